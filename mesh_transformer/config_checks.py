"""Checks of a config's values; see `Config`."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

from mesh_transformer.families import (
    DEFAULTS,
    ROTARY_LISTS,
    ROTARY_OPTIONS,
    ROTARY_SCALINGS,
    SAMPLING,
)
from mesh_transformer.util import (
    InputError,
    Named,
    describe,
    is_named,
    mismatch,
    name_of,
    without_paths,
)

MOST_LAYERS = 4096  # with many more, merely listing the parameters takes minutes and all memory
# Optimizers that update each number by itself.
ELEMENTWISE = ("adam", "lion", "sgd")
MOST_SUMMED = (2**31 - 1) // 127**2  # products of 8-bit numbers whose sum fits 32 bits
LARGEST_FLOAT = 3e38  # of 32 bits
LONG = ("seed", "anneal_tokens", "warmup_tokens")  # the keys that may be 2**31 or larger
ROTARY_KEYS = ("rotary_scaling", "unrotated_layers", "sliding_rotary_base")  # only of pe rotary
MATMULS = ("forward", "input_gradients", "weight_gradients")  # the names in `int8_matmuls`
# (expected values, whether a value is one, keys); the keys may also be null.
RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "at least 1",
        lambda x: x >= 1,
        "layers d_model n_heads key_heads ff_size n_vocab seq head_size attention_window tpu_size "
        "cores_per_replica context_parallel per_replica_batch gradient_accumulation_steps "
        "anneal_steps "
        "original_bias_copies loss_chunk val_every ckpt_every keep_n keep_every max_skipped "
        "reward_workers answer_tokens rollout_updates total_steps early_stop anneal_tokens "
        "eval_harness_limit rollout_rows",
    ),
    (
        "at least 0",
        lambda x: x >= 0,
        "warmup_steps warmup_tokens batch_ramp_steps lr end_lr weight_decay adam_eps z_loss "
        "shuffle_buffer val_batches",
    ),
    (
        "above 0",
        lambda x: x > 0,
        "clip_norm val_batch_multiplier desirable_weight undesirable_weight reward_seconds "
        "clip_low clip_high importance_cap distill_temperature distill_weight norm_eps rotary_base "
        "sliding_rotary_base attention_scale score_cap logit_cap logit_divisor embed_scale "
        "residual_scale sliding_window",
    ),
    (
        "at least 0 and below 1",
        lambda x: 0 <= x < 1,
        "adam_b1 adam_b2 lion_b1 lion_b2 momentum noise_scale_alpha dropout_embedding "
        "dropout_attention dropout_residual",
    ),
    ("above 1", lambda x: x > 1, "skip_spikes"),
    ("at least 2", lambda x: x >= 2, "group_size"),  # advantages are differences
    ("at most 1", lambda x: x <= 1, "distill_weight"),
    (f"at most {MOST_LAYERS}", lambda x: x <= MOST_LAYERS, "layers"),
    ("at least -2**63", lambda x: x >= -(2**63), "seed"),
)


def check(c: Any) -> None:
    """Raise InputError if a value is out of range or a size is not divisible as required."""
    for key, value in dataclasses.asdict(c).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{key} is {value}, expected a finite number")
        if isinstance(value, float) and abs(value) > LARGEST_FLOAT:
            raise InputError(f"{key} is {value}, expected at most {LARGEST_FLOAT}")
        limit = 63 if key in LONG else 31
        if isinstance(value, int) and value >= 2**limit:
            raise InputError(f"{key} is {value}, expected less than 2**{limit}")
    for expected, holds, keys in RANGES:
        for key in keys.split():
            value = getattr(c, key)
            if value is not None and not isinstance(value, str) and not holds(value):
                raise InputError(f"{key} is {value}, expected {expected}")
    paths = "train_set bucket model_dir tokenizer tune_model_path reference teacher"
    for key in paths.split(" "):
        if getattr(c, key) == "":
            raise InputError(f"{key} is an empty string; give a value, or remove the key")
    if c.attention_window is not None and c.attention_window > c.seq:
        raise InputError(
            f"attention_window is {c.attention_window}, expected at most seq ({c.seq})"
        )
    _check_training(c)
    _check_block(c)
    _check_norm(c)
    _check_heads(c)
    _check_lists(c)
    _check_rotary_scaling(c)
    _check_lora(c)
    _check_virtual_mesh(c)
    _check_divisions(c)
    _check_exact(c)
    _check_int8_matmuls(c)
    _check_offload(c)
    _check_objective(c)
    _check_functions(c)
    if unknown := sorted(set(c.sampling) - set(SAMPLING)):
        raise InputError(f"sampling has {unknown[0]!r}, expected settings of {', '.join(SAMPLING)}")
    if outside := [token for token in c.end_tokens or () if not 0 <= token < c.n_vocab]:
        raise InputError(f"end_tokens has {outside[0]}, expected ids from 0 to {c.n_vocab - 1}")
    if c.int8_weights and c.weight_bits != 8:
        raise InputError(
            f"int8_weights is true, but weight_bits is {c.weight_bits}; remove int8_weights"
        )


def _check_training(c: Any) -> None:
    def refuse(is_wrong: object, problem: str) -> None:
        if is_wrong:
            raise InputError(problem)

    assert c.anneal_steps is not None
    lengths = f"warmup_steps {c.warmup_steps} and anneal_steps {c.anneal_steps}"
    wrong = c.warmup_steps or c.anneal_steps != c.defaults()["anneal_steps"]
    advice = "but warmup_tokens or anneal_tokens is set; give both in updates, or both in tokens"
    refuse(c.schedule_in_tokens and wrong, f"{lengths} are in updates, {advice}")
    kind, total, most = c.schedule, c.total_steps or 0, c.gradient_accumulation_steps
    wrong = c.schedule_in_tokens and c.anneal_tokens is None
    wrong = wrong and kind not in ("constant", "inverse_sqrt")
    refuse(wrong, f"schedule {kind} with warmup_tokens needs anneal_tokens, too; set it")
    wrong = kind == "inverse_sqrt" and not (c.warmup_tokens or c.warmup_steps)
    refuse(wrong, f"schedule {kind} needs a warm-up; set warmup_steps or warmup_tokens")
    wrong = kind == "wsd" and c.warmup_steps + c.anneal_steps > max(total, 1)
    refuse(kind == "wsd" and not total, f"schedule {kind} needs total_steps; set it")
    refuse(wrong, f"{lengths} exceed total_steps {total}; lower one of them (schedule {kind})")
    wrong = (c.batch_ramp_steps or c.batch_ramp_from < 1) and not 1 <= c.batch_ramp_from <= most
    expected = f"expected 1 to gradient_accumulation_steps ({most})"
    refuse(wrong, f"batch_ramp_from is {c.batch_ramp_from}, {expected}")
    wrong = c.momentum and c.optimizer not in ("muon", "sgd")
    refuse(wrong, f"momentum is {c.momentum}, expected null with optimizer {c.optimizer}")
    wrong, sets = c.keep_best not in (None, *c.val_set), ", ".join(c.val_set) or "none"
    refuse(wrong, f"keep_best is {c.keep_best!r}, expected a name in val_set: {sets}")
    wrong = c.early_stop and c.keep_best is None and len(c.val_set) != 1
    refuse(wrong, f"early_stop needs keep_best, the name of one val_set: {sets}")
    wrong = (c.keep_best or c.early_stop) and not c.val_batches
    refuse(wrong, "keep_best and early_stop need validation; set val_batches above 0")


def _check_block(c: Any) -> None:
    kinds = c.layer_kind.hf_types
    if c.hf_type not in (kinds or (None,)):
        allowed = " or ".join(map(repr, kinds)) or "null"
        raise InputError(f"hf_type is {c.hf_type!r}, expected {allowed} (block {c.block})")
    if c.original_bias_copies > 1 and not c.layer_kind.biased_ends:
        raise InputError(
            f"original_bias_copies is {c.original_bias_copies}, expected 1 with block {c.block}, "
            "which the original does not have"
        )


def _check_norm(c: Any) -> None:
    if c.norm == "layernorm-desync" and c.partitioning != "shard_map":
        raise InputError(
            f"norm is {c.norm}, which has parameters of its own on each shard, but partitioning is "
            f"{c.partitioning}; set it to shard_map, or choose norm layernorm"
        )


def _check_heads(c: Any) -> None:
    grouped = c.key_heads != c.n_heads
    alone = {
        "pe t5": (c.pe == "t5", {"key_heads": grouped, "sliding_window": c.sliding_window}),
        f"block {c.block}": (
            c.layer_kind.arrangement == "parallel",
            {"norm_place": c.norm_place != "before", "residual_scale": c.residual_scale != 1},
        ),
        f"norm {c.norm}": (
            not c.norm_kind.root_mean,
            {"qk_norm": c.qk_norm != "none", "embed_norm": c.embed_norm}
            | {"norm_place": c.norm_place != "before"},
        ),
        f"fused block {c.block}": (
            c.layer_kind.fused,
            {"key_heads": grouped, "qk_norm": c.qk_norm == "projection"},
        ),
        f"pe {c.pe}": (
            c.pe != "rotary",
            {"rotary_base": c.rotary_base != DEFAULTS["rotary_base"]}
            | {key: getattr(c, key) is not None for key in ROTARY_KEYS},
        ),
    }
    for what, (applies, keys) in alone.items():
        for key, is_set in keys.items():
            if applies and is_set:
                raise InputError(f"{key} is {getattr(c, key)!r}, which {what} does not support")
    row = c.layer_kind
    allowed = ["fused_in"] if row.fused else list(row.lora_targets)
    if row.joint_bias:  # it is that of these two, unless the row has others besides
        allowed = [name for name in allowed if name not in ("o", "out") or name in row.biases]
    _check_names(c, "biases", allowed, f" (block {c.block})")


def _check_names(c: Any, key: str, allowed: Sequence[str], where: str = "") -> None:
    expected = f"expected only names from {', '.join(allowed)}{where}"
    for name in getattr(c, key):
        if name not in allowed:
            raise InputError(f"{key} has {name!r}, {expected}")


def _check_lists(c: Any) -> None:
    for key in ("sliding_layers", "unrotated_layers", "biases", "int8_matmuls"):
        if len(set(values := getattr(c, key) or ())) < len(values):
            raise InputError(f"{key} is {values}, expected no duplicates")
    for key in ("sliding_layers", "unrotated_layers"):
        for number in getattr(c, key) or ():
            if not 0 <= number < c.layers:
                raise InputError(
                    f"{key} has {number}, expected numbers from 0 to {c.layers - 1} (layers)"
                )
    for key in ("sliding_layers", "sliding_rotary_base"):
        if (value := getattr(c, key)) is not None and c.sliding_window is None:
            raise InputError(f"{key} is {value}, but sliding_window is null; set it")


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf


def _check_rotary_scaling(c: Any) -> None:
    values = c.rotary_scaling
    if values is None:
        return
    kind = values.get("rope_type")
    required = ROTARY_SCALINGS.get(kind)
    if required is None:
        raise InputError(
            f"rotary_scaling has rope_type {kind!r}, expected one of {', '.join(ROTARY_SCALINGS)}"
        )
    allowed = {"rope_type", *required, *ROTARY_OPTIONS.get(kind, ())}
    for key in {*required} - values.keys():
        raise InputError(f"rotary_scaling of type {kind} lacks {key!r}; add it")
    for key in values.keys() - allowed:
        raise InputError(f"rotary_scaling of type {kind} has {key!r}, which is unknown; remove it")
    for key, value in values.items():
        if key == "truncate" and not isinstance(value, bool):
            raise InputError(f"rotary_scaling: truncate is {value!r}, expected true or false")
        if key in ROTARY_LISTS:
            numbers = value if isinstance(value, list) else []
            if len(numbers) != c.d_rotary // 2 or not all(map(_is_positive, numbers)):
                raise InputError(
                    f"rotary_scaling: {key} is {str(value)[:80]}, expected {c.d_rotary // 2} "
                    "numbers above 0, one for each rotated pair"
                )
        elif key not in ("rope_type", "truncate") and not _is_positive(value):
            raise InputError(f"rotary_scaling: {key} is {value!r}, expected a number above 0")
    if kind == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        raise InputError(
            f"rotary_scaling: high_freq_factor is {values['high_freq_factor']}, expected above "
            f"low_freq_factor ({values['low_freq_factor']})"
        )
    if kind == "dynamic" and c.d_rotary <= 2:
        raise InputError(
            f"rotary_scaling is of type dynamic, but {c.d_rotary} entries of a head are rotated, "
            "expected more than 2; use another type"
        )
    if kind == "yarn" and c.rotary_base <= 1:
        raise InputError(
            f"rotary_base is {c.rotary_base}, expected above 1 with rotary_scaling of type yarn"
        )


def _check_lora(c: Any) -> None:
    if not 0 <= c.lora_rank <= c.d_model:
        raise InputError(f"lora_rank is {c.lora_rank}, expected 0 (off) to d_model ({c.d_model})")
    if c.frozen_bits and not c.lora_rank:
        raise InputError(
            f"frozen_bits is {c.frozen_bits}, but lora_rank is 0, so that no matrix is frozen; set "
            "lora_rank"
        )
    assert c.lora_alpha is not None
    assert c.lora_targets is not None
    if c.lora_rank and c.lora_alpha <= 0:
        raise InputError(f"lora_alpha is {c.lora_alpha}, expected above 0")
    _check_names(c, "lora_targets", c.layer_kind.lora_targets, f" (block {c.block})")
    if len(set(c.lora_targets)) < max(len(c.lora_targets), 1):
        raise InputError(
            f"lora_targets is {c.lora_targets}, expected at least one name, and no duplicates"
        )


def _check_divisions(c: Any) -> None:
    def check_divisible(what: str, size: int, key: str, remedy: str) -> None:
        by = getattr(c, key)
        if size % by:
            raise InputError(f"{what} is {size}, not divisible by {key} {by}; {remedy}")

    if c.head_size == c.d_model // c.n_heads:
        check_divisible("d_model", c.d_model, "n_heads", "change one of them, or set head_size")
    check_divisible("n_heads", c.n_heads, "key_heads", "change one of them")
    if c.layer_kind.fused:
        check_divisible("the feed-forward width (ff_size)", c.d_ff, "n_heads", "change one of them")
    shards = "cores_per_replica"
    if c.shard_activations:
        check_divisible("seq", c.seq, shards, f"change {shards}, or set shard_activations to false")
    assert c.tpu_size is not None
    check_divisible(
        "tpu_size", c.tpu_size, shards, f"set tpu_size to a multiple of {shards}, or lower {shards}"
    )
    _check_context(c)
    _check_length_buckets(c)
    if c.pe == "rotary" and c.d_rotary > c.d_head:
        raise InputError(
            f"pe_rotary_dims is {c.d_rotary}, above the head size {c.d_head} "
            f"(head_size, by default d_model / n_heads); lower pe_rotary_dims"
        )
    if c.pe == "rotary" and (c.d_rotary % 2 or not c.d_rotary):
        raise InputError(f"pe_rotary_dims is {c.d_rotary}, expected a positive even number")


def _check_context(c: Any) -> None:
    if c.context_shards == c.context_parallel == 1:
        return
    cp, sizes = c.context_shards, f"context_parallel is {c.context_parallel}"
    if c.virtual_mesh is not None:
        sizes += f" and virtual_mesh {c.virtual_mesh}"
    if cp % c.context_parallel:
        raise InputError(
            f"{sizes}, whose cp ({cp}) context_parallel does not divide; set virtual_mesh to "
            f"[dp, cp, mp] with a cp that is a multiple of {c.context_parallel}"
        )
    if c.tpu_size % c.replica_devices:
        raise InputError(
            f"{sizes}, and tpu_size {c.tpu_size} is not divisible by its product with "
            f"cores_per_replica ({c.cores_per_replica}); change one of them"
        )
    if cp & (cp - 1):
        raise InputError(f"{sizes}, expected a power of two")
    if c.seq % c.position_multiple:
        raise InputError(
            f"{sizes}, and seq {c.seq} is not a multiple of {c.position_multiple}, the number of "
            "parts of a sequence; change one of them"
        )
    heads = -(-c.n_heads // c.shards)  # of a shard
    divides = heads % cp == 0
    if c.context_attention == "all_to_all" and not divides:
        raise InputError(
            f"{sizes}, and context_attention is all_to_all, but a shard has {heads} heads, "
            f"not divisible by {cp}; set context_attention to ring"
        )
    ring = c.context_attention == "ring" or not divides
    unsupported = c.attention == "xla" or (ring and c.attention not in ("auto", "blocks"))
    if unsupported:
        remedy = "auto" if not divides else "auto, or context_attention to all_to_all"
        remedy = "auto" if c.attention == "xla" else remedy
        raise InputError(
            f"{sizes}, which excludes attention {c.attention}; set attention to {remedy}"
        )
    if c.pe == "t5":
        raise InputError(f"{sizes}, but pe is t5, whose bias is not split; use another pe")
    if c.exact:
        raise InputError(f"{sizes}, but exact is true; unset one of them")


def _check_length_buckets(c: Any) -> None:
    lengths, multiple = c.length_buckets, c.position_multiple
    problem = f"length_buckets is {lengths}"
    ascending = lengths == sorted(set(lengths)) and all(0 < n <= c.seq for n in lengths)
    if not ascending or any(n % multiple for n in lengths):
        kind = f" multiples of {multiple}" if multiple > 1 else " numbers"
        raise InputError(f"{problem}, expected ascending{kind} from 1 to seq ({c.seq})")
    if lengths and c.hosts_read:
        raise InputError(
            f"{problem}, but hosts_read is true, so that no host sees all sequences of a batch; "
            "unset one"
        )


def _check_offload(c: Any) -> None:
    wrong = None
    if c.virtual_mesh is not None:
        wrong = f"virtual_mesh is {c.virtual_mesh}"  # updates by layer may round differently
    elif c.offload == "params" and c.zero == 3:
        wrong = "zero is 3, which keeps the parameters split over dp"
    if c.offload != "none" and wrong:
        raise InputError(f"offload is {c.offload!r}, but {wrong}; change one of them")


def _check_int8_matmuls(c: Any) -> None:
    _check_names(c, "int8_matmuls", MATMULS)
    tokens = c.per_replica_batch * c.seq
    if "weight_gradients" in c.int8_matmuls and tokens > MOST_SUMMED:
        raise InputError(
            f"int8_matmuls has weight_gradients, and per_replica_batch {c.per_replica_batch} times "
            f"seq {c.seq} is {tokens}, expected at most {MOST_SUMMED}; lower per_replica_batch"
        )
    if c.int8_matmuls and c.virtual_mesh is not None:  # which needs the same scales anywhere
        raise InputError(
            f"int8_matmuls is {c.int8_matmuls}, but virtual_mesh is {c.virtual_mesh}; remove one "
            "of them"
        )


def _check_virtual_mesh(c: Any) -> None:
    if c.virtual_mesh is None:
        return
    sizes = f"virtual_mesh is {c.virtual_mesh}"
    if len(c.virtual_mesh) not in (2, 3) or any(x < 1 or x & (x - 1) for x in c.virtual_mesh):
        raise InputError(f"{sizes}, expected [dp, mp] or [dp, cp, mp], powers of two")
    if c.shards % c.cores_per_replica:
        raise InputError(
            f"{sizes}, whose mp is not divisible by cores_per_replica {c.cores_per_replica}; "
            "change one of them"
        )
    if c.shard_activations and c.seq % c.shards:
        raise InputError(
            f"{sizes}, whose mp does not divide seq {c.seq}; change one of them, or set "
            "shard_activations to false"
        )
    if c.partitioning != "shard_map":
        raise InputError(f"{sizes}, but partitioning is {c.partitioning}; set it to shard_map")
    if c.optimizer not in ELEMENTWISE:
        allowed = ", ".join(ELEMENTWISE)
        raise InputError(
            f"{sizes}, but optimizer {c.optimizer} is not elementwise; set it to one of {allowed}"
        )


def _check_exact(c: Any) -> None:
    """Check that a config with `exact` can keep what docs/same-bits.md promises."""
    if not c.exact:
        return
    if c.shards > 1 and c.virtual_mesh is None:  # the compiler would choose the order of sums
        raise InputError(
            f"exact is true and cores_per_replica is {c.cores_per_replica}, but virtual_mesh is "
            f"null; set it, for example to [1, {c.cores_per_replica}]"
        )
    excluded = {
        "attention": None if c.attention in ("auto", "xla") else c.attention,
        # Later positions would be in the slots of earlier ones.
        "attention_window": c.attention_window if c.attention_window < c.seq else None,
        "dropout": c.drops,
        "int8_cache": c.int8_cache,
        "int8_matmuls": c.int8_matmuls,
        "packed_positions": None if c.packed_positions == "restart" else c.packed_positions,
        "paged_attention": None if c.paged_attention == "xla" else c.paged_attention,
        "shard_activations": c.shard_activations and c.shards > 1,
    }
    for key, value in excluded.items():
        if value:
            raise InputError(f"exact is true, which excludes {key}, but it is {value}; unset one")


def _check_functions(c: Any) -> None:
    """Check that functions of the user's are used where they have an effect."""
    for key in ("objective", "teacher"):
        if c.token_loss is not None and getattr(c, key) is not None:
            raise InputError(
                f"token_loss is {c.token_loss}, but {key} is {getattr(c, key)!r}, which has a loss "
                "of its own; unset one"
            )
    if is_named(c.train_set) and c.hosts_read:
        raise InputError(
            f"train_set is the function {c.train_set}, but hosts_read is true, which is for "
            "records; set it to false"
        )


