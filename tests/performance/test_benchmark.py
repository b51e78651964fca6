"""What a benchmark says follows from what it measured; each mode runs, at a tiny size."""

import json
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mesh_transformer.cli import benchmark as script
from mesh_transformer.config import Config
from mesh_transformer.model import flops
from mesh_transformer.performance import ablation, benchmark, device_trace, loader_timing, report
from mesh_transformer.util import InputError, StoppedError, run_script
from scripts import plot_ablation
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


def test_a_published_rate_comes_to_the_published_share():
    """transformer_shmap's README: 6.86B on a v3-32, 867 TFLOP/s, an MFU of 44 percent."""
    args = script.parse_args(["--dp", "4", "--mp", "8", "--version", "v3"])
    config = script.config_of(args)
    assert flops.n_params(config) == pytest.approx(6.86e9, rel=1e-3)
    limits = benchmark.limits(args.hardware, SimpleNamespace(size=32), config.dtype)
    assert limits is not None
    assert (limits.hardware, limits.flops) == ("v3", 32 * 61.5e12)
    seconds = 3.0
    tokens = round(seconds * 867e12 / flops.palm_flops_per_token(config))
    found = benchmark.speed(config, tokens, seconds, limits.flops)
    assert found.tokens_per_second == tokens / 3
    assert found.tflops == pytest.approx(867, rel=1e-4)  # whole tokens
    assert round(found.mfu, 2) == 0.44
    again = flops.hardware_flops_per_token(config) / flops.palm_flops_per_token(config)
    assert found.hfu == pytest.approx(again * found.mfu, rel=1e-12)
    assert benchmark.speed(config, tokens, seconds, None).mfu is None


def test_the_hardware_names_the_model():
    def layers(*words: str) -> int:
        return script.config_of(script.parse_args([*words])).layers

    assert (layers("--version", "v2"), layers("--hardware", "v3")) == (12, 32)
    assert (layers("--hardware", "h200"), layers("--hardware", "cpu"), layers()) == (28, 4, 4)
    assert layers("--hardware", "h200", "--model", "20B", "--set", "layers=3") == 3


def test_flags_replace_the_configs_keys(config_file):
    words = (
        "--dp 2 --mp 4 --batch 3 --seq 8 --accumulate 5 --zero 1 --remat dots --set norm=rmsnorm"
    )
    words += " --partitioning jit --dtype bfloat16"
    args = script.parse_args(["--config", config_file, *words.split()])
    found = script.config_of(args).as_dict()
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
    assert found == Config.from_dict(TINY | changes).as_dict()


def test_an_operation_is_charged_what_nothing_inside_it_took():
    events = [("inner", 12.0, 15.0), ("outer", 10.0, 20.0), ("next", 20.0, 21.0), ("a", 16.0, 18.0)]
    found = dict(device_trace._own_times(events))
    assert found == {"inner": 3.0, "a": 2.0, "outer": 5.0, "next": 1.0}


def test_of_a_trace_the_operations_count_each_once():
    def plane(name: str, *lines: str) -> SimpleNamespace:
        stats = [("hlo_op", "x")]
        events = [SimpleNamespace(name=name, start_ns=1.0, duration_ns=2.0, stats=stats)]
        events.append(SimpleNamespace(name="other", start_ns=1.0, duration_ns=1.0, stats=[]))
        found = [SimpleNamespace(name=each, events=events) for each in lines]
        return SimpleNamespace(name=name, lines=found)

    planes = [
        plane("/device:TPU:0", "XLA Modules", "XLA Ops", "Steps"),
        plane("/device:GPU:0", "Stream #7(Compute)", "XLA Ops"),
        plane("/host:CPU", "a thread"),
        plane("/host:metadata", "a line"),
    ]
    found = list(device_trace._lines(SimpleNamespace(planes=planes)))
    assert [len(line) for line in found] == [2, 2, 1]  # a host has other events too
    assert found[2] == [("/host:CPU", 1.0, 3.0)]
    with pytest.raises(InputError, match="contains no"):
        device_trace.operations(str(ROOT / "configs"))


def measured(monkeypatch, capsys, *words: str) -> dict:
    """The one object on stdout."""
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *words, "--json"])
    script.main()
    return json.loads(capsys.readouterr().out)


