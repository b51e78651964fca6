"""Records of prompts with completions, and of conversations, with loss on the answers only."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.data.chat import ChatTemplate, Conversation, Segment
from mesh_transformer.data.documents import unknown_error
from mesh_transformer.data.inputs import BadInputError, BadInputHandler
from mesh_transformer.data.special_tokens import beginning, with_beginning
from mesh_transformer.data.tables import replace_surrogates
from mesh_transformer.data.teacher import TEACHER_KEYS, Alternatives, TeacherTokens
from mesh_transformer.data.tokenizer import Encoded, alphabet, encode_spans
from mesh_transformer.util import join_keys

TOKENIZER_BATCH = 1000  # pairs or conversations per call of the tokenizer, which uses all cores


class Pair(NamedTuple):
    """A prompt and its completion.

    Attributes:
      where: the file and the line or row of the pair, for error messages.
      logprobs: what a server sent with the completion; see `teacher`.
    """

    where: str
    prompt: str
    completion: str
    logprobs: Any = None

    @classmethod
    def of(cls, value: Any, where: str, prompt: str, completion: str) -> "Pair":
        """Return the pair in a row of a table.

        Args:
          value: a dict of columns, or the parsed JSON of a line.
          where: the file and the line or row, for error messages.
          prompt, completion: the names of the columns.

        Raises:
          BadInputError: if a string is missing or the completion is empty.
        """
        mapping = value if isinstance(value, dict) else {}
        names = (prompt, completion)
        texts = [mapping[name] for name in names if isinstance(mapping.get(name), str)]
        if len(texts) < 2 or not texts[1]:
            raise BadInputError(
                "no pair",
                f"{where}: expected strings `{prompt}` and `{completion}`; only `{prompt}` may be "
                f"empty; found the keys {join_keys(mapping)}",
            )
        return cls(where, *map(replace_surrogates, texts))

    def segments(self) -> list[Segment]:
        return [Segment(self.prompt, False), Segment(self.completion, True)]


Item = Pair | Conversation
Segments = list[list[Segment]]


@dataclasses.dataclass(frozen=True)
class Text:
    """A tokenised pair or conversation.

    Attributes:
      tokens: the tokens, the last of which ends the last answer.
      has_loss: for each token, whether it counts in the loss.
      place: its place in a group of preferences; see `preferences`.
      teacher: what a teacher says of each token; None if there is no teacher.
    """

    tokens: list[int]
    has_loss: list[bool]
    place: int = 0
    teacher: Alternatives | None = None

    def __len__(self) -> int:
        """Return the number of positions that the text takes in a record.

        The last token takes no position, because it is only a label and never an input.
        """
        return len(self.tokens) - 1


class Encoder:
    """Tokenises pairs and conversations.

    Args:
      seq: the maximum number of tokens of a text.
      bad: called for each text that cannot be tokenised, or is longer than `seq` and cannot be cut.
      template: the chat template; None for the default of `ChatTemplate`.
      teacher: adds a teacher's probabilities to the texts.

    Attributes:
      template: the chat template; None as long as it is not needed.
      cut: the number of conversations that were cut.
      parts: the number of parts that they were cut into.
      several: the number of conversations with several texts (see `ChatTemplate.texts`), uncut.
    """

    def __init__(
        self,
        tokenizer: Any,
        seq: int,
        bad: BadInputHandler,
        template: ChatTemplate | None = None,
        teacher: TeacherTokens | None = None,
    ):
        self.tokenizer, self.seq, self.bad, self.template = tokenizer, seq, bad, template
        self.teacher = teacher
        self.first = beginning(tokenizer)
        self.cut = self.parts = self.several = 0

    def texts(self, items: Iterable[Item]) -> Iterator[Text]:
        """Yield the text of each pair, and the texts of each conversation or of its parts."""
        items = iter(items)
        while batch := list(islice(items, TOKENIZER_BATCH)):
            for item, texts in self.encoded(self.usable(batch)):
                if max(map(len, texts)) <= self.seq:
                    self.several += len(texts) > 1
                    yield from texts
                elif isinstance(item, Conversation):
                    yield from self._parts(item)
                else:
                    completion = sum(texts[0].has_loss) - 1
                    prompt = len(texts[0]) - completion
                    length = f"{prompt} tokens of prompt and {completion} of completion"
                    limit = f"--seq {self.seq} has room for {self.seq} in total"
                    self.bad(BadInputError("too long", f"{item.where}: {length}, {limit}"))

    def _parts(self, conversation: Conversation) -> Iterator[Text]:
        """Yield the texts of the parts of a conversation that is too long for one record."""
        self.cut += 1
        try:
            for part in conversation.parts(self._length, self.seq, self.bad):
                self.parts += 1
                yield from self._texts(part)
        except BadInputError as error:  # the template refuses a part
            self.bad(error)

    def _length(self, conversation: Conversation) -> int:
        return max(map(len, self._texts(conversation)))

    def _texts(self, conversation: Conversation) -> list[Text]:
        ((_, texts),) = self.encoded([(conversation, self.segments(conversation))])
        return texts

    def usable(self, items: list[Item]) -> list[tuple[Item, Segments]]:
        """Return (item, the segments of its texts) for each item that can be tokenised."""
        usable = []
        for item in items:
            try:
                usable.append((item, self.segments(item)))
            except BadInputError as error:
                self.bad(error)
        return usable

    def encoded(self, items: list[tuple[Item, Segments]]) -> Iterator[tuple[Item, list[Text]]]:
        """Yield (item, its texts) for each item."""
        pieces = [
            piece for item, texts in items for text in texts for piece in self._pieces(item, text)
        ]
        strings = ["".join(segment.text for segment in piece) for piece in pieces]
        encoded = iter(encode_spans(self.tokenizer, strings))
        for item, texts in items:
            joined = [self._joined(item, self._pieces(item, text), encoded) for text in texts]
            if self.teacher is not None:
                try:
                    joined = [self._taught(item, text) for text in joined]
                except BadInputError as error:
                    self.bad(error)
                    continue
            yield item, joined

    def _taught(self, item: Item, text: Text) -> Text:
        """Return the text with a teacher's probabilities; see `TeacherTokens.alternatives`."""
        assert self.teacher is not None
        parts = text.tokens, text.has_loss, item.logprobs, item.where
        return dataclasses.replace(text, teacher=self.teacher.alternatives(*parts))

    def _pieces(self, item: Item, text: list[Segment]) -> Segments:
        """Return the parts of a text that are tokenised separately."""
        # The positions of tokens in a text are known only for tokenizers that are written in Rust.
        whole = isinstance(item, Conversation) and self.tokenizer.is_fast
        return [text] if whole else [[segment] for segment in text]

    def segments(self, item: Item) -> Segments:
        """Return the segments of an item's texts.

        Raises:
          BadInputError: if the chat template fails, or if the tokenizer lacks a character.
        """
        if isinstance(item, Conversation):
            self.template = self.template or ChatTemplate(self.tokenizer)
            texts = self.template.texts(item)
        else:
            texts = [item.segments()]
        if known := alphabet(self.tokenizer):
            text = "".join(segment.text for segments in texts for segment in segments)
            text = text.replace(self.tokenizer.eos_token, "")
            if error := unknown_error(item.where, text, known):
                raise error
        return texts

    def _joined(self, item: Item, pieces: Segments, encoded: Iterator[Encoded]) -> Text:
        """Return the text of pieces whose tokens `encoded` yields.

        The end-of-text token is added, unless the completion ends with it, or the chat template
        ends the last answer with it.
        """
        tokens: list[int] = []
        has_loss: list[bool] = []
        for piece, (ids, spans) in zip(pieces, encoded, strict=False):
            tokens += ids
            has_loss += _with_loss(piece, spans)
        end = self.tokenizer.eos_token_id
        if isinstance(item, Pair):  # a chat template has the special tokens before a text itself
            plain, tokens = tokens, with_beginning(self.first, tokens)
            has_loss = [False] * (len(tokens) - len(plain)) + has_loss
            is_ended = tokens[-1:] == [end]
        else:  # a template may add more after the token
            is_ended = self.tokenizer.eos_token in pieces[-1][-1].text
        if not is_ended:
            return Text([*tokens, end], [*has_loss, True])
        return Text(tokens, has_loss)


