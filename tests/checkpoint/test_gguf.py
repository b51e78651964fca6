"""GGUF files: reading and writing, compared with transformers and with the package gguf."""

import contextlib
import os
import sys

import gguf
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jax
from tokenizers import normalizers, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import mesh_transformer
from mesh_transformer.checkpoint import conversion, gguf_files, hf
from mesh_transformer.checkpoint.host_arrays import FLOATS
from mesh_transformer.checkpoint.source import Source
from mesh_transformer.checkpoint.state_tree import differing_keys
from mesh_transformer.cli import convert as convert_command
from mesh_transformer.data.gguf_header import GgufHeader, read_header
from mesh_transformer.data.gguf_tokenizer import metadata_of, read_tokenizer
from mesh_transformer.data.tokenizer import (
    byte_tokenizer,
    character_tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from mesh_transformer.model.layer_values import BY_LAYER, have_same_layers
from mesh_transformer.util import InputError
from tests.checkpoint.test_hf import logits, tokens_for
from tests.support import families_of_today, torch_models
from tests.support.llama_tokenizers import LLAMA_LIKE

VOCAB = 300
# Heads and key heads.  With as many groups as key heads, such as 9 over 3, a mistake in the order
# of rows that confuses the two does not show.
HEADS = [(6, 2), (9, 3), (8, 2), (4, 1), (4, 4)]
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
OLD_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def llama(heads, key_heads, *, head=8, tied=False, model_type="llama", **keys):
    """Return a Llama, or a similar model, with random weights; its width is not heads * head."""
    torch.manual_seed(heads * 100 + key_heads)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=VOCAB,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=256,
        **({"rope_theta": 5e4, "hidden_size": 10 * heads, "intermediate_size": 96} | keys),
    )
    network = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            # A norm's scale, or a matrix large enough for logits that differ.
            parameter.normal_(1.0, 0.3) if parameter.ndim == 1 else parameter.normal_(0, 0.2)
    return network


def save(network, folder, tokenizer=None):
    network.save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return str(folder)


def tensors(path):
    """Return the tensors of a GGUF file as transformers reads them."""
    folder, name = os.path.split(path)
    options = {"gguf_file": name, "dtype": torch.float32}
    network = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    return network, {key: value.numpy() for key, value in network.state_dict().items()}


def as_gguf(tmp_path, network, **options):
    folder = save(network, tmp_path / "hf")
    path = str(tmp_path / "model.gguf")
    conversion.convert(folder, "hf", path, "gguf", **options)
    return folder, path


