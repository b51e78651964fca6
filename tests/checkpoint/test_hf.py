"""Hugging Face's GPT-J: logits compared with torch's, bit-identical round trips, refusals."""

import errno
import json
import os
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from transformers import AutoModelForCausalLM, GPTJConfig, GPTJForCausalLM

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file

from mesh_transformer.checkpoint import hf, hf_files
from mesh_transformer.config import Config
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.mesh.declaration import map_declared
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import transformer
from mesh_transformer.util import InputError

SEQ = 24
SIZES = [  # layers, heads, head size, rotary dims, vocabulary
    (1, 3, 16, 8, 50),
    (2, 5, 40, 32, 97),
    (3, 7, 64, 64, 131),
]
NAMES = ("model.safetensors", "pytorch_model.bin")


def torch_model(layers=2, heads=3, head=16, rotary=8, vocab=50, seed=0, dtype=torch.float32):
    """Return a torch GPT-J with all parameters random, including norms and biases."""
    config = GPTJConfig(
        vocab_size=vocab,
        n_positions=SEQ,
        n_embd=heads * head,
        n_layer=layers,
        n_head=heads,
        rotary_dim=rotary,
        bos_token_id=None,
        eos_token_id=None,
    )
    network = GPTJForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in network.named_parameters():
            noise = torch.randn(values.shape, generator=generator)
            start = float("ln_" in name and "weight" in name)
            values.copy_(start + noise * (1.0 if "wte" in name else 0.2))
    return network.to(dtype)


def host_state(config, seed=0, bias=True, dtype=np.float32):
    """Return a host state of random weights; if `bias` is False, the embedding's bias is zero."""
    rng = np.random.default_rng(seed)
    params = map_declared(
        lambda d: (rng.standard_normal(d.shape) * 0.3).astype(dtype),
        transformer.declarations(config),
    )
    if not bias:
        params["embed"]["embedding"]["b"][...] = 0
    return {"params": params, "step": np.zeros((), np.int32)}


def small_config(**changes):
    values = {"layers": 2, "d_model": 48, "n_heads": 3, "n_vocab": 50, "seq": SEQ}
    return Config(**(values | {"pe_rotary_dims": 8, "dtype": "float32"} | changes))


def logits(state, config, tokens):
    config = config.replace(dtype="float32")
    return np.asarray(transformer.logits(state["params"], jnp.asarray(tokens), config, Auto()))


def tokens_for(vocab):
    return np.random.default_rng(1).integers(0, vocab, (2, SEQ))


def tensors_in(folder):
    """Return all tensors of a folder's safetensors files, read by the safetensors library."""
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def assert_same_tensors(actual, expected):
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert actual[name].dtype == values.dtype, name
        assert torch.equal(actual[name].view(torch.uint8), values.view(torch.uint8)), name


def assert_same_state(actual, expected):
    def same(_, a, b):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))

    map_declared(same, transformer.declarations(actual[0]), actual[1]["params"], expected["params"])


@pytest.mark.quick(1)
@pytest.mark.parametrize(("layers", "heads", "head", "rotary", "vocab"), SIZES)
def test_logits_of_a_torch_model_match_torchs(tmp_path, layers, heads, head, rotary, vocab):
    network = torch_model(layers, heads, head, rotary, vocab)
    network.save_pretrained(tmp_path / "theirs")
    config, state = hf.read(str(tmp_path / "theirs"))
    assert (config.layers, config.n_heads, config.d_rotary) == (layers, heads, rotary)
    tokens = tokens_for(vocab)
    with torch.no_grad():
        expected = network(torch.tensor(tokens)).logits.numpy()
    scale = np.abs(expected).max()
    assert scale > 3  # so that the tolerance below is small in comparison
    # 1e-4, for logits of up to some tens in f32: the sums differ in order.
    np.testing.assert_allclose(logits(state, config, tokens), expected, rtol=0, atol=1e-4)
    if rotary < head:  # other rotary dimensions must change the logits
        changed = config.replace(pe_rotary_dims=rotary + 2)
        assert np.abs(logits(state, changed, tokens) - expected).max() > 1e-2


