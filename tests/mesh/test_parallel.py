"""Counts of collectives in the compiled step; virtual devices, meshes and layouts."""

import functools
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mesh_transformer.config import Config
from mesh_transformer.mesh.declaration import Declaration
from mesh_transformer.mesh.devices import fit_to_devices, make_mesh
from mesh_transformer.mesh.parallel import Manual
from mesh_transformer.model import transformer
from mesh_transformer.performance.groups import Groups
from mesh_transformer.performance.hlo import Collective, Loop, parse
from mesh_transformer.training import step
from mesh_transformer.util import InputError
from tests.conftest import AS_USERS_COMPILE, SMALL, random_batch

DP, MP, ACCUMULATION, ROWS = 2, 4, 4, 3


def over(axis: str) -> Groups:
    """Return the device groups of a collective over one mesh axis."""
    devices = np.arange(DP * MP).reshape(DP, MP)
    rows = devices if axis == "mp" else devices.T
    return frozenset(frozenset(map(int, row)) for row in rows)


def test_asynchronous_collectives_are_counted_by_their_results():
    lines = (
        "ENTRY %main () -> f32[] {",
        "  %a = (f32[2,8], f32[16,8]) all-gather-start(f32[2,8] %x), replica_groups={{0,1}}",
        "  %b = (bf16[4], bf16[4], u32[], u32[]) collective-permute-start(bf16[4] %y)",
        "  %c = (f32[3], s32[5]) all-reduce-start(f32[3] %z, s32[5] %w), replica_groups={{0},{1}}",
        "  %d = f32[16,8] all-gather-done((f32[2,8], f32[16,8]) %a)",
        "}",
    )
    collectives = parse("\n".join(lines)).collectives
    assert [(c.kind, c.shape, c.bytes, c.is_alone) for c in collectives] == [
        ("all-gather", (16, 8), 512, False),
        ("collective-permute", (4,), 8, False),
        ("all-reduce", (3,), 12, True),
        ("all-reduce", (5,), 20, True),
    ]


@dataclass
class Program:
    """A compiled program, and the number of argument bytes that it reuses for its outputs."""

    whole: Loop
    reused: int

    def loops(self) -> tuple[list[Collective], list[list[Collective]], list[list[Collective]]]:
        """Return the collectives outside loops, by microbatch loop, and by inner layer loop."""
        assert {loop.trips for loop in self.whole.loops} == {ACCUMULATION}
        layer = [loop for microbatch in self.whole.loops for loop in microbatch.loops]
        # The compiler for CPUs writes the gradient of a gather as a loop.
        assert not any(inner.collectives for loop in layer for inner in loop.all()[1:])
        microbatch = [loop.collectives for loop in self.whole.loops]
        return self.whole.collectives, microbatch, [loop.collectives for loop in layer]


def compiled_step(**changes: Any) -> Program:
    """Compile the train step on 2 x 4 devices: four microbatches of 3 sequences per replica."""
    compiled = lowered_step(**changes).compile()
    return Program(parse(compiled.as_text()), compiled.memory_analysis().alias_size_in_bytes)


def lowered_step(**changes: Any) -> Any:
    values = {"layers": 4, "cores_per_replica": MP, "tpu_size": DP * MP} | changes
    config = Config.from_dict(SMALL | values)
    state = jax.eval_shape(functools.partial(step.init_state, config), jax.random.key(0))
    batch = random_batch(config, ACCUMULATION, DP * ROWS)
    mesh = make_mesh(config, jax.devices()[: config.tpu_size])
    train: Any = step.compile_train(step.StateLayout(config, mesh))
    return train.lower(state, batch)


def activations(collectives: list[Collective]) -> list[Collective]:
    """Return the all-reduces of an array as large as a replica's residual stream."""
    size = ROWS * SMALL["seq"] * SMALL["d_model"]
    return [c for c in collectives if c.kind == "all-reduce" and math.prod(c.shape) == size]