def rewritten(source, path, *, tensors=None, **metadata):
    """Write a file with other metadata (None to leave it out) or tensors than those of `source`."""
    reader = gguf.GGUFReader(source)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    types = {key: field.types for key, field in reader.fields.items()}
    writer = gguf.GGUFWriter(path, str(metadata.pop("architecture", "llama")))
    changed = {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in (fields | changed).items():
        if key.startswith("GGUF.") or key == "general.architecture" or value is None:
            continue
        kinds = types.get(key) if key not in changed else None
        if kinds is not None and kinds[0] != gguf.GGUFValueType.ARRAY:
            writer.add_key_value(key, value, kinds[0])
        else:
            name = {str: "string", int: "uint32", float: "float32", bool: "bool", list: "array"}
            getattr(writer, f"add_{name[type(value)]}")(key, value)
    stored = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    for name, value in (stored | (tensors or {})).items():
        if value is not None:
            data, kind = value
            writer.add_tensor(name, np.array(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("model_type", "heads", "key_heads", "tied"),
    [
        ("qwen2", 6, 2, True),
        ("qwen3", 8, 2, False),
        *[("llama", *heads, tied) for tied in (False, True) for heads in HEADS],
    ],
)
def test_files_hold_the_model_for_us_and_for_transformers(
    tmp_path, model_type, heads, key_heads, tied
):
    # transformers reads no other size of a head for Qwen.
    width = {"qwen2": {"hidden_size": 8 * heads}, "qwen3": {"head": 128}}.get(model_type, {})
    network = llama(heads, key_heads, tied=tied, model_type=model_type, **width)
    folder, path = as_gguf(tmp_path, network)
    theirs, read = tensors(path)
    expected = network.state_dict()
    assert read.keys() == expected.keys()
    for name, values in read.items():
        np.testing.assert_array_equal(values, expected[name].numpy(), err_msg=name)
    config, state = hf.read(path)
    own_config, own = hf.read(folder)
    assert config.replace(tokenizer=own_config.tokenizer) == own_config
    for part, modules in own["params"].items():
        for module, leaves in modules.items():
            for leaf, values in leaves.items():
                np.testing.assert_array_equal(state["params"][part][module][leaf], values)
    tokens = tokens_for(VOCAB)
    with torch.no_grad():
        reference = theirs(torch.tensor(tokens)).logits.numpy()
    assert np.abs(reference).max() > 3
    # 1e-4, for logits of up to some tens in f32: the sums differ in order.
    np.testing.assert_allclose(logits(state, config, tokens), reference, rtol=0, atol=1e-4)


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_OTHER_YARN = {"beta_fast": 16.0, "original_max_position_embeddings": 4096}
# {model: (its case in `families_of_today`, or model type in `torch_models`, and config keys that
# differ from it)}
MODELS = {
    "llama": ("llama, biases", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {}),
    "smollm3": ("smollm3", {"no_rope_layers": None, "num_hidden_layers": 5}),
    "granite": ("granite", {"attention_bias": True, "head_dim": 10}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3, window beyond all positions": ("phi3", {"sliding_window": 200}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma2 of 27B": ("gemma2", {"query_pre_attn_scalar": 8, "num_hidden_layers": 46}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 16, "final_logit_softcapping": 9.0}),
    "gemma3, windows as usual": (
        "gemma3_text",
        {"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "layer_types": None},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "olmo3, windows as usual": ("olmo3", {"num_hidden_layers": 5, "layer_types": None}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox, sequential": (torch_models.SEQUENTIAL, {}),
}


def network_of(model, **changes):
    """Return one of `MODELS`, with weights that are numbers in bf16.

    Gemma's norms are stored plus 1, which in f32 keeps all bits of such numbers.
    """
    case, keys = MODELS.get(model, (model, {}))
    if case in families_of_today.CASES:
        network = families_of_today.torch_model(case, **({"vocab_size": VOCAB} | keys | changes))
    else:
        network = torch_models.torch_model(case, vocab=VOCAB, **changes)
    with torch.no_grad():
        for values in network.parameters():
            values.copy_(values.bfloat16())
    return network


@pytest.mark.quick(4)
@pytest.mark.parametrize("model", MODELS)
def test_every_architecture_keeps_the_model_and_every_bit(tmp_path, model):
    folder, path = as_gguf(tmp_path, network_of(model))
    (expected, own), (config, state) = hf.read(folder), hf.read(path)
    assert not differing_keys(config, expected, {"hf_type", *BY_LAYER})
    assert have_same_layers(config, expected)
    assert jax.tree.structure(own) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, state, own)


_GEMMAS_DEFAULTS = {"head_dim": 256, "query_pre_attn_scalar": 256, "num_attention_heads": 3}
_GEMMAS_DEFAULTS |= {"rope_parameters": None, "layer_types": None}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ("gemma2", _GEMMAS_DEFAULTS),
        ("gemma3_text", _GEMMAS_DEFAULTS),
        pytest.param(  # its padding token is 32000
            "phi3", {"vocab_size": 32064, "rope_parameters": None}, marks=pytest.mark.slow
        ),
        ("gpt2", {"seq": 1024}),
    ],
)
def test_transformers_reads_other_architectures(tmp_path, model, keys):
    """As far as its reader goes: with its defaults for what it does not read."""
    network = network_of(model, **keys)
    _, path = as_gguf(tmp_path, network)
    theirs, _ = tensors(path)
    config, state = hf.read(path)
    tokens = tokens_for(VOCAB)
    with torch.no_grad():
        reference = theirs(torch.tensor(tokens)).logits.numpy()
    assert np.abs(reference).max() > 3
    # As in the test of Llama's logits.
    np.testing.assert_allclose(logits(state, config, tokens), reference, rtol=0, atol=1e-4)


def permuted(count):
    """LlamaModel.permute of llama.cpp's conversion."""
    return lambda x: x.reshape(count, 2, -1, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)


_SAME = np.asarray
_NEOX_QKV = "gpt_neox.layers.1.attention.query_key_value.weight"


@pytest.mark.parametrize(
    ("model", "name", "theirs", "change"),
    [
        ("granite", "model.layers.1.self_attn.q_proj.weight", "blk.1.attn_q.weight", permuted(9)),
        ("smollm3", "model.layers.1.self_attn.k_proj.weight", "blk.1.attn_k.weight", permuted(3)),
        ("olmo2", "model.layers.1.self_attn.q_proj.weight", "blk.1.attn_q.weight", _SAME),
        ("olmo2", "model.layers.1.self_attn.k_norm.weight", "blk.1.attn_k_norm.weight", _SAME),
        ("phi3", "model.layers.1.self_attn.qkv_proj.weight", "blk.1.attn_qkv.weight", _SAME),
        ("phi3", "model.layers.1.mlp.gate_up_proj.weight", "blk.1.ffn_up.weight", _SAME),
        ("gemma", "model.layers.1.self_attn.q_proj.weight", "blk.1.attn_q.weight", _SAME),
        ("gemma", "model.norm.weight", "output_norm.weight", lambda x: x + 1),
        (
            "gemma2",
            "model.layers.1.pre_feedforward_layernorm.weight",
            "blk.1.ffn_norm.weight",
            lambda x: x + 1,
        ),
        (
            "gemma3",
            "model.layers.1.post_attention_layernorm.weight",
            "blk.1.post_attention_norm.weight",
            lambda x: x + 1,
        ),
        ("gpt2", "transformer.h.1.mlp.c_fc.weight", "blk.1.ffn_up.weight", np.transpose),
        ("gpt2", "transformer.h.1.attn.c_attn.weight", "blk.1.attn_qkv.weight", np.transpose),
        (  # all queries, then all keys, then all values
            "gpt_neox",
            _NEOX_QKV,
            "blk.1.attn_qkv.weight",
            lambda x: x.reshape(4, 3, 16, -1).swapaxes(0, 1).reshape(x.shape),
        ),
        *[
            (
                model,
                f"model.layers.1.self_attn.{which}_proj.weight",
                f"blk.1.attn_{which}.weight",
                permuted(count),
            )
            for model in HEADS
            for which, count in zip("qk", model, strict=True)
        ],
    ],
)
def test_tensors_have_the_layout_of_llama_cpps_converter(tmp_path, model, name, theirs, change):
    network = llama(*model) if isinstance(model, tuple) else network_of(model)
    _, path = as_gguf(tmp_path, network)
    actual = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}[theirs]
    np.testing.assert_array_equal(actual, change(network.state_dict()[name].numpy()))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            "granite",
            {"attention.scale": 0.15, "embedding_scale": 12.0, "residual_scale": 0.22}
            | {"logit_scale": 0.5, "rope.dimension_count": 10},
        ),
        ("phi3", {"rope.dimension_count": 4, "attention.key_length": 8}),
        (
            "gemma2",
            {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
            | {"attention.sliding_window": 6, "attention.sliding_window_pattern": None},
        ),
        (
            "gemma3",
            {"rope.freq_base": 1000.0, "rope.freq_base_swa": 100.0, "rope.scaling.factor": 8.0}
            | {"attention.sliding_window_pattern": [True, True, False]}
            | {"rope.scaling.type": "linear", "final_logit_softcapping": 9.0},
        ),
        (
            "olmo3",
            {"attention.sliding_window": 6, "rope.scaling.original_context_length": 16}
            | {"attention.sliding_window_pattern": [True, False, True]}
            | {"rope.freq_base_swa": None},
        ),
        ("gemma3, windows as usual", {"attention.sliding_window_pattern": None}),
        ("olmo3, windows as usual", {"attention.sliding_window_pattern": None}),
        ("gpt2", {"attention.layer_norm_epsilon": 1e-5, "rope.freq_base": None}),
        (
            "gpt_neox",
            {"use_parallel_residual": True, "rope.dimension_count": 8}
            | {"hidden_activation": "gelu", "attention.layer_norm_epsilon": 1e-5},
        ),
        ("gpt_neox, sequential", {"use_parallel_residual": False}),
    ],
)
def test_metadata_have_llama_cpps_keys(tmp_path, model, expected):
    _, path = as_gguf(tmp_path, network_of(model))
    metadata = read_header(path).metadata
    name = metadata["general.architecture"]
    assert {key: metadata.get(f"{name}.{key}") for key in expected} == expected


