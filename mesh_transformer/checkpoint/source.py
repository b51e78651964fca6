"""What a path to a checkpoint means: its format, its step, its config; found once per load."""

import functools
import os
from typing import Literal, get_args

from mesh_transformer.checkpoint import hf, native, original_files
from mesh_transformer.checkpoint.adapters import Base, saved_base
from mesh_transformer.checkpoint.saved_step import SavedStep
from mesh_transformer.config import Config
from mesh_transformer.data.storage import AnyPath, is_uri, local_path, step_number
from mesh_transformer.util import InputError

Format = Literal["original", "native", "hf"]
FORMATS: tuple[Format, ...] = get_args(Format)


class Source:
    """A checkpoint to read from.  What it says of itself is read when needed, and only once.

    JAX is not started: its virtual devices can still be set.

    Attributes:
      path: as it was given, absolute: a model folder, one step_N of it, or a Hugging Face folder.
      kind: its format.
      step: the step that is meant, of a native checkpoint.
    """

    def __init__(self, path: AnyPath, kind: Format | None = None):
        """Finds out what is at `path`, unless its `kind` is known.

        Raises:
          InputError: where nothing is.
        """
        self.path = local_path(path)
        self.step: SavedStep | None = None
        if kind is None and _is_original(self.path):
            kind = "original"
        if kind in (None, "native"):
            try:
                self.step, kind = native.find(self.path), "native"
            except InputError:
                # Last, as any model folder may hold a config.json of its own.
                if kind == "native" or not os.path.isfile(os.path.join(self.path, "config.json")):
                    raise
                kind = "hf"
        self.kind: Format = kind

    @classmethod
    def of(cls, path: "AnyPath | Source") -> "Source":
        """The source at a path; a Source as it is."""
        return path if isinstance(path, Source) else cls(path)

    def __fspath__(self) -> str:
        return self.path

    @functools.cached_property
    def place(self) -> str:
        """The very step that `path` means: a model folder's newest changes as its run continues."""
        if self.kind == "original":
            return original_files.step_folder(self.path)
        return self.path if self.step is None else str(self.step)

    @functools.cached_property
    def config(self) -> Config:
        """The model's config; InputError for the original's format, which does not store it."""
        if self.step is not None:
            return Config.from_dict(self.step.config, f"{self.path}: saved config")
        if self.kind == "hf":
            return hf.read_config(self.path)
        raise InputError(
            f"{self.path}: checkpoints of the original do not store a config; give the one that it "
            "was trained with"
        )

    @functools.cached_property
    def adapters(self) -> Base | None:
        """What its adapters were trained on; None where it is a whole model."""
        return None if self.step is None else saved_base(self.step.aux, self.path)


def _is_original(folder: str) -> bool:
    """Whether shards are in it or in one of its steps, or its index names some."""
    if is_uri(folder) or not os.path.isdir(folder):
        return False
    steps = [name for name in os.listdir(folder) if step_number(name) is not None]
    folders = [folder, *(os.path.join(folder, step) for step in steps)]
    if any(original_files.numbered(each, "shard") for each in folders):
        return True
    try:
        return bool(original_files.read_index(folder))
    except InputError:  # meta.json is a common name
        return False


def check_vacant(folder: AnyPath) -> None:
    """InputError where a folder without native checkpoints holds one of another format."""
    if kind := other_format(folder, "native"):
        raise InputError(
            f"{folder}: holds a checkpoint in {kind} format, which a run cannot resume from; give "
            "it as --tune-model-path with another model folder, or convert it"
        )


def other_format(folder: AnyPath, own: Format) -> Format | None:
    """The format of what is in a folder, where that is not its `own`; None where it is vacant."""
    try:
        kind = Source(folder).kind
    except InputError:
        return None
    if kind == "hf":
        names = os.listdir(local_path(folder))
        if not any(name.endswith((".safetensors", ".bin")) for name in names):
            return None  # Any program may have written a config.json.
    return None if kind == own else kind
