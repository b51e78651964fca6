"""Loading checkpoints of any format onto a mesh, in the layout of the training state."""

import functools
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mesh_transformer.checkpoint import conversion
from mesh_transformer.checkpoint.adapters import BASE_MOVED_ADVICE, Base
from mesh_transformer.checkpoint.integrity import checksum
from mesh_transformer.checkpoint.saved_step import SavedStep
from mesh_transformer.checkpoint.source import Source
from mesh_transformer.checkpoint.state_tree import (
    Convert,
    Path,
    check_optimizer,
    check_same_model,
    leaves,
    nested,
    optimizer_of,
    put_on_devices,
)
from mesh_transformer.config import Config
from mesh_transformer.data.same_tokenizer import check_encoding
from mesh_transformer.generation.finite import describe_bad_weights
from mesh_transformer.mesh.devices import named
from mesh_transformer.mesh.host_memory import device_copies
from mesh_transformer.model import matrices, transformer
from mesh_transformer.model.lora import Adapter
from mesh_transformer.storage.access import AnyPath
from mesh_transformer.training.distillation import teacher_layout
from mesh_transformer.training.step import State, StateLayout, init_state
from mesh_transformer.util import InputError, NonFiniteError


@functools.cache
def compile_checksums(mesh: Mesh, dtype: str) -> Callable[[Any], Any]:
    """Return a jitted function from frozen parameters to their checksums after a cast to `dtype`.

    The result has the structure of the parameters, with one uint32 per leaf.
    """

    def sums(params: Any) -> Any:
        return jax.tree.map(lambda leaf: checksum(leaf.astype(dtype)), params)

    return jax.jit(sums, out_shardings=named(mesh, P()))


class Loaded(NamedTuple):
    """The result of `load`.

    Attributes:
      state: the entries "params", "frozen" and, if it was read, "opt_state" of a training state
        (see `training.step.init_state`), without the padding of the mesh.
      base: the record of the adapters' base model; None if `state` has no adapters.
    """

    state: State
    base: Base | None


def load(source: Source, layout: StateLayout, *, optimizer: bool) -> Loaded:
    """Load a checkpoint's weights, and optionally its optimizer's state, onto a mesh.

    If the config does not set `lora_rank`, the result is a whole model.  Adapters in the checkpoint
    are merged into their base model.

    If the config sets `lora_rank`, the result is LoRA adapters and their base model.  If the
    checkpoint holds adapters, these and their base model are loaded.  If the checkpoint holds a
    whole model, it becomes the base model of newly initialised adapters.

    Args:
      optimizer: whether to load the optimizer's state, if the checkpoint has one.

    Raises:
      InputError: if the source cannot be read or does not fit the config, or if the optimizer's
        state is that of another optimizer.
    """
    config, state = layout.config, layout.stored
    # The other entries are those of another run.
    template = {key: state[key] for key in (("params", "opt_state") if optimizer else ("params",))}
    recorded = source.adapters
    if not config.lora_rank:
        return Loaded(_read(source, config, template) | {"frozen": {}}, None)
    if recorded is None:
        frozen, base = load_base(source.path, layout, [source], None)
        fresh = jax.jit(
            lambda key: init_state(config, key)["params"],
            out_shardings=jax.tree.map(lambda leaf: leaf.sharding, state["params"]),
        )
        return Loaded({"params": fresh(jax.random.key(config.seed)), "frozen": frozen}, base)
    state = _read_adapters(source, config, template)
    frozen, base = load_base(source.path, layout, [recorded.path], recorded)
    return Loaded(state | {"frozen": frozen}, base)


class LoadedTeacher(NamedTuple):
    """The teacher of a run (see `training.distillation`).

    Attributes:
      layout: the layout of its parameters; None if there is no teacher.
      params: its parameters, or nothing.
    """

    layout: StateLayout | None
    params: tuple[Any, ...]


def load_teacher(layout: StateLayout) -> LoadedTeacher:
    """Load the teacher that a config names, if any, onto the mesh of its student.

    Args:
      layout: the student's.

    Raises:
      InputError: if it cannot be read, or cannot teach the student.
      NonFiniteError: if some of its parameters are NaN or infinite.
    """
    config = layout.config
    if config.teacher_path is None:
        return LoadedTeacher(None, ())
    source = Source(config.teacher_path)
    own = teacher_layout(layout, source.config, config.teacher_path).of_params
    check_encoding(source.tokenizer, None, config.tokenizer, f"teacher {config.teacher}")
    params = own.padded({"params": load(source, own, optimizer=False).state["params"]})["params"]
    if bad := describe_bad_weights(params, layout.mesh):
        raise NonFiniteError(f"teacher {config.teacher}: {bad}")
    return LoadedTeacher(own, (params,))


def load_adapter(source: Source, layout: StateLayout, params: Any) -> Adapter:
    """Load LoRA adapters that were trained on a model.

    Args:
      layout: the layout of the model's state.

    Returns:
      The adapters, with the padding of the mesh.

    Raises:
      InputError: if the checkpoint holds no adapters, or those of another model.
      NonFiniteError: if some of its values are NaN or infinite.
    """
    config, mesh = layout.config, layout.mesh
    if source.adapters is None:
        raise InputError(f"{source.path}: holds a whole model, expected LoRA adapters")
    if config.lora_rank:
        raise InputError(
            f"{source.path}: adapters can be given to a base model only, but the model has some "
            "itself; load its base model"
        )
    saved = source.config if source.step is not None else source.read_adapters(config)[0]
    own = layout.of(
        config.replace(
            lora_rank=saved.lora_rank,
            lora_alpha=saved.lora_alpha,
            lora_targets=saved.lora_targets,
            offload="none",
        )
    ).of_params
    template = {"params": own.stored["params"]}
    adapters = own.padded(_read_adapters(source, own.config, template))["params"]
    # Rows without the adapter multiply it by 0, and 0 times NaN is NaN.
    if bad := describe_bad_weights(adapters, mesh):
        raise NonFiniteError(f"{source.path}: {bad}")
    if config.offload == "params":
        params = jax.jit(lambda x: device_copies(x, layout.declared, config, np.float32))(params)
    base = layout.of(own.config.merged()).unpadded({"params": params})["params"]
    if leaf := source.adapters.difference(Base("", _checksums(base, own))):
        raise InputError(
            f"{source.path}: its adapters were trained on another model, {source.adapters.path} "
            f"(leaf {leaf} differs); load that one"
        )
    return Adapter(own.config, adapters)


