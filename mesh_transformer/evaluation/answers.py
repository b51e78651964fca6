"""A server's answers to a file of prompts, and their scores.

A row of prompts has `prompt`, a text, or `messages`, a conversation.  Each user message that no
answer follows is answered, one after the other.  A row of answers has the columns of the prompt's
row, and `completion` (the last answer), `finish_reason`, `row` (the number of the prompt's row) and
`sample`.  If it is a conversation, `messages` has the answers.  `completion-records` reads these
rows.
"""

import contextlib
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mesh_transformer.data.chat import ANSWERS
from mesh_transformer.data.prompts import prompt_of
from mesh_transformer.data.tables import all_rows
from mesh_transformer.evaluation.openai_client import Client
from mesh_transformer.evaluation.rewards import Rewards
from mesh_transformer.storage.journal import write_in_order
from mesh_transformer.util import InputError

# Those of an answer, which are added to the prompt's row.
COLUMNS = ("row", "sample", "completion", "finish_reason", "logprobs")
Table = Sequence[tuple[str, Any]]  # the location and the value of each row
RESAMPLES = 1000  # of the bootstrap
CHECK_SECONDS = 60.0  # limit of a call that checks an answer
# The question to a judge.  {prompt}, {first} and {second} are replaced.
JUDGE = """Compare two answers to the same request. Judge which one follows the request better, is \
more correct and more helpful. Neither length nor order should matter.

[Request]
{prompt}

[Answer A]
{first}

[Answer B]
{second}

Explain your judgement in a few sentences. Then end with exactly one of these lines:
[[A]] if answer A is better, [[B]] if answer B is better, [[C]] if they are equally good."""


def write(
    prompts: str | Table,
    path: str,
    client: Client,
    options: dict[str, Any],
    *,
    samples: int = 1,
    seed: int = 0,
    chat: bool = False,
    logprobs: bool = False,
    top_logprobs: int = 0,
    **more: Any,
) -> None:
    """Ask for answers, and write them in the order of the prompts; see `write_rows` for `more`.

    Args:
      prompts, path: see `write_rows`.
      options: keys of the requests, such as temperature and max_tokens.
      samples: number of answers per prompt, whose seeds are `seed`, `seed` + 1 and so on.
      chat: whether a `prompt` is a conversation of one message.
      logprobs: whether to ask for log-probabilities, too, those of the last answer.
      top_logprobs: if not 0, the number of most likely tokens per position whose log-probabilities
        to ask for, too.
    """
    logprobs = logprobs or bool(top_logprobs)

    def ask(where: str, row: Any, sample: int) -> dict[str, Any]:
        own = options | {"seed": seed + sample}
        messages: list[Any] = []
        text, choice, asked = None, {}, prompt_of(row, where)
        if isinstance(asked, str) and chat:
            asked = [_user(asked)]
        if not isinstance(asked, str):
            followed = [message["role"] == ANSWERS for message in asked[1:]]
            for message, has_answer in zip(asked, [*followed, False], strict=False):
                messages.append(message)
                if message["role"] == "user" and not has_answer:
                    more = {"logprobs": True} if logprobs else {}
                    more |= {"top_logprobs": top_logprobs} if top_logprobs else {}
                    text, choice = client.answer(where, own | more, messages=messages)
                    messages.append({"role": ANSWERS, "content": text})
        else:
            more = {"logprobs": max(top_logprobs, 1)} if logprobs else {}
            text, choice = client.answer(where, own | more, prompt=asked)
        if text is None:
            raise InputError(f"{where}: messages has no user message without an answer")
        answer = {"messages": messages} if messages else {}
        answer |= {"completion": text, "finish_reason": choice.get("finish_reason")}
        return answer | ({"logprobs": choice.get("logprobs")} if logprobs else {})

    settings = [options, seed, chat, logprobs, top_logprobs]
    write_rows(prompts, path, client, ask, COLUMNS, samples=samples, settings=settings, **more)


