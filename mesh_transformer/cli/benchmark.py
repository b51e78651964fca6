"""Measures a config on the devices here: its train step, or decoding, checkpoints, the loader.

Without an accelerator --dp x --mp virtual CPU devices stand in for some.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from mesh_transformer.cli.arguments import positive
from mesh_transformer.config import Config
from mesh_transformer.performance import ablation, checkpoint_timing, loader_timing, report
from mesh_transformer.util import InputError, run_script

# Variables that change what is measured: told with the command.
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "GLIBC_TUNABLES")
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# transformer_shmap's two, which it trains on 32 microbatches of one sequence a replica.
SHMAP = {
    "d_model": 4096,
    "n_heads": 16,
    "n_vocab": 50304,
    "seq": 1024,
    "pe_rotary_dims": 64,
    "gradient_accumulation_steps": 32,
}
MODELS: dict[str, Any] = {  # a file of configs/, or the keys
    "tiny": "tiny.json",
    "13M": {  # four chunks of the loss, as GPT-J has
        "layers": 6,
        "d_model": 256,
        "n_heads": 8,
        "n_vocab": 16384,
        "seq": 1024,
        "loss_chunk": 256,
        "pe_rotary_dims": 32,
        "dtype": "float32",
    },
    "105M": {
        "layers": 8,
        "d_model": 1024,
        "n_heads": 4,
        "n_vocab": 2048,
        "seq": 1024,
        "pe_rotary_dims": 64,
        "per_replica_batch": 2,
        "remat": "none",
        "dtype": "float32",
    },
    "2.8B": SHMAP | {"layers": 12},
    "6.9B": SHMAP | {"layers": 32},
    "gpt-j-6b": "6B_roto_256.json",
    "20B": "20B.json",
    "40B": "40B.json",
}
# What is measured on hardware that is named alone; on any other, GPT-J.
MODEL_OF = {"cpu": "tiny", "v2": "2.8B", "v3": "6.9B"}


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--config", help="JSON or YAML file")
    which.add_argument("--model", help=f"{', '.join(MODELS)} (default: by --hardware)")
    parser.add_argument("--dp", type=positive, default=1, help="replicas (1)")
    parser.add_argument("--mp", type=positive, default=1, help="devices of each (1)")
    parser.add_argument(
        "--hardware",
        "--version",
        help="v2, v3, v4, v5e, v5p, v6e, h100, h200, a100, cpu: whose peak counts (default: the "
        "devices' own; a CPU's is measured)",
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--decode", action="store_true", help="tokens of --batch rows a replica")
    modes.add_argument("--checkpoint", action="store_true", help="save and restore the state")
    modes.add_argument("--loader", action="store_true", help="records read by one core")
    modes.add_argument(
        "--ablate", action="store_true", help="the train step with one optimisation off at a time"
    )
    keys = parser.add_argument_group("in place of the config's keys")
    keys.add_argument("--batch", type=positive, help="sequences a replica")
    keys.add_argument("--seq", type=positive)
    keys.add_argument("--accumulate", type=positive, help="microbatches")
    keys.add_argument("--zero", type=int, choices=(0, 1, 3))
    keys.add_argument("--remat", choices=("full", "dots", "none"))
    keys.add_argument("--partitioning", choices=("shard_map", "jit"))
    keys.add_argument("--dtype", choices=("bfloat16", "float32"))
    keys.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any other, as JSON"
    )
    size = parser.add_argument_group("how much is measured")
    size.add_argument("--steps", type=positive, default=10, help="timed, the median counts (10)")
    size.add_argument("--warmup", type=int, default=2, help="steps between the first and them (2)")
    size.add_argument("--prompt", type=positive, help="tokens, with --decode (128)")
    size.add_argument("--tokens", type=positive, help="timed, with --decode (128)")
    size.add_argument("--rounds", type=positive, default=5, help="of the other modes (5)")
    size.add_argument("--records", type=positive, default=100_000, help="--loader (%(default)s)")
    parser.add_argument("--folder", type=Path, help="to write in (default: a temporary one)")
    parser.add_argument("--profile", metavar="DIR", help="write a trace there, tell its top ten")
    parser.add_argument(
        "--every-host", action="store_true", help="this runs on every host of a slice"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--markdown", action="store_true", help="print a row for docs/benchmarks.md")
    return parser.parse_args(arguments)


def model_name(args: argparse.Namespace) -> str:
    """The preset that is measured where no config is given."""
    return args.model or MODEL_OF.get(args.hardware, "gpt-j-6b" if args.hardware else "tiny")


def config_of(args: argparse.Namespace) -> Config:
    """The config that the flags stand for, on their mesh."""
    name = model_name(args)
    if args.config is not None:
        config = Config.load(args.config)
    elif name not in MODELS:
        raise InputError(f"--model is {name!r}, expected one of {', '.join(MODELS)}")
    elif isinstance(MODELS[name], str):
        config = Config.load(str(CONFIGS / MODELS[name]))
    else:
        config = Config.from_dict(MODELS[name], f"model {name}")
    changes: dict[str, Any] = {
        "cores_per_replica": args.mp,
        "tpu_size": args.dp * args.mp,
        "per_replica_batch": args.batch,
        "seq": args.seq,
        "gradient_accumulation_steps": args.accumulate,
        "zero": args.zero,
        "remat": args.remat,
        "partitioning": args.partitioning,
        "dtype": args.dtype,
    }
    changes = {key: value for key, value in changes.items() if value is not None}
    return Config.from_dict(config.as_dict() | changes | dict(map(key_value, args.set)))


def key_value(text: str) -> tuple[str, Any]:
    """A key and its value: JSON's, or where it is none the text itself."""
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--set is {text!r}, expected KEY=VALUE")
    with contextlib.suppress(json.JSONDecodeError):
        return key, json.loads(value)
    return key, value


