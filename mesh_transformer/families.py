"""The kinds of transformer layers (blocks), and the sizes of published models (presets)."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Block:
    """What a block determines besides its computation, which is in `model.layers`.

    Attributes:
      lora_targets: the matrices that can have LoRA adapters.
      lora_default: how many of `lora_targets`, from the first, have adapters by default.
      biased_ends: whether the embedding and the output head have biases, as GPT-J's do.
      hf_types: Hugging Face's model types that a model with this block can be exported as; the
        first is the default.
      own_defaults: defaults of config keys that differ from `DEFAULTS`.
    """

    lora_targets: tuple[str, ...] = ("q", "v", "k", "o", "fc", "out")
    lora_default: int = 2
    biased_ends: bool = False
    hf_types: tuple[str, ...] = ()
    own_defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the config keys in `DEFAULTS` for models with this block."""
        hf_type = self.hf_types[0] if self.hf_types else None
        return DEFAULTS | {"hf_type": hf_type} | self.own_defaults


# Config keys whose default depends on the block.
DEFAULTS: dict[str, Any] = {
    "pe": "rotary",
    "rotary_pairs": "neighbours",
    "activation": "gelu_tanh",
    "tie_head": False,
    "hf_type": None,
}

# The kinds of layers, by the value of the config key `block`.
BLOCKS = {
    # Attention and feed-forward read the same norm, and their outputs are added.
    "gptj": Block(biased_ends=True, hf_types=("gptj", "codegen")),
    # The block gptj with gated feed-forward, and with one matrix in and one out.
    "geglu": Block(lora_targets=("fused_in", "fused_out"), lora_default=1, biased_ends=True),
    # Attention, then feed-forward, each with a norm of its own.
    "gpt2": Block(hf_types=("gpt2", "gpt_neox"), own_defaults={"pe": "fixed", "tie_head": True}),
    # As gptj, but attention and feed-forward each have a norm of their own.
    "neox": Block(
        hf_types=("gpt_neox",), own_defaults={"rotary_pairs": "halves", "activation": "gelu"}
    ),
}


def _gpt2(layers: int, d_model: int, n_heads: int) -> dict[str, Any]:
    sizes = {"layers": layers, "d_model": d_model, "n_heads": n_heads}
    return {"block": "gpt2", **sizes, "n_vocab": 50257, "seq": 1024}


def _neox(layers: int, d_model: int, n_heads: int, n_vocab: int = 50304) -> dict[str, Any]:
    sizes = {"layers": layers, "d_model": d_model, "n_heads": n_heads, "n_vocab": n_vocab}
    rotary = {"pe_rotary_dims": d_model // n_heads // 4, "tokenizer": "EleutherAI/gpt-neox-20b"}
    return {"block": "neox", **sizes, "seq": 2048, **rotary}


def _codegen(layers: int, d_model: int, n_heads: int, rotary: int = 64) -> dict[str, Any]:
    sizes = {"layers": layers, "d_model": d_model, "n_heads": n_heads, "n_vocab": 51200}
    names = {"tokenizer": "Salesforce/codegen-350M-mono", "hf_type": "codegen"}
    return {"block": "gptj", **sizes, "seq": 2048, "pe_rotary_dims": rotary, **names}


# {name: the config keys that describe the model}
PRESETS: dict[str, dict[str, Any]] = {
    "gpt-j-6b": {
        "block": "gptj",
        "layers": 28,
        "d_model": 4096,
        "n_heads": 16,
        "n_vocab": 50400,
        "seq": 2048,
        "pe_rotary_dims": 64,
    },
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
    "codegen-350m": _codegen(20, 1024, 16, 32),
    "codegen-2b": _codegen(32, 2560, 32),
    "codegen-6b": _codegen(33, 4096, 16),
    "codegen-16b": _codegen(34, 6144, 24),
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