@pytest.mark.quick(2)
@pytest.mark.parametrize(("layers", "heads", "head", "rotary", "vocab"), SIZES)
def test_torch_computes_our_logits_from_written_files(tmp_path, layers, heads, head, rotary, vocab):
    config = small_config(
        layers=layers, d_model=heads * head, n_heads=heads, pe_rotary_dims=rotary, n_vocab=vocab
    )
    state = host_state(config)
    hf.write(str(tmp_path / "ours"), state, config, shard_bytes=200_000)
    network, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert isinstance(network, GPTJForCausalLM)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = tokens_for(vocab)
    with torch.no_grad():
        actual = network.eval()(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(actual, logits(state, config, tokens), rtol=0, atol=1e-4)


@pytest.mark.quick(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_torch_model_is_read_and_written_back_bit_identically(tmp_path, dtype, shard_bytes):
    network = torch_model(dtype=dtype)
    network.save_pretrained(tmp_path / "theirs", max_shard_size=shard_bytes)
    config, state = hf.read(str(tmp_path / "theirs"))
    hf.write(str(tmp_path / "back"), state, config, shard_bytes=shard_bytes)
    assert_same_tensors(tensors_in(tmp_path / "back"), tensors_in(tmp_path / "theirs"))
    assert_same_tensors(tensors_in(tmp_path / "back"), network.state_dict())
    read = [json.loads((tmp_path / f / "config.json").read_text()) for f in ("theirs", "back")]
    # Older releases of transformers read the dtype from its former key, torch_dtype.
    assert read[1] == read[0] | {"torch_dtype": read[0]["dtype"]}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back").dtype == dtype


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_state_is_written_and_read_back_bit_identically(tmp_path, dtype):
    config = small_config()
    state = host_state(config, bias=False, dtype=dtype)
    state["params"]["embed"]["embedding"]["w"][3] = -0.0  # adding a bias of 0 would turn it into +0
    hf.write(str(tmp_path / "hf"), state, config, shard_bytes=30_000)
    assert_same_state(hf.read(str(tmp_path / "hf"), config=config), state)
    assert hf.read(str(tmp_path / "hf"), config=config)[0] == config


def test_embedding_bias_is_added_to_the_embedding(tmp_path):
    config = small_config()
    state = host_state(config)
    hf.write(str(tmp_path / "hf"), state, config)
    _, back = hf.read(str(tmp_path / "hf"))
    assert not back["params"]["embed"]["embedding"]["b"].any()
    tokens = tokens_for(config.n_vocab)
    # The model adds the bias in f32 too, so both sums round alike.
    np.testing.assert_allclose(
        logits(back, config, tokens), logits(state, config, tokens), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("target", [None, np.float32])
def test_embedding_bias_is_added_in_f32(tmp_path, dtype, target):
    config = small_config()
    state = host_state(config, dtype=dtype)
    hf.write(str(tmp_path / "hf"), state, config, dtype=target)
    values = state["params"]["embed"]["embedding"]
    total = values["w"].astype(np.float32) + values["b"].astype(np.float32)
    # A sum in the narrow dtype would give a different result.
    assert not np.array_equal(total, total.astype(dtype))
    loaded = hf.read(str(tmp_path / "hf"))[1]["params"]["embed"]["embedding"]["w"]
    assert loaded.dtype == (target or dtype)
    np.testing.assert_array_equal(loaded, total.astype(loaded.dtype))


def test_dtype_argument_casts_the_weights(tmp_path):
    config = small_config()
    state = host_state(config, bias=False)
    hf.write(str(tmp_path / "f32"), state, config)
    hf.write(str(tmp_path / "bf16"), state, config, dtype=ml_dtypes.bfloat16)
    cast = hf.read(str(tmp_path / "f32"), dtype="bfloat16")
    assert_same_state(cast, hf.read(str(tmp_path / "bf16"))[1])
    assert_same_state(
        cast,
        {
            "params": map_declared(
                lambda _, x: x.astype(ml_dtypes.bfloat16),
                transformer.declarations(config),
                state["params"],
            )
        },
    )
    with pytest.raises(InputError, match="dtype is int8, expected float32, float16 or bfloat16"):
        hf.read(str(tmp_path / "f32"), dtype=np.int8)
    state["params"]["layers"]["layer"]["o"][1, 2, 3] = 1e6
    with pytest.raises(InputError, match=r"h\.1\.attn\.out_proj\.weight holds 1e\+06"):
        hf.write(str(tmp_path / "f16"), state, config, dtype=np.float16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bf16", "f32"]


def test_layers_of_different_dtypes_require_a_dtype_argument(tmp_path):
    tensors = torch_model().state_dict()
    tensors["transformer.h.1.mlp.fc_in.bias"] = tensors["transformer.h.1.mlp.fc_in.bias"].half()
    torch_model().save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"bias has dtype float16, but other layers have float32"):
        hf.read(str(tmp_path))
    _, state = hf.read(str(tmp_path), dtype=np.float32)
    np.testing.assert_array_equal(
        state["params"]["layers"]["layer/fc"]["b"][1],
        tensors["transformer.h.1.mlp.fc_in.bias"].float().numpy(),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sharded", [False, True])
def test_bin_files_are_read(tmp_path, dtype, sharded):
    network = torch_model(dtype=dtype)
    network.save_pretrained(tmp_path / "safe")
    network.config.save_pretrained(tmp_path / "bin")
    # With constants that are not weights, as in the first GPT-J files.
    tensors = network.state_dict() | {
        f"transformer.h.{i}.attn.{name}": values
        for i in range(2)
        for name, values in (
            ("bias", torch.ones(1, 1, SEQ, SEQ, dtype=torch.uint8)),
            ("masked_bias", torch.tensor(-1e9)),
        )
    }
    if sharded:
        halves = [dict(list(tensors.items())[i::2]) for i in range(2)]
        weight_map = {}
        for i, half in enumerate(halves):
            torch.save(half, tmp_path / "bin" / f"pytorch_model-{i}.bin")
            weight_map |= dict.fromkeys(half, f"pytorch_model-{i}.bin")
        index = tmp_path / "bin" / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    else:
        torch.save(tensors, tmp_path / "bin" / "pytorch_model.bin")
    assert_same_state(hf.read(str(tmp_path / "bin")), hf.read(str(tmp_path / "safe"))[1])


@pytest.mark.slow
def test_vocabulary_is_trimmed_and_padded(tmp_path):
    config = small_config(layers=1, d_model=8, n_heads=1, n_vocab=50400)
    state = host_state(config, bias=False)
    hf.write(str(tmp_path / "hf"), state, config, trim_vocab=True)
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert network.config.vocab_size == network.lm_head.out_features == 50257
    assert network.config.eos_token_id == network.generation_config.eos_token_id == 50256
    trimmed, short = hf.read(str(tmp_path / "hf"))
    assert trimmed.n_vocab == 50257
    with pytest.raises(InputError, match="vocab_size is 50257, but the config's n_vocab is 50256"):
        hf.read(str(tmp_path / "hf"), config=config.replace(n_vocab=50256))

    _, padded = hf.read(str(tmp_path / "hf"), config=config)
    assert padded["params"]["embed"]["embedding"]["w"].shape == (50400, 8)
    assert not padded["params"]["embed"]["embedding"]["w"][50257:].any()
    tokens = tokens_for(50257)
    actual, expected = logits(padded, config, tokens), logits(short, trimmed, tokens)
    # 1e-5: a matrix product of a different width may sum in a different order.
    np.testing.assert_allclose(actual[..., :50257], expected, rtol=0, atol=1e-5)
    assert np.exp(actual[..., 50257:] - actual.max()).max() == 0
    hf.write(str(tmp_path / "again"), padded, config, trim_vocab=True)
    assert_same_tensors(tensors_in(tmp_path / "again"), tensors_in(tmp_path / "hf"))


def test_read_leaves_no_weight_uninitialised(tmp_path, monkeypatch):
    """Padding rows are written too, whatever the allocated memory contained."""
    hf.write(str(tmp_path / "hf"), host_state(small_config()), small_config())
    empty = np.empty

    def poisoned(*arguments, **options):
        values = empty(*arguments, **options)
        values.fill(7)
        return values

    monkeypatch.setattr(np, "empty", poisoned)
    _, state = hf.read(str(tmp_path / "hf"), config=small_config(n_vocab=64))
    head = state["params"]["proj"]["projection/head"]
    assert not (state["params"]["embed"]["embedding"]["w"][50:]).any()
    assert not state["params"]["embed"]["embedding"]["b"].any()
    assert not head["w"][:, 50:].any()
    assert (head["b"][50:] == hf.PADDING_BIAS).all()
    for values in jax.tree.leaves(state):
        assert not (values == 7).any()


@pytest.mark.slow
def test_peak_memory_is_the_weights_and_one_tensor(tmp_path):
    config = small_config(layers=24, d_model=256, n_heads=4, n_vocab=4096)
    state = host_state(config)
    weights = sum(
        x.nbytes for p in state["params"].values() for m in p.values() for x in m.values()
    )
    largest = 4096 * 256 * 4
    # A first write, so that imports and the caches of the tokenizer are not measured below.
    hf.write(str(tmp_path / "warm"), state, config)
    tracemalloc.start()
    try:
        load_tokenizer()
        baseline = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        hf.write(str(tmp_path / "hf"), state, config, dtype=ml_dtypes.bfloat16)
        write_peak = tracemalloc.get_traced_memory()[1]
        del state
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        hf.read(str(tmp_path / "warm"))
        read_peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    # At once: one tensor and blocks of it, the names, JSON and the tokenizer's vocabulary.
    assert write_peak < baseline + 2 * largest < weights / 4 + baseline
    assert weights <= read_peak < weights + 2 * largest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "layernorm-nobias"}, "norm is 'layernorm-nobias'"),
        (
            {"norm": "rmsnorm"},
            "norm is 'rmsnorm', but Hugging Face's GPT-J supports only 'layernorm'",
        ),
        ({"pe": "t5"}, "pe is 't5'"),
        ({"pe": "fixed"}, "pe is 'fixed'"),
        ({"version": 2}, "block is 'geglu'"),
        ({"head_size": 32}, "head_size is 32"),
        ({"attention_window": 8}, "attention_window is 8"),
    ],
)
def test_configs_that_hugging_face_cannot_represent_are_refused(tmp_path, changes, message):
    config = small_config(**changes)
    with pytest.raises(InputError, match=message):
        hf.write(str(tmp_path / "hf"), host_state(config), config)
    assert not list(tmp_path.iterdir())


