"""`Source`: the checkpoint at a path, with its format, step, config and base model."""

import functools
import os
import sys
from typing import Any

from etils import epath

from mesh_transformer.checkpoint import (
    hf_config,
    hf_files,
    native,
    native_state,
    original_files,
    peft,
)
from mesh_transformer.checkpoint.adapters import BASE_MOVED_ADVICE, Base, saved_base
from mesh_transformer.checkpoint.formats import HUGGING_FACE, Format, check_format
from mesh_transformer.checkpoint.saved_step import SavedStep
from mesh_transformer.checkpoint.step_folders import committed_steps, step_number
from mesh_transformer.config import Config
from mesh_transformer.data.gguf_header import SUFFIX, is_gguf
from mesh_transformer.data.tokenizer import TOKENIZER_FILES
from mesh_transformer.storage import files
from mesh_transformer.storage.access import AnyPath, check_bucket, local_path
from mesh_transformer.util import InputError


class Source:
    """A checkpoint to read from.  Its metadata are read on first use, and only once.

    Reading the metadata does not initialise JAX's devices, so virtual devices can be configured
    afterwards.

    Attributes:
      path: the absolute path or URI of a model folder, a step_N, a Hugging Face folder or a GGUF
        file.  For a model's folder in Hugging Face's cache, it is that of its snapshot.
      kind: the format: "original" (mesh-transformer-jax), "native", "hf" (Hugging Face), "gguf"
        (llama.cpp) or "peft".
      step: for native checkpoints, the step at `path` or, if `path` is a model folder, the newest
        step in it; None for other formats.
    """

    def __init__(self, path: AnyPath, kind: Format | None = None, *, text_only: bool = False):
        """Open the checkpoint at `path`.

        Args:
          kind: the checkpoint's format (default: detected).
          text_only: whether it is a multi-modal model of Hugging Face's, whose text part is meant.

        Raises:
          InputError: if `kind` is not a format, or if there is no checkpoint at `path`.  The latter
            is checked only if `kind` is "native" or None.
        """
        if kind is not None:
            check_format(kind)
        self.path = snapshot_of(local_path(path))
        self.text_only = text_only
        self.step: SavedStep | None = None
        if kind is None and is_gguf(self.path) and files.is_file(self.path):
            kind = "gguf"
        if kind is None and _is_original(self.path):
            kind = "original"
        if kind in (None, "native"):
            try:
                self.step, kind = native.find(self.path), "native"
            except InputError:
                # Checked last, as any model folder may hold a config.json of its own.
                whole = files.is_file(os.path.join(self.path, "config.json"))
                adapters = files.is_file(os.path.join(self.path, peft.CONFIG))
                if kind == "native" or not (whole or adapters):
                    raise
                if whole and adapters and hf_files.has_weights(self.path):
                    raise InputError(
                        f"{self.path} holds both a model (config.json) and adapters of another "
                        f"({peft.CONFIG}); move one of them to a folder of its own"
                    ) from None
                kind = "peft" if adapters else "hf"
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
        if self.kind == "gguf" or files.is_folder(self.checkpoint_path):
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
        if self.kind in HUGGING_FACE:
            return hf_config.read_config(self.path, text_only=self.text_only)
        if self.adapters is not None:
            return self.read_adapters(None)[0]
        raise InputError(
            f"{self.path}: checkpoints of mesh-transformer-jax do not store a config; give the "
            "config that the model was trained with (--config)"
        )

    @functools.cached_property
    def tokenizer(self) -> str | None:
        """The name of the model's own tokenizer; None if the checkpoint does not tell."""
        if self.kind == "gguf" and self.config.tokenizer != self.path:
            return None
        if self.kind == "hf" and not {*TOKENIZER_FILES} & {*files.names(self.path)}:
            return None
        return None if self.kind == "original" else self.config.tokenizer

    @property
    def name(self) -> str:
        """The model's name: that of its folder or GGUF file, or on Hugging Face's hub."""
        path = self.path.rstrip("/")
        if step_number(path) is not None:  # the model folder's name
            path = os.path.dirname(path)
        *_, above, parent, name = ["", "", *path.split("/")]
        if parent == "snapshots" and above.startswith("models--"):
            return above.removeprefix("models--").replace("--", "/")
        return name.removesuffix(SUFFIX)

    @property
    def identity(self) -> list[Any]:
        """The path of the checkpoint and, if it is local, the size and time of each of its files.

        It differs if the weights may differ.
        """
        path = self.checkpoint_path
        paths = [
            os.path.join(root, name)
            for root, _, names in os.walk(path)
            for name in names
            if not name.startswith(".") and not name.endswith((".jsonl", ".partial"))
        ]
        return [
            path,
            *(
                (name, *files.status(name))
                for name in sorted(paths or [path] * os.path.isfile(path))
            ),
        ]

    def with_answer_keys(self, config: Config, *, same_tokenizer: bool = False) -> Config:
        """Return a config of the model with the checkpoint's keys about answers that it lacks.

        These are `end_tokens`, `chat_template` and `sampling`.  A config with another tokenizer,
        whose ids have other meanings, is returned unchanged.

        Args:
          same_tokenizer: whether the tokenizers are known to be the same, whatever their names.
        """
        if self.kind == "original":
            return config
        own = self.config
        if not same_tokenizer and config.tokenizer != own.tokenizer:
            return config
        ids = own.end_tokens and [n for n in own.end_tokens if n < config.n_vocab]
        template = own.chat_template if config.chat_template is None else config.chat_template
        return config.replace(
            end_tokens=ids if config.end_tokens is None else config.end_tokens,
            chat_template=template,
            sampling=config.sampling or own.sampling,
        )

    @functools.cached_property
    def adapters(self) -> Base | None:
        """The record of the base model if the checkpoint holds LoRA adapters, otherwise None."""
        if self.kind == "peft":
            name = peft.base_of(self.path)
            cached = _in_cache(name)
            here = files.is_folder(local_path(name)) or not files.is_folder(cached)
            return Base(name if here else cached, {})
        return None if self.step is None else saved_base(self.step.aux, self.path)

    def base(self, path: AnyPath | None) -> "Source":
        """Return the base model of the adapters in this checkpoint.

        Args:
          path: the base model's current path (default: the one that the checkpoint names).
        """
        assert self.adapters is not None
        path = self.adapters.path if path is None else local_path(path)
        try:
            return Source(path)
        except InputError:
            raise InputError(
                f"{self.path}: the base model that its adapters were trained on is not at {path} "
                f"(no checkpoint there); {BASE_MOVED_ADVICE}"
            ) from None

    def read_adapters(self, base: "Config | Source | None") -> tuple[Config, dict[str, Any]]:
        """Return the config and the state, in host memory, of the adapters in this checkpoint.

        Args:
          base: the base model, or its config (default: the one that the checkpoint names).
        """
        if self.step is not None:
            return native_state.read(self.step, optimizer=False)
        base = self.base(None) if base is None else base
        return peft.read(self.path, base if isinstance(base, Config) else base.config)


