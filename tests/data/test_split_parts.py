"""Text that workers split in any order: the same bytes as those of one process."""

import contextlib
import json
import random
import re
from io import BufferedReader

import pytest

from mesh_transformer.cli import new_tokenizer
from mesh_transformer.cli import split as script
from mesh_transformer.data import documents, parts, split, split_parts
from mesh_transformer.data.contents import ZstandardReader
from mesh_transformer.util import InputError
from tests.cli.test_split import both
from tests.data.test_parts import END, write_large_files
from tests.long import killed_tokenizing
from tests.support.shuffled_workers import ShuffledWorkers, Stopped


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Make pieces, parts, frames and lines small, and let no worker change this process."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 64)
    monkeypatch.setattr(split, "PART_BYTES", 300)
    monkeypatch.setattr(split, "FRAME_BYTES", 250)
    monkeypatch.setattr(split_parts, "LINE_CHARACTERS", 100)
    monkeypatch.setattr(split_parts, "WINDOW_CHARACTERS", 50)
    parts._reader.cache_clear()


@pytest.fixture
def run(monkeypatch, capsys):
    """Split with the command, by means of workers if there are any; return files and output."""

    def run(source, out, workers, *options):
        monkeypatch.setattr(script, "ray_workers", lambda _: contextlib.nullcontext(workers))
        capsys.readouterr()
        script.main([str(source), str(out), *map(str, options)])
        printed = capsys.readouterr().out.replace(str(out), "OUT")
        assert sorted(path.name for path in out.iterdir()) == ["train.jsonl.zst", "val.jsonl.zst"]
        return killed_tokenizing.contents(out), printed

    return run


def text_of(folder):
    """Return the text of each of the two parts; long documents are cut into lines anywhere."""
    texts = []
    for name in split_parts.NAMES:
        with open(folder / f"{name}.jsonl.zst", "rb") as raw:
            texts.append(
                "".join(json.loads(line)["text"] for line in BufferedReader(ZstandardReader(raw)))
            )
    return texts


@pytest.mark.parametrize(("seed", "validation"), [(0, 0.002), (1, 0.3), (2, 0.3)])
def test_workers_in_any_order_give_the_bytes_of_one_process(tmp_path, run, seed, validation):
    killed_tokenizing.write_text(tmp_path / "in")
    write_large_files(tmp_path / "in", seed)
    for number in range(5):  # small files, which share frames
        (tmp_path / "in" / f"small_{number}.txt").write_text(f"text {number}\n" * number)
    options = ("--validation", validation, "--seed", seed)
    expected = run(tmp_path / "in", tmp_path / "one", None, *options)
    assert expected[0]["train.jsonl.zst"].count(b"\x28\xb5\x2f\xfd") > 10  # frames
    workers = ShuffledWorkers(seed)
    assert run(tmp_path / "in", tmp_path / "many", workers, *options) == expected
    assert {part.path for part in workers.parts} == set(map(str, (tmp_path / "in").iterdir()))
    for name in ("large.txt", "large.jsonl"):
        assert sum(part.path.endswith(name) for part in workers.parts) > 20
    # With parts of another size, the choice and the text are the same.
    split.PART_BYTES = 1 << 20
    run(tmp_path / "in", tmp_path / "large parts", None, *options)
    assert text_of(tmp_path / "large parts") == text_of(tmp_path / "one")


@pytest.mark.parametrize("seed", range(2))
def test_rows_on_workers_give_the_bytes_of_one_process(tmp_path, run, seed):
    killed_tokenizing.write_text(tmp_path / "in")
    write_large_files(tmp_path / "in", seed)
    options = ("--rows", "--validation", 0.2, "--seed", seed)
    expected = run(tmp_path / "in", tmp_path / "one", None, *options)
    workers = ShuffledWorkers(seed)
    assert run(tmp_path / "in", tmp_path / "many", workers, *options) == expected
    assert sum(part.path.endswith("large.jsonl") for part in workers.parts) > 20


