"""The names of the checkpoint formats."""

from typing import Literal, get_args

from mesh_transformer.util import InputError

# A checkpoint's format.  "peft" is that of the package peft, and only for LoRA adapters.
Format = Literal["original", "native", "hf", "gguf", "peft"]
ALL_FORMATS: tuple[Format, ...] = get_args(Format)
# Formats of models in Hugging Face's terms, and all those whose models have no steps.
HUGGING_FACE: tuple[Format, ...] = ("hf", "gguf")
WITHOUT_STEPS: tuple[Format, ...] = (*HUGGING_FACE, "peft")
FORMATS: tuple[Format, ...] = ("original", "native", "hf")  # of whole models, GPT-J included


def check_format(kind: str) -> None:
    """Raise InputError if `kind` is not a checkpoint format, one of `ALL_FORMATS`."""
    if kind not in ALL_FORMATS:
        raise InputError(f"format is {kind!r}, expected one of {', '.join(ALL_FORMATS)}")
