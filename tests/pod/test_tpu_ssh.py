"""Commands and files on TPU hosts: fabric against loopback SSH servers that run real commands."""

import fcntl
import os
import signal
import stat
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import paramiko
import pytest

from mesh_transformer.pod.tpu import install
from mesh_transformer.pod.tpu import ssh as tpu_ssh
from mesh_transformer.pod.tpu.spec import SshOptions, TpuSpec
from mesh_transformer.pod.tpu.ssh import Hosts
from mesh_transformer.pod.tpu.vm import Limits, TpuVm
from mesh_transformer.util import HostError, InputError, StoppedError
from tests.support.fake_tpu import FakeHost, FakeTpuApi, key_pair
from tests.support.waiting import SECONDS, wait_until

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-that-nobody-else-may-see"


@pytest.fixture
def key(tmp_path):
    return key_pair(tmp_path)


def new_host(folder: Path, key: Path, **place) -> FakeHost:
    home = folder / f"home{place.get('address', '')}"
    home.mkdir()
    return FakeHost(home, "me", key.with_suffix(".pub").read_text(), **place)


@pytest.fixture
def host(tmp_path, key):
    with new_host(tmp_path, key) as server:
        yield server


def options(host: FakeHost, key: Path, **changes) -> SshOptions:
    defaults = {"user": "me", "key_file": str(key), "port": host.port, "connect_seconds": 1.0}
    return SshOptions(**defaults | changes)


@pytest.fixture
def hosts(host, key):
    """Connections to `host`, whose published key is known."""
    connections = Hosts([host.address], options(host, key), {host.address: host.published()})
    yield connections
    connections.close()


def test_outputs_are_in_the_order_of_the_hosts(tmp_path, key, host):
    """The first host's output comes first, although that host is slower."""
    with new_host(tmp_path, key, address="127.0.0.2", port=host.port) as second:
        (host.home / "who").write_text("first\n")
        (second.home / "who").write_text("second\n")
        hosts = Hosts([host.address, second.address], options(host, key))
        command = "if grep -q first who; then sleep 1; fi; sleep 0.5; cat who"
        assert hosts.run(command, seconds=SECONDS) == ["first\n", "second\n"]
        hosts.close()


def test_commands_can_run_on_some_of_the_hosts(tmp_path, key, host):
    with new_host(tmp_path, key, address="127.0.0.2", port=host.port) as second:
        (host.home / "who").write_text("first\n")
        (second.home / "who").write_text("second\n")
        hosts = Hosts([host.address, second.address], options(host, key))
        some = hosts.only([second.address])
        assert some.run("cat who", seconds=SECONDS) == ["second\n"]
        with pytest.raises(StoppedError, match=r"host 1 \(127\.0\.0\.2\)"):
            some.run("exit 3", seconds=SECONDS)
        assert hosts.run("cat who", seconds=SECONDS) == ["first\n", "second\n"]
        hosts.close()


def test_output_is_shown_with_the_host_that_wrote_it(hosts, capsys):
    assert hosts.run("echo one; echo two >&2; printf three", seconds=SECONDS, show=True) == [
        "one\nthree"
    ]
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == [f"[host 0 (127.0.0.1)] {word}" for word in ("one", "three", "two")]


def test_failing_command_is_reported_with_its_output(hosts, capsys):
    command = "for i in $(seq 100); do echo line $i; done; echo no such thing >&2; exit 7"
    with pytest.raises(StoppedError, match="exited with status 7: no such thing") as error:
        hosts.run(command, seconds=SECONDS)
    assert "\n" not in str(error.value)
    assert "host 0 (127.0.0.1)" in str(error.value)
    errors = capsys.readouterr().err
    assert "[host 0 (127.0.0.1)] line 100\n" in errors
    assert "[host 0 (127.0.0.1)] no such thing\n" in errors
    assert "line 50\n" not in errors
    assert hosts.run("echo on", seconds=SECONDS) == ["on\n"]


def test_failing_host_ends_the_commands_of_the_others(tmp_path, key, host):
    with new_host(tmp_path, key, address="127.0.0.2", port=host.port) as second:
        (host.home / "bad").touch()
        hosts = Hosts([host.address, second.address], options(host, key))
        start = time.monotonic()
        with pytest.raises(StoppedError, match=r"host 0 .*status 3"):
            hosts.run("if [ -e bad ]; then sleep 0.5; exit 3; fi; sleep 600", seconds=900)
        assert time.monotonic() - start < SECONDS  # rather than 600


