"""Creating, awaiting, losing and deleting TPUs: the real client against a loopback server."""

import contextlib
import dataclasses
import math
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest
from google.cloud import tpu_v2

from mesh_transformer.mesh.accelerators import accelerator_type
from mesh_transformer.pod.tpu import api as tpu_api
from mesh_transformer.pod.tpu.api import (
    CapacityError,
    PreemptedError,
    UnavailableError,
    default_project,
    new_client,
)
from mesh_transformer.pod.tpu.spec import SshOptions, TpuSpec, deadline_script
from mesh_transformer.pod.tpu.vm import OWNER, Limits, TpuVm
from mesh_transformer.util import InputError, StoppedError
from tests.support.fake_tpu import STOCKOUT, FakeTpuApi, Queue, key_pair
from tests.support.waiting import SECONDS, wait_until

ROOT = Path(__file__).parents[2]
NAME = "projects/p/locations/europe-west4-a/nodes/pod"
QUOTA = "Quota limit 'TPUV3sPreemptiblePerProjectPerZoneForTPUAPI' has been exceeded. Limit: 8."
# Short, but long enough for a loaded machine, because every wait ends after a few polls.
QUICK = Limits(
    queue=20, ready=20, capacity=0, capacity_again=20, delete=20, host_keys=0.1, settle=0.1,
    poll=0.01,
)  # fmt: skip


@pytest.fixture
def api():
    with FakeTpuApi() as server:
        yield server


@pytest.fixture
def make(api, tmp_path, monkeypatch):
    """A function that returns a TpuVm of the fake API, with changes to its spec and arguments."""
    monkeypatch.setenv("HOME", str(tmp_path))
    ssh = SshOptions(user="me", key_file=str(key_pair(tmp_path)))

    def make_tpu(limits=QUICK, adopt=False, keep=False, client=None, smaller=(), **changes):
        spec = TpuSpec(
            **{"name": "pod", "zone": "europe-west4-a", "accelerator_type": "v3-8"}
            | {"project": "p"} | changes
        )  # fmt: skip
        client = client or api.client()
        return TpuVm(
            spec, client=client, limits=limits, ssh=ssh, adopt=adopt, keep=keep, smaller=smaller
        )

    return make_tpu


def limits_with(**changes) -> Limits:
    return dataclasses.replace(QUICK, **changes)


def requests_of(api, kind):
    return [request for request in api.requests if isinstance(request, kind)]


@pytest.mark.parametrize("tier", ["on_demand", "spot", "preemptible"])
def test_tpu_is_created_and_deleted(api, make, capsys, tier):
    with make(tier=tier, accelerator_type="v6e-8") as tpu:
        assert tpu.state() == "READY"
        assert tpu.hosts() == ["127.0.0.1"]
        tpu.check()
    assert not api.nodes
    node = requests_of(api, tpu_v2.CreateNodeRequest)[0].node
    assert node.accelerator_type == "v6e-8"
    assert node.runtime_version == "v2-alpha-tpuv6e"
    assert node.scheduling_config.spot == (tier == "spot")
    assert node.scheduling_config.preemptible == (tier == "preemptible")
    assert node.network_config.enable_external_ips
    assert node.metadata["ssh-keys"].startswith("me:ecdsa-sha2-nistp256 ")
    assert "PRIVATE" not in str(node)
    command = "gcloud compute tpus tpu-vm delete pod --zone europe-west4-a --project p --quiet"
    assert command in capsys.readouterr().err  # printed before it can be needed


@pytest.mark.parametrize("tier", ["on_demand", "spot"])
def test_queued_tpu_becomes_ready_and_is_deleted(api, make, capsys, tier):
    api.queue_after = 5
    with make(queued=True, tier=tier) as tpu:
        assert tpu.state() == "READY"
        # One before the request and 5 in the queue.
        assert api.calls.count("GetQueuedResource") == 6
    assert not api.queue
    assert not api.nodes
    request = requests_of(api, tpu_v2.CreateQueuedResourceRequest)[0]
    assert ("spot" in request.queued_resource) == (tier == "spot")
    assert request.queued_resource.queueing_policy.valid_until_duration.seconds == 20
    assert requests_of(api, tpu_v2.DeleteQueuedResourceRequest)[0].force
    assert "tpus queued-resources delete pod" in capsys.readouterr().err


