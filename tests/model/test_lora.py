"""LoRA adapters: training on every mesh, merging, and checkpoints without the base model."""

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from mesh_transformer.checkpoint import conversion, loading, native_state
from mesh_transformer.checkpoint.formats import FORMATS
from mesh_transformer.checkpoint.integrity import host_checksum
from mesh_transformer.checkpoint.native import Checkpoints, find
from mesh_transformer.checkpoint.source import Source
from mesh_transformer.config import Config
from mesh_transformer.families import BLOCKS
from mesh_transformer.generation import programs
from mesh_transformer.mesh.declaration import combine
from mesh_transformer.mesh.devices import make_mesh, named
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import lora
from mesh_transformer.model.loss import train_loss
from mesh_transformer.training import loop, step
from mesh_transformer.transformer_shard import CausalTransformer, load
from mesh_transformer.util import InputError
from tests.conftest import SMALL, random_batch
from tests.support.pages import ROOT
from tests.support.small_run import SEQ, VOCAB, run_values

COMPILED = {
    loading: ("checksums",),
    programs: ("score", "weights"),
    step: ("eval", "logits", "opt_state", "train"),
}


@pytest.fixture(scope="module", autouse=True)
def _compile_once() -> Iterator[None]:
    """Compile each program only once per config, because compilation takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        for module, names in COMPILED.items():
            for name in names:
                function = getattr(module, f"compile_{name}")
                patch.setattr(module, function.__name__, functools.cache(function))
        yield


LORA = {"lora_rank": 2, "lora_alpha": 3.0, "gradient_accumulation_steps": 2, "warmup_steps": 0}


def lora_config(**changes: Any) -> Config:
    return Config(**(SMALL | LORA | changes))


def state_of(config: Config) -> Any:
    """Return a state whose adapters change the model: their second factors are also nonzero."""
    state = jax.tree.map(np.array, step.init_state(config, jax.random.key(0)))
    rng = np.random.default_rng(0)
    for module in state["params"]["layers"].values():
        for name in module:
            if name.endswith("_lora_b"):
                module[name] = rng.normal(scale=0.1, size=module[name].shape).astype(np.float32)
    return state


def trained(config: Config, state: Any, batch: Any) -> tuple[Any, dict[str, float]]:
    """Return the state after one step, and the step's metrics."""
    layout = step.StateLayout(config, make_mesh(config, jax.devices()[: config.tpu_size]))
    state, metrics = step.compile_train(layout)(jax.device_put(state, layout.shardings), batch)
    return jax.tree.map(np.asarray, state), {name: float(x) for name, x in metrics.items()}


def gradients_of_merged_weights(config: Config, state: Any, batch: Any) -> Any:
    """Return the adapters' gradients, computed by merging them into a model without adapters."""

    def loss(adapters: Any, obs: Any, target: Any) -> Any:
        params = combine(state["frozen"], adapters)
        merge = functools.partial(lora.merged, scale=config.lora_scale)
        params |= {"layers": jax.vmap(merge)(params["layers"])}
        return train_loss(params, obs, target, config.merged(), Auto())[0]

    # Microbatches have equal sizes, so the mean over all sequences is the mean of their means.
    sequences = (tokens.reshape(-1, tokens.shape[-1]) for tokens in (batch["obs"], batch["target"]))
    return jax.jit(jax.grad(loss))(state["params"], *sequences)


def assert_close(actual: Any, expected: Any) -> None:
    # f32 sums in a different order.  The largest value is about 1, and Adam's steps are 1e-2.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "split"),
    [
        ("gptj", {"cores_per_replica": 4, "partitioning": "shard_map", "zero": 1}),
        ("geglu", {"cores_per_replica": 8, "partitioning": "jit", "zero": 0}),
        ("gpt2", {"cores_per_replica": 4, "partitioning": "jit", "zero": 3}),
        ("neox", {"cores_per_replica": 4, "partitioning": "shard_map", "zero": 1}),
        ("llama", {"cores_per_replica": 4, "partitioning": "shard_map", "zero": 1}),
        ("llama", {"cores_per_replica": 8, "partitioning": "jit", "zero": 3}),
    ],
)
def test_every_mesh_trains_adapters_like_the_merged_model_without_changing_the_base(block, split):
    targets = list(BLOCKS[block].lora_targets)
    copied = {"key_heads": 2} if block == "llama" else {}
    config = lora_config(block=block, lora_targets=targets, clip_norm=1e9, **copied)
    state, batch = state_of(config), random_batch(config, 2, 4)
    expected, expected_metrics = trained(config, state, batch)
    # The gradients follow from Adam's first moment after one step without clipping.
    gradients = jax.tree.map(lambda mu: mu / (1 - config.adam_b1), expected["opt_state"]["mu"])
    assert_close(gradients, gradients_of_merged_weights(config, state, batch))

    actual, metrics = trained(config.replace(**split, tpu_size=8), state, batch)
    assert_close(actual, expected)
    for name in ("loss", "last_loss", "grad_norm"):
        assert metrics[name] == pytest.approx(expected_metrics[name], abs=1e-5)
    jax.tree.map(np.testing.assert_array_equal, actual["frozen"], state["frozen"])
    unchanged = jax.tree.map(np.array_equal, actual["params"], state["params"])
    assert not any(jax.tree.leaves(unchanged))