def mode_of(args: argparse.Namespace) -> str:
    """What is measured."""
    modes = [mode for mode in ("decode", "checkpoint", "loader", "ablate") if getattr(args, mode)]
    return (modes or ["train"])[0]


@contextlib.contextmanager
def work_folder(given: Path | None) -> Iterator[Path]:
    """A new folder, inside the given one, that is gone afterwards."""
    if given is not None and not given.is_dir():
        raise InputError(f"--folder is {given}, which is no folder; make it first")
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=given) as folder:
        yield Path(folder)


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """This process has no more meanwhile, nor do the threads that it begins, ever."""
    if not hasattr(os, "sched_setaffinity"):
        raise InputError("--loader keeps to one core, which this system has no call for")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags ask for, as the JSON object."""
    config, mode = config_of(args), mode_of(args)
    if args.warmup < 0:
        raise InputError(f"--warmup is {args.warmup}, expected at least 0")
    if args.profile is not None and mode != "train":
        raise InputError(f"--profile is of train steps; leave it or --{mode} out")
    if args.every_host and mode in ("checkpoint", "loader"):
        raise InputError(f"--{mode} is of one host; leave --every-host out")

    import jax

    from mesh_transformer.mesh.devices import make_mesh, use_virtual_devices
    from mesh_transformer.model import flops
    from mesh_transformer.performance import benchmark

    if args.every_host:
        try:
            jax.distributed.initialize()
        except (RuntimeError, ValueError) as error:
            why = " ".join(str(error).split())[:200]
            raise InputError(
                f"--every-host: this is no host of a slice that JAX knows ({why})"
            ) from None
    wanted = args.dp * args.mp
    use_virtual_devices(wanted)
    devices = jax.devices()
    if len(devices) < wanted or (args.every_host and len(devices) != wanted):
        raise InputError(
            f"--dp {args.dp} x --mp {args.mp} are {wanted} devices, but there are {len(devices)} "
            f"({devices[0].device_kind}); change either"
        )
    mesh = make_mesh(config, devices[:wanted])
    limits = benchmark.limits(args.hardware, mesh, config.dtype)
    peak = None if limits is None else limits.flops
    if args.decode:
        bandwidth = None if limits is None else limits.bandwidth
        some = min(128, max(config.window // 4, 1))
        found: Any = benchmark.measure_decoding(
            config, mesh, bandwidth, prompt=args.prompt or some, tokens=args.tokens or some
        )
    elif args.checkpoint:
        with work_folder(args.folder) as folder:
            found = checkpoint_timing.measure(config, mesh, folder, args.rounds)
    elif args.loader:
        with work_folder(args.folder) as folder, one_core():
            found = loader_timing.measure(folder, args.records, config.seq, args.rounds)
        most = peak and peak / flops.palm_flops_per_token(config)
        found |= {"most_tokens_per_second_of_a_step": most}
    elif args.ablate:
        found = ablation.measure(config, mesh, args.rounds)
    else:
        found = benchmark.measure_training(
            config, mesh, limits, count=args.steps, warmup=args.warmup, profile=args.profile
        )
    measured = found if isinstance(found, dict) else dataclasses.asdict(found)
    told = limits and dataclasses.asdict(limits)
    return about(args, config, devices[0]) | {"limits": told, **measured}


def about(args: argparse.Namespace, config: Config, device: Any) -> dict[str, Any]:
    """What was measured, where and when."""
    from mesh_transformer.model import flops

    given = [word for word in sys.argv[1:] if word not in ("--json", "--markdown")]
    around = [
        f"{name}={shlex.quote(os.environ[name])}" for name in ENVIRONMENT if name in os.environ
    ]
    keys = (
        "layers d_model n_heads n_vocab seq block partitioning zero remat dtype "
        "per_replica_batch gradient_accumulation_steps"
    )
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib")}
    return {
        "mode": mode_of(args),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join([*around, shlex.join(["scripts/benchmark.py", *given])]),
        "versions": versions | {"python": platform.python_version()},
        "platform": device.platform,
        "device": processor() if device.platform == "cpu" else device.device_kind,
        "dp": args.dp,
        "mp": args.mp,
        "model": args.config or model_name(args),
        "parameters": flops.n_params(config),
        "config": {key: getattr(config, key) for key in keys.split()},
        "flops_per_token": flops.palm_flops_per_token(config),
    }


def processor() -> str:
    """The CPU's name and how many cores this process may use."""
    limited = hasattr(os, "sched_getaffinity")  # not everywhere
    cores = len(os.sched_getaffinity(0)) if limited else os.cpu_count()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {cores} cores"
    return f"{platform.machine()} CPU, {cores} cores"


def main() -> None:
    args = parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # of a GPU; JAX takes 0.75
    found = measure(args)
    if args.json:
        print(json.dumps(found))
    elif args.markdown:
        print(report.row(found))
    else:
        print(report.lines(found))


if __name__ == "__main__":
    run_script(main)
