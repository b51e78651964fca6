"""Finds and opens input files: files and folders, saved datasets, datasets on the hub."""

import codecs
import collections
import contextlib
import fnmatch
import gzip
import json
import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

from tqdm import tqdm

from mesh_transformer.data import hub
from mesh_transformer.data.file_types import FileType, format_types, has_ending, is_hidden
from mesh_transformer.storage import files
from mesh_transformer.util import InputError

HUB = "hf:"  # what the name of a dataset on the Hugging Face hub begins with
# Files that `save_to_disk` of a Hugging Face DatasetDict or Dataset writes into its folder.
SPLITS_FILE, STATE_FILE, INFO_FILE = "dataset_dict.json", "state.json", "dataset_info.json"


class DamagedError(Exception):
    """Error for a damaged file of a format whose own errors depend on a package."""


DAMAGE_ERRORS = (
    DamagedError,
    EOFError,
    gzip.BadGzipFile,
    lzma.LZMAError,
    tarfile.TarError,
    zlib.error,
)
MAX_PRINTED = 20  # skipped items that a `BadInputHandler` prints; further ones are only counted


class BadInputError(InputError):
    """Error for an unusable line or document, or a damaged file; other input can still be read.

    Attributes:
      reason: a short category, such as "not JSON"; skipped items are counted by category.
    """

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class BadInputHandler:
    """Stops at unusable input, or skips and counts it.

    Call the handler with a BadInputError for each unusable item.

    Args:
      skip: if false, each call raises InputError.  If true, each call counts the item by the
        error's reason, and the first 20 (`MAX_PRINTED`) calls also print the error.  None is as
        false, for commands without the flag --skip-bad.

    Attributes:
      counts: the number of skipped items by reason.
    """

    def __init__(self, skip: bool | None):
        self.skip = skip
        self.counts: collections.Counter[str] = collections.Counter()

    def __call__(self, error: BadInputError) -> None:
        if self.skip is None:
            raise error
        if not self.skip:
            raise InputError(f"{error}; fix the input, or skip such input with --skip-bad")
        if self.count < MAX_PRINTED:
            tqdm.write(f"skipped: {error}")
        self.counts[error.reason] += 1

    @property
    def count(self) -> int:
        return self.counts.total()


