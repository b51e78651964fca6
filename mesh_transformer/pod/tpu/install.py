"""Install this package and Ray's token on the hosts of a TPU, and start a Ray worker on each."""

import gzip
import io
import os
import platform
import shlex
import stat
import tarfile
from pathlib import Path

from mesh_transformer.pod.tpu.ssh import Hosts
from mesh_transformer.util import InputError

FOLDER = ".mesh-transformer"  # in the user's home on each host
PACKAGE = f"{FOLDER}/package"
TOKEN = f"{FOLDER}/ray_token"
LOCK = f"{FOLDER}/lock"
# Shell code to put at the start of a command.  It ensures that only one command with this code runs
# on a host at a time.  A command keeps running on its host even if the driver that sent it is
# disconnected or killed, for example during a long installation.  Nothing waits for the old command
# any more, so the new command kills it, together with its process group.  An old command is
# recognised by the lock file, which it holds open as file descriptor 9.
ALONE = f"""
exec 9>> {LOCK}
mine=$(ps -o pgid= -p $$)
for file in /proc/[0-9]*/fd/9; do
    if [ "$file" -ef {LOCK} ]; then
        pid=${{file#/proc/}}
        group=$(ps -o pgid= -p "${{pid%%/*}}")
        if [ -n "$group" ] && [ "$group" != "$mine" ]; then kill -KILL -- "-$((group))"; fi
    fi
done
if ! flock --wait 30 9; then
    echo "a command of an earlier run is still running here; restart this host" >&2
    exit 1
fi
"""
ROOT = Path(__file__).resolve().parents[3]

# Files to copy from outside the package.  They are listed one by one, so that no other file (a key,
# a .env) is ever copied to a host.
REQUIRED_FILES = (
    "setup.py",
    "pyproject.toml",
    "requirements.txt",
    "requirements-libtpu.txt",
    "scripts/init_ray.sh",
)
PACKAGE_SUFFIXES = {".py", ".json", ".html", ".css", ".js", ".svg"}


def package_archive(root: Path = ROOT) -> bytes:
    """Return a .tar.gz of the files that a host needs to install this package.

    The same files always give the same bytes.

    Args:
      root: the folder of the repository checkout.

    Raises:
      InputError: if one of the files is missing.
    """
    missing = [name for name in REQUIRED_FILES if not (root / name).is_file()]
    if missing:
        raise InputError(
            f"{root / missing[0]} is missing, but is needed to install the package on TPU hosts; "
            "start the run from a checkout of mesh-transformer"
        )
    package = sorted((root / "mesh_transformer").rglob("*"))
    files = [root / name for name in REQUIRED_FILES]
    files += [path for path in package if path.suffix in PACKAGE_SUFFIXES and path.is_file()]
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        for path in files:
            entry = tarfile.TarInfo(path.relative_to(root).as_posix())
            entry.size = path.stat().st_size
            entry.mode = 0o755 if path.suffix == ".sh" else 0o644
            archive.addfile(entry, io.BytesIO(path.read_bytes()))
    return packed.getvalue()


def copy_package(hosts: Hosts, root: Path = ROOT) -> None:
    """Copy this package to each host.

    An older copy on the host is replaced only once all files of the new copy have been unpacked.

    Args:
      root: the folder of the repository checkout.
    """
    hosts.put(package_archive(root), f"{FOLDER}/package.tgz")
    steps = (
        f"set -e; cd {FOLDER}; rm -rf package.new package.old; mkdir package.new; "
        "tar -xzf package.tgz -C package.new; "
        "if [ -e package ]; then mv -T package package.old; fi; "
        "mv -T package.new package; rm -rf package.old"  # keep the .tgz: a later call may use it
    )
    hosts.run(ALONE + steps, seconds=120, what="unpack the package")


def ray_token() -> str:
    """Return the authentication token of the driver's Ray cluster.

    The token is the environment variable RAY_AUTH_TOKEN or, if that is not set, the content of the
    file that RAY_AUTH_TOKEN_PATH names (default ~/.ray/auth_token).

    Raises:
      InputError: if there is no token, or if other users can read the file.
    """
    token = os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if token:
        return token
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named).expanduser() if named else Path.home() / ".ray" / "auth_token"
    if not path.is_file():
        raise InputError(
            f"RAY_AUTH_TOKEN is not set, and Ray's token file {path} does not exist; unset "
            "RAY_AUTH_TOKEN_PATH and run `ray get-auth-token --generate > /dev/null`"
        )
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise InputError(f"Ray's token file {path} can be read by others; run `chmod 600 {path}`")
    token = path.read_text("utf-8").strip()
    if not token:
        raise InputError(f"Ray's token file {path} is empty; write the Ray cluster's token there")
    return token


def start_ray(
    hosts: Hosts, address: str, token: str, *, seconds: float = 1800.0, show: bool = False
) -> None:
    """Copy this package to every host, install it there, and start a Ray worker.

    The token is written to a file that only its owner can read, and is never part of a command
    line.  The hosts use the same Python minor version as this process.

    Args:
      address: "ip:port" of the Ray head.
      token: authentication token of the Ray cluster; see `ray_token`.
      seconds: time limit, in seconds, for the installation and the start of Ray.
      show: print the hosts' output as it arrives.
    """
    copy_package(hosts)
    hosts.put_secret(token, TOKEN)
    script = ["bash", f"{PACKAGE}/scripts/init_ray.sh", "--address", address, "--restart"]
    script += ["--python", ".".join(platform.python_version_tuple()[:2])]
    command = f"{ALONE}RAY_AUTH_TOKEN_PATH={TOKEN} {shlex.join(script)}"
    hosts.run(command, seconds=seconds, show=show, what="install and start Ray")