@pytest.mark.parametrize("queued", [False, True])
def test_hosts_delete_the_tpu_after_max_hours(api, make, queued):
    limits = limits_with(deadline_grace=100.0)
    with make(queued=queued, tier="spot", max_hours=2, limits=limits) as tpu:
        kind = tpu_v2.CreateQueuedResourceRequest if queued else tpu_v2.CreateNodeRequest
        request = requests_of(api, kind)[0]
        node = request.queued_resource.tpu.node_spec[0].node if queued else request.node
        script = node.metadata["startup-script"]
        # Two hours and 100 s of grace, less the time that the request took.
        match = re.search(r"date \+%s\) \+ (\d+)", script)
        assert match is not None
        assert 7300 - 60 < int(match[1]) <= 7300
        place = "projects/p/locations/europe-west4-a"
        end = f"{place}/queuedResources/pod?force=true" if queued else f"{place}/nodes/pod"
        assert f"https://tpu.googleapis.com/v2/{end}'" in script
        tpu._ready_since -= 3 * 3600
        api.preempt()
        with pytest.raises(StoppedError, match="--max-hours 2 have passed, so the TPU is not"):
            tpu.recreate()
    with make(name="other") as tpu:
        assert "startup-script" not in requests_of(api, tpu_v2.CreateNodeRequest)[-1].node.metadata
        assert tpu._seconds_left() == math.inf


def test_max_hours_begin_when_the_tpu_is_ready(api, make, monkeypatch):
    """Time in the queue does not count."""
    with make(queued=True, tier="spot", max_hours=2) as tpu:
        assert 2 * 3600 - 60 < tpu._seconds_left() <= 2 * 3600
    assert make(max_hours=2)._seconds_left() == 2 * 3600  # before it is ready


def test_no_tpu_is_created_after_the_block(api, make):
    """This happens if a process ends while another of its threads recreates the TPU."""
    with make() as tpu:
        api.preempt()
    count = len(requests_of(api, tpu_v2.CreateNodeRequest))
    with pytest.raises(StoppedError, match="is not created: this process is ending"):
        tpu.recreate()
    assert len(requests_of(api, tpu_v2.CreateNodeRequest)) == count
    assert not api.nodes


@pytest.mark.parametrize("refused", [False, True])
def test_deadline_script_deletes_the_tpu_or_shuts_down(tmp_path, refused):
    """The script runs as on a host, but with stubs for requests and for the shutdown."""
    tools = tmp_path / "bin"
    tools.mkdir()
    log = tmp_path / "log"
    stubs = {
        "curl": f"""case "$*" in
*metadata*) echo "curl $*" >> {log}; echo '{{"access_token": "t0ken", "expires_in": 3}}' ;;
*DELETE*) echo "curl $* $(cat)" >> {log}; exit {22 if refused else 0} ;;
esac""",
        "sleep": "exit 0",
        "shutdown": f"echo shutdown $* >> {log}",
    }
    for name, text in stubs.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    spec = TpuSpec("pod", "europe-west4-a", "v3-8", project="p")
    script = tmp_path / "script"
    script.write_text(deadline_script(spec, 0, str(tmp_path)))
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    subprocess.run(["bash", str(script)], env=environment, check=True)

    def ended():
        lines = log.read_text().splitlines() if log.exists() else []
        return lines if lines and ("shutdown" if refused else "DELETE") in lines[-1] else None

    calls = wait_until(ended, "a deletion or a shutdown")
    deletions = [call for call in calls if "DELETE" in call]
    assert len(deletions) == (5 if refused else 1)
    for call in deletions:
        assert call.endswith("/nodes/pod Authorization: Bearer t0ken")
        assert "-H @- https://tpu" in call
    # A host that restarts keeps its deadline.
    deadline = (tmp_path / "mesh-transformer-deadline").read_text()
    script.write_text(deadline_script(spec, 10**6, str(tmp_path)))
    subprocess.run(["bash", str(script)], env=environment, check=True)
    assert (tmp_path / "mesh-transformer-deadline").read_text() == deadline


