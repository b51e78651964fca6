"""`NetworkRunner`: `CausalTransformer` on one host of several, for a driver elsewhere."""

import contextlib
import functools
import os
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np

from mesh_transformer.data.loader import TFRecordNewInputs, open_train_set
from mesh_transformer.generation.batch import Batch
from mesh_transformer.generation.decode import Chosen
from mesh_transformer.generation.sampling import SamplerSettings
from mesh_transformer.mesh.devices import use_virtual_devices
from mesh_transformer.mesh.placement import places
from mesh_transformer.mesh.program import use_compilation_cache
from mesh_transformer.training.metrics import StepClock
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import HostError, InputError, StoppedError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _on_host(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """What goes wrong in `method` reaches the driver as one line that names the host.

    Bad input stays an InputError.  Everything else, which may not even survive pickling, becomes
    a HostError, with its traceback in the host's log.
    """

    @functools.wraps(method)
    def told(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return method(*args, **kwargs)
        except (InputError, StoppedError):
            raise
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            runner: Any = args[0]
            text = " ".join(str(error).split())[:300]
            raise HostError(f"host {runner.rank}: {type(error).__name__}: {text}") from None

    return told


def reach_directly(address: str) -> None:
    """Has this process's gRPC leave a proxy in the environment out on the way to an address."""
    for name in ("no_proxy", "NO_PROXY"):
        others = [each for each in os.environ.get(name, "").split(",") if each]
        os.environ[name] = ",".join([*others, address])


class Measured(NamedTuple):
    """What a host says of a step: the seconds that it took here, and what it measured.

    `ended` is how many of the steps after it had ended by then, `save_failed` whether the last save
    had failed.
    """

    step: int
    seconds: float
    numbers: dict[str, float]
    ended: int
    save_failed: bool


class NetworkRunner:
    """One process of a mesh: the network's methods on the rows of this process's replicas.

    All processes of a mesh get the same calls in the same order.  `train` only dispatches; the
    `metrics` of each step are fetched later, so that the device never waits for the driver.
    """

    def __init__(self, rank: int):
        self.rank = rank
        self.network: CausalTransformer | None = None
        self._batch: Batch | None = None
        self._unread: deque[tuple[int, dict[str, Any]]] = deque()
        self._clock = StepClock()
        self._train_set: TFRecordNewInputs | None = None
        self._read: deque[dict[str, np.ndarray]] = deque()  # batches that no step had yet

    def pid(self) -> int:
        """This process's id, on its own machine."""
        return os.getpid()

    @_on_host
    def free_port(self, address: str) -> int:
        """A port of this host's `address` that nothing listens on, for a coordinator."""
        with contextlib.closing(socket.socket()) as listener:
            listener.bind((address, 0))
            return listener.getsockname()[1]

    @_on_host
    def start(
        self,
        config: dict[str, Any],
        *,
        coordinator: str,
        processes: int,
        heartbeat: int,
        devices: int | None = None,
    ) -> dict[str, Any]:
        """Joins the other processes and lays out the mesh; the weights come later.

        Args:
          coordinator: "host:port", where process 0 listens.
          heartbeat: seconds of silence after which the others count a process as dead, and end.
          devices: how many virtual CPU devices this process has; None for an accelerator's own.

        Returns:
          What the driver has to know: `replicas`, `dp`, `batch_size`, `noise_batches` and
          `peak_flops`.
        """
        use_compilation_cache()
        if devices is not None:
            use_virtual_devices(devices)
        if processes > 1:
            reach_directly(coordinator.rpartition(":")[0])
            jax.distributed.initialize(
                coordinator,
                num_processes=processes,
                process_id=self.rank,
                heartbeat_timeout_seconds=heartbeat,
                # It believes whoever connects: no network but the hosts' own may reach it.
                coordinator_bind_address=coordinator,
            )
        self.network = CausalTransformer(config, init=False)
        return {
            "replicas": self.network.replicas,
            "dp": self.network.dp,
            "batch_size": self.network.batch_size,
            "noise_batches": self.network.noise_batches,
            "peak_flops": self.network.peak_flops,
        }

    @property
    def _started(self) -> CausalTransformer:
        if self.network is None:
            raise InputError("the host has no model yet; call start first")
        return self.network

    @property
    def _running(self) -> Batch:
        if self._batch is None:
            raise InputError("the host has no running batch yet; call batch first")
        return self._batch

    @_on_host
    def init(self) -> None:
        """As `CausalTransformer.init`."""
        self._started.init()

    @_on_host
    def open_train_set(
        self, train_set: str | dict[str, float], state: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Begins to read this process's rows, from a state on; the state that it is in then."""
        network = self._started
        if self._train_set is not None:
            self._train_set.close()
        self._read.clear()
        config = network.config.replace(train_set=train_set)
        (columns,) = places([network.replicas], network.batch_size // network.dp)
        self._train_set = open_train_set(config, network.batch_size, columns.tolist())
        if state is not None:
            self._train_set.restore(state)
        return self._train_set.state()

    @_on_host
    def read(self) -> dict[str, Any]:
        """Reads the next batch, for a `train` without one; the state after it."""
        if self._train_set is None:
            raise InputError("the host reads no records yet; call open_train_set first")
        self._read.append(self._train_set.get_samples())
        return self._train_set.state()

    @_on_host
    def train(self, sample: dict[str, np.ndarray] | None) -> None:
        """Dispatches one step on this process's rows [A, B, T]; None: on those that it has read."""
        network = self._started
        if sample is None:
            sample = self._read.popleft()
        self._batch = None  # whose weights are about to be old
        if not self._unread:
            self._clock.restart()
        metrics = network.train(sample)
        self._unread.append((network.step, metrics))
        self._clock.look(self._unread)

    @_on_host
    def metrics(self) -> Measured:
        """What is known of the oldest unread step, once it has ended."""
        step, found = self._unread.popleft()
        numbers = {name: float(value) for name, value in found.items()}
        ended = self._clock.look(self._unread, read=1)
        return Measured(step, self._clock.take(), numbers, ended, self._started.save_failed)

    @_on_host
    def eval(self, sample: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As `CausalTransformer.eval`, of and for this process's rows."""
        return {name: np.asarray(found) for name, found in self._started.eval(sample).items()}

    @_on_host
    def score(self, tokens: np.ndarray, alternatives: int) -> Chosen:
        """As `CausalTransformer.score`, of and for this process's rows."""
        return self._started.score(tokens, alternatives)

    @_on_host
    def generate(
        self, ctx: np.ndarray, ctx_length: np.ndarray, gen_length: int, options: dict[str, Any]
    ) -> np.ndarray:
        """As `CausalTransformer.generate`; all processes give prompts of the same width."""
        return self._started.generate(ctx, ctx_length, gen_length, options)

    @_on_host
    def batch(self, rows: int) -> None:
        """A running batch of `rows` rows of this process, in place of the one that was there."""
        self._batch = None  # first, so that no memory holds two
        self._batch = self._started.batch(rows)

    @_on_host
    def reserve(self, positions: int) -> None:
        """As `Batch.reserve`."""
        self._running.reserve(positions)

    @_on_host
    def insert(
        self,
        rows: Sequence[int],
        prompts: Sequence[np.ndarray],
        lengths: np.ndarray,
        settings: SamplerSettings,
        alternatives: int | None,
        longest: int,
        most: int,
    ) -> Chosen:
        """As `Batch.insert`, of and for this process's rows; all get the last three alike."""
        return self._running.insert(
            rows,
            prompts,
            lengths,
            settings,
            alternatives=alternatives,
            longest=longest,
            most=most,
        )

    @_on_host
    def decode(
        self, steps: int, alternatives: int | None, needed: int, idle: np.ndarray
    ) -> tuple[np.ndarray, Chosen]:
        """As `Batch.decode`, for this process's rows, and how many tokens each may have then.

        Args:
          needed: positions of the row that will have most of all processes' rows.
          idle: the rows of this process to release first.
        """
        self._running.reserve(needed)
        self._running.release(idle)
        chosen = self._running.decode(steps, alternatives)
        return self._running.left, chosen

    @_on_host
    def only_generate(self) -> None:
        """As `CausalTransformer.only_generate`."""
        self._started.only_generate()

    @_on_host
    def claim(self, folder: str) -> None:
        """As `CausalTransformer.claim`."""
        self._started.claim(folder)

    @_on_host
    def save(self, folder: str, aux: dict[str, Any] | None) -> None:
        """As `CausalTransformer.save`: all processes write their parts of one checkpoint."""
        self._started.save(folder, aux)

    @_on_host
    def wait(self) -> None:
        """As `CausalTransformer.wait`."""
        self._started.wait()

    @_on_host
    def leave(self, path: str) -> None:
        """Makes an empty file, for other hosts to look for."""
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "xb"):
                pass
        except OSError as error:
            raise InputError(
                f"{os.path.dirname(path)}: cannot be written: {error.strerror}; choose another "
                "folder or mend its permissions"
            ) from None

    @_on_host
    def sees(self, path: str) -> bool:
        """Whether a file is there."""
        return os.path.exists(path)

    @_on_host
    def take_away(self, path: str) -> None:
        """Deletes a file."""
        os.remove(path)

    @_on_host
    def restore(self, folder: str, base: str | None = None) -> tuple[int, dict[str, Any] | None]:
        """As `CausalTransformer.restore`, with the step that it is at then."""
        aux = self._started.restore(folder, base)
        return self._started.step, aux

    @_on_host
    def load(self, path: str, fresh_opt: bool, only_params: bool) -> None:
        """As `CausalTransformer.load`."""
        self._started.load(path, fresh_opt=fresh_opt, only_params=only_params)

    @_on_host
    def close(self) -> None:
        """As `CausalTransformer.close`; the process itself is ended by the driver."""
        if self.network is not None:
            self.network.close()
