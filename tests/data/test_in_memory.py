"""Batches from arrays, datasets and iterables: their contents, and their exact positions."""

from collections import UserDict
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
import pytest
from transformers import BatchEncoding

from mesh_transformer.data.in_memory import InMemoryTrainSet, InOrder
from mesh_transformer.data.tokenizer import byte_tokenizer
from mesh_transformer.util import InputError

SEQ = 7


class TorchDataset:
    """A dataset as torch's: only `__len__` and `__getitem__`, which knows no slices."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        assert type(index) is int
        return self.rows[index]


class Endless:
    """An iterable that can be iterated again, and never ends."""

    def __iter__(self):
        rng = np.random.default_rng(3)
        while True:
            yield rng.integers(0, 50, SEQ + 1)


def rows_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, 50, (count, SEQ + 1))


def open_set(data, shape=(2, 3), seed=5):
    return InMemoryTrainSet(data, SEQ, lambda _: shape, seed)


def sequences(batch):
    """Return the sequences [A * B, T + 1] of a batch, in their order."""
    obs, target = (batch[key].reshape(-1, SEQ) for key in ("obs", "target"))
    assert (obs[:, 1:] == target[:, :-1]).all()
    return np.concatenate((obs, target[:, -1:]), axis=1)


@pytest.mark.parametrize("library", ["memmap", "torch", "jax"])
def test_windows_of_a_text_are_pieces_of_it_from_all_places(tmp_path, library):
    tokens = np.random.default_rng(0).permutation(40).astype(np.uint16)
    tokens.tofile(tmp_path / "train.bin")  # as nanoGPT's
    data = {
        "memmap": lambda: np.memmap(tmp_path / "train.bin", np.uint16, "r"),
        "torch": lambda: pytest.importorskip("torch").tensor(tokens.astype(np.int64)),
        "jax": lambda: jnp.asarray(tokens),
    }[library]()
    train_set, starts = open_set(data), set()
    for _ in range(100):
        batch = train_set.get_samples()
        assert batch["obs"].shape == (2, 3, SEQ)
        for row in sequences(batch):
            start = int(np.flatnonzero(tokens == row[0])[0])
            np.testing.assert_array_equal(row, tokens[start : start + SEQ + 1])
            starts.add(start)
    # 600 draws of 33 places: that one is missed has a probability of 33 * (32 / 33)^600 < 1e-6.
    assert starts == set(range(40 - SEQ))
    train_set.close()


@pytest.mark.parametrize("kind", [list, np.array, TorchDataset])
def test_each_epoch_has_every_item_once_in_an_order_of_its_own(kind):
    rows = rows_of(10)
    train_set = open_set(kind(list(rows)), (1, 5))
    epochs = [
        np.concatenate([sequences(train_set.get_samples()) for _ in range(2)]) for _ in range(3)
    ]
    for epoch in epochs:
        np.testing.assert_array_equal(*(np.array(sorted(map(tuple, x))) for x in (epoch, rows)))
    assert not (epochs[0] == epochs[1]).all()
    assert not (epochs[1] == epochs[2]).all()
    train_set.close()


def test_an_iterable_is_used_once_in_its_order():
    rows = rows_of(8)
    train_set = open_set((row for row in rows), (1, 3))
    read = [sequences(train_set.get_samples()) for _ in range(2)]
    np.testing.assert_array_equal(np.concatenate(read), rows[:6])
    with pytest.raises(StopIteration):  # the last two are less than a batch
        train_set.get_samples()
    train_set.close()


@pytest.mark.parametrize(
    "data", [np.arange(100), list(rows_of(10)), Endless()], ids=["windows", "epochs", "iterable"]
)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_restored_position_gives_the_same_batches(data, at):
    whole, resumed = open_set(data), open_set(data)
    for _ in range(at):
        whole.get_samples()
    resumed.restore(whole.state(), at)
    for _ in range(3):
        expected, actual = whole.get_samples(), resumed.get_samples()
        for key in expected:
            np.testing.assert_array_equal(actual[key], expected[key])
    assert resumed.state() == whole.state()
    whole.close()
    resumed.close()


def test_a_ramp_of_batches_is_continued_at_a_restored_position():
    def size_of(batches):
        return min(1 + batches, 3), 2

    data = list(rows_of(30))
    whole = InMemoryTrainSet(data, SEQ, size_of, 0)
    sizes = [len(whole.get_samples()["obs"]) for _ in range(2)]
    assert sizes == [1, 2]
    resumed = InMemoryTrainSet(data, SEQ, size_of, 0)
    resumed.restore(whole.state(), 2)
    expected, actual = whole.get_samples(), resumed.get_samples()
    assert len(actual["obs"]) == 3
    np.testing.assert_array_equal(actual["obs"], expected["obs"])
    whole.close()
    resumed.close()


def test_pairs_and_dicts_are_sequences_too():
    obs, target = rows_of(1)[0, :-1], rows_of(1, seed=1)[0, 1:]
    target[:3] = -1  # does not count
    [pair] = InOrder([(obs, target)], SEQ, 4)
    assert pair["target"].min() >= 0
    np.testing.assert_array_equal(pair["loss_mask"], [[0] * 3 + [1] * (SEQ - 3)])
    np.testing.assert_array_equal(pair["target"][0, 3:], target[3:])
    segments = np.repeat([1, 2], [3, SEQ - 3])
    given = {"obs": obs, "target": np.abs(target), "segment_ids": segments}
    [read] = InOrder([given], SEQ, 4)
    assert read.keys() == given.keys()
    for key in given:
        np.testing.assert_array_equal(read[key], given[key][None])
    [ids] = InOrder([{"input_ids": [*obs, 5]}], SEQ, 4)
    np.testing.assert_array_equal(sequences(ids), [[*obs, 5]])


def test_items_for_transformers_count_their_labels_and_no_padding():
    tokens = rows_of(1)[0]
    labels, padding = np.where(np.arange(SEQ + 1) < 3, -100, tokens), np.arange(SEQ + 1) < 6
    item = {"input_ids": tokens, "labels": labels, "attention_mask": padding.astype(int)}
    [row] = InOrder([item], SEQ, 1)
    np.testing.assert_array_equal(row["obs"][0], tokens[:-1])
    np.testing.assert_array_equal(row["loss_mask"][0], [0, 0, 1, 1, 1, 0, 0])
    counted = row["loss_mask"][0] == 1
    np.testing.assert_array_equal(row["target"][0][counted], tokens[1:][counted])
    [row] = InOrder([item | {"labels": None}], SEQ, 1)
    np.testing.assert_array_equal(row["loss_mask"][0], [1, 1, 1, 1, 1, 0, 0])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int64])
def test_padding_never_counts_whatever_the_dtype_of_the_tokens(dtype):
    tokens = np.arange(SEQ + 1, dtype=dtype)
    item = {"input_ids": tokens, "attention_mask": (tokens < 5).astype(dtype)}
    for given in (item, item | {"labels": tokens}):
        [row] = InOrder([given], SEQ, 1)
        np.testing.assert_array_equal(row["loss_mask"][0], np.arange(1, SEQ + 1) < 5)
        np.testing.assert_array_equal(row["target"][0][:4], [1, 2, 3, 4])
        assert row["target"].max() == 4


def test_any_mapping_is_an_item():
    item = {"input_ids": list(range(SEQ + 1)), "attention_mask": [1] * (SEQ - 1) + [0, 0]}
    [expected] = InOrder([item], SEQ, 1)
    for mapping in (BatchEncoding(item), UserDict(item), MappingProxyType(item)):
        [row] = InOrder([mapping], SEQ, 1)
        assert row.keys() == expected.keys()
        for key, array in expected.items():
            np.testing.assert_array_equal(row[key], array)


def test_output_of_a_tokenizer_is_an_item():
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    [row] = InOrder([tokenizer("hello", padding="max_length", max_length=SEQ + 1)], SEQ, 1)
    np.testing.assert_array_equal(row["obs"], [[*b"hello", 256, 256]])
    np.testing.assert_array_equal(row["loss_mask"], [[1, 1, 1, 1, 0, 0, 0]])


def test_validation_reads_a_dataset_that_does_not_end_by_itself():
    class Windows:
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return np.arange(index, index + SEQ + 1)

    assert sum(len(batch["obs"]) for batch in InOrder(Windows(), SEQ, 2)) == 5


def test_validation_reads_every_token_of_an_array_once():
    tokens = np.arange(3 * SEQ + 1 + 4)  # the last 4 tokens do not fill a window
    batches = list(InOrder(tokens, SEQ, 2))
    assert [len(batch["obs"]) for batch in batches] == [2, 1]
    targets = np.concatenate([batch["target"].ravel() for batch in batches])
    np.testing.assert_array_equal(targets, np.arange(1, 3 * SEQ + 1))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.arange(SEQ), "data has 7 tokens, expected more than seq (7)"),
        ([], "data has no items, expected at least one sequence of tokens"),
        ({"obs": [1]}, "data is of type dict, expected an array, a dataset or an iterable"),
        (3, "data is of type int, expected"),
        ([3, 4], "an item of data is a int; expected an array of seq + 1 token ids"),
        (np.zeros((4, 2, 3)), "an item of data is a ndarray of shape (2, 3); expected"),
        ([{"obs": [1, 2]}], "an item of data is a dict; expected"),
        ([{"obs": [1, 2], "x": [3]}], "or with input_ids; found the keys obs, x"),
        (
            BatchEncoding({"input_ids": [[1, 2]]}),
            "data is of type BatchEncoding, expected an",
        ),
        (
            [([1, 2], [1, 2, 3])],
            "an item of data has arrays of different lengths: 2 (obs), 3 (target)",
        ),
        (
            [{"input_ids": [1, 2], "attention_mask": [0, 1]}] * 2,
            "padded at its start; pad at the end",
        ),
        (
            [{"input_ids": np.arange(5), "attention_mask": np.ones(4)}],
            "an item of data has attention_mask of shape (4,), expected (5,), that of input_ids",
        ),
        (
            [{"input_ids": np.arange(5), "labels": np.arange(4)}],
            "an item of data has labels of shape (4,), expected (5,), that of input_ids",
        ),
        (
            [[1, 2, 3], ([1, 2], [2, 3])],
            "some items of data have loss_mask, obs, target and some obs",
        ),
        ([[1, [2, 3]]] * 2, "an item of data has [1, [2, 3]]; expected an array of"),
        ([([1, None], [None, 2])] * 2, "an item of data has [1, None]; expected an array of"),
        ([{"input_ids": [1, 2], "labels": ["1", "2"]}] * 2, "an item of data has ['1', '2']; "),
        ([[1, 2, 3], [1, 2]], "items of data have 1 and 2 positions; give equal lengths"),
    ],
)
def test_unusable_data_are_refused(data, message):
    with pytest.raises(InputError) as caught:
        open_set(data, (1, 2)).get_samples()
    assert message in str(caught.value)


def test_an_iterator_cannot_go_back():
    train_set = open_set(iter(rows_of(20)))
    first = train_set.state()
    train_set.get_samples()
    train_set.restore(first)
    with pytest.raises(InputError, match="data is an iterator, which cannot go back; give"):
        train_set.get_samples()


def test_an_iterator_continues_after_items_that_a_run_has_used():
    rows = rows_of(20)
    train_set = open_set(iter(rows), (1, 2))
    train_set.restore({"sequence": 6}, 3)
    np.testing.assert_array_equal(sequences(train_set.get_samples()), rows[6:8])
    train_set.close()
