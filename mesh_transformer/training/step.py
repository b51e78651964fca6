"""One training and one evaluation step, and the only place that chooses who splits over mp."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mesh_transformer.checkpoint.checksums import checksum
from mesh_transformer.config import Config
from mesh_transformer.generation import decode
from mesh_transformer.generation.sampling import SamplerSettings
from mesh_transformer.mesh.compiler_options import compiler_options
from mesh_transformer.mesh.declaration import is_declaration, joined, partition
from mesh_transformer.mesh.devices import abstract, named
from mesh_transformer.mesh.parallel import Auto, Manual, Parallel
from mesh_transformer.model import flash_attention, gptj
from mesh_transformer.model.attention import LayerCache
from mesh_transformer.training.optimizer import Optimizer
from mesh_transformer.util import InputError, to_bf16, to_f32

State = dict[str, Any]
Batch = dict[str, Array]


def init_state(config: Config, key: Array) -> State:
    """A fresh state: params, Adam's moments, and the count of updates done; all global.

    What is frozen has no moments, and is kept in the compute dtype: it does not move.
    """
    declared = gptj.declarations(config)
    trained, frozen = partition(declared, gptj.init(config, key))
    optimizer = Optimizer(config, gptj.trained(config))
    stored = to_bf16(trained) if config.early_cast else trained
    frozen = jax.tree.map(lambda x: x.astype(config.dtype), frozen)
    return {
        "params": joined(frozen, stored),
        "opt_state": optimizer.init(trained),
        "step": jnp.zeros((), jnp.int32),
    }


def abstract_state(config: Config, mesh: Mesh) -> State:
    """Shapes and layouts of the state, with nothing in them."""
    shapes = jax.eval_shape(functools.partial(init_state, config), jax.random.key(0))
    return abstract(shapes, named(mesh, state_specs(config, mesh)))


def state_specs(config: Config, mesh: Mesh) -> State:
    """The layout at rest of every leaf of the state."""
    par = _parallel(config, mesh)
    moments = par.at_rest(gptj.trained(config))
    return {
        "params": par.at_rest(gptj.declarations(config)),
        "opt_state": {"count": P(), "mu": moments, "nu": moments},
        "step": P(),
    }


def _compute_params(params: Any, config: Config, par: Parallel) -> Any:
    """The one cast of the state: f32 at rest, the compute dtype in the forward pass."""
    return par.compute_copy(params, gptj.declarations(config), config.dtype)


def gradients(
    params: Any, batch: Batch, config: Config, par: Parallel
) -> tuple[Any, dict[str, Array]]:
    """Gradients of A microbatches summed in f32, their mean over dp, and what was measured.

    Only what is trained has one.

    Args:
      batch: `obs` and `target` [A, B, T], of this program's sequences, and maybe `loss_mask` and
        `segment_ids` (see `CausalTransformer.train`).
    """
    declared = gptj.trained(config)
    own = _compute_params(params, config, par)
    trained, frozen = partition(gptj.declarations(config), own)
    mask, segments = batch.get("loss_mask"), batch.get("segment_ids")
    weights = None if mask is None else gptj.loss_weights(mask, par, segments)
    squares = Optimizer(config, declared).squares

    def loss_of(trained: Any, *sample: Any) -> tuple[Array, Array]:
        params = joined(frozen, par.spread(trained, declared))
        return gptj.train_loss(params, sample[0], sample[1], config, par, *sample[2:])

    grad_fn = jax.value_and_grad(loss_of, has_aux=True)

    def microbatch(sums: Any, sample: tuple[Any, ...]) -> Any:
        (loss, last_loss), grads = grad_fn(trained, *sample)
        grads = to_f32(grads)
        sums = jax.tree.map(jnp.add, sums, grads)
        square = par.micro_total(squares(par.micro(grads, declared)), declared)
        return sums, (loss, last_loss, square)

    accumulation = batch["obs"].shape[0]
    samples = (batch["obs"], batch["target"], weights, segments)
    sums, (loss, last_loss, micro_square) = jax.lax.scan(
        microbatch, par.accumulator(trained, declared), samples
    )
    grads = par.mean(jax.tree.map(lambda g: g / accumulation, sums), declared)
    measured = jnp.stack(
        (loss.mean(), last_loss.mean(), jnp.sqrt(micro_square).mean(), micro_square.mean())
    )
    loss, last_loss, norm_micro, square_micro = par.mean_scalar(measured)
    return grads, {
        "loss": loss,
        "last_loss": last_loss,
        "grad_norm": jnp.sqrt(par.total(squares(grads), declared)),
        "grad_norm_micro": norm_micro,
        "grad_square_micro": square_micro,
    }


def update(state: State, grads: Any, norm: Array, config: Config) -> State:
    """One optimizer step; leaf by leaf, in the layout at rest, with no word between devices."""
    optimizer = Optimizer(config, gptj.trained(config))
    trained, frozen = partition(gptj.declarations(config), state["params"])
    trained, opt_state = optimizer.update(grads, state["opt_state"], trained, state["step"], norm)
    return {"params": joined(frozen, trained), "opt_state": opt_state, "step": state["step"] + 1}


def eval_step(params: Any, batch: Batch, config: Config, par: Parallel) -> dict[str, Array]:
    """Loss and hits of every token; `obs` and `target` [B, T]; no z-loss, as in the original."""
    params = _compute_params(params, config, par)
    segments = batch.get("segment_ids")
    found = gptj.losses(params, batch["obs"], batch["target"], config, par, segments)
    return {
        "loss": found.loss_BT.mean(axis=-1),
        "last_loss": found.loss_BT[:, -1],
        "all_loss": found.loss_BT,
        "correct": found.correct_BT,
    }


def logits_step(params: Any, tokens: Array, config: Config, par: Parallel) -> Array:
    """Next-token logits [B, T, V] in f32, over the whole vocabulary."""
    params = _compute_params(params, config, par)
    return par.gather(gptj.logits(params, tokens, config, par))


def check_zero(config: Config, mesh: Mesh) -> None:
    """Raises InputError where ZeRO can split a matrix along no axis."""
    if not config.zero:
        return
    dp = mesh.shape["dp"]
    declared = jax.tree_util.tree_leaves_with_path(
        gptj.declarations(config.merged()), is_leaf=is_declaration
    )
    for path, declaration in declared:
        if declaration.decay and declaration.zero_axis(dp) is None:
            raise InputError(
                f"config: zero is {config.zero}, but dp {dp} divides no free axis of "
                f"{jax.tree_util.keystr(path)} {declaration.shape}; set zero to 0, or change the "
                f"mesh"
            )


def _parallel(
    config: Config, mesh: Mesh, *, attention: str = "xla", split_stream: bool = False
) -> Parallel:
    """Who splits over mp."""
    if mesh.size == 1:  # nobody to talk to: even a sum over one device would take its time
        return Auto(attention=attention)
    kind = Auto if config.partitioning == "jit" else Manual
    return kind(mesh, config.zero or 0, attention=attention, split_stream=split_stream)


def gradient_replicas(config: Config, mesh: Mesh) -> int:
    """How many gradients of one microbatch a step measures (`grad_norm_micro`)."""
    return _parallel(config, mesh).replicas


def _partition(
    function: Callable[..., Any],
    config: Config,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    *,
    sequences: bool = False,
    split_stream: bool = False,
) -> Callable[..., Any]:
    """`function(*args, config=, par=)` on every part of the mesh, as one function of the whole.

    With `sequences` it attends to whole ones, as these devices do it best.
    """
    attention = flash_attention.chosen(config, mesh.devices.flat[0]) if sequences else "xla"
    par = _parallel(config, mesh, attention=attention, split_stream=split_stream)

    def program(*args: Any) -> Any:
        # TPUs and newer GPUs would round f32 matmul inputs to fewer bits unless told not to.
        exact = config.dtype == "float32"
        with jax.default_matmul_precision("highest") if exact else contextlib.nullcontext():
            return function(*args, config=config, par=par)

    if not par.axes:
        return program
    return jax.shard_map(
        program,
        mesh=mesh,
        in_specs=par.within(in_specs),
        out_specs=par.within(out_specs),
        axis_names=set(par.axes),
    )


def _compiled(
    function: Callable[..., Any],
    config: Config,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    donate_argnums: int | None = None,
    *,
    sequences: bool = False,
) -> Callable[..., Any]:
    return jax.jit(
        _partition(function, config, mesh, in_specs, out_specs, sequences=sequences),
        in_shardings=named(mesh, in_specs),
        out_shardings=named(mesh, out_specs),
        donate_argnums=donate_argnums,
    )


def compile_adapters(config: Config, mesh: Mesh) -> Callable[[Array], Any]:
    """A function from a key to fresh adapters, without the parameters that they sit on."""
    declared = gptj.declarations(config)

    def fresh(key: Array) -> Any:
        return partition(declared, init_state(config, key)["params"])[0]

    layout = partition(declared, state_specs(config, mesh)["params"])[0]
    return jax.jit(fresh, out_shardings=named(mesh, layout))


def compile_checksums(mesh: Mesh, dtype: str) -> Callable[[Any], Any]:
    """A function from frozen parameters to a checksum of each, of its numbers in `dtype`."""

    def sums(params: Any) -> Any:
        return jax.tree.map(lambda leaf: checksum(leaf.astype(dtype)), params)

    return jax.jit(sums, out_shardings=named(mesh, P()))


MEASURED = ("loss", "last_loss", "grad_norm", "grad_norm_micro", "grad_square_micro")


def compile_init(config: Config, mesh: Mesh) -> Callable[[Array], State]:
    """A function from a key to a fresh state, every leaf made where it will live."""
    return jax.jit(
        functools.partial(init_state, config), out_shardings=named(mesh, state_specs(config, mesh))
    )


def compile_opt_state(config: Config, mesh: Mesh) -> Callable[[Any], Any]:
    """A function from trained params to fresh moments."""
    optimizer = Optimizer(config, gptj.trained(config))
    return jax.jit(
        optimizer.init, out_shardings=named(mesh, state_specs(config, mesh)["opt_state"])
    )


def compile_train(config: Config, mesh: Mesh) -> Callable[..., Any]:
    """(state, batch) -> (state, metrics); the old state's memory is reused."""
    batch = P(None, "dp")  # whatever it has
    measured = dict.fromkeys(MEASURED, P())
    layout = state_specs(config, mesh)
    optimizer = Optimizer(config, gptj.trained(config))
    specs = (layout["params"], batch), (layout["opt_state"]["mu"], measured)
    measure = _partition(
        gradients, config, mesh, *specs, sequences=True, split_stream=config.shard_activations
    )

    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
        grads, metrics = measure(state["params"], batch)
        metrics["learning_rate"] = optimizer.learning_rate(state["step"])
        return update(state, grads, metrics["grad_norm"], config), metrics

    return jax.jit(
        train_step,
        in_shardings=named(mesh, (layout, batch)),
        out_shardings=(named(mesh, layout), named(mesh, P())),
        donate_argnums=0,
        compiler_options=compiler_options(config, mesh),
    )