def load_base(
    where: str,
    layout: StateLayout,
    places: Sequence[AnyPath | Source],
    recorded: Base | None,
) -> tuple[Any, Base]:
    """Load the base model of LoRA adapters from the first checkpoint in `places` that holds it.

    Args:
      recorded: the record of the base model that the adapters were trained on.  Checkpoints with
        other checksums are skipped.  If None, any model is accepted.

    Returns:
      The base model's parameters, which are frozen, without the padding of the mesh, and a record
      of its path and checksums.

    Raises:
      InputError: if no checkpoint in `places` holds the base model.
    """
    config = layout.config
    template = layout.of(config.replace(frozen_bits=None)).stored["frozen"]
    rejected = []
    for place in places:
        try:
            source = Source.of(place)
            name = source.checkpoint_path
        except InputError:
            rejected.append(f"{os.fspath(place)} (no checkpoint there)")
            continue
        if source.adapters is not None:
            rejected.append(f"{name} (adapters, not a base model)")
            continue
        sums: dict[str, dict[str, int]] = {}
        convert = None if config.frozen_bits is None else _quantize(layout, sums)
        frozen = _read(source, config.merged(), {"params": template}, convert)["params"]
        base = Base(name, sums or _checksums(frozen, layout))
        changed = recorded and recorded.difference(base)
        if not changed:
            return frozen, base
        rejected.append(f"{name} (another model: leaf {changed} differs)")
        del frozen  # frees its memory before the next one is read
    raise InputError(
        f"{where}: the base model that its adapters were trained on is not at "
        f"{', '.join(rejected)}; {BASE_MOVED_ADVICE}"
    )


def _quantize(layout: StateLayout, sums: dict[str, dict[str, int]]) -> Convert:
    """Return a function that quantizes leaves of the base model to `frozen_bits` as they are read.

    The base model as a whole may be too large for the devices.

    Args:
      sums: a dict to which the function adds the result of `_checksums` for each leaf.
    """
    declared, stored = transformer.declarations(layout.config), layout.stored["frozen"]
    bits = layout.config.frozen_bits
    assert bits is not None

    def convert(path: Path, leaf: Array) -> Any:
        for dtype, own in _checksums(nested({path[1:]: leaf}), layout).items():
            sums.setdefault(dtype, {}).update(own)
        d, own = (functools.reduce(operator.getitem, path[1:], x) for x in (declared, stored))
        if not matrices.is_quantized(own):
            return leaf
        quantize = functools.partial(matrices.quantize, declared=d, bits=bits)
        shardings = jax.tree.map(lambda x: x.sharding, own)
        return jax.block_until_ready(jax.jit(quantize, out_shardings=shardings)(leaf))

    return convert


def _checksums(frozen: Any, layout: StateLayout) -> dict[str, dict[str, int]]:
    """Return {dtype: {leaf name: checksum}} of the frozen parameters, as `Base` records them.

    The dtypes are bfloat16 and, if different, the config's dtype.
    """
    sums_by_dtype = {}
    for dtype in sorted({layout.config.dtype, "bfloat16"}):
        sums = leaves(compile_checksums(layout.mesh, dtype)(frozen))
        sums_by_dtype[dtype] = {"/".join(path): int(np.asarray(x)) for path, x in sums.items()}
    return sums_by_dtype


def _read(source: Source, config: Config, template: State, convert: Convert | None = None) -> State:
    """Read a checkpoint into arrays with the template's shardings and dtypes.

    Top-level keys of the template that the checkpoint lacks, such as "opt_state", are left out.
    Adapters in the checkpoint are merged into their base model.
    """
    if source.step is not None and source.adapters is None:
        return _read_native(source.step, config, template, convert)
    dtype = template["params"]["embed"]["embedding"]["w"].dtype
    _, host = conversion.read(
        source, config, dtype=dtype, optimizer="opt_state" in template, lazy=True
    )
    if "opt_state" in host:  # of mesh-transformer-jax, whose optimizer is Adam
        check_optimizer(config, "adam", source.path)
    template = {key: leaf for key, leaf in template.items() if key in host}
    return put_on_devices(host, template, convert)


def _read_adapters(source: Source, config: Config, template: State) -> State:
    """Read a checkpoint of adapters into arrays with the template's shardings and dtypes."""
    if source.step is not None:
        return _read_native(source.step, config, template)
    own, host = source.read_adapters(config)
    check_same_model(config, own.as_dict(), source.path)
    return put_on_devices(host, {"params": template["params"]})


def _read_native(
    step: SavedStep, config: Config, template: State, convert: Convert | None = None
) -> State:
    check_same_model(config, step.config, str(step))
    saved = {path[0] for path in step.leaves}
    if "opt_state" in template.keys() & saved:
        check_optimizer(config, optimizer_of(Config.from_dict(step.config, str(step))), str(step))
    only = [k for k in template if k in saved or k == "params"]
    return step.restore(template, only=only, convert=convert)
