"""Token records: order independent of the batch size, exact resuming, and all refusals."""

import gc
import itertools
import json
import os
import threading

import numpy as np
import pytest

from mesh_transformer.data.loader import TFRecordNewInputs
from mesh_transformer.data.prefetch import Prefetch
from mesh_transformer.data.tfrecords import features, frames, write_records
from mesh_transformer.storage.access import tensorflow
from mesh_transformer.util import InputError
from tests.support.fake_gcs import gcs_server

SEQ = 6
N_VOCAB = 500


@pytest.fixture
def files():
    """Token arrays of three files, 13 records in total, which most batch sizes do not divide."""
    generator = np.random.default_rng(3)
    return [generator.integers(0, N_VOCAB, (rows, SEQ + 1), np.uint32) for rows in (5, 1, 7)]


@pytest.fixture
def index(files, tmp_path):
    names = [f"part_{number}.tfrecords" for number in range(len(files))]
    for name, tokens in zip(names, files, strict=True):
        assert write_records(str(tmp_path / name), tokens) == len(tokens)
    path = tmp_path / "some.train.index"
    path.write_text("\n".join(names) + "\n")
    return path


def load(index, batch_size: int | tuple = 1, **options):
    return TFRecordNewInputs(str(index), batch_size, SEQ, n_vocab=N_VOCAB, **options)


def tokens_of(batch):
    """Return a batch's records, one per row."""
    obs, target = (batch[key].reshape(-1, SEQ) for key in ("obs", "target"))
    np.testing.assert_array_equal(obs[:, 1:], target[:, :-1])
    return np.concatenate((obs, target[:, -1:]), axis=1)


def take(loader, batches):
    return np.concatenate([tokens_of(batch) for batch in itertools.islice(loader, batches)])


@pytest.mark.parametrize("batch_size", [1, 2, 3, 13, (2, 2), (3, 4), (1, 11)])
def test_any_batch_size_repeats_the_files_records_in_order(index, files, batch_size):
    everything = np.concatenate(files)
    loader = load(index, batch_size)
    batches = [loader.get_samples() for _ in range(9)]
    shape = (batch_size,) if isinstance(batch_size, int) else batch_size
    for batch in batches:
        assert {(key, x.shape, str(x.dtype)) for key, x in batch.items()} == {
            (key, (*shape, SEQ), "uint32") for key in ("obs", "target")
        }
    actual = np.concatenate([tokens_of(batch) for batch in batches])
    expected = everything[np.arange(len(actual)) % len(everything)]
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("batch_size", [1, 4, 13])
def test_one_epoch_ends_after_its_last_full_batch(index, files, batch_size):
    everything = np.concatenate(files)
    full = len(everything) // batch_size * batch_size
    loader = load(index, batch_size, repeat=False)
    np.testing.assert_array_equal(take(loader, 100), everything[:full])
    for _ in range(2):  # the loader stays exhausted
        with pytest.raises(StopIteration):
            loader.get_samples()


def test_sample_once_starts_at_the_beginning_and_keeps_the_position(index, files):
    loader = load(index, 4)
    loader.get_samples()
    state = loader.state()
    for _ in range(2):
        once = take(loader.sample_once(), 100)
        np.testing.assert_array_equal(once, np.concatenate(files)[:12])
    assert loader.state() == state


@pytest.mark.quick(6)
@pytest.mark.parametrize("first", [1, 2, 5])
@pytest.mark.parametrize("second", [1, 3, (2, 2)])
def test_resume_at_every_batch_with_another_batch_size(index, files, first, second):
    everything = np.concatenate(files)
    loader = load(index, first)
    for done in range(0, 30, first):
        state = json.loads(json.dumps(loader.state()))
        resumed = take(load(index, second, restore_state=state), 5)
        expected = everything[(done + np.arange(len(resumed))) % len(everything)]
        np.testing.assert_array_equal(resumed, expected)
        loader.get_samples()


def test_restore_rewinds_a_loader_in_use(index):
    loader = load(index, 3)
    loader.get_samples()
    state, expected = loader.state(), take(loader, 7)
    loader.restore(state)
    assert loader.state() == state
    np.testing.assert_array_equal(take(loader, 7), expected)


