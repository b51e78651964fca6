"""Native checkpoints, `<folder>/step_<N>/`: asynchronous, atomic, restorable on any mesh.

Orbax writes the checkpoints.  Each step_<N> holds two items, which are committed together: `state`,
the tree of arrays, and `aux`, JSON such as the config and the data loader's position.  Checksums of
both items are saved with them, and verified when the items are read; see `integrity`.

The module `step_folders` describes how complete steps are recognised.  A lock ensures that a model
folder has only one writer at a time.  A writer may consist of many processes.
"""

import atexit
import contextlib
import errno
import functools
import json
import logging
import os
import sys
import threading
import time
import weakref
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
from mesh_transformer.checkpoint.integrity import tree_checksums
from mesh_transformer.checkpoint.joint_save import JointSave
from mesh_transformer.checkpoint.orbax_handlers import (
    SAVE_SECONDS,
    HostArrayHandler,
    StateHandler,
    StateSave,
    silence_failure_messages,
)
from mesh_transformer.checkpoint.saved_step import SavedStep
from mesh_transformer.checkpoint.state_tree import check_names, leaves
from mesh_transformer.checkpoint.step_folders import (
    BEST,
    TEMPORARY,
    best_step,
    committed_steps,
    delete_step,
    is_committed,
    is_unfinished,
    no_checkpoint_error,
    write_best,
)
from mesh_transformer.mesh.host_memory import is_in_host
from mesh_transformer.storage.access import (
    check_bucket,
    convert_failures,
    convert_storage_errors,
    delete_tree,
    entries,
    free_bytes,
    free_space,
    is_failure,
    local_path,
    reason,
    unwritable_error,
)
from mesh_transformer.storage.locks import BucketLock, LocalLock, lock_folder
from mesh_transformer.util import InputError, StoppedError, brief, check_number, start_thread

_CHUNK = 8 << 20  # bytes per read or write of a leaf; up to 128 reads or writes run at once
_SIGNAL_SECONDS = 0.5  # longest time until a signal is handled while `wait` waits
_PRUNE_SECONDS = 30  # longest time that `wait` waits for old steps to be deleted

_log = logging.getLogger(__name__)
_began: "weakref.WeakSet[Checkpoints]" = weakref.WeakSet()  # those that have begun a save


def _finish_saves(process: int) -> None:
    """Wait for saves that are still running when the program ends, and report those that fail.

    Args:
      process: the id of the process that saves; others, which it has forked, do nothing.
    """
    for checkpoints in list(_began) if os.getpid() == process else ():
        try:
            checkpoints.wait()
        except Exception as error:  # the others' saves must still be waited for
            print(f"error: {error}", file=sys.stderr)


@functools.cache
def _finish_saves_at_exit() -> None:
    """Have `_finish_saves` called when the program ends, if it has a single process.

    With several processes, a wait for those that have failed might not end.
    """
    if jax.process_count() == 1:
        # The functions of `atexit` are called too late, when Orbax can no longer start threads.
        register = getattr(threading, "_register_atexit", atexit.register)
        register(functools.partial(_finish_saves, os.getpid()))


