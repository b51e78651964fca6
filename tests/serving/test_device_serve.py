"""device_serve.py as a user runs it: starting, requests, stopping and bad input."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import device_serve
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.serving.server import listen
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import QUICK_COMPILATION
from tests.long.interruptions import members, sessions_of
from tests.support.small_run import write_config
from tests.support.waiting import SECONDS, wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[str, CausalTransformer]:
    """A folder with a model of random weights, and the model."""
    config = {
        "layers": 2,
        "d_model": 64,
        "n_heads": 8,
        "n_vocab": 50400,
        "seq": 32,
        "pe_rotary_dims": 8,
        "dtype": "float32",
        "name": "small",
    }
    folder = str(tmp_path_factory.mktemp("model"))
    network = CausalTransformer(config)
    network.save(folder)
    network.close()
    return folder, network


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Iterator[Callable[..., subprocess.Popen]]:
    """A function that starts the script; processes that still run at the end are killed."""
    compiled = str(tmp_path_factory.mktemp("compiled"))
    processes: list[subprocess.Popen] = []

    def run(*options: str) -> subprocess.Popen:
        environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": compiled}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        process = subprocess.Popen(
            [sys.executable, "device_serve.py", *options],
            cwd=ROOT,
            env=environment | {"XLA_FLAGS": QUICK_COMPILATION},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def url_of(process: subprocess.Popen) -> str:
    """Return the URL of a server, once it accepts requests."""
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(r"http://\S+", line):
            return match[0]
    raise AssertionError(process.communicate()[1])


def request_and_answer(network) -> tuple[dict[str, Any], str]:
    """Return a request and the text that the network itself generates for it."""
    tokens = load_tokenizer()("Hello there")["input_ids"]
    options = {"top_p": 0.9, "temp": 0.7, "seed": 5}
    answer = network.generate(np.array([tokens]), np.array([len(tokens)]), 30, options)[0]
    body = {"prompt": "Hello there", "max_tokens": 30, "top_p": 0.9, "temperature": 0.7, "seed": 5}
    return body, load_tokenizer().decode(answer)


@pytest.mark.slow
def test_answers_match_the_network_and_sigterm_drains(model, start):
    folder, network = model
    process = start("--model-path", folder, "--port", "0", "--rows", "4")
    url = url_of(process)
    request, text = request_and_answer(network)
    with httpx.Client(base_url=url, timeout=SECONDS) as client:
        assert client.get("/health").json() == {"status": "ok", "model": "small"}
        answer = client.post("/v1/completions", json=request).json()
        assert answer["choices"][0]["text"] == text
        load = ["--clients", "8", "--seconds", "2", "--requests", "8", "--most-tokens", "16"]
        load += ["--most-words", "20"]
        command = [sys.executable, "scripts/measure/serving.py", "--url", url, *load]
        loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (loaded.returncode, loaded.stdout.count("0 answers differ")) == (0, 1), loaded
        # Two requests for many sequences, most of which are still queued when the signal comes.
        long = request | {"max_tokens": 32, "n": 8, "ignore_eos": True}
        with (
            ThreadPoolExecutor(1) as pool,
            client.stream("POST", "/v1/completions", json=long | {"stream": True}) as stream,
        ):
            lines = stream.iter_lines()
            next(lines)
            second = pool.submit(client.post, "/v1/completions", json=long)
            while "queue_length 12" not in (metrics := client.get("/metrics").text):
                assert "queue_length" in metrics
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
            assert len(second.result(SECONDS).json()["choices"]) == 8
    assert process.wait(SECONDS) == 0
    messages = process.communicate()[1].splitlines()
    progress = ("compiling", "the cache has room for")
    assert [line for line in messages if line.strip() and not line.startswith(progress)] == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


@pytest.mark.slow
def test_hosts_answer_like_one_process_and_are_restarted(model, start, tmp_path):
    """With guesses of a draft, the model itself, which new hosts load too."""
    folder, network = model
    config = write_config(tmp_path / "config.json", network.config.as_dict() | {"tpu_size": 2})
    process = start(
        *["--config", config, "--model-path", folder, "--local-hosts", "2"],
        *["--port", "0", "--rows", "2", "--heartbeat", "60", "--speculate", "2", "--draft", folder],
    )
    url = url_of(process)
    request, text = request_and_answer(network)
    with httpx.Client(base_url=url, timeout=4 * SECONDS) as client:  # new hosts start

        def answer() -> str:
            response = client.post("/v1/completions", json=request | {"ignore_eos": True})
            return response.json()["choices"][0]["text"] if response.is_success else str(response)

        def counted(name: str) -> float:
            (value,) = re.findall(rf"^\w*{name}_total\S* (\S+)", client.get("/metrics").text, re.M)
            return float(value)

        assert answer() == text
        assert counted("guessed_tokens") > 0
        (head,) = sessions_of(process.pid)
        hosts = [p for p, title in members(head).items() if title.startswith("ray::NetworkRunner")]
        assert len(hosts) == 2
        os.kill(hosts[1], signal.SIGKILL)
        # Between requests, the server compiles programs in advance.  If that is what fails, the
        # hosts have been replaced before the next request.
        first = answer()
        assert first == text or "500" in first
        assert answer() == text  # from new hosts
        assert counted("right_guesses") == counted("guessed_tokens")
        assert client.get("/health").json()["status"] == "ok"
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 0
    messages = process.communicate()[1]
    assert "HostError: host " in messages
    assert "restarting all hosts" in messages.splitlines()
    wait_until(lambda: not members(head), "end of all processes")


STUCK = """
import contextlib
import sys

