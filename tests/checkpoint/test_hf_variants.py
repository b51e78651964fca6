"""Folders that transformers reads although they are not as `save_pretrained` writes them.

The oracle is what transformers computes with the same folder.
"""

import json
import sys

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file

import mesh_transformer
from mesh_transformer.checkpoint import conversion, hf, hf_config
from mesh_transformer.checkpoint.source import Source
from mesh_transformer.cli import convert as convert_command
from mesh_transformer.config import Config
from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.util import InputError
from tests.checkpoint.test_hf import assert_same_tensors, logits, tensors_in, tokens_for
from tests.support import made_tasks
from tests.support.torch_models import SEQUENTIAL, torch_model

VOCAB = 50
SAFE = "model.safetensors"
HEADS = {"gpt2": "lm_head.weight", "gptj": "lm_head.weight", "gpt_neox": "embed_out.weight"}
EMBEDDINGS = {
    "gpt2": "transformer.wte.weight",
    "gptj": "transformer.wte.weight",
    "gpt_neox": "gpt_neox.embed_in.weight",
}


def torch_logits(folder):
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return network(torch.tensor(tokens_for(VOCAB))).logits.numpy()


def assert_read_as_by_transformers(folder):
    config, state = hf.read(str(folder))
    actual = logits(state, config, tokens_for(VOCAB))
    # 1e-4, for logits of up to some tens in f32: the sums differ in order.
    np.testing.assert_allclose(actual, torch_logits(folder), rtol=0, atol=1e-4)
    return config


def change_tensors(folder, change):
    """Replace the tensors in a folder's only file by what `change` returns for them."""
    tensors = change(load_file(folder / SAFE))
    save_file({name: x.clone() for name, x in tensors.items()}, folder / SAFE, {"format": "pt"})


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.slow
@pytest.mark.parametrize("family", HEADS)
def test_a_trained_head_is_kept_although_the_config_says_tied(tmp_path, capsys, family):
    torch_model(family).save_pretrained(tmp_path / "hf")
    head, embedding = HEADS[family], EMBEDDINGS[family]
    change_config(tmp_path / "hf", tie_word_embeddings=True)
    own = torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(1))
    change_tensors(tmp_path / "hf", lambda tensors: tensors | {head: own})
    assert not assert_read_as_by_transformers(tmp_path / "hf").tie_head
    conversion.convert(str(tmp_path / "hf"), "hf", str(tmp_path / "native"), "native")
    conversion.convert(str(tmp_path / "native"), "native", str(tmp_path / "back"), "hf")
    assert torch.equal(tensors_in(tmp_path / "back")[head], own)
    assert not json.loads((tmp_path / "back/config.json").read_text())["tie_word_embeddings"]
    # One line per process and folder, however often the folder is read.
    line = f"{tmp_path}/hf/config.json: tie_word_embeddings is true, but the weights hold an output"
    assert capsys.readouterr().err.count(line) == 1

    for names in ((embedding, head), (embedding,), (head,)):  # equal, or stored once
        change_tensors(
            tmp_path / "hf",
            lambda tensors, names=names: (
                {n: x for n, x in tensors.items() if n not in (embedding, head)}
                | dict.fromkeys(names, own)
            ),
        )
        assert assert_read_as_by_transformers(tmp_path / "hf").tie_head, names
    assert line not in capsys.readouterr().err


def test_an_index_may_list_a_tied_head_that_no_shard_has(tmp_path):
    torch_model("gpt2").save_pretrained(tmp_path, max_shard_size="50KB")
    path = tmp_path / f"{SAFE}.index.json"
    index = json.loads(path.read_text())
    shards = sorted({*index["weight_map"].values()})
    assert len(shards) > 2
    index["weight_map"]["lm_head.weight"] = shards[1]
    path.write_text(json.dumps(index))
    assert assert_read_as_by_transformers(tmp_path).tie_head
    index["weight_map"]["transformer.ln_f.other"] = shards[1]
    path.write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"tensor transformer\.ln_f\.other is missing"):
        hf.read(str(tmp_path))


@pytest.mark.parametrize("pickled", [False, True])
def test_float64_weights_are_read_in_float32(tmp_path, pickled):
    tensors = torch_model("gptj").double().state_dict()
    for folder in ("f64", "f32"):
        torch_model("gptj").save_pretrained(tmp_path / folder)
    noise = torch.Generator().manual_seed(2)
    tensors = {k: x + 1e-9 * torch.randn(x.shape, generator=noise) for k, x in tensors.items()}
    assert all(x.dtype == torch.float64 for x in tensors.values())
    if pickled:
        (tmp_path / "f64" / SAFE).unlink()
        torch.save(tensors, tmp_path / "f64/pytorch_model.bin")
    else:
        save_file(tensors, tmp_path / "f64" / SAFE, {"format": "pt"})
    assert_read_as_by_transformers(tmp_path / "f64")
    conversion.convert(str(tmp_path / "f64"), "hf", str(tmp_path / "ours"), "hf")
    assert_same_tensors(tensors_in(tmp_path / "ours"), {k: x.float() for k, x in tensors.items()})
    change_tensors(tmp_path / "f32", lambda t: {k: x.double() * 1e39 for k, x in t.items()})
    with pytest.raises(InputError, match=r"holds .*e\+\d+, above float32's maximum"):
        hf.read(str(tmp_path / "f32"))


