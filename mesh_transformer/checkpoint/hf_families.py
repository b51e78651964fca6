"""The model types of Hugging Face: keys of config.json, tensors, and their counterparts here."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

Leaf = tuple[str, str]  # (module, leaf) of one of our parameters in a layer
Layer = dict[str, tuple[Leaf, ...]]

# A small released model that can be read.  Errors name it where they refuse another.
SMALL_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
OTHER_MODEL = f"give another model, such as {SMALL_MODEL}"

_SIZES = {
    "n_layer": "layers",
    "n_embd": "d_model",
    "n_head": "n_heads",
    "vocab_size": "n_vocab",
    "n_positions": "seq",
}
_NEOX_SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "vocab_size": "n_vocab",
    "max_position_embeddings": "seq",
}
_Q, _K, _V = (("layer/q", "w"), ("layer/k", "w"), ("layer/v", "w"))
_QKV_BIAS = (("layer/q", "b"), ("layer/k", "b"), ("layer/v", "b"))


def _norm(name: str, module: str) -> Layer:
    return {f"{name}.weight": ((module, "scale"),), f"{name}.bias": ((module, "offset"),)}


def _projections(*names: tuple[str, str]) -> Layer:
    """Return the matrices of a layer and their biases, from pairs of their name and ours."""
    return {
        f"{theirs}.{kind}": (leaf,)
        for theirs, ours in names
        for kind, leaf in (
            ("weight", ("layer", ours) if ours in ("o", "out") else (f"layer/{ours}", "w")),
            ("bias", ("layer", f"{ours}_b") if ours in ("o", "out") else (f"layer/{ours}", "b")),
        )
    }


_FC, _O, _OUT = ("layer/fc", "w"), ("layer", "o"), ("layer", "out")
_GPTJ_MLP = _projections(("mlp.fc_in", "fc")) | {
    "mlp.fc_out.weight": (_OUT,),
    "mlp.fc_out.bias": (("layer", "b"),),
}
_NOTHING: dict[str, Any] = {}


class Number(NamedTuple):
    """A number of config.json: our config key, the default, and our value as a power of theirs.

    If `may_lack` is true, both may be null.
    """

    ours: str
    default: float | None
    power: float = 1
    may_lack: bool = False

    def written(self, config: Any) -> float | int | None:
        """Return the value for config.json."""
        value = getattr(config, self.ours)
        return value if self.power == 1 or value is None else round(value ** (1 / self.power))


class Family(NamedTuple):
    """One of Hugging Face's model types: the keys of its config.json, and its tensors.

    Attributes:
      title: the name for error messages.
      architecture: the class that loads the model.
      block: our block that computes the model.  A GPT-NeoX without `use_parallel_residual` is
        computed by the block gpt2.
      pe: our position embedding.
      sizes: {key of config.json: our config key}.
      defaults: the values of sizes that config.json may lack.
      fixed: {key of config.json: the only value that our model supports}.  A missing key means that
        value.
      activation: the key of the activation, and its default.
      inner: the key of the feed-forward's width.
      tied: the default of `tie_word_embeddings`.
      written: further keys to write, with their values.
      prefix: the part of the names of all tensors but the output head's.
      embedding: the name of the token embedding, without the prefix.
      positions: the name of the position embedding, without the prefix; None if there is none.
      layers: the name of the list of layers, without the prefix.
      layer: {name in a layer: the leaves that the tensor holds}, of which a model may lack some.
      norm: the name of the last norm, without the prefix.
      head: the name of the output head.
      rotary_pairs: which entries of a head are rotated together; see the config key.
      out_axis: the axis of matrices that indexes outputs: 0 for torch's Linear, which is the
        default, 1 for GPT-2's Conv1D.
      groups: the number of groups that the outputs of a tensor with several leaves are divided
        into, each with a part of every leaf; None: one group per head.
      optional: keys of `sizes` that may be missing or null, for the default of our key.
      implied: our config keys that have one value in all models, or a function of our sizes.
      numbers: {key of config.json: the number}, for numbers above 0.
      biases: {key of config.json: our matrices that have a bias if it is true}.
      rope: the default base of the rotary wavelengths, if config.json gives it.
      legacy_gelu: whether "gelu" is an older name of its tanh approximation.  If config.json has
        `hidden_activation`, too, that is the activation.
      partial: whether a part of each head may be rotated, the others being left as they are.
      rope_by_kind: whether sliding layers have a base of their own, without scaling.
      sliding_rope: the default of that base; None: the base of full layers.
      sliding: the layers with a window, from a function that returns a whole number of config.json
        given its key, default and minimum, and from the number of layers; None if no layer has one.
      window: the window if config.json lacks the key; a null there means none.
      unrotated: whether config.json lists layers without rotary embedding.
    """

    title: str
    architecture: str
    block: str
    sizes: dict[str, str]
    defaults: dict[str, int]
    activation: tuple[str, str]
    written: dict[str, Any]
    prefix: str
    embedding: str
    layers: str
    layer: Layer
    norm: str
    head: str
    pe: str = "rotary"
    fixed: dict[str, Any] = _NOTHING
    inner: str | None = None
    tied: bool = False
    positions: str | None = None
    rotary_pairs: str = "neighbours"
    out_axis: int = 0
    groups: int | None = None
    optional: tuple[str, ...] = ()
    implied: dict[str, Any] = _NOTHING
    numbers: dict[str, Number] = _NOTHING
    biases: dict[str, tuple[str, ...]] = _NOTHING
    rope: float | None = None
    legacy_gelu: bool = False
    partial: bool = False
    rope_by_kind: bool = False
    sliding_rope: float | None = None
    sliding: Callable[[Callable[..., int], int], list[int]] | None = None
    window: int | None = 4096
    unrotated: bool = False

    @property
    def one_window(self) -> bool:
        """Whether all layers have the window, if the model has one."""
        return self.sliding is _all_layers

    @property
    def flags_window(self) -> bool:
        """Whether there is a window only if config.json has a true `use_sliding_window`."""
        return self.sliding is _from_max_window_layers

    @property
    def embedding_weight(self) -> str:
        """The name of the token embedding's matrix."""
        return f"{self.prefix}{self.embedding}.weight"

    @property
    def head_weights(self) -> tuple[str, ...]:
        """The names that the output head's matrix has in files; the first is written.

        transformers 5 calls all heads lm_head.
        """
        return tuple(dict.fromkeys((f"{self.head}.weight", "lm_head.weight")))


