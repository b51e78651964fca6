"""Score a model's summaries of prompts by ROUGE, with the given completions as references.

The input has the format of create_completion_tfrecords.py: each line has an article and a separator
in `prompt`, and its reference summary in `completion`.  Summaries are decoded greedily, so the same
model and input always give the same scores.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from mesh_transformer import extras
from mesh_transformer.cli.arguments import model_arguments, model_parser, positive
from mesh_transformer.cli.machines import add_host_arguments, running_model
from mesh_transformer.data.completions import Pair
from mesh_transformer.data.file_types import TABLE_TYPES
from mesh_transformer.data.inputs import BadInputHandler, find_files
from mesh_transformer.data.rows import no_pairs_error, read_pairs
from mesh_transformer.data.special_tokens import before_end, end_tokens, prompt_tokens
from mesh_transformer.storage import files
from mesh_transformer.util import InputError, run_script

METRICS = ("rouge1", "rouge2", "rougeL")
STEPS = 16  # tokens to decode between checks whether all summaries have ended


def parse_arguments() -> argparse.Namespace:
    parser = model_parser(str(__doc__).partition("\n")[0])
    parser.add_argument("pairs", help="a .jsonl or .jsonl.zst file, or a folder of such files")
    parser.add_argument(
        "--length",
        type=positive,
        default=64,
        help="maximum tokens per summary (default %(default)s)",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="use only the first N pairs")
    parser.add_argument("--output", metavar="FILE", help="JSON file for scores and summaries")
    parser.add_argument("--skip-bad", action="store_true", help="skip lines that are not pairs")
    add_host_arguments(parser, required=False)
    return parser.parse_args()


def summaries(network: Any, tokenizer: Any, prompts: Sequence[str], length: int) -> list[str]:
    """Return the greedily decoded summary of each prompt.

    The prompt and the summary must together fit into the model's `seq`.  If a prompt is too long,
    only its last tokens are used.

    Args:
      length: the maximum number of tokens per summary.
    """
    room = network.config.seq - length
    if room < 1:
        raise InputError(
            f"--length {length} leaves no room for a prompt in the model's seq "
            f"{network.config.seq}; lower --length"
        )
    tokens = [prompt_tokens(tokenizer, prompt) for prompt in prompts]
    if cut := sum(len(prompt) > room for prompt in tokens):
        tqdm.write(
            f"{cut} of {len(tokens)} prompts have more than {room} tokens; only their last {room} "
            "are used"
        )
    texts: list[str] = [""] * len(tokens)
    order = sorted(range(len(tokens)), key=lambda index: -len(tokens[index]))
    with tqdm(total=len(order), desc="summarizing", unit="text") as bar:
        for begin in range(0, len(order), network.batch_size):
            group = order[begin : begin + network.batch_size]
            rows = [np.array(tokens[index][-room:]) for index in group]
            for index, row in zip(group, continued(network, rows, length, tokenizer), strict=True):
                texts[index] = tokenizer.decode(row, skip_special_tokens=True)
            bar.update(len(group))
    return texts


def continued(
    network: Any, prompts: Sequence[np.ndarray], length: int, tokenizer: Any
) -> Iterator[list[int]]:
    """Yield the tokens generated after each prompt of a batch, up to one that ends answers.

    That token is not included.
    """
    from mesh_transformer.generation.sampling import sampler_settings
    from mesh_transformer.generation.stream import stream_tokens

    ends = end_tokens(tokenizer, network.config)
    settings = sampler_settings({"temp": 0}, len(prompts))
    batch, rows = network.batch(network.batch_size), np.empty((len(prompts), 0), np.uint32)
    for new in stream_tokens(batch, prompts, length, settings, most=STEPS):
        rows = np.concatenate([rows, new], axis=1)
        if np.isin(rows, list(ends)).any(axis=1).all():
            break
    for row in rows.tolist():
        yield before_end(row, ends)


def scored(references: Sequence[str], candidates: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the means of F1, precision and recall of each metric, and the standard error of F1.

    A single example has no standard error.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise InputError(f"ROUGE: {extras.missing(error) or error}") from error

    scorer = RougeScorer(METRICS, use_stemmer=True)
    pair_scores = [
        scorer.score(reference, candidate)
        for reference, candidate in zip(references, candidates, strict=True)
    ]
    results = {}
    for metric in METRICS:
        values = [scores[metric].fmeasure for scores in pair_scores]
        count = len(values)
        error = {"f1_stderr": statistics.stdev(values) / count**0.5} if count > 1 else {}
        results[metric] = {
            "f1": statistics.fmean(values),
            **error,
            "precision": statistics.fmean(scores[metric].precision for scores in pair_scores),
            "recall": statistics.fmean(scores[metric].recall for scores in pair_scores),
        }
    return results


def table(results: dict[str, dict[str, float]], count: int) -> str:
    """Format the scores of `count` examples as a table."""
    columns = {"f1": "F1", "f1_stderr": "stderr", "precision": "precision", "recall": "recall"}
    lines = [f"{count} examples".ljust(16) + "".join(f"{n:>10}" for n in columns.values())]
    for metric, values in results.items():
        name = metric.replace("rouge", "ROUGE-").ljust(16)
        cells = [f"{values[key]:.4f}" if key in values else "-" for key in columns]
        lines.append(name + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def read(options: argparse.Namespace) -> list[Pair]:
    """Read all input files, and return the first `--limit` pairs of prompt and completion."""
    bad = BadInputHandler(options.skip_bad)
    paths = find_files(options.pairs, TABLE_TYPES)
    pairs = [pair for path in paths for pair in read_pairs(path, bad, int)]
    if not pairs:
        raise no_pairs_error(options.pairs, bad)
    return pairs[: options.limit]


def main() -> None:
    options = parse_arguments()
    path, config = model_arguments(options)
    pairs = read(options)

    from mesh_transformer.checkpoint.source import Source
    from mesh_transformer.data.tokenizer import Tokenizer

    scored(["a"], ["a"])  # reports a missing rouge-score before the model is loaded
    model = path if config else Source(path)
    tokenizer = Tokenizer.of(None, config or Source.of(model).config, must_fit=True).loaded
    with running_model(options, model, config, only_generate=True) as network:
        texts = summaries(network, tokenizer, [pair.prompt for pair in pairs], options.length)
    results = scored([pair.completion for pair in pairs], texts)
    if options.output:
        examples = [
            {"prompt": pair.prompt, "completion": pair.completion, "summary": text}
            for pair, text in zip(pairs, texts, strict=True)
        ]
        contents = {"count": len(pairs), **results, "examples": examples}
        try:
            files.write_text(options.output, json.dumps(contents, indent=1) + "\n")
        except OSError as error:
            line = f"--output {options.output}: {error.strerror}; choose another file"
            raise InputError(line) from error
    print(table(results, len(pairs)))


if __name__ == "__main__":
    run_script(main)
