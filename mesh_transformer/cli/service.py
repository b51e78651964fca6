"""A service of a model as commands run it: flags that describe it, and the service."""

import argparse
import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from mesh_transformer.cli.arguments import model_arguments, natural, positive
from mesh_transformer.cli.machines import add_host_arguments, has_hosts, running_model
from mesh_transformer.config import Config
from mesh_transformer.util import InputError, exit_now

if TYPE_CHECKING:
    from mesh_transformer.checkpoint.source import Source
    from mesh_transformer.data.chat import ChatTemplate
    from mesh_transformer.serving.service import Service


def add_service_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `running_service`, except those of `model_parser`."""
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
    parser.add_argument(
        "--rows",
        type=positive,
        default=16,
        metavar="N",
        help="maximum requests served concurrently (default 16)",
    )
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
    add_host_arguments(parser, required=False)


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


class Described(NamedTuple):
    """A model as clients see it, before its weights are loaded.

    Attributes:
      model: where its weights are.
      config: the config that was given; None for that of the checkpoint.
      own: the model's config.
      tokenizer: a tokenizer of transformers.
      template: renders conversations; None for a model that cannot chat.
      names: see `names_of`.
    """

    model: "str | Source"
    config: Config | None
    own: Config
    tokenizer: Any
    template: "ChatTemplate | None"
    names: dict[str, int]


def described(args: argparse.Namespace) -> Described:
    """Return what the flags of `model_parser` and `add_service_arguments` say of the model.

    Raises:
      InputError: if the model, its tokenizer or its chat template cannot be used.
    """
    path, config = model_arguments(args)

    from mesh_transformer.checkpoint.source import Source
    from mesh_transformer.data.chat import template_to_chat
    from mesh_transformer.data.tokenizer import Tokenizer

    model = path if config else Source(path)
    own = config or Source.of(model).config
    tokenizer = Tokenizer.of(None, own, must_fit=True).loaded
    template = template_to_chat(tokenizer, args.chat_template)
    unnamed = own.name == Config.name
    names = names_of(args, Source.of(model).name if unnamed else own.name)
    return Described(model, config, own, tokenizer, template, names)


@contextlib.contextmanager
def running_service(
    args: argparse.Namespace,
    *,
    queue: int,
    max_tokens: int | None = None,
    stall_seconds: float = 60.0,
    warm_up: bool = True,
    wait: bool = False,
) -> "Iterator[Service]":
    """Return a context manager that yields a service, which is not started yet.

    Args:
      args: the values of the flags of `model_parser` and `add_service_arguments`.
      queue, stall_seconds: see `Engine`.
      max_tokens: maximum tokens per answer; None for the model's window.
      warm_up: whether to compile in advance what requests may need.
      wait: whether to compile all of it now; see `Engine.warm_up`.

    Raises:
      InputError: if the flags, the model, its tokenizer or its chat template cannot be used.
    """
    from mesh_transformer.checkpoint.source import Source
    from mesh_transformer.generation.sampling_settings import check_defaults
    from mesh_transformer.serving.engine import Engine
    from mesh_transformer.serving.metrics import Metrics
    from mesh_transformer.serving.service import Service

    # This comes before the model is loaded, which takes long, so that errors appear at once.
    if args.host_cache and has_hosts(args):
        raise InputError("--host-cache does not support several hosts; leave it out")
    known = described(args)
    sampling = known.own.sampling
    check_defaults(sampling)
    draft = draft_of(args, known.own)
    folders = [folder for _, folder in args.adapter]
    with running_model(
        args, known.model, known.config, only_generate=True, adapters=folders, draft=draft
    ) as network:
        metrics = Metrics(args.rows)
        engine = Engine(
            network,
            metrics,
            rows=args.rows,
            queue=queue,
            speculate=args.speculate,
            chunk=args.chunk,
            kept_tokens=args.prefix_cache,
            cache_tokens=args.cache_tokens,
            fixed_shapes=args.fixed_shapes,
            host_bytes=args.host_cache * 2**30,
            pooling=args.embeddings,
            stall_seconds=stall_seconds,
        )
        print(engine.capacity, file=sys.stderr)
        if warm_up:
            engine.warm_up(wait=wait)
        yield Service(
            known.names,
            engine,
            known.tokenizer,
            metrics,
            max_tokens or network.config.window,
            known.template,
            args.any_name,
            ends_of(map(Source, folders)),
            sampling,
        )


def identity_of(args: argparse.Namespace, model: "Service | Described") -> list[Any]:
    """Return JSON values that differ if the model may give other answers."""
    from mesh_transformer.checkpoint.source import Source

    path, config = model_arguments(args)
    sources = [Source(name) for name in (path, *(folder for _, folder in args.adapter))]
    template = model.template and model.template.template
    shapes = args.fixed_shapes and [args.chunk, args.speculate]
    flags = [args.any_name, shapes, args.embeddings]
    config = config or sources[0].config
    return [*(source.identity for source in sources), repr(config), template, model.names, *flags]


@contextlib.contextmanager
def application(
    args: argparse.Namespace, key_file: str | None = None, **options: Any
) -> Iterator[Any]:
    """Return a context manager that yields the application of a replica, in its process.

    Args:
      key_file: the file of API keys, if clients need one.
      options: those of `running_service`.
    """
    from mesh_transformer.serving.app import create_app
    from mesh_transformer.serving.requests import Keys

    keys = Keys(key_file)
    with running_service(args, **options) as service:
        yield create_app(service, keys, hosts=["*"])  # the address has checked the Host header


def end(service: "Service") -> NoReturn:
    """End this process after the `with` block of `running_service`.

    A normal exit of the interpreter takes seconds, and waits forever if the engine is stuck.
    """
    if service.engine.close(0) or service.engine.health_problem is None:
        exit_now("", 0)
    exit_now("error: the network did not answer; its pending requests were dropped", 1)
