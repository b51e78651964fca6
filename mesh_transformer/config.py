"""The one configuration of a run: a frozen, typed, validated view of the original's JSON."""

import dataclasses
import difflib
import json
import math
import os
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from mesh_transformer.util import InputError


def describe(value: Any) -> str:
    """A value with its type, for an error line."""
    return f"{type(value).__name__} {value!r}"


def mismatch(value: Any, wanted: Any) -> str | None:
    """What is expected in place of a value, with a hint where one is known; None where it fits."""
    if _matches(value, wanted):
        return None
    hint = ""
    if isinstance(value, str) and "Literal" in str(wanted):
        options = [a for a in _literals(wanted) if isinstance(a, str)]
        close = difflib.get_close_matches(value, options, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
    elif isinstance(value, str) and _matches(0.5, wanted) and _is_number(value):
        hint = "; to YAML a number with an exponent has a point: 1.0e-4"
    return f"expected {_expected(wanted)}{hint}"


def _matches(value: Any, wanted: Any) -> bool:
    """Whether a JSON value is of a field's annotated type (bool is no int; int is a float)."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, option) for option in arguments)
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in arguments)
    if origin is list:
        return isinstance(value, list) and all(_matches(v, arguments[0]) for v in value)
    if origin is dict:
        pairs = value.items() if isinstance(value, dict) else [(None, None)]
        return all(_matches(k, arguments[0]) and _matches(v, arguments[1]) for k, v in pairs)
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, wanted)


def _expected(wanted: Any) -> str:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_expected(a) for a in arguments)
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in arguments)
    if origin in (list, dict):
        return f"{origin.__name__} of {', '.join(_expected(a) for a in arguments)}"
    return "null" if wanted is type(None) else wanted.__name__


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _literals(wanted: Any) -> list[Any]:
    if typing.get_origin(wanted) is Literal:
        return list(typing.get_args(wanted))
    return [a for option in typing.get_args(wanted) for a in _literals(option)]


Norm = Literal[
    "layernorm",
    "layernorm-desync",
    "layernorm-nobias",
    "rmsnorm",
    "rmsnorm-bias",
    "scalenorm",
    "scalenorm-bias",
]

Attention = Literal["auto", "xla", "blocks", "splash", "splash_interpreted", "cudnn"]

MOST_LAYERS = 4096  # what names each layer would take minutes and all memory for many more
REQUIRED_TO_TRAIN = ("train_set", "total_steps")

# Which matrices of a block adapters can sit on; the first ones are the default.
LORA_TARGETS = {
    "gptj": ("q", "v", "k", "o", "fc", "out"),
    "geglu": ("fused_in", "fused_out"),
}
LORA_DEFAULTS = {"gptj": 2, "geglu": 1}


@dataclass(frozen=True)
class Config:
    """Every key of the original's JSON under its own name, and what it hard-coded as optional keys.

    Only the first four keys are required to build a model; `device_train.py` also asks for
    `REQUIRED_TO_TRAIN`.  Sizes are in tokens, sequences or parameters; steps are optimizer updates.

    Raises:
      InputError: at construction, naming the key, the value and the remedy.
    """

    # The model.
    layers: int
    d_model: int
    n_heads: int
    n_vocab: int
    seq: int = 2048
    norm: Norm = "layernorm"
    pe: Literal["rotary", "fixed", "t5"] = "rotary"
    pe_rotary_dims: int | None = None  # None: the whole head
    head_size: int | None = None  # None: d_model / n_heads
    block: Literal["gptj", "geglu"] | None = None  # None: by version
    attention_window: int | None = None  # None: seq; keys further back than this are masked

    # How it is spread over devices.
    version: Literal[1, 2] = 1
    partitioning: Literal["shard_map", "jit"] | None = None  # None: by version
    tpu_size: int | None = None  # None: cores_per_replica
    cores_per_replica: int = 1
    zero: Literal[0, 1, 3] | None = None  # None: 0 under shard_map; under jit by early_collect
    early_collect: bool = True  # the original's name for ZeRO 1 (true) or 3 (false) in version 2
    attention: Attention = "auto"  # how that of a whole sequence is computed (docs/attention.md)
    remat: Literal["full", "dots", "none"] = "full"  # what the backward pass computes again
    shard_activations: bool = False  # between layers each device keeps its part of the positions
    loss_chunk: int = 512  # positions of a sequence whose logits are held at once

    # The TPU that `train.py --tpu` makes; flags replace them (`TpuSpec.of` says what they mean).
    tpu_zone: str | None = None
    tpu_generation: Literal["v2", "v3", "v4", "v5e", "v5p", "v6e"] = "v3"
    tpu_runtime_version: str | None = None
    tpu_tier: Literal["on_demand", "spot", "preemptible"] = "on_demand"
    tpu_network: str | None = None
    tpu_subnetwork: str | None = None

    # The numbers.
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    early_cast: bool = False  # parameters are kept in bf16
    int8_weights: bool = False  # those that generation reads are kept in 8 bits
    bf16_optimizer: bool = False  # Adam's moments are kept in bf16

    # The optimizer.
    per_replica_batch: int = 1
    gradient_accumulation_steps: int = 1
    warmup_steps: int = 0
    anneal_steps: int = 1
    lr: float = 1e-4
    end_lr: float = 1e-5
    weight_decay: float = 0.1
    adam_b1: float = 0.9
    adam_b2: float = 0.999
    adam_eps: float = 1e-8
    clip_norm: float = 1.0
    z_loss: float = 1e-4
    original_bias_copies: int = 1
    noise_scale_alpha: float = 0.01

    # LoRA: adapters alone are trained, on a model that is given (docs/finetune.md).
    lora_rank: int = 0  # 0: all of the model is trained
    lora_alpha: float | None = None  # None: lora_rank; what an adapter adds times this over rank
    lora_targets: list[str] | None = field(default=None, hash=False)  # None: by block

    # The run.
    total_steps: int | None = None
    seed: int = 0
    bucket: str | None = None
    model_dir: str | None = None
    train_set: str | dict[str, float] | None = field(default=None, hash=False)  # or sets: weights
    shuffle_buffer: int = 0  # so many records are shuffled together; 0 is the index's order
    hosts_read: bool = False  # each host reads its own part of train_set, which all of them see
    val_set: dict[str, str] = field(default_factory=dict, hash=False)
    val_batches: int = 100
    val_every: int = 500
    ckpt_every: int = 500
    keep_n: int = 3
    keep_every: int = 10000
    tokenizer: str = "gpt2"
    eval_harness_tasks: list[str] = field(default_factory=list, hash=False)
    eval_harness_limit: int | None = None  # questions of each task; None: all
    name: str = "mesh-transformer"
    wandb_project: str | None = None
    comment: str = ""

    def __post_init__(self) -> None:
        for key, wanted in typing.get_type_hints(type(self)).items():
            value = _typed(key, getattr(self, key), wanted)
            object.__setattr__(self, key, value)
        for key, value in self._defaults().items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)
        _check(self)

    def _defaults(self) -> dict[str, Any]:
        """What the keys that may be left out (None) stand for, given the others."""
        second = self.version == 2
        head_size = self.head_size or self.d_model // max(self.n_heads, 1)
        return {
            "head_size": self.d_model // max(self.n_heads, 1),
            "pe_rotary_dims": head_size,
            "block": "geglu" if second else "gptj",
            "partitioning": "jit" if second else "shard_map",
            "zero": (1 if self.early_collect else 3) if second else 0,
            "attention_window": self.seq,
            "tpu_size": self.cores_per_replica,
            "lora_alpha": float(self.lora_rank),
            "lora_targets": self._lora_defaults(),
        }

    def _lora_defaults(self) -> list[str]:
        block = self.block or ("geglu" if self.version == 2 else "gptj")
        return list(LORA_TARGETS[block][: LORA_DEFAULTS[block]])

    @property
    def d_head(self) -> int:
        """Size of one head (`head_size` with its default filled in)."""
        assert self.head_size is not None
        return self.head_size

    @property
    def d_rotary(self) -> int:
        """How many of a head's dimensions are rotated (`pe_rotary_dims`, filled in)."""
        assert self.pe_rotary_dims is not None
        return self.pe_rotary_dims

    @property
    def d_ff(self) -> int:
        """Width of the feed-forward part."""
        return 4 * self.d_model

    @property
    def window(self) -> int:
        """How many positions a query sees, itself included."""
        assert self.attention_window is not None
        return self.attention_window

    @property
    def lora_scale(self) -> float:
        """What an adapter's output is multiplied by."""
        assert self.lora_alpha is not None
        return self.lora_alpha / self.lora_rank

    def adapts(self, target: str) -> bool:
        """Whether an adapter sits on a matrix of every layer."""
        assert self.lora_targets is not None
        return self.lora_rank > 0 and target in self.lora_targets

    def merged(self) -> "Config":
        """The config of the model without adapters, as their base is, or they merged into it."""
        return self.replace(lora_rank=0, lora_alpha=None, lora_targets=None)

    def replace(self, **changes: Any) -> "Config":
        """A copy with `changes`; keys that were at their derived default follow them."""
        return Config(**(self.as_dict() | changes))

    def as_dict(self) -> dict[str, Any]:
        """All keys, JSON-able; `from_dict` gives the same config back.

        A key at its derived default is None, so that it follows a change of the others.
        """
        values = dataclasses.asdict(self)
        for key, default in self._defaults().items():
            if values[key] == default:
                values[key] = None
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "config") -> "Config":
        """Builds a config from JSON's values; `where` names their source in error lines."""
        known = {f.name for f in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else "remove it"
                raise InputError(f"{where}: unknown key {key!r}; {hint}")
        missing = [k for k in ("layers", "d_model", "n_heads", "n_vocab") if k not in values]
        if missing:
            raise InputError(f"{where}: required key {missing[0]!r} is missing; add it")
        try:
            return cls(**values)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

    @classmethod
    def load(cls, path: str, version: int | None = None) -> "Config":
        """Reads a JSON or YAML file of one flat mapping.

        `version` replaces the file's own, and its `block` and `partitioning`, which it sets.
        """
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except OSError as error:
            raise InputError(
                f"config {path}: cannot be read ({error.strerror}); give the path of a JSON file"
            ) from None
        except UnicodeDecodeError:
            raise InputError(f"config {path}: not UTF-8 text; give a JSON or YAML file") from None
        values = _parse(path, text)
        if not isinstance(values, dict):
            raise InputError(
                f"config {path}: found {describe(values)}, expected one mapping of keys to values"
            )
        if version is not None:
            values = {k: v for k, v in values.items() if k not in ("block", "partitioning")}
            values["version"] = version
        return cls.from_dict(values, f"config {path}")

    @classmethod
    def of(cls, source: "Config | dict[str, Any] | str | os.PathLike[str]") -> "Config":
        """A config from whatever a caller has: a Config, a dict, or the path of a file."""
        if isinstance(source, Config):
            return source
        if isinstance(source, dict):
            return cls.from_dict(source)
        return cls.load(os.fspath(source))

    def require_to_train(self) -> None:
        """Raises InputError where a key that training needs is missing."""
        for key in REQUIRED_TO_TRAIN:
            if getattr(self, key) is None:
                raise InputError(f"config: training needs the key {key!r}; add it")

    def model_folder(self) -> str:
        """`bucket` joined with `model_dir`: a gs:// or other URI, or a local folder.

        A bare bucket name means Google Cloud Storage, as in the original; a value with a slash
        or a leading dot is a path.
        """
        if self.bucket is None or self.model_dir is None:
            raise InputError(
                "config: no model folder; set bucket and model_dir, or pass --model-dir"
            )
        bucket = self.bucket
        if "/" not in bucket and not bucket.startswith("."):
            bucket = f"gs://{bucket}"
        return f"{bucket.rstrip('/')}/{self.model_dir.strip('/')}"


def _parse(path: str, text: str) -> Any:
    if path.endswith((".yaml", ".yml")):
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            line = " ".join(str(error).split())
            raise InputError(f"config {path}: not YAML: {line}") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"config {path}: not JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None


def _typed(key: str, value: Any, wanted: Any) -> Any:
    if key == "val_set" and value is None:
        return {}
    if expected := mismatch(value, wanted):
        raise InputError(f"{key} is {describe(value)}, {expected}")
    return float(value) if wanted is float else value


def _check(c: Config) -> None:
    """What the types cannot say: ranges and what must divide what."""
    positive = (
        "layers d_model n_heads n_vocab seq head_size attention_window tpu_size cores_per_replica "
        "per_replica_batch gradient_accumulation_steps anneal_steps original_bias_copies "
        "loss_chunk val_every ckpt_every keep_n keep_every"
    )
    for key in positive.split(" "):
        if getattr(c, key) < 1:
            raise InputError(f"{key} is {getattr(c, key)}, expected at least 1")
    if c.layers > MOST_LAYERS:
        raise InputError(f"layers is {c.layers}, expected at most {MOST_LAYERS}")
    at_least_0 = "warmup_steps lr end_lr weight_decay adam_eps z_loss shuffle_buffer val_batches"
    for key in at_least_0.split(" "):
        if getattr(c, key) < 0:
            raise InputError(f"{key} is {getattr(c, key)}, expected at least 0")
    for key in ("adam_b1", "adam_b2", "noise_scale_alpha"):
        if not 0 <= getattr(c, key) < 1:
            raise InputError(f"{key} is {getattr(c, key)}, expected at least 0 and below 1")
    for key, value in dataclasses.asdict(c).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{key} is {value}, expected a finite number")
    if c.clip_norm <= 0:
        raise InputError(f"clip_norm is {c.clip_norm}, expected above 0")
    if c.attention_window is not None and c.attention_window > c.seq:
        raise InputError(
            f"attention_window is {c.attention_window}, expected at most seq ({c.seq})"
        )
    _check_lora(c)
    _check_divisions(c)


def _check_lora(c: Config) -> None:
    if not 0 <= c.lora_rank <= c.d_model:
        raise InputError(f"lora_rank is {c.lora_rank}, expected 0 (off) to d_model ({c.d_model})")
    assert c.lora_alpha is not None
    assert c.lora_targets is not None
    assert c.block is not None
    if c.lora_rank and c.lora_alpha <= 0:
        raise InputError(f"lora_alpha is {c.lora_alpha}, expected above 0")
    allowed = LORA_TARGETS[c.block]
    for target in c.lora_targets:
        if target not in allowed:
            raise InputError(
                f"lora_targets has {target!r}, expected some of {', '.join(allowed)} "
                f"(block {c.block})"
            )
    if len(set(c.lora_targets)) < max(len(c.lora_targets), 1):
        raise InputError(f"lora_targets is {c.lora_targets}, expected at least one, each once")


def _check_divisions(c: Config) -> None:
    def divides(what: str, size: int, key: str, remedy: str) -> None:
        by = getattr(c, key)
        if size % by:
            raise InputError(f"{what} is {size}, which {key} {by} does not divide; {remedy}")

    if c.head_size == c.d_model // c.n_heads:
        divides("d_model", c.d_model, "n_heads", "change either, or set head_size")
    if c.block == "geglu":
        divides("the feed-forward width (4 * d_model)", c.d_ff, "n_heads", "change either")
    shards = "cores_per_replica"
    divides("n_heads", c.n_heads, shards, f"choose heads in a multiple of it, or another {shards}")
    divides("n_vocab", c.n_vocab, shards, "round n_vocab up to a multiple of it")
    if c.pe == "fixed":
        divides("d_model", c.d_model, shards, f"change d_model or {shards} (pe fixed splits it)")
    if c.shard_activations:
        divides("seq", c.seq, shards, f"change {shards}, or set shard_activations to false")
    if c.block == "gptj":
        divides("the feed-forward width (4 * d_model)", c.d_ff, shards, f"change {shards}")
    assert c.tpu_size is not None
    divides("tpu_size", c.tpu_size, shards, f"give tpu_size a multiple of it (or lower {shards})")
    if c.pe == "rotary" and c.d_rotary > c.d_head:
        raise InputError(
            f"pe_rotary_dims is {c.d_rotary}, above the head size {c.d_head} "
            f"(d_model / n_heads); lower pe_rotary_dims"
        )
    if c.pe == "rotary" and (c.d_rotary % 2 or not c.d_rotary):
        raise InputError(f"pe_rotary_dims is {c.d_rotary}, expected a positive even number")
