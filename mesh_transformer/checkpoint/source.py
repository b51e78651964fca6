"""`Source`: the checkpoint at a path, with its format, step, config and base model."""

import functools
import os
import sys
from typing import Literal, get_args

from etils import epath

from mesh_transformer.checkpoint import hf_config, native, original_files
from mesh_transformer.checkpoint.adapters import Base, saved_base
from mesh_transformer.checkpoint.saved_step import SavedStep
from mesh_transformer.checkpoint.step_folders import committed_steps
from mesh_transformer.config import Config
from mesh_transformer.storage import files
from mesh_transformer.storage.access import AnyPath, check_bucket, local_path, step_number
from mesh_transformer.util import InputError

Format = Literal["original", "native", "hf"]  # a checkpoint's format
FORMATS: tuple[Format, ...] = get_args(Format)


def check_format(kind: str) -> None:
    """Raise InputError if `kind` is not a checkpoint format: "original", "native" or "hf"."""
    if kind not in FORMATS:
        raise InputError(f"format is {kind!r}, expected one of {', '.join(FORMATS)}")


class Source:
    """A checkpoint to read from.  Its metadata are read on first use, and only once.

    Reading the metadata does not initialise JAX's devices, so virtual devices can be configured
    afterwards.

    Attributes:
      path: the absolute path or URI of a model folder, a step_N or a Hugging Face folder.
      kind: the format: "original" (mesh-transformer-jax), "native" or "hf" (Hugging Face).
      step: for native checkpoints, the step at `path` or, if `path` is a model folder, the newest
        step in it; None for other formats.
    """

    def __init__(self, path: AnyPath, kind: Format | None = None):
        """Open the checkpoint at `path`.

        Args:
          kind: the checkpoint's format (default: detected).

        Raises:
          InputError: if `kind` is not a format, or if there is no checkpoint at `path`.  The latter
            is not checked if `kind` is "original" or "hf".
        """
        if kind is not None:
            check_format(kind)
        self.path = local_path(path)
        self.step: SavedStep | None = None
        if kind is None and _is_original(self.path):
            kind = "original"
        if kind in (None, "native"):
            try:
                self.step, kind = native.find(self.path), "native"
            except InputError:
                # Checked last, as any model folder may hold a config.json of its own.
                if kind == "native" or not files.is_file(os.path.join(self.path, "config.json")):
                    raise
                kind = "hf"
        self.kind: Format = kind

    @classmethod
    def of(cls, path: "AnyPath | Source") -> "Source":
        """Return the `Source` of a path; if `path` is a `Source` already, return it unchanged."""
        return path if isinstance(path, Source) else cls(path)

    def __fspath__(self) -> str:
        return self.path

    @functools.cached_property
    def checkpoint_path(self) -> str:
        """`path` itself or, if that is a model folder, the path of its newest step.

        Determined once, so it stays the same if the model folder gets a newer step.
        """
        if self.kind == "original":
            return original_files.step_folder(self.path)
        return self.path if self.step is None else str(self.step)

    def existing_path(self) -> str:
        """Return `checkpoint_path`, or the newest step's path if that step was deleted."""
        if files.is_folder(self.checkpoint_path):
            return self.checkpoint_path
        newest = Source(self.path).checkpoint_path
        print(f"{self.checkpoint_path} was deleted; loading {newest}", file=sys.stderr, flush=True)
        return newest

    @functools.cached_property
    def config(self) -> Config:
        """The model's config.

        Raises:
          InputError: for checkpoints of mesh-transformer-jax, which do not store a config.
        """
        if self.step is not None:
            return Config.from_dict(self.step.config, f"{self.path}: saved config")
        if self.kind == "hf":
            return hf_config.read_config(self.path)
        raise InputError(
            f"{self.path}: checkpoints of mesh-transformer-jax do not store a config; give the "
            "config that the model was trained with (--config)"
        )

    @functools.cached_property
    def adapters(self) -> Base | None:
        """The record of the base model if the checkpoint holds LoRA adapters, otherwise None."""
        return None if self.step is None else saved_base(self.step.aux, self.path)


def saved_steps(folder: AnyPath) -> list[int]:
    """Return the numbers of a model folder's steps, ascending; [] if it is not a model folder.

    The steps may be native ones or those of mesh-transformer-jax.
    """
    path = local_path(folder)
    if _is_original(path):
        numbers = original_files.entry_numbers(path, "step")
        steps = ((number, os.path.join(path, f"step_{number}")) for number in numbers)
        return [number for number, step in steps if original_files.entry_numbers(step, "shard")]
    check_bucket(path)
    return committed_steps(epath.Path(path))


def _is_original(folder: str) -> bool:
    """Return whether a folder holds a checkpoint of mesh-transformer-jax.

    This is the case if the folder or a step in it has shards, or if the folder has a meta.json
    that lists checkpoints.
    """
    steps = [name for name in files.names(folder) if step_number(name) is not None]
    folders = [folder, *(os.path.join(folder, step) for step in steps)]
    if any(original_files.entry_numbers(path, "shard") for path in folders):
        return True
    try:
        return bool(original_files.read_index(folder))
    except InputError:  # some other program's meta.json
        return False


def check_vacant(folder: AnyPath) -> None:
    """Raise InputError if `folder` holds a checkpoint in a format other than native."""
    if kind := other_format(folder, "native"):
        raise InputError(
            f"{folder} holds a checkpoint in {kind} format, which a run cannot resume from; "
            "choose another folder (--model-dir), and give this one as --tune-model-path, or "
            f"convert it: mesh-transformer convert --from {kind} {folder} --to native NEW"
            + (" --config CONFIG" if kind == "original" else "")
        )


def other_format(folder: AnyPath, own: Format) -> Format | None:
    """Return the format of the checkpoint in `folder` if it differs from `own`, else None.

    Also returns None if there is no checkpoint.  A config.json without weight files does not
    count as a checkpoint.
    """
    try:
        kind = Source(folder).kind
    except InputError:
        return None
    if kind == "hf":
        names = files.names(local_path(folder))
        if not any(name.endswith((".safetensors", ".bin")) for name in names):
            return None  # config.json may be another program's
    return None if kind == own else kind
