"""Records in a random order over a whole set, `shuffle_buffer` "all", and the table it needs."""

import gzip
import itertools
import json
import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from mesh_transformer.data import record_offsets, record_set
from mesh_transformer.data.loader import describe_batch
from mesh_transformer.data.record_set import Position, RecordSet, permuted
from mesh_transformer.data.tfrecords import Frame, frames, write_records, write_set
from mesh_transformer.util import InputError
from tests.data.test_record_set import SEQ, load, numbers, write_index
from tests.support.fake_gcs import Stored, gcs_server

ALL = {"shuffle_buffer": "all", "seed": 7}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Return the user's cache of tables."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mesh-transformer" / "offsets"


@pytest.mark.parametrize("count", [1, 2, 3, 10, 24, 25, 26, 1000])
def test_numbers_are_permuted(count):
    keys = np.random.default_rng(count).integers(2**64, size=(2, 8), dtype="u8")
    first, second = (permuted(np.arange(count), count, own) for own in keys)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(count))
    at = np.random.default_rng(0).integers(count, size=5)
    assert permuted(at, count, keys[0]).tolist() == first[at].tolist()
    # One of 24! orders or more; fewer numbers may have equal ones.
    assert count < 24 or first.tolist() != second.tolist()


def test_large_numbers_are_permuted():
    """15 T tokens in sequences of 2048: results are in the range, and no two are equal."""
    count = 7_324_218_751
    at = np.arange(count - 5000, count)
    result = permuted(at, count, np.random.default_rng(0).integers(2**64, size=8, dtype="u8"))
    assert len(set(result.tolist())) == len(at)
    assert 0 <= result.min() < count / 100  # the smallest of 5000; once in exp(50) it is not
    assert 0.99 * count < result.max() < count


def test_every_epoch_is_another_permutation_of_all_records(tmp_path):
    index = write_index(tmp_path, "a")
    everything = sorted(numbers(load(index, repeat=False), 24))
    actual = numbers(load(index, 5, **ALL), 24)
    epochs = [actual[start : start + 24] for start in range(0, 120, 24)]
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5
    assert numbers(load(index, 7, **ALL), 17)[:119] == actual[:119]
    assert numbers(load(index, 5, shuffle_buffer="all", seed=8), 24) != actual
    assert numbers(load(index, 1, repeat=False, **ALL), 100) == actual[:24]


def test_the_records_of_a_file_are_spread_over_the_epoch(tmp_path):
    index = write_index(tmp_path, "a", (1000, 1000, 1000))
    order = np.array(numbers(load(index, 100, **ALL), 30)) // 1000
    for part in np.split(order, 10):  # 300 records, of which 100 +- 8 are of each file
        # 5 standard deviations: one of 30 counts is outside for about one seed in 60,000.
        assert (abs(np.bincount(part, minlength=3) - 100) < 41).all()


def test_resume_at_every_record(tmp_path, monkeypatch):
    monkeypatch.setattr(record_set, "PERMUTED", 5)
    index = write_index(tmp_path, "a")

    def opened():
        return RecordSet(index, SEQ, None, shuffle="all", seed=7)

    def read(records, position, count):
        rows = itertools.islice(records.records(position, repeat=True), count)
        return [(int(records.row(record)["obs"][0]), after) for record, after in rows]

    expected, position = read(opened(), Position(), 80), Position()
    for done in range(60):
        records = opened()
        state = json.loads(json.dumps(records.state(position)))
        assert read(records, records.checked_position(state), 9) == expected[done : done + 9], done
        position = expected[done][1]


def test_resume_a_mixture_with_another_batch_size(tmp_path):
    index = {write_index(tmp_path, "a"): 1.0, write_index(tmp_path, "b", (2, 6), first=100): 0.5}
    with closing(load(index, **ALL)) as loader:
        expected = numbers(loader, 120)
    for batch_size in (1, 3, (2, 2), 7):
        with closing(load(index, batch_size, **ALL)) as loader:
            first = numbers(loader, 5)
            state = json.loads(json.dumps(loader.state()))
        with closing(load(index, 5, restore_state=state, **ALL)) as loader:
            assert first + numbers(loader, 6) == expected[: len(first) + 30]