def test_time_limit_ends_the_command_on_the_host(host, hosts):
    command = "echo $$ > pid; sleep 60"
    with pytest.raises(StoppedError, match=r"took more than 0\.5 s"):
        hosts.run(command, seconds=0.5)
    with pytest.raises(ProcessLookupError):
        os.kill(int((host.home / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("bash -c 'kill -KILL $$'; exit $?", "was killed; is the host out of memory"),
        ("kill -KILL $$", "was cut off or killed"),
        ("exit 124", "exited with status 124"),
    ],
)
def test_killed_command_is_not_reported_as_a_timeout(hosts, command, message):
    with pytest.raises(StoppedError, match=message):
        hosts.run(command, seconds=600)


def test_host_cut_off_during_a_command_can_be_used_again(host, hosts):
    threading.Timer(0.7, host.cut).start()
    with pytest.raises(StoppedError, match="was cut off"):
        hosts.run("sleep 30", seconds=60)
    assert hosts.run("echo again", seconds=SECONDS) == ["again\n"]


def test_files_are_complete_and_secrets_are_private(host, hosts):
    content = os.urandom(300_000)
    hosts.put(content, ".mesh-transformer/file")
    assert (host.home / ".mesh-transformer/file").read_bytes() == content
    (host.home / ".mesh-transformer/secret").write_text("an older one")
    hosts.put_secret(TOKEN, ".mesh-transformer/secret")
    path = host.home / ".mesh-transformer/secret"
    assert path.read_text() == TOKEN
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["file", "secret"]
    # The mode is set before the first byte is written, so other users can never read the secret.
    assert host.modes_at_first_write[-1] == 0o600


def test_host_must_have_its_published_key(tmp_path, key, host):
    with new_host(tmp_path, key, address="127.0.0.2", port=host.port) as other:
        keys = {host.address: other.published()}
        with pytest.raises(StoppedError, match="SSH host key is not the expected one"):
            Hosts([host.address], options(host, key), keys).run("echo no", seconds=SECONDS)
        # If the published keys are all of unknown types, no key is accepted, rather than any key.
        keys = {host.address: [("ssh-new", "AAAA")]}
        with pytest.raises(StoppedError, match="SSH host key is not the expected one"):
            Hosts([host.address], options(host, key), keys).run("echo no", seconds=SECONDS)
        assert host.commands == []


def test_first_key_is_remembered_if_none_was_published(host, key, hosts):
    hosts = Hosts([host.address], options(host, key))
    assert hosts.run("echo yes", seconds=SECONDS) == ["yes\n"]
    hosts.close()
    host.new_key()
    with pytest.raises(StoppedError, match="SSH host key is not the expected one"):
        hosts.run("echo no", seconds=SECONDS)
    strict = Hosts([host.address], options(host, key, trust_first=False))
    with pytest.raises(StoppedError, match="SSH host key is not the expected one"):
        strict.run("echo no", seconds=SECONDS)


def test_rejected_user_key_is_an_input_error(host, key):
    with pytest.raises(InputError, match=r"user 'you' with key .* was rejected"):
        Hosts([host.address], options(host, key, user="you")).run("echo no", seconds=SECONDS)


def test_unusable_private_keys_are_input_errors(tmp_path, key):
    locked, other = tmp_path / "locked", tmp_path / "other"
    paramiko.RSAKey.generate(1024).write_private_key_file(str(locked), password="secret")
    other.write_text("not a key")
    for path, message in [
        (tmp_path / "none", "ssh-keygen"),
        (locked, "has a passphrase"),
        (other, "cannot be read as a private key"),
    ]:
        with pytest.raises(InputError, match=message):
            Hosts(["127.0.0.1"], SshOptions(key_file=str(path)))
    # The format in which gcloud writes keys.
    old = tmp_path / "google_compute_engine"
    private = paramiko.RSAKey.generate(2048)
    private.write_private_key_file(str(old))
    expected = f"ssh-rsa {private.get_base64()}"
    assert SshOptions(key_file=str(old)).public_key() == expected


def test_host_without_an_ssh_server_is_reported(key, host):
    nowhere = Hosts(["127.0.0.3"], options(host, key))
    with pytest.raises(StoppedError, match=r"SSH on port .* did not answer .* firewall"):
        nowhere.run("echo no", seconds=SECONDS)


def test_lost_host_is_awaited_for_less_time_than_a_starting_one(tmp_path, key, monkeypatch):
    monkeypatch.setattr(tpu_ssh, "RECONNECT_SECONDS", 0.5)
    with new_host(tmp_path, key) as server:
        hosts = Hosts([server.address], options(server, key, connect_seconds=300.0))
        assert hosts.run("echo up", seconds=SECONDS) == ["up\n"]
    start = time.monotonic()
    with pytest.raises(HostError, match=r"SSH on port \d+ did not answer for 0\.5 s"):
        hosts.run("echo no", seconds=SECONDS)
    assert time.monotonic() - start < SECONDS  # rather than 300


def test_host_that_starts_late_is_awaited(tmp_path, key):
    server = new_host(tmp_path, key)
    hosts = Hosts([server.address], options(server, key, connect_seconds=SECONDS))
    server.pause_for(1.5)
    with server:
        assert hosts.run("echo up", seconds=SECONDS) == ["up\n"]
        hosts.close()


@pytest.mark.slow
def test_silent_host_has_a_time_limit(host, hosts, monkeypatch):
    """As if its disk hangs, the host stays connected, but neither answers nor ends the command."""
    hosts.run("true", seconds=SECONDS)
    monkeypatch.setattr(tpu_ssh, "SILENCE_SECONDS", 1)
    monkeypatch.setattr(tpu_ssh, "CONNECT_SECONDS", 1)
    monkeypatch.setattr(tpu_ssh, "PUT_SECONDS", 0.2)
    host.silent.set()
    start = time.monotonic()
    with pytest.raises(HostError, match="'echo no' gave no answer"):
        hosts.run("echo no", seconds=0.2)
    with pytest.raises(HostError, match="'copy a/file' gave no answer"):
        hosts.put(b"content", "a/file")
    assert time.monotonic() - start < SECONDS


def test_package_completely_replaces_the_old_one(host, hosts):
    old = host.home / install.PACKAGE
    old.mkdir(parents=True)
    (old / "stale.py").touch()
    install.copy_package(hosts)
    assert not (old / "stale.py").exists()
    for name in [*install.REQUIRED_FILES, "mesh_transformer/config.py"]:
        assert (old / name).read_bytes() == (ROOT / name).read_bytes()
    assert os.access(old / "scripts/init_ray.sh", os.X_OK)
    left = sorted(path.name for path in old.parent.iterdir())
    assert left == ["lock", "package", "package.tgz"]


def test_archive_contains_only_sources(tmp_path):
    for name in install.REQUIRED_FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    package = tmp_path / "mesh_transformer"
    package.mkdir()
    for name in ("a.py", ".env", "key.pem", "id_rsa", "notes.txt"):
        (package / name).write_text(name)
    first = install.package_archive(tmp_path)
    with tarfile.open(fileobj=BytesIO(first)) as archive:
        assert set(archive.getnames()) == {*install.REQUIRED_FILES, "mesh_transformer/a.py"}
    os.utime(package / "a.py", (1, 1))
    assert install.package_archive(tmp_path) == first
    (tmp_path / "setup.py").unlink()
    with pytest.raises(InputError, match=r"setup\.py is missing"):
        install.package_archive(tmp_path)


def test_token_is_read_from_where_ray_looks(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    with pytest.raises(InputError, match="get-auth-token --generate"):
        install.ray_token()
    usual = tmp_path / ".ray" / "auth_token"
    usual.parent.mkdir()
    usual.write_text("usual\n")
    usual.chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        install.ray_token()
    usual.chmod(0o600)
    assert install.ray_token() == "usual"
    named = tmp_path / "named"
    named.touch(0o600)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(named))
    with pytest.raises(InputError, match="is empty"):
        install.ray_token()
    named.write_text("named")
    assert install.ray_token() == "named"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "variable")
    assert install.ray_token() == "variable"


