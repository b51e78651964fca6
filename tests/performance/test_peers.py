"""The comparison with other libraries: its table, and libraries that cannot be measured."""

import subprocess
import sys
from pathlib import Path

import pytest

from mesh_transformer.cli.benchmark import script
from mesh_transformer.util import InputError

peers = script("peers", "peers")
ROOT = Path(__file__).parents[2]
LLAMA, GPTJ, DECODE = peers.WORK


def report(wall, cpu, **others):
    """Return what a program prints; `wall` and `cpu` are its median times."""
    times = {"wall": [wall, 9 * wall, wall / 9], "cpu": [cpu, 9 * cpu, cpu / 9]}
    return {"first": 20.0, "peak": 3 * 2**29, "versions": {"jax": "1.2"}, **times, **others}


def cells(text):
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def test_ratios_compare_the_medians_of_a_round():
    # In the second round everything takes 10 times as long; a ratio across rounds would show it.
    ours = [report(1.0, 2.0), report(10.0, 20.0), report(2.0, 4.0)]
    theirs = [report(3.0, 1.0), report(20.0, 10.0), report(5.0, 2.0)]
    assert peers.ratio(theirs, ours, "wall") == "2.50 (2.00 to 3.00)"
    assert peers.ratio(theirs, ours, "cpu") == "0.50 (0.50 to 0.50)"


def test_the_table_has_a_row_for_each_library_and_says_whether_it_computes_the_same():
    ours, torch = report(1.0, 2.0, loss=9.0), report(2.0, 1.0, loss=9.00001)
    maxtext = report(4.0, 4.0, loss=9.5)
    results = {LLAMA: {"ours": [ours], "torch": [torch], "maxtext": [maxtext]}}
    text, agree = peers.table(results)
    assert agree
    first, second, third = cells(text)
    assert first["library"] == "this library (jax 1.2)"
    assert (first["wall (s)"], first["CPU (s)"]) == ("1.000", "2.000")
    assert first["peak memory (GiB)"] == "1.50"
    assert first["start to end of the first (s)"] == "20.0"
    assert second["wall time over ours"] == "2.00 (2.00 to 2.00)"
    assert second["CPU time over ours"] == "0.50 (0.50 to 0.50)"
    assert second["compared with ours"] == "our weights: first loss 9.000010, ours 9.000000"
    note = "initial weights of its own: first loss 9.500000, ours 9.000000"
    assert third["compared with ours"] == note
    # The losses of the same weights must agree; those of other weights need not.
    results[LLAMA]["torch"] = [torch | {"loss": 9.001}]
    assert not peers.table(results)[1]


def test_other_tokens_from_the_same_weights_are_counted():
    ours, theirs = report(1.0, 1.0, tokens=[1, 2, 3]), report(1.0, 1.0, tokens=[1, 2, 4])
    text, agree = peers.table({DECODE: {"ours": [ours], "llama_cpp": [theirs]}})
    assert not agree
    assert cells(text)[1]["compared with ours"] == "our weights: 2 of 3 tokens are ours"


def test_a_library_that_fails_is_left_out_and_the_rest_goes_on(monkeypatch, tmp_path):
    calls = []

    def measure(peer, python, title, args, folder):
        calls.append((title, peer.name))
        if peer.name == "easydel":
            raise InputError("out of memory")
        return report(1.0, 1.0, loss=9.0)

    monkeypatch.setattr(peers, "measure", measure)
    args, left_out = type("Args", (), {"rounds": 2}), {}
    pythons = {name: Path(sys.executable) for name in ("ours", "torch", "easydel")}
    results = peers.rounds(pythons, args, tmp_path, left_out)
    assert left_out == {"easydel": f"{LLAMA}: out of memory"}
    # GPT-J is not in the table, because no other library is left that trains it.
    assert {title: list(names) for title, names in results.items()} == {LLAMA: ["ours", "torch"]}
    assert [len(runs) for runs in results[LLAMA].values()] == [2, 2]
    assert [name for title, name in calls if title == LLAMA and name != "easydel"] == [
        "ours", "torch", "torch", "ours",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        (peers.Peer("x", "X", "9.9"), "it needs Python 9.9, and python9.9 is not in PATH"),
        (peers.Peer("x", "X", needs=("no_such_package",)), "no_such_package is not installed"),
    ],
)
def test_a_library_that_cannot_be_installed_is_named(tmp_path, peer, reason):
    with pytest.raises(InputError) as caught:
        peers.interpreter(peer, tmp_path)
    assert str(caught.value) == reason


def test_an_environment_is_created_once_and_a_failed_one_again(monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(peers.shutil, "which", lambda name: f"/bin/{name}")

    def failing(command):
        commands.append([*map(str, command)])
        if "-r" in commands[-1]:
            raise InputError("No matching distribution")

    peer = peers.PEERS["maxtext"]
    monkeypatch.setattr(peers, "call", failing)
    with pytest.raises(InputError, match="No matching distribution"):
        peers.interpreter(peer, tmp_path)
    monkeypatch.setattr(peers, "call", lambda command: commands.append([*map(str, command)]))
    (tmp_path / "maxtext").mkdir()
    python = peers.interpreter(peer, tmp_path)
    assert commands[-1][-2:] == ["--no-deps", "maxtext==0.2.5"]
    assert commands[2][:3] == ["/bin/python3.12", "-m", "venv"]
    count = len(commands)
    assert peers.interpreter(peer, tmp_path) == python
    assert len(commands) == count


def test_the_clock_reports_the_steps_after_the_first():
    program = (
        "import time; from clock import Clock; clock = Clock(time.monotonic() - 5)\n"
        "for _ in range(3): clock.step_ended()\n"
        "clock.report('pytest', loss=2.0)"
    )
    folder = ROOT / "scripts" / "measure" / "peers"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    told = peers.json.loads(result.stdout)
    assert told["first"] >= 5
    assert len(told["wall"]) == len(told["cpu"]) == 2
    assert told["peak"] > 2**20
    assert told["versions"] == {"pytest": pytest.__version__}
    assert told["loss"] == 2.0