@pytest.mark.parametrize("ahead", [1, 5, 1024])
def test_hosts_read_their_own_columns_only(tmp_path, monkeypatch, ahead):
    monkeypatch.setattr(record_set, "RECORDS_AHEAD", ahead)
    index = {write_index(tmp_path, "a"): 2.0, write_index(tmp_path, "b", (2, 6), first=100): 1.0}
    with closing(load(index, (3, 4), **ALL)) as whole:
        expected = [whole.get_samples()["obs"] for _ in range(5)]
    reads = []
    payload = Frame.payload
    monkeypatch.setattr(Frame, "payload", lambda frame: reads.append(1) or payload(frame))
    hosts = [load(index, (3, 4), columns=part, **ALL) for part in ([0, 1], [2, 3])]
    # Without the threads, which read further ahead.
    batches = zip(*(host._batches_from(0) for host in hosts), strict=True)
    places = []
    for rows, read in zip(expected, batches, strict=False):
        actual = np.concatenate([batch["obs"] for batch, _ in read], axis=1)
        np.testing.assert_array_equal(actual, rows)
        places = [host._mixture.state(place) for host, (_, place) in zip(hosts, read, strict=True)]
    assert len(reads) == 5 * 12
    assert places == [whole.state()] * 2


def test_a_set_s_writer_writes_the_table(tmp_path):
    rows = np.random.default_rng(0).integers(0, 50_000, (200, SEQ + 1))
    _, index, _ = write_set(tmp_path, "a", rows, record_offsets.write_offsets)
    written = (tmp_path / "a.offsets").read_bytes()
    assert len(written) == 64 + 8 * 2 + 8 * 4 + 2 * 200
    (tmp_path / "a.offsets").unlink()
    RecordSet(index, SEQ, None, shuffle="all")
    assert (tmp_path / "a.offsets").read_bytes() == written
    # Nor is the table a record file of the folder, with the index or without.
    for _ in range(2):
        records = RecordSet(str(tmp_path), SEQ, None)
        assert [Path(path).name for path in records.paths] == ["a_200.tfrecords"]
        Path(index).unlink(missing_ok=True)


@pytest.mark.parametrize("seq", [3, 40_000])  # lengths of 2 and of 4 bytes
def test_the_table_has_the_place_of_every_record(tmp_path, seq):
    generator = np.random.default_rng(seq)
    for part, count in enumerate((3, 100, 1, 64)):
        count = count if seq < 100 else min(count, 3)
        rows = generator.integers(0, 50_000, (count, seq + 1))
        write_records(str(tmp_path / f"{part}.tfrecords"), rows)
    records = RecordSet(str(tmp_path), seq, None, shuffle="all")
    paths = sorted(str(path) for path in tmp_path.glob("*.tfrecords"))
    expected, before = [], 0
    for file, path in enumerate(paths):
        before = 0
        for number, (_, end) in enumerate(frames(path, 0)):
            expected.append((file, number, before, end - before))
            before = end
    assert records._offsets is not None
    places = records._offsets.places(np.arange(len(expected)))
    assert [tuple(place) for place in places] == expected
    assert Path(f"{tmp_path}.offsets").exists()
    rows = [records.row(record) for record, _ in records.records(Position(), repeat=False)]
    assert len(rows) == len(expected)


def test_a_table_that_does_not_fit_is_made_again(tmp_path):
    index, table = write_index(tmp_path, "a"), tmp_path / "a.offsets"
    with closing(load(index, **ALL)) as loader:
        state = loader.state()
    good = table.read_bytes()
    generator = np.random.default_rng(0)
    damaged = [b"", good[:-1], good + b"\0", good[:20]]
    for at in generator.integers(len(good), size=20):  # each byte is checked
        damaged.append(
            good[:at] + bytes([good[at] ^ (1 << int(generator.integers(8)))]) + good[at + 1 :]
        )
    for content in damaged:
        table.write_bytes(content)
        RecordSet(index, SEQ, None, shuffle="all")
        assert table.read_bytes() == good
    write_records(str(tmp_path / "a_0.tfrecords"), np.zeros((9, SEQ + 1), int))
    with pytest.raises(InputError, match=r"seed 7, records 24, but .* seed 7, records 28; restore"):
        load(index, restore_state=state, **ALL)
    assert table.read_bytes() != good


