"""Shuffling, mixtures and masks: the order of records, and exact resuming."""

import collections
import itertools
import json
import math

import numpy as np
import pytest

from mesh_transformer.data import record_set
from mesh_transformer.data.loader import TFRecordNewInputs, epochs
from mesh_transformer.data.record_set import RecordSet
from mesh_transformer.data.tfrecords import frames, write_records
from mesh_transformer.util import InputError

SEQ = 3
FILES = (5, 1, 7, 11)


def write_index(folder, name, files=FILES, first=0):
    """Write an index and its records; return the index file's path.

    Records are numbered from `first`, and all tokens of a record are its number.
    """
    folder.mkdir(exist_ok=True)
    for part, count in enumerate(files):
        rows = np.arange(first, first + count)[:, None].repeat(SEQ + 1, 1)
        write_records(str(folder / f"{name}_{part}.tfrecords"), rows)
        first += count
    index = folder / f"{name}.index"
    index.write_text("".join(f"{name}_{part}.tfrecords\n" for part in range(len(files))))
    return str(index)


def numbers(loader, batches):
    """Return the record numbers of the next batches."""
    return [
        int(n) for batch in itertools.islice(loader, batches) for n in batch["obs"][..., 0].flat
    ]


def load(index, batch_size=1, **options):
    return TFRecordNewInputs(index, batch_size, SEQ, **options)


@pytest.mark.parametrize("shuffle_buffer", [1, 4, 24, 100])
def test_every_epoch_has_every_record_once_in_its_own_order(tmp_path, shuffle_buffer):
    index = write_index(tmp_path, "a")
    actual = numbers(load(index, 5, shuffle_buffer=shuffle_buffer, seed=3), 24)
    epochs = [actual[start : start + 24] for start in range(0, 120, 24)]
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 3  # two of the 24 orders of files may coincide
    assert epochs[0] != list(range(24))
    assert numbers(load(index, 5, shuffle_buffer=shuffle_buffer, seed=3), 24) == actual
    assert numbers(load(index, 5, shuffle_buffer=shuffle_buffer, seed=4), 24) != actual
    if shuffle_buffer == 1:  # files are shuffled, but not the records inside them
        parts = np.split(np.arange(24), np.cumsum(FILES)[:-1])
        begins = sorted(epochs[0].index(part[0]) for part in parts)
        whole = [epochs[0][begin : begin + len(part)] for part in parts for begin in begins]
        assert all(part.tolist() in whole for part in parts)


def test_one_epoch_of_a_shuffled_set_ends(tmp_path):
    loader = load(write_index(tmp_path, "a"), 5, shuffle_buffer=7, repeat=False)
    assert len(set(numbers(loader, 100))) == 20  # four full batches of the 24 records


def test_file_listed_twice_is_read_twice(tmp_path):
    index = write_index(tmp_path, "a", (2, 3))
    with open(index, "a") as file:
        file.write("a_0.tfrecords\n")
    expected = [0, 1, 2, 3, 4, 0, 1] * 2
    loader = load(index)
    for done in range(7):
        resumed = load(index, restore_state=loader.state())
        assert numbers(resumed, 7) == expected[done : done + 7]
        resumed.close()
        loader.get_samples()
    assert collections.Counter(numbers(load(index, shuffle_buffer=3), 7)) == collections.Counter(
        expected[:7]
    )