def stub_venv(folder: Path) -> None:
    """Create a virtual environment whose programs only record how they were called.

    A program hangs once if the home folder has a file named "hang" plus its first argument.
    """
    (folder / "bin").mkdir(parents=True)
    for name in ("ray", "python"):
        program = folder / "bin" / name
        program.write_text(
            "#!/usr/bin/env bash\n"
            f'echo "{name} $*" >> "$HOME/calls"\n'
            'echo "$RAY_AUTH_MODE ${RAY_AUTH_TOKEN-unset} ${RAY_AUTH_TOKEN_PATH-unset}" '
            '>> "$HOME/environment"\n'
            'if mv "$HOME/hang$1" "$HOME/hung" 2> /dev/null; then\n'
            '    sleep 300 & echo $! > "$HOME/new"; mv "$HOME/new" "$HOME/hanging"; wait; fi\n'
            'if [ "$1" = -c ]; then echo 0.10.2; fi\n'
            'if [ "$1" = start ]; then sleep 300 > /dev/null 2>&1 & echo $! >> "$HOME/left"; fi\n'
            'if [ "$1" = start ] && mv "$HOME/fail" "$HOME/failed"; then\n'
            "    echo timed out >&2; exit 1; fi\n"
            'if [ "$1" = start ] && mv "$HOME/twice" "$HOME/fail"; then\n'
            "    echo timed out >&2; exit 1; fi\n"
        )
        program.chmod(0o755)