@pytest.mark.parametrize(
    ("model", "changed", "key", "expected"),
    [
        ("gemma2", {"attention.sliding_window": None}, "sliding_window", 4096),
        ("gemma2", {"attn_logit_softcapping": None}, "score_cap", 50.0),
        ("gemma2", {"attention.sliding_window_pattern": 3}, "sliding_layers", [0, 1]),
        ("gemma3", {"attention.sliding_window_pattern": None}, "sliding_layers", [0, 1, 2]),
        ("gemma3", {"attention.sliding_window": None}, "sliding_window", None),
        ("gemma3", {"rope.freq_base_swa": None}, "sliding_rotary_base", 1e4),
        ("gemma3", {"final_logit_softcapping": 0.0}, "logit_cap", None),
        ("phi3", {"attention.sliding_window": 5}, "sliding_window", 5),
        ("phi3", {"attention.sliding_window": 0}, "sliding_window", None),
        ("granite", {"residual_scale": None}, "residual_scale", 1.0),
        ("gpt_neox", {"hidden_activation": None}, "activation", "gelu"),
        ("gpt_neox", {"hidden_activation": "gelu_new"}, "activation", "gelu_tanh"),
        # llama.cpp's conversion writes these, and llama.cpp computes the factor itself.
        (
            "olmo3",
            {"rope.scaling.yarn_attn_factor": 0.1 * np.log(4.0).item() + 1},
            "rotary_scaling",
            _YARN,
        ),
    ],
)
def test_other_metadata_of_an_architecture_are_read(tmp_path, model, changed, key, expected):
    _, path = as_gguf(tmp_path, network_of(model))
    name = read_header(path).metadata["general.architecture"]
    values = {f"{name}.{own}".replace(".", "__"): value for own, value in changed.items()}
    path = rewritten(path, str(tmp_path / "changed.gguf"), architecture=name, **values)
    assert getattr(Source(path).config, key) == expected


@pytest.mark.parametrize(
    ("model", "changes", "problem"),
    [
        ("phi3", {"sliding_window": 9}, "sliding_window is 9, but .* it would be None"),
        ("mistral", {"sliding_window": 7}, "sliding_window is 7, but .* it would be None"),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 1, 1]}, r"unrotated_layers is \[1\]"),
        ("gemma2", {"query_pre_attn_scalar": 24}, "attention_scale is 0.2"),
        ("gemma2", {"final_logit_softcapping": None}, "logit_cap is None, but .* be 30.0"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "score_cap is 50.0, but .* be None"),
        ("gemma", {"tie_word_embeddings": False}, "tie_head is False, but .* be True"),
        ("olmo2", {"tie_word_embeddings": True}, "tie_head is True, but .* be False"),
        ("qwen3", {"attention_bias": True}, r"biases is \['q', 'k', 'v', 'o'\], but .* be \[\]"),
        ("llama", {"hidden_act": "gelu_new"}, "activation is 'gelu_tanh', but .* be 'silu'"),
        ("qwen3", {"rope_parameters": _YARN | _OTHER_YARN}, "rotary_scaling is .*16.0"),
        (
            "olmo3",
            {
                "rope_parameters": {
                    "full_attention": _YARN,
                    "sliding_attention": {"rope_type": "default", "rope_theta": 9.0},
                }
            },
            "sliding_rotary_base is 9.0, but .* be 500000.0",
        ),
        ("olmo2", {"head_dim": 12}, "9 heads of size 12 in a model of width 72; llama.cpp's olmo2"),
        ("nanochat", {}, "hf_type is 'nanochat', but GGUF files"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path, model, changes, problem):
    with pytest.raises(InputError, match=problem) as caught:
        as_gguf(tmp_path, network_of(model, **changes))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "model.gguf").exists()


