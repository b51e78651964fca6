"""Questions about facts that are hidden in long texts, generated from a seed.

Needle in a haystack, and tasks like those of RULER (Hsieh et al. 2024, arXiv:2404.06654).  Each
question ends with the beginning of its answer, so that base models answer, too.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.data.special_tokens import prompt_tokens
from mesh_transformer.util import InputError

ANSWER_TOKENS = 32  # of a prompt's length, those that are left for the answer
NUMBERS = range(100, 1000)  # the values of keys and variables
_KEYS = """\
amber anchor apple arrow badger basil beacon beaver birch bishop bottle bronze butter camel candle
carpet castle cedar cherry clover cobalt coffee copper coral cotton cricket crystal dagger daisy
diamond dolphin dragon eagle ebony emerald engine falcon feather fennel ferry flint garlic garnet
ginger granite hammer harbor hazel helmet heron honey indigo ivory jacket jaguar jasmine jungle
ladder lemon lily lizard lotus magnet maple"""
_ADJECTIVES = "old quiet long green narrow warm empty bright early heavy distant simple"
_NOUNS = "road field house river teacher window village market garden letter bridge morning"
_VERBS = "crosses follows reaches leaves watches passes joins faces finds covers meets keeps"
KEYS = _KEYS.split()
SAMPLE = 64  # sentences or words of filler whose tokens are counted first
ESTIMATES = 4  # of how many of them fit


class Question(NamedTuple):
    """A question about a text.

    Attributes:
      facts: hidden sentences, each with its place in the text, from 0 to 1, in order.
      ending: what follows the text: the question and the beginning of its answer.
      expected: the right answer, as the set of its numbers or words.
      frequent: the most frequent words, if the text is a list of words and not of sentences.
    """

    facts: list[tuple[float, str]]
    ending: str
    expected: list[str]
    frequent: Sequence[str] = ()


class Prompt(NamedTuple):
    """A text and a question as token ids, and the right answer (see `Question`)."""

    tokens: list[int]
    expected: list[str]


def fact(key: str, number: Any) -> str:
    """Return a sentence that gives a key its number."""
    return f"The number of {key} is {number}."


def ending(question: str, answer: str) -> str:
    """Return a question and the beginning of its answer."""
    return f"\n\nQuestion: {question}\nAnswer: {answer}"


def number_of(key: str) -> str:
    """Return the question for the number of a key."""
    return ending(f"What is the number of {key}?", f"The number of {key} is")


def _single(rng: np.random.Generator, depth: float, others: int = 0) -> Question:
    """Return a question for a key whose fact is at `depth`, with other keys anywhere."""
    keys, numbers = drawn(rng, KEYS, others + 1), drawn(rng, NUMBERS, others + 1)
    facts = zip([depth, *rng.random(others)], map(fact, keys, numbers), strict=True)
    return Question(sorted(facts), number_of(keys[0]), numbers[:1])


def _keys(rng: np.random.Generator, depth: float) -> Question:
    return _single(rng, depth, others=7)


def _values(rng: np.random.Generator, depth: float) -> Question:
    """Return a question for the numbers of a key, one of them at `depth`, the others anywhere."""
    (key,), numbers = drawn(rng, KEYS, 1), drawn(rng, NUMBERS, 4)
    sentences = [f"One number of {key} is {number}." for number in numbers]
    facts = zip([depth, *rng.random(3)], sentences, strict=True)
    text = ending(f"What are the four numbers of {key}?", f"The four numbers of {key} are")
    return Question(sorted(facts), text, numbers)


def _variables(rng: np.random.Generator, depth: float) -> Question:
    """Return a question for X3 in X1 = 5, X2 = X1, X3 = X2, which begins at `depth`.

    Another chain of three variables begins anywhere.
    """
    names = [f"X{number}" for number in drawn(rng, range(1, 100), 6)]
    numbers, facts = drawn(rng, NUMBERS, 2), []
    for first, number, chain in zip(
        (depth, rng.random()), numbers, (names[:3], names[3:]), strict=True
    ):
        places = [first, *sorted(rng.uniform(first, 1, 2))]
        lines = [f"{x} = {y}." for x, y in zip(chain, [number, *chain], strict=False)]
        facts += zip(places, lines, strict=True)
    facts.sort(key=lambda item: item[0])  # keeps the order of a chain whose places are all 1
    text = ending(f"What is the value of {names[2]}?", f"The value of {names[2]} is")
    return Question(facts, text, numbers[:1])


def _words(rng: np.random.Generator, _: float) -> Question:
    """Return a question for the three most frequent words of a list."""
    words = drawn(rng, KEYS, 3)
    text = ending("Which three words are the most frequent?", "The three most frequent words are")
    return Question([], text, words, words)


TASKS: dict[str, Callable[[np.random.Generator, float], Question]] = {
    "single": _single,
    "keys": _keys,
    "values": _values,
    "variables": _variables,
    "words": _words,
}
WITHOUT_DEPTH = ("words",)


def drawn(rng: np.random.Generator, items: Sequence[Any], count: int) -> list[str]:
    """Return `count` different items, as texts."""
    return [str(items[at]) for at in rng.choice(len(items), count, replace=False)]


def filler(rng: np.random.Generator, count: int, frequent: Sequence[str] = ()) -> list[str]:
    """Return random sentences without numbers and keys or, given frequent words, a list of keys."""
    if frequent:
        others = [key for key in KEYS if key not in frequent]
        words: list[str] = []
        while len(words) < count:  # no other word is twice among 20, and so none is as frequent
            words += rng.permutation([*frequent, *frequent, *drawn(rng, others, 14)]).tolist()
        return words[:count]
    columns = [
        rng.choice(x.split(), count) for x in (_ADJECTIVES, _NOUNS, _VERBS, _ADJECTIVES, _NOUNS)
    ]
    return [f"The {a} {b} {c} the {d} {e}." for a, b, c, d, e in zip(*columns, strict=True)]


def prompt(tokenizer: Any, task: str, length: int, depth: float, seed: Sequence[int]) -> Prompt:
    """Return a question with as much filler as fits.

    Args:
      task: one of `TASKS`.
      length: number of tokens of the prompt and of `ANSWER_TOKENS` for the answer.
      depth: the place of the fact that is asked for, from 0, the beginning of the text, to 1.
      seed: non-negative integers.  The same arguments give the same prompt.

    Raises:
      InputError: if `length` is too short.
    """
    rng, room = np.random.default_rng(seed), length - ANSWER_TOKENS
    question = TASKS[task](rng, depth)
    units = filler(rng, max(room, SAMPLE), question.frequent)  # each has at least one token

    def tokens(count: int) -> list[int]:
        text = units[:count]
        for place, sentence in reversed(question.facts):
            text.insert(round(place * count), sentence)
        return prompt_tokens(tokenizer, " ".join(text) + question.ending)

    least = count = 40 if question.frequent else 1  # of fewer words, others may be as frequent
    result = tokens(count)
    if len(result) > room:
        raise InputError(
            f"--lengths has {length}, but the shortest prompt of {task} has {len(result)} tokens, "
            f"and its answer may have {ANSWER_TOKENS}; give greater lengths"
        )
    per_unit = (len(tokens(SAMPLE)) - len(result)) / (SAMPLE - count)
    for _ in range(ESTIMATES):  # each is closer, but units differ, and so no number is exact
        if not (more := int((room - len(result)) / per_unit)):
            break
        count = max(least, count + more)
        result = tokens(count)
    while len(result) > room:
        count -= 1
        result = tokens(count)
    return Prompt(result, question.expected)


def is_right(answer: str, expected: Sequence[str]) -> bool:
    """Return whether an answer's first numbers and keys are those expected, in any order."""
    words = re.findall(r"\w+", answer.lower())
    values = [word for word in words if word.isdecimal() or word in KEYS]
    return sorted(values[: len(expected)]) == sorted(expected)
