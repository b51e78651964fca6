"""What `scripts/hlo_diff.py` says about two compiled programs."""

import json

import jax
import jax.numpy as jnp
import pytest

from mesh_transformer.performance.plan import Memory
from scripts import hlo_diff


def summary_of(function, size=64):
    text = jax.jit(function).lower(jnp.ones((size, size))).compile().as_text()
    return hlo_diff.summary(Memory(1000, text, 0.1, False))


def test_names_and_source_lines_are_no_difference():
    def one(x):
        return jnp.sin(x @ x) + 1

    def same(y):
        product = y @ y

        return jnp.sin(product) + 1

    assert hlo_diff.differences(summary_of(one), summary_of(same)) == []
    text = jax.jit(one).lower(jnp.ones((8, 8))).compile().as_text()
    assert text is not None
    renamed = text.replace("%fusion", "%other_fusion").replace("%x", "%z")
    assert hlo_diff.normalised(renamed) == hlo_diff.normalised(text)


def test_each_figure_that_changes_is_named(tmp_path, capsys):
    before = summary_of(lambda x: jnp.sin(x @ x))
    other = summary_of(lambda x: jnp.cos(x @ x))
    assert hlo_diff.differences(before, other) == ["the text differs, but nothing that is counted"]
    larger = summary_of(lambda x: jnp.sin(x @ x), size=128)
    assert any(line.startswith("moved: ") for line in hlo_diff.differences(before, larger))
    reduced = before | {"collectives": {"all-reduce f32[4] over 2": 3}, "peak": 2000, "cycles": 50}
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, version, programs in (
        (paths[0], "1", {"same": before, "step": before, "old": before}),
        (paths[1], "2", {"same": before, "step": reduced}),
    ):
        path.write_text(json.dumps({"jax": version, "programs": programs}))
    assert hlo_diff.compare(paths) == 1
    assert capsys.readouterr().out.splitlines() == [
        "JAX 1 -> 2",
        "old:",
        f"  only in {paths[0]}",
        "same: nothing",
        "step:",
        "  peak: 1,000 -> 2,000 (2.000)",
        "  cycles: 0 -> 50",
        "  collectives: all-reduce f32[4] over 2: 0 -> 3",
    ]
    assert hlo_diff.compare([paths[0], paths[0]]) == 0


@pytest.mark.slow
def test_programs_of_a_config_are_written(tmp_path, monkeypatch):
    config = ("cpu-8", "pythia-14m", {"cores_per_replica": 2, "seq": 64})
    monkeypatch.setattr(hlo_diff, "CONFIGS", {"14M": config})
    path = tmp_path / "a.json"
    hlo_diff.write(path, None)
    programs = json.loads(path.read_text())["programs"]
    assert set(programs) == {"14M, train", "14M, decode"}
    # Two sums of activations per layer, one in each direction, of a step with two microbatches.
    assert any(key.startswith("all-reduce") for key in programs["14M, train"]["collectives"])
