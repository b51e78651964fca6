"""Sets of training records that are made from text; a run that is interrupted can be resumed."""

import contextlib
import dataclasses
import fcntl
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from mesh_transformer.data.corpus import PROGRESS, Corpus, Tokenizing
from mesh_transformer.data.documents import TEXT_COLUMN, cleaner
from mesh_transformer.data.inputs import InputSet, format_counts
from mesh_transformer.data.packing import (
    TextOptions,
    TextSettings,
    publish,
    sequences,
    write_parts,
)
from mesh_transformer.data.parts import Workers
from mesh_transformer.data.same_tokenizer import encoding
from mesh_transformer.data.text_parts import TextWork, TokenizingParts
from mesh_transformer.data.tokenizer import fingerprint
from mesh_transformer.storage.access import check_bucket, is_uri
from mesh_transformer.storage.files import delete, is_file, open_file, upload
from mesh_transformer.util import InputError

PARTS = "parts"  # folder, in the work folder, of the parts that other processes have tokenised
UPLOADED = "uploaded"  # folder, in the work folder, of the files that are uploaded to a bucket


@contextlib.contextmanager
def work_folder(folder: Path, new: bool) -> Iterator[None]:
    """Create a temporary folder in which to build a record set, and lock it against other runs.

    The folder is removed when the `with` block completes, or if the block raises InputError before
    any progress was saved.  In all other cases the folder remains, so that a later run can resume.

    Args:
      new: whether to discard the progress of an earlier run in the same folder.

    Raises:
      InputError: if another run has locked the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"{folder}: another run uses this folder; wait until that run ends"
            ) from error
        if new or not (folder / PROGRESS).exists():
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != "lock":
                    path.unlink()
        try:
            yield
        except InputError:
            if not (folder / PROGRESS).exists():
                shutil.rmtree(folder)
            raise
        # Delete the progress first: if the clean-up is interrupted, the next run starts over.
        (folder / PROGRESS).unlink(missing_ok=True)
        shutil.rmtree(folder)


def make_set(
    options: TextOptions, name: str, inputs: InputSet, tokenizer, workers: Workers | None = None
) -> str:
    """Make the record set `name`, or resume an interrupted run, and return a one-line summary.

    Tokens and progress are first stored in the folder `<name>.partial`; see `work_folder`.

    Args:
      inputs: the text files.
      workers: other processes that tokenise the text; None for this one.

    Raises:
      InputError: if the input is unusable, if there is not enough text for a single sequence, or if
        a record set of that name was made with other options.
    """
    output = options.output_dir
    check_bucket(output)
    work = Path("." if is_uri(output) else output) / f"{name}.partial"
    base = work / UPLOADED / name if is_uri(output) else Path(output) / name
    try:
        with work_folder(work, options.new):
            return _make(options, name, inputs, tokenizer, base, work, workers)
    except OSError as error:
        path = Path(error.filename or work)
        action = "written" if path.is_relative_to(work.parent) else "read"
        raise InputError(
            f"{path} cannot be {action} ({error.strerror or error}); check the disk "
            "and its permissions"
        ) from error


def _make(
    options: TextOptions,
    name: str,
    inputs: InputSet,
    tokenizer,
    base: Path,
    work: Path,
    workers: Workers | None,
) -> str:
    """Build a record set in the folder `work`, then move or upload it; see `make_set`.

    Args:
      base: the local path of the finished record set, without a file extension.  If the output
        folder is in a bucket, this path is inside `work`, and the files are uploaded from there.
      work: a folder for temporary files, from `work_folder`.
    """
    settings: dict[str, Any] = {
        field.name: getattr(options, field.name) for field in dataclasses.fields(TextSettings)
    }
    tokenizer_entry = {"name": options.tokenizer or "gpt2", "sha256": fingerprint(tokenizer)}
    tokenizer_entry["encoding"] = encoding(tokenizer)
    if not options.new:
        manifest = {"tokenizer": tokenizer_entry, "options": settings, "dataset": inputs.origin}
        _check_same_settings(options, name, manifest)
    generator = random.Random(options.seed)
    files = list(inputs.files)
    if not options.preserve_data_order:
        generator.shuffle(files)
    settings_of_corpus = settings | {"tokenizer": tokenizer_entry["sha256"]}
    tokenizing = _tokenizing(options, name, files, tokenizer, settings_of_corpus, work, workers)
    corpus = tokenizing.run()
    sources = tokenizing.progress.sources
    skipped = sum((Counter(source.skipped) for source in sources), Counter[str]())
    skipped = dict(sorted(skipped.items()))
    packed = sequences(corpus, options, tokenizer, generator)
    first = next(packed, None)
    if first is None:
        (work / PROGRESS).unlink()  # otherwise the next run would resume and fail here again
        raise _no_sequence_error(options, inputs, corpus, skipped)
    parts = write_parts(work, chain([first], packed), options.sequences_per_file)
    entries = [dataclasses.asdict(source) for source in sources]
    for entry in entries:
        del entry["changed"]  # the modification time, which copying the file changes
    manifest = {
        "tokens_per_sequence": options.seq + 1,
        "documents": len(corpus.sizes),
        "tokens": len(corpus.tokens),
        "skipped": skipped,
        "tokenizer": tokenizer_entry,
        "options": settings,
        **({"dataset": inputs.origin} if inputs.origin else {}),
        "sources": entries,
    }
    base.parent.mkdir(parents=True, exist_ok=True)
    replaced = is_file(f"{os.path.join(options.output_dir, name)}.index")
    index = publish(base, parts, manifest)
    names = index.read_text(encoding="utf-8").splitlines()
    paths = [str(base.with_name(name)) for name in (names[0], index.name)]
    if is_uri(options.output_dir):
        upload(str(work / UPLOADED), options.output_dir, replace=True)
        if workers is not None:
            delete(_folder_of_parts(options, name, work))
        local = [os.path.relpath(path, work / UPLOADED) for path in paths]
        paths = [os.path.join(options.output_dir, path) for path in local]
    others = f" and {len(names) - 1} others" if len(names) > 1 else ""
    count = sum(written for _, written in parts)
    remarks = "; replaced an earlier set of this name" if replaced else ""
    remarks += f"; skipped: {format_counts(skipped)}" if skipped else ""
    contents = f"{count} sequences of {options.seq + 1} tokens"
    return f"{paths[0]}{others}: {contents}; listed in {paths[1]}{remarks}"


def _tokenizing(
    options: TextOptions,
    name: str,
    files: list[str],
    tokenizer,
    settings: dict[str, Any],
    work: Path,
    workers: Workers | None,
) -> Tokenizing:
    """Return the run that tokenises the files into a corpus in the folder `work`."""
    cleaning = (options.normalize_with_ftfy, options.normalize_with_wikitext_detokenize)
    clean, column = cleaner(*cleaning), options.text_column
    arguments = (work, files, tokenizer, settings, clean, options.skip_bad, column)
    if workers is None:
        return Tokenizing(*arguments)
    folder = _folder_of_parts(options, name, work)
    if options.new:
        delete(folder)
    part_work = TextWork(folder, os.getcwd(), tokenizer, *cleaning, column)
    return TokenizingParts(*arguments, work=part_work, workers=workers)


def _folder_of_parts(options: TextOptions, name: str, work: Path) -> str:
    """Return the folder of finished parts, which all workers must reach."""
    if is_uri(options.output_dir):
        return os.path.join(options.output_dir, f"{name}.partial")
    return os.path.abspath(work / PARTS)


def _check_same_settings(options: TextOptions, name: str, manifest: dict[str, Any]) -> None:
    """Raise InputError if the record set already exists, but was created with other settings.

    Args:
      manifest: the entries "tokenizer", "options" and "dataset" of the new record set's manifest.
    """
    path = f"{os.path.join(options.output_dir, name)}.manifest.json"
    if not is_file(path):
        return
    try:
        with open_file(path) as file:
            old = json.loads(file.read())
        # Version 1.0 had no --text-column.
        before = {"text_column": TEXT_COLUMN} | old["options"]
        differences = [
            f"--{key.replace('_', '-')} {before.get(key)!r}"
            for key, value in manifest["options"].items()
            if before.get(key) != value
        ]
        if old["tokenizer"]["sha256"] != manifest["tokenizer"]["sha256"]:
            differences.append(f"--tokenizer {old['tokenizer']['name']}")
        datasets = [
            [entry[key] for key in ("name", "subset", "split") if entry[key]]
            for entry in (old.get("dataset"), manifest["dataset"])
            if entry
        ]
        if len(datasets) == 2 and datasets[0] != datasets[1]:
            differences.append(f"the dataset {' '.join(datasets[0])}")
    except (ValueError, KeyError, TypeError, AttributeError):
        return  # damaged, or of an earlier version, which the new set replaces
    if differences:
        raise InputError(
            f"{path}: this record set already exists, but was created with "
            f"{', '.join(differences)}; give "
            "another name or the same options, or replace it with --new"
        )


def _no_sequence_error(
    options: TextOptions, inputs: InputSet, corpus: Corpus, skipped: dict[str, int]
) -> InputError:
    """Return the error to raise if the text does not yield a single sequence."""
    where = inputs.files[0] if len(inputs.files) == 1 else options.input_path
    skipped_text = f" (skipped: {format_counts(skipped)})" if skipped else ""
    if not len(corpus.sizes):
        return InputError(f"{where}: all its files are empty{skipped_text}; add text to them")
    line = f"{where}: found {len(corpus.tokens)} tokens{skipped_text}"
    if len(corpus.tokens) <= options.seq:
        return InputError(
            f"{line}, but one sequence needs {options.seq + 1}; add text, or lower --seq"
        )
    return InputError(
        f"{line}, but no sequence of {options.seq + 1} tokens has at least "
        f"{options.min_unique_tokens} distinct ones; add text, or lower --seq or "
        "--min-unique-tokens"
    )