def test_a_granite_without_rotary_embedding_is_refused(tmp_path):
    _, path = as_gguf(tmp_path, network_of("granite"))
    assert conversion.compare_with_torch(path) is None  # of which transformers reads no files
    values = {"granite__rope__scaling__finetuned": False}
    path = rewritten(path, str(tmp_path / "other.gguf"), architecture="granite", **values)
    with pytest.raises(InputError, match=r"'granite.rope.scaling.finetuned' is 'False'"):
        _ = Source(path).config


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0"])
def test_types_that_are_written(tmp_path, kind):
    network = llama(6, 2, hidden_size=96)
    quantized = kind == "q8_0"
    options = {"quantized": True} if quantized else {"dtype": FLOATS[kind]}
    _, path = as_gguf(tmp_path, network, **options)
    expected = gguf.GGMLQuantizationType[kind.upper()]
    half = gguf.GGMLQuantizationType.F16
    for tensor in gguf.GGUFReader(path).tensors:
        if len(tensor.shape) == 1:
            assert tensor.tensor_type == gguf.GGMLQuantizationType.F32, tensor.name
        elif quantized and tensor.shape[0] % 32:  # attn_output has rows of 48 values
            assert tensor.tensor_type == half
            assert tensor.name.endswith("attn_output.weight")
        else:
            assert tensor.tensor_type == expected, tensor.name
    assert gguf_files.is_quantized(path) == quantized
    _, theirs = tensors(path)
    config, state = hf.read(path)
    hf.write(str(tmp_path / "back"), state, config, dtype=np.float32)
    back = LlamaForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    for name, values in theirs.items():
        np.testing.assert_array_equal(back[name].numpy(), values, err_msg=name)
    held = state["params"]["embed"]["embedding"]["w"].dtype
    assert held == (np.float32 if quantized else FLOATS[kind])
    again = str(tmp_path / "again.gguf")
    conversion.convert(path, "gguf", again, "gguf", quantized=quantized)
    with open(path, "rb") as one, open(again, "rb") as other:
        assert one.read() == other.read()


@pytest.mark.parametrize("kind", [*OLD_TYPES, *K_TYPES])
def test_quantized_types_are_read_as_gguf_does(tmp_path, kind):
    network = llama(4, 2, head=64, hidden_size=256, intermediate_size=512)
    _, path = as_gguf(tmp_path, network)
    number = gguf.GGMLQuantizationType[kind]
    random, changed = np.random.default_rng(int(number)), {}
    for tensor in gguf.GGUFReader(path).tensors:
        if len(tensor.shape) > 1:
            shape = gguf.quant_shape_to_byte_shape(tensor.data.shape, number)
            raw = random.integers(0, 256, shape, dtype=np.uint8)
            if kind in OLD_TYPES:  # the package cannot quantize to the others
                raw = gguf.quantize(tensor.data, number)
            changed[tensor.name] = raw, number
    path = rewritten(path, str(tmp_path / f"{kind}.gguf"), tensors=changed)
    config = Source(path).config
    names = {"model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight"}
    names |= {"model.embed_tokens.weight": "token_embd.weight"}
    names |= {"model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight"}
    stored = gguf_files.find(path, names, config)
    for name, theirs in names.items():
        assert stored[name].dtype == "F32"
        with np.errstate(invalid="ignore"):  # random scales may be infinite
            expected = gguf.dequantize(*changed[theirs])
            np.testing.assert_array_equal(stored[name].read(), expected)
    if kind in OLD_TYPES:
        _, read = tensors(path)
        _, state = hf.read(path)
        for name in ("q", "k"):
            ours = state["params"]["layers"][f"layer/{name}"]["w"]
            layers = (f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in (0, 1))
            theirs = [read[layer] for layer in layers]
            np.testing.assert_array_equal(ours, np.stack(theirs).swapaxes(1, 2))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "BF16"])
