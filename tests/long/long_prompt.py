"""Serves short requests while a long prompt is computed beside them.

`python -m tests.long.long_prompt` takes some minutes on 2 free cores.  It reports the time between
two deliveries of the short answers without and with the long prompt, in turn, and the memory.  Then
all answers must equal those of a server that has no other request, which `fixed_shapes` promises.
"""

import argparse
import resource
import sys
import threading
import time
from collections.abc import Sequence

import jax
import numpy as np
from tqdm import tqdm

from mesh_transformer.config import Config
from mesh_transformer.generation.sampling_settings import SamplingOptions
from mesh_transformer.performance.device_arrays import abstract_rows, bytes_per_device
from mesh_transformer.serving.engine import Engine, Request
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.serving.progress import Progress
from mesh_transformer.transformer_shard import CausalTransformer

SHORT_PROMPT, LONG_ANSWER = 64, 16
RUNNING = 8000  # tokens of short answers that run all the time; they are cancelled
QUARTERS = 4  # of the long prompt; times are reported per quarter


class Client:
    """A request, its tokens so far, and the times at which they were delivered."""

    def __init__(self, prompt: np.ndarray, length: int, seed: int):
        # Half of the answers are greedy, the others sampled.
        settings = SamplingOptions(temp=float(seed % 2), top_p=0.9, seed=seed)
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.request = Request(prompt, length, settings, self.deliver)

    def deliver(self, progress: Progress) -> None:
        self.times.append(time.perf_counter())
        self.tokens += [token.number for token in progress.tokens]
        self.error = progress.error
        if progress.ended:
            self.ended.set()

    def wait(self) -> list[int]:
        while not self.ended.wait(1):
            pass
        if self.error is not None:
            raise self.error
        return self.tokens


