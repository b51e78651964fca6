"""Native checkpoints: bit-identical restores, whatever happens between save and restore."""

import contextlib
import errno
import fcntl
import functools
import json
import os
import random
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer.checkpoint import (
    integrity,
    native,
    native_state,
    saved_step,
    step_folders,
)
from mesh_transformer.checkpoint.integrity import host_checksum, tree_checksums
from mesh_transformer.checkpoint.native import Checkpoints, find
from mesh_transformer.checkpoint.state_tree import leaves
from mesh_transformer.mesh.declaration import map_declared
from mesh_transformer.model import transformer
from mesh_transformer.storage.access import tensorflow
from mesh_transformer.storage.locks import LocalLock
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError, StoppedError
from tests.support.fake_gcs import gcs_server
from tests.support.waiting import SECONDS

ROOT = Path(__file__).resolve().parents[2]
SPECS = {
    "params": {
        "embed/~/linear": {"w": P("mp", None), "b": P()},
        "layers": {"w": P(None, None, ("mp", "dp")), "scale": P(None, "mp")},
    },
    "opt_state": {"mu": {"w": P(None, ("mp", "dp"))}, "nothing": {}},
    "step": P(),
    "rng": P(),
}
LEAVES = {
    "params": {
        "embed/~/linear": {"w": ((16, 6), jnp.float32), "b": ((7,), jnp.bfloat16)},
        "layers": {"w": ((3, 5, 32), jnp.bfloat16), "scale": ((3, 8), jnp.float32)},
    },
    "opt_state": {"mu": {"w": ((24, 16), jnp.float32)}, "nothing": {}},
    "step": ((), jnp.int32),
    "rng": ((2,), jnp.uint32),
}
AUX = {"step": 7, "loader": {"file": 3, "record": 12}, "noise": [0.5, None]}


def is_leaf(node):
    return isinstance(node, tuple)


def mesh_of(dp, mp):
    return Mesh(np.array(jax.devices()[: dp * mp]).reshape(dp, mp), ("dp", "mp"))


def random_state(seed, mesh):
    """Return a tree in which every bit of every leaf is random (NaNs and infinities included)."""
    rng = np.random.default_rng(seed)

    def make(leaf, spec):
        shape, dtype = leaf
        size = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
        value = np.frombuffer(rng.bytes(size), dtype=dtype).reshape(shape)
        return jax.device_put(value, NamedSharding(mesh, spec))

    return jax.tree.map(make, LEAVES, SPECS, is_leaf=is_leaf)


def template_of(mesh, leaves=LEAVES, specs=SPECS):
    def make(leaf, spec):
        return jax.ShapeDtypeStruct(*leaf, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(make, leaves, specs, is_leaf=is_leaf)


@pytest.mark.slow
@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 3),
    reason="this Python starts no threads at the end of a program (docs/versions.md)",
)
def test_a_program_that_ends_waits_for_its_save(tmp_path):
    code = """
import sys, numpy as np
from mesh_transformer.checkpoint.native import Checkpoints
checkpoints = Checkpoints(sys.argv[1], host=True)
for step in (1, 2):
    checkpoints.save(step, {"x": np.zeros((4096, 1024), np.float32)}, {})
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert run.stderr == ""
    assert Checkpoints(str(tmp_path), read_only=True).steps() == [1, 2]


def test_only_the_process_that_saves_waits_at_its_end(monkeypatch, capsys):
    """A forked process has no threads that could finish a save."""
    waited = []

    def wait(name: str) -> None:
        waited.append(name)
        raise OSError(f"{name} failed")

    fakes = [SimpleNamespace(wait=functools.partial(wait, name)) for name in "ab"]
    monkeypatch.setattr(native, "_began", fakes)
    native._finish_saves(os.getpid() + 1)
    assert waited == []
    native._finish_saves(os.getpid())
    assert waited == ["a", "b"]
    assert capsys.readouterr().err == "error: a failed\nerror: b failed\n"


def test_a_replaced_state_is_not_taken_for_saved_after_a_failure(tmp_path, monkeypatch):
    state = {"x": np.zeros(4, np.float32)}
    with closing(Checkpoints(str(tmp_path), host=True)) as checkpoints:
        checkpoints.save(5, state, {})
        checkpoints.wait()
        checkpoints.save(5, state, {})  # it is saved already
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "_check_vacant", _fail)
            with pytest.raises(InputError, match="broken by the test"):
                checkpoints.save(3, state, {}, replaced=True)
        with pytest.raises(InputError, match="already exists"):
            checkpoints.save(5, state, {})


def _fail(step: int) -> None:
    raise InputError("broken by the test")


def scalar_template(mesh, shape=(), dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for actual_leaf, expected_leaf in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        assert actual_leaf.dtype == expected_leaf.dtype
        assert np.asarray(actual_leaf).tobytes() == np.asarray(expected_leaf).tobytes()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder that contains step 7, saved on a 2x4 mesh, and the state that was saved."""
    folder = str(tmp_path_factory.mktemp("model"))
    state = random_state(7, mesh_of(2, 4))
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(7, state, AUX)
    return folder, state


@pytest.mark.parametrize("shape", [(2, 4), (1, 8), (8, 1), (4, 2), (1, 1)])
def test_restore_is_bit_identical_on_any_mesh(saved, shape):
    folder, state = saved
    template = template_of(mesh_of(*shape))
    with Checkpoints(folder, read_only=True) as checkpoints:
        restored = checkpoints.restore(None, template)
        assert checkpoints.saved(7).aux == AUX
    assert_same_bits(restored, state)
    for leaf, target in zip(jax.tree.leaves(restored), jax.tree.leaves(template), strict=True):
        assert leaf.sharding == target.sharding


@pytest.mark.parametrize("seed", range(3))
def test_state_saved_in_another_layout_is_restored(tmp_path, seed):
    rng = random.Random(seed)
    shapes = [(2, 4), (1, 8), (8, 1), (4, 2), (1, 1)]
    state = random_state(seed, mesh_of(*rng.choice(shapes)))
    with Checkpoints(str(tmp_path)) as checkpoints:
        checkpoints.save(seed, state, {})
        restored = checkpoints.restore(seed, template_of(mesh_of(*rng.choice(shapes))))
    assert_same_bits(restored, state)