def test_state_contains_the_position_of_the_next_record(index):
    loader = load(index, 4)
    take(loader, 4)  # 16 records: one epoch of 13 and 3 more
    state = loader.state()
    assert (state["epoch"], state["file"], state["record"]) == (1, 0, 3)


def test_resume_reads_nothing_before_the_position(index, tmp_path):
    loader = load(index, 1)
    take(loader, 9)
    state, expected = loader.state(), take(loader, 4)
    damaged = tmp_path / "part_2.tfrecords"
    content = bytearray(damaged.read_bytes())
    content[20] ^= 1  # in the third file's first record, which lies before the position
    damaged.write_bytes(content)
    np.testing.assert_array_equal(take(load(index, 1, restore_state=state), 4), expected)


def test_relative_paths_are_looked_up_beside_the_index_first(tmp_path, monkeypatch):
    """A file of the same name in the working directory may be of another record set."""
    in_working_directory, beside_index = np.zeros((2, SEQ + 1)), np.ones((2, SEQ + 1))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.index").write_text("a.tfrecords\n\n")
    monkeypatch.chdir(tmp_path)
    write_records("a.tfrecords", in_working_directory.astype(int))
    np.testing.assert_array_equal(take(load("data/a.index", 2), 1), in_working_directory)
    write_records(str(tmp_path / "data" / "a.tfrecords"), beside_index.astype(int))
    np.testing.assert_array_equal(take(load("data/a.index", 2), 1), beside_index)
    # As the original's indexes, which list paths relative to the working directory.
    (tmp_path / "data" / "b.index").write_text("data/a.tfrecords\n")
    np.testing.assert_array_equal(take(load("data/b.index", 2), 1), beside_index)


