"""Choice of a config for training on a record set: model size, batch, schedule and mesh.

Nothing is compiled.  The rules are:

* Model size: 20 training tokens per parameter (Hoffmann et al. 2022, Chinchilla).  Repeated tokens
  count for up to 4 epochs (Muennighoff et al. 2023, Scaling data-constrained language models).
  Parameters of the embedding and the output head are not counted: with GPT-2's vocabulary they
  outnumber all others in small models, but most of them are never used by a small corpus.
* Learning rate: that of the GPT-3 model of the same size (Brown et al. 2020, table 2.1).  Models
  smaller than all GPT-3 models get a higher one.  Fine-tuning uses 0.4 times this rate.  For
  GPT-J-6B, trained with 1.2e-4, this gives about the 5e-5 that its authors recommend.
* Batch: the size that gives 1000 steps in all (200 for fine-tuning), but at least 2**10 tokens per
  step and at most 2**19 (2**15 for fine-tuning).
* Mesh: the smallest number of devices per replica whose memory suffices.  They split the model or,
  if the records are long (`analytic.context_sizes`) and that is not enough, the positions too.
* With a batch in tokens, this batch is kept, and mesh, ZeRO, remat and microbatches are the fastest
  on paper of those that fit (`search.fastest`).
"""

import dataclasses
import itertools
import math
from typing import Any

from mesh_transformer.config import Config
from mesh_transformer.config_model import Architecture
from mesh_transformer.data.record_set import SetSize
from mesh_transformer.families import SIZES, Size
from mesh_transformer.mesh.accelerators import GIB, Hardware, assumed_cpu
from mesh_transformer.model import flops
from mesh_transformer.performance import search
from mesh_transformer.performance.analytic import (
    attention_on,
    context_sizes,
    estimate_step,
    memory_bytes,
)
from mesh_transformer.performance.topology import Slice, format_mesh
from mesh_transformer.util import InputError

TOKENS_PER_PARAMETER = 20
USEFUL_EPOCHS = 4
FINE_TUNING_LR = 0.4
STEPS, FINE_TUNING_STEPS = 1000, 200
LEAST_TOKENS, MOST_TOKENS, MOST_FINE_TUNING_TOKENS = 1 << 10, 1 << 19, 1 << 15  # per step
MOST_ROWS = 64  # sequences per device and microbatch
WARMUP = 3000  # warmup steps of GPT-J; at most a tenth of the steps is used
VOCABULARY = 50400  # GPT-2's 50257 tokens, padded as in GPT-J
# Maximum estimated memory of a step, as a share of the device's memory.  The estimate is a lower
# bound, and on a laptop other programs need memory too.
MEMORY_SHARE = {"cpu": 0.5, "gpu": 0.8, "tpu": 0.95}
# Time of a step on a CPU, divided by its time with matmuls and memory at full speed.
CPU_SLOWDOWN = 2.0


# The config keys of a base model that its fine-tuning keeps.
KEPT = {field.name for field in dataclasses.fields(Architecture)} - {"seq"}
KEPT |= {"version", "partitioning", "tokenizer", "end_tokens", "chat_template", "sampling"}


@dataclasses.dataclass(frozen=True)
class Device:
    """The devices to train on, all of the same kind.

    Attributes:
      name: name of the devices in messages, such as v3-8 or cpu.
      platform: "cpu", "gpu" or "tpu".
      count: number of devices.
      memory: bytes that a program may use on one device.
      dtype: the compute dtype that suits the devices.
      hardware: peak FLOP/s and bandwidths of one device; None if unknown.
    """

    name: str
    platform: str
    count: int
    memory: int
    dtype: str
    hardware: Hardware | None

    @property
    def budget(self) -> int:
        """The limit for the estimated memory of a step, in bytes per device.

        It is the device's memory (`memory`) times the platform's `MEMORY_SHARE`.
        """
        return int(self.memory * MEMORY_SHARE[self.platform])