@pytest.mark.parametrize("queued", [False, True])
def test_tpu_preempted_while_running_is_recreated(api, make, queued):
    with make(queued=queued, tier="spot") as tpu:
        tpu.check()
        api.addresses = ["127.0.0.9"]
        api.preempt()
        with pytest.raises(PreemptedError, match="'pod' was taken away"):
            tpu.check()
        # Capacity, and the quota that the lost TPU used, are rarely available again at once.
        refusals = (QUOTA, STOCKOUT, QUOTA)
        api.create_errors = [(grpc.StatusCode.RESOURCE_EXHAUSTED, message) for message in refusals]
        tpu.recreate()
        tpu.check()
        assert tpu.hosts() == ["127.0.0.9"]
    assert not api.nodes
    assert not api.queue


def test_preemption_before_the_tpu_is_ready_is_reported(api, make):
    api.ready_after = None
    tpu = make(tier="spot")
    threading.Timer(0.3, api.preempt).start()
    with pytest.raises(PreemptedError, match=r"was taken away \(preempted\)"), tpu:
        pass
    assert not api.nodes


@pytest.mark.parametrize("when", [(), ("later",)])
def test_exceeded_quota_is_an_input_error_at_once(api, make, when):
    api.create_errors = [(grpc.StatusCode.RESOURCE_EXHAUSTED, QUOTA, *when)]
    with pytest.raises(InputError, match="Limit: 8; ask for more quota") as error, make():
        pass
    assert "\n" not in str(error.value)
    assert "v3-8 in europe-west4-a" in str(error.value)
    assert not api.nodes


@pytest.mark.parametrize("when", [(), ("later",)])
def test_request_without_capacity_is_retried_within_the_time_limit(api, make, when):
    api.create_errors = [(grpc.StatusCode.RESOURCE_EXHAUSTED, STOCKOUT, *when)] * 3
    with pytest.raises(CapacityError, match=r"no more capacity.*another zone"), make():
        pass
    with make(limits=limits_with(capacity=20)) as tpu:
        assert tpu.state() == "READY"
    assert not api.create_errors


SMALLER = {"accelerator_type": "v4-16", "smaller": ("v4-12", "v4-8"), "adopt": True}


def created_types(api) -> list[str]:
    """Return the types of all requests so far, and forget them."""
    requests = requests_of(api, tpu_v2.CreateNodeRequest)
    api.requests.clear()
    return [request.node.accelerator_type for request in requests]


def test_smaller_tpu_is_used_while_the_zone_has_no_capacity(api, make, capsys):
    """v4-12 is not offered; the whole TPU is requested first each time."""
    api.without_capacity = {"v4-16"}
    with make(**SMALLER, limits=limits_with(smaller_after=0)) as tpu:
        assert tpu.spec.accelerator_type == "v4-8"
        assert tpu.spec.devices == 4
        assert created_types(api) == ["v4-16", "v4-8"]
        api.preempt()
        tpu.recreate()
        assert created_types(api) == ["v4-16", "v4-8"]
        api.preempt()
        api.without_capacity = set()
        tpu.recreate()
        assert created_types(api) == ["v4-16"]
        assert tpu.spec.accelerator_type == "v4-16"
    assert not api.nodes


def test_smaller_tpus_are_requested_only_after_a_while(api, make, capsys):
    api.without_capacity = {"v4-16"}
    with make(**SMALLER, limits=limits_with(smaller_after=0.5)) as tpu:
        assert tpu.spec.accelerator_type == "v4-8"
    types = created_types(api)
    assert types[-2:] == ["v4-16", "v4-8"]
    assert len(types) > 2
    assert set(types[:-1]) == {"v4-16"}
    assert "no more capacity in the zone" in capsys.readouterr().err


