"""`NetworkRunner`: runs a `CausalTransformer` on one of several hosts, for a driver process."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import os
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import mesh_transformer
from mesh_transformer import log_lines
from mesh_transformer.calls import Call, Result
from mesh_transformer.config import Config, Weight
from mesh_transformer.data.loader import open_train_set
from mesh_transformer.generation.batch import BatchCall, NewBatch, Run
from mesh_transformer.mesh.devices import use_virtual_devices
from mesh_transformer.mesh.jax_versions import bind_collectives
from mesh_transformer.mesh.placement import process_rows
from mesh_transformer.mesh.program import compile_together, use_compilation_cache
from mesh_transformer.network import Train
from mesh_transformer.pod import meeting
from mesh_transformer.pod.faults import host_error
from mesh_transformer.training.metrics import StepClock
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError, StoppedError, brief, print_traceback

SECONDS_TO_SEE = 10.0  # for a new file to be seen through a network file system
SECONDS_TO_SHUT_DOWN = 60  # for JAX to disconnect the processes at the end
PACKAGE_VERSION = "the version of mesh_transformer (digest of its sources)"


def versions() -> dict[str, str | None]:
    """Return {what: version} of this process's code, which must be equal in all of a run."""
    result: dict[str, str | None] = {}
    for package in ("jax", "jaxlib", "libtpu", "orbax-checkpoint"):
        try:
            result[f"the version of {package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            result[f"the version of {package}"] = None
    digest = hashlib.sha256()
    folder = Path(__file__).parent.parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    version = f"{mesh_transformer.__version__} ({digest.hexdigest()[:12]})"
    return result | {PACKAGE_VERSION: version}


def check_versions(hosts: Mapping[str, Mapping[str, str | None]]) -> None:
    """Raise InputError if hosts have different versions of the code, or this process has another.

    This process is the driver, which may lack what only the hosts' devices need.

    Args:
      hosts: {name of a host: its `versions()`}.
    """
    driver = {PACKAGE_VERSION: versions()[PACKAGE_VERSION]}
    reports: dict[str, Mapping[str, str | None]] = {"the driver": driver, **hosts}
    for what in sorted({what for report in reports.values() for what in report}):
        names: dict[str | None, list[str]] = {}
        for name, report in reports.items():
            if what in report:
                names.setdefault(report[what], []).append(name)
        if len(names) > 1:
            differing = ", but ".join(
                f"{version or 'missing'} on {brief(', '.join(machines))}"
                for version, machines in names.items()
            )
            raise InputError(f"{what} is {differing}; install the same version on all of them")


MARKER = ".shared"  # the end of the names of files that show which hosts share a folder


def marker_in(folder: str) -> str:
    """Return the path of a new marker in a folder."""
    return os.path.join(folder, f".{secrets.token_hex(8)}{MARKER}")


# The methods of `NetworkRunner` that a leader may call.
CALLS = [
    "pid",
    "free_port",
    "versions",
    "start",
    "open_train_set",
    "record_files",
    "read",
    "metrics",
    "run",
    "create_marker",
    "marker_exists",
    "delete_marker",
    "close",
]


@dataclasses.dataclass(frozen=True)
class MeshPlace:
    """How a process joins the others of a mesh.

    Attributes:
      address: IP address at which the other processes reach this one.
      coordinator: "HOST:PORT" where JAX's coordinator listens, in process 0.
      processes: number of processes in the mesh.
      heartbeat: seconds after which JAX declares a silent process dead, and ends all others.
      devices: number of virtual CPU devices to use; None to use the machine's accelerators.
      bind: the address at which the coordinator listens, "" for all of its machine (default: the
        host of `coordinator`).
    """

    address: str
    coordinator: str
    processes: int
    heartbeat: int
    devices: int | None = None
    bind: str | None = None


class StepReport(NamedTuple):
    """One host's report about one training step.

    Attributes:
      step: number of the step.
      seconds: duration of the step on this host, in seconds.
      numbers: the step's metrics, by name.
      finished: number of later steps that have also finished on this host.
      save_failed: whether the last save of a checkpoint has failed on this host.
      notice: whether this host has received SIGTERM, a sign that its machine will be shut down.
    """

    step: int
    seconds: float
    numbers: dict[str, float]
    finished: int
    save_failed: bool
    notice: bool = False


class NetworkRunner:
    """Runs a `CausalTransformer` in one process of a mesh, on that process's own batch rows.

    Call `start` first.  All processes of a mesh must receive the same calls in the same order; the
    leader makes them by `call`.
    `Train` starts a step without waiting for it; a later call of `metrics` waits for the step and
    returns its metrics.
    """

    def __init__(
        self,
        rank: int,
        *,
        own_process: bool = False,
        name: str | None = None,
        device_ids: Sequence[int] | None = None,
    ):
        """Create a runner for the process with this rank.

        Args:
          rank: index of this process in the mesh, from 0.
          own_process: whether nothing else runs in this process.  If so, SIGTERM does not end the
            process, but is reported in `StepReport.notice`.
          name: name of this process in messages (default: "host" and the rank).
          device_ids: the local devices to use (default: all).
        """
        if own_process:  # Ray calls only the constructor on the main thread
            signal.signal(signal.SIGTERM, self._receive_notice)
            log_lines.use()
            self._lines = log_lines.formatted()
            self._lines.__enter__()  # until the process ends
        log_lines.about(process=rank)
        self.rank, self.name = rank, name or f"host {rank}"
        self._device_ids = device_ids
        self.network: CausalTransformer | None = None
        self._batch: Run | None = None  # runs the calls of the newest batch
        self._unread: deque[tuple[int, dict[str, Any] | Exception]] = deque()
        self._clock = StepClock()
        self._notice = False  # whether SIGTERM was received
        self._train_set: Any = None
        self._read: deque[dict[str, np.ndarray]] = deque()  # batches not trained on yet

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of this class for the leader, and return its result.

        Raises:
          InputError, StoppedError: as the method does.  Any other exception might not reach the
            leader, so it is replaced by the result of `host_error`, which names this process.  Its
            traceback is printed.
        """
        if method not in CALLS:
            raise InputError(f"{method!r} is no call of a leader")
        try:
            return getattr(self, method)(*arguments)
        except (InputError, StoppedError):
            raise
        except Exception as error:
            print_traceback(error)
            raise host_error(self.name, error) from None

    def pid(self) -> int:
        """Return the process id (PID) of this runner."""
        return os.getpid()

    def free_port(self, address: str) -> int:
        """Return a free TCP port at this host's `address`, for JAX's coordinator to listen on."""
        return meeting.free_port(address)

    def versions(self) -> dict[str, str | None]:
        """Return `versions()` of this process."""
        return versions()

    def start(self, config: dict[str, Any], place: MeshPlace) -> dict[str, Any]:
        """Connect to the other processes, and create the mesh and a model without weights.

        Args:
          config: the config's keys and values.

        Returns:
          A dict with the attributes `replicas`, `dp`, `batch_size`, `noise_batches` and
          `peak_flops` of the model (see `CausalTransformer`), and the `machine`'s host name.

        Raises:
          InputError: if the processes do not have the config's `tpu_size` devices together.
          HostError: if another program has taken the coordinator's port.
        """
        use_compilation_cache()
        if place.devices is not None:
            use_virtual_devices(place.devices)
        if place.processes > 1:
            self._connect(place)
            size = Config.from_dict(config).tpu_size
            if jax.device_count() != size:
                raise InputError(
                    f"{place.processes} processes have {jax.device_count()} "
                    f"{jax.default_backend()} devices together ({jax.local_device_count()} in "
                    f"{self.name}), but the config's tpu_size is {size}; set "
                    "tpu_size, or start another number of processes (Slurm and Open MPI give each "
                    "process one GPU, unless JAX_LOCAL_DEVICE_IDS lists more)"
                )
        self.network = CausalTransformer(config, init=False)
        names = ("replicas", "dp", "batch_size", "noise_batches", "peak_flops")
        facts = {name: getattr(self.network, name) for name in names}
        return facts | {"machine": socket.gethostname()}

    def _connect(self, place: MeshPlace) -> None:
        """Connect JAX in this process to JAX in the others."""
        host, _, port = place.coordinator.rpartition(":")
        # The coordinator has no authentication, so by default it listens only at its own address.
        bind = host if place.bind is None else place.bind
        if self.rank == 0:
            meeting.check_free(bind.strip("[]"), int(port))
        jax.config.update("jax_enable_preemption_service", False)  # it handles SIGTERM itself
        for name in ("no_proxy", "NO_PROXY"):  # gRPC then connects without a configured proxy
            others = [other for other in os.environ.get(name, "").split(",") if other]
            os.environ[name] = ",".join([*others, host.strip("[]")])
        bind_collectives(place.address)
        jax.config.update("jax_check_proxy_envs", False)  # it would warn of `no_proxy`
        jax.distributed.initialize(
            place.coordinator,
            num_processes=place.processes,
            process_id=self.rank,
            local_device_ids=self._device_ids,
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=place.heartbeat,
            shutdown_timeout_seconds=SECONDS_TO_SHUT_DOWN,
            coordinator_bind_address=f"{bind or '[::]'}:{port}",
        )
        if jax.default_backend() == "cpu":
            compile_together()

    def _receive_notice(self, number: int, frame: object) -> None:
        """Handle SIGTERM: record it for the next `StepReport`; the process keeps running."""
        self._notice = True

    @property
    def _started(self) -> CausalTransformer:
        if self.network is None:
            raise InputError("the host has no model yet; call start first")
        return self.network

    def open_train_set(
        self, train_set: str | dict[str, Weight], state: dict[str, Any] | None, batches: int
    ) -> dict[str, Any]:
        """Open the training set, to read only this process's batch rows.

        Args:
          train_set: path of the training set, or a dict {path: weight} for a mixture.
          state: position to resume from, as returned by `TFRecordNewInputs.state`; None begins at
            the first record.
          batches: number of batches before this position.

        Returns:
          The new position in the records, as from `TFRecordNewInputs.state`.
        """
        network = self._started
        if self._train_set is not None:
            self._train_set.close()
        self._read.clear()
        config = network.config.replace(train_set=train_set)
        own = process_rows([network.replicas], network.batch_size // network.dp)
        self._train_set = open_train_set(config, network.batch_size, *own)
        self._train_set.restore(state, batches)
        return self._train_set.state()

    def record_files(self) -> Any:
        """Return a value that is equal on hosts that see the same record files."""
        assert self._train_set is not None
        return self._train_set.fingerprint()

    def read(self) -> dict[str, Any]:
        """Read the next batch and keep it for a later `Train`.

        Returns:
          The position in the records after this batch, as from `TFRecordNewInputs.state`.
        """
        if self._train_set is None:
            raise InputError("the host has no open training set; call open_train_set first")
        self._read.append(self._train_set.get_samples())
        return self._train_set.state()

    def _train(self, sample: dict[str, np.ndarray]) -> None:
        network = self._started
        self._batch = None  # the weights of a running batch become outdated
        if not self._unread:
            self._clock.restart()
        try:
            metrics = network.train(sample)
        except Exception as error:
            self._unread.append((network.step + 1, error))
            raise
        self._unread.append((network.step, metrics))
        self._record_finished()

    def _record_finished(self, read: int = 0) -> int:
        started = [values for _, values in self._unread if not isinstance(values, Exception)]
        return self._clock.record_finished(started, read=read)

    def metrics(self) -> StepReport:
        """Wait for the oldest step that has not been reported yet, and return its report.

        Raises:
          Exception: the error of that step, if it has failed.
        """
        step, values = self._unread.popleft()
        if isinstance(values, Exception):
            raise values
        numbers = {name: float(value) for name, value in values.items()}
        log_lines.about(step=step)
        finished = self._record_finished(read=1)
        seconds, failed = self._clock.pop_seconds(), self._started.save_failed
        return StepReport(step, seconds, numbers, finished, failed, self._notice)

    def run(self, call: Call[Result]) -> Result:
        """Run a call with the rows of this process; see `CausalTransformer.run`.

        The calls of a batch are those of the newest `NewBatch`, whose own result is None.  `Train`
        starts a step, on the oldest batch from `read` that has not been used yet if it has none,
        and returns None.
        """
        if isinstance(call, Train):
            self._train(self._read.popleft() if call.batch is None else call.batch)
            return None  # type: ignore[return-value]
        run: Run | None = self._started.run
        if isinstance(call, BatchCall):
            run = self._batch
        if run is None:
            raise InputError("the host has no batch, or training has ended it; call batch first")
        if isinstance(call, NewBatch):
            self._batch = None  # freed first, so that memory never holds two batches
            self._batch = run(call)
            return None  # type: ignore[return-value]
        result = run(call)
        return jax.tree.map(np.asarray, result) if call.returns_rows else result

    def create_marker(self, path: str) -> None:
        """Create an empty file at `path`, to test which other hosts share this host's disk.

        Its folder is created too, if necessary.

        Raises:
          InputError: if the file cannot be created.
        """
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "xb"):
                pass
        except OSError as error:
            raise InputError(
                f"{self.name} cannot write to {os.path.dirname(path)}: {error.strerror}; choose "
                "another folder or fix the permissions"
            ) from None

    def marker_exists(self, path: str) -> bool:
        """Return whether this host can see a file at `path`, which was just created."""
        deadline = time.monotonic() + SECONDS_TO_SEE
        while not os.path.exists(path):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
            with contextlib.suppress(OSError):  # refreshes what a network file system has cached
                os.listdir(os.path.dirname(path))
        return True

    def delete_marker(self, path: str) -> None:
        """Delete a file that `create_marker` created."""
        name = os.path.basename(path)
        if name.startswith(".") and name.endswith(MARKER):
            os.remove(path)

    def close(self) -> None:
        """Wait for the last save and unlock the model folder; the process keeps running."""
        if self.network is not None:
            self.network.close()
