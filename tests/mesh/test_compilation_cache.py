"""The compilation cache is written by every process, and a second start compiles nothing."""

import os
import subprocess
import sys

import pytest

from tests.support.pages import ROOT
from tests.support.waiting import SECONDS

COMPILES = """
import jax
from mesh_transformer.mesh.jax_versions import private
from mesh_transformer.mesh.program import use_compilation_cache

use_compilation_cache()
jax.devices()
state = private("distributed", "global_state")
state.process_id = 3
jax.jit(lambda x: x + 3)(1.0)
assert state.process_id == 3
"""


@pytest.mark.slow
def test_a_process_other_than_the_first_writes_the_compilation_cache(tmp_path):
    command = [sys.executable, "-c", COMPILES]
    environment = os.environ | {"MESH_TRANSFORMER_CACHE": str(tmp_path)}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=SECONDS)
    assert list(tmp_path.glob("jit__lambda*"))


SERVES = """
import jax
import numpy as np
from mesh_transformer.mesh.program import use_compilation_cache
from mesh_transformer.serving.engine import Engine
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.transformer_shard import CausalTransformer

use_compilation_cache()
sizes = {"layers": 2, "d_model": 64, "n_heads": 8, "n_vocab": 128, "seq": 16, "pe_rotary_dims": 4}
config = sizes | {"cores_per_replica": 1, "tpu_size": 1, "total_steps": 2}
network = CausalTransformer(config, devices=jax.devices()[:1])
tokens = np.arange(network.batch_size * 17).reshape(1, network.batch_size, 17) % 128
network.train({"obs": tokens[..., :-1], "target": tokens[..., 1:]})
Engine(network, Metrics(2), rows=2, pooling="mean").warm_up()
network.generate(np.ones((1, 4), int), [4], 4)
"""


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path):
    environment = os.environ | {"MESH_TRANSFORMER_CACHE": str(tmp_path)}
    programs = []
    for _ in range(2):
        command = [sys.executable, "-c", SERVES]
        subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=SECONDS)
        programs.append(sorted(path.name for path in tmp_path.glob("*-cache")))
    assert len(programs[0]) > 10
    assert programs[1] == programs[0]
