"""The state of a training run, and the training, evaluation and logits steps on a mesh."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer.config import Config
from mesh_transformer.data.batches import TEACHER_KEYS, VALUE_KEYS
from mesh_transformer.mesh.declaration import (
    Declaration,
    combine,
    is_declaration,
    map_declared,
    partition,
    resized,
)
from mesh_transformer.mesh.devices import abstract, named
from mesh_transformer.mesh.host_memory import device_copies, in_host
from mesh_transformer.mesh.parallel import Parallel
from mesh_transformer.mesh.program import Layout, compiler_options
from mesh_transformer.mesh.virtual import on_every_device
from mesh_transformer.model import matrices, transformer
from mesh_transformer.model.attention import attention_backend, is_ring
from mesh_transformer.model.block_attention import check_lengths
from mesh_transformer.model.casts import to_bf16, to_f32
from mesh_transformer.model.dropout import sequence_keys
from mesh_transformer.model.loss import Teacher, loss_weights, losses, train_loss
from mesh_transformer.model.transformer import Params
from mesh_transformer.training import distillation, offload, spikes
from mesh_transformer.training.objectives import (
    Head,
    objective_loss,
    objective_weights,
    own_metrics,
)
from mesh_transformer.training.optimizer import Optimizer
from mesh_transformer.training.schedule import learning_rate
from mesh_transformer.util import InputError

State = dict[str, Any]  # the state of a training run; `init_state` describes its entries
Batch = dict[str, Array]


def init_state(
    config: Config,
    key: Array,
    mp: int = 1,
    init: Callable[[Array], Any] | None = None,
) -> State:
    """Return a fresh training state, made of global arrays.

    Args:
      init: a function from the key to fresh parameters (default: `transformer.init`).
      mp: the number of shards; the arrays are padded for a mesh that splits the model over as many.

    Returns:
      A dict with these keys:
        params: the trained parameters.
        frozen: all other parameters, in the compute dtype because they are never updated, or with
          `frozen_bits` partly quantized.  Empty unless the config sets `lora_rank`.
        opt_state: the optimizer's state (see `update_rules.Rule`).
        step: the number of completed updates.
        norms: the gradient norms of the last 128 steps, if the config sets `skip_spikes`.
        sequences: the number of sequences consumed so far, if the schedule counts tokens.
    """
    declared = transformer.declarations(config)
    fresh = init or functools.partial(transformer.init, config)
    padded = map_declared(lambda d, x: resized(x, d.padded(mp)), declared, fresh(key))
    params, frozen = partition(declared, padded)
    frozen = jax.tree.map(lambda x: x.astype(config.dtype), frozen)
    return {
        "params": to_bf16(params) if config.early_cast else params,
        "frozen": transformer.quantized(frozen, config),
        "opt_state": Optimizer(config, transformer.trained(config)).init(params),
        **history(config),
    }


def history(config: Config) -> State:
    """Return the initial values of the entries that summarise the run's earlier steps.

    These are `step` and, with some configs, `norms` and `sequences`; see `init_state`.
    """
    entries: State = {"step": jnp.zeros((), jnp.int32)}
    if config.skip_spikes:
        entries["norms"] = spikes.fresh_norms()
    if config.schedule_in_tokens:
        entries["sequences"] = jnp.zeros((), jnp.int32)
    return entries


def all_params(state: State) -> Any:
    """Return the trained and the frozen parameters of a state as one tree.

    `state` may also be a tree of the same structure, such as `StateLayout.specs`.
    """
    return combine(state["frozen"], state["params"])


def saved_part(state: State) -> State:
    """Return the part of a state that checkpoints store: everything but the frozen parameters."""
    return {key: value for key, value in state.items() if key != "frozen"}


@dataclass(frozen=True)
class StateLayout(Layout):
    """How the training state of a config is laid out on a mesh between steps, and in checkpoints.

    Raises:
      InputError: at construction, if the config enables ZeRO, but ZeRO cannot split some matrix
        over dp, or if a matrix cannot be quantized to `frozen_bits`.
    """

    def __post_init__(self) -> None:
        if self.config.frozen_bits == 4:
            layers = transformer.declarations(self.config)["layers"]
            matrices.check_groups(layers, self.par.shards, "frozen_bits")
        if (cp := self.par.cp) > 1 and self.attention_choices["ring"]:
            drops = self.config.dropout_attention > 0
            check_lengths((self.config.seq, *self.config.length_buckets), cp, drops=drops)
        if not self.config.zero:
            return
        dp = self.par.dp
        declared = jax.tree_util.tree_leaves_with_path(self.declared, is_leaf=is_declaration)
        for path, declaration in declared:
            is_matrix = declaration.decay and not declaration.adapter
            if is_matrix and declaration.zero_axis(dp) is None:
                raise InputError(
                    f"config: zero is {self.config.zero}, but ZeRO cannot split the parameter "
                    f"{jax.tree_util.keystr(path)} of shape {declaration.shape} over dp {dp}: dp "
                    "must divide an axis that mp does not split; set zero to 0, or change the mesh"
                )

    @functools.cached_property
    def declared(self) -> Params:
        """The declarations of the arrays that hold all parameters; see `transformer.stored`."""
        return transformer.stored(self.config)

    @property
    def attention(self) -> str:
        """The backend for attention over whole sequences; see `attention_backend`."""
        return attention_backend(self.config, self.mesh.devices.flat[0], self.par.cp)

    @property
    def attention_choices(self) -> dict[str, Any]:
        """The choices of `partitioned` for attention over whole sequences."""
        device, cp = self.mesh.devices.flat[0], self.par.cp
        return {"attention": self.attention, "ring": is_ring(self.config, device, cp)}

    @property
    def train_choices(self) -> dict[str, Any]:
        """The choices of `partitioned` for training steps."""
        split_stream = self.config.shard_activations and self.config.shards > 1
        return self.attention_choices | {"split_stream": split_stream}

    @functools.cached_property
    def optimizer(self) -> Optimizer:
        """The optimizer, with the declarations of the trained parameters."""
        return Optimizer(self.config, transformer.trained(self.config))

    @functools.cached_property
    def of_params(self) -> "StateLayout":
        """The layout of the same parameters without the config's optimizer, which training needs.

        An optimizer of the user's is not imported then.
        """
        return self.of(self.config.replace(optimizer="sgd"))

    @functools.cached_property
    def declared_state(self) -> State:
        """The `Declaration` of every leaf of the state."""
        single = Declaration((), P(), decay=False, summed=False)
        moments = jax.tree.map(lambda moment: moment.declaration, self.optimizer.moments())
        return {
            "params": self.optimizer.declared,
            "frozen": transformer.frozen(self.config),
            "opt_state": {"count": single} | moments,
            **dict.fromkeys(self._history, single),
        }

    @property
    def _history(self) -> State:
        return jax.eval_shape(functools.partial(history, self.config))

    def fresh_history(self) -> State:
        """Return the result of `history`, on every device of the mesh."""
        return jax.device_put(history(self.config), NamedSharding(self.mesh, P()))

    @functools.cached_property
    def specs(self) -> State:
        """The `PartitionSpec` of every leaf of the state between steps."""
        at_rest, moments = self.par.at_rest, self.optimizer.moments()
        return {
            "params": at_rest(self.optimizer.declared),
            "frozen": at_rest(self.declared_state["frozen"]),
            "opt_state": {
                "count": P(),
                **jax.tree.map(lambda moment: moment.spec(at_rest(moment.parameter)), moments),
            },
            **dict.fromkeys(self._history, P()),
        }

    @functools.cached_property
    def shardings(self) -> State:
        """The sharding and memory of every leaf of the state between steps."""
        offloaded = {"none": (), "moments": ("opt_state",), "params": ("params", "opt_state")}
        return named(self.mesh, self.specs) | {
            key: in_host(self.mesh, self.specs[key], self.declared_state[key])
            for key in offloaded[self.config.offload]
        }

    @functools.cached_property
    def abstract(self) -> State:
        """The state between steps, as `jax.ShapeDtypeStruct`s with shardings."""
        init = functools.partial(init_state, self.config, mp=self.par.shards)
        return abstract(jax.eval_shape(init, jax.random.key(0)), self.shardings)

    @functools.cached_property
    def stored(self) -> State:
        """The state as checkpoints store it, as `jax.ShapeDtypeStruct`s with shardings."""
        return self.unpadded(self.abstract)

    def unpadded(self, state: State) -> State:
        """Return a state, or a part of it, without the padding of the mesh, for checkpoints.

        Arrays that have no padding are returned unchanged.  Leaves may also be
        `jax.ShapeDtypeStruct`s.
        """
        return self._converted(state, pad=False)

    def padded(self, state: State) -> State:
        """Return a state, or a part of it, with the padding of the mesh; inverts `unpadded`."""
        return self._converted(state, pad=True)

    def _converted(self, state: State, *, pad: bool) -> State:
        mp = self.par.shards

        def one(d: Declaration, own: NamedSharding, leaf: Any) -> Any:
            if d.padded(mp) == d.shape:
                return leaf
            shape = d.padded(mp) if pad else d.shape
            sharding = own if pad else own.update(spec=d.unpadded_spec(own.spec, self.mesh.shape))
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
            # One after the other: see `placement.MOST_IN_FLIGHT`.
            return jax.block_until_ready(_compile_resized(shape, sharding)(leaf))

        return {
            key: map_declared(one, self.declared_state[key], self.shardings[key], leaf)
            for key, leaf in state.items()
        }


@functools.lru_cache(maxsize=256)
def _compile_resized(shape: tuple[int, ...], sharding: NamedSharding) -> Callable[[Array], Array]:
    return jax.jit(functools.partial(resized, shape=shape), out_shardings=sharding)


def gradients(
    params: Any,
    frozen: Any,
    batch: Batch,
    microbatches: Array | None = None,
    *,
    config: Config,
    par: Parallel,
    head: Head | None = None,
    teacher: Teacher | None = None,
) -> tuple[Any, dict[str, Array]]:
    """Return the gradients of `params`, sharded like the state, and the metrics in `MEASURED`.

    With an objective or a teacher, its own metrics follow.

    The gradients are averaged over the microbatches and over dp, with all sums in f32.  If there is
    one microbatch and one replica, nothing is summed, and they are in the compute dtype.

    Args:
      params, frozen: the trained parameters and all other parameters (see `init_state`).
      batch: `obs` and `target` [A, B, T], optionally `loss_mask` and `segment_ids` (see
        `CausalTransformer.train`), and with dropout `key` [A, B] (see `sequence_keys`).  Inside a
        `shard_map`, B counts only the device's sequences.
      microbatches: the number of microbatches to use, from the first (default: all A).
      head: the objective; None for cross entropy.
      teacher: the teacher, if there is one, with parameters for the step.
    """
    declared, fixed = transformer.trained(config), transformer.frozen(config)
    params = par.compute_copy(params, declared, config.dtype)
    frozen = par.compute_copy(frozen, fixed, config.dtype)
    mask, segments = batch.get("loss_mask"), batch.get("segment_ids")
    weights: Any = None
    if head is not None:
        weights = objective_weights(batch["loss_mask"], segments, par, head)
    elif mask is not None:
        weights = loss_weights(mask, par, segments)
    if microbatches is not None:  # the mean of the weights is 1 over the microbatches to use
        weights = jax.tree.map(lambda w: w * (microbatches / len(w)), weights)
    squares = Optimizer(config, declared).squares
    names, own_loss = (), None
    if head is not None:
        names, own_loss = head.names, functools.partial(objective_loss, head=head)
    elif config.teacher is not None:
        names, own_loss = distillation.NAMES, functools.partial(distillation.loss, teacher=teacher)

    def loss_of(params: Any, *sample: Any) -> tuple[Array, Array]:
        whole = combine(frozen, par.mark_varying(params, declared))
        if own_loss is not None:
            return own_loss(whole, *sample, config=config, par=par)
        return train_loss(whole, sample[0], sample[1], config, par, *sample[2:])

    grad_fn = jax.value_and_grad(loss_of, has_aux=True)

    def one(sample: tuple[Any, ...]) -> Any:
        (loss, last_loss), grads = grad_fn(params, *sample)
        square = squares(par.microbatch_grads(to_f32(grads), declared))
        return grads, (loss, last_loss, par.microbatch_total(square, declared))

    def microbatch(sums: Any, sample: tuple[Any, ...]) -> Any:
        grads, measured = one(sample)
        return jax.tree.map(jnp.add, sums, to_f32(grads)), measured

    samples = (batch["obs"], batch["target"], weights, segments, batch.get("key"))
    if head is not None:
        samples += (mask, {key: batch.get(key) for key in VALUE_KEYS})
    elif config.has_stored_teacher:
        samples += (tuple(batch[key] for key in TEACHER_KEYS),)
    accumulation = len(batch["obs"]) if microbatches is None else microbatches
    sums = par.accumulator(params, declared)
    if microbatches is not None:
        size = 4 + 2 * len(names)
        sums, measured = _sum_of_first(microbatch, sums, samples, microbatches, par, size)
    else:
        if accumulation == 1 and par.dp == 1:  # nothing to add
            sums, of_each = one(jax.tree.map(lambda x: x[0], samples))
        else:
            sums, of_each = jax.lax.scan(microbatch, sums, samples)
        loss, last_loss, micro_square = of_each
        measured = _stacked(
            loss.mean(),
            last_loss.mean(axis=range(last_loss.ndim - 1)) if names else last_loss.mean(),
            jnp.sqrt(micro_square).mean(),
            micro_square.mean(),
        )
    grads = par.mean(jax.tree.map(lambda g: g / accumulation, sums), declared)
    if weights is not None:
        measured = jnp.append(measured, jax.tree.leaves(weights)[0].mean())
    loss, last_loss, norm_micro, square_micro, *rest = par.mean_over_dp(measured)
    own = {name: rest[i] / rest[i + len(names)] for i, name in enumerate(names)}
    mean_weight = rest[-1:]
    return grads, own | {
        "loss": loss,
        "last_loss": last_loss,
        "grad_norm": jnp.sqrt(par.total(squares(grads), declared)),
        "grad_norm_micro": norm_micro,
        "grad_square_micro": square_micro,
        "counted": jnp.float32(1) if weights is None else jnp.sign(mean_weight[0]),
    }


def _sum_of_first(
    microbatch: Callable[..., Any],
    sums: Any,
    samples: Any,
    microbatches: Array,
    par: Parallel,
    size: int,
) -> tuple[Any, Array]:
    """Accumulate gradients and metrics over the first `microbatches` of `samples`.

    The number of iterations is not known at compile time, so that one program serves all sizes of
    a batch.

    Args:
      microbatch: see `gradients`.
      sums: the gradient sums to add to.
      size: the number of metrics, see `_stacked`.

    Returns:
      The new sums, and the means over microbatches of `_stacked`.
    """

    def body(index: Array, carry: Any) -> Any:
        sums, totals = carry
        sample = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, False), samples)
        sums, (loss, last_loss, square) = microbatch(sums, sample)
        return sums, totals + _stacked(loss, last_loss, jnp.sqrt(square), square)

    totals = par.zeros((size,), jnp.float32, "dp")
    sums, totals = jax.lax.fori_loop(0, microbatches, body, (sums, totals))
    return sums, totals / microbatches


def _stacked(loss: Array, last_loss: Array, norm: Array, square: Array) -> Array:
    """Return the metrics of microbatches as a vector.

    With an objective or a teacher, `last_loss` is a vector of its metrics, which follow the others,
    and the loss takes its place.
    """
    if not last_loss.ndim:
        return jnp.stack((loss, last_loss, norm, square))
    return jnp.concatenate((jnp.stack((loss, loss, norm, square)), last_loss))


MEASURED = ("loss", "last_loss", "grad_norm", "grad_norm_micro", "grad_square_micro", "counted")


def compile_train(
    layout: StateLayout, head: Head | None = None, teacher: StateLayout | None = None
) -> Callable[..., Any]:
    """Return the compiled training step: a function (state, batch) -> (state, metrics).

    It minimises the objective `head` or, by default, the cross entropy.

    If the config sets `batch_ramp_steps`, the function takes a third argument: the number of
    microbatches to use, int32 [], of the A = `gradient_accumulation_steps` microbatches of `batch`.
    `data.batches.whole_batch` returns these arguments.  If it sets `teacher`, the last argument is
    the teacher's parameters.

    The buffers of the state that is passed in are donated.

    Args:
      teacher: the layout of the teacher; see `distillation.teacher_layout`.
    """
    config, specs = layout.config, layout.specs
    if (config.teacher_path is None) != (teacher is None):
        raise InputError(
            f"config: teacher is {config.teacher!r}, but this command loads no teacher; set it to "
            "null"
        )
    batch = P(None, "dp")  # for all arrays of the batch
    microbatches = (P(),) if config.batch_ramp_steps else ()
    measured = MEASURED if head is None else (*MEASURED, *head.names)
    if config.teacher is not None:
        measured = (*MEASURED, *distillation.NAMES)
    teachers = () if teacher is None else (teacher.specs["params"],)

    def gradients_of(params: Any, frozen: Any, teachers: tuple[Any, ...], *rest: Any, **own: Any):
        one = None
        if teacher is not None:
            its_par = teacher.parallel(**teacher.train_choices)
            one = distillation.teacher_of(teachers[0], teacher.config, its_par)
        return gradients(params, frozen, *rest, head=head, teacher=one, **own)

    measure = layout.partitioned(
        gradients_of,
        (specs["params"], specs["frozen"], teachers, batch, *microbatches),
        (specs["params"], dict.fromkeys(measured, P())),
        **layout.train_choices,
    )

    update_on_virtual_mesh = None
    if config.virtual_mesh is not None:  # elementwise rules may round differently in another layout
        results = specs["params"], specs["opt_state"]
        update_on_virtual_mesh = layout.partitioned(
            lambda *args, config, par: layout.optimizer.update(*args),
            (*results, specs["params"], P(), P()),
            results,
        )

    def train_step(state: State, batch: Batch, *extra: Any) -> tuple[State, dict[str, Array]]:
        count = len(microbatches)
        params, moments, step = state["params"], state["opt_state"], state["step"]
        if config.drops:
            accumulation, rows, _ = batch["obs"].shape
            batch = batch | {"key": sequence_keys(config.seed, step, (accumulation, rows))}
        copies = device_copies(params, layout.optimizer.declared, config, config.dtype)
        grads, metrics = measure(copies, state["frozen"], extra[count:], batch, *extra[:count])
        for name in config.metrics:
            metrics |= own_metrics(name, grads, copies, metrics)
        rows = batch["obs"].shape[1]
        rate = learning_rate(config, step, state.get("sequences"), rows)
        norm = metrics["grad_norm"]
        new: State = {"step": step + 1}
        if "sequences" in state:
            used = extra[0] if count else len(batch["obs"])
            new["sequences"] = state["sequences"] + used * rows
        may_skip = "loss_mask" in batch or config.skip_nonfinite or config.skip_spikes
        skipped = spikes.is_skipped(config, state.get("norms"), metrics)
        if config.skip_spikes:
            added = jnp.where(metrics["counted"] > 0, norm, jnp.nan)  # NaN is not added
            new["norms"] = spikes.with_norm(state["norms"], added, step)

        def updated_or_kept(optimizer: Optimizer, grads: Any, moments: Any, params: Any) -> Any:
            # With `offload`, which excludes a virtual mesh, the optimizer is that of some matrices.
            update = update_on_virtual_mesh or optimizer.update
            updated = update(grads, moments, params, rate, norm)
            if not may_skip:
                return updated
            before = (params, moments)
            return jax.tree.map(lambda new, old: jnp.where(skipped, old, new), updated, before)

        # Each leaf is updated in the state's layout.  Elementwise rules need no collectives.
        arguments = layout.optimizer, grads, moments, params
        if config.offload == "none":
            new["params"], new["opt_state"] = updated_or_kept(*arguments)
        else:
            new["params"], new["opt_state"] = offload.update(updated_or_kept, *arguments)
        metrics["learning_rate"] = rate
        metrics["skipped"] = skipped.astype(jnp.float32)
        return state | new, metrics

    return jax.jit(
        train_step,
        in_shardings=(layout.shardings, *named(layout.mesh, (batch, *microbatches, *teachers))),
        out_shardings=(layout.shardings, named(layout.mesh, P())),
        donate_argnums=0,
        compiler_options=compiler_options(layout),
    )


def eval_step(params: Any, batch: Batch, config: Config, par: Parallel) -> dict[str, Array]:
    """Return the losses and correct predictions of a batch; see `Network.eval`.

    As in the original mesh-transformer-jax, the losses do not include the z-loss.

    Args:
      batch: `obs` and `target` [B, T], and optionally `segment_ids`.  Inside a `shard_map`, B
        counts only the device's sequences.
    """
    params = par.compute_copy(params, transformer.stored(config), config.dtype)
    segments = batch.get("segment_ids")
    per_token = losses(params, batch["obs"], batch["target"], config, par, segments)
    return {
        "loss": per_token.loss_BT.mean(axis=-1),
        "last_loss": per_token.loss_BT[:, -1],
        "all_loss": per_token.loss_BT,
        "correct": per_token.correct_BT,
    }


def logits_step(params: Any, tokens: Array, config: Config, par: Parallel) -> tuple[Array, Array]:
    """Return the next-token logits [B, T, V], in f32, after each of `tokens` [B, T].

    Also returns whether all logits of each row are finite, [B].
    """
    params = par.compute_copy(params, transformer.stored(config), config.dtype)
    logits = par.gather(transformer.logits(params, tokens, config, par))[..., : config.n_vocab]
    return logits, jnp.isfinite(logits).all(axis=(1, 2))


def compile_init(layout: StateLayout) -> Callable[[Array], State]:
    """Return a compiled function from a PRNG key to a fresh state, sharded over the mesh."""
    config = layout.config
    init = functools.partial(transformer.init, config)
    if config.virtual_mesh is not None:  # the bits must not depend on how the arrays are split
        init = on_every_device(init, layout.mesh)
    return jax.jit(
        functools.partial(init_state, config, mp=layout.par.shards, init=init),
        out_shardings=layout.shardings,
    )


def compile_opt_state(layout: StateLayout) -> Callable[[Any], Any]:
    """Return a compiled function from trained parameters to a fresh optimizer state."""
    return jax.jit(layout.optimizer.init, out_shardings=layout.shardings["opt_state"])


def compile_eval(layout: StateLayout) -> Callable[..., Any]:
    """Return a compiled `eval_step` for the mesh: a function (params, batch) -> dict of results."""
    outputs = dict.fromkeys(("loss", "last_loss", "all_loss", "correct"), P("dp"))
    return _compile_forward(eval_step, layout, outputs)


def compile_logits(layout: StateLayout) -> Callable[..., Any]:
    """Return a compiled `logits_step` for the mesh: a function (params, tokens) -> its results."""
    return _compile_forward(logits_step, layout, (P("dp"), P("dp")))


def _compile_forward(
    function: Callable[..., Any], layout: StateLayout, outputs: Any
) -> Callable[..., Any]:
    """Compile a function of all parameters of a state and of a batch, split over dp."""
    config, batch = layout.config, P("dp")
    forward = layout.of(config.for_inference()).partitioned(
        function, (all_params(layout.specs), batch), outputs, **layout.attention_choices
    )

    def program(params: Any, batch: Any) -> Any:
        return forward(device_copies(params, layout.declared, config, config.dtype), batch)

    return jax.jit(
        program,
        in_shardings=(all_params(layout.shardings), named(layout.mesh, batch)),
        out_shardings=named(layout.mesh, outputs),
    )
