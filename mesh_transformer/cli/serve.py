"""Serve a model over HTTP: OpenAI's API, mesh-transformer-jax's API and a web page."""

import argparse
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mesh_transformer.cli.arguments import model_arguments, model_parser, natural, positive
from mesh_transformer.cli.machines import add_host_arguments, running_model
from mesh_transformer.config import Config
from mesh_transformer.util import InputError, exit_now

if TYPE_CHECKING:
    from mesh_transformer.checkpoint.source import Source


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
    parser.add_argument(
        "--name",
        action="append",
        help="model name for clients (repeatable; default: the config's name, or the file's or "
        "folder's)",
    )
    parser.add_argument(
        "--any-name",
        action="store_true",
        help="answer requests for models of other names too, with the model",
    )
    for flag, default, description in (
        ("--rows", 16, "maximum requests served concurrently (default 16)"),
        ("--queue", 256, "maximum waiting requests (default 256)"),
        ("--max-tokens", None, "maximum tokens per answer (default: the model's window)"),
        ("--stall-seconds", 60, "seconds per model call after which /health fails (default 60)"),
    ):
        parser.add_argument(flag, type=positive, default=default, metavar="N", help=description)
    parser.add_argument(
        "--prefix-cache",
        type=natural,
        metavar="N",
        help="tokens of prompts that each replica keeps for prompts with the same beginning "
        "(default: 4 times 2048, or 4 times the model's window if that is shorter)",
    )
    parser.add_argument(
        "--cache-tokens",
        type=positive,
        metavar="N",
        help="tokens of all requests and kept prompts that each replica has memory for (default: "
        "2048 for every row, or the model's window if that is shorter, and --prefix-cache; at "
        "least the window)",
    )
    parser.add_argument(
        "--host-cache",
        type=natural,
        default=0,
        metavar="GIB",
        help="host memory for kept prompts that no longer fit in the devices' memory (default 0)",
    )
    parser.add_argument(
        "--chunk",
        type=positive,
        default=256,
        metavar="N",
        help="maximum tokens of a prompt between two decoding steps (default 256)",
    )
    parser.add_argument(
        "--speculate",
        type=natural,
        default=0,
        metavar="N",
        help="tokens to guess per decoding step, while it saves time: from earlier text, or with "
        "--draft (default 0)",
    )
    parser.add_argument(
        "--draft",
        metavar="FOLDER",
        help="smaller model with the same tokenizer, which guesses the tokens of --speculate",
    )
    parser.add_argument(
        "--fixed-shapes",
        action="store_true",
        help="compute each prompt alone, in equal chunks, so that an answer does not depend on "
        "other requests even by rounding",
    )
    parser.add_argument(
        "--log-requests",
        action="store_true",
        help="write a line of JSON about each request to standard error",
    )
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja template of a model that can chat, plain, or none for completions only "
        "(default: the tokenizer's, if any)",
    )
    parser.add_argument(
        "--embeddings",
        choices=("mean", "last"),
        help="serve /v1/embeddings: the mean over a text's tokens, or the last token's vector",
    )
    parser.add_argument(
        "--adapter",
        type=adapter,
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="LoRA adapters of the model, which clients choose as the model NAME (repeatable)",
    )
    drain = "seconds to finish running requests at shutdown (default 60)"
    parser.add_argument("--drain-seconds", type=int, default=60, help=drain)
    add_host_arguments(parser, required=False)
    return parser.parse_args()


def adapter(text: str) -> tuple[str, str]:
    """Parse NAME=FOLDER, the argument of --adapter."""
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=FOLDER")
    return name, folder


def names_of(args: argparse.Namespace, default: str) -> dict[str, int]:
    """Return the names for clients, each with the number of its adapter, 0 for the model itself.

    Args:
      default: the model's name, if --name gives none.

    Raises:
      InputError: if a name is empty, or an adapter has the name of another model.
    """
    names = dict.fromkeys(args.name or [default], 0)
    if "" in names:
        raise InputError("--name is empty; give a name")
    for number, (name, _) in enumerate(args.adapter, 1):
        if name in names:
            raise InputError(f"--adapter {name}: another model has this name; choose another one")
        names[name] = number
    return names


