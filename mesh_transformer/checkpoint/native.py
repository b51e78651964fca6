"""Native checkpoints: `<folder>/step_<N>/` written by Orbax, async and atomic, for any mesh.

A step holds two items: `state`, the tree of arrays, and `aux`, JSON (loader position, config
and the like), so that weights and data position can never disagree.  Checksums of both are saved
beside them and verified when they are read (`integrity`).  The folder itself is the
index.  A step counts once Orbax has put its commit file in it, which it does last.  What Orbax
marked as its own and did not commit is the remains of an interrupted save or deletion, which the
next writer clears away; whatever else is named `step_*` is not ours to touch.  One writer (which
may span many processes) to a folder at a time: a lock keeps others out.
"""

import contextlib
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from mesh_transformer.checkpoint import integrity
from mesh_transformer.checkpoint.host_arrays import LazyLeaf
from mesh_transformer.checkpoint.integrity import (
    tree_checksums,
)
from mesh_transformer.checkpoint.joint_save import JointSave
from mesh_transformer.checkpoint.orbax_handlers import (
    SAVE_SECONDS,
    HostArrayHandler,
    StateHandler,
    StateSave,
)
from mesh_transformer.checkpoint.saved_step import SavedStep
from mesh_transformer.checkpoint.state_tree import (
    check_names,
    leaves,
)
from mesh_transformer.data.storage import (
    FolderLock,
    delete_tree,
    entries,
    failures_as,
    free_space,
    hush_failures,
    is_failure,
    local_path,
    nothing_in,
    reason,
    reported,
    step_number,
    unwritable,
)
from mesh_transformer.util import InputError

_COMMIT_FILE = "commit_success.txt"
_MARK = "_CHECKPOINT_METADATA"  # what Orbax puts in a step first, and `delete_step` removes last
_TEMPORARY = ".orbax-checkpoint-tmp"
_CHUNK = 8 << 20  # bytes of a leaf that are one read or write, of which 128 may be under way
_PRUNE_SECONDS = 30  # that others wait for old steps to be deleted

