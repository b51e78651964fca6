"""Plans: names and grids of TPU slices, memory, collectives, search and compiler errors."""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from mesh_transformer.cli import plan as script
from mesh_transformer.config import Config
from mesh_transformer.mesh.accelerators import GIB
from mesh_transformer.model import flops
from mesh_transformer.performance import compilation, plan, search
from mesh_transformer.performance.compilation import Memory, OutOfTimeError, compiled
from mesh_transformer.performance.topology import (
    LIBRARY,
    Gpus,
    LocalDevices,
    basis_of,
    peak_on,
    slice_named,
    topology,
)
from mesh_transformer.util import InputError
from tests.conftest import SMALL

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

ROOT = Path(__file__).parents[2]

# Peaks in GiB of steps of Pythia 6.9B on eight devices, with attention in blocks: by libtpu
# 0.0.42.1 for a v5p:2x2x2, and by the compiler for GPUs of JAX 0.10.2 for eight H100, without any.
COMPILED_FOR_BOTH = [(24.70, 27.13), (24.86, 26.22), (54.39, 55.26), (69.47, 71.34)]

needs_libtpu = pytest.mark.skipif(
    not LIBRARY.exists(), reason="libtpu is not installed; not every platform has it"
)


@pytest.mark.parametrize(
    ("name", "generation", "grid", "devices"),
    [
        ("v2-8", "v2", (2, 2), 8),
        ("v3-8", "v3", (2, 2), 8),
        ("v3-32", "v3", (4, 4), 32),
        ("v3-256", "v3", (8, 16), 256),
        ("v4-8", "v4", (2, 2, 1), 4),
        ("v4-32", "v4", (2, 2, 4), 16),
        ("v4-256", "v4", (4, 4, 8), 128),
        ("v5e-8", "v5e", (2, 4), 8),
        ("v5litepod-256", "v5e", (16, 16), 256),
        ("v5p-128", "v5p", (4, 4, 4), 64),
        ("v5p:16x16x24", "v5p", (16, 16, 24), 6144),
        ("v5p-384", "v5p", (4, 4, 12), 192),
        ("v5p-768", "v5p", (4, 8, 12), 384),
        ("v5p-1280", "v5p", (4, 8, 20), 640),
        ("v5p-12288", "v5p", (16, 16, 24), 6144),
        ("v4-4096", "v4", (8, 16, 16), 2048),
        ("v6e-64", "v6e", (8, 8), 64),
        ("tpu7x-8", "tpu7x", (2, 2, 1), 8),
    ],
)
def test_the_name_of_a_slice_gives_its_grid_and_devices(name, generation, grid, devices):
    actual = topology(name)
    assert (actual.generation, actual.grid, actual.devices) == (generation, grid, devices)


@pytest.mark.parametrize("name", ["", "v3", "v9-8", "v3-6", "v5p-7", "v5e-0", "h100-8", "v9:2x2"])
def test_an_unknown_slice_name_is_refused(name):
    with pytest.raises(InputError, match=r"topology is '"):
        topology(name)


@pytest.mark.parametrize(
    ("name", "model", "memory", "devices"),
    [
        ("8xH100", "h100", 84_942_979_072, 8),
        ("8 x H100", "h100", 84_942_979_072, 8),
        ("a100-40gb", "a100-40gb", 42_331_013_120, 1),
        ("gpu:80GiBx8", "h100", 80 * GIB, 8),
        ("gpu:22.5GiB", "h100", int(22.5 * GIB), 1),
    ],
)
def test_gpus_need_not_be_present(monkeypatch, name, model, memory, devices):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    actual = slice_named(name)
    assert isinstance(actual, Gpus)
    assert (actual.model, actual.memory, actual.devices) == (model, memory, devices)
    assert actual.hbm == int(0.75 * memory)  # JAX's allocator
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert actual.hbm == int(0.9 * memory)
    assert actual.stand_in.devices == devices
    assert ("assumed" in actual.hardware("bfloat16").source) == name.startswith("gpu:")
    for on_tpu, on_gpu in COMPILED_FOR_BOTH:
        assert on_gpu <= peak_on(actual, int(on_tpu * GIB)) / GIB < 1.2 * on_gpu
    assert peak_on(topology("v5p-16"), GIB) == GIB
    assert "as a rule for GPUs" in basis_of(actual)
    assert "on paper, not compiled" in basis_of(actual, on_paper=True)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "most")
    with pytest.raises(InputError, match=r"XLA_PYTHON_CLIENT_MEM_FRACTION is 'most', expected a"):
        assert actual.hbm


@pytest.mark.parametrize(
    ("dp", "mp", "expected"),
    [(None, None, 4), (None, 2, 2), (4, None, 2), (2, 4, 4), (1, 8, 8)],
)
def test_missing_mesh_sizes_are_computed(dp, mp, expected):
    assert script.model_shards(dp, 1, mp, default=4, devices=8) == expected