def test_part_of_a_state_can_be_restored(saved):
    folder, state = saved
    template = template_of(mesh_of(4, 2))
    with Checkpoints(folder, read_only=True) as checkpoints:
        by_name = checkpoints.restore(7, template, only=("params",))
        by_template = checkpoints.restore(7, {"params": template["params"]})
    assert_same_bits(by_name, {"params": state["params"]})
    assert_same_bits(by_template, {"params": state["params"]})


def test_floating_leaves_are_cast(tmp_path):
    mesh = mesh_of(2, 4)
    sharding = NamedSharding(mesh, P("dp", "mp"))
    value = jax.random.normal(jax.random.key(0), (16, 16))
    with Checkpoints(str(tmp_path)) as checkpoints:
        checkpoints.save(1, {"w": jax.device_put(value, sharding)}, {})
        target = jax.ShapeDtypeStruct((16, 16), jnp.bfloat16, sharding=sharding)
        restored = checkpoints.restore(1, {"w": target})
    assert_same_bits(restored, {"w": value.astype(jnp.bfloat16)})


@pytest.mark.slow
def test_donation_right_after_save_does_not_affect_the_checkpoint(tmp_path):
    sharding = NamedSharding(mesh_of(2, 4), P("dp", "mp"))
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2 + 1, tree), donate_argnums=0)

    def fresh():
        keys = jax.random.split(jax.random.key(1), 4)
        make = [jax.random.normal(key, (1024, 1024)) for key in keys]
        return {str(i): jax.device_put(leaf, sharding) for i, leaf in enumerate(make)}

    jax.block_until_ready(step(fresh()))  # Compiles now, so that the steps below overlap the save.
    state, expected = fresh(), fresh()
    with Checkpoints(str(tmp_path)) as checkpoints:
        checkpoints.save(1, state, {})
        for _ in range(10):
            state = step(state)
        jax.block_until_ready(state)
        template = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), expected
        )
        assert_same_bits(checkpoints.restore(1, template), expected)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("keep_n", "keep_every", "kept"),
    [(1, None, [9]), (3, None, [7, 8, 9]), (2, 4, [0, 4, 8, 9]), (20, 3, list(range(10)))],
)
def test_newest_steps_and_multiples_of_keep_every_are_kept(tmp_path, keep_n, keep_every, kept):
    state = {"step": jnp.int32(0)}
    with Checkpoints(str(tmp_path), keep_n=keep_n, keep_every=keep_every) as checkpoints:
        for step in range(10):
            checkpoints.save(step, state, {"step": step})
        checkpoints.wait()
        assert checkpoints.steps() == kept
        assert checkpoints.newest() == 9
        assert [checkpoints.saved(step).aux["step"] for step in kept] == kept
    assert sorted(os.listdir(tmp_path)) == sorted(f"step_{step}" for step in kept)


def test_committed_step_is_not_saved_again(tmp_path):
    with Checkpoints(str(tmp_path)) as checkpoints:
        checkpoints.save(1, {"x": jnp.int32(1)}, {"try": 1})
        checkpoints.save(1, {"x": jnp.int32(2)}, {"try": 2})
        assert checkpoints.saved(1).aux == {"try": 1}
        assert int(checkpoints.restore(1, {"x": scalar_template(mesh_of(1, 1))})["x"]) == 1


def test_step_saved_by_another_run_is_not_overwritten(tmp_path):
    state = {"x": jnp.int32(1)}
    with Checkpoints(str(tmp_path)) as checkpoints:
        checkpoints.save(1, state, {"try": 1})
    with Checkpoints(str(tmp_path)) as checkpoints:
        with pytest.raises(
            InputError, match="step_1 already exists and was not saved by this run; choose an"
        ):
            checkpoints.save(1, state, {"try": 2})
        assert checkpoints.saved(1).aux == {"try": 1}
        checkpoints.restore(1, {"x": scalar_template(mesh_of(1, 1))})
        checkpoints.save(1, state, {"try": 3})  # no error: this run has restored the step
        assert checkpoints.saved(1).aux == {"try": 1}


def test_step_just_saved_is_kept_even_if_newer_steps_exist(tmp_path):
    with Checkpoints(str(tmp_path), keep_n=1) as checkpoints:
        checkpoints.save(100, {"x": jnp.int32(1)}, {})
    with Checkpoints(str(tmp_path), keep_n=1) as checkpoints:
        checkpoints.save(5, {"x": jnp.int32(2)}, {})
        checkpoints.wait()
        assert checkpoints.steps() == [5, 100]


def test_step_folders_of_the_original_format_are_not_touched(tmp_path):
    """The original format also names its folders step_<N>."""
    theirs = tmp_path / "step_10" / "shard_0" / "0.npz"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"weights")
    with Checkpoints(str(tmp_path), keep_n=1) as checkpoints:
        for step in (9, 11):
            checkpoints.save(step, {"x": jnp.int32(step)}, {})
        with pytest.raises(InputError, match="step_10 already exists"):
            checkpoints.save(10, {"x": jnp.int32(10)}, {})
        checkpoints.wait()
        assert checkpoints.steps() == [11]
    assert theirs.read_bytes() == b"weights"


@pytest.mark.parametrize("file", ["step_0/shard_0/0.npz", "model.safetensors"])
def test_run_does_not_start_in_a_folder_of_another_format(tmp_path, small, file):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_bytes(b"weights")
    network = CausalTransformer(small(), init=False)
    assert network.restore(str(tmp_path / "new")) is None
    (tmp_path / "config.json").write_text("{}")
    with contextlib.closing(network), pytest.raises(InputError, match="--tune-model-path"):
        network.restore(str(tmp_path))
    (tmp_path / file).unlink()
    if "step" not in file:
        # A config.json without weights is not a model.
        assert network.restore(str(tmp_path)) is None


def test_a_refused_save_leaves_the_files_of_the_folder_s_owner_alone(tmp_path):
    with Checkpoints(str(tmp_path)) as owner, Checkpoints(str(tmp_path)) as other:
        owner.claim()
        unfinished = tmp_path / "step_7.orbax-checkpoint-tmp-1"
        unfinished.mkdir()
        with pytest.raises(InputError, match="is in use by"):
            other.save(5, {"x": jnp.int32(1)}, {})
        assert unfinished.exists()


