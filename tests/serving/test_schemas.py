"""Schemas that take long or much memory to compile, and clients that leave meanwhile."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesh_transformer.data.tokenizer import byte_tokenizer
from mesh_transformer.serving import grammar, trial
from mesh_transformer.serving.answer import TokenTexts
from mesh_transformer.serving.engine import ConstraintError
from mesh_transformer.serving.grammar import PARSER_BYTES, FullError, Grammars
from mesh_transformer.serving.trial import LeftError, Outcome
from mesh_transformer.util import InputError
from tests.support.hostile_requests import (
    COSTLY_SCHEMA,
    LARGE_SCHEMAS,
    object_of,
    response_format,
)
from tests.support.live_server import SECONDS, check_error, connected, post, wait_for

pytest_plugins = ["tests.support.live_fixtures"]
SMALL = json.dumps(object_of({"type": "boolean"}))


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(TokenTexts(byte_tokenizer()), 264)
    yield made
    made.close()


def children(made: Grammars) -> list[str]:
    """Return the process ids of the trials that are running."""
    process = made._trials._process
    assert process is not None
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", LARGE_SCHEMAS)
def test_a_schema_that_takes_too_long_or_too_much_memory_is_refused_and_not_kept(grammars, name):
    with pytest.raises(InputError, match=r"takes more than 2 s or 128 MiB|too large"):
        grammars.json(json.dumps(LARGE_SCHEMAS[name](0)))
    assert not grammars._kept
    assert not children(grammars)
    assert grammars.json(SMALL).allowed.any()  # the same process goes on


def test_the_trial_of_a_client_that_leaves_ends(grammars):
    left = threading.Event()
    left.set()
    with pytest.raises(LeftError):
        grammars.json(json.dumps(LARGE_SCHEMAS["multiple"](0)), left)
    assert not children(grammars)
    assert grammars.json(SMALL, left).allowed.any()


def test_the_process_for_schemas_ends_with_its_server_and_is_replaced_if_it_dies(grammars):
    grammars.json(SMALL)
    first = grammars._trials._process
    first.kill()
    first.wait()
    other = json.dumps(object_of({"type": "null"}))
    with pytest.raises(OSError, match="has ended"):
        grammars.json(other)
    assert grammars.json(other).allowed.any()
    second = grammars._trials._process
    grammars.close()
    assert second.returncode == 0


def test_a_trial_that_waits_instead_of_computing_ends():
    program = """
import time
from multiprocessing.connection import Pipe
from mesh_transformer.serving import trial

trial.WAIT_SECONDS = 0.1
trial.measured = lambda *_: time.sleep(10**6)
print(trial.attempt(None, "{}", Pipe()[0]).error)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.stdout.strip(), ended.stderr) == (trial.TOO_LARGE, "")


@pytest.mark.parametrize("leaves", [False, True])
def test_a_process_for_schemas_that_does_not_answer_is_replaced(grammars, monkeypatch, leaves):
    grammars.json(SMALL)
    monkeypatch.setattr(trial, "PROCESS_SECONDS", 0.3)
    left, first = threading.Event(), grammars._trials._process
    if leaves:
        left.set()
    first.send_signal(signal.SIGSTOP)
    other = json.dumps(object_of({"type": "null"}))
    with pytest.raises(OSError, match="has ended"):
        grammars.json(other, left)
    assert first.returncode == -signal.SIGKILL
    monkeypatch.setattr(trial, "PROCESS_SECONDS", SECONDS)
    assert grammars.json(other).allowed.any()


class FakeTrials:
    """Trials whose outcome is a size that the schema names as its title."""

    def run(self, schema: str, left: threading.Event) -> Outcome:
        return Outcome(json.loads(schema)["title"])

    def close(self) -> None:
        pass


def test_parsers_are_kept_within_their_memory_the_latest_ones_first(grammars, monkeypatch):
    rng = np.random.default_rng(0)
    monkeypatch.setattr(grammar, "KEPT_BYTES", 20 * PARSER_BYTES)
    grammars.__dict__["_trials"] = FakeTrials()
    expected: list[tuple[str, int]] = []
    for _ in range(200):
        number = int(rng.integers(40))
        size = number**2 * PARSER_BYTES // 70
        schema = json.dumps({"type": "boolean", "title": size, "description": str(number)})
        assert (grammars.kept(schema) is not None) == (schema in dict(expected))
        grammars.json(schema)
        expected = [(kept, most) for kept, most in expected if kept != schema]
        expected.append((schema, size + PARSER_BYTES + len(schema)))
        while sum(most for _, most in expected) > grammar.KEPT_BYTES:
            expected.pop(0)
        assert list(grammars._kept) == [kept for kept, _ in expected]


