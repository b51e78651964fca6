"""Adapters of the package peft: read, served, trained on, merged and written.

The oracle is peft's definition: a torch model whose matrices are W + alpha / R * B A.
"""

import json
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file

import mesh_transformer
from mesh_transformer.checkpoint import conversion, peft
from mesh_transformer.checkpoint.source import Source
from mesh_transformer.generation.sampling import sampler_settings
from mesh_transformer.util import InputError
from tests.checkpoint.test_hf import tokens_for
from tests.support.torch_models import torch_model

VOCAB = 50
# The matrices of one layer in transformers' models.
LAYERS = {
    "gptj": "transformer.h.{}.",
    "codegen": "transformer.h.{}.",
    "gpt2": "transformer.h.{}.",
    "gpt_neox": "gpt_neox.layers.{}.",
}
MODULES = {
    "gptj": ["attn.q_proj", "attn.v_proj", "attn.out_proj", "mlp.fc_in"],
    "codegen": ["attn.qkv_proj", "mlp.fc_out"],
    "gpt2": ["attn.c_attn", "attn.c_proj", "mlp.c_proj"],
    "gpt_neox": ["attention.query_key_value", "mlp.dense_h_to_4h"],
}


def save_adapters(folder, base, tensors, **config):
    folder.mkdir()
    values = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "r": 4,
        "lora_alpha": 6,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in tensors}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(values | config))
    named = {
        f"base_model.model.{name}.lora_{factor}.weight": x.contiguous()
        for name, pair in tensors.items()
        for factor, x in zip("AB", pair, strict=True)
    }
    save_file(named, folder / "adapter_model.safetensors")


def random_adapters(network, family, layers=(0, 1), rank=4, seed=0):
    """Return {module: (A, B)} of random adapters."""
    generator = torch.Generator().manual_seed(seed)
    names = [LAYERS[family].format(layer) + m for layer in layers for m in MODULES[family]]
    result = {}
    for name in names:
        shape = network.get_submodule(name).weight.shape
        outputs, inputs = shape[::-1] if family == "gpt2" else shape  # GPT-2's Conv1D
        a, b = (
            torch.randn(shape, generator=generator) / 8
            for shape in ((rank, inputs), (outputs, rank))
        )
        result[name] = (a, b)
    return result


def merged_logits(network, adapters, scales, family):
    """Return the logits of a torch model with adapters added to its matrices."""
    with torch.no_grad():
        for name, (a, b) in adapters.items():
            scale = scales if isinstance(scales, float) else scales[name]
            change = scale * (b.double() @ a.double()).float()
            network.get_submodule(name).weight += change.T if family == "gpt2" else change
        return network(torch.tensor(tokens_for(VOCAB))).logits.numpy()


def load(folder, **changes):
    return mesh_transformer.load(folder, changes={"dtype": "float32"} | changes)


def logits(folder, **changes):
    network = load(folder, **changes)
    result = np.asarray(network.logits(tokens_for(VOCAB)))
    network.close()
    return result


def assert_same_logits(actual, expected):
    # 1e-4, for logits of up to some tens in f32: the sums differ in order.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", LAYERS)
def test_adapters_of_peft_are_added_to_the_base_and_come_back(tmp_path, family):
    network = torch_model(family)
    network.save_pretrained(tmp_path / "base")
    adapters = random_adapters(network, family)
    save_adapters(tmp_path / "peft", tmp_path / "base", adapters)
    with torch.no_grad():
        without = network(torch.tensor(tokens_for(VOCAB))).logits.numpy()
    expected = merged_logits(network, adapters, 6 / 4, family)
    assert np.abs(expected - without).max() > 0.5
    assert_same_logits(logits(tmp_path / "peft"), expected)
    # Merged into the base model.
    conversion.convert(str(tmp_path / "peft"), "peft", str(tmp_path / "merged"), "hf")
    theirs = type(network).from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        assert_same_logits(theirs(torch.tensor(tokens_for(VOCAB))).logits.numpy(), expected)
    # Written again: the same tensors, bit for bit.
    conversion.convert(str(tmp_path / "peft"), "peft", str(tmp_path / "back"), "peft")
    actual, before = (
        load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("back", "peft")
    )
    assert actual.keys() == before.keys()
    assert all(torch.equal(actual[name], before[name]) for name in before)
    config = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 6)
    assert (config["rank_pattern"], config["alpha_pattern"]) == ({}, {})
    assert config["fan_in_fan_out"] is (family == "gpt2")
    assert config["target_modules"] == sorted(MODULES[family])
    assert config["base_model_name_or_path"] == str(tmp_path / "base")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gptj", "gpt2", "gpt_neox"])
