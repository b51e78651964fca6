"""Interrupts one run of `train --every-host` many times, in random ways; takes a minute for each.

Run with the number of interruptions and a seed:

    python -m tests.long.every_host 20 0

After each interruption all processes must end by themselves, and the next ones resume.  In the end,
the metrics must equal those of an undisturbed run, bit for bit.
"""

import argparse
import random
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from mesh_transformer.pod.every_host import ADVICE
from tests.support.every_host import every_host
from tests.support.small_run import assert_same_rows, mixed_values, rows_of, write_config

HEARTBEAT = 10
TO_END = HEARTBEAT + 60.0  # seconds, on a busy machine
# Calls that fail in one process, by the names of the functions; see `break_call`.
FAULTS = {
    "score": "mesh_transformer.evaluation.validation:score:1:OSError",
    "MetricsLog.__init__": "mesh_transformer.training.metrics:MetricsLog.__init__:1:InputError",
    "metrics": "mesh_transformer.pod.runner:NetworkRunner.metrics:3:ValueError",
    "place": "mesh_transformer.mesh.placement:Rows.place:9:OSError",
    "get_samples": "mesh_transformer.data.loader:TFRecordNewInputs.get_samples:6:InputError",
    "newest": "mesh_transformer.checkpoint.native:Checkpoints.newest:1:InputError",
    "open_train_set": "mesh_transformer.pod.runner:NetworkRunner.open_train_set:1:KeyError",
}
LEADERS = ("score", "MetricsLog.__init__")  # the members do not call these
SIGNALS = ("SIGTERM", "SIGKILL", "SIGSTOP")


class Interruption(NamedTuple):
    """A signal to the process with an index after a step, or a call that fails in that process.

    Attributes:
      kind: one of `SIGNALS`, or a key of `FAULTS`.
    """

    kind: str
    index: int
    step: int = 0


def interrupt(folder: Path, config: str, count: int, interruption: Interruption) -> str:
    """Start or resume a run, interrupt it, and check how its processes end; return a description.

    A process that is suspended continues once the others have ended, and then ends too.
    """
    kind, index, step = interruption
    fault = {index: FAULTS[kind]} if kind in FAULTS else {}
    flags = ("--heartbeat", str(HEARTBEAT))
    with every_host(folder, config, count, *flags, faults=fault) as run:
        if kind in SIGNALS:
            run.wait_for_step(step)
            run.all[index].send_signal(getattr(signal, kind))
        began = time.monotonic()
        expected = 0 if kind == "SIGTERM" else 2 if "InputError" in fault.get(index, "") else 1
        for other, process in enumerate(run.all):
            if other != index:
                assert process.wait(TO_END if kind in SIGNALS else 300) == expected, run.log(other)
        seconds = time.monotonic() - began
        run.all[index].send_signal(signal.SIGCONT)
        status = run.all[index].wait(TO_END)
        assert status == (-9 if kind == "SIGKILL" else expected), run.log(index)
        lines = [run.lines(other)[-1:] for other in range(count)]
        if kind in ("SIGKILL", "SIGSTOP"):
            line = (
                rf"error: (process {index} \(.*\) (has ended without notice|does not answer)|JAX "
                rf"has lost another process, or failed \(see above\)); {ADVICE}"
            )
            assert all(
                re.fullmatch(line, *last) for other, last in enumerate(lines) if other != index
            ), lines
        elif kind in FAULTS:
            assert "broken by the test" in lines[0][0], lines
        return f"{interruption}: {seconds:.1f} s; {lines[0]}"


def planned(count: int, processes: int, seed: int) -> list[Interruption]:
    """Return random interruptions, at steps that increase; every kind is equally frequent."""
    rng = random.Random(seed)
    kinds = [*SIGNALS, *FAULTS] * (count // len([*SIGNALS, *FAULTS]) + 1)
    rng.shuffle(kinds)
    steps = sorted(rng.randint(1, 25) for _ in range(count))
    return [
        Interruption(kind, 0 if kind in LEADERS else rng.randrange(processes), step)
        for kind, step in zip(kinds, steps, strict=False)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=20)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_config(folder / "config.json", mixed_values(folder))
        with every_host(folder / "whole", config, args.processes) as run:
            assert run.wait() == [0] * args.processes, run.log(0)
        for interruption in planned(args.count, args.processes, args.seed):
            print(interrupt(folder, config, args.processes, interruption), flush=True)
        with every_host(folder, config, args.processes) as run:
            assert run.wait() == [0] * args.processes, run.log(0)
        assert_same_rows(rows_of(folder / "model"), rows_of(folder / "whole" / "model"))


if __name__ == "__main__":
    main()