def write_rows(
    prompts: str | Table,
    path: str,
    client: Client,
    ask: Callable[[str, Any, int], dict[str, Any]],
    columns: Sequence[str],
    *,
    settings: Any,
    samples: int | None = None,
    in_flight: int = 8,
    keep_errors: bool = False,
    **more: Any,
) -> None:
    """Write the columns `ask(where, row, sample)` beside those of each row of a table.

    Args:
      prompts: the path of the table, or its rows; see `all_rows`.
      path: the path of the result; see `write_in_order`, also for `settings`, `in_flight` and
        `more`.
      ask: sends requests with `client`.
      columns: the names of all new columns.
      samples: the number of results per row, which have the columns `row` and `sample`; None for
        one without these columns.
      keep_errors: whether an InputError of a row is its result, the column `error`, instead of the
        end of the run.
    """
    names = {*columns, "error"} if keep_errors else {*columns}

    def result(item: tuple[int, int, str, Any]) -> dict[str, Any]:
        number, sample, where, row = item
        place = {} if samples is None else {"row": number, "sample": sample}
        try:
            answer = ask(where, row, sample)
            return row | place | answer
        except InputError as problem:
            if not keep_errors:
                raise
            error = getattr(problem, "error", {"message": str(problem)})
            own = row if isinstance(row, dict) else {}
            return own | dict.fromkeys(columns) | place | {"error": error}

    rows = all_rows(prompts) if isinstance(prompts, str) else prompts
    for where, row in rows:
        if taken := names.intersection(row if isinstance(row, dict) else ()):
            raise InputError(
                f"{where}: the answer would replace the column {min(taken)!r}; rename the column"
            )
    numbers = range(samples or 1)
    items = [(n, sample, where, row) for n, (where, row) in enumerate(rows) for sample in numbers]
    write_in_order(
        path,
        items,
        result,
        settings=[client.identity, settings],
        in_flight=in_flight,
        size=lambda item: _length(item[-1]),
        stop=client.stop,
        **more,
    )


def _length(row: Any) -> int:
    """Return the number of characters of a row's prompt, about."""
    row = row if isinstance(row, dict) else {}
    value = row.get("messages") or row.get("prompt") or ""
    return len(value if isinstance(value, str) else json.dumps(value, default=str))


def write_vectors(prompts: str | Table, path: str, client: Client, **more: Any) -> None:
    """Write the column `embedding` beside those of each row of prompts; see `write_rows`."""

    def ask(where: str, row: Any, _: int) -> dict[str, Any]:
        text = prompt_of(row, where)
        if not isinstance(text, str):
            raise InputError(f"{where}: expected `prompt`, a text, to embed; found messages")
        response = client.send("embeddings", {"model": client.model, "input": text}, where)
        return {"embedding": response["data"][0]["embedding"]}

    write_rows(prompts, path, client, ask, ("embedding",), settings="embeddings", **more)


def write_scores(
    prompts: str | Table,
    path: str,
    client: Client,
    encode: Callable[[str, bool], list[int]],
    **more: Any,
) -> None:
    """Write the log-probabilities of the completion in each row; see `write_rows`.

    The columns are `tokens`, `token_logprobs` and their sum, `logprob`.

    Args:
      encode: returns the token ids of a text; the second argument is whether it begins the text
        that the model reads.
    """

    def ask(where: str, row: Any, _: int) -> dict[str, Any]:
        prompt = prompt_of(row, where)
        if not isinstance(prompt, str) or not isinstance(row.get("completion"), str):
            raise InputError(f"{where}: expected the texts `prompt` and `completion`")
        first, last = encode(prompt, True), encode(row["completion"], False)
        body = {"prompt": first + last, "max_tokens": 0, "echo": True, "logprobs": 0}
        response = client.send("completions", {"model": client.model} | body, where)
        scored = response["choices"][0]["logprobs"]
        logprobs = scored["token_logprobs"][len(first) :]
        tokens = scored["tokens"][len(first) :]
        return {"tokens": tokens, "token_logprobs": logprobs, "logprob": math.fsum(logprobs)}

    columns = ("tokens", "token_logprobs", "logprob")
    write_rows(prompts, path, client, ask, columns, settings="scores", **more)


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def read_answers(path: str) -> list[dict[str, Any]]:
    """Return the rows of a file that `write` has written.

    Raises:
      InputError: if it has other rows.
    """
    rows = all_rows(path)
    for where, row in rows:
        known = row.keys() if isinstance(row, dict) else set()
        if not {"row", "completion"} <= known or not {"prompt", "messages"} & known:
            raise InputError(f"{where}: expected an answer that the command answers has written")
    return [row for _, row in rows]


def request_and_answer(row: dict[str, Any]) -> tuple[str, str]:
    """Return the prompt and the answer in a row, or all those of its conversation, as two texts."""
    if "messages" not in row:
        return row["prompt"], row["completion"] or ""
    parts: tuple[list[str], list[str]] = [], []
    for message in row["messages"]:
        parts[message["role"] == ANSWERS].append(message["content"])
    return "\n\n".join(parts[0]), "\n\n".join(parts[1])


def pass_at_k(count: int, passed: int, k: int) -> float:
    """Return the unbiased estimate that one of k answers passes (Chen et al. 2021, equation 1).

    Args:
      count, passed: numbers of all answers and of those that passed.
    """
    return 1 - math.comb(count - passed, k) / math.comb(count, k)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 percent interval of the mean of `values`, by a bootstrap with a fixed seed."""
    rng, array = np.random.default_rng(0), np.asarray(values, float)
    means = [array[rng.integers(0, len(array), len(array))].mean() for _ in range(RESAMPLES)]
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def mean_and_interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean of values of different prompts, and its interval."""
    return {"mean": float(np.mean(values)), "interval": interval(values), "prompts": len(values)}