def format_counts(counts: dict[str, int]) -> str:
    """Format counts by reason as text, largest count first, such as "3 not JSON, 1 no text"."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {reason}" for reason, count in ordered)


class InputSet(NamedTuple):
    """Input files that belong together.

    Attributes:
      name: the file's name without its ending, the split of a dataset, or the name of a folder.
      files: the paths of the files, in reading order.
      origin: for a dataset on the hub: its name, subset, split and commit.
      left_out: a line that counts the entries of the folder that are left out, with two names for
        each reason; empty if there are none, or if the input is not a folder.
    """

    name: str
    files: list[str]
    origin: dict[str, str] | None = None
    left_out: str = ""


def find_sets(
    path: str, types: tuple[str, ...], split: str | None = None, subset: str | None = None
) -> list[InputSet]:
    """Return the sets of input files at `path`: one per file, or one per split of a dataset.

    Args:
      path: a file, or a pattern of file names such as `data/train-*.parquet`; a folder, whose
        subfolders are read, too; a folder written by `save_to_disk` of a Hugging Face Dataset or
        DatasetDict; or `hf:NAME`, a dataset on the Hugging Face hub, which is downloaded.
      types: the accepted kinds of files (see `FileType`); a folder's other files are left out.
      split: the only split of a dataset to return.
      subset: the subset (also called config) of a dataset on the hub.

    Raises:
      InputError: if there is no such input, or no file has an accepted ending.
    """
    splits, origin = None, None
    if path.startswith(HUB):
        splits, origin = hub.download(path.removeprefix(HUB), subset, split)
    elif subset is not None:
        raise InputError(f"--subset {subset}: only a dataset on the hub (hf:NAME) has subsets")
    elif (saved := _saved(path)) == SPLITS_FILE:
        file = os.path.join(path, SPLITS_FILE)
        names = _read_json(file, lambda value: [str(name) for name in value["splits"]])
        splits = {name: _saved_files(os.path.join(path, name)) for name in names}
    elif saved == STATE_FILE and split is None:
        return [InputSet(os.path.basename(os.path.normpath(path)), _saved_files(path))]
    if splits is None:
        if split is not None:
            raise InputError(
                f"--split {split}: {path} is not a dataset with splits; remove --split"
            )
        paths, line = _find_files(path, types)
        return [InputSet(_stem(file), [file], None, line) for file in paths]
    if split is not None and split not in splits:
        raise InputError(
            f"--split {split}: {path} has no such split; choose one of {', '.join(splits)}"
        )
    return [
        InputSet(name, paths, None if origin is None else origin | {"split": name})
        for name, paths in splits.items()
        if split in (None, name)
    ]


def find_set(
    path: str, types: tuple[str, ...], split: str | None = None, subset: str | None = None
) -> InputSet:
    """Return all input files at `path` as a single set, in order of their names.

    See `find_sets` for the arguments.

    Raises:
      InputError: also if `path` is a dataset with several splits, and `split` is None.
    """
    sets = find_sets(path, types, split, subset)
    if len(sets) == 1:
        return sets[0]
    if path.startswith(HUB) or _saved(path):
        raise InputError(
            f"{path} has the splits {', '.join(inputs.name for inputs in sets)}; choose one with "
            "--split"
        )
    all_files = [file for inputs in sets for file in inputs.files]
    return InputSet(path, all_files, None, sets[0].left_out)


def find_files(
    path: str, types: tuple[str, ...], split: str | None = None, subset: str | None = None
) -> list[str]:
    """Return the paths of the input files at `path`; see `find_set`."""
    return find_set(path, types, split, subset).files


def _find_files(path: str, types: tuple[str, ...]) -> tuple[list[str], str]:
    """Return the paths of files, and a line on those that are left out; see `InputSet`."""
    folder, name = os.path.split(path)
    left: dict[str, list[str]] = {}
    if files.is_file(path):
        paths = [path]
    elif files.is_folder(path):
        paths, left = _files_in(path, types)
    elif set(name) & set("*?[") and files.is_folder(folder or "."):
        paths = _files_in(folder, types, name)[0]
    else:
        is_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) and not has_ending(path)
        hint = f", or give {HUB}{path} for a dataset on the Hugging Face hub" if is_name else ""
        raise InputError(f"{path}: no such file or folder; check the path{hint}")
    if not paths or not _has_type(paths[0], types):
        raise InputError(
            f"{path}: no text found, expected files ending in {format_types(types)}; rename or "
            "convert the files"
        )
    counts = [
        f"{len(names)} {reason} ({', '.join(names[:2])}{', ...' if len(names) > 2 else ''})"
        for reason, names in sorted(left.items())
    ]
    return paths, f"left out: {', '.join(counts)}" if counts else ""


def _has_type(path: str, types: tuple[str, ...]) -> bool:
    file_type = FileType.of(path)
    return file_type is not None and file_type.kind in types


# Names of files that describe a folder, and of those of a folder that holds no text to train on.
ABOUT = re.compile(r"(readme|licen[cs]e)(\.md)?", re.IGNORECASE)
MODEL_FILES = {"config.json", "tokenizer.json", "tokenizer_config.json", "merges.txt"}
OWN_FILES = {"metrics.jsonl", "status.json"}  # of a run
SAMPLE_BYTES = 8192  # of a file without an ending, to see whether it is a text


def _files_in(
    folder: str, types: tuple[str, ...], pattern: str | None = None
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the files of a folder that `find_files` reads, and those that it leaves out.

    Files in subfolders are read too, unless there is a pattern.  README and LICENSE are left out if
    they are Markdown or have no ending, and .json files if there are files of other types, because
    they then tend to describe those.

    Returns:
      The paths of the files that are read, and the names of all other entries by the reason.
    """
    kept: list[str] = []
    left: dict[str, list[str]] = collections.defaultdict(list)

    def add(inside: str) -> None:
        for name in sorted(files.names(os.path.join(folder, inside) or ".")):
            if pattern is not None and not fnmatch.fnmatchcase(name, pattern):
                continue
            relative = os.path.join(inside, name)
            path = os.path.join(folder, relative)
            # Of a file in a bucket, each question is a request.
            is_file = _has_type(name, types) and files.is_file(path)
            is_folder = not is_file and files.is_folder(path)
            if is_hidden(name):
                reason = "hidden"
            elif is_folder:
                reason = _reason_of_folder(path)
            else:
                reason = _reason_of_file(path) if is_file else "of other types"
            if reason:
                left[reason].append(f"{relative}/" if is_folder else relative)
            elif not is_folder:
                kept.append(relative)
            elif pattern is None:
                add(relative)

    add("")
    others = [name for name in kept if not _has_type(name, (".json",))]
    if others and len(others) < len(kept):
        left["of other types"] += sorted({*kept} - {*others})
        kept = others
    return [os.path.join(folder, name) for name in kept], left


