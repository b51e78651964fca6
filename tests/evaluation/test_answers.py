"""Answers of a server to files of prompts: order, resumption, turns, pass@k and win rates."""

import contextlib
import itertools
import json
import string
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import mesh_transformer
from mesh_transformer.__main__ import main
from mesh_transformer.cli import completion_records
from mesh_transformer.config import Config
from mesh_transformer.data.inputs import BadInputHandler
from mesh_transformer.data.loader import open_train_set
from mesh_transformer.data.rows import Names, read_texts
from mesh_transformer.data.tokenizer import character_tokenizer, load_tokenizer
from mesh_transformer.evaluation import answers, openai_client
from mesh_transformer.evaluation.openai_client import Client
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.support.live_server import Live

pytest_plugins = ["tests.support.live_fixtures"]


class Stub(ThreadingHTTPServer):
    """A server whose answers are a function of the request.

    Attributes:
      answer: returns the text of the answer to a request, or the status of an error.
      bodies: the requests that were answered or refused.
      most: the largest number of requests at a time.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], str | int]):
        self.answer, self.bodies, self.most, self.now = answer, [], 0, 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "stub"}]})

    def do_POST(self) -> None:
        stub: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with stub.lock:
            stub.now += 1
            stub.most = max(stub.most, stub.now)
            stub.bodies.append(body)
        text = stub.answer(body)
        if isinstance(text, int):
            self.reply(text, {"error": {"message": "not this one"}})
        else:
            content = {"role": "assistant", "content": text}
            end = {"message": content} if "messages" in body else {"text": text}
            self.reply(200, {"choices": [end | {"finish_reason": "stop", "logprobs": {"a": 1}}]})
        with stub.lock:
            stub.now -= 1

    def reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stub]]:
    """Return a function that starts a `Stub`; failed requests are sent again at once."""
    monkeypatch.setattr(openai_client, "PAUSE_SECONDS", 0.0)
    stubs: list[Stub] = []

    def start(answer: Callable[[dict[str, Any]], str | int]) -> Stub:
        stubs.append(Stub(answer))
        return stubs[-1]

    yield start
    for one in stubs:
        one.shutdown()
        one.server_close()


def echo(body: dict[str, Any]) -> str:
    asked = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
    return f"{asked}!{body.get('seed', '')}"


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_in_order_and_continue_after_a_kill(
    stub: Callable[..., Stub], tmp_path: Path
) -> None:
    prompts = write_lines(
        tmp_path / "prompts.jsonl", [{"prompt": f"p{n}", "n": n} for n in range(9)]
    )
    busy: set[str] = set()

    def often_busy(body: dict[str, Any]) -> str | int:
        key = f"{body['prompt']} {body['seed']}"
        if key in busy or hash(key) % 2:
            return echo(body)
        busy.add(key)
        return 503

    def write(path: Path, answer: Callable[..., Any]) -> Stub:
        server, options = stub(answer), {"temperature": 0.5}
        answers.write(
            prompts, str(path), Client(server.url), options, samples=2, seed=7, in_flight=3
        )
        return server

    server = write(tmp_path / "whole.jsonl", often_busy)
    assert server.most <= 3
    assert len(server.bodies) == 18 + len(busy)
    assert {body["temperature"] for body in server.bodies} == {0.5}
    whole = read_lines(tmp_path / "whole.jsonl")
    assert [(row["n"], row["row"], row["sample"]) for row in whole] == [
        (n, n, i) for n in range(9) for i in range(2)
    ]
    assert [row["completion"] for row in whole] == [
        f"p{n}!{7 + i}" for n in range(9) for i in range(2)
    ]
    with pytest.raises(InputError, match="exists; choose another file"):
        write(tmp_path / "whole.jsonl", echo)

    with pytest.raises(InputError, match=r"prompts\.jsonl: line 6: .*status 400: not this one"):
        write(tmp_path / "parts.jsonl", lambda body: 400 if body["prompt"] == "p5" else echo(body))
    assert not (tmp_path / "parts.jsonl").exists()
    (draft,) = tmp_path.glob(".parts.jsonl.*")
    lines = [line.split(" ", 1) for line in draft.read_text().splitlines()]
    kept = {int(number): json.loads(text) for number, text in lines}
    # All begun before the refused one, except two that may be lost, and some after it.
    assert 8 <= len(kept) == len(lines) <= 16
    assert kept == {number: whole[number] for number in kept}
    with draft.open("a") as file:
        file.write('17 {"prompt": "p8", "compl')  # as a killed process leaves it
    server = write(tmp_path / "parts.jsonl", echo)
    assert len(server.bodies) == 18 - len(kept)
    assert read_lines(tmp_path / "parts.jsonl") == whole
    assert not draft.exists()


def test_each_user_message_of_a_conversation_is_answered(
    stub: Callable[..., Stub], tmp_path: Path
) -> None:
    def user(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    def assistant(text: str) -> dict[str, str]:
        return {"role": "assistant", "content": text}

    system = {"role": "system", "content": "s"}
    rows = [
        {"messages": [system, user("a"), assistant("given"), user("b"), user("c")], "id": "x"},
        {"prompt": "d"},
    ]
    prompts, path = write_lines(tmp_path / "prompts.jsonl", rows), tmp_path / "answers.jsonl"
    server = stub(echo)
    choices: dict[str, Any] = {"chat": True, "logprobs": True, "in_flight": 1}
    answers.write(prompts, str(path), Client(f"{server.url}/v1/"), {}, **choices)
    first = [system, user("a"), assistant("given"), user("b")]
    second = [*first, assistant("b!0"), user("c")]
    assert [x["messages"] for x in server.bodies] == [first, second, [user("d")]]
    one, other = read_lines(path)
    assert one["messages"] == [*second, assistant("c!0")]
    assert (one["id"], one["completion"], one["logprobs"]) == ("x", "c!0", {"a": 1})
    assert other["messages"] == [user("d"), assistant("d!0")]
    # `completion-records` reads them.
    texts = list(read_texts(str(path), BadInputHandler(skip=False), lambda count: None, Names()))
    assert [len(x.messages) for x in texts] == [7, 2]  # type: ignore[union-attr]
    assert answers.request_and_answer(one) == ("s\n\na\n\nb\n\nc", "given\n\nb!0\n\nc!0")


def test_unusable_prompts_and_servers_are_refused(
    stub: Callable[..., Stub], tmp_path: Path
) -> None:
    client = Client(stub(echo).url)

    def message(row: Any) -> str:
        prompts = write_lines(tmp_path / "prompts.jsonl", [row])
        with pytest.raises(InputError) as error:
            answers.write(prompts, str(tmp_path / "a.jsonl"), client, {})
        return str(error.value)

    assert "line 1: expected `prompt`, a text, or `messages`" in message({"question": "?"})
    assert "each with the strings role and content" in message({"messages": [{"text": "?"}]})
    assert "replace the column 'completion'" in message({"prompt": "?", "completion": "a"})
    assert "expected `prompt`, a text" in message(3)
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert "no user message without an answer" in message({"messages": answered})
    assert "no user message without an answer" in message({"messages": []})
    with pytest.raises(InputError, match=r"does not end in \.jsonl"):
        answers.write(str(tmp_path / "prompts.jsonl"), str(tmp_path / "a.txt"), client, {})
    with pytest.raises(InputError, match="expected an address"):
        Client("localhost:8000")
    closed = stub(echo)
    closed.shutdown()
    closed.server_close()
    with pytest.raises(InputError, match="Connection refused"):
        Client(closed.url)


def test_pass_at_k_is_the_mean_over_all_choices_of_k_answers() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        passed = rng.random(rng.integers(1, 9)) < 0.4
        k = int(rng.integers(1, len(passed) + 1))
        expected = np.mean([any(x) for x in itertools.combinations(passed, k)])
        actual = answers.pass_at_k(len(passed), int(passed.sum()), k)
        assert actual == pytest.approx(expected, abs=1e-12)


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    samples = rng.random((100, 60)) < 0.3
    hits = sum(low <= 0.3 <= high for low, high in map(answers.interval, samples))
    assert 86 <= hits <= 100  # 95 percent, give or take four standard deviations
    assert answers.interval(samples[0]) == answers.interval(samples[0])


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["mesh-transformer", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0  # type: ignore[return-value]


def test_commands_write_and_score_answers(
    stub: Callable[..., Stub],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = write_lines(
        tmp_path / "p.jsonl", [{"prompt": str(n), "even": n % 2} for n in range(4)]
    )
    (tmp_path / "check.py").write_text(
        "def check(prompt, answer, row):\n    return answer == f'{prompt}!3' and row['even'] == 0\n"
    )
    url, path = stub(echo).url, tmp_path / "a.jsonl"
    words = ["--url", url, "--samples", 2, "--seed", 2, "--max-tokens", 5, "--options", "top_p=0.9"]
    assert call(monkeypatch, "answers", prompts, path, *words) == 0
    check, output = f"{tmp_path}/check.py:check", tmp_path / "scores.json"
    words = ["--check", check, "--k", 1, 2, "--output", output]
    assert call(monkeypatch, "score", path, *words) == 0
    results = json.loads(output.read_text())
    assert results["pass@1"]["mean"] == 0.25
    assert results["pass@2"]["mean"] == 0.5
    assert results["pass@2"]["prompts"] == 4
    assert "pass@2: 0.5000 (95 % interval 0.0000 to 1.0000)" in capsys.readouterr().out
    for more in (["--check", check, "--k", 3], ["--check", f"{check}s"], [], ["--against", path]):
        assert call(monkeypatch, "score", path, *more) == 2
        assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("judge", ["longer", "first", "unclear"])
def test_a_judge_is_asked_in_both_orders(
    stub: Callable[..., Stub], tmp_path: Path, judge: str
) -> None:
    lengths = [(3, 1), (1, 3), (2, 2), (9, 4)]
    files = [
        write_lines(
            tmp_path / f"{side}.jsonl",
            [{"prompt": f"p{n} {{first}}", "completion": "x" * x[side], "row": n // 2}
             for n, x in enumerate(lengths)],
        )
        for side in (0, 1)
    ]  # fmt: skip

    def judged(body: dict[str, Any]) -> str:
        (message,) = body["messages"]
        prompt, first, second = message["content"].split("|")
        assert prompt in [f"p{n} {{first}}" for n in range(4)]  # not replaced again
        difference = len(first) - len(second)
        longer = "A" if difference > 0 else "B" if difference < 0 else "C"
        return {"longer": f"[[A]] or [[B]]? [[{longer}]]", "first": "[[A]]"}.get(judge, "Hm.")

    client, template = Client(stub(judged).url), "{prompt}|{first}|{second}"
    results = answers.win_rate(*files, str(tmp_path / "out.jsonl"), client, {}, template)
    counts = [results[key] for key in ("won", "tied", "lost", "unclear judgements")]
    expected = {"longer": [2, 1, 1, 0], "first": [0, 4, 0, 0], "unclear": [0, 4, 0, 8]}
    assert counts == expected[judge]
    assert results["win rate"]["mean"] == (0.625 if judge == "longer" else 0.5)
    assert results["win rate"]["prompts"] == 2  # with two samples each
    other = write_lines(tmp_path / "other.jsonl", [{"prompt": "q", "completion": "", "row": 0}])
    with pytest.raises(InputError, match="expected answers to the same prompts"):
        answers.win_rate(files[0], other, str(tmp_path / "new.jsonl"), client, {})


def test_our_own_server_answers(serve: Any, tmp_path: Path) -> None:
    live = serve(template="plain", network={"window": 512})
    prompts = write_lines(
        tmp_path / "prompts.jsonl",
        [{"prompt": "Hello"}, {"messages": [{"role": "user", "content": x} for x in "ab"]}],
    )
    path = tmp_path / "answers.jsonl"
    answers.write(prompts, str(path), Client(live.url), {"max_tokens": 5}, logprobs=True)
    one, two = read_lines(path)
    assert one["completion"] == live.ask(prompt="Hello", max_tokens=5, seed=0)["choices"][0]["text"]
    assert len(one["logprobs"]["token_logprobs"]) == 5
    assert [x["role"] for x in two["messages"]] == ["user", "assistant"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("chat", "most"), [(False, 5), (True, 20)])  # the most of a server
def test_a_servers_probabilities_are_those_of_training(
    tmp_path: Path, chat: bool, most: int
) -> None:
    """Of the same weights, the divergence is 0; it is not if positions are mixed up."""
    tokenizer = character_tokenizer([string.ascii_letters + ": \n"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    sizes = {"layers": 2, "d_model": 32, "n_heads": 2, "seq": 64, "pe_rotary_dims": 4}
    run = {"total_steps": 1, "warmup_steps": 0, "lr": 1e-3, "per_replica_batch": 1}
    config = Config(
        **sizes,
        **run,
        n_vocab=len(tokenizer),
        dtype="float32",
        tokenizer=str(tmp_path / "tokenizer"),
    )
    network = CausalTransformer(config)
    assert network.state is not None
    network.state["params"] = jax.tree.map(lambda x: 3 * x, network.state["params"])  # less even
    network.save(str(tmp_path / "model"))
    network.wait()
    prompts = write_lines(
        tmp_path / "prompts.jsonl", [{"prompt": word} for word in ["One", "two", "Red"]]
    )
    live = Live(
        network, load_tokenizer(tmp_path / "tokenizer"), None, rows=8, template=str(template)
    )
    with contextlib.closing(live):
        path, options = str(tmp_path / "answers.jsonl"), {"max_tokens": 12, "temperature": 1}
        client = Client(live.url)
        answers.write(prompts, path, client, options, samples=3, chat=chat, top_logprobs=most)
    flags = ["--tokenizer", str(tmp_path / "tokenizer"), "--chat-template", str(template)]
    words = [path, "answers", "--output-dir", str(tmp_path), "--seq", "64", *flags]
    completion_records.main([*words, "--teacher-tokens", str(most)])
    network.close()

    taught = config.replace(teacher="records", train_set=str(tmp_path / "answers.index"))
    batch = open_train_set(taught, 8).get_samples()
    logprobs = batch["teacher_logprobs"].reshape(8, 64, most)
    answered = batch["loss_mask"].sum() - 8  # the tokens that end the answers
    assert np.isfinite(logprobs[..., 0]).sum() >= 0.9 * answered

    def divergence(batch: dict[str, np.ndarray]) -> float:
        student = mesh_transformer.load(str(tmp_path / "model"), changes={"teacher": "records"})
        return float(student.train(batch)["objective/kl"])

    assert abs(divergence(batch)) < 1e-5  # f32 rounds log-probabilities of up to 10 to 1e-6
    assert divergence(batch | {"teacher_ids": np.roll(batch["teacher_ids"], most, axis=-1)}) > 0.1
