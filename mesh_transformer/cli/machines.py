"""The hosts on which a command runs its model: flags that choose them, and the model on them."""

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mesh_transformer.cli.arguments import positive
from mesh_transformer.config import Config
from mesh_transformer.pod.launch import (
    GroupHosts,
    build_model,
    local_machines,
    local_nodes,
    ray_machines,
    smaller_tpus,
    tpu_machines,
)
from mesh_transformer.pod.tpu.spec import SshOptions, TpuSpec
from mesh_transformer.util import InputError

if TYPE_CHECKING:
    from mesh_transformer.checkpoint.source import Source
    from mesh_transformer.pod.cluster import TPUCluster
    from mesh_transformer.pod.restarts import RestartingCluster
    from mesh_transformer.storage.access import AnyPath
    from mesh_transformer.transformer_shard import CausalTransformer


# Flags that replace a config key of the same name.
TPU_KEYS = ("tpu_zone", "tpu_generation", "tpu_runtime_version")


def add_host_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the flags that choose the hosts to run the model on, and the timeouts of these hosts.

    Args:
      required: whether the user must give --tpu, --local-hosts or --ray, a flag that is added only
        then.  If False and no flag is given, the model runs in the command's own process.
    """
    hosts = parser.add_mutually_exclusive_group(required=required)
    hosts.add_argument(
        "--tpu", metavar="NAME", help="TPU to create, which is deleted when the script ends"
    )
    hosts.add_argument(
        "--local-hosts", type=int, metavar="N", help="number of local processes to use as hosts"
    )
    if required:
        hosts.add_argument(
            "--ray",
            metavar="ADDRESS",
            help="existing Ray cluster to train on: HOST:PORT, or auto for that of this machine",
        )
    parser.add_argument(
        "--heartbeat",
        type=positive,
        default=10,
        help="declare a host dead after this many silent seconds (default 10)",
    )
    parser.add_argument(
        "--patience",
        type=positive,
        default=3600,
        help="maximum seconds per call to the hosts, compilation included (default 3600)",
    )
    add_tpu_arguments(parser)


def add_tpu_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe the TPU created by `--tpu`, and the SSH login to its hosts."""
    group = parser.add_argument_group(
        "with --tpu", "the TPU to create; a flag with a config key overrides the key"
    )
    group.add_argument(
        "--tpu-zone",
        "--tpu-region",
        metavar="ZONE",
        help="zone, such as europe-west4-a (config key tpu_zone)",
    )
    group.add_argument(
        "--tpu-generation",
        help="v2, v3, v4, v5e, v5p or v6e (config key tpu_generation; default v3)",
    )
    group.add_argument(
        "--tpu-runtime-version",
        metavar="VERSION",
        help="image of the hosts (config key tpu_runtime_version; default: the generation's)",
    )
    group.add_argument(
        "--preemptible",
        action="store_true",
        help="use a cheaper TPU that may be preempted, and is then created again (config key "
        "tpu_tier chooses the tier)",
    )
    group.add_argument(
        "--queued", action="store_true", help="wait in Google's queue for up to a day"
    )
    group.add_argument(
        "--max-hours",
        type=float,
        metavar="H",
        help="stop, save and delete the TPU after H hours; 15 minutes later its hosts delete it "
        "even if this driver is gone (default: no limit)",
    )
    group.add_argument(
        "--ssh-user", metavar="NAME", help="user name on the hosts (default: your local one)"
    )
    group.add_argument(
        "--ssh-key", metavar="FILE", help=f"private key (default: {SshOptions.key_file})"
    )
    group.add_argument(
        "--ssh-port", type=int, metavar="PORT", help="SSH port of the hosts (default 22)"
    )


def refuse_tpu_arguments(args: argparse.Namespace) -> None:
    """Raise InputError if a flag of `add_tpu_arguments` is given, as all of them require `--tpu`.

    Call this only if `--tpu` is not given.
    """
    for name in (
        *TPU_KEYS,
        "preemptible",
        "queued",
        "max_hours",
        "ssh_user",
        "ssh_key",
        "ssh_port",
    ):
        value = getattr(args, name)
        if value is not None and value is not False:
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag} requires --tpu; give --tpu NAME, or remove {flag}")


