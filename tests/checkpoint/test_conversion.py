"""The conversion script as users run it, and loading of the same model from every format."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

import device_sample
import mesh_transformer
import resharding_example
from mesh_transformer.checkpoint import (
    conversion,
    hf_files,
    integrity,
    native_state,
    original_files,
)
from mesh_transformer.checkpoint import original as original_format
from mesh_transformer.checkpoint.formats import FORMATS
from mesh_transformer.checkpoint.host_arrays import FLOATS
from mesh_transformer.checkpoint.source import Source
from mesh_transformer.checkpoint.state_tree import in_memory
from mesh_transformer.cli import convert as convert_command
from mesh_transformer.config import Config
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError, StoppedError, run_script
from tests.checkpoint.test_hf_config import word_tokenizer
from tests.conftest import DATA, original_config, random_batch

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = DATA / "original" / "f32" / "mp4_ga1"
MESHES = {"1x8": (8, 8), "2x4": (4, 8), "one device": (1, 1)}  # cores_per_replica, tpu_size


def files(folder: Path | str) -> dict[str, bytes]:
    folder = Path(folder)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def leaves(tree: Any) -> dict[str, np.ndarray]:
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in pairs}


def assert_same_bits(actual: Any, expected: Any) -> None:
    actual, expected = leaves(actual), leaves(expected)
    assert actual.keys() == expected.keys()
    for key, leaf in actual.items():
        assert (leaf.dtype, leaf.shape) == (expected[key].dtype, expected[key].shape), key
        assert leaf.tobytes() == expected[key].tobytes(), key


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> tuple[str, Config]:
    """The golden model's config, as a file and as a Config."""
    path = tmp_path_factory.mktemp("config") / "config.json"
    golden = original_config("f32/mp4_ga1", tpu_size=8)
    path.write_text(json.dumps(golden.as_dict()))
    return str(path), golden


@pytest.fixture(scope="module")
def start(config, tmp_path_factory) -> Path:
    """A folder whose model folder `original` contains a full checkpoint of 8 shards."""
    folder = tmp_path_factory.mktemp("start")
    state = original_format.read(str(GOLDEN / "step_10"), config[1])
    original_format.write(str(folder / "original"), state, config[1], shards=8)
    return folder


@pytest.fixture(scope="module")
def formats(start, config) -> dict[str, Path]:
    """The same weights in all three formats, with Adam's moments except in the hf format."""
    convert("original", start / "original", "native", start / "native", "--config", config[0])
    convert("native", start / "native", "hf", start / "hf")
    return {kind: start / kind for kind in FORMATS}


def convert(source: str, src: object, target: str, dst: object, *flags: object) -> None:
    """Run the converter's main in this process; its exceptions propagate."""
    arguments = ["--from", source, src, "--to", target, dst, *flags]
    before = sys.argv
    sys.argv = ["convert_checkpoint.py", *map(str, arguments)]
    try:
        convert_command.main()
    finally:
        sys.argv = before


