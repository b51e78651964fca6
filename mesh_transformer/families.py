"""The kinds of norms and layers (blocks), and the sizes of published models (presets)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

# The keys of `NORMS`.
NormName = Literal[
    "layernorm",
    "layernorm-desync",
    "layernorm-nobias",
    "rmsnorm",
    "rmsnorm-bias",
    "scalenorm",
    "scalenorm-bias",
    "rms",
    "rms-plus-one",
    "rms-plain",
]
BlockName = Literal["gptj", "geglu", "gpt2", "neox", "llama"]  # the keys of `BLOCKS`
ObjectiveName = Literal["dpo", "ipo", "orpo", "simpo", "kto", "grpo"]  # the keys of `OBJECTIVES`
# The matrices of a layer, unless its block is fused, in the order in which LoRA prefers them.
MATRICES = ("q", "v", "k", "o", "fc", "out")


@dataclass(frozen=True)
class NormKind:
    """A norm of a layer's input, as `model.norms.Norm` computes it.

    Attributes:
      centered: whether x less its mean is divided by its standard deviation, and scales are
        initially 1; otherwise x is divided by its 2-norm, and scales are initially sqrt(D).
      root_mean: whether x is divided by the root of its mean square, and scales are initially 1.
      scaled: whether the result is multiplied by scales.
      plus_one: whether scales are stored less 1, and initially 0.
      scalar: whether all entries of x have the same scale, and the same offset.
      offset: whether an offset is added.
      per_shard: whether each mp shard has a scale and an offset of its own.
      original: the name of its module in mesh-transformer-jax; None for a norm that it lacks.
    """

    centered: bool = False
    root_mean: bool = False
    scaled: bool = True
    plus_one: bool = False
    scalar: bool = False
    offset: bool = False
    per_shard: bool = False
    original: str | None = None


# The kinds of norms, by the value of the config key `norm`.
NORMS: dict[str, NormKind] = {
    "layernorm": NormKind(centered=True, offset=True, original="replicated_layer_norm"),
    "layernorm-desync": NormKind(centered=True, offset=True, per_shard=True, original="layer_norm"),
    "layernorm-nobias": NormKind(centered=True, original="replicated_layer_norm"),
    "rmsnorm": NormKind(original="rms_norm"),
    "rmsnorm-bias": NormKind(offset=True, original="rms_norm"),
    "scalenorm": NormKind(scalar=True, original="rms_norm"),
    "scalenorm-bias": NormKind(scalar=True, offset=True, original="rms_norm"),
    "rms": NormKind(root_mean=True),
    "rms-plus-one": NormKind(root_mean=True, plus_one=True),
    "rms-plain": NormKind(root_mean=True, scaled=False),
}


@dataclass(frozen=True)
class InitialValues:
    """Standard deviations of a model's initial matrices, as functions of its config.

    Attributes:
      truncated: whether the normal distributions are truncated at two standard deviations.
      embedding: of the token embedding.
      positions: of learned position embeddings.
      inputs: of matrices that read the residual stream, and of the output head.
      outputs: of matrices whose outputs are added to the residual stream.
    """

    truncated: bool
    embedding: Callable[[Any], float]
    positions: Callable[[Any], float]
    inputs: Callable[[Any], float]
    outputs: Callable[[Any], float]


# The initial values of published models, by the name that a block gives as `initial`.
INITIAL_VALUES = {
    # The original mesh-transformer-jax.
    "gptj": InitialValues(
        truncated=True,
        embedding=lambda c: c.n_vocab**-0.5,
        positions=lambda c: 0.02,
        inputs=lambda c: c.d_model**-0.5,
        outputs=lambda c: 2 / c.layers / c.d_model**0.5,
    ),
    # GPT-2 (Radford 2019).
    "gpt2": InitialValues(
        truncated=False,
        embedding=lambda c: 0.02,
        positions=lambda c: 0.02,
        inputs=lambda c: 0.02,
        outputs=lambda c: 0.02 / (2 * c.layers) ** 0.5,
    ),
    # GPT-NeoX-20B (Black 2022).
    "neox": InitialValues(
        truncated=False,
        embedding=lambda c: (2 / 5 / c.d_model) ** 0.5,
        positions=lambda c: (2 / 5 / c.d_model) ** 0.5,
        inputs=lambda c: (2 / 5 / c.d_model) ** 0.5,
        outputs=lambda c: 2 / c.layers / c.d_model**0.5,
    ),
}


@dataclass(frozen=True)
class Block:
    """A kind of transformer layer: what `model.layers.TransformerLayer` computes, and its defaults.

    Attributes:
      arrangement: "parallel" if attention and feed-forward read the same residual stream, or
        "sequential" if the feed-forward reads the stream with the attention's output added.
      ff_norm: whether the feed-forward has a norm of its own; if not, it reads that of attention.
      gated: whether the hidden activations are the product of those of `gate` and of `fc`.
      fused: whether one matrix holds the columns of q, k, v and of the gate and value of a gated
        feed-forward, and another one the rows of both outputs, sorted by head; only if parallel.
      biases: the matrices with a bias, by default.
      joint_bias: whether attention and feed-forward have one bias together, after their sum.
      biased_ends: whether the embedding and the output head have biases, as GPT-J's do.
      initial: the initial values of matrices, a name in `INITIAL_VALUES`.
      lora_targets: the matrices that can have LoRA adapters.
      lora_default: how many of `lora_targets`, from the first, have adapters by default.
      hf_types: Hugging Face's model types that a model with this block can be exported as; the
        first is the default.
      own_defaults: defaults of config keys that differ from `DEFAULTS`.
    """

    arrangement: Literal["parallel", "sequential"]
    ff_norm: bool = True
    gated: bool = False
    fused: bool = False
    biases: tuple[str, ...] = MATRICES
    joint_bias: bool = False
    biased_ends: bool = False
    initial: str = "gptj"
    lora_targets: tuple[str, ...] = MATRICES
    lora_default: int = 2
    hf_types: tuple[str, ...] = ()
    own_defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def initial_values(self) -> InitialValues:
        """The entry of `INITIAL_VALUES` that `initial` names."""
        return INITIAL_VALUES[self.initial]

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the config keys in `DEFAULTS` for models with this block."""
        hf_type = self.hf_types[0] if self.hf_types else None
        return DEFAULTS | {"hf_type": hf_type, "biases": list(self.biases)} | self.own_defaults


