"""Whose tokenizer is whose: models keep their own, and records fit the model that they train."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import normalizers, processors
from transformers import AutoTokenizer

from mesh_transformer.checkpoint.hf_config import read_config
from mesh_transformer.cli import completion_records, new_config, new_tokenizer, text_records
from mesh_transformer.cli.arguments import run_arguments, run_parser
from mesh_transformer.config import Config
from mesh_transformer.data import same_tokenizer
from mesh_transformer.data import tokenizer as tokenizers
from mesh_transformer.data.loader import open_train_set
from mesh_transformer.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from mesh_transformer.evaluation import validation
from mesh_transformer.training.loop import train
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import SMALL

END = "<|endoftext|>"
MODEL = {"model_type": "gptj", "n_layer": 1, "n_embd": 64, "n_head": 4, "rotary_dim": 8}
MODEL |= {"vocab_size": 50400, "n_positions": 16}
GPT_J = {"content": END, "special": True, "lstrip": False, "rstrip": False, "single_word": False}


def changed(name: str) -> Any:
    """Return GPT-2's tokenizer with a change that its vocabulary does not show."""
    tokenizer: Any = load_tokenizer()
    backend = tokenizer.backend_tokenizer
    if name == "chat template":
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
        )
    elif name == "end of text":
        tokenizer.eos_token = "."
    elif name == "lower case":
        backend.normalizer = normalizers.Lowercase()
    elif name == "beginning":
        template = processors.TemplateProcessing(f"{END} $A", special_tokens=[(END, 50256)])
        backend.post_processor = template
    elif name == "prefix space":
        backend.pre_tokenizer.add_prefix_space = True
        tokenizer.init_kwargs["add_prefix_space"] = tokenizer.add_prefix_space = True
    return tokenizer


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["chat template", "end of text", "lower case", "beginning", "prefix space"]
)
def test_a_folder_keeps_a_tokenizer_with_the_vocabulary_of_gpt2(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    changed(name).save_pretrained(tmp_path)
    config = read_config(str(tmp_path))
    assert config.tokenizer == str(tmp_path)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.of(None, config, must_fit=True).loaded
    text = f"Hello world\n\nthis is  a Test.{END} ."
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.eos_token == theirs.eos_token
    assert ours.chat_template == theirs.chat_template


@pytest.mark.slow
def test_a_folder_keeps_tokens_that_only_its_settings_list(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    for name, new_name in tokenizers.HUGGING_FACE_NAMES.items():
        shutil.copy(tokenizers._packaged_vocabulary() / name, tmp_path / new_name)
    assert read_config(str(tmp_path)).tokenizer == "gpt2"
    settings: dict[str, Any] = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": END,
        "unk_token": END,
    }
    settings |= {"eos_token": END, "added_tokens_decoder": {"50256": GPT_J}}
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(settings))
    assert read_config(str(tmp_path)).tokenizer == "gpt2"
    settings["added_tokens_decoder"]["50257"] = GPT_J | {"content": "<|im_end|>"}
    path.write_text(json.dumps(settings))
    assert read_config(str(tmp_path)).tokenizer == str(tmp_path)
    path.unlink()
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    assert read_config(str(tmp_path)).tokenizer == str(tmp_path)


