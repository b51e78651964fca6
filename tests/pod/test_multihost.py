"""Several processes that form one mesh, without Ray, compute the same as one process."""

import subprocess
from typing import Any

import jax
import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.mesh.placement import gathered, process_rows
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import HostError
from tests.support.multihost import STEPS, random_batches, replica_rows, run
from tests.support.small_run import VALUES

# f32 rounds to 6e-8; gloo and the collectives within one process add in different orders.
OTHER_PROCESSES = 1e-5
GENERATED = 6
SCORED = 5  # number of most likely tokens

RUNS = {
    "2 hosts, a replica across both": (2, {"cores_per_replica": 8, "per_replica_batch": 4}),
    "2 hosts, version 2": (2, {"block": "geglu", "partitioning": "jit", "zero": 1}),
    "4 hosts, zero 3": (4, {"cores_per_replica": 2, "per_replica_batch": 1, "zero": 3}),
    "2 hosts of 3, the middle replica across both": (
        2,
        {"tpu_size": 6, "cores_per_replica": 2, "n_vocab": 60, "per_replica_batch": 1},
    ),
}


def joined(parts: list[np.ndarray], replicas: list[list[int]]) -> np.ndarray:
    """Return all rows, in order, from the rows of processes that hold these replicas."""
    return gathered(parts, process_rows(replicas, len(parts[0]) // len(replicas[0])))


def one_process(
    config: dict[str, Any], batches: dict[str, np.ndarray]
) -> tuple[CausalTransformer, list[dict[str, float]]]:
    """Return a trained network and the metrics of its steps."""
    network = CausalTransformer(config, devices=jax.devices()[: config["tpu_size"]])
    steps = []
    for step in range(STEPS):
        sample = {key: batches[f"train_{key}_{step}"] for key in ("obs", "target")}
        metrics = network.train(sample)
        steps.append({k: float(v) for k, v in metrics.items()})
    return network, steps


@pytest.mark.slow
def test_a_machine_needs_no_name_that_can_be_looked_up(tmp_path):
    """Gloo would look it up, and refuse to start."""
    name = "nameless.invalid"
    if subprocess.run(["unshare", "--uts", "hostname", name], check=False).returncode:
        pytest.skip("not root, so a process cannot have a host name of its own")
    config = VALUES | {"layers": 1, "tpu_size": 2, "cores_per_replica": 2}
    run(tmp_path / "hosts", config, 2, random_batches(Config(**config)), [], hostname=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_processes_match_a_single_process(tmp_path, name):
    hosts, changes = RUNS[name]
    config = VALUES | changes
    batches = random_batches(Config(**config))
    calls = [("init", []), *(("train", step) for step in range(STEPS))]
    calls += [("eval", None), ("score", SCORED)]
    # Each host compiles this itself, and more than two hosts do not split a row any further.
    generates = hosts == 2
    calls += [("generate", GENERATED)] * generates
    results = run(tmp_path / "run", config, hosts, batches, calls)
    expected, steps = one_process(config, batches)

    replicas = [list(map(int, result["replicas"])) for result in results]
    per_host = config["tpu_size"] // hosts
    assert replicas == [
        sorted({d // config["cores_per_replica"] for d in range(h * per_host, (h + 1) * per_host)})
        for h in range(hosts)
    ]
    worst = 0.0
    for step, values in enumerate(steps):
        for key, value in values.items():
            actual = [float(result[f"{step + 1}_{key}"]) for result in results]
            assert len(set(actual)) == 1, (step, key, actual)
            assert actual[0] == pytest.approx(value, rel=OTHER_PROCESSES), (step, key)
            worst = max(worst, abs(actual[0] / value - 1) if value else 0)
    print(f"{name}: largest relative difference {worst:.1e}")

    def all_rows(key: str) -> np.ndarray:
        return joined([result[key] for result in results], replicas)

    number = 1 + STEPS
    evaluated = expected.eval({key: batches[f"eval_{key}"] for key in ("obs", "target")})
    for key, value in evaluated.items():
        np.testing.assert_allclose(all_rows(f"{number}_{key}"), value, rtol=1e-5, atol=1e-6)
    for key, value in expected.score(batches["eval_obs"], SCORED)._asdict().items():
        np.testing.assert_allclose(
            all_rows(f"{number + 1}_{key}"), value, rtol=0, atol=OTHER_PROCESSES
        )
    if not generates:
        return
    options = {key: batches[key] for key in ("seed", "top_p")}
    tokens = expected.generate(batches["ctx"], batches["length"], GENERATED, options)
    np.testing.assert_array_equal(all_rows(f"{number + 2}_tokens"), tokens)


@pytest.mark.parametrize("dp", [1, 2, 3, 6])
def test_joined_shares_are_the_original_rows(dp):
    rng = np.random.default_rng(dp)
    rows = rng.normal(size=(12, 3))
    for hosts in (1, 2, 4):
        # Each replica is on at least one host, and some are on several.
        held = [
            sorted({int(r) for r in rng.integers(0, dp, 2)} | set(range(h, dp, hosts)))
            for h in range(hosts)
        ]
        np.testing.assert_array_equal(joined([replica_rows(rows, h, dp) for h in held], held), rows)
        np.testing.assert_array_equal(
            joined([replica_rows(rows.T, h, dp, axis=1).T for h in held], held), rows
        )


def test_hosts_with_the_same_rows_must_agree_bit_for_bit():
    rows = np.array([[0.5, np.nan], [1.5, 2.5]])
    np.testing.assert_array_equal(joined([rows, rows[1:]], [[0, 1], [1]]), rows)
    np.testing.assert_array_equal(joined([rows, rows], [[0], [0]]), rows)  # NaN equals NaN
    changed = rows.copy()
    changed[1, 1] = np.nextafter(2.5, 3)
    with pytest.raises(HostError, match="host 1 and an earlier host returned different values"):
        joined([rows, changed[1:]], [[0, 1], [1]])


@pytest.mark.slow
def test_processes_wait_for_each_other_s_compilation(tmp_path):
    """Gloo gives a process 30 s to join the first collective; nothing else in JAX waits longer."""
    batches = random_batches(Config(**VALUES))
    calls = [("delay_compilation", 40.0), ("init", []), ("delay_compilation", 40.0), ("train", 0)]
    first, second = run(tmp_path / "run", VALUES, 2, batches, calls)
    np.testing.assert_array_equal(first["3_loss"], second["3_loss"])
