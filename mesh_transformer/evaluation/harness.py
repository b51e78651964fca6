"""The questions of lm-eval that a config or a script asks for, opened before what takes long."""

import functools
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh_transformer.config import Config
from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.util import InputError

if TYPE_CHECKING:
    from mesh_transformer.network import Network

# What the original's configs name, as lm-eval calls them now.
DEFAULT_TASKS = ("lambada", "piqa", "hellaswag", "winogrande", "mathqa", "pubmedqa")


class Harness:
    """Tasks with their questions, known to be such as the config's model can be asked.

    Args:
      names: lm-eval's, those of tasks in the folder `include_path`, or YAML files.
      num_fewshot: examples ahead of each question; None: what each task says.
      limit: questions of each task, or below 1 the share of them; None: all.

    Raises:
      InputError: where lm-eval is not installed, or a task cannot be had or asked.
    """

    def __init__(
        self,
        config: Config,
        names: Sequence[str],
        *,
        include_path: str | None = None,
        num_fewshot: int | None = None,
        limit: float | None = None,
    ):
        if limit is not None and not limit > 0:
            raise InputError(f"the limit of questions is {limit}, expected above 0")
        try:
            from mesh_transformer.evaluation import tasks
        except ImportError as error:
            raise InputError(
                f"lm-eval's tasks ({', '.join(names)}): {error.name or error} is missing; "
                "pip install 'lm-eval>=0.4.13', or set eval_harness_tasks to []"
            ) from None
        self._evaluation = tasks
        self._tasks = tasks.tasks_of(names, include_path)
        self._tokenizer = Tokenizer.of(None, config, must_fit=True).loaded
        self._options: dict[str, Any] = {"num_fewshot": num_fewshot, "limit": limit}
        tasks.rehearse(config, self._tokenizer, self._tasks, **self._options)

    def results(
        self, network: "Network", stopped: Callable[[], bool] = lambda: False
    ) -> dict[str, Any] | None:
        """What a network answers: see `evaluation.evaluate`."""
        return self._evaluation.evaluate(
            network, self._tokenizer, self._tasks, stopped=stopped, **self._options
        )

    def table(self, results: dict[str, Any]) -> str:
        """Results for people, with their standard errors."""
        return self._evaluation.table(results)


@functools.cache
def opened(config: Config) -> Harness | None:
    """The config's `eval_harness_tasks`, once for each config; None where it has none."""
    if not config.eval_harness_tasks:
        return None
    return Harness(config, config.eval_harness_tasks, limit=config.eval_harness_limit)


def numbers(results: dict[str, Any]) -> dict[str, float]:
    """The numbers of results as `<task>/<metric>`, with `,<filter>` where a task has filters."""
    found: dict[str, float] = {}
    for task, told in results["results"].items():
        for name, value in told.items():
            metric, comma, source = name.partition(",")
            # Others are the task's title, and standard errors that are not known.
            if comma and isinstance(value, int | float) and math.isfinite(value):
                found[f"{task}/{metric if source == 'none' else name}"] = float(value)
    return found


def write(path: str, results: dict[str, Any]) -> None:
    """Writes results as JSON; the file is there whole or not at all."""
    temporary = Path(f"{path}.tmp")
    try:
        temporary.write_text(json.dumps(_finite(results), indent=2, default=str) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"--output {path}: {error.strerror}; choose another file") from None


def _finite(value: Any) -> Any:
    """Numbers that JSON has not as null."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
