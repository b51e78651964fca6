"""Traces of some steps of a run by JAX's profiler."""

import contextlib
import os
from collections.abc import Callable, Iterator

import jax

from mesh_transformer.network import TrainableNetwork
from mesh_transformer.storage import files
from mesh_transformer.storage.access import replace_errors
from mesh_transformer.util import InputError, first_line

NAME = "profile"  # of the folder in a model folder


@contextlib.contextmanager
def traced(folder: str) -> Iterator[None]:
    """Record a trace while the context lasts, in a folder that may be in a bucket."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # events of Python calls would slow the program down
    with files.output_folder(folder) as local:
        with _told(folder):  # another trace may be active
            jax.profiler.start_trace(os.fspath(local), profiler_options=options)
        try:
            yield
        finally:
            with _told(folder):
                jax.profiler.stop_trace()


def _told(folder: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that converts the profiler's errors to InputErrors."""

    def convert(error: Exception) -> Exception:
        is_own = isinstance(error, RuntimeError)
        return InputError(f"{folder}: {first_line(error)}") if is_own else error

    return replace_errors(convert)


class ProfiledSteps:
    """Traces some steps of a run, and says where the trace is.

    The trace has exactly these steps: the devices have finished all earlier work when it begins,
    and the steps when it ends.  It changes no number.

    Args:
      folder: the model folder; the trace is written to a folder in it.
      steps: the numbers of the steps; None for none.
      report: prints a line for the user.
    """

    def __init__(
        self,
        network: TrainableNetwork,
        folder: str,
        steps: range | None,
        report: Callable[[str], None],
    ):
        self._network, self._steps, self._report = network, steps, report
        self._path, self._active = f"{folder}/{NAME}", False
        if steps and network.step >= steps[0]:
            report(f"--profile: the run resumes after step {network.step}; no step is traced")
            self._steps = None

    def before_step(self) -> None:
        """Begin the trace if the next step is the first one."""
        if self._steps and self._network.step + 1 == self._steps[0]:
            problem = self._network.trace(self._path)
            self._active = not problem
            if problem:
                self._report(f"{self._path}: no trace is written: {problem}")

    def after_step(self) -> None:
        """End the trace if the step was the last one."""
        if self._steps and self._network.step == self._steps[-1]:
            self.end()

    def end(self) -> None:
        """End the trace, if there is one; if it cannot be written, say so."""
        if not (self._steps and self._active):
            return
        self._active = False
        if problem := self._network.trace(None):
            self._report(f"{self._path}: no trace is written: {problem}")
            return
        self._report(
            f"trace of steps {self._steps[0]} to {self._network.step}: {self._path}; to look at "
            f"it: pip install xprof && xprof --logdir {self._path}"
        )
