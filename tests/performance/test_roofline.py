"""What a step costs on paper: links, memory traffic in a program's text, settings in order."""

import functools
import itertools
import math
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
from mesh_transformer.mesh import accelerators
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import attention as attention_module
from mesh_transformer.model import flops, gptj
from mesh_transformer.model.loss import train_loss
from mesh_transformer.performance import hlo, scaling, search
from mesh_transformer.performance.hlo import Program
from mesh_transformer.performance.roofline import estimate, link_seconds, sent, traffic_of
from mesh_transformer.performance.scaling import on_paper
from mesh_transformer.performance.topology import topology
from mesh_transformer.util import InputError, to_bf16
from scripts import plot_scaling

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

CONFIGS = Path(__file__).parents[2] / "configs"


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
    v5p = accelerators.hardware("v5p")  # six links of 100 GB/s
    assert link_seconds(600e9, v5p) == pytest.approx((1, 3))
    assert link_seconds(450e9, accelerators.hardware("h100")) == pytest.approx((1, 1))


def test_a_step_is_between_its_longest_part_and_the_sum():
    config = Config.load(str(CONFIGS / "6B_roto_256.json"))
    hardware, tokens = accelerators.hardware("v5e"), 8 * 2048
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
    kernel = estimate(
        config,
        hardware,
        devices=8,
        tokens=tokens,
        hbm_traffic_bytes=0,
        link_bytes=0,
        attention="splash",
    )
    splash = flops.hardware_flops_per_token(config, "splash")
    assert kernel.compute_seconds == pytest.approx(tokens * splash / (8 * 197e12))
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
        # The operand is read and twice as much is written.
        ("(f32[8,100]{1,0}, f32[16,100]{1,0}) all-gather-start(%a), dimensions={0}", 3 * 3200),
        ("f32[8,100]{1,0} all-reduce-start(%a)", 2 * 3200),
        # Of what is computed beside other work that counts which it reads and writes.
        ("((f32[8,100]{1,0}), f32[1,100]{1,0}) async-start(%a), calls=%wrapped", 2 * 400),
        ("((f32[8,100]{1,0}), f32[1,100]{1,0:S(1)}) async-start(%a), calls=%wrapped", 400),
    ],
)
def test_memory_traffic_of_what_is_started(line, moved):
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
    [  # two rows that are read and written; a fusion reads their numbers too
        ("scatter(%a, %i, %b), to_apply=%second", 2 * 800),
        ("fusion(%a, %i, %b), kind=kCustom, calls=%fused", 8 + 2 * 800),
        # What is added to is read as well.
        ("scatter(%a, %i, %b), to_apply=%sum", 3 * 800),
        ("fusion(%a, %i, %b), kind=kCustom, calls=%adding", 8 + 3 * 800),
        # Eight rows of zeros are written before two of them are.
        ("fusion(%i, %b), kind=kCustom, calls=%fresh", 8 + 800 + 3200),
    ],
)
def test_memory_traffic_of_what_is_scattered_in_place(line, moved):
    assert Program(SCATTERED.replace("LINE", line)).moved() == moved


