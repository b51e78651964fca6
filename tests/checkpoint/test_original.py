"""Checkpoints in the original format: golden files, every shard count and all refusals."""

import json
import os
import pickle
import re
import resource
import shutil
import tracemalloc
import zipfile
from pathlib import Path

import haiku as hk
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mesh_transformer import families
from mesh_transformer.checkpoint import original_files
from mesh_transformer.checkpoint.original import entries, read, write
from mesh_transformer.checkpoint.original_files import split, step_folder
from mesh_transformer.mesh.declaration import map_declared
from mesh_transformer.model import transformer
from mesh_transformer.training.step import StateLayout, saved_part
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import DATA, original_config, random_batch

ORIGINAL = DATA / "original"
STEPS = sorted(str(path.relative_to(ORIGINAL)) for path in ORIGINAL.glob("*/*/*step_*"))
NORMS = [name for name, kind in families.NORMS.items() if kind.original and not kind.per_shard]
BF16 = np.dtype(ml_dtypes.bfloat16)


def random_state(config, *, seed=0, dtype=np.float32, full=True):
    """Return a state of random leaves; if `full`, with Adam's moments, of which nu is positive."""
    rng = np.random.default_rng(seed)
    declared = transformer.declarations(config)

    def tree(dtype):
        return map_declared(
            lambda d: np.asarray(rng.normal(size=d.shape), np.float32).astype(dtype), declared
        )

    state = {"params": tree(dtype), "step": np.int32(7)}
    if full:
        moments = {"mu": tree(np.float32), "nu": jax.tree.map(np.square, tree(np.float32))}
        state["opt_state"] = {"count": np.int32(9), **moments}
    return state


def assert_same(actual, expected):
    """Assert that two trees have the same structure, dtypes, shapes and bits."""
    actual, expected = (dict(jax.tree.leaves_with_path(t)) for t in (actual, expected))
    assert actual.keys() == expected.keys()
    for path, value in actual.items():
        name = jax.tree_util.keystr(path)
        assert value.dtype == expected[path].dtype, name
        assert value.shape == expected[path].shape, name
        assert value.tobytes() == expected[path].tobytes(), name


def assert_same_files(actual, expected):
    names = [
        {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}
        for folder in (actual, expected)
    ]
    assert names[0] == names[1]
    for name in names[0]:
        assert members(Path(actual, name)) == members(Path(expected, name)), name


def members(path):
    """Return the names and bytes of an archive's files; Pythons differ in what is around them."""
    if path.suffix != ".npz":
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def network_of(state, config, *, devices=None):
    """Return a network with a host state, which may lack Adam's moments."""
    network = CausalTransformer(config, init=False, devices=devices)
    layout, state = StateLayout(config, network.mesh), state | {"frozen": {}}
    shardings = {key: layout.shardings[key] for key in state}
    network.state = jax.tree.map(jax.device_put, state, shardings)
    network.step = int(state["step"])
    return network


def tokens_of(golden):
    return [{"obs": t[..., :-1], "target": t[..., 1:]} for t in golden]


@pytest.mark.parametrize("step", STEPS)
def test_golden_files_are_read_and_written_back_byte_for_byte(step, tmp_path):
    config = original_config(os.path.dirname(step))
    state = read(str(ORIGINAL / step), config)
    assert ("opt_state" in state) == ("slim" not in step)
    written = write(str(tmp_path / "model"), state, config)
    assert os.path.basename(written) == os.path.basename(step).removeprefix("slim_")
    assert_same_files(ORIGINAL / step, written)


@pytest.mark.slow
def test_trained_checkpoint_evaluates_as_in_the_original():
    golden = np.load(ORIGINAL / "f32/mp4_ga1/golden.npz")
    config = original_config("f32/mp4_ga1")
    network = network_of(read(str(ORIGINAL / "f32/mp4_ga1"), config), config)
    obs, target = golden["eval_tokens"][:, :-1], golden["eval_tokens"][:, 1:]
    result = network.eval({"obs": obs, "target": target})
    # 2e-5: twenty times the original's own run-to-run noise of 1e-6.
    for name in ("loss", "last_loss", "all_loss"):
        np.testing.assert_allclose(result[name], golden[f"eval_step10.{name}"], atol=2e-5, rtol=0)
    np.testing.assert_array_equal(result["correct"], golden["eval_step10.correct"])
    theirs = golden["eval_step10.logits"]
    np.testing.assert_allclose(network.logits(obs), theirs, atol=2e-5, rtol=0)
    prompts = golden["gen.ctx"], golden["gen.ctx_length"], golden["gen.tokens"].shape[1]
    np.testing.assert_array_equal(network.generate(*prompts, {"temp": 0.0}), golden["gen.tokens"])


