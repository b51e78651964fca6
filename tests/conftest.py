"""Settings and fixtures for all tests: eight virtual CPU devices, small models and batches."""

import gc
import hashlib
import json
import os
import signal
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.mesh.jax_versions import wrap_compilation

jax.config.update("jax_num_cpu_devices", 8)
# Most of a test's time is compilation.  Using XLA's older code generation for fusions and disabling
# LLVM's optimisations (which take minutes for some programs) reduces it to a fifth.  XLA's passes
# over the program stay the same, except that scatters become loops.  Splitting a program into parts
# for several threads would cost a tenth more, as every core has a worker.
QUICK_COMPILATION = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
# Compiler options for tests that compile a single program as users do.
AS_USERS_COMPILE: dict[str, Any] = {"xla_backend_optimization_level": 3}
if jaxlib.version.__version_info__ < (0, 11, 1):  # newer ones lack the older code generation
    QUICK_COMPILATION += " --xla_cpu_use_fusion_emitters=false"
    AS_USERS_COMPILE["xla_cpu_use_fusion_emitters"] = True
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILATION}"
MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 15_000
THIRD = "TEST_THIRD"  # a landing's number: of the slow tests, only that third is run
QUARTER = "TEST_QUARTER"  # a number: of all tests, only that quarter is run
STARTED = "TEST_STARTED"  # when the session started, in seconds, for its workers
# Else what commands print would depend on how long they take.
os.environ["MESH_TRANSFORMER_STATUS"] = ""
# Ray reads at its import how it authenticates, and some tests import it before a head starts.
os.environ.setdefault("RAY_AUTH_MODE", "token")
# Processes that tests start share a compilation cache during a session.  This process does not use
# it: it compiles hardly any program twice, and writing all programs to the cache would take longer.
jax.config.update("jax_enable_compilation_cache", False)
# Tracing creates many objects that live as long as the program, and by default Python looks through
# all of them again and again: a tenth of a test's time.
gc.set_threshold(200_000, 20, 100)
# Programs that this process has compiled, by platform, hash of the text, options and devices.
_programs: dict[tuple[Any, ...], Any] = {}


def share_programs() -> None:
    """Let this process compile equal programs only once.

    Each network traces its own functions, so a test that creates several equal networks, or saves
    and loads them, would compile the same programs several times.  JAX's compilation cache would
    write every program to a file.
    """

    def wrap(compile_program: Callable[..., Any]) -> Callable[..., Any]:
        def compile_once(
            backend: Any,
            module: Any,
            devices: Any,
            options: Any,
            callbacks: Any,
            *rest: Any,
            **more: Any,
        ) -> Any:
            if callbacks:  # functions of this program alone
                return compile_program(backend, module, devices, options, callbacks, *rest, **more)
            text = hashlib.sha256(module.operation.get_asm().encode()).digest()
            places = tuple(device.id for device in devices.flat)
            key = (backend.platform, text, options.SerializeAsString(), places)
            if key not in _programs:
                _programs[key] = compile_program(
                    backend, module, devices, options, callbacks, *rest, **more
                )
            return _programs[key]

        return compile_once

    wrap_compilation(wrap)


share_programs()
# A background process ignores SIGINT (Ctrl-C), a process under nohup ignores SIGHUP, and the
# processes that they start would inherit this.  Signals with a handler in this process are reset to
# the default in the processes that it starts.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, lambda *_: None),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers use the folder of their session
    os.environ.setdefault(STARTED, str(time.time()))
    # Programs that tests start put their temporary files, caches and settings here, and it is
    # deleted at the end.  Tests' own folders stay where pytest puts them, for a look afterwards.
    _session = tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True)
    os.environ |= {
        "PYTEST_DEBUG_TEMPROOT": tempfile.gettempdir(),
        "TMPDIR": _session.name,
        "MESH_TRANSFORMER_CACHE": f"{_session.name}/compiled",
        "XDG_CACHE_HOME": f"{_session.name}/cache",
        "XDG_CONFIG_HOME": f"{_session.name}/config",
        "TPU_LOG_DIR": "disabled",
    }
    tempfile.tempdir = None  # read TMPDIR again

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
    # With 1e-8, Adam would amplify rounding errors where a gradient is zero by symmetry.
    "adam_eps": 1e-4,
}


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow the cases of a test after the first n, if it has the mark `quick(n)`.

    If `TEST_THIRD` is set, deselect the slow tests of the two other thirds, and if `TEST_QUARTER`
    is set, all tests of the three other quarters.
    """
    seen: dict[str, int] = {}
    for item in items:
        if mark := item.get_closest_marker("quick"):
            name = item.nodeid.partition("[")[0]
            seen[name] = seen.get(name, 0) + 1
            if seen[name] > mark.args[0]:
                item.add_marker(pytest.mark.slow)
    left_out: set[pytest.Item] = set()
    if number := os.environ.get(THIRD):
        slow = [item for item in items if item.get_closest_marker("slow")]
        left_out |= {item for item in slow if part_of(item.nodeid, 3) != int(number) % 3}
    if number := os.environ.get(QUARTER):
        left_out |= {item for item in items if part_of(item.nodeid, 4) != int(number) % 4}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def part_of(nodeid: str, parts: int) -> int:
    """Return in which of so many equal parts a test is, from 0: the same on every machine."""
    return zlib.crc32(f"seed 1 {nodeid}".encode()) % parts


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip slow tests that would begin after the minutes in `TEST_MINUTES`, if that is set.

    Continuous integration has a limit, which some machines would exceed.
    """
    minutes = float(os.environ.get("TEST_MINUTES") or "inf")
    late = time.time() - float(os.environ[STARTED]) > 60 * minutes
    if late and item.get_closest_marker("slow"):
        pytest.skip(f"the {minutes:g} minutes in which slow tests may begin are over")


@pytest.hookimpl(trylast=True)  # after the fixtures are gone
def pytest_runtest_teardown() -> None:
    """Delete the compiled programs if they have many memory mappings.

    Linux permits 65,530 mappings per process.  A compiled program has several, JAX keeps programs,
    and XLA aborts the process when it gets no more.
    """
    if MAPPINGS.exists() and len(MAPPINGS.read_bytes().splitlines()) > MOST_MAPPINGS:
        _programs.clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def small() -> Callable[..., Config]:
    """Return a function that creates a small f32 config, with changes."""
    return lambda **changes: Config(**(SMALL | changes))


def random_batch(config: Config, *shape: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random `obs` and `target` arrays with the leading axes `shape`."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.n_vocab, (*shape, config.seq + 1)).astype(np.uint32)
    return {"obs": tokens[..., :-1], "target": tokens[..., 1:]}


def original_config(variant: str, **changes: Any) -> Config:
    """Return the config of one of the original's golden runs, with changes."""
    values = json.loads((DATA / "original" / variant / "config.json").read_text())
    return Config(
        **{k: v for k, v in values.items() if k[0] != "_"} | {"dtype": "float32"} | changes
    )


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Callable[[str], Path]]:
    """Return a function that creates a small file system of a size, or resizes it.

    The function returns the path of its folder.
    """
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
