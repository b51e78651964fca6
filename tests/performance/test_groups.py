"""Collectives belong to mesh axes by their groups of devices, whatever the size of their arrays."""

import collections
import itertools
import random

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from mesh_transformer.config import Config
from mesh_transformer.mesh.program import Layout
from mesh_transformer.performance.groups import axes_of, groups_of
from mesh_transformer.performance.hlo import parse
from mesh_transformer.performance.roofline import traffic_of

# Device 4 dp + 2 cp + mp is at (dp, cp, mp) of this mesh.
SIZES = {"dp": 2, "cp": 2, "mp": 2}
GLOBAL = "channel_id=1, use_global_device_ids=true"
# One array of 64 numbers each: the operation, its attributes, and the axes that it runs over.
PLANTED = [
    ("all-reduce", "replica_groups={{0,1},{2,3},{4,5},{6,7}}", "mp"),
    ("all-reduce", "replica_groups={{0,2},{1,3},{4,6},{5,7}}", "cp"),
    ("all-reduce", "replica_groups={{0,4},{1,5},{2,6},{3,7}}", "dp"),
    ("all-reduce", "replica_groups={{4,0},{1,5},{6,2},{7,3}}", "dp"),
    ("all-reduce", "replica_groups=[4,2]<=[8]", "mp"),
    ("all-reduce", "replica_groups=[4,2]<=[2,2,2]T(0,2,1)", "cp"),
    ("all-reduce", "replica_groups=[4,2]<=[2,4]T(1,0)", "dp"),
    ("all-gather", "replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}", "dp and cp"),
    ("all-gather", "replica_groups=[2,4]<=[2,2,2]T(1,0,2), dimensions={0}", "dp and mp"),
    ("all-gather", "replica_groups=[2,4]<=[8], dimensions={0}", "cp and mp"),
    ("reduce-scatter", "replica_groups=mesh['dp'=2,'cp'=2,'mp'=2] {'cp'}, dimensions={0}", "cp"),
    ("reduce-scatter", "replica_groups=mesh[a=2,b=4] {b:(2)2}, dimensions={0}", "mp"),
    ("reduce-scatter", "replica_groups=mesh[a=2,b=4] {b:(1)2}, dimensions={0}", "cp"),
    ("reduce-scatter", "replica_groups=mesh[a=8] {a:(1)2,a:(4)2}, dimensions={0}", "dp and mp"),
    ("all-reduce", "replica_groups=mesh[a=2,b=4], device_ids=([4,2]T(1,0)) {a}", "mp"),
    ("all-reduce", "replica_groups=mesh[a=2,b=4], device_ids=(0,2,4,6,1,3,5,7) {b}", "dp and cp"),
    ("all-to-all", "replica_groups={{0,1,2,3,4,5,6,7}}", "dp and cp and mp"),
    ("all-reduce", "replica_groups={}", "dp and cp and mp"),
    ("all-reduce", "replica_groups={{0}}, channel_id=1", "dp and cp and mp"),
    ("collective-permute", "source_target_pairs={{0,2},{2,0},{1,3},{3,1},{4,6},{6,4}}", "cp"),
    ("collective-permute", "source_target_pairs={{0,4},{4,0}}", "dp"),
    ("collective-permute", "source_target_pairs={{0,3},{3,0},{1,2},{2,1}}", "cp and mp"),
    # Groups that are none of the mesh's axes.
    ("all-reduce", "replica_groups={{0,3},{1,2},{4,7},{5,6}}", "part of cp and mp"),
    ("all-reduce", "replica_groups={{0,7},{1,6},{2,5},{3,4}}", "part of dp and cp and mp"),
    ("all-reduce", "replica_groups={{0,1},{2},{3},{4,5},{6},{7}}", "part of mp"),
    ("all-gather", "replica_groups={{0,1,2},{3},{4,5,6},{7}}, dimensions={0}", "part of cp and mp"),
    ("all-reduce", "replica_groups={{0,1},{2,3},{4,6},{5,7}}", "part of cp and mp"),
]


def lines_of(number: int, kind: str, attributes: str) -> str:
    """Return the HLO of a planted collective: synchronous, asynchronous or in a computation."""
    if "channel_id" not in attributes and "pairs" not in attributes:
        attributes = f"{attributes}, {GLOBAL}"
    array, both = "f32[64]{0}", "(f32[64]{0}, f32[64]{0})"
    started = array if kind == "all-reduce" else both
    if number % 2 or kind in ("reduce-scatter", "all-to-all"):
        return f"  %a{number} = {array} {kind}(%p), {attributes}"
    return (
        f"  %a{number} = {started} {kind}-start(%p), {attributes}\n"
        f"  %b{number} = {array} {kind}-done(%a{number})"
    )


