"""Configuration of a run: a frozen, validated dataclass, read from JSON or YAML files."""

import dataclasses
import difflib
import json
import os
import typing
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from mesh_transformer import old_names
from mesh_transformer.config_checks import check, typed
from mesh_transformer.config_files import read_config
from mesh_transformer.config_model import Architecture, Model
from mesh_transformer.families import BLOCKS, OBJECTIVES, PRESETS, ObjectiveKind, ObjectiveName
from mesh_transformer.util import InputError, Named, mismatch

# Keys that earlier checkpoints may contain, with what to use instead; null was their default.
REMOVED = {"memory_every": "set ckpt_every instead: checkpoints are written in the background, too"}
LISTED = "`mesh-transformer keys` lists the keys"  # the end of errors about unknown keys

Weight = float | list[list[float]]
"""The weight of a record set in a mixture.

It is a number, or pairs of a number of updates and the weight after them, in ascending order.
Between them the weight is interpolated linearly, elsewhere it is constant.
"""


@dataclass(frozen=True)
class Config(Model):
    """Configuration of a model and of its training.

    The fields are called keys, as in config files.  Every key of the config files of the original
    mesh-transformer-jax is supported.  Additional keys set values that the original hard-codes.

    Only `layers`, `d_model`, `n_heads` and `n_vocab` are required to build a model.  Training also
    requires `train_set` and `total_steps`.  A step is one optimizer update.

    Raises:
      InputError: at construction, if a value is invalid.  The message names the key, the value and
        the remedy.
    """

    # Partitioning over devices.
    version: Literal[1, 2] = 1  # which of the original's two models; sets defaults of other keys
    # Who inserts the collectives: the library, or XLA.  None: shard_map in version 1, else jit
    partitioning: Literal["shard_map", "jit"] | None = None
    # Devices of a run: as many virtual CPU devices are created, and `load` uses no more devices.
    tpu_size: int | None = None  # None: cores_per_replica times context_parallel
    cores_per_replica: int = 1  # mp: devices that one copy of the model is split over
    # cp: devices that the positions of each sequence are split over (docs/long-context.md)
    context_parallel: int = 1
    # ZeRO stage.  None: 0 in version 1; in version 2, 1 if early_collect is true, otherwise 3.
    zero: Literal[0, 1, 3] | None = None
    # [dp, mp] or [dp, cp, mp]: results have the bits of this mesh, whatever mesh runs it
    # (docs/same-bits.md).
    virtual_mesh: list[int] | None = field(default=None, hash=False)
    early_collect: bool = True  # used only in version 2, if zero is None
    shard_activations: bool = False  # between layers, split activations over mp by position
    # What training keeps in host memory: the optimizer's moments, or also the parameters; see
    # docs/training.md.
    offload: Literal["none", "moments", "params"] = "none"

    # The TPU that `train.py --tpu` creates (see `TpuSpec.of`); flags override these keys.
    tpu_zone: str | None = None  # Google Cloud zone
    tpu_generation: Literal["v2", "v3", "v4", "v5e", "v5p", "v6e"] = "v3"  # TPU generation
    tpu_runtime_version: str | None = None  # image of the hosts.  None: the generation's default
    tpu_tier: Literal["on_demand", "spot", "preemptible"] = "on_demand"  # price tier
    tpu_network: str | None = None  # of Google Cloud.  None: the project's default network
    tpu_subnetwork: str | None = None  # of Google Cloud.  None: the network's default

    # Precision.
    early_cast: bool = False  # store parameters in bf16
    # For generation, the bits that the weights are quantized to (docs/generation.md).  None: 8 if
    # int8_weights is true, else they are not quantized.
    weight_bits: Literal[4, 8] | None = None
    int8_weights: bool = False  # older name of weight_bits 8
    int8_cache: bool = False  # for generation, quantize keys and values to 8 bits
    bf16_optimizer: bool = False  # store the optimizer's moments in bf16, except adafactor's

    # Objective: what training minimises (docs/finetune.md).
    objective: ObjectiveName | None = None  # None: cross entropy
    beta: float | None = None  # of the objective.  None: 2 for simpo, 0 for grpo, else 0.1
    margin: float = 0.5  # of rewards, which simpo asks for
    desirable_weight: float = 1.0  # of the losses of desirable completions, with kto
    undesirable_weight: float = 1.0  # the same, of undesirable ones
    # The model that training compares with: "base", the initial weights, or a checkpoint's path.
    reference: str = "base"
    # A checkpoint of any architecture with the same vocabulary, whose probabilities training
    # learns, or "records", if they have a teacher's probabilities (docs/finetune.md).  None: none
    teacher: str | None = None
    distill_weight: float = 0.5  # of the KL divergence; the cross entropy has 1 minus it
    # Of grpo, which trains on answers of the model itself (docs/reinforcement.md):
    reward: str | None = None  # function of an answer, as FILE.py:FUNCTION
    reward_seconds: float = 10.0  # time limit of a call
    reward_workers: int = 2  # processes that call it
    on_reward_failure: Literal["continue", "stop"] = "continue"  # continue: without that answer
    group_size: int = 8  # answers per prompt
    answer_tokens: int = 256  # maximum tokens per answer
    rollout_updates: int = 1  # updates per rollout
    rollout_rows: int | None = None  # answers generated at a time.  None: all of a rollout
    curriculum: bool = False  # draw prompts less often whose answers had equal rewards
    clip_low: float = 0.2  # the ratio of probabilities is clipped below 1 - clip_low
    clip_high: float = 0.28  # and above 1 + clip_high
    importance_cap: float = 2.0  # maximum importance weight of training relative to the sampler
    scale_advantages: bool = False  # divide advantages by the standard deviation of their group
    divide_by: Literal["tokens", "answer_tokens"] = "tokens"  # the summed loss

    # Optimizer.
    per_replica_batch: int = 1  # sequences per microbatch and replica
    gradient_accumulation_steps: int = 1  # microbatches per update
    # Updates over which the number of microbatches rises linearly; 0: it is constant.
    batch_ramp_steps: int = 0
    batch_ramp_from: int = 1  # microbatches of the first update, with batch_ramp_steps
    # How the learning rate changes; see docs/training.md.
    schedule: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] | Named = "cosine"
    warmup_steps: int = 0  # updates of linear warm-up from 0 to lr
    # Updates of decay from lr to end_lr, after the warm-up; with wsd, the last ones of total_steps.
    # None: the rest of total_steps; with wsd a tenth of total_steps.
    anneal_steps: int | None = None
    warmup_tokens: int | None = None  # tokens of warm-up, in place of warmup_steps
    anneal_tokens: int | None = None  # tokens of decay, in place of anneal_steps
    lr: float = 1e-4  # peak learning rate
    end_lr: float = 1e-5  # learning rate after the decay
    weight_decay: float = 0.1  # decoupled, applied to matrices only
    # The rule by which gradients become updates; see docs/training.md.
    optimizer: Literal["adam", "adafactor", "lion", "muon", "sgd"] | Named = "adam"
    momentum: float | None = None  # of muon and sgd.  None: 0.95 for muon, 0.9 for sgd
    lion_b1: float = 0.9  # weight of the average of gradients in Lion's update
    lion_b2: float = 0.99  # decay of Lion's average of gradients
    adam_b1: float = 0.9  # decay of Adam's first moment
    adam_b2: float = 0.999  # decay of Adam's second moment
    adam_eps: float = 1e-8  # added to the root of the second moment
    clip_norm: float = 1.0  # maximum global norm of the gradient
    # Leave the model unchanged by updates whose loss or gradient norm is not finite.
    skip_nonfinite: bool = False
    # Also skip updates whose gradient norm is above this many times its median over the last 128
    # steps.
    skip_spikes: float | None = None
    max_skipped: int = 10  # skipped updates in a row after which training stops
    original_bias_copies: int = 1  # copies of each bias in the original run; see `Optimizer`
    # Functions of the gradients whose results become metrics (docs/own-parts.md).
    metrics: list[Named] = field(default_factory=list, hash=False)
    # Functions that are called with each metrics row before it is written (docs/own-parts.md).
    hooks: list[Named] = field(default_factory=list, hash=False)
    noise_scale_alpha: float = 0.01  # weight of the newest step in the noise scale's averages

    # Run.
    total_steps: int | None = None  # updates at which training ends; required to train
    seed: int = 0  # of the initial weights and adapters, the order of the data, and dropout
    bucket: str | None = None  # Google Cloud Storage bucket, URI or local folder
    model_dir: str | None = None  # folder of the checkpoints and metrics in `bucket`
    # The path of an index or a folder of records, or a mixture: {path: weight}, where a weight is a
    # number, or pairs of a number of updates and the weight after them.  A relative path that does
    # not exist is looked up in data/.  Or a function that returns data (docs/own-parts.md).
    train_set: str | Named | dict[str, Weight] | None = field(default=None, hash=False)
    # Documents of plain text, which end with the tokenizer's end-of-text token, do not attend to
    # each other.
    separate_documents: bool = False
    # Batches are cut to the smallest of these numbers of positions that holds all targets that
    # count (docs/long-context.md).
    length_buckets: list[int] = field(default_factory=list, hash=False)
    # Records shuffled together.  0: the index's order; all: those of a set, over all files
    shuffle_buffer: int | Literal["all"] = 0
    hosts_read: bool = False  # each host reads its own batch rows, so it needs access to train_set
    # Validation sets, each {name: path, as in train_set}: {"wiki": "data/wiki.val.index"}.
    val_set: dict[str, str] = field(default_factory=dict, hash=False)
    val_batches: int = 100  # batches per validation set; 0: no validation
    val_batch_multiplier: float = 1.0  # sequences per validation batch, relative to a microbatch
    val_by_position: bool = False  # also measure losses by position: 0-127, 128-255, 256-511...
    val_every: int = 500  # updates between validations; step total_steps has one, too
    ckpt_every: int = 500  # updates between checkpoints
    keep_n: int = 3  # newest checkpoints to keep
    keep_every: int = 10000  # also keep checkpoints at multiples of this step
    # Name of a val_set: also keep the step with its lowest loss, as <model folder>/best.
    keep_best: str | None = None
    # Stop after so many validations in a row without a lower loss on that set, or on the only one.
    early_stop: int | None = None
    # After a failed save, training continues and saves again later, or it stops.
    on_save_failure: Literal["continue", "stop"] = "continue"
    tokenizer: str = "gpt2"  # folder, hub name, gpt2 or bytes
    # Initial weights of a new run: model folder, step_N, Hugging Face folder or GGUF.  None: random
    tune_model_path: str | None = None
    # Ids of tokens that end an answer, besides the tokenizer's end-of-text token.
    end_tokens: list[int] | None = field(default=None, hash=False)
    # Jinja text that replaces the tokenizer's chat template; --chat-template FILE sets it.
    chat_template: str | None = field(default=None, hash=False)
    # Sampling settings of answers for which none are given, such as temp and top_k.
    sampling: dict[str, float] = field(default_factory=dict, hash=False)
    eval_harness_tasks: list[str] = field(default_factory=list, hash=False)  # lm-eval tasks
    eval_harness_limit: int | None = None  # questions per task; None: all
    # Beginnings of texts that the model continues after each val_every steps and the last one, to
    # be read; "" begins a new text.
    sample_prompts: list[str] = field(default_factory=list, hash=False)
    name: str = "mesh-transformer"  # of the run on wandb
    wandb_project: str | None = None  # to which metrics are sent.  None: to none
    comment: str = ""  # free text, not used

    def __post_init__(self) -> None:
        for key, annotation in typing.get_type_hints(type(self)).items():
            value = typed(key, getattr(self, key), annotation)
            object.__setattr__(self, key, value)
        for key, value in self.defaults().items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)
        check(self)

    def defaults(self) -> dict[str, Any]:
        """Return {key: default} for the keys whose default depends on the values of other keys."""
        second = self.version == 2
        head_size = self.head_size or self.d_model // max(self.n_heads, 1)
        block = BLOCKS[self.block or ("geglu" if second else "gptj")]
        total = self.total_steps or 0
        anneal = total // 10 if self.schedule == "wsd" else total - self.warmup_steps
        return {
            "head_size": self.d_model // max(self.n_heads, 1),
            "pe_rotary_dims": head_size,
            "key_heads": self.n_heads,
            "ff_size": 4 * self.d_model,
            "block": "geglu" if second else "gptj",
            **block.defaults,
            "partitioning": "jit" if second else "shard_map",
            "zero": (1 if self.early_collect else 3) if second else 0,
            "attention_window": self.seq,
            "attention_scale": head_size**-0.5 if head_size > 0 else None,
            "sliding_layers": None if self.sliding_window is None else list(range(self.layers)),
            "anneal_steps": max(1, anneal),
            "weight_bits": 8 if self.int8_weights else None,
            "beta": kind.beta if (kind := self.objective_kind) else None,
            "momentum": {"muon": 0.95, "sgd": 0.9}.get(self.optimizer, 0.0),
            "tpu_size": self.replica_devices,
            "lora_alpha": float(self.lora_rank),
            "lora_targets": list(block.lora_targets[: block.lora_default]),
        }

    @property
    def shards(self) -> int:
        """Number of shards of the model: that of `virtual_mesh`, by default `cores_per_replica`."""
        return self.cores_per_replica if self.virtual_mesh is None else self.virtual_mesh[-1]

    @property
    def context_shards(self) -> int:
        """Number of devices, or of virtual ones, that split the positions of each sequence."""
        if self.virtual_mesh is None:
            return self.context_parallel
        return self.virtual_mesh[1] if len(self.virtual_mesh) == 3 else 1

    @property
    def replica_devices(self) -> int:
        """Number of devices of a replica, mp times cp."""
        return self.cores_per_replica * self.context_parallel

    @property
    def position_multiple(self) -> int:
        """The number of positions of training batches must be a multiple of this."""
        chunks = 2 * self.context_shards if self.context_shards > 1 else 1  # two per device
        return chunks * self.shards if self.shard_activations else chunks

    def replicas(self, dp: int) -> int:
        """Return the number of replicas on a mesh with `dp`: that of `virtual_mesh`, or `dp`."""
        return dp if self.virtual_mesh is None else self.virtual_mesh[0]

    def virtual_replicas(self, dp: int) -> int:
        """Return the number of virtual replicas per replica of a mesh with `dp`."""
        return self.replicas(dp) // dp

    @property
    def drops(self) -> bool:
        """Whether training uses dropout."""
        return max(self.dropout_embedding, self.dropout_attention, self.dropout_residual) > 0

    @property
    def objective_kind(self) -> ObjectiveKind | None:
        """What the objective needs (see `families.OBJECTIVES`); None for cross entropy."""
        return None if self.objective is None else OBJECTIVES[self.objective]

    @property
    def has_rollouts(self) -> bool:
        """Whether training samples the texts that it trains on."""
        return self.objective_kind is not None and self.objective_kind.records == "prompts"

    @property
    def has_stored_teacher(self) -> bool:
        """Whether the probabilities of a teacher are in the records, not computed by a model."""
        return self.teacher == "records"

    @property
    def teacher_path(self) -> str | None:
        """The path of the teacher to load; None without one, and for stored probabilities."""
        return None if self.has_stored_teacher else self.teacher

    @property
    def watched_set(self) -> str | None:
        """The validation set of `keep_best` and `early_stop`; None if neither is set."""
        if self.keep_best is not None or self.early_stop is None:
            return self.keep_best
        return next(iter(self.val_set))

    def microbatches(self, step: int) -> int:
        """Return the number of microbatches of the update that follows `step` updates."""
        most, ramp = self.gradient_accumulation_steps, self.batch_ramp_steps
        rise = most - self.batch_ramp_from
        return most if step >= ramp else self.batch_ramp_from + rise * step // ramp

    @property
    def schedule_in_tokens(self) -> bool:
        """Whether the learning rate schedule counts tokens instead of updates."""
        return self.warmup_tokens is not None or self.anneal_tokens is not None

    def for_inference(self) -> "Config":
        """Return a copy of this config whose matmuls are those of evaluation and generation."""
        return self.replace(int8_matmuls=[])

    def merged(self) -> "Config":
        """Return a copy without LoRA adapters, which describes the model that they merge into."""
        return self.replace(lora_rank=0, lora_alpha=None, lora_targets=None, frozen_bits=None)

    def replace(self, **changes: Any) -> "Config":
        """Return a copy of this config with the keys in `changes` set to new values.

        Some defaults depend on other keys.  A key with such a default gets its new default: a
        change of `d_model` also changes a `head_size` that is `d_model / n_heads`.
        """
        return Config(**(self.as_dict() | _known(changes, "config")))

    def as_dict(self) -> dict[str, Any]:
        """Return all keys as a dict of JSON values, from which `from_dict` builds an equal config.

        A key whose default depends on other keys is None if it has that default.
        """
        values = dataclasses.asdict(self)
        for key, default in self.defaults().items():
            if values[key] == default:
                values[key] = None
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "config") -> "Config":
        """Build a config from a dict of JSON values.

        Args:
          where: the source of the values, such as a file; error messages start with it.
        """
        values = _known(values, where)
        missing = [k for k in ("layers", "d_model", "n_heads", "n_vocab") if k not in values]
        if missing:
            raise InputError(f"{where}: required key {missing[0]!r} is missing; add it")
        try:
            return cls(**values)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

    @classmethod
    def load(
        cls,
        path: str | None,
        version: int | None = None,
        changes: dict[str, Any] | None = None,
        model: str | None = None,
    ) -> "Config":
        """Read a config from a JSON or YAML file that holds one flat mapping, or take a preset.

        Args:
          path: a local path or a gs:// URI, or the name of a config in the folder configs/ or in
            the library, or of a preset (see `families.PRESETS`); None to take only `model`.  The
            names tiny, tiny.json and configs/tiny.json are equivalent.
          version: if not None, it replaces the file's `version`.  The file's `block` and
            `partitioning` are then ignored, so these keys get the defaults of this version.
          changes: config keys whose values replace those in the file and of the preset.
          model: the name of a preset, whose keys replace those in the file that describe the model.
        """
        values = {} if path is None else read_config(path)
        if version is not None:
            values = {k: v for k, v in values.items() if k not in ("block", "partitioning")}
            values["version"] = version
        if model is not None:
            values = with_preset(values, model)
        where = f"model {model}" if path is None else f"config {path}"
        return cls.from_dict(values | (changes or {}), where)

    @classmethod
    def of(cls, source: "Config | dict[str, Any] | str | os.PathLike[str]") -> "Config":
        """Return `source` as a Config; it may be a Config, a dict of keys or the path of a file.

        Raises:
          InputError: if the config is invalid.
        """
        if isinstance(source, Config):
            return source
        if isinstance(source, dict):
            return cls.from_dict(source)
        return cls.load(os.fspath(source))

    @classmethod
    def setting(cls, text: str) -> tuple[str, Any]:
        """Parse `KEY=VALUE`, the argument of the flag --set, into a config key and its value.

        The value is JSON, such as `1e-4`, `true`, `null` or `{"pile": "pile.val.index"}`.  Strings
        need no quotes.

        Raises:
          InputError: if there is no such key, or the value has the wrong type for the key.
        """
        key, separator, value = text.partition("=")
        hints = typing.get_type_hints(cls)
        if not separator or key not in hints:
            hint = _key_hint(key, LISTED)
            problem = f"unknown key {key!r}; {hint}" if separator else "expected KEY=VALUE"
            raise InputError(f"--set {text}: {problem}")
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = value
        if mismatch(parsed, hints[key]) and not mismatch(value, hints[key]):
            parsed = value  # a string that looks like a number
        if expected := mismatch(parsed, hints[key]):
            raise InputError(f"--set {text}: {expected}")
        return key, parsed

    def require_to_train(self, max_steps: int | None = None) -> int:
        """Raise InputError if a key that training requires is missing; return the last step.

        Args:
          max_steps: the step to stop at; if it is given, `total_steps` is not required.
        """
        total = self.total_steps if max_steps is None else max_steps
        if self.train_set is None or total is None:
            missing = "train_set" if self.train_set is None else "total_steps"
            raise InputError(f"config: training needs the key {missing!r}; add it")
        return total

    def model_folder(self) -> str:
        """Return `bucket` joined with `model_dir`: a URI such as gs://bucket/dir, or a local path.

        As in the original mesh-transformer-jax, a `bucket` without slash and leading dot is the
        name of one on Google Cloud Storage.

        Raises:
          InputError: if `bucket` or `model_dir` is not set.
        """
        if self.bucket is None or self.model_dir is None:
            raise InputError(
                "config: no model folder; set bucket and model_dir, or pass --model-dir"
            )
        bucket = self.bucket
        if "/" not in bucket and not bucket.startswith("."):
            bucket = f"gs://{bucket}"
        return f"{bucket.rstrip('/')}/{self.model_dir.strip('/')}"