def products(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of all matrix products in a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.outvars[0].aval.shape
        for inner in jaxprs_in_params(equation.params):
            yield from products(inner)


def test_gradients_of_the_base_are_not_computed():
    """Check that no matrix product has the shape of a weight of the base.

    Activations have a batch axis, so a product with the shape of a weight is its gradient.
    """

    def gradient_shapes(config: Config) -> set[tuple[int, ...]]:
        state = jax.eval_shape(functools.partial(step.init_state, config), jax.random.key(0))
        batch = random_batch(config, 2, 3)
        function = functools.partial(step.gradients, config=config, par=Auto())
        traced = jax.make_jaxpr(function)(state["params"], state["frozen"], batch)
        shapes = set(products(traced.jaxpr))
        return shapes & {(64, 64), (64, 256), (256, 64), (64, 128), (128, 64)}

    config = lora_config(lora_targets=list(BLOCKS["gptj"].lora_targets))
    assert (
        len(gradient_shapes(config.merged())) == 4
    )  # (128, 64) is missing: the embedding is a lookup
    assert not gradient_shapes(config)


def run_config(folder: Path) -> Config:
    changes = {"tpu_size": 1, "cores_per_replica": 1, "val_batches": 0, "ckpt_every": 100}
    values = run_values(folder, total_steps=2, **changes)
    return Config(**values, lora_rank=2, lora_targets=["q", "o"], lora_alpha=4.0)


def run(config: Config, folder: Path, steps: int, base: Path | None = None) -> CausalTransformer:
    """Train up to step `steps`, resuming if the folder has a checkpoint."""
    network = CausalTransformer(config, devices=jax.devices()[: config.tpu_size], init=False)
    tune = None if base is None else str(base)
    loop.train(network, str(folder), max_steps=steps, tune_model_path=tune)
    return network


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Config]:
    """Return a folder with a base model at step 1, and adapters of that base at step 2."""
    folder = tmp_path_factory.mktemp("runs")
    config = run_config(folder)
    run(config.merged(), folder / "base", 1)
    run(config, folder / "adapters", 2, folder / "base")
    return folder, config


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def logits(network: CausalTransformer) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, SEQ))
    return np.asarray(network.logits(tokens))


@pytest.mark.slow
def test_adapters_are_saved_without_the_base_and_resume_bit_identically(runs, tmp_path):
    folder, config = runs
    before = bytes_of(folder / "base")
    run(config, tmp_path / "halves", 1, folder / "base")
    resumed = run(config, tmp_path / "halves", 2)
    assert resumed.state is not None
    uninterrupted = CausalTransformer(config, devices=jax.devices()[:1], init=False)
    uninterrupted.restore(str(folder / "adapters"))
    jax.tree.map(np.testing.assert_array_equal, resumed.state, uninterrupted.state)
    assert bytes_of(folder / "base") == before

    with Checkpoints(str(folder / "adapters"), read_only=True) as saved:
        stored = {path: leaf for path, leaf in saved.saved(2).leaves.items() if path[0] != "step"}
    names = {path[-1] for path in stored if path[0] == "params"}
    assert names == {f"{name}_lora_{factor}" for name in ("w", "o") for factor in "ab"}
    assert {path[:2] for path in stored if path[0] == "opt_state"} == {
        ("opt_state", "count"),
        ("opt_state", "mu"),
        ("opt_state", "nu"),
    }


def test_gpt_j_adapters_train_less_than_5_percent_of_the_state():
    config = Config.load(str(ROOT / "configs" / "6B_lora_v3-8.json"))

    def trained_bytes(config: Config) -> int:
        state = jax.eval_shape(functools.partial(step.init_state, config), jax.random.key(0))
        trained = jax.tree.leaves((state["params"], state["opt_state"]))
        return sum(x.size * x.dtype.itemsize for x in trained)

    assert trained_bytes(config) < 0.05 * trained_bytes(config.merged())


