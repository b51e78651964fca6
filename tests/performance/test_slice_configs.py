"""The configs of models for one slice or for GPUs, such as `configs/6B_<slice>.json`: they fit."""

import collections
import dataclasses
import json
from pathlib import Path

import pytest

from mesh_transformer.config import Config
from mesh_transformer.config_model import Architecture
from mesh_transformer.families import PRESETS
from mesh_transformer.mesh.accelerators import GENERATIONS, GIB, Hardware, hardware
from mesh_transformer.performance import search
from mesh_transformer.performance.analytic import estimate_step, sequences_per_step
from mesh_transformer.performance.topology import topology
from tests.performance.test_plan import needs_libtpu, run_python

FOLDER = Path(__file__).parents[2] / "configs"
# By the beginning of a config's name: the config or preset whose network it has.
MODELS = {"6B": "6B_roto_256", "8B": "llama3-8b", "70B": "llama3-70b"}
SLICES = {
    path.stem: path.stem.partition("_")[2]
    for path in sorted(FOLDER.glob("*_*-*.json"))
    if path.stem.partition("_")[2].partition("-")[0] in GENERATIONS
}
# By config: the name and number of GPUs, and the GiB that nvidia-smi reports for each.
GPUS = {
    "6B_h100x8": ("h100", 8, 79.6),
    "6B_h200": ("h200", 1, 140.4),
    "8B_h100x8": ("h100", 8, 79.6),
}
GPU_SHARE = 0.95  # of the memory that JAX may use (XLA_PYTHON_CLIENT_MEM_FRACTION)


def devices_of(name: str) -> tuple[Hardware, int, float]:
    """Return the hardware that a config is for, the number of devices, and the bytes of each."""
    if name in GPUS:
        gpu, count, gib = GPUS[name]
        return hardware(gpu), count, GPU_SHARE * gib * GIB
    slice_ = topology(SLICES[name])
    return slice_.hardware("bfloat16"), slice_.devices, slice_.hbm


def model_of(name: str) -> str:
    return MODELS[name.partition("_")[0]]


def test_there_are_configs_for_several_slices():
    counts = collections.Counter(map(model_of, (*SLICES, *GPUS)))
    assert counts == {"6B_roto_256": 10, "llama3-8b": 5, "llama3-70b": 2}


@pytest.mark.parametrize("name", [*SLICES, *GPUS])
def test_a_config_trains_the_same_model_as_the_others(name):
    """Only the keys that a search chooses differ from GPT-J-6B's own config or the first one."""
    model = model_of(name)
    first = next(other for other in (*SLICES, *GPUS) if model_of(other) == model)
    own, expected = Config.load(name), Config.load(first if model in PRESETS else model)
    changed = {
        field.name
        for field in dataclasses.fields(Config)
        if getattr(own, field.name) != getattr(expected, field.name)
    }
    searched = {*search.SEARCHED_KEYS, "shard_activations", "loss_chunk", "tpu_size", "offload"}
    assert changed <= searched
    assert sequences_per_step(own) == sequences_per_step(expected) == 512
    assert own.tpu_size == devices_of(name)[1]
    network = Config.load(model).replace(seq=own.seq)
    for field in dataclasses.fields(Architecture):
        assert getattr(own, field.name) == getattr(network, field.name), field.name


@pytest.mark.parametrize("name", [*SLICES, *GPUS])
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
    gpt_j = [name for name in SLICES if model_of(name) == "6B_roto_256" and name.endswith("-8")]
    small = [name for name in gpt_j if Config.load(name).zero != 3]
    lines = run_python("-c", COMPILED, *small).stdout.splitlines()
    results = [json.loads(line) for line in lines]
    assert [name for name, _, _ in results] == small
    for name, fits, peak in results:
        config, slice_ = Config.load(name), topology(SLICES[name])
        estimate = estimate_step(config, slice_.hardware(config.dtype), slice_.devices)
        assert fits, name
        # Reduced optimisation changes the peak by at most 8 percent.
        assert estimate.peak_bytes == pytest.approx(peak, rel=0.08), name
