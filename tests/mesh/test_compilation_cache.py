"""The compilation cache is written by every process, not only by the first."""

import os
import subprocess
import sys

from tests.support.pages import ROOT
from tests.support.waiting import SECONDS

COMPILES = """
import jax
from jax._src import distributed
from mesh_transformer.mesh.program import use_compilation_cache

use_compilation_cache()
jax.devices()
distributed.global_state.process_id = 3
jax.jit(lambda x: x + 3)(1.0)
assert distributed.global_state.process_id == 3
"""


def test_a_process_other_than_the_first_writes_the_compilation_cache(tmp_path):
    command = [sys.executable, "-c", COMPILES]
    environment = os.environ | {"MESH_TRANSFORMER_CACHE": str(tmp_path)}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=SECONDS)
    assert list(tmp_path.glob("jit__lambda*"))