ABOUT = {
    "mode", "date", "command", "versions", "platform", "device", "dp", "mp", "model", "parameters",
    "config", "flops_per_token", "limits",
}  # fmt: skip


def check_row(found: dict) -> None:
    """The mode's table in the docs has these columns, and each of them a cell."""
    header = report.header(found["mode"])
    assert header in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    columns = header.splitlines()[0].count(" | ")
    assert {line.count(" | ") for line in report.row(found).splitlines()} == {columns}
    assert found["date"] in report.lines(found)


@pytest.mark.slow
def test_training_tells_its_time_and_what_it_comes_to(monkeypatch, capsys, tmp_path, config_file):
    words = f"--config {config_file} --dp 2 --mp 2 --batch 3 --steps 3 --warmup 1"
    words += f" --profile {tmp_path}"
    monkeypatch.setenv("GLIBC_TUNABLES", "a=1 b=2")
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    found = measured(monkeypatch, capsys, *words.split())
    assert set(found) > ABOUT
    around = f"XLA_FLAGS='{os.environ['XLA_FLAGS']}' GLIBC_TUNABLES='a=1 b=2'"
    assert found["command"] == f"{around} scripts/benchmark.py {words}"
    assert found["tokens_per_step"] == 2 * 3 * 2 * 32  # microbatches, sequences, replicas, tokens
    assert len(found["all_step_seconds"]) == 3
    assert found["step_seconds"] == sorted(found["all_step_seconds"])[1]
    speed, peak = found["speed"], found["peak_flops"]
    assert speed["tokens_per_second"] == found["tokens_per_step"] / found["step_seconds"]
    assert speed["tflops"] == speed["tokens_per_second"] * found["flops_per_token"] / 1e12
    assert speed["mfu"] == pytest.approx(speed["tflops"] * 1e12 / peak, rel=1e-12)
    # A fresh model knows nothing of 128 tokens.
    assert found["loss"] == pytest.approx(math.log(128), abs=0.5)
    assert found["peak_bytes"] > found["temporary_bytes"] > 0
    assert "compiler" in found["peak_bytes_source"]
    shares = [each["share"] for each in found["profile"]]
    assert len(shares) == 10
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 1 + 1e-9
    check_row(found)


@pytest.mark.slow
def test_decoding_counts_what_it_reads(monkeypatch, capsys, config_file):
    words = f"--config {config_file} --dp 2 --decode --batch 3 --tokens 4 --prompt 6"
    found = measured(monkeypatch, capsys, *words.split())
    assert set(found) > ABOUT
    # Each device: the layer's matrices and the head in f32, and biases and norms.
    matrices = 4 * (12 * 16**2 + 16 * 128)
    assert matrices < found["weight_bytes"] < 1.1 * matrices
    # Keys and values of the prompt, of the tokens before, and of half those that are timed.
    assert found["cache_bytes"] == 2 * 4 * 16 * (6 + 4 + 2) * 3
    assert found["tokens_per_second"] == 2 * 3 / found["token_seconds"]
    read = 2 * (found["weight_bytes"] + found["cache_bytes"])
    assert found["limit_seconds"] == read / found["limits"]["bandwidth"]
    assert found["share_of_limit"] == found["limit_seconds"] / found["token_seconds"]
    check_row(found)


@pytest.mark.slow
def test_a_checkpoint_is_compared_with_a_plain_file(monkeypatch, capsys, tmp_path, config_file):
    words = f"--config {config_file} --checkpoint --rounds 1 --folder {tmp_path}"
    found = measured(monkeypatch, capsys, *words.split())
    assert set(found) > ABOUT
    assert found["state_bytes"] == 12 * found["parameters"] + 8  # and two counts
    assert found["save_bytes_per_second"] == found["state_bytes"] / found["save_seconds"]
    assert found["save_ratio"] == found["save_seconds"] / found["write_seconds"]
    assert found["save_seconds"] > found["blocked_seconds"]
    assert not list(tmp_path.iterdir())
    check_row(found)


