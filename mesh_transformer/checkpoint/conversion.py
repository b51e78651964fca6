"""Any checkpoint in, any checkpoint out: the original's, Hugging Face's and native ones.

Every format reads and writes the same host state: {"params", "step"} and perhaps {"opt_state"},
nested dicts of numpy arrays in the native structure, global shapes.  `compare` shows whether two
checkpoints are the same model, by their logits on a fixed prompt.
"""

import functools
import os
import re
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from mesh_transformer.checkpoint import hf, native_state, original, original_files
from mesh_transformer.checkpoint.adapters import MOVED, Base, merged_leaves, saved_base
from mesh_transformer.checkpoint.host_arrays import in_memory
from mesh_transformer.checkpoint.native import find, find_aux
from mesh_transformer.checkpoint.state_tree import check_same_model
from mesh_transformer.config import Config
from mesh_transformer.data.storage import AnyPath, check_free, is_uri, local_path, step_number
from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import gptj
from mesh_transformer.util import InputError, to_f32

Format = Literal["original", "native", "hf"]
FORMATS: tuple[Format, ...] = get_args(Format)
GPT2_ROWS, GPTJ_ROWS = 50257, 50400  # GPT-J's vocabulary is GPT-2's, filled up


class Written(NamedTuple):
    """What a conversion has made: the folder, the model's config, what is in it."""

    path: str
    config: Config
    dtype: str  # of the embedding, if not of all weights
    optimizer: bool


def format_of(path: AnyPath) -> Format:
    """What is at `path`, a model folder or one of its step_N; InputError where nothing is."""
    path = local_path(path)
    here = not is_uri(path) and os.path.isdir(path)
    if here and _is_original(path):
        return "original"
    try:
        find(path)
    except InputError:
        # Last, as any model folder may hold a config.json of its own.
        if here and os.path.isfile(os.path.join(path, "config.json")):
            return "hf"
        raise
    return "native"


def _is_original(folder: str) -> bool:
    """Whether shards are in it or in one of its steps, or its index tells of some."""
    steps = [name for name in os.listdir(folder) if step_number(name) is not None]
    folders = [folder, *(os.path.join(folder, step) for step in steps)]
    if any(original_files.numbered(each, "shard") for each in folders):
        return True
    try:
        return bool(original_files.read_index(folder))
    except InputError:  # meta.json is a common name
        return False


def check_vacant(folder: AnyPath) -> None:
    """InputError where a folder without native checkpoints holds one of another format."""
    if kind := _other_format(folder, "native"):
        raise InputError(
            f"{folder}: holds a checkpoint in {kind} format, which a run does not go on from; give "
            "it as --tune-model-path with another model folder, or convert it"
        )


def _other_format(folder: AnyPath, own: Format) -> Format | None:
    """The format of what is in a folder, where that is not its `own`; None where it is vacant."""
    try:
        kind = format_of(folder)
    except InputError:
        return None
    if kind == "hf":
        names = os.listdir(local_path(folder))
        if not any(name.endswith((".safetensors", ".bin")) for name in names):
            return None  # A config.json alone may be anyone's.
    return None if kind == own else kind


def config_of(path: AnyPath) -> Config:
    """The config that the checkpoint at `path` tells; InputError where it tells none.

    JAX is not started: its virtual devices can still be set.
    """
    return _told(local_path(path), format_of(path))


def _told(path: str, kind: Format) -> Config:
    if kind == "native":
        return Config.from_dict(
            native_state.saved_config(find_aux(path), path), f"{path}: saved config"
        )
    if kind == "hf":
        return hf.read_config(path)
    raise _tells_none(path)


def _tells_none(path: str) -> InputError:
    return InputError(
        f"{path}: a checkpoint of the original's does not tell its config; give the one that it "
        "was trained with"
    )


def read(
    path: AnyPath,
    kind: Format,
    config: Config | None = None,
    *,
    dtype: DTypeLike | None = None,
    optimizer: bool = True,
    lazy: bool = False,
    base: AnyPath | None = None,
) -> tuple[Config, dict[str, Any]]:
    """The checkpoint at `path` (a model folder, newest step, or one step_N) and its config.

    Adapters are merged into the model that they were trained on, weights alone.

    Args:
      config: may be None where the checkpoint tells its own; else it must be of the same model.
      dtype: parameters are cast to it as they are read; None: they keep their own.
      optimizer: take Adam's moments where there are any.
      lazy: leaves are `LazyLeaf`s, read (and found to be damaged) when they are asked for.
      base: where that model is, if no more where it was.

    Raises:
      InputError: where it cannot be read, does not fit the config, or needs one.
    """
    path = local_path(path)
    if kind == "hf":
        return hf.read(path, config=config, dtype=dtype, lazy=lazy)
    recorded = saved_base(find_aux(path), path) if kind == "native" else None
    if recorded is not None:
        config, state = _merged(path, config, recorded, base, dtype)
        return config, state if lazy else in_memory(state)
    if base is not None:
        raise InputError(f"--base goes with adapters, and {path} is a whole model; leave it out")
    wanted: Any = {"dtype": dtype, "optimizer": optimizer, "lazy": lazy}
    if kind == "native":
        return native_state.read(path, config=config, **wanted)
    if config is None:
        raise _tells_none(path)
    return config, original.read(path, config, **wanted)


