"""What a step costs on paper: links, memory traffic in a program's text, settings in order."""

from pathlib import Path

import pytest

from mesh_transformer import flops, plan_search, scaling
from mesh_transformer.config import Config
from mesh_transformer.hlo_bytes import Program
from mesh_transformer.roofline import estimate, link_seconds, sent
from mesh_transformer.scaling import on_paper

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.mark.parametrize(
    ("kind", "size", "devices", "expected"),
    [
        ("all-reduce", 800, 8, 1400),  # 7/8 of it out, and 7/8 of it on
        ("all-gather", 800, 8, 700),
        ("reduce-scatter", 100, 8, 700),  # the result is an eighth
        ("all-to-all", 800, 8, 700),
        ("collective-permute", 800, 8, 800),
        ("all-reduce", 800, 1, 0),
    ],
)
def test_what_a_device_sends_in_a_ring(kind, size, devices, expected):
    assert sent(kind, size, devices) == expected


def test_links_are_all_busy_or_two_of_them():
    v5p = flops.hardware("v5p")  # six links of 100 GB/s
    assert link_seconds(600e9, v5p) == pytest.approx((1, 3))
    assert link_seconds(450e9, flops.hardware("h100")) == pytest.approx((1, 1))


def test_a_step_is_between_its_longest_part_and_the_sum():
    config = Config.load(str(CONFIGS / "6B_roto_256.json"))
    hardware, tokens = flops.hardware("v5e"), 8 * 2048
    found = estimate(
        config,
        hardware,
        devices=8,
        tokens=tokens,
        hbm_traffic_bytes=819 * 10**8,  # 0.1 s
        link_bytes=20 * 10**9,  # 0.1 s over four links, 0.2 s over two
    )
    compute = tokens * flops.hardware_flops_per_token(config) / (8 * 197e12)
    assert found.compute_seconds == pytest.approx(compute)
    assert found.step_seconds == pytest.approx((compute, compute + 0.3))
    assert found.hfu[0] == pytest.approx(1)
    useful = flops.palm_flops_per_token(config) / flops.hardware_flops_per_token(config)
    assert found.mfu[0] == pytest.approx(useful)
    text = "\n".join(found.lines())
    assert "estimate on v5e, peak 197 TFLOP/s" in text
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


def test_memory_traffic_of_a_made_program():
    """A row has 400 bytes.  The addition moves 24 of them.  A turn of the loop reads a row and
    its number and writes it, copies it on-chip (one read), and writes it from there where the
    number says: what is on-chip, and the rows beside it, do not count."""
    turn = (400 + 4 + 400) + 400 + (4 + 400)
    program = Program(PROGRAM)
    assert program.moved() == 24 * 400 + 8 * turn
    assert program.moved_in_a_loop() == turn


def test_paper_of_gpt_j_on_a_v3_8():
    """58 all-reduces of 2048 x 4096 bf16 over 8 devices: 1.70 GB sent; no replicas, no dp."""
    config = Config.load(str(CONFIGS / "6B_roto_256.json")).replace(gradient_accumulation_steps=1)
    found = on_paper(config, flops.hardware("v3"), 8)
    assert (found.dp, found.mp, found.dp_bytes) == (1, 8, 0)
    assert found.mp_bytes == 58 * 2 * 7 * 2048 * 4096 * 2 // 8
    # f32 parameters and moments, a bf16 copy, and the residual stream of each layer.
    eighth = flops.n_params(config) // 8
    assert found.memory_bytes == (12 + 2) * eighth + 28 * 2048 * 4096 * 2


def test_paper_of_zero():
    """With 32 replicas each has 31/32 of its part to send: f32 twice, f32 and bf16 once with
    ZeRO 1, and with ZeRO 3 f32 and twice bf16 in each microbatch."""
    config = Config.load(str(CONFIGS / "6B_roto_256.json"))
    part = flops.n_params(config) // 8
    for zero, width in ((0, 8), (1, 6), (3, 16 * 8)):
        found = on_paper(config.replace(zero=zero), flops.hardware("v3"), 256)
        assert found.dp_bytes == pytest.approx(width * part * 31 / 32, rel=1e-6)
    assert on_paper(config.replace(zero=1), flops.hardware("v3"), 256).memory_bytes < 8 * 2**30


def test_every_candidate_trains_on_as_many_sequences_a_step():
    config = Config.load(str(CONFIGS / "6B_roto_256.json"))
    found = plan_search.candidates(config, 256)
    assert len(found) == len(set(found)) > 100
    for one in found:
        dp = 256 // one.cores_per_replica
        assert dp * one.per_replica_batch * one.gradient_accumulation_steps == 512
    assert {one.cores_per_replica for one in found} == {1, 2, 4, 8, 16}  # of 16 heads
    assert not any(
        one.zero
        for one in plan_search.candidates(config, 8)
        if one.tpu_size == one.cores_per_replica
    )


def test_the_tables_of_scaling():
    """With tokens that are nothing but 2 N of f32 to sum, break-even is the peak over the links:
    for GPT-J-6B about (8 N) / (FLOPs a token) of 61.5 T / 82 G = 750 tokens on a v3."""
    config = Config.load(str(CONFIGS / "6B_roto_256.json"))
    lines = scaling.markdown(config, "v3").splitlines()
    zero_0 = next(line for line in lines if line.startswith("| 0 |"))
    eight = 8 * flops.n_params(config) / flops.hardware_flops_per_token(config)
    assert f" {eight * 750:,.0f} " in zero_0
    by_mp = [line.split(" | ")[1] for line in lines[4:10]]
    assert by_mp == sorted(by_mp)
    rows = [line for line in lines if " x " in line and line.startswith("| ")][1:]
    assert [row.split(" | ")[1] for row in rows] == ["1", "4", "16", "64", "256"]  # 768: not of 512