def test_a_failed_save_leaves_the_files_of_the_next_owner_alone(tmp_path):
    class Lost(LocalLock):
        def check(self) -> None:
            raise StoppedError("taken over")

    with Checkpoints(str(tmp_path)) as checkpoints:
        checkpoints.claim()
        assert checkpoints._lock is not None
        checkpoints._lock.release()
        checkpoints._lock = Lost(tmp_path)
        others = tmp_path / "step_7.orbax-checkpoint-tmp-1"
        others.mkdir()
        with pytest.raises(StoppedError, match="taken over"):
            checkpoints.save(5, {"x": jnp.int32(1)}, {})
        assert isinstance(checkpoints._failure(5, 4, OSError("no answer")), InputError)
        assert others.exists()


OTHER_ERRORS = (TypeError("another version"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED"))


@pytest.mark.parametrize("error", OTHER_ERRORS)
def test_an_error_that_is_not_about_the_data_is_not_called_damage(saved, monkeypatch, error):
    def failing(*_: Any) -> None:
        raise error

    monkeypatch.setattr(saved_step.ocp.PyTreeCheckpointHandler, "metadata", failing)
    monkeypatch.setattr(saved_step.asyncio, "run", failing)
    step = find(saved[0])
    with pytest.raises(type(error)) as caught:
        _ = step.leaves
    assert caught.value is error
    with pytest.raises(type(error)) as caught:
        step._read({})
    assert caught.value is error


def test_interrupted_deletion_is_completed(tmp_path, monkeypatch):
    with Checkpoints(str(tmp_path), keep_n=1) as checkpoints:
        checkpoints.save(1, {"x": jnp.int32(1)}, {})
        checkpoints.wait()
        step = epath.Path(tmp_path / "step_1")
        # As if killed just before the folder as a whole was deleted.
        with monkeypatch.context() as patch:
            patch.setattr(step_folders, "delete_tree", lambda path: None)
            step_folders.delete_step(step)
        assert checkpoints.steps() == []
        assert step.exists()
        checkpoints.save(2, {"x": jnp.int32(2)}, {})
    assert os.listdir(tmp_path) == ["step_2"]


def test_incomplete_steps_are_invisible_and_the_next_writer_deletes_them(tmp_path, saved):
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / "step_7", tmp_path / "step_8.orbax-checkpoint-tmp")
    shutil.copytree(tmp_path / "step_7", tmp_path / "step_9")  # as after an interrupted deletion
    (tmp_path / "step_9" / "commit_success.txt").unlink()
    for name in ("step_notes", "step_010"):
        (tmp_path / name).mkdir()
    (tmp_path / "metrics.jsonl").write_text("{}\n")

    with Checkpoints(str(tmp_path), read_only=True) as reader:
        assert reader.steps() == [7]
    assert len(os.listdir(tmp_path)) == 6  # a reader deletes nothing
    assert str(find(str(tmp_path))) == str(tmp_path / "step_7")
    with Checkpoints(str(tmp_path)) as writer:
        assert len(os.listdir(tmp_path)) == 6  # nor does a writer before its first write
        writer.claim()
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "step_010", "step_7", "step_notes"]


def test_find_accepts_a_model_folder_or_a_step(saved, tmp_path, monkeypatch):
    folder, _ = saved
    step = f"{folder}/step_7"
    assert str(find(folder)) == str(find(f"{step}/")) == step
    assert find(folder).number == 7
    monkeypatch.chdir(Path(folder).parent)
    assert str(find(f"{Path(folder).name}/step_7")) == step
    with pytest.raises(InputError, match=r"step_8 does not exist"):
        find(f"{folder}/step_8")
    with pytest.raises(InputError, match=r"holds no finished checkpoint"):
        find(str(tmp_path))


def changed(mesh, **tops):
    return {**template_of(mesh), **tops}


def test_a_path_that_is_not_utf_8_is_refused_in_one_line(saved, tmp_path, caplog):
    """Where a run would save, and where a checkpoint was moved to."""
    bad = tmp_path / os.fsdecode(b"caf\xe9")
    shutil.copytree(saved[0], bad)
    line = r"caf\\udce9(/\w+)?: the path is not UTF-8, .*; rename its folders, or choose another"
    for use, path in ((Checkpoints, bad / "new"), (find, bad), (find, bad / "step_7")):
        with pytest.raises(InputError, match=line):
            use(str(path))
    assert not (bad / "new").exists()
    assert not caplog.records


def test_error_names_the_leaf_that_does_not_match_the_config(saved):
    folder, _ = saved
    mesh = mesh_of(2, 4)
    opt_state = template_of(mesh)["opt_state"]
    cases = [
        (
            changed(mesh, step=scalar_template(mesh, (2,))),
            r"leaf step has shape \(\), but the config expects \(2,\)",
        ),
        (
            changed(mesh, opt_state={"mu": {"w": scalar_template(mesh, (24, 8), jnp.float32)}}),
            r"leaf opt_state/mu/w has shape \(24, 16\), but the config expects \(24, 8\)",
        ),
        (
            changed(mesh, step=scalar_template(mesh, (), jnp.float32)),
            r"leaf step has dtype int32, but the config expects float32",
        ),
        (
            changed(mesh, opt_state={**opt_state, "nu": scalar_template(mesh)}),
            r"leaf opt_state/nu is missing; the config expects shape \(\)",
        ),
        (
            changed(mesh, opt_state={"other": scalar_template(mesh)}),
            r"leaf opt_state/mu/w of shape \(24, 16\) is not part of the config's model",
        ),
    ]
    with Checkpoints(folder, read_only=True) as checkpoints:
        for template, message in cases:
            with pytest.raises(InputError, match=message) as caught:
                checkpoints.restore(7, template)
            assert "\n" not in str(caught.value)
            assert f"{folder}/step_7" in str(caught.value)