def test_parsers_in_use_are_limited_too(grammars, monkeypatch):
    monkeypatch.setattr(grammar, "KEPT_BYTES", 0)
    monkeypatch.setattr(grammar, "MOST_BYTES", 4 * PARSER_BYTES)
    grammars.__dict__["_trials"] = FakeTrials()
    schemas = [
        json.dumps({"type": "boolean", "title": 0, "description": "a" * n}) for n in range(9)
    ]
    in_use = [grammars.json(schema) for schema in schemas[:3]]
    assert grammars.kept(schemas[0]) is None
    for _ in range(2):
        with pytest.raises(FullError):
            grammars.json(schemas[3])
    in_use.pop()
    in_use.append(grammars.json(schemas[3]).copy())
    with pytest.raises(FullError):
        grammars.json(schemas[4])


def test_a_parser_that_has_met_a_limit_is_not_kept(grammars):
    schema = json.dumps(COSTLY_SCHEMA)
    first = grammars.json(schema)
    expected, rng = first.allowed.copy(), np.random.default_rng(0)

    def add_letters() -> None:
        for _ in range(10_000):
            bits = np.unpackbits(first.allowed.view(np.uint8), bitorder="little")
            first.add(int(rng.choice([letter for letter in b"abcdefghijkl" if bits[letter]])))

    for letter in b'{"a": "':
        first.add(letter)
    with pytest.raises(ConstraintError, match="too many states"):
        add_letters()
    assert grammars.kept(schema) is None
    assert (grammars.json(schema).allowed == expected).all()
    assert grammars.kept(schema) is not None


@pytest.fixture
def held_schemas(monkeypatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Hold new schemas until the second event is set; the first says that one began."""
    began, go_on, json_format = threading.Event(), threading.Event(), Grammars.json

    def held(*args: Any) -> Any:
        began.set()
        assert go_on.wait(SECONDS)
        return json_format(*args)

    monkeypatch.setattr(Grammars, "json", held)
    yield began, go_on
    go_on.set()


@pytest.mark.slow
def test_new_schemas_delay_no_other_request(serve, tmp_path, held_schemas):
    (tmp_path / "template").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    live = serve(template=str(tmp_path / "template"))
    began, go_on = held_schemas
    body = {"prompt": "a", "max_tokens": 2}
    known = {"response_format": response_format({"const": 1})}
    go_on.set()
    expected = live.ask(**body, **known)["choices"]
    began.clear()
    go_on.clear()
    new = [
        body | {"response_format": response_format({"const": "x", "title": str(number)})}
        for number in range(grammar.MOST_NEW)
    ]
    with ThreadPoolExecutor(len(new)) as pool:
        answers = [pool.submit(live.ask, **request) for request in new]
        wait_for(lambda: live.service._formats._new == len(new))
        assert began.is_set()
        assert live.ask(**body)["choices"]
        assert live.ask(**body, **known)["choices"] == expected
        assert live.ask(prompt=["a " * 20] * 40, max_tokens=1)["choices"]
        talk = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        assert live.http.post("/v1/chat/completions", json=talk).status_code == 200
        one_more = body | {"response_format": response_format({"const": "y"})}
        refused = live.http.post("/v1/completions", json=one_more)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "5")
        assert "32 schemas are waiting" in check_error(refused)["message"]
        go_on.set()
        for answer in answers:
            assert answer.result(SECONDS)["choices"]


def test_clients_that_leave_end_their_requests_and_the_server_does_not_wait(serve, held_schemas):
    live = serve(drain_seconds=10**6)
    began, go_on = held_schemas
    for number in range(3):
        request = post({"prompt": "a", "response_format": response_format({"const": number})})
        head = f"\r\nX-Request-Id: gone-{number}\r\n".encode()
        with connected(live) as connection:
            connection.sendall(request.replace(b"\r\n", head, 1))
            assert began.wait(SECONDS)
        assert live.logged(f"gone-{number}")["status"] == 499
    wait_for(lambda: live.service._formats._new == 0)
    live.server.should_exit = True
    live.thread.join(SECONDS)
    assert not live.thread.is_alive()
    assert not go_on.is_set()
