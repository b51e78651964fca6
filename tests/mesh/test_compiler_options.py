"""Compiler options per device and ZeRO stage.

`tests/performance/test_plan.py` checks that the TPU compiler accepts them.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.mesh.program import Layout, compiler_options
from tests.conftest import SMALL


def options(kind: str, platform: str = "tpu", **changes) -> dict | None:
    device = SimpleNamespace(platform=platform, device_kind=kind)
    mesh: Any = SimpleNamespace(devices=np.array([[device]]))
    return compiler_options(Layout(Config.of(SMALL | changes), mesh))


@pytest.mark.parametrize(("kind", "platform"), [("cpu", "cpu"), ("NVIDIA H200", "gpu")])
def test_devices_other_than_tpus_have_no_compiler_options(kind, platform):
    assert options(kind, platform, zero=3) is None


@pytest.mark.parametrize(
    ("kind", "beside"),
    [
        ("TPU v2", False),
        ("TPU v3", False),
        ("TPU v4", False),
        ("TPU v5 lite", True),
        ("TPU v5", False),
        ("TPU v6 lite", False),
    ],
)
def test_all_reduces_are_asynchronous_on_tpus_that_support_it(kind, beside):
    assert ("xla_enable_async_all_reduce" in (options(kind) or {})) is beside


def test_zero_3_disables_the_pass_that_would_move_its_gradient_sums():
    assert options("TPU v3") is None
    assert options("TPU v3", zero=3) == {
        "xla_disable_hlo_passes": "while-loop-all-reduce-code-motion"
    }
