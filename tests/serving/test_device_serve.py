"""device_serve.py as a user runs it: started, asked, stopped, and given bad input."""

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
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60


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
    """Starts the script; whatever still runs at the end is killed."""
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
    """Where it serves, once it does."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"http://\S+", line):
            return found[0]
    raise AssertionError(process.communicate()[1])


def question_and_answer(network) -> tuple[dict[str, Any], str]:
    """A request, and what the network says to it by itself."""
    tokens = load_tokenizer()("Hello there")["input_ids"]
    options = {"top_p": 0.9, "temp": 0.7, "seed": 5}
    alone = network.generate(np.array([tokens]), np.array([len(tokens)]), 30, options)[0]
    asked = {"prompt": "Hello there", "max_tokens": 30, "top_p": 0.9, "temperature": 0.7, "seed": 5}
    return asked, load_tokenizer().decode(alone)


@pytest.mark.slow
def test_answers_are_the_networks_and_sigterm_drains(model, start):
    folder, network = model
    process = start("--model-path", folder, "--port", "0", "--rows", "4")
    url = url_of(process)
    asked, text = question_and_answer(network)
    with httpx.Client(base_url=url, timeout=SECONDS) as client:
        assert client.get("/health").json() == {"status": "ok", "model": "small"}
        answer = client.post("/v1/completions", json=asked).json()
        assert answer["choices"][0]["text"] == text
        load = ["--clients", "8", "--seconds", "2", "--requests", "8", "--most-tokens", "16"]
        load += ["--most-words", "20"]
        command = [sys.executable, "scripts/measure/serving.py", "--url", url, *load]
        loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (loaded.returncode, loaded.stdout.count("0 answers differ")) == (0, 1), loaded
        # Two requests of many sequences, most of which still wait when the signal comes.
        long = asked | {"max_tokens": 32, "n": 8, "ignore_eos": True}
        with (
            ThreadPoolExecutor(1) as pool,
            client.stream("POST", "/v1/completions", json=long | {"stream": True}) as stream,
        ):
            lines = stream.iter_lines()
            next(lines)
            other = pool.submit(client.post, "/v1/completions", json=long)
            while "queue_length 12" not in (said := client.get("/metrics").text):
                assert "queue_length" in said
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
            assert len(other.result(SECONDS).json()["choices"]) == 8
    assert process.wait(SECONDS) == 0
    said = process.communicate()[1].splitlines()
    assert [line for line in said if line.strip() and not line.startswith("compiling")] == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


@pytest.mark.slow
def test_hosts_answer_as_one_process_and_start_again(model, start, tmp_path):
    folder, network = model
    config = write_config(tmp_path / "config.json", network.config.as_dict() | {"tpu_size": 2})
    process = start(
        *["--config", config, "--model-path", folder, "--local-hosts", "2"],
        *["--port", "0", "--rows", "2", "--heartbeat", "60"],
    )
    url = url_of(process)
    asked, text = question_and_answer(network)
    with httpx.Client(base_url=url, timeout=4 * SECONDS) as client:  # the hosts start in it

        def answer() -> str:
            found = client.post("/v1/completions", json=asked | {"ignore_eos": True})
            return found.json()["choices"][0]["text"] if found.is_success else str(found)

        assert answer() == text
        (head,) = sessions_of(process.pid)
        hosts = [p for p, title in members(head).items() if title.startswith("ray::NetworkRunner")]
        assert len(hosts) == 2
        os.kill(hosts[1], signal.SIGKILL)
        assert "500" in answer()
        assert answer() == text  # of new hosts
        assert client.get("/health").json()["status"] == "ok"
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 0
    said = process.communicate()[1]
    assert "HostError: host " in said
    assert "restarting all hosts" in said.splitlines()
    wait_until(lambda: not members(head), "processes stay behind")


STUCK = """
import contextlib
import sys

import device_serve
from mesh_transformer.util import run_script
from tests.support.fake_network import FakeNetwork


class Stuck(FakeNetwork):
    name = "stuck"

    def batch(self, rows):
        batch = super().batch(rows)
        insert = batch.insert

        def once(rows, prompts, *rest, **options):
            if prompts[0][0] == 464:
                self.allowed.clear()  # and never sets it again
            return insert(rows, prompts, *rest, **options)

        batch.insert = once
        return batch


network = Stuck(range(100), name="stuck")
device_serve.running_model = lambda *_, **__: contextlib.nullcontext(network)
run_script(device_serve.main)
"""


def test_sigterm_ends_a_server_whose_network_never_answers(tmp_path):
    values = {"layers": 1, "d_model": 8, "n_heads": 1, "n_vocab": 50400, "seq": 64}
    config = write_config(tmp_path / "config.json", values)
    command = [sys.executable, "-c", STUCK, "--config", config, "--model-path", str(tmp_path)]
    command += ["--port", "0", "--drain-seconds", "1", "--stall-seconds", "1"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process, ThreadPoolExecutor(1) as pool:
        url = url_of(process)
        asked = {"prompt": [464], "max_tokens": 5}
        answer = pool.submit(httpx.post, f"{url}/v1/completions", json=asked, timeout=SECONDS)
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503, "it is never unhealthy")
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(SECONDS) == 1
        assert answer.exception(SECONDS) is not None or answer.result().is_server_error
        said = process.communicate()[1].splitlines()
        assert said[-1].startswith("error: the network did not answer")
        # The drain time, a second for the engine, and some for a busy machine.
        assert time.monotonic() - began < 20


def test_connections_wait_for_the_server():
    """Which has the port for itself from then on."""
    with contextlib.closing(listen("127.0.0.1", 0)) as found:
        socket.create_connection(found.getsockname(), timeout=SECONDS).close()
        with pytest.raises(InputError, match="another --port"):
            listen("127.0.0.1", found.getsockname()[1])


@pytest.mark.parametrize(
    ("options", "said"),
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
def test_bad_input_is_named(monkeypatch, tmp_path, options, said):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as busy:
        names = {"tmp": tmp_path, "model": tmp_path, "busy": busy.getsockname()[1]}
        words = [option.format(**names) for option in options]
        monkeypatch.setattr(sys, "argv", ["device_serve.py", *words])
        with pytest.raises(InputError, match=re.escape(said)) as found:
            device_serve.main()
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("flag", ["--rows", "--queue", "--max-tokens", "--stall-seconds"])
def test_limits_are_at_least_1(monkeypatch, capsys, flag):
    monkeypatch.setattr(sys, "argv", ["device_serve.py", "--model-path", "m", flag, "0"])
    with pytest.raises(SystemExit) as exit_:
        device_serve.main()
    assert exit_.value.code == 2
    assert f"argument {flag}: 0 is not a positive integer" in capsys.readouterr().err