def snapshot_of(path: str) -> str:
    """Return the snapshot of a model in Hugging Face's cache; for other paths, `path` itself.

    Args:
      path: a folder such as models--org--name, which has the folders blobs, refs and snapshots.

    Raises:
      InputError: if there are several snapshots, and refs/main names none of them.
    """
    folder, main = os.path.join(path, "snapshots"), os.path.join(path, "refs", "main")
    if not os.path.basename(path).startswith("models--") or not files.is_folder(folder):
        return path
    revisions = sorted(files.names(folder))
    if files.is_file(main):
        with files.open_file(main) as file:
            named = file.read(100).decode("utf-8", "replace").strip()
        revisions = [named] if named in revisions else revisions
    if len(revisions) != 1:
        raise InputError(
            f"{path}: expected one snapshot, or one that refs/main names, found "
            f"{', '.join(revisions) or 'none'}; give the path of a snapshot"
        )
    return os.path.join(folder, revisions[0])


def _in_cache(name: str) -> str:
    """Return the folder of a model of the hub in Hugging Face's cache, which need not exist."""
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    return os.path.join(cache, "models--" + name.replace("/", "--"))


def saved_steps(folder: AnyPath) -> list[int]:
    """Return the numbers of a model folder's steps, ascending; [] if it is not a model folder.

    The steps may be native ones or those of mesh-transformer-jax.
    """
    path = local_path(folder)
    if _is_original(path):
        return list(original_files.step_numbers(path))
    check_bucket(path)
    return committed_steps(epath.Path(path))


def _is_original(folder: str) -> bool:
    """Return whether a folder holds a checkpoint of mesh-transformer-jax.

    This is the case if the folder or a step in it has shards, or if the folder has a meta.json
    that lists checkpoints.
    """
    step = next(original_files.step_numbers(folder), None)
    if step is not None or original_files.entry_numbers(folder, "shard"):
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
