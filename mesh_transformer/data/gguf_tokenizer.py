"""Tokenizers in the metadata of GGUF files: byte-level BPE, and SentencePiece's BPE.

A GGUF file does not hold a tokenizer.json.  It holds the tokens with their types, the merges or
scores, and names of llama.cpp's for the rest: `tokenizer.ggml.model` for the kind of tokenizer, and
`tokenizer.ggml.pre` for how text is split before byte-level merges apply.
"""

import json
from typing import Any, NamedTuple

from mesh_transformer.data.gguf_header import GgufHeader
from mesh_transformer.data.special_tokens import BYTE_TOKEN, beginning
from mesh_transformer.util import InputError, first_line

_PREFIX = "tokenizer.ggml."
BPE, SENTENCEPIECE = "gpt2", "llama"  # values of `tokenizer.ggml.model`
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # values of `token_type`
SPACE = "\u2581"  # SentencePiece's letter for a space
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


class Split(NamedTuple):
    """How text is split into words, within which byte-level merges apply.

    Attributes:
      pattern: a regular expression of words.
      digits: whether each digit is a word.
      whole: whether a word that is a token needs no merges.
      begins: whether texts begin with the BOS token unless the file says otherwise.
    """

    pattern: str
    digits: bool = False
    whole: bool = False
    begins: bool = False