def _check_objective(c: Any) -> None:
    if c.beta is not None and (c.beta < 0 or (c.beta == 0 and not c.has_rollouts)):
        raise InputError(
            f"beta is {c.beta}, expected {'at least' if c.has_rollouts else 'above'} 0"
        )
    if c.objective is None and c.beta is not None:
        raise InputError(f"beta is {c.beta}, but objective is null; set objective")
    if c.objective is not None and c.teacher is not None:
        raise InputError(
            f"objective is {c.objective}, but teacher is {c.teacher!r}; set one of them to null"
        )
    if c.has_stored_teacher and (c.distill_kl, c.distill_temperature) != ("forward", 1):
        raise InputError(
            f"teacher is records, but distill_kl is {c.distill_kl} and distill_temperature "
            f"{c.distill_temperature}; only forward and 1 are possible"
        )
    if c.has_rollouts and c.reward is None:
        raise InputError("objective is grpo, but reward is null; set it to FILE.py:FUNCTION")
    if c.objective is not None and c.separate_documents:
        raise InputError(
            f"objective is {c.objective}, but separate_documents is true, which is for plain text; "
            "unset one"
        )
    if c.objective is not None and not c.has_rollouts and c.val_by_position:
        raise InputError(
            f"objective is {c.objective}, but val_by_position is true, which is for losses of "
            "tokens; unset one"
        )


def typed(key: str, value: Any, annotation: Any) -> Any:
    """Return the value of a config key; raise InputError if it has another type."""
    value = without_paths(value)
    if Named in get_args(annotation):  # also of list[Named]
        if callable(value):
            return name_of(value, key)
        if isinstance(value, list):
            value = [name_of(one, key) if callable(one) else one for one in value]
    if key == "val_set" and (value is None or isinstance(value, str)):
        return {"val": value} if value else {}
    if expected := mismatch(value, annotation):
        raise InputError(f"{key} is {describe(value)}, {expected}")
    return float(value) if annotation is float else value