# Config keys whose default depends on the block.
DEFAULTS: dict[str, Any] = {
    "pe": "rotary",
    "rotary_pairs": "neighbours",
    "activation": "gelu_tanh",
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "biases": [],
    "rotary_base": 10000.0,
    "tie_head": False,
    "hf_type": None,
}

# The keys of `rotary_scaling` by its type, and those that it may have besides.
ROTARY_SCALINGS: dict[Any, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings", "short_factor", "long_factor"),
}
ROTARY_OPTIONS: dict[Any, tuple[str, ...]] = {
    "yarn": (
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("attention_factor",),
}
ROTARY_LISTS = ("short_factor", "long_factor")  # with a number for each rotated pair

# The settings in the config key `sampling`.
SAMPLING = ("temp", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")

# The kinds of layers, by the value of the config key `block`.
BLOCKS: dict[str, Block] = {
    "gptj": Block(
        "parallel",
        ff_norm=False,
        biases=("fc",),
        joint_bias=True,
        biased_ends=True,
        hf_types=("gptj", "codegen"),
    ),
    "geglu": Block(
        "parallel",
        ff_norm=False,
        fused=True,
        biases=("fused_in",),
        joint_bias=True,
        biased_ends=True,
        lora_targets=("fused_in", "fused_out"),
        lora_default=1,
    ),
    "gpt2": Block(
        "sequential",
        initial="gpt2",
        hf_types=("gpt2", "gpt_neox", "nanochat"),
        own_defaults={"pe": "fixed", "tie_head": True},
    ),
    "neox": Block(
        "parallel",
        initial="neox",
        hf_types=("gpt_neox",),
        own_defaults={"rotary_pairs": "halves", "activation": "gelu"},
    ),
    "llama": Block(
        "sequential",
        gated=True,
        biases=(),
        initial="gpt2",
        lora_targets=(*MATRICES, "gate"),
        hf_types=(
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "smollm3",
            "granite",
            "phi3",
            "gemma",
            "gemma2",
            "gemma3_text",
            "olmo2",
            "olmo3",
        ),
        own_defaults={"rotary_pairs": "halves", "activation": "silu", "norm": "rms"},
    ),
}


def _model(
    block: BlockName, layers: int, d_model: int, n_heads: int, **others: Any
) -> dict[str, Any]:
    sizes = {"layers": layers, "d_model": d_model, "n_heads": n_heads}
    return {"block": block, **sizes, **others}


def _gpt2(*sizes: int) -> dict[str, Any]:
    return _model("gpt2", *sizes, n_vocab=50257, seq=1024)


def _neox(layers: int, d_model: int, n_heads: int, n_vocab: int = 50304) -> dict[str, Any]:
    rotary = {"pe_rotary_dims": d_model // n_heads // 4, "tokenizer": "EleutherAI/gpt-neox-20b"}
    return _model("neox", layers, d_model, n_heads, n_vocab=n_vocab, seq=2048, **rotary)


def _codegen(*sizes: int, rotary: int = 64) -> dict[str, Any]:
    names = {"tokenizer": "Salesforce/codegen-350M-mono", "hf_type": "codegen"}
    return _model("gptj", *sizes, n_vocab=51200, seq=2048, pe_rotary_dims=rotary, **names)


def _llama(*sizes: int, **others: Any) -> dict[str, Any]:
    *model, key_heads, ff_size = sizes
    return _model("llama", *model, key_heads=key_heads, ff_size=ff_size, **others)


def _llama3(*sizes: int, factor: float = 8.0, **others: Any) -> dict[str, Any]:
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    common = {"n_vocab": 128256, "seq": 131072, "rotary_base": 5e5, "rotary_scaling": rope}
    return _llama(*sizes, **common, tokenizer="meta-llama/Llama-3.2-1B", **others)


def _qwen3(*sizes: int, **others: Any) -> dict[str, Any]:
    common = {"n_vocab": 151936, "seq": 40960, "head_size": 128, "rotary_base": 1e6}
    common |= {"norm_eps": 1e-6, "qk_norm": "head", "hf_type": "qwen3"}
    return _llama(*sizes, **common, tokenizer="Qwen/Qwen3-0.6B", **others)


def _gemma3(layers: int, d_model: int, *sizes: int, **others: Any) -> dict[str, Any]:
    common = {"n_vocab": 262208, "seq": 131072, "head_size": 256, "rotary_base": 1e6}
    common |= {"norm": "rms-plus-one", "norm_eps": 1e-6, "norm_place": "both", "qk_norm": "head"}
    common |= {"activation": "gelu_tanh", "tie_head": True, "embed_scale": d_model**0.5}
    common |= {"rotary_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 1024}
    common |= {"sliding_rotary_base": 1e4, "sliding_layers": _all_but_each(6, layers)}
    common |= {"tokenizer": "google/gemma-3-270m", "hf_type": "gemma3_text"}
    return _llama(layers, d_model, *sizes, **common | others)


def _smollm2(*sizes: int, base: float = 1e5) -> dict[str, Any]:
    common = {"n_vocab": 49152, "seq": 8192, "rotary_base": base, "tie_head": True}
    return _llama(*sizes, **common, tokenizer="HuggingFaceTB/SmolLM2-135M")


def _all_but_each(pattern: int, layers: int) -> list[int]:
    return [layer for layer in range(layers) if (layer + 1) % pattern]


_OLMO3_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836,
}
# Gemma 3 without images: another vocabulary, and texts of a quarter of the length.
_GEMMA3_TEXT = {"n_vocab": 262144, "seq": 32768, "sliding_window": 512, "rotary_scaling": None}


# {name: the config keys that describe the model}
PRESETS: dict[str, dict[str, Any]] = {
    "gpt-j-6b": _model("gptj", 28, 4096, 16, n_vocab=50400, seq=2048, pe_rotary_dims=64),
    # As in minGPT, the sizes of GPT-1 in the architecture of GPT-2.
    "gpt1": _gpt2(12, 768, 12)
    | {"n_vocab": 40478, "seq": 512, "tokenizer": "openai-community/openai-gpt"},
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "pythia-14m": _neox(6, 128, 4),
    "pythia-31m": _neox(6, 256, 8),
    "pythia-70m": _neox(6, 512, 8),
    "pythia-160m": _neox(12, 768, 12),
    "pythia-410m": _neox(24, 1024, 16),
    "pythia-1b": _neox(16, 2048, 8),
    "pythia-1.4b": _neox(24, 2048, 16),
    "pythia-2.8b": _neox(32, 2560, 32),
    "pythia-6.9b": _neox(32, 4096, 32, 50432),
    "pythia-12b": _neox(36, 5120, 40, 50688),
    "neox-20b": _neox(44, 6144, 64, 50432) | {"activation": "gelu_tanh"},
    "codegen-350m": _codegen(20, 1024, 16, rotary=32),
    "codegen-2b": _codegen(32, 2560, 32),
    "codegen-6b": _codegen(33, 4096, 16),
    "codegen-16b": _codegen(34, 6144, 24),
    # Llama 3.2 and 3.1.
    "llama3-1b": _llama3(16, 2048, 32, 8, 8192, factor=32.0, tie_head=True),
    "llama3-3b": _llama3(28, 3072, 24, 8, 8192, factor=32.0, tie_head=True),
    "llama3-8b": _llama3(32, 4096, 32, 8, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 8, 28672),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, tie_head=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 6144, tie_head=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 8, 9728, tie_head=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 25600),
    "gemma3-270m": _gemma3(18, 640, 4, 1, 2048, **_GEMMA3_TEXT),
    "gemma3-1b": _gemma3(26, 1152, 4, 1, 6912, **_GEMMA3_TEXT),
    "gemma3-4b": _gemma3(34, 2560, 8, 4, 10240),
    "gemma3-12b": _gemma3(48, 3840, 16, 8, 15360),
    "gemma3-27b": _gemma3(62, 5376, 32, 16, 21504, head_size=128, attention_scale=168**-0.5),
    "olmo3-7b": _llama(32, 4096, 32, 32, 11008)
    | {"n_vocab": 100278, "seq": 65536, "rotary_base": 5e5, "norm_eps": 1e-6}
    | {"norm_place": "after", "qk_norm": "projection", "hf_type": "olmo3"}
    | {"sliding_window": 4096, "sliding_layers": _all_but_each(4, 32), "sliding_rotary_base": 5e5}
    | {"rotary_scaling": _OLMO3_YARN, "tokenizer": "allenai/Olmo-3-7B-Instruct"},
    "mistral-7b": _llama(32, 4096, 32, 8, 14336)  # version 0.3
    | {"n_vocab": 32768, "seq": 32768, "rotary_base": 1e6, "hf_type": "mistral"}
    | {"tokenizer": "mistralai/Mistral-7B-v0.3"},
    "smollm2-135m": _smollm2(30, 576, 9, 3, 1536),
    "smollm2-360m": _smollm2(32, 960, 15, 5, 2560),
    "smollm2-1.7b": _smollm2(24, 2048, 32, 32, 8192, base=1.3e5),
    "smollm3-3b": _llama(36, 2048, 16, 4, 11008)
    | {"n_vocab": 128256, "seq": 65536, "rotary_base": 5e6, "norm_eps": 1e-6, "tie_head": True}
    | {"unrotated_layers": [*range(3, 36, 4)], "hf_type": "smollm3"}
    | {"tokenizer": "HuggingFaceTB/SmolLM3-3B"},
}


@dataclass(frozen=True)
class ObjectiveKind:
    """What an objective (`training.objectives.OBJECTIVES`) needs.

    Attributes:
      beta: the default of the config key `beta`.
      needs_reference: whether it compares the model with the reference.
      records: the kind of records: "pairs" of a chosen and a rejected text, "labels" or "prompts".
    """

    beta: float
    needs_reference: bool = False
    records: str = "pairs"


# The kinds of objectives, by the value of the config key `objective`.
OBJECTIVES = {
    "dpo": ObjectiveKind(0.1, needs_reference=True),
    "ipo": ObjectiveKind(0.1, needs_reference=True),
    "orpo": ObjectiveKind(0.1),
    "simpo": ObjectiveKind(2.0),
    "kto": ObjectiveKind(0.1, needs_reference=True, records="labels"),
    "grpo": ObjectiveKind(0.0, records="prompts"),
}


@dataclass(frozen=True)
class Size:
    """A model size: its architecture, and the learning rate for training it from scratch."""

    name: str
    layers: int
    d_model: int
    n_heads: int
    lr: float

    @property
    def architecture(self) -> dict[str, Any]:
        head = self.d_model // self.n_heads
        return {
            "layers": self.layers,
            "d_model": self.d_model,
            "n_heads": self.n_heads,
            "pe_rotary_dims": min(head // 2, 64),
        }

    def body(self) -> int:
        """Return 12 L D^2 (L layers of width D).

        This is roughly the number of parameters without embedding and output head.
        """
        return 12 * self.layers * self.d_model**2


SIZES = (
    Size("tiny", 4, 128, 8, 3e-3),
    Size("mini", 6, 256, 8, 2e-3),
    Size("small", 8, 512, 8, 1e-3),
    Size("medium", 12, 768, 12, 6e-4),
    Size("large", 24, 1024, 16, 3e-4),
    Size("xl", 24, 2048, 16, 2e-4),
    Size("6b", 28, 4096, 16, 1.2e-4),
)