def test_no_finished_part_is_read_again(tmp_path, run):
    write_large_files(tmp_path / "in", 1)
    expected = run(tmp_path / "in", tmp_path / "one", None)
    begun, out = [], tmp_path / "many"
    for calls in (0, 1, 15, 40, None):
        workers = ShuffledWorkers(len(begun), calls)
        with contextlib.nullcontext() if calls is None else pytest.raises(Stopped):
            assert run(tmp_path / "in", out, workers) == expected
        begun += workers.parts
    assert len(begun) == len(set(begun))
    measured = {part for part in begun if not part.choices}
    written = {part._replace(choices="") for part in begun if part.choices}
    assert len(measured) > 30
    assert written < measured  # empty files are not written
    assert {part.path for part in measured - written} == {str(tmp_path / "in" / "empty.txt")}


def test_another_choice_measures_nothing_again_and_writes_what_differs(tmp_path, run):
    write_large_files(tmp_path / "in", 2)
    with pytest.raises(Stopped):
        run(tmp_path / "in", tmp_path / "out", ShuffledWorkers(1, 60), "--seed", 1)
    expected = run(tmp_path / "in", tmp_path / "one", None, "--seed", 2)
    workers = ShuffledWorkers(2)
    assert run(tmp_path / "in", tmp_path / "out", workers, "--seed", 2) == expected
    assert all(part.choices for part in workers.parts)


@pytest.mark.parametrize("seed", range(4))  # of the part that is written before the interruption
def test_another_cut_of_the_same_document_is_written_again(tmp_path, run, seed):
    (tmp_path / "in").mkdir()
    for number, length in enumerate((900, 9)):
        (tmp_path / "in" / f"{number}.txt").write_text("some words " * length)
    with pytest.raises(Stopped):
        run(tmp_path / "in", tmp_path / "out", ShuffledWorkers(seed, 3), "--validation", 0.2)
    expected = run(tmp_path / "in", tmp_path / "one", None, "--validation", 0.4)
    workers = ShuffledWorkers(seed)
    assert run(tmp_path / "in", tmp_path / "out", workers, "--validation", 0.4) == expected


