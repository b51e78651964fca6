"""From a checkpoint of any format to a state on a mesh, every leaf in its layout at rest."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mesh_transformer.checkpoint import conversion, original_files
from mesh_transformer.checkpoint.adapters import MOVED, Base, saved_base
from mesh_transformer.checkpoint.conversion import Format
from mesh_transformer.checkpoint.integrity import checksum
from mesh_transformer.checkpoint.native import Checkpoints, find, find_aux
from mesh_transformer.checkpoint.native_state import saved_config
from mesh_transformer.checkpoint.state_tree import check_same_model, leaves, placed
from mesh_transformer.config import Config
from mesh_transformer.data.storage import AnyPath, local_path
from mesh_transformer.mesh.declaration import joined, partition
from mesh_transformer.mesh.devices import named
from mesh_transformer.model import gptj
from mesh_transformer.training import step as steps
from mesh_transformer.training.step import init_state, state_specs
from mesh_transformer.util import InputError


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


class Loaded(NamedTuple):
    """What was there: {"params"} and perhaps {"opt_state"}; under adapters also their base."""

    state: steps.State
    base: Base | None


def saved_part(state: steps.State, config: Config) -> steps.State:
    """What of a state, or of its template, a checkpoint has: all but what is frozen."""
    return state | {"params": partition(gptj.declarations(config), state["params"])[0]}


def load(path: AnyPath, config: Config, mesh: Mesh, *, optimizer: bool) -> Loaded:
    """The weights at `path`, of any format, and with `optimizer` Adam's moments if there are any.

    A config with `lora_rank` takes adapters and what they were trained on; where `path` has no
    adapters it is the base of fresh ones.  Without `lora_rank` adapters are merged.

    Raises:
      InputError: where it cannot be read, or is of another model than the config's.
    """
    path = local_path(path)
    kind = conversion.format_of(path)
    wanted = steps.abstract_state(config, mesh)
    del wanted["step"]
    if not optimizer:
        del wanted["opt_state"]
    recorded = saved_base(find_aux(path), path) if kind == "native" else None
    if not config.lora_rank:
        return Loaded(_read(path, kind, config, wanted, merge=recorded is not None), None)
    if recorded is None:
        frozen, base = load_base(path, config, mesh, [path], None)
        fresh = compile_adapters(config, mesh)(jax.random.key(config.seed))
        return Loaded({"params": joined(frozen, fresh)}, base)
    found = _read(path, kind, config, saved_part(wanted, config))
    frozen, base = load_base(path, config, mesh, [recorded.path], recorded)
    return Loaded(found | {"params": joined(frozen, found["params"])}, base)


def load_base(
    where: str, config: Config, mesh: Mesh, places: Sequence[str], recorded: Base | None
) -> tuple[Any, Base]:
    """The frozen parameters, from the first of `places` that has them, and what they are.

    Args:
      where: the adapters, for error lines.
      recorded: what they were trained on; None: whatever is there.

    Raises:
      InputError: where none of the places has them.
    """
    _, wanted = partition(gptj.declarations(config), steps.abstract_state(config, mesh)["params"])
    refusals = []
    for place in places:
        try:
            kind = conversion.format_of(place)
            place = _resolved(place, kind)
        except InputError:
            refusals.append(f"{place} (no checkpoint is there)")
            continue
        if kind == "native" and saved_base(find_aux(place), place) is not None:
            refusals.append(f"{place} (adapters are there)")
            continue
        frozen = _read(place, kind, config.merged(), {"params": wanted})["params"]
        base = Base(place, _checksums(frozen, config, mesh))
        changed = recorded and recorded.difference(base)
        if not changed:
            return frozen, base
        refusals.append(f"{place} (another in the leaf {changed})")
        del frozen  # before another is read
    raise InputError(
        f"{where}: the model that its adapters were trained on is not at {', '.join(refusals)}; "
        f"{MOVED}"
    )


def _resolved(path: str, kind: Format) -> str:
    """The very step that a path means, which is another once its run has gone on."""
    if kind == "hf":
        return path
    if kind == "original":
        return original_files.step_folder(path)
    folder, step = find(path)
    return f"{folder}/step_{step}"


def _checksums(frozen: Any, config: Config, mesh: Mesh) -> dict[str, dict[str, int]]:
    """Of the numbers that the run computes with, and of what bf16 makes of them."""
    found = {}
    for dtype in sorted({config.dtype, "bfloat16"}):
        sums = compile_checksums(mesh, dtype)(frozen)
        found[dtype] = {"/".join(key): int(np.asarray(x)) for key, x in leaves(sums).items()}
    return found


def _read(
    path: str, kind: Format, config: Config, wanted: steps.State, *, merge: bool = False
) -> steps.State:
    """What of `wanted` is at `path`, in its layouts; adapters are to be merged where `merge`."""
    if kind == "native" and not merge:
        return _read_native(path, config, wanted)
    dtype = wanted["params"]["embed"]["embedding"]["w"].dtype
    _, host = conversion.read(
        path, kind, config, dtype=dtype, optimizer="opt_state" in wanted, lazy=True
    )
    return placed(host, {key: leaf for key, leaf in wanted.items() if key in host})


def _read_native(path: str, config: Config, wanted: steps.State) -> steps.State:
    folder, number = find(path)
    with Checkpoints(folder, read_only=True) as checkpoints:
        where = f"{folder}/step_{number}"
        check_same_model(config, saved_config(checkpoints.aux(number), where), where)
        there = {key[0] for key in checkpoints.leaves(number)}
        only = [key for key in wanted if key in there or key == "params"]
        return checkpoints.restore(number, wanted, only=only)