def test_slim_copy_evaluates_as_in_the_original():
    golden = np.load(ORIGINAL / "bf16/mp4_ga1/golden.npz")
    config = original_config("bf16/mp4_ga1")
    state = read(str(ORIGINAL / "bf16/mp4_ga1/slim_step_10"), config, dtype=np.float32)
    network = network_of(state, config)
    obs, target = golden["eval_tokens"][:, :-1], golden["eval_tokens"][:, 1:]
    result = network.eval({"obs": obs, "target": target})
    # 2e-2: the weights were rounded to bf16, and the original computed partly in bf16.
    np.testing.assert_allclose(result["loss"], golden["eval_step10.loss"], atol=2e-2, rtol=0)


@pytest.mark.slow
def test_training_ends_at_the_originals_state():
    variant = ORIGINAL / "f32/mp4_ga1"
    config = original_config("f32/mp4_ga1", original_bias_copies=4)
    batches = tokens_of(np.load(variant / "golden.npz")["train_tokens"])
    ours = network_of(read(str(variant / "step_0"), config), config)
    for batch in batches:
        ours.train(batch)
    actual, theirs = jax.device_get(saved_part(ours.state)), read(str(variant / "step_10"), config)
    assert actual["opt_state"]["count"] == theirs["opt_state"]["count"] == 10
    assert actual["step"] == theirs["step"] == 10

    def compare(path, our_leaf, their_leaf):
        # 1e-4 of the leaf's largest entry: rounding errors grow over ten Adam steps.
        tolerance = 1e-4 * np.abs(their_leaf).max()
        np.testing.assert_allclose(
            our_leaf, their_leaf, atol=tolerance, rtol=0, err_msg=jax.tree_util.keystr(path)
        )

    jax.tree.map_with_path(compare, actual, theirs)
    from_theirs = network_of(theirs, config)
    for seed in range(5):
        batch = random_batch(config, 1, 2, seed=seed)
        losses = [float(network.train(batch)["loss"]) for network in (ours, from_theirs)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.slow
def test_bf16_losses_are_close_to_the_originals():
    golden = np.load(ORIGINAL / "bf16/mp4_ga1/golden.npz")
    changes = {"dtype": "bfloat16", "original_bias_copies": 4}
    config = original_config("bf16/mp4_ga1", **changes)
    # The two golden runs start from the same f32 weights.
    network = network_of(read(str(ORIGINAL / "f32/mp4_ga1/step_0"), config), config)
    losses = [float(network.train(batch)["loss"]) for batch in tokens_of(golden["train_tokens"])]
    # 2e-2: two runs of the original differ by 4e-4, and its activations are f32, whereas
    # ours are bf16.
    np.testing.assert_allclose(losses, golden["train.loss"], atol=2e-2, rtol=0)


@pytest.mark.parametrize(("variant", "n"), [("f32/mp4_ga1", 26), ("f32/t5_mp4", 17)])
def test_names_and_order_match_the_originals_list_of_leaves(variant, n):
    lines = (ORIGINAL / variant / "leaves.txt").read_text().splitlines()
    listed = re.findall(r"\['params'\]\['(.*)'\]\['(.*)'\]", "\n".join(lines))
    config = original_config(variant)
    actual = entries(config, transformer.declarations(config))
    assert [entry.name for entry in actual] == [" ".join(names) for names in listed]
    assert len(actual) == n
    places = [
        (f"{piece}.npz/arr_{place}")
        for piece, (first, end) in enumerate(split(len(lines)))
        for place in range(end - first)
    ]
    assert [line.split()[1] for line in lines] == places


def haiku_names(config):
    """Return the parameter names of Haiku modules nested as in the original, in JAX's order."""

    class Norm(hk.Module):
        def __init__(self):
            kind = config.norm
            names = {"layernorm-desync": "layer_norm", "layernorm": "replicated_layer_norm"}
            super().__init__(names.get(kind.removesuffix("-nobias"), "rms_norm"))
            self.leaves = ["scale"]
            if kind.startswith("layernorm") or kind.endswith("-bias"):
                self.leaves.append("offset")

        def __call__(self):
            for leaf in self.leaves:
                hk.get_parameter(leaf, (), init=jnp.zeros)

    class Layer(hk.Module):
        def __init__(self, name, biases):
            super().__init__(name)
            self.parts = [hk.Linear(1, with_bias=bias) for bias in biases]
            if name == "embedding_shard":
                if config.pe == "fixed":
                    hk.get_parameter("pos_embs", (), init=jnp.zeros)
            else:
                norm = Norm()
                self.parts.append(lambda x: norm())

        def __call__(self):
            for part in self.parts:
                part(jnp.zeros((1, 1)))

    class CausalTransformerShard(hk.Module):
        def __init__(self):
            super().__init__()
            self.parts = [Layer("embedding_shard", [True]), Layer("projection_shard", [True])]
            biases = [False, False, False, False, True, True]
            self.parts += [Layer(f"layer_{i}", biases) for i in range(config.layers)]
            if config.pe == "t5":
                self.parts.append(RelativePositionEmbs())

        def __call__(self):
            for part in self.parts:
                part()

    class RelativePositionEmbs(hk.Module):
        def __call__(self):
            hk.get_parameter("rel_embedding", (), init=jnp.zeros)

    params = jax.eval_shape(
        hk.transform(lambda: CausalTransformerShard()()).init, jax.random.key(0)
    )
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    return [f"{module.key} {leaf.key}" for module, leaf in paths]


@pytest.mark.quick(7)
@pytest.mark.parametrize("pe", ["rotary", "fixed", "t5"])
@pytest.mark.parametrize("norm", [*NORMS, "layernorm-desync"])
def test_names_and_order_match_haikus(small, norm, pe):
    config = small(layers=11, norm=norm, pe=pe)  # layer_10 is sorted between layer_1 and layer_2
    actual = [entry.name for entry in entries(config, transformer.declarations(config))]
    assert actual == haiku_names(config)


@pytest.mark.quick(2)
@pytest.mark.parametrize("pe", ["rotary", "fixed", "t5"])
@pytest.mark.parametrize("norm", NORMS)
def test_resharding_to_any_number_of_shards_and_back_is_exact(small, norm, pe, tmp_path):
    config = small(layers=2, d_model=32, norm=norm, pe=pe)
    state = random_state(config)
    first = write(str(tmp_path / "first"), state, config, shards=8)
    folder, merged = first, None
    for number, shards in enumerate((1, 4, 8)):
        merged = read(folder, config)
        # Shares of a sum are only multiplied and divided by powers of two, which is exact.
        assert_same(merged, state | {"step": np.int32(7)})
        folder = write(str(tmp_path / f"model_{number}"), merged, config, shards=shards)
    assert_same_files(first, folder)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_slim_copies_keep_their_dtype(small, dtype, tmp_path):
    config = small(norm="layernorm-nobias", pe="t5")
    state = random_state(config, dtype=dtype, full=False)
    first = write(str(tmp_path / "first"), state, config, shards=8)
    loaded = read(first, config)
    assert_same(loaded, state)
    if dtype is BF16:  # rewritten by numpy, which stores bf16 as |V2, not <V2
        for piece in Path(first).rglob("*.npz"):
            edit(piece, lambda arrays: None)
        assert_same(read(first, config), state)
    assert_same(write_and_read(tmp_path / "second", loaded, config, shards=2), state)


def write_and_read(folder, state, config, **options):
    return read(write(str(folder), state, config, **options), config)


def test_weights_are_cast_when_written_and_read(small, tmp_path):
    config = small()
    state = random_state(config)
    narrow = write(str(tmp_path / "narrow"), state, config, shards=4, dtype=BF16)
    rounded = jax.tree.map(lambda leaf: leaf.astype(BF16), state["params"])
    expected = state | {"params": rounded}
    assert_same(read(narrow, config), expected)  # the moments stay f32
    wide = read(narrow, config, dtype="float32", optimizer=False)
    assert_same(wide, {"params": jax.tree.map(np.float32, rounded), "step": state["step"]})
    huge = jax.tree.map(lambda leaf: leaf * 1e5, state["params"])
    for params in (huge, jax.tree.map(lambda leaf: leaf.astype(BF16), huge)):
        with pytest.raises(
            InputError, match=r"holds \d+, above float16's maximum 65504; choose dtype f"
        ):
            write(str(tmp_path / "huge"), state | {"params": params}, config, dtype="float16")
    assert not (tmp_path / "huge").exists()


def test_bf16_moments_are_written_as_f32(small, tmp_path):
    config = small(bf16_optimizer=True)
    state = random_state(config)
    for name in ("mu", "nu"):
        state["opt_state"][name] = jax.tree.map(lambda x: x.astype(BF16), state["opt_state"][name])
    loaded = write_and_read(tmp_path / "model", state, config)["opt_state"]
    assert_same(loaded["mu"], jax.tree.map(np.float32, state["opt_state"]["mu"]))


def leaf_of(folder, config, shard, group, name):
    """Return one array of a full checkpoint, located by its index among the leaves."""
    names = [entry.name for entry in entries(config, transformer.declarations(config))]
    n = len(names)
    position = next(i for i, entry_name in enumerate(names) if entry_name.endswith(name))
    index = position + {"mu": 1, "nu": n + 1, "params": 2 * n + 2}[group]
    size, longer = divmod(3 * n + 3, 16)
    for piece in range(16):
        count = size + (piece < longer)
        if index < count:
            return np.load(f"{folder}/shard_{shard}/{piece}.npz")[f"arr_{index}"]
        index -= count
    raise AssertionError


@pytest.mark.quick(6)
@pytest.mark.parametrize("norm", [*NORMS, "layernorm-desync"])
def test_each_shard_contains_its_part_of_every_leaf(small, norm, tmp_path):
    config = small(layers=11, norm=norm, pe="fixed", cores_per_replica=4)
    state = random_state(config)
    folder = write(str(tmp_path / "model"), state, config)
    layers, heads = state["params"]["layers"], slice(16, 32)

    def assert_contains(name, expected, group="params", shard=1):
        np.testing.assert_array_equal(leaf_of(folder, config, shard, group, name), expected)

    assert_contains("layer_10/~/linear w", layers["layer/q"]["w"][10][:, heads])
    assert_contains("layer_10/~/linear_1 w", layers["layer/v"]["w"][10][:, heads])
    assert_contains("layer_10/~/linear_2 w", layers["layer/k"]["w"][10][:, heads])
    assert_contains("layer_10/~/linear_3 w", layers["layer"]["o"][10][heads])
    assert_contains("layer_10/~/linear_5 b", layers["layer"]["b"][10] / 4)
    assert_contains(
        "layer_10/~/linear_5 b", state["opt_state"]["nu"]["layers"]["layer"]["b"][10], "nu"
    )
    embedding = state["params"]["embed"]["embedding"]
    assert_contains("embedding_shard/~/linear w", embedding["w"][32:64])
    assert_contains("embedding_shard/~/linear b", embedding["b"] / 4)
    assert_contains("embedding_shard pos_embs", embedding["pos_embs"][:, heads])

    norm_name = {"layernorm-desync": "layer_norm"}.get(norm, "replicated_layer_norm")
    norm_name = norm_name if norm.startswith("layernorm") else "rms_norm"
    for group in ("params", "mu"):
        ours = (state["params"] if group == "params" else state["opt_state"]["mu"])["proj"]
        for leaf, value in ours["projection/norm"].items():
            name, other_shards = f"projection_shard/~/{norm_name} {leaf}", value
            if norm.startswith("layernorm"):
                initial = float(leaf == "scale" and group == "params")
                other_shards = np.full_like(value, initial)
            if norm == "layernorm-desync":
                value, other_shards = value[0], value[1]
            assert_contains(name, value, group, shard=0)
            assert_contains(name, other_shards, group)
    if norm == "layernorm-nobias":
        assert_contains(f"projection_shard/~/{norm_name} offset", np.zeros(64), shard=0)


def test_desync_requires_its_own_number_of_shards(small, tmp_path):
    config = small(norm="layernorm-desync", cores_per_replica=4)
    state = random_state(config)
    assert_same(write_and_read(tmp_path / "model", state, config), state)
    with pytest.raises(InputError, match=r"shards is 8, but .* is 4; they must be equal.*; choose"):
        write(str(tmp_path / "other"), state, config, shards=8)
    changed = config.replace(cores_per_replica=2)
    with pytest.raises(InputError, match=r"is 4, but .* is 2; they must be equal.*; copy all"):
        read(str(tmp_path / "model"), changed)


def edit(path, change):
    """Rewrite a piece after applying `change` to the dict of its arrays."""
    with np.load(path) as archive:
        arrays = dict(archive)
    change(arrays)
    np.savez(path, **arrays)


def test_different_shares_of_a_bias_are_added(small, tmp_path):
    config = small(norm="rmsnorm")
    state = random_state(config, full=False)
    folder = write(str(tmp_path / "model"), state, config, shards=2)
    # The first leaf is the embedding's bias.
    edit(f"{folder}/shard_1/0.npz", lambda arrays: np.add(arrays["arr_0"], 1, arrays["arr_0"]))
    actual = read(folder, config)["params"]["embed"]["embedding"]["b"]
    # 1e-6: the sum of two f32 shares rounds once.
    expected = state["params"]["embed"]["embedding"]["b"] + 1
    np.testing.assert_allclose(actual, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.quick(10)
@pytest.mark.parametrize("dtype", [BF16, np.float16])
@pytest.mark.parametrize("shards", [3, 5, 6])
@pytest.mark.parametrize("alike", [True, False])
def test_shares_of_a_bias_are_added_in_f32(small, dtype, shards, alike, tmp_path):
    heads = {"d_model": 8 * shards, "n_heads": shards, "n_vocab": 8 * shards}
    config = small(layers=1, norm="rmsnorm", **heads)
    state = random_state(config, dtype=dtype, full=False)
    folder = write(str(tmp_path / "model"), state, config, shards=shards)
    places = [f"{folder}/shard_{number}/0.npz" for number in range(shards)]
    if not alike:  # the first leaf is the embedding's bias, which numpy reads as |V2 in bf16
        factor = np.asarray(0.7, dtype)
        edit(places[1], lambda arrays: arrays.update(arr_0=arrays["arr_0"].view(dtype) * factor))
    shares = [np.load(place)["arr_0"].view(dtype).astype(np.float32) for place in places]
    total = shares[0] * shards if alike else np.sum(shares, axis=0)
    for target in (None, np.float32):
        actual = read(folder, config, dtype=target)["params"]["embed"]["embedding"]["b"]
        assert_same(actual, total.astype(target or dtype))
    assert not np.array_equal(total, total.astype(dtype))  # so that a sum in `dtype` would differ


def test_leaves_that_all_shards_contain_are_averaged(small, tmp_path):
    config = small(norm="rmsnorm")
    state = random_state(config)
    folder = write(str(tmp_path / "model"), state, config, shards=2)
    names = [entry.name for entry in entries(config, transformer.declarations(config))]
    places = split(3 * len(names) + 3)
    # Leaf names, and the index at which each group begins: params for the first leaf, mu for the
    # second.
    changed = {
        "projection_shard/~/rms_norm scale": 2 * len(names) + 2,
        "embedding_shard/~/linear b": 1,
    }
    for name, start in changed.items():
        index = start + next(i for i, entry_name in enumerate(names) if entry_name.endswith(name))
        piece = next(p for p, (first, end) in enumerate(places) if first <= index < end)
        leaf = f"arr_{index - places[piece][0]}"
        path = f"{folder}/shard_1/{piece}.npz"
        edit(path, lambda arrays, leaf=leaf: np.add(arrays[leaf], 1, arrays[leaf]))
    loaded = read(folder, config)
    # 1e-6: the sum and the mean of f32 numbers each round once.
    for tree, before, keys in (
        (loaded["params"], state["params"], ("proj", "projection/norm", "scale")),
        (loaded["opt_state"]["mu"], state["opt_state"]["mu"], ("embed", "embedding", "b")),
    ):
        actual, previous = (t[keys[0]][keys[1]][keys[2]] for t in (tree, before))
        np.testing.assert_allclose(actual, previous + 0.5, atol=1e-6, rtol=1e-6)


def test_step_is_read_from_the_schedules_count(small, tmp_path):
    config = small()
    state = random_state(config)
    folder = write(str(tmp_path / "model"), state, config, shards=2)
    n = len(entries(config, transformer.declarations(config)))
    piece = next(p for p, (first, end) in enumerate(split(3 * n + 3)) if first <= 2 * n + 1 < end)
    place = f"arr_{2 * n + 1 - split(3 * n + 3)[piece][0]}"
    edit(f"{folder}/shard_0/{piece}.npz", lambda arrays: arrays.update({place: np.int32(3)}))
    loaded = read(folder, config)
    assert (loaded["step"], loaded["opt_state"]["count"]) == (3, 9)
    assert read(folder, config, optimizer=False)["step"] == 3


def test_model_folder_has_an_index_of_its_steps(small, tmp_path):
    config, folder = small(), tmp_path / "model"
    state = random_state(config, full=False)
    for step in (20, 5):
        write(str(folder), state | {"step": np.int32(step)}, config)
    index = json.loads((folder / "meta.json").read_text())
    assert index == {"step": 5, "checkpoints": [20, 5], "aux": {"20": {}, "5": {}}}
    assert sorted(os.listdir(folder)) == ["meta.json", "step_20", "step_5"]
    assert step_folder(str(folder)) == str(folder / "step_5")
    assert read(str(folder), config)["step"] == 5
    with pytest.raises(InputError, match="step_5 already exists"):
        write(str(folder), state | {"step": np.int32(5)}, config)
    (folder / "meta.json").unlink()
    os.mkdir(folder / "step_100")  # an empty folder is not a checkpoint
    assert read(str(folder), config)["step"] == 20
    assert read(str(folder / "step_5"), config)["step"] == 5


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "meta.json cannot be read"),
        ('{"step": 1}', "meta.json: expected a mapping whose `checkpoints` is a list of steps"),
        ('{"checkpoints": [8]}', "meta.json names step 8 as the newest, but .*step_8 is missing"),
    ],
)
def test_bad_index_is_a_one_line_error(small, text, line, tmp_path):
    write(str(tmp_path / "model"), random_state(small(), full=False), small())
    (tmp_path / "model" / "meta.json").write_text(text)
    with pytest.raises(InputError, match=line):
        read(str(tmp_path / "model"), small())