def compile_eval(config: Config, mesh: Mesh) -> Callable[..., Any]:
    """(params, batch) -> losses a token."""
    outputs = dict.fromkeys(("loss", "last_loss", "all_loss", "correct"), P("dp"))
    specs = (state_specs(config, mesh)["params"], P("dp"))
    return _compiled(eval_step, config, mesh, specs, outputs, sequences=True)


def compile_logits(config: Config, mesh: Mesh) -> Callable[..., Any]:
    """(params, tokens) -> logits."""
    specs = (state_specs(config, mesh)["params"], P("dp"))
    return _compiled(logits_step, config, mesh, specs, P("dp"), sequences=True)


def decode_specs(config: Config) -> decode.DecodeState:
    """The layout of a running batch: rows over dp, heads over mp."""
    rows, cache = P("dp"), P("dp", "mp")
    settings = SamplerSettings(*(rows,) * len(SamplerSettings._fields))
    caches = (LayerCache(cache, cache),) * config.layers
    return decode.DecodeState(caches, rows, rows, rows, rows, settings)


def compile_weights(config: Config, mesh: Mesh) -> Callable[[Any], Any]:
    """A function from params, in any layout, to the weights of the functions below."""
    return jax.jit(
        functools.partial(decode.weights_of, config=config),
        out_shardings=named(mesh, decode.weight_specs(config)),
    )


