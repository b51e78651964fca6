"""Conversion between the formats: native, mesh-transformer-jax's, Hugging Face's and GGUF.

Each format is read into, and written from, the same "host state": nested dicts of numpy arrays
with the keys "params", "step" and optionally "opt_state".  The structure is that of native
checkpoints, and the arrays are unsharded.  `compare` checks that two checkpoints hold the same
model, by comparing their logits on a fixed prompt.
"""

import functools
import os
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from mesh_transformer.checkpoint import gguf_files, hf, native_state, original, peft, torch_model
from mesh_transformer.checkpoint.adapters import Base, merged_leaves
from mesh_transformer.checkpoint.formats import HUGGING_FACE, WITHOUT_STEPS, Format, check_format
from mesh_transformer.checkpoint.source import Source, other_format
from mesh_transformer.checkpoint.state_tree import check_same_model, in_memory
from mesh_transformer.checkpoint.step_folders import step_number
from mesh_transformer.config import Config
from mesh_transformer.data.gguf_header import SUFFIX, is_gguf
from mesh_transformer.data.same_tokenizer import check_encoding
from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import transformer
from mesh_transformer.model.casts import to_f32
from mesh_transformer.storage import files
from mesh_transformer.storage.access import AnyPath, check_absent, is_uri, local_path
from mesh_transformer.util import InputError

GPT2_ROWS, GPTJ_ROWS = 50257, 50400  # vocabulary sizes; GPT-J's is GPT-2's, padded


class ConversionResult(NamedTuple):
    """The result of a conversion.

    Attributes:
      path: what was written: a step_N, a Hugging Face folder or a GGUF file.
      config: the model's config.
      dtype: the dtype of the embedding matrix.  All other weights have the same dtype, unless the
        source mixes dtypes and `convert` was called without a dtype.
      optimizer: whether the optimizer state was written.
    """

    path: str
    config: Config
    dtype: str
    optimizer: bool


def read(
    source: Source,
    config: Config | None = None,
    *,
    dtype: DTypeLike | None = None,
    optimizer: bool = True,
    lazy: bool = False,
    base: AnyPath | None = None,
    drop_extra: bool = False,
) -> tuple[Config, dict[str, Any]]:
    """Return a checkpoint's config, and its state as nested dicts of numpy arrays.

    The state has the keys "params", "step" and optionally "opt_state".  If the checkpoint holds
    LoRA adapters, they are merged into their base model.

    Args:
      source: the checkpoint, of any format.
      config: a config of the checkpoint's model (default: the one that the checkpoint stores).
      dtype: the dtype to cast the parameters to as they are read (default: their own).
      optimizer: whether to read the optimizer's state, if there is one and it is that of the
        config's optimizer.  That of adapters is never read.
      lazy: whether to return `LazyLeaf`s, which are read from disk (and checked for damage) on use.
      base: if the checkpoint holds adapters, the path of their base model (default: the path that
        the checkpoint records).
      drop_extra: whether to leave out tensors of a Hugging Face folder or GGUF file that are not
        part of the model, and print their names.  Otherwise they are an error.

    Raises:
      InputError: if the checkpoint cannot be read or does not fit the config, or if it stores no
        config and none is passed.
    """
    if source.kind in HUGGING_FACE:
        options = {"lazy": lazy, "drop_extra": drop_extra, "text_only": source.text_only}
        return hf.read(source.path, config=config, dtype=dtype, **options)
    if source.adapters is not None:
        config, state = _merged(source, source.adapters, config, base, dtype)
        return config, state if lazy else in_memory(state)
    if base is not None:
        raise InputError(
            f"--base requires adapters, but {source.path} is a whole model; remove --base"
        )
    options: Any = {"dtype": dtype, "optimizer": optimizer, "lazy": lazy}
    if source.step is not None:
        return native_state.read(source.step, config=config, **options)
    if config is None:
        config = source.config  # raises: mesh-transformer-jax stores no config
    return config, original.read(source.path, config, **options)