def truncate(path, share=0.5):
    with open(path, "r+b") as file:
        file.truncate(int(os.path.getsize(path) * share))


def flip(path):
    """Flip one bit of the first array's values."""
    with zipfile.ZipFile(path) as archive:
        info = archive.infolist()[0]
    content = bytearray(Path(path).read_bytes())
    content[info.header_offset + 400] ^= 1
    Path(path).write_bytes(content)


def pickled(path):
    edit(path, lambda arrays: arrays.update(arr_1=np.array([{"a": 1}], object)))


def put(value):
    return lambda path: edit(path, lambda arrays: arrays.update(arr_1=value(arrays["arr_1"])))


def header(change):
    """Return a function that changes an array's header, which numpy parses as Python.

    The checksums of the archive remain correct.
    """

    def damage(path):
        with zipfile.ZipFile(path) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        parts["arr_1.npy"] = parts["arr_1.npy"].replace(*change)
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in parts.items():
                archive.writestr(name, content)

    return damage


# The damaged piece contains the embedding's b and w, in shard 1 of 2.
DAMAGE = [
    (truncate, r"shard_1/0\.npz: not a complete \.npz archive \(.* bytes\); copy"),
    (os.remove, r"shard_1/0\.npz is missing; a shard has 16 files"),
    (
        lambda path: Path(path).write_bytes(pickle.dumps([1])),
        r"shard_1/0\.npz: not a complete \.npz",
    ),
    (
        flip,
        r"0\.npz: arr_0 \(params: .*linear b\) is damaged: Bad CRC-32.*; expected shape \(64,\)",
    ),
    (header((b"}", b"(")), r"arr_1 \(.*linear w\) is damaged: its .npy header is damaged: "),
    (
        header((b"'descr'", b"'descr ")),
        r"arr_1 \(.*\) is damaged: its .npy header is damaged: ",
    ),
    (
        header((b": ", b":)")),
        r"arr_1 \(.*linear w\) is damaged: its .npy header is damaged: ",
    ),
    (pickled, r"0\.npz: arr_1 \(.*linear w\) is a pickled object.* refused as unsafe"),
    (put(lambda w: w[:-1]), r"0\.npz: arr_1 \(.*\) has shape \(63, 64\), expected \(64, 64\)"),
    (put(lambda w: w[:, :-1]), r"arr_1 \(.*\) has shape \(64, 63\), expected \(64, 64\) in each"),
    (
        lambda path: put(np.int32)(path.replace("shard_1", "shard_0")),
        r"arr_1 \(.*linear w\) is int32, expected one of float32, float16, bfloat16; use",
    ),
    (put(np.int32), r"arr_1 \(.*linear w\) is int32, expected float32 as in .*shard_0"),
    (put(np.float16), r"arr_1 \(.*linear w\) is float16, expected float32 as in .*shard_0"),
    (
        lambda path: edit(path, lambda arrays: arrays.update(arr_9=np.zeros(1))),
        r"0\.npz holds 3 arrays, but none is arr_2; expected arr_0 to arr_2; check",
    ),
    (
        lambda path: edit(path, lambda arrays: arrays.update(arr_2=np.zeros(1))),
        r"shard_1: found 28 leaves, but .*shard_0 has 27; copy",
    ),
    (
        lambda path: shutil.rmtree(os.path.dirname(path)),
        r"arr_1 \(params: .*\) has shape \(64, 64\), expected \(128, 64\) in each of 1 shards; .*",
    ),
    (
        lambda path: shutil.rmtree(os.path.dirname(path).replace("shard_1", "shard_0")),
        r"step_7: shard_0 is missing, though shard_1 exists; copy shard_0 as well",
    ),
]