def test_missing_checkpoints_are_refused(tmp_path, saved):
    template = template_of(mesh_of(1, 1))
    with Checkpoints(str(tmp_path / "no"), read_only=True) as checkpoints:
        assert checkpoints.steps() == []
        assert checkpoints.newest() is None
        with pytest.raises(InputError, match="no does not exist"):
            checkpoints.restore(None, template)
    assert not (tmp_path / "no").exists()
    with (
        Checkpoints(str(tmp_path)) as checkpoints,
        pytest.raises(InputError, match="holds no finished checkpoint"),
    ):
        checkpoints.saved()
    with (
        Checkpoints(saved[0], read_only=True) as checkpoints,
        pytest.raises(InputError, match="has no step 3; choose one of 7"),
    ):
        checkpoints.restore(3, template)


@pytest.mark.parametrize("what", ["state/_METADATA", "state/d", "aux/metadata"])
def test_error_names_the_damaged_file(tmp_path, saved, what):
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    damaged = tmp_path / "step_7" / what
    if damaged.is_dir():
        for part in (tmp_path / "step_7" / "state").glob("**/d/*"):
            part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    else:
        damaged.write_text('{"half')
    with (
        Checkpoints(str(tmp_path), read_only=True) as checkpoints,
        pytest.raises(InputError, match=r"step_7(: its file| cannot be read)") as caught,
    ):
        checkpoints.restore(checkpoints.saved().aux["step"], template_of(mesh_of(2, 4)))
    assert "\n" not in str(caught.value)
    assert f"its file {what}" in str(caught.value)


def flip(path: Path, offset: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def error_of(folder, state):
    """Return the error of reading step 7, or None if it equals what was saved."""
    with Checkpoints(str(folder), read_only=True) as checkpoints:
        try:
            assert checkpoints.saved(7).aux == AUX
            assert_same_bits(checkpoints.restore(7, big_template(state)), state)
        except InputError as error:
            return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("as_host", [False, True], ids=["device", "host"])
def test_flipped_bit_is_detected_wherever_it_is(tmp_path, as_host):
    """The error names the leaf if the bit is in an array, else the file, or the bit is unused."""
    rng = np.random.default_rng(0)
    sharding = NamedSharding(mesh_of(2, 4), P("dp", "mp"))
    state = {
        "params": {
            "layers": {"w": rng.standard_normal((4, 64, 64)).astype(np.float32)},
            "proj/~/linear": {"w": rng.standard_normal((256, 128)).astype(jnp.bfloat16)},
        },
        "opt_state": {"mu": rng.standard_normal((128, 128)).astype(np.float32)},
    }
    values = {"/".join(path): leaf for path, leaf in leaves(state).items()}
    if not as_host:
        state = jax.device_put(state, sharding)
    with Checkpoints(str(tmp_path), host=as_host) as checkpoints:
        checkpoints.save(7, state, AUX)
    state = jax.device_put(state, sharding)
    noticed = {"leaf": 0, "file": 0, "nothing": 0}
    for file in sorted(path for path in (tmp_path / "step_7").rglob("*") if path.is_file()):
        content = file.read_bytes()
        # The first 16 bytes of an array are contiguous, whatever its chunks are.
        starts = {name: content.find(value.tobytes()[:16]) for name, value in values.items()}
        arrays = {offset: name for name, offset in starts.items() if offset >= 0}
        for offset in [
            *(offset + 9 for offset in arrays),
            *map(int, rng.integers(0, len(content), 3)),
        ]:
            flip(file, offset, int(rng.integers(8)))
            message = error_of(tmp_path, state)
            file.write_bytes(content)
            if (leaf := arrays.get(offset - 9)) is not None:
                assert f"its leaf {leaf}" in (message or "nothing")
            # Other bytes may belong to an array too, so any outcome is allowed there.
            what = "nothing" if message is None else re.search("(file|leaf) ", message)[1]
            noticed[what] += 1
    assert noticed["leaf"] >= 3
    assert noticed["file"] >= 5
    assert error_of(tmp_path, state) is None


def test_checksum_of_each_layer_is_verified_as_it_is_read(tmp_path):
    values = np.random.default_rng(0).standard_normal((3, 40, 50)).astype(np.float32)
    state = {"params": {"layers": {"w": values}}, "step": np.asarray(7, np.int32)}
    with Checkpoints(str(tmp_path), host=True) as checkpoints:
        checkpoints.save(7, state, {})
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        if (offset := file.read_bytes().find(values[1].tobytes()[:64])) >= 0:
            flip(file, offset, 3)
    with Checkpoints(str(tmp_path), read_only=True) as checkpoints:
        leaf = checkpoints.saved(7).open_leaf(("params", "layers", "w"))
    for layer in (0, 2):
        np.testing.assert_array_equal(leaf[layer], values[layer])
    with pytest.raises(InputError, match=r"its leaf params/layers/w \(layer 1\) is damaged"):
        leaf[1]


def test_step_without_checksums_loads_with_one_warning(tmp_path, saved, caplog):
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "step_7" / integrity.NAME).unlink()
    for _ in range(2):
        with Checkpoints(str(tmp_path), read_only=True) as checkpoints:
            assert checkpoints.saved().aux == AUX
            checkpoints.restore(7, template_of(mesh_of(1, 1)))
    warnings = [
        record.getMessage() for record in caplog.records if "no checksums" in record.message
    ]
    assert len(warnings) == 1
    assert f"{tmp_path}/step_7" in warnings[0]


