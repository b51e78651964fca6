"""Benchmarks: reported numbers against measured ones; every mode runs with a tiny model."""

import json
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from mesh_transformer.cli import benchmark as script
from mesh_transformer.config import Config
from mesh_transformer.generation.generator import Generator
from mesh_transformer.mesh.devices import make_mesh
from mesh_transformer.mesh.placement import Rows
from mesh_transformer.mesh.program import Layout
from mesh_transformer.model import flops, transformer
from mesh_transformer.performance import benchmark, plan, report
from mesh_transformer.performance.topology import slice_named
from mesh_transformer.util import InputError, StoppedError, run_script
from scripts import plot_ablation
from scripts.measure import ablation, loader, operations
from tests.conftest import SMALL

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

TINY = SMALL | {
    "layers": 1,
    "d_model": 16,
    "n_heads": 4,
    "seq": 32,
    "gradient_accumulation_steps": 2,
}


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("benchmark") / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def test_a_published_speed_gives_the_published_mfu():
    """The README of transformer_shmap reports 6.86B, a v3-32, 867 TFLOP/s and an MFU of 44 %."""
    args = script.parse_args(["--dp", "4", "--mp", "8", "--version", "v3"])
    config = script.config_of(args)
    assert flops.n_params(config) == pytest.approx(6.86e9, rel=1e-3)
    limits = benchmark.limits(args.hardware, SimpleNamespace(size=32), config.dtype)
    assert limits is not None
    assert (limits.hardware, limits.flops) == ("v3", 32 * 61.5e12)
    seconds = 3.0
    tokens = round(seconds * 867e12 / flops.palm_flops_per_token(config))
    speed = benchmark.speed(config, tokens, seconds, limits.flops)
    assert speed.tokens_per_second == tokens / 3
    assert speed.tflops == pytest.approx(867, rel=1e-4)  # the number of tokens is rounded
    assert round(speed.mfu, 2) == 0.44
    hardware_ratio = flops.hardware_flops_per_token(config) / flops.palm_flops_per_token(config)
    assert speed.hfu == pytest.approx(hardware_ratio * speed.mfu, rel=1e-12)
    assert benchmark.speed(config, tokens, seconds, None).mfu is None


def test_the_hardware_selects_the_default_model():
    def layers(*words: str) -> int:
        return script.config_of(script.parse_args([*words])).layers

    assert (layers("--version", "v2"), layers("--hardware", "v3")) == (12, 32)
    assert (layers("--hardware", "h200"), layers("--hardware", "cpu"), layers()) == (28, 4, 4)
    assert layers("--hardware", "h200", "--model", "20B", "--set", "layers=3") == 3


def test_flags_override_config_keys(config_file):
    words = (
        "--dp 2 --mp 4 --batch 3 --seq 8 --accumulate 5 --zero 1 --remat dots --set norm=rmsnorm"
    )
    words += " --partitioning jit --dtype bfloat16"
    args = script.parse_args(["--config", config_file, *words.split()])
    actual = script.config_of(args).as_dict()
    changes = {
        "cores_per_replica": 4,
        "tpu_size": 8,
        "per_replica_batch": 3,
        "seq": 8,
        "gradient_accumulation_steps": 5,
        "zero": 1,
        "remat": "dots",
        "norm": "rmsnorm",
        "partitioning": "jit",
        "dtype": "bfloat16",
    }
    assert actual == Config.from_dict(TINY | changes).as_dict()


def test_the_time_of_an_operation_excludes_operations_inside_it():
    events = [("inner", 12.0, 15.0), ("outer", 10.0, 20.0), ("next", 20.0, 21.0), ("a", 16.0, 18.0)]
    times = dict(operations._self_times(events))
    assert times == {"inner": 3.0, "a": 2.0, "outer": 5.0, "next": 1.0}


