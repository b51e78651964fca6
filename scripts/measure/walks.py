"""Count the functions that receive a config, a checkpoint path, a prompt and a sampling setting.

A small model is trained for one step and saved, resumed for another step, converted to Hugging
Face's format and loaded from there to generate, and served for one request, all in this process.  A
profiler records which functions of the library receive each value as an argument:

* config: a `Config`.
* model: the part of a config that defines the model, `config.model`.
* layout: a `Layout`, which is derived from a config and a mesh.
* checkpoint: the path of a model folder, or of a step in one, but not of files inside a step.
* prompt: an array or list that contains the prompt's tokens in their order.
* setting: the value of `top_p`, or an array or dict that contains it.

A method's `self` is ignored, so what an object holds counts where it is stored, not wherever it is
used.  The column "within objects" also counts functions that receive an object of the library with
such a value as an attribute.  A function counts once, however often it is called.

To measure another version, put its folder first:

PYTHONPATH=<folder> python scripts/measure/walks.py
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

import mesh_transformer
from mesh_transformer.util import exit_now

PACKAGE = mesh_transformer.__name__
PROMPT = [11, 47, 5, 60, 23, 38]
TOP_P = 0.8125  # exact in any float format
VOCABULARY = 64
VALUES = {
    "layers": 2,
    "d_model": 32,
    "n_heads": 4,
    "n_vocab": VOCABULARY,
    "seq": 32,
    "pe_rotary_dims": 4,
    "dtype": "float32",
    "tpu_size": 1,
    "cores_per_replica": 1,
    "per_replica_batch": 2,
    "warmup_steps": 1,
    "anneal_steps": 4,
    "total_steps": 2,
    "ckpt_every": 1,
}
THINGS = ("config", "model", "layout", "checkpoint", "prompt", "setting")
VARIADIC = 0x04, 0x08  # flags of code with *args and **kwargs


class Walks:
    """A profiler that records which functions of the library receive which of the `THINGS`.

    Args:
      folders: the model folders whose paths count as checkpoints.

    Attributes:
      direct: for each thing, the functions that receive it itself.
      within: for each thing, those that receive an object with it as an attribute.
    """

    def __init__(self, folders: list[str]):
        self._folders = folders
        self._arguments: dict[CodeType, tuple[str, ...]] = {}
        self.direct: dict[str, set[str]] = {thing: set() for thing in THINGS}
        self.within: dict[str, set[str]] = {thing: set() for thing in THINGS}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls of this thread, and of threads started meanwhile."""
        threading.setprofile(self._call)
        sys.setprofile(self._call)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _call(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        names = self._arguments.get(code)
        if names is None:
            names = self._arguments[code] = self._names(frame)
        values = [frame.f_locals[name] for name in names if name in frame.f_locals]
        for value in values:
            for thing in self._things(value):
                self.direct[thing].add(_place(frame))
            for attribute in _attributes(value):
                for thing in self._things(attribute):
                    self.within[thing].add(_place(frame))

    def _names(self, frame: FrameType) -> tuple[str, ...]:
        """Return the arguments to look at: none for functions of other packages."""
        module, code = frame.f_globals.get("__name__") or "", frame.f_code
        ours = module == PACKAGE or module.startswith(f"{PACKAGE}.")
        if not ours or code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"):
            return ()
        count = code.co_argcount + code.co_kwonlyargcount
        count += sum(bool(code.co_flags & flag) for flag in VARIADIC)
        names = code.co_varnames[:count]
        return names[1:] if names[:1] in (("self",), ("cls",)) else names

    def _things(self, value: Any) -> Iterator[str]:
        kind = type(value)
        if kind.__module__ in (f"{PACKAGE}.config", f"{PACKAGE}.config_model"):
            yield "config" if kind.__name__ == "Config" else "model"
        if kind.__module__.startswith(PACKAGE) and kind.__name__.endswith("Layout"):
            yield "layout"
        if isinstance(value, str | os.PathLike) and self._is_checkpoint(os.fspath(value)):
            yield "checkpoint"
        for array in _arrays(value):
            if array.dtype.kind in "iu" and _contains(array, PROMPT):
                yield "prompt"
            if array.dtype.kind == "f" and (array == TOP_P).any():
                yield "setting"

    def _is_checkpoint(self, path: str) -> bool:
        folder, name = os.path.split(path.rstrip("/"))
        folder = folder if name.startswith("step_") else os.path.join(folder, name)
        return folder in self._folders


def _place(frame: FrameType) -> str:
    """Return file:function for a function of the library."""
    module, code = frame.f_globals["__name__"], frame.f_code
    name = code.co_qualname.replace(".<locals>", "")
    if name.startswith("__create_fn__"):  # a method that `dataclass` wrote
        name = f"{type(frame.f_locals['self']).__qualname__}.{code.co_name}"
    return f"{module.removeprefix(f'{PACKAGE}.').replace('.', '/')}.py:{name}"


def _attributes(value: Any) -> list[Any]:
    """Return the attributes of an object of the library."""
    if not type(value).__module__.startswith(PACKAGE) or isinstance(value, type):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _arrays(value: Any, depth: int = 2) -> Iterator[np.ndarray]:
    """Yield a number, a list of numbers or an array, or those in a list, tuple or dict."""
    if isinstance(value, jax.Array):
        # Traced arrays have no values; arrays of random keys have none that NumPy knows.
        with contextlib.suppress(jax.errors.JAXTypeError, RuntimeError, TypeError):
            if value.size <= 2**16 and value.is_fully_addressable and not value.is_deleted():
                yield np.asarray(value)
    elif isinstance(value, np.ndarray):
        if value.dtype != object:
            yield value
    elif isinstance(value, float):
        yield np.array(value)
    elif isinstance(value, list | tuple | dict) and depth and len(value) <= 2**10:
        items = list(value.values() if isinstance(value, dict) else value)
        if items and all(type(item) is int for item in items):
            yield np.array(items)
            return
        for item in items:
            yield from _arrays(item, depth - 1)


def _contains(array: np.ndarray, tokens: list[int]) -> bool:
    """Return whether an array contains tokens next to each other."""
    if array.size < len(tokens):
        return False
    windows = np.lib.stride_tricks.sliding_window_view(array.reshape(-1), len(tokens))
    return bool((windows == tokens).all(1).any())


def write_inputs(folder: Path) -> str:
    """Write records, a tokenizer and a config; return the config's path."""
    from mesh_transformer.data.tfrecords import write_records

    rng = np.random.default_rng(0)
    write_records(str(folder / "records"), rng.integers(0, VOCABULARY, (40, VALUES["seq"] + 1)))
    (folder / "train.index").write_text("records\n")
    known = {f"w{number}": number for number in range(VOCABULARY)}
    words = {"version": "1.0", "model": {"type": "WordLevel", "vocab": known, "unk_token": "w0"}}
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(words | {"added_tokens": []}))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(kind))
    files = {"train_set": str(folder / "train.index"), "tokenizer": str(folder / "tokenizer")}
    path = folder / "config.json"
    path.write_text(json.dumps(VALUES | files))
    return str(path)


