"""Measure a config's train step, decoding, checkpoints or record loader on this machine.

Without an accelerator, the measurement runs on --dp x --mp virtual CPU devices.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import importlib.util
import json
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from mesh_transformer.cli.arguments import (
    CONFIG_HELP,
    Parser,
    add_key_arguments,
    add_setting_argument,
    key_arguments,
    positive,
    settings,
)
from mesh_transformer.config import Config
from mesh_transformer.config_files import CONFIGS
from mesh_transformer.families import PRESETS
from mesh_transformer.util import InputError

# Environment variables that affect the measurements; they are included in the reported command.
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "GLIBC_TUNABLES")
# Config keys that the two models of the repository transformer_shmap have in common.  These models
# were trained with 32 microbatches per step, each with one sequence per replica.
SHMAP = {
    "d_model": 4096,
    "n_heads": 16,
    "n_vocab": 50304,
    "seq": 1024,
    "pe_rotary_dims": 64,
    "gradient_accumulation_steps": 32,
}
MODELS: dict[str, Any] = {  # for each preset, a file in configs/ or config keys
    "tiny": "tiny.json",
    "13M": {  # the loss is computed in four chunks per sequence, as in GPT-J
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
# For each mode that a script in scripts/measure carries out: the script, which defines `result` and
# `COLUMNS`, those of its table.
SCRIPTS = {"checkpoint": "checkpoints", "loader": "loader", "ablate": "ablation"}
SHOWN_OPERATIONS = 10
# Default model for each value of --hardware; GPT-J for values that are not listed.
MODEL_OF = {"cpu": "tiny", "v2": "2.8B", "v3": "6.9B"}


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--config", help=CONFIG_HELP)
    parser.add_argument(
        "--model",
        help=f"{', '.join(MODELS)}, or a preset such as gpt2 (default: by --hardware); with "
        "--config, a preset",
    )
    parser.add_argument("--dp", type=positive, default=1, help="replicas (default 1)")
    parser.add_argument("--mp", type=positive, default=1, help="devices per replica (default 1)")
    parser.add_argument(
        "--cp", type=positive, default=1, help="devices that split each sequence (default 1)"
    )
    parser.add_argument(
        "--hardware",
        "--version",
        help="hardware whose peak and bandwidth to compare with: v2, v3, v4, v5e, v5p, v6e, h100, "
        "h200, a100 or cpu (default: that of the devices; a CPU is measured)",
    )
    modes = parser.add_mutually_exclusive_group()
    for flag, description in (
        ("--decode", "measure generation with --batch rows per replica"),
        ("--checkpoint", "measure saving and restoring the state"),
        ("--loader", "measure reading of records on one core"),
        ("--verify", "compare what the devices compute with the formulas"),
        ("--ablate", "measure the train step with one optimisation off at a time"),
        ("--suite", "measure all that fits this machine, each case in a process of its own"),
    ):
        modes.add_argument(flag, action="store_true", help=description)
    suite = parser.add_argument_group("with --suite or --verify")
    suite.add_argument(
        "--minutes", type=float, default=30.0, help="time for all cases or checks (default 30)"
    )
    suite.add_argument("--resume", action="store_true", help="resume the suite with this --folder")
    keys = add_key_arguments(parser)
    keys.add_argument("--seq", type=positive, help="sequence length in tokens")
    keys.add_argument(
        "--partitioning", choices=("shard_map", "jit"), help="partitioning of the model over mp"
    )
    keys.add_argument("--dtype", choices=("bfloat16", "float32"), help="compute dtype")
    add_setting_argument(keys)
    size = parser.add_argument_group("size of the measurement")
    size.add_argument(
        "--steps", type=positive, default=10, help="timed steps; their median counts (default 10)"
    )
    size.add_argument(
        "--warmup",
        type=int,
        default=2,
        help="untimed steps between the first and the timed ones (default 2)",
    )
    size.add_argument(
        "--prompt",
        type=positive,
        help="prompt tokens per row with --decode (default 128, at most a quarter of the window)",
    )
    size.add_argument(
        "--tokens",
        type=positive,
        help="timed tokens per row with --decode (default 128, at most a quarter of the window)",
    )
    size.add_argument(
        "--pages", action="store_true", help="store the cache of --decode in pages, as serve does"
    )
    size.add_argument(
        "--rounds",
        type=positive,
        default=5,
        help="repetitions with --checkpoint, --loader or --ablate (default 5)",
    )
    size.add_argument(
        "--records",
        type=positive,
        default=100_000,
        help="records to write and read with --loader (default %(default)s)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder for temporary files (default: the system's), or for the results of --suite "
        "(default: suite)",
    )
    parser.add_argument(
        "--profile", metavar="DIR", help="folder for a profiler trace; prints its ten longest ops"
    )
    parser.add_argument(
        "--every-host",
        action="store_true",
        help="set up jax.distributed, when this command runs on every host of a slice",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument(
        "--markdown", action="store_true", help="print table rows for docs/benchmarks.md"
    )
    return parser.parse_args(arguments)


def model_name(args: argparse.Namespace) -> str:
    """Return the name of the preset model (--model) to measure if --config is not given."""
    return args.model or MODEL_OF.get(args.hardware, "gpt-j-6b" if args.hardware else "tiny")


def config_of(args: argparse.Namespace) -> Config:
    """Return the config to measure: that of --config or --model, changed by the other flags.

    --dp sets the number of replicas in the mesh; --mp and --cp set the devices that split the model
    and the sequences.
    """
    name = model_name(args)
    if args.config is not None:
        config = Config.load(args.config, model=args.model)
    elif name in PRESETS and name not in MODELS:
        config = Config.load(None, model=name)
    elif name not in MODELS:
        presets = ", ".join(name for name in PRESETS if name not in MODELS)
        raise InputError(f"--model is {name!r}, expected one of {', '.join(MODELS)}, {presets}")
    elif isinstance(MODELS[name], str):
        config = Config.load(str(CONFIGS / MODELS[name]))
    else:
        config = Config.from_dict(MODELS[name], f"model {name}")
    changes = {"cores_per_replica": args.mp, "context_parallel": args.cp}
    changes["tpu_size"] = args.dp * args.cp * args.mp
    changes |= key_arguments(args, "seq", "partitioning", "dtype")
    full = {"batch_ramp_steps": 0}  # steps of the full size are measured
    return Config.from_dict(config.as_dict() | changes | settings(args) | full)


def mode_of(args: argparse.Namespace) -> str:
    """Return "decode", "checkpoint", "loader" or "ablate" if that flag is given, else "train"."""
    modes = [mode for mode in ("decode", *SCRIPTS) if getattr(args, mode)]
    return (modes or ["train"])[0]


@functools.cache
def script(name: str, flag: str) -> Any:
    """Return the module `scripts/measure/<name>.py`, which carries out a flag.

    Raises:
      InputError: if there is no such file, because the library was installed without its sources.
    """
    path = Path(__file__).parents[2] / "scripts" / "measure" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"measure_{name}", path)
    if spec is None or spec.loader is None or not path.exists():
        raise InputError(
            f"--{flag} runs scripts/measure/{name}.py, which the installed package lacks; install "
            "a checkout of the repository with pip install -e ."
        )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the measurement that the flags select, and return the dict that --json prints."""
    config, mode = config_of(args), mode_of(args)
    if args.warmup < 0:
        raise InputError(f"--warmup is {args.warmup}, expected at least 0")
    if args.profile is not None and mode in SCRIPTS:
        raise InputError(f"--profile records no --{mode}; remove one of the flags")
    if args.every_host and mode in ("checkpoint", "loader"):
        raise InputError(f"--{mode} measures a single host; remove --every-host")
    if mode in ("checkpoint", "loader") and args.folder and not args.folder.is_dir():
        raise InputError(f"--folder {args.folder} is not a folder; create it first")
    own = script(SCRIPTS[mode], mode) if mode in SCRIPTS else None
    operations = script("operations", "profile") if args.profile is not None else None

    import jax

    from mesh_transformer.mesh.device_order import first_devices
    from mesh_transformer.mesh.devices import make_mesh, use_virtual_devices
    from mesh_transformer.performance import benchmark
    from mesh_transformer.training.step import StateLayout

    if args.every_host:
        try:
            jax.distributed.initialize()
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"--every-host: JAX cannot detect the hosts of a slice ({reason}); remove the flag "
                "if there is only one host"
            ) from None
    count = args.dp * args.cp * args.mp
    use_virtual_devices(count)
    devices = jax.devices()
    if len(devices) < count or (args.every_host and len(devices) != count):
        raise InputError(
            f"--dp {args.dp} x --cp {args.cp} x --mp {args.mp} need {count} devices, but there are "
            f"{len(devices)} ({devices[0].device_kind}); change one of them"
        )
    mesh = make_mesh(config, first_devices(count))
    layout = StateLayout(config, mesh)
    limits = benchmark.limits(args.hardware, mesh, config.dtype)
    if own is not None:
        result = own.result(layout, args, limits and limits.flops)
    elif args.decode:
        default = min(128, max(config.window // 4, 1))
        prompt, tokens = args.prompt or default, args.tokens or default
        bandwidth = limits and limits.bandwidth
        sizes = {"prompt": prompt, "tokens": tokens, "pages": args.pages}
        decoding = benchmark.measure_decoding(layout, bandwidth, **sizes, profile=args.profile)
        result = dataclasses.asdict(decoding)
    else:
        training = benchmark.measure_training(
            layout, limits, count=args.steps, warmup=args.warmup, profile=args.profile
        )
        result = dataclasses.asdict(training)
    if operations is not None:
        longest = operations.operations(args.profile)[:SHOWN_OPERATIONS]
        result["profile"] = [dataclasses.asdict(operation) for operation in longest]
    limits_dict = limits and dataclasses.asdict(limits)
    return run_info(args, config, devices[0]) | {"limits": limits_dict, **result}


def run_info(args: argparse.Namespace, config: Config, device: Any) -> dict[str, Any]:
    """Return a description of a measurement, which `measure` adds to its results.

    It contains the mode, model, config, mesh, hardware, software versions, date and command.
    """
    from mesh_transformer.model import flops

    words = [word for word in sys.argv[1:] if word not in ("--json", "--markdown")]
    variables = [
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
        "command": " ".join([*variables, shlex.join(["scripts/benchmark.py", *words])]),
        "versions": versions | {"python": platform.python_version()},
        "platform": device.platform,
        "device": processor() if device.platform == "cpu" else device.device_kind,
        "dp": args.dp,
        "cp": args.cp,
        "mp": args.mp,
        "model": args.config or model_name(args),
        "parameters": flops.n_params(config),
        "config": {key: getattr(config, key) for key in keys.split()},
        "flops_per_token": flops.palm_flops_per_token(config),
    }


def processor() -> str:
    """Return the CPU's name and the number of cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {cores} cores"
    return f"{platform.machine()} CPU, {cores} cores"


def table(args: argparse.Namespace, result: dict[str, Any]) -> str:
    """Format a result as readable text, or with --markdown as rows for docs/benchmarks.md."""
    from mesh_transformer.performance import report

    mode = mode_of(args)
    if mode in SCRIPTS:
        columns = script(SCRIPTS[mode], mode).COLUMNS
    else:
        columns = report.DECODING if mode == "decode" else report.TRAINING
    if args.markdown:
        return report.row(result, columns)
    lines = [report.lines(result, columns)]
    if result.get("profile"):
        lines += script("operations", "profile").lines(result["profile"])
    return "\n".join(lines)


def main() -> None:
    args = parse_args()
    os.environ.setdefault(
        "XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95"
    )  # for GPUs; JAX's default is 0.75
    if args.suite:
        others = ("config", "model", "profile", "every_host", "json", "markdown")
        if unused := [name.replace("_", "-") for name in others if getattr(args, name)]:
            raise InputError(f"--suite has cases of its own; remove --{unused[0]}")
        own = script("suite", "suite")
        sys.exit(own.run(args.folder or Path("suite"), args.minutes, resume=args.resume))
    if args.verify:
        sys.exit(script("verify", "verify").run(args))
    result = measure(args)
    if args.json:
        print(json.dumps(result))
    else:
        print(table(args, result))