@pytest.mark.parametrize(("damage", "line"), DAMAGE)
def test_damage_is_a_one_line_error(small, damage, line, tmp_path):
    config = small()
    folder = write(str(tmp_path / "model"), random_state(config, full=False), config, shards=2)
    damage(f"{folder}/shard_1/0.npz")
    with pytest.raises(InputError, match=line) as caught:
        read(folder, config)
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value)


def mutated(content, rng):
    """Return the bytes truncated, or with two of them changed.

    The changes are anywhere, near the first headers, or in the archive's directory at the end.
    """
    content = bytearray(content)
    kind = rng.integers(4)
    if kind == 0:
        return content[: rng.integers(len(content))]
    first, end = [(0, None), (0, 200), (-400, None)][kind - 1]
    places = range(len(content))[first:end]
    for place in rng.choice(places, 2):
        content[place] = rng.integers(256)
    return content


@pytest.mark.slow
def test_random_damage_is_a_one_line_error_or_harmless(tmp_path):
    config, folder = original_config("f32/t5_mp4"), str(tmp_path / "step_0")
    shutil.copytree(ORIGINAL / "f32/t5_mp4/step_0", folder)
    good, refused = read(folder, config), 0
    rng = np.random.default_rng(0)
    for _ in range(60):
        path = Path(folder, f"shard_{rng.integers(4)}", f"{rng.integers(16)}.npz")
        whole = path.read_bytes()
        path.write_bytes(mutated(whole, rng))
        line = None
        try:
            # Harmless, such as a changed date in the archive.
            assert_same(read(folder, config), good)
        except InputError as error:
            line = str(error)
            refused += 1
        assert line is None or ("\n" not in line and str(path) in line)
        path.write_bytes(whole)
    assert refused > 30


