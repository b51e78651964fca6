"""mesh-transformer config: what is chosen for a corpus and devices, and the file it writes."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from mesh_transformer.checkpoint import native_state
from mesh_transformer.cli import new_config, new_tokenizer, text_records
from mesh_transformer.cli.arguments import run_arguments, run_parser
from mesh_transformer.config import Config
from mesh_transformer.data.record_set import RecordSet, SetSize, set_size
from mesh_transformer.data.tfrecords import write_records
from mesh_transformer.mesh import accelerators
from mesh_transformer.mesh.accelerators import GIB, Hardware
from mesh_transformer.mesh.declaration import map_declared
from mesh_transformer.model import flops, transformer
from mesh_transformer.performance import recipe as library
from mesh_transformer.performance.analytic import sequences_per_step
from mesh_transformer.performance.recipe import SIZES, Device, device_of, recipe
from mesh_transformer.performance.topology import slice_named
from mesh_transformer.util import InputError
from tests.support.small_run import SEQ, write_set

CPU = Hardware("cpu", "cpu", 1e11, 1e10, 1e10, 2, "made up")
LAPTOP = Device("cpu", "cpu", 1, 8 * GIB, "float32", CPU)
T4 = Device("gpu", "gpu", 1, 15 * GIB, "float32", None)
GPT_J = Config.load("6B_roto_256")
SMALL = GPT_J.replace(layers=2, d_model=256, n_heads=8, pe_rotary_dims=8)


def tpu(name):
    return device_of(slice_named(name))


def corpus(tokens, seq=1024):
    return SetSize(round(tokens / seq), seq)


@pytest.mark.parametrize("tokens", [1e5, 1e6, 1e7, 1e8, 1e9, 1e10])
def test_the_size_follows_the_text(tokens):
    result = recipe(corpus(tokens), None, tpu("v4-32"))
    config = Config.from_dict(result.values)
    allowed = tokens * 4 / 20  # 20 tokens per parameter, 4 epochs
    fitting = [size for size in SIZES if 12 * size.layers * size.d_model**2 <= allowed]
    chosen = (fitting or SIZES)[-1 if fitting else 0]
    assert (config.layers, config.d_model) == (chosen.layers, chosen.d_model)


@pytest.mark.quick(6)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_sizes_are_valid_and_count_their_parameters(size):
    config = Config.from_dict(size.architecture | {"n_vocab": 8})
    assert flops.n_params(config) == pytest.approx(size.body(), rel=0.02)  # biases and norms


@pytest.mark.quick(10)
@pytest.mark.parametrize("seed", range(30))
def test_any_corpus_and_device_give_a_valid_config(seed):
    rng = np.random.default_rng(seed)
    train = SetSize(int(10 ** rng.uniform(2, 6)), int(rng.choice([64, 128, 1000, 2048])))
    held_out = SetSize(int(10 ** rng.uniform(0, 4)), train.seq)
    device = [LAPTOP, T4, tpu("v3-8"), tpu("v5e-4"), tpu("v4-64")][rng.integers(5)]
    base = [None, SMALL][rng.integers(2)]
    epochs = [None, 0.5, 3.0][rng.integers(3)]
    minutes = [None, 10.0][rng.integers(2)]
    result = recipe(train, held_out, device, base=base, epochs=epochs, minutes=minutes)
    config = Config.from_dict(result.values)
    total, sequences = config.total_steps, sequences_per_step(config)
    assert total is not None
    assert result.steps_per_epoch == train.sequences / sequences
    assert sequences <= train.sequences
    assert config.warmup_steps + config.anneal_steps == max(total, 1 + config.warmup_steps)
    assert max(config.val_every, config.ckpt_every) <= max(1, total)
    assert library._memory(config, device) <= device.budget
    wanted = (epochs or (4 if base is None else 1)) * result.steps_per_epoch
    if device is not LAPTOP or minutes is None:
        assert total == max(1, round(wanted))
    sizes = {(size.layers, size.d_model) for size in SIZES}
    assert (config.layers, config.d_model) in ({(2, 256)} if base else sizes)
    assert all("\n" not in line for line in result.reasons)


def test_a_laptop_finishes_in_time():
    train = corpus(1e8, 128)
    results = [recipe(train, None, LAPTOP, minutes=minutes) for minutes in (10, 20, None)]
    steps = [result.values["total_steps"] for result in results]
    seqs = [sequences_per_step(Config.from_dict(result.values)) for result in results]
    tokens = [128 * a * b for a, b in zip(steps, seqs, strict=True)]
    assert tokens[1] == pytest.approx(2 * tokens[0], rel=0.05)  # whole steps
    assert tokens[2] == pytest.approx(4e8, rel=0.01)
    assert results[0].values["d_model"] == 128
    config = Config.from_dict(results[0].values)
    assert tokens[0] * flops.flops_per_token(config) < 600 * CPU.peak
    assert "limited to 10 minutes on cpu (--minutes)" in results[0].reasons[-1]


def test_a_busy_machine_gets_the_same_config(monkeypatch):
    """The speed of CPUs is not measured."""
    cores = os.cpu_count() or 1
    monkeypatch.setattr(accelerators, "_run_seconds", None)  # which times what is measured
    one, four = device_of(slice_named("cpu")), device_of(slice_named("cpu-4"))
    assert one.hardware is not None
    assert four.hardware is not None
    assert one.hardware.peak in (cores * 50e9, cores * 100e9)
    assert four.hardware.peak == one.hardware.peak / 4


def test_the_lines_describe_the_keys_that_were_set():
    """The rest of the schedule also follows them."""
    changes = {"layers": 3, "total_steps": 50, "per_replica_batch": 2}
    result = recipe(corpus(1e7), None, LAPTOP, size="tiny", changes=changes)
    config = Config.from_dict(result.values)
    assert result.values | changes == result.values
    assert config.warmup_steps + config.anneal_steps == 50
    _, model, batch, steps = result.reasons
    assert model.endswith("as you chose; as set: layers 3 instead of 4")
    assert batch.startswith(f"batch: {sequences_per_step(config)} sequences per step")
    assert steps.startswith("steps: 50, as set; an epoch is ")


def test_gpt_j_on_a_v3_8_is_the_shipped_config():
    result = recipe(corpus(4e6, 2048), corpus(2e5, 2048), tpu("v3-8"), base=GPT_J)
    shipped = Config.load("6B_finetune_v3-8")
    values = Config.from_dict(result.values)
    for key in (*library.KEPT, "cores_per_replica", "tpu_size", "remat", "dtype"):
        assert getattr(values, key) == getattr(shipped, key), key
    assert values.lr == pytest.approx(5e-5, rel=0.05)  # 0.4 * 1.2e-4


def test_long_records_are_split_if_the_model_alone_is_not_enough():
    """Adapters of an 8B model, on records of 32,768 tokens; short records are never split."""
    base, lora = Config.load("8B_v6e-8").replace(seq=2**17), {"lora_rank": 8}
    for seq, changes, mesh in (
        (2**15, {}, (2, 4)),
        (2**15, {"context_parallel": 4}, (4, 2)),
        (2**13, {}, (1, 2)),
    ):
        result = recipe(SetSize(4000, seq), None, tpu("v5e-8"), base=base, changes=lora | changes)
        config = Config.from_dict(result.values)
        assert (config.context_parallel, config.cores_per_replica) == mesh
        assert ("context_parallel" in result.values) == (mesh[0] > 1)
        along_cp = f"cp {mesh[0]} x " if mesh[0] > 1 else ""
        assert f" x {along_cp}mp {mesh[1]}; at least" in result.reasons[2]


@pytest.mark.parametrize(
    ("name", "base", "tokens"),
    [
        ("v5p-384", GPT_J, 192 * 2**12),
        ("gpu:24GiBx4", None, 2**16),
    ],
)
def test_a_batch_in_tokens_is_kept(name, base, tokens):
    """ZeRO, mp, remat and microbatches follow from it, and the estimated memory suffices."""
    device = tpu(name)
    result = recipe(corpus(1e10, 2048), None, device, base=base, batch_tokens=tokens)
    config = Config.from_dict(result.values)
    assert config.seq * sequences_per_step(config) == tokens
    assert config.tpu_size == device.count
    assert library._memory(config, device) <= device.budget
    assert f"batch: {tokens // 2048} sequences per step" in result.reasons[2]
    keys = {"zero": 3, "remat": "dots", "per_replica_batch": 2}
    fixed = recipe(
        *(corpus(1e10, 2048), None, device), base=base, batch_tokens=tokens, changes=keys
    )
    assert fixed.values | keys == fixed.values
    with pytest.raises(InputError, match="1,000, not a whole number of sequences of 2,048 tokens"):
        recipe(corpus(1e10, 2048), None, device, base=base, batch_tokens=1000)


def test_a_batch_in_tokens_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"no setting of v5e-1 has 4,096 tokens per step and"):
        recipe(corpus(1e9, 2048), None, tpu("v5e-1"), base=GPT_J, batch_tokens=4096)
    with pytest.raises(InputError, match="gpu is not in the hardware table; remove it"):
        recipe(corpus(1e9, 2048), None, T4, batch_tokens=4096)


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"at least \d+\.\d GiB per device, but on gpu .* of 15"):
        recipe(corpus(1e6), None, T4, base=GPT_J)
    changes = {"lora_rank": 8, "dtype": "bfloat16"}
    values = recipe(corpus(1e6), None, T4, base=GPT_J, changes=changes).values
    assert values["lora_rank"] == 8


@pytest.mark.parametrize(
    ("train", "val", "message"),
    [
        (SetSize(100, 64), SetSize(9, 32), "32 tokens per sequence, the training records 64"),
        (SetSize(100, 4096), None, "4096 tokens per sequence, but the base model .* 2048"),
        (SetSize(3, 64), None, "3 training sequences, but a step on v3-8 needs 8; add text"),
    ],
)
def test_unsuitable_records_are_refused(train, val, message):
    with pytest.raises(InputError, match=message):
        recipe(train, val, tpu("v3-8"), base=SMALL)


def test_records_are_counted(tmp_path):
    index = write_set(tmp_path, "set", {"one": 5, "two": 3})
    assert set_size(index) == (8, SEQ)
    pairs = {name: np.ones(7, np.int64) for name in ("input_ids", "labels", "input_mask")}
    write_records(str(tmp_path / "pairs.tfrecords"), [pairs] * 4)
    (tmp_path / "pairs.index").write_text("pairs.tfrecords\n")
    assert set_size(str(tmp_path / "pairs.index")) == (4, 7)
    write_records(str(tmp_path / "pairs.tfrecords"), [{"other": np.ones(7, np.int64)}])
    with pytest.raises(InputError, match=r"no tokens .*, found features \['other'\]"):
        set_size(str(tmp_path / "pairs.index"))


def call(*words):
    new_config.main([*map(str, words)])


def test_the_command_writes_a_config_that_reads_the_records(tmp_path, capsys):
    train = write_set(tmp_path, "train")
    val = write_set(tmp_path, "val", {"one": 13})
    output = tmp_path / "my.json"
    flags = ("--train", train, "--val", val, "--output", output, "--topology", "v3-8")
    call(*flags, "--size", "mini", "--set", "seed=7")
    config = Config.load(str(output))
    assert (config.layers, config.d_model, config.seq, config.seed) == (6, 256, SEQ, 7)
    assert (config.train_set, config.val_set) == (train, {"val": val})
    assert config.model_folder() == "./runs/my"
    assert isinstance(config.train_set, str)
    RecordSet(config.train_set, config.seq, config.n_vocab).require(sequences_per_step(config))
    printed = capsys.readouterr().out
    assert printed.startswith(f"data: 61 sequences of {SEQ} tokens")
    assert printed.endswith(f"next: mesh-transformer train --config {output}\n")
    with pytest.raises(InputError, match=r"my\.json already exists; choose another name"):
        call(*flags)


@pytest.mark.parametrize("name", ["my.json", "my.yaml", "my.yml"])
@pytest.mark.parametrize("lr", [1e-4, 6e-4, 2e-5, 3.5e-5])
def test_numbers_are_read_as_they_were_written(tmp_path, name, lr):
    """Rates such as 6e-05, which are no numbers in YAML without a decimal point."""
    output = tmp_path / name
    settings = ("--set", f"lr={lr}", "--set", f"end_lr={lr / 10}", "--topology", "v3-8")
    call("--train", write_set(tmp_path, "train"), "--output", output, *settings)
    config = Config.load(str(output))
    assert (config.lr, config.end_lr) == (lr, lr / 10)


def test_validation_records_of_another_tokenizer_are_refused(tmp_path):
    indexes = {name: write_set(tmp_path, name) for name in ("train", "val")}
    for name, index in indexes.items():
        manifest = {"tokenizer": {"name": f"{name}_tokenizer"}}
        Path(index.replace(".index", ".manifest.json")).write_text(json.dumps(manifest))
    line = "val.index was created with the tokenizer val_tokenizer, but .* with train_tokenizer; "
    with pytest.raises(InputError, match=line):
        call("--train", indexes["train"], "--val", indexes["val"], "--output", tmp_path / "my.json")


def test_the_base_may_have_any_format(tmp_path, capsys):
    train = write_set(tmp_path, "train")
    original = tmp_path / "step_3"
    (original / "shard_0").mkdir(parents=True)
    (original / "shard_0" / "0.npz").write_bytes(b"")
    values = {"model_type": "gptj", "n_layer": 2, "n_embd": 64, "n_head": 4, "rotary_dim": 8}
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").write_text(json.dumps(values | {"vocab_size": 64, "n_positions": 32}))
    for base, layers in ((original, 28), (hf, 2)):
        output = tmp_path / f"{base.name}.json"
        call("--train", train, "--output", output, "--base", base, "--topology", "v3-8")
        assert json.loads(output.read_text())["layers"] == layers
        assert json.loads(output.read_text())["tune_model_path"] == str(base)
        line = f"next: mesh-transformer train --config {output}\n"
        assert capsys.readouterr().out.endswith(line)


def test_a_native_base_that_has_learned_its_positions_needs_records_of_its_length(tmp_path):
    train = write_set(tmp_path, "train")
    for seq in (SEQ, 2 * SEQ):
        config = Config(layers=1, d_model=64, n_heads=4, n_vocab=64, block="gpt2", seq=seq)
        declared = transformer.declarations(config)
        params = map_declared(lambda d: np.zeros(d.shape, np.float32), declared)
        state = {"params": params, "step": np.zeros((), np.int32)}
        native_state.write(str(tmp_path / f"base{seq}"), state, config)
    arguments = ["--train", train, "--topology", "v3-8", "--output", tmp_path / "my.json"]
    line = f"the model has learned {2 * SEQ} positions, but the records have {SEQ} tokens; recreate"
    with pytest.raises(InputError, match=line):
        call(*arguments, "--base", tmp_path / f"base{2 * SEQ}")
    call(*arguments, "--base", tmp_path / f"base{SEQ}")
    config = Config.load(str(tmp_path / "my.json"))
    assert (config.seq, config.sample_prompts) == (SEQ, [])  # the slice may lack the tokenizer


def test_the_tokenizer_is_that_of_the_records(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be or not to be " * 50)
    new_tokenizer.main(["text.txt", "tokenizer", "--size", "263"])
    text_records.main(["text.txt", "mine", "--seq", "8", "--tokenizer", "tokenizer"])
    call("--train", "mine.index", "--output", "mine.json")
    values = json.loads(Path("mine.json").read_text())
    assert values["tokenizer"] == "tokenizer"
    assert values["n_vocab"] == 512  # a multiple of 256
    assert values["sample_prompts"] == [""]
    Path("mine.manifest.json").write_text("[]")
    with pytest.raises(InputError, match=r"mine.manifest.json: not the manifest of a record set"):
        call("--train", "mine.index", "--output", "other.json")
    Path("mine.manifest.json").unlink()
    call("--train", "mine.index", "--output", "other.json")
    assert "tokenizer" not in json.loads(Path("other.json").read_text())


def test_a_base_without_a_tokenizer_takes_that_of_the_records(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be or not to be " * 50)
    text_records.main(["text.txt", "mine", "--seq", "8", "--tokenizer", "bytes"])
    values = {"model_type": "gptj", "n_layer": 2, "n_embd": 64, "n_head": 4, "rotary_dim": 8}
    Path("hf").mkdir()
    Path("hf/config.json").write_text(json.dumps(values | {"vocab_size": 257, "n_positions": 32}))
    flags = ("--train", "mine.index", "--base", "hf", "--topology", "v3-8")
    call(*flags, "--output", "a.json")
    call(*flags, "--output", "b.json", "--tokenizer", "bytes")
    for name in ("a.json", "b.json"):
        assert Config.load(name).tokenizer == "bytes"
        command = ["--config", name, "--model-dir", "m"]
        assert run_arguments(run_parser("").parse_args(command))[0].tokenizer == "bytes"
    with pytest.raises(InputError, match="was created with the tokenizer bytes, which gives other"):
        call(*flags, "--output", "c.json", "--tokenizer", "gpt2")


@pytest.mark.parametrize("epochs", ["0", "-1", "nan", "inf", "many"])
def test_bad_numbers_are_refused(monkeypatch, capsys, epochs):
    monkeypatch.setattr(sys, "argv", ["mesh-transformer config"])
    with pytest.raises(SystemExit) as ended:
        call("--train", "t", "--output", "o", f"--epochs={epochs}")
    assert ended.value.code == 2
    assert f"{epochs} is not a positive number" in capsys.readouterr().err