@pytest.mark.parametrize(("dp", "mp"), [(3, None), (16, None), (0, None), (2, 2), (None, 3)])
def test_a_mesh_that_does_not_fit_the_slice_is_refused(dp, mp):
    with pytest.raises(InputError, match=r"--dp .* must equal the slice's 8 devices"):
        script.model_shards(dp, 1, mp, default=4, devices=8)


@pytest.mark.parametrize(
    ("dp", "cp", "mp", "expected"),
    [(None, 2, None, 4), (None, 4, None, 2), (2, 2, None, 2), (None, 8, None, 1), (2, 4, 1, 1)],
)
def test_positions_are_split_over_a_part_of_the_slice(dp, cp, mp, expected):
    assert script.model_shards(dp, cp, mp, default=4, devices=8) == expected
    with pytest.raises(InputError, match=r"--dp any x --cp 16 x --mp 0 must equal the slice's 8"):
        script.model_shards(None, 16, None, default=4, devices=8)


@pytest.mark.parametrize("name", ["cpu-0", "cpu-9", "cpu-x"])
def test_an_invalid_number_of_cpu_devices_is_refused(name):
    with pytest.raises(InputError, match=r"topology is '"):
        slice_named(name)


def test_a_gpu_plan_on_a_machine_without_a_gpu_is_refused(monkeypatch):
    def none(backend):
        raise RuntimeError(f"no {backend}")

    monkeypatch.setattr(jax, "local_devices", none)
    with pytest.raises(InputError, match="JAX finds no GPU"):
        slice_named("gpu")


class Gpu(SimpleNamespace):
    """A fake GPU, with the attributes that a plan reads before it compiles."""

    def memory_stats(self):
        return self.stats


@pytest.mark.parametrize(
    ("kind", "stats", "reason"),
    [
        ("NVIDIA H200", None, "H200 does not report how much memory a program may use"),
        ("NVIDIA H200", {}, "H200 does not report how much memory a program may use"),
        ("NVIDIA X1", {"bytes_limit": 1}, "X1 is not in the hardware table"),
    ],
)
def test_an_unsupported_gpu_is_refused_before_compiling(monkeypatch, kind, stats, reason):
    gpu, mesh = Gpu(platform="gpu", device_kind=kind, stats=stats), slice_named("cpu").mesh(1)
    monkeypatch.setattr(LocalDevices, "_list", lambda self: [gpu])
    monkeypatch.setattr(LocalDevices, "mesh", lambda *_: mesh)
    monkeypatch.setattr(plan, "compiled", lambda *_, **__: pytest.fail("compiled"))
    with pytest.raises(InputError, match=f"topology gpu: NVIDIA {reason}"):
        plan.plan(small(), LocalDevices("gpu", "gpu", 1))


@pytest.mark.parametrize(("text", "size"), [("1.25T", 1.25 * 2**40), ("20.5G", 20.5 * 2**30)])
def test_the_size_of_a_program_that_does_not_fit_is_parsed(text, size):
    memory = failed_compilation(
        f"RESOURCE_EXHAUSTED: Used {text} of 15G ({text}) exceeds available HBM by 5G"
    )
    assert (memory.peak, memory.text) == (size, None)


def test_other_compiler_errors_are_reported_in_one_line():
    with pytest.raises(InputError, match=r"topology v3-8: compilation failed: INTERNAL: no$"):
        failed_compilation("INTERNAL: no\nand a stack of lines")


def failed_compilation(message: str) -> Memory:
    """Return the memory of a program whose compilation fails with `message`."""

    def fail(compiler_options):
        raise jax.errors.JaxRuntimeError(message)

    lowered = SimpleNamespace(compile=fail, as_text=lambda: message)
    function: Any = SimpleNamespace(trace=lambda *_: SimpleNamespace(lower=lambda: lowered))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    argument = jax.ShapeDtypeStruct((1,), "float32", sharding=sharding)
    return compiled("v3-8", function, argument)


def counted_program(calls: list[str], text: str = "program") -> tuple[Any, Any]:
    """Return a fake jitted function that records its compilations, and its abstract argument."""
    analysis = SimpleNamespace(
        argument_size_in_bytes=5,
        output_size_in_bytes=3,
        alias_size_in_bytes=2,
        temp_size_in_bytes=1,
    )
    program = SimpleNamespace(as_text=lambda: "HLO", memory_analysis=lambda: analysis)

    def compile_program(compiler_options):
        calls.append(text)
        return program

    lowered = SimpleNamespace(compile=compile_program, as_text=lambda: text)
    function = SimpleNamespace(trace=lambda *_: SimpleNamespace(lower=lambda: lowered))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return function, jax.ShapeDtypeStruct((1,), "float32", sharding=sharding)


