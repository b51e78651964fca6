"""Files in a bucket are read like local ones, in few requests."""

import io
import itertools
import os
import zipfile

import numpy as np
import pytest
from etils import epath

from mesh_transformer.storage import files, remote_file
from mesh_transformer.util import InputError

SIZE = 3_000_000


@pytest.fixture
def content(tmp_path):
    content = np.random.default_rng(0).bytes(SIZE)
    (tmp_path / "file").write_bytes(content)
    return content


@pytest.fixture
def requests(monkeypatch):
    """The ranges (first, last + 1) that were requested; small ones, so that sizes here suffice."""
    requests = []

    class Recorded(remote_file.Range):
        def __init__(self, path, start, end):
            requests.append((start, end))
            super().__init__(path, start, end)

    monkeypatch.setattr(remote_file, "Range", Recorded)
    monkeypatch.setattr(remote_file, "READ_AHEAD", (1 << 12, 1 << 16))
    monkeypatch.setattr(remote_file, "IN_FLIGHT", 1 << 18)
    monkeypatch.setattr(remote_file, "PART", 1 << 17)
    remote_file._read_tail.cache_clear()
    return requests


def remote(folder, name="file", size=SIZE, **options):
    """Return a file of a URI that needs no bucket: tensorstore reads file:// in the same way."""
    return remote_file.RemoteFile(f"file://{folder}/{name}", size, 0, **options)


@pytest.mark.parametrize("seed", range(6))
def test_any_reads_return_the_file_s_bytes(tmp_path, content, requests, seed):
    generator = np.random.default_rng(seed)
    with remote(tmp_path, in_order=seed % 2 > 0) as file, io.BytesIO(content) as expected:
        for _ in range(200):
            if generator.random() < 0.4:
                whence = int(generator.integers(3))
                offset = int(generator.integers(SIZE)) - (0, expected.tell(), SIZE)[whence]
                assert file.seek(offset, whence) == expected.seek(offset, whence)
            count = int(10 ** generator.uniform(0, 6))
            assert file.read(count) == expected.read(count)
            assert file.tell() == expected.tell()
        file.seek(SIZE + 10)
        assert file.read(5) == b""
    assert all(0 <= first < last <= SIZE for first, last in requests)


def test_reading_in_order_takes_few_requests(tmp_path, content, requests):
    with remote(tmp_path) as file:
        assert b"".join(iter(lambda: file.read(1000), b"")) == content
    # 4 KiB, 8 KiB, ..., then 64 KiB each, and the last 4 KiB.
    assert len(requests) <= 5 + SIZE / (1 << 16) + 1
    requests.clear()
    with remote(tmp_path) as file:
        file.seek(100)
        assert file.read(2_000_000) == content[100:2_000_100]
    assert requests == [(100, 2_000_100)]  # a long read is not read ahead


def test_requests_run_ahead_of_the_reader_as_far_as_it_has_read(tmp_path, content, requests):
    with remote(tmp_path) as file:
        file.seek(100)
        assert file.read(10) == content[100:110]
        assert requests == [(100, 100 + (1 << 12))]
        file.seek(90 + (1 << 12))
        assert b"".join(file.read(1000) for _ in range(400)) == content[90 + (1 << 12) :][:400_000]
        assert all(end == first for (_, end), (first, _) in itertools.pairwise(requests))
        assert file.tell() + (1 << 17) < requests[-1][1] <= file.tell() + (1 << 18) + (1 << 16)
        asked = len(requests)
        file.seek(2_000_000)
        assert file.read(10) == content[2_000_000:2_000_010]
        assert requests[asked:] == [(2_000_000, 2_000_000 + (1 << 12))]


def test_a_file_read_in_order_is_requested_at_once(tmp_path, content, requests):
    with remote(tmp_path, in_order=True) as file:
        assert requests == [(at, at + (1 << 16)) for at in range(0, 1 << 18, 1 << 16)]
        assert file.readall() == content
    assert [first for first, _ in requests] == [*range(0, SIZE, 1 << 16)]
    assert requests[-1][1] == SIZE


