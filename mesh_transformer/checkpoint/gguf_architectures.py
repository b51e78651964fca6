"""llama.cpp's architectures: what their GGUF files hold of each of Hugging Face's model types.

The facts are those of llama.cpp's `src/models/*.cpp` and `conversion/*.py`.
"""

from typing import NamedTuple


class Key(NamedTuple):
    """A key of the metadata.  A number of 0 means that the key is missing, as in llama.cpp.

    Attributes:
      theirs: the key of config.json, whose default holds if this key is missing.
      kind: the type of its values.
      required: whether a file without it is refused.
    """

    theirs: str
    kind: type = float
    required: bool = False


class Architecture(NamedTuple):
    """One of llama.cpp's architectures.

    Attributes:
      name: llama.cpp's name.  Several model types may share it.
      keys: {key of the metadata: its meaning}, besides sizes, rotary embeddings and windows.
      neighbours: whether neighbouring entries of a head are rotated together, so that the rows of
        queries and keys have another order than at Hugging Face.
      divides: whether a tensor of the file may divide the rotary frequencies.
      partial: whether a part of each head may be rotated.
      square: whether the heads together are as wide as the model.
      tied: whether the output head is the embedding; None if that depends on the file.
      biases: the keys of config.json for biases that the file may hold.
      pattern: windows are in all layers but each `pattern`-th one, unless the file says otherwise;
        0: in all layers, but llama.cpp leaves them out; None: in no layer.
      window: the window if the file lacks the key; None: no window.
      sliding_base: the default base of the rotary wavelengths in layers with a window, if files
        hold it; None: that of other layers.
      wide_scores: for types with the key `query_pre_attn_scalar`, the number of layers of the model
        in which it is width / heads; in others, it is the size of a head.
      neutral: {another key: the values with which it does not change the model}.
      read_by_transformers: whether transformers reads all that such files hold.
    """

    name: str
    keys: dict[str, Key]
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
    neutral: dict[str, tuple[float, ...]] = {}  # noqa: RUF012
    read_by_transformers: bool = False


_RMS = {"attention.layer_norm_rms_epsilon": Key("rms_norm_eps", required=True)}
_LOGIT_CAP = {"final_logit_softcapping": Key("final_logit_softcapping")}
_LLAMA = Architecture(
    "llama",
    _RMS,
    neighbours=True,
    divides=True,
    biases=("attention_bias", "mlp_bias"),
    read_by_transformers=True,
)
# {Hugging Face's model type: architecture}.  Of the types that share one, files without windows are
# read as the first, and files with windows as the first that has them.
ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": Architecture("qwen2", _RMS, square=True, read_by_transformers=True),
    "qwen3": Architecture("qwen3", _RMS, read_by_transformers=True),
    "smollm3": Architecture("smollm3", _RMS, neighbours=True),
    "granite": _LLAMA._replace(
        name="granite",
        keys=_RMS
        | {
            "attention.scale": Key("attention_multiplier", required=True),
            "embedding_scale": Key("embedding_multiplier"),
            "residual_scale": Key("residual_multiplier"),
            "logit_scale": Key("logits_scaling", required=True),
        },
        neutral={"rope.scaling.finetuned": (1,)},  # without it, nothing is rotated
        read_by_transformers=False,
    ),
    "phi3": Architecture("phi3", _RMS, partial=True, square=True, pattern=0),
    "gemma": Architecture("gemma", _RMS, tied=True),
    "gemma2": Architecture(
        "gemma2",
        _RMS | {"attn_logit_softcapping": Key("attn_logit_softcapping")} | _LOGIT_CAP,
        tied=True,
        pattern=2,
        window=4096,
        wide_scores=46,
    ),
    "gemma3_text": Architecture(
        "gemma3", _RMS | _LOGIT_CAP, pattern=6, sliding_base=1e4, wide_scores=62
    ),
    "olmo2": Architecture("olmo2", _RMS, square=True, tied=False),
    "olmo3": Architecture("olmo2", _RMS, square=True, tied=False, pattern=4),
    "gpt2": Architecture(
        "gpt2", {"attention.layer_norm_epsilon": Key("layer_norm_epsilon", required=True)}
    ),
    "gpt_neox": Architecture(
        "gptneox",
        {
            "attention.layer_norm_epsilon": Key("layer_norm_eps", required=True),
            "use_parallel_residual": Key("use_parallel_residual", bool, required=True),
            # llama.cpp computes the tanh approximation of GELU whatever the file says.
            "hidden_activation": Key("hidden_act", str),
        },
        partial=True,
        tied=False,
    ),
}


def architectures(name: str) -> dict[str, Architecture]:
    """Return {Hugging Face's model type: architecture} for llama.cpp's name of an architecture."""
    return {key: row for key, row in ARCHITECTURES.items() if row.name == name}


def sliding_layers(pattern: int, layers: int) -> list[bool]:
    """Return which layers have a window: all but each `pattern`-th one; 0: all."""
    return [not pattern or (layer + 1) % pattern > 0 for layer in range(layers)]
