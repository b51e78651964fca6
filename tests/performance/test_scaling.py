"""Estimates on paper against what the TPU compiler reports."""

import pytest

from mesh_transformer.config import Config
from mesh_transformer.families import SIZES
from mesh_transformer.mesh.accelerators import GIB
from mesh_transformer.performance import recipe, search
from mesh_transformer.performance.analytic import estimate_step
from mesh_transformer.performance.topology import topology

# Peaks in GiB per device of plans compiled in full with libtpu 0.0.42.1, which `plan` reports for
# these flags: config, --topology, --mp, --zero, --batch, --accumulate, --remat and whether
# --shard-activations.
PEAKS = [
    ("6B_roto_256", "v3-8", 8, 0, 1, 1, "full", False, 11.73),
    ("6B_roto_256", "v3-8", 8, 0, 1, 4, "dots", False, 14.93),
    ("6B_roto_256", "v3-8", 8, 0, 1, 512, "dots", True, 14.54),
    ("6B_roto_256", "v3-8", 4, 1, 2, 1, "full", False, 15.16),
    ("6B_roto_256", "v3-8", 4, 3, 1, 4, "full", True, 15.81),
    ("6B_roto_256", "v3-8", 2, 3, 2, 1, "full", False, 14.43),
    ("6B_roto_256", "v3-256", 2, 3, 4, 1, "dots", False, 9.81),
    ("6B_roto_256", "v4-8", 4, 0, 2, 256, "dots", True, 29.95),
    ("6B_roto_256", "v4-8", 4, 0, 4, 4, "full", False, 30.17),
    ("6B_roto_256", "v4-8", 2, 3, 2, 4, "full", False, 32.30),
    ("6B_roto_256", "v5e-8", 8, 0, 8, 1, "full", False, 15.07),
    ("6B_roto_256", "v5e-8", 8, 0, 8, 4, "full", True, 14.89),
    ("6B_roto_256", "v5e-8", 8, 0, 2, 256, "dots", True, 15.01),
    ("6B_roto_256", "v5e-256", 4, 1, 8, 1, "dots", True, 13.50),
    ("6B_roto_256", "v5e-8", 2, 3, 2, 4, "full", False, 16.67),
    ("6B_roto_256", "v5e-8", 4, 3, 2, 4, "full", False, 16.51),
    ("6B_roto_256", "v5e-8", 4, 3, 4, 4, "full", True, 16.37),
    ("6B_roto_256", "v5p-16", 1, 1, 4, 4, "dots", False, 68.48),
    ("6B_roto_256", "v5p-16", 1, 1, 8, 4, "dots", False, 83.55),
    ("6B_roto_256", "v5p-16", 1, 3, 8, 4, "dots", False, 46.50),
    ("6B_roto_256", "v5p-64", 1, 1, 8, 2, "none", False, 84.11),
    ("6B_roto_256", "v6e-8", 2, 3, 8, 16, "dots", True, 30.66),
    ("6B_roto_256", "v6e-256", 4, 1, 8, 1, "dots", False, 16.15),
    ("6B_roto_256", "v6e-8", 4, 1, 4, 4, "dots", True, 23.72),
    ("6B_roto_256", "v5e-8", 4, 3, 8, 32, "full", True, 17.03),
    ("6B_roto_256", "v5e-256", 2, 3, 4, 1, "none", True, 12.26),  # loss_chunk 2048, and below
    ("6B_roto_256", "v5e-256", 4, 1, 8, 1, "none", False, 18.83),
    ("6B_roto_256", "v6e-256", 2, 1, 4, 1, "none", True, 22.32),
    ("6B_roto_256", "v6e-256", 2, 3, 4, 1, "none", False, 11.45),
    ("20B", "v4-256", 8, 1, 4, 24, "full", False, 23.60),  # loss_chunk of the config again
    ("40B", "v4-256", 8, 1, 4, 1, "full", False, 26.70),
    ("40B", "v5e-256", 8, 3, 4, 24, "full", False, 8.88),
    ("40B", "v5p-128", 8, 0, 1, 24, "full", False, 93.23),
    ("40B", "v5p-128", 8, 3, 4, 24, "full", False, 18.32),
    ("8B_v5e-256", "v5e-256", 1, 3, 2, 1, "full", False, 13.58),
    ("8B_v6e-8", "v6e-8", 2, 3, 2, 64, "full", False, 29.38),
    ("8B_v5p-64", "v5p-64", 1, 1, 1, 16, "dots", False, 84.96),
    ("70B_v5p-64", "v5p-64", 2, 3, 4, 8, "full", True, 91.94),
]


