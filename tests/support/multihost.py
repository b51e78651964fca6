"""Hosts as plain processes (`host_process`), without Ray; they are always killed at the end."""

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
STEPS = 5  # number of training batches
PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
SECONDS = 300.0  # time limit for a busy machine


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def listening(port: int) -> list[str]:
    """Return the addresses with a listener on a port, as the kernel writes them (Linux only)."""
    addresses = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, _, state = line.split()[1:4]
            address, _, number = local.partition(":")
            if state == "0A" and int(number, 16) == port:
                addresses.append(address)
    return addresses


def random_batches(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Return batches for `host_process`: to train, to evaluate, and prompts of unequal lengths."""
    rng = np.random.default_rng(seed)
    assert config.tpu_size is not None
    rows = config.per_replica_batch * config.tpu_size // config.cores_per_replica
    batches: dict[str, np.ndarray] = {}
    shapes = {f"_{step}": (2, rows) for step in range(STEPS)}
    for name, shape in ({f"train{k}": v for k, v in shapes.items()} | {"eval": (12,)}).items():
        tokens = rng.integers(0, min(VOCAB, config.n_vocab), (*shape, SEQ + 1)).astype(np.uint32)
        kind, _, number = name.partition("_")
        end = f"_{number}" if number else ""
        batches |= {f"{kind}_obs{end}": tokens[..., :-1], f"{kind}_target{end}": tokens[..., 1:]}
    batches["ctx"] = batches["eval_obs"]
    # One replica's rows are all short: by itself, its process would compile for narrower prompts.
    batches["length"] = np.concatenate((np.full(6, 2), np.full(6, SEQ))).astype(np.int32)
    batches["seed"] = np.arange(12, dtype=np.uint32)
    batches["top_p"] = np.linspace(0.3, 1, 12, dtype=np.float32)
    return batches


def replica_rows(x: np.ndarray, replicas: list[int], dp: int, axis: int = 0) -> np.ndarray:
    """Return the rows of the global batch x that belong to `replicas`.

    Args:
      x: the global batch, whose number of rows is a multiple of dp.
      replicas: the dp indices of the replicas.
      axis: the row axis of x.
    """
    parts = np.split(x, dp, axis)
    return np.concatenate([parts[replica] for replica in replicas], axis)


@contextlib.contextmanager
def started(
    folder: Path,
    config: dict[str, Any],
    hosts: int,
    batches: dict[str, np.ndarray],
    calls: list[tuple[str, Any]],
    *,
    pipes: bool = False,
    environment: dict[str, str] | None = None,
    hostname: str = "",
) -> Iterator[list[subprocess.Popen]]:
    """Start processes that make these calls; those that still run at the end are killed.

    With `pipes`, each has text pipes as standard input and output; else its output is in its log.
    `environment` has variables that they get besides this process's.  With `hostname`, which
    requires root, their machine has this name.
    """
    folder.mkdir()
    np.savez(folder / "batches.npz", **batches)
    port = free_port()
    start = {
        "address": "127.0.0.1",
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
            if hostname:
                rename = f'hostname {hostname} && exec "$0" "$@"'
                command = ["unshare", "--uts", "sh", "-c", rename, *command]
            with (folder / f"{rank}.log").open("w") as log:
                to, out = (subprocess.PIPE,) * 2 if pipes else (None, log)
                # This proxy does not answer, because hosts must reach each other without it.
                variables = os.environ | dict.fromkeys(PROXIES, "http://127.0.0.1:9")
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=variables | (environment or {}),
                        stdin=to,
                        stdout=out,
                        stderr=log,
                        text=True,
                    )
                )
        # Only on loopback, because the coordinator trusts everyone who connects.
        addresses = wait_until(lambda: listening(port), "a listening coordinator")
        assert all(address.endswith("0100007F") for address in addresses), addresses
        yield processes
    finally:
        for process in processes:
            process.kill()
            with process:  # closes its pipes and waits for it
                pass


def run(
    folder: Path,
    config: dict[str, Any],
    hosts: int,
    batches: dict[str, np.ndarray],
    calls: list[tuple[str, Any]],
    **options: Any,
) -> list[dict[str, np.ndarray]]:
    """Return the results of each of `hosts` processes; `options` are those of `started`."""
    with started(folder, config, hosts, batches, calls, **options) as processes:
        for rank, process in enumerate(processes):
            status = process.wait(SECONDS)
            assert status == 0, (folder / f"{rank}.log").read_text()[-3000:]
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(hosts)]
