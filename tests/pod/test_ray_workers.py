"""`RayWorkers`: workers and nodes that die or hang, errors, and the command on a cluster."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_transformer.cli import text_records as script
from mesh_transformer.data import parts
from mesh_transformer.util import InputError, StoppedError, start_thread
from tests.long import killed_tokenizing
from tests.support.ray_cluster import add_node, ray_cluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow
PARTS = [f"part {number}" for number in range(9)]


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(cpus=2) as cluster:
        yield cluster


@pytest.fixture
def workers(cluster):
    from mesh_transformer.pod.ray_workers import RayWorkers  # sets how Ray authenticates

    with RayWorkers(cluster.address) as workers:
        yield workers


def once(path: str) -> bool:
    """Return true at the first call with this path, in all processes together."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def test_results_are_those_of_the_parts(workers):
    results = dict(workers.run(lambda shared, part: (shared, part, 1), b"shared", iter(PARTS)))
    assert results == {part: (b"shared", part, 1) for part in PARTS}
    assert not list(workers.run(lambda shared, part: 1, b"", iter(())))


def test_parts_whose_workers_are_killed_are_begun_again(workers, tmp_path, capsys):
    folder = tmp_path.as_posix()

    def kill_some(shared: bytes, part: str) -> str:
        if part[-1] in "047" and once(f"{folder}/{part}"):
            os.kill(os.getpid(), signal.SIGKILL)
        return part * 2

    assert dict(workers.run(kill_some, b"", iter(PARTS))) == {part: part * 2 for part in PARTS}
    output = capsys.readouterr().out
    assert output.count("its worker died") == 3
    assert "part 4: its worker died (WorkerCrashedError); another one begins it again" in output


def test_part_that_kills_each_worker_ends_the_run(workers, monkeypatch):
    monkeypatch.setattr("mesh_transformer.pod.ray_workers.ATTEMPTS", 2)

    def kill(shared: bytes, part: str) -> None:
        if part == "part 3":
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(StoppedError, match=r"^part 3: 2 workers died of it, the last with Worker"):
        list(workers.run(kill, b"", iter(PARTS)))


def test_hanging_part_is_begun_a_second_time(workers, monkeypatch, tmp_path):
    monkeypatch.setattr("mesh_transformer.pod.ray_workers.LEAST_STRAGGLER", 0.1)
    folder = tmp_path.as_posix()

    def hang_once(shared: bytes, part: str) -> int:
        if part == "part 2" and once(f"{folder}/pid"):
            Path(folder, "pid").write_text(str(os.getpid()), "utf-8")
            os.kill(os.getpid(), signal.SIGSTOP)
        return len(part)

    try:
        assert dict(workers.run(hang_once, b"", iter(PARTS))) == dict.fromkeys(PARTS, 6)
    finally:
        os.kill(int((tmp_path / "pid").read_text("utf-8")), signal.SIGKILL)


def test_parts_of_a_node_that_vanishes_are_begun_again(cluster, workers, tmp_path):
    node = add_node(cluster, 1)
    folder, name = tmp_path.as_posix(), node.node_id

    def hang_there(shared: bytes, part: str) -> str:
        import ray

        begun = Path(folder, "begun")
        if ray.get_runtime_context().get_node_id() == name:
            begun.touch()
            signal.pause()
        wait_until(begun.exists, "a part on the second node")  # otherwise all could run on this one
        return part

    def remove() -> None:
        wait_until((tmp_path / "begun").exists, "a part on the second node")
        cluster.remove_node(node, allow_graceful=False)

    thread = start_thread(remove, name="remove")
    assert dict(workers.run(hang_there, b"", iter(PARTS))) == {part: part for part in PARTS}
    thread.join()


def test_error_of_a_function_ends_the_run_with_one_line(workers):
    def fail(shared: bytes, part: str) -> None:
        if part == "part 5":
            raise OSError("the disk is full")

    with pytest.raises(StoppedError, match=r"^part 5: a worker failed: OSError: the disk is full$"):
        list(workers.run(fail, b"", iter(PARTS)))


def test_missing_package_on_the_workers_is_named(workers):
    def fail(shared: bytes, part: str) -> None:
        raise ModuleNotFoundError("No module named 'mesh_transformer'")

    with pytest.raises(StoppedError, match="install the same version of mesh-transformer on all"):
        list(workers.run(fail, b"", iter(PARTS)))


def test_address_without_a_cluster_is_one_line(tmp_path):
    command = [sys.executable, "-m", "mesh_transformer", "records", "a.txt", "set"]
    (tmp_path / "a.txt").write_text("text", "utf-8")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [*command, "--ray", "127.0.0.1:9"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: --ray 127.0.0.1:9: no Ray cluster can be reached (")
    assert result.stderr.count("\n") == 1


def test_records_of_the_command_are_those_of_one_process(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", 200)
    monkeypatch.chdir(tmp_path)  # the paths are relative
    killed_tokenizing.write_text(tmp_path / "in")
    options = ["--seq", "16", "--tokenizer", "bytes"]
    script.main(["in", "set", "--output-dir", "one", *options])
    script.main(["in", "set", "--output-dir", "many", *options, "--ray", cluster.address])
    expected = killed_tokenizing.contents(tmp_path / "one")
    assert killed_tokenizing.contents(tmp_path / "many") == expected
    (tmp_path / "in" / "0.txt").write_bytes(b"\xff<|endoftext|>" * 99)
    with pytest.raises(InputError, match=r"^in/0\.txt: document 1 holds the bytes .*--skip-bad$"):
        script.main(["in", "set", "--output-dir", "bad", *options, "--ray", cluster.address])
