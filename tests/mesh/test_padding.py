"""Meshes whose mp divides neither heads nor widths: the results are those of one device."""

import subprocess
import sys

import jax
import numpy as np
import pytest

import mesh_transformer
from mesh_transformer.checkpoint import conversion, native_state
from mesh_transformer.config import Config
from mesh_transformer.mesh.declaration import map_declared
from mesh_transformer.model import transformer
from mesh_transformer.transformer_shard import CausalTransformer
from tests.conftest import SMALL, random_batch

# mp 2, 4 and 8 divide neither the heads, nor the vocabulary, nor the feed-forward's width, nor
# d_model, by which learned positions are split.
ODD = SMALL | {"n_heads": 5, "d_model": 35, "n_vocab": 131, "z_loss": 1e-3}
# partitioning, dp, mp and zero, and the blocks that are tested on this mesh, of which `make test`
# the first where it is marked.  Each block meets both partitionings and two ZeRO stages.
MESHES = [
    (("shard_map", 1, 8, 0), ("gptj",), 0),
    (("shard_map", 2, 4, 1), ("geglu",), 0),
    (("shard_map", 4, 2, 3), ("gpt2", "neox"), 1),
    (("jit", 1, 8, 0), ("gpt2",), 0),
    (("jit", 4, 2, 1), ("gptj", "neox"), 0),
    (("jit", 2, 4, 3), ("geglu",), 0),
]


def case(*values, quick: bool):
    return pytest.param(*values, marks=() if quick else pytest.mark.slow)


def config_of(mp: int = 1, **changes) -> Config:
    # ZeRO splits d_model, which dp must divide.
    widths = {"d_model": 40, "head_size": 7} if changes.get("zero") else {}
    split = {"cores_per_replica": mp, "tpu_size": mp}
    return Config(**(ODD | widths | split | changes))


def network_on(devices: int, config: Config, **changes) -> CausalTransformer:
    return CausalTransformer(config, devices=jax.devices()[:devices], **changes)


def assert_padding_is_zero(network: CausalTransformer) -> int:
    """Check that all padding is zero; return the number of entries of padding."""
    state, count = network.state, 0
    assert state is not None

    def check(declaration, *arrays) -> None:
        nonlocal count
        inside = tuple(slice(size) for size in declaration.shape)
        for array in map(np.array, arrays):
            count += array.size - np.prod(declaration.shape, dtype=int)
            array[inside] = 0
            assert not array.any()

    declared = transformer.declarations(network.config)
    map_declared(
        check, declared, state["params"], state["opt_state"]["mu"], state["opt_state"]["nu"]
    )
    return count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "partitioning", "dp", "mp", "zero"),
    [
        case(block, *mesh, quick=number < quick)
        for mesh, blocks, quick in MESHES
        for number, block in enumerate(blocks)
    ],
)
def test_training_matches_one_device_and_padding_stays_zero(block, partitioning, dp, mp, zero):
    changes = {"block": block, "zero": zero, "pe": "fixed"}
    check_training(config_of(mp, partitioning=partitioning, **changes), config_of(**changes))


@pytest.mark.quick(1)
@pytest.mark.parametrize("partitioning", ["shard_map", "jit"])
@pytest.mark.parametrize(
    ("mp", "changes"),
    [
        (4, {"n_heads": 6, "key_heads": 2}),
        (2, {"n_heads": 9, "key_heads": 3, "qk_norm": "head"}),  # as SmolLM2-135M
        (4, {"n_heads": 6, "key_heads": 2, "qk_norm": "projection", "biases": ["q", "k", "v"]}),
        (8, {"n_heads": 3, "key_heads": 1, "attention_scale": 0.5, "residual_scale": 0.7}),
    ],
    ids=str,
)
def test_padding_of_heads_that_share_keys_stays_zero(partitioning, mp, changes):
    changes = {"block": "llama", "head_size": 6, "pe_rotary_dims": 4} | changes
    check_training(config_of(mp, partitioning=partitioning, **changes), config_of(**changes))


def check_training(config: Config, alone: Config) -> None:
    """Check that a padded mesh trains like one device, and that its padding stays zero."""
    one, mesh = network_on(1, alone), network_on(8, config)
    batches = [random_batch(config, 2, 8, seed=seed) for seed in range(3)]
    for batch in batches:
        actual, expected = mesh.train(batch), one.train(batch)
        for name in ("loss", "last_loss", "grad_norm"):
            # Sums in another order, over a few Adam steps.
            assert float(actual[name]) == pytest.approx(float(expected[name]), rel=1e-5), name
    assert assert_padding_is_zero(mesh) > 0
    for actual, expected in zip(
        jax.tree.leaves(mesh.saved_state()["params"]),
        jax.tree.leaves(one.saved_state()["params"]),
        strict=True,
    ):
        assert actual.shape == expected.shape
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)  # Adam's step is 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "partitioning", "mp"),
    [
        case("gpt2", "shard_map", 8, quick=True),
        case("geglu", "shard_map", 8, quick=False),
        case("gptj", "jit", 4, quick=False),
        case("neox", "jit", 4, quick=False),
        case("llama", "shard_map", 8, quick=False),
    ],
)
def test_checkpoints_have_no_padding_and_resume_on_any_mesh(tmp_path, block, partitioning, mp):
    """A state is saved by one device, then by a mesh, and restored by another mesh, bit for bit."""
    one = network_on(1, config_of(block=block, zero=1))
    one.train(random_batch(one.config, 1, 4))
    expected = jax.tree.map(np.asarray, one.saved_state())
    meshes = [(partitioning, mp, 1), ("shard_map", 2, 3), ("jit", 1, 0)]
    network, folder = one, tmp_path / "one"
    for number, (partition, shards, zero) in enumerate(meshes):
        network.save(folder)
        network.close()
        config = config_of(shards, block=block, zero=zero, partitioning=partition, d_model=40)
        network = network_on(8, config.replace(head_size=7), init=False)
        assert network.restore(folder) is not None
        jax.tree.map(np.testing.assert_array_equal, network.saved_state(), expected)
        folder = tmp_path / str(number)
    network.close()


