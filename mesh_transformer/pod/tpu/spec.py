"""Specification of a TPU to create (name, zone, type, tier) and of the SSH login to its hosts.

Invalid values are reported before a TPU is requested and costs money.
"""

import dataclasses
import getpass
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Self, get_args

from mesh_transformer import extras
from mesh_transformer.config import Config
from mesh_transformer.mesh.accelerators import CLOUD_GENERATIONS, Tier, accelerator_type
from mesh_transformer.util import InputError

if TYPE_CHECKING:
    from paramiko import PKey


@dataclasses.dataclass(frozen=True)
class TpuSpec:
    """Specification of a TPU to create; invalid values raise InputError.

    Attributes:
      name: name of the TPU, unique in its project and zone.
      zone: Google Cloud zone, such as "europe-west4-a" (`region` in the original
        mesh-transformer-jax).
      accelerator_type: the TPU type, as the Cloud TPU API names it, such as "v4-8".
      runtime_version: the TPU's software version; None selects the default of its generation.
      project: Google Cloud project; None selects the project of the credentials.
      tier: price tier: "on_demand", or the cheaper "spot" or "preemptible", whose TPUs Google may
        take away at any time.
      queued: whether to wait in Google's queue for capacity.  The tier must then be "spot" or
        "on_demand", because the queue does not accept "preemptible".
      network, subnetwork: VPC network and subnetwork of the hosts; None selects the default.
      external_ips: whether the hosts get external IP addresses.  Without external addresses, the
        network needs a NAT so that the hosts can download packages.
      max_hours: maximum hours of use, counted from when the TPU is ready; None for no limit.  Some
        minutes after this time, the hosts delete the TPU if it still exists (see
        `deadline_script`).
    """

    name: str
    zone: str
    accelerator_type: str
    runtime_version: str | None = None
    project: str | None = None
    tier: Tier = "on_demand"
    queued: bool = False
    network: str | None = None
    subnetwork: str | None = None
    external_ips: bool = True
    max_hours: float | None = None

    @classmethod
    def of(
        cls,
        config: Config,
        name: str,
        *,
        queued: bool = False,
        preemptible: bool = False,
        max_hours: float | None = None,
    ) -> Self:
        """Return the spec of a TPU with `tpu_size` devices and the config's other `tpu_*` values.

        Args:
          name: name of the TPU.
          preemptible: use a cheaper tier whose TPUs Google may take away at any time: "spot" if
            `queued`, otherwise the generation's `cheap_tier` ("spot" or "preemptible").  The option
            has no effect if the config's `tpu_tier` is not "on_demand".

        Raises:
          InputError: if the config has no `tpu_zone`, or if a value is invalid.
        """
        if config.tpu_zone is None:
            raise InputError(
                "a TPU needs a zone; give --tpu-zone (such as europe-west4-a), or "
                "set the config key tpu_zone"
            )
        assert config.tpu_size is not None
        kind = accelerator_type(config.tpu_generation, config.tpu_size)
        tier: Tier = config.tpu_tier
        if preemptible and tier == "on_demand":
            tier = "spot" if queued else CLOUD_GENERATIONS[kind.split("-")[0]].cheap_tier
        return cls(
            name,
            config.tpu_zone,
            kind,
            runtime_version=config.tpu_runtime_version,
            tier=tier,
            queued=queued,
            network=config.tpu_network,
            subnetwork=config.tpu_subnetwork,
            max_hours=max_hours,
        )

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", self.name):
            raise InputError(
                f"TPU name is {self.name!r}, expected at most 63 lower-case letters, digits and "
                "hyphens, beginning with a letter and not ending with a hyphen"
            )
        if not re.fullmatch(r"[a-z]+-[a-z]+[0-9]+-[a-z]", self.zone):
            raise InputError(
                f"TPU zone is {self.zone!r}; give a zone with its letter, such as 'europe-west4-a'"
            )
        self._check_accelerator()
        if self.max_hours is not None and not 0 < self.max_hours < 24 * 366:
            raise InputError(
                f"--max-hours is {self.max_hours:g}, expected more than 0 and less than a year"
            )
        if self.tier not in get_args(Tier):
            raise InputError(f"TPU tier is {self.tier!r}; give one of {', '.join(get_args(Tier))}")
        if self.queued and self.tier == "preemptible":
            raise InputError(
                "TPU tier is 'preemptible', which cannot be queued; use 'spot', or omit --queued"
            )

    def _check_accelerator(self) -> None:
        match = re.fullmatch(r"([a-z0-9]+)-([1-9][0-9]*)", self.accelerator_type)
        if match and match[1] in CLOUD_GENERATIONS:
            if int(match[2]) % CLOUD_GENERATIONS[match[1]].units:
                raise InputError(
                    f"accelerator type is {self.accelerator_type!r}, but the number in {match[1]} "
                    "types counts cores, two per chip; give an even number"
                )
            return
        if match and match[1] == "v5e":
            advice = f"give the API's name for this type, 'v5litepod-{match[2]}'"
        else:
            advice = (
                f"give a generation of {', '.join(CLOUD_GENERATIONS)} and a size, such as 'v4-8'"
            )
        raise InputError(f"accelerator type is {self.accelerator_type!r}; {advice}")

    @property
    def generation(self) -> str:
        """The TPU generation, such as "v4"."""
        return self.accelerator_type.split("-")[0]

    @property
    def devices(self) -> int:
        """Number of JAX devices of the TPU, over all its hosts."""
        return int(self.accelerator_type.split("-")[1]) // CLOUD_GENERATIONS[self.generation].units

    @property
    def runtime(self) -> str:
        """Runtime version to request: `runtime_version` or, if None, the generation's default."""
        return self.runtime_version or CLOUD_GENERATIONS[self.generation].runtime_version

    def smaller(self) -> list[Self]:
        """Return the specs of TPUs with a half, a quarter, ... of the devices, largest first.

        The zone may not offer all of these types.
        """
        specs, devices = [], self.devices
        while devices > 1:
            devices //= 2
            kind = accelerator_type(self.generation, devices)
            specs.append(dataclasses.replace(self, accelerator_type=kind))
        return specs

    def delete_command(self) -> str:
        """Return the gcloud command with which a user can delete the TPU."""
        kind = ["queued-resources"] if self.queued else ["tpu-vm"]
        place = ["--zone", self.zone, *(["--project", self.project] if self.project else [])]
        force = ["--force"] if self.queued else []
        return shlex.join(
            ["gcloud", "compute", "tpus", *kind, "delete", self.name, *place, *force, "--quiet"]
        )


