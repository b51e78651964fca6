"""The parameter table in the docstring of `model.transformer` against the code."""

import math
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mesh_transformer.checkpoint.state_tree import leaves
from mesh_transformer.config import Config
from mesh_transformer.families import BLOCKS, NORMS
from mesh_transformer.mesh.declaration import is_declaration
from mesh_transformer.model import transformer
from tests.conftest import SMALL

TRUNCATED = 0.8796  # standard deviation of a standard normal distribution truncated at two sigma
CONFIGS: list[dict[str, Any]] = [{"norm": norm} for norm in NORMS]
CONFIGS += [{"block": "geglu", "pe": "t5"}, {"pe": "fixed"}, *({"block": name} for name in BLOCKS)]
CONFIGS += [{"block": "neox", "tie_head": True, "pe": "fixed", "norm": "layernorm-desync"}]
CONFIGS += [{"block": "gpt2", "tie_head": False, "norm": "rmsnorm-bias"}, {"tie_head": True}]
LLAMA: dict[str, Any] = {"block": "llama", "key_heads": 4, "ff_size": 36}
CONFIGS += [LLAMA | {"qk_norm": "head", "norm_place": "both", "biases": ["q", "gate", "o"]}]
CONFIGS += [LLAMA | {"qk_norm": "projection", "norm_place": "after", "tie_head": True}]
CONFIGS += [LLAMA | {"qk_norm": "rotated", "norm": "rms-plain", "biases": ["k", "v", "fc", "out"]}]
CONFIGS += [LLAMA | {"norm": "rms-plus-one", "embed_norm": True}]


def rows(heading: str) -> list[list[str]]:
    """Return the rows of the docstring's table with a heading, each as a list of cells."""
    assert transformer.__doc__ is not None
    (table,) = re.findall(rf"^    ({heading} .*(?:\n    \S.*)*)", transformer.__doc__, re.MULTILINE)
    return [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()[1:]]


def symbols(config: Config) -> dict[str, int]:
    c = config
    block = {"I": 3 * c.d_head + 2 * c.d_ff // c.n_heads, "O": c.d_head + c.d_ff // c.n_heads}
    model = {"V": c.n_vocab, "D": c.d_model, "T": c.seq, "L": c.layers, "H": c.n_heads}
    heads = {"J": c.key_heads or 0, "K": c.d_head}
    return model | block | heads | {"F": c.d_ff, "mp": c.cores_per_replica}


def documented(config: Config) -> dict[str, tuple[str, str]]:
    """Return {name: (shape, initial value)} for a config, according to the docstring."""
    (norm,) = (row[1:] for row in rows("norm") if row[0] == config.norm)
    block = config.layer_kind
    (values,) = (row[1:] for row in rows("name") if row[0] == block.initial)
    initial = dict(zip(("embedding", "positions", "inputs", "outputs"), values, strict=True))
    table = {}

    def holds(condition: str) -> bool:
        key, differs, expected = re.findall(r"(\w+)(!?)=(\S+)", condition)[0]
        actual = getattr(config if hasattr(config, key) else block, key)
        holds = expected in actual if isinstance(actual, list) else str(actual) == expected
        return holds != bool(differs)

    for name, shape, value, *condition in rows("parameter"):
        if not all(map(holds, condition)):
            continue
        value = initial.get(value, value)
        if name.endswith("*"):
            for part, cell in zip(("scale", "offset"), norm, strict=False):
                axes, value = cell.split(": ")
                full_shape = shape.replace("...", axes.replace("()", "")).strip(", ")
                table[name[:-1] + part] = full_shape, value
        else:
            table[name] = shape, value
    return table


@pytest.mark.quick(15)
@pytest.mark.parametrize(
    "changes", CONFIGS, ids=lambda changes: "-".join(map(str, changes.values()))
)
def test_documented_shapes_and_layouts_match_the_declarations(changes):
    config = Config.from_dict(SMALL | {"cores_per_replica": 4, "tpu_size": 4} | changes)
    values: dict[str, Any] = symbols(config)
    declared = jax.tree.flatten_with_path(transformer.declarations(config), is_leaf=is_declaration)[
        0
    ]
    actual = {"/".join(key.key for key in path): (d.shape, d.spec) for path, d in declared}

    def layout(cells: str) -> tuple[tuple[int, ...], P]:
        axes = [cell.removesuffix("/mp") for cell in cells.split(", ") if cell]
        split = ["mp" if cell.endswith("/mp") else None for cell in cells.split(", ") if cell]
        return tuple(eval(axis, {}, values) for axis in axes), P(*split)

    table = {name: layout(shape) for name, (shape, _) in documented(config).items()}
    assert actual == table


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "changes", CONFIGS, ids=lambda changes: "-".join(map(str, changes.values()))
)
def test_documented_initial_values_match_the_code(changes):
    config = Config.from_dict(SMALL | {"cores_per_replica": 4, "tpu_size": 4} | changes)
    params = jax.jit(transformer.init, static_argnums=0)(config, jax.random.key(0))
    actual = {"/".join(path): np.asarray(leaf) for path, leaf in leaves(params).items()}
    for name, (_, value) in documented(config).items():
        number = eval(re.sub("^(normal|truncated)", "", value), {}, symbols(config))
        leaf = actual.pop(name)
        if not value.startswith(("normal", "truncated")):
            np.testing.assert_array_equal(leaf, np.float32(number), err_msg=name)
            continue
        # Five standard errors of the mean, and of the mean square, of `leaf.size` draws.
        tolerance = 5 / math.sqrt(leaf.size)
        truncated = value.startswith("truncated")
        assert (np.abs(leaf).max() <= 2 * number * (1 + 1e-6)) == truncated, name
        expected = TRUNCATED if truncated else 1
        assert leaf.std() / number == pytest.approx(expected, abs=tolerance), name
        assert abs(leaf.mean() / number) < tolerance, name
    assert not actual