@pytest.mark.quick(7)
@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"layers": 3},
            r"shard_0: found 81 leaves \(2 layers, full\), expected 111 \(full\) or",
        ),
        ({"d_model": 128}, r"linear b\) has shape \(64,\), expected \(128,\) in each of 2"),
        ({"n_vocab": 256}, r"linear w\) has shape \(64, 64\), expected \(128, 64\) in"),
        (
            {"n_heads": 1},
            r"step_7: n_heads is 1, not divisible by 2 shards; copy all of its shards, or",
        ),
        ({"pe": "t5"}, r"found 81 leaves, expected 84 "),
        ({"norm": "rmsnorm"}, "found 81 leaves, expected 72 "),
        (
            {"block": "geglu"},
            "block is geglu, but mesh-transformer-jax checkpoints support only gptj",
        ),
        (
            {"head_size": 16},
            "head_size is 16, but mesh-transformer-jax checkpoints support only d_model /",
        ),
    ],
)
def test_config_of_another_model_is_a_one_line_error(small, changes, line, tmp_path):
    write(str(tmp_path / "model"), random_state(small()), small(), shards=2)
    with pytest.raises(InputError, match=line) as caught:
        read(str(tmp_path / "model"), small(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["nothing", "."])
def test_missing_checkpoint_is_a_one_line_error(small, path, tmp_path):
    with pytest.raises(
        InputError, match=r"no such folder|found no mesh-transformer-jax checkpoint"
    ):
        read(str(tmp_path / path), small())


def test_a_norm_that_the_original_lacks_is_refused(small, tmp_path, monkeypatch):
    monkeypatch.setitem(families.NORMS, "rmsnorm", families.NormKind())
    config = small(norm="rmsnorm")
    with pytest.raises(InputError, match=r"norm is rmsnorm, .* only layernorm,.*; keep this model"):
        write(str(tmp_path / "model"), random_state(config), config)
    assert os.listdir(tmp_path) == []


def test_writing_a_state_that_does_not_match_the_config_is_refused(small, tmp_path):
    config, folder = small(), tmp_path / "model"
    state = random_state(config)
    with pytest.raises(InputError, match="n_heads is 8, not divisible by 3 shards; choose another"):
        write(str(folder), state, config, shards=3)
    with pytest.raises(InputError, match="number of shards is 0, expected at least 1"):
        write(str(folder), state, config, shards=0)
    with pytest.raises(
        InputError, match=r"layer/\w+ has shape \(2, .*\), but the config expects \(3, "
    ):
        write(str(folder), state, small(layers=3, n_vocab=128))
    for dtype in (np.float64, np.int32):
        leaf = state["params"]["layers"]["layer/q"]["w"].astype(dtype)
        layers = state["params"]["layers"] | {"layer/q": {"w": leaf}}
        with pytest.raises(InputError, match=r"layer/q/w has dtype \w+, but the config "):
            write(str(folder), state | {"params": state["params"] | {"layers": layers}}, config)
    del state["opt_state"]["nu"]["embed"]["embedding"]["w"]
    with pytest.raises(InputError, match="opt_state/nu/embed/embedding/w is missing"):
        write(str(folder), state, config)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("indexed", [False, True])
def test_a_checkpoint_of_version_2_is_called_so(small, tmp_path, indexed):
    step = tmp_path / "step_5"
    (step / "params").mkdir(parents=True)
    (step / "params" / "shard_0.npz").touch()
    if indexed:
        (tmp_path / "meta.json").write_text('{"step": 5, "checkpoints": [5], "aux": {"5": {}}}')
    for path in (step, tmp_path) if indexed else (step,):
        with pytest.raises(InputError, match=r"step_5: this is a checkpoint of .* version 2"):
            read(str(path), small())


def test_a_write_that_was_killed_at_its_end_is_completed(small, tmp_path, monkeypatch):
    config, folder = small(), tmp_path / "model"
    state = random_state(config, full=False)
    write(str(folder), state | {"step": np.int32(1)}, config)
    with monkeypatch.context() as patch:
        patch.setattr(original_files, "finish", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            write(str(folder), state | {"step": np.int32(2)}, config)
    with pytest.raises(InputError, match=r"step_2: .* killed at the very end; it is complete"):
        write(str(folder), state | {"step": np.int32(2)}, config)
    assert json.loads((folder / "meta.json").read_text())["checkpoints"] == [1, 2]
    assert not (folder / "step_2" / "meta.json").exists()
    assert read(str(folder), config)["step"] == 2
    with monkeypatch.context() as patch:
        patch.setattr(original_files, "finish", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            write(str(folder), state | {"step": np.int32(3)}, config)
    write(str(folder), state | {"step": np.int32(4)}, config)
    with pytest.raises(InputError, match=r"step_3: .* killed at the very end; it is complete"):
        write(str(folder), state | {"step": np.int32(3)}, config)
    assert json.loads((folder / "meta.json").read_text())["checkpoints"] == [1, 2, 4]


def _interrupt(path: str) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("existing", [False, True])
def test_failed_write_leaves_nothing(small, existing, tmp_path):
    config, folder = small(), tmp_path / "model"
    state = random_state(config, full=False)
    if existing:
        write(str(folder), state, config)
    before = sorted(tmp_path.rglob("*"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(InputError, match="cannot be written: File too large"):
            write(str(folder), state | {"step": np.int32(8)}, config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.quick(1)
@pytest.mark.parametrize("shards", [1, 8])
def test_only_one_leaf_at_a_time_is_copied_in_memory(small, shards, tmp_path):
    config = small(layers=4, d_model=256)  # 14 MB; the largest leaf of one layer is 1 MB
    state = random_state(config, full=False)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    tracemalloc.start()
    try:
        folder = write(str(tmp_path / "model"), state, config, shards=shards)
        _, peak = tracemalloc.get_traced_memory()
        # A leaf's part and its copy, and 1 MB for everything else.
        assert peak < 3e6 + 1e6
        tracemalloc.reset_peak()
        loaded = read(folder, config)
        _, peak = tracemalloc.get_traced_memory()
        assert peak < weights + 3e6 + 1e6
    finally:
        tracemalloc.stop()
    assert_same(loaded, state)


def test_conversion_to_native_and_back_on_every_mesh_is_exact(small, tmp_path):
    values = {"layers": 3, "cores_per_replica": 8, "tpu_size": 8}
    config = small(**values)
    first = write(str(tmp_path / "first"), random_state(config), config)
    folder = first
    meshes = [(8, None, 1), (4, None, 4), (1, jax.devices()[:1], 8)]
    for cores, devices, shards in meshes:
        mesh_config = config.replace(cores_per_replica=cores, tpu_size=None if devices else 8)
        network = network_of(read(folder, config), mesh_config, devices=devices)
        network.save(str(tmp_path / f"native_{cores}"))
        network.close()
        restored = CausalTransformer(config, init=False)
        restored.restore(str(tmp_path / f"native_{cores}"))
        restored.close()
        host = jax.device_get(restored.state)
        folder = write(str(tmp_path / f"shards_{cores}"), host, config, shards=shards)
    assert_same_files(first, folder)
