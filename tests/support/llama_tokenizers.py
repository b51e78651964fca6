"""Small tokenizers like those of Llama 2, whose decoders drop the space at the start of a text."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPACE = "\u2581"  # in the names of tokens, instead of a space
# Text of which the vocabulary has some words, some characters, and the rest as bytes.
PIECES = [
    "the",
    "he",
    "a",
    " ",
    "  ",
    " the",
    " a",
    "\n",
    "\u00e9",
    "\u65e5\u672c",
    "\U0001f44d",
    ".",
]


def _model() -> models.BPE:
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [*"\u2581theaxyz.", "th", "the", "he", f"{SPACE}a", f"{SPACE}the", SPACE * 2]
    merges = [("t", "h"), ("th", "e"), (SPACE, "the"), ("h", "e"), (SPACE, "a"), (SPACE, SPACE)]
    vocabulary = {name: number for number, name in enumerate(names)}
    return models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)


def _wrapped(tokenizer: Tokenizer) -> Any:
    ends = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def _llama() -> Any:
    tokenizer = Tokenizer(_model())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _wrapped(tokenizer)


def _metaspace() -> Any:
    tokenizer = Tokenizer(_model())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _wrapped(tokenizer)


LLAMA_LIKE = {"llama": _llama, "metaspace": _metaspace}  # {kind: function that makes a tokenizer}