def tpu_arguments(args: argparse.Namespace, config: Config) -> tuple[TpuSpec, SshOptions]:
    """Return the spec of the TPU to create, and the options of the SSH login to its hosts.

    The config determines the properties of the TPU that no flag sets, such as its zone.
    """
    changes = {key: getattr(args, key) for key in TPU_KEYS if getattr(args, key) is not None}
    ssh_flags = {"user": args.ssh_user, "key_file": args.ssh_key, "port": args.ssh_port}
    ssh: dict[str, Any] = {name: value for name, value in ssh_flags.items() if value is not None}
    spec = TpuSpec.of(
        config.replace(**changes),
        args.tpu,
        queued=args.queued,
        preemptible=args.preemptible,
        max_hours=args.max_hours,
    )
    return spec, SshOptions(**ssh)


def machines_of(
    args: argparse.Namespace, config: Config, wait: float | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that provides the hosts chosen by the command's flags.

    The hosts are those of a TPU (--tpu), processes on this machine (--local-hosts), or the machines
    of a Ray cluster (--ray); in a replica, those that Ray has reserved for it.  The context manager
    yields a function that returns the hosts.  Call this function before each attempt to start the
    model, because it also restarts Ray and recreates the TPU if necessary.

    Args:
      wait: for a run that can continue on fewer devices, the seconds to wait for all of them.  The
        context manager then yields `elastic.ElasticHosts`.
    """
    if args.tpu is None:
        refuse_tpu_arguments(args)
        if replica_hosts(args) > 1:
            return contextlib.nullcontext(GroupHosts(config, replica_hosts(args)))
        if address := getattr(args, "ray", None):
            return ray_machines(config, address)
        if wait is None:
            return local_machines(config, args.local_hosts)
        return local_nodes(config, args.local_hosts, wait)
    spec, ssh = tpu_arguments(args, config)
    if wait is None:
        return tpu_machines(config, spec, ssh)
    return smaller_tpus(config, spec, wait, ssh)


def replica_hosts(args: argparse.Namespace) -> int:
    """Return the number of machines of a replica; 1 if the command has no replicas."""
    return getattr(args, "replica_hosts", 1)


def has_hosts(args: argparse.Namespace) -> bool:
    """Return whether the model is on hosts, rather than in the process that runs it."""
    return args.tpu is not None or args.local_hosts is not None or replica_hosts(args) > 1


@contextlib.contextmanager
def running_model(
    args: argparse.Namespace,
    path: "AnyPath | Source",
    config: Config | None,
    *,
    only_generate: bool = False,
    adapters: Sequence[str] = (),
    draft: "Source | None" = None,
) -> "Iterator[CausalTransformer | RestartingCluster]":
    """Return a context manager that yields a network for inference, with the weights at `path`.

    This also enables JAX's persistent compilation cache.

    Args:
      args: the values of the flags added by `add_host_arguments`.  Unless they name hosts, the
        network runs in this process.
      config: the network's config; None to use the config stored at `path`.
      only_generate: whether to free all memory that generation does not need.  The network can then
        only generate and score (see `CausalTransformer.only_generate`).
      adapters: checkpoints of LoRA adapters, of which each text may choose one.
      draft: checkpoint of a smaller model that guesses tokens; None for none.
    """
    from mesh_transformer.mesh.program import use_compilation_cache

    use_compilation_cache()
    if not has_hosts(args):
        from mesh_transformer.transformer_shard import load

        refuse_tpu_arguments(args)
        local_network = load(path, config)
        if adapters:
            local_network.add_adapters(adapters)
        if draft is not None:
            local_network.add_draft(draft)
        if only_generate:
            local_network.only_generate()
        yield local_network
        return
    from mesh_transformer.checkpoint.source import Source

    network_config = config or Source.of(path).config
    # After a restart, the network has the same steps, even if there are newer ones.
    sources = [Source.of(name) for name in ([] if config else [path]) + [*adapters]]
    with machines_of(args, network_config) as hosts:
        from mesh_transformer.pod.restarts import RestartingCluster

        def make() -> "TPUCluster":
            cluster = build_model(
                network_config, hosts(), heartbeat=args.heartbeat, patience=args.patience
            )
            try:
                paths = [source.existing_path() for source in sources]
                cluster.load(os.fspath(path) if config else paths.pop(0), only_params=True)
                if paths:
                    cluster.add_adapters(paths)
                if draft is not None:
                    cluster.add_draft(draft.existing_path())
                if only_generate:
                    cluster.only_generate()
            except BaseException:
                cluster.close()
                raise
            return cluster

        with contextlib.closing(RestartingCluster(make)) as network:
            yield network
