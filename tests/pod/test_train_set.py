"""What the driver makes of its hosts' reading; tests/cli/test_train.py has real hosts."""

from typing import Any

import pytest

from mesh_transformer.config import Config
from mesh_transformer.pod.train_set import READ_ON_HOSTS, ClusterTrainSet
from mesh_transformer.util import HostError, InputError
from tests.conftest import SMALL


class Hosts:
    """A cluster of two, of which a function says what each call is answered with."""

    replicas = ((0, 1), (2, 3))

    def __init__(self, train_set: Any, answer: Any):
        self.config = Config(**SMALL, train_set=train_set)
        self.answer = answer
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def call(self, method: str, *arguments: tuple[Any, ...]) -> list[Any]:
        assert arguments[0] == arguments[1]
        self.calls.append((method, arguments[0]))
        return self.answer(method, len(self.calls))

    def failed(self, told: str) -> HostError:
        return HostError(told)


def test_the_hosts_read_and_the_driver_knows_where(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hosts: Any = Hosts({"a.index": 2.0, "gs://b/c.index": 1.0}, lambda _, n: [{"record": n}] * 2)
    loader = ClusterTrainSet(hosts)
    # A host has another working folder.
    whole = {f"{tmp_path}/a.index": 2.0, "gs://b/c.index": 1.0}
    assert hosts.calls == [("open_train_set", (whole, None))]
    assert loader.get_samples() is READ_ON_HOSTS
    assert loader.state() == {"record": 2}
    loader.restore({"record": 9})
    assert hosts.calls[1:] == [("read", ()), ("open_train_set", (whole, {"record": 9}))]
    assert loader.state() == {"record": 3}
    loader.close()


def test_hosts_at_different_records_are_a_failure():
    hosts: Any = Hosts("a.index", lambda method, _: [{"at": 1}, {"at": 1 + (method == "read")}])
    loader = ClusterTrainSet(hosts)
    with pytest.raises(HostError, match="at different records"):
        loader.get_samples()
    assert loader.state() == {"at": 1}


def test_after_a_bad_record_the_position_is_that_before_it():
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
