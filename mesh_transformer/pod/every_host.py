"""One network over several processes that all run the same command, without a driver.

    process 0                       process 1
    training.loop.train             training.loop.train
    EveryHost -- Lockstep  <---->   EveryHost -- Lockstep
    devices   <-- collectives -->   devices

Every process runs the training loop on its own devices and batch rows.  `Lockstep` makes all of
them make the same calls; JAX's collectives do the rest.
"""

import contextlib
import ctypes
import functools
import os
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mesh_transformer.calls import Call, StateCall
from mesh_transformer.checkpoint.orbax_handlers import SAVE_SECONDS
from mesh_transformer.config import Config
from mesh_transformer.generation.batch import NewBatch, Run
from mesh_transformer.mesh.devices import use_virtual_devices
from mesh_transformer.mesh.placement import AllRows
from mesh_transformer.mesh.program import bind_collectives, compile_together
from mesh_transformer.network import Claim, Save, Train, TrainSet, Wait
from mesh_transformer.pod.lockstep import ADVICE, Lockstep
from mesh_transformer.pod.meeting import Meeting, Place, check_free
from mesh_transformer.pod.runner import bypass_proxy, versions
from mesh_transformer.pod.shared_folder import create_marker
from mesh_transformer.storage.access import is_uri
from mesh_transformer.training import loop
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError, exit_now

# Batches that are read before they are needed.  A process that cannot read a batch knows it this
# many steps earlier, and the others are at most this many steps ahead of it.
AHEAD = loop.IN_FLIGHT + 1
SECONDS_TO_SHUT_DOWN = 60  # for JAX to disconnect the processes at the end
SECONDS_TO_SEE = 10.0  # for a new file to be seen through a network file system
SECONDS_TO_REPORT = 2.0  # for the reason of an abort to arrive


class EveryHost(CausalTransformer):
    """A `CausalTransformer` in one of several processes that all make the same calls.

    `open_train_set` and `train` take only the batch rows of this process.  All other methods take
    the rows of all replicas, and return all rows.

    Attributes:
      lockstep: the agreement with the other processes.
    """

    def __init__(self, config: Config, lockstep: Lockstep):
        super().__init__(config, init=False)
        self.lockstep = lockstep
        self._eval_rows = AllRows(self.mesh, self.config.virtual_replicas(self.dp))

    def open_train_set(self) -> TrainSet:  # type: ignore[override]
        """Open `config.train_set`, to read only the batch rows of this process.

        Raises:
          InputError: also if the processes do not all see the same record files.
        """
        records = self.lockstep.together(super().open_train_set)
        seen = self.lockstep.values(records.fingerprint())
        if index := _first_other(seen):
            raise InputError(
                f"train_set: {self.lockstep.meeting.name(index)} sees other record files than "
                "process 0 (names or sizes differ); give all processes the same files"
            )
        return _TrainSet(records, self._begin_step, self.lockstep)

    def _begin_step(self, batch: int) -> None:
        self.lockstep.begin_call(save_failed=super().save_failed, batch=batch)

    def run(self, call: Call[Any]) -> Any:
        """Run a call in all processes; each passes in the rows of all replicas."""
        local = functools.partial(super().run, call)
        match call:
            case Train():  # which `get_samples` of the training set has begun
                metrics = local()
                self.lockstep.complete_call()
                return metrics
            case Save() | Wait():
                try:
                    return self.lockstep.together(local, patience=SAVE_SECONDS)
                finally:
                    self.lockstep.count_save()
            case Claim():
                self._check_shared(call.folder)
                return self.lockstep.together(local)
            case StateCall():
                return self.lockstep.together(local)
            case NewBatch():
                return functools.partial(self._run_in_step, self._run_in_step(super().run, call))
        return self._run_in_step(super().run, call)

    def _run_in_step(self, run: Run, call: Call[Any]) -> Any:
        with self.lockstep.call(save_failed=super().save_failed):
            return run(call)

    def _check_shared(self, folder: str) -> None:
        """Raise InputError in all processes if `folder` is local and not shared by all of them."""
        if is_uri(folder):
            return
        name = self.lockstep.once(lambda: f".{secrets.token_hex(8)}.shared")
        path = os.path.join(folder, name)
        writes = self.lockstep.writes
        self.lockstep.together(lambda: create_marker(path, "process 0") if writes else None)
        seen = self.lockstep.values(_is_seen(path))
        if writes:
            os.remove(path)
        if not all(seen):
            raise InputError(
                f"{folder}: {self.lockstep.meeting.name(seen.index(False))} does not see a file of "
                "process 0 in this folder; give a folder that all hosts share, such as "
                "gs://bucket/model"
            )

    @property
    def save_failed(self) -> bool:
        """Whether all processes have learned that the last save has failed."""
        return self.lockstep.save_failed

    def close(self) -> None:
        if not self.lockstep.broken:  # else the last save will never be complete
            super().close()


