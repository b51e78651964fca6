"""A network as lm-eval's tasks ask it: what is said is tokenized, batched, scored and continued."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from tqdm import tqdm

from mesh_transformer.config import Config
from mesh_transformer.generation.sampling import SamplingOptions
from mesh_transformer.network import Network
from mesh_transformer.util import HostError, InputError, bucket

SMALLEST = 16  # texts are padded to this width times a power of two: few compilations
MOST_TOKENS = 256  # of a generated answer, where a task does not say
STEPS = 16  # tokens that answers grow by between looks for their ends
IN_FLIGHT = 2  # batches dispatched before what is told of the oldest is read

Encoded = tuple[Any, list[int], list[int]]  # lm-eval's (texts, context, continuation)


class StoppedAskingError(Exception):
    """Whoever asked for scores has no use for them any more."""


class NetworkLM(TemplateLM):
    """lm-eval's model over a network.

    Each token's loss is computed where the model is; the losses alone come back.

    Args:
      stopped: looked at between batches; where it says so, StoppedAskingError is raised.
    """

    def __init__(
        self, network: Network, tokenizer: Any, stopped: Callable[[], bool] = lambda: False
    ):
        super().__init__()
        self.network = network
        self.tokenizer = tokenizer
        self.stopped = stopped
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
        pending: deque[tuple[Sequence[int], dict[str, Any]]] = deque()

        def read(group: Sequence[int], scored: dict[str, Any]) -> None:
            loss_BT, correct_BT = (np.asarray(scored[key]) for key in ("all_loss", "correct"))
            for row, index in enumerate(group):
                end = len(texts[index]) - 1
                said = slice(end - len(requests[index][2]), end)
                logprob = -float(loss_BT[row, said].sum(dtype=np.float64))
                found[index] = logprob, bool(correct_BT[row, said].all())
            bar.update(len(group))

        with _bar("scoring", len(texts), disable_tqdm) as bar:
            # As many tokens at once whatever their width: more of shorter texts.
            for width, rows, group in _groups(
                map(len, texts), self.network.batch_size, self.max_length, self.max_length
            ):
                self._look()
                tokens = np.zeros((rows, width + 1), np.uint32)
                for row, index in zip(tokens, group, strict=False):
                    row[: len(texts[index])] = texts[index]  # what follows a text it does not see
                scored = self.network.eval({"obs": tokens[:, :-1], "target": tokens[:, 1:]})
                pending.append((group, scored))
                if len(pending) > IN_FLIGHT:
                    read(*pending.popleft())
            for each in pending:
                read(*each)
        return [found[index] for index in range(len(texts))]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Each context's continuation, up to the first of its task's stop sequences."""
        asked = [_Generation(request.args[1]) for request in requests]
        end = self.tokenizer.decode([self.eot_token_id])
        prompts = [
            self._prompt(request.args[0], wanted.length)
            for request, wanted in zip(requests, asked, strict=True)
        ]
        answers: dict[int, str] = {}
        with _bar("generating", len(asked), disable_tqdm) as bar:
            for _, _, group in _groups(map(len, prompts), self.network.batch_size, self.max_length):
                chosen = [prompts[index] for index in group], [asked[index] for index in group]
                # Each has a seed of its own: some tasks ask for several answers to one prompt.
                given = (*chosen, group, end)
                try:
                    texts = self._continued(*given)
                except HostError:  # a lasting cluster has new hosts; of another the next call fails
                    texts = self._continued(*given)
                answers |= zip(group, texts, strict=True)
                bar.update(len(group))
        return [answers[index] for index in range(len(asked))]

    def _prompt(self, context: str, length: int) -> np.ndarray:
        """A context's last tokens that leave room for an answer, and one token at least."""
        room = self.max_length - length
        if room < 1:
            raise InputError(
                f"answers of {length} tokens are asked for, but the model's seq is "
                f"{self.max_length}; set max_gen_toks lower in the task's generation_kwargs"
            )
        return np.array(self.tok_encode(context)[-room:] or [self.prefix_token_id])

    def _look(self) -> None:
        if self.stopped():
            raise StoppedAskingError

    def _continued(
        self,
        prompts: Sequence[np.ndarray],
        asked: Sequence["_Generation"],
        seeds: Sequence[int],
        end: str,
    ) -> list[str]:
        """The answers to one batch of prompts, which ends when all of them have."""
        batch = self.network.batch(self.network.batch_size)
        lengths = np.array([each.length for each in asked])
        options = [each.options(seed) for each, seed in zip(asked, seeds, strict=True)]
        settings = SamplingOptions.stacked(options)
        # All rows at once: those of a mesh's replicas are filled alike.
        first = batch.insert(range(len(prompts)), prompts, lengths, settings)
        tokens = [[int(token)] for token in first.token]
        while True:
            self._look()
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


class Rehearsal(NetworkLM):
    """Takes questions as a model of this config will be asked them, and answers none."""

    def __init__(self, config: Config, tokenizer: Any):
        nobody: Any = SimpleNamespace(config=config)
        super().__init__(nobody, tokenizer)

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        for _, context, said in requests:
            _checked(context, said, self.max_length)
        return [(0.0, False)] * len(requests)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        for request in requests:
            self._prompt(request.args[0], _Generation(request.args[1]).length)
        return [""] * len(requests)


class _Generation:
    """How a task wants its answers, from its `generation_kwargs`; greedy unless it samples."""

    def __init__(self, options: dict[str, Any]):
        known = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}
        if unknown := set(options) - known:
            raise InputError(
                f"generation_kwargs: {min(unknown)} is not known here; use "
                f"{', '.join(sorted(known))}"
            )
        until = options.get("until") or []
        self.until = [until] if isinstance(until, str) else list(until)
        self.length = int(options.get("max_gen_toks", MOST_TOKENS))
        temperature = float(options.get("temperature") or 0)
        sampled = options.get("do_sample", temperature > 0)
        temp = (temperature or 1.0) if sampled else 0.0
        top_p, top_k = float(options.get("top_p", 1)), int(options.get("top_k", 0))
        self._drawn = SamplingOptions(top_p, top_k, temp)

    def options(self, seed: int) -> SamplingOptions:
        """How the answer with that seed is drawn."""
        return dataclasses.replace(self._drawn, seed=seed)

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
            f"a continuation has {len(said)} tokens, expected 1 to the model's seq {longest}"
        )
    return (context + said)[-(longest + 1) :]


def _bar(what: str, total: int, disable: bool) -> Any:
    return tqdm(total=total, desc=what, unit="text", leave=False, disable=disable)


def _groups(
    lengths: Iterable[int], rows: int, longest: int, filled: int | None = None
) -> Iterator[tuple[int, int, Sequence[int]]]:
    """Batches of texts, the longest first: the width to pad them to, and that many rows.

    There are `rows` rows, or, of `filled` positions each, as many as have room in these.
    """
    known = list(lengths)
    order = sorted(range(len(known)), key=lambda index: -known[index])
    while order:
        width = bucket(known[order[0]] - 1, SMALLEST, longest)
        many = rows * max(1, (filled or 0) // width)
        yield width, many, order[:many]
        order = order[many:]
