"""Scores a model with lm-eval's tasks, on a network known by its methods, wherever it runs."""

import functools
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from mesh_transformer.config import Config
from mesh_transformer.sampling import SamplerSettings
from mesh_transformer.util import InputError, bucket

# What the original's configs name, as lm-eval calls them now.
DEFAULT_TASKS = ("lambada", "piqa", "hellaswag", "winogrande", "mathqa", "pubmedqa")
SMALLEST = 16  # texts are padded to this width times a power of two: few compilations
MOST_TOKENS = 256  # of a generated answer, where a task does not say
STEPS = 16  # tokens that answers grow by between looks for their ends

Encoded = tuple[Any, list[int], list[int]]  # lm-eval's (texts, context, continuation)


class Network(Protocol):
    """What the tasks ask of a model; see `CausalTransformer`."""

    config: Config

    @property
    def batch_size(self) -> int: ...
    def eval(self, sample: dict[str, np.ndarray]) -> dict[str, Any]: ...
    def batch(self, rows: int) -> Any: ...


class NetworkLM(TemplateLM):
    """A network as lm-eval's tasks ask it: what they say is tokenized, batched and scored.

    Each token's loss is computed where the model is; the losses alone come back.
    """

    def __init__(self, network: Network, tokenizer: Any):
        super().__init__()
        self.network = network
        self.tokenizer = tokenizer
        self.max_length = network.config.seq

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        return self.tokenizer(string, add_special_tokens=bool(add_special_tokens))["input_ids"]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The logprob of each whole text in nats, read in windows of the model's length."""
        windows: list[Encoded] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            parts = utils.get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1
            )
            for part in parts:
                windows.append((None, *utils.make_disjoint_window(part)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        scored = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for owner, (logprob, _) in zip(owners, scored, strict=True):
            totals[owner] += logprob
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Of each continuation its logprob in nats, and whether it is what argmax would say."""
        texts = [_checked(context, said, self.max_length) for _, context, said in requests]
        found: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(texts), desc="scoring", unit="text", disable=disable_tqdm) as bar:
            for width, group in _groups(map(len, texts), self.network.batch_size, self.max_length):
                tokens = np.zeros((self.network.batch_size, width + 1), np.uint32)
                for row, index in zip(tokens, group, strict=False):
                    row[: len(texts[index])] = texts[index]  # what follows a text it does not see
                scored = self.network.eval({"obs": tokens[:, :-1], "target": tokens[:, 1:]})
                loss_BT, correct_BT = (np.asarray(scored[k]) for k in ("all_loss", "correct"))
                for row, index in enumerate(group):
                    end = len(texts[index]) - 1
                    said = slice(end - len(requests[index][2]), end)
                    logprob = -float(loss_BT[row, said].sum(dtype=np.float64))
                    found[index] = logprob, bool(correct_BT[row, said].all())
                bar.update(len(group))
        return [found[index] for index in range(len(texts))]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Each context's continuation, up to the first of its task's stop sequences."""
        asked = [_Generation(request.args[1]) for request in requests]
        end = self.tokenizer.decode([self.eot_token_id])
        prompts = []
        for request, wanted in zip(requests, asked, strict=True):
            room = self.max_length - wanted.length
            if room < 1:
                raise InputError(
                    f"a task asks for answers of {wanted.length} tokens, but the model's seq is "
                    f"{self.max_length}; set its max_gen_toks lower"
                )
            tokens = self.tok_encode(request.args[0])[-room:]
            prompts.append(np.array(tokens or [self.prefix_token_id]))
        answers: dict[int, str] = {}
        with tqdm(total=len(asked), desc="generating", unit="text", disable=disable_tqdm) as bar:
            for _, group in _groups(map(len, prompts), self.network.batch_size, self.max_length):
                texts = self._continued(
                    [prompts[index] for index in group], [asked[index] for index in group], end
                )
                answers |= zip(group, texts, strict=True)
                bar.update(len(group))
        return [answers[index] for index in range(len(asked))]

    def _continued(
        self, prompts: Sequence[np.ndarray], asked: Sequence["_Generation"], end: str
    ) -> list[str]:
        """The answers to one batch of prompts, which ends when all of them have."""
        batch = self.network.batch(self.network.batch_size)
        lengths = np.array([each.length for each in asked])
        settings = SamplerSettings(
            np.array([each.top_p for each in asked], np.float32),
            np.array([each.top_k for each in asked], np.int32),
            np.array([each.temp for each in asked], np.float32),
            np.ones(len(asked), np.float32),
            np.zeros(len(asked), np.uint32),
        )
        # All rows at once: those of a mesh's replicas are filled alike.
        first = batch.insert(range(len(prompts)), prompts, lengths, settings)
        tokens = [[int(token)] for token in first.token]
        while True:
            texts = [self.tokenizer.decode(row) for row in tokens]
            cut = [
                each.cut(text, end, len(row) >= each.length)
                for each, text, row in zip(asked, texts, tokens, strict=True)
            ]
            if None not in cut:
                return [text for text in cut if text is not None]
            left = max(n - len(row) for n, row in zip(lengths, tokens, strict=True))
            new = batch.decode(min(STEPS, left)).token
            for row, more, length in zip(tokens, new, lengths, strict=False):
                row += more[: length - len(row)].tolist()


class _Generation:
    """How a task wants its answers, from its `generation_kwargs`; greedy unless it samples."""

    def __init__(self, options: dict[str, Any]):
        known = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}
        if unknown := set(options) - known:
            raise InputError(
                f"a task's generation_kwargs: {min(unknown)} is not known here; use "
                f"{', '.join(sorted(known))}"
            )
        until = options.get("until") or []
        self.until = [until] if isinstance(until, str) else list(until)
        self.length = int(options.get("max_gen_toks", MOST_TOKENS))
        temperature = float(options.get("temperature") or 0)
        sampled = options.get("do_sample", temperature > 0)
        self.temp = (temperature or 1.0) if sampled else 0.0
        self.top_p = float(options.get("top_p", 1))
        self.top_k = int(options.get("top_k", 0))

    def cut(self, text: str, end: str, complete: bool) -> str | None:
        """The answer, if `text` holds all of it."""
        places = [at for stop in (*self.until, end) if stop and (at := text.find(stop)) >= 0]
        if places:
            return text[: min(places)]
        return text if complete else None


def _checked(context: list[int], said: list[int], longest: int) -> list[int]:
    """A text that ends in what is scored: of a long context the end, and one token at least."""
    if not 0 < len(said) <= longest:
        raise InputError(
            f"a task's continuation has {len(said)} tokens, expected 1 to seq {longest}"
        )
    return (context + said)[-(longest + 1) :]


def _groups(lengths: Iterable[int], rows: int, longest: int) -> Iterable[tuple[int, Sequence[int]]]:
    """Batches of at most `rows` texts and the width to pad them to, the longest first."""
    known = list(lengths)
    order = sorted(range(len(known)), key=lambda index: -known[index])
    for begin in range(0, len(order), rows):
        group = order[begin : begin + rows]
        yield bucket(known[group[0]] - 1, SMALLEST, longest), group


class Tasks(NamedTuple):
    """Names of tasks, and what finds them."""

    names: Sequence[str]
    manager: TaskManager


def tasks_of(names: Sequence[str], include_path: str | None = None) -> Tasks:
    """The tasks of these names, lm-eval's or those in the folder `include_path`.

    Raises:
      InputError: for a name that there is not.
    """
    manager = _manager(include_path)
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        raise InputError(
            f"lm-eval has no task {unknown[0]!r}; `lm-eval ls tasks` lists them, and "
            "--include-path adds a folder of your own"
        )
    return Tasks(names, manager)


@functools.cache
def _manager(include_path: str | None) -> TaskManager:
    """Which reads the names of thousands of tasks, for seconds."""
    return TaskManager(include_path=include_path)


def evaluate(
    network: Network,
    tokenizer: Any,
    tasks: Tasks,
    *,
    num_fewshot: int | None = None,
    limit: float | None = None,
) -> dict[str, Any]:
    """lm-eval's results of these tasks, with their standard errors.

    Args:
      num_fewshot: examples ahead of each question; None: what each task says.
      limit: questions of each task, or below 1 the share of them; None: all.

    Raises:
      InputError: where a task asks for what cannot be done.
    """
    results: Any = simple_evaluate(
        NetworkLM(network, tokenizer),
        tasks=list(tasks.names),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=tasks.manager,
        log_samples=False,
    )
    kept = ("results", "groups", "group_subtasks", "versions", "n-shot", "n-samples")
    return {key: results[key] for key in (*kept, "higher_is_better") if key in results}


def table(results: dict[str, Any]) -> str:
    """The results as a table."""
    return utils.make_table(results)


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
