"""Whether two checkpoints are the same model: their logits on a fixed prompt."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mesh_transformer.checkpoint import conversion, hf_config
from mesh_transformer.checkpoint.conversion import Format
from mesh_transformer.config import Config
from mesh_transformer.data.storage import AnyPath, local_path
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import gptj
from mesh_transformer.util import to_f32

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
    sizes = [hf_config.read_config(path).n_vocab for path, kind, _ in both if kind == "hf"]
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
    config, state = conversion.read(path, kind, config, optimizer=False, lazy=True, base=base)
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
