"""The clean-ups of text that create_finetune_tfrecords.py offers."""

import re
from collections.abc import Callable


def wikitext_detokenize(text: str) -> str:
    """Undo WikiText's spacing of punctuation, by the original's rules in the original's order.

    Original: one more rule, for years written `' 90s`, was in another language's notation: it
    never matched such a year and damaged what it did match.  It is left out.
    """
    text = text.replace("s '", "s'")
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for opening, closing in ("()", "[]", "{}", '""', "''"):
        inside = f"[^{re.escape(closing)}]*?"
        pattern = rf"{re.escape(opening)}\s*({inside})\s*{re.escape(closing)}"
        text = re.sub(pattern, rf"{opening}\1{closing}", text)
    for count in (4, 3, 2):
        text = text.replace(" ".join("=" * count), "=" * count)
    for spaced, joined in ((" \u00b0 ", "\u00b0"), (" \n", "\n"), ("\n ", "\n")):
        text = text.replace(spaced, joined)
    return text.replace(" N ", " 1 ").replace(" 's", "'s")


def cleaner(use_ftfy: bool, use_wikitext: bool) -> Callable[[str], str]:
    """The chosen clean-ups as one function: ftfy's repair of garbled text, then WikiText's."""
    steps: list[Callable[[str], str]] = []
    if use_ftfy:
        import ftfy

        steps.append(lambda text: ftfy.fix_text(text, normalization="NFKC"))
    if use_wikitext:
        steps.append(wikitext_detokenize)

    def clean(text: str) -> str:
        for step in steps:
            text = step(text)
        return text

    return clean