class Checkpoints:
    """The checkpoints of one model folder, saved in the background and restored onto any mesh.

    With several processes, all of them must make the same calls.  The phases of a save are:

    1. `save`, in all processes: arrays in host memory are copied.
    2. Process 0 locks the folder, checks that the step is vacant, and deletes unfinished steps.
    3. Barrier "vacant": all processes wait for that.
    4. All processes start checksums on the devices, and Orbax copies arrays to the host.  `save`
       returns.
    5. In the background, all processes write their parts to step_N with a temporary name, and meet
       at Orbax's barriers, for which those of `JointSave` stand in: they fail together.
    6. Process 0 writes the checksums (`_write_integrity`), checks the lock, and renames the step.
    7. `_commit`: process 0 records the best step, and deletes old steps in another thread.
    8. If any process fails in 2 to 6, `save` or `wait` raises an error in all of them: it reports
       the failure to the others (`JointSave.fail`) and waits until these have stopped writing,
       then process 0 deletes the unfinished step (`_failure`).
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
        """Open a folder; nothing is created or changed before the first `save` or `claim`.

        Args:
          folder: a local path or a URI such as `gs://bucket/model`.
          keep_n: the number of newest steps to keep after each save; older ones are deleted, except
            the best step (see `save`).
          keep_every: also keep every step that is a multiple of this number (default: none).
          read_only: if True, `save` and `claim` raise RuntimeError.
          host: whether the states to save hold numpy arrays and `LazyLeaf`s instead of jax Arrays.
            This is supported only in a single process.

        Raises:
          InputError: if `keep_n` or `keep_every` is below 1.
        """
        for name, value in (("keep_n", keep_n), ("keep_every", keep_every)):
            if value is not None:
                check_number(name, value, 1)
        self.folder = _absolute(folder)
        self._keep_n, self._keep_every, self._read_only = keep_n, keep_every, read_only
        self._host = host
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, int, Future[None]] | None = None  # step, bytes, commit
        self._known: int | None = None  # the step saved or restored last
        self._saving: int | None = None  # the step whose save started last
        self._best: dict[str, Any] = {}  # the entry `best` of the last `aux`
        self._lock: LocalLock | BucketLock | None = None
        self._pruning: threading.Thread | None = None
        self._joint = JointSave()
        self._sums: dict[str, list[int]] = {}  # checksums of the leaves being saved
        self._saved = functools.cache(lambda step: SavedStep(self._path(step)))
        self._checkpointer = self._new_checkpointer()
        silence_failure_messages()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Return the committed steps, ascending; an empty list if the folder does not exist."""
        return committed_steps(self.folder)

    def newest(self) -> int | None:
        """Return the highest committed step, or None if there is none."""
        return max(self.steps(), default=None)

    def claim(self, n_bytes: int = 0) -> None:
        """Lock the folder against other writers until `close`.

        Creates the folder if necessary, and deletes the unfinished steps of interrupted saves.

        Args:
          n_bytes: the size of a checkpoint, for which the folder's disk must have room.

        Raises:
          InputError: if another process has locked the folder, if the folder cannot be written, or
            if its disk has less than `n_bytes` free.
        """
        if self._read_only:
            raise RuntimeError(f"{self.folder} was opened read-only; open it without read_only")
        if jax.process_index() != 0:
            return
        if self._lock is None:
            self._lock = lock_folder(os.fspath(self.folder))
            with convert_failures(lambda error: unwritable_error(self.folder, error)):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._clear_uncommitted()
        self._check_room(n_bytes)

    def _check_room(self, n_bytes: int) -> None:
        """Check that the disk has room for a checkpoint, and warn if not for all that are kept."""
        folder = os.fspath(self.folder)
        free = free_bytes(folder)
        if free is None or not n_bytes:
            return
        if free < n_bytes:
            raise InputError(
                f"model folder {folder}: {os.strerror(errno.ENOSPC)}: a checkpoint takes "
                f"{n_bytes:,} bytes, {free:,} are free; make room or choose another folder"
            )
        missing = self._keep_n + 1 - len(self.steps())  # an old step is deleted after a new one
        if free < n_bytes * missing:
            _log.warning(
                "model folder %s: %s bytes are free, but %s more checkpoints take %s; make room or "
                "lower keep_n",
                *(folder, f"{free:,}", missing, f"{n_bytes * missing:,}"),
            )

    def save(self, step: int, state: Any, aux: dict[str, Any], *, replaced: bool = False) -> None:
        """Start saving a state and a JSON dict as step number `step`.

        Waits for the previous save first.  Returns once all jax Arrays have been copied to the
        host, so the caller may donate them.  numpy arrays must not change until `wait` has
        returned.  If `step` is the step that this object saved or restored last, nothing is saved,
        except if the state has been `replaced` since.

        Args:
          state: nested dicts of arrays.
          aux: a JSON-serialisable dict.  An entry `best` with the keys `step`, `set` and `loss`
            names the best step (none if `step` is None).  As soon as `step` is saved, the file
            `best` of the folder names the best step, too.  That step is not deleted.

        Raises:
          InputError: if this step already exists, the save cannot start, or the previous save
            failed.
        """
        if self._read_only:
            raise RuntimeError(f"{self.folder} was opened read-only; open it without read_only")
        self.wait()
        self._best = aux["best"] if isinstance(aux, dict) and aux.get("best") else {}
        if replaced:
            self._known = None
        if step == self._known:
            with convert_failures(lambda error: unwritable_error(self.folder, error)):
                self._record_best()
            return
        json.dumps(aux)  # Raise a TypeError here, not in the background thread.
        check_names(state)
        n_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        state = jax.tree.map(_copied_if_in_host, state)
        chunked = jax.tree.map(_save_args, state)
        arguments = ocp.args.Composite(
            state=StateSave(state, save_args=chunked), aux=ocp.args.JsonSave(aux)
        )
        self._joint.begin()
        # Any failure from here on must be reported to the other processes.
        with convert_failures(lambda error: self._failure(step, n_bytes, error)):
            self.claim()
            self._check_lock()
            self._check_vacant(step)
            self._clear_uncommitted()
            self._joint.barrier("vacant", SAVE_SECONDS * 1000)
            self._saving = step
            self._saved.cache_clear()
            self._sums.clear()
            if not self._host:  # checksums of host arrays are computed as they are written
                sums = tree_checksums(leaves(state))
                self._sums |= {".".join(path): sums[path] for path in sums}
            # Orbax checks again that the step is vacant.  The other processes must skip that check,
            # as the first process may have created the folder by then.
            forced = jax.process_index() != 0
            self._checkpointer.save(self._path(step), args=arguments, force=forced)
        self._pending = step, n_bytes, self._executor.submit(self._commit, step)
        _began.add(self)
        _finish_saves_at_exit()

    def _check_lock(self) -> None:
        """Check that no other process has taken over the folder's lock; see `BucketLock.check`."""
        if self._lock is not None:
            self._lock.check()

    def _check_vacant(self, step: int) -> None:
        """Raise InputError if the step exists, unless it is left over from an interrupted save."""
        if self._path(step).exists() and not is_unfinished(self._path(step)):
            raise InputError(
                f"checkpoint folder {self.folder}: step_{step} already exists and was not saved "
                "by this run; choose another folder or move that step away"
            )

    @property
    def save_failed(self) -> bool:
        """Whether the save in the background has already failed; if so, `wait` raises its error."""
        pending = self._pending
        return pending is not None and pending[2].done() and pending[2].exception() is not None

    def is_saving(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the current save; return whether it is still running."""
        return self._pending is not None and not wait_for([self._pending[2]], timeout).done

    def wait(self) -> None:
        """Wait until the current save, if any, is committed.

        Then waits up to 30 seconds for old steps to be deleted.

        Raises:
          InputError: if the save failed.  Later calls do not raise it again.
        """
        if self._pending is None:
            return
        step, n_bytes, commit = self._pending
        try:
            # Python handles a signal that arrives just before a wait only when that wait ends, so a
            # Ctrl-C could get lost in a wait without a timeout.
            while self.is_saving(_SIGNAL_SECONDS):
                pass
            with convert_failures(lambda error: self._failure(step, n_bytes, error)):
                commit.result()
                self._known = step
        finally:
            if commit.done():  # not if Ctrl-C interrupted the wait
                self._pending = None
        if self._pruning is not None:
            self._pruning.join(_PRUNE_SECONDS)

    def close(self) -> None:
        """Wait for the current save, then end the threads and release the lock.

        Raises:
          InputError: if the save failed.
        """
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            self._checkpointer.close()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def saved(self, step: int | None = None) -> SavedStep:
        """Return the committed step with this number (default: the newest).

        Raises:
          InputError: if there is no such step.
        """
        self.wait()
        steps = self.steps()
        if not steps:
            raise no_checkpoint_error(self.folder)
        if step is not None and step not in steps:
            known = ", ".join(map(str, steps))
            raise InputError(
                f"checkpoint folder {self.folder} has no step {step}; choose one of {known}"
            )
        return self._saved(steps[-1] if step is None else step)

    def restore(self, step: int | None, template: Any, *, only: Sequence[str] | None = None) -> Any:
        """Restore the state of step number `step` (None: the newest); see `SavedStep.restore`."""
        saved = self.saved(step)
        restored = saved.restore(template, only=only)
        self._known = saved.number
        return restored

    def _new_checkpointer(self) -> ocp.AsyncCheckpointer:
        """Return an asynchronous Orbax checkpointer that saves the items `state` and `aux`."""
        handlers, joint = ocp.type_handlers, self._joint
        # To Orbax, each process is the only active one, so that it meets no others at barriers of
        # its own, which would wait for a process that has failed.  They meet at those of `joint`.
        processes = ocp.options.MultiprocessingOptions(
            active_processes=None if joint.alone else {jax.process_index()}
        )
        host_arrays = HostArrayHandler(self._sums)
        state = StateHandler(
            joint,
            use_compression=False,  # parameters hardly compress
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
            # If creating folders in the background fails, some threads wait forever.
            create_directories_asynchronously=False,
            timeout_secs=SAVE_SECONDS,
            barrier_sync_fn=None if joint.alone else joint.barrier,
            post_finalization_callback=self._write_integrity,
        )
        return ocp.AsyncCheckpointer(
            handler, async_options=options, multiprocessing_options=processes
        )

    def _write_integrity(self) -> None:
        """Write the checksums of the step being saved; Orbax calls this before it commits the step.

        Raises:
          StoppedError: if another process has taken over the lock of the folder.
        """
        (step,) = (
            path
            for path in self.folder.iterdir()
            if path.name.partition(TEMPORARY)[0] == f"step_{self._saving}"
        )
        integrity.write(step, self._sums)
        self._check_lock()

    def _path(self, step: int) -> epath.Path:
        return self.folder / f"step_{step}"

    def _commit(self, saved: int) -> None:
        """Wait until Orbax has committed step `saved`, then delete old steps in another thread."""
        self._checkpointer.wait_until_finished()
        try:
            self._record_best()
        except Exception as error:  # the next save tries again
            if not is_failure(error):
                raise
            _log.warning("cannot record the best step of %s: %s", self.folder, reason(error))
        if jax.process_index() != 0 or (self._pruning and self._pruning.is_alive()):
            return
        # In a separate thread, so that storage that hangs does not hold up a successful save.
        warn = self._warn_of_pruning
        self._pruning = start_thread(self._prune, saved, name="prune", failed=warn)

    def _record_best(self) -> None:
        """Make the file `best` name the step that the last `aux` names, if that step is saved."""
        step = self._best.get("step")
        if step is None or jax.process_index() != 0 or step == best_step(self.folder):
            return
        if is_committed(self._path(step)):
            self.claim()
            self._check_lock()
            write_best(self.folder, {key: self._best[key] for key in ("step", "set", "loss")})

    def _prune(self, saved: int) -> None:
        """Delete the steps that `keep_n` and `keep_every` do not keep; log a warning if that fails.

        The best step is kept, too.  The next save tries again.

        Args:
          saved: the step that was saved last, which is always kept.
        """
        try:
            self._check_lock()
            kept = (saved, self._best.get("step"), best_step(self.folder))
            for step in self.steps()[: -self._keep_n]:
                if step not in kept and (self._keep_every is None or step % self._keep_every):
                    delete_step(self._path(step))
        except Exception as error:
            if not is_failure(error):
                raise
            self._warn_of_pruning(error)

    def _warn_of_pruning(self, error: Exception) -> None:
        _log.warning("cannot delete old steps of %s: %s", self.folder, reason(error))

    def _clear_uncommitted(self) -> int:
        """Delete the folders that interrupted saves and deletions left; return their number."""
        if jax.process_index() != 0:
            return 0
        unfinished = [path for path in entries(self.folder) if is_unfinished(path)]
        for path in unfinished:
            with contextlib.suppress(FileNotFoundError):  # `_prune` may be deleting it too
                delete_tree(path)
        return len(unfinished)

    def _clear_after_failure(self) -> None:
        """Delete the files of a failed save, repeatedly until no new files appear.

        Some writes of the save may still be running.  They cannot be waited for, and each may
        create the deleted folder again.  After a few seconds, this method gives up, and the next
        save deletes the remaining files.  These are never taken for a complete step, because they
        include no commit file.
        """
        quiet = 0
        for _ in range(50):
            try:
                self._check_lock()  # without the lock, the files may be those of another writer
                quiet = 0 if self._clear_uncommitted() else quiet + 1
            except StoppedError:
                return
            except Exception as error:
                if not is_failure(error):
                    raise
                quiet = 0
            if quiet == 5:
                return
            time.sleep(0.1)

    def _failure(self, step: int, n_bytes: int, error: Exception) -> Exception:
        """Delete the files that a failed save has written, and return the error to raise.

        The result is `error` itself if it is an InputError or StoppedError, otherwise an InputError
        that describes it.

        Args:
          n_bytes: the total size of the step's arrays, for the error message.
        """
        free = free_space(os.fspath(self.folder))
        self._joint.fail(error, SAVE_SECONDS)
        self._checkpointer = self._new_checkpointer()
        if self._lock is not None:  # without it, the files may be those of another writer
            self._clear_after_failure()
        # An InputError is, for example, about a `LazyLeaf` that could not be read.
        if isinstance(error, InputError | StoppedError):
            return error
        try:
            newest = self.newest()
            if newest == step:  # only the answer to the last request was lost
                self._known = step
            intact = (
                "there is no earlier checkpoint" if newest is None else f"step {newest} is intact"
            )
        except InputError:  # the storage does not answer
            intact = "earlier checkpoints are intact"
        return InputError(
            f"checkpoint folder {self.folder}: saving step {step} failed: {reason(error)} "
            f"({n_bytes:,} bytes to save{free}); {intact}; make room or choose another folder"
        )


def find(path: str) -> SavedStep:
    """Return the newest step of the model folder `path`; if `path` is a step, return that step.

    If `path` is the file `best` of a model folder, return the best step of that folder.

    Raises:
      InputError: if `path` does not exist or has no committed step.
    """
    folder = _absolute(path)
    with convert_storage_errors(f"checkpoint folder {folder}"):
        if is_committed(folder):
            return SavedStep(folder)
    if folder.name == BEST and (number := best_step(folder.parent)) is not None:
        step = folder.parent / f"step_{number}"
        if is_committed(step):
            return SavedStep(step)
        raise InputError(f"{folder} names step_{number}, which does not exist; use another step")
    steps = committed_steps(folder)
    if not steps:
        raise no_checkpoint_error(folder)
    return SavedStep(folder / f"step_{steps[-1]}")


def _absolute(path: str) -> epath.Path:
    """Return a path or URI as the absolute path that Orbax requires.

    Raises:
      InputError: if the path is in a bucket that cannot be reached or does not exist, or has names
        that are not UTF-8, which tensorstore requires.
    """
    check_bucket(path)
    absolute = local_path(path)
    try:
        absolute.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{brief(absolute, 500)}: the path is not UTF-8, as those of native checkpoints must "
            "be; rename its folders, or choose another path"
        ) from None
    return epath.Path(absolute)


def _copied_if_in_host(leaf: Any) -> Any:
    """Copy an array in host memory, because Orbax may not; return other arrays unchanged."""
    if not isinstance(leaf, jax.Array) or not is_in_host(leaf):
        return leaf
    return jax.device_put(leaf, leaf.sharding, may_alias=False)


def _save_args(leaf: Any) -> ocp.SaveArgs:
    """Return Orbax's save options for a leaf.

    Leaves that are stacked over layers are chunked along the layers first, so that each layer is
    contiguous.
    """
    return ocp.SaveArgs(chunk_byte_size=_CHUNK, shard_axes=(0,) if leaf.ndim > 2 else ())
