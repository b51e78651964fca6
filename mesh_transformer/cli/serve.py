"""Serve a model over HTTP: OpenAI's API, mesh-transformer-jax's API and a web page."""

import argparse
import sys
from typing import Any

from mesh_transformer.cli.arguments import model_parser, positive
from mesh_transformer.cli.replicas import (
    add_replica_arguments,
    check_replica_arguments,
    serve_replicas,
)
from mesh_transformer.cli.service import (
    add_service_arguments,
    end,
    identity_of,
    running_service,
)


def parse_args() -> argparse.Namespace:
    parser = model_parser(__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="listening address (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=5000, help="port; 0: any free (default 5000)")
    parser.add_argument("--api-key-file", help="file of keys that clients must send, one per line")
    parser.add_argument("--allow-origin", action="append", help="allowed CORS origin (repeatable)")
    parser.add_argument(
        "--allow-host",
        action="append",
        metavar="NAME",
        default=[],
        help="allowed Host header of a server without keys; '*' allows any (repeatable)",
    )
    for flag, default, description in (
        ("--queue", 256, "maximum waiting requests (default 256)"),
        ("--max-tokens", None, "maximum tokens per answer (default: the model's window)"),
        ("--stall-seconds", 60, "seconds per model call after which /health fails (default 60)"),
    ):
        parser.add_argument(flag, type=positive, default=default, metavar="N", help=description)
    parser.add_argument(
        "--log-requests",
        action="store_true",
        help="write a line of JSON about each request to standard error",
    )
    parser.add_argument(
        "--batch-folder",
        metavar="DIR",
        help="serve /v1/files and /v1/batches, with files in this folder",
    )
    drain = "seconds to finish running requests at shutdown (default 60)"
    parser.add_argument("--drain-seconds", type=int, default=60, help=drain)
    add_service_arguments(parser)
    add_replica_arguments(parser)
    return parser.parse_args()


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `running_service` that the flags of this command give."""
    return {name: getattr(args, name) for name in ("queue", "max_tokens", "stall_seconds")}


def main() -> None:
    args = parse_args()
    check_replica_arguments(args)
    if args.replicas:
        # No request waits for the programs of a new replica.
        serve_replicas(args, {**engine_options(args), "wait": True})
        return

    from mesh_transformer.serving.app import create_app
    from mesh_transformer.serving.batches import Batches
    from mesh_transformer.serving.requests import Keys
    from mesh_transformer.serving.server import listen, serve

    # This comes before the model is loaded, which takes long, so that errors appear at once.
    keys = Keys(args.api_key_file)
    with (
        listen(args.host, args.port) as socket,
        running_service(args, **engine_options(args)) as service,
    ):
        log = sys.stderr if args.log_requests else None
        batches = None
        if args.batch_folder:
            batches = Batches(service, args.batch_folder, identity_of(args, service))
        hosts = [args.host, *args.allow_host]
        app = create_app(service, keys, args.allow_origin, hosts, log, batches)
        serve(app, socket, args.drain_seconds)
    end(service)