@pytest.mark.parametrize("row", PEAKS, ids=lambda row: "-".join(map(str, row[:-1])))
def test_the_estimated_memory_is_that_of_the_compiler(row):
    """Estimates may be off by as much as a search allows for.

    One that is too large would hide a setting that fits; one that is too small costs a compilation.
    """
    name, slice_name, mp, zero, batch, accumulation, remat, sharded, peak = row
    slice_ = topology(slice_name)
    config = Config.load(name).replace(
        cores_per_replica=mp,
        tpu_size=slice_.devices,
        zero=zero,
        per_replica_batch=batch,
        gradient_accumulation_steps=accumulation,
        remat=remat,
        shard_activations=sharded,
    )
    estimate = estimate_step(config, slice_.hardware(config.dtype), slice_.devices)
    assert estimate.peak_bytes == pytest.approx(peak * GIB, rel=search.PAPER_ERROR)


@pytest.mark.parametrize(
    ("model", "remat", "peak"),
    [
        ("pythia-410m", "none", 11.78),
        ("pythia-410m", "dots", 9.55),
        ("gpt2-medium", "none", 8.24),
        ("smollm2-135m", "none", 20.24),
    ],
)
def test_heads_of_64_entries_take_the_memory_of_128(model, remat, peak):
    """The peaks, in GiB, are those of `plan` for a v5e-8 with the model on each device."""
    slice_, keys = topology("v5e-8"), {"zero": 0, "per_replica_batch": 4, "remat": remat}
    keys |= {"tpu_size": 8, "cores_per_replica": 1, "gradient_accumulation_steps": 1}
    config = Config.load(None, None, keys, model)
    estimate = estimate_step(config, slice_.hardware(config.dtype), slice_.devices)
    assert estimate.peak_bytes == pytest.approx(peak * GIB, rel=search.PAPER_ERROR)


@pytest.mark.parametrize(("rows", "peak"), [(8, 1494), (64, 10838)])
def test_the_logits_of_a_small_model_are_estimated(rows, peak):
    """The peaks, in MiB, are those of `plan` for a v5e-8 with the model on each device.

    A search and `mesh-transformer config` use the same estimate.
    """
    slice_ = topology("v5e-8")
    architecture = next(size.architecture for size in SIZES if size.name == "tiny")
    keys = {"n_vocab": 50400, "seq": 512, "dtype": "bfloat16", "remat": "none", "tpu_size": 8}
    config = Config(**architecture | keys, cores_per_replica=1, per_replica_batch=rows)
    estimate = estimate_step(config, slice_.hardware(config.dtype), 8).peak_bytes
    # With 50400 tokens and 4 layers of width 128, nearly all of it is logits.
    assert estimate == pytest.approx(peak * 2**20, rel=search.PAPER_ERROR)
    device = recipe.device_of(slice_)
    assert recipe._memory(config, device) == estimate


@pytest.mark.parametrize(("name", "batch", "peak"), [("v5e-8", 16, 14.68), ("v3-8", 8, 12.93)])
def test_what_is_in_host_memory_is_not_estimated(name, batch, peak):
    """The peaks are those of docs/plan.md.  They include the layers that are on their way."""
    slice_ = topology(name)
    config = Config.load("20B").replace(
        cores_per_replica=8,
        tpu_size=8,
        zero=0,
        per_replica_batch=batch,
        gradient_accumulation_steps=1,
        shard_activations=True,
        loss_chunk=128,
        offload="params",
    )
    estimate = estimate_step(config, slice_.hardware(config.dtype), slice_.devices)
    # These layers took up to 2 GiB, a seventh of the peak.
    assert 0.8 * peak * GIB < estimate.peak_bytes < peak * GIB
