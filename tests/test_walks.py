import re
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_script_counts_functions_that_receive_each_value():
    command = [sys.executable, "scripts/measure/walks.py", "--list"]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    counts = re.findall(r"^(\w+) +(\d+) +(\d+)$", run.stdout, re.MULTILINE)
    direct = dict(re.findall(r"^(\w+)\n((?:  .*\n)+)", run.stdout, re.MULTILINE))
    assert [(thing, int(count)) for thing, count, _ in counts] == [
        (thing, places.count("\n")) for thing, places in direct.items()
    ]
    assert all(int(count) <= int(within) for _, count, within in counts)
    for thing, place in (
        ("config", "transformer_shard.py:CausalTransformer.__init__"),
        ("layout", "generation/programs.py:compile_decode"),
        ("checkpoint", "training/loop.py:train"),
        ("checkpoint", "storage/locks.py:lock_folder"),
        ("prompt", "serving/service.py:Service.tokens"),
        ("prompt", "generation/batch.py:Batch.insert"),
        ("setting", "generation/sampling_settings.py:sampler_settings"),
    ):
        assert f"  {place}\n" in direct[thing], (thing, place)