def test_every_operation_of_a_trace_is_counted_once():
    def plane(name: str, *lines: str) -> SimpleNamespace:
        stats = [("hlo_op", "x")]
        events = [SimpleNamespace(name=name, start_ns=1.0, duration_ns=2.0, stats=stats)]
        events.append(SimpleNamespace(name="other", start_ns=1.0, duration_ns=1.0, stats=[]))
        trace_lines = [SimpleNamespace(name=line_name, events=events) for line_name in lines]
        return SimpleNamespace(name=name, lines=trace_lines)

    planes = [
        plane("/device:TPU:0", "XLA Modules", "XLA Ops", "Steps"),
        plane("/device:GPU:0", "Stream #7(Compute)", "XLA Ops"),
        plane("/host:CPU", "a thread"),
        plane("/host:metadata", "a line"),
    ]
    lines_of_trace = list(operations._lines(SimpleNamespace(planes=planes)))
    assert [len(line) for line in lines_of_trace] == [2, 2, 1]  # a host also has other events
    assert lines_of_trace[2] == [("/host:CPU", 1.0, 3.0)]
    with pytest.raises(InputError, match="contains no"):
        operations.operations(str(ROOT / "configs"))


@pytest.mark.parametrize(
    "words", ["--ablate", "--checkpoint", "--loader", "--profile trace", "--verify"]
)
def test_without_its_script_a_flag_is_refused_before_it_measures(monkeypatch, words, tmp_path):
    """As in a package that was installed without its sources."""
    script.script.cache_clear()
    monkeypatch.setattr(script, "__file__", str(tmp_path / "mesh_transformer" / "cli" / "a.py"))
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *words.split()])
    flag, names = words.split()[0], "ablation|checkpoints|loader|operations|verify"
    line = rf"{flag} runs scripts/measure/({names})\.py.* install a checkout"
    with pytest.raises(InputError, match=line):
        script.main()


def run_benchmark(monkeypatch, capsys, *words: str) -> dict:
    """Run the benchmark, and return the JSON object that it prints to stdout."""
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *words, "--json"])
    script.main()
    return json.loads(capsys.readouterr().out)


ABOUT = {
    "mode", "date", "command", "versions", "platform", "device", "dp", "mp", "model", "parameters",
    "config", "flops_per_token", "limits",
}  # fmt: skip


def check_row(result: dict) -> None:
    """Check that the docs have the mode's table header, and that the row has all its columns."""
    mode = result["mode"]
    columns = {"train": report.TRAINING, "decode": report.DECODING}.get(mode)
    if columns is None:
        columns = script.script(script.SCRIPTS[mode], mode).COLUMNS
    header = report.header(result, columns)
    assert header in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    count = header.splitlines()[0].count(" | ")
    assert {line.count(" | ") for line in report.row(result, columns).splitlines()} == {count}
    assert result["date"] in report.lines(result, columns)


@pytest.mark.slow
def test_the_train_mode_reports_times_speeds_and_memory(monkeypatch, capsys, tmp_path, config_file):
    words = f"--config {config_file} --dp 2 --mp 2 --batch 3 --steps 3 --warmup 1"
    words += f" --profile {tmp_path}"
    monkeypatch.setenv("GLIBC_TUNABLES", "a=1 b=2")
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    result = run_benchmark(monkeypatch, capsys, *words.split())
    assert set(result) > ABOUT
    environment = f"XLA_FLAGS='{os.environ['XLA_FLAGS']}' GLIBC_TUNABLES='a=1 b=2'"
    assert result["command"] == f"{environment} scripts/benchmark.py {words}"
    assert result["tokens_per_step"] == 2 * 3 * 2 * 32  # microbatches, sequences, replicas, tokens
    assert len(result["all_step_seconds"]) == 3
    assert result["step_seconds"] == sorted(result["all_step_seconds"])[1]
    speed, peak = result["speed"], result["peak_flops"]
    assert speed["tokens_per_second"] == result["tokens_per_step"] / result["step_seconds"]
    assert speed["tflops"] == speed["tokens_per_second"] * result["flops_per_token"] / 1e12
    assert speed["mfu"] == pytest.approx(speed["tflops"] * 1e12 / peak, rel=1e-12)
    # A fresh model predicts 128 tokens uniformly.
    assert result["loss"] == pytest.approx(math.log(128), abs=0.5)
    assert result["peak_bytes"] > result["temporary_bytes"] > 0
    assert "compiler" in result["peak_bytes_source"]
    shares = [operation["share"] for operation in result["profile"]]
    assert len(shares) == 10
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 1 + 1e-9
    check_row(result)


