"""lm-eval's tasks: loaded, rehearsed without a model, and asked of a network; their results."""

import contextlib
import functools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from lm_eval import evaluator, utils
from lm_eval.tasks import TaskManager

from mesh_transformer.config import Config
from mesh_transformer.evaluation.network_lm import NetworkLM, Rehearsal, StoppedAskingError
from mesh_transformer.network import Network
from mesh_transformer.util import InputError

BOOTSTRAPS = 1000  # draws behind the standard error of a metric that is no mean
SEEDS = {"random": 0, "numpy": 1234, "fewshot": 1234}  # lm-eval's own


class Tasks(NamedTuple):
    """Tasks with all of their questions, as lm-eval's `TaskManager.load` gives them."""

    loaded: Any

    @property
    def by_name(self) -> dict[str, Any]:
        """Those that ask questions themselves; groups are of these."""
        return self.loaded["tasks"]


def tasks_of(names: Sequence[str], include_path: str | None = None) -> Tasks:
    """The tasks of these names: lm-eval's, those in the folder `include_path`, or YAML files.

    Raises:
      InputError: for a name that there is not, and where questions cannot be had.
    """
    if include_path is not None and not os.path.isdir(include_path):
        raise InputError(f"--include-path {include_path}: no such folder; give one with tasks")
    # Those shipped with lm-eval are thousands, which take seconds to be read.
    own = _matched(_manager(include_path, shipped=False), names)
    if all(own.values()):
        with contextlib.suppress(InputError):  # they may be groups of lm-eval's
            return _loaded(_manager(include_path, shipped=False), own)
    manager = _manager(include_path, shipped=True)
    matched = _matched(manager, names)
    for name, found in matched.items():
        if not found:
            raise InputError(
                f"lm-eval has no task {name!r}; `lm-eval ls tasks` lists them, and "
                "--include-path adds a folder of your own"
            )
    return _loaded(manager, matched)


@functools.cache
def _manager(include_path: str | None, shipped: bool) -> TaskManager:
    return TaskManager(include_path=include_path, include_defaults=shipped)


def _matched(manager: TaskManager, names: Sequence[str]) -> dict[str, list[str]]:
    """What each name, which may be a pattern, stands for."""
    return {name: [name] if os.path.isfile(name) else manager.match_tasks([name]) for name in names}


def _loaded(manager: TaskManager, matched: dict[str, list[str]]) -> Tasks:
    names = [name for found in matched.values() for name in found]
    try:
        with _seeded():
            return Tasks(manager.load(names))
    except Exception as error:  # what tasks and their readers raise is theirs to choose
        lines = str(error).strip().splitlines() or [""]
        raise InputError(
            f"lm-eval cannot load the tasks {', '.join(names)}: {type(error).__name__}: "
            f"{lines[0]}; leave out what cannot be had"
        ) from error


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """For tasks that shuffle by the process's own random numbers, which nobody else misses."""
    before = random.getstate(), np.random.get_state()
    random.seed(SEEDS["random"])
    np.random.seed(SEEDS["numpy"])
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def rehearse(
    config: Config,
    tokenizer: Any,
    tasks: Tasks,
    *,
    num_fewshot: int | None = None,
    limit: float | None = None,
) -> None:
    """Goes through all questions without a model, as `evaluate` will.

    Raises:
      InputError: naming the task that asks for what cannot be done.
    """
    model = Rehearsal(config, tokenizer)
    for name, task in tasks.by_name.items():
        alone = Tasks({"tasks": {name: task}, "groups": {}, "group_map": {}})
        try:
            _asked(model, alone, num_fewshot=num_fewshot, limit=limit, draws=0)
        except ValueError as error:
            raise InputError(f"lm-eval's task {name}: {error}") from None


def evaluate(
    network: Network,
    tokenizer: Any,
    tasks: Tasks,
    *,
    num_fewshot: int | None = None,
    limit: float | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """lm-eval's results of these tasks, with their standard errors.

    Args:
      num_fewshot: examples ahead of each question; None: what each task says.
      limit: questions of each task, or below 1 the share of them; None: all.
      stopped: looked at between batches; None is returned soon after it says so.

    Raises:
      InputError: where a task asks for what cannot be done.
    """
    model = NetworkLM(network, tokenizer, stopped)
    try:
        results = _asked(model, tasks, num_fewshot=num_fewshot, limit=limit, draws=BOOTSTRAPS)
    except StoppedAskingError:
        return None
    kept = ("results", "groups", "group_subtasks", "versions", "n-shot", "n-samples")
    return {key: results[key] for key in (*kept, "higher_is_better") if key in results}


def _asked(
    model: NetworkLM, tasks: Tasks, *, num_fewshot: int | None, limit: Any, draws: int
) -> Any:
    """As lm-eval's `simple_evaluate`, of tasks that are loaded, and without its pool of processes.

    That is made by fork, which JAX's threads do not outlive.
    """
    for task in tasks.by_name.values():
        said = task.get_config("num_fewshot")
        if num_fewshot is not None and said != 0:  # a task that says 0 has no examples to give
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif said is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEEDS["fewshot"])
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with _seeded():
            return evaluator.evaluate(
                model, tasks.loaded, limit=limit, bootstrap_iters=draws, log_samples=False
            )
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before


def table(results: dict[str, Any]) -> str:
    """The results as a table."""
    return utils.make_table(results)
