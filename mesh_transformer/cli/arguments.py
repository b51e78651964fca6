"""Command-line flags shared by several commands, and their conversion to configs and options."""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from mesh_transformer import log_lines
from mesh_transformer.config import Config
from mesh_transformer.data.documents import TEXT_COLUMN
from mesh_transformer.data.file_types import format_types
from mesh_transformer.storage.access import local_path
from mesh_transformer.util import InputError

if TYPE_CHECKING:
    from mesh_transformer.checkpoint.source import Source
    from mesh_transformer.data.parts import Workers


class RunOptions(TypedDict):
    """Options of a training run, passed as keywords to `loop.train` or `restarts.train`."""

    max_steps: int | None
    tune_model_path: str | None
    fresh_opt: bool
    fall_back: bool
    validate: bool
    profile: range | None


# Modes that train, and modes that only evaluate.
TRAIN_MODES, EVAL_MODES = ("train_and_eval", "train"), ("eval", "eval_all")


def positive(text: str) -> int:
    """Parse a flag's value as a positive integer; for use as argparse's `type`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)


def above_0(text: str) -> float:
    """Parse a flag's value as a positive number; for use as argparse's `type`."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def token_count(text: str) -> int:
    """Parse a number of tokens, such as 2097152, 512K or 2M; for use as argparse's `type`.

    As in the names of batch sizes, K is 2**10 and M is 2**20.
    """
    number, unit = _amount(text, "KM")
    tokens = number * {"": 1, "K": 2**10, "M": 2**20}[unit]
    if tokens < 1 or tokens % 1:
        raise argparse.ArgumentTypeError(
            f"{text} is not a number of tokens such as 2097152, 512K or 2M (2 x 2**20)"
        )
    return int(tokens)


def byte_count(text: str) -> int:
    """Parse an amount of text, such as 500MB or 10GB; for use as argparse's `type`.

    As in the sizes of disks, K is 10**3, M 10**6, G 10**9 and T 10**12.
    """
    number, unit = _amount(text.upper().removesuffix("B"), "KMGT")
    size = int(number * 1000 ** " KMGT".index(unit or " "))
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of bytes such as 500MB or 10GB")
    return size


def _amount(text: str, units: str) -> tuple[float, str]:
    """Return a number and its unit, "" for none; (0, "") if the text is not such an amount."""
    number = r"(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?"  # a comma only between thousands
    match = re.fullmatch(rf"({number}) ?([{units}]?)", text.upper().strip())
    return (float(match[1].replace(",", "")), match[4]) if match else (0.0, "")


def add_batch_tokens(parser: argparse.ArgumentParser, note: str) -> None:
    """Add the flag --batch-tokens, whose help ends in `note`."""
    parser.add_argument(
        "--batch-tokens",
        type=token_count,
        metavar="N",
        help=f"tokens per step, such as 512K or 2M (K is 2**10, M is 2**20); {note}",
    )


TOPOLOGY_HELP = (
    "TPU slice, such as v3-8, v4-256, v5e-256 or v5p:16x16x24; GPUs, such as 8xH100 or "
    "gpu:80GiBx8; or this machine's cpu, cpu-8 or gpu"
)


def natural(text: str) -> int:
    """Parse a flag's value as 0 or a positive integer; for use as argparse's `type`."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not 0 or a positive integer")
    return int(text)


def step_range(text: str) -> range:
    """Parse a flag's value as a step or steps, as `7` or `5-7`; for use as argparse's `type`."""
    first, hyphen, last = text.partition("-")
    if not first.isdecimal() or not (last if hyphen else first).isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no step, such as 7, nor steps, such as 5-7")
    steps = range(int(first), int(last or first) + 1)
    if not steps or steps[0] < 1:
        raise argparse.ArgumentTypeError(f"{text} has no step; steps are counted from 1")
    return steps


class Parser(argparse.ArgumentParser):
    """An argument parser that accepts `_` for `-` in flags, such as --max_steps for --max-steps."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        hyphenated = [_hyphenate(word) for word in words[:end]]
        return super().parse_known_args(hyphenated + words[end:], namespace)


