"""Values of config.json in Hugging Face's families with gated layers, against transformers'."""

import json

import numpy as np
import pytest
import transformers

from mesh_transformer.checkpoint.hf_config import family_of, read_config, write_configs
from mesh_transformer.config import Config
from mesh_transformer.util import InputError

LAYERS = 7
SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "smollm3": "SmolLM3",
    "granite": "Granite",
    "phi3": "Phi3",
    "nanochat": "NanoChat",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 2.0}


def read(folder, model_type, **values):
    values = SIZES | {"model_type": model_type} | values
    (folder / "config.json").write_text(json.dumps(values), "utf-8")
    return read_config(str(folder))


def theirs(model_type, **values):
    kind = getattr(transformers, f"{CLASSES[model_type]}Config")
    result = kind.from_dict(json.loads(json.dumps(SIZES | values)))
    result.standardize_rope_params()  # as models do
    return result


def windows(config):
    return [
        config.sliding_window if layer in (config.sliding_layers or ()) else None
        for layer in range(LAYERS)
    ]


@pytest.mark.parametrize("model_type", CLASSES)
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"sliding_window": None},
        {"sliding_window": 5},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "max_window_layers": 0},
        {"use_sliding_window": True, "max_window_layers": 4, "sliding_window": 9},
        {"layer_types": ["sliding_attention", *["full_attention"] * 4, *["sliding_attention"] * 2]},
    ],
    ids=str,
)
def test_windows_are_those_of_transformers(tmp_path, model_type, values):
    """Missing keys have transformers' defaults; without `use_sliding_window` Qwen has no window."""
    if model_type == "smollm3" and values.get("use_sliding_window"):
        with pytest.raises(InputError, match="use_sliding_window is True; only False"):
            read(tmp_path, model_type, **values)
        return
    config = theirs(model_type, **values)
    own, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if model_type in ("mistral", "phi3"):  # which ignore layer_types
        kinds = ["sliding_attention"] * LAYERS
    elif model_type not in ("qwen2", "qwen3", "gemma2", "gemma3_text", "olmo3"):
        kinds = ["full_attention"] * LAYERS
    expected = [own if kind == "sliding_attention" else None for kind in kinds]
    assert windows(read(tmp_path, model_type, **values)) == expected


NESTED = {"full_attention": LINEAR | {"rope_theta": 70.0}, "sliding_attention": {"rope_theta": 9.0}}


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LINEAR}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("llama", {"rope_parameters": {"type": "linear", "factor": 2.0}}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default"}}
            | {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 80.0},
        ),
        ("llama", {"rope_parameters": YARN | {"rope_theta": 70.0}, "rope_scaling": LINEAR}),
        ("llama", {"rope_parameters": LINEAR | {"rope_theta": 70.0}, "rope_scaling": {}}),
        ("llama", {"rope_parameters": YARN, "original_max_position_embeddings": 8}),
        ("qwen3", {"rope_scaling": LLAMA3, "original_max_position_embeddings": 8}),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        ("smollm3", {}),
        ("gemma3_text", {"rope_parameters": NESTED}),
        ("gemma3_text", {"rope_parameters": NESTED, "rope_scaling": YARN}),
        ("gemma3_text", {"rope_scaling": LINEAR, "original_max_position_embeddings": 8}),
        ("olmo3", {"rope_scaling": YARN, "original_max_position_embeddings": 8}),
    ],
)
def test_rotary_parameters_are_those_of_transformers(tmp_path, model_type, values):
    expected = theirs(model_type, **values).rope_parameters
    expected = expected.get("full_attention", expected)
    config = read(tmp_path, model_type, **values)
    assert config.rotary_base == expected["rope_theta"]
    scaling = config.rotary_scaling or {"rope_type": "default"}
    assert scaling == {key: expected[key] for key in scaling}


def test_sliding_layers_of_olmo_3_have_the_base_of_the_others_by_default(tmp_path):
    """As in the authors' code, which has one base; transformers falls back to 500,000."""
    assert read(tmp_path, "olmo3", rope_theta=70.0).sliding_rotary_base == 70
    assert read(tmp_path, "olmo3").sliding_rotary_base == 5e5
    rope = {"full_attention": {"rope_theta": 70.0}}
    assert read(tmp_path, "olmo3", rope_parameters=rope).sliding_rotary_base == 70
    assert read(tmp_path, "gemma3_text", rope_theta=70.0).sliding_rotary_base == 1e4
    assert read(tmp_path, "gemma3_text", sliding_window=None).sliding_rotary_base is None


@pytest.mark.parametrize("hf_type", ["olmo3", "gemma3_text"])
def test_exports_have_the_base_of_sliding_layers(tmp_path, hf_type):
    config = read(tmp_path, hf_type, rope_theta=70.0).replace(sliding_rotary_base=None)
    write_configs(str(tmp_path), config, 131, np.dtype(np.float32), None)
    assert read_config(str(tmp_path)).sliding_rotary_base == 70
    config = config.replace(rotary_scaling=LINEAR)
    with pytest.raises(InputError, match="rotary_scaling applies to sliding layers"):
        write_configs(str(tmp_path), config, 131, np.dtype(np.float32), None)
    config = config.replace(sliding_window=None, sliding_layers=None)
    write_configs(str(tmp_path), config, 131, np.dtype(np.float32), None)
    assert read_config(str(tmp_path)).model == config.model