BAD = {
    "text": ("large.txt", END, [b"\xff bytes", b"long " * 40 + b"caf\xe9"], ()),
    "lines": ("large.jsonl", "\n", [b'{"other": 1}', b"{", b'"\xff"', b'{"text": null}'], ()),
    "rows": ("large.jsonl", "\n", [b"{", b'"\xff"'], ("--rows",)),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("count", [1, 30])
def test_bad_documents_are_reported_as_by_one_process(tmp_path, run, kind, count):
    write_large_files(tmp_path / "in", 5)
    generator = random.Random(count)
    name, separator, bad, flags = BAD[kind]
    path = tmp_path / "in" / name
    texts = path.read_bytes().split(separator.encode())
    for _ in range(count):
        texts.insert(generator.randrange(len(texts) // 2, len(texts)), generator.choice(bad))
    path.write_bytes(separator.encode().join(texts))
    whole = split.PART_BYTES
    errors = []
    for workers, size in ((None, 1 << 20), (None, whole), (ShuffledWorkers(count), whole)):
        split.PART_BYTES = size
        with pytest.raises(InputError) as error:
            run(tmp_path / "in", tmp_path / "out", workers, *flags)
        errors.append(str(error.value))
    assert errors == errors[:1] * 3
    assert re.search(r"(document|line) \d\d", errors[0])
    expected = run(tmp_path / "in", tmp_path / "one", None, "--skip-bad", *flags)
    assert expected[1].count("skipped: ") == min(count, 20)
    workers = ShuffledWorkers(count)
    assert run(tmp_path / "in", tmp_path / "out", workers, "--skip-bad", *flags) == expected


def test_column_that_is_missing_is_reported_as_by_one_process(tmp_path, run):
    killed_tokenizing.write_text(tmp_path / "in")
    errors = []
    for workers in (None, ShuffledWorkers(0)):
        with pytest.raises(InputError) as error:
            run(tmp_path / "in" / "4.csv", tmp_path / "out", workers, "--text-column", "id")
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_file_that_changes_between_the_readings_is_named(tmp_path, monkeypatch, run):
    write_large_files(tmp_path / "in", 1)
    path, original = tmp_path / "in" / "large.txt", parts.finish

    def changed(shared, part):
        if part.choices:
            path.write_text("other text")
        return original(shared, part)

    monkeypatch.setattr(parts, "finish", changed)
    with pytest.raises(InputError, match=r"large\.txt has 10 bytes on a worker, expected the"):
        run(path, tmp_path / "out", ShuffledWorkers(1))
    assert not list((tmp_path / "out").glob("*.zst"))


def test_part_without_documents_is_a_readable_file(tmp_path, run):
    (tmp_path / "in.jsonl").write_text('"a"\n"b"\n')
    run(tmp_path / "in.jsonl", tmp_path / "out", None, "--validation", 0.9)
    assert both(tmp_path / "out") == [[], ["a", "b"]]


@pytest.mark.parametrize("kind", ["bpe", "characters"])
def test_sample_of_a_tokenizer_is_the_same_on_workers(tmp_path, monkeypatch, kind):
    write_large_files(tmp_path / "in", 1)
    lines = [json.dumps({"other": f"{number} " * 40}) for number in range(100)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    read: list[list[str]] = []
    original = new_tokenizer.texts

    def texts(*arguments):
        read.append([])
        for text in original(*arguments):
            read[-1].append(text)
            yield text

    monkeypatch.setattr(new_tokenizer, "texts", texts)

    def train(name, workers, *options):
        monkeypatch.setattr(new_tokenizer, "ray_workers", lambda _: contextlib.nullcontext(workers))
        words = [str(tmp_path / "in.jsonl"), str(tmp_path / name), "--kind", kind, *options]
        new_tokenizer.main([*words, "--text-column", "other"])
        assert not list(tmp_path.glob("*.partial"))
        return killed_tokenizing.contents(tmp_path / name)

    expected = train("one", None, "--sample", "2KB")
    assert train("many", ShuffledWorkers(1), "--sample", "2KB", "--ray", "auto") == expected
    train("other", None, "--sample", "2KB", "--seed", "1")
    train("all", None, "--sample", "1GB")
    train("also", None)
    one, many, other, everything, also = read
    assert one == many != other
    assert everything == also
    whole = {f"{number} " * 40 for number in range(100)}
    for sample in (one, other):
        assert 1000 <= sum(map(len, sample)) <= 2000
        assert {*"".join(sample).split()} <= {*"".join(whole).split()}


def test_interrupted_sample_on_workers_is_continued(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text("\n".join(f'"{n} {"words " * 9}"' for n in range(99)))
    words = [str(tmp_path / "in.jsonl"), str(tmp_path / "out"), "--sample", "1KB"]
    begun = []
    for calls in (9, 15, None):
        workers = ShuffledWorkers(1, calls)
        monkeypatch.setattr(
            new_tokenizer, "ray_workers", lambda _, w=workers: contextlib.nullcontext(w)
        )
        with contextlib.nullcontext() if calls is None else pytest.raises(Stopped):
            new_tokenizer.main([*words, "--ray", "auto"])
        begun += workers.parts
    assert len(begun) == len(set(begun)) > 24
    assert [path.name for path in tmp_path.iterdir() if path.name != "in.jsonl"] == ["out"]
    with pytest.raises(InputError, match="--ray is for choosing a sample; add --sample BYTES"):
        new_tokenizer.main([str(tmp_path / "in.jsonl"), str(tmp_path / "new"), "--ray", "auto"])
