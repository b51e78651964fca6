"""Distillation: against torch, on every mesh, and over whole runs."""

import functools
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.data.batches import whole_batch
from mesh_transformer.data.tfrecords import write_set
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import transformer
from mesh_transformer.performance import plan
from mesh_transformer.performance.roofline import traffic_of
from mesh_transformer.performance.topology import slice_named
from mesh_transformer.training import distillation, loop, step
from mesh_transformer.transformer_shard import CausalTransformer, load
from mesh_transformer.util import InputError
from tests.conftest import SMALL, random_batch
from tests.model.test_transformer import weights
from tests.training.test_step import fresh_state, mesh_of

VOCAB = 126  # which 4 shards pad to 128
TINY = SMALL | {"n_vocab": VOCAB, "loss_chunk": 6, "clip_norm": 1e9, "weight_decay": 0.0}
# Another family, width and number of layers.
LARGE = Config.from_dict(
    SMALL
    | {"block": "llama", "layers": 3, "d_model": 48, "n_heads": 4, "key_heads": 2, "seq": 32}
    | {"n_vocab": VOCAB, "optimizer": "adafactor", "seed": 5}
)


def config_of(**changes: Any) -> Config:
    values = {"teacher": "large", "distill_weight": 0.3, "distill_temperature": 2.5}
    return Config.from_dict(TINY | values | changes)


def layouts(config: Config, dp: int, mp: int) -> tuple[step.StateLayout, step.StateLayout]:
    """Return the layouts of the student and of its teacher."""
    layout = step.StateLayout(config, mesh_of(dp, mp))
    return layout, distillation.teacher_layout(layout, LARGE, "large")


def batch_of(config: Config) -> dict[str, np.ndarray]:
    batch = random_batch(config, 2, 8)
    mask = np.random.default_rng(1).random(batch["obs"].shape) < 0.6
    return batch | {"loss_mask": mask.astype(np.uint8)}


def run(config: Config, dp: int = 1, mp: int = 1, batch: Any = None) -> tuple[Any, Any]:
    """Return the metrics and the gradient of a step."""
    layout, teachers, params = step.StateLayout(config, mesh_of(dp, mp)), [], []
    if config.teacher_path is not None:
        layout, own = layouts(config, dp, mp)
        whole = own.padded({"params": jax.tree.map(jnp.asarray, weights(LARGE))})["params"]
        teachers, params = [own], [jax.device_put(whole, own.shardings["params"])]
    base = config.replace(zero=0, partitioning="jit", cores_per_replica=1, virtual_mesh=None)
    state = jax.tree.map(jax.device_put, layout.padded(fresh_state(base)), layout.shardings)
    train = step.compile_train(layout, None, *teachers)
    batch = batch_of(config) if batch is None else batch
    state, metrics = train(state, *whole_batch(config, batch), *params)
    moments = layout.unpadded({"opt_state": state["opt_state"]})["opt_state"]["mu"]
    gradient = jax.tree.map(lambda mu: np.asarray(mu) / (1 - config.adam_b1), moments)
    return {name: float(value) for name, value in metrics.items()}, gradient


@functools.cache
def one_device(**changes: Any) -> tuple[Any, Any]:
    return run(config_of(**changes, partitioning="jit"))