@pytest.mark.slow
def test_a_merged_export_has_the_logits_of_the_adapters(runs, tmp_path):
    folder, config = runs
    adapted = load(folder / "adapters", config)
    expected = logits(adapted)
    assert np.abs(expected - logits(load(folder / "base", config.merged()))).max() > 1e-3
    for kind in FORMATS:
        path = tmp_path / kind
        written = conversion.convert(folder / "adapters", "native", path, kind)
        assert written.config.lora_rank == 0
        assert not written.optimizer
        # A merged weight is rounded to f32 as one value, a weight and its adapter separately.
        exported = logits(load(path, config.merged()))
        np.testing.assert_allclose(exported, expected, rtol=0, atol=1e-5)
    assert "lora" not in find(str(tmp_path / "native")).aux

    merged = load(folder / "adapters", config.merged())  # same tolerance: logprobs are as large
    np.testing.assert_allclose(logits(merged), expected, rtol=0, atol=1e-5)
    tokens = np.arange(12).reshape(2, 6)
    scores = [network.score(tokens, 0).logprob for network in (adapted, merged)]
    np.testing.assert_allclose(scores[0], scores[1], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_missing_or_different_base_is_reported_in_one_line(runs, tmp_path):
    folder, config = runs
    adapters, moved, other = (tmp_path / name for name in ("adapters", "moved", "other"))
    shutil.copytree(folder / "adapters", adapters)
    other_config, state = conversion.read(Source(folder / "base", "native"))
    state["params"]["proj"]["projection/head"]["b"][3] += 0.01
    native_state.write(str(other), state, other_config)
    base = folder / "base" / "step_1"
    network = CausalTransformer(config, devices=jax.devices()[:1], init=False)
    shutil.move(folder / "base", moved)
    try:
        gone = rf"its adapters were trained on is not at {base} \(no checkpoint there\)[,;]"
        with pytest.raises(InputError, match=rf"{gone} put it back"):
            load(adapters, config)
        with pytest.raises(InputError, match=rf"{gone} put it back"):
            conversion.convert(adapters, "native", tmp_path / "merged", "hf")
        leaf = "proj/projection/head/b"
        changed = rf"{gone} {other}/step_1 \(another model: leaf {leaf} differs\); put it back"
        with pytest.raises(InputError, match=changed):
            network.restore(str(adapters), str(other))
        with pytest.raises(
            InputError,
            match=rf"not trained on the base model that was read \(leaf {leaf} differs\)",
        ):
            conversion.convert(adapters, "native", tmp_path / "merged", "hf", base=other)
        assert not (tmp_path / "merged").exists()
        with pytest.raises(
            InputError, match=rf"{gone} {adapters}/step_\d+ \(adapters, not a base model\)"
        ):
            network.restore(str(adapters), str(adapters))
        conversion.convert(adapters, "native", tmp_path / "merged", "hf", base=moved)
        network.restore(str(adapters), str(moved))
        network.step = 3
        network.save(str(adapters))
        network.close()
    finally:
        shutil.move(moved, folder / "base")
    assert find(str(adapters)).aux["lora"]["base"] == str(moved / "step_1")


def test_contradictory_adapter_settings_are_refused(runs, tmp_path):
    folder, config = runs
    message = "lora_rank is 2, but adapters are trained on an existing model; load one first"
    with pytest.raises(InputError, match=message):
        run(config, tmp_path, 1)
    with pytest.raises(InputError, match=r"a run that trains a whole model .* has lora_rank 2"):
        run(config, folder / "base", 3)
    with pytest.raises(InputError, match=r"a run that trains adapters .* has lora_rank 0"):
        run(config.merged(), folder / "adapters", 3)
    with pytest.raises(InputError, match=r"has lora_alpha 4.0, but the config has 1.0"):
        run(config.replace(lora_alpha=1.0), folder / "adapters", 3)
    with pytest.raises(InputError, match=r"--base requires adapters, but .* is a whole model"):
        conversion.convert(folder / "base", "native", tmp_path / "new", "hf", base=folder / "base")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checksum_on_a_mesh_equals_the_sum_over_parts_on_the_host(dtype):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 8, 20)).astype(np.float32)
    mesh = make_mesh(lora_config(cores_per_replica=4))
    placed = jax.device_put(values, named(mesh, jax.sharding.PartitionSpec(None, "mp", None)))
    mesh_checksum = int(loading.compile_checksums(mesh, dtype)({"w": placed})["w"])
    parts = [host_checksum(part, at * 160, dtype) for at, part in enumerate(values)]
    assert mesh_checksum == sum(parts) % 2**32
    swapped = values.copy()
    swapped[0, 0, :2] = values[0, 0, 1::-1]
    assert host_checksum(swapped, dtype=dtype) != mesh_checksum