def test_smaller_tpu_is_requested_even_if_the_first_request_takes_longer(api, make):
    api.without_capacity, api.create_seconds = {"v4-16"}, 0.4
    with make(**SMALLER, limits=limits_with(smaller_after=0.1)) as tpu:
        assert tpu.spec.accelerator_type == "v4-8"
    assert created_types(api) == ["v4-16", "v4-16", "v4-8"]


def test_refused_smaller_type_does_not_end_the_wait(api, make, capsys):
    """The quota does not allow the smaller TPU, and the whole one can be created a little later."""
    stockout = grpc.StatusCode.RESOURCE_EXHAUSTED
    api.create_errors = [(stockout, STOCKOUT), (stockout, QUOTA)]
    limits = limits_with(smaller_after=0, capacity=20)
    with make(**SMALLER, limits=limits) as tpu:
        assert tpu.spec.accelerator_type == "v4-16"
    assert created_types(api) == ["v4-16", "v4-8", "v4-16"]
    assert "no more capacity" in (line := capsys.readouterr().err)
    assert "ask for more quota" in line


def test_zone_without_smaller_types_is_named(api, make, capsys):
    api.create_errors = [(grpc.StatusCode.RESOURCE_EXHAUSTED, STOCKOUT)]
    options = SMALLER | {"smaller": ("v4-12", "v4-4")}
    with make(**options, limits=limits_with(smaller_after=0, capacity=20)) as tpu:
        assert tpu.spec.accelerator_type == "v4-16"
    line = "the zone europe-west4-a offers none of v4-12, v4-4; requesting only v4-16\n"
    assert line in capsys.readouterr().err


def test_no_capacity_for_any_type_names_the_whole_tpu(api, make):
    api.without_capacity = {"v4-16", "v4-8"}
    with pytest.raises(CapacityError, match=r"v4-16 in .*no more capacity"):
        make(**SMALLER, limits=limits_with(smaller_after=0)).__enter__()
    assert not api.nodes


def test_smaller_tpu_of_a_killed_driver_is_taken_over(api, make, capsys):
    api.without_capacity = {"v4-16"}
    killed = make(**SMALLER, limits=limits_with(smaller_after=0))
    killed.__enter__()
    killed._guard.close()  # as the end of its process would
    api.without_capacity = set()
    created_types(api)
    with make(**SMALLER) as tpu:
        assert "taking over TPU 'pod'" in capsys.readouterr().err
        assert tpu.spec.accelerator_type == "v4-8"
        assert created_types(api) == []
        api.preempt()
        tpu.recreate()
        assert created_types(api) == ["v4-16"]
    assert not api.nodes


def test_failed_queued_request_reports_the_reason(api, make):
    api.queue_after = None
    tpu = make(queued=True)

    def fail():
        resource = next(iter(api.queue.values()))
        resource.state.state = Queue.FAILED
        resource.state.failed_data.error = {"code": 8, "message": QUOTA}

    threading.Timer(0.3, fail).start()
    with pytest.raises(InputError, match="more quota"), tpu:
        pass
    assert not api.queue


def test_existing_tpu_of_the_same_name_is_left_alone(api, make):
    other = make()
    other.__enter__()
    with pytest.raises(InputError, match=r"already exists.*tpu-vm delete pod --zone") as error:
        make().__enter__()
    assert "\n" not in str(error.value)
    assert list(api.nodes) == [NAME]
    other.__exit__(None, None, None)
    assert not api.nodes


def test_tpu_of_the_same_name_that_appears_before_the_request_is_left_alone(api, make):
    """Another user's TPU that appears at that moment is not deleted either."""
    tpu, other = make(), make()
    real = api.client().get_node
    tpu._api.node = lambda: None if not api.nodes else real(name=NAME)
    other.__enter__()
    tpu._api.node = lambda: None
    with pytest.raises(InputError, match="already exists"):
        tpu.__enter__()
    assert list(api.nodes) == [NAME]
    tpu._api.node = lambda: real(name=NAME)
    tpu._may_exist = True  # as if the request had received no answer
    tpu.delete()
    assert list(api.nodes) == [NAME]
    other.__exit__(None, None, None)