@pytest.mark.slow
def test_gpt_j_s_released_files_are_gpt2_s_tokenizer(tmp_path):
    """They are of a release of 2021, and pad the vocabulary with tokens that nothing uses."""
    values = json.loads(load_tokenizer().backend_tokenizer.to_str())
    fillers = [
        GPT_J | {"id": 50256 + i, "special": False, "content": f"<|extratoken_{i}|>"}
        for i in range(1, 144)
    ]
    values["added_tokens"] = [
        token | {"normalized": True} for token in [GPT_J | {"id": 50256}, *fillers]
    ]
    values["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    values["post_processor"] = values["decoder"] = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
    }
    values["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    values["model"]["merges"] = [" ".join(pair) for pair in values["model"]["merges"]]
    for key in ("byte_fallback", "ignore_merges", "type"):
        values["model"].pop(key)
    special = {f"{name}_token": GPT_J | {"__type": "AddedToken"} for name in ("bos", "eos", "unk")}
    special |= {"add_prefix_space": False, "tokenizer_class": "GPT2Tokenizer", "from_slow": True}
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    assert read_config(str(tmp_path)).tokenizer == "gpt2"
    plain = load_tokenizer()
    assert same_tokenizer.encoding(load_tokenizer(tmp_path)) == same_tokenizer.encoding(plain)


def test_saved_tokenizers_name_a_class_of_both_releases_of_transformers(tmp_path, monkeypatch):
    """Release 5 writes TokenizersBackend and a list that release 4 does not read."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("to be or not to be")
    new_tokenizer.main(["a.txt", "made", "--size", "260"])
    tokenizer: Any = load_tokenizer("bytes")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.save_pretrained("raw")
    for source in ("bytes", "raw", "made"):
        Path(f"{source}-saved").mkdir()
        Tokenizer(source, load_tokenizer(source), True).save(f"{source}-saved")
    for folder in ("made", "bytes-saved", "raw-saved", "made-saved"):
        values = json.loads(Path(folder, "tokenizer_config.json").read_text())
        assert values["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert "extra_special_tokens" not in values
    again = load_tokenizer("raw-saved")
    assert again.all_special_ids == load_tokenizer("raw").all_special_ids == [256, 257]
    assert again("a<|turn|>b")["input_ids"] == [97, 257, 98]


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Any:
    """A folder with records of bytes, and tokenizers that are those of bytes or nearly so."""
    before, path = os.getcwd(), tmp_path_factory.mktemp("work")
    os.chdir(path)
    Path("a.txt").write_text("to be or not to be " * 30)
    Path("p.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    byte_tokenizer().save_pretrained("same")
    other: Any = byte_tokenizer()
    other.backend_tokenizer.normalizer = normalizers.Lowercase()
    other.save_pretrained("lower")
    text_records.main(["a.txt", "bytes", "--seq", "16", "--tokenizer", "bytes"])
    completion_records.main(["p.jsonl", "pairs", "--seq", "16", "--tokenizer", "bytes"])
    yield path
    os.chdir(before)


def run_config(tokenizer: str, records: str) -> Config:
    changes = {"n_vocab": 257, "seq": 16, "tpu_size": 1, "cores_per_replica": 1}
    changes |= {"total_steps": 2, "train_set": f"{records}.index", "tokenizer": tokenizer}
    return Config.of(SMALL | changes)


@pytest.mark.quick(1)
@pytest.mark.parametrize("records", ["bytes", "pairs"])
def test_records_of_another_tokenizer_are_refused(work, records):
    line = f"{records}.index was created with the tokenizer bytes, which gives other tokens than "
    for tokenizer in ("bytes", "same"):
        open_train_set(run_config(tokenizer, records), 2).close()
    for tokenizer in ("lower", "gpt2"):
        config = run_config(tokenizer, records)
        with pytest.raises(InputError, match=f"^{line}{tokenizer}; use one tokenizer"):
            open_train_set(config, 2)
        network: Any = type("Network", (), {"config": config, "dp": 1, "batch_size": 2})
        with pytest.raises(InputError, match=f"^{line}{tokenizer}; use one tokenizer"):
            validation.open_set(network, f"{records}.index")


def test_a_tokenizer_that_was_replaced_under_its_name_is_noticed(work):
    byte_tokenizer().save_pretrained("mine")
    text_records.main(["a.txt", "made", "--seq", "16", "--tokenizer", "mine"])
    open_train_set(run_config("mine", "made"), 2).close()
    shutil.copytree("lower", "mine", dirs_exist_ok=True)
    same_tokenizer.check_encoding.cache_clear()  # as in the next process
    with pytest.raises(InputError, match="the tokenizer mine, which gives other tokens than the o"):
        open_train_set(run_config("mine", "made"), 2)


@pytest.mark.parametrize("value", [None, 3])
def test_a_damaged_manifest_is_one_line(work, value):
    text_records.main(["a.txt", f"bad{value}", "--seq", "16", "--tokenizer", "bytes"])
    Path(f"bad{value}.manifest.json").write_text(json.dumps({"tokenizer": value}))
    with pytest.raises(InputError, match="not the manifest of a record set"):
        open_train_set(run_config("bytes", f"bad{value}"), 2)


def test_a_damaged_tokenizer_is_one_line(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"^tokenizer "):
        load_tokenizer(str(tmp_path))


@pytest.mark.slow
def test_a_token_for_padding_leaves_gpt2_s_tokenizer_what_it_is(tmp_path):
    tokenizer: Any = load_tokenizer()
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": END}))
    assert read_config(str(tmp_path)).tokenizer == "gpt2"


def base_folder(tokenizer: Any, name: str, **changes: Any) -> str:
    Path(name).mkdir()
    tokenizer.save_pretrained(name)
    (Path(name) / "config.json").write_text(json.dumps(MODEL | {"vocab_size": 512} | changes))
    return str(Path(name).resolve())


def test_a_base_of_another_tokenizer_is_refused(work):
    """By `config --base`, and by `train` with a config that was made otherwise."""
    flags = ["--train", "bytes.index", "--topology", "v3-8"]
    base = base_folder(load_tokenizer("lower"), "lower-base")
    line = "bytes.index was created with the tokenizer bytes, which gives other tokens than "
    with pytest.raises(InputError, match=f"{line}{base}; "):
        new_config.main([*flags, "--output", "no.json", "--base", base])
    line = f"--base {base} was created with the tokenizer {base}, which gives other tokens than byt"
    with pytest.raises(InputError, match=line):
        new_config.main([*flags, "--output", "no.json", "--base", base, "--tokenizer", "bytes"])
    Path("hand.json").write_text(json.dumps(run_config("bytes", "bytes").as_dict()))
    command = ["--config", "hand.json", "--model-dir", "m", "--tune-model-path", base]
    line = f"the model {base} was created with the tokenizer {base}, which gives other tokens than "
    with pytest.raises(InputError, match=line):
        run_arguments(run_parser("").parse_args(command))
    same = base_folder(load_tokenizer("same"), "same-base", eos_token_id=[256, 300])
    config, _, _ = run_arguments(run_parser("").parse_args([*command[:-1], same]))
    assert config.end_tokens == [256]  # of the base, and 300 is not in the vocabulary
    chosen = [*command[:-1], same, "--set", "end_tokens=[255]"]
    assert run_arguments(run_parser("").parse_args(chosen))[0].end_tokens == [255]
    new_config.main([*flags, "--output", "yes.json", "--base", same])
    made = json.loads(Path("yes.json").read_text())
    assert made["tokenizer"] == made["tune_model_path"] == same
    assert made["end_tokens"] == [256, 300]


def test_a_fine_tuned_model_ends_answers_as_its_base(work):
    """Also after the base is gone, when the run resumes; a config's own list stays."""
    base = base_folder(load_tokenizer("same"), "ends-base", eos_token_id=[256, 300])
    plain = base_folder(load_tokenizer("same"), "plain-base")

    def ends(model: str, folder: str = "new", **own: Any) -> list[int] | None:
        values = run_config("bytes", "bytes").replace(n_vocab=512).as_dict()
        Path("ends.json").write_text(json.dumps(values | own))
        command = ["--config", "ends.json", "--model-dir", folder, "--tune-model-path", model]
        return run_arguments(run_parser("").parse_args(command))[0].end_tokens

    assert ends(base) == ends(base, end_tokens=None) == ends("gone", base) == [256, 300]
    assert (ends(base, end_tokens=[7]), ends(base, end_tokens=[])) == ([7], [])
    assert ends(plain) is ends("gone") is None


class Loaded(Exception):  # noqa: N818  # no error
    """Raised in place of training."""


def test_a_config_made_with_a_base_starts_from_it(work, capsys, monkeypatch, tmp_path):
    """Without --tune-model-path, which names another model if it is given."""
    base = base_folder(load_tokenizer("same"), "a-base")
    new_config.main(["--train", "bytes.index", "--output", "c.json", "--base", base])
    assert capsys.readouterr().out.endswith("next: mesh-transformer train --config c.json\n")
    changes = {"tpu_size": 1, "cores_per_replica": 1, "per_replica_batch": 4}
    changes |= {"gradient_accumulation_steps": 1}
    network = CausalTransformer(Config.load("c.json", changes=changes), init=False)
    for given in (None, "other"):

        def load(path: str, fresh_opt: bool, expected: str = given or base) -> None:
            assert path == expected
            raise Loaded

        monkeypatch.setattr(network, "load", load)
        with pytest.raises(Loaded):
            train(network, tmp_path / "run", tune_model_path=given, validate=False)


@pytest.mark.slow
def test_fit_starts_from_the_weights_that_a_network_has(work):
    """Also if its config names those that it was once fine-tuned from."""
    from mesh_transformer.training.fit import fit

    config = run_config("bytes", "bytes").replace(tune_model_path="gone")
    network = CausalTransformer(config)
    rows = fit(network, np.zeros((16, 17), np.int32), steps=1)
    assert len(rows) == 1
