"""What the hosts of a TPU need to join the driver's Ray cluster: the package, the token, Ray."""

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

FOLDER = ".mesh-transformer"  # in the home of the user on each host
PACKAGE = f"{FOLDER}/package"
TOKEN = f"{FOLDER}/ray_token"
LOCK = f"{FOLDER}/lock"
# A command goes on at its host when its driver is cut off or killed, as in a long installation.
# The next one ends it, since nobody waits for it any more: with the whole group of processes that
# its time limit would have ended.  It is known by the lock, which it has open as file 9.
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
    echo "the command of an earlier start does not end; start this host anew" >&2
    exit 1
fi
"""
ROOT = Path(__file__).resolve().parents[3]

# Named one by one, so that nothing else that lies about (a key, a .env) ever leaves this machine.
NEEDED = (
    "setup.py",
    "pyproject.toml",
    "requirements.txt",
    "requirements-libtpu.txt",
    "scripts/init_ray.sh",
)
PACKAGE_SUFFIXES = {".py", ".json", ".html", ".css", ".js", ".svg"}


def package_archive(root: Path = ROOT) -> bytes:
    """A .tar.gz of what a host has to have; equal sources give equal bytes."""
    missing = [name for name in NEEDED if not (root / name).is_file()]
    if missing:
        raise InputError(
            f"{root / missing[0]} is missing, which TPU hosts install from; run this from a "
            "checkout of mesh-transformer"
        )
    package = sorted((root / "mesh_transformer").rglob("*"))
    files = [root / name for name in NEEDED]
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
    """Puts the package on each host, in place of an older copy; whole, or not at all."""
    hosts.put(package_archive(root), f"{FOLDER}/package.tgz")
    steps = (
        f"set -e; cd {FOLDER}; rm -rf package.new package.old; mkdir package.new; "
        "tar -xzf package.tgz -C package.new; "
        "if [ -e package ]; then mv -T package package.old; fi; "
        "mv -T package.new package; rm -rf package.old"  # the .tgz may be the next one's already
    )
    hosts.run(ALONE + steps, seconds=120, what="unpack the package")


def ray_token() -> str:
    """The driver's Ray token, looked for where Ray looks: two variables, then the usual file."""
    token = os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if token:
        return token
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named).expanduser() if named else Path.home() / ".ray" / "auth_token"
    if not path.is_file():
        raise InputError(
            f"Ray's token is not in RAY_AUTH_TOKEN and {path} does not exist; make it with "
            "`ray get-auth-token --generate > /dev/null`"
        )
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise InputError(f"Ray's token {path} can be read by others; run `chmod 600 {path}`")
    token = path.read_text("utf-8").strip()
    if not token:
        raise InputError(f"Ray's token {path} is empty; write it anew with `ray get-auth-token`")
    return token


def start_ray(
    hosts: Hosts, address: str, token: str, *, seconds: float = 1800.0, show: bool = False
) -> None:
    """Copies the package, installs it and starts a Ray worker of `address` ("ip:port") everywhere.

    The token goes into a file that only its owner can read, never into a command.  Hosts get the
    driver's own Python version but for its last number, which pickles do not depend on.
    """
    copy_package(hosts)
    hosts.put_secret(token, TOKEN)
    script = ["bash", f"{PACKAGE}/scripts/init_ray.sh", "--address", address, "--restart"]
    script += ["--python", ".".join(platform.python_version_tuple()[:2])]
    command = f"{ALONE}RAY_AUTH_TOKEN_PATH={TOKEN} {shlex.join(script)}"
    hosts.run(command, seconds=seconds, show=show, what="install and start Ray")