def test_rows_in_pages_have_pages_of_their_own():
    config = Config(**TINY, per_replica_batch=3)
    pool, chunks = benchmark._own_pages(config, 6, 20)  # two replicas, rows of two pages of 16
    assert chunks.page_PJ.shape == (6, config.window // pool.page)
    for own_PJ in np.split(chunks.page_PJ, 2):
        assert sorted(own_PJ[own_PJ >= 0]) == list(range(pool.pages)) == list(range(6))


@pytest.mark.slow
@pytest.mark.parametrize("pages", ["", "--pages"])
def test_the_decode_mode_counts_the_bytes_read_per_token(monkeypatch, capsys, config_file, pages):
    words = f"--config {config_file} --dp 2 --decode --batch 3 --tokens 4 --prompt 6 {pages}"
    result = run_benchmark(monkeypatch, capsys, *words.split())
    assert set(result) > ABOUT
    # Each device has the layer's matrices and the head in f32, and biases and norms.
    matrices = 4 * (12 * 16**2 + 16 * 128)
    assert matrices < result["weight_bytes"] < 1.1 * matrices
    # Keys and values of the prompt, of the earlier tokens, and of half the timed tokens.
    assert result["cache_bytes"] == 2 * 4 * 16 * (6 + 4 + 2) * 3
    assert result["tokens_per_second"] == 2 * 3 / result["token_seconds"]
    bytes_read = 2 * (result["weight_bytes"] + result["cache_bytes"])
    assert result["limit_seconds"] == bytes_read / result["limits"]["bandwidth"]
    assert result["share_of_limit"] == result["limit_seconds"] / result["token_seconds"]
    check_row(result)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"tie_head": True}, {"tie_head": True, "weight_bits": 8}])
def test_benchmarks_and_plans_count_the_same_bytes_per_token(changes):
    """A quantized head is a copy, so that the embedding is not read for it."""
    config = Config(**TINY, per_replica_batch=3, int8_cache="weight_bits" in changes, **changes)
    config = config.replace(cores_per_replica=1, tpu_size=1)
    layout = Layout(config, make_mesh(config))
    generator = Generator(layout, Rows(layout.mesh))
    generator.cache_weights(transformer.init(config, jax.random.key(0)))
    weights, cache = benchmark._read_per_token(generator, config.window)
    planned = plan.decode_plan(config, slice_named("cpu-1"))
    assert (weights + cache, cache) == (planned.read_bytes, planned.cache_bytes)


@pytest.mark.slow
def test_the_checkpoint_mode_compares_with_a_plain_file(monkeypatch, capsys, tmp_path, config_file):
    words = f"--config {config_file} --checkpoint --rounds 1 --folder {tmp_path}"
    result = run_benchmark(monkeypatch, capsys, *words.split())
    assert set(result) > ABOUT
    assert result["state_bytes"] == 12 * result["parameters"] + 8  # 8 bytes are two counters
    assert result["save_bytes_per_second"] == result["state_bytes"] / result["save_seconds"]
    assert result["save_ratio"] == result["save_seconds"] / result["write_seconds"]
    assert result["save_seconds"] > result["blocked_seconds"]
    assert not list(tmp_path.iterdir())
    check_row(result)


@pytest.mark.slow
def test_the_loader_mode_compares_with_tf_data_and_a_train_step(tmp_path, config_file):
    result = loader.measure(tmp_path, 1000, 8, 1)
    assert result["tokens_per_second"] == 8 * result["records_per_second"]
    assert min(result.values()) > 0
    args = script.parse_args(["--config", config_file, "--loader"])
    about = script.run_info(args, script.config_of(args), SimpleNamespace(platform="cpu"))
    check_row(about | result | {"limits": None, "most_tokens_per_second_of_a_step": None})
    with pytest.raises(InputError, match="a multiple of 10"):
        loader.measure(tmp_path, 15, 8, 1)


