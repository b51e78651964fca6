"""Files in a bucket are read like local ones, in few requests."""

import io
import os
import zipfile

import numpy as np
import pytest
from etils import epath

from mesh_transformer.storage import files
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
    requests, read = [], files._read_range

    def recorded(path, start, target):
        requests.append((start, start + len(target)))
        read(path, start, target)

    monkeypatch.setattr(files, "_read_range", recorded)
    monkeypatch.setattr(files, "READ_AHEAD", (1 << 12, 1 << 16))
    monkeypatch.setattr(files, "PART", 1 << 17)
    files._read_tail.cache_clear()
    return requests


def remote(folder, name="file", size=SIZE):
    """Return a file of a URI that needs no bucket: tensorstore reads file:// in the same way."""
    return files._RemoteFile(f"file://{folder}/{name}", size, 0)


@pytest.mark.parametrize("seed", range(5))
def test_any_reads_return_the_file_s_bytes(tmp_path, content, requests, seed):
    generator = np.random.default_rng(seed)
    with remote(tmp_path) as file, io.BytesIO(content) as expected:
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