def _with_loss(segments: list[Segment], spans: list[tuple[int, int]]) -> list[bool]:
    """Return whether each token has a character of a segment with loss.

    Args:
      spans: the (start, end) of each token in the text of the segments.
    """
    sizes = [len(segment.text) for segment in segments]
    counts = np.repeat([segment.has_loss for segment in segments], sizes)
    before = np.concatenate([[0], np.cumsum(counts)])
    starts, ends = np.array(spans, int).reshape(-1, 2).T
    # A token may have no characters.  It is spaces that the tokenizer leaves out of spans, or one
    # that it adds at the beginning, which counts with the token after it.
    starts = np.where(starts == ends, np.minimum(starts, np.append(0, ends[:-1])), starts)
    ends = np.clip(ends, starts + 1, len(counts))
    return (before[ends] > before[starts]).tolist()


def pack_texts(
    texts: Iterable[Text], end: int, seq: int, *, pack: bool
) -> Iterator[dict[str, np.ndarray]]:
    """Yield training records of texts, each as a dict of features (see `record`).

    Each record holds one text or, if `pack` is true, as many consecutive texts as fit.  The texts
    are then segments 1, 2 and so on.

    Args:
      end: the id of the end-of-text token.
      seq: tokens per record.
    """
    for fitting in fill_records(([text] for text in texts), seq, seq if pack else 1):
        together = [text for (text,) in fitting]
        yield record(together, end, seq, range(1, len(together) + 1) if pack else None)