def compile_empty(config: Config, mesh: Mesh) -> Callable[[int, int], decode.DecodeState]:
    """(rows, slots) -> a batch of idle rows."""
    return jax.jit(
        functools.partial(decode.empty, config),
        static_argnums=(0, 1),
        out_shardings=named(mesh, decode_specs(config)),
    )


def compile_grow(config: Config, mesh: Mesh) -> Callable[..., decode.DecodeState]:
    """(batch, slots) -> the same batch with more slots."""
    layout = named(mesh, decode_specs(config))
    return jax.jit(decode.grow, static_argnums=1, out_shardings=layout)


def compile_score(config: Config, mesh: Mesh, alternatives: int) -> Callable[..., Any]:
    """(weights, tokens, following) -> what the model thinks of what follows each token."""
    rows = P("dp")
    function = functools.partial(decode.score, alternatives=alternatives)
    specs = (decode.weight_specs(config), rows, rows)
    return _compiled(function, config, mesh, specs, rows)


def compile_prefill(config: Config, mesh: Mesh, alternatives: int | None) -> Callable[..., Any]:
    """(weights, batch, prompts) -> (batch, what was chosen); the old batch's memory is reused."""
    rows, state = P("dp"), decode_specs(config)
    prompts = decode.Prompts(rows, rows, rows, state.settings)
    function = functools.partial(decode.prefill, alternatives=alternatives)
    specs = (decode.weight_specs(config), state, prompts)
    return _compiled(function, config, mesh, specs, (state, rows), donate_argnums=1)


def compile_decode(
    config: Config, mesh: Mesh, alternatives: int | None, most: int
) -> Callable[..., Any]:
    """(weights, batch, left, steps) -> (batch, chosen); the old batch's memory is reused."""
    state = decode_specs(config)
    function = functools.partial(decode.decode, alternatives=alternatives, most=most)
    specs = (decode.weight_specs(config), state, P("dp"), P())
    return _compiled(function, config, mesh, specs, (state, P("dp")), donate_argnums=1)
