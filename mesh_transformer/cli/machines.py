"""The machines that a command's flags ask for, and a network that runs on them."""

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mesh_transformer.cli.arguments import refuse_tpu_arguments, tpu_arguments
from mesh_transformer.config import Config
from mesh_transformer.pod.launch import build_model, local_machines, tpu_machines

if TYPE_CHECKING:
    from mesh_transformer.checkpoint.source import Source
    from mesh_transformer.data.storage import AnyPath
    from mesh_transformer.pod.cluster import TPUCluster
    from mesh_transformer.pod.hosts import Host
    from mesh_transformer.pod.restarts import LastingCluster
    from mesh_transformer.transformer_shard import CausalTransformer


def machines_of(
    args: argparse.Namespace, config: Config
) -> "contextlib.AbstractContextManager[Callable[[], list[Host]]]":
    """What gives the hosts that `add_host_arguments`' flags ask for, at each attempt."""
    if args.tpu is not None:
        return tpu_machines(config, *tpu_arguments(args, config))
    refuse_tpu_arguments(args)
    return local_machines(config, args.local_hosts)


@contextlib.contextmanager
def running_model(
    args: argparse.Namespace,
    path: "AnyPath | Source",
    config: Config | None,
    *,
    only_generate: bool = False,
) -> "Iterator[CausalTransformer | LastingCluster]":
    """A network with the weights at `path`, to answer with.

    It runs on the hosts that `add_host_arguments`' flags ask for, otherwise in this process;
    without a config it has that of `path`.  For `only_generate` see `CausalTransformer`.
    """
    if args.tpu is None and args.local_hosts is None:
        from mesh_transformer.transformer_shard import load

        refuse_tpu_arguments(args)
        alone = load(path, config)
        if only_generate:
            alone.only_generate()
        yield alone
        return
    from mesh_transformer.checkpoint.source import Source

    own = config or Source.of(path).config
    with machines_of(args, own) as hosts:
        from mesh_transformer.pod.restarts import LastingCluster

        def make() -> "TPUCluster":
            cluster = build_model(own, hosts(), heartbeat=args.heartbeat, patience=args.patience)
            try:
                cluster.load(os.fspath(path), only_params=True)
                if only_generate:
                    cluster.only_generate()
            except BaseException:
                cluster.close()
                raise
            return cluster

        with contextlib.closing(LastingCluster(make)) as network:
            yield network
