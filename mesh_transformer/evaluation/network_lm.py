"""lm-eval's model interface for a network: tokenization, batching, scoring and generation."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from tqdm import tqdm

from mesh_transformer.config import Config
from mesh_transformer.data.chat import ChatTemplate
from mesh_transformer.data.special_tokens import (
    before_end,
    beginning,
    end_tokens,
    special_tokens,
    start_token,
    with_beginning,
)
from mesh_transformer.generation.finite import check_finite
from mesh_transformer.generation.sampling_settings import (
    EVALUATION_DEFAULTS,
    RANGES,
    Range,
    SamplingOptions,
)
from mesh_transformer.generation.stream import stream_tokens
from mesh_transformer.network import Network
from mesh_transformer.util import HostError, InputError, InterruptedWorkError, brief, bucket

MIN_WIDTH = 16  # texts are padded to this times a power of two, to limit compilations
MOST_TOKENS = 256  # default maximum per generated answer (a task's max_gen_toks)
# The keys of a task's `generation_kwargs`.  lm-eval reads the first length that there is.
LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SHARE = Range(np.float32, 1.0, 0.0, 1.0)
SAMPLING_KEYS = {"top_p": SHARE, "typical_p": SHARE}
SAMPLING_KEYS |= {key: RANGES[key] for key in ("top_k", "min_p", "repetition_penalty")}
NUMBERS = SAMPLING_KEYS | {"temperature": RANGES["temp"]}
NUMBERS |= dict.fromkeys(LENGTH_KEYS, Range(np.int32, MOST_TOKENS, 1, 2**31 - 1))
NEUTRAL = {"num_beams": 1, "num_return_sequences": 1}  # values that change nothing
BEAM_KEYS = ("early_stopping", "length_penalty")  # without an effect on a single beam
STEPS = 16  # tokens generated between checks for stop sequences
IN_FLIGHT = 2  # batches dispatched before the scores of the oldest are read

Encoded = tuple[Any, list[int], list[int]]  # lm-eval's (texts, context tokens, continuation tokens)


class NetworkLM(TemplateLM):
    """lm-eval's model interface, implemented by a `Network`.

    Args:
      tokenizer: the Hugging Face tokenizer of the model.
      stopped: called between batches; if it returns True, InterruptedWorkError is raised.
      share: whether to compute what many texts begin with once.  This needs the weights converted
        for generation, beside the parameters.
      template: the chat template for questions; None for none.
    """

    def __init__(
        self,
        network: Network,
        tokenizer: Any,
        stopped: Callable[[], bool] = lambda: False,
        *,
        share: bool = True,
        template: ChatTemplate | None = None,
    ):
        super().__init__()
        self.share = share
        self.template = template
        self.network = network
        self.tokenizer = tokenizer
        self.stopped = stopped
        self.max_length = network.config.seq
        self._first = beginning(tokenizer)
        self._special = special_tokens(tokenizer)
        self._ends = end_tokens(tokenizer, network.config)
        self._end_text = tokenizer.eos_token or ""

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return start_token(self.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.template and self.template.template

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        assert self.template is not None
        unfinished = not add_generation_prompt  # the last message is the beginning of the answer
        return self.template.prompt(chat_history, add=add_generation_prompt, unfinished=unfinished)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        tokens = self.tokenizer(string, add_special_tokens=False)["input_ids"]
        return tokens if add_special_tokens is False else with_beginning(self._first, tokens)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the total logprob of each text, in nats.

        Long texts are scored in windows of at most the model's `seq` tokens.
        """
        windows: list[Encoded] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            parts = utils.get_rolling_token_windows(
                tokens, self.prefix_token_id, self.max_length, 1
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
        """Return each continuation's logprob in nats, and whether greedy decoding produces it.

        Args:
          requests: for each continuation, a tuple (unused, context tokens, continuation tokens).
        """
        texts = [
            _joined(context, continuation, self.max_length) for _, context, continuation in requests
        ]
        sizes = [len(continuation) for _, _, continuation in requests]
        # At least one token before the continuation, which its first logprob needs.
        free = [len(text) - size - 1 for text, size in zip(texts, sizes, strict=True)]
        network = self.network
        shared = []
        if self.share:
            overhead = network.batch_size * self.max_length
            shared = [
                (length, group)
                for length, group in common_beginnings(texts, free, network.dp, overhead)
                if 2 * length * len(group) >= sum(len(texts[index]) for index in group)
            ]
        alone = sorted(set(range(len(texts))) - {i for _, group in shared for i in group})
        results: dict[int, tuple[float, bool]] = {}
        with _bar("scoring", len(texts), disable_tqdm) as bar:
            for length, group in shared:
                self._score_after(length, group, texts, sizes, results, bar)
            self._score_alone(alone, texts, sizes, results, bar)
        return [results[index] for index in range(len(texts))]

    def _score_alone(
        self,
        indices: Sequence[int],
        texts: Sequence[list[int]],
        sizes: Sequence[int],
        results: dict[int, tuple[float, bool]],
        bar: Any,
    ) -> None:
        """Score the continuations of the texts `indices`, and add them to `results`.

        Args:
          sizes: number of tokens of each continuation.
          bar: the progress bar.
        """
        pending: deque[tuple[Sequence[int], dict[str, Any]]] = deque()

        def read(group: Sequence[int], scored: dict[str, Any]) -> None:
            loss_BT, correct_BT = (np.asarray(scored[key]) for key in ("all_loss", "correct"))
            check_finite((loss_BT,), "losses")
            for row, index in enumerate(group):
                end = len(texts[index]) - 1
                span = slice(end - sizes[index], end)
                logprob = -float(loss_BT[row, span].sum(dtype=np.float64))
                results[index] = logprob, bool(correct_BT[row, span].all())
            bar.update(len(group))

        # All batches have about the same number of tokens: batches of shorter texts have more rows.
        lengths = [len(texts[index]) for index in indices]
        for width, rows, chosen in _groups(
            lengths, self.network.batch_size, self.max_length, self.max_length
        ):
            self._check_stopped()
            group = [indices[at] for at in chosen]
            width = max(width, self.network.config.position_multiple)
            tokens = _padded([texts[index] for index in group], rows, width + 1)
            scored = self._scored(tokens)
            pending.append((group, scored))
            if len(pending) > IN_FLIGHT:
                read(*pending.popleft())
        for group, scored in pending:
            read(group, scored)

    def _scored(self, tokens: np.ndarray) -> dict[str, Any]:
        """Return the losses of all tokens but the first, and whether each is the most likely one.

        If the config quantizes weights, these are the results of the quantized weights.
        """
        network = self.network
        if network.config.weight_bits is None:
            return network.eval({"obs": tokens[:, :-1], "target": tokens[:, 1:]})
        try:
            chosen = network.score(tokens, 1)
        except HostError:
            network.batch(network.batch_size)  # a RestartingCluster restarts its hosts
            chosen = network.score(tokens, 1)
        return {"all_loss": -chosen.logprob, "correct": chosen.top_token[..., 0] == chosen.token}

    def _score_after(
        self,
        length: int,
        indices: Sequence[int],
        texts: Sequence[list[int]],
        sizes: Sequence[int],
        results: dict[int, tuple[float, bool]],
        bar: Any,
    ) -> None:
        """Like `_score_alone`, for texts whose first `length` tokens are equal.

        The keys and values of these tokens are computed once.
        """
        beginning = np.array(texts[indices[0]][:length])
        rests = [texts[index][length:] for index in indices]
        rows = self.network.batch_size
        # The scores of attention take as much memory per token as those of a whole text.
        for width, most, chosen in _groups(
            map(len, rests), rows, self.max_length, self.max_length // 4
        ):
            self._check_stopped()
            rows = min(bucket(len(chosen), 1), most)
            width = min(width, self.max_length - length)
            tokens = _padded([rests[at] for at in chosen], rows, width + 1)
            try:
                scored = self.network.score(tokens, 1, beginning)
            except HostError:  # of a RestartingCluster, which restarts its hosts in `eval`
                rest = [index for index in indices if index not in results]
                self._score_alone(rest, texts, sizes, results, bar)
                return
            for row, at in enumerate(chosen):
                end = len(rests[at]) - 1
                span = slice(end - sizes[indices[at]], end)
                logprob = float(scored.logprob[row, span].sum(dtype=np.float64))
                greedy = scored.top_token[row, span, 0] == scored.token[row, span]
                results[indices[at]] = logprob, bool(greedy.all())
            bar.update(len(chosen))

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate an answer to each request, up to the first stop sequence of its task.

        Tokens that end answers, and a stop sequence that is a special token's name, end it, too.
        """
        generations = [_Generation(request.args[1]) for request in requests]
        prompts = [
            self._prompt(request.args[0], generation.length)
            for request, generation in zip(requests, generations, strict=True)
        ]
        answers: dict[int, str] = {}
        with _bar("generating", len(generations), disable_tqdm) as bar:
            for _, _, group in _groups(map(len, prompts), self.network.batch_size, self.max_length):
                chosen = [generations[index] for index in group]
                # Each answer has its own seed (its index), because some tasks ask for several
                # answers to one prompt.
                arguments = [prompts[index] for index in group], chosen, group
                try:
                    texts = self._generate_batch(*arguments)
                except HostError:  # a RestartingCluster restarts its hosts; others fail again
                    texts = self._generate_batch(*arguments)
                answers |= zip(group, texts, strict=True)
                bar.update(len(group))
        return [answers[index] for index in range(len(generations))]

    def _prompt(self, context: str, length: int) -> np.ndarray:
        """Tokenize a context, dropping its first tokens if they would leave no room for an answer.

        If the context is empty, the token that begins a text is returned.

        Args:
          length: maximum number of tokens in the answer.
        """
        room = self.max_length - length
        if room < 1:
            raise InputError(
                f"answers of {length} tokens leave no room for a prompt in the model's seq "
                f"{self.max_length}; lower max_gen_toks in the task's generation_kwargs"
            )
        return np.array(self.tok_encode(context)[-room:] or [self.prefix_token_id])

    def _check_stopped(self) -> None:
        if self.stopped():
            raise InterruptedWorkError

    def _generate_batch(
        self,
        prompts: Sequence[np.ndarray],
        generations: Sequence["_Generation"],
        seeds: Sequence[int],
    ) -> list[str]:
        """Generate the answers to a batch of prompts, and return their texts.

        Args:
          prompts: the token ids of each prompt.
          generations: the generation settings for each prompt.
          seeds: the random seed for each prompt.
        """
        batch = self.network.batch(self.network.batch_size)
        lengths = np.array([generation.length for generation in generations])
        options = [
            generation.options(seed) for generation, seed in zip(generations, seeds, strict=True)
        ]
        settings = SamplingOptions.stacked(options)
        tokens: list[list[int]] = [[] for _ in prompts]
        cut: list[str | None] = []
        # Insert all rows at once, which fills the replicas of a mesh equally.
        for new in stream_tokens(batch, prompts, lengths, settings, most=STEPS):
            for row, more, length in zip(tokens, new, lengths, strict=True):
                row += more[: length - len(row)].tolist()
            self._check_stopped()
            cut = [
                self._answer(generation, row)
                for generation, row in zip(generations, tokens, strict=True)
            ]
            if None not in cut:
                break
        return [text for text in cut if text is not None]

    def _answer(self, generation: "_Generation", tokens: list[int]) -> str | None:
        """Return the final text of an answer, or None if more tokens are needed.

        Args:
          tokens: the answer's tokens so far.
        """
        names = {number for number, name in self._special.items() if name in generation.until}
        ends = self._ends | names
        kept = before_end(tokens, ends)
        complete = len(kept) < len(tokens) or len(tokens) >= generation.length
        text = self.tokenizer.decode(kept, skip_special_tokens=True)
        return generation.cut(text, self._end_text, complete)


class DryRunLM(NetworkLM):
    """Stand-in for `NetworkLM` that checks lm-eval's requests without running a network.

    Raises InputError if a model with this config cannot answer a request.  Otherwise it returns
    placeholder answers.
    """

    def __init__(self, config: Config, tokenizer: Any, template: ChatTemplate | None = None):
        network: Any = SimpleNamespace(config=config)
        super().__init__(network, tokenizer, template=template)

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        for _, context, continuation in requests:
            _joined(context, continuation, self.max_length)
        return [(0.0, False)] * len(requests)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        for request in requests:
            self._prompt(request.args[0], _Generation(request.args[1]).length)
        return [""] * len(requests)


def _expected(key: str, value: Any) -> str:
    """Describe the values of a key of `generation_kwargs`, or return "" if this is one of them."""
    if key in NUMBERS:
        allowed = NUMBERS[key]
        return "" if np.ndim(value) == 0 and allowed.numbers(value) is not None else str(allowed)
    if key == "do_sample":
        return "" if isinstance(value, bool) else "true or false"
    if key == "until":
        texts = value if isinstance(value, list | tuple) else [value]
        is_text = all(isinstance(text, str) for text in texts)
        return "" if is_text else "a text, or a list of texts"
    return ""


class _Generation:
    """Generation settings from a task's `generation_kwargs`.

    Decoding is greedy unless the task sets `do_sample` or a `temperature` above 0.
    """

    def __init__(self, options: dict[str, Any]):
        options = {key: value for key, value in options.items() if value is not None}
        known = {"until", "do_sample", *NUMBERS}
        for key, value in options.items():
            if expected := _expected(key, value):
                actual = brief(repr(value))
                raise InputError(f"generation_kwargs: {key} is {actual}, expected {expected}")
            if key not in known | set(BEAM_KEYS) and NEUTRAL.get(key, ()) != value:
                raise InputError(
                    f"generation_kwargs: {key} is not supported; the supported keys are "
                    f"{', '.join(sorted(known))}"
                )
        until = options.get("until", [])
        self.until = [until] if isinstance(until, str) else list(until)
        self.length = next((options[key] for key in LENGTH_KEYS if key in options), MOST_TOKENS)
        temperature = options.get("temperature", 0)
        sampled = options.get("do_sample", temperature > 0)
        temp = (temperature or 1.0) if sampled else EVALUATION_DEFAULTS.temp
        settings = {key: options[key] for key in SAMPLING_KEYS if key in options}
        self._sampling = dataclasses.replace(EVALUATION_DEFAULTS, temp=temp, **settings)

    def options(self, seed: int) -> SamplingOptions:
        """Return the task's sampling settings, with the given random seed."""
        return dataclasses.replace(self._sampling, seed=seed)

    def cut(self, text: str, end: str, complete: bool) -> str | None:
        """Return the final text of an answer, or None if more tokens are needed.

        The final text is `text` up to its first stop sequence.  If `text` has no stop sequence but
        is `complete`, the final text is all of it.

        Args:
          text: the answer so far.
          end: the end-of-text token, as text; it also counts as a stop sequence.
          complete: whether the answer has reached its maximum length.
        """
        ends = [at for stop in (*self.until, end) if stop and (at := text.find(stop)) >= 0]
        if ends:
            return text[: min(ends)]
        return text if complete else None


def _joined(context: list[int], continuation: list[int], longest: int) -> list[int]:
    """Append a continuation to its context, and return the last `longest` + 1 tokens.

    Raises:
      InputError: if the continuation is empty or has more than `longest` tokens.
    """
    if not 0 < len(continuation) <= longest:
        raise InputError(
            f"a continuation has {len(continuation)} tokens, expected 1 to {longest} (the model's "
            "seq); leave out the task that it belongs to"
        )
    return (context + continuation)[-(longest + 1) :]


def _padded(texts: Sequence[list[int]], rows: int, width: int) -> np.ndarray:
    """Return texts as token ids [rows, width], left-aligned.

    Attention is causal, so the padding after a text does not affect it.
    """
    tokens = np.zeros((rows, width), np.uint32)
    for row, text in zip(tokens, texts, strict=False):
        row[: len(text)] = text
    return tokens


def common_beginnings(
    texts: Sequence[list[int]], most: Sequence[int], copies: int, overhead: int
) -> list[tuple[int, list[int]]]:
    """Divide texts into groups that begin with the same tokens, to compute these once per group.

    The groups are chosen so that they save as many tokens as possible.  Texts that are in no group
    have too little in common with others.

    Args:
      texts: token ids.
      most: for each text, how many of its first tokens may be computed apart from the rest.
      copies: how many times a beginning is computed.
      overhead: number of tokens that a group must save beyond that.

    Returns:
      For each group: the number of equal tokens, and the indices of its texts.
    """
    order = sorted(range(len(texts)), key=texts.__getitem__)
    # Neighbours in this order are merged into groups, those with the longest common beginning
    # first.  A group is an interval, stored at its first and last place.
    groups = [_Group(at, at + 1, most[index], 0, None) for at, index in enumerate(order)]
    common = [_equal(texts[one], texts[other]) for one, other in itertools.pairwise(order)]
    for at in sorted(range(len(common)), key=lambda at: -common[at]):
        left, right = groups[at], groups[at + 1]
        length = min(common[at], left.length, right.length)
        together = (right.end - left.begin - copies) * length - overhead
        apart = left.saved + right.saved
        whole = together > apart
        merged = _Group(
            left.begin,
            right.end,
            length,
            max(together, apart),
            None if whole else (left, right),
        )
        groups[merged.begin] = groups[merged.end - 1] = merged
    result, rest = [], [groups[0]] if order else []
    while rest:
        group = rest.pop()
        if group.parts is not None:
            rest += group.parts
        elif group.saved > 0:
            result.append((group.length, order[group.begin : group.end]))
    return result


class _Group(NamedTuple):
    """Texts that are next to each other in lexicographic order.

    Attributes:
      length: number of tokens with which all of them begin.
      saved: number of tokens saved by computing beginnings once.
      parts: the two parts whose beginnings are computed apart; None if there is only one beginning.
    """

    begin: int
    end: int
    length: int
    saved: int
    parts: "tuple[_Group, _Group] | None"


def _equal(one: list[int], other: list[int]) -> int:
    """Return the number of tokens with which both texts begin."""
    pairs = zip(one, other, strict=False)
    different = (at for at, (a, b) in enumerate(pairs) if a != b)
    return next(different, min(len(one), len(other)))


def _bar(description: str, total: int, disable: bool) -> Any:
    return tqdm(total=total, desc=description, unit="text", leave=False, disable=disable)


def _groups(
    lengths: Iterable[int], rows: int, longest: int, row_width: int | None = None
) -> Iterator[tuple[int, int, Sequence[int]]]:
    """Divide texts into batches, the longest texts first.

    Args:
      lengths: number of tokens in each text.
      rows: number of rows in a batch; if `row_width` is given, the minimum number.
      longest: maximum number of tokens that a row is padded to.
      row_width: if given, batches of shorter texts get more rows, so that each batch has about
        `rows * row_width` tokens.

    Yields:
      For each batch: the number of tokens per padded row, the number of rows, and the indices of
      the batch's texts.
    """
    sizes = list(lengths)
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    while order:
        width = bucket(sizes[order[0]] - 1, MIN_WIDTH, longest)
        count = rows * max(1, (row_width or 0) // width)
        yield width, count, order[:count]
        order = order[count:]