def device_of(devices: Slice) -> Device:
    """Return the `Device` that describes a TPU slice or this machine's devices.

    The speed of CPUs is assumed, not measured, so that equal machines get equal configs.
    Its `dtype` is "float32" for CPUs and for GPUs without bf16 (compute capability below 8), and
    otherwise "bfloat16".
    """
    platform = devices.platform
    major = str(getattr(devices, "compute_capability", "")).partition(".")[0]
    lacks_bf16 = major.isdecimal() and int(major) < 8  # NVIDIA GPUs before Ampere, such as the V100
    dtype = "float32" if platform == "cpu" or lacks_bf16 else "bfloat16"
    try:
        if platform == "cpu":
            hardware = assumed_cpu().part(devices.devices)
        else:
            hardware = devices.hardware(dtype)
    except InputError:  # not in the hardware table
        hardware = None
    return Device(devices.name, platform, devices.devices, devices.hbm, dtype, hardware)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A chosen config, and why it was chosen.

    Attributes:
      values: the config's keys and their values.
      steps_per_epoch: training steps per pass over the record set; may be a fraction.
      reasons: lines of text that explain the choice to the user.
    """

    values: dict[str, Any]
    steps_per_epoch: float
    reasons: list[str]


@dataclasses.dataclass(frozen=True)
class _Request:
    """The arguments of `recipe`, with defaults filled in.

    Attributes:
      fixed: the config keys and values that do not depend on the model size.
    """

    corpus: SetSize
    held_out: SetSize | None
    device: Device
    base: Config | None
    size: str | None
    epochs: float
    minutes: float | None
    changes: dict[str, Any]
    batch_tokens: int | None

    @property
    def fixed(self) -> dict[str, Any]:
        keys = {"n_vocab": VOCABULARY, "seq": self.corpus.seq, "dtype": self.device.dtype}
        return keys | self.changes

    @property
    def tokens(self) -> int:
        """The number of tokens of one epoch."""
        return self.corpus.sequences * self.corpus.seq


def recipe(
    corpus: SetSize,
    held_out: SetSize | None,
    device: Device,
    *,
    base: Config | None = None,
    size: str | None = None,
    epochs: float | None = None,
    minutes: float | None = None,
    changes: dict[str, Any] | None = None,
    batch_tokens: int | None = None,
) -> Recipe:
    """Choose a config for training on a set of records.

    The config has every key that training needs, except the paths of files and folders.

    Args:
      corpus: the size of the training set.
      held_out: the size of the validation set; None if there is none.
      device: the devices to train on.
      base: the config of the model to fine-tune; None to train from scratch.
      size: the name of one of `SIZES`; None to choose it.
      epochs: passes over the training set; None for 4, or for 1 if a base model is fine-tuned.
      minutes: maximum training time on CPUs; ignored on other devices.
      changes: config keys and values set by the user, which override those that would be chosen.
      batch_tokens: tokens per step; None to choose it.

    Raises:
      InputError: if no model fits the devices, if the training set is too small for one step, if
        training and validation records differ in length, or if the records are longer than the base
        model's sequences.
    """
    if held_out is not None and held_out.seq != corpus.seq:
        raise InputError(
            f"the validation records have {held_out.seq} tokens per sequence, the training records "
            f"{corpus.seq}; create both with the same --seq"
        )
    if base is not None and corpus.seq > base.seq:
        raise InputError(
            f"the records have {corpus.seq} tokens per sequence, but the base model was trained "
            f"with at most {base.seq}; recreate them with --seq {base.seq}"
        )
    epochs = epochs or (USEFUL_EPOCHS if base is None else 1)
    request = _Request(
        corpus, held_out, device, base, size, epochs, minutes, changes or {}, batch_tokens
    )
    if base is not None:
        model = _base_keys(base, request)
        # That of the size whose number of parameters is nearest.
        body = 12 * base.layers * base.d_model**2
        lr = FINE_TUNING_LR * min(SIZES, key=lambda size: abs(math.log(size.body() / body))).lr
        reason = f"model: that of the base, {_millions(flops.n_params(base))} parameters"
    else:
        chosen, reason = _choose_size(request)
        model, lr = chosen.architecture | request.fixed, chosen.lr
        changed = [
            f"{key} {model[key]} instead of {value}"
            for key, value in chosen.architecture.items()
            if model[key] != value
        ]
        reason += f"; as set: {', '.join(changed)}" if changed else ""
    return _schedule(request, model, lr, reason)


def _base_keys(base: Config, request: _Request) -> dict[str, Any]:
    """Return the config keys for fine-tuning: the base's architecture, then `request.fixed`."""
    kept = base.as_dict()
    keys = {key: kept[key] for key in kept if key in KEPT and kept[key] is not None}
    keys |= request.fixed
    keys["n_vocab"] = request.changes.get("n_vocab", base.n_vocab)
    if base.window != base.seq:
        keys["attention_window"] = min(base.window, request.corpus.seq)
    return keys