def _first_other(values: Sequence[Any]) -> int:
    """Return the index of the first value that differs from the value at index 0; 0 if none."""
    return next((index for index, value in enumerate(values) if value != values[0]), 0)


def _is_seen(path: str) -> bool:
    """Return whether a file that was just created is seen from this host."""
    deadline = time.monotonic() + SECONDS_TO_SEE
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
        with contextlib.suppress(OSError):  # refreshes what a network file system has cached
            os.listdir(os.path.dirname(path))
    return True


class _TrainSet:
    """A training set that is read some batches ahead, so that errors are known early.

    If reading a batch fails in one process, all processes stop before that batch, and can save.

    Args:
      begin_step: called with a batch's number before the batch is taken; begins a call that all
        processes make (see `Lockstep.begin_call`), which ends when they train on the batch.
    """

    def __init__(self, records: TrainSet, begin_step: Callable[[int], None], lockstep: Lockstep):
        self._records, self._begin_step, self._lockstep = records, begin_step, lockstep
        self._taken = 0  # number of batches
        self._ahead: deque[tuple[dict[str, np.ndarray], dict[str, Any]]] = deque()
        self._state = records.state()
        self._error: Exception | None = None

    def get_samples(self) -> dict[str, np.ndarray]:
        while self._error is None and len(self._ahead) <= AHEAD:
            try:
                sample = self._records.get_samples()
            except Exception as error:
                self._error = error
                self._lockstep.announce_bad_batch(error, self._taken + len(self._ahead))
            else:
                self._ahead.append((sample, self._records.state()))
        self._begin_step(self._taken)  # raises before the position changes
        self._taken += 1
        sample, self._state = self._ahead.popleft()
        return sample

    def state(self) -> dict[str, Any]:
        return self._state

    def restore(self, state: dict[str, Any] | None, batches: int = 0) -> None:
        self._ahead.clear()
        self._records.restore(state, batches)
        self._state = self._records.state()

    def close(self) -> None:
        self._records.close()


FLAGS = ("--coordinator", "--process-count", "--process-index")


def find_place(
    coordinator: str | None, count: int | None, index: int | None, seconds: float
) -> tuple[Place, list[int] | None]:
    """Return the place of this process, and the ids of the local devices that it uses.

    If `count` and `index` are None, JAX detects the cluster.  The ids are None for all devices.

    Args:
      coordinator: "HOST:PORT" of process 0 (default: the variable JAX_COORDINATOR_ADDRESS).
      seconds: time limit for looking up the host of process 0.

    Raises:
      InputError: if values are missing or contradict each other, or no cluster is detected.
    """
    chosen = (coordinator, count, index)
    ids = [int(i) for i in os.environ.get("JAX_LOCAL_DEVICE_IDS", "").split(",") if i] or None
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if chosen == (None, None, None):
        coordinator, count, index, ids = _detected(coordinator, ids, seconds)
    values = zip(FLAGS, (coordinator, count, index), strict=True)
    if missing := [flag for flag, value in values if value is None]:
        raise InputError(
            f"--every-host requires {', '.join(missing)}; give all of {', '.join(FLAGS)}, or none "
            "of them where JAX detects the cluster (Slurm, Open MPI, Cloud TPUs, Kubernetes)"
        )
    assert coordinator is not None
    assert count is not None
    assert index is not None
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"--coordinator is {coordinator}, expected HOST:PORT")
    if not 0 <= index < count:
        raise InputError(
            f"--process-index is {index}, expected 0 to {count - 1} (--process-count is {count})"
        )
    return Place(coordinator, count, index), ids


def _detected(
    coordinator: str | None, ids: list[int] | None, seconds: float
) -> tuple[str | None, int | None, int | None, list[int] | None]:
    """Return (address of process 0, process count, process index, local device ids) from JAX.

    JAX detects them in `jax.distributed.initialize` too, but there a process that cannot connect is
    aborted.  It has no public function for this, so a private one is called.
    """
    try:
        from jax._src.clusters import ClusterEnv

        return ClusterEnv.auto_detect_unset_distributed_params(
            coordinator, None, None, ids, None, int(seconds)
        )  # type: ignore[return-value]
    except Exception as error:  # each kind of cluster raises its own exceptions
        text = " ".join(str(error).split())[:300]
        raise InputError(
            f"--every-host: JAX cannot detect the cluster ({type(error).__name__}: {text}); give "
            f"{', '.join(FLAGS)}"
        ) from None


