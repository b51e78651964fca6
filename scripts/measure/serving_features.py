"""Measure what common beginnings, chunks and guesses save, with and without them in this process.

* evaluation: the logprobs of answers to questions that all begin with the same examples, computed
  together or one text at a time.
* chunks: the time between two deliveries of a running answer while long prompts arrive, computed
  in chunks or whole, compared with the time while nothing arrives.
* guesses: the time of a decode step that checks guesses, compared with one that makes none, and the
  number of tokens that it generates for an answer that quotes the prompt.  Guesses make such an
  answer faster by the quotient of the two.
* draft: the time of a step whose guesses are those of a draft with `--draft-layers` layers, and how
  much faster answers are if all guesses are right.

The model has random weights, so the quoting answer is not its own: sentences of README.md stand for
it, and each step is given the text so far.  Measurements with and without alternate.
"""

import argparse
import functools
import itertools
import re
import statistics
import tempfile
import threading
import time
from pathlib import Path

import jax
import numpy as np

from mesh_transformer.generation.sampling import SamplingOptions, sampler_settings
from mesh_transformer.generation.speculation import guess
from mesh_transformer.performance.benchmark import timed
from mesh_transformer.serving.engine import Engine, Progress, Request
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.transformer_shard import CausalTransformer

GREEDY = SamplingOptions(temp=0.0, top_p=1.0)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "what",
        nargs="*",
        default=["evaluation", "chunks", "guesses", "draft"],
        help="what to measure (default: evaluation chunks guesses draft)",
    )
    for name, default, text in (
        ("layers", 12, "layers"),
        ("width", 768, "d_model"),
        ("heads", 12, "heads"),
        ("vocabulary", 50400, "n_vocab"),
        ("seq", 2048, "seq"),
        ("prompt", 1500, "tokens of the examples, and of the prompts that arrive"),
        ("questions", 8, "questions, each with 4 answers"),
        ("arrivals", 4, "long prompts that arrive per round"),
        ("guess", 4, "guessed tokens per step"),
        ("draft-layers", 2, "layers of the draft"),
        ("rounds", 3, "rounds"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{text} (default {default})"
        )
    return parser.parse_args()


def measure_evaluation(args: argparse.Namespace, network: CausalTransformer) -> None:
    from mesh_transformer.evaluation import network_lm

    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return rng.integers(0, args.vocabulary, count).tolist()

    examples = tokens(args.prompt)
    contexts = [examples + tokens(48) for _ in range(args.questions)]
    requests = [(None, context, tokens(8)) for context in contexts for _ in range(4)]
    model = network_lm.NetworkLM(network, None)
    group = network_lm.common_beginnings
    results = {}

    def score(together: bool) -> None:
        network._generator._begun = None  # the beginning is computed in every round
        network_lm.common_beginnings = group if together else lambda *args, **kwargs: []
        results[together] = model._loglikelihood_tokens(requests, disable_tqdm=True)
        network_lm.common_beginnings = group

    for together in (True, False):
        score(together)  # compiles
    ratios = []
    for _ in range(args.rounds):
        apart, joined = (timed(functools.partial(score, x))[0] for x in (False, True))
        ratios.append(apart / joined)
    worst = max(abs(one - other) for (one, _), (other, _) in zip(*results.values(), strict=True))
    print(
        f"evaluation: {len(requests)} texts of {args.prompt + 56} tokens take "
        f"{statistics.median(ratios):.2f} times as long one at a time ({min(ratios):.2f} to "
        f"{max(ratios):.2f}); logprobs differ by at most {worst:.1e}"
    )


def gaps(engine: Engine, args: argparse.Namespace, arrivals: int) -> list[float]:
    """Return the times between two deliveries of an answer, while long prompts arrive.

    Without arrivals, as many deliveries are timed as there are in about a second.
    """
    rng = np.random.default_rng(1)
    times: list[float] = []
    began, served = threading.Event(), threading.Semaphore(0)

    def deliver(progress: Progress) -> None:
        times.append(time.perf_counter())
        if len(times) > 2:
            began.set()

    def end(progress: Progress) -> None:
        if progress.ended:
            served.release()

    running = Request(np.zeros(64, np.int32), args.seq - 64, GREEDY, deliver)
    engine.submit([running])
    assert began.wait(600)
    first = len(times)
    for _ in range(arrivals):
        prompt = rng.integers(0, args.vocabulary, args.prompt, np.int32)
        engine.submit([Request(prompt, 1, GREEDY, end)])
        served.acquire()
    if not arrivals:
        while len(times) < first + 20:
            time.sleep(0.01)
    engine.cancel(running)
    while engine.active:
        engine.submit([Request(np.zeros(1, np.int32), 1, GREEDY, end)])  # ends the turn
        served.acquire()
    return np.diff(times[first:]).tolist()


def measure_chunks(args: argparse.Namespace, network: CausalTransformer) -> None:
    engines = {}
    for name, chunk in (("chunks", 256), ("whole", args.seq)):
        engines[name] = Engine(network, Metrics(4), rows=4, chunk=chunk, kept_tokens=0)
        engines[name].warm_up()
        engines[name].start()
    alone: list[float] = []
    arriving: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(args.rounds):
        alone += gaps(engines["chunks"], args, 0)
        for name, engine in engines.items():
            arriving[name] += gaps(engine, args, args.arrivals)
    base = np.percentile(alone, 99)
    for name, times in arriving.items():
        percentiles = [np.percentile(times, q) / base for q in (50, 99, 100)]
        print(
            f"{name}: between two deliveries, the 50th and 99th percentile and the maximum are "
            f"{', '.join(f'{p:.2f}' for p in percentiles)} times the 99th percentile without "
            f"arrivals ({len(times)} deliveries)"
        )
    for engine in engines.values():
        engine.close()


def tokens_per_step(args: argparse.Namespace) -> float:
    """Return how many tokens a step generates for an answer of sentences from the prompt.

    The prompt is README.md, with a word or a sign as a token, and the answer 40 of its sentences in
    random order.
    """
    numbers: dict[str, int] = {}
    document = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    words = re.findall(r"\w+|[^\w\s]", document)[: args.prompt]
    prompt = [numbers.setdefault(word, len(numbers)) for word in words]
    ends = [0, *(at + 1 for at, word in enumerate(words) if word == ".")]
    sentences = [prompt[a:b] for a, b in itertools.pairwise(ends)]
    chosen = np.random.default_rng(0).choice(len(sentences), 40)
    answer = [token for at in chosen for token in sentences[at]]
    text = np.array(prompt + answer)
    slots = len(text)  # no token is forgotten
    newest, steps = len(prompt) - 1, 0
    run = jax.jit(guess, static_argnums=2)
    while newest + 1 < len(text):
        history = np.where(np.arange(slots) <= newest, text, 0)[None]
        guesses = np.asarray(run(history, np.array([newest]), args.guess))[0]
        right = guesses[: len(text) - newest - 1] == text[newest + 1 :][: args.guess]
        newest += 1 + int(np.cumprod(right).sum())
        steps += 1
    return len(answer) / steps


def time_of_guesses(
    args: argparse.Namespace, network: CausalTransformer, rows: int
) -> tuple[float, float, float]:
    """Return how many times as long a step with guesses takes: the least, median and most."""
    batch = network.batch(rows, guesses=args.guess)
    plain = network.batch(rows)
    settings = sampler_settings({"temp": 0.0, "top_p": 1.0}, rows)
    prompts = [np.random.default_rng(n).integers(0, args.vocabulary, 256) for n in range(rows)]
    for each in (batch, plain):
        each.insert(range(rows), prompts, 10**6, settings)
    ratios = []
    for turn in range(1 + 5 * args.rounds):
        seconds, _ = timed(functools.partial(plain.decode, 4))
        ratio = timed(functools.partial(batch.decode, 4, speculate=True))[0] / seconds
        ratios += [ratio] if turn else []  # the first turn compiles
    return min(ratios), statistics.median(ratios), max(ratios)


def measure_draft(args: argparse.Namespace, network: CausalTransformer) -> None:
    """Measure the time of steps with a draft; the random weights of the two seldom agree."""
    with tempfile.TemporaryDirectory() as folder:
        draft = CausalTransformer(network.config.replace(layers=args.draft_layers))
        draft.save(folder)
        draft.close()
        network.add_draft(folder)
    for rows in (1, 4, 16):
        step = time_of_guesses(args, network, rows)
        print(
            f"draft: with {rows} rows, a step that checks {args.guess} guesses of a draft with "
            f"{args.draft_layers} layers takes {step[1]:.2f} times as long ({step[0]:.2f} to "
            f"{step[2]:.2f}) as one that makes none; if all are right, it is at most "
            f"{(1 + args.guess) / step[1]:.2f} times as fast"
        )


def measure_guesses(args: argparse.Namespace, network: CausalTransformer) -> None:
    tokens = tokens_per_step(args)
    for rows in (1, 4, 16):
        least, median, most = time_of_guesses(args, network, rows)
        print(
            f"guesses: with {rows} rows, a step that checks {args.guess} guesses takes "
            f"{median:.2f} times as long ({least:.2f} to {most:.2f}) and generates {tokens:.2f} "
            f"tokens of a quoting answer: {tokens / median:.2f} times as fast"
        )


def main() -> None:
    args = parse_args()
    network = CausalTransformer(
        {
            "layers": args.layers,
            "d_model": args.width,
            "n_heads": args.heads,
            "n_vocab": args.vocabulary,
            "seq": args.seq,
            "pe_rotary_dims": 32,
            "dtype": "float32",
            "remat": "none",
        }
    )
    measures = {
        "evaluation": measure_evaluation,
        "chunks": measure_chunks,
        "guesses": measure_guesses,
        "draft": measure_draft,
    }
    for what in args.what:
        measures[what](args, network)


if __name__ == "__main__":
    main()
