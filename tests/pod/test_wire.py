"""Values survive the way to another process, and bytes from strangers run no code."""

import contextlib
import pickle

import jax.numpy as jnp
import msgpack
import numpy as np
import pytest

from mesh_transformer.generation.batch import Decode, Insert, NewBatch, Score
from mesh_transformer.generation.pool import Chunks, Pool
from mesh_transformer.generation.sampling import sampler_settings
from mesh_transformer.network import Eval, Load, Restore, Save, Train, Wait
from mesh_transformer.pod.faults import PermanentError, RaisedError
from mesh_transformer.pod.runner import MeshPlace, StepReport
from mesh_transformer.pod.wire import OBJECT, decode, encode
from mesh_transformer.util import DamagedError, InputError, NonFiniteError

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 64, (2, 3, 5)).astype(np.uint32)
VALUES = {
    "plain": [None, True, -3, 2.5, "é", b"\0", [1, [2]], {"a": {3: "b"}}],
    "tuples": ((1, 2), [()], {"a": (1, [2, (3,)])}),
    "arrays": [
        RNG.normal(size=(2, 0, 3)),
        np.asarray(RNG.normal(size=4), jnp.bfloat16),
        np.float32(0.1),
        np.bool_(1),
        jnp.arange(3),
        TOKENS[:, ::2],
    ],
    "training": [Train(None), Train({"obs": TOKENS}), Eval({"obs": TOKENS[0]}), Wait()],
    "state": [
        Load("/m", True, False),
        Restore("gs://b/m", None),
        Save("/m", {"best": {"loss": 0.5}}),
    ],
    "generation": [
        NewBatch(2, Pool(8, 4), 0),
        Score(TOKENS[0], 2, None, 1),
        Insert(
            row_P=np.arange(2),
            tokens_PT=TOKENS[0],
            length_P=np.array([1, 5]),
            settings=sampler_settings({"temp": 0.5, "logit_bias": {3: 1.5}}, 2),
            chunks=Chunks(*[np.arange(2)] * len(Chunks._fields)),
            allowed={1: RNG.integers(0, 2, 64) > 0},
            alternatives=None,
            width=16,
            most=2,
            reach=None,
        ),
        Decode(np.array([3, 0]), None, 4, 2, 0, 9),
    ],
    "members": [
        MeshPlace("10.0.0.2", "10.0.0.1:80", 2, 10),
        StepReport(3, 0.5, {"loss": float("nan")}, 1, False),
    ],
    "errors": [
        InputError("no such file"),
        DamagedError("step_9 is damaged", "/m/step_9", "step_6"),
        NonFiniteError("NaN"),
        PermanentError("full"),
        RaisedError("host 1: KeyError"),
    ],
}


def assert_same(actual: object, expected: object) -> None:
    """Compare two values, with the types of all their parts and the bits of their arrays."""
    if isinstance(expected, jnp.ndarray):
        expected = np.asarray(expected)
    assert type(actual) is type(expected)
    if isinstance(expected, np.ndarray | np.generic):
        assert isinstance(actual, np.ndarray | np.generic)
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.tobytes() == expected.tobytes()
    elif isinstance(expected, dict):
        assert isinstance(actual, dict)
        assert_same(list(actual.items()), list(expected.items()))
    elif isinstance(expected, list | tuple):
        assert isinstance(actual, list | tuple)
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, BaseException) or hasattr(expected, "__dataclass_fields__"):
        args = expected.args if isinstance(expected, BaseException) else ()
        assert getattr(actual, "args", ()) == args
        assert_same(vars(actual), vars(expected))
    else:
        assert actual == expected or expected != expected


@pytest.mark.parametrize("name", VALUES)
def test_values_are_equal_after_the_way(name):
    assert_same(decode(encode(VALUES[name])), VALUES[name])


def test_arrays_can_be_written_to():
    decode(encode(np.zeros(3)))[0] = 1


@pytest.mark.parametrize("value", [object(), pickle.Pickler, np.array([None]), {1, 2}, 1j])
def test_other_objects_are_refused_by_the_sender(value):
    with pytest.raises(TypeError, match="a message cannot contain"):
        encode([value])


@pytest.mark.parametrize(
    "named",
    [
        ("os", "system", ["true"]),
        ("subprocess", "Popen", [["true"]]),
        ("mesh_transformer.util", "exit_now", ["", 0]),
        ("mesh_transformer.util", "os", []),
        ("mesh_transformer.util", "Any", []),
        ("mesh_transformer.nothing", "Call", []),
        ("mesh_transformer.pod.cluster", "TPUCluster", []),
        ("mesh_transformer.network", "Save", [1, 2, 3, 4]),
        ("mesh_transformer.pod.every_host", "ConnectedMember", ["a", None, None]),
    ],
)
def test_bytes_of_strangers_make_no_other_objects(named):
    content = msgpack.packb(msgpack.ExtType(OBJECT, encode(list(named))))
    assert content is not None
    with pytest.raises(ValueError, match="not a message"):
        decode(content)


@pytest.mark.parametrize("seed", range(20))
def test_damaged_bytes_are_an_error_or_another_value(seed):
    rng = np.random.default_rng(seed)
    content = bytearray(encode(VALUES[list(VALUES)[seed % len(VALUES)]]))
    for _ in range(200):
        damaged = content.copy()
        damaged[rng.integers(len(damaged))] = rng.integers(256)
        with contextlib.suppress(ValueError):
            decode(bytes(damaged[: rng.integers(1, len(damaged) + 1)]))