def test_mixed_types_become_f32(tmp_path, kind):
    """The types may differ from layer to layer, as in files that llama.cpp quantizes."""
    network = llama(6, 2, hidden_size=96)
    _, path = as_gguf(tmp_path, network, dtype=np.float16)
    name = "blk.1.ffn_up.weight"
    values = network.state_dict()["model.layers.1.mlp.up_proj.weight"].numpy()
    number = gguf.GGMLQuantizationType[kind]
    changed = {name: (gguf.quantize(values, number), number)}
    path = rewritten(path, str(tmp_path / "mixed.gguf"), tensors=changed)
    _, state = hf.read(path)
    leaf = state["params"]["layers"]["layer/fc"]["w"]
    assert leaf.dtype == np.float32
    np.testing.assert_array_equal(leaf[1].T, gguf.dequantize(*changed[name]))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rotary_frequencies_of_llama_3_are_recognised(factor):
    rope = gguf_files.LLAMA3 | {"factor": factor, "rope_theta": 5e5}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=1, rope_parameters=rope, max_position_embeddings=2**17
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 5e5 ** (-np.arange(0, 128, 2) / 128)
    divisors = gguf_files.llama3_divisors(rope, 128)
    assert divisors.min() == 1
    assert divisors.max() == factor
    np.testing.assert_allclose(plain / divisors, scaled.numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    "rope",
    [
        gguf_files.LLAMA3 | {"factor": 8.0},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ],
)
def test_scaled_rotary_frequencies_are_kept(tmp_path, rope):
    network = llama(6, 2, head=16, rope_parameters=rope | {"rope_theta": 5e5})
    folder, path = as_gguf(tmp_path, network)
    config = Source(path).config
    assert config.rotary_scaling is not None
    assert config.replace(tokenizer="x") == Source(folder).config.replace(tokenizer="x")


@pytest.mark.parametrize(
    ("metadata", "factor"),
    [
        ({"scale_linear": 4.0}, 4.0),
        ({"scaling__factor": 2.0}, 2.0),
        ({"scaling__factor": 2.0, "scale_linear": 4.0}, 2.0),
        ({"scaling__type": "linear", "scale_linear": 4.0}, 4.0),
        ({"scaling__type": "none", "scaling__factor": 4.0}, None),
        ({"scaling__type": "linear"}, None),
        ({"scale_linear": 1.0}, None),
    ],
)
def test_linear_scaling_by_its_old_key_or_without_a_type(tmp_path, metadata, factor):
    network = llama(6, 2)
    folder, path = as_gguf(tmp_path, network)
    metadata = {f"llama__rope__{key}": value for key, value in metadata.items()}
    path = rewritten(path, str(tmp_path / "scaled.gguf"), **metadata)
    if factor is not None:
        network.config.rope_parameters |= {"rope_type": "linear", "factor": factor}
        folder = save(network, tmp_path / "scaled")
    config = Source(path).config
    assert config.replace(tokenizer="x") == Source(folder).config.replace(tokenizer="x")


NEUTRAL = {
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": -1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "attention.scale": 8**-0.5,
    "attention.causal": True,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
}


def test_metadata_that_would_change_the_model_are_refused(tmp_path):
    """Keys that are not supported, and unknown keys, are accepted with neutral values only."""
    _, path = as_gguf(tmp_path, llama(6, 2))
    changed = str(tmp_path / "changed.gguf")

    def rewrite(values):
        rewritten(path, changed, **{key.replace(".", "__"): x for key, x in values.items()})

    zero = {"attention.sliding_window": 0, "expert_count": 0, "attention.scale": 0.0, "other": 0}
    ignored = {"rope.scaling.finetuned": True, "tensor_data_layout": "Meta AI original pth"}
    for neutral in (NEUTRAL, zero | ignored):
        # A key of another architecture does not count.
        rewrite({f"llama.{key}": value for key, value in neutral.items()} | {"other.key": 7})
        assert Source(changed).config.replace(tokenizer=path) == Source(path).config
    wrong = {key: not value if value is True else value + 0.5 for key, value in NEUTRAL.items()}
    for key, value in (wrong | {"attention.sliding_window": 16, "other": "x"}).items():
        rewrite({f"llama.{key}": value})
        with pytest.raises(InputError, match=rf"'llama\.{key}' is .* not supported") as caught:
            _ = Source(changed).config
        assert "\n" not in str(caught.value)
        assert changed in str(caught.value)


def test_rotary_frequencies_that_a_file_cannot_hold_are_refused(tmp_path):
    wrong = {"rope_type": "llama3", "low_freq_factor": 2.0, "high_freq_factor": 4.0}
    rope = wrong | {"factor": 8.0, "original_max_position_embeddings": 8192, "rope_theta": 5e5}
    with pytest.raises(InputError, match=r"rotary_scaling is .*2\.0, .*it would be None"):
        as_gguf(tmp_path, llama(6, 2, head=16, rope_parameters=rope))


TEXTS = ["It's 12345 IT'S\n\n  a\u0301 \u65e5\u672c.\t?!", " the  a.", "", "\U0001f44d x", "the\n"]


def assert_same_tokenizer(actual, expected):
    for text in TEXTS:
        ids = expected(text)["input_ids"]
        assert actual(text)["input_ids"] == ids
        assert actual.decode(ids) == expected.decode(ids)
    assert actual.get_vocab() == expected.get_vocab()
    for name in ("bos", "eos", "unk"):
        assert getattr(actual, f"{name}_token") == getattr(expected, f"{name}_token")