@pytest.mark.quick(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool"])
def test_checksums_do_not_depend_on_the_layout(dtype):
    rng = np.random.default_rng(0)
    values = (100 * rng.standard_normal((3, 8, 70000 // 8))).astype(jnp.dtype(dtype))
    layers = [host_checksum(layer, index * layer.size) for index, layer in enumerate(values)]
    assert sum(layers) % 2**32 == host_checksum(values)
    for shape, spec in (((1, 1), P()), ((2, 4), P(None, ("dp", "mp"))), ((4, 2), P(None, "dp"))):
        placed = jax.device_put(values, NamedSharding(mesh_of(*shape), spec))
        whole, stacked = ("w",), ("layers", "w")
        checksums = tree_checksums({whole: placed, stacked: placed})
        assert checksums == {whole: [host_checksum(values)], stacked: layers}
    swapped = values.copy()
    swapped[0, 0, :2] = [1, 0]
    ordered = swapped.copy()
    ordered[0, 0, :2] = [0, 1]
    assert host_checksum(swapped) != host_checksum(ordered)
    if dtype != "bool":
        for bit in range(values.itemsize * 8):
            changed = values.copy().reshape(-1)
            changed.view(f"u{values.itemsize}")[70] ^= np.array(1 << bit, f"u{values.itemsize}")
            assert host_checksum(changed) != host_checksum(values)


# Concurrent writers, and symbolic links.


def test_folder_has_one_writer(tmp_path):
    folder = str(tmp_path / "model")
    with Checkpoints(folder) as first, Checkpoints(folder) as second:
        first.claim()
        owner = rf"in use by process {os.getpid()} on {socket.gethostname()} since 2.* \(\S+\); "
        with pytest.raises(InputError, match=owner):
            second.save(1, {"x": jnp.int32(1)}, {})
        assert os.listdir(folder) == [".lock"]
        first.save(1, {"x": jnp.int32(1)}, {})
        first.wait()
        assert second.newest() == 1  # reading needs no lock
        first.close()
        second.save(2, {"x": jnp.int32(2)}, {})
        second.wait()
    assert sorted(os.listdir(folder)) == ["step_1", "step_2"]


def hold(folder):
    with LocalLock(folder):
        print("held", flush=True)
        sys.stdin.read()


@pytest.mark.slow
def test_lock_of_a_killed_writer_blocks_no_other_process(tmp_path):
    folder = str(tmp_path / "model")
    process = child("hold", folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"in use by process {process.pid} on "):
            LocalLock(folder)
        process.kill()
        process.wait()
        with LocalLock(folder) as lock:
            assert json.loads((tmp_path / "model" / ".lock").read_text())["process"] == os.getpid()
            lock.release()
            LocalLock(folder).release()
    assert os.listdir(folder) == []


def open_files(folder):
    """List the files in a folder that this process has open (Linux only)."""
    names = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            names.append(os.readlink(path))
    return [name for name in names if name.startswith(f"{folder}/")]


def test_lock_is_retried_if_its_file_is_deleted_meanwhile(tmp_path, monkeypatch):
    """As when the owner releases the lock between open and flock."""
    flock, deleted = fcntl.flock, []

    def late(file, operation):
        if not deleted:
            deleted.append((tmp_path / ".lock").unlink())
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with LocalLock(tmp_path):
        with pytest.raises(InputError, match="is in use by process"):
            LocalLock(tmp_path)
        assert open_files(tmp_path) == [str(tmp_path / ".lock")]


def test_lock_is_retried_if_its_file_is_deleted_just_before_it_is_compared(tmp_path, monkeypatch):
    """As when another process has replaced the file, and releases its lock between two checks."""
    fstat, deleted = os.fstat, []

    def late(file):
        if not deleted:
            deleted.append((tmp_path / ".lock").unlink())
        return fstat(file)

    monkeypatch.setattr(os, "fstat", late)
    with LocalLock(tmp_path):
        assert open_files(tmp_path) == [str(tmp_path / ".lock")]


def test_lock_has_only_one_owner_at_a_time(tmp_path):
    """Also when the owner deletes the lock file while other threads are about to lock it."""
    owners, conflicts = [], []

    def writer(number):
        for _ in range(50):
            try:
                lock = LocalLock(str(tmp_path))
            except InputError:
                continue
            owners.append(number)
            if len(owners) != 1:
                conflicts.append(list(owners))
            owners.remove(number)
            lock.release()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(writer, range(4)))
    assert conflicts == []
    assert os.listdir(tmp_path) == []


def test_pruning_deletes_links_but_not_their_targets(tmp_path):
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    with Checkpoints(str(theirs)) as checkpoints:
        checkpoints.save(5, {"x": jnp.int32(5)}, {})
    mine.mkdir()
    (mine / "step_5").symlink_to(theirs / "step_5")
    shutil.copytree(theirs / "step_5", theirs / "step_6")
    (theirs / "step_6" / "commit_success.txt").unlink()  # as while it is being saved or deleted
    (mine / "step_6").symlink_to(theirs / "step_6")
    before = sorted(path.relative_to(theirs) for path in theirs.rglob("*"))
    with Checkpoints(str(mine), keep_n=1) as checkpoints:
        assert int(checkpoints.restore(5, {"x": scalar_template(mesh_of(1, 1), (), "int32")})["x"])
        for step in (7, 8):
            checkpoints.save(step, {"x": jnp.int32(step)}, {})
            checkpoints.wait()
    assert os.listdir(mine) == ["step_8"]
    assert sorted(path.relative_to(theirs) for path in theirs.rglob("*")) == before
    with Checkpoints(str(theirs), read_only=True) as checkpoints:
        assert checkpoints.steps() == [5]


def test_deletion_does_not_follow_a_link_inside_a_step(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("")
    with Checkpoints(str(tmp_path / "model"), keep_n=1) as checkpoints:
        checkpoints.save(1, {"x": jnp.int32(1)}, {})
        checkpoints.wait()
        (tmp_path / "model" / "step_1" / "more").symlink_to(elsewhere)
        checkpoints.save(2, {"x": jnp.int32(2)}, {})
    assert os.listdir(tmp_path / "model") == ["step_2"]
    assert os.listdir(elsewhere) == ["precious"]


def host(state):
    return jax.tree.map(np.asarray, state)


def test_host_arrays_are_saved_and_restored_on_any_mesh(tmp_path):
    state = random_state(3, mesh_of(2, 4))
    with Checkpoints(str(tmp_path), host=True) as checkpoints:
        checkpoints.save(1, host(state), AUX)
        while checkpoints.is_saving(0.01):
            pass
        assert checkpoints.steps() == [1]
        for shape in ((2, 4), (1, 1)):
            assert_same_bits(checkpoints.restore(1, template_of(mesh_of(*shape))), state)


def test_new_model_folder_appears_only_when_complete(tmp_path, monkeypatch, small):
    """An interrupted write leaves nothing under its name, so that a second attempt succeeds."""
    config, folder = small(layers=1), tmp_path / "new"
    params = map_declared(lambda d: np.ones(d.shape, np.float32), transformer.declarations(config))
    state = {"params": params, "step": np.zeros((), np.int32)}
    save = Checkpoints.save

    def interrupted(checkpoints, *args):
        save(checkpoints, *args)
        checkpoints.wait()
        assert not folder.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        native_state.write(str(folder), state, config)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []
    native_state.write(str(folder), state, config)
    assert_same_bits(native_state.read(str(folder))[1], state)


@pytest.mark.parametrize("from_host", [False, True])
def test_single_leaves_can_be_read(tmp_path, from_host):
    """Whole or by layer, even after `Checkpoints` is closed, and cast as by numpy."""
    state = random_state(5, mesh_of(4, 2))
    state["params"]["layers"]["w"] = jnp.arange(480.0).reshape(3, 5, 32) / 7
    with Checkpoints(str(tmp_path), host=from_host) as checkpoints:
        checkpoints.save(1, host(state) if from_host else state, {})
        checkpoints.wait()
        infos = checkpoints.saved(1).leaves
        assert set(infos) == set(leaves(state))
        for path, leaf in leaves(state).items():
            assert (infos[path].shape, infos[path].dtype) == (leaf.shape, leaf.dtype)
            lazy = checkpoints.saved(1).open_leaf(path)
            assert (lazy.shape, lazy.dtype) == (leaf.shape, leaf.dtype)
            assert_same_bits(np.asarray(lazy), np.asarray(leaf))
        lazy = checkpoints.saved(1).open_leaf(("params", "layers", "w"))
    whole = np.asarray(state["params"]["layers"]["w"])
    for layer in (0, 2, -1):
        assert_same_bits(lazy[layer], whole[layer])
    for dtype in (np.dtype(jnp.bfloat16), np.dtype(np.float16)):
        assert_same_bits(np.asarray(lazy.astype(dtype, "w")), whole.astype(dtype))


@pytest.mark.parametrize("what", ["half of state/step/0", "no state/rng/0"])
def test_damaged_host_array_is_a_one_line_error(tmp_path, what):
    state = random_state(6, mesh_of(1, 1))
    with Checkpoints(str(tmp_path), host=True) as checkpoints:
        checkpoints.save(7, host(state), {})
        checkpoints.wait()
        damaged = tmp_path / "step_7" / what.rpartition(" ")[2]
        if what.startswith("half"):
            damaged.write_bytes(damaged.read_bytes()[:2])
        else:
            damaged.unlink()
        path = (damaged.parent.name,)
        for read in (
            lambda: checkpoints.restore(7, template_of(mesh_of(2, 4))),
            lambda: np.asarray(checkpoints.saved(7).open_leaf(path)),
        ):
            with pytest.raises(InputError, match="step_7 cannot be read") as caught:
                read()
            assert "\n" not in str(caught.value)


def test_restoring_a_state_from_weights_only_is_refused(tmp_path):
    state = random_state(8, mesh_of(2, 4))
    with Checkpoints(str(tmp_path)) as checkpoints:
        checkpoints.save(1, {"params": state["params"], "step": state["step"]}, {})
        template = template_of(mesh_of(2, 4))
        del template["rng"]
        with pytest.raises(InputError, match="has no opt_state: a run can start"):
            checkpoints.restore(1, template)


@pytest.mark.parametrize("aux", [{}, [], 3, {"config": 3}, {"config": {}}, {"config": {"x": 1}}])
def test_aux_without_a_config_is_a_one_line_error(small, aux, tmp_path):
    with Checkpoints(str(tmp_path)) as checkpoints:
        checkpoints.save(1, {"params": {"w": jnp.zeros(3)}}, aux)
    for config in (None, small()):
        with pytest.raises(
            InputError, match=r"step_1: (its file aux/metadata holds|saved config: )"
        ) as caught:
            native_state.read(str(tmp_path), config=config)
        assert "\n" not in str(caught.value)


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(InputError, match="keep_n is 0"):
        Checkpoints(str(tmp_path), keep_n=0)
    with pytest.raises(InputError, match="keep_every is 0"):
        Checkpoints(str(tmp_path), keep_every=0)
    (tmp_path / "file").write_text("")
    with (
        Checkpoints(str(tmp_path / "file" / "model")) as checkpoints,
        pytest.raises(InputError, match="file/model cannot be written: Not a directory"),
    ):
        checkpoints.claim()
    with (
        Checkpoints(str(tmp_path), read_only=True) as reader,
        pytest.raises(RuntimeError, match="read-only"),
    ):
        reader.save(1, {"x": jnp.int32(1)}, {})
    with Checkpoints(str(tmp_path)) as checkpoints:
        with pytest.raises(TypeError, match="JSON"):
            checkpoints.save(1, {"x": jnp.int32(1)}, {"array": np.zeros(2)})
        with pytest.raises(ValueError, match=r"two leaves of the state are both called a\.b"):
            checkpoints.save(1, {"a.b": jnp.int32(1), "a": {"b": jnp.int32(1)}}, {})
        assert checkpoints.steps() == []


def big_state(seed):
    """Return 16 MB that do not compress, so that saving takes long enough to be interrupted."""
    rng = np.random.default_rng(seed)
    sharding = NamedSharding(mesh_of(2, 4), P("dp", "mp"))
    names = [f"w{i}" for i in range(16)]
    return {
        name: jax.device_put(rng.standard_normal((512, 512)).astype(np.float32), sharding)
        for name in names
    }


def big_template(state=None):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        big_state(0) if state is None else state,
    )


def save_and_wait(checkpoints, step):
    checkpoints.save(step, big_state(step), {"step": step})
    checkpoints.wait()


def fail_to_save(checkpoints, step, reason):
    with pytest.raises(InputError, match=f"saving step {step} failed: {reason} ") as caught:
        save_and_wait(checkpoints, step)
    assert "\n" not in str(caught.value)
    assert "16,777,216 bytes to save, " in str(caught.value)
    assert "step 1 is intact" in str(caught.value)
    assert sorted(os.listdir(checkpoints.folder)) == [".lock", "step_1"]
    checkpoints.wait()  # the error is raised only once


def test_full_disk_leaves_the_previous_step(small_disk):
    small = {"x": jnp.arange(5)}
    with Checkpoints(str(small_disk("4m") / "model")) as checkpoints:
        checkpoints.save(1, small, {})
        fail_to_save(checkpoints, 2, "No space left on device")
        checkpoints.save(3, small, {})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3]


def limited_save(folder):
    """Make a save that fails at the file size limit, then one that succeeds.

    Runs in a separate process because it changes that limit.
    """
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"x": jnp.arange(5)}, {})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        fail_to_save(checkpoints, 2, "File too large")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        checkpoints.save(2, big_state(2), {})
        assert_same_bits(checkpoints.restore(2, big_template()), big_state(2))
        assert checkpoints.steps() == [1, 2]


