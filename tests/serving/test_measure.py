"""The load test, against a server on a fake network."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["tests.support.live_fixtures"]

ROOT = Path(__file__).parents[2]


def measure(live, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/measure/serving.py", "--url", live.url, "--requests", "12"]
    return subprocess.run(
        [*command, "--most-tokens", "9", "--most-words", "20", *words],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_requests_arrive_at_random_times_and_the_latencies_are_drawn(live, tmp_path):
    picture = tmp_path / "latency.png"
    words = ["--seconds", "2", "--rates", "5", "20", "--picture", str(picture)]
    ended = measure(live, *words, "--lengths", "skewed", "--shared-words", "7")
    assert ended.returncode == 0, ended.stderr
    alone, slow, fast, *last = ended.stdout.splitlines()
    assert alone.startswith("one at a time: 12 answers, ")
    for rate, line in (("5", slow), ("20", fast)):
        assert line.startswith(f"{rate} requests/s: ")
        assert "p50 / p90 / p99 time to first token " in line
        assert "nan" not in line
    assert last[0] == "0 answers differ from those given one at a time"
    assert last[1] == "0 rows and waiting requests are left"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_refused_requests_are_counted(serve):
    live = serve(queue=1, rows=1)
    live.network.seconds = 0.05
    ended = measure(live, "--seconds", "1", "--rates", "40")
    assert ended.returncode == 0, ended.stderr
    refused = re.search(r"tokens/s, (\d+) refused;", ended.stdout)
    assert refused is not None
    assert int(refused[1]) > 0


def test_wrong_answers_are_counted_and_end_with_status_1(serve, monkeypatch):
    """The network answers otherwise once the expected answers are known."""
    live = serve()
    answer, network = live.network.answer, live.network
    calls = []

    def changing(prompt, seed, length):
        calls.extend([length] * (length == 1))  # once per answer, for its first token
        return [number + (len(calls) > 12) for number in answer(prompt, seed, length)]

    monkeypatch.setattr(network, "answer", changing)
    ended = measure(live, "--seconds", "1", "--rates", "30")
    assert ended.returncode == 1, ended.stderr
    assert "\n0 answers differ from those given one at a time\n" not in ended.stdout


@pytest.mark.slow
def test_clients_that_leave_and_errors_of_the_server_are_counted(serve, monkeypatch):
    live = serve(rows=3)
    call, prompts = live.network.call, []

    def failing(kind, *what):
        prompts.extend([kind] * (kind in ("insert", "chunk")))
        if len(prompts) == 16:  # the 12 requests on their own have been answered
            prompts.append("")
            raise RuntimeError("a host is gone")
        call(kind, *what)

    monkeypatch.setattr(live.network, "call", failing)
    words = ["--clients", "8", "--seconds", "4", "--leave", "0.4", "--count-errors"]
    ended = measure(live, *words, "--most-tokens", "40")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    left = re.search(r" (\d+) left, (\d+) failed; ", ended.stdout)
    assert left is not None
    assert int(left[1]) > 0
    assert 1 <= int(left[2]) <= 3  # the requests in the rows
    assert "failed: the server reports the model failed" in ended.stdout
    assert "\n0 rows and waiting requests are left\n" in ended.stdout
    if sys.platform == "linux":
        (memory,) = re.findall(r"^memory of the server: (.*) MB$", ended.stdout, re.MULTILINE)
        assert all(float(mb) > 100 for mb in memory.split(" / "))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--picture", "a.png"], "error: --picture requires --rates; add the rates to measure"),
        (["--rates", "0"], "error: --rates 0: expected more than 0 requests per second"),
        (["--rates", "1", "nan"], "error: --rates nan: expected more than 0 requests per second"),
    ],
)
def test_bad_flags_are_one_line(live, words, message):
    ended = measure(live, *words)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (2, message)
