"""Runs whose hosts vanish, restored from storage and from the memory of the other hosts."""

import pytest

from tests.long.recoveries import compared


@pytest.mark.slow
def test_a_run_restored_from_memory_ends_like_an_undisturbed_one(tmp_path):
    found = compared(2, 2, seed=0, folder=tmp_path)  # checks the metrics
    for way, recoveries in found.items():
        print(way, *recoveries, sep="\n")
    assert {recovery.source for recovery in found["storage"]} == {"storage"}
    assert "memory" in {recovery.source for recovery in found["memory"]}
