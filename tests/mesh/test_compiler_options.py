"""What the compiler is told: for whom, and when.  That TPUs' own accepts it is in test_plan."""

from types import SimpleNamespace

import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.mesh.program import compiler_options
from tests.conftest import SMALL


def options(kind: str, platform: str = "tpu", **changes) -> dict | None:
    device = SimpleNamespace(platform=platform, device_kind=kind)
    mesh = SimpleNamespace(devices=np.array([[device]]))
    return compiler_options(Config.of(SMALL | changes), mesh)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "platform"), [("cpu", "cpu"), ("NVIDIA H200", "gpu")])
def test_others_than_tpus_are_told_nothing(kind, platform):
    assert options(kind, platform, zero=3) is None


@pytest.mark.parametrize(
    ("kind", "beside"),
    [
        ("TPU v2", False),
        ("TPU v3", False),
        ("TPU v4", False),
        ("TPU v5 lite", True),
        ("TPU v5", True),
        ("TPU v6 lite", True),
    ],
)
def test_all_reduces_run_beside_other_work_where_tpus_can(kind, beside):
    assert ("xla_enable_async_all_reduce" in (options(kind) or {})) is beside


def test_zero_3_disables_the_pass_that_would_move_its_sums():
    assert options("TPU v3") is None
    assert options("TPU v3", zero=3) == {
        "xla_disable_hlo_passes": "while-loop-all-reduce-code-motion"
    }
