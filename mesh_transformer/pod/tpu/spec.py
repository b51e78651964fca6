"""Which TPU to make (name, place, kind, price) and whom to be on its hosts.

All of it is checked before anything that costs money is asked for.
"""

import dataclasses
import getpass
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Self, get_args

from mesh_transformer.config import Config
from mesh_transformer.mesh.accelerators import GENERATIONS, Tier, accelerator_type
from mesh_transformer.util import InputError

if TYPE_CHECKING:
    from paramiko import PKey


@dataclasses.dataclass(frozen=True)
class TpuSpec:
    """A TPU to make, and how.

    `zone` is what the original called a region ("europe-west4-a").  `runtime_version` and
    `project` are the generation's and the credentials' own when None.  A queued request waits in
    line for capacity; it takes "spot" or "on_demand", since the API's queue has no preemptible
    tier.  `external_ips` gives hosts their own way to the internet, without which the network
    needs a NAT to install packages.  Some minutes after `max_hours` its hosts delete it themselves,
    whatever has become of the driver (`deadline_script`).
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
        """The config's TPU: `tpu_size` devices of `tpu_generation` in `tpu_zone`, and so on.

        `preemptible` asks for the tier that may be taken away: the generation's own, or spot in
        the queue; a `tpu_tier` other than "on_demand" stays.
        """
        if config.tpu_zone is None:
            raise InputError(
                "a TPU needs a zone to be made in; give --tpu-zone (such as europe-west4-a), or "
                "the config key tpu_zone"
            )
        assert config.tpu_size is not None
        kind = accelerator_type(config.tpu_generation, config.tpu_size)
        tier: Tier = config.tpu_tier
        if preemptible and tier == "on_demand":
            tier = "spot" if queued else GENERATIONS[kind.split("-")[0]].cheap
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
                f"TPU name is {self.name!r}; take up to 63 lower-case letters, digits and hyphens, "
                "a letter first and no hyphen last"
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
            raise InputError(f"TPU tier is {self.tier!r}; take one of {', '.join(get_args(Tier))}")
        if self.queued and self.tier == "preemptible":
            raise InputError(
                "TPU tier is 'preemptible', which cannot be queued; take 'spot', or do not queue"
            )

    def _check_accelerator(self) -> None:
        found = re.fullmatch(r"([a-z0-9]+)-([1-9][0-9]*)", self.accelerator_type)
        if found and found[1] in GENERATIONS:
            if int(found[2]) % GENERATIONS[found[1]].units:
                raise InputError(
                    f"accelerator type is {self.accelerator_type!r}; a {found[1]} type counts "
                    "cores, two a chip: give an even number"
                )
            return
        if found and found[1] == "v5e":
            advice = f"the API calls it 'v5litepod-{found[2]}'"
        else:
            advice = f"give a generation of {', '.join(GENERATIONS)} and a size, such as 'v4-8'"
        raise InputError(f"accelerator type is {self.accelerator_type!r}; {advice}")

    @property
    def generation(self) -> str:
        return self.accelerator_type.split("-")[0]

    @property
    def devices(self) -> int:
        """JAX devices in the slice, over all its hosts."""
        return int(self.accelerator_type.split("-")[1]) // GENERATIONS[self.generation].units

    @property
    def runtime(self) -> str:
        return self.runtime_version or GENERATIONS[self.generation].runtime_version

    def delete_command(self) -> str:
        """What a person types to delete it, whatever became of this program."""
        kind = ["queued-resources"] if self.queued else ["tpu-vm"]
        place = ["--zone", self.zone, *(["--project", self.project] if self.project else [])]
        force = ["--force"] if self.queued else []
        return shlex.join(
            ["gcloud", "compute", "tpus", *kind, "delete", self.name, *place, *force, "--quiet"]
        )


def deadline_script(spec: TpuSpec, seconds: float, folder: str = "/var/lib") -> str:
    """A startup script for every host of a TPU: deletes the TPU so many seconds after it started.

    A host has the TPU's own service account, which may need the role roles/tpu.admin for it; where
    the API refuses, the host shuts down.  A host that starts again keeps its first deadline.
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
        # The token comes by standard input: a machine's users see all arguments.
        curl -sf -X DELETE -H @- '{url}' <<< "Authorization: Bearer $token" && exit
        sleep 60
    done
    shutdown -h now
) > /dev/null 2>&1 &
"""


@dataclasses.dataclass(frozen=True)
class SshOptions:
    """Whom to be on the hosts, and for how long to try; the key is the one gcloud makes."""

    user: str = dataclasses.field(default_factory=getpass.getuser)
    key_file: str = "~/.ssh/google_compute_engine"
    port: int = 22
    trust_first: bool = True
    connect_seconds: float = 300.0

    @property
    def key_path(self) -> Path:
        return Path(self.key_file).expanduser()

    def private_key(self) -> "PKey":
        """The key; InputError where it is missing, has a passphrase, or is none."""
        try:
            from paramiko import PKey
            from paramiko.pkey import UnknownKeyType
        except ImportError as error:
            raise InputError(
                f"package {error.name!r} is missing, which TPU hosts need; pip install fabric"
            ) from error
        path = self.key_path
        if not path.is_file():
            raise InputError(
                f"SSH key {path} is missing; make it with `ssh-keygen -t ed25519 -N '' -f {path}`, "
                "or name another"
            )
        try:
            return PKey.from_path(path)
        except TypeError as error:  # cryptography's word for "a passphrase is needed"
            raise InputError(f"SSH key {path} has a passphrase; name a key without one") from error
        except (ValueError, OSError, UnknownKeyType) as error:
            raise InputError(
                f"SSH key {path} cannot be read as a private key ({type(error).__name__}); name "
                "another"
            ) from error

    def public_key(self) -> str:
        """What a host has to know, as authorized_keys has it."""
        key = self.private_key()
        return f"{key.get_name()} {key.get_base64()}"
