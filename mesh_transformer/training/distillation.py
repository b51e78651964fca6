"""Distillation: a student learns the probabilities that a teacher gives to every token.

The teacher is another model on the same mesh.  Its parameters are an argument of the training step,
so they belong to no state, and are neither trained nor saved.  Or its probabilities of the most
likely tokens are in the records (see `data.teacher`).
"""

import dataclasses
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import Array

from mesh_transformer.config import Config
from mesh_transformer.config_model import Architecture
from mesh_transformer.mesh.declaration import map_declared
from mesh_transformer.mesh.parallel import Parallel
from mesh_transformer.mesh.program import Layout
from mesh_transformer.model import transformer
from mesh_transformer.model.loss import LossWeights, Teacher, distillation_losses, stored_losses
from mesh_transformer.model.transformer import Params
from mesh_transformer.training.objectives import PREFIX
from mesh_transformer.util import InputError

NAMES = (f"{PREFIX}cross_entropy", f"{PREFIX}kl")  # of the metrics of a step
StudentLayout = TypeVar("StudentLayout", bound=Layout)
# Keys that concern only the student.
_STUDENT_ONLY: dict[str, Any] = {"teacher": None, "offload": "none", "original_bias_copies": 1}
_STUDENT_ONLY |= {f"dropout_{part}": 0.0 for part in ("embedding", "attention", "residual")}


def teacher_layout(layout: StudentLayout, teacher: Config, where: str) -> StudentLayout:
    """Return the layout of a teacher on the mesh of its student.

    Its config has the teacher's architecture, and otherwise the keys of the student's run.  Its
    parameters are in the compute dtype.

    Args:
      layout: the student's layout.
      where: the path of the teacher, for error messages.

    Raises:
      InputError: if the teacher cannot teach the student.
    """
    student = layout.config
    if teacher.n_vocab != student.n_vocab:
        raise InputError(
            f"teacher {where}: it has {teacher.n_vocab} tokens (n_vocab), and the student "
            f"{student.n_vocab}; choose a teacher with the student's tokenizer and n_vocab"
        )
    if teacher.seq < student.seq:
        raise InputError(
            f"teacher {where}: its sequences have at most {teacher.seq} tokens (seq), and the "
            f"student's {student.seq}; lower the student's seq"
        )
    own = {field.name: getattr(teacher, field.name) for field in dataclasses.fields(Architecture)}
    rest = {"zero": 3 if student.zero == 3 else 0, "early_cast": student.dtype == "bfloat16"}
    try:
        return layout.of(student.merged().for_inference().replace(**own, **rest, **_STUDENT_ONLY))
    except InputError as error:
        raise InputError(f"teacher {where}: {error}") from None


def teacher_of(params: Params, config: Config, par: Parallel) -> Teacher:
    """Return the teacher from its parameters between steps; call this once per step."""
    declared = transformer.declarations(config)
    frozen = map_declared(lambda d: dataclasses.replace(d, frozen=True), declared)
    return Teacher(par.compute_copy(params, frozen, config.dtype), config, par)


def loss(
    params: Params,
    tokens_BT: Array,
    targets_BT: Array,
    weights: LossWeights | None,
    segments_BT: Array | None,
    key_B: Array | None,
    alternatives: tuple[Array, Array] | None = None,
    *,
    config: Config,
    par: Parallel,
    teacher: Teacher | None,
) -> tuple[Array, Array]:
    """Return the mean loss of a microbatch, and its metrics: means of `NAMES`, then shares of 1.

    The loss is that of `loss.train_loss`, in which the weight of the cross entropy is
    1 - `distill_weight`, plus `distill_weight` times the KL divergence.  The divergence is
    multiplied by the squared temperature, so that its gradients do not depend on it much (Hinton et
    al. 2015, section 2.1).

    Args:
      weights, key_B: see `loss.loss_weights` and `loss.losses`.
      alternatives: the batch's `TEACHER_KEYS`, [B, T x K]; used if there is no `teacher`.
    """
    sample = tokens_BT, targets_BT
    rest = config, par, segments_BT, key_B
    if teacher is not None:
        result, kl_BT = distillation_losses(params, teacher, *sample, *rest)
    else:
        assert alternatives is not None
        ids_BTK, logprobs_BTK = (x.reshape(*tokens_BT.shape, -1) for x in alternatives)
        result, kl_BT = stored_losses(params, *sample, ids_BTK, logprobs_BTK, *rest)
    every_BT = jnp.ones(kl_BT.shape) if weights is None else weights.every_BT

    def mean(x_BT: Array) -> Array:
        return jnp.mean(every_BT * x_BT)

    cross_entropy, kl = mean(result.loss_BT), mean(kl_BT)
    total = (1 - config.distill_weight) * cross_entropy
    total += config.distill_weight * config.distill_temperature**2 * kl
    total += config.z_loss * mean(jnp.square(result.log_sum_BT))
    one = jnp.ones(())
    return total, jnp.stack((cross_entropy, kl, one, one))
