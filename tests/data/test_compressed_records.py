"""Compressed TFRecords: read as TensorFlow reads them, resumed anywhere, damage reported."""

import gzip
import zlib

import numpy as np
import pytest

from mesh_transformer.data.loader import TFRecordNewInputs
from mesh_transformer.data.tfrecords import frames, is_compressed, write_records
from mesh_transformer.storage.access import tensorflow
from mesh_transformer.util import InputError

SEQ, RECORDS = 64, 40
TOKENS = np.random.default_rng(5).integers(0, 50257, (RECORDS, SEQ + 1))


def compress(path, kind):
    """Copy a TFRecord file with TensorFlow's own writer and a compression; return its path."""
    tf = tensorflow()
    written = path.with_name(f"{kind}_zstd_{RECORDS}.tfrecords")
    with tf.io.TFRecordWriter(str(written), tf.io.TFRecordOptions(kind)) as writer:
        for payload, _ in frames(str(path), 0):
            writer.write(payload)
    return written


@pytest.fixture
def plain(tmp_path):
    path = tmp_path / f"plain_{RECORDS}.tfrecords"
    write_records(str(path), TOKENS)
    return path


def load(path, **options):
    index = path.with_suffix(".index")
    index.write_text(f"{path.name}\n")
    return TFRecordNewInputs(str(index), 1, SEQ, **options)


@pytest.mark.parametrize("kind", ["ZLIB", "GZIP"])
def test_compressed_records_are_the_same_and_resume_anywhere(plain, kind):
    written = compress(plain, kind)
    assert is_compressed(str(written))
    assert not is_compressed(str(plain))
    loader, expected = load(written), load(plain)
    for done in range(RECORDS + 2):
        resumed = load(written, restore_state=loader.state())
        for row in resumed, loader:
            np.testing.assert_array_equal(
                row.get_samples()["obs"][0], TOKENS[done % RECORDS, :-1].astype(np.uint32)
            )
        resumed.close()
        expected.get_samples()
        assert loader.state()["offset"] == expected.state()["offset"]


def test_several_streams_in_one_file_are_all_read(plain, tmp_path):
    payload = plain.read_bytes()
    half = len(payload) // 2
    path = tmp_path / "streams.tfrecords"
    path.write_bytes(gzip.compress(payload[:half]) + zlib.compress(payload[half:]))
    assert list(frames(str(path), 0)) == list(frames(str(plain), 0))


@pytest.mark.parametrize("kind", ["ZLIB", "GZIP"])
def test_truncated_and_corrupt_compressed_files_are_refused(plain, kind):
    written = compress(plain, kind)
    content = written.read_bytes()
    rng = np.random.default_rng(7)
    for end in [*rng.integers(12, len(content), 20).tolist(), len(content) - 1]:
        written.write_bytes(content[:end])
        with pytest.raises(InputError, match=r"truncated|corrupt"):
            list(frames(str(written), 0))
    for place in rng.integers(12, len(content), 20).tolist():
        changed = bytearray(content)
        changed[place] ^= 0x10
        written.write_bytes(changed)
        with pytest.raises(InputError, match=r"truncated|corrupt"):
            list(frames(str(written), 0))


def test_position_beyond_the_end_is_refused(plain):
    written = compress(plain, "ZLIB")
    loader = load(written)
    for _ in range(RECORDS - 1):
        loader.get_samples()
    state = loader.state()
    write_records(str(plain), TOKENS[:3])
    compress(plain, "ZLIB")
    with pytest.raises(InputError, match=r"ends .* bytes before the checkpoint's data position"):
        load(written, restore_state=state).get_samples()