def test_runs_are_as_many_as_asked_for_or_take_so_long(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(accelerators, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    runs: list[None] = []
    assert accelerators._run_seconds(lambda: runs.append(None), 3) == [1] * 3
    assert len(runs) == 4  # the first is left out
    assert accelerators._run_seconds(lambda: None, 3, 7.0) == [1] * 7


def test_every_array_of_a_collective_in_pieces_counts_once():
    """Two pieces of one exchange of two arrays, and one of another."""
    piece = (
        "(f32[8]{0}, f32[4]{0}) all-reduce(%a, %b), replica_groups={{0,1}}, "
        'frontend_attributes={chain_id="C"}'
    )
    lines = [f"  %first = {piece}", f"  %second = {piece}", f"  %third = {piece.replace('C', 'D')}"]
    text = "\n".join(["ENTRY %main (a: f32[8], b: f32[4]) -> f32[8] {", *lines, "}"])
    found = hlo.parse(text).collectives
    assert [each.shape for each in found] == [(8,), (4,), (8,), (4,)]


def test_a_program_is_not_its_own_loop_over_one_layer():
    """What is outside of every loop is no layer's, though it runs once, as a single layer does."""
    config = Config(layers=1, d_model=8, n_heads=2, n_vocab=8, seq=4, cores_per_replica=2)
    text = """ENTRY %main (a: f32[1,4,8]) -> f32[1,4,8] {
  %a = f32[1,4,8]{2,1,0} parameter(0)
  ROOT %sum = f32[1,4,8]{2,1,0} all-reduce(%a), replica_groups={{0,1}}
}
"""
    mesh = Mesh(np.asarray(jax.devices()[:2]).reshape(1, 2), ("dp", "mp"))
    found = traffic_of(text, config, mesh)
    assert (found.layer_forward, found.layer_backward) == (0, 0)
    assert [each.place for each in found.exchanges] == ["step"]


def test_paper_of_gpt_j_on_a_v3_8():
    """58 all-reduces of 2048 x 4096 bf16 over 8 devices: 1.70 GB sent; no replicas, no dp."""
    config = Config.load(str(CONFIGS / "6B_roto_256.json")).replace(gradient_accumulation_steps=1)
    found = on_paper(config, accelerators.hardware("v3"), 8)
    assert (found.dp, found.mp, found.dp_bytes) == (1, 8, 0)
    assert found.mp_bytes == 58 * 2 * 7 * 2048 * 4096 * 2 // 8
    # f32 parameters and moments, and at the update gradients; with several microbatches also a
    # bf16 copy and the residual stream of each layer; with eight times the batch these are more.
    eighth, stream = flops.n_params(config) // 8, 28 * 2048 * 4096 * 2
    assert found.memory_bytes == (12 + 4) * eighth
    more = on_paper(config.replace(gradient_accumulation_steps=2), accelerators.hardware("v3"), 8)
    assert more.memory_bytes == (12 + 4 + 2) * eighth + stream
    batch = on_paper(config.replace(per_replica_batch=8), accelerators.hardware("v3"), 8)
    assert batch.memory_bytes == (12 + 2) * eighth + 8 * stream


def test_paper_of_zero():
    """With 32 replicas each has 31/32 of its part to send: f32 twice, f32 and bf16 once with
    ZeRO 1, and with ZeRO 3 f32 and twice bf16 in each microbatch."""
    config = Config.load(str(CONFIGS / "6B_roto_256.json"))
    part = flops.n_params(config) // 8
    for zero, width in ((0, 8), (1, 6), (3, 16 * 8)):
        found = on_paper(config.replace(zero=zero), accelerators.hardware("v3"), 256)
        assert found.dp_bytes == pytest.approx(width * part * 31 / 32, rel=1e-6)
    assert (
        on_paper(config.replace(zero=1), accelerators.hardware("v3"), 256).memory_bytes < 8 * 2**30
    )


@pytest.mark.parametrize("block", ["gptj", "geglu"])
@pytest.mark.parametrize("remat", ["full", "dots", "none"])
@pytest.mark.parametrize("attention", ["xla", "blocks", "splash_interpreted"])
def test_on_paper_a_layer_keeps_what_its_backward_pass_reads(attention, remat, block):
    """Of a gradient's saved arrays those that have a layer, a batch and all positions."""
    batch = 5
    config = Config(
        layers=3,
        d_model=48,
        n_heads=4,
        n_vocab=56,
        seq=384,
        block=block,
        remat=remat,
        attention=attention,
    )
    tokens = jnp.zeros((batch, config.seq), jnp.int32)

    def loss(params: Any) -> jax.Array:
        par = Auto(attention=attention)
        return train_loss(to_bf16(params), tokens, tokens, config, par)[0]

    params = jax.eval_shape(functools.partial(gptj.init, config), jax.random.key(0))
    saved = jax.tree.leaves(jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params))
    kept = sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf in saved
        if leaf.shape[:2] == (config.layers, batch)
    )
    one = scaling.kept_of_a_layer(config, attention)
    assert kept == config.layers * batch * config.seq * one


