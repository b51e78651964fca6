"""Hosts as plain processes (`host_process`), without Ray: started, awaited, never left behind."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mesh_transformer.config import Config
from tests.support.small_run import SEQ, VOCAB
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
STEPS = 5  # of which there are batches
PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
SECONDS = 300.0  # on a machine that has other things to do


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def listening(port: int) -> list[str]:
    """Linux: the addresses, as the kernel writes them, on which somebody listens on a port."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, _, state = line.split()[1:4]
            address, _, number = local.partition(":")
            if state == "0A" and int(number, 16) == port:
                found.append(address)
    return found


def random_batches(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """What `host_process` is fed: train batches, one to evaluate, prompts of unequal lengths."""
    rng = np.random.default_rng(seed)
    assert config.tpu_size is not None
    rows = config.per_replica_batch * config.tpu_size // config.cores_per_replica
    found: dict[str, np.ndarray] = {}
    shapes = {f"_{step}": (2, rows) for step in range(STEPS)}
    for name, shape in ({f"train{k}": v for k, v in shapes.items()} | {"eval": (12,)}).items():
        tokens = rng.integers(0, min(VOCAB, config.n_vocab), (*shape, SEQ + 1)).astype(np.uint32)
        kind, _, number = name.partition("_")
        end = f"_{number}" if number else ""
        found |= {f"{kind}_obs{end}": tokens[..., :-1], f"{kind}_target{end}": tokens[..., 1:]}
    found["ctx"] = found["eval_obs"]
    # One replica's rows are all short: alone, its process would compile for a narrower prompt.
    found["length"] = np.concatenate((np.full(6, 2), np.full(6, SEQ))).astype(np.int32)
    found["seed"] = np.arange(12, dtype=np.uint32)
    found["top_p"] = np.linspace(0.3, 1, 12, dtype=np.float32)
    return found


@contextlib.contextmanager
def started(
    folder: Path,
    config: dict[str, Any],
    hosts: int,
    batches: dict[str, np.ndarray],
    calls: list[tuple[str, Any]],
    *,
    pipes: bool = False,
) -> Iterator[list[subprocess.Popen]]:
    """Processes that make these calls; killed at the end of the block, if not over by then.

    `pipes` gives each a standard input and output of text; else what they say is in their logs.
    """
    folder.mkdir()
    np.savez(folder / "batches.npz", **batches)
    port = free_port()
    start = {
        "coordinator": f"127.0.0.1:{port}",
        "processes": hosts,
        "heartbeat": 10,
        "devices": config["tpu_size"] // hosts,
    }
    processes = []
    try:
        for rank in range(hosts):
            spec = {
                "rank": rank,
                "config": config,
                "start": start,
                "calls": calls,
                "batches": str(folder / "batches.npz"),
                "results": str(folder / f"{rank}.npz"),
            }
            path = folder / f"{rank}.json"
            path.write_text(json.dumps(spec))
            command = [sys.executable, "-m", "tests.support.host_process", str(path)]
            with (folder / f"{rank}.log").open("w") as log:
                to, out = (subprocess.PIPE,) * 2 if pipes else (None, log)
                # A proxy that does not answer: hosts reach each other without.
                environment = os.environ | dict.fromkeys(PROXIES, "http://127.0.0.1:9")
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=environment,
                        stdin=to,
                        stdout=out,
                        stderr=log,
                        text=True,
                    )
                )
        # On loopback alone: the coordinator believes whoever connects.
        addresses = wait_until(lambda: listening(port), "nobody listens")
        assert all(address.endswith("0100007F") for address in addresses), addresses
        yield processes
    finally:
        for process in processes:
            process.kill()
            with process:  # closes its pipes, and waits
                pass


def run(
    folder: Path,
    config: dict[str, Any],
    hosts: int,
    batches: dict[str, np.ndarray],
    calls: list[tuple[str, Any]],
) -> list[dict[str, np.ndarray]]:
    """What each of `hosts` processes found."""
    with started(folder, config, hosts, batches, calls) as processes:
        for rank, process in enumerate(processes):
            status = process.wait(SECONDS)
            assert status == 0, (folder / f"{rank}.log").read_text()[-3000:]
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(hosts)]
