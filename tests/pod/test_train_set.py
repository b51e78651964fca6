"""`ClusterTrainSet` on fake hosts; tests/cli/test_train.py uses real ones."""

from types import SimpleNamespace
from typing import Any

import pytest

from mesh_transformer.config import Config
from mesh_transformer.pod.train_set import READ_ON_HOSTS, ClusterTrainSet
from mesh_transformer.storage.access import local_path
from mesh_transformer.util import HostError, InputError
from tests.conftest import SMALL


class Hosts:
    """A fake cluster of two hosts; `answer(method, number)` is the result of the n-th call."""

    members = (SimpleNamespace(name="host 0"), SimpleNamespace(name="host 1"))
    members_path = staticmethod(local_path)

    def __init__(self, train_set: Any, answer: Any):
        self.config = Config(**SMALL, train_set=train_set)
        self.answer, self.files = answer, ["a digest"] * 2
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def call(self, method: str, *arguments: tuple[Any, ...]) -> list[Any]:
        if method == "record_files":
            return self.files
        assert arguments[0] == arguments[1]
        self.calls.append((method, arguments[0]))
        return self.answer(method, len(self.calls))

    def failure(self, message: str) -> HostError:
        return HostError(message)


def test_hosts_read_and_driver_records_the_position(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hosts: Any = Hosts({"a.index": 2.0, "gs://b/c.index": 1.0}, lambda _, n: [{"record": n}] * 2)
    loader = ClusterTrainSet(hosts)
    # The paths are absolute because a host has a different working folder.
    absolute = {f"{tmp_path}/a.index": 2.0, "gs://b/c.index": 1.0}
    assert hosts.calls == [("open_train_set", (absolute, None, 0))]
    assert loader.get_samples() is READ_ON_HOSTS
    assert loader.state() == {"record": 2}
    loader.restore({"record": 9}, 7)
    assert hosts.calls[1:] == [("read", ()), ("open_train_set", (absolute, {"record": 9}, 7))]
    assert loader.state() == {"record": 3}
    loader.close()


def test_hosts_at_different_records_raise_an_error():
    hosts: Any = Hosts("a.index", lambda method, _: [{"at": 1}, {"at": 1 + (method == "read")}])
    loader = ClusterTrainSet(hosts)
    with pytest.raises(HostError, match="at different records"):
        loader.get_samples()
    assert loader.state() == {"at": 1}


def test_hosts_that_see_other_files_are_named():
    hosts: Any = Hosts("a.index", lambda *_: [{"at": 1}] * 2)
    hosts.files = ["a digest", "another"]
    with pytest.raises(InputError, match=r"train_set: host 1 sees other record files than host 0 "):
        ClusterTrainSet(hosts)


def test_position_stays_before_a_bad_record():
    def answer(method: str, number: int) -> list[Any]:
        if number == 3:
            raise InputError("a.tfrecords: corrupt record")
        return [{"record": number}] * 2

    hosts: Any = Hosts("a.index", answer)
    loader = ClusterTrainSet(hosts)
    loader.get_samples()
    with pytest.raises(InputError, match="corrupt record"):
        loader.get_samples()
    assert loader.state() == {"record": 2}
