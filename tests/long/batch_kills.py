"""Kills `mesh-transformer batch` at random moments, and measures it against the engine alone.

`python -m tests.long.batch_kills` answers 2,000 prompts with a small model of random weights: once
without interruption, and once killed by SIGKILL five times, with the same bytes; `--fixed-shapes`
compares log-probabilities, too.  `--only times` then answers some of the prompts by the command's
code and by the engine alone, in turns, and prints the ratio of the medians of their throughput.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from mesh_transformer.cli import batch
from mesh_transformer.cli.service import running_service
from mesh_transformer.evaluation import answers
from mesh_transformer.evaluation.openai_client import LocalClient
from mesh_transformer.generation.sampling_settings import SamplingOptions
from mesh_transformer.serving.engine import Request
from mesh_transformer.serving.local import running
from mesh_transformer.transformer_shard import CausalTransformer
from tests.support.waiting import SECONDS, wait_until

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("the", "of", "a", "tree", "river", "stone", "bird", "sings", "under", "old", "moon")


def write_inputs(folder: Path, width: int, layers: int, count: int) -> None:
    """Write a model of random weights, and prompts of 1 to 40 words."""
    sizes = {"layers": layers, "d_model": width, "n_heads": 4, "n_vocab": 264, "seq": 512}
    keys = {"tokenizer": "bytes", "pe_rotary_dims": 8, "dtype": "float32", "name": "small"}
    network = CausalTransformer(sizes | keys)
    network.save(str(folder / "model"))
    network.close()
    generator = random.Random(0)
    lines = [
        json.dumps({"prompt": " ".join(generator.choices(WORDS, k=generator.randint(1, 40)))})
        for _ in range(count)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def words_of(folder: Path, output: str, tokens: int, options: list[str]) -> list[str]:
    """Return the arguments of the command that answers the prompts."""
    own = [str(folder / "prompts.jsonl"), str(folder / output), "--max-tokens", str(tokens)]
    return [*own, "--model-path", str(folder / "model"), *options]


def run(folder: Path, output: str, words: list[str], kill_after: int | None) -> None:
    """Run the command; kill it once it has added `kill_after` lines to its journal."""
    command = [sys.executable, "-m", "mesh_transformer", "batch", *words]
    with open(folder / "errors", "w") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stderr=errors, env=os.environ)
    if kill_after is None:
        assert process.wait() == 0, (folder / "errors").read_text()[-2000:]
        return

    def lines() -> int:
        (journal, *_) = [*folder.glob(f".{output}.*.partial"), None]
        return 0 if journal is None else journal.read_bytes().count(b"\n")

    assert process.poll() is None
    wait_until(lambda: lines() >= kill_after or process.poll() is not None, "lines", SECONDS * 5)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    print(f"killed at {lines()} lines", flush=True)


def kill(folder: Path, count: int, tokens: int, options: list[str], kills: int) -> bool:
    """Return whether a run that is killed `kills` times writes the bytes of one that is not."""
    run(folder, "whole.jsonl", words_of(folder, "whole.jsonl", tokens, options), None)
    places = sorted(random.SystemRandom().sample(range(1, count - 50), kills))
    for place in places:
        run(folder, "parts.jsonl", words_of(folder, "parts.jsonl", tokens, options), place)
    run(folder, "parts.jsonl", words_of(folder, "parts.jsonl", tokens, options), None)
    whole, parts = ((folder / f"{name}.jsonl").read_bytes() for name in ("whole", "parts"))
    rows = [[json.loads(line) for line in text.splitlines()] for text in (whole, parts)]
    texts = sum(one["completion"] != other["completion"] for one, other in zip(*rows, strict=True))
    differ = sum(one != other for one, other in zip(*rows, strict=True))
    print(f"{len(rows[0])} rows: {texts} texts and {differ} rows differ; bytes {whole == parts}")
    return whole == parts


def times(folder: Path, tokens: int, options: list[str], rounds: int) -> float:
    """Return the throughput of the command's code, as a share of that of the engine alone."""
    words = words_of(folder, "times.jsonl", tokens, options)
    with mock.patch.object(sys, "argv", ["batch", *words]):
        args = batch.parse_args()
    prompts, seconds = str(folder / "prompts.jsonl"), {"batch": [], "engine": []}
    with (
        running_service(args, queue=10**6, warm_up=False) as service,
        running(service) as requests,
    ):
        client = LocalClient(requests.post, service.name, "", requests.stop)
        tokenizer = service.words.tokenizer
        rows = answers.all_rows(prompts)
        encoded = [tokenizer(row["prompt"])["input_ids"] for _, row in rows]

        def by_batch() -> None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(args.output)
            chosen = batch.choices_of(args) | {"in_flight": 2 * args.rows}
            answers.write(rows, args.output, client, batch.options_of(args), **chosen)

        def by_engine() -> None:
            left, done = [len(encoded)], threading.Event()

            def deliver(progress: Any) -> None:
                left[0] -= progress.ended
                if not left[0]:
                    done.set()

            sampling = SamplingOptions(top_p=1.0, temp=1.0, seed=0)
            stop = service.words.ends_with([], ends=True)
            requests = [
                Request(np.array(x, np.int32), tokens, sampling, deliver, stop=stop)
                for x in sorted(encoded, key=len, reverse=True)
            ]
            service.engine.submit(requests)
            done.wait()

        for turn in range(rounds + 2):
            for name, work in (("batch", by_batch), ("engine", by_engine)):
                began, worked = time.perf_counter(), time.process_time()
                work()
                if turn > 1:  # the first ones compile
                    seconds[name].append(time.perf_counter() - began)
                    used = (time.process_time() - worked) / len(rows)
                    rate = f"{len(rows) / seconds[name][-1]:.1f} rows/s, {used:.4f} CPU s/row"
                    print(f"{name}: {rate}", flush=True)
    ratio = statistics.median(seconds["engine"]) / statistics.median(seconds["batch"])
    print(f"throughput of batch / engine: {ratio:.3f}")
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("kills", "times"), help="leave out the other half")
    parser.add_argument("--count", type=int, default=2000, help="prompts")
    parser.add_argument("--tokens", type=int, default=48, help="tokens per answer")
    parser.add_argument("--width", type=int, default=512, help="d_model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, args.width, args.layers, args.count)
        right = args.only == "times" or kill(folder, args.count, args.tokens, options, args.kills)
        if args.only != "kills":
            right &= times(folder, args.tokens, options, args.rounds) >= 0.95
    sys.exit(not right)


if __name__ == "__main__":
    main()