@pytest.mark.slow
def test_extra_tensors_are_named_and_left_out_with_a_flag(tmp_path, capsys, monkeypatch):
    network = torch_model("gpt2")
    network.save_pretrained(tmp_path / "hf")
    extra = {"v_head.summary.weight": torch.ones(1, 64), "v_head.summary.bias": torch.ones(1)}
    change_tensors(tmp_path / "hf", lambda tensors: tensors | extra)
    with pytest.raises(
        InputError, match=r"v_head\.\w+\.\w+ \(and 1 more\).*--drop-extra"
    ) as caught:
        hf.read(str(tmp_path / "hf"))
    assert str(tmp_path / "hf" / SAFE) in str(caught.value)
    expected = torch_logits(tmp_path / "hf")

    def convert(*flags):
        monkeypatch.setattr(sys, "argv", ["convert", *map(str, flags)])
        convert_command.main()

    paths = ("--from", "hf", tmp_path / "hf", "--to", "hf", tmp_path / "ours")
    with pytest.raises(InputError, match="--drop-extra"):
        convert(*paths)
    convert(*paths, "--drop-extra", "--verify")
    assert "hf: left out v_head.summary." in capsys.readouterr().err
    np.testing.assert_array_equal(torch_logits(tmp_path / "ours"), expected)
    with pytest.raises(InputError, match="--drop-extra requires --from hf"):
        convert("--from", "native", "a", "--to", "hf", "b", "--drop-extra")


def test_a_gpt_neox_with_sequential_residual_is_the_block_gpt2(tmp_path):
    torch_model(SEQUENTIAL).save_pretrained(tmp_path / "theirs")
    config = assert_read_as_by_transformers(tmp_path / "theirs")
    # The block whose programs have two activation all-reduces per layer each way.
    assert (config.block, config.hf_type) == ("gpt2", "gpt_neox")
    parallel = config.replace(block="neox")
    assert parallel.rotary_pairs == config.rotary_pairs == "halves"
    hf.write(str(tmp_path / "ours"), hf.read(str(tmp_path / "theirs"))[1], config)
    written = json.loads((tmp_path / "ours/config.json").read_text())
    assert written["use_parallel_residual"] is False
    assert hf_config.read_config(str(tmp_path / "ours")) == config
    change_config(tmp_path / "theirs", use_parallel_residual="no")
    with pytest.raises(InputError, match="use_parallel_residual is 'no', expected true or false"):
        hf.read(str(tmp_path / "theirs"))


@pytest.mark.parametrize("rows", [64, 80])
def test_a_tokenizer_may_be_larger_or_smaller_than_the_embedding(tmp_path, rows):
    torch_model("gptj", vocab=rows).save_pretrained(tmp_path / "hf")
    made_tasks.save_tokenizer(tmp_path / "hf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    theirs.add_tokens([f"<added{i}>" for i in range(64 - len(theirs))])
    theirs.add_special_tokens({"pad_token": "<pad>"})  # without resizing the model
    theirs.save_pretrained(tmp_path / "hf")
    assert len(theirs) == 65
    config, state = hf.read(str(tmp_path / "hf"))
    assert config.n_vocab == rows
    tokenizer = Tokenizer.of(None, config, must_fit=True)  # as all commands load it
    assert tokenizer.fits
    text = theirs.decode(range(2, 30))
    assert tokenizer.loaded(text)["input_ids"] == theirs(text)["input_ids"]
    assert tokenizer.loaded.decode([5, 64, rows - 1]) == theirs.decode([5, 64, rows - 1])
    network = mesh_transformer.load(tmp_path / "hf", changes={"dtype": "float32"})
    prompt = np.array([theirs("<pad>" + text)["input_ids"][:8]])
    if rows == 64:
        with pytest.raises(InputError, match=r"token id 64, outside the vocabulary"):
            network.score(prompt, 0)
    else:
        network.score(prompt, 0)
    network.close()
    hf.write(str(tmp_path / "trimmed"), state, config, trim_vocab=True)
    assert hf.read(str(tmp_path / "trimmed"))[0].n_vocab == min(rows, 65)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "trimmed")) == 65


DEEP = b'{"a":' * 200_000


def test_hostile_metadata_are_one_line(tmp_path):
    def assert_one_line(function, line):
        with pytest.raises(InputError, match=line) as caught:
            function()
        assert "\n" not in str(caught.value)

    torch_model("gptj").save_pretrained(tmp_path / "hf")
    change_config(tmp_path / "hf", vocab_size=10**12)
    assert_one_line(lambda: hf.read(str(tmp_path / "hf")), "n_vocab is 1000000000000, expected")
    (tmp_path / "hf" / "config.json").write_bytes(DEEP)
    assert_one_line(lambda: hf.read(str(tmp_path / "hf")), "not JSON .nested too deeply")
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "meta.json").write_bytes(DEEP)
    meta = Source(tmp_path / "meta", "original")
    assert_one_line(lambda: meta.checkpoint_path, r"meta\.json cannot be read")
    for text in (DEEP, b'{"seq":' + b"9" * 5000 + b"}", b'{"name": "\xe9"}'):
        (tmp_path / "c.json").write_bytes(text)
        assert_one_line(lambda: Config.load(str(tmp_path / "c.json")), "c.json: ")
    loop = tmp_path / "loop"
    loop.mkdir()
    for name, target in (("step_5", loop), ("config.json", "config.json"), ("a", "a")):
        (loop / name).symlink_to(target)
    assert_one_line(lambda: Source(loop), "holds no finished checkpoint")