CHANGES = ({}, {"int8_weights": True, "int8_cache": True}, {"norm": "rmsnorm", "pe": "t5"})
SPLITS = (("shard_map", 8), ("jit", 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "partitioning", "mp", "changes"),
    [  # each of the changes on both meshes
        case("gpt2", *SPLITS[0], CHANGES[0], quick=True),
        case("geglu", *SPLITS[1], CHANGES[0], quick=False),
        case("gptj", *SPLITS[0], CHANGES[1], quick=False),
        case("neox", *SPLITS[1], CHANGES[1], quick=False),
        case("geglu", *SPLITS[0], CHANGES[2], quick=False),
        case("gpt2", *SPLITS[1], CHANGES[2], quick=False),
    ],
)
def test_the_same_weights_give_the_same_results(tmp_path, block, partitioning, mp, changes):
    one = network_on(1, config_of(block=block, **changes))
    one.save(tmp_path / "one")
    one.close()
    config = config_of(mp, block=block, partitioning=partitioning, **changes)
    mesh = network_on(8, config, init=False)
    mesh.load(tmp_path / "one")
    batch = random_batch(config, 3)
    actual, expected = mesh.eval(batch), one.eval(batch)
    # Sums in another order.
    np.testing.assert_allclose(actual["all_loss"], expected["all_loss"], rtol=1e-5)
    np.testing.assert_array_equal(actual["correct"], expected["correct"])
    logits = mesh.logits(batch["obs"])
    assert logits.shape == (3, config.seq, config.n_vocab)
    # 2e-5: sums in another order, in f32.
    np.testing.assert_allclose(logits, one.logits(batch["obs"]), rtol=0, atol=2e-5)
    scored, wanted = (network.score(batch["obs"], 131) for network in (mesh, one))
    np.testing.assert_allclose(scored.logprob, wanted.logprob, rtol=0, atol=2e-5)
    assert np.sort(scored.top_token).tolist() == np.sort(wanted.top_token).tolist()
    prompts = batch["obs"][:, :6]
    for options in ({"temp": 0.0}, {"top_p": 0.9, "seed": 3, "repetition_penalty": 1.2}):
        tokens = [network.generate(prompts, [6, 4, 1], 8, options) for network in (mesh, one)]
        np.testing.assert_array_equal(*tokens)


@pytest.mark.slow
def test_adapters_train_and_merge_as_on_one_device(tmp_path):
    base = network_on(1, config_of(block="gpt2"))
    base.save(tmp_path / "base")
    base.close()
    lora = {"lora_rank": 3, "lora_targets": ["q", "v", "k", "o", "fc", "out"], "warmup_steps": 0}
    losses, states = [], []
    for devices, mp in ((1, 1), (8, 8)):
        network = network_on(devices, config_of(mp, block="gpt2", **lora), init=False)
        network.load(tmp_path / "base")
        batches = [random_batch(network.config, 1, 4, seed=seed) for seed in range(3)]
        losses.append([float(network.train(batch)["loss"]) for batch in batches])
        network.save(tmp_path / f"lora{mp}")
        network.close()
        merged = network_on(1, config_of(block="gpt2"), init=False)
        merged.load(tmp_path / f"lora{mp}")
        states.append(merged.saved_state()["params"])
    # Sums in another order, over a few Adam steps.
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-4), *states)


@pytest.mark.slow
def test_an_exported_file_has_the_bytes_of_the_imported_one(tmp_path):
    """As for the 25 heads and 50257 tokens of gpt2-xl, on meshes that divide neither."""
    one = network_on(1, config_of(block="gpt2", seq=24))
    native_state.write(
        str(tmp_path / "native"), jax.tree.map(np.asarray, one.saved_state()), one.config
    )
    conversion.convert(tmp_path / "native", "native", tmp_path / "hf", "hf")
    for mp in (2, 4, 8):
        mesh = mesh_transformer.load(tmp_path / "hf", config_of(mp, block="gpt2", seq=24))
        assert mesh.mesh.shape["mp"] == mp
        mesh.save(tmp_path / f"saved{mp}")
        mesh.close()
        conversion.convert(tmp_path / f"saved{mp}", "native", tmp_path / f"hf{mp}", "hf")
        for path in (tmp_path / "hf").iterdir():
            assert (tmp_path / f"hf{mp}" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
def test_saving_often_with_padding_ends(tmp_path):
    """One small program per array and save, of which XLA's CPU client can hold only so many."""
    code = (
        "import jax; jax.config.update('jax_num_cpu_devices', 8)\n"
        "import numpy as np, mesh_transformer\n"
        "config = {'block': 'gpt2', 'layers': 3, 'd_model': 60, 'n_heads': 5, 'n_vocab': 101}\n"
        "config |= {'seq': 16, 'dtype': 'float32', 'cores_per_replica': 8, 'tpu_size': 8}\n"
        "network = mesh_transformer.CausalTransformer(config)\n"
        "tokens = np.random.default_rng(0).integers(0, 101, (1, network.batch_size, 17))\n"
        "for _ in range(20):\n"
        "    network.train({'obs': tokens[..., :-1], 'target': tokens[..., 1:]})\n"
        "    network.saved_state()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