def program_of(lines: str) -> str:
    return (
        f"ENTRY %main (p: f32[64]) -> f32[64] {{\n  %p = f32[64]{{0}} parameter(0)\n{lines}\n}}\n"
    )


@pytest.mark.parametrize(("kind", "attributes", "expected"), PLANTED)
def test_a_planted_collective_is_attributed_to_its_axes(kind, attributes, expected):
    for number in (0, 1):
        (one,) = parse(program_of(lines_of(number, kind, attributes))).collectives
        assert (one.kind, one.shape) == (kind, (64,))
        assert axes_of(one.kind, one.groups, SIZES)[0] == expected


def test_planted_collectives_of_equal_sizes_are_told_apart():
    program = program_of(
        "\n".join(lines_of(number, *row[:2]) for number, row in enumerate(PLANTED))
    )
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(2, 2, 2), tuple(SIZES))
    config = Config(layers=3, d_model=8, n_heads=2, n_vocab=8, seq=8, cores_per_replica=2)
    config = config.replace(context_parallel=2, tpu_size=8)
    counts = {
        (e.kind, e.axis): e.count for e in traffic_of(program, Layout(config, mesh)).exchanges
    }
    assert counts == collections.Counter((kind, axis) for kind, _, axis in PLANTED)


def test_an_asynchronous_computation_counts_once():
    line = f"  %r = f32[64]{{0}} reduce-scatter(%q), replica_groups=[4,2]<=[8], {GLOBAL}"
    text = f"%inner (q: f32[128]) -> f32[64] {{\n{line}\n}}\n" + program_of(
        "  %a = ((f32[128]{0}), f32[64]{0}) async-start(%p), calls=%inner\n"
        "  %b = f32[64]{0} async-done(%a), calls=%inner"
    )
    (one,) = parse(text).collectives
    assert axes_of(one.kind, one.groups, SIZES) == ("mp", 2)


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        ("all-reduce", "replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}"),
        ("all-reduce", "replica_groups=[8,1]<=[8]"),
        ("collective-permute", "source_target_pairs={{0,0},{5,5}}"),
        ("collective-permute", "source_target_pairs={}"),
    ],
)
def test_what_stays_on_its_device_has_no_axis(kind, attributes):
    assert axes_of(kind, groups_of(attributes), SIZES) == ("", 1)


@pytest.mark.parametrize("seed", range(20))
def test_random_axes_are_recognised_in_every_notation(seed):
    """Group devices by their coordinates along the other axes; exchange two devices of groups."""
    draw = random.Random(seed)
    sizes = {name: draw.choice((1, 2, 3, 4)) for name in "abcd"} | {"e": 2, "f": 3}
    over = draw.sample(list(sizes), draw.randint(1, 3)) + ["e"] * (seed % 2)
    over = [name for name in sizes if name in {*over, "f"}]
    places = list(itertools.product(*(range(size) for size in sizes.values())))
    rows = collections.defaultdict(list)
    for number, place in enumerate(places):
        others = (x for name, x in zip(sizes, place, strict=True) if name not in over)
        rows[tuple(others)].append(number)
    listed = ",".join(f"{{{','.join(map(str, row))}}}" for row in rows.values())
    order = [index for index, name in enumerate(sizes) if name not in over]
    order += [index for index, name in enumerate(sizes) if name in over]
    shape = f"[{len(rows)},{len(places) // len(rows)}]<=[{','.join(map(str, sizes.values()))}]"
    named = ",".join(f"'{name}'={size}" for name, size in sizes.items())
    texts = (
        f"replica_groups={{{listed}}}",
        f"replica_groups={shape}T({','.join(map(str, order))})",
        f"replica_groups=mesh[{named}] {{{','.join(map(repr, over))}}}",
    )
    expected = " and ".join(name for name in over if sizes[name] > 1)
    for text in texts:
        actual = axes_of("all-reduce", groups_of(text), sizes)
        assert actual == (expected, len(places) // len(rows))
    if len(rows) > 1:  # another partition into groups of the same sizes
        one, other = list(rows.values())[:2]
        one[0], other[-1] = other[-1], one[0]
        mixed = frozenset(map(frozenset, rows.values()))
        assert axes_of("all-reduce", mixed, sizes)[0].startswith("part of ")