@contextlib.contextmanager
def joined(
    config: Config,
    place: Place,
    ids: Sequence[int] | None,
    flags: dict[str, Any],
    *,
    seconds: float,
    heartbeat: int,
) -> Iterator[EveryHost]:
    """Connect this process to the others; yield a network over the devices of all of them.

    When the context ends, this function waits for the other processes.  If it ends with an
    exception, the process exits.  Only process 0 writes to standard output and standard error,
    apart from errors.

    Args:
      place: the place of this process, from `find_place`.
      ids: the local devices that it uses, from `find_place`.
      flags: further JSON values, by name, that must be equal in all processes.
      seconds: time limit for all processes to connect.
      heartbeat: seconds after which a process that does not answer counts as dead.

    Raises:
      InputError: if the processes cannot connect, or differ in their config, flags or versions.
    """
    keys = {f"config key {key}": value for key, value in config.as_dict().items()}
    facts = keys | flags | versions()
    meeting = Meeting(place, facts, seconds=seconds, heartbeat=heartbeat)
    lockstep = Lockstep(meeting)
    with contextlib.ExitStack() as stack:
        if not lockstep.writes:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        try:
            lockstep.broken = True  # after an error in here, the others could wait inside JAX
            _start_jax(config, lockstep, ids, heartbeat)
            lockstep.broken = False
            lockstep.together(functools.partial(_check_devices, config, place))
            yield EveryHost(config, lockstep)
            lockstep.finish()
        except BaseException as error:
            lockstep.exit(error)


def _start_jax(
    config: Config, lockstep: Lockstep, ids: Sequence[int] | None, heartbeat: int
) -> None:
    """Connect JAX in this process to JAX in the others, and start its devices."""
    meeting, place = lockstep.meeting, lockstep.meeting.place
    assert config.tpu_size is not None
    port = meeting.coordinator.rpartition(":")[2]
    if place.index == 0 and place.count > 1:
        check_free(place.bind_host, int(port))
    if config.tpu_size % place.count == 0:
        use_virtual_devices(config.tpu_size // place.count)
    if place.count > 1:
        _report_aborts(lockstep)
        jax.config.update("jax_enable_preemption_service", False)  # it handles SIGTERM itself
        bypass_proxy(place.host)
        bind_collectives(meeting.address)
        with contextlib.suppress(AttributeError):  # a JAX version without this setting
            jax.config.update("jax_check_proxy_envs", False)  # it would warn of `no_proxy`
        jax.distributed.initialize(
            meeting.coordinator,
            num_processes=place.count,
            process_id=place.index,
            local_device_ids=ids,
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=heartbeat,
            shutdown_timeout_seconds=SECONDS_TO_SHUT_DOWN,
            coordinator_bind_address=f"{_bracketed(place.bind_host or '::')}:{port}",
        )
        if jax.default_backend() == "cpu":
            compile_together()


def _check_devices(config: Config, place: Place) -> None:
    """Raise InputError if the processes do not have `config.tpu_size` devices together."""
    if jax.device_count() != config.tpu_size:
        raise InputError(
            f"{place.count} processes have {jax.device_count()} {jax.default_backend()} devices "
            f"together ({jax.local_device_count()} in process {place.index}), but the config's "
            f"tpu_size is {config.tpu_size}; set tpu_size, or start another number of processes "
            "(Slurm and Open MPI give each process one GPU, unless JAX_LOCAL_DEVICE_IDS lists more)"
        )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _report_aborts(lockstep: Lockstep) -> None:
    """When JAX aborts this process, print one line after JAX's own report, and exit.

    JAX's client aborts the process when process 0 is gone, or when a process has not answered for
    some seconds.  Python's own signal handlers never run in that case, because they would run only
    after the abort.
    """

    def report(number: int) -> None:
        lockstep.name_silent()
        time.sleep(SECONDS_TO_REPORT)  # the thread of `lockstep` may learn the reason, and exit
        line = f"error: JAX has lost another process, or failed (see above); {ADVICE}"
        print(line, file=sys.__stderr__, flush=True)  # `sys.stderr` may lead nowhere
        exit_now("", 1)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(report)
    _handlers.append(handler)
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


_handlers: list[Any] = []  # kept, because the operating system holds only their addresses