def with_preset(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the config keys `values`, with those that describe the model replaced by a preset's.

    Raises:
      InputError: if there is no preset of this name.
    """
    if name not in PRESETS:
        raise InputError(f"model {name!r} is not a preset; choose one of {', '.join(PRESETS)}")
    replaced = {field.name for field in fields(Architecture)}
    replaced |= {"lora_targets", "original_bias_copies", "tokenizer"}  # may not suit the preset
    return {key: values[key] for key in values if key not in replaced} | PRESETS[name]


def _known(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the values without removed keys; raise InputError if a key is not a config key.

    For keys of the original mesh-transformer-jax, the message says what replaces them.
    """
    if line := old_names.keys_line(values):
        raise InputError(f"{where}: {line}")
    known = {f.name for f in fields(Config)}
    for key in values:
        if key in REMOVED and values[key] is not None:
            raise InputError(f"{where}: the key {key!r} no longer exists; {REMOVED[key]}")
        if key not in known | REMOVED.keys():
            hint = _key_hint(key, f"remove it; {LISTED}")
            raise InputError(f"{where}: unknown key {key!r}; {hint}")
    return {key: value for key, value in values.items() if key in known}


def _key_hint(key: str, otherwise: str) -> str:
    """Return "did you mean 'seq'?" if `key` is similar to the config key seq, else `otherwise`."""
    close = difflib.get_close_matches(str(key), typing.get_type_hints(Config), n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise
