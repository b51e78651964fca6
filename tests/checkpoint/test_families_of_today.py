"""Hugging Face's families with gated layers, from Llama to nanochat, against transformers.

Logits in f32 may differ from torch's in f64 by three times what torch's in f32 do: the sums have
another order.
"""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from mesh_transformer.checkpoint import hf
from mesh_transformer.checkpoint.conversion import convert
from mesh_transformer.checkpoint.hf_config import family_of, read_config, write_configs
from mesh_transformer.config import Config
from mesh_transformer.families import PRESETS
from mesh_transformer.generation.batch import MOST_STEPS
from mesh_transformer.generation.pool import Pool
from mesh_transformer.generation.sampling import sampler_settings
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import flops, transformer
from mesh_transformer.model.layer_values import frequencies
from mesh_transformer.model.loss import train_loss
from mesh_transformer.serving.pages import Pages
from mesh_transformer.transformer_shard import load
from mesh_transformer.util import InputError
from tests.serving.test_pages import insert_in_parts
from tests.support.families_of_today import CASES, SEQ, torch_model

TOKENS = np.random.default_rng(0).integers(0, 131, (2, 40))
# (number of devices, mp, partitioning)
# One device is that of the tests of parts of prompts and of exports.
MESHES = [(2, 2, "shard_map"), (8, 8, "shard_map"), (8, 4, "jit")]  # devices, mp, partitioning
# Sizes besides those of `CASES`, with the head tied where theirs is not, and the reverse.
ONE_KEY_HEAD = {"num_key_value_heads": 1, "hidden_size": 100, "num_attention_heads": 5}
EVEN = {"num_key_value_heads": 2, "hidden_size": 64, "num_attention_heads": 8}
ORIGINAL = 20  # positions up to which longrope has its short factors
LENGTH = 64  # number of tokens that are generated: many times the sliding windows
MARGIN = 1e-3  # between the logits of the two most likely tokens: ten times what rounding changes


def torch_logits(network, tokens=TOKENS):
    """Return the logits in f32 and in f64."""
    rope = getattr(network.config, "rope_parameters", None) or {}
    with torch.no_grad():
        single = network(torch.tensor(tokens)).logits.numpy()
        if rope.get("rope_type") == "llama3":
            # In f64, torch would keep these frequencies as it has rounded them in several steps in
            # f32, which changes the logits more than all other rounding.
            rotated = frequencies(network.config.head_dim, rope["rope_theta"], rope)[0]
            network.model.rotary_emb.inv_freq = torch.tensor(rotated)
        double = network.double()(torch.tensor(tokens)).logits.numpy()
    network.float()
    return single, double


def check_close(actual, single, double):
    bound = 3 * np.abs(single - double).max()
    assert np.abs(actual - double).max() <= bound
    assert bound < 1e-4 * np.abs(double).max()  # so that the check means something


def check_export(folder, state, config, network, tokens, logits):
    """Write a folder, and check that transformers computes the logits of `network` from it."""
    hf.write(str(folder), state, config)
    loaded = type(network).from_pretrained(folder).eval()
    loaded.set_attn_implementation("eager")
    with torch.no_grad():
        assert torch.equal(loaded(torch.tensor(tokens)).logits, torch.tensor(logits))


@pytest.mark.quick(len(CASES))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", [{}, ONE_KEY_HEAD, EVEN])
def test_logits_match_torchs_and_exports_keep_every_bit(tmp_path, sizes, case):
    changes = {}
    if sizes and "gemma" not in case:  # Gemma's head is always tied
        changes = {"tie_word_embeddings": not torch_model(case).config.tie_word_embeddings}
    network = torch_model(case, **sizes, **changes)
    network.save_pretrained(tmp_path / "theirs")
    single, double = torch_logits(network)
    config, state = hf.read(str(tmp_path / "theirs"))
    config = config.replace(dtype="float32")
    run = jax.jit(lambda params: transformer.logits(params, TOKENS, config, Auto()))
    check_close(np.asarray(run(state["params"])), single, double)
    check_export(tmp_path / "ours", state, config, network, TOKENS, single)
    read, state = hf.read(str(tmp_path / "ours"))
    assert (
        dataclasses.replace(read, tokenizer=config.tokenizer).model
        == config.replace(dtype=read.dtype).model
    )
    hf.write(str(tmp_path / "again"), state, read)
    for path in (tmp_path / "ours").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