def ends_of(adapters: "Iterable[Source]") -> dict[int, list[int]]:
    """Return the `end_tokens` of the configs of adapters, numbered from 1, if they have any."""
    # Adapters in the format of the package peft have no config of their own.
    own = ((number, source) for number, source in enumerate(adapters, 1) if source.step is not None)
    return {number: ids for number, source in own if (ids := source.config.end_tokens)}


def draft_of(args: argparse.Namespace, config: Config) -> "Source | None":
    """Return the checkpoint of the draft that --draft names; None without the flag.

    Args:
      config: the config of the model.

    Raises:
      InputError: if the draft cannot guess the model's tokens.
    """
    if args.draft is None:
        return None
    if not args.speculate:
        raise InputError("--draft requires --speculate; give the number of tokens to guess")
    from mesh_transformer.checkpoint.source import Source
    from mesh_transformer.generation.speculation import check_vocabulary

    draft = Source(args.draft)
    if draft.kind == "original":
        raise InputError(
            f"--draft {args.draft}: checkpoints of mesh-transformer-jax do not store a config; "
            "convert it with mesh-transformer convert"
        )
    check_vocabulary(draft.config, config, f"--draft {args.draft}")
    return draft


def main() -> None:
    args = parse_args()
    path, config = model_arguments(args)

    from mesh_transformer.checkpoint.source import Source
    from mesh_transformer.data.chat import template_to_chat
    from mesh_transformer.data.tokenizer import Tokenizer
    from mesh_transformer.generation.sampling_settings import check_defaults
    from mesh_transformer.serving.app import create_app
    from mesh_transformer.serving.engine import Engine
    from mesh_transformer.serving.metrics import Metrics
    from mesh_transformer.serving.requests import Keys
    from mesh_transformer.serving.server import listen, serve
    from mesh_transformer.serving.service import Service

    # This comes before the model is loaded, which takes long, so that errors appear at once.
    keys = Keys(args.api_key_file)
    if args.host_cache and (args.tpu or args.local_hosts):
        raise InputError("--host-cache does not support several hosts; leave it out")
    with listen(args.host, args.port) as socket:
        model = path if config else Source(path)
        own_config = config or Source.of(model).config
        tokenizer = Tokenizer.of(None, own_config, must_fit=True).loaded
        template = template_to_chat(tokenizer, args.chat_template)
        sampling = own_config.sampling
        check_defaults(sampling)
        unnamed = own_config.name == Config.name
        names = names_of(args, Source.of(model).name if unnamed else own_config.name)
        draft = draft_of(args, own_config)
        folders = [folder for _, folder in args.adapter]
        with running_model(
            args, model, config, only_generate=True, adapters=folders, draft=draft
        ) as network:
            metrics = Metrics(args.rows)
            engine = Engine(
                network,
                metrics,
                rows=args.rows,
                queue=args.queue,
                speculate=args.speculate,
                chunk=args.chunk,
                kept_tokens=args.prefix_cache,
                cache_tokens=args.cache_tokens,
                fixed_shapes=args.fixed_shapes,
                host_bytes=args.host_cache * 2**30,
                pooling=args.embeddings,
                stall_seconds=args.stall_seconds,
            )
            print(engine.capacity, file=sys.stderr)
            engine.warm_up(wait=False)
            max_tokens = args.max_tokens or network.config.window
            ends = ends_of(map(Source, folders))
            service = Service(
                names,
                engine,
                tokenizer,
                metrics,
                max_tokens,
                template,
                args.any_name,
                ends,
                sampling,
            )
            log = sys.stderr if args.log_requests else None
            app = create_app(service, keys, args.allow_origin, [args.host, *args.allow_host], log)
            serve(app, socket, args.drain_seconds)
    # A normal exit of the interpreter takes seconds, and waits forever if the engine is stuck.
    if engine.close(0) or engine.health_problem is None:
        exit_now("", 0)
    exit_now("error: the network did not answer; its pending requests were dropped", 1)
