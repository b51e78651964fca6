"""Estimates of a step's cost: links, memory traffic of a program, scaling and search."""

import functools
import itertools
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from mesh_transformer.cli import plan as script
from mesh_transformer.config import Config
from mesh_transformer.families import BLOCKS
from mesh_transformer.mesh import accelerators
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.mesh.program import Layout
from mesh_transformer.model import attention as attention_module
from mesh_transformer.model import flops, transformer
from mesh_transformer.model.casts import to_bf16
from mesh_transformer.model.loss import train_loss
from mesh_transformer.performance import analytic, hlo, scaling, search
from mesh_transformer.performance.analytic import estimate_step
from mesh_transformer.performance.compilation import OutOfTimeError
from mesh_transformer.performance.hlo import Program
from mesh_transformer.performance.roofline import (
    bytes_on_links,
    bytes_sent,
    estimate,
    link_seconds,
    traffic_of,
)
from mesh_transformer.performance.topology import topology
from mesh_transformer.training.step import init_state
from mesh_transformer.util import InputError
from scripts import plot_scaling

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

CONFIGS = Path(__file__).parents[2] / "configs"
V5P = accelerators.hardware("v5p")


@pytest.mark.parametrize(
    ("kind", "size", "devices", "expected"),
    [
        ("all-reduce", 800, 8, 1400),  # 7/8 for the reduce-scatter, and 7/8 for the all-gather
        ("all-gather", 800, 8, 700),
        ("reduce-scatter", 100, 8, 700),  # the result is an eighth of the input
        ("all-to-all", 800, 8, 700),
        ("collective-permute", 800, 8, 800),
        ("all-reduce", 800, 1, 0),
    ],
)
def test_bytes_sent_per_device_in_a_ring(kind, size, devices, expected):
    assert bytes_sent(kind, size, devices) == expected


@pytest.mark.parametrize(("devices", "expected"), [(2, 400), (4, 800), (8, 1600), (3, 533)])
def test_bytes_of_an_all_to_all_count_once_per_link(devices, expected):
    at = range(devices)
    hops = sum(min((a - b) % devices, (b - a) % devices) for a in at for b in at) // devices
    assert bytes_on_links("all-to-all", 800, devices) == expected == 800 * hops // devices
    assert bytes_on_links("all-reduce", 800, devices) == bytes_sent("all-reduce", 800, devices)


def test_link_time_is_a_range_from_all_links_to_two_links():
    v5p = accelerators.hardware("v5p")  # six links of 100 GB/s
    assert link_seconds(600e9, v5p) == pytest.approx((1, 3))
    assert link_seconds(450e9, accelerators.hardware("h100")) == pytest.approx((1, 1))