def test_a_table_is_cached_where_it_cannot_be_beside(tmp_path, cache, monkeypatch):
    index = write_index(tmp_path / "set", "a")
    save = record_offsets.RecordOffsets.save

    def refused(table, path, digest):
        if path.startswith(str(tmp_path / "set")):
            raise PermissionError(13, "Permission denied", path)
        save(table, path, digest)

    monkeypatch.setattr(record_offsets.RecordOffsets, "save", refused)
    expected = numbers(load(index, **ALL), 24)
    assert not (tmp_path / "set" / "a.offsets").exists()
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(record_offsets, "_made", None)
    assert numbers(load(index, **ALL), 24) == expected


def test_records_in_a_bucket(tmp_path, cache, monkeypatch):
    """The table is written into the bucket, copied into the cache, and made once."""
    index = write_index(tmp_path / "set", "a")
    expected = numbers(load(index, 3, **ALL), 16)
    with gcs_server(tmp_path) as (gcs, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        for path in (tmp_path / "set").iterdir():
            if path.suffix != ".offsets":
                gcs.objects["bucket", f"set/{path.name}"] = Stored(path.read_bytes(), 1, 0.0)
        remote = "gs://bucket/set/a.index"
        assert numbers(load(remote, 3, **ALL), 16) == expected
        written = gcs.objects["bucket", "set/a.offsets"].content
        assert written == (tmp_path / "set" / "a.offsets").read_bytes()
        monkeypatch.setattr(record_offsets, "_made", None)
        for path in cache.iterdir():
            path.unlink()
        assert numbers(load(remote, 3, **ALL), 16) == expected
        assert len(list(cache.iterdir())) == 1


def test_errors_name_the_record_or_the_table(tmp_path):
    index, path = write_index(tmp_path, "a", (4,)), tmp_path / "a_0.tfrecords"
    loader = load(index, **ALL)
    before = loader.state()
    loader.get_samples()
    assert describe_batch(index, before, loader.state()) == (
        f"{index} from epoch 0, record 0 of its shuffled order to before epoch 0, record 1 of its "
        "shuffled order"
    )
    with pytest.raises(InputError, match=r"with shuffle_buffer 0, but .* with shuffle_buffer all"):
        load(index, restore_state=load(index).state(), **ALL)
    with pytest.raises(InputError, match=r"with shuffle_buffer all, .* with shuffle_buffer 4"):
        load(index, restore_state=before, shuffle_buffer=4, seed=7)
    with pytest.raises(InputError, match=r"data position .* is damaged"):
        load(index, restore_state=before | {"taken": 5}, **ALL)
    with pytest.raises(InputError, match="found 4 records in total, but one batch needs 5"):
        load(index, 5, **ALL)
    good = path.read_bytes()
    records = RecordSet(index, SEQ, None, shuffle="all")
    for at, line in [
        (-1, "corrupt record at byte"),
        (0, "no record of .* as the table .*a.offsets"),
    ]:
        content = bytearray(good)
        content[-len(good) // 4 if at == 0 else at] ^= 1  # the last record's first or last byte
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"a_0\.tfrecords: {line}"):
            [records.row(record) for record, _ in records.records(Position(), repeat=False)]
    path.write_bytes(good[:-5])
    with pytest.raises(InputError, match=r"a_0\.tfrecords: truncated in the record at byte"):
        [records.row(record) for record, _ in records.records(Position(), repeat=False)]
    path.unlink()
    with pytest.raises(InputError, match=r"a_0\.tfrecords: No such file"):
        [records.row(record) for record, _ in records.records(Position(), repeat=False)]


def test_compressed_records_are_refused(tmp_path):
    index, path = write_index(tmp_path, "a"), tmp_path / "a_1.tfrecords"
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(InputError, match=r"a_1\.tfrecords is compressed, .*decompress it, or set"):
        load(index, **ALL)
    assert not (tmp_path / "a.offsets").exists()
    assert sorted(name for name in os.listdir(tmp_path) if name[0] == ".") == []