def assert_same(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
    (metrics, gradient), (other, others) = actual, expected
    assert metrics.keys() == other.keys()
    for name in metrics.keys() - {"grad_norm_micro", "grad_square_micro"}:  # of parts of a batch
        np.testing.assert_allclose(metrics[name], other[name], rtol=tolerance, err_msg=name)
    largest = max(float(np.abs(x).max()) for x in jax.tree.leaves(others))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * largest),
        gradient,
        others,
    )


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", ["forward", "reverse"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_losses_and_gradients_are_torchs(kind: str, temperature: float) -> None:
    torch = pytest.importorskip("torch")
    changes = {"distill_kl": kind, "distill_temperature": temperature}
    config = config_of(**changes, partitioning="jit")
    metrics, gradient = one_device(**changes)
    params, batch = jax.tree.map(jnp.asarray, fresh_state(config)["params"]), batch_of(config)
    mask = torch.tensor(batch["loss_mask"].astype(np.float64))
    rows = {key: x.reshape(-1, config.seq) for key, x in batch.items()}

    with jax.default_matmul_precision("highest"):
        own, pull = jax.vjp(
            lambda params: transformer.logits(params, rows["obs"], config, Auto()), params
        )
        theirs = transformer.logits(weights(LARGE), rows["obs"], LARGE, Auto())
    student = torch.tensor(np.asarray(own, np.float64), requires_grad=True)
    teacher = torch.tensor(np.asarray(theirs, np.float64))
    targets = torch.tensor(rows["target"].astype(np.int64))
    p, q = (torch.log_softmax(x / temperature, dim=-1) for x in (teacher, student))
    p, q = (p, q) if kind == "forward" else (q, p)
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(dim=-1)
    ce = torch.nn.functional.cross_entropy(student.mT, targets, reduction="none")
    z = torch.square(torch.logsumexp(student, -1) - student.max(dim=-1).values.detach())
    mean_kl, mean_ce, mean_z = ((x * mask.view(x.shape)).sum() / mask.sum() for x in (kl, ce, z))
    loss = 0.7 * mean_ce + 0.3 * temperature**2 * mean_kl + config.z_loss * mean_z
    loss.backward()
    expected = {"loss": loss, "objective/kl": mean_kl, "objective/cross_entropy": mean_ce}
    for name, value in expected.items():  # f32 against f64
        np.testing.assert_allclose(metrics[name], value.item(), rtol=1e-5, err_msg=name)
    (others,) = pull(jnp.asarray(student.grad.numpy(), jnp.float32))
    assert_same(({}, gradient), ({}, others), 1e-5)


MESHES = [
    ("forward", {"partitioning": "shard_map"}, 2, 4),
    ("reverse", {"partitioning": "jit", "zero": 3}, 2, 4),
    ("reverse", {"partitioning": "shard_map", "zero": 3, "shard_activations": True}, 4, 2),
    ("reverse", {"partitioning": "shard_map"}, 1, 8),
    ("forward", {"partitioning": "jit", "zero": 1}, 1, 2),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("kind", "changes", "dp", "mp"), MESHES)
def test_every_mesh_has_the_results_of_one_device(
    kind: str, changes: Any, dp: int, mp: int
) -> None:
    config = config_of(distill_kl=kind, cores_per_replica=mp, tpu_size=dp * mp, **changes)
    # f32 sums in another order.
    assert_same(run(config, dp, mp), one_device(distill_kl=kind))


@pytest.mark.slow
def test_virtual_mesh_has_equal_bits() -> None:
    config = config_of(virtual_mesh=[2, 2])
    one, four = run(config), run(config.replace(cores_per_replica=2, tpu_size=4), 2, 2)
    jax.tree.map(np.testing.assert_array_equal, one, four)
    assert_same(one, one_device(distill_kl="forward"))


def test_ramp_counts_only_the_microbatches_it_uses() -> None:
    ramp = config_of(partitioning="jit", gradient_accumulation_steps=4, batch_ramp_steps=5)
    assert_same(run(ramp), one_device(distill_kl="forward"))


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient(kind: str) -> None:
    config = config_of(distill_kl=kind, distill_weight=1.0, z_loss=0.0, partitioning="jit")
    layout, _ = layouts(config, 1, 1)
    own = distillation.teacher_layout(layout, config, "itself")
    state = jax.tree.map(jnp.asarray, fresh_state(config.replace(teacher=None)))
    params = jax.tree.map(jnp.copy, state["params"])
    state, metrics = step.compile_train(layout, None, own)(state, batch_of(config), params)
    # The f32 rounding of log-probabilities; the two logits have equal bits.
    assert abs(float(metrics["objective/kl"])) < 1e-6
    assert float(metrics["grad_norm"]) < 1e-6