def _hyphenate(word: str) -> str:
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


CONFIG_HELP = (
    "config file, JSON or YAML, which may be in a bucket, or the name of a shipped one, such as "
    "6B_roto_256"
)


def add_config_arguments(
    parser: "argparse.ArgumentParser | argparse._ArgumentGroup",
    note: str = "",
    default: str | None = None,
) -> None:
    """Add the flags --config, --model and --set, which `load_config` reads.

    Args:
      note: the end of the help of --config, such as its default.
    """
    parser.add_argument("--config", default=default, help=CONFIG_HELP + note)
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="published architecture, such as gpt2-xl or pythia-1b, which replaces the keys of "
        "--config that describe the model; alone, it is the whole config",
    )
    add_setting_argument(parser)


def load_config(args: argparse.Namespace, version: int | None = None) -> Config:
    """Return the config that --config, --model and --set describe."""
    if args.config is None and args.model is None:
        raise InputError("give --config, --model or both")
    return Config.load(args.config, version, settings(args), args.model)


def add_setting_argument(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Add the flag --set, which overrides config keys; `settings` parses its values."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="config key to override, such as lr=1e-4; the value is JSON or text (repeatable)",
    )


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the config keys that --set overrides, with their new values."""
    return dict(map(Config.setting, args.set))


def run_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags that all training commands share."""
    try:
        log_lines.use()
    except ValueError as error:
        raise InputError(str(error)) from None
    parser = Parser(description=description)
    parser.add_argument(
        "--log",
        action=_Log,
        choices=log_lines.FORMATS,
        help="format of what the command's Python code prints, text or a JSON object per line; "
        "other processes and C++ libraries print text "
        f"(default: ${log_lines.VARIABLE}, or text)",
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--mode",
        choices=TRAIN_MODES + EVAL_MODES,
        default=TRAIN_MODES[0],
        help="train_and_eval: train, and score the config's val_set and eval_harness_tasks every "
        "val_every steps and at total_steps; train: without scores; eval: score the newest "
        "checkpoint, or --tune-model-path; eval_all: score every step of the model folder "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--tune-model-path",
        help="initial weights of a new run: model folder, step_N, Hugging Face folder or GGUF file "
        "(default: the config's tune_model_path); with lora_rank, the base model (also give it to "
        "resume if the base model has moved)",
    )
    parser.add_argument(
        "--fresh-opt",
        action="store_true",
        help="start with a fresh optimizer, not with that of --tune-model-path",
    )
    parser.add_argument(
        "--fall-back",
        action="store_true",
        help="if the newest checkpoint is damaged, resume from the newest intact one before it",
    )
    add_template_argument(parser)
    parser.add_argument(
        "--version",
        type=int,
        choices=(1, 2),
        help="1: gptj blocks under shard_map; 2: geglu blocks under jit (default: the config's)",
    )
    parser.add_argument(
        "--max-steps", type=int, help="global step to stop at (default: the config's total_steps)"
    )
    parser.add_argument(
        "--profile",
        type=step_range,
        metavar="STEPS",
        help="steps to trace with JAX's profiler into the model folder, such as 20-22",
    )
    parser.add_argument(
        "--model-dir", help="model folder or URI (default: the config's bucket and model_dir)"
    )
    return parser


