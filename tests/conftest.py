"""Eight virtual CPU devices for every test; small models and batches to compare with."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mesh_transformer.config import Config

jax.config.update("jax_num_cpu_devices", 8)
# Most of a test's time is compilation: with XLA's older way to write a fusion's code, and without
# LLVM's optimisations (which some of it would take minutes of), it is a fifth.  The passes over
# the program are the same, but that scatters become loops.
QUICK_COMPILATION = "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILATION}"
# What a single program is compiled with where it is to be as users have it.
AS_USERS_COMPILE = {"xla_cpu_use_fusion_emitters": True, "xla_backend_optimization_level": 3}
# What tests start compiles a program once a session.  In here hardly one is compiled twice, and to
# write them all would take longer.
jax.config.update("jax_enable_compilation_cache", False)
# A process in the background ignores Ctrl-C, and one under nohup SIGHUP; all that it starts would
# too.  What has a handler here has the default there.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, lambda *_: None),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)
if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker has the folder of its session
    _compiled = tempfile.TemporaryDirectory(prefix="compiled")
    os.environ["MESH_TRANSFORMER_CACHE"] = _compiled.name

DATA = Path(__file__).parent / "data"

SMALL = {
    "layers": 2,
    "d_model": 64,
    "n_heads": 8,
    "n_vocab": 128,
    "seq": 16,
    "pe_rotary_dims": 4,
    "dtype": "float32",
    "lr": 1e-2,
    "warmup_steps": 1,
    "anneal_steps": 10,
    # With 1e-8 Adam blows rounding up where a gradient is zero by symmetry.
    "adam_eps": 1e-4,
}


@pytest.fixture
def small() -> Callable[..., Config]:
    """A small f32 config, with changes."""
    return lambda **changes: Config(**(SMALL | changes))


def random_batch(config: Config, *shape: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random `obs` and `target` of the given leading shape."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.n_vocab, (*shape, config.seq + 1)).astype(np.uint32)
    return {"obs": tokens[..., :-1], "target": tokens[..., 1:]}


def original_config(variant: str, **changes: Any) -> Config:
    """The config of one of the original's golden runs."""
    values = json.loads((DATA / "original" / variant / "config.json").read_text())
    return Config(
        **{k: v for k, v in values.items() if k[0] != "_"} | {"dtype": "float32"} | changes
    )


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Callable[[str], Path]]:
    """A function that gives a folder on a file system of some size, or that another size."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def resize(size: str) -> Path:
        options = f"size={size}" + (",remount" if os.path.ismount(folder) else "")
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("a small file system cannot be mounted here (not root)")
        return folder

    yield resize
    if os.path.ismount(folder):
        subprocess.run(["umount", "-l", str(folder)], check=True)