def _merged(
    source: Source,
    recorded: Base,
    config: Config | None,
    moved: AnyPath | None,
    dtype: DTypeLike | None,
) -> tuple[Config, dict[str, Any]]:
    """Return the config and state of a base model with LoRA adapters merged into it.

    The parameters in the state are `LazyLeaf`s, which are read from disk on use.

    Args:
      config: a config of the model (default: the one stored with the adapters).
      moved: the base model's current path (default: the recorded path).
    """
    base = source.base(moved)
    own, adapters = source.read_adapters(config or base)
    config = (config or own).merged()
    check_same_model(config, own.as_dict(), source.path)
    _, state = read(base, config, optimizer=False, lazy=True)
    params = merged_leaves(
        state["params"], adapters["params"], own, recorded, source.path, dtype=dtype
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
    chat_template: str | None = None,
    base: AnyPath | None = None,
    drop_extra: bool = False,
    text_only: bool = False,
    quantized: bool = False,
) -> ConversionResult:
    """Convert a checkpoint to another format, dtype or number of shards.

    Leaves are converted in parts: one layer at a time for leaves that are stacked over layers,
    other leaves whole.  At most two parts are in memory: the one being written and the next one.

    Args:
      source: a model folder (its newest step, or `step`), a step_N, a Hugging Face folder or a GGUF
        file.
      source_kind: the format of `source`.
      target_kind: the format of `target`.  "peft" is only for adapters, which the other formats
        merge into their base model.
      target: the model folder, step_N, Hugging Face folder or GGUF file to write, which must not
        exist yet.
      config: the model's config (default: the one stored in the source).  Without `tokenizer`, its
        tokenizer must be the source's, unless `target_kind` is "original", which stores none.
      shards: the number of shards to write, if `target_kind` is "original", the format of
        mesh-transformer-jax (default: the config's cores_per_replica).
      dtype: the dtype to cast the parameters to (default: their own).
      slim: whether to leave out the optimizer's state.  Otherwise it is converted if `source` has
        one and the target format can store it: a native checkpoint can store all, one of
        mesh-transformer-jax only Adam's.
      step: the step to convert, if `source` is a model folder (default: its newest).
      trim_vocab: whether to cut the padding off the vocabulary, if `target_kind` is "hf".
      tokenizer: the model's tokenizer, as `load_tokenizer` accepts it (default: the config's).
      chat_template: the text of the model's chat template (default: that of `tokenizer`, if it has
        one, or else the config's).
      base: if `source` holds adapters, the path of their base model (default: the path that
        `source` records).  With the target format "peft", the path or hub name to store.
      drop_extra: see `read`.
      text_only: whether to convert the text part of a multi-modal model, a Hugging Face folder.
      quantized: whether to write matrices as 8-bit integers (Q8_0), if `target_kind` is "gguf".

    Raises:
      InputError: if the source cannot be read or the target cannot be written.  A failed conversion
        leaves nothing new at `target`.
    """
    target = local_path(target)
    check_format(target_kind)
    _check_target(target, target_kind)
    try:
        opened = Source(step_of(source, source_kind, step), source_kind, text_only=text_only)
        if target_kind == "peft":
            return _export_adapters(opened, target, base, dtype)
        described = opened.base(base) if opened.kind == "peft" else opened
        if config is not None and tokenizer is None and target_kind != "original":
            check_encoding(described.tokenizer, None, config.tokenizer, described.path)
        config = (config or described.config).merged()
        config = described.with_answer_keys(config)
        if source_kind in HUGGING_FACE and target_kind == "original":
            _check_rows(target, config, shards)
        before = config.chat_template
        # Check before the long read that the tokenizer exists and fits the model.
        if tokenizer is not None:
            config = config.replace(tokenizer=tokenizer, chat_template=None)
            own = Tokenizer.of(tokenizer, config, must_fit=True).loaded.chat_template or before
            # A tokenizer with several templates keeps them.
            chat_template = chat_template or (own if isinstance(own, str) else None)
        if chat_template is not None:
            config = config.replace(chat_template=chat_template)
        # Which formats can store the state of the config's optimizer.
        stores = {"native": True, "original": config.optimizer == "adam"}
        optimizer = not slim and stores.get(source_kind, False) and stores.get(target_kind, False)
        options: Any = {"dtype": dtype, "optimizer": optimizer, "lazy": True, "base": base}
        _, state = read(opened, config, drop_extra=drop_extra, **options)
    except InputError:
        _check_kind(source, source_kind)
        raise
    written = target
    if target_kind == "hf":
        hf.write(target, state, config, trim_vocab=trim_vocab, tokenizer=tokenizer)
    elif target_kind == "gguf":
        kind = "q8_0" if quantized else None
        hf.write_gguf(target, state, config, kind=kind, tokenizer=tokenizer)
    else:
        folder = _model_folder(target, state, source_kind)
        written = os.path.join(folder, f"step_{int(state['step'])}")
        if target_kind == "native":
            native_state.write(folder, state, config)
        else:
            original.write(folder, state, config, shards=shards)
    held = "q8_0" if quantized else state["params"]["embed"]["embedding"]["w"].dtype.name
    return ConversionResult(written, config, held, "opt_state" in state)