def fill_records(
    groups: Iterable[Sequence[Text]], seq: int, most: int
) -> Iterator[list[Sequence[Text]]]:
    """Yield lists of consecutive groups of texts, each as long as fits a record.

    Args:
      seq: tokens per record.
      most: the maximum number of groups per record.
    """
    waiting: list[Sequence[Text]] = []
    for group in groups:
        if waiting and (len(waiting) == most or sum(map(len, chain(*waiting, group))) > seq):
            yield waiting
            waiting = []
        waiting.append(group)
    if waiting:
        yield waiting


def record(
    texts: Sequence[Text], end: int, seq: int, numbers: Iterable[int] | None
) -> dict[str, np.ndarray]:
    """Return a record as a dict from each feature's name to an array of shape [seq].

    Each array holds the values of the first text, then those of the second, and so on, followed by
    padding.  With a teacher, `TEACHER_KEYS` have the alternatives of each label, [seq x K].

    Args:
      texts: the texts in the record; one if `numbers` is None.
      end: the id of the end-of-text token, which also serves as padding.
      numbers: the numbers of the texts in the feature `segment_ids`, in which the padding has 0;
        None for no such feature.
    """
    columns: dict[str, list[list[Any]]] = {
        "input_ids": [text.tokens[:-1] for text in texts],
        "labels": [text.tokens[1:] for text in texts],
        "input_mask": [text.has_loss[1:] for text in texts],
    }
    if numbers is not None:
        columns["segment_ids"] = [
            [number] * len(text) for number, text in zip(numbers, texts, strict=True)
        ]
    padding = dict.fromkeys(columns, 0) | {"input_ids": end, "labels": end}
    missing = seq - sum(map(len, texts))
    arrays = {
        name: np.array([*chain(*parts), *[padding[name]] * missing], int)
        for name, parts in columns.items()
    }
    if teachers := [text.teacher for text in texts if text.teacher is not None]:
        for name, parts, fill in zip(
            TEACHER_KEYS, zip(*teachers, strict=True), (0, -np.inf), strict=True
        ):
            whole = np.concatenate([part[1:] for part in parts])
            arrays[name] = np.pad(whole, ((0, missing), (0, 0)), constant_values=fill).ravel()
    return arrays