def child(*arguments, **options):
    """Start this file's function `arguments[0]` in a new process, with warnings as errors."""
    command = [sys.executable, "-W", "error", __file__, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=environment, text=True, **options)


@pytest.mark.slow
def test_failed_write_raises_and_prints_nothing(tmp_path):
    process = child("limited_save", tmp_path / "model", stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=SECONDS)
    assert errors == ""
    assert process.returncode == 0


def save_until_killed(folder, first):
    """Save three steps, and print when each save begins and when it is committed."""
    states = {step: big_state(step) for step in range(int(first), int(first) + 3)}
    with Checkpoints(folder, keep_n=2) as checkpoints:
        for step in sorted(states):
            print("begun", step, flush=True)
            checkpoints.save(step, states[step], {"step": step})
            checkpoints.wait()
            print("committed", step, flush=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))]
)
def test_process_killed_during_a_save_leaves_intact_steps(tmp_path, seed):
    folder = str(tmp_path)
    with Checkpoints(folder) as checkpoints:
        began = time.monotonic()
        save_and_wait(checkpoints, 1)
        duration = time.monotonic() - began
    process = child("save_until_killed", folder, 2, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun 2\n"
    # With seed 0 the kill is always within the first save, otherwise anywhere in three saves.
    rng = random.Random(seed)
    time.sleep(duration * (0.2 if seed == 0 else rng.uniform(0, 3)))
    process.kill()
    output = process.stdout.read()
    process.wait()
    committed = [int(line.split()[1]) for line in output.splitlines() if "committed" in line]

    with Checkpoints(folder) as checkpoints:
        steps = checkpoints.steps()
        # The last step may have been committed just before this could be printed.
        assert steps[-1] in (max(committed, default=1), max(committed, default=1) + 1)
        checkpoints.claim()  # succeeds although the killed process left its lock file
        assert all(name == f"step_{name[5:]}" for name in os.listdir(folder) if name != ".lock")
        for step in steps:
            assert checkpoints.saved(step).aux == {"step": step}
            assert_same_bits(checkpoints.restore(step, big_template()), big_state(step))
        checkpoints.save(9, big_state(9), {"step": 9})
        assert_same_bits(checkpoints.restore(9, big_template()), big_state(9))


def one_of_two(folder, rank, port):
    """Run process `rank` of two on a 2x4 mesh: save, prune and restore."""
    jax.distributed.initialize(f"localhost:{port}", 2, int(rank))
    shapes = {(2, 4): P(None, ("mp", "dp")), (4, 2): P("dp", "mp")}
    value = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)

    def sharded(shape):
        return NamedSharding(mesh_of(*shape), shapes[shape])

    sharding = sharded((2, 4))
    array = jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
    with Checkpoints(folder, keep_n=2) as checkpoints:
        for step in range(4):
            checkpoints.save(step, {"w": array}, {"step": step})
        target = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharded((4, 2)))
        restored = checkpoints.restore(None, {"w": target})["w"]
    for shard in restored.addressable_shards:
        np.testing.assert_array_equal(shard.data, value[shard.index])


