"""llama.cpp's architectures: what GGUF files hold of each of Hugging Face's model types.

The facts are those of llama.cpp's `src/models/*.cpp` and `conversion/*.py`.
"""

from typing import NamedTuple


class Key(NamedTuple):
    """A key of the metadata.  The number 0 means that the key is missing, as in llama.cpp.

    Attributes:
      theirs: the key of config.json, whose default holds if this key is missing.
      kind: the type of its values.
      required: whether a file without it is refused.
    """

    theirs: str
    kind: type = float
    required: bool = False


_RMS = {"attention.layer_norm_rms_epsilon": Key("rms_norm_eps", required=True)}
_NOTHING: dict[str, tuple[float, ...]] = {}


class Architecture(NamedTuple):
    """One of llama.cpp's architectures.

    Attributes:
      name: llama.cpp's name, which several model types may share.
      keys: {key of the metadata: its meaning}, besides sizes, rotary embeddings and windows.
      neighbours: whether neighbouring entries of a head are rotated together, so that the rows of
        queries and keys have another order than at Hugging Face.
      divides: whether a tensor of the file may divide the rotary frequencies.
      partial: whether a part of each head may be rotated.
      square: whether the heads together are as wide as the model.
      tied: whether the output head is the embedding; None if that depends on the file.
      biases: the keys of config.json for biases that files may hold.
      pattern: windows are in all layers but each `pattern`-th one, unless the file says otherwise;
        0: in all layers, but llama.cpp leaves them out; None: in no layer.
      window: the window if a file lacks the key; None: no window.
      sliding_base: the base of the rotary wavelengths in layers with a window if a file lacks the
        key; None: that of other layers, and llama.cpp does not read the key.
      wide_scores: for types with the key `query_pre_attn_scalar`, the number of layers of the model
        in which it is width / heads; in others, it is the size of a head.
      neutral: {another key: the values with which it does not change the model}.
      read_by_transformers: whether transformers reads all that such files hold.
    """

    name: str
    keys: dict[str, Key] = _RMS
    neighbours: bool = False
    divides: bool = False
    partial: bool = False
    square: bool = False
    tied: bool | None = None
    biases: tuple[str, ...] = ()
    pattern: int | None = None
    window: int | None = None
    sliding_base: float | None = None
    wide_scores: int | None = None
    neutral: dict[str, tuple[float, ...]] = _NOTHING
    read_by_transformers: bool = False


_BIASES = ("attention_bias", "mlp_bias")
_LLAMA = Architecture(
    "llama", neighbours=True, divides=True, biases=_BIASES, read_by_transformers=True
)
_GRANITE = {
    "attention.scale": Key("attention_multiplier", required=True),
    "embedding_scale": Key("embedding_multiplier"),
    "residual_scale": Key("residual_multiplier"),
    "logit_scale": Key("logits_scaling", required=True),
}
_NEOX = {
    "attention.layer_norm_epsilon": Key("layer_norm_eps", required=True),
    "use_parallel_residual": Key("use_parallel_residual", bool, required=True),
    # llama.cpp computes the tanh approximation of GELU whatever the file says.
    "hidden_activation": Key("hidden_act", str),
}
_LOGIT_CAP = {"final_logit_softcapping": Key("final_logit_softcapping")}
_CAPS = _LOGIT_CAP | {"attn_logit_softcapping": Key("attn_logit_softcapping")}
_OLMO2 = Architecture("olmo2", square=True, tied=False)
# {Hugging Face's model type: architecture}.  Of the types that share a name, files are read as the
# first one, or if they have windows as the first one with windows.
ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": Architecture("qwen2", square=True, read_by_transformers=True),
    "qwen3": Architecture("qwen3", read_by_transformers=True),
    "smollm3": Architecture("smollm3", neighbours=True),
    "granite": Architecture(
        "granite",
        _RMS | _GRANITE,
        neighbours=True,
        divides=True,
        biases=_BIASES,
        neutral={"rope.scaling.finetuned": (1,)},  # without it, nothing is rotated
    ),
    "phi3": Architecture("phi3", partial=True, square=True, pattern=0),
    "gemma": Architecture("gemma", tied=True),
    "gemma2": Architecture(
        "gemma2", _RMS | _CAPS, tied=True, pattern=2, window=4096, wide_scores=46
    ),
    "gemma3_text": Architecture(
        "gemma3", _RMS | _LOGIT_CAP, pattern=6, sliding_base=1e4, wide_scores=62
    ),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2._replace(pattern=4),
    "gpt2": Architecture(
        "gpt2", {"attention.layer_norm_epsilon": Key("layer_norm_epsilon", required=True)}
    ),
    "gpt_neox": Architecture("gptneox", _NEOX, partial=True, tied=False),
}


def sliding_layers(pattern: int, layers: int) -> list[bool]:
    """Return which layers have a window: all but each `pattern`-th one; 0: all."""
    return [not pattern or (layer + 1) % pattern > 0 for layer in range(layers)]
