"""Hugging Face's config.json and tokenizer files: reading, writing and refusals."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer as Words
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, GenerationConfig, GPTJConfig, PreTrainedTokenizerFast

from mesh_transformer.checkpoint.hf_config import read_config, write_configs
from mesh_transformer.config import Config
from mesh_transformer.data.tokenizer import Tokenizer, load_tokenizer
from mesh_transformer.util import InputError

# As written by an early release of transformers, with keys that no longer exist.
EARLY = {
    "activation_function": "gelu_new",
    "architectures": ["GPTJForCausalLM"],
    "attn_pdrop": 0.0,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "gradient_checkpointing": False,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gptj",
    "n_embd": 4096,
    "n_head": 16,
    "n_layer": 28,
    "n_positions": 2048,
    "rotary": True,
    "rotary_dim": 64,
    "scale_attn_weights": True,
    "summary_type": "cls_index",
    "tie_word_embeddings": False,
    "tokenizer_class": "GPT2Tokenizer",
    "torch_dtype": "float16",
    "transformers_version": "4.18.0.dev0",
    "use_cache": True,
    "vocab_size": 50400,
}
GPTJ = Config(layers=28, d_model=4096, n_heads=16, n_vocab=50400, pe_rotary_dims=64)


def config_file(folder, **changes):
    values = EARLY | changes
    values = {key: value for key, value in values.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


def word_tokenizer(folder, size):
    """Save a tokenizer of `size` words as transformers does; return its folder."""
    words = Words(WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return str(folder)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_config_of_an_early_release_is_read(tmp_path):
    assert read_config(config_file(tmp_path)) == GPTJ.replace(end_tokens=[50256])
    # The defaults that transformers uses for missing keys.
    folder = config_file(tmp_path, n_positions="absent", rotary_dim="absent", n_inner=16384)
    assert read_config(folder) == GPTJ.replace(end_tokens=[50256])


def test_configs_are_exchanged_with_transformers_both_ways(tmp_path):
    rng = np.random.default_rng(0)
    for trial in range(10):
        heads = int(rng.integers(1, 9))
        width, rotary = heads * 16, int(2 * rng.integers(1, 9))
        layers, vocab, seq = (int(rng.integers(1, 200)) for _ in range(3))
        config = Config(layers, width, heads, vocab, seq=seq, pe_rotary_dims=rotary)
        theirs = GPTJConfig(
            n_layer=layers,
            n_embd=width,
            n_head=heads,
            vocab_size=vocab,
            n_positions=seq,
            rotary_dim=rotary,
            bos_token_id=None,
            eos_token_id=None,
        )
        (tmp_path / f"ours{trial}").mkdir()
        write_configs(str(tmp_path / f"ours{trial}"), config, vocab, np.dtype(np.float16), None)
        loaded = GPTJConfig.from_pretrained(tmp_path / f"ours{trial}")
        theirs.architectures, theirs.dtype = ["GPTJForCausalLM"], loaded.dtype
        assert str(loaded.dtype).endswith("float16")
        assert loaded.to_diff_dict() == theirs.to_diff_dict()
        theirs.save_pretrained(tmp_path / f"theirs{trial}")
        for folder in ("ours", "theirs"):
            assert read_config(str(tmp_path / f"{folder}{trial}")) == config


def test_eos_token_id_is_written_if_there_is_one(tmp_path):
    """The ids are the config's or else the tokenizer's, and they are read again."""
    for own, ends, expected in (
        (50256, None, 50256),
        (0, None, 0),
        (None, None, None),
        (50256, [7], 7),
        (None, [9, 7], [9, 7]),
    ):
        tokenizer, config = SimpleNamespace(bos_token_id=3, eos_token_id=own), GPTJ
        config = config.replace(end_tokens=ends)
        write_configs(str(tmp_path), config, 50257, np.dtype(np.float32), tokenizer)
        for kind in (GPTJConfig, GenerationConfig):
            assert kind.from_pretrained(tmp_path).eos_token_id == expected
            assert kind.from_pretrained(tmp_path).bos_token_id == 3
        ids = expected if isinstance(expected, list) else [expected]
        assert read_config(str(tmp_path)).end_tokens == (None if expected is None else ids)


def test_end_tokens_are_those_that_transformers_ends_at(tmp_path):
    """generation_config.json goes before config.json; ids outside the vocabulary are left out."""
    for ours, theirs, expected in (
        (5, [7, 256], [7, 256]),
        ([5, 6], None, [5, 6]),
        (50256, [50399, 50400], [50399]),
        (50400, None, None),
        (None, None, None),
    ):
        config_file(tmp_path, eos_token_id=ours)
        settings = {"eos_token_id": theirs, "max_new_tokens": 3}
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
        assert read_config(str(tmp_path)).end_tokens == expected
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["7"]}')
    with pytest.raises(InputError, match=r"generation_config.json: eos_token_id is \['7'\]"):
        read_config(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt_neo"},
            r"'gpt_neo', expected one of gptj, codegen, gpt2.*; .*, such as \S+/SmolLM2-",
        ),
        ({"model_type": "absent"}, "model_type is None"),
        (
            {"activation_function": "relu"},
            "activation_function is 'relu'; only gelu_new, gelu, gelu_fast",
        ),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        ({"rotary_dim": None}, "rotary_dim is None, expected a whole number"),
        ({"n_inner": 8192}, "n_inner is 8192; only 4 times the model's width and null"),
        ({"n_embd": "4096"}, "n_embd is '4096', expected a whole number"),
        ({"n_layer": "absent"}, "n_layer is None"),
        ({"n_layer": 10**9}, "layers is 1000000000, expected at most 4096"),
        ({"n_head": True}, "n_head is True"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"n_head": 17}, "not divisible by n_heads 17"),
        ({"rotary_dim": 512}, "pe_rotary_dims is 512, above the head size 256"),
    ],
)
def test_unsupported_configs_are_refused(tmp_path, changes, message):
    with pytest.raises(InputError, match=message) as caught:
        read_config(config_file(tmp_path, **changes))
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tokenizer_in_the_model_folder_is_used_and_copied(tmp_path):
    folder = tmp_path / "model"
    word_tokenizer(folder, 50)
    before = contents(folder)
    config = read_config(config_file(folder))
    assert config.tokenizer == str(folder)
    (tmp_path / "copy").mkdir()
    Tokenizer.of(None, config, must_fit=False).save(str(tmp_path / "copy"))
    settings = before["tokenizer_config.json"]  # with the name that transformers 4 knows, too
    settings = settings.replace(b"TokenizersBackend", b"PreTrainedTokenizerFast")
    assert contents(tmp_path / "copy") == before | {"tokenizer_config.json": settings}


@pytest.mark.slow
def test_gpt2_tokenizer_is_recognised_unless_it_has_added_tokens_in_use(tmp_path):
    tokenizer = load_tokenizer()
    config_file(tmp_path)

    def tokenizer_with(added):
        tokenizer.add_tokens(added)
        tokenizer.save_pretrained(tmp_path)
        return read_config(str(tmp_path)).tokenizer

    assert tokenizer_with([]) == "gpt2"
    assert tokenizer_with([f"<|extratoken_{i}|>" for i in range(1, 144)]) == "gpt2"
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    assert tokenizer_with(["<|user|>"]) == str(tmp_path)
    # The file names of older releases.
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "".join(f"{one} {other}\n" for one, other in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}")
    assert read_config(str(tmp_path)).tokenizer == "gpt2"
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|extratoken_1|>": 50257}))
    assert read_config(str(tmp_path)).tokenizer == "gpt2"
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|user|>": 50257}))
    assert read_config(str(tmp_path)).tokenizer == str(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"model": []},
        {"model": {}, "added_tokens": [{}]},
        {"model": {}, "added_tokens": ["a"]},
        {"model": {}, "added_tokens": None},
    ],
)
def test_invalid_tokenizer_file_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        InputError, match=r"tokenizer.json: not a Hugging Face tokenizer[^\n]* copy the folder"
    ):
        read_config(config_file(tmp_path))


def test_any_other_vocabulary_is_the_models_own_tokenizer(tmp_path):
    for words in ([["a", -1.5]], {"a": 0, "b": "c"}, {"a": [1]}, {"\ud800": 0}, None):
        values = {"model": {"vocab": words}, "added_tokens": [{"content": 3}]}
        (tmp_path / "tokenizer.json").write_text(json.dumps(values))
        assert read_config(config_file(tmp_path)).tokenizer == str(tmp_path)


def test_gpt2_tokenizer_is_the_default(tmp_path):
    assert read_config(config_file(tmp_path)).tokenizer == "gpt2"
    Tokenizer.of(None, GPTJ, must_fit=False).save(str(tmp_path / "new"))
    text = "hello\n\nhello<|endoftext|> Ünïcode  spaces"
    loaded = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert loaded(text).input_ids == load_tokenizer()(text).input_ids


def test_tokenizer_larger_than_n_vocab_is_left_out_or_refused(tmp_path):
    small = GPTJ.replace(n_vocab=100)
    Tokenizer.of(None, small, must_fit=False).save(str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    with pytest.raises(InputError, match="tokenizer gpt2 has 50257 tokens, more than n_vocab 100"):
        Tokenizer.of(None, small, must_fit=True)
    assert len(Tokenizer.of(word_tokenizer(tmp_path / "100", 100), small, True).loaded) == 100
    with pytest.raises(InputError, match="101 has 101 tokens, more than n_vocab 100"):
        Tokenizer.of(word_tokenizer(tmp_path / "101", 101), small, must_fit=False)
