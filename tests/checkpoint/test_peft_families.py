"""Adapters of Hugging Face's gated families, which the package peft and this one exchange.

The oracle is peft itself: it loads our adapters, and we load its own, with equal logits.
"""

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mesh_transformer.checkpoint import conversion
from mesh_transformer.checkpoint.adapters import Base, merged_leaves
from mesh_transformer.checkpoint.peft import write
from mesh_transformer.checkpoint.source import Source
from mesh_transformer.checkpoint.state_tree import in_memory
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import transformer
from tests.checkpoint.test_gguf import llama, save, tensors
from tests.support.families_of_today import CASES, torch_model

TOKENS = np.random.default_rng(0).integers(0, 131, (2, 40))
SIX = {"num_attention_heads": 6, "num_key_value_heads": 2}  # three heads share each of two
MODELS = [*((case, {}) for case in CASES), ("llama", SIX), ("phi3", SIX)]
MODELS = [model for model in MODELS if model[0] not in ("llama, biases", "llama, yarn")]


def torch_logits(network):
    with torch.no_grad():
        return network.eval()(torch.tensor(TOKENS)).logits.numpy()


def torch_base(folder):
    network = AutoModelForCausalLM.from_pretrained(folder)
    network.set_attn_implementation("eager")  # the only one with caps on scores
    return network


def our_logits(config, params):
    """Return the logits of a model in float32."""
    config = config.replace(dtype="float32")
    run = jax.jit(lambda params: transformer.logits(params, TOKENS, config, Auto()))
    return np.asarray(run(in_memory(params)))


def assert_same_logits(actual, expected):
    # In f32, the sums have another order, and merged matrices are rounded.
    bound = 2e-5 * np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)


def peft_model(base, **options):
    """Return a model with random adapters of peft's own."""
    kind = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules="all-linear", init_lora_weights=False, **options
    )
    torch.manual_seed(0)
    return peft.get_peft_model(torch_base(base), kind)


def random_like(adapters):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32), adapters)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "keys"), MODELS, ids=str)
def test_peft_and_this_package_read_each_others_adapters(tmp_path, case, keys):
    base = str(tmp_path / "base")
    torch_model(case, **keys).save_pretrained(base)
    without = torch_logits(torch_base(base))
    theirs = peft_model(base)
    theirs.save_pretrained(tmp_path / "theirs")
    expected = torch_logits(theirs)
    assert np.abs(expected - without).max() > 0.05 * np.abs(without).max()
    config, state = conversion.read(Source(tmp_path / "theirs"))  # merged
    assert_same_logits(our_logits(config, state["params"]), expected)
    # Written again: the same tensors, bit for bit.
    conversion.convert(tmp_path / "theirs", "peft", tmp_path / "back", "peft")
    name = "adapter_model.safetensors"
    actual, before = load_file(tmp_path / "back" / name), load_file(tmp_path / "theirs" / name)
    assert actual.keys() == before.keys()
    assert all(torch.equal(actual[key], before[key]) for key in before)
    # Ours: each matrix has a first factor of its own, also in a tensor that holds several.
    config, state = Source(tmp_path / "theirs").read_adapters(None)
    assert config.lora_targets == list(config.layer_kind.lora_targets)
    own = random_like(state["params"])
    write(str(tmp_path / "ours"), own, config, base)
    loaded = peft.PeftModel.from_pretrained(torch_base(base), tmp_path / "ours")
    expected = torch_logits(loaded)
    _, whole = conversion.read(Source(base))
    params = merged_leaves(whole["params"], own, config, Base(base, {}), base)
    assert_same_logits(our_logits(config.merged(), params), expected)
    conversion.convert(tmp_path / "ours", "peft", tmp_path / "merged", "hf")
    assert_same_logits(torch_logits(torch_base(tmp_path / "merged")), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "heads"), [("llama", (6, 2)), ("qwen2", (9, 3))])
def test_adapters_are_merged_into_gguf_files(tmp_path, model_type, heads):
    """In which rows of queries and keys have another order, for Llama."""
    network = llama(*heads, model_type=model_type, hidden_size=8 * heads[0])
    theirs = peft_model(save(network, tmp_path / "base"))
    theirs.save_pretrained(tmp_path / "theirs")
    path = str(tmp_path / "merged.gguf")
    conversion.convert(tmp_path / "theirs", "peft", path, "gguf")
    assert_same_logits(torch_logits(tensors(path)[0]), torch_logits(theirs))
