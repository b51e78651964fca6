"""`TPUCluster`: a network over all hosts of a mesh, each of them a Ray actor.

    driver                         host 0 (NetworkRunner)      host 1
    train(step n+1)  -- rows -->   queued                      queued
                                   device runs step n   <-->   device runs step n
    float(loss n)    <-- numbers --

The next batch is on its hosts while the last step runs.  Whatever fails on any host ends all of
them and becomes one HostError: what is left is the newest checkpoint, from which a new cluster
goes on (`runs.train`).
"""

import dataclasses
import itertools
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
from numpy.typing import ArrayLike
from ray import exceptions

from mesh_transformer.config import Config
from mesh_transformer.data.loader import TFRecordNewInputs, open_train_set
from mesh_transformer.data.storage import local_path
from mesh_transformer.generation.decode import Chosen
from mesh_transformer.generation.prompts import check_prompts
from mesh_transformer.generation.sampling import RANGES, sampler_settings
from mesh_transformer.mesh.placement import gathered, places, share
from mesh_transformer.pod.batch import ClusterBatch
from mesh_transformer.pod.hosts import Host, kill_processes, start_process
from mesh_transformer.pod.runner import Measured
from mesh_transformer.training.step import MEASURED
from mesh_transformer.util import HostError, InputError, StoppedError


@dataclasses.dataclass
class Reading:
    """The calls that dispatch a step, then what it measured."""

    step: int
    dispatched: list[Any]
    values: dict[str, float] | None = None
    ended: bool = False  # on all hosts, as far as they have said


class Number:
    """One of a step's measurements, waited for when read."""

    def __init__(self, read: Callable[[Reading], dict[str, float]], reading: Reading, name: str):
        self._read, self._reading, self._name = read, reading, name

    def __float__(self) -> float:
        return self._read(self._reading)[self._name]

    def is_ready(self) -> bool:
        """Whether the step is known to have ended; only reading one before it finds out."""
        return self._reading.ended or self._reading.values is not None


# A batch that the hosts hold: none of it is here.
READ_ON_HOSTS: dict[str, np.ndarray] = {}


class ClusterTrainSet:
    """`TFRecordNewInputs` on every host, each for the rows of its own replicas.

    The batches are those that one process would read, record for record, and so are the states:
    a run may go on with fewer hosts, or with the driver reading.  All hosts must see the files.

    Raises:
      InputError: as `TFRecordNewInputs`, where any host finds something wrong.
      HostError: when a host fails, or is at another record than the others.
    """

    def __init__(self, cluster: "TPUCluster"):
        self._cluster = cluster
        self._state: dict[str, Any] = {}
        self._open(None)

    def _open(self, state: dict[str, Any] | None) -> None:
        found = self._cluster.config.train_set
        assert found is not None
        if isinstance(found, Mapping):
            whole: Any = {local_path(path): weight for path, weight in found.items()}
        else:
            whole = local_path(found)
        self._call("open_train_set", whole, state)

    def get_samples(self) -> dict[str, np.ndarray]:
        """Has the hosts read the next batch; gives `READ_ON_HOSTS`, to train on."""
        self._call("read")
        return READ_ON_HOSTS

    def state(self) -> dict[str, Any]:
        """As `TFRecordNewInputs.state`."""
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        """As `TFRecordNewInputs.restore`."""
        self._open(state)

    def close(self) -> None:
        """Does nothing: the hosts end theirs when another takes its place, or with themselves."""

    def _call(self, method: str, *arguments: Any) -> None:
        """A call whose answer is the state that all hosts are in then."""
        states = self._cluster.call(method, *[arguments] * len(self._cluster.replicas))
        if any(state != states[0] for state in states):
            raise self._cluster.failed("the hosts are at different records of train_set")
        self._state = states[0]


SECONDS_TO_START = 60.0  # for a host's process, from nothing to its first answer
SECONDS_TO_ANSWER = 2.0  # for a host to say that it lives, once something has failed
SECONDS_TO_AGREE = 5.0  # for all hosts to find the same input bad
MOST_UNREAD = 4  # steps under way; their batches and numbers are what Ray has to hold
STORE_FULL = (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError)
METRICS = (*MEASURED, "learning_rate")


