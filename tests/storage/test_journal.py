"""Files of lines that are made in any order: order, kills at any byte, bounds and locks."""

import json
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mesh_transformer.storage.journal import Journal, write_in_order
from mesh_transformer.storage.locks import LocalLock
from mesh_transformer.util import InputError

VALUES = [{"n": n, "text": "ü\n" * (n % 5), "x": [0.1 * n, None]} for n in range(40)]


class Asked:
    """A function of items, which counts its calls; it fails at some call."""

    def __init__(self, fails_at: int = -1):
        self.calls, self.now, self.most = list[int](), 0, 0
        self._fails_at, self._lock = fails_at, threading.Lock()

    def __call__(self, number: int) -> Any:
        with self._lock:
            self.calls.append(number)
            self.now += 1
            self.most = max(self.most, self.now)
            fails = len(self.calls) == self._fails_at
        try:
            if fails:
                raise InputError("it fails")
            return VALUES[number]
        finally:
            with self._lock:
                self.now -= 1


def write(path: Path, ask: Asked, **options: Any) -> None:
    items = range(len(VALUES))
    write_in_order(str(path), items, ask, settings="s", **{"in_flight": 4} | options)


def expected() -> bytes:
    return "".join(json.dumps(value) + "\n" for value in VALUES).encode()


@pytest.mark.parametrize("seed", range(20))
def test_interrupted_runs_write_the_same_bytes_and_ask_once(tmp_path: Path, seed: int) -> None:
    rng, path, kept = random.Random(seed), tmp_path / "a.jsonl", Counter[int]()
    while not path.exists():
        ask = Asked(rng.choice([-1, rng.randint(1, 40)]))
        try:
            write(path, ask, size=lambda n: n * seed % 7)
        except InputError:
            (draft,) = tmp_path.glob(".a.jsonl.*.partial")
            text = draft.read_bytes()
            cut = rng.randint(0, len(text))  # as a killed process leaves it
            draft.write_bytes(text[:cut])
            with Journal(str(draft)) as journal:
                done = set(journal.places)
            assert draft.read_bytes() == text[:cut][: text[:cut].rfind(b"\n") + 1]
            assert done == {int(line.split(b" ")[0]) for line in draft.read_bytes().splitlines()}
        else:
            done = set(range(40))
        # What was kept is not asked again.
        assert not kept.keys() & set(ask.calls)
        kept = Counter(done)
    assert path.read_bytes() == expected()
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]


def test_large_items_are_asked_first_and_few_at_a_time(tmp_path: Path) -> None:
    ask, sizes = Asked(), [n * 7 % 11 for n in range(40)]
    write(tmp_path / "a.jsonl", ask, size=lambda n: sizes[n], in_flight=1)
    assert ask.calls == sorted(range(40), key=lambda n: -sizes[n])  # equal ones in their order
    ask = Asked()
    write(tmp_path / "b.jsonl", ask, in_flight=3)
    assert ask.most <= 3
    assert Counter(ask.calls) == Counter(range(40))


def test_other_settings_begin_anew(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it fails"):
        write(tmp_path / "a.jsonl", Asked(30))
    ask = Asked()
    write_in_order(str(tmp_path / "a.jsonl"), range(40), ask, settings="other", in_flight=2)
    assert len(ask.calls) == 40


def test_only_one_process_writes_a_file(tmp_path: Path) -> None:
    with LocalLock(tmp_path, "a.jsonl"):
        line = r"file .*a\.jsonl is in use by process \d+ .*; wait for it or stop it, or choose"
        with pytest.raises(InputError, match=line):
            write(tmp_path / "a.jsonl", Asked())
        write(tmp_path / "b.jsonl", Asked())
        with LocalLock(tmp_path):  # the folder is another lock
            pass
    write(tmp_path / "a.jsonl", Asked())
    for name, problem in (("a.jsonl", "exists"), ("a.txt", "does not end in .jsonl")):
        with pytest.raises(InputError, match=f"{problem}; choose another file"):
            write(tmp_path / name, Asked())
