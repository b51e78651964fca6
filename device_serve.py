"""Serves a trained model over HTTP: OpenAI's completions, the original's /complete, and a page."""

import argparse

from mesh_transformer.arguments import add_host_arguments, model_arguments, model_parser
from mesh_transformer.build_model import running_model
from mesh_transformer.util import InputError, run_script


def parse_args() -> argparse.Namespace:
    parser = model_parser(__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=5000, help="0: any free one (5000)")
    parser.add_argument("--api-key-file", help="keys that clients must have, one a line")
    parser.add_argument("--allow-origin", action="append", help="of a web page that may call")
    parser.add_argument("--name", help="of the model, to clients (default: the config's name)")
    parser.add_argument("--rows", type=int, default=16, help="requests side by side (16)")
    parser.add_argument("--queue", type=int, default=256, help="requests that may wait (256)")
    parser.add_argument("--max-tokens", type=int, help="of one answer (default: the window)")
    parser.add_argument("--drain-seconds", type=int, default=60, help="for answers at the end (60)")
    add_host_arguments(parser, required=False)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    path, config = model_arguments(args)
    for name in ("rows", "queue", "max_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise InputError(
                f"--{name.replace('_', '-')}: {getattr(args, name)}, expected 1 or more"
            )

    from mesh_transformer.compilation_cache import use_compilation_cache
    from mesh_transformer.conversion import config_of
    from mesh_transformer.hf_config import Tokenizer
    from mesh_transformer.serving.app import create_app
    from mesh_transformer.serving.engine import Engine
    from mesh_transformer.serving.gate import Keys
    from mesh_transformer.serving.metrics import Metrics
    from mesh_transformer.serving.server import listen, serve
    from mesh_transformer.serving.service import Service

    # First, as loading takes long.
    keys = Keys(args.api_key_file)
    socket = listen(args.host, args.port)
    tokenizer = Tokenizer.of(None, config or config_of(path), must_fit=True).loaded
    use_compilation_cache()
    with running_model(args, path, config, only_generate=True) as network:
        metrics = Metrics(args.rows)
        engine = Engine(network, metrics, rows=args.rows, queue=args.queue)
        engine.warm_up()
        most = args.max_tokens or network.config.window
        service = Service(args.name or network.config.name, engine, tokenizer, metrics, most)
        serve(create_app(service, keys, args.allow_origin), socket, args.drain_seconds)


if __name__ == "__main__":
    run_script(main)
