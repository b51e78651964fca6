"""`bench --verify`: all checks pass here, and planted faults fail the checks meant for them."""

import json
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mesh_transformer.cli import benchmark as script
from mesh_transformer.model import attention, layers, matrices
from mesh_transformer.util import InputError
from scripts.measure import verify
from scripts.measure.verify import Check, SkippedError

SOUND = "int8 matmul"  # a check that no planted fault changes


def outcomes(*names: str) -> dict[str, str]:
    """Run the checks with these names; return {name: status}, as the lines show them."""
    selected, lines = [check for check in verify.checks() if check.name in names], []
    assert len(selected) == len(names)
    verify.results(selected, show=lines.append)
    statuses = (line.split()[0] for line in lines)
    return dict(zip([check.name for check in selected], statuses, strict=True))


def test_quick_checks_pass():
    names = ["logits of GPT-J, float32", "logits of Llama, bfloat16", "attention to an int8 cache"]
    names += ["attention blocks, bfloat16", "gradients of attention xla, float32", SOUND]
    assert outcomes(*names) == dict.fromkeys(names, "passed")


@pytest.mark.slow
def test_all_checks_pass(monkeypatch):
    """Except those of meshes, which take as long as all others, and repeat tests/mesh."""
    monkeypatch.setattr(verify, "CALLS", 3)
    monkeypatch.setattr(verify, "meshes", list)
    results = verify.results(verify.checks())
    assert [result for result in results if result["status"] != "passed"] == []


def wrong_rotary_sign(monkeypatch):
    rotate = attention.rotate
    monkeypatch.setattr(
        attention, "rotate", lambda x, at, *args, **more: rotate(x, -at, *args, **more)
    )


def softmax_in_bf16(monkeypatch):
    softmax = jax.nn.softmax
    monkeypatch.setattr(
        jax.nn, "softmax", lambda x: softmax(x.astype(jnp.bfloat16)).astype(x.dtype)
    )


def int8_scale_off_by_one_row(monkeypatch):
    quantize = matrices.to_int8

    def shifted(*args, **more):
        values, scale = quantize(*args, **more)
        return values, jnp.roll(scale, 1, axis=-1)

    monkeypatch.setattr(matrices, "to_int8", shifted)


def stale_cache_row(monkeypatch):
    write = layers.write

    def stale(cache, *args):
        return jax.tree.map(lambda new, old: new.at[1].set(old[1]), write(cache, *args), cache)

    monkeypatch.setattr(layers, "write", stale)


@pytest.mark.parametrize(
    ("plant", "name", "passes"),
    [
        (wrong_rotary_sign, "logits of GPT-J, float32", SOUND),
        # The tolerance of logits in bfloat16 is too wide for this fault.
        (softmax_in_bf16, "attention xla, bfloat16", "logits of GPT-J, bfloat16"),
        (int8_scale_off_by_one_row, "decode of GPT-J, int8 weights", "attention to an int8 cache"),
        (stale_cache_row, "decode of Llama", SOUND),
    ],
)
def test_a_planted_fault_fails_its_check(monkeypatch, plant, name, passes):
    plant(monkeypatch)
    assert outcomes(name, passes) == {name: "failed", passes: "passed"}


def run_verify(monkeypatch, *words: str) -> Any:
    """Return the exit status of `bench --verify`."""
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--verify", *words])
    monkeypatch.setattr(script, "script", lambda *_: verify)
    with pytest.raises(SystemExit) as ended:
        script.main()
    return ended.value.code


def test_checks_go_on_after_a_failure(monkeypatch, capsys):
    def skipped():
        raise SkippedError("needs 2 devices")

    values = {"right": 0.1, "wrong": 0.3, "NaN": math.nan}
    made = [Check(name, lambda value=value: value, 0.2) for name, value in values.items()]
    made += [Check("raises", lambda: 1 / 0, 0.2), Check("elsewhere", skipped, 0.2)]
    monkeypatch.setattr(verify, "checks", lambda: iter(made))
    assert run_verify(monkeypatch) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "1 passed, 3 failed, 1 skipped"
    assert [line.split()[:2] for line in lines[-6:-1]] == [
        ["passed", "right"],
        ["failed", "wrong"],
        ["failed", "NaN"],
        ["failed", "raises"],
        ["skipped", "elsewhere"],
    ]
    assert "0.3 of 0.2" in lines[-5]
    assert lines[-3].endswith("ZeroDivisionError: division by zero")
    assert run_verify(monkeypatch, "--json") == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["mode"], result["platform"], result["devices"]) == ("verify", "cpu", 8)
    assert [check["difference"] for check in result["checks"]] == [0.1, 0.3, None, None, None]


def test_no_check_begins_after_the_minutes(monkeypatch, capsys):
    assert run_verify(monkeypatch, "--minutes", "0", "--json") == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert len(checks) == len(list(verify.checks()))
    assert {check["status"] for check in checks} == {"skipped"}
    assert {check["note"] for check in checks} == {"--minutes 0 are over"}


def test_meshes_have_checks_of_their_own():
    names = [check.name for check in verify.checks()]
    expected = [
        f"{what} of Llama on 2 x 4, {way}"
        for way in ("shard_map", "jit")
        for what in ("gradients", "decode")
    ]
    assert names[-5:] == [*expected, "same bits on each mesh, arrays that differ"]


def test_several_hosts_are_refused(monkeypatch):
    with pytest.raises(InputError, match="--verify checks the devices of a single host"):
        run_verify(monkeypatch, "--every-host")