_GPTJ = Family(
    title="GPT-J",
    architecture="GPTJForCausalLM",
    block="gptj",
    sizes=_SIZES | {"rotary_dim": "pe_rotary_dims"},
    defaults={"n_positions": 2048, "rotary_dim": 64},
    fixed={"layer_norm_epsilon": 1e-5},
    activation=("activation_function", "gelu_new"),
    inner="n_inner",
    written={"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    prefix="transformer.",
    embedding="wte",
    layers="h",
    layer=_norm("ln_1", "layer/norm")
    | _projections(*((f"attn.{name}_proj", name) for name in "qkv"), ("attn.out_proj", "o"))
    | _GPTJ_MLP,
    norm="ln_f",
    head="lm_head",
)
FAMILIES = {
    "gptj": _GPTJ,
    "codegen": _GPTJ._replace(
        title="CodeGen",
        architecture="CodeGenForCausalLM",
        layer=_norm("ln_1", "layer/norm")
        | {"attn.qkv_proj.weight": (_Q, _V, _K)}
        | _projections(("attn.out_proj", "o"))
        | _GPTJ_MLP,
        groups=4,  # for four TPU cores
    ),
    "gpt2": _GPTJ._replace(
        title="GPT-2",
        architecture="GPT2LMHeadModel",
        block="gpt2",
        pe="fixed",
        sizes=_SIZES,
        defaults={"n_positions": 1024},
        fixed=_GPTJ.fixed
        | {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        tied=True,
        positions="wpe",
        layer=_norm("ln_1", "layer/norm")
        | {"attn.c_attn.weight": (_Q, _K, _V), "attn.c_attn.bias": _QKV_BIAS}
        | _projections(("attn.c_proj", "o"))
        | _norm("ln_2", "layer/ff_norm")
        | _projections(("mlp.c_fc", "fc"), ("mlp.c_proj", "out")),
        out_axis=1,
        groups=1,
    ),
    "gpt_neox": Family(
        title="GPT-NeoX",
        architecture="GPTNeoXForCausalLM",
        block="neox",
        sizes=_NEOX_SIZES,
        defaults={"max_position_embeddings": 2048},
        fixed={"layer_norm_eps": 1e-5, "attention_bias": True},
        activation=("hidden_act", "gelu"),
        inner="intermediate_size",
        written={"attention_dropout": 0.0, "hidden_dropout": 0.0, "rotary_emb_base": 10000},
        prefix="gpt_neox.",
        embedding="embed_in",
        layers="layers",
        layer=_norm("input_layernorm", "layer/norm")
        | _norm("post_attention_layernorm", "layer/ff_norm")
        | {
            "attention.query_key_value.weight": (_Q, _K, _V),
            "attention.query_key_value.bias": _QKV_BIAS,
        }
        | _projections(("attention.dense", "o"))
        | _projections(("mlp.dense_h_to_4h", "fc"), ("mlp.dense_4h_to_h", "out")),
        norm="final_layer_norm",
        head="embed_out",
        rotary_pairs="halves",
    ),
}

_NEW_SIZES = _NEOX_SIZES | {
    "num_key_value_heads": "key_heads",
    "intermediate_size": "ff_size",
    "head_dim": "head_size",
}
_BIASED = {"attention_bias": ("q", "k", "v", "o")}


def _scale(name: str, module: str) -> Layer:
    return {f"{name}.weight": ((module, "scale"),)}


_ATTENTION = _projections(*((f"self_attn.{name}_proj", name) for name in "qkvo"))
_GATED = _projections(("mlp.gate_proj", "gate"), ("mlp.up_proj", "fc"), ("mlp.down_proj", "out"))
_QK_NORMS = _scale("self_attn.q_norm", "layer/q_norm") | _scale("self_attn.k_norm", "layer/k_norm")
_NORMS_BEFORE = _scale("input_layernorm", "layer/norm") | _scale(
    "post_attention_layernorm", "layer/ff_norm"
)
_NORMS_AFTER = _scale("post_attention_layernorm", "layer/norm_after") | _scale(
    "post_feedforward_layernorm", "layer/ff_norm_after"
)


def _all_layers(whole: Callable[..., int], layers: int) -> list[int]:
    return [*range(layers)]


def _from_max_window_layers(whole: Callable[..., int], layers: int) -> list[int]:
    return [*range(whole("max_window_layers", 28, 0), layers)]


def _all_but_each(pattern: int, whole: Callable[..., int], layers: int) -> list[int]:
    each = whole("sliding_window_pattern", pattern)
    return [layer for layer in range(layers) if (layer + 1) % each]


_LLAMA = Family(
    title="Llama",
    architecture="LlamaForCausalLM",
    block="llama",
    sizes=_NEW_SIZES,
    optional=("num_key_value_heads", "head_dim"),
    defaults={"max_position_embeddings": 2048},
    activation=("hidden_act", "silu"),
    numbers={"rms_norm_eps": Number("norm_eps", 1e-6)},
    biases=_BIASED | {"mlp_bias": ("gate", "fc", "out")},
    rope=1e4,
    written={"attention_dropout": 0.0},
    prefix="model.",
    embedding="embed_tokens",
    layers="layers",
    layer=_NORMS_BEFORE | _ATTENTION | _GATED,
    norm="norm",
    head="lm_head",
    rotary_pairs="halves",
)
_QWEN2 = _LLAMA._replace(
    title="Qwen2",
    architecture="Qwen2ForCausalLM",
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32},
    implied={"biases": ["q", "k", "v"]},
    biases={},
    sliding=_from_max_window_layers,
)
_GEMMA = _LLAMA._replace(
    title="Gemma",
    architecture="GemmaForCausalLM",
    defaults={"max_position_embeddings": 8192, "num_key_value_heads": 16, "head_dim": 256},
    fixed={"use_bidirectional_attention": False},
    activation=("hidden_act", "gelu_pytorch_tanh"),
    legacy_gelu=True,
    implied={"norm": "rms-plus-one", "embed_scale": lambda ours: ours["d_model"] ** 0.5},
    biases=_BIASED,
    tied=True,
)
_GEMMA2 = _GEMMA._replace(
    title="Gemma 2",
    architecture="Gemma2ForCausalLM",
    defaults=_GEMMA.defaults | {"num_key_value_heads": 4},
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    legacy_gelu=False,
    implied=_GEMMA.implied | {"norm_place": "both"},
    numbers=_GEMMA.numbers
    | {
        "query_pre_attn_scalar": Number("attention_scale", 256, power=-0.5),
        "attn_logit_softcapping": Number("score_cap", 50, may_lack=True),
        "final_logit_softcapping": Number("logit_cap", 30, may_lack=True),
    },
    sliding=partial(_all_but_each, 2),
    layer=_scale("input_layernorm", "layer/norm")
    | _scale("pre_feedforward_layernorm", "layer/ff_norm")
    | _NORMS_AFTER
    | _ATTENTION
    | _GATED,
)
_OLMO2 = _LLAMA._replace(
    title="OLMo 2",
    architecture="Olmo2ForCausalLM",
    implied={"norm_place": "after", "qk_norm": "projection"},
    numbers={"rms_norm_eps": Number("norm_eps", 1e-5)},
    biases=_BIASED,
    layer=_NORMS_AFTER | _QK_NORMS | _ATTENTION | _GATED,
)
FAMILIES |= {
    "llama": _LLAMA,
    "mistral": _LLAMA._replace(
        title="Mistral",
        architecture="MistralForCausalLM",
        defaults={"max_position_embeddings": 4096 * 32, "num_key_value_heads": 8},
        biases={},
        sliding=_all_layers,
    ),
    "qwen2": _QWEN2,
    "qwen3": _QWEN2._replace(
        title="Qwen3",
        architecture="Qwen3ForCausalLM",
        defaults=_QWEN2.defaults | {"head_dim": 128},
        implied={"qk_norm": "head"},
        biases=_BIASED,
        layer=_LLAMA.layer | _QK_NORMS,
    ),
    "smollm3": _LLAMA._replace(
        title="SmolLM3",
        architecture="SmolLM3ForCausalLM",
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4},
        rope=2e6,
        tied=True,
        fixed={"use_sliding_window": False},
        unrotated=True,
    ),
    "granite": _LLAMA._replace(
        title="Granite",
        architecture="GraniteForCausalLM",
        numbers=_LLAMA.numbers
        | {
            "attention_multiplier": Number("attention_scale", 1.0),
            "embedding_multiplier": Number("embed_scale", 1.0),
            "residual_multiplier": Number("residual_scale", 1.0),
            "logits_scaling": Number("logit_divisor", 1.0),
        },
    ),
    "phi3": _LLAMA._replace(
        title="Phi-3",
        architecture="Phi3ForCausalLM",
        defaults={"max_position_embeddings": 4096},
        biases={},
        numbers={"rms_norm_eps": Number("norm_eps", 1e-5)},
        written=_LLAMA.written | {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "pad_token_id": None},
        sliding=_all_layers,
        window=None,
        partial=True,
        groups=1,
        layer=_NORMS_BEFORE
        | {
            "self_attn.qkv_proj.weight": (_Q, _K, _V),
            "self_attn.o_proj.weight": (_O,),
            "mlp.gate_up_proj.weight": (("layer/gate", "w"), _FC),
            "mlp.down_proj.weight": (_OUT,),
        },
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2._replace(
        title="Gemma 3",
        architecture="Gemma3ForCausalLM",
        defaults=_GEMMA2.defaults
        | {"max_position_embeddings": 131072, "vocab_size": 262208, "num_attention_heads": 8},
        implied=_GEMMA2.implied | {"qk_norm": "head"},
        numbers=_GEMMA2.numbers
        | {
            "attn_logit_softcapping": Number("score_cap", None, may_lack=True),
            "final_logit_softcapping": Number("logit_cap", None, may_lack=True),
        },
        rope=1e6,
        rope_by_kind=True,
        sliding_rope=1e4,
        sliding=partial(_all_but_each, 6),
        layer=_GEMMA2.layer | _QK_NORMS,
    ),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2._replace(
        title="OLMo 3",
        architecture="Olmo3ForCausalLM",
        rope=5e5,
        rope_by_kind=True,
        sliding=partial(_all_but_each, 4),
    ),
    "nanochat": _LLAMA._replace(
        title="nanochat",
        architecture="NanoChatForCausalLM",
        block="gpt2",
        implied={"norm": "rms-plain", "qk_norm": "rotated", "embed_norm": True},
        numbers=_LLAMA.numbers
        | {"final_logit_softcapping": Number("logit_cap", 15, may_lack=True)},
        biases=_BIASED,
        activation=("hidden_act", "relu2"),
        rotary_pairs="backward_halves",
        layer=_ATTENTION | _projections(("mlp.fc1", "fc"), ("mlp.fc2", "out")),
    ),
}
