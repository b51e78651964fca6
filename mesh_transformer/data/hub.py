"""Downloads datasets from the Hugging Face hub, with the package datasets."""

import os
import re
from typing import Any

from mesh_transformer import extras
from mesh_transformer.util import InputError

COMMIT = re.compile(r"[0-9a-f]{40}")


def download(
    name: str, subset: str | None, split: str | None
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Download a dataset into the cache of the package datasets, unless it is there already.

    The environment variables of that package apply, such as HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.

    Args:
      name: the dataset's name, such as `owner/name`, or `owner/name@REVISION` for a branch, tag or
        commit.
      subset: the subset (also called config) of the dataset; required if it has several.
      split: the split to return (default: all).

    Returns:
      A dict from each split to the paths of its .arrow files, in order, and a dict that identifies
      the dataset: its name, subset and commit.

    Raises:
      InputError: if the package is missing, the dataset does not exist, or the hub cannot be
        reached.
    """
    if split is not None and not re.fullmatch(r"\w+(\.\w+)*", split):
        raise InputError(f"--split {split}: expected the name of one whole split, such as train")
    if os.path.exists(name):
        raise InputError(
            f"hf:{name}: this folder's {name} has the same name, which the package datasets would "
            "read instead; run the command in another folder"
        )
    try:
        import datasets
    except ImportError as error:
        raise InputError(f"hf:{name}: {extras.missing(error) or error}") from error
    base, _, revision = name.partition("@")
    try:
        loaded: Any = datasets.load_dataset(
            base, subset, split=split, revision=revision or None, keep_in_memory=False
        )
    except Exception as error:  # of datasets, huggingface_hub, httpx or pyarrow
        raise InputError(
            f"hf:{name}: {_reason(error)}; check the name, --subset, --split and the network"
        ) from error
    splits = {split: loaded} if split is not None else dict(loaded)
    paths = {key: [file["filename"] for file in part.cache_files] for key, part in splits.items()}
    origin = {"name": base, "subset": next(iter(splits.values())).info.config_name or ""}
    # The cache has a folder for each commit of a dataset.
    folders = [os.path.dirname(path) for files in paths.values() for path in files]
    commits = set(filter(COMMIT.fullmatch, map(os.path.basename, folders)))
    return paths, origin | {"commit": ", ".join(sorted(commits))}


def _reason(error: Exception) -> str:
    """Return what the hub or the package reports, in one line of at most 300 characters."""
    texts = [str(error)]
    if error.__cause__ is not None:  # "An error occurred while generating the dataset"
        texts.append(str(error.__cause__))
    text = ": ".join(" ".join(text.split()).rstrip(".") for text in texts)
    return text if len(text) <= 300 else f"{text[:297]}..."