def _choose_size(request: _Request) -> tuple[Size, str]:
    """Choose the size of a model that is trained from scratch, and explain the choice."""
    epochs = min(request.epochs, USEFUL_EPOCHS)
    allowed = request.tokens * epochs / TOKENS_PER_PARAMETER
    if request.size is not None:
        chosen = next(size for size in SIZES if size.name == request.size)
        return chosen, f"model: {_describe(chosen)}, as you chose"
    why = (
        f"{TOKENS_PER_PARAMETER} tokens per parameter and {epochs:g} epochs "
        f"suggest {_millions(allowed)} parameters"
    )
    fitting = [size for size in SIZES if size.body() <= allowed] or [SIZES[0]]
    for chosen in reversed(fitting):
        config = Config(**chosen.architecture | request.fixed)
        try:
            _fit(config, 1, request.device)
        except InputError:
            why += f"; {chosen.name} exceeds the memory"
            continue
        if chosen is SIZES[0] or _most_tokens(config, request) >= request.tokens:
            least = ", and this is the smallest size" if chosen.body() > allowed else ""
            if 10 * allowed < chosen.body():
                least += "; so little text will be memorised, add more"
            return chosen, f"model: {_describe(chosen)}: {why}{least}"
        why += f"; {chosen.name} would need more than {request.minutes:g} minutes for an epoch"
    return SIZES[0], f"model: {_describe(SIZES[0])}: {why}"