def _merged(
    path: str,
    config: Config | None,
    recorded: Base,
    moved: AnyPath | None,
    dtype: DTypeLike | None,
) -> tuple[Config, dict[str, Any]]:
    """The adapters at `path`, merged lazily into the model that is now at `moved`."""
    own, adapters = native_state.read(path, optimizer=False)
    config = (config or own).merged()
    check_same_model(config, own.as_dict(), path)
    place = recorded.path if moved is None else local_path(moved)
    try:
        kind = format_of(place)
    except InputError:
        raise InputError(
            f"{path}: the model that its adapters were trained on is not at {place} (no checkpoint "
            f"is there); {MOVED}"
        ) from None
    _, state = read(place, kind, config, optimizer=False, lazy=True)
    params = merged_leaves(
        state["params"], adapters["params"], own.lora_scale, recorded, path, dtype=dtype
    )
    return config, {"params": params, "step": adapters["step"]}


def convert(
    source: AnyPath,
    source_kind: Format,
    target: AnyPath,
    target_kind: Format,
    *,
    config: Config | None = None,
    shards: int | None = None,
    dtype: DTypeLike | None = None,
    slim: bool = False,
    step: int | None = None,
    trim_vocab: bool = False,
    tokenizer: str | None = None,
    base: AnyPath | None = None,
) -> Written:
    """Writes the checkpoint `source` anew as `target`: another format, dtype or number of shards.

    In memory are one layer's part of a leaf, or a leaf without layers, and the next one.  Adam's
    moments come along where both formats have them and it is not to be `slim`.

    Args:
      source: a model folder (newest step, or `step`) or one step_N.
      target: a model folder, or the step_N of one, that is not there yet.
      config: None: what the source tells.
      shards: of the original's format; default: the config's cores_per_replica.
      trim_vocab: cut the padding off Hugging Face's vocabulary.
      tokenizer: takes the place of the config's.
      base: see `read`.

    Raises:
      InputError: for what cannot be read or written; then nothing is at `target`.
    """
    target = local_path(target)
    _check_target(target, target_kind)
    try:
        path = step_of(source, source_kind, step)
        config = (config or _told(path, source_kind)).merged()
        if source_kind == "hf" and target_kind == "original":
            _check_rows(target, config, shards)
        # Now, as reading takes long: is it there, and is it this model's?
        if tokenizer is not None:
            config = config.replace(tokenizer=tokenizer)
            Tokenizer.of(tokenizer, config, must_fit=True)
        optimizer = not slim and target_kind != "hf"
        wanted: Any = {"dtype": dtype, "optimizer": optimizer, "lazy": True, "base": base}
        _, state = read(path, source_kind, config, **wanted)
    except InputError:
        _check_kind(source, source_kind)
        raise
    written = target
    if target_kind == "hf":
        hf.write(target, state, config, trim_vocab=trim_vocab, tokenizer=tokenizer)
    else:
        folder = _model_folder(target, state, source_kind)
        written = os.path.join(folder, f"step_{int(state['step'])}")
        if target_kind == "native":
            native_state.write(folder, state, config)
        else:
            original.write(folder, state, config, shards=shards)
    held = state["params"]["embed"]["embedding"]["w"].dtype.name
    return Written(written, config, held, "opt_state" in state)


def _check_rows(target: str, config: Config, shards: int | None) -> None:
    """InputError where a vocabulary that was cut does not divide into the shards."""
    rows, count = config.n_vocab, shards or config.cores_per_replica
    if rows % count:
        released = rows == GPT2_ROWS and not GPTJ_ROWS % count
        filled = GPTJ_ROWS if released else rows + -rows % count
        raise InputError(
            f"{target}: {count} shards do not divide the vocabulary, {rows}; give a --config with "
            f"n_vocab {filled}, which fills it up with tokens that are never predicted"
        )