def assert_refused(message: str, *arguments: object) -> None:
    """Assert that a conversion fails with a one-line error and leaves DST unchanged."""
    target = Path(str(arguments[3]))
    before = files(target) if target.exists() else None
    with pytest.raises(InputError, match=message) as caught:
        convert(*arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert (files(target) if target.exists() else None) == before
    assert not [path.name for path in target.parent.glob(f".{target.name}*")]


@pytest.mark.slow
def test_resharding_by_way_of_native_returns_the_same_bytes(start, config, tmp_path):
    """8 -> 1 -> 4 -> 8 shards, with the native format in between, including the optimizer."""
    source = start / "original"
    for shards in (1, 4, 8):
        native, target = tmp_path / f"native_{shards}", tmp_path / f"original_{shards}"
        convert("original", source, "native", native, "--config", config[0])
        convert("native", native, "original", target, "--shards", shards)
        assert len(list((target / "step_10").iterdir())) == shards
        source = target
    assert files(source / "step_10") == files(start / "original" / "step_10")


@pytest.mark.slow
def test_loading_and_saving_on_other_meshes_preserves_the_bytes(start, config, tmp_path):
    """A model that is loaded onto and saved from each mesh in turn still has the same 8 shards."""
    source = begin = str(start / "original")
    for name, (cores, size) in MESHES.items():
        mesh = config[1].replace(cores_per_replica=cores, tpu_size=size)
        network = CausalTransformer(mesh, devices=jax.devices()[:size], init=False)
        network.load(source)
        source = str(tmp_path / name)
        network.save(source)
        network.close()
    native, saved = native_state.read(source)
    before = original_format.read(begin, native)
    saved["step"] = before["step"]  # a loaded model starts at step 0
    original_format.write(str(tmp_path / "end"), saved, native, shards=8)
    assert files(tmp_path / "end" / "step_10") == files(start / "original" / "step_10")


def folded(state: dict[str, Any]) -> dict[str, Any]:
    """Return the weights as the hf format stores them, with the bias added to the embedding."""
    params = dict(state["params"])
    embedding = params["embed"]["embedding"]
    bias = embedding["b"]
    params["embed"] = {
        "embedding": embedding | {"w": embedding["w"] + bias, "b": np.zeros_like(bias)}
    }
    return {"params": params, "step": np.int32(0)}


@pytest.mark.slow
@pytest.mark.parametrize("source", FORMATS)
def test_every_format_converts_to_every_format(formats, config, tmp_path, source):
    """The weights are the same bits, as is the optimizer if both formats store it."""
    _, start = conversion.read(Source(str(formats["native"]), "native"))
    for target in FORMATS:
        end = tmp_path / target
        convert(source, formats[source], target, end, "--config", config[0])
        assert Source(str(end)).kind == target
        _, loaded = conversion.read(Source(str(end), target), config[1])
        assert_same_bits(loaded, folded(start) if "hf" in (source, target) else start)
        if target != "hf":
            step = 0 if source == "hf" else 10
            assert Source(str(end / f"step_{step}")).kind == target


@pytest.mark.slow
def test_conversion_with_dtype_slim_and_step_flags(formats, config, tmp_path):
    """Weights are cast as by numpy; moments are unchanged, or left out with --slim."""
    _, start = conversion.read(Source(str(formats["native"]), "native"))
    for name, dtype in FLOATS.items():
        for source in ("original", "native"):
            end = tmp_path / f"{source}_{name}" / "step_10"
            flags = ("--dtype", name, "--step", 10, "--config", config[0])
            convert(source, formats[source], "native", end, *flags)
            _, loaded = conversion.read(Source(str(end), "native"))
            cast = jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), start["params"])
            assert_same_bits(loaded, start | {"params": cast})
    convert("native", formats["native"], "original", tmp_path / "without", "--slim")
    _, loaded = conversion.read(Source(str(tmp_path / "without"), "original"), config[1])
    assert_same_bits(loaded, {key: start[key] for key in ("params", "step")})