def torch_answers(network, prompts):
    """Return the `LENGTH` most likely tokens that follow each of some prompts of one length."""
    options = {"max_new_tokens": LENGTH, "do_sample": False, "return_dict_in_generate": True}
    made = network.generate(torch.tensor(np.stack(prompts)), output_logits=True, **options)
    top = torch.stack(made.logits).topk(2).values
    assert (top[..., 0] - top[..., 1]).min() > MARGIN  # so that rounding decides no token
    return made.sequences[:, -LENGTH:].numpy()


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "mp", "partitioning"), MESHES)
@pytest.mark.parametrize("case", CASES)
def test_every_mesh_computes_and_generates_like_torch(tmp_path, case, devices, mp, partitioning):
    network = torch_model(case)
    network.save_pretrained(tmp_path)
    single, double = torch_logits(network)
    mesh = {"cores_per_replica": mp, "tpu_size": devices, "partitioning": partitioning}
    ours = load(str(tmp_path), changes={"dtype": "float32"} | mesh)
    check_close(np.asarray(ours.logits(TOKENS)), single, double)
    actual = ours.generate(TOKENS[:, :9], [9, 9], LENGTH, {"temp": 0})
    np.testing.assert_array_equal(actual, torch_answers(network, TOKENS[:, :9]))
    ours.close()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_parts_of_prompts_and_shared_pages_generate_like_torch(tmp_path, case):
    network = torch_model(case)
    network.save_pretrained(tmp_path)
    ours = load(str(tmp_path), changes={"dtype": "float32"})
    first, second = TOKENS[0, :21], np.concatenate((TOKENS[0, :16], TOKENS[1, :5]))
    pool = Pool(pages=3 * SEQ // 4, page=4, kept=8)
    behind = -(-((ours.config.sliding_window or 1) - 1) // pool.page)
    batch, pages = ours.batch(3, pool), Pages(pool, SEQ, behind=behind)
    settings = sampler_settings({"temp": 0.0}, 1)
    options = {"length": LENGTH, "settings": settings, "alternatives": None}
    prompts = [(first, 8), (second, 32), (TOKENS[1, :9], 32)]
    begun = [
        insert_in_parts(batch, number, prompt, size, pages, **options)
        for number, (prompt, size) in enumerate(prompts)
    ]
    # The first prompt is computed in parts, and the second without its beginning, which it shares.
    parts = [[(0, 8), (8, 16), (16, 21)], [(16, 21)], [(0, 9)]]
    assert [calls for _, _, calls in begun] == parts
    tokens = [np.stack([chosen.token[0] for _, chosen, _ in begun])[:, None]]
    while batch.left.any():
        tokens.append(batch.decode(min(MOST_STEPS, batch.left.max())).token)
    expected = torch_answers(network, [first, second]), torch_answers(network, [TOKENS[1, :9]])
    np.testing.assert_array_equal(np.concatenate(tokens, axis=1), np.concatenate(expected))
    ours.close()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradients_match_torchs(tmp_path, case):
    network = torch_model(case).double()
    inputs, targets = (torch.tensor(x) for x in (TOKENS[:, :-1], TOKENS[:, 1:]))
    logits = network(inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 131), targets.reshape(-1))
    loss.backward()
    network.float().save_pretrained(tmp_path / "theirs")
    config, state = hf.read(str(tmp_path / "theirs"))
    config = config.replace(dtype="float32", z_loss=0.0)
    run = jax.jit(
        jax.grad(lambda p: train_loss(p, TOKENS[:, :-1], TOKENS[:, 1:], config, Auto())[0])
    )
    gradients = jax.tree.map(np.asarray, run(state["params"]))
    hf.write(str(tmp_path / "ours"), {"params": gradients, "step": state["step"]}, config)
    read = type(network).from_pretrained(tmp_path / "ours")
    actual = dict(read.named_parameters())
    for name, values in network.named_parameters():
        expected = values.grad.numpy()
        # f32 against f64, relative to the largest entry of the tensor's gradient.
        bound = 1e-4 * np.abs(expected).max()
        np.testing.assert_allclose(
            actual[name].detach().numpy(), expected, rtol=0, atol=bound, err_msg=name
        )


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["ring", "all_to_all"])
@pytest.mark.parametrize("case", CASES)
def test_split_positions_give_the_logits_and_gradients_of_one_device(tmp_path, case, exchange):
    torch_model(case, **EVEN).save_pretrained(tmp_path)
    batch = {"obs": TOKENS[None, :, :-8], "target": TOKENS[None, :, 1:-7]}
    keys = {"optimizer": "sgd", "momentum": 0.0, "lr": 1.0, "warmup_steps": 0, "weight_decay": 0.0}
    keys |= {"dtype": "float32", "per_replica_batch": 2, "clip_norm": 1.0, "adam_eps": 1e-8}

    def results(**mesh):
        ours = load(str(tmp_path), changes=keys | mesh)
        logits = np.asarray(ours.logits(batch["obs"][0]))
        loss = ours.train(batch)["loss"]  # the parameters change by the gradient
        params = jax.tree.map(np.asarray, ours.saved_state()["params"])
        ours.close()
        return {"logits": logits, "loss": loss, "params": params}

    expected = results(tpu_size=1)
    mesh = {"context_parallel": 4, "cores_per_replica": 2, "tpu_size": 8}
    actual = results(**mesh, context_attention=exchange)
    # f32 sums in another order, of numbers up to 10.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-4), actual, expected)