def stub_python(folder: Path) -> None:
    """Create a `python3.11` that creates such environments."""
    folder.mkdir()
    maker = folder / f"python3.{sys.version_info.minor}"
    maker.write_text(
        "#!/usr/bin/env bash\n"
        'if [ "$2" = venv ]; then mkdir -p "$3"; cp -r "$HOME/stub/." "$3"; fi\n'
    )
    maker.chmod(0o755)


def runs(pid: int) -> bool:
    """Return whether a process exists and is not a zombie, which has no command line."""
    path = Path(f"/proc/{pid}/cmdline")
    return path.exists() and path.read_bytes() != b""


@pytest.fixture
def stubbed(host, monkeypatch):
    """`host` with stubs of Python and Ray."""
    stub_venv(host.home / "stub")
    stub_python(host.home / "bin")
    monkeypatch.setenv("PATH", f"{host.home / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    return host


def left_running(host: FakeHost) -> list[bool]:
    """Return whether each process that was started by `ray start` still runs."""
    return [runs(int(pid)) for pid in (host.home / "left").read_text().split()]


def test_start_ray_passes_the_token_only_in_a_file(stubbed, hosts, capsys):
    """A host gets the package and the token, installs (stubbed) and runs `ray start` (stubbed)."""
    host = stubbed
    install.start_ray(hosts, "10.0.0.2:6379", TOKEN, seconds=60, show=True)
    token = host.home / install.TOKEN
    assert token.read_text() == TOKEN
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    calls = (host.home / "calls").read_text().splitlines()
    assert calls[-1].startswith("ray start --address 10.0.0.2:6379 --resources {")
    # The driver identifies the host by this address, even if it has others.
    assert calls[-1].endswith(f"--node-ip-address {host.address}")
    # Only requirements that are pinned by hashes and the package itself are installed.
    installs = [call for call in calls if " -m pip install " in call]
    pinned = ["requirements.txt", "requirements-libtpu.txt"]
    assert [Path(call.split()[-1]).name for call in installs] == [*pinned, "package"]
    assert all("--require-hashes" in call for call in installs[:2])
    assert set((host.home / "environment").read_text().splitlines()) == {
        f"token unset {token.resolve()}"
    }
    # A second start installs nothing, and no command or log contains the token.
    install.start_ray(hosts, "10.0.0.2:6379", TOKEN, seconds=60)
    again = (host.home / "calls").read_text().splitlines()[len(calls) :]
    assert [call.split()[:2] for call in again] == [["ray", "start"]]
    assert left_running(host) == [False, True]
    seen = "\n".join([*host.commands, *calls, *again]) + "".join(capsys.readouterr())
    assert TOKEN not in seen


def test_failed_ray_start_is_retried_once(stubbed, hosts):
    """Ray waits at most 30 s, which may be too short for a machine that has just booted."""
    (stubbed.home / "fail").touch()
    install.start_ray(hosts, "10.0.0.2:6379", TOKEN, seconds=60)
    assert left_running(stubbed) == [False, True]
    (stubbed.home / "twice").touch()
    with pytest.raises(StoppedError, match="'install and start Ray' exited with status 1: timed"):
        install.start_ray(hosts, "10.0.0.2:6379", TOKEN, seconds=60)
    assert left_running(stubbed)[:-1] == [False] * 3


@pytest.mark.quick(1)
@pytest.mark.parametrize("argument", ["-m", "start"], ids=["installation", "ray start"])
def test_next_start_ends_a_start_that_was_cut_off(stubbed, hosts, argument):
    (stubbed.home / f"hang{argument}").touch()
    hanging = stubbed.home / "hanging"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(install.start_ray, hosts, "10.0.0.2:6379", TOKEN, seconds=60)
        wait_until(hanging.exists, "the start that hangs", 30)
        stubbed.cut()
        with pytest.raises(HostError, match="'install and start Ray' was cut off"):
            first.result()
    assert runs(int(hanging.read_text()))
    install.start_ray(hosts, "10.0.0.2:6379", TOKEN, seconds=60)
    assert not runs(int(hanging.read_text()))
    assert left_running(stubbed) == [True]
    with (stubbed.home / install.LOCK).open() as lock:  # not held by the remaining processes
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("arguments", "token", "mode", "message"),
    [
        (["--address", "here"], TOKEN, 0o600, "HOST:PORT"),
        (["--address"], TOKEN, 0o600, "--address needs a value"),
        (["--adress", "h:1"], TOKEN, 0o600, "unknown argument --adress"),
        (["--address", "h:1"], TOKEN, 0o640, "can be read by others"),
        (["--address", "h:1"], "", 0o600, "no Ray token"),
    ],
)
def test_init_ray_reports_bad_input(tmp_path, arguments, token, mode, message):
    path = tmp_path / "token"
    path.write_text(token)
    path.chmod(mode)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    result = subprocess.run(
        ["bash", str(ROOT / "scripts/init_ray.sh"), *arguments],
        env=environment | {"RAY_AUTH_TOKEN_PATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert TOKEN not in result.stderr


def test_tpu_vm_runs_commands_with_the_published_host_keys(tmp_path, key, host):
    limits = Limits(poll=0.01, host_keys=5.0, settle=0.1)
    spec = TpuSpec("pod", "europe-west4-a", "v3-8", project="p")
    with FakeTpuApi() as api:
        threading.Timer(0.3, lambda: api.host_keys.append(host.published())).start()
        ssh = options(host, key, trust_first=False)
        with TpuVm(spec, client=api.client(), limits=limits, ssh=ssh) as tpu:
            assert tpu.run("echo hello", seconds=SECONDS) == ["hello\n"]
            tpu.copy_package()
            assert (host.home / install.PACKAGE / "setup.py").is_file()
        assert not api.nodes


INTERRUPTED = """
import sys
from mesh_transformer.pod.tpu.spec import SshOptions
from mesh_transformer.pod.tpu.ssh import Hosts
from mesh_transformer.util import run_script

def main():
    options = SshOptions(user="me", key_file=sys.argv[1], port=int(sys.argv[2]))
    Hosts(["127.0.0.1"], options).run("touch started; sleep 1200", seconds=3000)

run_script(main)
"""


def test_ctrl_c_may_leave_the_lock_of_a_call_held(hosts, monkeypatch):
    """The interrupt arrives in `wait`, which holds these locks for a moment."""
    held = []

    def interrupted(futures, *_):
        for future in futures:
            future._condition.acquire()
        held.extend(futures)
        raise KeyboardInterrupt

    monkeypatch.setattr(tpu_ssh, "wait", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            hosts.run("sleep 1200", seconds=3000)
    finally:
        for future in held:
            future._condition.release()


def test_ctrl_c_does_not_wait_for_the_command(host, key):
    command = [sys.executable, "-c", INTERRUPTED, str(key), str(host.port)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        wait_until((host.home / "started").exists, "the command's start")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in errors