def two_processes(function, folder):
    """Return whether both processes of `function` exit with status 0."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    processes = [child(function, folder, rank, port) for rank in range(2)]
    return [process.wait(timeout=SECONDS) for process in processes] == [0, 0]


def fails_once(function):
    """Return a function that raises PermissionError at its first call, then calls `function`."""
    errors = [PermissionError(errno.EACCES, "Permission denied")]

    def fail_once():
        if errors:
            raise errors.pop()
        return function()

    return fail_once


def lagging_of_two(folder, rank, port):
    """Save with the second process delayed until the first could have begun to write."""
    jax.distributed.initialize(f"localhost:{port}", 2, int(rank))
    with Checkpoints(folder, keep_n=1) as checkpoints:
        for step in (1, 2):
            save = checkpoints._checkpointer.save

            def late(*args, save=save, **kwargs):
                time.sleep(2 * int(rank))
                return save(*args, **kwargs)

            checkpoints._checkpointer.save = late
            save_and_wait(checkpoints, step)
            checkpoints._checkpointer.save = save
        restored = checkpoints.restore(2, big_template())
    for name, leaf in big_state(2).items():
        for actual, expected in zip(
            restored[name].addressable_shards, leaf.addressable_shards, strict=True
        ):
            np.testing.assert_array_equal(actual.data, expected.data)


def failing_of_two(folder, rank, port):
    """Make saves in which one process cannot write its part: first process 1, then process 0."""
    jax.distributed.initialize(f"localhost:{port}", 2, int(rank))
    with Checkpoints(folder) as checkpoints:
        save_and_wait(checkpoints, 1)
        for step, failing in ((2, 1), (3, 0)):
            if int(rank) == failing:
                soft = 200_000
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
            began = time.monotonic()
            with pytest.raises(InputError, match=f"saving step {step} failed: .*[Ff]ile too large"):
                save_and_wait(checkpoints, step)
            assert time.monotonic() - began < SECONDS  # rather than Orbax's timeout of 20 minutes
            unlimited = (resource.RLIM_INFINITY,) * 2
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
            assert checkpoints.steps() == [1]
        # Process 0 fails before it writes anything, while process 1 is late.
        clear = checkpoints._clear_uncommitted
        if rank == "0":
            checkpoints._clear_uncommitted = fails_once(clear)
        else:
            time.sleep(1)
        with pytest.raises(InputError, match=r"saving step 3 failed: .*Permission denied"):
            save_and_wait(checkpoints, 3)
        checkpoints._clear_uncommitted = clear
        # The same processes can then save, even the same step.
        save_and_wait(checkpoints, 3)
        restored = checkpoints.restore(3, big_template())
    for name, leaf in big_state(3).items():
        for actual, expected in zip(
            restored[name].addressable_shards, leaf.addressable_shards, strict=True
        ):
            np.testing.assert_array_equal(actual.data, expected.data)


@pytest.mark.slow
def test_failure_of_one_process_fails_the_save_on_all_at_once(tmp_path):
    assert two_processes("failing_of_two", tmp_path)
    with Checkpoints(str(tmp_path), read_only=True) as checkpoints:
        assert checkpoints.steps() == [1, 3]
        assert_same_bits(checkpoints.restore(3, big_template()), big_state(3))


@pytest.mark.slow
def test_two_processes_save_to_a_bucket(tmp_path, monkeypatch):
    """In a bucket, a step has its final name even while it is being saved."""
    with gcs_server(tmp_path) as (gcs, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert two_processes("lagging_of_two", "gs://bucket/model")
        steps = {name.split("/")[1] for _, name in gcs.objects if name.count("/") > 1}
    assert steps == {"step_2"}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["claim", "vacant", "finish", "prune"])
def test_refusal_by_a_bucket_is_a_one_line_error(tmp_path, monkeypatch, caplog, where):
    """TensorFlow's errors, which are not OSErrors, are reported like them."""
    refused = tensorflow().errors.PermissionDeniedError(None, None, "403 Forbidden: no access")

    def refuse(*_):
        raise refused

    with Checkpoints(str(tmp_path), keep_n=1) as checkpoints:
        if where != "claim":
            save_and_wait(checkpoints, 1)
        if where in ("claim", "vacant"):
            name = {"claim": "_clear_uncommitted", "vacant": "_check_vacant"}[where]
            monkeypatch.setattr(checkpoints, name, refuse)
        else:
            module, name = {
                "finish": (native.integrity, "write"),
                "prune": (native, "delete_step"),
            }[where]
            monkeypatch.setattr(module, name, refuse)
        if where == "prune":
            save_and_wait(checkpoints, 2)
            assert "cannot delete old steps" in caplog.text
            assert checkpoints.steps() == [1, 2]
        else:
            message = "cannot be written" if where == "claim" else "saving step 2 failed"
            with pytest.raises(InputError, match=f"{message}: 403 Forbidden: no access"):
                save_and_wait(checkpoints, 2)
        monkeypatch.undo()
        save_and_wait(checkpoints, 3)  # saves succeed once access is restored
        assert checkpoints.steps() == [3]