class TPUCluster:
    """`CausalTransformer` over all `hosts`: the same methods, for whole batches.

    Args:
      heartbeat: seconds of silence after which a host counts as dead.
      patience: seconds that any one call may take, compilation included.

    Raises:
      HostError: from every method, when a host dies, hangs or fails; all hosts are ended then.
    """

    def __init__(
        self,
        config: Config,
        hosts: Sequence[Host],
        *,
        heartbeat: int = 10,
        patience: float = 3600.0,
    ):
        self.config = config
        self.hosts = list(hosts)
        self.heartbeat = heartbeat
        self.patience = patience
        self.step = 0
        self.save_failed = False  # as far as the hosts have said
        self._unread: deque[Reading] = deque()
        self._pids: list[int] = []
        self._actors: list[Any] = []
        self.ended = False  # whether the hosts are gone
        self._why = ""  # where a host's failure was the reason
        self.newest_batch: ClusterBatch | None = None  # the one that the hosts hold
        try:
            for rank, host in enumerate(self.hosts):
                self._actors.append(start_process(rank, host))
            facts = self._start()
        except BaseException:
            self.kill()
            raise
        self.replicas: list[list[int]] = [each["replicas"] for each in facts]  # each host's
        self.dp: int = facts[0]["dp"]
        self.batch_size: int = facts[0]["batch_size"]
        self.noise_batches: tuple[int, int] = facts[0]["noise_batches"]
        self.peak_flops: float | None = facts[0]["peak_flops"]

    def _start(self) -> list[dict[str, Any]]:
        """Joins the hosts: on a port that is new each time, since an old peer may still call."""
        asked = self._ask("pid")
        if ray.wait(asked, num_returns=len(asked), timeout=SECONDS_TO_START)[1]:
            raise self.failed(otherwise=f"no process within {SECONDS_TO_START:.0f} s")
        self._pids = self._answers(asked)
        address = self.hosts[0].address
        port = self._answers([self._actors[0].free_port.remote(address)])[0]
        refs = [
            actor.start.remote(
                self.config.as_dict(),
                coordinator=f"{address}:{port}",
                processes=len(self.hosts),
                heartbeat=self.heartbeat,
                devices=host.devices,
            )
            for actor, host in zip(self._actors, self.hosts, strict=True)
        ]
        return self._answers(refs)

    def init(self) -> None:
        """Fresh weights and optimizer; the step becomes 0."""
        self.call("init")
        self.step = 0

    def open_train_set(self) -> TFRecordNewInputs | ClusterTrainSet:
        """The batches that the config trains on, read here or on the hosts."""
        if self.config.hosts_read:
            return ClusterTrainSet(self)
        return open_train_set(self.config, self.batch_size)

    def train(self, sample: dict[str, np.ndarray]) -> dict[str, Any]:
        """One update with token ids `obs` and `target` [A, B, T]; returns at once.

        Only where `MOST_UNREAD` steps before it are unread it waits for the oldest of them.

        Returns:
          What `CausalTransformer.train` measures, and `host_seconds/<rank>`, how long the step
          took there: numbers that wait for the step when they are read (`float`).
        """
        shares: list[tuple[Any]] = [(None,)] * len(self.hosts)
        if sample is not READ_ON_HOSTS:
            if sample["obs"].shape[1] % self.dp:
                raise InputError(
                    f"train: the batch has {sample['obs'].shape[1]} sequences, "
                    f"expected a multiple of the {self.dp} replicas"
                )
            shares = self._shares(sample, axis=1)
        if len(self._unread) >= MOST_UNREAD:
            self.read(self._unread[0])
        self.step += 1
        reading = Reading(self.step, self._ask("train", *shares))
        self._unread.append(reading)
        seconds = [f"host_seconds/{rank}" for rank in range(len(self.hosts))]
        return {name: Number(self.read, reading, name) for name in (*METRICS, *seconds)}

    def read(self, reading: Reading) -> dict[str, float]:
        """What a step measured, after those before it."""
        while reading.values is None:
            oldest = self._unread.popleft()
            answers = self._answers([*oldest.dispatched, *self._ask("metrics")])
            told = answers[len(self.hosts) :]
            oldest.values = self._agreed(oldest.step, told)
            self.save_failed = self.save_failed or any(each.save_failed for each in told)
            for later in itertools.islice(self._unread, min(each.ended for each in told)):
                later.ended = True
        return reading.values

    def _agreed(self, step: int, answers: list[Measured]) -> dict[str, float]:
        """The one answer of all hosts, to the bit, with the seconds of each."""
        said = [repr((each.step, each.numbers)) for each in answers]  # in which NaN equals NaN
        if len(set(said)) > 1 or answers[0].step != step:
            told = ", ".join(
                f"host {rank} is at step {each.step} with loss {each.numbers['loss']!r}"
                for rank, each in enumerate(answers)
            )
            raise self.failed(f"the hosts disagree after step {step}: {told}")
        seconds = {f"host_seconds/{rank}": each.seconds for rank, each in enumerate(answers)}
        return answers[0].numbers | seconds

    def eval(self, sample: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As `CausalTransformer.eval`, in numpy arrays."""
        count = len(sample["obs"])
        padded = {name: self._padded(rows) for name, rows in sample.items()}
        found = self.call("eval", *self._shares(padded))
        return {name: self._joined([each[name] for each in found], count) for name in found[0]}

    def score(self, tokens: np.ndarray, alternatives: int) -> Chosen:
        """As `CausalTransformer.score`."""
        shares = self._shares(self._padded(tokens))
        found = self.call("score", *[(*share, alternatives) for share in shares])
        return Chosen(*(self._joined(parts, len(tokens)) for parts in zip(*found, strict=True)))

    def generate(
        self,
        ctx: ArrayLike,
        ctx_length: ArrayLike,
        gen_length: int,
        sampler_options: dict[str, Any] | None = None,
    ) -> np.ndarray:
        """As `CausalTransformer.generate`."""
        tokens, length = check_prompts(ctx, ctx_length, gen_length)
        count = len(tokens)
        given = dict(zip(RANGES, sampler_settings(sampler_options or {}, count), strict=True))
        # The hosts compile for the width that they are given: it is that of the longest prompt.
        rows = {"ctx": tokens[:, -int(length.max()) :], "length": length, **given}
        padded = {name: self._padded(each) for name, each in rows.items()}
        arguments = [
            (each.pop("ctx"), each.pop("length"), gen_length, each)
            for (each,) in self._shares(padded)
        ]
        return self._joined(self.call("generate", *arguments), count)

    def batch(self, rows: int) -> ClusterBatch:
        """As `CausalTransformer.batch`, with the rows of all replicas; it replaces the last one."""
        self.newest_batch = ClusterBatch(self, rows)
        return self.newest_batch

    def only_generate(self) -> None:
        """As `CausalTransformer.only_generate`."""
        self.call("only_generate")

    def claim(self, folder: str) -> None:
        """As `CausalTransformer.claim`; InputError where hosts have a folder each."""
        self._check_shared(folder)
        self.call("claim", *[(local_path(folder),)] * len(self.hosts))

    def save(self, folder: str, aux: dict[str, Any] | None = None) -> None:
        """As `CausalTransformer.save`: all hosts' parts are committed together or not at all."""
        self._together("save", *[(local_path(folder), aux)] * len(self.hosts))

    def wait(self) -> None:
        """As `CausalTransformer.wait`."""
        self._together("wait")

    def _together(self, method: str, *arguments: tuple[Any, ...]) -> None:
        """A call that fails on all hosts or on none, though not at the same moment."""
        self.save_failed = False
        self._answers(self._ask(method, *arguments), agree=self.patience)

    def restore(self, folder: str, base: str | None = None) -> dict[str, Any] | None:
        """As `CausalTransformer.restore`; InputError where hosts have a folder each."""
        self._check_shared(folder)
        there = None if base is None else local_path(base)
        found = self.call("restore", *[(local_path(folder), there)] * len(self.hosts))
        self.step, aux = found[0]
        return aux

    def _check_shared(self, folder: str) -> None:
        """InputError where several machines have a disk of their own at `folder`.

        A save would wait there for the other hosts' parts for ever.
        """
        if "://" in folder or len({host.address for host in self.hosts}) == 1:
            return
        path = os.path.join(local_path(folder), f".{secrets.token_hex(8)}.shared")
        self._answers([self._actors[0].leave.remote(path)])
        seen = self._answers([actor.sees.remote(path) for actor in self._actors])
        self._answers([self._actors[0].take_away.remote(path)])
        if not all(seen):
            self.kill()
            raise InputError(
                f"{folder}: host {seen.index(False)} has another disk there than host 0; give a "
                "folder that all of them see, such as gs://bucket/model"
            )

    def load(self, path: str, *, fresh_opt: bool = False, only_params: bool = False) -> None:
        """As `CausalTransformer.load`."""
        self.call("load", *[(local_path(path), fresh_opt, only_params)] * len(self.hosts))
        self.step = 0

    def close(self) -> None:
        """Waits for the last save, then ends all hosts; does nothing where they have ended."""
        if self.ended:
            return
        try:
            self.call("close")
        finally:
            self.kill()

    def _padded(self, rows: np.ndarray) -> np.ndarray:
        missing = -len(rows) % self.dp
        return np.concatenate((rows, np.repeat(rows[:1], missing, axis=0))) if missing else rows

    def _shares(self, batch: Any, axis: int = 0) -> list[tuple[Any]]:
        """Each host's rows of an array, or of each of a dict's, as its one argument."""

        def of(replicas: list[int]) -> Any:
            if not isinstance(batch, dict):
                return share(batch, replicas, self.dp, axis)
            return {name: share(rows, replicas, self.dp, axis) for name, rows in batch.items()}

        return [(of(replicas),) for replicas in self.replicas]

    def _joined(self, found: Sequence[np.ndarray], count: int) -> np.ndarray:
        at = places(self.replicas, len(found[0]) // len(self.replicas[0]))
        return self.gathered(found, at)[:count]

    def gathered(self, found: Sequence[np.ndarray], at: Sequence[np.ndarray]) -> np.ndarray:
        """As `rows.gathered`; where it raises HostError, all hosts are ended."""
        try:
            return gathered(found, at)
        except HostError as error:
            raise self.failed(str(error)) from None

    def call(self, method: str, *arguments: tuple[Any, ...]) -> list[Any]:
        """What every host answers to a call of its `NetworkRunner`, with arguments of its own."""
        return self._answers(self._ask(method, *arguments))

    def _ask(self, method: str, *arguments: tuple[Any, ...]) -> list[Any]:
        """Sends a call to every host, with arguments of its own; answers come by `_answers`."""
        if self.ended:
            raise HostError(f"the hosts have been ended{self._why}; make a new cluster")
        given = arguments or [()] * len(self._actors)
        try:
            return [
                getattr(actor, method).remote(*each)
                for actor, each in zip(self._actors, given, strict=True)
            ]
        except STORE_FULL:
            raise self._no_room("this machine") from None
        except KeyboardInterrupt:  # some hosts have the call, and would wait for the others
            self.kill()
            raise

    def _answers(self, refs: list[Any], agree: float = SECONDS_TO_AGREE) -> list[Any]:
        """What all calls return; the first failure of any host is the failure of all.

        Of hosts that find no bad input where another has, no more is waited for than `agree`
        seconds.
        """
        deadline = time.monotonic() + self.patience
        while True:
            try:
                return ray.get(refs, timeout=self.heartbeat)
            except exceptions.GetTimeoutError:
                if gone := self._silent(self.heartbeat):
                    raise self._lost("; ".join(gone)) from None
                if time.monotonic() > deadline:
                    raise self.failed(f"a call took more than {self.patience:.0f} s") from None
            except exceptions.RayTaskError as error:
                raise self._told(error, refs, agree) from None
            except exceptions.RayError as error:
                lost = f"a call was lost ({type(error).__name__})"
                raise self.failed(otherwise=lost) from None

    def _told(self, error: exceptions.RayTaskError, refs: list[Any], agree: float) -> Exception:
        """What to raise for what a host raised."""
        cause = error.cause
        if isinstance(cause, STORE_FULL):
            return self._no_room("a host")
        if isinstance(cause, InputError):
            # A host that died in the midst of a read or a save makes the others' fail.
            if gone := self._silent(SECONDS_TO_ANSWER):
                return self._lost("; ".join(gone))
            # Of bad input all hosts say the same.  A host that does not may wait for one that has
            # given up.
            if ray.wait(refs, num_returns=len(refs), timeout=agree)[1]:
                self.kill()
            return InputError(str(cause))
        return self.failed(str(cause) if isinstance(cause, StoppedError) else _one_line(error))

    def _silent(self, seconds: float) -> list[str]:
        """The hosts that cannot say within `seconds` that they live, and what is known of them."""
        pings = [actor.pid.options(concurrency_group="health").remote() for actor in self._actors]
        ray.wait(pings, num_returns=len(pings), timeout=seconds)
        found = []
        for rank, ping in enumerate(pings):
            try:
                ray.get(ping, timeout=0)
            except exceptions.GetTimeoutError:
                found.append(f"host {rank} does not answer")
            except exceptions.RayError:
                found.append(f"host {rank} died")
        return found

    def failed(self, told: str = "", *, otherwise: str = "") -> HostError:
        """Ends all hosts; the error to raise, which names the hosts that are gone.

        It tells in any case what was `told`, and what is `otherwise` where no host is gone.
        """
        gone = self._silent(SECONDS_TO_ANSWER)
        return self._lost("; ".join([*gone, told] if told else gone or [otherwise]))

    def _lost(self, why: str) -> HostError:
        """Ends all hosts; the error to raise, which every later call repeats."""
        self._why = f" ({why})"
        self.kill()
        return HostError(why)

    def _no_room(self, where: str) -> StoppedError:
        """Ends all hosts: another attempt would find the same disk."""
        self.kill()
        return StoppedError(
            f"Ray's object store on {where} is full, and so is the disk that it spills to "
            "(RAY_TMPDIR, else /tmp); make room there, and start again"
        )

    def kill(self) -> None:
        """Ends every process of the mesh, those too that are stopped or in a call."""
        if self.ended:
            return
        self.ended = True
        kill_processes(self._actors, self._pids, self.hosts)


def _one_line(error: BaseException) -> str:
    """What an exception of Ray's says last, which is the cause after a traceback."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip()[:300]
