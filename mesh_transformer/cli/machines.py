"""Provide the hosts that a command's flags choose, and start a model on these hosts."""

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from mesh_transformer.cli.arguments import refuse_tpu_arguments, tpu_arguments
from mesh_transformer.config import Config
from mesh_transformer.pod.launch import (
    build_model,
    local_machines,
    local_nodes,
    smaller_tpus,
    tpu_machines,
)

if TYPE_CHECKING:
    from mesh_transformer.checkpoint.source import Source
    from mesh_transformer.pod.cluster import TPUCluster
    from mesh_transformer.pod.elastic import ElasticHosts
    from mesh_transformer.pod.hosts import Host
    from mesh_transformer.pod.restarts import RestartingCluster
    from mesh_transformer.storage.access import AnyPath
    from mesh_transformer.transformer_shard import CausalTransformer


def machines_of(
    args: argparse.Namespace, config: Config
) -> "contextlib.AbstractContextManager[Callable[[], list[Host]]]":
    """Return a context manager that provides the hosts chosen by the command's flags.

    The hosts are those of a TPU (--tpu) or processes on this machine (--local-hosts).  The context
    manager yields a function that returns the hosts.  Call this function before each attempt to
    start the model, because it also restarts Ray and recreates the TPU if necessary.

    Args:
      args: the values of the flags added by `add_host_arguments`.
    """
    if args.tpu is not None:
        return tpu_machines(config, *tpu_arguments(args, config))
    refuse_tpu_arguments(args)
    return local_machines(config, args.local_hosts)


def elastic_machines_of(
    args: argparse.Namespace, config: Config, wait: float
) -> "contextlib.AbstractContextManager[ElasticHosts]":
    """Return a context manager like `machines_of`, for a run that can continue on fewer devices.

    Args:
      args: the values of the flags added by `add_host_arguments`.
      wait: seconds to wait for all devices.
    """
    if args.tpu is not None:
        spec, ssh = tpu_arguments(args, config)
        return smaller_tpus(config, spec, wait, ssh)
    refuse_tpu_arguments(args)
    return local_nodes(config, args.local_hosts, wait)


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
      args: the values of the flags added by `add_host_arguments`.  If neither --tpu nor
        --local-hosts is given, the network runs in this process.
      config: the network's config; None to use the config stored at `path`.
      only_generate: whether to free all memory that generation does not need.  The network can then
        only generate and score (see `CausalTransformer.only_generate`).
      adapters: checkpoints of LoRA adapters, of which each text may choose one.
      draft: checkpoint of a smaller model that guesses tokens; None for none.
    """
    from mesh_transformer.mesh.program import use_compilation_cache

    use_compilation_cache()
    if args.tpu is None and args.local_hosts is None:
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