def deadline_script(spec: TpuSpec, seconds: float, folder: str = "/var/lib") -> str:
    """Return a startup script for a TPU's hosts that deletes the TPU after `seconds` seconds.

    The time counts from a host's first start; a restart of the host does not extend the time.  The
    script deletes the TPU through the Cloud TPU API, as the TPU's service account, which may need
    the role roles/tpu.admin.  If the API refuses the deletion, the host shuts itself down.

    Args:
      folder: folder on the host for the file that stores the deadline.
    """
    kind, end = ("queuedResources", "?force=true") if spec.queued else ("nodes", "")
    url = (
        f"https://tpu.googleapis.com/v2/projects/{spec.project}/locations/{spec.zone}/"
        f"{kind}/{spec.name}{end}"
    )
    return rf"""#!/bin/bash
deadline={folder}/mesh-transformer-deadline
[ -s "$deadline" ] || echo $(($(date +%s) + {seconds:.0f})) > "$deadline"
token_url=http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token
(
    while [ "$(date +%s)" -lt "$(cat "$deadline")" ]; do sleep 30; done
    for attempt in 1 2 3 4 5; do
        token=$(curl -sf -H 'Metadata-Flavor: Google' "$token_url" |
            sed -n 's/.*"access_token": *"\([^"]*\)".*/\1/p')
        # The token is passed on standard input: a machine's users can see all arguments.
        curl -sf -X DELETE -H @- '{url}' <<< "Authorization: Bearer $token" && exit
        sleep 60
    done
    shutdown -h now
) > /dev/null 2>&1 &
"""


@dataclasses.dataclass(frozen=True)
class SshOptions:
    """How to log in to a TPU's hosts over SSH.

    Attributes:
      user: login name on the hosts (default: the name of the local user).
      key_file: path of the private key (default: the key that gcloud creates).
      port: TCP port of the SSH servers on the hosts.
      trust_first: whether to connect to a host that has not published any SSH host keys.  If so,
        the first key that the host presents is trusted; see the docstring of the module `ssh`.
      connect_seconds: time limit, in seconds, for retrying the first connection to a host.
    """

    user: str = dataclasses.field(default_factory=getpass.getuser)
    key_file: str = "~/.ssh/google_compute_engine"
    port: int = 22
    trust_first: bool = True
    connect_seconds: float = 300.0

    @property
    def key_path(self) -> Path:
        """`key_file` with `~` expanded."""
        return Path(self.key_file).expanduser()

    def private_key(self) -> "PKey":
        """Read the private key; raise InputError if it is missing, invalid or has a passphrase."""
        try:
            from paramiko import PKey
            from paramiko.pkey import UnknownKeyType
        except ImportError as error:
            raise InputError(f"TPU hosts: {extras.missing(error) or error}") from error
        path = self.key_path
        if not path.is_file():
            raise InputError(
                f"SSH key {path} is missing; create it with `ssh-keygen -t ed25519 -N '' -f {path}`"
                ", or choose another key with --ssh-key"
            )
        try:
            return PKey.from_path(path)
        except TypeError as error:  # raised by `cryptography` if the key has a passphrase
            raise InputError(
                f"SSH key {path} has a passphrase; choose an unencrypted key with --ssh-key"
            ) from error
        except (ValueError, OSError, UnknownKeyType) as error:
            raise InputError(
                f"SSH key {path} cannot be read as a private key ({type(error).__name__}); choose "
                "another key with --ssh-key"
            ) from error

    def public_key(self) -> str:
        """Return the public key in the format of a line in authorized_keys."""
        key = self.private_key()
        return f"{key.get_name()} {key.get_base64()}"