def _reason_of_folder(path: str) -> str:
    """Say why a subfolder is left out; return "" if it is not."""
    if os.path.islink(path):  # it may lead back
        return "linked"
    if path.endswith(".partial"):  # see `cli.text_records`
        return "unfinished"
    inside = files.names(path)
    if MODEL_FILES & {*inside}:
        return "of a model or tokenizer"
    own = any(name in OWN_FILES or name.endswith(".index") for name in inside)
    return "of records or a run" if own else ""


def _reason_of_file(path: str) -> str:
    """Say why a file of a folder is left out; return "" if it is not."""
    name = os.path.basename(path)
    if name.endswith((".manifest.json", ".offsets")) or name in OWN_FILES:
        return "of records or a run"
    if ABOUT.fullmatch(name):
        return "README or LICENSE"
    return "" if has_ending(name) or _is_text(path) else "not UTF-8"


def _is_text(path: str) -> bool:
    """Return whether the beginning of a file is UTF-8; also if it cannot be read."""
    try:
        with files.open_file(path) as file:
            sample = file.read(SAMPLE_BYTES)
        codecs.getincrementaldecoder("utf-8")().decode(sample)
    except UnicodeDecodeError:
        return False
    except OSError:  # reading the text will say why
        return True
    return b"\0" not in sample


def _stem(path: str) -> str:
    file_type = FileType.of(path)
    return file_type.stem if file_type else os.path.basename(path)


def _saved(path: str) -> str | None:
    """Return whether `save_to_disk` has written a folder: None if not.

    Returns `SPLITS_FILE` for a DatasetDict, and `STATE_FILE` for a Dataset, which has no splits.
    """
    names = set(files.names(path)) if files.is_folder(path) else set()
    if SPLITS_FILE in names:
        return SPLITS_FILE
    return STATE_FILE if {STATE_FILE, INFO_FILE} <= names else None


def _saved_files(folder: str) -> list[str]:
    """Return the paths of the .arrow files of a saved Hugging Face Dataset.

    Raises:
      InputError: if a file is missing, or the dataset was saved with a selection of its rows, as
        early versions of the package datasets did.
    """
    path = os.path.join(folder, STATE_FILE)
    names = _read_json(path, lambda value: [entry["filename"] for entry in value["_data_files"]])
    if _read_json(path, lambda value: value.get("_indices_data_files")):
        raise InputError(
            f"{path}: the dataset is stored with a selection of its rows; save it again with a "
            "newer version of the package datasets"
        )
    paths = [os.path.join(folder, name) for name in names]
    for file in paths:
        if not files.is_file(file):
            raise InputError(f"{file}: no such file, but {path} lists it; save the dataset again")
    return paths


def _read_json(path: str, field: Callable[[Any], Any]) -> Any:
    """Return the result of `field` on the value in a JSON file of a saved dataset."""
    try:
        with files.open_file(path) as file:
            return field(json.loads(file.read()))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: not a file of a saved dataset; save the dataset again"
        ) from error


@contextlib.contextmanager
def open_input(path: str, bad: BadInputHandler) -> Iterator[IO[bytes]]:
    """Return a context manager that opens a file for reading bytes.

    If the code in the `with` block raises one of the errors in DAMAGE_ERRORS, the error is
    suppressed, and `bad` is called with a BadInputError saying that the file is damaged.

    Raises:
      InputError: if the file cannot be read.
    """
    try:
        with files.open_file(path) as raw:
            yield raw
    except DAMAGE_ERRORS as error:
        bad(BadInputError("damaged", f"{path}: damaged or cut short: {error}"))
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror or error}); check its permissions"
        ) from error
