"""A process that calls a reward function: `python reward_worker.py FILE FUNCTION`.

It reads a JSON list of the function's arguments per line of standard input, and writes what the
function returns, or what is wrong, as a JSON object per line.  The first object says whether the
function could be loaded.  This file is run by itself, so it imports nothing of the library.
"""

import importlib.util
import json
import math
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any


def loaded(path: str, name: str) -> Callable[..., Any]:
    """Return a function of a file, whose folder is where its imports are looked up, too."""
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    spec = importlib.util.spec_from_file_location("rewards", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["rewards"] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def outcome(call: Callable[[], Any], path: str) -> dict[str, Any]:
    """Return the value of a call, or its error in a line."""
    try:
        return {"value": call()}
    except BaseException as error:
        lines = [x.lineno for x in traceback.extract_tb(error.__traceback__) if x.filename == path]
        place = f" (line {lines[-1]})" if lines else ""
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}"}


def number(value: Any) -> float:
    """Return a reward as a float; raise ValueError unless it is a finite number."""
    if isinstance(value, str) or not math.isfinite(result := float(value)):
        raise ValueError(f"the result is {value!r}, expected a finite number")
    return result


def main() -> None:
    path, name = sys.argv[1:]
    lines, out = os.fdopen(os.dup(0), encoding="utf-8"), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the function prints
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read(lines: Iterable[str]) -> None:
        for line in lines:
            waiting.put(line)
        os._exit(0)  # the training process has ended, whatever the function is doing

    threading.Thread(target=read, args=(lines,), daemon=True).start()
    result = outcome(lambda: loaded(path, name), path)
    function = result.pop("value", None)
    while True:
        os.write(out, f"{json.dumps(result)}\n".encode())
        arguments = json.loads(waiting.get())
        result = outcome(lambda: number(function(*arguments)), path)  # noqa: B023


if __name__ == "__main__":
    main()
