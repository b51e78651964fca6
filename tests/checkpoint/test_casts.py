"""No number becomes infinite on its way between dtypes, whichever format holds it."""

import os

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike

from mesh_transformer.checkpoint import conversion, hf, native_state, original
from mesh_transformer.checkpoint.host_arrays import FLOATS, cast
from mesh_transformer.checkpoint.source import FORMATS, Source
from mesh_transformer.mesh.declaration import map_declared
from mesh_transformer.model import gptj
from mesh_transformer.util import InputError


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (2, 0, 4)])
@pytest.mark.parametrize("source", FLOATS.values())
@pytest.mark.parametrize("target", FLOATS.values())
def test_a_cast_is_numpy_s(shape, source, target):
    value = np.random.default_rng(0).normal(size=shape).astype(source)
    found = cast(value, target, "leaf")
    assert found.dtype == target
    assert found.tobytes() == value.astype(target).tobytes()


@pytest.mark.parametrize("place", [(0, 0, 0), (1, 2, 3)])
@pytest.mark.parametrize(
    ("largest", "source", "target", "line"),
    [
        (
            -65520,
            "f32",
            "f16",
            "leaf holds 65520, above float16's maximum 65504; choose f.*32 or bf",
        ),
        (
            65536,
            "bf16",
            "f16",
            "leaf holds 65536, above float16's maximum 65504; choose f.*32 or bf",
        ),
        (
            3.4e38,
            "f32",
            "bf16",
            r"leaf holds 3.4e\+38, above bfloat16's maximum 3.3.*; choose float32",
        ),
    ],
)
def test_what_is_too_large_is_refused(place, largest, source, target, line):
    value = np.zeros((2, 3, 4), FLOATS[source])
    value[place] = largest
    value[0, 1, :2] = np.inf, np.nan
    with pytest.raises(InputError, match=line):
        cast(value, FLOATS[target], "leaf")
    value[place] = np.copysign(np.inf, largest)  # infinite before, infinite after
    found = cast(value, FLOATS[target], "leaf")
    # In f32, as numpy's comparison knows no NaN of bfloat16's.
    np.testing.assert_array_equal(found.astype(np.float32), value.astype(np.float32))


def weights(config, dtype: DTypeLike = np.float32):
    """Random weights that every format holds: without a bias of the embedding."""
    rng = np.random.default_rng(0)
    params = map_declared(
        lambda d: rng.normal(size=d.shape).astype(dtype), gptj.declarations(config)
    )
    params["embed"]["embedding"]["b"][...] = 0
    return {"params": params, "step": np.zeros((), np.int32)}


def write(folder, kind, state, config):
    if kind == "hf":
        hf.write(folder, state, config)
    else:
        {"native": native_state, "original": original}[kind].write(folder, state, config)


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", FORMATS)
def test_every_pair_of_formats_refuses_what_f16_cannot_hold(small, source, target, tmp_path):
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
    _, found = conversion.read(Source(end, source), config, dtype=np.float16)
    expected = state["params"]["layers"]["layer/q"]["w"].astype(np.float16)
    np.testing.assert_array_equal(found["params"]["layers"]["layer/q"]["w"], expected)


def test_a_sum_of_f16_shares_may_be_too_large_for_it(small, tmp_path):
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


def test_a_bias_folded_into_f16_may_be_too_large_for_it(small, tmp_path):
    config = small(layers=1)
    state = weights(config, np.float16)
    state["params"]["embed"]["embedding"]["w"][7, 3] = 4e4
    state["params"]["embed"]["embedding"]["b"][3] = 3e4
    with pytest.raises(
        InputError, match=r"wte\.weight holds 70\d\d\d, above float16's maximum 65504"
    ):
        hf.write(str(tmp_path / "hf"), state, config)
    assert not os.listdir(tmp_path)