def test_a_program_is_compiled_once(tmp_path, monkeypatch):
    """Its figures are found again by the program and the compiler's flags, unless damaged."""
    monkeypatch.setenv("MESH_TRANSFORMER_CACHE", str(tmp_path))
    calls: list[str] = []
    first = compiled("cpu", *counted_program(calls))
    assert (first.peak, first.text, first.cached) == (7, "HLO", False)
    again = compiled("other name", *counted_program(calls))
    assert again == dataclasses.replace(first, cached=True)
    assert calls == ["program"]
    compiled("cpu", *counted_program(calls, "another"))
    monkeypatch.setenv("XLA_FLAGS", "--other")
    compiled("cpu", *counted_program(calls))
    assert calls == ["program", "another", "program"]
    for entry in (tmp_path / "plans").iterdir():
        entry.write_bytes(entry.read_bytes()[:-9])
    assert not compiled("cpu", *counted_program(calls)).cached
    assert compiled("cpu", *counted_program(calls)).cached
    monkeypatch.setenv("MESH_TRANSFORMER_CACHE", "")
    assert not compiled("cpu", *counted_program(calls)).cached


def test_a_compilation_ends_at_the_time_limit(monkeypatch):
    monkeypatch.setenv("MESH_TRANSFORMER_CACHE", "")
    calls: list[str] = []
    with pytest.raises(OutOfTimeError):
        compiled("cpu", *counted_program(calls), deadline=time.monotonic())
    assert calls == []
    assert compiled("cpu", *counted_program(calls), deadline=time.monotonic() + 60).peak == 7
    ended = threading.Event()
    with pytest.raises(OutOfTimeError):  # the compiler would never end
        compilation._within(time.monotonic() + 0.01, ended.wait)
    ended.set()

    def fail() -> None:
        raise InputError("no")

    with pytest.raises(InputError, match="no"):
        compilation._within(time.monotonic() + 60, fail)


def run_in_process(monkeypatch, capsys, *words: str) -> tuple[int, str]:
    """Run `mesh-transformer plan` with the time over at once; return its status and output."""

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # the command sets it; this undoes it afterwards
    monkeypatch.setenv("MESH_TRANSFORMER_CACHE", "")
    monkeypatch.setattr(sys, "argv", ["plan", "--config", "tiny", "--minutes", "1e-9", *words])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().out