def test_sets_are_mixed_by_weight(tmp_path):
    sets = {
        write_index(tmp_path, "a", (50, 60)): 3,
        write_index(tmp_path, "b", (7,), first=1000): 1.0,
        write_index(tmp_path, "c", (3,), first=2000): 0,
    }
    actual = numbers(load(sets, 10, seed=1), 1000)
    counts = collections.Counter(number // 1000 for number in actual)
    # 10,000 draws: a share of 0.75 is within 0.02, except for about one seed in 300,000.
    assert counts[0] / 10_000 == pytest.approx(0.75, abs=0.02)
    assert set(counts) == {0, 1}
    first_set = [number for number in actual if number < 1000]
    # Each set in its own order, repeatedly.
    assert first_set == [n % 110 for n in range(len(first_set))]
    second_set = [number for number in actual if number >= 1000]
    assert second_set == [1000 + n % 7 for n in range(len(second_set))]


def test_weights_need_not_sum_to_one(tmp_path):
    a, b = write_index(tmp_path, "a"), write_index(tmp_path, "b", first=100)
    assert numbers(load({a: 2, b: 6}), 50) == numbers(load({a: 0.25, b: 0.75}), 50)


def test_weights_change_linearly_between_updates(tmp_path):
    """From 0 to the same share of the records as the other set, in updates of 50 records."""
    a, b = write_index(tmp_path, "a", (97,)), write_index(tmp_path, "b", (31,), first=1000)
    sets = {a: 2.0, b: [[100, 0], [500, 2]]}
    batches = [numbers(batch, 1) for batch in [load(sets, 50, seed=1)] for _ in range(600)]
    shares = np.array([np.mean(np.array(batch) >= 1000) for batch in batches])
    assert not shares[:101].any()
    weights = np.interp(np.arange(600), [100, 500], [0, 2])
    # Means over 5,000 records: a share of at most 0.5 is within 0.03, except for one in 45,000.
    means = (shares.reshape(6, 100).mean(axis=1), (weights / (weights + 2)).reshape(6, 100))
    np.testing.assert_allclose(means[0], means[1].mean(axis=1), atol=0.03)
    every = list(itertools.chain.from_iterable(batches))
    assert [n for n in every if n < 1000] == [n % 97 for n in range(sum(n < 1000 for n in every))]
    loader = load(sets, 50, seed=1)
    numbers(loader, 299)
    resumed = load(sets, (2, 25), seed=1)
    resumed.restore(loader.state(), 299)
    assert numbers(resumed, 301) == every[299 * 50 :]
    resumed = load(sets, 50, seed=1, restore_state=loader.state())
    assert numbers(resumed, 301) == every[299 * 50 :]


@pytest.mark.parametrize(
    "weight", [[], [[1, 2], [1, 3]], [[5, 1.0], [2, 1.0]], [[0]], [[-1, 2.0]], [[0, 1.0, 2.0]]]
)
def test_invalid_changes_of_weights_are_refused(tmp_path, weight):
    a, b = write_index(tmp_path, "a"), write_index(tmp_path, "b", first=100)
    with pytest.raises(InputError, match=r"train_set: the weight .* expected pairs of a number of"):
        load({a: 1.0, b: weight})
    with pytest.raises(InputError, match=r"the weights in update 7 are \[0.0, 0.0\], expected fin"):
        load({a: [[0, 1], [7, 0]], b: 0})


def test_epochs_are_counted_by_the_names_of_the_indexes():
    after = {"sets": [{"epoch": 3}, {"epoch": 0}], "drawn": 9}
    mixture = {"x/a.index": 1.0, "y/b/": [[0, 1.0], [1, 2.0]]}
    assert epochs(mixture, after) == {"a": 3, "b": 0}
    assert epochs({"x/a": 1, "y/a": 1}, after) == {"x/a": 3, "y/a": 0}
    assert epochs("a.index", {"epoch": 1}) == {}
    assert epochs(None, {"sequence": 4}) == {}


@pytest.mark.quick(1)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("shuffle_buffer", [0, 1, 4, 9])
def test_resume_at_any_record_with_another_batch_size(tmp_path, shuffle_buffer, mixed):
    index = write_index(tmp_path, "a")
    if mixed:
        index = {index: 1.0, write_index(tmp_path, "b", (2, 6), first=100): 0.5}
    options = {"shuffle_buffer": shuffle_buffer, "seed": 7}
    expected = numbers(load(index, **options), 200)
    loader = load(index, **options)
    for done in range(101):
        state = json.loads(json.dumps(loader.state()))
        batch_size = [1, 3, (2, 2), 7][done % 4]
        resumed = load(index, batch_size, restore_state=state, **options)
        actual = numbers(resumed, 6)
        assert actual == expected[done : done + len(actual)], done
        resumed.close()
        loader.get_samples()


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_that_read_their_own_columns_read_the_whole_batch(tmp_path, hosts):
    index = {write_index(tmp_path, "a"): 2.0, write_index(tmp_path, "b", (2, 6), first=100): 1.0}
    options = {"shuffle_buffer": 4, "seed": 7}
    expected = load(index, (3, 4), **options)
    parts = np.split(np.arange(4), hosts)
    state = None
    for _ in range(10):  # each batch is read by new loaders that resume from the last state
        loaders = [
            load(index, (3, 4), columns=part.tolist(), restore_state=state, **options)
            for part in parts
        ]
        batches = [loader.get_samples() for loader in loaders]
        for name, rows in expected.get_samples().items():
            np.testing.assert_array_equal(
                np.concatenate([batch[name] for batch in batches], axis=1), rows
            )
        states = [loader.state() for loader in loaders]
        assert states == [expected.state()] * hosts
        state = states[0]
        for loader in loaders:
            loader.close()


@pytest.mark.quick(1)
@pytest.mark.parametrize("shuffle_buffer", [0, 50])
def test_cost_of_resuming_does_not_depend_on_the_position(tmp_path, monkeypatch, shuffle_buffer):
    index = write_index(tmp_path, "a", (2000, 2000))
    options = {"shuffle_buffer": shuffle_buffer}
    loader, states = load(index, 10, **options), []
    for _ in range(2):
        loader.get_samples()
        states.append(loader.state())
        collections.deque(itertools.islice(loader, 957), maxlen=0)
    loader.close()
    assert states[1]["epoch"] == 2
    read = []

    def counted(*arguments):
        for frame in frames(*arguments):
            read.append(arguments[0])
            yield frame

    monkeypatch.setattr(record_set, "frames", counted)
    counts = []
    for state in states:
        read.clear()
        source = RecordSet(index, SEQ, None, shuffle=shuffle_buffer)
        rows = source.records(source.checked_position(state), repeat=True)
        collections.deque(itertools.islice(rows, 10), maxlen=0)
        counts.append(len(read))
    # The set's first record, and the requested records or the shuffle block that contains them.
    assert counts == [1 + max(10, shuffle_buffer)] * 2


def write_masked(folder, name, rows):
    """Write an index and its masked records (input_ids, labels, input_mask); return its path."""
    named = [dict(zip(("input_ids", "labels", "input_mask"), row, strict=True)) for row in rows]
    write_records(str(folder / f"{name}.tfrecords"), named)
    (folder / f"{name}.index").write_text(f"{name}.tfrecords\n")
    return str(folder / f"{name}.index")


def test_masked_records_are_returned_with_their_masks(tmp_path):
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 50, (6, 3, SEQ))
    rows[:, 2] %= 2
    loader = load(write_masked(tmp_path, "a", rows), (1, 2), n_vocab=50, repeat=False)
    batches = list(loader)
    for index, key in enumerate(("obs", "target", "loss_mask")):
        actual = np.concatenate([batch[key] for batch in batches]).reshape(6, SEQ)
        np.testing.assert_array_equal(actual, rows[:, index])
        assert actual.dtype == (np.uint8 if key == "loss_mask" else np.uint32)