def test_trained_adapters_are_written_for_peft(tmp_path, family):
    torch_model(family).save_pretrained(tmp_path / "base")
    keys = {"lora_rank": 3, "lora_alpha": 5.0, "lora_targets": ["q", "v", "o", "fc"]}
    network = load(tmp_path / "base", **keys, lr=0.05, total_steps=2)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (1, 1, 25)).astype(np.uint32)
    for _ in range(2):
        network.train({"obs": tokens[..., :-1], "target": tokens[..., 1:]})
    network.save(str(tmp_path / "native"))
    expected = np.asarray(network.logits(tokens_for(VOCAB)))
    network.close()
    conversion.convert(str(tmp_path / "native"), "native", str(tmp_path / "peft"), "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    adapters, scales = {}, {}
    for name, a in tensors.items():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[name.replace("lora_A", "lora_B")]
            adapters[module] = (a, b)
            # peft looks for the end of the module's name.
            alphas, ranks = (
                [v for k, v in config[key].items() if re.fullmatch(rf"(.*\.)?({k})", module)]
                for key in ("alpha_pattern", "rank_pattern")
            )
            rank = ranks[0] if ranks else config["r"]
            assert len(a) == rank == (6 if "c_attn" in name or "query_key" in name else 3)
            scales[module] = (alphas[0] if alphas else config["lora_alpha"]) / rank
    network = torch_model(family)
    assert_same_logits(merged_logits(network, adapters, scales, family), expected)
    assert_same_logits(logits(tmp_path / "peft"), expected)
    # Training can continue from them.
    again = load(tmp_path / "peft", total_steps=2)
    again.train({"obs": tokens[..., :-1], "target": tokens[..., 1:]})
    again.save(str(tmp_path / "again"))
    again.close()
    recorded = Source(tmp_path / "again").adapters
    assert recorded is not None
    assert recorded.path == str(tmp_path / "base")
    with pytest.raises(InputError, match="base is a whole model, but the format peft is only for"):
        conversion.convert(str(tmp_path / "base"), "hf", str(tmp_path / "none"), "peft")


@pytest.mark.slow
def test_adapters_are_served_on_a_mesh_beside_native_ones(tmp_path):
    network = torch_model("gptj")
    network.save_pretrained(tmp_path / "base")
    adapters = random_adapters(network, "gptj")
    save_adapters(tmp_path / "peft", "an organisation/and a model that is not here", adapters)
    ours = load(tmp_path / "base", tpu_size=8, cores_per_replica=4)
    ours.add_adapters([tmp_path / "peft"])
    text = tokens_for(VOCAB)[:1]
    settings = sampler_settings({"temp": 0.0, "adapter": np.array([1])}, 1)
    chosen = ours.batch(2).insert([0], [text[0]], 1, settings, alternatives=VOCAB)
    expected = merged_logits(network, adapters, 6 / 4, "gptj")[0, -1]
    logprobs = torch.log_softmax(torch.tensor(expected), -1).numpy()
    order = np.asarray(chosen.top_token).reshape(-1)
    assert_same_logits(np.asarray(chosen.top_logprob).reshape(-1), logprobs[order])
    ours.close()
    # The name of the base is needed only where the base must be found.
    with pytest.raises(InputError, match="the base model that its adapters were trained on is not"):
        load(tmp_path / "peft")
    conversion.convert(
        str(tmp_path / "peft"), "peft", str(tmp_path / "hf"), "hf", base=tmp_path / "base"
    )
    assert_same_logits(logits(tmp_path / "hf")[0, -1], expected)


@pytest.mark.slow
def test_ranks_and_scales_may_differ_between_modules(tmp_path):
    network = torch_model("gptj")
    network.save_pretrained(tmp_path / "base")
    one = random_adapters(network, "gptj", layers=(1,), rank=2)  # no adapters in layer 0
    two = random_adapters(network, "gptj", layers=(1,), rank=5, seed=1)
    name = "transformer.h.1.attn.v_proj"
    adapters = one | {name: two[name]}
    for use_rslora in (False, True):
        folder = tmp_path / f"peft{use_rslora}"
        patterns = {"rank_pattern": {"v_proj": 5}, "alpha_pattern": {"attn.v_proj": 3}}
        save_adapters(folder, tmp_path / "base", adapters, r=2, use_rslora=use_rslora, **patterns)
        scales = dict.fromkeys(adapters, 6 / (2**0.5 if use_rslora else 2))
        scales[name] = 3 / (5**0.5 if use_rslora else 5)
        expected = merged_logits(torch_model("gptj"), adapters, scales, "gptj")
        assert_same_logits(logits(folder), expected)


@pytest.mark.slow
def test_a_base_in_the_cache_of_the_hub_is_found(tmp_path, monkeypatch):
    network = torch_model("gpt2")
    root = tmp_path / "hub" / "models--org--small"
    network.save_pretrained(root / "snapshots" / "0123abc")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0123abc")
    with torch.no_grad():
        expected = network(torch.tensor(tokens_for(VOCAB))).logits.numpy()
    assert_same_logits(logits(root), expected)
    (root / "snapshots" / "older").mkdir()
    assert Source(root).path == str(root / "snapshots" / "0123abc")
    (root / "refs" / "main").write_text("gone")
    with pytest.raises(InputError, match=r"org--small: expected one snapshot.*, older; give"):
        Source(root)
    (root / "refs" / "main").write_text("0123abc\n")
    adapters = random_adapters(network, "gpt2")
    save_adapters(tmp_path / "peft", "org/small", adapters)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert_same_logits(logits(tmp_path / "peft"), merged_logits(network, adapters, 6 / 4, "gpt2"))


@pytest.mark.parametrize(
    ("config", "tensors", "line"),
    [
        ({"peft_type": "IA3"}, {}, "peft_type is 'IA3', which is not supported; merge"),
        ({"use_dora": True}, {}, "use_dora is True, which is not supported"),
        ({"bias": "all"}, {}, "bias is 'all', which is not supported"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save is .*, which is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, "init_lora_weights is 'pissa_niter_4'"),
        ({"alpha_pattern": {"v.*": 1}}, {}, r"alpha_pattern has v\.\*, expected names"),
        ({"lora_alpha": "8"}, {}, "alpha is '8', expected a number"),
        ({"base_model_name_or_path": None}, {}, "base_model_name_or_path is None"),
        ({}, {"transformer.h.0.attn.v_proj.lora_A.weight": torch.ones(4, 63)}, "has shapes .4, 63"),
        ({}, {"transformer.h.7.attn.v_proj.lora_A.weight": torch.ones(4, 64)}, "not an adapter of"),
        ({}, {"transformer.h.0.ln_1.lora_A.weight": torch.ones(4, 64)}, "not an adapter of one"),
        ({}, {"lm_head.lora_A.weight": torch.ones(4, 64)}, "adapts the output head"),
        ({}, {"transformer.h.0.mlp.fc_out.lora_A.weight": torch.ones(4, 256)}, "lora_B of .* miss"),
        ({}, {"transformer.h.0.attn.q_proj.lora_A.weight": torch.ones(4)}, "expected a matrix"),
    ],
)
def test_what_is_not_lora_is_refused_in_one_line(tmp_path, config, tensors, line):
    network = torch_model("gptj")
    network.save_pretrained(tmp_path / "base")
    save_adapters(tmp_path / "peft", tmp_path / "base", random_adapters(network, "gptj"), **config)
    path = tmp_path / "peft" / "adapter_model.safetensors"
    extra = {f"base_model.model.{name}": x for name, x in tensors.items()}
    save_file(load_file(path) | extra, path)
    with pytest.raises(InputError, match=line) as caught:
        Source(tmp_path / "peft").read_adapters(None)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "peft") in str(caught.value)


def test_adapters_beside_a_whole_model_are_ambiguous(tmp_path):
    torch_model("gptj").save_pretrained(tmp_path)
    (tmp_path / peft.CONFIG).write_text("{}")
    with pytest.raises(InputError, match=r"holds both a model .* and adapters of another"):
        Source(tmp_path)


@pytest.mark.slow
def test_adapters_may_lie_beside_their_base_s_config(tmp_path):
    """Some trainers save it with them; only weights make a folder a model."""
    network = torch_model("gptj")
    network.save_pretrained(tmp_path / "base")
    adapters = random_adapters(network, "gptj")
    save_adapters(tmp_path / "peft", tmp_path / "base", adapters)
    network.config.save_pretrained(tmp_path / "peft")
    assert Source(tmp_path / "peft").kind == "peft"
    expected = merged_logits(network, adapters, 6 / 4, "gptj")
    assert_same_logits(logits(tmp_path / "peft"), expected)