def test_plans_for_several_devices_are_a_table(monkeypatch, capsys):
    """After the time limit, the figures are on paper."""
    words = ("--topology", "cpu-4, cpu-2", "--batch-tokens", "16K")
    status, text = run_in_process(monkeypatch, capsys, *words)
    head, line, first, second, note = text.splitlines()[-5:]
    assert head.startswith("| devices | fits | mesh | ZeRO | remat |")
    assert line.startswith("| --- |")
    for row, name in ((first, "cpu-4"), (second, "cpu-2")):
        assert re.match(rf"\| {name} \| yes \| dp \d x mp \d \|", row)
        assert row.endswith("| on paper, not compiled |")
    assert (status, note) == (0, search.OUT_OF_TIME)
    assert text.count("peak and bytes: on paper, not compiled; nothing was measured") == 2
    status, text = run_in_process(monkeypatch, capsys, *words, "--json")
    for own, devices in zip(json.loads(text), (4, 2), strict=True):
        tokens = own["dp"] * own["per_replica_batch"] * own["accumulation"] * 64
        assert (own["devices"], tokens, own["collectives"]) == (devices, 2**14, None)
        assert own["basis"] == "on paper, not compiled"
    assert status == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch-tokens", "16K", "--decode"), "--batch-tokens is a batch for training"),
        (("--decode",), "the step was not compiled within --minutes 1e-09"),
        (("--batch-tokens", "1000"), "1,000, not a whole .* 64 tokens; .* divides is 1,024, 16 "),
        (("--batch-tokens", "960", "--mp", "1"), "gives the 15 sequences per step"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(monkeypatch, capsys, words, message):
    with pytest.raises(InputError, match=message) as refused:
        run_in_process(monkeypatch, capsys, "--topology", "cpu-4", *words)
    assert "\n" not in str(refused.value)


def small(**changes) -> Config:
    return Config.of(SMALL | {"gradient_accumulation_steps": 3} | changes)


@pytest.mark.slow
def test_a_plan_for_virtual_devices():
    """Plan for dp 2 x mp 4 on CPUs, where every gradient is summed over dp once per step."""
    config = small(cores_per_replica=4)
    result = plan.plan(config, slice_named("cpu-8"))
    assert (result.dp, result.mp, result.fits) == (2, 4, True)
    assert result.flops == flops.palm_flops_per_token(config) * config.seq * 3 * 2
    assert result.collectives is not None
    assert (result.collectives.layer_forward, result.collectives.layer_backward) == (1, 1)
    over_dp = [exchange for exchange in result.collectives.exchanges if exchange.axis != "mp"]
    assert {exchange.place for exchange in over_dp} == {"step"}
    assert sum(exchange.bytes for exchange in over_dp) >= 4 * flops.matmul_params(config) / 4
    for exchange in result.collectives.exchanges:
        if exchange.place.startswith("layer"):
            activations = 4 * config.seq * config.d_model * config.per_replica_batch
            assert exchange.bytes == exchange.count * activations  # f32
            assert exchange.sent == exchange.bytes * 6 // 4
    assert result.estimate is not None
    least, most = result.estimate.step_seconds
    assert 0 < least < most
    assert result.state_bytes < result.peak_bytes
    text = result.table()
    for word in ("fits", "estimate on cpu", "TFLOP/s per device", "layer backward"):
        assert word in text


@pytest.mark.slow
def test_a_plan_compares_a_virtual_mesh_with_the_plain_step():
    config = small(cores_per_replica=4, virtual_mesh=[2, 4])
    result = plan.priced_plan(config, slice_named("cpu-8"))
    here, there = result.collectives, result.plain and result.plain.collectives
    assert here is not None
    assert there is not None
    for traffic in (here, there):
        assert (traffic.layer_forward, traffic.layer_backward) == (1, 1)
    # Only arrays with fewer entries than devices, such as the loss, are gathered whole.
    assert here.sent <= 1.05 * there.sent
    # An all-reduce over 4 devices of a ring: 4/4 + 3/4 of the bytes, instead of twice 3/4; over 2
    # devices, 1/2 twice in both.
    assert there.on_links == there.sent
    assert 1.0 < here.on_links / there.on_links < 1.05 * 7 / 6
    assert "all-to-all" in here.bytes_by_kind
    assert "all-to-all" not in there.bytes_by_kind
    assert "virtual_mesh takes" in result.table()
    json.dumps(dataclasses.asdict(result))


@pytest.mark.slow
@pytest.mark.parametrize("partitioning", ["shard_map", "jit"])
def test_a_plan_for_generation(partitioning):
    config = small(cores_per_replica=2, per_replica_batch=3, partitioning=partitioning)
    result = plan.decode_plan(config, slice_named("cpu-4"))
    assert (result.dp, result.mp, result.rows, result.fits) == (2, 2, 6, True)
    # K and V of each layer in f32, for the heads and rows on one device.
    heads = config.n_heads // 2
    assert result.cache_bytes == 2 * config.layers * 3 * heads * config.seq * config.d_head * 4
    assert result.state_bytes == result.weights_bytes + result.cache_bytes
    assert result.collectives is not None
    # Under jit, one all-reduce sums two arrays: the outputs of attention and feed-forward.
    assert result.collectives.layer_forward == (1 if partitioning == "shard_map" else 2)
    # The only all-gather is that of the logits; cache entries need none.
    gathers = [
        exchange for exchange in result.collectives.exchanges if exchange.kind == "all-gather"
    ]
    assert sum(exchange.count for exchange in gathers) == 1
    assert result.bytes_per_step is not None
    assert result.bytes_per_step >= result.read_bytes
    assert "tokens/s" in result.table()


@pytest.mark.slow
def test_a_plan_counts_two_4_bit_weights_per_byte():
    config = small(d_model=64, cores_per_replica=1)
    eight, four = (
        plan.decode_plan(config.replace(weight_bits=bits), slice_named("cpu-1")) for bits in (8, 4)
    )
    # Per layer, 12 D * D weights, of which 64 share a scale of 2 bytes.  In 8 bits, there are 9 D
    # scales of 4 bytes.
    matrices, scales = 12 * config.d_model**2, 9 * config.d_model
    saved = config.layers * (matrices + 4 * scales - matrices // 2 - 2 * matrices // 64)
    assert eight.weights_bytes - four.weights_bytes == saved
    assert eight.read_bytes - four.read_bytes == saved
    assert "4-bit weights" in four.table()


@pytest.mark.slow
def test_a_plan_for_generation_with_a_cache_in_pages():
    """Attention's loop runs once per 256 positions of a row."""
    config = small(cores_per_replica=2, per_replica_batch=2, seq=1024)
    result = plan.decode_plan(config, slice_named("cpu-2"), cache_tokens=1200)
    assert (result.cache_length, result.cache_tokens, result.fits) == (600, 1200, True)
    position = 2 * config.layers * (config.n_heads // 2) * config.d_head * 4
    assert result.cache_bytes == 1200 * position
    shorter = plan.decode_plan(config, slice_named("cpu-2"), cache_tokens=1024)
    assert result.bytes_per_step is not None
    assert shorter.bytes_per_step is not None
    # One time more, for two rows.
    assert result.bytes_per_step - shorter.bytes_per_step >= 2 * 256 * position
    assert "pages for 1200 per replica" in result.table()
    # Rows have at most the window's positions; training's 8-bit matmuls are not those of decoding.
    changed = config.replace(int8_matmuls=["forward"], int8_weights=True)
    larger = plan.decode_plan(changed, slice_named("cpu-2"), cache_tokens=4096)
    assert (larger.cache_length, larger.cache_bytes) == (1024, 4096 * position)
    assert larger.read_bytes < larger.weights_bytes + 2 * 1024 * position
    with pytest.raises(InputError, match="room for 10 tokens, expected at least 16"):
        plan.decode_plan(config, slice_named("cpu-2"), cache_tokens=10)


@pytest.mark.slow
@pytest.mark.parametrize("cache_tokens", [None, 4096])
def test_a_plan_for_generation_with_guesses(cache_tokens):
    """Looked up, and from a draft with its own heads, whose cache is as long as the model's."""
    config = small(cores_per_replica=2, per_replica_batch=3, seq=1024, attention_window=128)
    draft = config.replace(layers=1, n_heads=2, d_model=32, seq=512, attention_window=512)
    make = functools.partial(plan.decode_plan, config, slice_named("cpu-4"))
    plain = make(cache_tokens=cache_tokens)
    looked_up = make(cache_tokens=cache_tokens, guesses=3)
    drafted = make(cache_tokens=cache_tokens, guesses=3, draft=draft)
    alone = plan.decode_plan(draft.replace(attention_window=128), slice_named("cpu-4"))
    slots = cache_tokens or 3 * 144  # a multiple of 16 that holds the window and the guesses
    position = 2 * config.layers * (config.n_heads // 2) * config.d_head * 4
    assert looked_up.cache_bytes == slots * position
    assert drafted.cache_bytes == slots * (position + 2 * 1 * 16 * 4)
    assert plain.weights_bytes == looked_up.weights_bytes
    assert drafted.weights_bytes == plain.weights_bytes + alone.weights_bytes
    cache = drafted.cache_bytes - looked_up.cache_bytes
    assert drafted.draft_bytes == alone.weights_bytes + cache
    assert drafted.peak_bytes >= looked_up.peak_bytes + drafted.draft_bytes
    # 3 rows of 128 positions, of those that there are.
    used = cache * 3 * 128 // cache_tokens if cache_tokens else cache
    reads = drafted.read_bytes - looked_up.read_bytes
    assert reads == 4 * (alone.read_bytes - alone.cache_bytes + used)
    for result in (plain, looked_up, drafted):
        assert result.collectives is not None
        assert result.bytes_per_step is not None
        assert result.collectives.layer_forward == 1
        assert result.bytes_per_step >= result.read_bytes
    assert "3 guesses per step" in drafted.table()
    assert "4 times as many if all guesses are right" in drafted.table()


def test_what_cannot_guess_has_no_plan():
    config = small(cores_per_replica=1)
    draft = config.replace(n_vocab=2 * config.n_vocab, tokenizer="bytes")
    with pytest.raises(InputError, match="choose a draft with the model's tokenizer"):
        plan.decode_plan(config, slice_named("cpu-1"), guesses=1, draft=draft)
    with pytest.raises(InputError, match=f"guesses is {config.seq}, expected 0 to"):
        plan.decode_plan(config, slice_named("cpu-1"), guesses=config.seq)


@pytest.mark.slow
def test_a_plan_for_generation_is_of_the_config_that_generates():
    """With LoRA, a tied head that each step reads, and the dtype of CPUs."""
    config = small(cores_per_replica=1)
    expected = plan.decode_plan(config, slice_named("cpu-1"))
    lora = config.replace(lora_rank=2, dtype="bfloat16", zero=1)
    result = plan.decode_plan(lora, slice_named("cpu-1"))
    assert (result.weights_bytes, result.cache_bytes, result.peak_bytes) == (
        expected.weights_bytes,
        expected.cache_bytes,
        expected.peak_bytes,
    )
    tied = plan.decode_plan(config.replace(tie_head=True), slice_named("cpu-1"))
    assert tied.read_bytes == tied.state_bytes


@pytest.mark.slow
def test_a_search_ranks_the_plans_that_fit():
    """Search on 4 devices with all settings fixed except mp and dp: two compilations."""
    config = small(cores_per_replica=2, tpu_size=4, gradient_accumulation_steps=1)
    fixed = {"remat": "full", "zero": 0, "per_replica_batch": config.per_replica_batch}
    result = search.search(config, slice_named("cpu-4"), fixed=fixed, limit=2)
    assert result.fits
    assert len(result.plans) == 2
    speeds = [
        found_plan.estimate.tokens_per_second[1]
        for found_plan in result.plans
        if found_plan.estimate
    ]
    assert speeds == sorted(speeds, reverse=True)
    assert {found_plan.zero for found_plan in result.plans} == {0}
    assert "2 fit" in result.table()
    json.dumps(dataclasses.asdict(result))
    with pytest.raises(InputError, match=r"gives the \d+ sequences per step"):
        search.search(
            config.replace(per_replica_batch=1),
            slice_named("cpu-4"),
            fixed={"remat": "full", "zero": 3, "cores_per_replica": 4},
        )


def run_python(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, and with the compiler flags that users have."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    process = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert process.returncode in (0, 1), process.stderr
    return process


def run_plan(config: Path, *words: str) -> tuple[int, dict]:
    """Run scripts/plan.py; return its exit status and the JSON object that it prints."""
    process = run_python("scripts/plan.py", "--config", str(config), *words, "--json")
    return process.returncode, json.loads(process.stdout)


# For each set of flags: the peak memory from docs/plan.md in GiB (None with --fast, which does not
# report it), the available memory in GiB, and the memory traffic per step in GB.  With one
# microbatch, the peaks are below those of a prototype of this design (13.4 and 12.9).  16
# microbatches are for fine-tuning.
GPT_J = [
    (("v3-8", "--accumulate", "1", "--fast"), None, 15.48, 78),
    (("v3-8", "--accumulate", "16"), 14.55, 15.48, 981),
    (("v5e-8", "--accumulate", "1"), 11.63, 15.75, 48),
]


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(("words", "peak", "limit", "moved"), GPT_J)
def test_gpt_j_fits(words, peak, limit, moved):
    """Compile with the options of a real run, except in the case with --fast."""
    path = ROOT / "configs" / "6B_roto_256.json"
    status, result = run_plan(path, "--topology", *words)
    assert (status, result["fits"]) == (0, True)
    assert (result["devices"], result["dp"], result["mp"]) == (8, 1, 8)
    # Each device has an eighth of the parameters and of both moments in f32, and replicated norms
    # and biases.
    assert 12 * result["parameters"] / 8 < result["state_bytes"] < 8.5 * GIB
    assert result["state_bytes"] < result["peak_bytes"]
    assert peak is None or result["peak_bytes"] < 1.05 * peak * GIB
    assert result["fast"] == (peak is None)
    assert result["hbm_bytes"] == int(limit * GIB)
    reduced = result["collectives"]
    assert (reduced["layer_forward"], reduced["layer_backward"]) == (1, 1)
    config = Config.load(str(path))
    tokens = config.seq * int(words[2])
    assert result["flops"] == flops.palm_flops_per_token(config) * tokens
    # The layers' all-reduces of bf16 activations, over eight devices.
    speed = result["estimate"]
    sent = 2 * config.layers * tokens * config.d_model * 2 * 7 // 4
    assert sent < speed["link_bytes"] < 1.1 * sent
    # The traffic may differ between versions of the compiler, but not by much.
    assert moved / 2 < speed["hbm_traffic_bytes"] / 1e9 < 2 * moved
    assert 0 < speed["mfu"][1] < speed["mfu"][0] < 1


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "topology", "mp", "kind"),
    [("20B", "v5e-8", 8, "params"), ("20B", "v3-8", 8, "params"), ("40B", "v4-32", 16, "moments")],
)
def test_large_models_fit_with_offload(name, topology, mp, kind):
    words = ["--topology", topology, "--mp", str(mp), "--batch", "1", "--accumulate", "1"]
    words += ["--shard-activations", "--set", "zero=0", "--set", f"offload={kind}", "--fast"]
    status, result = run_plan(ROOT / "configs" / f"{name}.json", *words)
    assert (status, result["fits"]) == (0, True)
    # Matrices are in host memory: 4 bytes for each moment, and 4 for the parameter.
    in_host = result["parameters"] / mp * (12 if kind == "params" else 8)
    assert 0.99 * in_host < result["host_bytes"] < 1.01 * in_host
    kept = 0 if kind == "params" else result["parameters"] / mp * 4
    assert kept < result["state_bytes"] < kept + 2**28
    # Moments are read and written; parameters are also read for the forward pass.
    read, written = result["estimate"]["host_bytes"]
    assert written == result["host_bytes"]
    assert read == pytest.approx(written * (4 / 3 if kind == "params" else 1), rel=1e-6)


SMALL_ON_A_TPU = """
import json, sys
from dataclasses import asdict
from mesh_transformer.config import Config
from mesh_transformer.performance.plan import plan
from mesh_transformer.performance.topology import topology

keys = json.loads(sys.argv[1])
configs = [Config(**keys, **more) for more in json.loads(sys.argv[2])]
results = [plan(config, topology(sys.argv[3]), fast=True) for config in configs]
print(json.dumps([asdict(result) for result in results]))
"""


@needs_libtpu
@pytest.mark.slow
def test_collectives_over_replicas_on_tpus():
    """Compile for dp 2 x mp 4: only ZeRO 3 has collectives over dp in the microbatch loop."""
    keys = SMALL | {"cores_per_replica": 4, "gradient_accumulation_steps": 4, "layers": 3}
    keys |= {"d_model": 512, "n_heads": 4, "seq": 256, "n_vocab": 1024, "dtype": "bfloat16"}
    variants = [{"zero": zero} for zero in (0, 1, 3)] + [{"zero": 1, "partitioning": "jit"}]
    process = run_python("-c", SMALL_ON_A_TPU, json.dumps(keys), json.dumps(variants), "v3-8")
    inside, once = [], []
    for plan_values in json.loads(process.stdout):
        reduced = plan_values["collectives"]
        assert plan_values["fits"]
        assert (reduced["layer_forward"], reduced["layer_backward"]) == (1, 1)
        over_dp = [exchange for exchange in reduced["exchanges"] if exchange["axis"] != "mp"]
        once.append(
            {
                (exchange["kind"], exchange["dtype"])
                for exchange in over_dp
                if exchange["place"] == "step"
            }
        )
        inside.append({exchange["place"] for exchange in over_dp} - {"step"})
    assert inside[0] == inside[1] == inside[3] == set()
    assert {"layer forward", "layer backward"} <= inside[2]
    # Gradient sums are in f32, parameters in bf16.
    summed = {("all-reduce", "f32")}
    split = summed | {("reduce-scatter", "f32"), ("all-gather", "bf16")}
    assert once == [summed, split, summed, split]


@needs_libtpu
@pytest.mark.slow
def test_keys_and_values_go_round_cp_on_tpus():
    """Count what ring attention sends in compiled steps: all arrays are f32 here.

    Keys and values go to each other device, in both passes; in the backward pass, so do their
    gradients, which then return home.
    """
    keys = SMALL | {"gradient_accumulation_steps": 2, "layers": 5, "per_replica_batch": 2}
    keys |= {"d_model": 512, "n_heads": 4, "seq": 1024, "n_vocab": 1024, "remat": "full"}
    meshes = [(1, 4, 2), (2, 2, 2)]  # dp, cp, mp
    variants = [{"context_parallel": cp, "cores_per_replica": mp} for _, cp, mp in meshes]
    process = run_python("-c", SMALL_ON_A_TPU, json.dumps(keys), json.dumps(variants), "v5e-8")
    plans = json.loads(process.stdout)
    for (dp, cp, mp), own in zip(meshes, plans, strict=True):
        assert (own["dp"], own["cp"], own["mp"], own["fits"]) == (dp, cp, mp, True)
        exchanges = own["collectives"]["exchanges"]
        ring = [one for one in exchanges if one["kind"] == "collective-permute"]
        array = 4 * 2 * (1024 // cp) * (4 // mp) * 128  # bytes of a microbatch's keys in a layer
        expected = 5 * 2 * array * (2 * (cp - 1) + 2 * (cp - 1) + 2 * cp)  # layers, microbatches
        assert sum(one["sent"] for one in ring if one["axis"] == "cp") == expected
        assert (own["collectives"]["layer_forward"], own["collectives"]["layer_backward"]) == (1, 1)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("slice_", ["v4-16", "v5e-8", "v5p-8", "v6e-8", "tpu7x-8"])
def test_the_compiler_for_each_tpu_accepts_the_options_of_a_step(slice_):
    """Each libtpu accepts other options for each TPU; see `program.compiler_options`."""
    keys = SMALL | {"cores_per_replica": 4, "dtype": "bfloat16"}
    process = run_python("-c", SMALL_ON_A_TPU, json.dumps(keys), json.dumps([{}]), slice_)
    assert json.loads(process.stdout)[0]["fits"]


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("slices", [2, 4])
def test_slices_exchange_one_gradient_per_step(slices):
    """Each device sends its part of what its slice has summed."""
    keys = SMALL | {"cores_per_replica": 8, "gradient_accumulation_steps": 4, "layers": 3}
    keys |= {"d_model": 1024, "n_heads": 8, "seq": 256, "n_vocab": 1024, "dtype": "bfloat16"}
    variants = json.dumps([{"zero": 0}, {"zero": 0, "partitioning": "jit"}])
    process = run_python("-c", SMALL_ON_A_TPU, json.dumps(keys), variants, f"{slices}xv5e-16")
    for result in json.loads(process.stdout):
        assert (result["dp"], result["mp"]) == (2 * slices, 8)
        between = [e for e in result["collectives"]["exchanges"] if e["axis"] == "slices"]
        kinds = {(exchange["kind"], exchange["place"], exchange["dtype"]) for exchange in between}
        assert kinds == {("all-reduce between slices", "step", "f32")}
        # An all-reduce over two slices sends each number once, over four 1.5 times.
        sent = sum(exchange["sent"] for exchange in between)
        gradient = 16 * sent / (2 * (slices - 1) / slices)
        # More only for padding, and for norms and biases, which each shard has.
        assert 4 * result["parameters"] <= gradient < 1.05 * 4 * result["parameters"]
        assert result["estimate"]["slice_seconds"] == pytest.approx(sent / 3.125e9)


DECODE_ON_A_TPU = """
import json, sys
from mesh_transformer.config import Config
from mesh_transformer.performance.plan import decode_plan
from mesh_transformer.performance.topology import topology

result = decode_plan(Config(**json.loads(sys.argv[1])), topology(sys.argv[2]))
names = ("weights_bytes", "cache_bytes", "read_bytes", "peak_bytes", "bytes_per_step")
print(json.dumps([getattr(result, name) for name in names]))
"""


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("slice_", "rows", "partitioning"),
    [("v3-8", 1, "shard_map"), ("v3-8", 32, "jit"), ("tpu7x-8", 32, "shard_map")],
)
def test_tpus_store_each_cache_only_once(slice_, rows, partitioning):
    """Writing in a different layout would require a second copy of the cache.

    The compiler for TPU7x makes one before and after each call, but not in each step.
    """
    keys = SMALL | {"cores_per_replica": 8, "n_heads": 16, "d_model": 2048, "seq": 2048}
    keys |= {"per_replica_batch": rows, "dtype": "bfloat16", "partitioning": partitioning}
    process = run_python("-c", DECODE_ON_A_TPU, json.dumps(keys), slice_)
    weights, cache, read, peak, moved = json.loads(process.stdout)
    assert cache == 2 * 2 * rows * 2048 * 2048 // 8 * 2
    # The rest includes padding to full tiles.
    assert slice_ == "tpu7x-8" or peak < weights + 1.5 * cache + 2**20
    # The compiler may copy a layer's cache to on-chip memory and back, or keep parts of it there.
    assert read / 2 < moved < 2 * read


@needs_libtpu
@pytest.mark.slow
def test_the_choices_for_tpus_and_gpus_fit():
    words = ("plan", "--config", "tiny", "--set", "dtype=bfloat16", "--batch-tokens", "16K")
    words += ("--topology", "v5e-4,2xH100", "--set", "layers=2", "--fast", "--json")
    on_tpu, on_gpu = json.loads(run_python("-m", "mesh_transformer", *words).stdout)
    for own, devices in ((on_tpu, 4), (on_gpu, 2)):
        assert (own["devices"], own["fits"], own["fast"]) == (devices, True, True)
        tokens = own["dp"] * own["per_replica_batch"] * own["accumulation"] * 64
        assert tokens == 2**14
        assert not any("part of" in one["axis"] for one in own["collectives"]["exchanges"])
    assert on_tpu["basis"] == "the compiler's, for TPUs"
    assert "compiled for TPUs (v5p:1x1x2)" in on_gpu["basis"]
    assert on_gpu["hbm_bytes"] == int(0.75 * 84_942_979_072)


@needs_libtpu
@pytest.mark.slow
def test_a_single_chip_can_be_planned_for():
    words = ["--config", "tiny", "--topology", "v5e-1", "--mp", "1", "--fast", "--json"]
    result = json.loads(run_python("-m", "mesh_transformer", "plan", *words).stdout)
    assert (result["dp"], result["mp"], result["fits"]) == (1, 1, True)
    assert result["hbm_bytes"] == int(15.75 * 2**30)


@needs_libtpu
@pytest.mark.slow
def test_a_model_that_does_not_fit_reports_its_peak_memory(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL | {"cores_per_replica": 4, "seq": 2048, "d_model": 1024}))
    status, result = run_plan(path, "--topology", "v2-8", "--mp", "8", "--batch", "4096", "--fast")
    assert (status, result["fits"], result["collectives"]) == (1, False, None)
    assert result["mp"] == 8
    assert result["peak_bytes"] > result["hbm_bytes"]


KERNEL_ON_A_TPU = """
import json, math, re, sys
from mesh_transformer.config import Config
from mesh_transformer.generation.pool import server_pool
from mesh_transformer.generation.weights import weight_layout
from mesh_transformer.mesh.program import Layout
from mesh_transformer.performance import device_arrays, plan
from mesh_transformer.performance.compilation import compiled
from mesh_transformer.performance.topology import mesh_of, topology

config, own = Config(**json.loads(sys.argv[1])), topology(sys.argv[2])
layout = weight_layout(Layout(config, mesh_of(config, own)))
pool = server_pool(config, 8)
rows = device_arrays.abstract_rows(layout, 8, pool)
weights = device_arrays.abstract_weights(layout)
memory = compiled("", *plan.decode_program(layout, weights, rows, pool))
size = rows.caches[0].k_BHSK.size // own.devices
made = []
for name, shape, kind in re.findall(r"%(\\S+) = bf16\\[([\\d,]+)\\]\\S* ([a-z-]+)\\(", memory.text):
    if math.prod(map(int, shape.split(","))) == size and kind not in ("parameter", "bitcast"):
        made.append(f"{name} {kind}")
print(json.dumps([memory.text.count('custom_call_target="tpu_custom_call"'), made]))
"""


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("slice_", "changes"),
    [
        ("v5e-4", {"head_size": 256, "partitioning": "shard_map"}),
        ("v5e-4", {"block": "llama", "key_heads": 8, "partitioning": "jit"}),
    ],
)
def test_the_kernel_for_pages_copies_no_cache(slice_, changes):
    devices = int(slice_[-1])
    keys = SMALL | {"cores_per_replica": devices, "tpu_size": devices, "n_heads": 16, "seq": 2048}
    keys |= {"d_model": 2048, "dtype": "bfloat16", "paged_attention": "pallas"}
    process = run_python("-c", KERNEL_ON_A_TPU, json.dumps(keys | changes), slice_)
    kernels, made = json.loads(process.stdout)
    assert kernels == keys["layers"]
    # A page is replaced in place; whatever else makes an array of that size copies the pool.
    known = re.compile("dynamic-update-slice|dynamic_update_slice| get-tuple-element")
    assert len(made) >= 2 * keys["layers"]
    assert [one for one in made if not known.search(one)] == []