def test_a_uri_is_read_like_a_path(index, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.tfrecords").write_text("of another record set")
    with gcs_server(tmp_path) as (gcs, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        for name, number in (("a", 0), ("b", 2)):
            content = (tmp_path / f"part_{number}.tfrecords").read_bytes()
            gcs._put(("loader", f"{name}.tfrecords"), content)
        gcs._put(("loader", "some.index"), b"gs://loader/a.tfrecords\nb.tfrecords\n")
        expected = np.concatenate([files[0], files[2]])
        loader = load("gs://loader/some.index", 5)
        np.testing.assert_array_equal(take(loader, 2), expected[:10])
        resumed = load("gs://loader/some.index", 2, restore_state=loader.state())
        np.testing.assert_array_equal(take(resumed, 1), expected[10:])
        for path in ("gs://loader", "gs://loader/"):  # a folder with one index
            np.testing.assert_array_equal(take(load(path, 5), 2), expected[:10])
        del gcs.objects["loader", "some.index"]  # a folder of records
        np.testing.assert_array_equal(take(load("gs://loader", 5), 2), expected[:10])
        assert "gs://loader/absent.index: no such file" in refusal("gs://loader/absent.index")
        # Many files of one folder are listed, not asked for one by one.
        content = (tmp_path / "part_1.tfrecords").read_bytes()
        names = [f"many/{number}.tfrecords" for number in range(1200)]
        for name in names:
            gcs._put(("loader", name), content)
        for number in range(5000):  # below the folder, not in it
            gcs._put(("loader", f"many/more/{number}"), b"")
        gcs._put(("loader", "many.index"), "\n".join(f"gs://loader/{x}" for x in names).encode())
        before = gcs.requests
        loader = load("gs://loader/many.index", 5)
        assert gcs.requests - before < 20
        np.testing.assert_array_equal(take(loader, 2), np.concatenate([files[1]] * 10))
        loader.close()
        gcs._put(("loader", names[-1]), b"")
        assert f"{names[-1]} is empty, expected records" in refusal("gs://loader/many.index")


def test_tensorflow_reads_our_records(index, files, tmp_path):
    tf = tensorflow()
    dataset = tf.data.TFRecordDataset(str(tmp_path / "part_2.tfrecords"))
    schema = {"text": tf.io.FixedLenFeature([SEQ + 1], tf.int64)}
    parsed = [tf.io.parse_single_example(record, schema)["text"].numpy() for record in dataset]
    np.testing.assert_array_equal(np.stack(parsed), files[2])


@pytest.mark.parametrize("seed", range(4))
def test_records_are_tensorflows_bit_for_bit(seed, tmp_path):
    tf, generator = tensorflow(), np.random.default_rng(seed)
    edges = np.array([0, -1, 2**63 - 1, -(2**63), 127, 128], np.int64)
    records = [
        {
            name: generator.choice(edges, generator.integers(9)) + generator.integers(300)
            for name in generator.choice(["text", "labels", "input_mask", "ä"], 3, replace=False)
        }
        for _ in range(20)
    ]
    write_records(str(tmp_path / "ours"), records)
    with tf.io.TFRecordWriter(str(tmp_path / "theirs")) as writer:
        for record in records:
            lists = {name: tf.train.Int64List(value=x.tolist()) for name, x in record.items()}
            feature = {name: tf.train.Feature(int64_list=x) for name, x in lists.items()}
            example = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(example.SerializeToString(deterministic=True))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    for record, (payload, _) in zip(records, frames(str(tmp_path / "theirs"), 0), strict=True):
        actual = features(payload, "here")
        assert actual.keys() == record.keys()
        for name, values in actual.items():
            np.testing.assert_array_equal(values, record[name])


def refusal(index, batch_size: int | tuple = 1, batches=1, **options):
    with pytest.raises(InputError) as caught:
        take(load(index, batch_size, **options), batches)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_index_is_refused(tmp_path):
    assert "absent.index: no such file" in refusal(tmp_path / "absent.index")


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_an_empty_index_is_refused(tmp_path, content):
    path = tmp_path / "empty.index"
    path.write_text(content)
    assert "empty.index is empty" in refusal(path)


def test_binary_file_is_refused_as_an_index(index, tmp_path):
    (tmp_path / "bytes.index").write_bytes(b"\xff\xfe\x00")
    assert "bytes.index: not text" in refusal(tmp_path / "bytes.index")


def test_a_missing_record_file_is_refused_at_once(index):
    with index.open("a") as file:
        file.write("absent.tfrecords\n")
    message = refusal(index)
    assert "absent.tfrecords: no such file; index " in message


def test_an_empty_record_file_is_refused_at_once(index, tmp_path):
    (tmp_path / "part_1.tfrecords").write_bytes(b"")
    assert "part_1.tfrecords is empty, expected records" in refusal(index)


def record_starts(path):
    """Return the byte offsets of the records, from their length fields, and the file size."""
    content, starts = path.read_bytes(), [0]
    while starts[-1] < len(content):
        length = int.from_bytes(content[starts[-1] : starts[-1] + 8], "little")
        starts.append(starts[-1] + 12 + length + 4)
    return starts


def test_error_of_truncation_at_any_byte_names_the_file_and_the_records_offset(index, tmp_path):
    path = tmp_path / "part_2.tfrecords"
    starts, content = record_starts(path), path.read_bytes()
    for kept in range(starts[3] + 1, starts[4]):
        path.write_bytes(content[:kept])
        message = refusal(index, batches=12)
        assert f"part_2.tfrecords: truncated in the record at byte {starts[3]};" in message


def test_error_of_a_flipped_bit_names_the_file_and_the_records_offset(index, tmp_path):
    path = tmp_path / "part_2.tfrecords"
    starts, content = record_starts(path), path.read_bytes()
    for byte in range(starts[3], starts[4]):
        damaged = bytearray(content)
        damaged[byte] ^= 0x10
        path.write_bytes(damaged)
        message = refusal(index, batches=12)
        assert f"part_2.tfrecords: corrupt record at byte {starts[3]} " in message


def test_records_before_the_damage_are_returned(index, files, tmp_path):
    path = tmp_path / "part_2.tfrecords"
    path.write_bytes(path.read_bytes()[: record_starts(path)[3] + 5])
    loader = load(index)
    np.testing.assert_array_equal(take(loader, 9), np.concatenate(files)[:9])
    for _ in range(2):
        with pytest.raises(InputError, match="truncated"):
            loader.get_samples()
    assert loader.state()["record"] == 3


def write_example(path, features):
    tf = tensorflow()
    example = tf.train.Example(features=tf.train.Features(feature=features))
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(example.SerializeToString())


def test_a_record_without_text_is_refused(index, tmp_path):
    tf = tensorflow()
    other = tf.train.Feature(int64_list=tf.train.Int64List(value=[1]))
    write_example(tmp_path / "part_1.tfrecords", {"tokens": other})
    message = refusal(index, batches=6)
    assert "part_1.tfrecords: record 0 " in message
    assert "no int64 feature text, found ['tokens']" in message


def test_a_record_of_raw_text_is_refused(index, tmp_path):
    tf = tensorflow()
    raw = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"to be"]))
    write_example(tmp_path / "part_1.tfrecords", {"text": raw})
    assert "no int64 feature text, found ['text']" in refusal(index, batches=6)


