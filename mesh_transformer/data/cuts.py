"""Where a document may be cut: where its tokenizer is known to split the text."""

import json
import re
from typing import Any, NamedTuple

# The regular expressions that split text into words in GPT-2, in Llama 3, and in Qwen 2.
_LETTERS = r"'s|'t|'re|'ve|'m|'ll|'d"
_LLAMA = (
    rf"(?i:{_LETTERS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = (
    rf"{_LETTERS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",
    _LLAMA.replace("DIGITS", "{1,3}"),
    _LLAMA.replace("DIGITS", ""),
)
# Normalizers that change the text on each side of a space by itself.  The others may leave out
# the character before it, or add spaces, which matters unless all of these are left out.
NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")
OTHER_NORMALIZERS = ("StripAccents", "BertNormalizer")
# Pre-tokenizers that split between characters of two kinds, but not always at a space.
LOCAL = ("Digits", "Punctuation")
WHITESPACE = ("WhitespaceSplit", "Whitespace", "BertPreTokenizer")
# Other places than spaces, for text without any.  The patterns `WORDS` split between an English
# letter and a digit, before a line end after these, and between Chinese and its punctuation.
_LINES = r"(?<=[0-9A-Za-z])(?=\n)"
_KINDS = (
    rf"{_LINES}|(?<=[0-9])(?=[A-Za-z])|(?<=[A-Za-z])(?=[0-9])"
    "|(?<=[\u4e00-\u9fff])(?=[\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])"
)
_ANYWHERE = r"(?<=.)(?=[\s0-9\u4e00-\u9fff])"


class Cuts(NamedTuple):
    """The places where a text may be cut, because no token is formed across them.

    One is before each space that follows a visible character.

    Attributes:
      elsewhere: a pattern that matches the empty string at further places; None if there are none.
    """

    elsewhere: re.Pattern[str] | None = None

    def last(self, text: str) -> int:
        """Return the last of these places in a text or, if it has none, 0.

        A space is preferred, because searching for it is faster.
        """
        cut = text.rfind(" ", 1)
        while cut > 0 and (text[cut - 1].isspace() or not text[cut - 1].isprintable()):
            cut = text.rfind(" ", 1, cut)
        if cut > 0 or self.elsewhere is None:
            return max(cut, 0)
        return max((match.start() for match in self.elsewhere.finditer(text, 1)), default=0)


GPT2_CUTS = Cuts(re.compile(_KINDS))  # for all tokenizers with GPT-2's words, such as our own


def cuts_of(tokenizer: Any) -> Cuts | None:
    """Return where text for a tokenizer may be cut; None if its documents must stay whole.

    The tokens of the pieces are then those of the whole document.  This is known for tokenizers
    that split text into words before they form tokens, by rules that are known, and that change no
    text across a word's end.  They are recognised by their definition.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    definition = json.loads(backend.to_str())
    normalizers = _steps(definition["normalizer"], "normalizers")
    stages = _steps(definition["pre_tokenizer"], "pretokenizers")
    leaves_out_spaces = bool(stages) and stages[0]["type"] in WHITESPACE
    known = NORMALIZERS + (OTHER_NORMALIZERS if leaves_out_spaces else ())
    if any(step["type"] not in known for step in normalizers):
        return None
    if not normalizers and _has_only_characters(definition["model"], stages):
        cuts = Cuts(re.compile(_ANYWHERE, re.DOTALL))
    else:
        cuts = _cuts_of_stages(stages)
    return cuts and _without_added_tokens(cuts, definition["added_tokens"], tokenizer.eos_token)


def _steps(value: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, which may be nested sequences."""
    if value is None:
        return []
    if value["type"] == "Sequence":
        return [step for inner in value[key] for step in _steps(inner, key)]
    return [value]


def _has_only_characters(model: dict[str, Any], stages: list[dict[str, Any]]) -> bool:
    """Return whether each token is a character or byte, whatever is before and after it."""
    together = ("merges", "fuse_unk", "continuing_subword_prefix", "end_of_word_suffix")
    return (
        model["type"] == "BPE"
        and not any(model[key] for key in together)
        and all(
            stage["type"] == "ByteLevel" and not (stage["use_regex"] or stage["add_prefix_space"])
            for stage in stages
        )
    )


def _cuts_of_stages(stages: list[dict[str, Any]]) -> Cuts | None:
    """Return the places where pre-tokenizers split, given in the order in which they run."""
    while stages and stages[0]["type"] in LOCAL:
        stages = stages[1:]
    if not stages:
        return None
    first = stages[0]
    # Metaspace may treat the beginning of a text in its own way, but not if that is a space.
    has_metaspace = any(stage["type"] == "Metaspace" for stage in stages)
    if first["type"] in WHITESPACE:
        return Cuts(None if has_metaspace else re.compile(_LINES))
    if first["type"] == "Metaspace" and first["split"]:
        return Cuts()
    if first["type"] == "ByteLevel" and first["use_regex"]:
        adds_space = first["add_prefix_space"] or has_metaspace
        return Cuts(None if adds_space else re.compile(_KINDS))
    is_isolated = first.get("behavior") == "Isolated" and not first.get("invert")
    if first["type"] == "Split" and first["pattern"].get("Regex") in WORDS and is_isolated:
        return Cuts(None if has_metaspace else re.compile(_KINDS))
    return None


def _without_added_tokens(
    cuts: Cuts, added: list[dict[str, Any]], separator: str | None
) -> Cuts | None:
    """Return the cuts that cannot be inside or at the end of an added token.

    Args:
      added: the added tokens, which are found in a text before it is split.
      separator: the token that separates documents, and so does not occur in them.
    """
    for token in added:
        text = token["content"]
        if text == separator:
            continue
        if token["rstrip"] or token["single_word"] or Cuts().last(text):
            return None
        if cuts.last(text):
            cuts = Cuts()
    return cuts
