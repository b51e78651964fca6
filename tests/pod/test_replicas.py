"""`serve --replicas`, as a user runs it, with replicas that die and weights that change."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.ray_cluster import add_node, ray_cluster
from tests.support.replicas import (
    FLAGS,
    Server,
    Weights,
    answer,
    environment_with,
    replica_processes,
    requests_of,
    running,
)
from tests.support.waiting import SECONDS, wait_until

REQUESTS = requests_of(groups=4, each=4)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def weights(folder) -> Weights:
    return Weights(folder, 2)


@pytest.fixture(scope="module")
def expected(folder, weights) -> list[list[str]]:
    """The answers of one server without Ray to all requests, with the weights of each step."""
    texts = []
    for step in range(2):
        with running(weights.step(step), compiled=folder) as server:
            results = [answer(server.http, request, stream=False) for request in REQUESTS]
        assert [kind for kind, _ in results] == ["answered"] * len(REQUESTS)
        texts.append([text for _, (text, _) in results])
    assert texts[0] != texts[1]
    return texts


@pytest.fixture(scope="module")
def server(folder, weights, expected) -> Iterator[Server]:
    flags = ("--replicas", "2", "--api-key-file", str(folder / "keys"), "--key-concurrent", "16")
    (folder / "keys").write_text("first\nsecond\n")
    with running(weights.folder, *flags, compiled=folder) as server:
        server.http.headers["Authorization"] = "Bearer first"
        yield server


def ask_all(server: Server, times: int = 1, *, done: Any = lambda: True) -> list[tuple[str, Any]]:
    """Return the results of all requests, of 8 clients; asks again until `done` returns True."""

    def ask(client: httpx.Client, number: int) -> tuple[str, Any]:
        return answer(client, REQUESTS[number], stream=number % 3 == 0)

    results = []
    with (
        httpx.Client(base_url=server.url, headers=server.http.headers, timeout=SECONDS) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        while times > 0 or not done():
            results += pool.map(lambda number: ask(client, number), range(len(REQUESTS)))
            times -= 1
    return results


def texts_of(results: list[tuple[str, Any]]) -> list[str]:
    assert {kind for kind, _ in results} == {"answered"}, results
    return [text for _, (text, _) in results]


def test_answers_are_those_of_one_server_and_prefixes_stay_on_their_replica(server, expected):
    names = server.names()
    assert len(names) == 2
    assert texts_of(ask_all(server)) == expected[0]
    before = server.metric("mesh_transformer_prompt_tokens_total")
    assert set(before) == set(names)
    assert min(before.values()) > 0  # both have answered
    results = ask_all(server)
    usage = [usage for _, (_, usage) in results]
    cached = sum(entry["prompt_tokens_details"]["cached_tokens"] for entry in usage)
    # Every prompt was answered before, by the same replica: only its last page is computed again.
    assert cached >= 0.7 * sum(entry["prompt_tokens"] for entry in usage)


def test_requests_without_a_key_are_refused_and_replicas_are_counted(server):
    for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": ""}):
        assert (
            server.http.post("/v1/completions", json=REQUESTS[0], headers=headers).status_code
            == 401
        )
    # Ray may just be replacing one that was too slow on a busy machine.
    name = "mesh_transformer_front_replicas"
    wait_until(lambda: server.metric(name) == {"": 2}, "two replicas are counted")


def test_a_killed_replica_is_replaced_and_loses_no_answer(server, expected):
    first, _ = server.processes()
    names = server.names()

    def replaced() -> bool:
        return len(server.names()) == 2 and server.names() != names

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_all, server, 2, done=replaced)
        os.kill(first, signal.SIGKILL)
        results = asking.result()
    # Only streams that had begun cannot be answered by the other replica.
    interrupted = [why for kind, why in results if kind != "answered"]
    assert all("the replica of the server has died" in why for why in interrupted)
    assert len(interrupted) <= 8
    for number, (kind, value) in enumerate(results):
        assert kind != "answered" or value[0] == expected[0][number % len(REQUESTS)]


def test_weights_change_without_a_refused_request(server, weights, expected):
    weights.publish()
    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(server.change, 1)
        texts = texts_of(ask_all(server, done=changing.done))
        changing.result()
    either = [{old, new} for old, new in zip(*expected, strict=True)]
    assert all(text in either[number % len(either)] for number, text in enumerate(texts))
    wait_until(lambda: len(server.processes()) == 2, "the old replicas have ended")
    assert texts_of(ask_all(server)) == expected[1]


def test_a_replica_over_two_machines_gives_the_same_answers(folder, weights, expected):
    mesh = ["--set", "tpu_size=2", "--set", "cores_per_replica=1", "--replicas", "1"]
    with ray_cluster(1) as cluster:
        add_node(cluster, 1)
        flags = [*mesh, "--replica-hosts", "2", "--ray", cluster.address]
        with running(weights.step(0), *flags, compiled=folder) as server:
            assert texts_of(ask_all(server)) == expected[0]


def test_a_batch_on_replicas_has_the_bytes_of_one_here(folder, weights):
    rng = random.Random(5)
    rows = [{"prompt": "".join(rng.choices("abcdefgh ", k=rng.randint(1, 60)))} for _ in range(160)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--max-tokens", "30", "--logprobs", "--model-path", str(weights.step(0)), *FLAGS[:4]]

    def start(output: str, *more: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "mesh_transformer", "batch", "rows.jsonl", output]
        return subprocess.Popen(
            [*command, *words, *FLAGS[-3:], *more],
            cwd=folder,
            env=environment_with(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def answered() -> int:
        (journal, *_) = [*folder.glob(".there.jsonl.*.partial"), None]
        return 0 if journal is None else journal.read_bytes().count(b"\n")

    here = start("here.jsonl")
    assert here.wait(SECONDS) == 0, here.communicate()
    with start("there.jsonl", "--replicas", "2") as there:
        try:
            wait_until(lambda: answered() > 20 or there.poll() is not None, "answers")
            assert there.poll() is None, there.communicate()
            os.kill(replica_processes(str(there.pid))[0], signal.SIGKILL)
            output, errors = there.communicate(timeout=SECONDS)
        finally:
            there.kill()
    assert there.returncode == 0, errors
    assert output.endswith("there.jsonl: 160 rows, 0 of them with errors\n")
    assert (folder / "there.jsonl").read_bytes() == (folder / "here.jsonl").read_bytes()
