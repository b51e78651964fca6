"""Every model type of Hugging Face: logits compared with torch's, and bit-identical round trips."""

import json
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import mesh_transformer
from mesh_transformer.checkpoint import conversion, hf
from mesh_transformer.checkpoint import torch_model as torch_logits
from mesh_transformer.cli import convert as convert_command
from mesh_transformer.util import InputError, StoppedError
from tests.checkpoint.test_hf import logits, tensors_in, tokens_for
from tests.support.torch_models import FAMILIES, torch_model

SIZES = [  # layers, heads, head size, rotary dims, vocabulary
    (1, 4, 16, 8, 50),
    (2, 8, 40, 32, 97),
    (3, 12, 32, 32, 131),
]


def bits_in(folder):
    """Return {name: (dtype, shape, bytes)} of the tensors in a folder's safetensors files."""
    return {
        name: (str(tensor.dtype), tensor.shape, tensor.view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors_in(folder).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("layers", "heads", "head", "rotary", "vocab"), SIZES)
def test_logits_match_torchs_both_ways(tmp_path, family, layers, heads, head, rotary, vocab):
    network = torch_model(family, layers, heads, head, rotary, vocab)
    network.save_pretrained(tmp_path / "theirs")
    config, state = hf.read(str(tmp_path / "theirs"))
    hf_type = family.partition(",")[0]
    assert (config.layers, config.n_heads, config.hf_type) == (layers, heads, hf_type)
    tokens = tokens_for(vocab)
    with torch.no_grad():
        expected = network(torch.tensor(tokens)).logits.numpy()
    scale = np.abs(expected).max()
    assert scale > 3  # so that the tolerance below is small in comparison
    # 1e-4, for logits of up to some tens in f32: the sums differ in order.
    np.testing.assert_allclose(logits(state, config, tokens), expected, rtol=0, atol=1e-4)
    hf.write(str(tmp_path / "ours"), state, config)
    loaded = type(network).from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():  # the same program and the same weights
        assert torch.equal(loaded(torch.tensor(tokens)).logits, torch.tensor(expected))


@pytest.mark.quick(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_conversions_to_native_and_back_keep_every_bit(tmp_path, family, dtype):
    torch_model(family, dtype=dtype).save_pretrained(tmp_path / "theirs")
    conversion.convert(str(tmp_path / "theirs"), "hf", str(tmp_path / "native"), "native")
    conversion.convert(str(tmp_path / "native"), "native", str(tmp_path / "back"), "hf")
    assert bits_in(tmp_path / "back") == bits_in(tmp_path / "theirs")
    conversion.convert(str(tmp_path / "back"), "hf", str(tmp_path / "native2"), "native")
    conversion.convert(str(tmp_path / "native2"), "native", str(tmp_path / "again"), "hf")
    for path in (tmp_path / "back").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_verify_compares_with_transformers(tmp_path, family, capsys, monkeypatch):
    torch_model(family, dtype=torch.bfloat16).save_pretrained(tmp_path / "theirs")
    difference, bound = conversion.compare_with_torch(tmp_path / "theirs")
    assert 0 < difference < bound == 1e-4

    def convert(target, name):
        flags = ["--from", "hf", str(tmp_path / "theirs"), "--to", target, str(tmp_path / name)]
        monkeypatch.setattr(sys, "argv", ["convert", *flags, "--verify"])
        convert_command.main()

    convert("native", "native")
    assert f"{tmp_path}/theirs: logits differ from transformers' by" in capsys.readouterr().out
    logits_of = torch_logits.logits
    # 1e-3 of logits up to some tens: more than the bound, which is relative to their spread.
    monkeypatch.setattr(torch_logits, "logits", lambda *args: logits_of(*args) * 1.001)
    with pytest.raises(StoppedError, match="transformers computes other logits"):
        convert("native", "other")
    monkeypatch.setattr(torch_logits, "is_installed", lambda: False)
    convert("native", "third")
    assert "theirs: not compared with transformers' logits, which need" in capsys.readouterr().out


@pytest.mark.slow
def test_exports_with_a_tied_head_and_a_bias_pass_verification(tmp_path):
    """The embedding's bias goes into the embedding, which shifts all logits of a position."""
    config = {"block": "gptj", "tie_head": True, "layers": 1, "d_model": 32, "n_heads": 4}
    config |= {"n_vocab": 50, "seq": 16, "pe_rotary_dims": 4, "dtype": "float32"}
    network = mesh_transformer.CausalTransformer(config)
    embedding = network.state["params"]["embed"]["embedding"]
    embedding["b"] += np.random.default_rng(0).normal(size=32).astype(np.float32)
    network.save(str(tmp_path / "native"))
    network.close()
    conversion.convert(str(tmp_path / "native"), "native", str(tmp_path / "hf"), "hf")
    difference, bound = conversion.compare(
        tmp_path / "native", "native", tmp_path / "hf", "hf", network.config
    )
    assert difference < bound
    difference, bound = conversion.compare_with_torch(tmp_path / "hf")
    assert difference < bound


def test_scaled_rotary_embeddings_are_refused(tmp_path):
    torch_model("gpt_neox").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text("utf-8"))
    del values["rope_parameters"]  # as transformers 4 wrote it
    path.write_text(json.dumps(values | {"rope_scaling": {"type": "linear", "factor": 4.0}}))
    with pytest.raises(InputError, match="its rotary embedding has type 'linear'"):
        hf.read(str(tmp_path))