def test_what_goes_to_other_slices_counts_apart_from_the_links():
    """As the TPU compiler sums over slices: within each of the two, then over the network."""
    program = """HloModule made

ENTRY %main (p: f32[32,128]) -> f32[32,128] {
  %p = f32[32,128]{1,0} parameter(0)
  %a = f32[8,128]{1,0} reduce-scatter(%p), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}
  %b = token[] after-all()
  %c = (f32[8,128]{1,0}, u32[], token[]) send(%a, %b), frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_transfer_type="ALL_REDUCE"}
  %d = (f32[8,128]{1,0}, u32[], token[]) recv(%b), frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  %e = f32[8,128]{1,0} get-tuple-element(%d), index=0
  ROOT %f = f32[32,128]{1,0} all-gather(%e), channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}
}
"""  # noqa: E501
    config = Config.load(str(CONFIGS / "6B_roto_256.json"))
    devices = np.array([SimpleNamespace(slice_index=number // 4) for number in range(8)])
    mesh: Any = SimpleNamespace(shape={"dp": 8, "mp": 1}, size=8, devices=devices)
    traffic = traffic_of(program, Layout(config, mesh))
    part = 4 * 8 * 128
    assert traffic.between_slices == part  # of each device: together, one gradient per slice
    assert traffic.on_links == 2 * 3 * part
    assert {exchange.axis for exchange in traffic.exchanges} == {"part of dp", "slices"}
    between = "all-reduce" + hlo.BETWEEN_SLICES
    assert bytes_sent(between, 800, 4) == 2 * 600  # each slice sends and gets three quarters twice
    options = {"devices": 8, "tokens": 1, "peak_bytes": 0, "hbm_traffic_bytes": 0, "link_bytes": 0}
    for name, seconds in (("v5e", 2), ("v4", None)):  # 3.125 GB/s, and unknown
        result = estimate(config, accelerators.hardware(name), **options, slice_bytes=6_250_000_000)
        assert result.slice_seconds == seconds
        assert result.step_seconds[0] >= (seconds or 0)
        assert "to other slices: 6.25 GB" in "\n".join(result.lines())


def test_the_step_time_is_between_its_longest_part_and_the_sum():
    config = Config.load(str(CONFIGS / "6B_roto_256.json"))
    hardware, tokens = accelerators.hardware("v5e"), 8 * 2048
    result = estimate(
        config,
        hardware,
        devices=8,
        tokens=tokens,
        peak_bytes=3,
        hbm_traffic_bytes=819 * 10**8,  # 0.1 s
        link_bytes=20 * 10**9,  # 0.1 s over four links, 0.2 s over two
    )
    compute = tokens * flops.hardware_flops_per_token(config) / (8 * 197e12)
    assert result.compute_seconds == pytest.approx(compute)
    assert result.step_seconds == pytest.approx((compute, compute + 0.3))
    assert result.hfu[0] == pytest.approx(1)
    useful = flops.palm_flops_per_token(config) / flops.hardware_flops_per_token(config)
    assert result.mfu[0] == pytest.approx(useful)
    kernel = estimate(
        config,
        hardware,
        devices=8,
        tokens=tokens,
        peak_bytes=3,
        hbm_traffic_bytes=0,
        link_bytes=0,
        attention="splash",
    )
    splash = flops.hardware_flops_per_token(config, "splash")
    assert kernel.compute_seconds == pytest.approx(tokens * splash / (8 * 197e12))
    text = "\n".join(result.lines())
    assert "estimate on v5e, peak 197 TFLOP/s" in text
    assert "per device): bound by compute" in text
    second = {"hbm_traffic_bytes": 819 * 10**9, "link_bytes": 10**11, "slice_bytes": 3125 * 10**6}
    for bound, key in zip(("memory", "links", "network"), second, strict=True):
        options = {"peak_bytes": 3, "hbm_traffic_bytes": 0, "link_bytes": 0} | {key: second[key]}
        assert estimate(config, hardware, devices=8, tokens=tokens, **options).bound == bound
    assert "cloud.google.com" in text


PROGRAM = """HloModule made, is_scheduled=true

%sliced (param_0.1: f32[8,100], param_1.1: s32[]) -> f32[1,100] {
  %param_0.1 = f32[8,100]{1,0} parameter(0)
  %param_1.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %one = f32[1,100]{1,0} dynamic-slice(%param_0.1, %param_1.1, %zero)
}

%updated (param_0.2: f32[8,100], param_1.2: f32[1,100], param_2.2: s32[]) -> f32[8,100] {
  %param_0.2 = f32[8,100]{1,0} parameter(0)
  %param_1.2 = f32[1,100]{1,0} parameter(1)
  %param_2.2 = s32[] parameter(2)
  %none = s32[] constant(0)
  ROOT %put = f32[8,100]{1,0} dynamic-update-slice(%param_0.2, %param_1.2, %param_2.2, %none)
}

%body (carry: (s32[], f32[8,100], f32[8,100])) -> (s32[], f32[8,100], f32[8,100]) {
  %carry = (s32[], f32[8,100]{1,0}, f32[8,100]{1,0}) parameter(0)
  %at = s32[] get-tuple-element(%carry), index=0
  %from = f32[8,100]{1,0} get-tuple-element(%carry), index=1
  %to = f32[8,100]{1,0} get-tuple-element(%carry), index=2
  %row = f32[1,100]{1,0:T(8,128)} fusion(%from, %at), kind=kLoop, calls=%sliced
  %near = f32[1,100]{1,0:T(8,128)S(1)} copy(%row)
  %filled = f32[8,100]{1,0} fusion(%to, %near, %at), kind=kLoop, calls=%updated
  ROOT %next = (s32[], f32[8,100]{1,0}, f32[8,100]{1,0}) tuple(%at, %from, %filled)
}

%less (carry.1: (s32[], f32[8,100], f32[8,100])) -> pred[] {
  %carry.1 = (s32[], f32[8,100]{1,0}, f32[8,100]{1,0}) parameter(0)
  %at.1 = s32[] get-tuple-element(%carry.1), index=0
  %end = s32[] constant(8)
  ROOT %lower = pred[] compare(%at.1, %end), direction=LT
}

ENTRY %main (a: f32[8,100], b: f32[8,100]) -> f32[8,100] {
  %a = f32[8,100]{1,0} parameter(0)
  %b = f32[8,100]{1,0} parameter(1)
  %begin = s32[] constant(0)
  %sum = f32[8,100]{1,0} add(%a, %b)
  %start = (s32[], f32[8,100]{1,0}, f32[8,100]{1,0}) tuple(%begin, %sum, %b)
  %loop = (s32[], f32[8,100]{1,0}, f32[8,100]{1,0}) while(%start), condition=%less, body=%body
  ROOT %out = f32[8,100]{1,0} get-tuple-element(%loop), index=2
}
"""


def test_memory_traffic_of_a_program_with_a_loop():
    """Compare with a count by hand; accesses to on-chip memory and other rows do not count.

    A row has 400 bytes, and the addition moves 24 rows.  An iteration of the loop reads a row and
    its index and writes the row, copies it to on-chip memory (one read), and writes it from there
    to the indexed row.
    """
    iteration = (400 + 4 + 400) + 400 + (4 + 400)
    program = Program(PROGRAM)
    assert program.moved() == 24 * 400 + 8 * iteration
    assert program.bytes_moved_per_iteration() == iteration


TILED = """%copy_fusion.1 (input: f32[8,100]) -> f32[8,100] {
  %input = f32[8,100]{1,0} parameter(0)
  ROOT %copied = f32[8,100]{1,0:T(8,128)} copy(%input)
}

%updated"""
IN_PLACE = """  %tiled = f32[8,100]{1,0:T(8,128)} fusion(%param_0.2), kind=kLoop, \
output_to_operand_aliasing={{}: (0, {})}, calls=%copy_fusion.1
  ROOT %put = f32[8,100]{1,0} dynamic-update-slice(%tiled, %param_1.2, %param_2.2, %none)"""


def test_a_copy_in_place_within_a_fusion_moves_nothing():
    """The compiler for TPU7x changes an array's tiles so before it updates a row."""
    update = re.search(r"  ROOT %put = .*", PROGRAM)
    assert update
    text = PROGRAM.replace("%updated", TILED, 1).replace(update[0], IN_PLACE)
    assert Program(text).moved() == Program(PROGRAM).moved()


STARTED = """
%wrapped (param_0.1: f32[8,100]) -> f32[1,100] {
  %param_0.1 = f32[8,100]{1,0} parameter(0)
  ROOT %row = f32[1,100]{1,0} slice(%param_0.1), slice={[0:1], [0:100]}
}

ENTRY %main (a: f32[8,100]) -> f32[16,100] {
  %a = f32[8,100]{1,0} parameter(0)
  LINE
}
"""


@pytest.mark.parametrize(
    ("line", "moved"),
    [
        # The operand is read, and twice as much is written.
        ("(f32[8,100]{1,0}, f32[16,100]{1,0}) all-gather-start(%a), dimensions={0}", 3 * 3200),
        ("f32[8,100]{1,0} all-reduce-start(%a)", 2 * 3200),
        # An asynchronous computation counts what it reads and writes.
        ("((f32[8,100]{1,0}), f32[1,100]{1,0}) async-start(%a), calls=%wrapped", 2 * 400),
        ("((f32[8,100]{1,0}), f32[1,100]{1,0:S(1)}) async-start(%a), calls=%wrapped", 400),
    ],
)
def test_memory_traffic_of_asynchronous_operations(line, moved):
    assert Program(STARTED.replace("LINE", f"%begun = {line}")).moved() == moved


SCATTERED = """
%second (old: f32[], new: f32[]) -> f32[] {
  %old = f32[] parameter(0)
  ROOT %new = f32[] parameter(1)
}

%sum (left: f32[], right: f32[]) -> f32[] {
  %left = f32[] parameter(0)
  %right = f32[] parameter(1)
  ROOT %both = f32[] add(%left, %right)
}

%fused (param_0: f32[8,100], param_1: s32[2], param_2: f32[2,100]) -> f32[8,100] {
  %param_0 = f32[8,100]{1,0} parameter(0)
  %param_1 = s32[2]{0} parameter(1)
  %param_2 = f32[2,100]{1,0} parameter(2)
  ROOT %inner = f32[8,100]{1,0} scatter(%param_0, %param_1, %param_2), to_apply=%second
}

%adding (param_3: f32[8,100], param_4: s32[2], param_5: f32[2,100]) -> f32[8,100] {
  %param_3 = f32[8,100]{1,0} parameter(0)
  %param_4 = s32[2]{0} parameter(1)
  %param_5 = f32[2,100]{1,0} parameter(2)
  ROOT %summed = f32[8,100]{1,0} scatter(%param_3, %param_4, %param_5), to_apply=%sum
}

%fresh (param_6: s32[2], param_7: f32[2,100]) -> f32[8,100] {
  %param_6 = s32[2]{0} parameter(0)
  %param_7 = f32[2,100]{1,0} parameter(1)
  %zero = f32[] constant(0)
  %zeros = f32[8,100]{1,0} broadcast(%zero), dimensions={}
  ROOT %made = f32[8,100]{1,0} scatter(%zeros, %param_6, %param_7), to_apply=%sum
}

ENTRY %main (a: f32[8,100], i: s32[2], b: f32[2,100]) -> f32[8,100] {
  %a = f32[8,100]{1,0} parameter(0)
  %i = s32[2]{0} parameter(1)
  %b = f32[2,100]{1,0} parameter(2)
  ROOT %written = f32[8,100]{1,0} LINE
}
"""


@pytest.mark.parametrize(
    ("line", "moved"),
    [  # two rows are read and written; a fusion also reads their indices
        ("scatter(%a, %i, %b), to_apply=%second", 2 * 800),
        ("fusion(%a, %i, %b), kind=kCustom, calls=%fused", 8 + 2 * 800),
        # An addition also reads the rows that it adds to.
        ("scatter(%a, %i, %b), to_apply=%sum", 3 * 800),
        ("fusion(%a, %i, %b), kind=kCustom, calls=%adding", 8 + 3 * 800),
        # Eight rows of zeros are written before two of them are overwritten.
        ("fusion(%i, %b), kind=kCustom, calls=%fresh", 8 + 800 + 3200),
    ],
)
def test_memory_traffic_of_in_place_scatters(line, moved):
    assert Program(SCATTERED.replace("LINE", line)).moved() == moved


def test_runs_reach_a_minimum_number_or_duration(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(accelerators, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    runs: list[None] = []
    assert accelerators._run_seconds(lambda: runs.append(None), 3) == [1] * 3
    assert len(runs) == 4  # the first run is not timed
    assert accelerators._run_seconds(lambda: None, 3, 7.0) == [1] * 7


def test_a_collective_split_into_pieces_counts_once():
    """Parse two pieces of one all-reduce of two arrays, and one piece of another all-reduce."""
    piece = (
        "(f32[8]{0}, f32[4]{0}) all-reduce(%a, %b), replica_groups={{0,1}}, "
        'frontend_attributes={chain_id="C"}'
    )
    lines = [f"  %first = {piece}", f"  %second = {piece}", f"  %third = {piece.replace('C', 'D')}"]
    text = "\n".join(["ENTRY %main (a: f32[8], b: f32[4]) -> f32[8] {", *lines, "}"])
    collectives = hlo.parse(text).collectives
    assert [collective.shape for collective in collectives] == [(8,), (4,), (8,), (4,)]
    # A piece in a loop belongs to the same all-reduce, unless the collective is in the loop alone.
    loop = '  %w = s32[] while(%a), condition=%c, body=%body, ..."known_trip_count":{"n":"3"}'
    for outside, times in ((lines[:1], {1}), (lines[2:], {1, 3})):
        body = "\n".join(["%body (a: s32[]) -> s32[] {", lines[1], "}"])
        text = "\n".join([body, "ENTRY %main (a: s32[]) -> s32[] {", *outside, loop, "}"])
        runs = list(hlo.parse(text).runs())
        assert {number for _, number in runs} == times
        assert len(runs) == 2 * len(times)


def test_collectives_outside_loops_do_not_belong_to_a_layer():
    """With one layer, collectives outside all loops do not count as collectives of the layer."""
    config = Config(layers=1, d_model=8, n_heads=2, n_vocab=8, seq=4, cores_per_replica=2)
    text = """ENTRY %main (a: f32[1,4,8]) -> f32[1,4,8] {
  %a = f32[1,4,8]{2,1,0} parameter(0)
  ROOT %sum = f32[1,4,8]{2,1,0} all-reduce(%a), replica_groups={{0,1}}
}
"""
    mesh = Mesh(np.asarray(jax.devices()[:2]).reshape(1, 2), ("dp", "mp"))
    result = traffic_of(text, Layout(config, mesh))
    assert (result.layer_forward, result.layer_backward) == (0, 0)
    assert [exchange.place for exchange in result.exchanges] == ["step"]


LAYERS = """%forward (state: (s32[], f32[1,4,8])) -> (s32[], f32[1,4,8]) {
  %state = (s32[], f32[1,4,8]{2,1,0}) parameter(0)
  %a = f32[1,4,8]{2,1,0} get-tuple-element(%state), index=1
  %one = f32[1,4,8]{2,1,0} all-reduce(%a), replica_groups=MP
  ROOT %next = (s32[], f32[1,4,8]{2,1,0}) tuple(%i, %one)
}

%backward (state: (s32[], f32[1,4,8])) -> (s32[], f32[1,4,8]) {
  %state = (s32[], f32[1,4,8]{2,1,0}) parameter(0)
  %b = f32[1,4,8]{2,1,0} get-tuple-element(%state), index=1
  %c = f32[32]{0} reshape(%b), metadata={op_name="jit(step)/transpose(jvp())/while/reshape"}
  %two = f32[1,4,8]{2,1,0} all-reduce(%b), replica_groups=MP
  %dp = f32[32]{0} all-reduce(%c), replica_groups=DP
  ROOT %next = (s32[], f32[1,4,8]{2,1,0}) tuple(%i, %two)
}

ENTRY %main (a: (s32[], f32[1,4,8])) -> (s32[], f32[1,4,8]) {
  %a = (s32[], f32[1,4,8]{2,1,0}) parameter(0)
  %first = (s32[], f32[1,4,8]{2,1,0}) while(%a), condition=%c, body=%forward, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %second = (s32[], f32[1,4,8]{2,1,0}) while(%first), condition=%c, body=%backward, \
backend_config={"known_trip_count":{"n":"3"}}
}
"""


@pytest.mark.parametrize(
    ("dp", "mp", "groups", "expected"),
    [
        (2, 2, ("{{0,1},{2,3}}", "{{0,2},{1,3}}"), (1, 1)),
        (1, 4, ("{{0,1,2,3}}", "{{0},{1},{2},{3}}"), (1, 1)),
        (4, 1, ("{{0,1,2,3}}", "{{0,1,2,3}}"), (0, 0)),
        (4, 1, ("{}", "[1,4]<=[4]"), (0, 0)),
    ],
)
def test_only_sums_over_mp_are_those_of_activations(dp, mp, groups, expected):
    """A gradient that is summed over dp in the loop over layers may have the same size.

    The loop of the backward pass is known by other operations than its collectives.
    """
    config = Config(layers=3, d_model=8, n_heads=2, n_vocab=8, seq=4, cores_per_replica=mp)
    text = LAYERS.replace("MP", groups[0]).replace("DP", groups[1])
    mesh = Mesh(np.asarray(jax.devices()[: dp * mp]).reshape(dp, mp), ("dp", "mp"))
    config = config.replace(per_replica_batch=1, tpu_size=dp * mp)
    result = traffic_of(text, Layout(config, mesh))
    assert (result.layer_forward, result.layer_backward) == expected


RING = """
%body (a: (s32[], f32[4])) -> (s32[], f32[4]) {
  ROOT %a = (s32[], f32[4]{0}) parameter(0)
}

ENTRY %main (k: bf16[100], t: (s32[], f32[4])) -> bf16[100] {
  %k = bf16[100]{0} parameter(0)
  %t = (s32[], f32[4]{0}) parameter(1)
  %go = (bf16[100]{0}, bf16[100]{0}) collective-permute-start(%k), source_target_pairs=PAIRS
  %w = (s32[], f32[4]{0}) while(%t), condition=%c, body=%body, ..."known_trip_count":{"n":"3"}
  %end = bf16[100]{0} collective-permute-done(%go)
  %on = (bf16[100]{0}, bf16[100]{0}) collective-permute-start(%end), source_target_pairs=PAIRS
  ROOT %r = bf16[100]{0} collective-permute-done(%on)
}
"""


@pytest.mark.parametrize("axis", ["dp", "cp", "mp", "cp and mp"])
def test_what_goes_round_an_axis_is_attributed_to_it(axis):
    """Of two arrays sent to the next device, one is on its way while a loop runs."""
    sizes = {"dp": 2, "cp": 2, "mp": 2}
    numbers = np.arange(8).reshape(2, 2, 2)
    along = [list(sizes).index(name) for name in axis.split(" and ")]
    nexts = numbers
    for index in along:
        nexts = np.roll(nexts, -1, index)
    pairs = [f"{{{a},{b}}}" for a, b in zip(numbers.flat, nexts.flat, strict=True)]
    text = RING.replace("PAIRS", f"{{{','.join(pairs)}}}")
    config = Config(layers=3, d_model=8, n_heads=2, n_vocab=8, seq=8, cores_per_replica=2)
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(2, 2, 2), tuple(sizes))
    config = config.replace(context_parallel=2, tpu_size=8)
    (ring,) = traffic_of(text, Layout(config, mesh)).exchanges
    assert (ring.kind, ring.axis, ring.count) == ("collective-permute", axis, 2)
    # One of the two links of a ring is idle, so that each byte takes the time of two.
    assert (ring.sent, ring.on_links, ring.beside_loops) == (400, 800, 200)
    assert ring.line().endswith("0.0 MB per step and device, 50% beside a loop")


def test_the_estimate_for_gpt_j_on_a_v3_8():
    """58 all-reduces of 2048 x 4096 bf16 over 8 devices send 1.70 GB; there are none over dp."""
    config = Config.load(str(CONFIGS / "6B_roto_256.json")).replace(gradient_accumulation_steps=1)
    v3, sent = accelerators.hardware("v3"), 58 * 2 * 7 * 2048 * 4096 * 2 // 8
    result = estimate_step(config, v3, 8)
    assert (analytic.mp_bytes(config, 2048, 8), analytic.dp_bytes(config, 1)) == (sent, 0)
    assert result.link_bytes == sent
    assert result.peak_bytes == analytic.memory_bytes(config, 8, analytic.attention_on(config, v3))
    parts = result.compute_seconds, result.hbm_seconds, link_seconds(sent, v3)[1]
    assert result.step_seconds[1] == pytest.approx(sum(parts), rel=1e-12)


@pytest.mark.parametrize("optimizer", ["adam", "adafactor", "lion", "muon", "sgd"])
def test_the_estimate_counts_the_moments_of_the_optimizer(optimizer):
    config = Config.load(str(CONFIGS / "6B_roto_256.json")).replace(optimizer=optimizer)
    state = jax.eval_shape(functools.partial(init_state, config), jax.random.key(0))
    params, moments = (
        sum(leaf.size for leaf in jax.tree.leaves(state[key])) for key in ("params", "opt_state")
    )
    # The optimizer's state has a count, too.
    assert analytic.moments_per_parameter(config) == pytest.approx((moments - 1) / params)
    expected = {"adam": 2, "adafactor": 0, "lion": 1, "muon": 1, "sgd": 1}[optimizer]
    # Muon has two moments of the embedding and the head, a fifteenth of the parameters.
    assert 0 <= analytic.moments_per_parameter(config) - expected < 0.07


def test_the_estimate_of_dp_bytes_with_zero():
    """Each of 32 replicas sends 31/32 of its part, several times.

    Without ZeRO it sends f32 values twice; with ZeRO 1, f32 and bf16 once each; with ZeRO 3, f32
    once and bf16 twice in each microbatch.
    """
    config = Config.load(str(CONFIGS / "6B_roto_256.json"))
    part = flops.n_params(config) // 8
    for zero, width in ((0, 8), (1, 6), (3, 16 * 8)):
        sent = analytic.dp_bytes(config.replace(zero=zero), 32)
        # mp does not split norms and some biases, 0.06 percent of the parameters of a device.
        assert sent == pytest.approx(width * part * 31 / 32, rel=1e-3)
        assert sent > width * part * 31 / 32


@pytest.mark.parametrize("window", [64, 1024])
def test_the_estimate_of_cp_bytes(window):
    """Each of 4 devices along cp sends its keys and values to the 3 others, or to those in reach.

    A window of one block of 64 positions needs the keys of the device before it and, as chunks are
    in zigzag order, of the one after it: of all others but the one at distance 2.
    """
    sizes: Any = {"layers": 2, "d_model": 32, "n_heads": 4, "n_vocab": 64, "seq": 1024}
    config = Config(**sizes, cores_per_replica=2, context_parallel=4, attention_window=window)
    tokens, part = 3 * 1024 // 4, analytic._part(config)
    shifts = 3 if window == 1024 else 2
    # Of 2 heads of 8 entries: bf16 in both passes, f32 gradients, and these once more in bf16.
    each = 2 * tokens * 2 * 8 * (shifts * (2 + 2 + 4) + 2)
    gradients = 2 * 4 * part * 3 // 4
    assert analytic.cp_bytes(config, tokens, True) == 2 * 2 * each + gradients
    assert analytic.cp_bytes(config.replace(context_parallel=1, tpu_size=2), tokens, True) == 0
    # Of 8 query and 2 key heads per device, the latter repeated to 4: a quarter goes to each other
    # device, over 1, 2 and 1 links.
    config = config.replace(n_heads=16, head_size=8, key_heads=4)
    part = analytic._part(config)
    each = 3 * 2 * tokens * (8 + 4) * 8 * 2
    assert analytic.cp_bytes(config, tokens, False) == 2 * each + 2 * 4 * part * 3 // 4


def test_splitting_positions_divides_activations_but_not_parameters():
    config = Config.load(str(CONFIGS / "8B_v5p-64.json"))
    config = config.replace(seq=2**17, zero=0, remat="full", attention="blocks", tpu_size=1)
    config = config.replace(gradient_accumulation_steps=1)
    whole, split, quarter = (
        analytic.memory_bytes(config.replace(context_parallel=cp, tpu_size=cp), cp, "blocks")
        for cp in (1, 2, 4)
    )
    per_token = 32 * analytic.saved_activation_bytes(config, "blocks")
    assert split - quarter > 2**15 * per_token
    assert whole - split == 2 * (split - quarter)
    speeds = [
        estimate_step(config.replace(context_parallel=cp, tpu_size=cp), V5P, cp) for cp in (1, 2)
    ]
    # Zigzag order: half of the positions are half of the work.
    assert speeds[1].compute_seconds == pytest.approx(speeds[0].compute_seconds / 2)


def test_a_search_splits_only_long_sequences():
    config = Config.load(str(CONFIGS / "8B_v5p-64.json")).replace(gradient_accumulation_steps=1)
    for seq, expected in ((2048, {1}), (2**14, {1, 2, 4}), (2**17, {1, 2, 4, 8, 16, 32})):
        long = config.replace(seq=seq, shard_activations=True)
        candidates = search.candidates(long, 32, {"per_replica_batch": 1})
        sizes = {candidate.context_parallel for candidate in candidates}
        assert sizes == expected
        assert all(32 % c.replica_devices == 0 for c in candidates)
        only = search.candidates(long, 32, {"context_parallel": 2})
        assert {c.context_parallel for c in only} <= {2}


def test_the_estimate_counts_copied_keys_and_values_on_every_device():
    """Of 2 key heads of 4 entries, each of 4 devices stores both, of 4 heads, one.

    It computes those of its queries: one in either case.
    """
    sizes: Any = {"layers": 3, "d_model": 32, "n_heads": 8, "n_vocab": 64, "block": "llama"}
    split = Config(**sizes, key_heads=4, seq=128, cores_per_replica=4)
    copied = split.replace(key_heads=2)
    matrices = 3 * 2 * 32 * 4  # of one head's keys and values
    assert analytic._part(copied) - analytic._part(split) == (2 - 1) * matrices
    assert flops.input_columns(copied) == flops.input_columns(split)
    # 6 query heads in 2 groups are 2 per device, of which the second's belong to both groups.
    uneven = copied.replace(n_heads=6, head_size=4)
    assert flops.input_columns(uneven) - flops.input_columns(copied) == 4 * 2 * 4 * (2 - 1)
    assert analytic.mp_bytes(split, 1, 4) == (4 * 3 + 2) * 32 * 2 * 2 * 3 // 4


@pytest.mark.quick(2)
@pytest.mark.parametrize("block", [*BLOCKS, "grouped"])
@pytest.mark.parametrize("remat", ["full", "dots", "none"])
@pytest.mark.parametrize("attention", ["xla", "blocks", "splash_interpreted"])
def test_the_estimate_of_saved_activations_matches_the_saved_arrays(attention, remat, block):
    """Sum the arrays saved for a gradient that have axes for layers, batch and positions.

    The results of matmuls have one axis for batch and positions.
    """
    batch = 5
    grouped: Any = {"block": "llama", "key_heads": 2, "qk_norm": "head"}
    config = Config(
        layers=3,
        d_model=48,
        n_heads=4,
        n_vocab=56,
        seq=384,
        remat=remat,
        attention=attention,
        **grouped if block == "grouped" else {"block": block},
    )
    tokens = jnp.zeros((batch, config.seq), jnp.int32)

    def loss(params: Any) -> jax.Array:
        par = Auto(attention=attention)
        return train_loss(to_bf16(params), tokens, tokens, config, par)[0]

    params = jax.eval_shape(functools.partial(transformer.init, config), jax.random.key(0))
    saved = jax.tree.leaves(jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params))
    kept = sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf in saved
        if leaf.shape[:2] in ((config.layers, batch), (config.layers, batch * config.seq))
    )
    per_token = analytic.saved_activation_bytes(config, attention)
    assert kept == config.layers * batch * config.seq * per_token


def test_estimates_assume_the_attention_backend_of_the_hardware(monkeypatch):
    config = Config.load(str(CONFIGS / "6B_roto_256.json"))
    names = {
        name: analytic.attention_on(config, accelerators.hardware(name)) for name in ("v3", "v4")
    }
    assert names == {"v3": "xla", "v4": "splash"}
    # cuDNN's kernels are used only where the check of their results succeeds.
    assert analytic.attention_on(config, accelerators.hardware("h200")) == "xla"
    monkeypatch.setattr(attention_module, "_cudnn_disagrees", lambda head_size: None)
    assert analytic.attention_on(config, accelerators.hardware("h200")) == "cudnn"
    for pe in ("t5", "rotary"):
        explicit = config.replace(pe=pe, attention="splash")
        assert analytic.attention_on(explicit, accelerators.hardware("v3")) == "xla"
    without_remat = config.replace(remat="none")
    v3, v4 = (estimate_step(without_remat, accelerators.hardware(name), 8) for name in names)
    # Per head, for two heads: the saved scores are replaced by a second copy of the output and a
    # sum.  One layer's scores more are in memory for a short time.
    scores = 2 * 2048 * 4
    saving = 28 * (scores - 2 * (256 * 2 + 4)) + scores
    assert v3.peak_bytes - v4.peak_bytes == 2048 * saving


def test_all_search_candidates_have_the_same_sequences_per_step():
    config = Config.load(str(CONFIGS / "6B_roto_256.json"))
    candidates = search.candidates(config, 256)
    assert len(candidates) == len(set(candidates)) > 100
    for candidate in candidates:
        dp = 256 // candidate.cores_per_replica
        assert dp * candidate.per_replica_batch * candidate.gradient_accumulation_steps == 512
    assert {c.cores_per_replica for c in candidates} == {1, 2, 4, 8, 16}  # divisors of 16 heads
    assert not any(
        candidate.zero
        for candidate in search.candidates(config, 8)
        if candidate.tpu_size == candidate.cores_per_replica
    )
    with pytest.raises(InputError, match="cores_per_replica is 32, expected one of 1, 2, 4, 8, 16"):
        search.candidates(config, 256, {"cores_per_replica": 32})


def test_scaling_tables():
    """Compare the break-even point and the meshes with calculations by hand.

    If the only communication is the all-reduce of 2 N f32 values, the break-even point is the ratio
    of peak FLOP/s to link speed: for GPT-J-6B on a v3 about 8 N / (FLOPs per token) times
    61.5 T / 82 G = 750 tokens.
    """
    config = Config.load(str(CONFIGS / "6B_roto_256.json"))
    lines = scaling.scaling_of(config, accelerators.hardware("v3"), 512).table().splitlines()
    zero_0 = next(line for line in lines if line.startswith("| 0 |"))
    eight = 8 * flops.n_params(config) / flops.hardware_flops_per_token(config)
    assert f" {eight * 750:,.0f} " in zero_0
    by_mp = [line.split(" | ")[1] for line in lines[4:10]]
    assert by_mp == sorted(by_mp)
    rows = [line for line in lines if " x " in line and line.startswith("| ")][1:]
    assert [row.split(" | ")[1] for row in rows] == [
        "1",
        "4",
        "16",
        "64",
        "256",
    ]  # 768: no divisor of 512


def run_script(monkeypatch, capsys, *words: str, status: int = 0) -> str:
    """Return the output of scripts/plan.py for GPT-J-6B, which ends with an exit status."""
    path = str(CONFIGS / "6B_roto_256.json")
    monkeypatch.setattr(sys, "argv", ["plan.py", "--config", path, *words])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # the script sets it too; this undoes it afterwards
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == status
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_scaling_plot_has_every_line(monkeypatch, capsys, tmp_path):
    tables, picture = tmp_path / "scaling.json", tmp_path / "scaling.svg"
    words = ("--topology", "v3-8", "--scaling", "--json")
    tables.write_text(run_script(monkeypatch, capsys, *words))
    monkeypatch.setattr(sys, "argv", ["plot_scaling.py", str(tables), str(picture)])
    plot_scaling.main()
    svg = picture.read_text()
    for label in (*scaling.GENERATIONS, "dp, ZeRO 0", "dp, ZeRO 1", "dp, ZeRO 3", "mp 8"):
        assert svg.count(f">{label}<") == 1
    tables.write_text("[1]")
    with pytest.raises(InputError, match=r"is not the output of plan\.py --scaling --json"):
        plot_scaling.main()


def test_another_mp_keeps_the_sequences_per_step(monkeypatch, capsys):
    words = ("--topology", "v3-8", "--scaling")
    assert "v3, mp 8, 512 sequences" in run_script(monkeypatch, capsys, *words)
    assert "v3, mp 2, 512 sequences" in run_script(monkeypatch, capsys, *words, "--mp", "2")
    halved = run_script(monkeypatch, capsys, *words, "--mp", "2", "--accumulate", "8")
    assert "v3, mp 2, 256 sequences" in halved


@pytest.mark.parametrize("name", ["v2-8", "tpu7x-8", "v5p:4x4x12", "8xH100", "gpu:40GiB", "cpu-8"])
def test_scaling_has_a_column_for_any_devices(monkeypatch, capsys, name):
    monkeypatch.setattr(accelerators, "_measured_flops", lambda dtype: 1e12)
    monkeypatch.setattr(accelerators, "_measured_copy", lambda: 1e10)
    words = ("--topology", name, "--scaling", "--json", "--batch-tokens", "2M")
    result = json.loads(run_script(monkeypatch, capsys, *words))
    generation = result["generation"]
    assert name.lower().startswith(generation) or generation == "h100"
    assert [*result["mp_shares"]] == list(dict.fromkeys([*scaling.GENERATIONS, generation]))
    assert all(share > 0 for share in result["mp_shares"][generation][1:])
    devices = [steps[0]["dp"] * steps[0]["mp"] for steps in result["steps"]]
    # mp is 1 on one GPU, and at most one replica per sequence is of use.
    most = 512 if name.startswith("gpu") else 2048
    assert (result["sequences"], devices) == (
        1024,
        [n for n in (8, 32, 128, 512, 2048) if n <= most],
    )


def test_a_search_limit_of_0_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plan.py", "--topology", "v3-8", "--search", "--limit", "0"])
    with pytest.raises(SystemExit):
        script.main()
    assert "0 is not a positive integer" in capsys.readouterr().err


def fake_plan(config: Config, speed: float, *, fits: bool = True, fast: bool = True) -> Any:
    """Return a fake plan with the attributes that a search reads."""
    return SimpleNamespace(
        dp=8 // config.cores_per_replica,
        mp=config.cores_per_replica,
        cp=config.context_parallel,
        zero=config.zero,
        remat=config.remat,
        shard_activations=config.shard_activations,
        loss_chunk=config.loss_chunk,
        per_replica_batch=config.per_replica_batch,
        accumulation=config.gradient_accumulation_steps,
        peak_bytes=2**30,
        hbm_bytes=2**31,
        fits=fits,
        fast=fast,
        estimate=SimpleNamespace(tokens_per_second=(2 * speed, speed), mfu=(0.5, 0.25)),
    )


def run_search(monkeypatch, compile_one: Any, fixed: dict[str, Any], **keys: Any) -> Any:
    """Run a search for a v3-8 with `compile_one(config, fast)` in place of the compiler."""
    monkeypatch.setattr(
        search, "plan", lambda config, _, fast=False, **__: compile_one(config, fast)
    )
    config = Config(
        layers=2, d_model=128, n_heads=8, n_vocab=512, tpu_size=8, gradient_accumulation_steps=3
    )
    return search.search(config, topology("v3-8"), fixed=fixed, **keys)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("key", "value"),
    [("loss_chunk", 64), ("shard_activations", True), ("per_replica_batch", 3)],
)
def test_a_search_keeps_fixed_settings(monkeypatch, key, value):
    def compile_one(config: Config, fast: bool) -> Any:
        assert getattr(config, key) == value
        return fake_plan(config, config.cores_per_replica, fast=fast)

    result = run_search(monkeypatch, compile_one, {key: value}, limit=4)
    assert len(result.plans) == 4
    assert result.sequences == 24


def test_a_search_shards_activations_where_memory_is_scarce():
    """Close to the limit both settings may be the faster one that fits."""
    config = Config.load(str(CONFIGS / "6B_roto_256.json")).replace(cores_per_replica=8)

    def sharded(batch: int, **fixed: bool) -> list[bool]:
        setting = config.replace(per_replica_batch=batch)
        pairs = search._that_may_fit(setting, topology("v3-256"), fixed)
        return [variant.shard_activations for _, variant in pairs]

    assert [sharded(batch) for batch in (1, 2, 4, 16)] == [[False], [False, True], [True], []]
    assert sharded(2, shard_activations=False) == [False]
    assert sharded(4, shard_activations=False) == []


def test_the_best_plans_of_a_search_are_compiled_in_full(monkeypatch):
    """Quick compilation ranks the plans wrongly and underestimates one's memory.

    In this test, a plan's speed depends only on mp.
    """
    speeds = {True: {1: 3, 2: 2, 4: 4, 8: 1}, False: {1: 5, 2: 6, 4: 7}}
    monkeypatch.setattr(search, "FULL_COMPILES", 2)

    def compile_one(config: Config, fast: bool) -> Any:
        mp = config.cores_per_replica
        return fake_plan(config, speeds[fast][mp], fits=fast or mp != 4, fast=fast)

    fixed = {"zero": 0, "remat": "full", "per_replica_batch": 1}
    result = run_search(monkeypatch, compile_one, fixed)
    assert [(plan.mp, plan.fast) for plan in result.plans] == [(2, False), (1, False), (8, True)]
    assert [plan.mp for plan in result.too_large] == [4]
    rows = result.table().splitlines()[2:]
    assert [row.split("  ")[-1] for row in rows] == ["in full", "in full", "quickly"]
    quick = run_search(monkeypatch, compile_one, fixed, in_full=False)
    assert [(plan.mp, plan.fast) for plan in quick.plans] == [(mp, True) for mp in (4, 1, 2, 8)]


def test_a_search_accounts_for_every_setting(monkeypatch):
    """mp 1 and all settings that need more memory are too large, and mp 2 fails to compile."""

    def compile_one(config: Config, fast: bool) -> Any:
        if config.cores_per_replica == 2:
            raise InputError("no")
        return fake_plan(config, 1.0, fits=config.cores_per_replica > 1, fast=False)

    result = run_search(monkeypatch, compile_one, {"zero": 0}, limit=3)
    tried = len(result.plans) + len(result.too_large) + result.larger + result.refused
    config = Config(
        layers=2, d_model=128, n_heads=8, n_vocab=512, tpu_size=8, gradient_accumulation_steps=3
    )
    all_candidates = search.candidates(config, 8, {"zero": 0})
    assert tried + result.hopeless + result.left_out == len(all_candidates)
    assert result.refused > 0
    assert f"{result.refused} failed to compile" in result.table()
    with pytest.raises(InputError, match="no"):
        run_search(monkeypatch, compile_one, {"cores_per_replica": 2})


def planned(monkeypatch, peaks: Any, **keys: Any) -> tuple[Any, list[Config]]:
    """Return the choice for a v5e-8 and the settings compiled, with fake plans.

    Args:
      peaks: returns the peak in GiB of the n-th compiled setting, or raises an error.
      keys: config keys that are fixed.
    """
    slice_, compiled = topology("v5e-8"), []

    def make(config: Config, _: Any, *, on_paper: bool = False, **options: Any) -> Any:
        result = fake_plan(config, 1.0, fits=False, fast=False)
        result.on_paper = on_paper
        if not on_paper:
            compiled.append(config)
            result.peak_bytes = int(peaks(len(compiled)) * 2**30)
            result.fits = result.peak_bytes <= slice_.hbm
        return result

    monkeypatch.setattr(search, "plan", make)
    config = Config.load(None, model=keys.pop("model", "pythia-1b"))
    config = search.with_batch(config, 2**19, [8])
    return search.choose(config, slice_, fixed={"per_replica_batch": 4} | keys), compiled


def test_the_first_choice_is_the_fastest_with_memory_to_spare(monkeypatch):
    result, compiled = planned(monkeypatch, lambda number: 12)
    assert (result.fits, result.on_paper, len(compiled)) == (True, False, 1)
    slice_ = topology("v5e-8")
    hardware = slice_.hardware("bfloat16")
    config = search.with_batch(Config.load(None, model="pythia-1b"), 2**19, [8])
    estimates = [
        (estimate_step(c, hardware, 8), c)
        for c in search.candidates(config, 8, {"per_replica_batch": 4})
    ]
    sure = [pair for pair in estimates if 1.1 * pair[0].peak_bytes <= slice_.hbm]
    best = min(sure, key=lambda pair: pair[0].step_seconds[1])
    chosen = estimate_step(compiled[0], hardware, 8)
    assert chosen.step_seconds[1] <= best[0].step_seconds[1]
    assert 1.1 * chosen.peak_bytes <= slice_.hbm
    own = compiled[0]
    dp = 8 // own.cores_per_replica // own.context_parallel
    assert dp * own.per_replica_batch * own.gradient_accumulation_steps * own.seq == 2**19


def test_a_choice_that_does_not_fit_is_followed_by_the_next(monkeypatch):
    result, compiled = planned(monkeypatch, lambda number: (99, 14)[number > 1])
    assert (result.fits, len(compiled)) == (True, 2)
    assert compiled[0] != compiled[1]
    result, compiled = planned(monkeypatch, lambda number: 30 - number)
    assert (result.fits, len(compiled)) == (False, search.MOST_CHOICES)
    assert result.peak_bytes == (30 - search.MOST_CHOICES) * 2**30

    def refuse(number: int) -> float:
        if number == 1:
            raise InputError("no")
        return 12

    result, compiled = planned(monkeypatch, refuse, zero=1)
    assert (result.fits, len(compiled)) == (True, 2)
    assert {config.zero for config in compiled} == {1}


def test_a_choice_is_on_paper_if_the_time_is_over_or_nothing_may_fit(monkeypatch):
    def run_out(number: int) -> float:
        raise OutOfTimeError

    result, compiled = planned(monkeypatch, run_out)
    assert (result.on_paper, len(compiled)) == (True, 1)
    result, compiled = planned(monkeypatch, lambda number: 1, model="llama3-70b")
    assert (result.on_paper, result.fits, compiled) == (True, False, [])


@pytest.mark.parametrize(
    ("most", "options", "expected"),
    [
        (9, {"deadline": math.inf}, [True, False, True, False]),
        (3, {"deadline": math.inf}, [True, False, True]),  # the time is over
        (9, {"fast": True}, [True]),
        (9, {}, [False]),
    ],
)
def test_a_choice_with_a_time_limit_is_compiled_quickly_first(monkeypatch, most, options, expected):
    """The second setting fits in full; the first one only if it is compiled quickly."""
    calls: list[bool] = []

    def make(config: Config, _: Any, *, fast: bool = False, **options: Any) -> Any:
        if len(calls) == most:
            raise OutOfTimeError
        calls.append(fast)
        return fake_plan(config, 1.0, fits=len(calls) != 2, fast=fast)

    monkeypatch.setattr(search, "plan", make)
    config = search.with_batch(Config.load(None, model="pythia-1b"), 2**19, [8])
    fixed = {"per_replica_batch": 4}
    result = search.choose(config, topology("v5e-8"), fixed=fixed, **options)
    assert (calls, result.fits, result.fast) == (expected, True, expected[-1])


def test_a_search_that_runs_out_of_time_keeps_what_it_found(monkeypatch):
    """Once while it compiles quickly, and once while it compiles in full."""
    for most, fast in ((2, [True, True]), (5, [False, True, True, True])):
        calls: list[Config] = []

        def compile_one(config: Config, quickly: bool, calls=calls, most=most) -> Any:
            if len(calls) == most:
                raise OutOfTimeError
            calls.append(config)
            return fake_plan(config, config.cores_per_replica, fast=quickly)

        fixed = {"zero": 0, "remat": "full", "per_replica_batch": 1}
        result = run_search(monkeypatch, compile_one, fixed)
        assert [plan.fast for plan in result.plans] == fast
        assert result.out_of_time
        assert result.table().endswith(search.OUT_OF_TIME)


@pytest.mark.parametrize("seed", range(10))
def test_a_batch_in_tokens_is_kept_or_refused(seed):
    rng = np.random.default_rng(seed)
    config = Config.load(None, model="pythia-1b")
    devices = [int(n) for n in 2 ** rng.integers(0, 9, 3)]
    sequences = int(rng.integers(1, 5000))
    batch = search.with_batch(config, sequences * config.seq, devices)
    assert analytic.sequences_per_step(batch) == sequences
    rest = int(rng.integers(1, config.seq))
    with pytest.raises(InputError, match="not a whole number of sequences of 2,048") as refused:
        search.with_batch(config, sequences * config.seq + rest, devices)
    nearest = re.search(r"divides is ([\d,]+), ([\d,]+) sequences", str(refused.value))
    assert nearest
    tokens, rows = (int(number.replace(",", "")) for number in nearest.groups())
    assert tokens == rows * config.seq
    assert all(rows % count == 0 for count in devices)
    assert rows == max(devices) or abs(tokens - sequences * config.seq - rest) <= (
        max(devices) * config.seq / 2
    )