@pytest.mark.parametrize("queued", [False, True])
def test_own_tpu_is_deleted_even_if_the_api_loses_its_label(api, make, queued):
    with make(queued=queued):
        for node in [*api.nodes.values(), *(q.tpu.node_spec[0].node for q in api.queue.values())]:
            node.labels.clear()
    assert not api.nodes
    assert not api.queue


@pytest.mark.parametrize("preempted", [False, True])
def test_adopt_takes_over_the_tpu_of_a_killed_driver(api, make, preempted):
    killed = make(adopt=True)
    killed.__enter__()
    killed._guard.close()
    owner = api.nodes[NAME].labels[OWNER]
    if preempted:
        api.preempt()
    with make(adopt=True) as tpu:
        assert tpu.state() == "READY"
        assert api.nodes[NAME].labels[OWNER] == owner
    assert api.calls.count("CreateNode") == 1 + preempted
    assert not api.nodes


def test_adopt_refuses_a_tpu_that_no_earlier_run_here_created(api, make, tmp_path, monkeypatch):
    """It refuses a TPU of another type, one of another user or machine, and one without a label."""
    killed = make(adopt=True)
    killed.__enter__()
    killed._guard.close()
    with pytest.raises(InputError, match="exists as v3-8, not v4-8"):
        make(adopt=True, accelerator_type="v4-8").__enter__()
    elsewhere = make(adopt=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(InputError, match="already exists"):
        elsewhere.__enter__()
    monkeypatch.setenv("HOME", str(tmp_path))
    api.nodes[NAME].labels.pop(OWNER)
    with pytest.raises(InputError, match="already exists"):
        make(adopt=True).__enter__()
    assert list(api.nodes) == [NAME]


@pytest.mark.parametrize("queued", [False, True])
def test_tpu_that_is_not_ready_in_time_is_deleted(api, make, queued):
    api.ready_after = api.queue_after = None
    limits = limits_with(ready=0.2, queue=0.2)
    with pytest.raises(StoppedError, match=r"after 0\.2 s"), make(limits=limits, queued=queued):
        pass
    assert not api.nodes
    assert not api.queue


def test_repair_of_a_running_tpu_is_awaited(api, make):
    with make() as tpu:
        api.nodes[NAME].state = tpu_v2.Node.State.REPAIRING
        polls = api.polls[NAME]

        def repair():
            while api.polls[NAME] < polls + 3:
                time.sleep(0.01)
            api.nodes[NAME].state = tpu_v2.Node.State.READY

        thread = threading.Thread(target=repair)
        thread.start()
        tpu.check()
        assert tpu.state() == "READY"
        thread.join()


def test_unhealthy_tpu_is_awaited(api, make):
    def sicken():
        while not api.nodes:
            time.sleep(0.01)
        api.nodes[NAME].health = tpu_v2.Node.Health.UNHEALTHY_MAINTENANCE
        end = time.monotonic() + SECONDS
        while tpu.state() == "CREATING" and time.monotonic() < end:
            time.sleep(0.02)
        states.append(tpu.state())
        api.nodes[NAME].health = tpu_v2.Node.Health.HEALTHY

    states, tpu = [], make()
    thread = threading.Thread(target=sicken)
    api.ready_after = 20
    thread.start()
    with tpu:
        thread.join()
        assert tpu.state() == "READY"
    assert states == ["UNHEALTHY"]


def test_unknown_accelerator_or_runtime_error_lists_the_available_ones(api, make):
    with (
        pytest.raises(InputError, match="the zone offers v4-16, v4-8"),
        make(accelerator_type="v4-32"),
    ):
        pass
    api.create_errors = [(grpc.StatusCode.INVALID_ARGUMENT, "Runtime version not found")]
    with (
        pytest.raises(InputError, match=r"v3-8.*, v9: .*versions are tpu-ubuntu"),
        make(runtime_version="v9"),
    ):
        pass


def test_unknown_zone_or_missing_rights_is_a_one_line_error(api, make):
    api.create_errors = [(grpc.StatusCode.PERMISSION_DENIED, "Location x-y1-a\nis not found.")]
    with pytest.raises(InputError, match=r"check the zone.*roles/tpu.admin") as error, make():
        pass
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "code", ["FAILED_PRECONDITION", "ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL"]
)
def test_delete_is_retried_after_a_temporary_error(api, make, code):
    api.delete_errors = [(grpc.StatusCode[code], "an operation is in progress")] * 2
    with make():
        pass
    assert api.calls.count("DeleteNode") == 3
    assert not api.nodes


