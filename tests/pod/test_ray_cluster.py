"""Training on a Ray cluster that exists: `pod --ray`."""

import os
import subprocess
import sys

import pytest

from mesh_transformer.cli import pod
from mesh_transformer.config import Config
from mesh_transformer.pod import launch
from mesh_transformer.util import HostError, InputError
from tests.conftest import SMALL
from tests.pod.test_every_host import assert_close_rows, train_here
from tests.support.multihost import ROOT, free_port
from tests.support.ray_cluster import add_node, ray_cluster
from tests.support.small_run import rows_of, run_values, write_config
from tests.support.waiting import SECONDS


@pytest.mark.slow
def test_a_run_uses_the_machines_of_a_cluster_and_leaves_it(tmp_path, monkeypatch):
    values = run_values(tmp_path, total_steps=6)
    config = write_config(tmp_path / "config.json", values)
    train_here(monkeypatch, config, tmp_path / "one")
    with ray_cluster(cpus=1) as cluster:
        add_node(cluster, 1)
        command = [sys.executable, "-m", "mesh_transformer", "pod", "--config", config]
        command += ["--model-dir", str(tmp_path / "ray"), "--ray", cluster.address]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        for steps in (4, 6):  # the second one resumes, in the same cluster
            result = subprocess.run(
                [*command, "--max-steps", str(steps)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
            assert result.returncode == 0, result.stderr[-3000:]
    rows = rows_of(tmp_path / "ray")
    assert_close_rows(rows, rows_of(tmp_path / "one"))
    assert [row["step"] for row in rows] == list(range(1, 7))


def test_machines_with_accelerators_are_used_and_waited_for(monkeypatch):
    from mesh_transformer.pod import hosts

    def node(name, alive=True, **resources):
        place = {"NodeID": name, "NodeManagerAddress": f"10.0.0.{name}", "Alive": alive}
        return place | {"Resources": {"CPU": 4.0, "node:1": 1.0} | resources}

    nodes = [node("3", GPU=8.0), node("1"), node("2", GPU=8.0), node("4", alive=False, GPU=8.0)]
    monkeypatch.setattr(hosts.ray, "nodes", lambda: nodes)
    found = launch.ClusterHosts(Config(**SMALL | {"tpu_size": 16}))
    expected = [hosts.Host(n, f"10.0.0.{n}", None, (("GPU", 8.0),)) for n in "23"]
    assert found() == expected
    nodes.append(node("0", GPU=8.0))  # more than the run has
    assert [host.node for host in found()] == ["0", "2"]
    nodes[2:] = [node("5")]
    waited = []
    monkeypatch.setattr(launch.time, "sleep", lambda _: waited.append(nodes.append(expected_node)))
    expected_node = node("6", GPU=8.0)
    assert [host.node for host in found()] == ["3", "6"]
    assert len(waited) == 1
    nodes[:] = nodes[1:2]
    monkeypatch.setattr(launch, "SECONDS_TO_RETURN", -1)
    with pytest.raises(HostError, match="0 of 2 machines are in the Ray cluster"):
        found()


def test_machines_without_accelerators_share_virtual_devices(monkeypatch):
    from mesh_transformer.pod import hosts

    node = {"NodeManagerAddress": "10.0.0.1", "Alive": True, "Resources": {"CPU": 1.0}}
    nodes = [node | {"NodeID": name} for name in "bca"]
    monkeypatch.setattr(hosts.ray, "nodes", lambda: nodes)
    found = launch.ClusterHosts(Config(**SMALL | {"tpu_size": 6}))()
    assert [(host.node, host.devices) for host in found] == [("a", 2), ("b", 2), ("c", 2)]
    with pytest.raises(InputError, match=r"3 machines without accelerators .* 8 devices, equally"):
        launch.ClusterHosts(Config(**SMALL | {"tpu_size": 8}))()


def test_a_cluster_that_cannot_be_reached_is_refused(tmp_path, monkeypatch):
    config = write_config(tmp_path / "config.json", run_values(tmp_path))
    words = ["pod", "--config", config, "--model-dir", str(tmp_path / "m")]
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setattr("sys.argv", [*words, "--ray", address])
    with pytest.raises(InputError, match=f"--ray {address}: no Ray cluster can be reached"):
        pod.main()
    monkeypatch.setattr("sys.argv", [*words, "--ray", address, "--wait", "5"])
    with pytest.raises(InputError, match="--wait cannot be combined with --ray; remove one of"):
        pod.main()
    monkeypatch.setattr("sys.argv", [*words, "--ray", address, "--preemptible"])
    with pytest.raises(InputError, match="--preemptible requires --tpu"):
        pod.main()
