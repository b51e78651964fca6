"""lm-eval tasks: loading, a dry run without a model, evaluation of a network, and results."""

import contextlib
import functools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from lm_eval import evaluator, utils
from lm_eval.tasks import TaskManager

from mesh_transformer.config import Config
from mesh_transformer.data.chat import ChatTemplate
from mesh_transformer.evaluation.network_lm import DryRunLM, NetworkLM
from mesh_transformer.network import Network
from mesh_transformer.util import InputError, InterruptedWorkError

BOOTSTRAPS = 1000  # resamples for the standard error of a metric that is not a mean
SEEDS = {"random": 0, "numpy": 1234, "fewshot": 1234}  # lm-eval's defaults


@dataclass(frozen=True)
class Options:
    """How tasks are evaluated.

    Attributes:
      num_fewshot: number of examples before each question; None for each task's own number.
      limit: number of questions per task or, below 1, a fraction of them; None for all.
      template: the chat template for questions, whose examples become earlier messages; None: none.
      gen_kwargs: what to change in the `generation_kwargs` of tasks that generate answers.
      log_samples: whether the results have the questions and answers, as "samples".
      unsafe_code: whether tasks may run code that the model has written.
    """

    num_fewshot: int | None = None
    limit: float | None = None
    template: ChatTemplate | None = None
    gen_kwargs: dict[str, Any] = field(default_factory=dict)
    log_samples: bool = False
    unsafe_code: bool = False


DEFAULTS = Options()


class Tasks(NamedTuple):
    """Loaded lm-eval tasks, with all of their questions.

    Attributes:
      loaded: the result of lm-eval's `TaskManager.load`.
    """

    loaded: Any

    @property
    def by_name(self) -> dict[str, Any]:
        """Dict from task name to lm-eval task; it includes the tasks that belong to groups."""
        return self.loaded["tasks"]


def tasks_of(names: Sequence[str], include_path: str | None = None) -> Tasks:
    """Load lm-eval tasks by name or pattern.

    Args:
      names: names of tasks, patterns of such names, or paths of YAML files.
      include_path: folder with additional task definitions, or None.

    Raises:
      InputError: if a task does not exist, or its questions cannot be loaded.
    """
    if include_path is not None and not os.path.isdir(include_path):
        raise InputError(
            f"--include-path {include_path}: no such folder; give a folder with tasks as YAML files"
        )
    # Try first without the thousands of tasks that lm-eval ships, because reading them takes
    # seconds.
    own = _match(_manager(include_path, shipped=False), names)
    if all(own.values()):
        with contextlib.suppress(InputError):  # the names may be groups of tasks that lm-eval ships
            return _load(_manager(include_path, shipped=False), own)
    manager = _manager(include_path, shipped=True)
    matched = _match(manager, names)
    for name, matches in matched.items():
        if not matches:
            raise InputError(
                f"lm-eval has no task {name!r} (eval_harness_tasks or --tasks); `lm-eval ls "
                "tasks` lists its tasks, and a task of your own is given by the path of its YAML "
                "file"
            )
    return _load(manager, matched)


@functools.cache
def _manager(include_path: str | None, shipped: bool) -> TaskManager:
    return TaskManager(include_path=include_path, include_defaults=shipped)


def _match(manager: TaskManager, names: Sequence[str]) -> dict[str, list[str]]:
    """Map each name or pattern to the names of the tasks that match it.

    The path of a file is mapped to itself.
    """
    return {name: [name] if os.path.isfile(name) else manager.match_tasks([name]) for name in names}


