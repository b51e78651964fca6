"""Sampling settings: their bounds and defaults, of one text and of the rows of a batch.

Array names end in their shape: B batch (independent rows), N biased tokens.
"""

import dataclasses
import numbers
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.util import InputError, brief


class Range(NamedTuple):
    """The dtype, default and inclusive bounds of a sampling setting."""

    dtype: Any
    default: Any
    least: float
    most: float

    def __str__(self) -> str:
        kind = "a number" if self.dtype is np.float32 else "a whole number"
        if self.most == F32_MAX:
            return f"{kind} of at least {self.least:g}"
        return f"{kind} from {self.least} to {self.most}"

    def numbers(self, values: Any) -> np.ndarray | None:
        """Return one or more numbers as an array; None if some are no numbers within the bounds."""
        try:
            value = np.asarray(values)
        except ValueError:  # nested lists of different lengths
            return None
        if value.dtype.kind not in ("iuf" if self.dtype is np.float32 else "iu"):
            return None
        with np.errstate(over="ignore"):  # in f32, 1e-50 is 0 and 1e50 is infinite
            value = value.astype(np.float32) if self.dtype is np.float32 else value
        within = (value >= self.least) & (value <= self.most)  # False for NaN
        return value.astype(self.dtype) if within.all() else None


F32_MAX = float(np.finfo(np.float32).max)
# The sampling settings by name.
RANGES = {
    "top_p": Range(np.float32, 0.9, 0.0, F32_MAX),
    "top_k": Range(np.int32, 0, 0, 2**31 - 1),
    "temp": Range(np.float32, 1.0, 0.0, F32_MAX),
    # Outside these bounds a penalized logit could overflow.
    "repetition_penalty": Range(np.float32, 1.0, 0.01, 100.0),
    "seed": Range(np.uint32, 0, 0, 2**32 - 1),
    "min_p": Range(np.float32, 0.0, 0.0, 1.0),
    # The bounds of OpenAI's API.
    "presence_penalty": Range(np.float32, 0.0, -2.0, 2.0),
    "frequency_penalty": Range(np.float32, 0.0, -2.0, 2.0),
    "typical_p": Range(np.float32, 1.0, 0.0, F32_MAX),
    "adapter": Range(np.int32, 0, 0, 2**31 - 1),
}
BIAS = Range(np.float32, 0.0, -100.0, 100.0)  # the values of "logit_bias"
MOST_BIASES = 300  # maximum number of biased tokens per row
NAMES = (*RANGES, "logit_bias")


class SamplerSettings(NamedTuple):
    """Sampling settings with one value per row.

    `nucleus_sample`, `typical_filter` and `adjusted` in `sampling` say what they mean.

    In a tree of PartitionSpecs, the fields are specs instead of values.

    Attributes:
      penalty_B: repetition penalty; 1 disables it.
      adapter_B: the number of the row's LoRA adapter; 0 for none.
      biased_BN: the token ids of `bias_BN`, which is added to their logits.
    """

    top_p_B: Any
    top_k_B: Any
    temp_B: Any
    penalty_B: Any
    seed_B: Any
    min_p_B: Any
    presence_B: Any
    frequency_B: Any
    typical_p_B: Any
    adapter_B: Any
    biased_BN: Any
    bias_BN: Any


def sampler_settings(options: Mapping[str, Any], rows: int | tuple[()]) -> SamplerSettings:
    """Check sampling options and return them as numpy arrays [rows] and [rows, `MOST_BIASES`].

    Floating-point values are converted to f32 before their bounds are checked.

    Args:
      options: maps the names in `RANGES` to one number or to one number per row.  Settings that are
        missing take their defaults.  As in the original mesh-transformer-jax, a `top_k` of None
        means no limit.  "logit_bias" is a dict {token id: bias}, or one such dict or None per row.
        Without a "seed", each row gets a random one; a single one gives row n, from 0, "seed" + n.
      rows: number of rows; () returns arrays without that dimension.

    Raises:
      InputError: if `options` is not a dict or has an unknown key, or if a value is not a number,
        is out of range, or is a list that does not have `rows` numbers.
    """
    if not isinstance(options, Mapping):
        raise InputError(
            f"generate: sampler_options is {brief(repr(options))}, expected a dict with the keys "
            f"{', '.join(NAMES)}"
        )
    unknown = set(options) - set(NAMES)
    if unknown:
        raise InputError(
            f"generate: unknown sampler option {brief(min(map(repr, unknown)))}; "
            f"use {', '.join(NAMES)}"
        )
    checked = {name: _checked(name, options, rows) for name in RANGES}
    if "seed" not in options:
        checked["seed"] = np.random.default_rng().integers(2**32, size=rows, dtype=np.uint32)
    elif isinstance(rows, int) and np.ndim(options["seed"]) == 0:
        checked["seed"] = checked["seed"] + np.arange(rows, dtype=np.uint32)  # modulo 2**32
    return SamplerSettings(*[*checked.values(), *_biases(options.get("logit_bias"), rows)])


