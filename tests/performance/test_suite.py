"""The suite of measurements: its cases, time limits, results after kills, and report."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mesh_transformer.cli import benchmark
from mesh_transformer.mesh.accelerators import GIB
from mesh_transformer.util import InputError
from scripts.measure import suite
from tests.support.pages import ROOT
from tests.support.waiting import wait_until

MACHINE = suite.Machine("cpu", "a CPU", 1, 32 * GIB)
LIMITS = {"flops": 4e11, "bandwidth": 3e10, "hardware": "cpu", "source": "measured"}
DECODING: dict[str, Any] = {
    "mode": "decode",
    "date": "2026-01-01",
    "device": "a CPU",
    "versions": {"jax": "1"},
    "parameters": 1e8,
    "flops_per_token": 6e8,
    "dp": 1,
    "mp": 1,
    "command": "bench",
    "config": {
        "per_replica_batch": 1,
        "gradient_accumulation_steps": 1,
        "seq": 64,
        "dtype": "float32",
        "remat": "none",
        "partitioning": "jit",
        "zero": 0,
    },
    "limits": LIMITS,
    "rows": 2,
    "prompt": 8,
    "prefill_seconds": 0.1,
    "token_seconds": 0.02,
    "tokens_per_second": 100.0,
    "weight_bytes": 400_000_000,
    "cache_bytes": 1_000_000,
    "share_of_limit": 0.7,
    "profile": [{"name": "dot.1", "seconds": 0.5, "share": 0.9, "runs": 3}],
}


@pytest.mark.parametrize("case", [*suite.CPU, *suite.ACCELERATOR], ids=lambda case: case.name)
@pytest.mark.parametrize("count", [1, 8])
def test_cases_are_commands_whose_sequences_fit_their_models(case, count):
    arguments = case.arguments(suite.Machine("gpu", "a GPU", count, 0), "folder")
    args = benchmark.parse_args(arguments)
    config = benchmark.config_of(args)
    assert config.cores_per_replica == (count if case.whole else args.mp)
    if args.decode:
        assert args.prompt + 1 + 3 * args.tokens <= config.window + args.tokens


CHECK = {"name": "logits", "difference": None, "tolerance": 1e-4, "status": "failed", "note": "NaN"}


def killed_after(count: int, measured_names: list[str]) -> Any:
    """Return a function like `suite.measured` that is interrupted after some results."""

    def measured(case: suite.Case, own: suite.Machine, seconds: float) -> dict[str, Any]:
        if len(measured_names) == count:
            raise KeyboardInterrupt
        measured_names.append(case.name)
        result = DECODING if case.name != "b" else {"mode": "verify", "checks": [CHECK]}
        return {"case": case.name, "command": "c", "status": "done", "seconds": 1, "result": result}

    return measured


def test_a_suite_goes_on_where_it_was_killed(tmp_path, monkeypatch, capsys):
    cases = tuple(suite.Case(name, "--decode", 1) for name in "abcd")
    monkeypatch.setattr(suite, "CPU", (*cases, suite.Case("large", "", 64)))
    monkeypatch.setattr(suite, "machine", lambda: MACHINE)
    measured_names: list[str] = []
    monkeypatch.setattr(suite, "measured", killed_after(2, measured_names))
    with pytest.raises(KeyboardInterrupt):
        suite.run(tmp_path, 5, resume=False)
    path = tmp_path / suite.RESULTS
    assert [record["case"] for record in suite.results(path)] == ["a", "b"]
    with path.open("ab") as file:
        file.write(b'{"case": "c", "stat')  # killed while it wrote
    assert len(suite.results(path)) == 2
    monkeypatch.setattr(suite, "measured", killed_after(9, measured_names))
    with pytest.raises(InputError, match="has the results of a suite; add --resume"):
        suite.run(tmp_path, 5, resume=False)
    assert suite.run(tmp_path, 0, resume=True) == 0
    assert "continue with --resume: c; d" in capsys.readouterr().out
    assert suite.run(tmp_path, 5, resume=True) == 0
    assert measured_names == ["a", "b", "c", "d"]
    assert len(path.read_bytes().splitlines()) == 4
    text = (tmp_path / suite.REPORT).read_text()
    assert "| a | 2026-01-01 |" in text
    assert "- b: done, 1 s" in text
    assert "| logits |  | 0.0001 | failed | NaN |" in text
    assert "| 90.0% | 500.00 | 3 | `dot.1` |" in text
    assert "| MaxText |" in text
    assert (tmp_path / suite.PICTURE).stat().st_size > 10_000


def test_a_failed_case_and_one_that_takes_too_long_end_only_themselves():
    failed = suite.measured(suite.Case("wrong", "--nothing", 1), MACHINE, 60)
    assert (failed["status"], "result" in failed) == ("failed", False)
    assert "unrecognized arguments: --nothing" in failed["error"]
    late = suite.measured(suite.Case("late", "--model 105M", 1), MACHINE, 0.1)
    assert late["status"] == "out of time"


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
def test_no_case_outlives_a_killed_suite():
    program = (
        "from scripts.measure import suite\n"
        "machine = suite.Machine('cpu', 'a CPU', 1, 2**35)\n"
        "suite.measured(suite.Case('long', '--model 105M', 1), machine, 600)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    child = wait_until(lambda: children.read_text().split(), "the case begins")[0]
    wait_until(lambda: b"bench" in Path(f"/proc/{child}/cmdline").read_bytes(), "it is bench")
    process.kill()
    process.wait()
    wait_until(lambda: not Path(f"/proc/{child}").exists(), "the case ends")


@pytest.mark.slow
def test_a_case_is_measured():
    words = "--model tiny --decode --prompt 8 --tokens 4 --batch 2"
    record = suite.measured(suite.Case("tiny", words, 1, whole=False), MACHINE, 300)
    assert record["status"] == "done"
    result = record["result"]
    assert (result["rows"], result["mode"]) == (2, "decode")
    assert len(result["profile"]) == 10
    assert json.loads(json.dumps(record)) == record