def checked(place: str, rows: Sequence[dict[str, Any]]) -> list[float]:
    """Return the scores that a function of the prompt, its answer and the row gives to answers.

    A row with an error instead of an answer scores 0.

    Args:
      place: the function, as FILE.py:FUNCTION; see `Rewards`.

    Raises:
      InputError: if there is no such function, or a call of it fails.
    """
    workers = min(os.cpu_count() or 1, len(rows) or 1)
    asked = [row for row in rows if row["completion"] is not None]
    with contextlib.closing(Rewards(place, CHECK_SECONDS, workers, "--check")) as check:
        scores = iter(
            check([(request_and_answer(row)[0], row["completion"], row) for row in asked])
        )
    result = []
    for row in rows:
        score = 0.0 if row["completion"] is None else next(scores)
        if isinstance(score, str):
            raise InputError(
                f"--check {place}: answer {row['sample']} to row {row['row']}: {score}"
            )
        result.append(score)
    return result


def pass_rates(
    rows: Sequence[dict[str, Any]], scores: Sequence[float], ks: Sequence[int]
) -> dict[str, Any]:
    """Return the mean score and pass@k of answers, with intervals over prompts.

    Args:
      rows: rows of answers.
      scores: the score of each; an answer passes if it is at least 1.
      ks: the values of k.

    Raises:
      InputError: if a prompt has fewer than k answers.
    """
    by_prompt = defaultdict[Any, list[float]](list)
    for row, score in zip(rows, scores, strict=True):
        by_prompt[row["row"]].append(float(score))
    result = {"score": mean_and_interval([float(np.mean(own)) for own in by_prompt.values()])}
    for k in ks:
        if not 1 <= k <= (least := min(map(len, by_prompt.values()))):
            raise InputError(f"--k has {k}, expected 1 to {least}, the answers per prompt")
        rates = [pass_at_k(len(x), sum(y >= 1 for y in x), k) for x in by_prompt.values()]
        result[f"pass@{k}"] = mean_and_interval(rates)
    return result


def win_rate(
    answers: str,
    others: str,
    path: str,
    client: Client,
    options: dict[str, Any],
    template: str = JUDGE,
    *,
    in_flight: int = 8,
) -> dict[str, Any]:
    """Return how often a judge prefers the answers in one file to those in another.

    Each pair is judged in both orders.  It is won if the judgements are better on average, and tied
    if they contradict each other.

    Args:
      answers, others: the paths of answers to the same prompts, in the same order.
      path: the file of the judgements, as lines of JSON; see `write_in_order`.
      template: the question to the judge; see `JUDGE`.

    Raises:
      InputError: if the files have different prompts.
    """
    read = [read_answers(x) for x in (answers, others)]
    texts = [list(map(request_and_answer, rows)) for rows in read]
    prompts, theirs = ([prompt for prompt, _ in rows] for rows in texts)
    if prompts != theirs:
        raise InputError(f"{answers} and {others}: expected answers to the same prompts, in order")

    def ask(item: tuple[int, bool]) -> dict[str, Any]:
        number, swapped = item
        first, second = (rows[number][1] for rows in (texts[::-1] if swapped else texts))
        parts = {"{prompt}": prompts[number], "{first}": first, "{second}": second}
        question = re.sub("{prompt}|{first}|{second}", lambda match: parts[match[0]], template)
        where = f"judgement of row {number}"
        text, _ = client.answer(where, options, messages=[_user(question)])
        verdicts = re.findall(r"\[\[([ABC])\]\]", text)
        value = {"A": 1.0, "B": 0.0}.get(verdicts[-1], 0.5) if verdicts else None
        if swapped and value is not None:
            value = 1 - value
        return {"row": number, "swapped": swapped, "win": value, "judgement": text}

    items = [(n, swapped) for n in range(len(prompts)) for swapped in (False, True)]
    settings = [client.identity, options, template, texts]
    write_in_order(path, items, ask, settings=settings, in_flight=in_flight, stop=client.stop)
    wins = [row["win"] for _, row in all_rows(path)]
    values = [0.5 if win is None else win for win in wins]
    means = np.mean(np.reshape(values, (-1, 2)), axis=1).tolist()
    by_prompt = defaultdict[Any, list[float]](list)
    for row, mean in zip(read[0], means, strict=True):
        by_prompt[row["row"]].append(mean)
    return {
        "win rate": mean_and_interval([float(np.mean(own)) for own in by_prompt.values()]),
        "won": sum(x > 0.5 for x in means),
        "tied": sum(x == 0.5 for x in means),
        "lost": sum(x < 0.5 for x in means),
        "unclear judgements": sum(win is None for win in wins),
    }