def test_slow_deletion_of_old_steps_does_not_block_saves(tmp_path, monkeypatch):
    may_delete = threading.Event()
    delete = native.delete_step
    monkeypatch.setattr(native, "delete_step", lambda path: (may_delete.wait(120), delete(path)))
    monkeypatch.setattr(native, "_PRUNE_SECONDS", 0.01)
    with Checkpoints(str(tmp_path), keep_n=1) as checkpoints:
        for step in range(1, 5):
            save_and_wait(checkpoints, step)
        assert checkpoints.steps() == [1, 2, 3, 4]
        may_delete.set()
        assert checkpoints._pruning is not None
        checkpoints._pruning.join()
        save_and_wait(checkpoints, 5)
        checkpoints._pruning.join()
        assert checkpoints.steps() == [5]


def test_leaves_are_cast_in_small_groups_largest_first(tmp_path, monkeypatch):
    """The devices thus never store all leaves both in the saved f32 and in the requested bf16."""
    monkeypatch.setattr(saved_step, "_CAST_BYTES", 1000)
    sharding = NamedSharding(mesh_of(1, 8), P())
    rng = np.random.default_rng(0)
    sizes = {"a": 10, "b": 400, "c": 200, "d": 100, "e": 30}
    state = {
        name: {"w": jax.device_put(rng.normal(size=size).astype(np.float32), sharding)}
        for name, size in sizes.items()
    }
    read = []
    with Checkpoints(str(tmp_path)) as checkpoints:
        checkpoints.save(1, state, {})
        whole = saved_step.SavedStep._read
        monkeypatch.setattr(
            saved_step.SavedStep,
            "_read",
            lambda self, expected: (
                read.append([path[0] for path in expected]),
                whole(self, expected),
            )[1],
        )
        dtypes = dict.fromkeys("abcd", jnp.bfloat16) | {"e": jnp.float32}
        template = {
            name: {"w": jax.ShapeDtypeStruct((size,), dtypes[name], sharding=sharding)}
            for name, size in sizes.items()
        }
        restored = checkpoints.restore(1, template)
    assert read == [["e"], ["b"], ["c"], ["d", "a"]]
    assert_same_bits(
        restored,
        {name: {"w": leaf["w"].astype(dtypes[name])} for name, leaf in state.items()},
    )


@pytest.mark.slow
def test_two_processes_save_one_checkpoint(tmp_path):
    assert two_processes("one_of_two", tmp_path)
    value = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    with Checkpoints(str(tmp_path), read_only=True) as checkpoints:
        assert checkpoints.steps() == [2, 3]
        target = scalar_template(mesh_of(1, 8), value.shape, jnp.float32)
        assert_same_bits(checkpoints.restore(3, {"w": target}), {"w": value})


def test_model_folder_contains_only_steps_with_the_documented_parts(saved):
    """No index file is needed: the steps are found by their folders' names."""
    folder = Path(saved[0])
    assert os.listdir(folder) == ["step_7"]
    parts = set(os.listdir(folder / "step_7"))
    assert {"state", "aux", "commit_success.txt"} <= parts
    assert json.loads((folder / "step_7" / "aux" / "metadata").read_text()) == AUX


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4 if sys.argv[1].endswith("of_two") else 8)
    globals()[sys.argv[1]](*sys.argv[2:])


def test_waiting_for_a_save_always_has_a_timeout(tmp_path):
    """Python handles a signal that arrives just before a wait only when that wait ends."""
    waited = threading.Event()

    class Saving(Future):
        def result(self, timeout=None):
            assert self.done()
            return super().result(timeout)

    checkpoints = Checkpoints(str(tmp_path))
    saving, is_saving = Saving(), checkpoints.is_saving

    def waits(timeout):
        waited.set()
        return is_saving(timeout)

    checkpoints._pending, checkpoints.is_saving = (1, 0, saving), waits
    with ThreadPoolExecutor(1) as pool:
        finish = pool.submit(lambda: waited.wait() and saving.set_result(None))
        checkpoints.wait()
        finish.result()
    checkpoints.close()
