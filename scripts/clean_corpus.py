"""Clean a corpus with datatrove: quality, duplicates and contamination, then one count of each.

`python scripts/clean_corpus.py TEXTS CLEAN --evaluation QUESTIONS` reads all JSON Lines files of
the folder TEXTS, whose lines have `text`, and writes those documents to the folder CLEAN that pass,
as JSON Lines for `mesh-transformer records CLEAN`.  With --ray, the steps run on a Ray cluster.
A document is left out if

* it is not like prose (Gopher's rules, Rae et al. 2021, and its rules about repetition),
* another document is the same up to small changes (MinHash with LSH, Broder 1997), or
* it shares a run of 12 words with a line's `text` in QUESTIONS, the evaluation sets.

What is left out is in the folder WORK (default: CLEAN.work), with the reason in its metadata.
Finished parts are not computed again if the command is repeated.

It needs `pip install -r requirements-clean.txt`, in an environment of its own.
"""

# pyright: reportMissingImports=false

import argparse
import hashlib
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.decont.n_grams import NGramsDecontConfig, NGramsDecontFilter
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.text import ngrams, simplify_text

WORDS = NGramsDecontConfig(n_grams=12)
MINHASH = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8)


def executor(args: argparse.Namespace, name: str, steps: list[Any], tasks: int) -> Any:
    """Return what runs `steps`, in this number of tasks."""
    options = {"tasks": tasks, "logging_dir": str(Path(args.work) / "logs" / name)}
    if not args.ray:
        return LocalPipelineExecutor(steps, workers=args.workers, **options)
    from datatrove.executor.ray import RayPipelineExecutor

    return RayPipelineExecutor(steps, workers=args.workers, **options)


def write_index(questions: str, folder: Path) -> None:
    """Write the hashes of all runs of words in the texts of a file of JSON Lines."""
    reader, hashes = NGramsDecontFilter(str(folder), WORDS), set[int]()
    for line in Path(questions).read_text(encoding="utf-8").splitlines():
        text = simplify_text(json.loads(line)["text"], WORDS.norm_config)
        runs = ngrams(reader.tokenizer.word_tokenize(text), WORDS.n_grams)
        hashes.update(map(reader.hash_func, map(" ".join, runs)))
    folder.mkdir(parents=True, exist_ok=True)
    dtype = WORDS.hash_config.np_descr
    np.array(sorted(hashes), dtype).tofile(folder / f"{Path(questions).stem}.index.hashes")


def check_same(args: argparse.Namespace, work: Path) -> None:
    """End the program if its finished parts are those of another command."""
    settings = {"texts": os.path.abspath(args.texts), "tasks": args.tasks, "evaluation": None}
    if args.evaluation:
        content = Path(args.evaluation).read_bytes()
        settings["evaluation"] = hashlib.sha256(content).hexdigest()
    path = work / "settings.json"
    if path.exists() and json.loads(path.read_text()) != settings:
        sys.exit(f"{path}: begun with {path.read_text()}; repeat that command, or delete {work}")
    work.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings))


def count(folder: Path) -> Counter[str]:
    """Return the numbers of documents in files of JSON Lines, by the reason in their metadata."""
    result: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            result[json.loads(line).get("metadata", {}).get("filter_reason", "document")] += 1
    return result


def writer(folder: Path) -> JsonlWriter:
    return JsonlWriter(str(folder), compression=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("texts", help="folder of JSON Lines files whose lines have `text`")
    parser.add_argument("clean", help="folder for the documents that are kept")
    parser.add_argument("--evaluation", help="JSON Lines file with the texts of evaluation sets")
    parser.add_argument("--work", help="folder of what is left out and of the parts")
    parser.add_argument("--tasks", type=int, default=8, help="parts of the corpus (default 8)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="tasks at a time")
    parser.add_argument("--ray", action="store_true", help="run the tasks on a Ray cluster")
    args = parser.parse_args()
    args.work = args.work or f"{args.clean}.work"
    work, out = Path(args.work), Path(args.work) / "left_out"

    def reader() -> JsonlReader:
        return JsonlReader(args.texts, glob_pattern="**/*.jsonl*")

    check_same(args, work)
    good = work / "good"
    quality = [
        reader(),
        GopherRepetitionFilter(exclusion_writer=writer(out / "repetition")),
        GopherQualityFilter(exclusion_writer=writer(out / "quality")),
    ]
    if args.evaluation:
        write_index(args.evaluation, work / "evaluation")
        contamination = writer(out / "contamination")
        quality.append(
            NGramsDecontFilter(str(work / "evaluation"), WORDS, exclusion_writer=contamination)
        )
    quality.append(writer(good))
    kept = JsonlReader(str(good))
    marks, pairs, remove = (str(work / "minhash" / name) for name in ("marks", "pairs", "remove"))
    signatures = MinhashDedupSignature(marks, config=MINHASH)
    buckets = MinhashDedupBuckets(marks, pairs, config=MINHASH)
    cluster = MinhashDedupCluster(pairs, remove, config=MINHASH)
    duplicates = MinhashDedupFilter(remove, exclusion_writer=writer(out / "duplicates"))
    for name, steps, tasks in (
        ("quality", quality, args.tasks),
        ("signatures", [kept, signatures], args.tasks),
        ("buckets", [buckets], MINHASH.num_buckets),
        ("cluster", [cluster], 1),
        ("duplicates", [kept, duplicates, writer(Path(args.clean))], args.tasks),
    ):
        executor(args, name, steps, tasks).run()
    print(f"{sum(count(Path(args.clean)).values())} documents kept in {args.clean}")
    for folder in sorted(out.iterdir()) if out.exists() else ():
        for reason, number in count(folder).most_common():
            print(f"{number} left out: {folder.name} ({reason})")


if __name__ == "__main__":
    main()
