"""Specification of a TPU to create (name, place, type, price) and of the login to its hosts.

Everything is checked before anything that costs money is requested.
"""

import dataclasses
import getpass
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Self, get_args

from mesh_transformer.config import Config
from mesh_transformer.mesh.accelerators import CLOUD_GENERATIONS, Tier, accelerator_type
from mesh_transformer.util import InputError

if TYPE_CHECKING:
    from paramiko import PKey


@dataclasses.dataclass(frozen=True)
class TpuSpec:
    """A TPU to create.

    Attributes:
      zone: such as "europe-west4-a"; the original called it a region.
      runtime_version: None for the default of the TPU's generation.
      project: None for the project of the credentials.
      queued: wait in Google's queue for capacity; requires the tier "spot" or "on_demand", since
        the API's queue has no preemptible tier.
      external_ips: give the hosts external addresses; without them the network needs a NAT for
        the hosts to install packages.
      max_hours: some minutes after this time the hosts delete the TPU themselves, even if the
        driver no longer runs (`deadline_script`).
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
        """Return the config's TPU: `tpu_size` devices of `tpu_generation` in `tpu_zone`.

        `preemptible` selects a tier that may be taken away: "spot" in the queue, otherwise that of
        the generation.  A `tpu_tier` other than "on_demand" takes precedence.

        Raises:
          InputError: if the config has no `tpu_zone`, or if a value is invalid.
        """
        if config.tpu_zone is None:
            raise InputError(
                "a TPU needs a zone; give --tpu-zone (such as europe-west4-a), or "
                "the config key tpu_zone"
            )
        assert config.tpu_size is not None
        kind = accelerator_type(config.tpu_generation, config.tpu_size)
        tier: Tier = config.tpu_tier
        if preemptible and tier == "on_demand":
            tier = "spot" if queued else CLOUD_GENERATIONS[kind.split("-")[0]].cheap
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
                f"TPU name is {self.name!r}; give up to 63 lower-case letters, digits and hyphens, "
                "with a letter first and no hyphen last"
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
                "TPU tier is 'preemptible', which cannot be queued; use 'spot', or do not queue"
            )

    def _check_accelerator(self) -> None:
        match = re.fullmatch(r"([a-z0-9]+)-([1-9][0-9]*)", self.accelerator_type)
        if match and match[1] in CLOUD_GENERATIONS:
            if int(match[2]) % CLOUD_GENERATIONS[match[1]].units:
                raise InputError(
                    f"accelerator type is {self.accelerator_type!r}; a {match[1]} type counts "
                    "cores, two per chip; give an even number"
                )
            return
        if match and match[1] == "v5e":
            advice = f"the API calls it 'v5litepod-{match[2]}'"
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
        """Number of JAX devices in the slice, over all its hosts."""
        return int(self.accelerator_type.split("-")[1]) // CLOUD_GENERATIONS[self.generation].units

    @property
    def runtime(self) -> str:
        """The runtime version to request."""
        return self.runtime_version or CLOUD_GENERATIONS[self.generation].runtime_version

    def delete_command(self) -> str:
        """Return the command with which the user can delete the TPU, should this program fail."""
        kind = ["queued-resources"] if self.queued else ["tpu-vm"]
        place = ["--zone", self.zone, *(["--project", self.project] if self.project else [])]
        force = ["--force"] if self.queued else []
        return shlex.join(
            ["gcloud", "compute", "tpus", *kind, "delete", self.name, *place, *force, "--quiet"]
        )


def deadline_script(spec: TpuSpec, seconds: float, folder: str = "/var/lib") -> str:
    """Return a startup script for a TPU's hosts that deletes the TPU after `seconds`.

    A host uses the TPU's own service account, which may need the role roles/tpu.admin; if the API
    refuses, the host shuts down.  Time counts from the host's first start: a host that starts again
    keeps its deadline.
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
    """How to log in to the hosts.

    Attributes:
      key_file: the private key; the default is the one that gcloud creates.
      trust_first: accept the first key seen from a host that has published none (see `ssh`).
      connect_seconds: for how long to retry the first connection to a host.
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
        """Return the key; raises InputError if it is missing, invalid or has a passphrase."""
        try:
            from paramiko import PKey
            from paramiko.pkey import UnknownKeyType
        except ImportError as error:
            raise InputError(
                f"package {error.name!r} is missing, but TPU hosts require it; pip install fabric"
            ) from error
        path = self.key_path
        if not path.is_file():
            raise InputError(
                f"SSH key {path} is missing; create it with `ssh-keygen -t ed25519 -N '' -f {path}`"
                ", or give another one"
            )
        try:
            return PKey.from_path(path)
        except TypeError as error:  # what cryptography raises if a passphrase is needed
            raise InputError(f"SSH key {path} has a passphrase; give a key without one") from error
        except (ValueError, OSError, UnknownKeyType) as error:
            raise InputError(
                f"SSH key {path} cannot be read as a private key ({type(error).__name__}); give "
                "another one"
            ) from error

    def public_key(self) -> str:
        """Return the public key as a line of authorized_keys."""
        key = self.private_key()
        return f"{key.get_name()} {key.get_base64()}"