@pytest.mark.parametrize("model_type", CLASSES)
def test_parts_of_heads_are_rotated_only_in_phi_3(tmp_path, model_type):
    for values in (
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ):
        if model_type == "phi3":
            assert read(tmp_path, model_type, **values).pe_rotary_dims == 8
        else:
            with pytest.raises(InputError, match=r"partial_rotary_factor is 0\.5; only 1 is"):
                read(tmp_path, model_type, **values)
    config = read(tmp_path, model_type, partial_rotary_factor=1.0).replace(pe_rotary_dims=4)
    if model_type != "phi3":
        with pytest.raises(InputError, match=r"pe_rotary_dims is 4, but .* supports only 16"):
            family_of(config)


@pytest.mark.parametrize(
    ("model_type", "values", "expected"),
    [
        ("gemma", {"hidden_act": "gelu"}, "gelu_tanh"),
        ("gemma", {"hidden_act": "gelu", "hidden_activation": None}, "gelu_tanh"),
        ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, "gelu_tanh"),
        ("gemma", {"hidden_act": "silu"}, "silu"),
        ("gemma", {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "silu"}, "silu"),
        ("gemma2", {"hidden_activation": None, "hidden_act": "gelu"}, "gelu_tanh"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "gelu"),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_activations_of_gemma(tmp_path, model_type, values, expected):
    assert read(tmp_path, model_type, **values).activation == expected


GEMMA = {"norm": "rms-plus-one", "embed_scale": 8.0, "tie_head": True, "activation": "gelu_tanh"}
GEMMA2 = GEMMA | {"hf_type": "gemma2", "norm_place": "both"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"biases": ["q", "k", "v"]}, r"biases is \['q', 'k', 'v'\], but .* Llama supports only"),
        ({"biases": ["gate"]}, r"biases is \['gate'\], but"),
        ({"biases": ["q", "k", "v", "o", "out"]}, "biases is"),
        ({"biases": ["gate", "fc", "out"], "hf_type": "granite"}, None),
        ({"biases": ["v", "o", "q", "k"]}, None),
        ({"biases": ["q", "k", "v"], "hf_type": "qwen2"}, None),
        ({"biases": ["q", "k", "v"], "hf_type": "mistral"}, "biases is"),
        (GEMMA | {"hf_type": "gemma"}, None),
        (GEMMA | {"hf_type": "gemma", "activation": "gelu"}, "activation is 'gelu', but"),
        (GEMMA2, None),
        (GEMMA2 | {"activation": "gelu"}, None),
        (GEMMA2 | {"attention_scale": 44**-0.5}, None),
        (GEMMA2 | {"attention_scale": 0.15}, r"attention_scale is 0\.15, but .* whole number"),
        (GEMMA2 | {"attention_scale": 2.0}, r"attention_scale is 2\.0, but .* whole number"),
    ],
)
def test_exports_that_config_json_would_deny_are_refused(changes, problem):
    sizes = {"layers": 2, "d_model": 64, "n_heads": 4, "n_vocab": 131, "head_size": 16}
    config = Config.from_dict(sizes | {"block": "llama"} | changes)
    if problem is None:
        family_of(config)
    else:
        with pytest.raises(InputError, match=problem):
            family_of(config)


@pytest.mark.parametrize(
    ("model_type", "values", "problem"),
    [
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0, expected"),
        ("gemma3_text", {"sliding_window_pattern": "x"}, "sliding_window_pattern is 'x'"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers is \[1\], expected a 0 or 1 for"),
        ("smollm3", {"no_rope_layers": 1}, "no_rope_layers is 1"),
        ("smollm3", {"no_rope_layers": [1, 2] * 4}, "no_rope_layers is"),
        ("llama", {"rope_parameters": [1]}, r"rope_parameters is \[1\], expected a mapping"),
        ("llama", {"rope_scaling": "x"}, "rope_scaling is 'x', expected a mapping"),
        (
            "gpt_neox",
            {"rope_scaling": "x", "intermediate_size": 256},
            "rope_scaling is 'x', expected a mapping",
        ),
        ("llama", {"rope_scaling": {"type": ["x"]}}, r"has type \['x'\]; only"),
        ("gemma3_text", {"rope_parameters": {"full_attention": 3}}, "full_attention is 3"),
        ("gemma2", {"layer_types": [[1]]}, r"layer_types is \[\[1\]\], expected a list of 7"),
        ("gemma2", {"layer_types": [[1]] * LAYERS}, r"layer_types has \[1\]; only"),
        ("gemma2", {"layer_types": ["full_attention"]}, "one per layer"),
        ("gemma2", {"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
        (
            "gemma2",
            {"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": None},
            "sliding_window is None, expected a whole number of at least 1",
        ),
        ("gemma2", {"sliding_window": "x"}, "sliding_window is 'x', expected a whole number"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers is"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window is 1, expected true or false"),
        ("phi3", {"partial_rotary_factor": "x"}, "partial_rotary_factor is 'x', expected"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; only"),
        ("llama", {"rope_theta": 0}, "rope_theta is 0, expected a number above 0"),
        ("llama", {"rope_theta": [1]}, r"rope_theta is \[1\], expected a number above 0"),
        ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*expected a number above 0"),
        ("llama", {"rope_scaling": LINEAR | {"factor": "x"}}, "factor of linear is 'x', expected"),
        ("llama", {"hidden_act": ["silu"]}, r"hidden_act is \['silu'\]; only"),
        (
            "llama",
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"quantization_config says that the weights are quantized \(gptq\)",
        ),
        ("gptj", {"quantization_config": []}, "quantization_config says"),
        (["llama"], {}, r"model_type is \['llama'\], expected one of"),
    ],
    ids=str,
)
def test_malformed_values_are_refused_in_one_line(tmp_path, model_type, values, problem):
    with pytest.raises(InputError, match=problem) as error:
        read(tmp_path, model_type, **values)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"{tmp_path}/config.json: ")