def _load(manager: TaskManager, matched: dict[str, list[str]]) -> Tasks:
    names = [name for matches in matched.values() for name in matches]
    try:
        with _seeded():
            return Tasks(manager.load(names))
    except Exception as error:  # tasks and data set readers may raise anything
        lines = str(error).strip().splitlines() or [""]
        raise InputError(
            f"lm-eval cannot load the tasks {', '.join(names)}: {type(error).__name__}: "
            f"{lines[0]}; leave out the tasks that cannot be loaded (eval_harness_tasks, --tasks)"
        ) from error


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Return a context manager that seeds the global random generators of Python and numpy.

    Some lm-eval tasks shuffle with these generators.  At the end, the previous states of the
    generators are restored.
    """
    before = random.getstate(), np.random.get_state()
    random.seed(SEEDS["random"])
    np.random.seed(SEEDS["numpy"])
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def dry_run(
    config: Config,
    tokenizer: Any,
    tasks: Tasks,
    options: Options = DEFAULTS,
) -> None:
    """Check all questions that `evaluate` would ask, without running a model.

    Raises:
      InputError: if a task has a question that cannot be asked, for example because the answer
        would not fit in `seq` tokens; the message names the task.
    """
    model = DryRunLM(config, tokenizer, options.template)
    for name, task in tasks.by_name.items():
        if getattr(task, "UNSAFE_CODE", False) and not options.unsafe_code:
            raise InputError(
                f"lm-eval's task {name} runs code that the model has written; leave it out, or "
                "allow it with --confirm-unsafe-code, on a machine without anything of value"
            )
        single = Tasks({"tasks": {name: task}, "groups": {}, "group_map": {}})
        try:
            _evaluate_tasks(model, single, replace(options, log_samples=False), bootstraps=0)
        except (TypeError, ValueError) as error:
            raise InputError(f"lm-eval's task {name}: {error}") from None


def evaluate(
    network: Network,
    tokenizer: Any,
    tasks: Tasks,
    options: Options = DEFAULTS,
    *,
    stopped: Callable[[], bool] = lambda: False,
    share: bool = True,
) -> dict[str, Any] | None:
    """Evaluate a network on tasks, and return lm-eval's results with their standard errors.

    Args:
      stopped: function that is called between batches; if it returns True, `evaluate` stops and
        returns None.
      share: whether to compute what many questions begin with once, which needs more memory: the
        weights converted for generation, and the keys and values of the beginning.

    Raises:
      InputError: if a task has a question that cannot be asked, for example because the answer
        would not fit in `seq` tokens.
    """
    model = NetworkLM(network, tokenizer, stopped, share=share, template=options.template)
    try:
        results = _evaluate_tasks(model, tasks, options, bootstraps=BOOTSTRAPS)
    except InterruptedWorkError:
        return None
    kept = ("results", "groups", "group_subtasks", "versions", "n-shot", "n-samples")
    return {key: results[key] for key in (*kept, "higher_is_better", "samples") if key in results}


def _evaluate_tasks(model: NetworkLM, tasks: Tasks, options: Options, *, bootstraps: int) -> Any:
    """Evaluate loaded tasks like lm-eval's `simple_evaluate`, but in a single process.

    lm-eval would otherwise fork a pool of processes.  That is unsafe, because JAX's threads do not
    survive a fork.

    Args:
      bootstraps: number of bootstrap resamples for the standard errors of metrics.
    """
    for task in tasks.by_name.values():
        configured = task.get_config("num_fewshot")
        # 0 means that the task never uses examples.
        if options.num_fewshot is not None and configured != 0:
            task.set_config(key="num_fewshot", value=options.num_fewshot)
        elif configured is None:
            task.set_config(key="num_fewshot", value=0)
        if options.gen_kwargs and task.OUTPUT_TYPE == "generate_until":
            task.set_config(key="generation_kwargs", value=options.gen_kwargs, update=True)
        task.set_fewshot_seed(seed=SEEDS["fewshot"])
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with _seeded():
            return evaluator.evaluate(
                model,
                tasks.loaded,
                limit=options.limit,  # type: ignore[arg-type]
                bootstrap_iters=bootstraps,
                log_samples=options.log_samples,
                apply_chat_template=options.template is not None,
                fewshot_as_multiturn=options.template is not None,
                confirm_run_unsafe_code=options.unsafe_code,
            )
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before


def table(results: dict[str, Any]) -> str:
    """Format the results that `evaluate` returns as a text table."""
    return utils.make_table(results)