def test_unmasked_records_mixed_with_masked_ones_have_loss_everywhere(tmp_path):
    rows = np.ones((3, 3, SEQ), int)
    rows[:, 2] = 0
    sets = {write_index(tmp_path, "a", first=2): 1.0, write_masked(tmp_path, "b", rows): 1.0}
    for batch in itertools.islice(load(sets, 4), 20):
        masked = batch["obs"][:, 0] == 1
        np.testing.assert_array_equal(
            batch["loss_mask"], np.where(masked, 0, 1)[:, None] * rows[0, 0]
        )
    assert "loss_mask" not in load(write_index(tmp_path, "a")).get_samples()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"input_mask": [0, 1, 2]}, "feature input_mask has values other than 0 and 1"),
        ({"labels": [1, 2]}, "holds 2 tokens, but config key seq 3 needs 3; set seq to 2"),
        ({"labels": [1, 2, 50]}, "holds token id 50, outside the vocabulary"),
        ({"input_mask": None}, "has no int64 feature input_mask, found ['input_ids', 'labels']"),
    ],
    ids=str,
)
def test_bad_masked_records_are_refused(tmp_path, change, line):
    row = {"input_ids": [1, 2, 3], "labels": [2, 3, 4], "input_mask": [0, 1, 1]} | change
    row = {name: np.array(values) for name, values in row.items() if values is not None}
    write_records(str(tmp_path / "a.tfrecords"), [row])
    (tmp_path / "a.index").write_text("a.tfrecords\n")
    with pytest.raises(InputError) as caught:
        load(str(tmp_path / "a.index"), n_vocab=50).get_samples()
    assert "a.tfrecords: record 0 (the first is 0)" in str(caught.value)
    assert line in str(caught.value)


