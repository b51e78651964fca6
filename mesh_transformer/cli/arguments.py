"""The flags that scripts share, and what they stand for."""

import argparse
from typing import Any, TypedDict

from mesh_transformer.config import Config
from mesh_transformer.pod.tpu.spec import SshOptions, TpuSpec
from mesh_transformer.util import InputError

# Flags that replace a config key of the same name.
TPU_KEYS = ("tpu_zone", "tpu_generation", "tpu_runtime_version")


class RunOptions(TypedDict):
    """What `training.train` and `runs.train` take by name."""

    max_steps: int | None
    tune_model_path: str | None
    fresh_opt: bool


def positive(text: str) -> int:
    """A flag's whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def run_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of the flags that every training run has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", required=True, help="JSON or YAML file")
    parser.add_argument(
        "--mode",
        choices=("train", "eval"),
        default="train",
        help="eval: score the config's val_set with the newest checkpoint, or --tune-model-path",
    )
    parser.add_argument(
        "--tune-model-path",
        help="what a new run starts from: model folder, step_N, or Hugging Face folder; with "
        "lora_rank the base, and where it is now",
    )
    parser.add_argument(
        "--fresh-opt", action="store_true", help="do not take the optimizer of --tune-model-path"
    )
    parser.add_argument(
        "--version", type=int, choices=(1, 2), help="1: gptj under shard_map; 2: geglu under jit"
    )
    parser.add_argument("--max-steps", type=int, help="train until the global step is this")
    parser.add_argument("--model-dir", help="folder or URI in place of bucket and model_dir")
    return parser


def run_arguments(args: argparse.Namespace) -> tuple[Config, str, RunOptions]:
    """The config, the model folder and the options that `run_parser`'s flags stand for."""
    if args.fresh_opt and args.tune_model_path is None:
        raise InputError("--fresh-opt goes with --tune-model-path; give both or neither")
    for name in ("max_steps", "fresh_opt", "new"):
        if args.mode == "eval" and getattr(args, name, None):
            raise InputError(f"--{name.replace('_', '-')} is for training; --mode eval has no use")
    config = Config.load(args.config, args.version)
    options = RunOptions(
        max_steps=args.max_steps, tune_model_path=args.tune_model_path, fresh_opt=args.fresh_opt
    )
    return config, args.model_dir or config.model_folder(), options


def model_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of the flags that say which trained model a script answers with."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", help="JSON or YAML file (default: what --model-path tells)")
    parser.add_argument(
        "--model-path",
        help="model folder, step_N or Hugging Face folder (default: the config's bucket/model_dir)",
    )
    parser.add_argument(
        "--version", type=int, choices=(1, 2), help="of the model, as in device_train.py"
    )
    return parser


def model_arguments(args: argparse.Namespace) -> tuple[str, Config | None]:
    """Where the model is that `model_parser`'s flags name, and its config where that is given."""
    if args.config is None and (args.model_path is None or args.version is not None):
        raise InputError("--config is missing: it goes with --version, or in place of --model-path")
    config = Config.load(args.config, args.version) if args.config else None
    return args.model_path or (config.model_folder() if config else ""), config


def add_host_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Adds the flags that say on which hosts a network runs, and when one of them counts as dead.

    Not `required`, it may also run in the script's own process.
    """
    hosts = parser.add_mutually_exclusive_group(required=required)
    hosts.add_argument("--tpu", metavar="NAME", help="the TPU to make, and to delete at the end")
    hosts.add_argument(
        "--local-hosts", type=int, metavar="N", help="N processes here stand in for hosts"
    )
    parser.add_argument(
        "--heartbeat", type=positive, default=10, help="seconds until silence is death (10)"
    )
    parser.add_argument(
        "--patience",
        type=positive,
        default=3600,
        help="seconds that one call to the hosts may take, compilation included (3600)",
    )
    add_tpu_arguments(parser)


def add_tpu_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say which TPU `--tpu` makes, and whom to be on its hosts."""
    group = parser.add_argument_group("with --tpu", "which TPU to make; some are config keys too")
    group.add_argument(
        "--tpu-zone",
        "--tpu-region",
        "--tpu_region",
        metavar="ZONE",
        help="such as europe-west4-a (key tpu_zone)",
    )
    group.add_argument(
        "--tpu-generation", help="v2, v3 (default), v4, v5e, v5p, v6e (key tpu_generation)"
    )
    group.add_argument(
        "--tpu-runtime-version",
        metavar="VERSION",
        help="the hosts' image (default: the generation's; key tpu_runtime_version)",
    )
    group.add_argument(
        "--preemptible",
        action="store_true",
        help="a cheaper TPU that may be taken away, and is made again (key tpu_tier names which)",
    )
    group.add_argument(
        "--queued", action="store_true", help="wait in Google's queue for as long as a day"
    )
    group.add_argument(
        "--max-hours",
        type=float,
        metavar="H",
        help="stop, save and delete the TPU after H hours; 15 minutes later its hosts delete it "
        "even if this driver is gone (default: no limit)",
    )
    group.add_argument("--ssh-user", metavar="NAME", help="user on the hosts (default: yours)")
    group.add_argument(
        "--ssh-key", metavar="FILE", help=f"private key (default: {SshOptions.key_file})"
    )
    group.add_argument("--ssh-port", type=int, metavar="PORT", help="the hosts' (default: 22)")


def refuse_tpu_arguments(args: argparse.Namespace) -> None:
    """Raises InputError where one of `add_tpu_arguments`' flags is given without `--tpu`."""
    for name in (
        *TPU_KEYS,
        "preemptible",
        "queued",
        "max_hours",
        "ssh_user",
        "ssh_key",
        "ssh_port",
    ):
        if getattr(args, name):
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag} goes with --tpu; give --tpu NAME too, or leave it out")


def tpu_arguments(args: argparse.Namespace, config: Config) -> tuple[TpuSpec, SshOptions]:
    """The TPU that `add_tpu_arguments`' flags and the config ask for, and how to log in there."""
    changes = {key: getattr(args, key) for key in TPU_KEYS if getattr(args, key) is not None}
    given = {"user": args.ssh_user, "key_file": args.ssh_key, "port": args.ssh_port}
    ssh: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    spec = TpuSpec.of(
        config.replace(**changes),
        args.tpu,
        queued=args.queued,
        preemptible=args.preemptible,
        max_hours=args.max_hours,
    )
    return spec, SshOptions(**ssh)