def run(command: str, *arguments: str) -> None:
    """Run a subcommand of `mesh-transformer` in this process."""
    from importlib import import_module

    with mock.patch.object(sys, "argv", [command, *arguments]):
        import_module(f"mesh_transformer.cli.{command}").main()


def ask(app: Any, *_: Any) -> None:
    """Send one request to the server's application, in place of listening for clients."""
    from starlette.testclient import TestClient

    body = {"prompt": PROMPT, "max_tokens": 4, "top_p": TOP_P, "seed": 1}
    with TestClient(app, base_url="http://127.0.0.1") as client:
        client.post("/v1/completions", json=body).raise_for_status()


def use(folder: Path, walks: Walks) -> None:
    """Train, resume, convert, load, generate and serve, and record all of it."""
    from mesh_transformer.cli import service

    config, model, converted = write_inputs(folder), str(folder / "model"), str(folder / "hf")
    with walks.recording():
        for steps in ("1", "2"):
            run("train", "--config", config, "--model-dir", model, "--max-steps", steps)
        run("convert", "--from", "native", model, "--to", "hf", converted)
        network = mesh_transformer.load(converted)
        settings = {"top_p": TOP_P, "temp": 1.0, "seed": 1}
        network.generate(np.array([PROMPT]), np.array([len(PROMPT)]), 4, settings)
        with (
            mock.patch("mesh_transformer.serving.server.serve", ask),
            mock.patch.object(service, "exit_now"),
        ):
            run("serve", "--model-path", model, "--port", "0", "--rows", "2")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the functions as well")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(os.path.realpath(name))
        walks = Walks([str(folder / "model"), str(folder / "hf")])
        with contextlib.redirect_stdout(sys.stderr):
            use(folder, walks)
    print(f"{PACKAGE} in {os.path.dirname(mesh_transformer.__file__)}")
    print(f"{'':12}{'functions':>10}{'within objects':>16}")
    for thing in THINGS:
        within = walks.direct[thing] | walks.within[thing]
        print(f"{thing:12}{len(walks.direct[thing]):10}{len(within):16}")
    for thing in THINGS if args.list else ():
        print(f"\n{thing}\n" + "\n".join(f"  {place}" for place in sorted(walks.direct[thing])))
        extra = sorted(walks.within[thing] - walks.direct[thing])
        print(f"{thing} within objects\n" + "\n".join(f"  {place}" for place in extra))
    exit_now("", 0)  # the server's thread may still compile


if __name__ == "__main__":
    main()