STORED: dict[str, Any] = {"teacher": "records", "distill_temperature": 1.0}


def stored_batch(config: Config, most: int, known: float = 0.8) -> dict[str, np.ndarray]:
    """Return a batch with the `most` likely tokens of a random teacher, at some positions."""
    batch, rng = batch_of(config), np.random.default_rng(2)
    shape = batch["obs"].shape
    logits = jnp.asarray(rng.normal(size=(*shape, VOCAB)), jnp.float32)
    logprobs = np.asarray(jax.nn.log_softmax(logits))
    ids = np.argsort(-logprobs, axis=-1)[..., :most]
    logprobs = np.take_along_axis(logprobs, ids, axis=-1)
    logprobs[rng.random(shape) >= known] = -np.inf
    logprobs[0, 0, :, -1] = -np.inf  # one less is known
    flat = (*shape[:-1], -1)
    own = {"teacher_ids": ids.reshape(flat), "teacher_logprobs": logprobs.reshape(flat)}
    return batch | own


def run_stored(config: Config, dp: int = 1, mp: int = 1, most: int = 5) -> tuple[Any, Any]:
    """Return the metrics and the gradient of a step on stored probabilities."""
    return run(config, dp, mp, stored_batch(config, most))


@pytest.mark.parametrize("most", [5, VOCAB])
def test_losses_of_stored_probabilities_are_torchs(most: int) -> None:
    """Also if all tokens are known, when it is the divergence over the whole vocabulary."""
    torch = pytest.importorskip("torch")
    config = config_of(**STORED, partitioning="jit")
    metrics, gradient = run_stored(config, most=most)
    params, batch = (
        jax.tree.map(jnp.asarray, fresh_state(config)["params"]),
        stored_batch(config, most),
    )
    mask = torch.tensor(batch["loss_mask"].astype(np.float64))
    rows = {key: batch[key].reshape(-1, config.seq) for key in ("obs", "target")}
    with jax.default_matmul_precision("highest"):
        own, pull = jax.vjp(
            lambda params: transformer.logits(params, rows["obs"], config, Auto()), params
        )
    student = torch.tensor(np.asarray(own, np.float64), requires_grad=True)
    shape = (*rows["obs"].shape, most)
    ids = torch.tensor(batch["teacher_ids"].reshape(shape))
    logp = torch.tensor(batch["teacher_logprobs"].reshape(shape).astype(np.float64))
    logq = torch.log_softmax(student, dim=-1).gather(-1, ids)
    known = torch.isfinite(logp)
    p, q = logp.exp(), torch.where(known, logq.exp(), 0)
    listed = torch.where(known, p * (torch.where(known, logp, 0) - logq), 0).sum(-1)
    rest_p, rest_q = 1 - p.sum(-1), 1 - q.sum(-1)
    has_rest = (rest_p > 1e-5) & known.any(-1)
    rest = torch.where(
        has_rest, rest_p * (rest_p.clamp(min=1e-9) / rest_q.clamp(min=1e-9)).log(), 0
    )
    targets = torch.tensor(rows["target"].astype(np.int64))
    ce = torch.nn.functional.cross_entropy(student.mT, targets, reduction="none")
    z = torch.square(torch.logsumexp(student, -1) - student.max(dim=-1).values.detach())
    kl = listed + rest
    mean_kl, mean_ce, mean_z = ((x * mask.view(x.shape)).sum() / mask.sum() for x in (kl, ce, z))
    loss = 0.7 * mean_ce + 0.3 * mean_kl + config.z_loss * mean_z
    loss.backward()
    expected = {"loss": loss, "objective/kl": mean_kl, "objective/cross_entropy": mean_ce}
    for name, value in expected.items():  # f32 against f64
        np.testing.assert_allclose(metrics[name], value.item(), rtol=2e-5, err_msg=name)
    (others,) = pull(jnp.asarray(student.grad.numpy(), jnp.float32))
    assert_same(({}, gradient), ({}, others), 2e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("changes", "dp", "mp"), [mesh[1:] for mesh in MESHES])
