"""Requests to a bucket fail at random; nothing is lost, and every failure is one line."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_faults_of_a_bucket_lose_nothing():
    command = [sys.executable, "-m", "tests.long.bucket_faults", "--seeds", "200", "203"]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "3 faults as expected, 0 not" in done.stdout
