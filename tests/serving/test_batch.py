"""Files of requests that are answered without a server: formats, errors, kills and resumption."""

import contextlib
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from mesh_transformer.cli import batch, completion_records
from mesh_transformer.data.chat import read_template
from mesh_transformer.data.tables import all_rows
from mesh_transformer.evaluation import answers
from mesh_transformer.evaluation.openai_client import Client, LocalClient
from mesh_transformer.serving import local
from mesh_transformer.serving.engine import Engine
from mesh_transformer.serving.local import LocalRequests, check_lines, running, write_lines
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.serving.service import Service
from mesh_transformer.util import InputError, StoppedError
from tests.long import batch_kills
from tests.support.fake_network import FakeNetwork
from tests.support.live_server import Live

pytest_plugins = ["tests.support.live_fixtures"]
OPTIONS: dict[str, Any] = {"template": "plain", "pooling": "last", "network": {"window": 512}}


@pytest.fixture(scope="module")
def live(serve: Any) -> Live:
    return serve(**OPTIONS)


@pytest.fixture(scope="module")
def start(tokenizer: Any, live: Live) -> Iterator[Callable[..., tuple[Service, LocalRequests]]]:
    """Return a function that starts a service like that of `Live`, without HTTP."""
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> tuple[Service, LocalRequests]:
            network = FakeNetwork(live.network.script, window=512)
            metrics = Metrics(8)
            engine = Engine(network, metrics, pooling="last", **{"rows": 8} | options)
            template = read_template(tokenizer, "plain")
            service = Service({"fake": 0}, engine, tokenizer, metrics, 500, template)
            return service, stack.enter_context(running(service))

        yield start


@pytest.fixture(scope="module")
def requests(start: Any) -> LocalRequests:
    return start()[1]