def test_stored_probabilities_give_the_same_on_every_mesh(changes: Any, dp: int, mp: int) -> None:
    config = config_of(**STORED, cores_per_replica=mp, tpu_size=dp * mp, **changes)
    assert_same(run_stored(config, dp, mp), run_stored(config_of(**STORED, partitioning="jit")))


@pytest.mark.slow
def test_stored_probabilities_have_equal_bits_on_a_virtual_mesh() -> None:
    config = config_of(**STORED, virtual_mesh=[2, 2])
    four = run_stored(config.replace(cores_per_replica=2, tpu_size=4), 2, 2)
    jax.tree.map(np.testing.assert_array_equal, run_stored(config), four)


def test_no_vocabulary_of_stored_probabilities_crosses_the_mesh() -> None:
    """They add K numbers per position, and that of the target."""
    config = config_of(**STORED, cores_per_replica=4, tpu_size=8, loss_chunk=8)
    layout, most = step.StateLayout(config, mesh_of(2, 4)), 5

    def sent(layout: step.StateLayout, batch: dict[str, np.ndarray]) -> int:
        train: Any = step.compile_train(layout)
        return traffic_of(train.lower(layout.abstract, batch).compile().as_text(), layout).sent

    stored = {key: x[:1] for key, x in stored_batch(config, most).items()}
    plain = {key: x for key, x in stored.items() if "teacher" not in key}
    more = sent(layout, stored) - sent(layout.of(config.replace(teacher=None)), plain)
    # As below; over dp, the means of the metrics.
    assert more == 1.5 * 4 * 4 * config.seq * (most + 1) + 4 * 4


def test_no_vocabulary_crosses_the_mesh() -> None:
    """A teacher adds the collectives of its layers, and five numbers per position."""
    config = config_of(cores_per_replica=4, tpu_size=8, loss_chunk=8)
    layout, own = layouts(config, 2, 4)
    batch = random_batch(config, 1, 8)

    def sent(layout: step.StateLayout, *teacher: step.StateLayout) -> int:
        train: Any = step.compile_train(layout, None, *teacher)
        params = [own.abstract["params"] for own in teacher]
        lowered = train.lower(layout.abstract, batch, *params)
        return traffic_of(lowered.compile().as_text(), layout).sent

    # A ring sends 2 (n - 1) / n times an array to all-reduce it: over mp, the residual stream after
    # the embedding and after both parts of each layer, and five numbers per position; over dp, the
    # means of the metrics.
    stream = 4 * 4 * config.seq * LARGE.d_model
    numbers = 5 * 4 * 4 * config.seq
    more = sent(layout, own) - sent(layout.of(config.replace(teacher=None)))
    assert more == 1.5 * ((1 + 2 * LARGE.layers) * stream + numbers) + 4 * 4


@pytest.fixture
def large(tmp_path: Path) -> str:
    """Save a teacher, and return its folder."""
    return saved(tmp_path / "large", LARGE)


def saved(folder: Path, config: Config) -> str:
    network = CausalTransformer(config)
    network.save(str(folder))
    network.close()
    return str(folder)