def memory() -> float:
    """Return the most memory, in GiB, that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def random_prompt(args: argparse.Namespace, length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length, np.int32)


def short_clients(args: argparse.Namespace, length: int) -> list[Client]:
    return [
        Client(random_prompt(args, SHORT_PROMPT, seed), length, seed) for seed in range(args.short)
    ]


def gaps(times: Sequence[float]) -> np.ndarray:
    """Return the milliseconds between deliveries of one answer."""
    return 1000 * np.diff(times)


def described(milliseconds: np.ndarray, base: np.ndarray | None = None) -> str:
    """Return percentiles, and their ratios to the 99th percentile of others."""
    values = np.percentile(milliseconds, (50, 99, 100))
    text = "50th percentile {:.1f} ms, 99th {:.1f}, most {:.1f}".format(*values)
    if base is not None:
        ratios = values / np.percentile(base, 99)
        text += " ({:.2f}, {:.2f}, {:.2f} times the 99th without)".format(*ratios)
    return f"{text}, {len(milliseconds)} deliveries"


def measure(args: argparse.Namespace, engine: Engine) -> None:
    """Report the time between deliveries of short answers, with and without a long prompt."""
    without: list[np.ndarray] = []
    beside: list[list[np.ndarray]] = [[] for _ in range(QUARTERS)]
    after: list[np.ndarray] = []
    for number in range(args.rounds):
        clients = short_clients(args, RUNNING)
        engine.submit([client.request for client in clients])
        while min(len(client.times) for client in clients) < 2 + args.deliveries:
            time.sleep(0.1)
        without.append(gaps(clients[0].times[2:]))
        began = time.perf_counter()
        long = Client(random_prompt(args, args.prompt, 1000 + number), args.answer, number)
        engine.submit([long.request])
        # When each quarter of the prompt was computed.
        ends = [began]
        bar = tqdm(total=args.prompt, unit="token", desc="long prompt", file=sys.stderr)
        while not long.ended.wait(0.005):
            bar.update(long.request.filled - bar.n)
            while len(ends) <= QUARTERS and long.request.filled * QUARTERS >= (
                args.prompt * len(ends)
            ):
                ends.append(time.perf_counter())
        bar.close()
        ended = time.perf_counter()
        for client in clients:
            engine.cancel(client.request)
        times = np.array(clients[0].times)
        ends[-1] = long.times[0]
        for quarter in range(QUARTERS):
            inside = times[(times >= ends[quarter]) & (times < ends[quarter + 1])]
            beside[quarter].append(gaps(inside))
        after.append(gaps(times[(times >= ends[-1]) & (times < ended)]))
        print(
            f"round {number}: the first token of the long answer after {ends[-1] - began:.1f} s, "
            f"of {len(long.wait())}; quarters of the prompt in "
            f"{', '.join(f'{s:.1f}' for s in np.diff(ends))} s",
            flush=True,
        )
    base = np.concatenate(without)
    print(f"without the long prompt: {described(base)}")
    for quarter, parts in enumerate(beside, 1):
        print(f"beside quarter {quarter} of it: {described(np.concatenate(parts), base)}")
    print(f"beside its answer: {described(np.concatenate(after), base)}")
    every = np.concatenate([part for parts in beside for part in parts])
    print(f"beside all of the prompt: {described(every, base)}")


def compare(args: argparse.Namespace, network: CausalTransformer) -> int:
    """Return how many answers differ from those of a server without other requests."""
    results = []
    for together in (True, False):
        engine = Engine(
            network,
            Metrics(args.short + 1),
            rows=args.short + 1,
            fixed_shapes=True,
            kept_tokens=0,
            cache_tokens=args.seq + (args.short + 1) * 2048,
        )
        engine.start()
        clients = short_clients(args, args.length)
        clients.append(Client(random_prompt(args, args.prompt, 1000), LONG_ANSWER, 1))
        if together:  # so that the long prompt is computed while the others run
            engine.submit([client.request for client in clients])
        for client in clients:
            if not together:
                engine.submit([client.request])
            client.wait()
        if together:
            short, long = [client.times for client in clients[:-1]], clients[-1].times
            print(f"in fixed shapes the others ended {max(max(t) for t in short) - long[0]:.1f} s")
        results.append([client.tokens for client in clients])
        engine.close()
    return sum(one != other for one, other in zip(*results, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default, text in (
        ("layers", 1, "layers"),
        ("width", 512, "d_model"),
        ("seq", 65536, "seq"),
        ("prompt", 60000, "tokens of the long prompt"),
        ("answer", 64, "tokens of its answer"),
        ("short", 8, "short requests"),
        ("length", 400, "tokens of their answers that are compared"),
        ("deliveries", 200, "deliveries without the long prompt"),
        ("rounds", 2, "rounds"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{text} (default {default})"
        )
    parser.add_argument("--only", choices=("times", "answers"), help="leave out the other half")
    args = parser.parse_args()
    config = Config(
        block="llama",
        layers=args.layers,
        d_model=args.width,
        n_heads=2,  # so that attention costs as much, beside the rest, as in a larger model
        key_heads=1,
        head_size=64,
        n_vocab=256,
        seq=args.seq,
        seed=1,
    )
    network = CausalTransformer(config, devices=jax.devices()[:1])
    network.init()
    network.only_generate()
    print(f"weights: {memory():.2f} GiB of memory")
    rows = args.short + 1
    if args.only != "answers":
        tokens = args.seq + rows * (RUNNING + SHORT_PROMPT)
        engine = Engine(network, Metrics(rows), rows=rows, kept_tokens=0, cache_tokens=tokens)
        pool = engine._prefiller._pages[0].pool
        state = abstract_rows(network._generator.layout, rows, pool)
        print(f"pool by plan: {bytes_per_device(state.caches) / 2**30:.3f} GiB")
        for compile_program in engine._decode_programs():
            compile_program()
            break  # the second one is for logprobs
        # A long prompt needs those for chunks and for a single prompt.
        for _, compile_program in engine._prefiller.programs():
            if compile_program.args[1] in (None, 1) or compile_program.args[0] == SHORT_PROMPT:
                compile_program()
        print(f"seconds per chunk: {engine._prefiller._seconds}, {engine._prefiller._slopes}")
        print(f"pool and programs: {memory():.2f} GiB of memory", flush=True)
        engine.start()
        measure(args, engine)
        engine.close()
        print(f"in the end: {memory():.2f} GiB of memory", flush=True)
    if args.only == "times":
        return
    different = compare(args, network)
    print(f"{different} of {rows} answers differ from those alone")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