# {`tokenizer.ggml.pre`: split}, as in llama.cpp's src/llama-vocab.cpp.  "default" is left out: it
# stands for a split that the converter did not know.  Of the names for one split, the first is
# written.
_SPLITS = {
    "gpt-2": Split(_GPT2_WORDS),
    "smollm": Split(_GPT2_WORDS, digits=True),
    "llama-bpe": Split(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}", whole=True, begins=True),
    "qwen2": Split(rf"{_WORDS}|\p{{N}}|{_REST}"),
    "dbrx": Split(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"),
    "tekken": Split(rf"{_CASED % ('', '')}|\p{{N}}|{_CASED_REST}", whole=True, begins=True),
    "gpt-4o": Split(rf"{_CASED % (_SUFFIX, _SUFFIX)}|\p{{N}}{{1,3}}|{_CASED_REST}"),
}
_SPLITS |= {
    other: _SPLITS[name]
    for name, others in (
        ("gpt-2", "olmo jais trillion phi-2"),
        ("smollm", "starcoder refact command-r codeshell exaone"),
        ("llama-bpe", "llama3 llama-v3 falcon3"),
        ("dbrx", "smaug-bpe"),
        ("qwen2", "deepseek-r1-qwen megrez"),
    )
    for other in others.split()
}
# The keys of special tokens, and their names in transformers.
_SPECIAL = {
    f"{_PREFIX}{key}_token_id": f"{name}_token"
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad"))
}
_MOST_LETTERS = 1000  # of a token that is merged, far more than vocabularies have
# A text on which any two of the splits differ.
_PROBE = "It's IT'S aB Ab  12345 1a\n\n x\r\n\t?!/\n/ \u0e01\u0e33 \u4e2d3 \u00e9\u0301."


class GgufTokenizer(NamedTuple):
    """A tokenizer from a GGUF file.

    Attributes:
      model: the `tokenizers.Tokenizer`.
      special: the special tokens by their names in transformers, such as `eos_token`, and the chat
        template.
    """

    model: Any
    special: dict[str, str]


def has_tokenizer(header: GgufHeader) -> bool:
    """Return whether a GGUF file holds a tokenizer."""
    return f"{_PREFIX}tokens" in header.metadata


def read_tokenizer(header: GgufHeader) -> GgufTokenizer:
    """Return the tokenizer that a GGUF file holds.

    Raises:
      InputError: if it is of a kind that is not supported, or damaged.
    """
    from tokenizers import AddedToken, processors

    kind = header.get(f"{_PREFIX}model", str)
    if kind not in (BPE, SENTENCEPIECE):
        raise InputError(
            f"{header.path}: {_PREFIX}model is {kind!r}, expected {BPE} or {SENTENCEPIECE}; name "
            "another tokenizer (--tokenizer or the config key tokenizer)"
        )
    tokens = header.get(f"{_PREFIX}tokens", list)
    types = header.get(f"{_PREFIX}token_type", list, [NORMAL] * len(tokens))
    rows = len(tokens)
    used = max((number for number, kind in enumerate(types, 1) if kind != UNUSED), default=0)
    if len(types) == len(tokens):  # the rest pads the vocabulary
        tokens, types = tokens[:used], types[:used]
    split = _split_of(header) if kind == BPE else None
    try:
        vocab = {token: number for number, token in enumerate(tokens)}
        if split is None:
            model = _sentencepiece(header, vocab, types)
        else:
            model = _byte_level(header, vocab, split)
        for kind, add in ((CONTROL, model.add_special_tokens), (USER_DEFINED, model.add_tokens)):
            own = (token for token, type_ in zip(tokens, types, strict=True) if type_ == kind)
            add([AddedToken(token, normalized=False, special=kind == CONTROL) for token in own])
        if len(vocab) != len(tokens):
            raise ValueError("a token is listed twice")
        names = {
            name: tokens[number]
            for key, name in _SPECIAL.items()
            if (number := header.get(key, int, -1)) >= 0 and not len(tokens) <= number < rows
        }
    except InputError:
        raise
    except Exception as error:  # the Rust library raises plain Exception
        raise InputError(
            f"{header.path}: its tokenizer is damaged ({first_line(error)}); copy the file again"
        ) from None
    begins = split is None or split.begins
    if header.get(f"{_PREFIX}add_bos_token", bool, begins) and "bos_token" in names:
        first = names["bos_token"]
        model.post_processor = processors.TemplateProcessing(
            single=f"{first} $A",
            pair=f"{first} $A {first} $B",
            special_tokens=[(first, model.token_to_id(first))],
        )
    template = header.get("tokenizer.chat_template", str, "")
    return GgufTokenizer(model, names | ({"chat_template": template} if template else {}))


def _split_of(header: GgufHeader) -> Split:
    name = header.metadata.get(f"{_PREFIX}pre")
    if not isinstance(name, str) or name not in _SPLITS:
        problem = "is missing" if name is None else f"is {str(name)[:80]!r}"
        raise InputError(
            f"{header.path}: {_PREFIX}pre {problem}, expected one of {', '.join(_SPLITS)}; name "
            "another tokenizer (--tokenizer or the config key tokenizer)"
        )
    return _SPLITS[name]


def _pre_tokenizer(split: Split) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if split.pattern == _GPT2_WORDS:  # as tokenizer.json has it
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, words]) if split.digits else words
    words = pre_tokenizers.Split(Regex(split.pattern), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([words, byte_level])


def _byte_level(header: GgufHeader, vocab: dict[str, int], split: Split) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    merges = [tuple(pair.split(" ")) for pair in header.get(f"{_PREFIX}merges", list, [])]
    model = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole))
    model.pre_tokenizer = _pre_tokenizer(split)
    model.decoder = decoders.ByteLevel()
    if split == _SPLITS["qwen2"]:
        model.normalizer = normalizers.NFC()
    return model


def _sentencepiece(header: GgufHeader, vocab: dict[str, int], types: list[int]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = header.get(f"{_PREFIX}scores", list)
    model = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(vocab, types, scores),
            unk_token=next((name for name in vocab if types[vocab[name]] == UNKNOWN), None),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    first = header.get(f"{_PREFIX}add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", SPACE)
    model.normalizer = normalizers.Sequence([*([normalizers.Prepend(SPACE)] * first), spaces])
    end = [decoders.Strip(" ", 1, 0)] * first
    model.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    )
    return model