def _export_adapters(
    source: Source, target: str, base: AnyPath | None, dtype: DTypeLike | None
) -> ConversionResult:
    """Write the adapters in `source` to a folder for the package peft; see `convert`."""
    recorded = source.adapters
    if recorded is None:
        raise InputError(
            f"{source.path} is a whole model, but the format peft is only for adapters; use --to hf"
        )
    own, state = source.read_adapters(None)
    name = recorded.path if base is None else os.fspath(base)
    peft.write(target, state["params"], own, name, dtype=dtype)
    first = next(iter(jax.tree.leaves(state["params"])))
    return ConversionResult(target, own, np.dtype(dtype or first.dtype).name, False)


def _check_rows(target: str, config: Config, shards: int | None) -> None:
    """Raise InputError if the size of the vocabulary is not divisible by the number of shards.

    This typically happens when a Hugging Face folder stores the vocabulary without padding.  The
    error message suggests an `n_vocab` that is divisible.
    """
    rows, count = config.n_vocab, shards or config.cores_per_replica
    if rows % count:
        as_gptj = rows == GPT2_ROWS and not GPTJ_ROWS % count
        padded = GPTJ_ROWS if as_gptj else rows + -rows % count
        raise InputError(
            f"{target}: n_vocab is {rows}, not divisible by {count} shards; give a --config with "
            f"n_vocab {padded}, which pads the vocabulary with tokens that are never predicted"
        )


def _check_target(target: str, kind: Format) -> None:
    """Raise InputError if a checkpoint cannot be written to `target`.

    This is the case if `target` exists, if it is a step_N whose N has leading zeros, or if it is a
    step_N in a model folder that holds a checkpoint in another format.
    """
    check_absent(target)
    if kind == "gguf" and not is_gguf(target):
        raise InputError(f"{target}: the name of a GGUF file ends in {SUFFIX}; add it")
    if kind in WITHOUT_STEPS:
        return
    folder, name = os.path.split(target)
    if step_number(target) is None:
        if re.fullmatch(r"step_\d+", name):
            raise InputError(f"{target}: write the step number without leading zeros")
        return
    if other := other_format(folder, kind):
        raise InputError(
            f"{target} cannot be written: {folder} holds a checkpoint in {other} format; choose "
            "another model folder"
        )


def _check_kind(path: AnyPath, kind: Format) -> None:
    """Raise InputError if `path` holds a checkpoint that is not in the format `kind`."""
    try:
        actual = Source(path).kind
    except InputError:
        return
    if actual != kind:
        raise InputError(
            f"{local_path(path)} is in {actual} format, not {kind}; use --from {actual} "
            f"(in Python, source_kind {actual!r})"
        ) from None


def step_of(path: AnyPath, kind: Format, step: int | None) -> str:
    """Return the path of the folder step_N for N = `step` in the model folder `path`.

    If `step` is None, or if `path` itself is this step_N, returns `path`.

    Raises:
      InputError: if `step` is passed, but there is no such step, or `path` is another step or a
        Hugging Face folder.
    """
    path = local_path(path)
    if step is None:
        return path
    if kind in WITHOUT_STEPS:
        what = "GGUF file" if kind == "gguf" else "Hugging Face folder"
        raise InputError(f"--step {step}: a {what} has no steps; remove --step")
    if (own := step_number(path)) is not None:
        if own != step:
            raise InputError(
                f"--step is {step}, but {path} is another step; give its model folder, or remove "
                "--step"
            )
        return path
    folder = os.path.join(path, f"step_{step}")
    if not files.is_folder(folder):
        raise InputError(
            f"--step {step}: {path} has no step_{step}; remove --step to use the newest"
        )
    return folder


def _model_folder(target: str, state: dict[str, Any], source_kind: Format) -> str:
    """Return the model folder to write to: `target`, or its parent if `target` is a step_N.

    Hugging Face folders and GGUF files do not store a step.  If the state was read from one and
    `target` is a step_N, the state's step is set to N.

    Raises:
      InputError: if `target` is a step_N, and the source stores a step other than N.
    """
    named = step_number(target)
    if named is None:
        return target
    step = int(state["step"])
    if source_kind in WITHOUT_STEPS:
        state["step"] = np.asarray(named, np.int32)
    elif step != named:
        raise InputError(
            f"{target}: the source is at step {step}; name the target step_{step}, or give a "
            "model folder as the target"
        )
    return os.path.dirname(target)


_PROMPT_LENGTH = 64
# The difference that `compare` allows, relative to the spread of the logits, by the target's dtype.
# In f32, only biases are rounded: those that are folded into the embedding or divided among shards.
# f16 and bf16 round every weight (by 2^-11 and 2^-8), and the errors add up over the layers.
# Q8_0 rounds every weight to 1/127 of the largest of 32, which is coarser than bf16.
LOGIT_BOUNDS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2, "q8_0": 1e-1}