@pytest.mark.slow
def test_the_loader_is_compared_with_tf_data_and_with_a_step(tmp_path, config_file):
    found = loader_timing.measure(tmp_path, 1000, 8, 1)
    assert found["tokens_per_second"] == 8 * found["records_per_second"]
    assert min(found.values()) > 0
    args = script.parse_args(["--config", config_file, "--loader"])
    about = script.about(args, script.config_of(args), SimpleNamespace(platform="cpu"))
    check_row(about | found | {"limits": None, "most_tokens_per_second_of_a_step": None})
    with pytest.raises(InputError, match="a multiple of 10"):
        loader_timing.measure(tmp_path, 15, 8, 1)


@pytest.mark.slow
def test_an_ablation_compares_programs_of_one_loss(monkeypatch, capsys, config_file):
    def two(*args: object) -> list[ablation.Variant]:
        return [every[0], every[-1]]

    every = ablation.variants(Config(**TINY), SimpleNamespace(size=4))
    monkeypatch.setattr(ablation, "variants", two)
    words = f"--config {config_file} --dp 2 --mp 2 --ablate --rounds 3"
    found = measured(monkeypatch, capsys, *words.split())
    library, naive = found["variants"]
    assert (library["name"], naive["name"]) == ("as it is", "all off")
    assert library["ratios"] == [1, 1, 1]
    assert naive["ratio"] == sorted(naive["ratios"])[1]
    assert naive["losses"] == pytest.approx(library["losses"], rel=found["loss_tolerance"])
    assert library["losses"][0] != library["losses"][1]
    # q, v, k and the feed-forward's matrix: three words more in the layer, of each microbatch.
    assert naive["all_reduces"] == library["all_reduces"] + 2 * 3
    check_row(found)


def test_another_loss_stops_an_ablation():
    def program(*losses: float) -> ablation.Compiled:
        return ablation.Compiled(ablation.Variant("other"), None, list(losses), {})

    ablation.check_losses([program(2.0, 1.5), program(2.00001, 1.50001)], 1e-5)
    with pytest.raises(StoppedError, match=r"other: the losses are \[2.0, 1.4\]"):
        ablation.check_losses([program(2.0, 1.5), program(2.0, 1.4)], 1e-5)


def test_a_picture_has_a_bar_for_each_variant(tmp_path):
    steps = [{"name": name, "ratio": 1.0, "memory_bytes": 5} for name in ("as it is", "all off")]
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"mode": "ablate", "dp": 2, "mp": 4, "variants": steps}))
    picture = tmp_path / "picture.svg"
    plot_ablation.draw([plot_ablation.read(str(path))] * 2, str(picture))
    assert picture.read_text().count(">all off<") == 2  # once a mesh
    path.write_text(json.dumps({"mode": "train"}))
    with pytest.raises(InputError, match="expected the output of benchmark"):
        plot_ablation.read(str(path))


def test_one_device_has_nobody_to_sum_with():
    def names(size: int, **keys: object) -> list[str]:
        mesh = SimpleNamespace(size=size)
        return [each.name for each in ablation.variants(Config(**TINY, **keys), mesh)]

    own = "each matmul its own sum"
    assert own in names(4)
    assert own not in names(1) + names(4, partitioning="jit")
    assert "all off" in names(1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--model 7B", "--model is '7B', expected one of tiny"),
        ("--hardware v9 --model tiny", "hardware is 'v9'"),
        ("--config nowhere.json", "config nowhere.json: cannot be read"),
        ("--set layers", "--set is 'layers', expected KEY=VALUE"),
        ("--set layer=2", "unknown key 'layer'; did you mean 'layers'?"),
        ("--set layers=many", "layers is str 'many'"),
        ("--dp 3 --mp 8", "--dp 3 x --mp 8 are 24 devices, but there are 8"),
        ("--warmup -1", "--warmup is -1"),
        ("--decode --prompt 60", "exceed the window of 64"),
        ("--decode --profile x", "--profile records train steps; remove it or --decode"),
        ("--loader --every-host", "--loader measures a single host"),
        ("--checkpoint --folder nowhere", "--folder nowhere is not a folder"),
    ],
)
def test_what_cannot_be_measured_is_one_line(monkeypatch, capsys, words, told):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *words.split()])
    with pytest.raises(SystemExit) as ended:
        run_script(script.main)
    assert ended.value.code == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert re.fullmatch(r"error: .*\n", found.err)
    assert told in found.err