@pytest.fixture
def records(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    rows = ({"text": rng.integers(0, VOCAB, TINY["seq"] + 1)} for _ in range(40))
    return write_set(tmp_path, "texts", rows)[1]


RUN: dict[str, Any] = {"total_steps": 4, "ckpt_every": 2, "val_every": 4, "val_batches": 1}
RUN |= {"lr": 1e-3, "per_replica_batch": 2, "keep_n": 9}


def train(config: Config, folder: Path, **options: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    network = CausalTransformer(config, init=False)
    loop.train(network, folder, on_row=rows.append, **options)
    return [
        {key: x for key, x in row.items() if "second" not in key and "_per_" not in key}
        for row in rows
    ]


@pytest.mark.quick(1)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_resumed_run_keeps_its_bits(large: str, records: str, tmp_path: Path, rank: int) -> None:
    sets = {"train_set": records, "val_set": {"own": records}, "teacher": large}
    config = config_of(**RUN | sets, lora_rank=rank)
    base = saved(tmp_path / "base", config.replace(teacher=None, lora_rank=0)) if rank else None
    whole = train(config, tmp_path / "whole", tune_model_path=base)
    first = train(config, tmp_path / "parts", tune_model_path=base, max_steps=2)
    assert first + train(config, tmp_path / "parts", tune_model_path=base) == whole
    row = whole[0]
    mixed = 0.7 * row["train/cross_entropy"] + 0.3 * 2.5**2 * row["train/kl"]
    np.testing.assert_allclose(row["train/loss"], mixed, rtol=1e-2)  # the z-loss is not in it
    if not rank:  # a few steps of adapters learn too little
        assert whole[-1]["train/kl"] < row["train/kl"]
    # Validation is the cross entropy alone, which the student has without its teacher, too.
    shutil.rmtree(large)
    student = load(str(tmp_path / "whole"))
    losses = student.eval(random_batch(config, 2))["all_loss"]
    assert np.isfinite(losses).all()
    assert abs(whole[-1]["val/loss_own"] - np.log(VOCAB)) < 1
    assert not list((tmp_path / "whole").rglob("*teacher*"))


def test_unusable_teachers_are_refused(large: str, records: str, tmp_path: Path) -> None:
    def message(**changes: Any) -> str:
        values = RUN | {"train_set": records, "teacher": large} | changes
        with pytest.raises(InputError) as error:
            train(config_of(**values), tmp_path / "run")
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "it has 126 tokens (n_vocab), and the student 128" in message(n_vocab=128)
    assert "at most 32 tokens (seq), and the student's 48" in message(seq=48)
    assert "created with the tokenizer gpt2" in message(tokenizer="bytes")
    assert "nowhere" in message(teacher=str(tmp_path / "nowhere"))
    assert "objective is dpo, but teacher is" in message(objective="dpo")
    assert "the records have no probabilities of a teacher" in message(**STORED)
    network = CausalTransformer(config_of(**STORED))
    with pytest.raises(InputError, match="the batch has no 'teacher_ids'"):
        network.train(batch_of(network.config))
    both = stored_batch(network.config, 2)
    for wrong, text in (
        ({"teacher_ids": both["teacher_ids"][..., 1:]}, "expected both to be"),
        ({"teacher_ids": both["teacher_ids"] + VOCAB}, "outside the vocabulary"),
    ):
        with pytest.raises(InputError, match=text):
            network.train(both | wrong)
    both.pop("teacher_logprobs")
    with pytest.raises(InputError, match="no 'teacher_logprobs'; give both or neither"):
        network.train(both)
    network = CausalTransformer(config_of(), init=False)
    with pytest.raises(InputError, match="the config has a teacher"):
        network.set_objective(lambda texts: texts.sum_BNK)
    with pytest.raises(InputError, match="but this command loads no teacher"):
        step.compile_train(step.StateLayout(config_of(), mesh_of(1, 1)))


@pytest.mark.slow
def test_plans_count_stored_probabilities() -> None:
    config, devices = config_of(**STORED).replace(cores_per_replica=2), slice_named("cpu-2")
    taught, plain = (plan.plan(x, devices) for x in (config, config.replace(teacher=None)))
    assert taught.state_bytes == plain.state_bytes
    assert taught.peak_bytes > plain.peak_bytes


def test_plans_count_the_teacher() -> None:
    config, devices = config_of(teacher="large", seq=16), slice_named("cpu-2")
    config = config.replace(cores_per_replica=2)
    taught = plan.plan(config, devices, teacher=LARGE)
    plain = plan.plan(config.replace(teacher=None), devices)
    size = sum(x.size for x in jax.tree.leaves(weights(LARGE)))
    assert taught.flops == plain.flops
    assert (
        2 * size < taught.state_bytes - plain.state_bytes < 3 * size
    )  # half of 4 bytes, and norms
    assert taught.peak_bytes - plain.peak_bytes > taught.state_bytes - plain.state_bytes