def tokenizer_file(tmp_path, tokenizer, rows=None, **changed):
    """Return a GGUF file that holds a tokenizer, and no model."""
    path = str(tmp_path / "tokenizer.gguf")
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (metadata_of(tokenizer, rows or len(tokenizer)) | changed).items():
        getattr(writer, f"add_{gguf_files._WRITTEN[type(value)]}")(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_byte_level_tokenizers(tmp_path):
    for number, expected in enumerate((load_tokenizer("gpt2"), byte_tokenizer())):
        expected.add_tokens(["<think>", "<|user|>"])
        expected.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
        expected.chat_template = "{{ messages }}"
        (tmp_path / str(number)).mkdir()
        path = tokenizer_file(tmp_path / str(number), expected)
        actual = load_tokenizer(path)
        assert_same_tokenizer(actual, expected)
        text = "<think> a <|im_end|><|user|>"
        assert actual.tokenize(text) == expected.tokenize(text)
        shown = actual.decode(actual(text)["input_ids"], skip_special_tokens=True)
        assert "<|im_end|>" not in shown


def test_sentencepiece_tokenizers(tmp_path):
    """Their merges follow from the scores of tokens, and a text begins with the BOS token."""
    expected = LLAMA_LIKE["llama"]()
    actual = load_tokenizer(tokenizer_file(tmp_path, expected))
    assert_same_tokenizer(actual, expected)
    assert actual("the")["input_ids"][0] == expected.bos_token_id


def test_tokenizers_that_llama_cpp_lacks_are_refused():
    """Merges across words, an unknown split, a normalizer, and characters without bytes."""
    lower = load_tokenizer("gpt2")
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    words = load_tokenizer("gpt2")
    words.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    others = (LLAMA_LIKE["metaspace"](), lower, words, character_tokenizer(["abc"]))
    for tokenizer in others:
        with pytest.raises(
            InputError, match=r"convert to hf, or give another --tokenizer"
        ) as caught:
            metadata_of(tokenizer, len(tokenizer))
        assert "\n" not in str(caught.value)


def test_special_tokens_outside_of_the_vocabulary(tmp_path):
    """An end of text that the model cannot generate is refused; a padding token is left out."""
    tokenizer = byte_tokenizer()
    with pytest.raises(
        InputError, match=r"^tokenizer: its bos_token is token 256, but the model has 256 tokens; "
    ):
        metadata_of(tokenizer, 256)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    metadata = metadata_of(tokenizer, 257)
    assert metadata["tokenizer.ggml.eos_token_id"] == 256
    assert "tokenizer.ggml.padding_token_id" not in metadata


def test_every_split_is_distinct_and_has_a_name(tmp_path):
    from mesh_transformer.data.gguf_tokenizer import _PROBE, _SPLITS, _pre_tokenizer

    names = {}
    for split in _SPLITS.values():
        words = tuple(_pre_tokenizer(split).pre_tokenize_str(_PROBE))
        names.setdefault((words, split.whole), set()).add(split)
    assert all(len(splits) == 1 for splits in names.values())
    for name in ("gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o"):
        tokenizer = train_tokenizer(TEXTS * 3, 400)
        tokenizer.backend_tokenizer.pre_tokenizer = _pre_tokenizer(_SPLITS[name])
        tokenizer.backend_tokenizer.model.ignore_merges = _SPLITS[name].whole
        if name == "qwen2":
            tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
        (tmp_path / name).mkdir()
        path = tokenizer_file(tmp_path / name, tokenizer)
        assert read_header(path).metadata["tokenizer.ggml.pre"] == name
        for text in TEXTS:
            stored = read_tokenizer(read_header(path)).model
            assert stored.encode(text).ids == tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    ("pre", "whole", "begins"),
    [
        ("gpt-2", False, False),
        ("smollm", False, False),
        ("qwen2", False, False),
        ("gpt-4o", False, False),
        ("llama-bpe", True, True),
        ("falcon3", True, True),
        ("tekken", True, True),
        ("dbrx", False, False),
        ("smaug-bpe", False, False),
    ],
)
def test_splits_are_those_of_llama_cpp(tmp_path, pre, whole, begins):
    """llama.cpp's `ignore_merges` and `add_bos` by the name of the split.

    The token "ba" has no merge, so that it is found only if words that are tokens need none.
    """
    tokenizer = train_tokenizer(TEXTS * 3, 400)
    metadata = metadata_of(tokenizer, len(tokenizer) + 1)
    metadata["tokenizer.ggml.tokens"][-1] = "ba"
    metadata["tokenizer.ggml.token_type"][-1] = 1
    metadata |= {"tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": 0}
    metadata.pop("tokenizer.ggml.add_bos_token")
    actual = read_tokenizer(GgufHeader("x", metadata, {}, 0)).model.encode("ba").tokens
    first = metadata["tokenizer.ggml.tokens"][:1]
    assert actual == first * begins + (["ba"] if whole else ["b", "a"])


@pytest.mark.parametrize("pre", [None, "default"])
def test_files_that_do_not_name_a_split_are_refused(tmp_path, pre):
    """Such as those of Llama 3 from before the key existed; GPT-2's split would be another."""
    metadata = metadata_of(tokenizer := byte_tokenizer(), len(tokenizer))
    metadata.pop("tokenizer.ggml.pre")
    if pre:
        metadata["tokenizer.ggml.pre"] = pre
    problem = "is missing" if pre is None else "is 'default'"
    with pytest.raises(InputError, match=rf"x: tokenizer.ggml.pre {problem}, .*--tokenizer"):
        read_tokenizer(GgufHeader("x", metadata, {}, 0))


