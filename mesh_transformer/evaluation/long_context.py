"""Accuracy of a network on questions about long texts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from mesh_transformer.config import Config
from mesh_transformer.data.chat import text_in
from mesh_transformer.data.special_tokens import before_end, end_tokens, prompt_tokens
from mesh_transformer.evaluation import haystack
from mesh_transformer.evaluation.answers import mean_and_interval
from mesh_transformer.network import Network
from mesh_transformer.util import InputError


class Cell(NamedTuple):
    """What is asked several times; `depth` is None if the task has none."""

    task: str
    length: int
    depth: float | None


def cells(tasks: Sequence[str], lengths: Sequence[int], depths: Sequence[float]) -> list[Cell]:
    """Return all combinations, the shortest lengths first."""
    return [
        Cell(task, length, depth)
        for length in sorted(set(lengths))
        for task in dict.fromkeys(tasks)
        for depth in ([None] if task in haystack.WITHOUT_DEPTH else sorted(set(depths)))
    ]


def check(config: Config, tokenizer: Any, chosen: Sequence[Cell]) -> None:
    """Raise InputError if a model with this config cannot be asked the questions of a cell."""
    for cell in chosen:
        if cell.length > config.window:
            raise InputError(
                f"--lengths has {cell.length}, but the model attends to {config.window} tokens; "
                f"give shorter lengths, or add --set seq={cell.length}"
            )
        _prompt(tokenizer, cell, 0, 0)


def text_or_records(tokenizer: Any, path: str) -> Any:
    """Return the validation set at a path: token ids of a text file if it ends in .txt.

    Raises:
      InputError: if the text cannot be read.
    """
    if not path.endswith(".txt"):
        return path
    return np.array(prompt_tokens(tokenizer, text_in(path, "--perplexity")))


def accuracies(
    network: Network, tokenizer: Any, chosen: Sequence[Cell], questions: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Ask a network questions, which it answers greedily, and return its accuracy in each cell.

    Args:
      tokenizer: the Hugging Face tokenizer of the model.
      questions: number of questions per cell.

    Returns:
      A dict per cell, with the fields of `Cell`, and the accuracy as `mean_and_interval` has it.

    Raises:
      InputError: if a length does not fit the task.
    """
    ends, rows = end_tokens(tokenizer, network.config), network.batch_size
    right: dict[Cell, list[float]] = {cell: [] for cell in chosen}
    with tqdm(total=len(chosen) * questions, unit="question") as bar:
        for length in sorted({cell.length for cell in chosen}):
            own = [cell for cell in chosen if cell.length == length]
            items = [(cell, number) for cell in own for number in range(questions)]
            for first in range(0, len(items), rows):  # batches of one width, to compile once
                batch = items[first : first + rows]
                prompts = [_prompt(tokenizer, *item, seed) for item in batch]
                ctx = np.zeros((len(batch), length - haystack.ANSWER_TOKENS), np.uint32)
                for row, prompt in zip(ctx, prompts, strict=True):
                    row[-len(prompt.tokens) :] = prompt.tokens
                sizes = [len(prompt.tokens) for prompt in prompts]
                answers = network.generate(ctx, sizes, haystack.ANSWER_TOKENS, {"temp": 0.0})
                for (cell, _), prompt, answer in zip(batch, prompts, answers.tolist(), strict=True):
                    text = tokenizer.decode(before_end(answer, ends), skip_special_tokens=True)
                    right[cell].append(haystack.is_right(text, prompt.expected))
                bar.update(len(batch))
    return [cell._asdict() | mean_and_interval(values) for cell, values in right.items()]


def _prompt(tokenizer: Any, cell: Cell, number: int, seed: int) -> haystack.Prompt:
    task = list(haystack.TASKS).index(cell.task)
    seeds = (seed, number, task, cell.length)  # the same filler at all depths
    return haystack.prompt(tokenizer, cell.task, cell.length, cell.depth or 0.0, seeds)
