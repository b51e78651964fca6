"""Replicas of a server on a Ray cluster: flags, and the address of all replicas."""

import argparse
import contextlib
import copy
import functools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mesh_transformer.cli.arguments import model_arguments, positive
from mesh_transformer.cli.service import application
from mesh_transformer.util import InputError, StoppedError, exit_now, start_thread

if TYPE_CHECKING:
    from mesh_transformer.pod.replicas import Replicas
    from mesh_transformer.serving.local import LocalRequests

OBJECT_STORE = 100 << 20  # bytes of a Ray started here; no request needs it


def add_cluster_arguments(parser: argparse.ArgumentParser, description: str) -> Any:
    """Add the flags for replicas, in a group of flags with a description, and return the group."""
    group = parser.add_argument_group("replicas", description)
    group.add_argument(
        "--replicas",
        type=counts,
        metavar="N or MIN-MAX",
        help="number of replicas, or its bounds, between which it follows the number of requests",
    )
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        default="local",
        help="Ray cluster for the replicas: HOST:PORT, auto for this machine's, or local to start "
        "one (default local)",
    )
    group.add_argument(
        "--replica-resources",
        type=resources,
        metavar="JSON",
        default={},
        help='Ray\'s resources of each replica, such as {"TPU": 4}, or of each of its machines '
        "(default: none)",
    )
    group.add_argument(
        "--replica-hosts",
        type=positive,
        metavar="H",
        default=1,
        help="number of machines of each replica, whose mesh is over all of them (default 1)",
    )
    return group


def add_replica_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for replicas, and the limits of each API key."""
    group = add_cluster_arguments(parser, "several servers behind one address, with Ray")
    group.add_argument(
        "--spare-replica",
        action="store_true",
        help="when the weights change, start each new replica before an old one ends, which takes "
        "the resources of one more",
    )
    for name, description in (
        ("--key-requests", "maximum requests of each API key in a minute (default: no limit)"),
        ("--key-concurrent", "maximum concurrent requests of each API key (default: no limit)"),
    ):
        group.add_argument(name, type=positive, metavar="N", help=description)


def counts(text: str) -> tuple[int, int]:
    """Parse N or MIN-MAX, the argument of --replicas."""
    least, dash, most = text.partition("-")
    with contextlib.suppress(ValueError):
        if 1 <= int(least) <= int(most if dash else least):
            return int(least), int(most if dash else least)
    raise argparse.ArgumentTypeError(f"{text!r}: expected N or MIN-MAX, from 1")


def resources(text: str) -> dict[str, float]:
    """Parse the argument of --replica-resources."""
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, dict) and all(isinstance(x, int | float) for x in value.values()):
            return value
    raise argparse.ArgumentTypeError(f'{text!r}: expected JSON such as {{"TPU": 4}}')


def check_replica_arguments(args: argparse.Namespace) -> None:
    """Raise InputError if flags are given without the flag that they require, or do not fit it."""
    for name, required in (
        ("key_requests", "replicas"),
        ("key_concurrent", "replicas"),
        ("replica_resources", "replicas"),
        ("spare_replica", "replicas"),
        ("key_requests", "api_key_file"),
        ("key_concurrent", "api_key_file"),
    ):
        if getattr(args, name) and not getattr(args, required):
            flag, other = (f"--{word.replace('_', '-')}" for word in (name, required))
            raise InputError(f"{flag} requires {other}; give {other}, or remove {flag}")
    check_cluster_arguments(args)
    if args.replicas and args.batch_folder:
        raise InputError("--replicas does not support --batch-folder; remove one of them")


def check_cluster_arguments(args: argparse.Namespace) -> None:
    """Raise InputError if replicas are asked for on machines that Ray does not know."""
    for name, given in (("--tpu", args.tpu), ("--local-hosts", args.local_hosts)):
        if args.replicas and given is not None:
            raise InputError(
                f"--replicas does not support {name}; give --ray, --replica-resources and "
                "--replica-hosts"
            )
    if args.replica_hosts > 1 and not args.replicas:
        raise InputError("--replica-hosts requires --replicas; give their number")
    if args.replica_hosts > 1 and args.ray == "local":
        raise InputError("--replica-hosts needs a cluster of several machines; give its --ray")


def serve_replicas(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Serve replicas until SIGTERM or Ctrl-C; SIGHUP replaces them by ones of the newest weights.

    Args:
      options: those of `running_service` in a replica.

    Raises:
      InputError: if the flags or the model cannot be used, or if there is no such cluster.
      StoppedError: if the replicas cannot start.
    """
    from mesh_transformer.serving.front import create_front
    from mesh_transformer.serving.limits import KeyLimits
    from mesh_transformer.serving.requests import Keys
    from mesh_transformer.serving.server import listen, serve

    keys = Keys(args.api_key_file)
    limits = KeyLimits(args.key_requests, args.key_concurrent)
    chosen, window = replica_arguments(args)
    drain = args.drain_seconds
    with (
        listen(args.host, args.port) as socket,
        running_replicas(args, socket.getsockname()[1], drain, args.spare_replica) as replicas,
    ):
        build = functools.partial(application, key_file=args.api_key_file, **options)
        renewal = Renewal(args, build, replicas)
        renewal.deploy(chosen)
        signal.signal(signal.SIGHUP, lambda *_: renewal.start())
        log = sys.stderr if args.log_requests else None
        hosts = [args.host, *args.allow_host]
        front = create_front(replicas, keys, window, args.allow_origin, hosts, log, limits)
        serve(front, socket, drain)
    exit_now("", 0)