def test_weights_of_another_config_are_not_written(tmp_path):
    with pytest.raises(InputError, match=r"params/embed/embedding/b has shape \(48,\).*\(96"):
        hf.write(str(tmp_path / "hf"), host_state(small_config()), small_config(d_model=96))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 96}, "d_model is 48, but the config has 96"),
        ({"layers": 3}, "layers is 2, but the config has 3"),
        ({"pe_rotary_dims": 4}, "pe_rotary_dims 8, but the config has 4"),
        ({"norm": "rmsnorm"}, "norm 'layernorm', but the config has 'rmsnorm'"),
    ],
)
def test_config_of_another_model_is_refused(tmp_path, changes, message):
    torch_model().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=message):
        hf.read(str(tmp_path), config=small_config(**changes))


def test_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def write_two(path, *arguments, write_file=hf_files.write_file):
        if "00003" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_file(path, *arguments)

    monkeypatch.setattr(hf_files, "write_file", write_two)
    config = small_config()
    with pytest.raises(InputError, match="hf cannot be written: No space left on device"):
        hf.write(str(tmp_path / "hf"), host_state(config), config, shard_bytes=20_000)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("metadata", [None, {"crc32": "of another program"}])
def test_the_metadata_of_other_programs_is_ignored(tmp_path, metadata):
    torch_model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length]) | {"__metadata__": metadata}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    assert hf.read(str(tmp_path))[0].layers == small_config().layers


def edit(name, change):
    """Return a function that changes or removes one tensor in a folder's only file."""

    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        values = change(tensors.pop(name))
        if values is not None:
            tensors[name] = values.contiguous()
        save_file(tensors, folder / "model.safetensors")

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
        (edit("lm_head.bias", lambda _: None), "tensor lm_head.bias is missing"),
        (
            edit("transformer.h.1.ln_1.bias", lambda x: x[:-1]),
            r"safetensors: tensor transformer.h.1.ln_1.bias has shape \(47,\), expected \(48,\)",
        ),
        (edit("lm_head.weight", lambda x: x.T), r"lm_head.weight has shape \(48, 50\), expected"),
        (
            edit("transformer.ln_f.weight", lambda x: x.to(torch.int8)),
            "transformer.ln_f.weight has dtype I8, expected one of F32, F16, BF16",
        ),
        (
            lambda f: save_file(
                load_file(f / "model.safetensors") | {"transformer.h.2.ln_1.bias": torch.ones(48)},
                f / "model.safetensors",
            ),
            "transformer.h.2.ln_1.bias is not part of the model",
        ),
    ],
)
def test_error_names_the_damage(tmp_path, damage, message):
    torch_model().save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        hf.read(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
