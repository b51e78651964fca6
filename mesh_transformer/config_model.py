"""The config keys of a model: what it is, and how it is computed.

`config.Config` adds those of a run.
"""

from dataclasses import dataclass, field, fields
from typing import Literal

from mesh_transformer.families import BLOCKS, NORMS, Block, BlockName, NormKind, NormName
from mesh_transformer.util import Named, is_named

# Backends of attention; see docs/attention.md.
Attention = Literal["auto", "xla", "blocks", "splash", "splash_interpreted", "cudnn"]


@dataclass(frozen=True)
class Architecture:
    """The config keys that describe a network: a preset sets them, and checkpoints compare them."""

    # Model.
    layers: int  # number of transformer layers
    d_model: int  # width of the residual stream
    n_heads: int  # attention heads per layer
    n_vocab: int  # rows of the embedding: the tokenizer's vocabulary, possibly padded
    seq: int = 2048  # tokens per sequence
    # The kind of layer; see `families.BLOCKS`.  None: gptj in version 1, geglu in version 2.
    block: BlockName | None = None
    # See `families.NORMS`, or a function (docs/own-parts.md).  None: rms in block llama, else
    # layernorm.
    norm: NormName | Named | None = None
    norm_eps: float | None = None  # added to what norms divide by.  None: 1e-5
    norm_place: Literal["before", "after", "both"] = "before"  # of attention and feed-forward
    # The norm of queries and keys: of each head, before ("head") or after the rotary embedding
    # ("rotated"), or of all heads together ("projection").
    qk_norm: Literal["none", "head", "rotated", "projection"] = "none"
    embed_norm: bool = False  # the embedding is followed by a norm
    biases: list[str] | None = field(default=None, hash=False)  # matrices.  None: the block's
    # Position embedding: rotary, learned ("fixed"), T5's bias, or a function of queries and keys
    # (docs/own-parts.md).  None: fixed in block gpt2, else rotary.
    pe: Literal["rotary", "fixed", "t5"] | Named | None = None
    pe_rotary_dims: int | None = None  # rotated entries of a head.  None: head_size
    # The entries of a head that are rotated together: neighbours, or one of each half of the
    # rotated part, forward or ("backward_halves") backward.  None: halves in blocks neox and
    # llama, else neighbours.
    rotary_pairs: Literal["neighbours", "halves", "backward_halves"] | None = None
    rotary_base: float | None = None  # of the wavelengths of rotary positions.  None: 10000
    # The change of the wavelengths for longer texts: Hugging Face's `rope_scaling` of type linear,
    # dynamic, llama3, yarn or longrope, such as {"rope_type": "linear", "factor": 8.0}.
    rotary_scaling: dict[str, object] | None = field(default=None, hash=False)
    unrotated_layers: list[int] | None = field(default=None, hash=False)  # numbers, from 0
    head_size: int | None = None  # entries of a head.  None: d_model / n_heads
    key_heads: int | None = None  # heads of keys and values, shared by queries.  None: n_heads
    ff_size: int | None = None  # width of the feed-forward.  None: 4 * d_model
    # GELU exactly, or with its tanh approximation, SiLU, squared ReLU or a function
    # (docs/own-parts.md).  None: gelu in block neox, silu in llama, else gelu_tanh.
    activation: Literal["gelu", "gelu_tanh", "silu", "relu2"] | Named | None = None
    tie_head: bool | None = None  # the output head is the embedding.  None: true in block gpt2
    # Hugging Face's model type to export as.  None: the block's; codegen is a gptj, too.
    hf_type: str | None = None
    attention_window: int | None = None  # positions that a token attends to.  None: seq
    sliding_window: int | None = None  # the same, of the layers in `sliding_layers`
    sliding_layers: list[int] | None = field(default=None, hash=False)  # from 0.  None: all
    # Of the sliding layers, without rotary_scaling.  None: they rotate like other layers
    sliding_rotary_base: float | None = None
    attention_scale: float | None = None  # factor of attention scores.  None: head_size ** -0.5
    score_cap: float | None = None  # bound c of attention scores x: c tanh(x / c).  None: none
    logit_cap: float | None = None  # the same, of logits
    logit_divisor: float = 1.0  # of logits
    embed_scale: float = 1.0  # factor of the embedding
    residual_scale: float = 1.0  # factor of what attention and feed-forward add

    @property
    def layer_kind(self) -> Block:
        """The properties of the model's block (see `families.BLOCKS`)."""
        assert self.block is not None
        return BLOCKS[self.block]

    @property
    def norm_kind(self) -> NormKind:
        """The properties of the model's norm (see `families.NORMS`)."""
        return NormKind(scaled=False) if is_named(self.norm) else NORMS[str(self.norm)]

    @property
    def d_head(self) -> int:
        """Size of one attention head (`head_size` with its default filled in)."""
        assert self.head_size is not None
        return self.head_size

    @property
    def d_rotary(self) -> int:
        """Number of rotated dimensions per head (`pe_rotary_dims` with its default filled in)."""
        assert self.pe_rotary_dims is not None
        return self.pe_rotary_dims

    @property
    def d_ff(self) -> int:
        """Width of the feed-forward layer (`ff_size` with its default filled in)."""
        assert self.ff_size is not None
        return self.ff_size

    @property
    def group(self) -> int:
        """Number of attention heads that share a head of keys and values."""
        assert self.key_heads is not None
        return self.n_heads // self.key_heads

    @property
    def copies_key_heads(self) -> bool:
        """Whether all mp shards store the matrices of all key heads: mp does not divide them."""
        assert self.key_heads is not None
        return self.group > 1 and self.key_heads % self.shards > 0

    @property
    def shards(self) -> int:
        """Number of shards of the model, on which `copies_key_heads` and one norm depend."""
        return 1

    def has_bias(self, matrix: str) -> bool:
        """Return whether each layer's matrix with this name, such as "q", has a bias."""
        assert self.biases is not None
        return matrix in self.biases

    @property
    def window(self) -> int:
        """Maximum number of positions that a query attends to, including its own position."""
        assert self.attention_window is not None
        return self.attention_window


