"""GPT-J-6B's configs for single slices, `configs/6B_<slice>.json`: same training, and they fit."""

import dataclasses
import json
from pathlib import Path

import pytest

from mesh_transformer.config import Config
from mesh_transformer.mesh.accelerators import GENERATIONS
from mesh_transformer.performance import search
from mesh_transformer.performance.scaling import estimate_step, sequences_per_step
from mesh_transformer.performance.topology import Topology, topology
from tests.performance.test_plan import needs_libtpu, run_python

FOLDER = Path(__file__).parents[2] / "configs"
NAMES = sorted(
    path.stem
    for path in FOLDER.glob("6B_*-*.json")
    if path.stem.removeprefix("6B_").partition("-")[0] in GENERATIONS
)


def slice_of(name: str) -> Topology:
    return topology(name.removeprefix("6B_"))


def test_there_are_configs_for_several_slices():
    assert len(NAMES) >= 5


@pytest.mark.parametrize("name", NAMES)
def test_a_slice_config_trains_as_gpt_j_was_trained(name):
    """Only the keys that a search chooses differ from GPT-J-6B's own config."""
    own, original = Config.load(name), Config.load("6B_roto_256")
    changed = {
        field.name
        for field in dataclasses.fields(Config)
        if getattr(own, field.name) != getattr(original, field.name)
    }
    assert changed <= {*search.SEARCHED_KEYS, "shard_activations", "tpu_size"}
    assert sequences_per_step(own) == sequences_per_step(original)
    assert own.tpu_size == slice_of(name).devices


@pytest.mark.parametrize("name", NAMES)
def test_a_slice_config_fits_on_paper(name):
    """Up to the error that the estimate has; the compiler decides."""
    config, slice_ = Config.load(name), slice_of(name)
    estimate = estimate_step(config, slice_.hardware(config.dtype), slice_.devices)
    assert estimate.memory_bytes <= (1 + search.PAPER_ERROR) * slice_.hbm


COMPILED = """
import json, sys
from mesh_transformer.config import Config
from mesh_transformer.performance.plan import plan
from mesh_transformer.performance.topology import topology

for name in sys.argv[1:]:
    result = plan(Config.load(name), topology(name.removeprefix("6B_")), fast=True)
    print(json.dumps([name, result.fits, result.peak_bytes]))
"""


@needs_libtpu
@pytest.mark.slow
def test_the_compiler_fits_the_configs_of_small_slices():
    """Compile quickly, except with ZeRO 3, where quick compilation needs less memory."""
    small = [name for name in NAMES if name.endswith("-8") and Config.load(name).zero != 3]
    lines = run_python("-c", COMPILED, *small).stdout.splitlines()
    results = [json.loads(line) for line in lines]
    assert [name for name, _, _ in results] == small
    for name, fits, peak in results:
        config, slice_ = Config.load(name), slice_of(name)
        estimate = estimate_step(config, slice_.hardware(config.dtype), slice_.devices)
        assert fits, name
        # Reduced optimisation changes the peak by at most 8 percent.
        assert estimate.memory_bytes == pytest.approx(peak, rel=0.08), name