def test_attention_on_paper_is_the_generation_s(monkeypatch):
    config = Config.load(str(CONFIGS / "6B_roto_256.json"))
    names = {
        name: scaling.attention_on(config, accelerators.hardware(name)) for name in ("v3", "v4")
    }
    assert names == {"v3": "xla", "v4": "splash"}
    # A GPU's kernels count where they were tried.
    assert scaling.attention_on(config, accelerators.hardware("h200")) == "xla"
    monkeypatch.setattr(attention_module, "_cudnn_disagrees", lambda head_size: None)
    assert scaling.attention_on(config, accelerators.hardware("h200")) == "cudnn"
    for each in ("t5", "rotary"):
        named = config.replace(pe=each, attention="splash")
        assert scaling.attention_on(named, accelerators.hardware("v3")) == "xla"
    whole = config.replace(remat="none")
    v3, v4 = (scaling.on_paper(whole, accelerators.hardware(name), 8) for name in names)
    # Of two heads, the scores for what each gave once more, and a sum.
    less = 2 * (2048 * 4 - 256 * 2 - 4)
    assert v3.memory_bytes - v4.memory_bytes == 28 * 2048 * less


def test_every_candidate_trains_on_as_many_sequences_a_step():
    config = Config.load(str(CONFIGS / "6B_roto_256.json"))
    found = search.candidates(config, 256)
    assert len(found) == len(set(found)) > 100
    for one in found:
        dp = 256 // one.cores_per_replica
        assert dp * one.per_replica_batch * one.gradient_accumulation_steps == 512
    assert {one.cores_per_replica for one in found} == {1, 2, 4, 8, 16}  # of 16 heads
    assert not any(
        one.zero for one in search.candidates(config, 8) if one.tpu_size == one.cores_per_replica
    )


def test_the_tables_of_scaling():
    """With tokens that are nothing but 2 N of f32 to sum, break-even is the peak over the links:
    for GPT-J-6B about (8 N) / (FLOPs a token) of 61.5 T / 82 G = 750 tokens on a v3."""
    config = Config.load(str(CONFIGS / "6B_roto_256.json"))
    lines = scaling.scaling_of(config, "v3", 512).table().splitlines()
    zero_0 = next(line for line in lines if line.startswith("| 0 |"))
    eight = 8 * flops.n_params(config) / flops.hardware_flops_per_token(config)
    assert f" {eight * 750:,.0f} " in zero_0
    by_mp = [line.split(" | ")[1] for line in lines[4:10]]
    assert by_mp == sorted(by_mp)
    rows = [line for line in lines if " x " in line and line.startswith("| ")][1:]
    assert [row.split(" | ")[1] for row in rows] == ["1", "4", "16", "64", "256"]  # 768: not of 512


def run_script(monkeypatch, capsys, *words: str) -> str:
    """What scripts/plan.py prints for GPT-J-6B."""
    path = str(CONFIGS / "6B_roto_256.json")
    monkeypatch.setattr(sys, "argv", ["plan.py", "--config", path, *words])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # as the script does, but not for other tests
    script.main()
    return capsys.readouterr().out


def test_a_picture_of_scaling_has_every_line(monkeypatch, capsys, tmp_path):
    measured, picture = tmp_path / "scaling.json", tmp_path / "scaling.svg"
    words = ("--topology", "v3-8", "--scaling", "--json")
    measured.write_text(run_script(monkeypatch, capsys, *words))
    monkeypatch.setattr(sys, "argv", ["plot_scaling.py", str(measured), str(picture)])
    plot_scaling.main()
    drawn = picture.read_text()
    for label in (*scaling.GENERATIONS, "dp, ZeRO 0", "dp, ZeRO 1", "dp, ZeRO 3", "mp 8"):
        assert drawn.count(f">{label}<") == 1
    measured.write_text("[1]")
    with pytest.raises(InputError, match=r"expected the output of plan\.py --scaling --json"):
        plot_scaling.main()


def test_another_mp_keeps_the_sequences_a_step(monkeypatch, capsys):
    words = ("--topology", "v3-8", "--scaling")
    assert "v3, mp 8, 512 sequences" in run_script(monkeypatch, capsys, *words)
    assert "v3, mp 2, 512 sequences" in run_script(monkeypatch, capsys, *words, "--mp", "2")
    halved = run_script(monkeypatch, capsys, *words, "--mp", "2", "--accumulate", "8")
    assert "v3, mp 2, 256 sequences" in halved