class _Log(argparse.Action):
    """Chooses the format at once, so that later errors of flags have it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        log_lines.use(values)
        setattr(namespace, self.dest, values)


def add_template_argument(parser: argparse.ArgumentParser) -> None:
    """Add the flag --chat-template of commands that store a model."""
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja template to store with the model, or plain (default: the model's own, if any)",
    )


def run_arguments(args: argparse.Namespace) -> tuple[Config, str, RunOptions]:
    """Return (config, model folder, options) from the values of `run_parser`'s flags."""
    for name in ("max_steps", "fresh_opt", "fall_back", "profile", "new"):
        if args.mode in EVAL_MODES and getattr(args, name, None):
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{flag} is for training; remove {flag} or --mode {args.mode}")
    if args.mode == "eval_all" and args.tune_model_path is not None:
        raise InputError("--mode eval_all scores a model folder; give it as --model-dir")
    config = load_config(args, args.version)
    if args.chat_template is not None:
        from mesh_transformer.data.chat import template_text

        config = config.replace(chat_template=template_text(args.chat_template))
    folder = args.model_dir or config.model_folder()
    log_lines.about(run=local_path(folder))
    base = args.tune_model_path or config.tune_model_path
    if args.fresh_opt and base is None:
        raise InputError("--fresh-opt requires --tune-model-path; give both or neither")
    base = args.tune_model_path if args.mode in EVAL_MODES else base
    existing = [] if getattr(args, "new", False) else [folder]  # --new deletes the run there
    # A run that is resumed has its own keys about answers, such as --chat-template.
    paths = [base, *existing] if args.mode in EVAL_MODES else [*existing, base]
    config = _based_on([*filter(None, paths)], config)
    if args.mode == "train" and config.watched_set is not None:
        raise InputError(
            f"--mode train does not score {config.watched_set}, which keep_best and early_stop "
            "need; use --mode train_and_eval, or set both to null"
        )
    if args.mode == "train" and (config.val_set or config.eval_harness_tasks):
        print("--mode train: the config's val_set and eval_harness_tasks are not scored")
    if config.total_steps is None and args.max_steps is not None:
        config = config.replace(total_steps=args.max_steps)  # the learning rate decays until then
    options = RunOptions(
        max_steps=args.max_steps,
        tune_model_path=args.tune_model_path,
        fresh_opt=args.fresh_opt,
        fall_back=args.fall_back,
        validate=args.mode == "train_and_eval",
        profile=args.profile,
    )
    return config, folder, options


def _based_on(paths: Sequence[str], config: Config) -> Config:
    """Return the config for using the model at the first of some paths that has one.

    The model's `end_tokens`, `chat_template` and `sampling` are used, unless the config sets its
    own.

    Raises:
      InputError: if the model has another tokenizer than the config.
    """
    from mesh_transformer.data.same_tokenizer import check_encoding

    for path in paths:
        if source := _stored(path):
            check_encoding(source.tokenizer, None, config.tokenizer, f"the model {path}")
            return source.with_answer_keys(config, same_tokenizer=True)
    return config


def _stored(path: str) -> "Source | None":
    """Return the checkpoint at `path`; None if there is none that stores a config."""
    from mesh_transformer.checkpoint.source import Source

    try:
        source = Source(path)
        return source if source.config else None
    except InputError:
        return None


