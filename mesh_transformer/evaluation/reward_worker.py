"""A process that calls a reward function: `python reward_worker.py FILE FUNCTION SECONDS`.

It reads the function's arguments, and writes its value or what is wrong, as a line of JSON per
call, after one about loading the function.  Run as a file, it imports nothing of the library.
"""

import faulthandler
import importlib.util
import json
import math
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

START_SECONDS = 300.0  # limit for loading the function's file, which may import much


def loaded(path: str, name: str) -> Callable[..., Any]:
    """Return a function of a file, which may import others of its folder."""
    sys.path[0] = os.path.dirname(path)
    spec: Any = importlib.util.spec_from_file_location("rewards", path)
    sys.modules["rewards"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def number(value: Any) -> float:
    """Return a reward as a float; raise ValueError unless it is a finite number."""
    if isinstance(value, str) or not math.isfinite(result := float(value)):
        raise ValueError(f"the result is {value!r}, expected a finite number")
    return result


def main() -> None:
    path, name, limit = sys.argv[1:]
    lines, out, nothing = os.fdopen(os.dup(0)), os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what the function prints
    outs = [out]  # closed in processes that the function forks, so that its end shows
    os.register_at_fork(after_in_child=lambda: [os.close(outs.pop()) for _ in outs[:]])

    def answer(call: Callable[[], Any], seconds: float) -> Any:
        """Write the outcome of a call and return its value, or end the process if it hangs."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=nothing)
        try:
            value, outcome = call(), {}
        except BaseException as error:
            own = [
                x.lineno for x in traceback.extract_tb(error.__traceback__) if x.filename == path
            ]
            line = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            value, outcome = None, {"error": line + (f" (line {own[-1]})" if own else "")}
        faulthandler.cancel_dump_traceback_later()
        shown = outcome or {"value": value if isinstance(value, float) else None}
        os.write(out, f"{json.dumps(shown)}\n".encode())
        return value

    function = answer(lambda: loaded(path, name), START_SECONDS)
    for line in lines:
        arguments = json.loads(line)
        answer(lambda: number(function(*arguments)), float(limit))  # noqa: B023


if __name__ == "__main__":
    main()
