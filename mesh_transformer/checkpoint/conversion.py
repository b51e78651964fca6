"""Any checkpoint in, any checkpoint out: the original's, Hugging Face's and native ones.

Every format reads and writes the same host state: {"params", "step"} and perhaps {"opt_state"},
nested dicts of numpy arrays in the native structure, global shapes.  `compare` shows whether two
checkpoints are the same model, by their logits on a fixed prompt.
"""

import functools
import os
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from mesh_transformer.checkpoint import hf, native_state, original
from mesh_transformer.checkpoint.adapters import MOVED, Base, merged_leaves
from mesh_transformer.checkpoint.host_arrays import in_memory
from mesh_transformer.checkpoint.source import Format, Source, other_format
from mesh_transformer.checkpoint.state_tree import check_same_model
from mesh_transformer.config import Config
from mesh_transformer.data.storage import AnyPath, check_free, is_uri, local_path, step_number
from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import gptj
from mesh_transformer.util import InputError, to_f32

GPT2_ROWS, GPTJ_ROWS = 50257, 50400  # GPT-J's vocabulary is GPT-2's, filled up


class Written(NamedTuple):
    """What a conversion has made: the folder, the model's config, what is in it."""

    path: str
    config: Config
    dtype: str  # of the embedding, if not of all weights
    optimizer: bool


def read(
    source: Source,
    config: Config | None = None,
    *,
    dtype: DTypeLike | None = None,
    optimizer: bool = True,
    lazy: bool = False,
    base: AnyPath | None = None,
) -> tuple[Config, dict[str, Any]]:
    """A checkpoint and its config.  Adapters are merged into the model they were trained on.

    Args:
      config: may be None where the checkpoint stores its own; else it must be of the same model.
      dtype: parameters are cast to it as they are read; None: they keep their own.
      optimizer: take Adam's moments where there are any; never of adapters.
      lazy: leaves are `LazyLeaf`s, read (and found to be damaged) on demand.
      base: where the adapters' model is, if it has moved.

    Raises:
      InputError: where it cannot be read, does not fit the config, or needs one.
    """
    if source.kind == "hf":
        return hf.read(source.path, config=config, dtype=dtype, lazy=lazy)
    if source.adapters is not None:
        config, state = _merged(source, source.adapters, config, base, dtype)
        return config, state if lazy else in_memory(state)
    if base is not None:
        raise InputError(
            f"--base goes with adapters, and {source.path} is a whole model; leave it out"
        )
    options: Any = {"dtype": dtype, "optimizer": optimizer, "lazy": lazy}
    if source.step is not None:
        return native_state.read(source.step, config=config, **options)
    if config is None:
        config = source.config  # which says that there is none
    return config, original.read(source.path, config, **options)


def _merged(
    source: Source,
    recorded: Base,
    config: Config | None,
    moved: AnyPath | None,
    dtype: DTypeLike | None,
) -> tuple[Config, dict[str, Any]]:
    """A source's adapters, merged lazily into the model that is now at `moved`."""
    assert source.step is not None
    own, adapters = native_state.read(source.step, optimizer=False)
    config = (config or own).merged()
    check_same_model(config, own.as_dict(), source.path)
    place = recorded.path if moved is None else local_path(moved)
    try:
        base = Source(place)
    except InputError:
        raise InputError(
            f"{source.path}: the model that its adapters were trained on is not at {place} (no "
            f"checkpoint is there); {MOVED}"
        ) from None
    _, state = read(base, config, optimizer=False, lazy=True)
    params = merged_leaves(
        state["params"], adapters["params"], own.lora_scale, recorded, source.path, dtype=dtype
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
        opened = Source(step_of(source, source_kind, step), source_kind)
        config = (config or opened.config).merged()
        if source_kind == "hf" and target_kind == "original":
            _check_rows(target, config, shards)
        # Now, as reading takes long: is it there, and is it this model's?
        if tokenizer is not None:
            config = config.replace(tokenizer=tokenizer)
            Tokenizer.of(tokenizer, config, must_fit=True)
        optimizer = not slim and target_kind != "hf"
        options: Any = {"dtype": dtype, "optimizer": optimizer, "lazy": True, "base": base}
        _, state = read(opened, config, **options)
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
    if found := other_format(folder, kind):
        raise InputError(
            f"{target}: {folder} holds a checkpoint in {found} format; choose another model folder"
        )


def _check_kind(path: AnyPath, kind: Format) -> None:
    """InputError where something is at `path`, but in another format than `kind`."""
    try:
        found = Source(path).kind
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
    one, other = Source(source, source_kind), Source(target, target_kind)
    # Hugging Face's vocabulary may be without the padding that the config has.
    sizes = [each.config.n_vocab for each in (one, other) if each.kind == "hf"]
    tokens = min([config.n_vocab, *sizes])
    before, _ = _logits(one, config, tokens, base)
    after, dtype = _logits(other, config, tokens, None)
    spread = before.max() - np.median(before)  # the same, whatever is added to all
    return float(np.abs(after - before).max() / spread), LOGIT_BOUNDS[dtype]


def _logits(
    source: Source, config: Config, tokens: int, base: AnyPath | None
) -> tuple[np.ndarray, str]:
    """f32 logits [T, tokens] after each token of a fixed prompt, and the dtype of the weights.

    Of the first `tokens` of the vocabulary alone.  Computed in f32 whatever the weights' dtype, on
    one device; of the layers' weights one layer's are cast at a time.
    """
    own = None if source.kind == "hf" else config
    config, state = read(source, own, optimizer=False, lazy=True, base=base)
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