@pytest.mark.parametrize("is_cut", [True, False])
def test_files_in_a_bucket_are_opened_before_they_are_needed(tmp_path, monkeypatch, is_cut):
    paths = [f"file://{tmp_path}/{number}" for number in range(40)]
    sizes = [int(10 ** np.random.default_rng(number).uniform(1, 6)) for number in range(40)]
    for number, size in enumerate(sizes):
        (tmp_path / str(number)).write_bytes(bytes([number]) * size)
    opened = []

    def open_file(path, *, in_order=False):
        opened.append((path, in_order))
        return open(path.removeprefix("file://"), "rb")

    monkeypatch.setattr(files, "open_file", open_file)
    monkeypatch.setattr(files, "OPEN_BYTES", 300_000)
    with files.OpenAhead(paths, sizes, is_cut=is_cut) as ahead:
        for number in range(len(paths)):
            with ahead.next() as file:
                assert file.read() == bytes([number]) * sizes[number]
            begun = sizes[number + 1 : ahead._begun]
            assert len(begun) <= 1 or (sum(begun) <= 300_000 and len(begun) <= files.OPEN_FILES)
    assert sorted(path for path, _ in opened) == sorted(paths)
    assert {path for path, in_order in opened if not in_order} == set(paths[:is_cut])


def test_an_archive_s_table_is_requested_once(tmp_path, requests):
    arrays = {f"arr_{n}": np.random.default_rng(n).normal(size=(100, 100)) for n in range(5)}
    np.savez(tmp_path / "0.npz", **arrays)
    size = os.path.getsize(tmp_path / "0.npz")
    for name, expected in arrays.items():
        with remote(tmp_path, "0.npz", size) as file, zipfile.ZipFile(file) as archive:
            np.testing.assert_array_equal(np.load(archive.open(f"{name}.npy")), expected)
    assert sum(last == size for _, last in requests) == 1


def test_failures_name_the_file_and_the_bytes(tmp_path, content, requests):
    with remote(tmp_path, size=SIZE + 1) as file:
        file.seek(SIZE - 10_000)
        message = r"file: bytes \d+ to 3000001 cannot be read: .*check your credentials"
        with pytest.raises(InputError, match=message):
            file.read()
    with remote(tmp_path, "none") as file, pytest.raises(InputError, match="none: bytes 0 to 4096"):
        file.read(10)
    with pytest.raises(ValueError, match="negative position"):
        remote(tmp_path).seek(-1)


OF_A_MODEL = ("model.safetensors", "tokenizer_config.json", "vocab.json", "config.json")
OF_A_SET = ("train_10.tfrecords", "val_2.tfrecords", "train.index", "val.index")


@pytest.mark.parametrize(("names", "last"), [(OF_A_MODEL, 1), (OF_A_SET, 2)])
@pytest.mark.parametrize("replace", [False, True])
def test_files_that_identify_a_folder_are_uploaded_last(
    tmp_path, monkeypatch, names, last, replace
):
    """At each moment, a folder that is being replaced is incomplete, or consists of new files."""
    target = tmp_path / "target"
    folders = [tmp_path / "new", *([target] if replace else [])]
    for folder in folders:
        folder.mkdir()
        for name in names:
            (folder / name).write_text(f"{name} of {folder.name}")
    target.mkdir(exist_ok=True)
    copy, copied = type(epath.Path()).copy, []

    def watched(self, to, **options):
        copied.append(self.name)
        for name in names[-last:]:
            assert (target / name).exists() == (name in copied[:-1])
        return copy(self, to, **options)

    monkeypatch.setattr(type(epath.Path()), "copy", watched)
    files.upload(str(tmp_path / "new"), str(target), replace=replace)
    assert sorted(copied[-last:]) == sorted(names[-last:])
    assert {path.name: path.read_text() for path in target.iterdir()} == {
        name: f"{name} of new" for name in names
    }