def _merges(vocab: dict[str, int], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that are a token together, the best scores first."""
    names, pairs = list(vocab), []
    for token, number in vocab.items():
        if types[number] not in (NORMAL, USER_DEFINED):
            continue
        if len(token) > _MOST_LETTERS:
            raise ValueError(
                f"a token has {len(token):,} letters, expected at most {_MOST_LETTERS:,}"
            )
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        whole = sorted((vocab[a], vocab[b]) for a, b in cuts if a in vocab and b in vocab)
        pairs += [(-scores[number], number, pair) for pair in whole]
    return [(names[a], names[b]) for _, _, (a, b) in sorted(pairs)]


def metadata_of(tokenizer: Any, rows: int) -> dict[str, Any]:
    """Return the metadata that hold a tokenizer, without its chat template.

    Args:
      tokenizer: the tokenizer of transformers.
      rows: the size of the model's vocabulary.  Ids without a token become unused tokens.

    Raises:
      InputError: if GGUF cannot represent the tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str())["model"] if backend is not None else {}
    where = f"tokenizer {tokenizer.name_or_path}".rstrip()  # those made here have no name
    if backend is None or model["type"] != "BPE":
        raise InputError(
            f"{where}: GGUF files hold byte-pair encodings only, found {model.get('type')}; "
            "convert to hf, or give another --tokenizer"
        )
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    added = tokenizer.added_tokens_decoder
    tokens, types = [f"[PAD{number}]" for number in range(rows)], [UNUSED] * rows
    sentencepiece = bool(model.get("byte_fallback"))
    for token, number in tokenizer.get_vocab().items():
        if number < rows:
            kind = BYTE if sentencepiece and BYTE_TOKEN.fullmatch(token) else NORMAL
            if number in added:
                kind = CONTROL if added[number].special else USER_DEFINED
            tokens[number] = token
            types[number] = UNKNOWN if sentencepiece and token == model["unk_token"] else kind
    values: dict[str, Any] = {"tokens": tokens, "token_type": types}
    values["add_bos_token"] = bool(beginning(tokenizer))
    if sentencepiece:
        ranks = {"".join(pair): rank for rank, pair in reversed([*enumerate(pairs)])}
        normal = {number for number, kind in enumerate(types) if kind == NORMAL}
        scores = [
            -ranks.get(token, len(pairs)) if n in normal else 0 for n, token in enumerate(tokens)
        ]
        first = backend.encode("a", add_special_tokens=False).tokens[0].startswith(SPACE)
        values |= {
            "model": SENTENCEPIECE,
            "scores": [*map(float, scores)],
            "add_space_prefix": first,
        }
    else:
        merges = [" ".join(pair) for pair in pairs]
        values |= {"model": BPE, "pre": _name_of_split(backend, model, where), "merges": merges}
    for key, name in _SPECIAL.items():
        number = getattr(tokenizer, f"{name}_id")
        if number is not None and number < rows:
            values[key.removeprefix(_PREFIX)] = number
        elif number is not None and name != "pad_token":  # no text has that one
            raise InputError(
                f"{where}: its {name} is token {number}, but the model has {rows} tokens; convert "
                "to hf, or give another --tokenizer"
            )
    metadata = {f"{_PREFIX}{key}": value for key, value in values.items()}
    stored = read_tokenizer(GgufHeader(where, metadata, {}, 0)).model
    if stored.encode(_PROBE).ids != tokenizer(_PROBE)["input_ids"]:
        raise InputError(
            f"{where}: llama.cpp would split or normalize text in another way; convert to hf, or "
            "give another --tokenizer"
        )
    return metadata


def _name_of_split(backend: Any, model: dict[str, Any], where: str) -> str:
    """Return the name of the split that a byte-level tokenizer makes.

    Args:
      model: the key `model` of its tokenizer.json.
    """
    own, whole = backend.pre_tokenizer, bool(model.get("ignore_merges"))
    words = None if own is None else own.pre_tokenize_str(_PROBE)
    # Tokens that merges lead to are found with both values of `whole`.
    for name, _ in sorted(_SPLITS.items(), key=lambda item: item[1].whole != whole):
        split = _pre_tokenizer(_SPLITS[name])
        if not model["merges"] or split.pre_tokenize_str(_PROBE) == words:
            return name
    raise InputError(
        f"{where}: it splits text into words in none of the ways {', '.join(_SPLITS)}; convert to "
        "hf, or give another --tokenizer"
    )
