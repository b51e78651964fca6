"""Checks of the arguments of `generate`, before they reach a device."""

import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.generation.prompts import check_prompts
from mesh_transformer.util import InputError

CTX = np.arange(8).reshape(2, 4)


WHOLE = "expected 2 whole numbers, one for each prompt"


@pytest.mark.parametrize(
    ("ctx", "ctx_length", "gen_length", "message"),
    [
        (CTX, [1, 5], 3, "ctx_length has values from 1 to 5, expected 1 to 4, the width of ctx"),
        (CTX, [0, 4], 3, "ctx_length has values from 0 to 4, expected 1 to 4, the width of ctx"),
        (CTX, [1, 4.5], 3, f"ctx_length is [1, 4.5], {WHOLE}"),
        (
            CTX,
            [1, float("nan")],
            3,
            f"ctx_length is [1, nan], {WHOLE}",
        ),
        (
            CTX,
            [1, None],
            3,
            f"ctx_length is [1, None], {WHOLE}",
        ),
        (
            CTX,
            ["1", "2"],
            3,
            f"ctx_length is ['1', '2'], {WHOLE}",
        ),
        (CTX, [[1], [2, 3]], 3, "ctx_length is [[1], [2, 3]], expected rows of equal length"),
        (CTX, None, 3, "ctx has shape (2, 4) and ctx_length (), expected [B, T] and [B]"),
        ([[1], [2, 3]], [1, 1], 3, "ctx is [[1], [2, 3]], expected rows of equal length"),
        (None, [1, 1], 3, "ctx has shape () and ctx_length (2,), expected [B, T] and [B]"),
        (CTX, [1, 4], None, "gen_length is None, expected a whole number, at least 1"),
        (CTX, [1, 4], "3", "gen_length is '3', expected a whole number, at least 1"),
        (CTX, [1, 4], 3.0, "gen_length is 3.0, expected a whole number, at least 1"),
        (CTX, [1, 4], 0, "gen_length is 0, expected at least 1"),
    ],
)
def test_wrong_arguments_are_input_errors(ctx, ctx_length, gen_length, message):
    with pytest.raises(InputError) as error:
        check_prompts(ctx, ctx_length, gen_length)
    assert str(error.value) == f"generate: {message}"


@pytest.mark.parametrize("kind", [list, np.uint32, np.float64, jnp.array])
def test_prompts_lose_their_padding(kind):
    length = [1, 4] if kind is list else kind([1, 4])
    first, second = check_prompts(CTX.tolist(), length, np.int32(3))
    assert (first.tolist(), second.tolist()) == ([3], [4, 5, 6, 7])
    check_prompts(CTX, length, jnp.int32(3))