@pytest.mark.slow
def test_the_ablation_mode_compares_programs_with_equal_losses(monkeypatch, capsys, config_file):
    def two_variants(*args: object) -> list[ablation.Variant]:
        return [all_variants[0], all_variants[-1]]

    mesh: Any = SimpleNamespace(size=4)
    all_variants = ablation.variants(Layout(Config(**TINY), mesh))
    monkeypatch.setattr(script.script("ablation", "ablate"), "variants", two_variants)
    words = f"--config {config_file} --dp 2 --mp 2 --ablate --rounds 3"
    result = run_benchmark(monkeypatch, capsys, *words.split())
    library, naive = result["variants"]
    assert (library["name"], naive["name"]) == ("as it is", "all off")
    assert library["ratios"] == [1, 1, 1]
    assert naive["ratio"] == sorted(naive["ratios"])[1]
    assert naive["losses"] == pytest.approx(library["losses"], rel=result["loss_tolerance"])
    assert library["losses"][0] != library["losses"][1]
    # q, k, v and the feed-forward matrix have separate all-reduces: three more in the layer, for
    # each of the two microbatches.
    assert naive["all_reduces"] == library["all_reduces"] + 2 * 3
    check_row(result)


def test_a_different_loss_stops_an_ablation():
    def program(*losses: float) -> ablation.Compiled:
        return ablation.Compiled(ablation.Variant("other"), None, list(losses), {})

    ablation.check_losses([program(2.0, 1.5), program(2.00001, 1.50001)], 1e-5)
    with pytest.raises(StoppedError, match=r"other: the losses are \[2.0, 1.4\]"):
        ablation.check_losses([program(2.0, 1.5), program(2.0, 1.4)], 1e-5)


def test_the_ablation_plot_has_a_bar_per_variant(tmp_path):
    variants = [{"name": name, "ratio": 1.0, "memory_bytes": 5} for name in ("as it is", "all off")]
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"mode": "ablate", "dp": 2, "mp": 4, "variants": variants}))
    picture = tmp_path / "picture.svg"
    plot_ablation.draw([plot_ablation.read(str(path))] * 2, str(picture))
    assert picture.read_text().count(">all off<") == 2  # once per mesh
    path.write_text(json.dumps({"mode": "train"}))
    with pytest.raises(InputError, match="is not the output of benchmark"):
        plot_ablation.read(str(path))


def test_one_device_has_no_variants_that_change_all_reduces():
    def names(size: int, **keys: object) -> list[str]:
        mesh: Any = SimpleNamespace(size=size)
        layout = Layout(Config(**TINY, **keys), mesh)
        return [variant.name for variant in ablation.variants(layout)]

    separate_sums = "each matmul its own sum"
    assert separate_sums in names(4)
    assert separate_sums not in names(1) + names(4, partitioning="jit")
    assert "all off" in names(1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model 7B", "--model is '7B', expected one of tiny"),
        ("--hardware v9 --model tiny", "hardware is 'v9'"),
        ("--config nowhere.json", "config nowhere.json cannot be read"),
        ("--set layers", "--set layers: expected KEY=VALUE"),
        ("--set layer=2", "--set layer=2: unknown key 'layer'; did you mean 'layers'?"),
        ("--set layers=many", "--set layers=many: expected int"),
        ("--dp 3 --mp 8", "--dp 3 x --cp 1 x --mp 8 need 24 devices, but there are 8"),
        ("--warmup -1", "--warmup is -1"),
        ("--decode --prompt 60", "exceed the window of 64"),
        ("--loader --profile x", "records no --loader; remove one of the flags"),
        ("--loader --every-host", "--loader measures a single host"),
        ("--checkpoint --folder nowhere", "--folder nowhere is not a folder"),
    ],
)
def test_invalid_flags_are_reported_in_one_line(monkeypatch, capsys, words, message):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *words.split()])
    with pytest.raises(SystemExit) as exit_info:
        run_script(script.main)
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"error: .*\n", captured.err)
    assert message in captured.err
