"""A fake Google Cloud project on this machine: the TPU API over TLS, and hosts that join Ray.

`train.py --tpu` connects to it with ordinary settings: the API's address, credentials and an SSH
port.  Everything in between is real: the client and its signed tokens, SSH, `init_ray.sh`, Ray
nodes and the mesh.  Each host has its own address, home and keys.  Its virtual environment already
exists, as on a second start, because installing it would take minutes.
"""

import contextlib
import datetime
import ipaddress
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Collection
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from mesh_transformer.pod.tpu import install
from mesh_transformer.pod.tpu.api import ENDPOINT
from tests.support.fake_tpu import FakeHost, FakeTpuApi, key_pair

ROOT = Path(__file__).parents[2]
PROJECT = "p"
# Prefixes of variables that hosts do not get.
OURS = ("RAY_", "GOOGLE_", "CLOUDSDK_", "GRPC_", "PYTEST_")


class FakePod:
    """A project whose machines can be switched on and off; a context manager.

    A driver that gets `flags` and `environment` uses this project.  `secrets` are texts that must
    not appear in any output.
    """

    def __init__(self, folder: Path):
        # The name is short because the paths of Ray's sockets may have 107 characters.
        self._homes = tempfile.TemporaryDirectory()
        self._hosts: list[FakeHost] = []
        self._on: set[str] = set()
        self._count = 0
        key, certificate = _certificate()
        authority, account = folder / "authority.pem", folder / "account.json"
        authority.write_bytes(certificate)
        private = _private(rsa.generate_private_key(65537, 2048)).decode()
        account.write_text(json.dumps(_account(private)))
        self.key = key_pair(folder)
        self.api = FakeTpuApi((key, certificate))
        self.environment = {
            ENDPOINT: f"https://{self.api.address}/",
            "GOOGLE_APPLICATION_CREDENTIALS": str(account),
            "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(authority),
        }
        # Only full lines of the keys, because the last one may be as short as an ordinary word.
        lines = (private + self.key.read_text()).splitlines()
        self.secrets = [line for line in lines if len(line) == 64]

    def __enter__(self) -> "FakePod":
        self.api.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.switch_off(self._on)
        self.api.__exit__(*error)
        self._homes.cleanup()

    @property
    def flags(self) -> list[str]:
        ssh = ["--ssh-user", "me", "--ssh-key", str(self.key)]
        return [*ssh, "--ssh-port", str(self._hosts[0].port)]

    def switch_on(self, count: int, devices: int) -> list[FakeHost]:
        """Start machines at new addresses, which are the hosts of the next TPU.

        Args:
          devices: number of virtual CPU devices per machine.
        """
        port = self._hosts[0].port if self._hosts else 0
        made = []
        for _ in range(count):
            self._count += 1
            made.append(self._new_host(port, devices).__enter__())
            port = made[-1].port
        self._hosts += made
        self._on |= {host.address for host in made}
        self.api.addresses = [host.address for host in made]
        self.api.host_keys = [host.published() for host in made]
        return made

    def _new_host(self, port: int, devices: int) -> FakeHost:
        home = Path(self._homes.name) / f"{self._count}"
        home.mkdir()
        _install(home)
        mine = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
        flags = f"--xla_force_host_platform_device_count={devices}"
        machine = mine | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
        }
        public = self.key.with_suffix(".pub").read_text()
        # Ray assumes that 127.0.0.1 is the driver's machine.
        address = f"127.0.0.{1 + self._count}"
        return FakeHost(home, "me", public, address, port, environment=machine)

    def switch_off(self, addresses: Collection[str]) -> None:
        """End machines and everything that runs on them."""
        for host in self._hosts:
            if host.address in addresses:
                host.__exit__(None, None, None)
        self._on -= set(addresses)

    def preempt(self) -> None:
        """Take the TPU and its machines away; machines that were switched on later stay."""
        ends = [end for node in self.api.nodes.values() for end in node.network_endpoints]
        gone = {end.ip_address for end in ends}
        self.api.preempt()
        self.switch_off(gone)

    def processes(self, title: str) -> list[int]:
        """Return the processes of all machines whose title starts with `title`."""
        pids = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended
                begins = (process / "cmdline").read_text().startswith(title)
                environment = (process / "environ").read_text()
                if begins and f"HOME={self._homes.name}" in environment:
                    pids.append(int(process.name))
        return pids

    def readable(self) -> str:
        """Return what other users can read in the hosts' homes, except the virtual environments."""
        texts = []
        for path in Path(self._homes.name).rglob("*"):
            if path.is_file() and path.stat().st_mode & 0o077 and "venv" not in path.parts:
                texts.append(path.read_text(errors="replace"))
        return "\n".join(texts)

    def commands(self) -> str:
        """Return all commands that were ever run on a host."""
        return "\n".join(command for host in self._hosts for command in host.commands)


def _install(home: Path) -> None:
    """Create what `init_ray.sh` would install: an environment with the host's own package first.

    Its Ray uses a folder in the host's home instead of /tmp, which all hosts here share.
    """
    package, venv = home / install.PACKAGE, home / install.FOLDER / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    version = ".".join(platform.python_version_tuple()[:2])
    libraries = sysconfig.get_path("purelib")
    site = venv / "lib" / f"python{version}" / "site-packages"
    (site / "host.pth").write_text(f"{package}\n{libraries}\n")
    ray = venv / "bin" / "ray"
    ray.write_text(
        f"#!{venv / 'bin' / 'python'}\nimport sys\nfrom ray.scripts.scripts import main\n"
        f"sys.argv[2:2] = ['--temp-dir', '{home / 'ray'}']\nsys.exit(main())\n"
    )
    ray.chmod(0o755)
    digest = subprocess.run(
        ["bash", "-c", "cat requirements.txt requirements-libtpu.txt setup.py | sha256sum"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    (venv / "installed").write_text(f"{version} {digest}")


def _private(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _certificate() -> tuple[bytes, bytes]:
    """Return a key for 127.0.0.1 and its self-signed certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")])
    now = datetime.datetime.now(datetime.UTC)
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(here, critical=False)
        .sign(key, hashes.SHA256())
    )
    return _private(key), certificate.public_bytes(serialization.Encoding.PEM)


def _account(private: str) -> dict[str, str]:
    """Return a service account's key file, as Google issues it; the driver signs tokens with it."""
    return {
        "type": "service_account",
        "project_id": PROJECT,
        "private_key_id": "1",
        "private_key": private,
        "client_email": f"driver@{PROJECT}.iam.gserviceaccount.com",
        "client_id": "1",
        "token_uri": "https://oauth2.invalid/token",
    }
