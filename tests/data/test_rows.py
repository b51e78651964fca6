"""Records of prompts and completions whose rows are tokenised by workers, file by file."""

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from mesh_transformer.cli import completion_records as script
from mesh_transformer.data import parts
from tests.long import killed_tokenizing
from tests.support.shuffled_workers import ShuffledWorkers, Stopped

FILES, ROWS = 4, 10


def row_of(kind: str, rng: random.Random) -> dict[str, Any]:
    """Return a row of random words, some of which are too long for a record."""

    def text() -> str:
        return " ".join(rng.choices(killed_tokenizing.WORDS, k=rng.choice([1, 2, 3, 4, 6, 9, 25])))

    match kind:
        case "chats":
            roles = ["user", "assistant"] * rng.randint(1, 4)
            return {"messages": [{"role": role, "content": text()} for role in roles]}
        case "preferences":
            return {"prompt": text(), "chosen": text(), "rejected": text()}
        case "labels":
            return {"prompt": text(), "completion": text(), "label": rng.random() < 0.5}
    row: dict[str, Any] = {"prompt": text(), "completion": text()}
    if kind == "taught":
        words = row["completion"].split(" ")
        tokens = [words[0], *(f" {word}" for word in words[1:])]
        numbers = [-rng.random() for _ in tokens]
        likely = dict(zip(tokens, numbers, strict=True))
        top = [{token: likely[token], " or": -rng.expovariate(1)} for token in tokens]
        row["logprobs"] = {"tokens": tokens, "token_logprobs": numbers, "top_logprobs": top}
    return row


def write_rows(folder: Path, kind: str) -> None:
    """Write files of rows, some of which cannot be used."""
    rng = random.Random(kind)
    folder.mkdir()
    for number in range(FILES):
        lines = [json.dumps(row_of(kind, rng)) for _ in range(ROWS)]
        lines.insert(rng.randrange(ROWS), rng.choice(["{", "{}", '{"prompt": 3}']))
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("chats", ("--pack",)),
        ("pairs", ()),
        ("preferences", ("--preferences", "pairs", "--pack")),
        ("labels", ("--preferences", "labels")),
        ("taught", ("--teacher-tokens", "3", "--pack")),
    ],
)
def test_rows_on_workers_give_the_bytes_of_one_process(tmp_path, monkeypatch, capsys, kind, flags):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")  # workers change it
    parts._reader.cache_clear()
    write_rows(tmp_path / "in", kind)
    words = ["--seq", "40", "--skip-bad", *flags]

    def create(folder, workers):
        monkeypatch.setattr(script, "ray_workers", lambda _: contextlib.nullcontext(workers))
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        script.main(["in", "set", "--output-dir", folder, *words])
        summary = capsys.readouterr().out.splitlines()[-1].replace(f"{folder}/", "")
        return killed_tokenizing.contents(tmp_path / folder), summary

    expected, printed = create("one", None)
    assert len(expected) == 4  # records, offsets, manifest, index
    assert "; skipped: " in printed
    begun = []
    for calls in (2, 0, None):
        workers = ShuffledWorkers(len(begun), calls)
        with contextlib.nullcontext() if calls is None else pytest.raises(Stopped):
            content, output = create("many", workers)
        begun += workers.parts
    assert content == expected
    assert output == printed
    assert len(begun) == len(set(begun)) == FILES  # no file is tokenised twice
    assert sorted(path.name for path in (tmp_path / "many").iterdir()) == sorted(expected)


def test_bad_rows_and_other_settings_are_noticed_as_by_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    parts._reader.cache_clear()
    write_rows(tmp_path / "in", "pairs")
    monkeypatch.chdir(tmp_path)

    def create(workers, *flags):
        monkeypatch.setattr(script, "ray_workers", lambda _: contextlib.nullcontext(workers))
        script.main(["in", "set", "--output-dir", "out", *flags])

    errors = []
    for workers in (None, ShuffledWorkers(0)):
        with pytest.raises(script.InputError) as error:
            create(workers)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    assert "line " in errors[0]
    # Finished files count for these settings only.
    with pytest.raises(Stopped):
        create(ShuffledWorkers(1, 3), "--seq", "64", "--skip-bad")
    workers = ShuffledWorkers(1)
    create(workers, "--seq", "65", "--skip-bad")
    assert len(workers.parts) == FILES