@contextlib.contextmanager
def running_replicas(
    args: argparse.Namespace, number: int, drain_seconds: float = 0.0, spare: bool = False
) -> "Iterator[Replicas]":
    """Return a context manager that yields replicas to deploy, and ends them.

    They are on the Ray cluster at the address --ray, or on one that is started here.

    Args:
      number: distinguishes these replicas from others on this machine.
      drain_seconds, spare: see `Replicas`.
    """
    from mesh_transformer.pod.ray_head import RayHead, connected

    with RayHead(OBJECT_STORE) if args.ray == "local" else connected(args.ray):
        from mesh_transformer.pod.replicas import Replicas, machines

        if (count := machines()) < args.replica_hosts:
            print(
                f"the cluster has {count} machines, and a replica needs {args.replica_hosts}: "
                "waiting for more of them to join",
                file=sys.stderr,
            )
        name, resources = f"mesh-transformer-{number}-{os.uname().nodename}", args.replica_resources
        replicas = Replicas(
            name, args.replicas, args.rows, resources, drain_seconds, spare, args.replica_hosts
        )
        try:
            yield replicas
        finally:
            replicas.close()


def replica_arguments(args: argparse.Namespace) -> tuple[argparse.Namespace, int]:
    """Return the flags of a replica, with the newest weights, and the model's context in tokens."""
    from mesh_transformer.checkpoint.source import Source

    path, config = model_arguments(args)
    source, chosen = Source(path), copy.copy(args)
    config = config or source.config
    chosen.model_path = source.checkpoint_path
    chosen.name = args.name or [source.name if config.name == type(config).name else config.name]
    return chosen, config.window


class Renewal:
    """Replaces the replicas by ones of the newest weights, one time after the other.

    Args:
      args: the command's flags.
      build: see `application`.
    """

    def __init__(self, args: argparse.Namespace, build: Callable[..., Any], replicas: "Replicas"):
        self._args, self._build, self._replicas = args, build, replicas
        self._lock = threading.Lock()

    def deploy(self, chosen: argparse.Namespace) -> None:
        """Start replicas with these flags, in place of those that run."""
        self._replicas.deploy(functools.partial(self._build, chosen))
        self._chosen = chosen

    def start(self) -> None:
        """Replace the replicas, in a thread."""
        start_thread(self._run, name="weights")

    def _run(self) -> None:
        with self._lock:
            try:
                self.deploy(replica_arguments(self._args)[0])
                line = f"all replicas serve {self._chosen.model_path}"
            except (InputError, StoppedError) as error:
                line = f"the replicas keep their weights: {error}"
                with contextlib.suppress(StoppedError):
                    self.deploy(self._chosen)
            print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def replica_requests(
    args: argparse.Namespace, options: dict[str, Any]
) -> "Iterator[tuple[LocalRequests, Replicas]]":
    """Return a context manager that yields requests to replicas, without an address, and these.

    Args:
      options: those of `running_service` in a replica.

    Raises:
      InputError, StoppedError: see `serve_replicas`.
    """
    from mesh_transformer.serving.front import create_front
    from mesh_transformer.serving.local import LocalRequests, running_loop
    from mesh_transformer.serving.requests import Keys

    chosen, window = replica_arguments(args)
    with running_replicas(args, os.getpid()) as replicas, running_loop() as loop:
        replicas.deploy(functools.partial(application, chosen, **options))
        with LocalRequests(create_front(replicas, Keys(None), window), loop) as requests:
            yield requests, replicas