def test_record_that_is_not_an_example_is_refused(index, tmp_path):
    with tensorflow().io.TFRecordWriter(str(tmp_path / "part_1.tfrecords")) as writer:
        writer.write(b"\xff\xff\xff")
    assert "record 0 (the first is 0) is not a tf.train.Example" in refusal(index, batches=6)


def test_a_record_of_another_length_is_refused(index, files, tmp_path):
    rows = [*files[2][:2], files[2][2][:-1]]
    write_records(str(tmp_path / "part_2.tfrecords"), rows)
    message = refusal(index, batches=9)
    assert f"part_2.tfrecords: record 2 (the first is 0) holds {SEQ} tokens" in message
    assert f"config key seq {SEQ} needs {SEQ + 1}" in message


@pytest.mark.parametrize("token", [N_VOCAB, 2**40, -1])
def test_a_token_outside_the_vocabulary_is_refused(index, files, tmp_path, token):
    rows = files[2].astype(np.int64)
    rows[4, 3] = token
    write_records(str(tmp_path / "part_2.tfrecords"), rows)
    message = refusal(index, batches=11)
    assert f"part_2.tfrecords: record 4 (the first is 0) holds token id {token}, " in message
    assert f"n_vocab is {N_VOCAB}" in message


@pytest.mark.parametrize("repeat", [True, False])
def test_fewer_records_than_one_batch_are_refused(index, repeat):
    assert "found 13 records in total, but one batch needs 14" in refusal(
        index, (2, 7), repeat=repeat
    )


def test_the_state_of_another_index_is_refused(index):
    state = load(index).state()
    index.write_text("part_0.tfrecords\npart_2.tfrecords\n")
    for old in ({"used": ["a_9.tfrecords"], "file_idx": 3}, []):
        assert "positions of the original mesh-transformer-jax cannot" in refusal(
            index, restore_state=old
        )
    assert "lists other files than when the checkpoint was saved" in refusal(
        index, restore_state=state
    )


def test_a_state_past_the_files_end_is_refused(index, tmp_path, files):
    loader = load(index)
    take(loader, 5)
    write_records(str(tmp_path / "part_0.tfrecords"), files[0][:3])
    assert "data position is byte" in refusal(index, restore_state=loader.state())


@pytest.mark.parametrize("change", [{"record": -1}, {"file": 3}, {"offset": None}, {"epoch": "1"}])
def test_a_damaged_state_is_refused(index, change):
    state = load(index).state() | change
    assert "expected a count for each of" in refusal(index, restore_state=state)


def test_failed_write_keeps_the_existing_file(tmp_path, files):
    path = tmp_path / "a.tfrecords"
    write_records(str(path), files[0])
    before = path.read_bytes()

    def failing():
        yield files[1][0]
        raise InputError("no more")

    with pytest.raises(InputError, match="no more"):
        write_records(str(path), failing())
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.tfrecords"]


def test_writing_into_a_missing_folder_is_refused(tmp_path, files):
    with pytest.raises(InputError, match=r"absent.a\.tfrecords cannot be written"):
        write_records(str(tmp_path / "absent" / "a.tfrecords"), files[0])


@pytest.mark.slow
def test_prefetch_thread_ends_when_closed_or_garbage_collected():
    before = set(threading.enumerate())
    for depth in (1, 4):
        closed, collected = (Prefetch(itertools.count(), depth) for _ in range(2))
        assert [next(closed) for _ in range(10)] == list(range(10))
        assert next(collected) == 0
        closed.close()
        del collected
        gc.collect()
    assert set(threading.enumerate()) <= before


def test_prefetch_raises_the_iterators_error_in_order_and_again():
    def failing():
        yield 1
        raise KeyError("gone")

    items = Prefetch(failing(), 4)
    assert next(items) == 1
    for _ in range(2):
        with pytest.raises(KeyError, match="gone"):
            next(items)
