"""Lazy leaves: which parts are read from disk, and when."""

import tracemalloc

import jax
import numpy as np
import pytest

from mesh_transformer.checkpoint import conversion, original
from mesh_transformer.checkpoint.host_arrays import LazyLeaf
from mesh_transformer.checkpoint.state_tree import in_memory
from mesh_transformer.config import Config
from mesh_transformer.mesh.declaration import map_declared
from mesh_transformer.model import transformer
from mesh_transformer.util import InputError

rng = np.random.default_rng(3)


def recording_leaf(values, *, layers):
    """Return a lazy leaf of `values`, and the list of the layers that have been read.

    An entry of None stands for a read of the whole leaf.
    """
    reads = []

    def read(layer):
        reads.append(layer)
        return values if layer is None else values[layer]

    return LazyLeaf(values.shape, values.dtype, read, layers=layers), reads


def test_indexing_reads_only_that_layer():
    values = rng.standard_normal((4, 3, 5), np.float32)
    leaf, reads = recording_leaf(values, layers=True)
    assert (leaf.shape, leaf.dtype, leaf.ndim, leaf.nbytes) == ((4, 3, 5), np.float32, 3, 240)
    assert not reads
    np.testing.assert_array_equal(leaf[2], values[2])
    np.testing.assert_array_equal(leaf[-1], values[-1])
    assert reads == [2, 3]
    with pytest.raises(IndexError):
        leaf[4]


@pytest.mark.parametrize("layers", [True, False])
def test_lazy_leaf_converts_to_an_array(layers):
    values = rng.standard_normal((4, 3), np.float32)
    leaf, reads = recording_leaf(values, layers=layers)
    np.testing.assert_array_equal(np.asarray(leaf), values)
    assert reads == ([0, 1, 2, 3] if layers else [None])
    np.testing.assert_array_equal(leaf[1:, 2], values[1:, 2])
    assert np.asarray(leaf, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="cannot be converted with copy=False"):
        np.array(leaf, copy=False)


def test_per_layer_scalars_are_stacked():
    values = rng.standard_normal(6, np.float32)
    np.testing.assert_array_equal(np.asarray(recording_leaf(values, layers=True)[0]), values)


def test_casts_happen_when_a_layer_is_read():
    values = rng.standard_normal((2, 3), np.float32)
    leaf, reads = recording_leaf(values, layers=True)
    half = leaf.astype(np.dtype(np.float16), "leaf w")
    assert half.dtype == np.float16
    assert leaf.astype(np.dtype(np.float32), "leaf w") is leaf
    assert not reads
    np.testing.assert_array_equal(half[1], values[1].astype(np.float16))
    values[1, 2] = 1e6
    with pytest.raises(InputError, match=r"^leaf w holds 1e\+06, above float16's maximum 65504"):
        half[1]


def test_in_memory_reads_all_lazy_leaves_of_a_state():
    values = rng.standard_normal((2, 3), np.float32)
    step = np.zeros((), np.int32)
    leaf, reads = recording_leaf(values, layers=True)
    state = {"params": {"layers": {"w": leaf}}, "step": step}
    loaded = in_memory(state)
    assert type(loaded["params"]["layers"]["w"]) is np.ndarray
    np.testing.assert_array_equal(loaded["params"]["layers"]["w"], values)
    assert loaded["step"] is step
    assert reads == [0, 1]
    assert in_memory(loaded) is loaded


@pytest.mark.slow
def test_conversion_holds_one_layer_in_memory_at_a_time(tmp_path):
    """The peak memory of original -> native -> hf -> original is below a tenth of the weights."""
    sizes = {"layers": 24, "d_model": 256, "n_heads": 4, "n_vocab": 256}
    config = Config.from_dict(sizes | {"cores_per_replica": 4, "pe_rotary_dims": 32})
    params = map_declared(
        lambda d: rng.standard_normal(d.shape, np.float32), transformer.declarations(config)
    )
    # The hf format folds this bias into the embedding; with zeros the round trip is exact.
    params["embed"]["embedding"]["b"][...] = 0
    start = original.write(
        str(tmp_path / "start"), {"params": params, "step": np.zeros((), np.int32)}, config
    )
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    del params
    options = {"config": config}
    for kind in ("hf", "native"):  # so that the imports are not measured
        conversion.convert(start, "original", tmp_path / f"warm-{kind}", kind, **options)
    tracemalloc.start()
    try:
        conversion.convert(start, "original", tmp_path / "native", "native", **options)
        conversion.convert(tmp_path / "native", "native", tmp_path / "hf", "hf")
        conversion.convert(tmp_path / "hf", "hf", tmp_path / "end", "original", **options)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    largest = 4 * 256 * 1024
    # Several copies of the largest leaf of one layer (as read, converted, queued and written) and
    # 1 MB for everything else.
    assert peak < 6 * largest + 1e6 < weights / 10
    for path in (tmp_path / "start").rglob("*.npz"):
        assert (tmp_path / "end" / path.relative_to(tmp_path / "start")).read_bytes() == (
            path.read_bytes()
        )