_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one model folder: saved in the background, restored on any mesh.

    `folder` is a local path or a URI such as `gs://bucket/model`.  After each save the newest
    `keep_n` steps are kept, and for ever those at multiples of `keep_every`.  With several
    processes every process makes the same calls.
    """

    def __init__(
        self,
        folder: str,
        *,
        keep_n: int = 3,
        keep_every: int | None = None,
        read_only: bool = False,
        host: bool = False,
    ) -> None:
        """Open the folder; nothing is made or changed before the first `save` or `claim`.

        `host` is for saving numpy arrays and `LazyLeaf`s, in one process.  Raises InputError
        where a keep is below 1.
        """
        for name, value in (("keep_n", keep_n), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}: it must be at least 1")
        self.folder = _absolute(folder)
        self._keep_n, self._keep_every, self._read_only = keep_n, keep_every, read_only
        self._host = host
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, int, Future[None]] | None = None  # step, bytes, its commit
        self._known: int | None = None  # the step that was saved or restored last
        self._saving: int | None = None  # the step whose save was begun last
        self._lock: FolderLock | None = None
        self._pruning: threading.Thread | None = None
        self._joint = JointSave()
        self._sums: dict[str, list[int]] = {}  # of the leaves that are being saved, by their names
        self._saved = functools.cache(lambda step: SavedStep(self._path(step)))
        self._checkpointer = self._new_checkpointer()
        hush_failures(_is_news)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The committed steps, ascending; empty where the folder is missing."""
        return _committed_steps(self.folder)

    def newest(self) -> int | None:
        """The last committed step, None where there is none."""
        return max(self.steps(), default=None)

    def claim(self) -> None:
        """Makes this the folder's only writer until `close`, and clears an interrupted save away.

        Raises InputError where another process writes there, or where it cannot be made.
        """
        if self._read_only:
            raise RuntimeError(f"{self.folder} was opened read-only")
        if self._lock is not None or jax.process_index() != 0:
            return
        self._lock = FolderLock(os.fspath(self.folder))
        with failures_as(lambda error: unwritable(self.folder, error)):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clear_uncommitted()

    def save(self, step: int, state: Any, aux: dict[str, Any]) -> None:
        """Start to save nested dicts of arrays and a JSON-able dict as `step`.

        Returns once jax Arrays are copied to the host (and an earlier save is done), so the
        caller may donate them; numpy arrays must stay as they are until `wait`.  The step that
        this object saved or restored last is left as it is.  Raises InputError where another's
        step is in the way, this save cannot start or the one before it failed.
        """
        if self._read_only:
            raise RuntimeError(f"{self.folder} was opened read-only")
        self.wait()
        if step == self._known:
            return
        json.dumps(aux)  # A TypeError belongs to the caller, not to the background thread.
        check_names(state)
        n_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        chunked = jax.tree.map(_save_args, state)
        arguments = ocp.args.Composite(
            state=StateSave(state, save_args=chunked), aux=ocp.args.JsonSave(aux)
        )
        self._joint.begin()
        # What a process raises from here on every other one has to hear of.
        with failures_as(lambda error: self._failure(step, n_bytes, error)):
            self.claim()
            self._check_vacant(step)
            self._clear_uncommitted()
            self._joint.barrier("vacant", SAVE_SECONDS * 1000)
            self._saving = step
            self._saved.cache_clear()
            self._sums.clear()
            if not self._host:  # else as they are written
                sums = tree_checksums(leaves(state))
                self._sums |= {".".join(path): sums[path] for path in sums}
            # Orbax looks again, and to others the first one's folder would be in the way.
            forced = jax.process_index() != 0
            self._checkpointer.save(self._path(step), args=arguments, force=forced)
        self._pending = step, n_bytes, self._executor.submit(self._commit, step)

    def _check_vacant(self, step: int) -> None:
        if self._path(step).exists() and not _is_remains(self._path(step)):
            raise InputError(
                f"checkpoint folder {self.folder}: step_{step} is there already, not of this run; "
                "choose another folder or move it away"
            )

    @property
    def save_failed(self) -> bool:
        """Whether the save in the background has failed, which `wait` will raise; known at once."""
        pending = self._pending
        return pending is not None and pending[2].done() and pending[2].exception() is not None

    def is_saving(self, timeout: float) -> bool:
        """Whether a save is still under way after `timeout` seconds at most."""
        return self._pending is not None and not wait_for([self._pending[2]], timeout).done

    def wait(self) -> None:
        """Wait until the save under way is committed; InputError (once) where it failed."""
        if self._pending is None:
            return
        step, n_bytes, commit = self._pending
        try:
            with failures_as(lambda error: self._failure(step, n_bytes, error)):
                commit.result()
                self._known = step
        finally:
            if commit.done():  # Not when Ctrl-C interrupted the wait.
                self._pending = None
        if self._pruning is not None:
            self._pruning.join(_PRUNE_SECONDS)

    def close(self) -> None:
        """Wait for the save under way, let go of threads and lock; raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            self._checkpointer.close()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def saved(self, step: int | None = None) -> SavedStep:
        """A committed step (None: the newest); InputError where there is no such step."""
        self.wait()
        steps = self.steps()
        if not steps:
            raise nothing_in(self.folder)
        if step is not None and step not in steps:
            known = ", ".join(map(str, steps))
            raise InputError(f"checkpoint folder {self.folder} has no step {step}; it has {known}")
        return self._saved(steps[-1] if step is None else step)

    def restore(self, step: int | None, template: Any, *, only: Sequence[str] | None = None) -> Any:
        """The tree of `step` (None: the newest); see `SavedStep.restore`."""
        saved = self.saved(step)
        restored = saved.restore(template, only=only)
        self._known = saved.number
        return restored

    def _new_checkpointer(self) -> ocp.AsyncCheckpointer:
        handlers, joint = ocp.type_handlers, self._joint
        # Each process for itself, as far as Orbax knows: they meet at barriers of our own.
        processes = ocp.options.MultiprocessingOptions(
            active_processes=None if joint.alone else {jax.process_index()}
        )
        host_arrays = HostArrayHandler(self._sums)
        state = StateHandler(
            joint,
            # Weights hardly compress.
            use_compression=False,
            use_ocdbt=not self._host,
            multiprocessing_options=processes,
            type_handler_registry=handlers.create_type_handler_registry(
                (jax.Array, handlers.get_type_handler(jax.Array)),
                *((kind, host_arrays) for kind in (np.ndarray, LazyLeaf)),
            ),
        )
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(multiprocessing_options=processes),
            state=state,
            aux=ocp.JsonCheckpointHandler(),
        )
        options = ocp.options.AsyncOptions(
            # Directories made in the background leave threads that wait for ever when that fails.
            create_directories_asynchronously=False,
            timeout_secs=SAVE_SECONDS,
            barrier_sync_fn=None if joint.alone else joint.barrier,
            post_finalization_callback=self._write_integrity,
        )
        return ocp.AsyncCheckpointer(
            handler, async_options=options, multiprocessing_options=processes
        )

    def _write_integrity(self) -> None:
        """Adds the checksums to the step under way, before Orbax commits it."""
        (step,) = (
            path
            for path in self.folder.iterdir()
            if path.name.partition(_TEMPORARY)[0] == f"step_{self._saving}"
        )
        integrity.write(step, self._sums)

    def _path(self, step: int) -> epath.Path:
        return self.folder / f"step_{step}"

    def _commit(self, saved: int) -> None:
        """Wait for Orbax to commit, then have the steps deleted that are no longer kept."""
        self._checkpointer.wait_until_finished()
        if jax.process_index() != 0 or (self._pruning and self._pruning.is_alive()):
            return
        # Beside: storage that does not answer must not hold up a save that is good.
        self._pruning = threading.Thread(target=self._prune, args=(saved,), daemon=True)
        self._pruning.start()

    def _prune(self, saved: int) -> None:
        """Delete the steps that are no longer kept; where one cannot be, the next save tries."""
        try:
            for step in self.steps()[: -self._keep_n]:
                if step != saved and (self._keep_every is None or step % self._keep_every):
                    delete_step(self._path(step))
        except Exception as error:
            if not is_failure(error):
                raise
            _log.warning("cannot delete old steps of %s: %s", self.folder, reason(error))

    def _clear_uncommitted(self) -> int:
        """Delete the remains of interrupted saves and deletions; how many there were."""
        if jax.process_index() != 0:
            return 0
        remains = [path for path in entries(self.folder) if _is_remains(path)]
        for path in remains:
            with contextlib.suppress(FileNotFoundError):  # `_prune` may be at it
                delete_tree(path)
        return len(remains)

    def _clear_after_failure(self) -> None:
        """Clear away a failed save until its other writes, which nothing can await, are over.

        Each of them makes its folder anew.  After a few seconds the rest, which is no step in
        any case, is left to the next save.
        """
        quiet = 0
        for _ in range(50):
            try:
                quiet = 0 if self._clear_uncommitted() else quiet + 1
            except Exception as error:
                if not is_failure(error):
                    raise
                quiet = 0
            if quiet == 5:
                return
            time.sleep(0.1)

    def _failure(self, step: int, n_bytes: int, error: Exception) -> InputError:
        """The one line for a failed save, after clearing away what it had written."""
        free = free_space(os.fspath(self.folder))
        self._joint.fail(error, SAVE_SECONDS)
        self._checkpointer = self._new_checkpointer()
        if self._lock is not None:  # else what is there may be another's
            self._clear_after_failure()
        if isinstance(error, InputError):  # of a `LazyLeaf` that cannot be read
            return error
        try:
            newest = self.newest()
            good = "no earlier checkpoint" if newest is None else f"step {newest} is intact"
        except InputError:  # of storage that does not answer
            good = "earlier checkpoints are intact"
        return InputError(
            f"checkpoint folder {self.folder}: saving step {step} failed: {reason(error)} "
            f"({n_bytes:,} bytes to save{free}); {good}; make room or choose another folder"
        )


def find(path: str) -> SavedStep:
    """A model folder's newest step, or the step that `path` itself is.

    Raises InputError where the path is missing or holds no checkpoint.
    """
    folder = _absolute(path)
    with reported(f"checkpoint folder {folder}"):
        if _is_committed(folder):
            return SavedStep(folder)
    steps = _committed_steps(folder)
    if not steps:
        raise nothing_in(folder)
    return SavedStep(folder / f"step_{steps[-1]}")


def own_steps(folder: str) -> list[epath.Path]:
    """All that this program has written as steps of a model folder, finished or not."""
    with reported(f"model folder {folder}"):
        found = entries(_absolute(folder))
        return [path for path in found if _is_committed(path) or _is_remains(path)]


def _absolute(path: str) -> epath.Path:
    """Orbax takes absolute paths alone; a URI is one already."""
    return epath.Path(local_path(path))


def _save_args(leaf: Any) -> ocp.SaveArgs:
    """Chunks of whole layers where leaves are stacked, so that they are contiguous."""
    return ocp.SaveArgs(chunk_byte_size=_CHUNK, shard_axes=(0,) if leaf.ndim > 2 else ())


def _is_committed(path: epath.Path) -> bool:
    return step_number(path.name) is not None and (path / _COMMIT_FILE).exists()


def _is_remains(path: epath.Path) -> bool:
    """Whether Orbax or `delete_step` was interrupted here; not what others call step_<N>."""
    name, temporary, _ = path.name.partition(_TEMPORARY)
    if step_number(name) is None or not path.is_dir() or _is_committed(path):
        return False
    return bool(temporary) or (path / _MARK).exists()


def _committed_steps(folder: epath.Path) -> list[int]:
    with reported(f"model folder {folder}"):
        names = [path.name for path in entries(folder) if _is_committed(path)]
    return sorted(int(name.removeprefix("step_")) for name in names)


def delete_step(path: epath.Path) -> None:
    """Delete a step: its commit file first, so that no half of it ever counts; its mark last.

    Of a link to a step only the link is deleted.
    """
    if os.path.islink(path):
        delete_tree(path)
        return
    (path / _COMMIT_FILE).unlink(missing_ok=True)
    for item in path.iterdir():
        if item.is_dir():
            delete_tree(item)
    delete_tree(path)


def _is_news(record: logging.LogRecord) -> bool:
    if record.name == "asyncio" and "was never retrieved" in record.getMessage():
        return False  # of the other writes or reads of one that has failed
    if record.levelno < logging.ERROR:
        return "Skipping merge of OCDBT" not in record.getMessage()  # of host arrays: as it should
    return "/orbax/checkpoint/" not in record.pathname and _TEMPORARY not in record.getMessage()