from mesh_transformer.cli import serve, service
from mesh_transformer.util import run_script
from tests.support.fake_network import FakeNetwork


class Stuck(FakeNetwork):
    name = "stuck"

    def batch(self, rows, *sizes):
        batch = super().batch(rows, *sizes)
        insert = batch.insert

        def once(rows, prompts, *rest, **options):
            if prompts[0][0] == 464:
                self.allowed.clear()  # and it is never set again
            return insert(rows, prompts, *rest, **options)

        batch.insert = once
        return batch


network = Stuck(range(100), name="stuck")
service.running_model = lambda *_, **__: contextlib.nullcontext(network)
run_script(serve.main)
"""


@pytest.mark.slow
def test_sigterm_ends_a_server_whose_network_hangs(tmp_path):
    values = {"layers": 1, "d_model": 8, "n_heads": 1, "n_vocab": 50400, "seq": 64}
    config = write_config(tmp_path / "config.json", values)
    command = [sys.executable, "-c", STUCK, "--config", config, "--model-path", str(tmp_path)]
    command += ["--port", "0", "--drain-seconds", "1", "--stall-seconds", "1"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process, ThreadPoolExecutor(1) as pool:
        url = url_of(process)
        request = {"prompt": [464], "max_tokens": 5}
        answer = pool.submit(httpx.post, f"{url}/v1/completions", json=request, timeout=SECONDS)
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503, "an unhealthy server")
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(SECONDS) == 1
        assert answer.exception(SECONDS) is not None or answer.result().is_server_error
        messages = process.communicate()[1].splitlines()
        assert messages[-1].startswith("error: the network did not answer")
        # The drain time, a second for the engine, and a margin for a busy machine.
        assert time.monotonic() - began < 20


def test_early_connections_wait_for_the_server():
    """From then on, no other server can use the port."""
    with contextlib.closing(listen("127.0.0.1", 0)) as listening:
        socket.create_connection(listening.getsockname(), timeout=SECONDS).close()
        with pytest.raises(InputError, match="another --port"):
            listen("127.0.0.1", listening.getsockname()[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --config or --model-path (--version requires --config)"),
        (["--model-path", "{tmp}/absent"], "absent"),
        (["--model-path", "{model}", "--api-key-file", "{tmp}/keys"], "--api-key-file"),
        (["--model-path", "{model}", "--port", "{busy}"], "another --port"),
        (["--model-path", "{model}", "--port", "70000"], "--port 70000"),
        (["--model-path", "{model}", "--host", "no.such.host.invalid"], "no.such.host.invalid"),
    ],
    ids=lambda value: value[-2] if isinstance(value, list) and value else None,
)
def test_bad_input_is_named(monkeypatch, tmp_path, options, message):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as busy:
        names = {"tmp": tmp_path, "model": tmp_path, "busy": busy.getsockname()[1]}
        words = [option.format(**names) for option in options]
        # A free port, as a test that runs at the same time may use the default one.
        words = words if "--port" in words else [*words, "--port", "0"]
        monkeypatch.setattr(sys, "argv", ["device_serve.py", *words])
        with pytest.raises(InputError, match=re.escape(message)) as error:
            device_serve.main()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("flag", ["--rows", "--queue", "--max-tokens", "--stall-seconds"])
def test_limits_are_at_least_1(monkeypatch, capsys, flag):
    monkeypatch.setattr(sys, "argv", ["device_serve.py", "--model-path", "m", flag, "0"])
    with pytest.raises(SystemExit) as exit_:
        device_serve.main()
    assert exit_.value.code == 2
    assert f"argument {flag}: 0 is not a positive integer" in capsys.readouterr().err


def test_sigterm_before_the_server_runs_is_not_lost():
    code = """
import builtins, signal, sys
from fastapi import FastAPI
from mesh_transformer.serving import server
builtins.print = lambda *_, **__: signal.raise_signal(signal.SIGTERM)
server.serve(FastAPI(), server.listen("127.0.0.1", 0), 1)
sys.exit(7)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=SECONDS).returncode == 7
