"""Leaves on the disk: what is read of them, and when."""

import tracemalloc

import jax
import numpy as np
import pytest

from mesh_transformer.checkpoint import conversion, original
from mesh_transformer.checkpoint.host_arrays import LazyLeaf, in_memory
from mesh_transformer.config import Config
from mesh_transformer.mesh.declaration import map_declared
from mesh_transformer.model import gptj
from mesh_transformer.util import InputError

rng = np.random.default_rng(3)


def recorded(values, *, layers):
    """A lazy leaf of these values, and which of its layers were read."""
    asked = []

    def read(layer):
        asked.append(layer)
        return values if layer is None else values[layer]

    return LazyLeaf(values.shape, values.dtype, read, layers=layers), asked


def test_a_layer_is_read_alone():
    values = rng.standard_normal((4, 3, 5), np.float32)
    leaf, asked = recorded(values, layers=True)
    assert (leaf.shape, leaf.dtype, leaf.ndim, leaf.nbytes) == ((4, 3, 5), np.float32, 3, 240)
    assert not asked
    np.testing.assert_array_equal(leaf[2], values[2])
    np.testing.assert_array_equal(leaf[-1], values[-1])
    assert asked == [2, 3]
    with pytest.raises(IndexError):
        leaf[4]


@pytest.mark.parametrize("layers", [True, False])
def test_all_of_it_is_an_array(layers):
    values = rng.standard_normal((4, 3), np.float32)
    leaf, asked = recorded(values, layers=layers)
    np.testing.assert_array_equal(np.asarray(leaf), values)
    assert asked == ([0, 1, 2, 3] if layers else [None])
    np.testing.assert_array_equal(leaf[1:, 2], values[1:, 2])
    assert np.asarray(leaf, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="without a copy"):
        np.array(leaf, copy=False)


def test_scalars_of_layers_are_stacked():
    values = rng.standard_normal(6, np.float32)
    np.testing.assert_array_equal(np.asarray(recorded(values, layers=True)[0]), values)


def test_casts_happen_on_reading():
    values = rng.standard_normal((2, 3), np.float32)
    leaf, asked = recorded(values, layers=True)
    half = leaf.astype(np.dtype(np.float16), "leaf w")
    assert half.dtype == np.float16
    assert leaf.astype(np.dtype(np.float32), "leaf w") is leaf
    assert not asked
    np.testing.assert_array_equal(half[1], values[1].astype(np.float16))
    values[1, 2] = 1e6
    with pytest.raises(InputError, match=r"^leaf w holds 1e\+06, above float16's maximum 65504"):
        half[1]


def test_a_state_is_read_into_memory():
    values = rng.standard_normal((2, 3), np.float32)
    step = np.zeros((), np.int32)
    leaf, asked = recorded(values, layers=True)
    state = {"params": {"layers": {"w": leaf}}, "step": step}
    found = in_memory(state)
    assert type(found["params"]["layers"]["w"]) is np.ndarray
    np.testing.assert_array_equal(found["params"]["layers"]["w"], values)
    assert found["step"] is step
    assert asked == [0, 1]
    assert in_memory(found) is found


def test_a_conversion_holds_a_layer_at_a_time(tmp_path):
    """original -> hf -> original, of a model whose layers are 20 times what either may hold."""
    sizes = {"layers": 24, "d_model": 256, "n_heads": 4, "n_vocab": 256}
    config = Config.from_dict(sizes | {"cores_per_replica": 4, "pe_rotary_dims": 32})
    params = map_declared(
        lambda d: rng.standard_normal(d.shape, np.float32), gptj.declarations(config)
    )
    params["embed"]["embedding"]["b"][...] = 0  # which is folded in: the way back is exact
    start = original.write(
        str(tmp_path / "start"), {"params": params, "step": np.zeros((), np.int32)}, config
    )
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    del params
    options = {"config": config}
    for kind in ("hf", "native"):  # and their imports
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
    # The largest leaf of a layer as it is read, made of that, waiting, and written; 1 MB for all
    # else.
    assert peak < 6 * largest + 1e6 < weights / 10
    for path in (tmp_path / "start").rglob("*.npz"):
        assert (tmp_path / "end" / path.relative_to(tmp_path / "start")).read_bytes() == (
            path.read_bytes()
        )