def compare(
    source: AnyPath,
    source_kind: Format,
    target: AnyPath,
    target_kind: Format,
    config: Config,
    base: AnyPath | None = None,
    text_only: bool = False,
) -> tuple[float, float]:
    """Compare the logits of two checkpoints on a fixed prompt, to check a conversion.

    The checkpoints are read one after the other, so only one is in memory at a time.

    Args:
      source_kind: the format of `source`.
      target_kind: the format of `target`.
      config: the config of the model.
      base: if the source holds adapters, the path of their base model (default: the path that the
        source records).
      text_only: as for `convert`.

    Returns:
      The largest difference between the logits, and the largest difference to accept for the
      target's dtype.  Both are divided by the spread of the source's logits, which is their maximum
      minus their median.
    """
    one, other = Source(source, source_kind, text_only=text_only), Source(target, target_kind)
    # The vocabulary in a Hugging Face folder may lack the padding of the config's `n_vocab`.
    sizes = [opened.config.n_vocab for opened in (one, other) if opened.kind in HUGGING_FACE]
    tokens = min([config.n_vocab, *sizes])
    before, _ = _logits(one, config, tokens, base)
    after, dtype = _logits(other, config, tokens, None)
    if target_kind == "gguf" and gguf_files.is_quantized(other.path):
        dtype = "q8_0"
    return _difference(before, after), LOGIT_BOUNDS[dtype]


def compare_with_torch(folder: AnyPath) -> tuple[float, float] | None:
    """Compare a checkpoint's logits with those that transformers and torch compute.

    Args:
      folder: a local Hugging Face folder, or a GGUF file.

    Returns:
      As for `compare`; None if torch is not installed, the folder is in a bucket, or transformers
      does not read all of a GGUF file.
    """
    path = os.path.expanduser(os.fspath(folder))
    if is_uri(path) or not torch_model.is_installed():
        return None
    source = Source(path, "gguf" if is_gguf(path) else "hf")
    config = source.config
    if is_gguf(path) and not gguf_files.architecture_of(config).read_by_transformers:
        return None
    ours, _ = _logits(source, config, config.n_vocab, None)
    [theirs] = torch_model.logits(path, _prompt(config, config.n_vocab))
    return _difference(theirs, ours), LOGIT_BOUNDS["float32"]


def _difference(before: np.ndarray, after: np.ndarray) -> float:
    """Return the largest difference between logits, divided by the spread of `before`."""
    # A constant that is added to all logits of a position changes nothing.  An export adds one if
    # it moves the embedding's bias into the embedding, and the head is tied.
    before, after = (x - x.mean(axis=-1, keepdims=True) for x in (before, after))
    return float(np.abs(after - before).max() / (before.max() - np.median(before)))


def _prompt(config: Config, tokens: int) -> np.ndarray:
    """Return a fixed prompt [1, T] of token ids below `tokens`."""
    return np.arange(min(_PROMPT_LENGTH, config.seq))[None] * 7919 % tokens


def _logits(
    source: Source, config: Config, tokens: int, base: AnyPath | None
) -> tuple[np.ndarray, str]:
    """Return the logits [T, tokens] of a fixed prompt, and the name of the weights' dtype.

    The logits are computed in f32, whatever the weights' dtype, on one device.

    Args:
      config: the config of the model.  It is not used for a Hugging Face folder, which stores one.
      tokens: the prompt and the returned logits contain only token ids below this number.
    """
    own = None if source.kind in HUGGING_FACE else config
    config, state = read(source, own, optimizer=False, lazy=True, base=base, drop_extra=True)
    prompt = _prompt(config, tokens)
    params = _on_device(state)["params"]
    dtype = params["embed"]["embedding"]["w"].dtype.name
    # The first activation is f32, so each layer casts its weights to f32 when it uses them.
    outer = {part: to_f32(leaves) for part, leaves in params.items() if part != "layers"}
    function = functools.partial(
        transformer.logits, config=config.replace(dtype="float32"), par=Auto()
    )
    with jax.default_matmul_precision("highest"):
        logits_BTV = jax.jit(function)(params | outer, jnp.asarray(prompt))
    return np.asarray(logits_BTV[0, :, :tokens]), dtype


def _on_device(tree: Any) -> Any:
    """Return nested dicts of host arrays as JAX arrays; `tree` is emptied to free its memory."""
    if isinstance(tree, dict):
        return {key: _on_device(tree.pop(key)) for key in list(tree)}
    return jnp.asarray(np.asarray(tree))