def check_gradients_are_reduced_once_per_step(program: Program, zero: int, **changes: Any) -> None:
    once, microbatch, layer = program.loops()
    inside = [c for collectives in (*microbatch, *layer) for c in collectives]
    assert {c.groups for c in inside} == {over("mp")}

    # Every gradient is summed over dp exactly once per step, as are four metrics.
    values = SMALL | {"layers": 4, "cores_per_replica": MP} | changes
    declared = transformer.declarations(Config.from_dict(values))
    all_declarations = jax.tree.leaves(declared, is_leaf=lambda node: isinstance(node, Declaration))
    leaves = [d for d in all_declarations if not d.frozen]
    entries = sum(math.prod(d.shape) // (MP if "mp" in tuple(d.spec) else 1) for d in leaves)
    size = {"all-reduce": 1, "reduce-scatter": DP}
    summed = sum(
        math.prod(c.shape) * size[c.kind]
        for c in once
        if c.groups == over("dp") and c.kind in size and c.shape
    )
    assert summed == entries + 4

    # The new state reuses the old state's memory: f32 parameters, two moments and two counters.
    frozen = [d for d in all_declarations if d.frozen]
    frozen_entries = sum(math.prod(d.shape) // (MP if "mp" in tuple(d.spec) else 1) for d in frozen)
    zero_shards = [1 if d.zero_axis(DP) is None or not zero else DP for d in leaves]
    trained_entries = sum(
        math.prod(d.shape) // (MP if "mp" in tuple(d.spec) else 1) // parts
        for d, parts in zip(leaves, zero_shards, strict=True)
    )
    assert program.reused == 4 * (3 * trained_entries + frozen_entries + 2)


SEQUENTIAL = {"block": "gpt2", "hf_type": "gpt_neox", "pe": "rotary", "rotary_pairs": "halves"}
GROUPED = {"block": "llama", "key_heads": 4, "norm_place": "both", "qk_norm": "head"}
COPIED = GROUPED | {"key_heads": 2}  # on 4 shards


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("block", "count", "remat", "zero"),
    [
        ("gptj", 1, "full", 0),
        ("gptj", 1, "none", 1),
        ("gptj", 1, "full", 1),
        ("gptj", 1, "none", 0),
        ("geglu", 1, "full", 1),
        ("neox", 1, "full", 1),
        ("neox", 1, "none", 0),
        ("gpt2", 2, "full", 0),
        ("gpt2", 2, "none", 1),
        ("sequential", 2, "full", 1),
        ("llama", 2, "none", 1),
        ("grouped", 2, "full", 1),
        ("copied", 2, "none", 1),
    ],
)
def test_layers_reduce_activations_once_per_norm_or_less(block, count, remat, zero):
    """A layer has one all-reduce per pass, or two if the feed-forward reads attention's output."""
    named = {"sequential": SEQUENTIAL | {"tie_head": False}, "grouped": GROUPED, "copied": COPIED}
    changes = named.get(block, {"block": block})
    program = compiled_step(partitioning="shard_map", remat=remat, zero=zero, **changes)
    _, (microbatch,), layer = program.loops()
    with_collectives = [collectives for collectives in layer if collectives]
    forward, backward = sorted(with_collectives, key=lambda f: "transpose" in f[0].where)
    assert len(forward) == len(activations(forward)) == count
    assert len(backward) == len(activations(backward)) == count
    assert not any("transpose" in c.where for c in forward)
    assert all("transpose" in c.where for c in backward)
    check_gradients_are_reduced_once_per_step(program, zero, **changes)
    if block == "copied":
        # Each shard has a part of the gradients of keys and values, which are summed once per
        # microbatch, for all layers together.
        keys = (4, SMALL["d_model"], 2 * SMALL["d_model"] // SMALL["n_heads"])
        assert [c.shape for c in microbatch].count(keys) == 2
    if block == "neox":
        # The norms follow the fan-out, so each shard has a part of the gradients of their scales
        # and offsets.  They are summed once per microbatch, for all layers together.
        norms = [c.shape for c in microbatch if c.shape == (4, SMALL["d_model"])]
        assert len(norms) == 4


@pytest.mark.quick(1)
@pytest.mark.parametrize("partitioning", ["shard_map", "jit"])
def test_a_device_computes_only_the_keys_of_its_queries(partitioning):
    """Also in the gradients of the matrices; of the 2 key heads, each of 4 devices needs one."""
    text = lowered_step(partitioning=partitioning, remat="none", **COPIED).compile().as_text()
    dots = re.findall(r"= f32\[(\d+),(\d+)\]\S* dot\(.*op_name=\"\S*/layer/([kv])/", text)
    tokens, width, head = (
        ROWS * SMALL["seq"],
        SMALL["d_model"],
        SMALL["d_model"] // SMALL["n_heads"],
    )
    expected = [(tokens, head), (tokens, width), (width, head)]  # forward and both gradients
    for name in "kv":
        actual = sorted((int(rows), int(columns)) for rows, columns, of in dots if of == name)
        assert actual == sorted(expected)


@pytest.mark.slow
def test_a_split_stream_is_gathered_and_scattered_once_per_layer_and_pass():
    program = compiled_step(shard_activations=True, remat="none", zero=1)
    check_gradients_are_reduced_once_per_step(program, 1)
    _, (microbatch,), layer = program.loops()
    size = ROWS * SMALL["seq"] * SMALL["d_model"]
    stream_collectives = [
        sorted((c.kind, math.prod(c.shape)) for c in collectives if c.groups == over("mp"))
        for collectives in layer
        if collectives
    ]
    # With remat, the backward pass would gather once more for the recomputation.
    assert stream_collectives == [[("all-gather", size), ("reduce-scatter", size // MP)]] * 2
    # Each device computes the gradients of norms and biases from its own positions only.  They are
    # summed once per microbatch, for all layers together.
    layers, width = 4, SMALL["d_model"]
    assert (
        sorted(c.shape for c in microbatch if c.shape == (layers, width)) == [(layers, width)] * 3
    )


@pytest.mark.slow
def test_without_shards_no_stream_is_split():
    """The compiler for TPUs fails on collectives of one device."""
    changes = {"cores_per_replica": 1, "tpu_size": DP, "zero": 1}
    own = lowered_step(**changes, shard_activations=True).as_text()
    assert own == lowered_step(**changes).as_text()


@pytest.mark.slow
def test_adapters_add_no_all_reduces_of_activations():
    adapters = {"lora_rank": 2, "lora_targets": ["q", "k", "v", "o", "fc", "out"]}
    program = compiled_step(**adapters, zero=1)
    check_gradients_are_reduced_once_per_step(program, 1, **adapters)
    _, (microbatch,), layer = program.loops()
    for collectives in filter(None, layer):
        assert len(collectives) == len(activations(collectives)) == 1
    # A factor that is replicated over mp is used by all devices.  Its gradient is summed over mp
    # once per microbatch, for all layers together, not once per layer.
    factors = [(4, 64, 2)] * 4 + [(4, 2, 64)] * 2
    assert sorted(c.shape for c in microbatch if c.shape in factors) == sorted(factors)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_are_reduced_once_per_step_under_jit(zero):
    # Here the compiler decides how often a layer reduces, which differs between backends.
    check_gradients_are_reduced_once_per_step(compiled_step(partitioning="jit", zero=zero), zero)


def test_layers_constrain_the_layout_of_their_weights_under_jit():
    # Without the sharding constraint of `collect`, TPUs lay out some gradients differently; on CPUs
    # there is no difference.
    text = lowered_step(partitioning="jit").as_text()
    for shape, layout in (("64x256", '{}, {"mp"}'), ("256x64", '{"mp"}, {}')):
        layer = rf"sharding_constraint %\S+ <@mesh, \[{layout}\]> : tensor<{shape}xf32>"
        assert re.search(layer, text)


@pytest.mark.quick(1)
@pytest.mark.parametrize("partitioning", ["shard_map", "jit"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_gradients_are_summed_over_replicas_in_f32(partitioning, zero):
    # The program is inspected before compilation, because the CPU compiler would widen bf16 sums.
    text = lowered_step(partitioning=partitioning, zero=zero, dtype="bfloat16").as_text()
    listed = r"dense<\[\[0, 4\], \[1, 5\], \[2, 6\], \[3, 7\]\]>"
    named = r"[^\n]*axis_ref<name = \"dp\">\]>"
    groups = rf"replica_groups = (?:{listed}|{named})"
    result = r"\) : \(tensor<(?:[\dx]*x)?(\w+)>\) -> "
    sums = re.findall(
        rf'"stablehlo.(?:all_reduce|reduce_scatter)"\([^\n]*{groups}.*?{result}', text, re.S
    )
    assert len(sums) > 10
    assert set(sums) == {"f32"}


@pytest.mark.slow
def test_layers_without_fan_out_reduce_more_often(monkeypatch):
    monkeypatch.setattr(Manual, "fan_out", lambda self, x: x)
    _, _, layer = compiled_step().loops()
    # Then q, k, v and the feed-forward matmul each have their own all-reduce.
    assert sorted(len(activations(collectives)) for collectives in layer if collectives) == [1, 4]


@pytest.mark.slow
def test_microbatches_without_the_compute_copy_reduce_over_dp(monkeypatch):
    copy = Manual.compute_copy

    def without_matrices_of_layers(self, params, *rest):
        # The custom gradients of `lookup` and `add_bias` require a copy of the others.
        copies = copy(self, params, *rest)
        return jax.tree.map(lambda x, other: x if x.ndim > 2 else other, params, copies)

    monkeypatch.setattr(Manual, "compute_copy", without_matrices_of_layers)
    _, microbatch, layer = compiled_step().loops()
    inside = [c for collectives in (*microbatch, *layer) for c in collectives]
    assert over("dp") in {c.groups for c in inside}


@pytest.mark.slow
def test_zero_3_adds_only_dp_gathers_and_scatters_to_the_layer_loops():
    _, _, layer = compiled_step(zero=3).loops()
    layers = [f for f in layer if f]
    assert [len(activations(f)) for f in layers] == [1, 1]
    kinds = {c.kind for f in layers for c in f if c.groups == over("dp")}
    assert kinds == {"all-gather", "reduce-scatter"}


SHALLOW, DEEP = 4, 28
NARROW = {"d_model": 32, "n_vocab": 32, "seq": 8}


@pytest.mark.slow
def test_the_compiled_step_does_not_grow_with_depth():
    # Lines are counted because the text contains sizes.  The counts differ slightly because loops
    # are peeled or fused differently.
    lines = [
        len(lowered_step(layers=n, **NARROW).compile(AS_USERS_COMPILE).as_text().splitlines())
        for n in (SHALLOW, DEEP)
    ]
    assert lines[1] < 1.03 * lines[0]


@pytest.mark.slow
def test_compile_time_does_not_grow_with_depth():
    def seconds(layers: int) -> float:
        jax.clear_caches()
        # CPU time of this process does not include other work on the machine.
        start = time.process_time()
        lowered_step(layers=layers, **NARROW).compile()
        return time.process_time() - start

    seconds(SHALLOW)  # the first call includes imports
    ratios = [seconds(DEEP) / seconds(SHALLOW) for _ in range(3)]
    assert np.median(ratios) < 1.25, ratios


PROBE = "print(jax.default_backend(), jax.local_device_count('cpu'))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "before", "expected"),
    [
        ({}, "", 6),
        ({"JAX_PLATFORMS": "cpu"}, "", 6),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, "", 3),
        ({"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}, "", 6),
        ({}, "jax.config.update('jax_num_cpu_devices', 5)", 5),
        ({"JAX_NUM_CPU_DEVICES": "4"}, "", 4),
        ({}, "jax.devices()", 1),
    ],
    ids=["bare", "cpu", "flags-3", "other-flags", "option-5", "variable-4", "started"],
)
def test_virtual_devices_are_created_unless_already_configured(environment, before, expected):
    lines = (
        "import jax",
        "from mesh_transformer.mesh.devices import use_virtual_devices",
        before,
        "use_virtual_devices(6)",
        PROBE,
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    process = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout.split() == ["cpu", str(expected)]


def test_a_mesh_has_one_row_per_replica():
    config = Config.from_dict(SMALL | {"cores_per_replica": 4})
    assert dict(make_mesh(config).shape) == {"dp": 2, "mp": 4}
    assert dict(make_mesh(config, jax.devices()[:4]).shape) == {"dp": 1, "mp": 4}
    # Neighbouring devices share a replica because their links are the fastest.
    assert list(make_mesh(config).devices[0]) == jax.devices()[:4]


def test_a_saved_model_fits_fewer_devices_than_its_shards():
    saved = Config.from_dict(SMALL | {"cores_per_replica": 4})
    assert fit_to_devices(saved, {"tpu_size": 2}).cores_per_replica == 1


def test_a_mesh_that_does_not_fit_the_devices_is_refused():
    config = Config.from_dict(SMALL | {"cores_per_replica": 4})
    with pytest.raises(InputError, match=r"cores_per_replica is 4, but there are 6 cpu devices; "):
        make_mesh(config, jax.devices()[:6])
    with pytest.raises(InputError, match=r"there are 2 cpu devices; .*device_count=8$"):
        make_mesh(config.replace(tpu_size=8), jax.devices()[:2])
    with pytest.raises(InputError, match="there are no devices"):
        make_mesh(config, [])


@pytest.mark.parametrize(
    ("shape", "spec", "at_rest"),
    [
        ((64, 32), P(None, "mp"), P("dp", "mp")),
        ((32, 64), P("mp", None), P("mp", "dp")),
        ((8, 4, 64), P("mp", None, None), P("mp", None, "dp")),  # the longest free axis
        ((64, 4, 7), P(None, "mp", None), P("dp", "mp", None)),
        ((63, 4), P(None, "mp"), P(None, "mp")),  # 2 replicas do not divide 63 rows
        ((64,), P("mp"), P("mp")),  # small, so it is replicated over dp
        ((64,), P(None), P(None)),
        ((), P(), P()),
    ],
)
def test_the_layout_between_steps(shape, spec, at_rest):
    declared = Declaration(shape, spec, decay=True, summed=False)
    assert declared.at_rest(2) == at_rest
    # Stacked parameters are never split along the layer axis, because a scan runs one layer at a
    # time.
    stacked = declared.stack(2)
    assert stacked.at_rest(2) == P(None, *at_rest)
    assert stacked.shape == (2, *shape)
    assert stacked.unstack() == declared
