"""Casts between dtypes, which never turn a finite number into infinity, in every format."""

import os

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike

from mesh_transformer.checkpoint import conversion, hf, native_state, original
from mesh_transformer.checkpoint.formats import FORMATS
from mesh_transformer.checkpoint.host_arrays import FLOATS, cast
from mesh_transformer.checkpoint.source import Source
from mesh_transformer.mesh.declaration import map_declared
from mesh_transformer.model import transformer
from mesh_transformer.util import InputError


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (2, 0, 4)])
@pytest.mark.parametrize("source", FLOATS.values())
@pytest.mark.parametrize("target", FLOATS.values())
def test_cast_matches_numpys_cast(shape, source, target):
    value = np.random.default_rng(0).normal(size=shape).astype(source)
    actual = cast(value, target, "leaf")
    assert actual.dtype == target
    assert actual.tobytes() == value.astype(target).tobytes()


@pytest.mark.parametrize("index", [(0, 0, 0), (1, 2, 3)])
@pytest.mark.parametrize(
    ("largest", "source", "target", "line"),
    [
        (
            -65520,
            "f32",
            "f16",
            "leaf holds 65520, above float16's maximum 65504; choose dtype f.*32 or bf",
        ),
        (
            65536,
            "bf16",
            "f16",
            "leaf holds 65536, above float16's maximum 65504; choose dtype f.*32 or bf",
        ),
        (
            3.4e38,
            "f32",
            "bf16",
            r"leaf holds 3.4e\+38, above bfloat16's maximum 3.3.*; choose dtype float32",
        ),
    ],
)
def test_values_above_the_maximum_of_a_dtype_are_refused(index, largest, source, target, line):
    value = np.zeros((2, 3, 4), FLOATS[source])
    value[index] = largest
    value[0, 1, :2] = np.inf, np.nan
    with pytest.raises(InputError, match=line):
        cast(value, FLOATS[target], "leaf")
    value[index] = np.copysign(np.inf, largest)  # infinities stay infinite
    actual = cast(value, FLOATS[target], "leaf")
    # Compared in f32, because numpy's comparison does not recognise NaNs of bfloat16.
    np.testing.assert_array_equal(actual.astype(np.float32), value.astype(np.float32))


def weights(config, dtype: DTypeLike = np.float32):
    """Random weights with an embedding bias of zero, which every format can represent."""
    rng = np.random.default_rng(0)
    params = map_declared(
        lambda d: rng.normal(size=d.shape).astype(dtype), transformer.declarations(config)
    )
    params["embed"]["embedding"]["b"][...] = 0
    return {"params": params, "step": np.zeros((), np.int32)}


def write(folder, kind, state, config):
    if kind == "hf":
        hf.write(folder, state, config)
    else:
        {"native": native_state, "original": original}[kind].write(folder, state, config)


@pytest.mark.quick(3)
@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", FORMATS)
def test_every_pair_of_formats_refuses_values_too_large_for_f16(small, source, target, tmp_path):
    config = small(layers=1)
    state = weights(config)
    state["params"]["layers"]["layer/q"]["w"][0, 3, 4] = 1e6
    path, end = str(tmp_path / source), str(tmp_path / f"to_{target}")
    write(path, source, state, config)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(
        InputError, match=f"{path}.* holds 1e\\+06, above float16's maximum"
    ) as caught:
        conversion.convert(path, source, end, target, config=config, dtype=np.float16)
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == before
    state["params"]["layers"]["layer/q"]["w"][0, 3, 4] = np.inf
    write(end, source, state, config)
    _, loaded = conversion.read(Source(end, source), config, dtype=np.float16)
    expected = state["params"]["layers"]["layer/q"]["w"].astype(np.float16)
    np.testing.assert_array_equal(loaded["params"]["layers"]["layer/q"]["w"], expected)


def test_sum_of_f16_shares_too_large_for_f16_is_refused(small, tmp_path):
    config = small(layers=1, norm="rmsnorm", cores_per_replica=4)
    folder = original.write(str(tmp_path / "f16"), weights(config, np.float16), config)
    for number in range(4):
        path = f"{folder}/shard_{number}/0.npz"
        with np.load(path) as archive:
            arrays = dict(archive)
        arrays["arr_0"][5] = 24992
        np.savez(path, **arrays)
    with pytest.raises(InputError, match=r"linear b\) holds 99968, above float16's maximum 65504"):
        original.read(folder, config)
    wide = original.read(folder, config, dtype=ml_dtypes.bfloat16)
    assert wide["params"]["embed"]["embedding"]["b"][5] == ml_dtypes.bfloat16(1e5)


def test_sum_of_embedding_and_bias_too_large_for_f16_is_refused(small, tmp_path):
    config = small(layers=1)
    state = weights(config, np.float16)
    state["params"]["embed"]["embedding"]["w"][7, 3] = 4e4
    state["params"]["embed"]["embedding"]["b"][3] = 3e4
    with pytest.raises(
        InputError, match=r"wte\.weight holds 70\d\d\d, above float16's maximum 65504"
    ):
        hf.write(str(tmp_path / "hf"), state, config)
    assert not os.listdir(tmp_path)
