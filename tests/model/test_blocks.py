"""Layers of rows that no published model has: the code knows blocks only by their attributes."""

import functools
import random

import pytest

from mesh_transformer.families import BLOCKS, INITIAL_VALUES, MATRICES, Block
from mesh_transformer.model import flops, transformer
from tests.model import test_parameters
from tests.training import test_step


def random_row(seed: int) -> Block:
    draw = random.Random(seed)
    parallel = draw.random() < 0.5
    return Block(
        "parallel" if parallel else "sequential",
        ff_norm=not parallel or draw.random() < 0.5,
        biases=tuple(name for name in MATRICES if draw.random() < 0.5),
        joint_bias=draw.random() < 0.5,
        biased_ends=draw.random() < 0.5,
        initial=draw.choice(list(INITIAL_VALUES)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_any_row_trains_on_2x4_like_on_one_device(monkeypatch, seed):
    monkeypatch.setitem(BLOCKS, "gptj", random_row(seed))
    fresh = functools.cache(transformer._declared.__wrapped__)
    monkeypatch.setattr(transformer, "_declared", fresh)
    config = test_step.small_config(seed=1000 + seed, remat=("full", "dots", "none")[seed % 3])
    test_parameters.test_documented_shapes_and_layouts_match_the_declarations(
        {"seed": config.seed, "norm": "rmsnorm"}
    )
    ends = 2 * config.n_vocab * config.d_model
    assert flops.matmul_params(config) - ends == config.layers * 12 * config.d_model**2
    expected = test_step.run(config.replace(partitioning="jit"))
    mesh = test_step.on_mesh(config, ("shard_map", "jit")[seed % 2], 4, (0, 1, 3)[seed % 3])
    test_step.check_agreement(mesh, expected, 2, 4)