@pytest.mark.parametrize(
    "weights", [[], [0.0, 0.0], [1.0, -1.0], [1.0, math.nan], [math.inf, 1.0], [1e308, 1e308]]
)
def test_invalid_weights_are_refused(tmp_path, weights):
    sets = {write_index(tmp_path, f"{n}"): weight for n, weight in enumerate(weights)}
    with pytest.raises(
        InputError, match="expected finite ones, none below 0 and at least one above 0"
    ):
        load(sets)


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        (
            {},
            {"shuffle_buffer": 3},
            "with shuffle_buffer 0, but the data is now read with shuffle_buffer 3, seed 0",
        ),
        (
            {"shuffle_buffer": 3},
            {},
            "with shuffle_buffer 3, seed 0, but the data is now read with shuffle_buffer 0",
        ),
        (
            {"shuffle_buffer": 3, "seed": 1},
            {"shuffle_buffer": 3},
            "3, seed 1, but the data is now read with shuffle_buffer 3",
        ),
    ],
    ids=str,
)
def test_position_in_another_order_is_refused(tmp_path, before, after, line):
    index = write_index(tmp_path, "a")
    state = load(index, **before).state()
    with pytest.raises(InputError, match=line):
        load(index, restore_state=state, **after)


def test_position_in_another_mixture_is_refused(tmp_path):
    a, b = write_index(tmp_path, "a"), write_index(tmp_path, "b", (2, 3))
    state = load({a: 1, b: 1}).state()
    with pytest.raises(InputError, match="a mixture of 2 sets, but train_set now has 1"):
        load(a, restore_state=state)
    with pytest.raises(InputError, match="lists other files than when the checkpoint was saved"):
        load({b: 1, a: 1}, restore_state=state)
    load({a: 1, b: 5}, restore_state=state).close()  # changed weights can resume


@pytest.mark.parametrize("options", [{}, {"shuffle_buffer": 4, "seed": 3}])
def test_folder_is_read_as_an_index_of_its_files(tmp_path, monkeypatch, options):
    """A run that was begun with one can be resumed with the other."""
    index = write_index(tmp_path / "set", "a")
    expected = load(index, 5, **options)
    assert numbers(load(str(tmp_path / "set"), 5, **options), 7) == numbers(expected, 7)
    (tmp_path / "set" / "a.index").unlink()
    (tmp_path / "set" / ".a_9.tfrecords").write_bytes(b"a hidden draft")
    monkeypatch.chdir(tmp_path)
    write_index(tmp_path, "a", first=100)  # the files of the working directory have the same names
    (tmp_path / "a.index").unlink()
    for path in ("set", "set/", str(tmp_path / "set")):
        loader = load(path, 5, restore_state=expected.state(), **options)
        assert numbers(loader, 7) == numbers(expected, 7)
        expected.restore(loader.state())
    assert record_set.set_size("set") == (24, SEQ)
    assert record_set.tokenizer_of("set") is None
    mixed = load({"set": 1, write_index(tmp_path / "b", "b", (3,), first=50): 1}, 50, seed=1)
    assert {*range(24), *range(50, 53)} == set(numbers(mixed, 4))
    write_records(str(tmp_path / "set" / "b.tfrecords"), np.zeros((1, SEQ + 1), int))
    with pytest.raises(InputError, match=r"^folder set lists other files than when the checkpoint"):
        load("set", 5, restore_state=expected.state(), **options)


def test_folder_without_one_record_set_is_refused(tmp_path):
    folder = tmp_path / "set"
    index = write_index(folder, "a")
    write_index(folder, "b")
    with pytest.raises(
        InputError, match=rf"has the indexes a\.index, b\.index; .*such as {index}$"
    ):
        load(str(folder))
    empty = folder / "sub"
    empty.mkdir()
    with pytest.raises(InputError, match=r"neither an index nor \.tfrecords or \.tfrecord files"):
        load(str(empty))
    (empty / "c.tfrecords").touch()
    with pytest.raises(InputError, match=rf"c\.tfrecords is empty.*remove it from folder {empty}$"):
        load(str(empty))
