"""Scores a model's summaries by ROUGE: it writes one for each prompt, the given one is the truth.

The pairs are those of create_completion_tfrecords.py: the article and a separator in `prompt`, the
abstract in `completion`.  Summaries are greedy: the same model and pairs give the same scores.
"""

import argparse
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mesh_transformer.cli.arguments import (
    add_host_arguments,
    model_arguments,
    model_parser,
    positive,
)
from mesh_transformer.cli.completion_records import FILE_TYPES, Pair, read_pairs
from mesh_transformer.cli.machines import running_model
from mesh_transformer.data.documents import Bad, find_files, told
from mesh_transformer.util import InputError, run_script

METRICS = ("rouge1", "rouge2", "rougeL")
STEPS = 16  # tokens that summaries grow by between looks for their ends


def parse_arguments() -> argparse.Namespace:
    parser = model_parser(str(__doc__).partition("\n")[0])
    parser.add_argument("pairs", help="a file or a folder of .jsonl and .jsonl.zst files")
    parser.add_argument(
        "--length", type=positive, default=64, help="tokens of a summary at most (%(default)s)"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="the first N pairs alone")
    parser.add_argument("--output", metavar="FILE", help="for scores and summaries as JSON")
    parser.add_argument("--skip-bad", action="store_true", help="leave out lines that are no pairs")
    add_host_arguments(parser, required=False)
    return parser.parse_args()


def summaries(network: Any, tokenizer: Any, prompts: Sequence[str], length: int) -> list[str]:
    """The likeliest summary of each; of a prompt that is too long the end is read."""
    room = network.config.seq - length
    if room < 1:
        raise InputError(f"--length {length}: the model's seq is {network.config.seq}; lower it")
    tokens = [tokenizer(prompt)["input_ids"] or [tokenizer.eos_token_id] for prompt in prompts]
    if cut := sum(len(each) > room for each in tokens):
        tqdm.write(f"{cut} of {len(tokens)} prompts have more than {room} tokens: their ends count")
    found: list[str] = [""] * len(tokens)
    order = sorted(range(len(tokens)), key=lambda index: -len(tokens[index]))
    with tqdm(total=len(order), desc="summarizing", unit="text") as bar:
        for begin in range(0, len(order), network.batch_size):
            group = order[begin : begin + network.batch_size]
            rows = [np.array(tokens[index][-room:]) for index in group]
            for index, row in zip(group, continued(network, rows, length, tokenizer), strict=True):
                found[index] = tokenizer.decode(row)
            bar.update(len(group))
    return found


def continued(
    network: Any, prompts: Sequence[np.ndarray], length: int, tokenizer: Any
) -> Iterator[list[int]]:
    """The tokens that follow each prompt of a batch, up to the end of text."""
    from mesh_transformer.generation.sampling import sampler_settings

    end, count = tokenizer.eos_token_id, len(prompts)
    batch = network.batch(network.batch_size)
    first = batch.insert(range(count), prompts, length, sampler_settings({"temp": 0}, count))
    rows = first.token[:, None]
    while rows.shape[1] < length and not (rows == end).any(axis=1).all():
        more = batch.decode(min(STEPS, length - rows.shape[1])).token[:count]
        rows = np.concatenate([rows, more], axis=1)
    for row in rows.tolist():
        yield row[: row.index(end)] if end in row else row


def scored(truths: Sequence[str], found: Sequence[str]) -> dict[str, dict[str, float]]:
    """Each metric's mean F1, precision and recall, and the standard error of the first."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise InputError("rouge-score is missing: pip install 'rouge-score>=0.1.2'") from error

    scorer = RougeScorer(METRICS, use_stemmer=True)
    each = [scorer.score(truth, text) for truth, text in zip(truths, found, strict=True)]
    results = {}
    for metric in METRICS:
        values = [scores[metric].fmeasure for scores in each]
        spread = statistics.stdev(values) if len(values) > 1 else float("nan")
        results[metric] = {
            "f1": statistics.fmean(values),
            "f1_stderr": spread / len(values) ** 0.5,
            "precision": statistics.fmean(scores[metric].precision for scores in each),
            "recall": statistics.fmean(scores[metric].recall for scores in each),
        }
    return results


def table(results: dict[str, dict[str, float]], count: int) -> str:
    columns = ("F1", "stderr", "precision", "recall")
    lines = [f"{count} examples".ljust(16) + "".join(f"{name:>10}" for name in columns)]
    for metric, values in results.items():
        name = metric.replace("rouge", "ROUGE-").ljust(16)
        lines.append(name + "".join(f"{value:10.4f}" for value in values.values()))
    return "\n".join(lines)


def write(path: str, contents: dict[str, Any]) -> None:
    draft = Path(f"{path}.partial")
    try:
        draft.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        raise InputError(f"--output {path}: {error.strerror}; choose another file") from error


def read(options: argparse.Namespace) -> list[Pair]:
    bad = Bad(options.skip_bad)
    files = find_files(options.pairs, FILE_TYPES)
    pairs = [pair for file in files for pair in read_pairs(file, bad, int)]
    if not pairs:
        left_out = f" (left out: {told(bad.counts)})" if bad.count else ""
        raise InputError(f"{options.pairs}: found no pairs{left_out}")
    return pairs[: options.limit]


def main() -> None:
    options = parse_arguments()
    path, config = model_arguments(options)
    pairs = read(options)

    from mesh_transformer.checkpoint.source import Source
    from mesh_transformer.data.tokenizer import Tokenizer
    from mesh_transformer.mesh.program import use_compilation_cache

    scored(["a"], ["a"])  # what is missing is told before the model is loaded
    model = path if config else Source(path)
    tokenizer = Tokenizer.of(None, config or Source.of(model).config, must_fit=True).loaded
    use_compilation_cache()
    with running_model(options, model, config, only_generate=True) as network:
        found = summaries(network, tokenizer, [pair.prompt for pair in pairs], options.length)
    results = scored([pair.completion for pair in pairs], found)
    if options.output:
        examples = [
            {"prompt": pair.prompt, "completion": pair.completion, "summary": text}
            for pair, text in zip(pairs, found, strict=True)
        ]
        write(options.output, {"count": len(pairs), **results, "examples": examples})
    print(table(results, len(pairs)))


if __name__ == "__main__":
    run_script(main)