def test_flags_that_do_not_go_together_or_count_nothing(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_script(monkeypatch, capsys, "--topology", "v3-8", "--search", "--limit", "0")
    assert "0 is not a positive integer" in capsys.readouterr().err


def told(config: Config, speed: float, *, fits: bool = True, fast: bool = True) -> Any:
    """As much of a plan as a search reads."""
    return SimpleNamespace(
        dp=8 // config.cores_per_replica,
        mp=config.cores_per_replica,
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


def searched(monkeypatch, compile_one: Any, fixed: dict[str, Any], **keys: Any) -> Any:
    """A search for a v3-8 with `compile_one(config, fast)` as the compiler."""
    monkeypatch.setattr(search, "plan", lambda config, _, fast=False: compile_one(config, fast))
    config = Config(
        layers=2, d_model=128, n_heads=8, n_vocab=512, tpu_size=8, gradient_accumulation_steps=3
    )
    return search.search(config, topology("v3-8"), fixed=fixed, **keys)


@pytest.mark.parametrize(
    ("key", "value"),
    [("loss_chunk", 64), ("shard_activations", True), ("per_replica_batch", 3)],
)
def test_a_search_keeps_what_is_given(monkeypatch, key, value):
    def compile_one(config: Config, fast: bool) -> Any:
        assert getattr(config, key) == value
        return told(config, config.cores_per_replica, fast=fast)

    found = searched(monkeypatch, compile_one, {key: value}, limit=4)
    assert len(found.plans) == 4
    assert found.sequences == 24


def test_activations_stay_whole_where_that_is_asked(monkeypatch):
    """Though nothing else has room for them."""
    config = Config.load(str(CONFIGS / "6B_roto_256.json")).replace(per_replica_batch=16)
    slice_, hardware = topology("v3-256"), accelerators.hardware("v3")
    asked = {"shard_activations": False}
    assert search._with_room(config, hardware, slice_, {})[1].shard_activations
    paper, kept = search._with_room(config, hardware, slice_, asked)
    assert not kept.shard_activations
    assert paper.memory_bytes > slice_.hbm


def test_the_best_of_a_search_are_compiled_in_full(monkeypatch):
    """Where the quick figures have the order wrong, and one too small: mp says how fast."""
    speeds = {True: {1: 4, 2: 3, 4: 2, 8: 1}, False: {1: 5, 2: 6, 4: 7}}

    def compile_one(config: Config, fast: bool) -> Any:
        mp = config.cores_per_replica
        return told(config, speeds[fast][mp], fits=fast or mp != 4, fast=fast)

    fixed = {"zero": 0, "remat": "full", "per_replica_batch": 1}
    found = searched(monkeypatch, compile_one, fixed)
    assert [(one.mp, one.fast) for one in found.plans] == [(2, False), (1, False), (8, True)]
    assert [one.mp for one in found.too_large] == [4]
    rows = found.table().splitlines()[2:]
    assert [row.split("  ")[-1] for row in rows] == ["in full", "in full", "quickly"]
    quick = searched(monkeypatch, compile_one, fixed, in_full=False)
    assert [(one.mp, one.fast) for one in quick.plans] == [(mp, True) for mp in (1, 2, 4, 8)]


def test_a_search_says_what_became_of_every_setting(monkeypatch):
    """mp 1 is too large, and so is all that keeps more; mp 2 is refused."""

    def compile_one(config: Config, fast: bool) -> Any:
        if config.cores_per_replica == 2:
            raise InputError("no")
        return told(config, 1.0, fits=config.cores_per_replica > 1, fast=False)

    found = searched(monkeypatch, compile_one, {"zero": 0}, limit=3)
    tried = len(found.plans) + len(found.too_large) + found.larger + found.refused
    config = Config(
        layers=2, d_model=128, n_heads=8, n_vocab=512, tpu_size=8, gradient_accumulation_steps=3
    )
    every = search.candidates(config, 8, {"zero": 0})
    assert tried + found.hopeless + found.left_out == len(every)
    assert found.refused > 0
    assert f"{found.refused} failed to compile" in found.table()
    with pytest.raises(InputError, match="no"):
        searched(monkeypatch, compile_one, {"cores_per_replica": 2})