def line(number: int, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": f"id {number}", "method": "POST", "url": url, "body": body}


def some_lines(count: int) -> list[Any]:
    """Return lines of every endpoint, with prompts and answers of random lengths."""
    rng, lines = random.Random(count), list[Any]()
    for number in range(count):
        text = " ".join(rng.choices(["tree", "stone", "bird"], k=rng.randint(1, 60)))
        length = {"max_tokens": rng.randint(1, 30), "seed": rng.randint(0, 9)}
        match number % 4:
            case 0:
                lines.append(line(number, prompt=text, logprobs=2, n=rng.randint(1, 3), **length))
            case 1:
                messages = [{"role": "user", "content": text}]
                lines.append(line(number, "/v1/chat/completions", messages=messages, **length))
            case 2:
                lines.append(line(number, "/v1/embeddings", input=[text, "b"]))
            case _:
                lines.append(line(number, prompt=text, stop=["time"], echo=True, **length))
    return lines


def located(rows: list[Any]) -> list[tuple[str, Any]]:
    return [(f"line {number}", row) for number, row in enumerate(rows, 1)]


def read(path: Path) -> list[Any]:
    return [row for _, row in all_rows(str(path))]


def write(path: Path, rows: list[Any], requests: Any, **options: Any) -> list[Any]:
    defaults = {"settings": "s", "in_flight": 16}
    write_lines(located(rows), str(path), requests, 3, **defaults | options)
    return read(path)


def test_results_are_those_of_the_server_in_order(
    requests: LocalRequests, live: Live, tmp_path: Path
) -> None:
    lines = some_lines(60)
    results = write(tmp_path / "a.jsonl", lines, requests)
    assert [row["custom_id"] for row in results] == [row["custom_id"] for row in lines]
    assert len({row["id"] for row in results}) == 60
    for request, row in zip(lines, results, strict=True):
        assert (row["response"]["status_code"], row["error"]) == (200, None)
        expected = live.http.post(request["url"], json=request["body"]).json()
        actual = row["response"]["body"]
        expected["usage"].pop("prompt_tokens_details", None)
        if "created" in actual:
            prefix = expected.pop("id").partition("-")[0]
            assert actual.pop("id").startswith(f"{prefix}-")
            assert (actual.pop("created"), expected.pop("created") > 0) == (0, True)
        assert actual == expected


def test_bad_lines_are_results_with_the_servers_errors(
    requests: LocalRequests, live: Live, tmp_path: Path
) -> None:
    refused = [
        line(0, prompt="tree " * 600),
        line(1, prompt="tree", max_tokens="many"),
        line(2, "/v1/chat/completions", messages=[]),
        line(3, "/v1/embeddings", input=3),
        line(4, prompt="tree", model="other"),
    ]
    malformed = [
        (line(5, "/v1/responses", input="tree"), "url"),
        (line(6, "/complete", context="tree"), "url"),
        (line(7, prompt="tree", stream=True), "stream"),
        (line(8) | {"body": "tree"}, "body"),
        (line(9, prompt="tree") | {"method": "GET"}, "method"),
        ({"url": "/v1/completions", "body": {"prompt": "tree"}}, "custom_id"),
        (None, "custom_id"),
        (line(10) | {"url": ["x"]}, "url"),
    ]
    rows = [*refused, *(row for row, _ in malformed), line(11, prompt="tree")]
    results = [row["response"] for row in write(tmp_path / "a.jsonl", rows, requests)]
    for request, result in zip(refused, results, strict=False):
        response = live.http.post(request["url"], json=request["body"])
        assert result["status_code"] == response.status_code >= 400
        assert result["body"] == response.json()
    for (_, param), result in zip(malformed, results[len(refused) :], strict=False):
        assert (result["status_code"], result["body"]["error"]["param"]) == (400, param)
    assert results[-1]["status_code"] == 200
    with pytest.raises(InputError, match="line 3: the custom_id 'id 0' is also that of line 1"):
        check_lines(located([refused[0], refused[1], line(0)]))


def test_seeds_follow_from_the_seed_and_the_line(requests: LocalRequests, tmp_path: Path) -> None:
    rows = [line(n, prompt="tree", max_tokens=9) for n in range(6)]
    one = write(tmp_path / "1.jsonl", rows, requests)
    assert write(tmp_path / "2.jsonl", rows, requests) == one
    texts = [row["response"]["body"]["choices"][0]["text"] for row in one]
    assert len(set(texts)) > 1
    write_lines(located(rows), str(tmp_path / "3.jsonl"), requests, 4, settings="", in_flight=2)
    more = [row["response"]["body"]["choices"][0]["text"] for row in read(tmp_path / "3.jsonl")]
    assert more != texts


class Killed:
    """Requests that end the run at the n-th one; `stop` does not stop the service."""

    def __init__(self, requests: LocalRequests, last: int):
        self.count, self._requests, self._last = 0, requests, last

    def stop(self) -> None:
        """Leave the service running for the next test."""

    def post(self, path: str, body: Any) -> Any:
        self.count += 1
        if self.count == self._last:
            raise StoppedError("killed")
        return self._requests.post(path, body)


def test_an_interrupted_batch_continues(requests: LocalRequests, tmp_path: Path) -> None:
    rows, rng = some_lines(60), random.Random(1)
    write(tmp_path / "whole.jsonl", rows, requests)
    path, kept = tmp_path / "parts.jsonl", 0
    for _ in range(3):
        killed = Killed(requests, rng.randint(15, 20))
        with pytest.raises(StoppedError):
            write(path, rows, killed, in_flight=4)
        (draft,) = tmp_path.glob(".parts.jsonl.*.partial")
        with draft.open("ab") as file:
            file.write(b'59 {"id": "torn')
        kept, before = draft.read_bytes().count(b"\n"), kept
        assert kept > before
    last = Killed(requests, -1)
    write(path, rows, last)
    assert last.count == 60 - kept
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_rows_get_the_answers_of_a_server(
    requests: LocalRequests, live: Live, tmp_path: Path
) -> None:
    """The files of `batch` and `answers` have the same bytes."""
    rows = [
        *({"prompt": "stone " * n, "n": n} for n in range(12)),
        {"messages": [{"role": "user", "content": x} for x in "ab"]},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for chat in (False, True):
        for name, client in (
            ("http", Client(live.url)),
            ("local", LocalClient(requests.post, "fake", "", lambda: None)),
        ):
            path, options = str(tmp_path / f"{name}{chat}.jsonl"), {"max_tokens": 7}
            more = {"samples": 2, "seed": 5, "chat": chat, "top_logprobs": 3}
            answers.write(str(tmp_path / "p.jsonl"), path, client, options, **more)
        http, local = (tmp_path / f"{name}{chat}.jsonl" for name in ("http", "local"))
        assert http.read_bytes() == local.read_bytes()
        assert len(read(http)) == 26


def test_rows_with_errors_are_kept_and_read(
    requests: LocalRequests, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "tree"}, {"prompt": "tree " * 600}, {"question": "?"}, 3, {"prompt": "a"}]
    client = LocalClient(requests.post, "fake", "", lambda: None)
    path = str(tmp_path / "a.jsonl")
    answers.write(located(rows), path, client, {"max_tokens": 4}, keep_errors=True)
    results = read(Path(path))
    assert [row["row"] for row in results] == [0, 1, 2, 3, 4]
    assert ["error" in row for row in results] == [False, True, True, True, False]
    assert results[1]["error"]["code"] == "context_length_exceeded"
    assert "expected `prompt`" in results[2]["error"]["message"]
    assert [results[at]["completion"] for at in (1, 2, 3)] == [None] * 3
    again = str(tmp_path / "b.jsonl")
    with pytest.raises(InputError, match=r"line 2: prompt: 60\d tokens, but"):
        answers.write(located(rows[:2]), again, client, {"max_tokens": 4})
    # An answer that is missing is not right.
    usable = [row for row in results if "prompt" in row]
    (tmp_path / "check.py").write_text(
        "def check(prompt, answer, row):\n    return len(answer)>0\n"
    )
    scores = answers.checked(f"{tmp_path}/check.py:check", usable)
    assert scores == [1, 0, 1]
    words = [path, "records", "--output-dir", str(tmp_path), "--seq", "64", "--skip-bad"]
    completion_records.main(words)
    assert "2 records" in capsys.readouterr().out


def test_rows_are_embedded_and_scored(
    requests: LocalRequests, live: Live, tokenizer: Any, tmp_path: Path
) -> None:
    texts = ["stone", "a tree", "old bird sings", ""]
    table = pyarrow.table({"prompt": texts, "completion": [" x", " y z", "", " w"]})
    parquet.write_table(table, tmp_path / "p.parquet")
    client = LocalClient(requests.post, "fake", "", lambda: None)
    source = str(tmp_path / "p.parquet")
    answers.write_vectors(source, str(tmp_path / "v.jsonl"), client)
    vectors = [row["embedding"] for row in read(tmp_path / "v.jsonl")]
    response = live.http.post("/v1/embeddings", json={"input": texts}).json()
    assert vectors == [item["embedding"] for item in response["data"]]

    def encode(text: str, first: bool) -> list[int]:
        return tokenizer(text)["input_ids"] or [tokenizer.eos_token_id] * first

    answers.write_scores(source, str(tmp_path / "s.jsonl"), client, encode)
    logprobs = live.network.logprobs()
    for row in read(tmp_path / "s.jsonl"):
        expected = logprobs[tokenizer(row["completion"])["input_ids"]]
        np.testing.assert_array_equal(row["token_logprobs"], expected)
        assert row["logprob"] == pytest.approx(expected.sum(), rel=1e-12)
        assert "".join(row["tokens"]) == row["completion"]
    rows = located([{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(InputError, match="expected the texts `prompt` and `completion`"):
        answers.write_scores(rows[:1], str(tmp_path / "t.jsonl"), client, encode)
    with pytest.raises(InputError, match="found messages"):
        answers.write_vectors(rows[1:], str(tmp_path / "t.jsonl"), client)


def test_a_full_queue_and_a_failing_network_are_asked_again(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "BUSY_SECONDS", 0.0)
    _, full = start(rows=2, queue=1)
    rows = [line(n, prompt="tree", max_tokens=9) for n in range(40)]
    assert {x["response"]["status_code"] for x in write(tmp_path / "1.jsonl", rows, full)} == {200}
    service, failing = start()
    service.engine.network.failures += [None, None, RuntimeError("once")]
    results = write(tmp_path / "2.jsonl", rows, failing)
    assert {row["response"]["status_code"] for row in results} == {200}
    # A batch cannot be made again, so that the engine stops.
    service.engine.network.failures += [RuntimeError("now"), RuntimeError("still")]
    with pytest.raises(StoppedError, match="the model cannot answer: still"):
        write(tmp_path / "3.jsonl", rows, failing, settings="t")


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        ([line(1), line(1)], [], "line 2: the custom_id 'id 1' is also that of"),
        ([line(1)], ["--max-tokens", "3"], "--max-tokens: lines of OpenAI's batch format have"),
        ([line(1)], ["--task", "scores"], "--task: lines of OpenAI's batch format have"),
        ([{"prompt": "a"}], [], "absent"),
        ("no JSON", [], "line 1 is not JSON"),
        ([line(1)], ["--replicas", "2", "--local-hosts", "2"], "does not support --local-hosts"),
        ([line(1)], ["--replica-hosts", "2"], "--replica-hosts requires --replicas"),
    ],
)
def test_unusable_input_is_named_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Any, words: list[str], message: str
) -> None:
    text = rows if isinstance(rows, str) else "\n".join(map(json.dumps, rows))
    (tmp_path / "in.jsonl").write_text(text)
    paths = [f"{tmp_path}/in.jsonl", f"{tmp_path}/out.jsonl", "--model-path", f"{tmp_path}/absent"]
    monkeypatch.setattr(sys, "argv", ["batch", *paths, *words])
    with pytest.raises(InputError, match=re.escape(message)):
        batch.main()
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.slow
def test_a_killed_command_and_one_on_two_hosts_write_the_same_bytes(tmp_path: Path) -> None:
    batch_kills.write_inputs(tmp_path, width=32, layers=1, count=150)
    options = ["--fixed-shapes", "--rows", "4", "--logprobs"]
    assert batch_kills.kill(tmp_path, 150, 6, options, kills=2)
    hosts = ["--local-hosts", "2", "--set", "tpu_size=2", "--set", "cores_per_replica=1"]
    words = batch_kills.words_of(tmp_path, "hosts.jsonl", 6, [*options, *hosts])
    batch_kills.run(tmp_path, "hosts.jsonl", words, None)
    assert (tmp_path / "hosts.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    words = batch_kills.words_of(tmp_path, "whole.jsonl", 6, options)
    command = [sys.executable, "-m", "mesh_transformer", "batch", *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "whole.jsonl exists; choose another file" in result.stderr


@pytest.mark.parametrize("deaths", [1, 3])
def test_a_row_waits_for_another_replica_after_a_death(
    monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    """The time counts from the first death, not from the beginning of the answer."""
    clock = [0.0]
    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(local, "BUSY_SECONDS", 0.0)
    left = iter(range(deaths, -1, -1))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        clock[0] += 1.2 * local.REPLICA_SECONDS
        status = 503 if next(left) else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    with local.running_loop() as loop, LocalRequests(app, loop) as requests:
        if deaths == 1:
            assert requests.post("/v1/completions", {}) == (200, {})
            return
        with pytest.raises(StoppedError, match="no replica has answered for 600 s"):
            requests.post("/v1/completions", {})
