"""Records of preferences: prompts with a chosen and a rejected answer, or with labelled answers.

A prompt and its answers are a group, whose texts are in the same record.  In `segment_ids`, the
texts of group n, from 0, have the numbers 3 n + 1 (chosen, or labelled as desirable), 3 n + 2
(rejected, or undesirable) and, with labels, 3 n + 3: the same prompt with the answer of another
row, from which KTO estimates a KL divergence.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.data.batches import GROUP
from mesh_transformer.data.chat import ANSWERS, Conversation
from mesh_transformer.data.completions import (
    TOKENIZER_BATCH,
    Encoder,
    Item,
    Pair,
    Segments,
    Text,
    fill_records,
    record,
)
from mesh_transformer.data.inputs import BadInputError
from mesh_transformer.data.tables import replace_surrogates
from mesh_transformer.util import join_keys

LABELS = {True: 0, False: 1, "true": 0, "false": 1, "True": 0, "False": 1}  # 1 is True


class Answers(NamedTuple):
    """A prompt with its answers, as strings or lists of messages.

    Attributes:
      where: the file and the line or row, for error messages.
      answers: the answers by their place in the group.
    """

    where: str
    prompt: Any
    answers: dict[int, Any]

    @classmethod
    def of_pair(cls, value: Any, where: str, names: tuple[str, str, str]) -> "Answers":
        """Return the answers in a row with the columns `names`: prompt, chosen and rejected.

        Answers that are conversations may begin with the prompt, whose column may then be missing.
        """
        row = value if isinstance(value, dict) else {}
        prompt, *answers = (row.get(name) for name in names)
        return cls(where, prompt, dict(enumerate(answers)))._checked(names, row)

    @classmethod
    def of_label(cls, value: Any, where: str, names: tuple[str, str, str]) -> "Answers":
        """Return the answer in a row with the columns `names`: prompt, completion and label."""
        row = value if isinstance(value, dict) else {}
        prompt, answer, label = (row.get(name) for name in names)
        if not isinstance(label, bool | int | float | str) or label not in LABELS:
            raise BadInputError(
                "no label",
                f"{where}: expected true or false in `{names[2]}`; found the keys {join_keys(row)}",
            )
        return cls(where, prompt, {LABELS[label]: answer})._checked(names[:2], row)

    def _checked(self, names: tuple[str, ...], row: dict[str, Any]) -> "Answers":
        answers = self.answers.values()
        lists = all(isinstance(answer, list) for answer in answers)
        if all(isinstance(answer, str | list) and answer for answer in answers) and (
            isinstance(self.prompt, str | list) or (self.prompt is None and lists)
        ):
            return self
        expected = " and ".join(f"`{name}`" for name in names)
        raise BadInputError(
            "no preference",
            f"{self.where}: expected {expected}, strings or lists of messages; only a prompt may "
            f"be empty; found the keys {join_keys(row)}",
        )

    def item(self, answer: Any) -> Item:
        """Return the prompt with an answer; of a conversation, only the last answer counts.

        Raises:
          BadInputError: if the messages are no conversation (see `Conversation.of`).
        """
        before = self.prompt or []
        if isinstance(answer, str) and isinstance(self.prompt, str):
            return Pair(self.where, *map(replace_surrogates, (self.prompt, answer)))
        if isinstance(answer, str):
            answer = [{"role": ANSWERS, "content": answer}]
        if isinstance(before, str):
            is_repeated = isinstance(answer[0], dict) and answer[0].get("role") != ANSWERS
            before = [] if is_repeated else [{"role": "user", "content": before}]
        conversation = Conversation.of([*before, *answer], self.where)
        *earlier, last = conversation.messages
        return conversation._replace(messages=[*({**m, "weight": 0} for m in earlier), last])


def encode(encoder: Encoder, rows: Iterable[Answers]) -> Iterator[list[Text]]:
    """Yield the texts of each prompt.  `encoder.bad` is called for those that cannot be used."""
    rows = iter(rows)
    while batch := list(islice(rows, TOKENIZER_BATCH)):
        groups: list[list[tuple[int, Item, Segments]]] = []
        for row, other in zip(batch, batch[-1:] + batch[:-1], strict=True):
            answers = row.answers
            if len(answers) == 1:
                answers = answers | {2: next(iter(other.answers.values()))}
            try:
                items = {place: row.item(answer) for place, answer in answers.items()}
                groups.append([(n, item, encoder.segments(item)) for n, item in items.items()])
            except BadInputError as error:
                encoder.bad(error)
        encoded = encoder.encoded([(item, texts) for group in groups for _, item, texts in group])
        for group in groups:
            texts = [replace(next(encoded)[1][0], place=place) for place, *_ in group]
            if sum(map(len, texts)) > encoder.seq and texts[-1].place == 2:
                texts.pop()  # one estimate less
            if (length := sum(map(len, texts))) <= encoder.seq:
                yield texts
                continue
            what = f"{length} tokens of a prompt with {len(texts)} answers"
            where = group[0][1].where
            limit = f"--seq {encoder.seq} has room for {encoder.seq} in total"
            encoder.bad(BadInputError("too long", f"{where}: {what}, {limit}"))


def pack_groups(
    groups: Iterable[list[Text]], end: int, seq: int, *, pack: bool
) -> Iterator[dict[str, np.ndarray]]:
    """Yield training records, with one group each or, if `pack` is true, as many as fit.

    Args:
      end: the id of the end-of-text token.
      seq: tokens per record.
    """
    for fitting in fill_records(groups, seq, seq // GROUP if pack else 1):
        numbers = [GROUP * n + 1 + text.place for n, group in enumerate(fitting) for text in group]
        yield record([text for group in fitting for text in group], end, seq, numbers)