@pytest.mark.parametrize("code", ["UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL"])
def test_unanswered_request_leaves_no_tpu(api, make, capsys, code):
    for what in ((), ("lost",)):  # lost: the TPU is created all the same
        api.create_errors = [(grpc.StatusCode[code], "a bad day", *what)]
        with pytest.raises(UnavailableError, match="a bad day") as error, make():
            pass
        assert "\n" not in str(error.value)
        assert not api.nodes
        assert ("did not appear" in capsys.readouterr().err) == (what == ())
    assert api.calls.count("DeleteNode") == 1


@pytest.mark.quick(1)
@pytest.mark.parametrize("code", ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL"])
def test_unanswered_read_is_retried(api, make, code):
    with make() as tpu:
        api.read_errors = [(grpc.StatusCode[code], "too many requests")] * 2
        tpu.check()
        assert not api.read_errors


def test_api_that_stays_silent_is_reported(api, make, monkeypatch, capsys):
    monkeypatch.setattr(tpu_api, "RETRY_SECONDS", 0.3)
    tpu = make()
    tpu.__enter__()
    capsys.readouterr()
    api.read_errors = [(grpc.StatusCode.UNAVAILABLE, "gone fishing")] * 1000
    with pytest.raises(UnavailableError, match=r"no answer for 0\.3 s .*gone fishing"):
        tpu.check()
    tpu.__exit__(KeyError, None, None)
    assert (
        "'pod' may still exist; delete it with: gcloud compute tpus tpu-vm delete pod"
        in capsys.readouterr().err
    )


def test_two_runs_on_a_machine_do_not_share_a_tpu(api, make):
    with make(adopt=True):
        with pytest.raises(InputError, match=rf"in use by your process {os.getpid()} on"):
            make(adopt=True).__enter__()
        assert list(api.nodes) == [NAME]
    with make(adopt=True):
        assert list(api.nodes) == [NAME]


def test_unwritable_home_is_reported_before_any_request(api, make, monkeypatch):
    monkeypatch.setenv("HOME", "/proc/none")
    with pytest.raises(InputError, match=r"^/proc/none/.*\.lock cannot be written: .*set HOME"):
        make(adopt=True).__enter__()
    assert not api.requests


def test_failed_delete_prints_the_command(api, make, capsys):
    command = "gcloud compute tpus tpu-vm delete pod --zone europe-west4-a --project p --quiet"
    api.delete_errors = [(grpc.StatusCode.PERMISSION_DENIED, "no")] * 2
    with pytest.raises(StoppedError, match=command), make(adopt=True):
        capsys.readouterr()
    assert command in capsys.readouterr().err
    # It does not hide an error that is raised in the block.
    capsys.readouterr()
    with pytest.raises(KeyError), make(adopt=True):
        raise KeyError
    assert command in capsys.readouterr().err


def test_delete_has_a_time_limit(api, make):
    api.gone_after = 10**9
    with pytest.raises(StoppedError, match="was not deleted"), make(limits=limits_with(delete=0.2)):
        pass


def test_keep_leaves_the_tpu_and_prints_how_to_delete_it(api, make, capsys):
    with make(keep=True):
        capsys.readouterr()
    assert list(api.nodes) == [NAME]
    assert "kept; delete it with: gcloud" in capsys.readouterr().err


def test_error_in_the_block_deletes_the_tpu(api, make):
    with pytest.raises(KeyError), make():
        raise KeyError
    assert not api.nodes


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_signal_does_not_interrupt_a_request(api, make, number, raised):
    """After an interrupted request, gRPC may crash in the next one."""
    client, answered = api.client(), []
    create = client.create_node

    def create_node(**keywords):
        os.kill(os.getpid(), number)
        answer = create(**keywords)
        answered.append(answer)
        return answer

    client.create_node = create_node
    with pytest.raises(raised), make(client=client):
        raise AssertionError("the signal was lost")
    assert len(answered) == 1
    assert api.calls[-1] == "GetNode"
    assert "DeleteNode" in api.calls
    assert not api.nodes


DRIVER = """
import sys
from mesh_transformer.pod.tpu.spec import SshOptions, TpuSpec
from mesh_transformer.pod.tpu.vm import Limits, TpuVm
from mesh_transformer.util import run_script
from tests.support.fake_tpu import client
import time

def main():
    queued = sys.argv[3] == "queued"
    spec = TpuSpec("pod", "europe-west4-a", "v3-8", project="p", queued=queued)
    limits = Limits(poll=0.05, settle=1.0)
    ssh = SshOptions(key_file=sys.argv[2])
    with TpuVm(spec, client=client(sys.argv[1]), limits=limits, ssh=ssh):
        print("in the block", flush=True)
        time.sleep(60)

run_script(main)
"""


@contextlib.contextmanager
def driver(api, folder, kind="node"):
    """Start a process that creates the TPU and waits in the block."""
    command = [sys.executable, "-c", DRIVER, api.address, str(key_pair(folder)), kind]
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_call(api, name):
    wait_until(lambda: name in api.calls, f"the call {name}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "moment", "status"),
    [
        (signal.SIGINT, "asking", 130),
        (signal.SIGINT, "making", 130),
        (signal.SIGINT, "running", 130),
        (signal.SIGTERM, "asking", 143),
        (signal.SIGTERM, "making", 143),
        (signal.SIGTERM, "running", 143),
        (signal.SIGHUP, "making", 129),
    ],
)
def test_signal_deletes_the_tpu(api, tmp_path, number, moment, status):
    """Signals come before the request is answered, while the TPU is created, and during its use."""
    if moment != "running":
        api.ready_after = None
    if moment == "asking":
        api.create_seconds = 1.0
    with driver(api, tmp_path) as process:
        if moment == "running":
            assert process.stdout is not None
            assert process.stdout.readline() == "in the block\n"
        wait_for_call(api, "CreateNode")
        assert bool(api.nodes) == (moment == "running") or moment == "making"
        process.send_signal(number)
        _, errors = process.communicate(timeout=SECONDS)
    assert "DeleteNode" in api.calls
    assert not api.nodes
    assert process.returncode == status
    assert "gcloud compute tpus tpu-vm delete pod" in errors
    assert "Traceback" not in errors


@pytest.mark.quick(1)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_while_queued_cancels_the_request(api, tmp_path, number, status):
    api.queue_after = None
    with driver(api, tmp_path, "queued") as process:
        wait_for_call(api, "CreateQueuedResource")
        process.send_signal(number)
        _, errors = process.communicate(timeout=SECONDS)
    assert not api.queue
    assert process.returncode == status
    assert "gcloud compute tpus queued-resources delete pod" in errors
    assert "Traceback" not in errors


def test_closing_the_terminal_deletes_the_tpu(api, tmp_path):
    """When an SSH session is lost, SIGHUP is sent and nobody reads the output any more."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", DRIVER, api.address, str(key_pair(tmp_path)), "node"]
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *command], cwd=ROOT, stdin=theirs, stdout=theirs,
        stderr=theirs, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    os.close(theirs)
    try:
        output = b""
        while b"in the block" not in output:
            output += os.read(ours, 1000)
        os.close(ours)
        process.wait(SECONDS)
    finally:
        process.kill()
        process.wait()
    assert "DeleteNode" in api.calls
    assert not api.nodes


def test_tpu_is_deleted_even_if_stderr_is_closed(api, tmp_path):
    with driver(api, tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "in the block\n"
        process.stderr.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 143
        process.stderr = None  # for `communicate`
    assert not api.nodes


@pytest.mark.quick(1)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_second_signal_during_the_deletion_prints_the_command(api, tmp_path, number, status):
    api.gone_after = 10**9
    with driver(api, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in the block\n"
        process.send_signal(signal.SIGINT)
        wait_for_call(api, "DeleteNode")
        process.send_signal(number)
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == status
    last = errors.replace("\r", "\n").strip().splitlines()[-1]
    assert last.startswith(
        "TPU 'pod' may still exist; delete it with: gcloud compute tpus tpu-vm delete pod"
    )
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Pod_1"}, "TPU name is 'Pod_1'"),
        ({"name": "-pod"}, "beginning with a letter"),
        ({"zone": "europe-west4"}, "zone is 'europe-west4'.*with its letter"),
        ({"accelerator_type": "v5e-8"}, "give the API's name for this type, 'v5litepod-8'"),
        ({"accelerator_type": "v4-7"}, "even number"),
        ({"accelerator_type": "a100-8"}, "give a generation of v2, v3"),
        ({"accelerator_type": "v3-0"}, "'v3-0'"),
        ({"tier": "cheap"}, "tier is 'cheap'"),
        ({"tier": "preemptible", "queued": True}, "cannot be queued"),
    ],
)
def test_bad_spec_values_are_input_errors(changes, message):
    good = {"name": "pod", "zone": "europe-west4-a", "accelerator_type": "v3-8"}
    with pytest.raises(InputError, match=message):
        TpuSpec(**good | changes)


@pytest.mark.parametrize(
    ("generation", "devices", "expected"),
    [
        ("v2", 8, "v2-8"),
        ("v3", 256, "v3-256"),
        ("v4", 128, "v4-256"),
        ("v5e", 16, "v5litepod-16"),
        ("v5p", 8, "v5p-16"),
        ("v6e", 8, "v6e-8"),
    ],
)
def test_accelerator_types_count_like_the_api(generation, devices, expected):
    """The 128 devices of the configs are a v4-256; the 256 of the original are a v3-256."""
    assert accelerator_type(generation, devices) == expected
    assert TpuSpec("pod", "europe-west4-a", expected).devices == devices


def test_missing_ssh_key_is_reported_before_any_request(api, tmp_path):
    ssh = SshOptions(key_file=str(tmp_path / "none"))
    spec = TpuSpec("pod", "europe-west4-a", "v3-8", project="p")
    with pytest.raises(InputError, match="ssh-keygen"):
        TpuVm(spec, client=api.client(), ssh=ssh)
    assert api.calls == []


def test_missing_packages_are_named(monkeypatch, tmp_path):
    key = key_pair(tmp_path)
    monkeypatch.setitem(sys.modules, "google.cloud.tpu_v2", None)
    monkeypatch.delattr("google.cloud.tpu_v2")
    with pytest.raises(InputError, match=r"package google\.cloud is missing; .*\[pod\]"):
        new_client()
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(InputError, match=r"package paramiko is missing; .*\[pod\]"):
        SshOptions(key_file=str(key)).public_key()


@pytest.mark.parametrize("endpoint", ["tpu.example.com", "http://127.0.0.1:1/", "https:///"])
def test_invalid_endpoint_is_named(monkeypatch, endpoint):
    monkeypatch.setenv(tpu_api.ENDPOINT, endpoint)
    with pytest.raises(InputError, match="; set it to https://HOST:PORT/ or unset it") as error:
        new_client()
    assert endpoint in str(error.value)


def test_missing_credentials_are_named(monkeypatch, tmp_path):
    for name in ("HOME", "CLOUDSDK_CONFIG"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT", "GCLOUD_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")  # because this machine may be in Google Cloud
    with pytest.raises(InputError, match="gcloud auth application-default login"):
        new_client()
    with pytest.raises(InputError, match="gcloud config set project"):
        default_project()