@dataclass(frozen=True)
class Model(Architecture):
    """The config keys that the code in `model/` reads."""

    # Computation.
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the computation
    attention: Attention = "auto"  # backend for training and scoring (docs/attention.md)
    # With context_parallel, what attention exchanges: keys and values ("ring"), or heads for
    # positions ("all_to_all"); see docs/long-context.md.  None: chosen by `is_ring`
    context_attention: Literal["ring", "all_to_all"] | None = None
    exact: bool = False  # every token has the same probability everywhere (docs/same-bits.md)
    paged_attention: Literal["xla", "pallas"] = "xla"  # backend of servers (docs/attention.md)
    remat: Literal["full", "dots", "none"] = "full"  # what the backward pass recomputes
    # In sequences that pack several texts, positions start at 0 in each text, or count through.
    packed_positions: Literal["restart", "continue"] = "restart"
    loss_chunk: int = 512  # positions per sequence whose logits are in memory at once
    # The matmuls of the layers that training computes with 8-bit integers: any of "forward",
    # "input_gradients" and "weight_gradients"; see docs/training.md.
    int8_matmuls: list[str] = field(default_factory=list, hash=False)
    z_loss: float = 1e-4  # weight of the z-loss; see `Losses`
    # A function of the cross entropy of each target, which training minimises (docs/own-parts.md).
    # None: the cross entropy
    token_loss: Named | None = None
    # With a teacher, the KL divergence to minimise: weighted by the teacher's probabilities
    # ("forward"), or by the student's.
    distill_kl: Literal["forward", "reverse"] = "forward"
    distill_temperature: float = 1.0  # both models' logits are divided by it

    # Dropout: probabilities with which training sets activations to 0 (`model.dropout`).
    dropout_embedding: float = 0.0  # of the embedding
    dropout_attention: float = 0.0  # of the attention probabilities
    dropout_residual: float = 0.0  # of what a layer adds to the residual stream

    # LoRA: only adapters are trained, on top of an existing model (docs/finetune.md).
    lora_rank: int = 0  # of the adapters; 0: train the whole model
    lora_alpha: float | None = None  # adapters are scaled by alpha / rank.  None: lora_rank
    # Matrices with adapters, by their names in `families.BLOCKS`.  None: fused_in in block geglu,
    # else q and v.
    lora_targets: list[str] | None = field(default=None, hash=False)
    # The bits in which training stores the frozen matrices of the layers.  None: those of dtype
    frozen_bits: Literal[4, 8] | None = None

    @property
    def model(self) -> "Model":
        """These keys alone or, if the layout or parameters depend on mp, all keys."""
        if self.norm == "layernorm-desync" or self.copies_key_heads:
            return self
        return Model(**{field.name: getattr(self, field.name) for field in fields(Model)})

    @property
    def lora_scale(self) -> float:
        """Factor `lora_alpha / lora_rank`, by which an adapter's output is multiplied."""
        assert self.lora_alpha is not None
        return self.lora_alpha / self.lora_rank

    def adapts(self, target: str) -> bool:
        """Return whether each layer's matrix `target`, such as "q", has a LoRA adapter."""
        assert self.lora_targets is not None
        return self.lora_rank > 0 and target in self.lora_targets