def model_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags that choose a trained model."""
    parser = Parser(description=description)
    add_config_arguments(parser, " (default: the one stored in --model-path)")
    parser.add_argument(
        "--model-path",
        help="model folder, step_N, Hugging Face folder or GGUF file (default: the config's "
        "bucket/model_dir)",
    )
    parser.add_argument(
        "--version",
        type=int,
        choices=(1, 2),
        help="1: gptj blocks under shard_map; 2: geglu blocks under jit; requires --config "
        "(default: the config's)",
    )
    return parser


def model_arguments(args: argparse.Namespace) -> tuple[str, Config | None]:
    """Return (path of the model, config) from the values of `model_parser`'s flags.

    The config is None if none of --config, --model and --set is given; the config stored with the
    model then applies.

    Raises:
      InputError: if none of --config, --model and --model-path is given, if --version is given
        without --config, if the config or the model folder is invalid, or if the config names
        another tokenizer than the model's.
    """
    described = args.config is not None or args.model is not None
    if not described and (args.model_path is None or args.version is not None):
        raise InputError("give --config or --model-path (--version requires --config)")
    changes = settings(args)
    if described:
        config = load_config(args, args.version)
        path = args.model_path or config.model_folder()
        # A tokenizer that is chosen by --set may replace the model's own.
        return path, config if "tokenizer" in changes else _based_on([path], config)
    if not changes:
        return args.model_path, None
    from mesh_transformer.checkpoint.source import Source

    if "tokenizer" in changes:  # it brings a template of its own
        changes = {"chat_template": None} | changes
    return args.model_path, Source(args.model_path).config.replace(**changes)


def check_output(args: argparse.Namespace, *names: str) -> None:
    """Raise InputError if a flag's file, if it is given, could not be written after the work.

    Args:
      names: the names of the flags, without hyphens.
    """
    from mesh_transformer.storage.access import check_bucket, is_uri

    for name in names:
        if path := getattr(args, name):
            check_bucket(path)
            folder = os.path.dirname(path) or "."
            if not is_uri(folder) and not os.access(folder, os.W_OK):
                raise InputError(f"--{name} {path}: {folder} is no folder to write to; create it")


def add_key_arguments(parser: argparse.ArgumentParser):
    """Add the flags --batch, --accumulate, --zero and --remat, which override config keys.

    Returns:
      The argument group of these flags.  A command can add flags for more config keys to it.
    """
    keys = parser.add_argument_group("config keys to override")
    keys.add_argument("--batch", type=positive, help="sequences per replica and microbatch")
    keys.add_argument("--accumulate", type=positive, help="microbatches per step")
    keys.add_argument("--zero", type=int, choices=(0, 1, 3), help="ZeRO stage")
    keys.add_argument("--remat", choices=("full", "dots", "none"), help="remat policy")
    return keys


def key_arguments(args: argparse.Namespace, *others: str) -> dict[str, Any]:
    """Return the config keys that the flags of `add_key_arguments` override, with their new values.

    Args:
      others: further config keys with a flag of the same name.
    """
    names = {"batch": "per_replica_batch", "accumulate": "gradient_accumulation_steps"}
    names |= {name: name for name in ("zero", "remat", *others)}
    return {key: x for name, key in names.items() if (x := getattr(args, name)) is not None}


def input_help(types: tuple[str, ...]) -> str:
    """Return the help text of a command's input, which is read by `find_set`."""
    return (
        f"file ({format_types(types)}), folder or pattern of such files, folder of a saved Hugging "
        "Face dataset, or hf:NAME, a dataset on the hub"
    )


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose what to read from the input of a command that reads text."""
    parser.add_argument("--split", metavar="NAME", help="split of a Hugging Face dataset to read")
    parser.add_argument(
        "--subset", metavar="NAME", help="subset (config) of a dataset on the hub to read"
    )
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="skip and count unusable lines, documents and parts of files instead of stopping",
    )


def add_text_column(parser: argparse.ArgumentParser) -> None:
    """Add the flag --text-column."""
    parser.add_argument(
        "--text-column",
        default=TEXT_COLUMN,
        metavar="NAME",
        help="column of the text in .csv, .tsv, .parquet and .arrow files, and its key in .jsonl "
        "files (default %(default)s)",
    )


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags shared by the commands that create training records."""
    parser.add_argument(
        "--output-dir",
        default=".",
        help="folder of the record set, which may be in a bucket (default: current folder)",
    )
    parser.add_argument(
        "--seq",
        type=positive,
        default=2048,
        help="tokens per sequence, the config's seq (default %(default)s)",
    )
    parser.add_argument(
        "--tokenizer",
        help="folder or GGUF file of a tokenizer or its model, hub name, gpt2 or bytes (default "
        "gpt2)",
    )
    add_ray_argument(parser)
    add_input_arguments(parser)


def add_ray_argument(parser: argparse.ArgumentParser) -> None:
    """Add the flag --ray, which `ray_workers` reads."""
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="read the input on the Ray cluster at HOST:PORT or auto, which finds it; all its "
        "machines must reach the input and the output folder at the same paths (default: this "
        "machine alone)",
    )


def ray_workers(address: str | None) -> "contextlib.AbstractContextManager[Workers | None]":
    """Return a context manager that connects to the Ray cluster at an address, if there is one."""
    if address is None:
        return contextlib.nullcontext()
    from mesh_transformer.pod.ray_head import set_driver_environment

    set_driver_environment()
    from mesh_transformer.pod.ray_workers import RayWorkers  # an installation may lack Ray

    return RayWorkers(address)