def edited(folder, **values):
    path = folder / "config.json"
    keys = json.loads(path.read_text("utf-8"))
    keys = {key: value for key, value in (keys | values).items() if value != "absent"}
    path.write_text(json.dumps(keys), "utf-8")
    return hf.read_config(str(folder))


def test_old_and_new_keys_of_rotary_embeddings_mean_the_same(tmp_path):
    torch_model("llama").save_pretrained(tmp_path)
    new = edited(tmp_path)
    rope = dict(json.loads((tmp_path / "config.json").read_text("utf-8"))["rope_parameters"])
    base, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    old = {"rope_theta": base, "rope_scaling": rope | {"type": kind}}
    assert edited(tmp_path, rope_parameters="absent", **old).model == new.model
    assert new.rotary_base == 500
    assert new.rotary_scaling is not None
    scaling = {"rope_scaling": {"rope_type": "xpos", "factor": 2.0}}
    with pytest.raises(InputError, match="its rotary embedding has type 'xpos'; only 'default'"):
        edited(tmp_path, **scaling)


@pytest.mark.parametrize(("length", "seq"), [(40, SEQ), (16, ORIGINAL)])
def test_longrope_has_the_factors_of_the_longest_sequence(tmp_path, length, seq):
    """Transformers has those of each text: the long ones beyond `ORIGINAL` tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    rope |= {"short_factor": [1.0, 1.3], "long_factor": [2.5, 7.0]}
    changes = {"original_max_position_embeddings": ORIGINAL, "sliding_window": None}
    rope |= {"original_max_position_embeddings": ORIGINAL}
    network, tokens = torch_model("phi3", rope_parameters=rope, **changes), TOKENS[:, :length]
    network.save_pretrained(tmp_path / "theirs")
    single, double = torch_logits(network, tokens)
    config, state = hf.read(str(tmp_path / "theirs"))
    assert config.rotary_scaling is not None
    assert config.rotary_scaling["factor"] == SEQ / ORIGINAL
    own = config.replace(dtype="float32", seq=seq)
    run = jax.jit(lambda params: transformer.logits(params, tokens, own, Auto()))
    check_close(np.asarray(run(state["params"])), single, double)
    check_export(tmp_path / "ours", state, config, network, tokens, single)
    with pytest.raises(InputError, match=r"short_factor is \[1.0\], expected 2 numbers above 0"):
        config.replace(rotary_scaling=config.rotary_scaling | {"short_factor": [1.0]})


@pytest.mark.parametrize("length", [16, 40])
def test_dynamic_scaling_has_the_wavelengths_of_the_longest_sequence(tmp_path, length):
    """Transformers has those of each text: longer ones beyond `ORIGINAL` tokens."""
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}
    changes = {"rope_parameters": rope, "max_position_embeddings": ORIGINAL}
    network, tokens = torch_model("llama", **changes), TOKENS[:, :length]
    network.save_pretrained(tmp_path / "theirs")
    single, double = torch_logits(network, tokens)
    config, state = hf.read(str(tmp_path / "theirs"))
    assert config.rotary_scaling is not None
    assert config.rotary_scaling["original_max_position_embeddings"] == config.seq == ORIGINAL
    own = config.replace(dtype="float32", seq=max(length, ORIGINAL))
    run = jax.jit(lambda params: transformer.logits(params, tokens, own, Auto()))
    check_close(np.asarray(run(state["params"])), single, double)
    check_export(tmp_path / "ours", state, own, network, tokens, single)


def test_gemma_3s_old_keys_mean_the_same(tmp_path):
    torch_model("gemma3_text").save_pretrained(tmp_path)
    new = edited(tmp_path)
    assert (new.rotary_base, new.sliding_rotary_base) == (1000, 100)
    assert new.sliding_layers == [0, 1]
    old = {"rope_theta": 1000.0, "rope_local_base_freq": 100.0, "sliding_window_pattern": 3}
    old |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert (
        edited(tmp_path, rope_parameters="absent", layer_types="absent", **old).model == new.model
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"qk_norm": "head"}, "qk_norm is 'head', but Hugging Face's Llama supports only 'none'"),
        ({"sliding_window": 8}, "sliding_window is 8, but .* Llama supports only None"),
        ({"hf_type": "gemma"}, "norm is 'rms', but Hugging Face's Gemma supports only"),
        ({"hf_type": "mistral", "sliding_window": 8, "sliding_layers": [0]}, "sliding_layers is"),
    ],
)
def test_what_a_family_cannot_express_is_refused_by_name(changes, problem):
    sizes = {"block": "llama", "layers": 2, "d_model": 16, "n_heads": 4, "n_vocab": 32, "seq": 16}
    config = Config.from_dict(sizes | changes)
    with pytest.raises(InputError, match=problem):
        family_of(config)


def multi_modal(kind):
    """Return one of transformers' multi-modal models, with random weights."""
    text = {"vocab_size": 140, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    text |= {"sliding_window": 7, "model_type": kind.replace("mistral3", "mistral")}
    values = {"vision_config": vision, "image_token_index": 139}
    if kind == "gemma3":
        text |= {"model_type": "gemma3_text", "layer_types": None, "sliding_window_pattern": 2}
        values |= {"mm_tokens_per_image": 4, "boi_token_index": 138, "eoi_token_index": 137}
        classes = transformers.Gemma3Config, transformers.Gemma3ForConditionalGeneration
    else:
        vision["model_type"] = "pixtral"
        values["tie_word_embeddings"] = False
        classes = transformers.Mistral3Config, transformers.Mistral3ForConditionalGeneration
    torch.manual_seed(0)
    network = classes[1](classes[0](text_config=text, **values)).eval()
    network.set_attn_implementation("eager")
    with torch.no_grad():
        for name, values in network.named_parameters():
            if "language_model" in name or name.startswith("lm_head"):
                values += 0.2 * torch.randn_like(values)
    return network


@pytest.mark.parametrize(
    "prefix", ["language_model.model.", "model.language_model.", "model.text_model."]
)
@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_the_text_part_of_a_multi_modal_model(tmp_path, kind, prefix):
    """It is refused without the flag, and needs none once it is converted."""
    network = multi_modal(kind)
    folder, target = tmp_path / "whole", tmp_path / "text"
    network.save_pretrained(folder)
    if prefix.startswith("model."):  # as transformers has named them since 4.52
        path = folder / "model.safetensors"
        tensors = {
            re.sub(r"^language_model\.lm_head", "lm_head", name).replace(
                "language_model.model.", prefix
            ): values
            for name, values in load_file(path).items()
        }
        save_file(tensors, path)
    assert any(name.startswith(prefix) for name in load_file(folder / "model.safetensors"))
    with pytest.raises(InputError, match=f"model_type is '{kind}', a multi-modal .*--text-only"):
        hf.read(str(folder))
    single, double = torch_logits(network)
    convert(folder, "hf", target, "hf", text_only=True)
    config, state = hf.read(str(target))
    assert config.hf_type == {"gemma3": "gemma3_text", "mistral3": "mistral"}[kind]
    assert config.tie_head == (kind == "gemma3")
    config = config.replace(dtype="float32")
    check_close(
        np.asarray(transformer.logits(state["params"], TOKENS, config, Auto())), *(single, double)
    )
    with pytest.raises(InputError, match="no text part of its own; remove --text-only"):
        hf.read(str(target), text_only=True)


def test_sizes_that_released_files_of_gemma_3_leave_out(tmp_path):
    """As in the config.json of its 4B model."""
    rope = {"factor": 8.0, "rope_type": "linear"}
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    text |= {"num_hidden_layers": 34, "rope_scaling": rope, "sliding_window": 1024}
    whole = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    theirs, ours = transformers.Gemma3TextConfig(**text), read_config(str(tmp_path), text_only=True)
    assert (ours.n_vocab, ours.n_heads) == (theirs.vocab_size, theirs.num_attention_heads)
    assert (ours.key_heads, ours.head_size) == (theirs.num_key_value_heads, theirs.head_dim)
    assert ours.end_tokens == [1, 106]
    assert ours.tie_head


# The parameters of the published files.  Those of Gemma 3 from 4B on are without 416,866,032 of the
# vision tower and 1152 (d_model + 1) of the projection of images.
PUBLISHED = {
    "llama3-1b": 1_235_814_400,
    "llama3-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 4_300_079_472 - 416_866_032 - 1152 * 2561,
    "gemma3-12b": 12_187_325_040 - 416_866_032 - 1152 * 3841,
    "gemma3-27b": 27_432_406_640 - 416_866_032 - 1152 * 5377,
    "olmo3-7b": 7_298_011_136,
    "mistral-7b": 7_248_023_552,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
}


def test_presets_have_the_published_number_of_parameters(tmp_path):
    """transformers counts the same, in models without data, and reads the same config."""
    of_today = {name for name in PRESETS if PRESETS[name]["block"] == "llama"}
    assert of_today == PUBLISHED.keys()
    for name, published in PUBLISHED.items():
        config = Config.load(name)
        write_configs(str(tmp_path), config, config.n_vocab, np.dtype("float32"), None)
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
        theirs = sum(values.numel() for values in network.parameters())
        assert flops.n_params(config) == theirs == published, name
        read = hf.read_config(str(tmp_path))
        assert read.model == config.model, name