@pytest.mark.slow
def test_step_can_be_added_to_an_existing_model_folder(formats, config, tmp_path):
    """DST may be a new step_N of an existing model folder."""
    for kind in ("original", "native"):
        folder = tmp_path / kind
        convert("hf", formats["hf"], kind, folder / "step_3", "--config", config[0])
        convert("native", formats["native"], kind, folder / "step_10")
        _, newest = conversion.read(Source(str(folder), kind), config[1])
        _, first = conversion.read(Source(str(folder / "step_3"), kind), config[1])
        assert (int(first["step"]), int(newest["step"])) == (3, 10)
        convert(kind, folder, "hf", tmp_path / f"hf_{kind}", "--step", 3, "--config", config[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("step", [False, True])
def test_load_accepts_every_format(formats, config, kind, step):
    """Model folders and step folders give the same logits, and moments if the format has them."""
    if kind == "hf" and step:
        pytest.skip("a Hugging Face folder has no steps")
    path = str(formats[kind] / "step_10" if step else formats[kind])
    tokens = random_batch(config[1], 4)["obs"]
    expected = mesh_transformer.load(str(formats["native"])).logits(tokens)
    model = {key: getattr(config[1], key) for key in ("layers", "d_model", "n_heads", "n_vocab")}
    model |= {"pe_rotary_dims": 4, "dtype": "float32", "seq": 32}
    loaded = {"a dict": mesh_transformer.load(Path(path), model)}
    for name, (cores, size) in MESHES.items():
        mesh = config[1].replace(cores_per_replica=cores, tpu_size=size)
        loaded[name] = mesh_transformer.load(path, mesh, optimizer=True)
    if kind != "original":
        loaded["its own"] = mesh_transformer.load(Path(path))
    for name, network in loaded.items():
        # Sums in f32 differ in order, and hf embeddings include the bias, which is added in f32.
        if not (kind == "hf" and name == "its own"):  # it computes in bf16
            np.testing.assert_allclose(network.logits(tokens), expected, rtol=0, atol=2e-5)
        assert network.step == 0
        assert network.state is not None
        assert ("opt_state" in network.state) == (name in MESHES)
    assert loaded["a dict"].mesh.size == 1
    if kind != "hf":
        _, start = conversion.read(Source(str(formats["native"]), "native"))
        state = loaded["2x4"].state
        assert state is not None
        assert_same_bits(state["opt_state"], start["opt_state"])
        assert_same_bits(state["params"], start["params"])


@pytest.mark.slow
def test_model_loaded_without_moments_trains_with_fresh_ones(formats, config):
    """As in a notebook: load a model without its optimizer, then train it."""
    reference = CausalTransformer(config[1], init=False)
    reference.load(str(formats["hf"]), fresh_opt=True)
    batch = random_batch(config[1], 1, 2)
    expected = reference.train(batch)
    loaded = mesh_transformer.load(str(formats["hf"]), config[1])
    actual = loaded.train(batch)
    assert loaded.step == 1
    assert float(actual["loss"]) == float(expected["loss"])
    assert_same_bits(loaded.state, reference.state)


@pytest.mark.slow
def test_step_without_moments_can_be_fine_tuned_but_not_resumed(formats, config, tmp_path):
    convert("native", formats["native"], "native", tmp_path / "slim", "--slim")
    network = CausalTransformer(config[1], init=False)
    network.load(str(tmp_path / "slim"))
    assert network.state is not None
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(network.state["opt_state"]))
    with pytest.raises(InputError, match="has no opt_state: a run can start"):
        network.restore(str(tmp_path / "slim"))
    network.close()
    network.restore(str(formats["native"]))  # with moments, but without a loader position
    assert network.step == 10
    network.close()


ALONE = """
import sys
import jax, mesh_transformer
from mesh_transformer.config import Config
network = mesh_transformer.load(sys.argv[1])
config = Config.load(sys.argv[2])
print(len(jax.devices()), network.mesh.size)
print(mesh_transformer.load(sys.argv[1], config).mesh.shape["dp"])
print(mesh_transformer.load(sys.argv[3]).mesh.size)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "last", "sizes"), [("native", "hf", "8 1 2 1"), ("hf", "native", "8 1 2 1")]
)
def test_load_creates_the_virtual_devices_of_the_run(formats, config, first, last, sizes):
    """In a new process, a model that needs more devices finds them even if loaded second."""
    folders = {kind: str(formats[kind]) for kind in (first, last)}
    program = [sys.executable, "-c", ALONE, folders[first], config[0], folders[last]]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    result = subprocess.run(
        program, check=True, capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert result.stdout.split() == sizes.split()


@pytest.mark.parametrize("aux", [{}, [], {"config": 3}])
def test_aux_without_a_config_is_a_one_line_error(formats, config, tmp_path, aux):
    """Every function that reads native checkpoints reports it."""
    shutil.copytree(formats["native"], tmp_path / "odd")
    (tmp_path / "odd" / "step_10" / "aux" / "metadata").write_text(json.dumps(aux))
    (tmp_path / "odd" / "step_10" / integrity.NAME).unlink()
    network = CausalTransformer(config[1], init=False)
    for reader in (mesh_transformer.load, network.load, network.restore):
        with pytest.raises(
            InputError, match=r"odd.*: its file aux/metadata holds [^\n]*, expected a JSON object"
        ):
            reader(str(tmp_path / "odd"))
    network.close()


@pytest.mark.quick(1)
@pytest.mark.parametrize("early", [False, True])
def test_weights_are_read_in_the_dtype_that_the_state_stores(formats, config, monkeypatch, early):
    """With early_cast, the host therefore never stores the weights in f32."""
    dtypes, read = [], conversion.read

    def record(*args: Any, **kwargs: Any) -> Any:
        dtypes.append(np.dtype(kwargs["dtype"]).name)
        return read(*args, **kwargs)

    monkeypatch.setattr(conversion, "read", record)
    stored = "bfloat16" if early else "float32"
    changed = config[1].replace(dtype="bfloat16", early_cast=early)
    for kind in FORMATS:
        state = mesh_transformer.load(formats[kind], changed).state
        assert state is not None
        assert {leaf.dtype.name for leaf in jax.tree.leaves(state["params"])} == {stored}
    assert dtypes == [stored] * 2  # the native format is read directly onto the devices


@pytest.mark.quick(1)
@pytest.mark.parametrize(("platform", "mp"), [("cpu", 1), ("tpu", 4)])
def test_single_replica_is_loaded_with_zero_off(
    formats, config, tmp_path, monkeypatch, platform, mp
):
    """Without a config argument, a model runs on one CPU device or on mp TPUs, so ZeRO is off."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    _, state = conversion.read(Source(formats["native"], "native"))
    pod = config[1].replace(partitioning="jit", zero=3)
    native_state.write(str(tmp_path / "model"), state, pod)
    network = mesh_transformer.load(tmp_path / "model")
    assert dict(network.mesh.shape) == {"dp": 1, "mp": mp}
    assert (network.config.zero, network.config.partitioning) == (0, "jit")


def test_load_requires_a_config_for_original_checkpoints(formats):
    with pytest.raises(
        InputError, match="original: checkpoints of mesh-transformer-jax do not store a config"
    ):
        mesh_transformer.load(str(formats["original"]))


def test_bad_input_is_a_one_line_error_and_nothing_is_left(formats, config, tmp_path):
    original, native, hf = (formats[kind] for kind in ("original", "native", "hf"))
    end, flags = tmp_path / "end", ("--config", config[0])
    other_config = tmp_path / "other.json"

    def with_values(**values: Any) -> tuple[str, str]:
        other_config.write_text(json.dumps(config[1].as_dict() | values))
        return "--config", str(other_config)

    (tmp_path / "empty").mkdir()
    for values, messages in (
        ({"d_model": 96}, ("expected", "its model has d_model 48", "d_model is 48")),
        ({"layers": 3}, (r"\(2 layers, full\)", "mu/layers/layer/b has shape", "layers is 2")),
        ({"n_heads": 4}, (None, "its model has n_heads 8", "its model has n_heads 8")),
    ):
        wrong = with_values(**values)
        for source, path, message in zip(FORMATS, (original, native, hf), messages, strict=True):
            if message is not None:  # original checkpoints do not store the number of heads
                assert_refused(message, source, path, "native", end, *wrong)
    assert_refused("already exists", "native", native, "original", original)
    assert_refused("already exists", "native", native, "hf", hf)
    assert_refused("already exists", "original", original, "native", native / "step_10", *flags)
    assert_refused("does not exist", "native", tmp_path / "none", "hf", end)
    assert_refused("no such folder", "original", tmp_path / "none", "hf", end, *flags)
    assert_refused("none/config.json cannot be read", "hf", tmp_path / "none", "native", end)
    assert_refused("holds no finished checkpoint", "native", tmp_path / "empty", "hf", end)
    assert_refused("do not store a config", "original", original, "native", end)
    assert_refused("--from pickle: expected one of", "pickle", native, "native", end)
    assert_refused("--to pickle: expected one of", "native", native, "pickle", end)
    assert_refused("--shards requires --to original", "native", native, "hf", end, "--shards", 4)
    assert_refused("--trim-vocab requires --to hf", "native", native, "native", end, "--trim-vocab")
    assert_refused("--step 10: a Hugging Face folder", "hf", hf, "native", end, "--step", 10)
    assert_refused("has no step_3", "native", native, "hf", end, "--step", 3)
    assert_refused("is another step", "native", native / "step_10", "hf", end, "--step", 3)
    assert_refused("the source is at step 10", "native", native, "original", tmp_path / "step_3")
    assert_refused("5", "native", native, "original", end, "--shards", 5)


@pytest.mark.slow
def test_tilde_means_the_home_folder_everywhere(formats, config, tmp_path, monkeypatch):
    """`~` is expanded in every path argument, and an existing DST is not overwritten."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for kind in FORMATS:
        (tmp_path / kind).symlink_to(formats[kind])
        assert Source(f"~/{kind}").kind == kind
        if kind != "original":
            assert Source(f"~/{kind}").config.layers == 2
    convert("native", "~/native", "hf", "~/new", "--step", 10, "--verify")
    assert (tmp_path / "new" / "config.json").is_file()
    (tmp_path / "mine").mkdir()
    for kind in FORMATS:
        with pytest.raises(InputError, match=f"{tmp_path}/mine already exists"):
            convert("hf", "~/new", kind, "~/mine", "--config", config[0])
    assert not list((tmp_path / "mine").iterdir())
    assert not (tmp_path / "~").exists()


def test_step_cannot_be_added_to_a_folder_of_another_format(formats, config, tmp_path):
    for existing in FORMATS:
        folder = tmp_path / existing
        shutil.copytree(formats[existing], folder)
        for kind in {"original", "native"} - {existing}:
            message = (
                f"{existing} holds a checkpoint in {existing} format; choose another model folder"
            )
            assert_refused(
                message, "hf", formats["hf"], kind, folder / "step_3", "--config", config[0]
            )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")  # not a model of any format
    convert("hf", formats["hf"], "native", tmp_path / "mine" / "step_3")
    message = "step_010: write the step number without leading zeros"
    for kind in ("original", "native"):
        assert_refused(message, "native", formats["native"], kind, tmp_path / "step_010")


def test_original_folders_are_recognised_by_shards_or_index(tmp_path):
    def is_original() -> bool:
        try:
            return Source(tmp_path).kind == "original"
        except InputError:
            return False

    (tmp_path / "shard_notes").mkdir()
    (tmp_path / "step_1" / "shards").mkdir(parents=True)
    index = tmp_path / "meta.json"
    for text in ("{}", "[]", "torn", '{"checkpoints": 3}'):
        index.write_text(text)
        assert not is_original()
    index.write_text('{"step": 7, "checkpoints": [7], "aux": {"7": {}}}')
    assert is_original()
    index.unlink()
    for shard in ("shard_0", "step_1/shard_0"):
        (tmp_path / shard).mkdir()
        assert is_original()
        (tmp_path / shard).rmdir()
    assert not is_original()


def test_output_describes_what_was_written(formats, config, tmp_path, capsys):
    def output_lines(*arguments: object) -> list[str]:
        convert(*arguments)  # type: ignore[arg-type]
        return capsys.readouterr().out.splitlines()

    original, native, hf = (tmp_path / kind for kind in FORMATS)
    source = formats["original"]
    assert output_lines("original", source, "native", native, "--config", config[0]) == [
        f"wrote {native}/step_10: native format, weights in float32, with the optimizer"
    ]
    assert output_lines("native", native, "original", original, "--slim", "--dtype", "bf16") == [
        f"wrote {original}/step_10: original format, weights in bfloat16"
    ]
    assert output_lines("native", native, "hf", hf, "--dtype", "f16") == [
        "tokenizer gpt2: not saved, as it has 50257 tokens, more than the model; give the "
        "model's own with --tokenizer",
        f"wrote {hf}: hf format, weights in float16",
    ]


@pytest.mark.slow
def test_trimmed_vocabulary_is_padded_for_the_shards(formats, config, tmp_path):
    def config_flags(count: int) -> tuple[str, str]:
        path = tmp_path / f"{count}.json"
        values = {"n_vocab": count, "cores_per_replica": 4, "tpu_size": 4}
        path.write_text(json.dumps(config[1].as_dict() | values))
        return "--config", str(path)

    trimmed, shards = tmp_path / "cut", ("--shards", 8)
    convert("hf", formats["hf"], "hf", trimmed, *config_flags(100))
    message = "n_vocab is 100, not divisible by 8 shards; give a --config with n_vocab 104"
    assert_refused(message, "hf", trimmed, "original", tmp_path / "end", *shards)
    convert("hf", trimmed, "original", tmp_path / "end", *shards, *config_flags(104), "--verify")
    gpt2 = Config(layers=28, d_model=4096, n_heads=16, n_vocab=50257, cores_per_replica=1)
    for count, padded in ((8, 50400), (64, 50304)):  # 64 does not divide 50400
        with pytest.raises(InputError, match=f"--config with n_vocab {padded},"):
            conversion._check_rows("end", gpt2, count)


@pytest.mark.slow
def test_tokenizer_flag_replaces_the_models_tokenizer(formats, config, tmp_path, capsys):
    """The native config stores the path of the tokenizer; if that is gone, another can be given."""
    own, native, again = tmp_path / "own", tmp_path / "native", tmp_path / "again"
    shutil.copytree(formats["hf"], own)
    word_tokenizer(own, 96)
    convert("hf", own, "native", native)
    assert f"the new checkpoint uses the tokenizer in {own}: keep it" in capsys.readouterr().out
    assert Source(native).config.tokenizer == str(own)
    message = f"native was created with the tokenizer {own}, which gives other tokens than gpt2"
    for kind in ("hf", "native"):
        assert_refused(message, "native", native, kind, tmp_path / "end", "--config", config[0])
    shutil.move(own, tmp_path / "moved")
    message = (
        f"tokenizer {own}: no such folder; .* if the model's own tokenizer is gone, "
        "name another with --tok"
    )
    assert_refused(message, "native", native, "hf", tmp_path / "end")
    convert("native", native, "hf", tmp_path / "end", "--tokenizer", tmp_path / "moved")
    words = (tmp_path / "moved" / "tokenizer.json").read_bytes()
    assert (tmp_path / "end" / "tokenizer.json").read_bytes() == words
    convert("native", native, "native", again, "--tokenizer", tmp_path / "moved")
    assert Source(again).config.tokenizer == str(tmp_path / "moved")
    large = "tokenizer gpt2 has 50257 tokens, more than n_vocab 96"
    assert_refused(large, "native", native, "native", tmp_path / "no", "--tokenizer", "gpt2")
    flags = ("--tokenizer", "gpt2")
    assert_refused("--tokenizer requires", "native", native, "original", tmp_path / "no", *flags)


@pytest.mark.parametrize("wrong", FORMATS)
def test_wrong_from_flag_names_the_actual_format(formats, config, tmp_path, wrong):
    for kind in FORMATS:
        message = f"{kind} is in {kind} format, not {wrong}; use --from {kind} "
        for flags in ((), ("--config", config[0]), ("--step", 3)):
            if kind != wrong:
                assert_refused(message, wrong, formats[kind], "native", tmp_path / "end", *flags)


@pytest.mark.parametrize("target", ["original", "hf"])
def test_terminated_conversion_leaves_nothing(formats, config, tmp_path, monkeypatch, target):
    """SIGTERM arrives while the files are being written."""
    module = {"original": original_files, "hf": hf_files}[target]

    def terminated(folder: str | list[str], *_: Any) -> None:
        folder = folder if isinstance(folder, str) else folder[0]
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "half").touch()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(module, "write", terminated)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        convert("native", formats["native"], target, tmp_path / "end")
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert not list(tmp_path.iterdir())


DAMAGE = {
    "original": ("step_10/shard_1/3.npz", "shard_1/3.npz"),
    "native": ("step_10/state/params.layers.layer/q.w/0.0.0", "step_10 cannot be read"),
    "hf": ("model.safetensors", "model.safetensors"),
}


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("how", ["torn", "missing"])
def test_error_names_the_damaged_source(formats, config, tmp_path, source, how):
    path = tmp_path / "damaged"
    shutil.copytree(formats[source], path)
    name, message = DAMAGE[source]
    damaged = path / name
    if how == "torn":
        damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    else:
        damaged.unlink()
        message = "found no weights" if source == "hf" else message
    target = "original" if source == "hf" else "hf"
    assert_refused(message, source, path, target, tmp_path / "end", "--config", config[0])


@pytest.mark.slow
def test_damaged_array_is_the_only_error_printed(formats, tmp_path):
    """Orbax keeps reading other arrays meanwhile, and would print an error about each."""
    tokenizer = word_tokenizer(tmp_path / "words", 96)
    convert("native", formats["native"], "native", tmp_path / "damaged", "--tokenizer", tokenizer)
    damaged = tmp_path / "damaged" / DAMAGE["native"][0]
    damaged.write_bytes(damaged.read_bytes()[:100])
    program = [
        sys.executable,
        "device_sample.py",
        "--prompt",
        "a",
        "--model-path",
        damaged.parents[3],
    ]
    result = subprocess.run(program, check=False, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 2
    assert re.match("error: .* cannot be read", result.stderr)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("target", FORMATS)
def test_full_disk_leaves_nothing(formats, config, small_disk, target):
    small = small_disk("128k")
    source = "hf" if target == "original" else "original"
    flags = ("--config", config[0])
    assert_refused("No space left", source, formats[source], target, small / "end", *flags)
    assert list(small.iterdir()) == []


@pytest.mark.slow
def test_verify_compares_logits(formats, config, tmp_path, capsys, monkeypatch):
    def difference_and_bound() -> tuple[float, float]:
        fields = re.search(r"^logits differ by (\S+) .*; (\S+) is", capsys.readouterr().out, re.M)
        return float(fields[1]), float(fields[2])

    flags = ("--config", config[0], "--verify")
    convert("original", formats["original"], "native", tmp_path / "a", *flags)
    assert difference_and_bound() == (0, 1e-4)
    convert("native", tmp_path / "a", "hf", tmp_path / "b", "--verify", "--dtype", "bf16")
    difference, bound = difference_and_bound()
    assert 0 < difference < bound == 5e-2
    convert("hf", tmp_path / "b", "original", tmp_path / "c", *flags)
    assert difference_and_bound()[0] <= 1e-6  # the bias is now zero, and nothing is rounded
    # A DST with different weights is detected: here, reading `d` changes some of them.
    read = conversion.read

    def read_wrong(source: Source, *args: Any, **kwargs: Any) -> Any:
        loaded_config, state = read(source, *args, **kwargs)
        if source.path.endswith("/d"):
            state = in_memory(state)
            state["params"]["layers"]["layer/q"]["w"][0] *= -1
        return loaded_config, state

    # Patched in its module, where `comparison` looks it up.
    monkeypatch.setattr(conversion, "read", read_wrong)
    with pytest.raises(StoppedError, match="its logits differ from those of"):
        convert("native", tmp_path / "a", "native", tmp_path / "d", "--verify")


def test_scripts_exit_with_status_2_and_one_line(formats, config, tmp_path, monkeypatch, capsys):
    model = ("--config", config[0], "--model-path", tmp_path)
    # Reported even if the model folder does not exist.
    large = "tokenizer gpt2 has 50257 tokens, more than n_vocab 96"
    for main, arguments in (
        (convert_command.main, ("--from", "native", tmp_path, "--to", "hf", tmp_path / "end")),
        (resharding_example.main, model),
        (device_sample.main, model),
        (device_sample.main, ("--model-path", formats["native"])),
        (device_sample.main, ("--model-path", tmp_path)),
        (device_sample.main, ()),
    ):
        monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            run_script(main)
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert (large in error) == (model == arguments or formats["native"] in arguments)


def test_the_resharding_example_continues_a_prompt_up_to_a_token_that_ends_answers(
    tmp_path, monkeypatch, capsys
):
    """The prompt has no special token after it, whatever the tokenizer adds."""
    folder = tmp_path / "tokenizer"
    made: Any = load_tokenizer("bytes")
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", made.eos_token_id)]
    )
    made.save_pretrained(folder)
    values = {"layers": 1, "d_model": 32, "n_heads": 2, "n_vocab": 260, "dtype": "float32"}
    (tmp_path / "c.json").write_text(json.dumps(values | {"tokenizer": str(folder)}))
    seen = []

    def generate(tokens, *_):
        seen.append(tokens.tolist())
        return np.array([[*b"cd", 9, *b"ef"], [*b"gh", made.eos_token_id, 9, 9]])

    def load(_, config):
        mesh = SimpleNamespace(size=1)
        return SimpleNamespace(mesh=mesh, config=config.replace(end_tokens=[9]), generate=generate)

    monkeypatch.setattr("mesh_transformer.transformer_shard.load", load)
    flags = ["--config", tmp_path / "c.json", "--prompt", "ab", "--samples", 2]
    monkeypatch.setattr(sys, "argv", ["resharding_example.py", *map(str, flags)])
    resharding_example.main()
    assert seen == [[[*b"ab"]] * 2]
    assert capsys.readouterr().out.endswith("\nabcd\n\nabgh\n")


def test_unknown_formats_are_refused(tmp_path):
    message = "format is 'huggingface', expected one of original, native, hf, gguf, peft"
    with pytest.raises(InputError, match=message):
        conversion.convert(tmp_path, "native", tmp_path / "new", "huggingface")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        conversion.convert(tmp_path, "huggingface", tmp_path / "new", "native")  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()
