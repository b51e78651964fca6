"""Evaluation on tasks of lm-eval (EleutherAI's evaluation harness), for training and for scripts.

Tasks are loaded and checked before the model's weights are loaded, so that errors appear early.
"""

import functools
import json
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mesh_transformer import extras
from mesh_transformer.config import Config
from mesh_transformer.data.chat import ChatTemplate, read_template
from mesh_transformer.data.tokenizer import Tokenizer, chat_template
from mesh_transformer.storage import files
from mesh_transformer.util import InputError

if TYPE_CHECKING:
    from mesh_transformer.network import Network

# The tasks in the configs of the original mesh-transformer-jax, by their current lm-eval names.
DEFAULT_TASKS = ("lambada", "piqa", "hellaswag", "winogrande", "mathqa", "pubmedqa")


class Harness:
    """lm-eval tasks, loaded and ready to evaluate a network.

    Loading checks that the network can answer every question, for example that the answers fit in
    the config's `seq` tokens.

    Args:
      config: the config of the network to evaluate.
      names: names of tasks, patterns of such names, or paths of YAML files.
      include_path: folder with additional task definitions, or None.
      num_fewshot: number of examples before each question (default: each task's own default).
      limit: number of questions per task or, below 1, a fraction of them (default: all).
      template: the chat template for questions: the path of a file, "plain", or "" for the
        tokenizer's own; None for none.
      options: further fields of `evaluation.tasks.Options`.

    Raises:
      InputError: if lm-eval is not installed, if a task cannot be loaded or has a question that the
        model cannot answer, or if `limit` is not above 0.
    """

    def __init__(
        self,
        config: Config,
        names: Sequence[str],
        *,
        include_path: str | None = None,
        num_fewshot: int | None = None,
        limit: float | None = None,
        template: str | None = None,
        **options: Any,
    ):
        if limit is not None and not limit > 0:
            raise InputError(f"--limit or eval_harness_limit is {limit}, expected above 0")
        try:
            from mesh_transformer.evaluation import tasks
        except ImportError as error:
            raise InputError(
                f"lm-eval tasks ({', '.join(names)}): {extras.missing(error) or error}, or set "
                "eval_harness_tasks to [] in the config"
            ) from None
        self._module = tasks
        if options.get("unsafe_code"):
            os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # the metric's own confirmation
        self._tasks = tasks.tasks_of(names, include_path)
        self._tokenizer = Tokenizer.of(None, config, must_fit=True).loaded
        chosen = _template(self._tokenizer, template)
        self._options = tasks.Options(num_fewshot, limit, chosen, **options)
        tasks.dry_run(config, self._tokenizer, self._tasks, self._options)

    def results(
        self,
        network: "Network",
        stopped: Callable[[], bool] = lambda: False,
        *,
        share: bool = True,
    ) -> dict[str, Any] | None:
        """Evaluate a network on the tasks, and return lm-eval's results with standard errors.

        Args:
          stopped: called between batches; if it returns True, the evaluation ends and returns None.
          share: whether to compute what many questions begin with once, which needs more memory.
        """
        return self._module.evaluate(
            network, self._tokenizer, self._tasks, self._options, stopped=stopped, share=share
        )

    def table(self, results: dict[str, Any]) -> str:
        """Format the dict that `Harness.results` returned as a text table."""
        return self._module.table(results)


def _template(tokenizer: Any, chosen: str | None) -> ChatTemplate | None:
    """Return the chat template that --apply-chat-template chooses; see `Harness`."""
    if chosen:
        return read_template(tokenizer, chosen)
    if chosen == "" and chat_template(tokenizer) is None:
        raise InputError(
            "--apply-chat-template: the tokenizer has no chat template; give a file, or plain"
        )
    return None if chosen is None else ChatTemplate(tokenizer)


@functools.cache
def load_harness(config: Config) -> Harness | None:
    """Load the tasks that `config.eval_harness_tasks` lists; return None if it is empty.

    Further calls with the same config return the same object.
    """
    if not config.eval_harness_tasks:
        return None
    return Harness(config, config.eval_harness_tasks, limit=config.eval_harness_limit)


def metric_values(results: dict[str, Any]) -> dict[str, float]:
    """Return all metrics and standard errors in `results` as a flat dict of numbers.

    The keys of the dict are `<task>/<metric>`.  If a metric is computed after one of lm-eval's
    filters, such as "strict-match", the key is `<task>/<metric>,<filter>`.  Values that are NaN or
    infinite are left out.

    Args:
      results: lm-eval's results, as returned by `Harness.results`.
    """
    values: dict[str, float] = {}
    for task, metrics in results["results"].items():
        for name, value in metrics.items():
            metric, comma, source = name.partition(",")
            # Other entries are the task's title, and standard errors that could not be computed.
            if comma and isinstance(value, int | float) and math.isfinite(value):
                values[f"{task}/{metric if source == 'none' else name}"] = float(value)
    return values


def write(path: str, results: dict[str, Any]) -> None:
    """Write lm-eval's results to the JSON file `path`, atomically; NaN and infinity become null.

    The samples of a task, if there are any, become lines of JSON in a file of their own beside it,
    whose name is that of `path` with "_samples_" and the task's name.
    """
    rest = {key: value for key, value in results.items() if key != "samples"}
    try:
        for task, samples in results.get("samples", {}).items():
            lines = (json.dumps(_finite(sample), default=str) + "\n" for sample in samples)
            files.write_text(f"{path.removesuffix('.json')}_samples_{task}.jsonl", "".join(lines))
        files.write_text(path, json.dumps(_finite(rest), indent=2, default=str) + "\n")
    except OSError as error:
        raise InputError(f"--output {path}: {error.strerror}; choose another file") from None


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON cannot represent, with None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