def _check_target(target: str, kind: Format) -> None:
    """InputError where `target` is there, is misnamed, or would join steps of another format."""
    check_free(target)
    if kind == "hf":
        return
    folder, name = os.path.split(target)
    if step_number(target) is None:
        if re.fullmatch(r"step_\d+", name):
            raise InputError(f"{target}: write the step's number without zeros in front")
        return
    if found := _other_format(folder, kind):
        raise InputError(
            f"{target}: {folder} holds a checkpoint in {found} format; choose another model folder"
        )


def _check_kind(path: AnyPath, kind: Format) -> None:
    """InputError where something is at `path`, but in another format than `kind`."""
    try:
        found = format_of(path)
    except InputError:
        return
    if found != kind:
        raise InputError(
            f"{local_path(path)}: is in {found} format, not {kind}; use --from {found}"
        ) from None


def step_of(path: AnyPath, kind: Format, step: int | None) -> str:
    """The folder of a model folder's `step`; `path` itself where `step` is None."""
    path = local_path(path)
    if step is None:
        return path
    if kind == "hf":
        raise InputError(f"--step {step}: a Hugging Face folder has no steps; leave it out")
    if (own := step_number(path)) is not None:
        if own != step:
            raise InputError(f"--step {step}: {path} is another; give its model folder, or no step")
        return path
    folder = os.path.join(path, f"step_{step}")
    if not is_uri(path) and not os.path.isdir(folder):
        raise InputError(f"--step {step}: {path} has no step_{step}; leave it out for the newest")
    return folder


def _model_folder(target: str, state: dict[str, Any], source_kind: Format) -> str:
    """The model folder that `target` means; `state` gets its step where the source had none."""
    named = step_number(target)
    if named is None:
        return target
    step = int(state["step"])
    if source_kind == "hf":
        state["step"] = np.asarray(named, np.int32)
    elif step != named:
        raise InputError(
            f"{target}: the source is at step {step}; name it step_{step}, or give a model folder"
        )
    return os.path.dirname(target)


_PROMPT_LENGTH = 64
# What `compare` allows a target of each dtype.  In f32 only a bias that is folded or split is
# rounded; the others round every weight (by 2^-11, 2^-8), and every layer adds to that.
LOGIT_BOUNDS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


def compare(
    source: AnyPath,
    source_kind: Format,
    target: AnyPath,
    target_kind: Format,
    config: Config,
    base: AnyPath | None = None,
) -> tuple[float, float]:
    """How far apart the logits of two checkpoints are on a fixed prompt, and how far they may be.

    Both are the largest difference over the spread of the source's logits; what may be depends on
    the target's dtype.  They are read one after the other; `base` is the source's, see
    `conversion.read`.
    """
    both: list[tuple[str, Format, AnyPath | None]] = [
        (local_path(source), source_kind, base),
        (local_path(target), target_kind, None),
    ]
    # Hugging Face's vocabulary may be without the padding that the config has.
    sizes = [hf.read_config(path).n_vocab for path, kind, _ in both if kind == "hf"]
    tokens = min([config.n_vocab, *sizes])
    (before, _), (after, dtype) = (
        _logits(path, kind, None if kind == "hf" else config, tokens, base)
        for path, kind, base in both
    )
    spread = before.max() - np.median(before)  # the same, whatever is added to all
    return float(np.abs(after - before).max() / spread), LOGIT_BOUNDS[dtype]


def _logits(
    path: str, kind: Format, config: Config | None, tokens: int, base: AnyPath | None
) -> tuple[np.ndarray, str]:
    """f32 logits [T, tokens] after each token of a fixed prompt, and the dtype of the weights.

    Of the first `tokens` of the vocabulary alone.  Computed in f32 whatever the weights' dtype, on
    one device; of the layers' weights one layer's are cast at a time.
    """
    config, state = read(path, kind, config, optimizer=False, lazy=True, base=base)
    prompt = np.arange(min(_PROMPT_LENGTH, config.seq))[None] * 7919 % tokens
    params = _on_device(state)["params"]
    dtype = params["embed"]["embedding"]["w"].dtype.name
    # The first activation is f32, so that each layer's weights become f32 where they are used.
    outer = {part: to_f32(leaves) for part, leaves in params.items() if part != "layers"}
    function = functools.partial(gptj.logits, config=config.replace(dtype="float32"), par=Auto())
    with jax.default_matmul_precision("highest"):
        logits_BTV = jax.jit(function)(params | outer, jnp.asarray(prompt))
    return np.asarray(logits_BTV[0, :, :tokens]), dtype


def _on_device(tree: Any) -> Any:
    """A host tree's arrays as JAX's; the tree is emptied on the way."""
    if isinstance(tree, dict):
        return {key: _on_device(tree.pop(key)) for key in list(tree)}
    return jnp.asarray(np.asarray(tree))