def check_defaults(sampling: Mapping[str, Any]) -> None:
    """Check the config key `sampling`.

    Raises:
      InputError: if a setting is not a number in its range.
    """
    try:
        sampler_settings(sampling, ())
    except InputError as error:
        raise InputError(f"config: sampling: {error}; correct it with --set sampling=...") from None


def _biases(biases: Any, rows: int | tuple[()]) -> tuple[np.ndarray, np.ndarray]:
    """Check `logit_bias` and return the token ids and their biases; see `sampler_settings`."""
    alone = isinstance(rows, tuple)
    count = 1 if alone else rows
    every = [biases] * count if biases is None or isinstance(biases, Mapping) else biases
    if not isinstance(every, Sequence) or len(every) != count:
        several = "" if alone else f", or {rows} of them, one per prompt"
        raise InputError(
            f"generate: logit_bias is {brief(repr(biases))}, expected a dict of token ids and "
            f"biases{several}"
        )
    tokens = np.zeros((count, MOST_BIASES), np.int32)
    values = np.zeros((count, MOST_BIASES), np.float32)
    for row, bias in enumerate(every):
        bias = {} if bias is None else bias
        if not isinstance(bias, Mapping) or len(bias) > MOST_BIASES or not _are_biases(bias):
            raise InputError(
                f"generate: logit_bias is {brief(repr(bias))}, expected a dict of at most "
                f"{MOST_BIASES} token ids, each with {BIAS}"
            )
        tokens[row, : len(bias)], values[row, : len(bias)] = [*bias], [*bias.values()]
    return (tokens[0], values[0]) if alone else (tokens, values)


def _are_biases(bias: Mapping[Any, Any]) -> bool:
    return all(
        isinstance(token, numbers.Integral)
        and isinstance(value, numbers.Real)
        and not any(isinstance(number, bool | np.bool) for number in (token, value))
        and 0 <= int(token) < 2**31
        and BIAS.least <= float(value) <= BIAS.most
        for token, value in bias.items()
    )


def _checked(name: str, options: Mapping[str, Any], rows: int | tuple[()]) -> np.ndarray:
    """Check the setting `name` and return it as an array [rows]; see `sampler_settings`."""
    allowed, option = RANGES[name], options.get(name, RANGES[name].default)
    if name == "top_k" and option is None:
        option = allowed.default
    if (value := allowed.numbers(option)) is None:
        raise InputError(f"generate: {name} is {brief(repr(option))}, expected {allowed}")
    try:
        return np.broadcast_to(value, rows)
    except ValueError:
        several = "" if rows == () else f", or {rows} of them, one per prompt"
        raise InputError(
            f"generate: {name} has shape {value.shape}, expected one number{several}"
        ) from None


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """The sampling settings of one generated text.

    See `RANGES` for their bounds, and `nucleus_sample`, `typical_filter` and `adjusted` in
    `sampling` for their meaning.  A `top_k` of None means no limit, and a `seed` of None a random
    seed for every text.

    Raises:
      InputError: at construction, for a value out of range.
    """

    top_p: float = 0.9
    top_k: int | None = 0
    temp: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    typical_p: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    adapter: int = 0

    def __post_init__(self) -> None:
        sampler_settings(self.options(), ())

    def options(self) -> dict[str, Any]:
        """Return the settings as a dict that `generate` accepts as `sampler_options`.

        If `seed` is None, the returned seed is random.
        """
        seed = secrets.randbits(32) if self.seed is None else self.seed
        top_k = RANGES["top_k"].default if self.top_k is None else self.top_k
        return {name: getattr(self, name) for name in NAMES} | {"seed": seed, "top_k": top_k}

    @staticmethod
    def stacked(texts: "Sequence[SamplingOptions]") -> SamplerSettings:
        """Combine the settings of several texts into arrays with one value per text."""
        rows = [text.options() for text in texts]
        return sampler_settings({name: [row[name] for row in rows] for name in NAMES}, len(rows))


# The default settings of each interface.  PYTHON_DEFAULTS is for `generate` and `POST /complete`.
PYTHON_DEFAULTS = SamplingOptions()
REPL_DEFAULTS = SamplingOptions(temp=0.8)
OPENAI_DEFAULTS = SamplingOptions(top_p=1.0)
EVALUATION_DEFAULTS = SamplingOptions(top_p=1.0, temp=0.0)
