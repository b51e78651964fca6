"""Compilation of programs for given devices: peak memory and HLO, with progress and a cache."""

import contextlib
import dataclasses
import gzip
import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from mesh_transformer.mesh.program import compiled_folder
from mesh_transformer.performance.hlo import planned_memory
from mesh_transformer.util import InputError, first_line, start_thread

# Compiler options that make compilation fast.  They do not change the collectives.  They change the
# peak memory by at most 8 percent, with ZeRO 3 by 12, and the memory traffic by at most a factor of
# 2.
FAST_OPTIONS = {"optimization_level": 9}  # O0; JAX 0.10 does not accept the name
_OUT_OF_MEMORY = re.compile(r"\(([\d.]+)([KMGT])\) exceeds available HBM")
_SIZES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class OutOfTimeError(Exception):
    """The time limit has passed.  The compilation that it interrupts runs on in its thread."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Peak memory and HLO of a compiled program.

    Attributes:
      peak: peak memory in bytes on one device.
      text: HLO text; None if the compiler rejected the program because it needs too much memory.
      seconds: compilation time.
      fast: whether the program was compiled with reduced optimisation (`FAST_OPTIONS`).
      cached: whether the other figures are those of an earlier compilation.
    """

    peak: int
    text: str | None
    seconds: float
    fast: bool
    cached: bool = False


def compiled(
    topology: str,
    function: Callable[..., Any],
    *args: Any,
    setting: str = "",
    fast: bool = False,
    deadline: float | None = None,
) -> Memory:
    """Compile a jitted function, and return its peak memory and HLO text.

    The result is stored in the folder of compiled programs (`compiled_folder`).  There it is found
    again by the program, the devices, the compiler and its options.

    Args:
      topology: name of the slice, for messages.
      args: the function's arguments, as abstract arrays with shardings.  The function is compiled
        for the devices of these shardings.
      setting: what is compiled, for the line that shows the progress.
      fast: whether to compile with reduced optimisation (`FAST_OPTIONS`); ignored except for TPUs.
      deadline: time of `time.monotonic` at which to stop; None for no limit.

    Raises:
      InputError: if compilation fails.  A program that needs too much memory raises no error; see
        `Memory.text`.
      OutOfTimeError: if the deadline passes first.
    """
    lowered = function.trace(*args).lower()  # type: ignore[attr-defined]
    devices = _devices(args)
    on_tpu = devices[0].platform == "tpu"
    fast = fast and on_tpu
    options = FAST_OPTIONS if fast else None
    entry = _entry(lowered.as_text(), devices, options)
    if memory := _read(entry):
        return memory
    if deadline is not None and time.monotonic() >= deadline:
        raise OutOfTimeError
    began = time.perf_counter()
    try:
        what = f"compiling for {topology}{setting and f', {setting}'}"
        # Status lines refresh it.
        with tqdm(desc=what, bar_format="{desc}: {elapsed}", dynamic_ncols=True):
            program = _within(deadline, lambda: lowered.compile(compiler_options=options))
    except jax.errors.JaxRuntimeError as error:
        size = _OUT_OF_MEMORY.search(str(error))
        if size is None:
            reason = first_line(error)
            raise InputError(f"topology {topology}: compilation failed: {reason}") from None
        peak = int(float(size[1]) * _SIZES[size[2]])
        memory = Memory(peak, None, time.perf_counter() - began, fast)
    else:
        # Only the TPU compiler reports the peak memory.
        peak = _peak_on_device(program) if on_tpu else planned_memory(program)
        memory = Memory(peak, program.as_text(), time.perf_counter() - began, fast)
    _write(entry, memory)
    return memory


def _devices(args: Any) -> list[Any]:
    """Return the devices in the shardings of abstract arrays, in the order of their mesh."""
    leaves = (leaf for leaf in jax.tree.leaves(args) if leaf.sharding is not None)
    sharding = next(leaves).sharding
    mesh = getattr(sharding, "mesh", None)
    return list(sharding.device_set) if mesh is None else list(mesh.devices.flat)


def _peak_on_device(program: Any) -> int:
    """Return the peak memory in bytes of a compiled program on one TPU device."""
    m = program.memory_analysis()
    new = m.host_output_size_in_bytes - m.host_alias_size_in_bytes
    in_host = m.host_argument_size_in_bytes + m.host_temp_size_in_bytes + new
    return m.peak_memory_in_bytes - in_host  # the peak includes them


def _within(deadline: float | None, compile_program: Callable[[], Any]) -> Any:
    """Return what `compile_program` returns, or raise OutOfTimeError at the deadline."""
    if deadline is None:
        return compile_program()
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(compile_program())
        except BaseException as error:  # raised again below
            result.set_exception(error)

    start_thread(run, name="compilation")  # which nothing can interrupt
    try:
        return result.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        raise OutOfTimeError from None


def _entry(text: str, devices: list[Any], options: dict[str, Any] | None) -> Path | None:
    """Return the file for the figures of a program; None if there is no cache on this machine."""
    folder = compiled_folder()
    if not folder or "://" in folder:
        return None
    places = [
        (device.device_kind, device.id, getattr(device, "coords", None), device.process_index)
        for device in devices
    ]
    client = devices[0].client
    compiler = jax.__version__, client.platform, client.platform_version
    flags = [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    key = repr((text, places, compiler, flags, options))
    return Path(folder) / "plans" / f"{hashlib.sha256(key.encode()).hexdigest()}.json.gz"


def _read(entry: Path | None) -> Memory | None:
    """Return the figures in a file; None if there is none, or if it is damaged."""
    if entry is None:
        return None
    try:
        return Memory(**json.loads(gzip.decompress(entry.read_bytes())), cached=True)
    except (OSError, EOFError, ValueError, TypeError):
        return None


def _write(entry: Path | None, memory: Memory) -> None:
    """Write figures to a file; a folder that cannot be written to is as if there were no cache."""
    if entry is None:
        return
    values = dataclasses.asdict(memory)
    del values["cached"]
    draft = entry.with_name(f"{entry.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(gzip.compress(json.dumps(values).encode(), 6))
        draft.replace(entry)
