"""GPT-J-6B's configs for one slice or for GPUs, `configs/6B_<slice>.json`: they fit."""

import dataclasses
import json
from pathlib import Path

import pytest

from mesh_transformer.config import Config
from mesh_transformer.mesh.accelerators import GENERATIONS, GIB, Hardware, hardware
from mesh_transformer.performance import search
from mesh_transformer.performance.analytic import estimate_step, sequences_per_step
from mesh_transformer.performance.topology import Topology, topology
from tests.performance.test_plan import needs_libtpu, run_python

FOLDER = Path(__file__).parents[2] / "configs"
NAMES = sorted(
    path.stem
    for path in FOLDER.glob("6B_*-*.json")
    if path.stem.removeprefix("6B_").partition("-")[0] in GENERATIONS
)
# By config: the name and number of GPUs, and the GiB that nvidia-smi reports for each.
GPUS = {"6B_h100x8": ("h100", 8, 79.6), "6B_h200": ("h200", 1, 140.4)}
GPU_SHARE = 0.95  # of the memory that JAX may use (XLA_PYTHON_CLIENT_MEM_FRACTION)


def slice_of(name: str) -> Topology:
    return topology(name.removeprefix("6B_"))


def devices_of(name: str) -> tuple[Hardware, int, float]:
    """Return the hardware that a config is for, the number of devices, and the bytes of each."""
    if name in GPUS:
        gpu, count, gib = GPUS[name]
        return hardware(gpu), count, GPU_SHARE * gib * GIB
    slice_ = slice_of(name)
    return slice_.hardware("bfloat16"), slice_.devices, slice_.hbm


def test_there_are_configs_for_several_slices():
    assert len(NAMES) >= 5


@pytest.mark.parametrize("name", [*NAMES, *GPUS])
def test_a_config_trains_as_gpt_j_was_trained(name):
    """Only the keys that a search chooses differ from GPT-J-6B's own config."""
    own, original = Config.load(name), Config.load("6B_roto_256")
    changed = {
        field.name
        for field in dataclasses.fields(Config)
        if getattr(own, field.name) != getattr(original, field.name)
    }
    assert changed <= {*search.SEARCHED_KEYS, "shard_activations", "loss_chunk", "tpu_size"}
    assert sequences_per_step(own) == sequences_per_step(original)
    assert own.tpu_size == devices_of(name)[1]


@pytest.mark.parametrize("name", [*NAMES, *GPUS])
def test_a_config_fits_on_paper(name):
    """Up to the error that the estimate has; the compiler decides."""
    kind, devices, limit = devices_of(name)
    estimate = estimate_step(Config.load(name), kind, devices)
    assert estimate.peak_bytes <= (1 + search.PAPER_ERROR) * limit


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
        assert estimate.peak_bytes == pytest.approx(peak, rel=0.08), name