def _most_tokens(config: Config, request: _Request) -> float:
    """Estimate how many tokens can be trained on in `request.minutes`.

    Only the speed of CPUs is estimated, for microbatches of about `LEAST_TOKENS` tokens.  The
    result is infinity for other devices, and if there is no time limit.
    """
    device = request.device
    if request.minutes is None or device.hardware is None or device.platform != "cpu":
        return math.inf
    rows = max(1, LEAST_TOKENS // config.seq)
    alone = {"tpu_size": 1, "cores_per_replica": 1, "context_parallel": 1}
    setting = config.replace(**alone, per_replica_batch=rows, remat="none")
    seconds = CPU_SLOWDOWN * estimate_step(setting, device.hardware, 1).step_seconds[1]
    return 60 * request.minutes * rows * config.seq / seconds


def _schedule(request: _Request, keys: dict[str, Any], lr: float, reason: str) -> Recipe:
    """Choose batch size, mesh and schedule for a model, and return the complete recipe.

    `reason` explains the choice of the model, whose config keys are `keys`.
    """
    corpus, device = request.corpus, request.device
    model = Config(**keys)
    tokens, limit = request.epochs * request.tokens, ""
    if _most_tokens(model, request) < tokens:
        tokens = _most_tokens(model, request)
        limit = f", limited to {request.minutes:g} minutes on {device.name} (--minutes)"
    own = {}
    if request.batch_tokens:
        mesh, memory = _fastest(model, request.batch_tokens, request)
    else:
        sequences = _sequences_per_step(corpus, tokens, is_fine_tuning=request.base is not None)
        mesh, memory = _fit(model, sequences, device)
        own = {key: value for key, value in request.changes.items() if key in mesh}
    if own:
        mesh |= own
        memory = _memory(model.replace(**mesh), device)
    mp, cp = mesh["cores_per_replica"], mesh["context_parallel"]
    dp = max(1, device.count // (mp * cp))
    sequences = mesh["per_replica_batch"] * mesh["gradient_accumulation_steps"] * dp
    if corpus.sequences < sequences:
        raise InputError(
            f"found {corpus.sequences} training sequences, but a step on {device.name} needs "
            f"{sequences}; add text, or recreate the records with a lower --seq"
        )
    steps = max(1, round(tokens / corpus.seq / sequences))
    if "total_steps" in request.changes and model.total_steps:
        steps, limit = model.total_steps, ", as set"
    warmup = min(WARMUP, steps // 10)
    epoch = corpus.sequences / sequences
    schedule = {
        "warmup_steps": warmup,
        "anneal_steps": max(1, steps - warmup),
        "lr": float(f"{lr:.2g}"),
        "end_lr": float(f"{lr / 10:.2g}"),
        "weight_decay": 0.1,
        "total_steps": steps,
        "shuffle_buffer": min(corpus.sequences, 10_000) if steps > epoch else 0,
        "val_every": _round_down(min(500, max(1, steps // 10))),
        "ckpt_every": _round_down(min(500, max(1, steps // 4))),
        "val_batches": _val_batches(request.held_out, steps, mesh["per_replica_batch"] * dp),
    }
    if cp == 1:
        del mesh["context_parallel"]  # the default
    values = keys | mesh | schedule | request.changes
    Config.from_dict(values)
    needed = f"{memory / GIB:.2f} of {device.memory / GIB:.2f} GiB"
    reasons = [
        f"data: {corpus.sequences:,} sequences of {corpus.seq} tokens, "
        f"{_millions(request.tokens)} in all",
        reason,
        f"batch: {sequences} sequences per step, on {device.name} as {format_mesh(dp, cp, mp)}; "
        f"at least {needed} per device on paper",
        f"steps: {steps}{limit}; an epoch is {epoch:.1f} steps, so these are {steps / epoch:.2f} "
        "epochs",
    ]
    return Recipe(values, epoch, reasons)


def _sequences_per_step(corpus: SetSize, tokens: float, *, is_fine_tuning: bool) -> int:
    """Return the sequences per step, a power of two, for a run that trains on `tokens` tokens."""
    steps = FINE_TUNING_STEPS if is_fine_tuning else STEPS
    most = MOST_FINE_TUNING_TOKENS if is_fine_tuning else MOST_TOKENS
    per_step = min(max(tokens / steps, LEAST_TOKENS), most)
    sequences = min(per_step / corpus.seq, corpus.sequences)
    return 2 ** math.floor(math.log2(max(sequences, 1)))


def _fit(config: Config, sequences: int, device: Device) -> tuple[dict[str, Any], int]:
    """Choose mesh, remat and microbatch size for about `sequences` sequences per step.

    The first setting that fits is chosen.  Small numbers of devices per replica are tried first,
    and among these, small numbers that split the positions.  For each, settings without remat are
    tried before those with it, and large microbatches before small ones.

    Returns:
      The config keys, and the estimated bytes per device.

    Raises:
      InputError: if no setting fits into the devices' memory.
    """
    least, rejected = math.inf, None
    own = config.context_parallel  # 1 is the default, and any other number as set
    contexts = [own] if own > 1 else context_sizes(config.seq, device.count)
    replicas = [n for n in range(1, device.count + 1) if device.count % n == 0]
    for replica, cp in itertools.product(replicas, contexts):
        if replica % cp:
            continue
        share = max(1, sequences * replica // device.count)  # sequences per replica and step
        rows = [2**n for n in reversed(range(MOST_ROWS.bit_length())) if share % 2**n == 0]
        settings = [("none", count) for count in rows if count >= min(share, 8)]
        for remat, count in settings + [("full", count) for count in rows]:
            keys = {
                "tpu_size": device.count,
                "cores_per_replica": replica // cp,
                "context_parallel": cp,
                "per_replica_batch": count,
                "gradient_accumulation_steps": share // count,
                "remat": remat,
            }
            try:
                setting = config.replace(**keys)
            except InputError as error:  # such as a number of heads that mp does not divide
                rejected = error
                continue
            needed = _memory(setting, device)
            if needed <= device.budget:
                return keys, needed
            least = min(least, needed)
    if rejected is not None and least == math.inf:
        raise rejected
    raise InputError(
        f"the model needs at least {least / GIB:.1f} GiB per device, but on {device.name} a config "
        f"may use at most {device.budget / GIB:.1f} of {device.memory / GIB:.1f} GiB; choose a "
        "smaller --size, a larger --topology, or train adapters with --set lora_rank=8"
    )


def _fastest(config: Config, tokens: int, request: _Request) -> tuple[dict[str, Any], int]:
    """Choose the mesh, ZeRO, remat and microbatch size for `tokens` tokens per step, as `_fit`."""
    device = request.device
    if device.hardware is None:
        raise InputError(
            f"--batch-tokens ranks settings by speed, but {device.name} is not in the hardware "
            "table; remove it, or name other devices with --topology"
        )
    config = search.with_batch(config, tokens, [device.count])
    keys = (*search.SEARCHED_KEYS, "shard_activations")
    fixed = {key: value for key, value in request.changes.items() if key in keys}
    chosen = search.fastest(config, device.hardware, device.count, device.budget, fixed)
    if chosen is None:
        raise InputError(
            f"no setting of {device.name} has {tokens:,} tokens per step and needs at most "
            f"{device.budget / GIB:.1f} of {device.memory / GIB:.1f} GiB per device on paper; "
            "choose another --batch-tokens, a smaller --size or a larger --topology"
        )
    estimate, setting = chosen
    return {key: getattr(setting, key) for key in ("tpu_size", *keys)}, estimate.peak_bytes


def _memory(config: Config, device: Device) -> int:
    """Estimate the bytes that a step needs per device."""
    attention = attention_on(config, device.hardware) if device.hardware else "xla"
    return memory_bytes(config, device.count, attention)


def _val_batches(held_out: SetSize | None, steps: int, rows: int) -> int:
    """Return the number of batches per validation; 0 without a validation set.

    A validation reads the whole validation set, but at most 100 batches, and at most one batch per
    30 training steps of the run.  It reads at least one batch.  The limits keep validation short
    compared with training.
    """
    if held_out is None:
        return 0
    return max(1, min(math.ceil(held_out.sequences / rows), steps // 30, 100))


def _round_down(number: int) -> int:
    """Round down to one significant digit; for example, 487 becomes 400."""
    unit = 10 ** (len(str(number)) - 1)
    return number // unit * unit


def _describe(size: Size) -> str:
    return f"{size.name}, {size.layers} layers of width {size.d_model}"


def _millions(count: float) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"
