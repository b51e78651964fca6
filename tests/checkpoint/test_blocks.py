"""Blocks of a state: who keeps them, and states put together from them on other meshes."""

import functools
import math
import types
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

from mesh_transformer.checkpoint import blocks
from mesh_transformer.checkpoint.state_tree import leaves
from mesh_transformer.config import Config
from mesh_transformer.transformer_shard import CausalTransformer
from tests.conftest import random_batch
from tests.support.small_run import VALUES

CONFIG = Config(**VALUES)


class FakeDevice:
    def __init__(self, process: int):
        self.process_index = process


def fake_leaf(shape: tuple[int, ...], cuts: tuple[int, ...], owners: list[list[int]]) -> Any:
    """Return a leaf that is cut into a grid; `owners` has the processes that hold each part."""
    bounds = [np.linspace(0, n, cut + 1).astype(int) for n, cut in zip(shape, cuts, strict=True)]
    devices = {}
    for part, place in enumerate(np.ndindex(cuts)):
        index = tuple(slice(b[i], b[i + 1]) for b, i in zip(bounds, place, strict=True))
        devices |= {FakeDevice(process): index for process in owners[part]}
    sharding = types.SimpleNamespace(devices_indices_map=lambda shape: devices)
    return types.SimpleNamespace(shape=shape, dtype=np.dtype(np.float32), sharding=sharding)


LAYOUTS = {
    "one process": (1, [[0] * 2] * 8),
    "every process holds all": (4, [[0, 1, 2, 3]] * 8),
    "each part in one process": (4, [[0], [0], [1], [1], [2], [2], [3], [3]]),
    "each part in two of six": (6, [[n % 3, 3 + n % 3] for n in range(8)]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_is_complete_without_any_one_process(layout, monkeypatch):
    processes, owners = LAYOUTS[layout]
    monkeypatch.setattr(blocks, "MOST_BYTES", 100)
    state = {
        "params": {"w": fake_leaf((16, 6, 4), (4, 1, 2), owners)},
        "step": fake_leaf((), (), [list(range(processes))]),
    }
    plan = blocks.plan(state, processes)
    for path, leaf in leaves(state).items():
        counted = np.zeros(leaf.shape, int)
        for block in plan:
            if block.path == path:
                counted[
                    block.slices_in(blocks.Block(path, (0,) * len(leaf.shape), leaf.shape))
                ] += 1
        assert (counted == 1).all()  # no position is missing, none is kept as two blocks
    devices = {
        block: {device.process_index for device, index in holders.items() if within(block, index)}
        for block in plan
        for holders in [leaves(state)[block.path].sharding.devices_indices_map(None)]
    }
    for block, keepers in plan.items():
        assert len(keepers) == min(2, processes)
        assert set(keepers.values()) <= devices[block], "a process sends what it does not hold"
        assert all(
            sender == keeper for keeper, sender in keepers.items() if keeper in devices[block]
        )
        rows_of_100_bytes = 100 // (4 * math.prod(block.shape[1:]))
        assert not block.shape or block.shape[0] <= max(1, rows_of_100_bytes)
    kept: Counter[int] = Counter()
    for block, keepers in plan.items():
        kept.update(dict.fromkeys(keepers, 4 * math.prod(block.shape)))
    assert max(kept.values()) - min(kept.values()) <= 2 * 100, kept  # two blocks


def within(block: blocks.Block, index: tuple[slice, ...]) -> bool:
    return all(
        part.start <= start and stop <= part.stop
        for start, stop, part in zip(block.start, block.stop, index, strict=True)
    )


EVERY_KEY = {"early_cast": True, "skip_spikes": 8.0}  # bfloat16 leaves, and all keys of a state
MESHES = {
    "8 along mp": {"cores_per_replica": 8},
    "2 replicas, ZeRO 1": {"cores_per_replica": 4, "zero": 1},
    "4 replicas, ZeRO 3": {"cores_per_replica": 2, "zero": 3},
}


@functools.cache
def trained_state(mesh: str) -> Any:
    """Return the state on a mesh after a training step."""
    model = CausalTransformer(CONFIG.replace(**EVERY_KEY, **MESHES[mesh]))
    model.train(random_batch(CONFIG, 2, model.batch_size))
    return model.saved_state()


@pytest.mark.slow
@pytest.mark.parametrize("after", MESHES)
@pytest.mark.parametrize("before", MESHES)
def test_blocks_of_one_mesh_make_the_same_state_on_another(before, after, monkeypatch):
    monkeypatch.setattr(blocks, "MOST_BYTES", 2048)
    state = trained_state(before)
    expected = {path: np.array(leaf) for path, leaf in leaves(state).items()}
    stored = {block: content for block, _, content in blocks.copied(state, blocks.plan(state, 1))}
    assert max(content.size for content in stored.values()) <= 2048
    assert sum(content.size for content in stored.values()) == sum(
        leaf.nbytes for leaf in expected.values()
    )
    other = CausalTransformer(CONFIG.replace(**EVERY_KEY, **MESHES[after]), init=False)
    asked = []

    def read(wanted):
        asked.extend(wanted)
        return [stored[block] for block in wanted]

    template = other.saved_template()
    assembled = blocks.assemble(template, stored, read)
    assert len(asked) == len(set(asked)) == len(stored)
    assert jax.tree.structure(assembled) == jax.tree.structure(template)
    for path, leaf in leaves(assembled).items():
        assert leaf.sharding == leaves(template)[path].sharding
        assert leaf.dtype == expected[path].dtype
        assert np.asarray(leaf).tobytes() == expected[path].tobytes(), path