def test_special_tokens_that_only_pad_the_vocabulary_are_left_out(tmp_path):
    expected = byte_tokenizer()
    size = len(expected)
    key = "tokenizer.ggml.padding_token_id"
    for number, left in ((size + 2, True), (size + 3, False), (size - 1, False)):
        metadata = metadata_of(expected, size + 3) | {key: number}
        header = GgufHeader("x", metadata, {}, 0)
        if number < size + 3:
            assert ("pad_token" not in read_tokenizer(header).special) == left
        else:
            with pytest.raises(InputError, match="damaged"):
                read_tokenizer(header)


def test_very_long_tokens_are_refused(tmp_path):
    """The ways to cut a token in two take time quadratic in its length."""
    metadata = metadata_of(tokenizer := LLAMA_LIKE["llama"](), len(tokenizer) + 1)
    for key, value in (("tokens", "a" * 1_000_000), ("token_type", 1), ("scores", 0.0)):
        metadata[f"tokenizer.ggml.{key}"][-1] = value
    with pytest.raises(InputError, match=r"damaged .*1,000,000 letters"):
        read_tokenizer(GgufHeader("x", metadata, {}, 0))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"architecture": "mamba"},
            r"architecture is 'mamba', expected one of llama.*; .*, such as \S+/SmolLM2-",
        ),
        ({"split__count": 2}, "is one of 2 parts"),
        ({"llama__block_count": None}, "llama.block_count is missing, expected a whole number"),
        ({"llama__block_count": "2"}, "llama.block_count is '2', expected a whole number"),
        ({"llama__rope__dimension_count": 4}, "llama.rope.dimension_count is 4, expected 8"),
        ({"llama__rope__scaling__type": "other"}, "type 'other'|scaling"),
        ({"llama__rope__scaling__type": "yarn"}, "scaling.factor is missing, expected a number"),
        ({"tokenizer__ggml__pre": "other"}, "tokenizer.ggml.pre is 'other', expected one of gpt-2"),
        ({"tokenizer__ggml__model": "bert"}, "tokenizer.ggml.model is 'bert', expected gpt2 or"),
        ({"tokenizer__ggml__token_type": [1, 2]}, "its tokenizer is damaged"),
        ({"llama__attention__head_count_kv": 3}, "attn_k|key_heads|k_proj"),
        (
            {"llama__block_count": 2**31},
            "block_count is 2,147,483,648, but the file has 21 tensors",
        ),
        ({"llama__block_count": 3}, "tensor blk.2.attn_norm.weight is missing"),
        ({"llama__block_count": 1}, "tensor blk.1.*is not part of the model"),
    ],
)
def test_files_that_do_not_fit_are_refused_in_one_line(tmp_path, metadata, message):
    _, path = as_gguf(tmp_path, llama(6, 2))
    if "other" in metadata.values() and "llama__rope__scaling__type" in metadata:
        metadata = metadata | {"llama__rope__scaling__factor": 2.0}
    path = rewritten(path, str(tmp_path / "bad.gguf"), **metadata)
    key = next(iter(metadata))
    read = load_tokenizer if key.startswith("tokenizer") else hf.read
    with pytest.raises(InputError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert path in str(caught.value)


def test_damaged_files_are_refused_in_one_line(tmp_path):
    _, path = as_gguf(tmp_path, llama(6, 2))
    with open(path, "rb") as file:
        content = file.read()
    start = min(tensor.start for tensor in read_header(path).tensors.values())
    random = np.random.default_rng(0)
    cuts = [
        0,
        3,
        4,
        7,
        23,
        *random.integers(24, start, 20),
        *random.integers(start, len(content), 5),
    ]
    bad = str(tmp_path / "bad.gguf")
    for cut in map(int, cuts):
        with open(bad, "wb") as file:
            file.write(content[:cut])
        with pytest.raises(InputError, match=r"GGUF|damaged|ends at byte") as caught:
            hf.read(bad)
        assert "\n" not in str(caught.value)
    for _ in range(100):  # the result is another model or an error, and no other exception
        changed = bytearray(content)
        changed[int(random.integers(0, start))] = int(random.integers(0, 256))
        with open(bad, "wb") as file:
            file.write(changed)
        with contextlib.suppress(InputError):
            hf.read(bad, drop_extra=True)


def text(value):
    content = value.encode()
    return len(content).to_bytes(8, "little") + content


def header_of(*tensors, keys=()):
    """Return a file without data, of tensors given as (name, shape), and of keys."""
    numbers = (3).to_bytes(4, "little"), *(len(x).to_bytes(8, "little") for x in (tensors, keys))
    content = b"GGUF" + b"".join(numbers)
    for key in keys:
        content += text(key) + (4).to_bytes(4, "little") + (1).to_bytes(4, "little")
    for name, shape in tensors:
        sizes = b"".join(size.to_bytes(8, "little") for size in shape)
        content += text(name) + len(shape).to_bytes(4, "little") + sizes + bytes(12)
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header_of(("a", [1] * 5)), "tensor 'a' has 5 dimensions, expected at most 4"),
        (header_of(("a", [0] * 100_000)), "100,000 dimensions"),
        (header_of(("a", [2]), ("b", [2]), ("a", [3])), "tensor 'a' is listed twice"),
        (header_of(("a\nb" * 99, [2]), ("a\nb" * 99, [2])), "listed twice"),
        (header_of(keys=["a", "b", "b"]), "key 'b' is listed twice"),
    ],
)
def test_damaged_headers_are_refused(tmp_path, content, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_header(str(path))
    assert "\n" not in str(caught.value)
    path.write_bytes(header_of(("a", [1] * 4), ("b", [2]), keys=["a", "b"]))
    assert [*read_header(str(path)).tensors] == ["a", "b"]


def test_other_models_are_not_written(tmp_path):
    keys = {"layers": 1, "d_model": 16, "n_heads": 2, "n_vocab": 300, "seq": 8}
    config = mesh_transformer.Config(**keys, tokenizer="bytes")
    state = {"params": {}, "step": np.zeros((), np.int32)}
    with pytest.raises(InputError, match="hf_type is 'gptj', but GGUF files"):
        hf.write_gguf(str(tmp_path / "model.gguf"), state, config)
    assert not [*tmp_path.iterdir()]


def test_a_failed_conversion_leaves_nothing(tmp_path, monkeypatch):
    folder = save(llama(6, 2), tmp_path / "hf")
    written = gguf.GGUFWriter.write_tensor_data

    def fail(self, values):
        if len(self.tensors[0]) < 5:
            raise OSError(28, "No space left on device")
        written(self, values)

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", fail)
    with pytest.raises(InputError, match=r"cannot be written.*no partial file is left"):
        conversion.convert(folder, "hf", str(tmp_path / "new" / "model.gguf"), "gguf")
    assert not [*(tmp_path / "new").iterdir()]
    monkeypatch.undo()
    path = str(tmp_path / "new" / "model.gguf")
    conversion.convert(folder, "hf", path, "gguf")
    assert [*(tmp_path / "new").iterdir()] == [tmp_path / "new" / "model.gguf"]
    with pytest.raises(InputError, match=r"already exists|exists"):
        conversion.convert(folder, "hf", path, "gguf")
    with pytest.raises(InputError, match=r"ends in \.gguf"):
        conversion.convert(folder, "hf", str(tmp_path / "new" / "model"), "gguf")


def test_the_command_converts_and_verifies(tmp_path, monkeypatch, capsys):
    folder = save(llama(6, 2), tmp_path / "hf")

    def convert(*flags):
        monkeypatch.setattr(sys, "argv", ["convert", *map(str, flags)])
        convert_command.main()

    path = tmp_path / "model.gguf"
    convert("--from", "hf", folder, "--to", "gguf", path, "--dtype", "q8_0", "--verify")
    printed = capsys.readouterr().out
    assert f"wrote {path}: gguf format, weights in q8_0" in printed
    assert f"{path}: logits differ from transformers'" in printed
    convert("--from", "gguf", path, "--to", "native", tmp_path / "native", "--verify")
    convert("--from", "native", tmp_path / "native", "--to", "hf", tmp_path / "back", "--verify")
    with pytest.raises(InputError, match="--dtype q8_0 requires --to gguf"):
        convert("--from", "gguf", path, "--to", "hf", tmp_path / "other", "--dtype", "q8_0")


def test_a_file_is_a_model_path(tmp_path):
    """It is loaded, with its tokenizer and end tokens, as the folder it was written from."""
    folder, path = as_gguf(tmp_path, llama(6, 2))
    source = Source(path)
    assert source.kind == "gguf"
    assert (source.config.tokenizer, source.tokenizer) == (path, path)
    assert source.config.end_tokens == [256]
    changes = {"dtype": "float32"}
    tokens = tokens_for(VOCAB)
    ours, theirs = (mesh_transformer.load(place, changes=changes) for place in (path, folder))
    np.testing.assert_array_equal(ours.logits(tokens), theirs.logits(tokens))


def test_sampling_settings_and_chat_template_in_the_metadata(tmp_path):
    _, path = as_gguf(tmp_path, llama(6, 2))
    assert Source(path).config.sampling == {}
    own = {"temp": 0.6, "top_k": 20, "penalty_repeat": 1.5, "sequence": "top_k;temp"}
    metadata = {f"general__sampling__{name}": value for name, value in own.items()}
    path = rewritten(path, str(tmp_path / "sampling.gguf"), **metadata)
    expected = {"temp": 0.6, "top_k": 20, "repetition_penalty": 1.5}
    assert Source(path).config.sampling == expected
    back, again = str(tmp_path / "back"), str(tmp_path / "again.gguf")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}!"
    conversion.convert(path, "gguf", back, "hf", chat_template=template)
    theirs = GenerationConfig.from_pretrained(back)
    assert (theirs.do_sample, theirs.temperature, theirs.top_k) == (True, 0.6, 20)
    assert theirs.repetition_penalty == 1.5
    messages = [{"role": "user", "content": "a"}]
    assert AutoTokenizer.from_pretrained(back).apply_chat_template(messages, tokenize=False) == "a!"
    conversion.convert(back, "hf", again, "gguf")
    config = Source(again).config
    assert (config.sampling, config.chat_template) == (expected, template)
    stored = read_header(again).metadata  # by llama.cpp's names
    assert stored["tokenizer.chat_template"] == template
    names = {"general.sampling.temp", "general.sampling.top_k", "general.sampling.penalty_repeat"}
    assert names <= stored.keys()
