"""Tensor files, compared with the libraries that define the formats, and damaged files."""

import json
import math
import pickle
import re
import shutil
import struct
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from mesh_transformer.checkpoint import hf_files
from mesh_transformer.checkpoint.hf_files import Tensor
from mesh_transformer.util import InputError

DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
SINGLE = "model.safetensors"
PICKLED = "pytorch_model.bin"


def random_arrays(seed, count=12):
    rng = np.random.default_rng(seed)
    arrays = {}
    for i in range(count):
        shape = tuple(rng.integers(1, 9, rng.integers(0, 4)))
        arrays[f"leaf.{i}"] = np.asarray(rng.standard_normal(shape)).astype(DTYPES[i % 3])
    return arrays


def write(folder, arrays, shard_bytes=10**9):
    tensors = [Tensor(k, v.dtype, v.shape, lambda v=v: v) for k, v in arrays.items()]
    with tqdm(total=sum(v.nbytes for v in arrays.values()), disable=True) as bar:
        hf_files.write(str(folder), tensors, shard_bytes, bar)


def read_all(folder):
    return {name: stored.read() for name, stored in hf_files.find(str(folder)).items()}


def as_torch(array):
    if array.dtype == ml_dtypes.bfloat16:
        return torch.tensor(array.view(np.uint16)).view(torch.bfloat16)
    return torch.tensor(array)


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert actual[name].dtype == values.dtype
        assert actual[name].shape == values.shape
        assert actual[name].tobytes() == values.tobytes()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shard_bytes", [10**9, 500, 1])
def test_safetensors_library_reads_our_files(tmp_path, seed, shard_bytes):
    arrays = random_arrays(seed)
    write(tmp_path, arrays, shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    actual = {k: v for path in files for k, v in load_file(path).items()}
    assert actual.keys() == arrays.keys()
    for name, values in arrays.items():
        assert actual[name].dtype == as_torch(values).dtype
        assert torch.equal(actual[name], as_torch(values))
    for path in files:
        (length,) = struct.unpack("<Q", path.read_bytes()[:8])
        assert length % 8 == 0
    if len(files) == 1:
        assert files[0].name == SINGLE
        return
    index = json.loads((tmp_path / f"{SINGLE}.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(v.nbytes for v in arrays.values())}
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / file)
    for path in files:
        sizes = [arrays[name].nbytes for name in load_file(path)]
        assert sum(sizes) <= shard_bytes or len(sizes) == 1
    assert len({index["weight_map"][name] for name in arrays}) == len(files)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shard_bytes", [10**9, 500])
def test_our_files_are_read_back(tmp_path, seed, shard_bytes):
    arrays = random_arrays(seed)
    write(tmp_path, arrays, shard_bytes)
    assert_same(read_all(tmp_path), arrays)


@pytest.mark.parametrize("seed", range(3))
def test_files_of_the_safetensors_library_are_read(tmp_path, seed):
    arrays = random_arrays(seed)
    save_file({k: as_torch(v) for k, v in arrays.items()}, tmp_path / SINGLE)
    assert_same(read_all(tmp_path), arrays)
    # Ordered by offset in the file, so that reading all tensors is one sequential pass.
    sizes = [
        math.prod(t.shape) * hf_files.DTYPES[t.dtype].itemsize
        for t in hf_files.find(str(tmp_path)).values()
    ]
    offset = (tmp_path / SINGLE).stat().st_size - sum(sizes)
    raw = (tmp_path / SINGLE).read_bytes()[offset:]
    assert raw == b"".join(v.tobytes() for v in read_all(tmp_path).values())


@pytest.mark.parametrize("checksums", [True, False])
def test_files_of_torch_are_read_without_torch(tmp_path, monkeypatch, checksums):
    arrays = random_arrays(0)
    tensors = {k: as_torch(v) for k, v in arrays.items()}
    # A transposed view of a larger storage, as may occur in a state dict.
    tensors["view"] = torch.arange(24.0).reshape(4, 6)[1:, 2:].T
    arrays["view"] = tensors["view"].contiguous().numpy()
    tensors["parameter"] = torch.nn.Parameter(torch.arange(3.0))
    arrays["parameter"] = np.arange(3, dtype=np.float32)
    state = torch.nn.Linear(3, 2).state_dict()  # an OrderedDict with an attribute
    arrays |= {name: values.numpy() for name, values in state.items()}
    state.update(tensors)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checksums)
    try:
        torch.save(state, tmp_path / PICKLED)
    finally:
        torch.serialization.set_crc32_options(before)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises ImportError
    assert_same(read_all(tmp_path), arrays)


def test_safetensors_are_preferred_to_bin_files(tmp_path):
    arrays = random_arrays(0)
    write(tmp_path, arrays)
    (tmp_path / PICKLED).write_bytes(b"not read")
    assert_same(read_all(tmp_path), arrays)


def truncate(path, n_bytes):
    path.write_bytes(path.read_bytes()[: -n_bytes or None])


def edit_header(path, change):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def assert_refused(folder, expected):
    """Assert that `find` fails with a one-line error that names the folder."""
    with pytest.raises(InputError, match=expected) as caught:
        hf_files.find(str(folder))
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            lambda path: truncate(path, 1),
            r"safetensors is truncated .* found .* bytes, expected .*",
        ),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "is truncated or damaged"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:100]),
            "is truncated or not a safetensors file",
        ),
        (lambda path: path.write_bytes(b"1234"), "is truncated or not a safetensors file"),
        (lambda path: path.write_bytes(struct.pack("<Q", 4) + b"abcd"), "header is damaged"),
        (lambda path: path.write_bytes(struct.pack("<Q", 2) + b"[]"), "header is damaged"),
        (lambda path: edit_header(path, lambda h: h["leaf.0"].pop("shape")), "header is damaged"),
        (lambda path: edit_header(path, lambda h: h["leaf.0"].update(shape=[7])), "header is dam"),
        (lambda path: path.unlink(), "found no weights; expected model.safetensors or"),
    ],
)
def test_error_names_a_damaged_safetensors_file(tmp_path, damage, expected):
    write(tmp_path, random_arrays(0))
    damage(tmp_path / SINGLE)
    assert_refused(tmp_path, expected)


def test_error_names_a_missing_shard_or_tensor(tmp_path):
    write(tmp_path, random_arrays(0), 500)
    index = tmp_path / f"{SINGLE}.index.json"
    good = index.read_text()
    values = json.loads(good)
    first = values["weight_map"]["leaf.0"]
    values["weight_map"]["leaf.99"] = first
    index.write_text(json.dumps(values))
    assert_refused(tmp_path, f"{first}: tensor leaf.99 is missing")
    # Shards must be in the model folder; existing files elsewhere that an index names are not read.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name, place in [(f"elsewhere/{first}", elsewhere), (f"../{first}", tmp_path.parent)]:
        shutil.copy(tmp_path / first, place / first)
        index.write_text(good.replace(first, name))
        assert_refused(tmp_path, "is missing, though")
    (tmp_path.parent / first).unlink()
    index.write_text(good)
    (tmp_path / first).unlink()
    assert_refused(tmp_path, f"{re.escape(first)} is missing, though .*index.json names it")
    index.write_text("{")
    assert_refused(tmp_path, "index.json: not JSON")
    index.write_text("[]")
    assert_refused(tmp_path, "index.json: found list, expected a mapping")
    index.write_text("{}")
    assert_refused(tmp_path, "index.json has no mapping `weight_map`")


class Harmful:
    """An object whose pickle calls a function when it is loaded."""

    def __reduce__(self):
        return print, ("this must not run",)


def test_pickle_that_could_run_code_is_refused(tmp_path, capsys):
    torch.save({"leaf": Harmful()}, tmp_path / PICKLED)
    assert_refused(tmp_path, r"pytorch_model.bin: refused as unsafe: .* \(__builtin__.print\)")
    (tmp_path / PICKLED).write_bytes(pickle.dumps({"leaf": Harmful()}))
    assert_refused(tmp_path, "pytorch_model.bin is .*a plain pickle is refused as unsafe")
    assert capsys.readouterr().out == ""


def test_error_names_a_damaged_bin_file(tmp_path):
    torch.save({"leaf": torch.ones(1000)}, tmp_path / PICKLED)
    truncate(tmp_path / PICKLED, 2000)
    assert_refused(tmp_path, "pytorch_model.bin is truncated or not a zip archive")
    torch.save([torch.ones(3)], tmp_path / PICKLED)
    assert_refused(tmp_path, "pytorch_model.bin: found no mapping of names to tensors")
    torch.save({"leaf": 3}, tmp_path / PICKLED)
    assert_refused(tmp_path, "pytorch_model.bin: found no mapping of names to tensors")


def test_a_flipped_bit_in_a_bin_file_is_reported_or_has_no_effect(tmp_path):
    generator = np.random.default_rng(0)
    arrays = random_arrays(0)
    torch.save({k: as_torch(v) for k, v in arrays.items()}, tmp_path / PICKLED)
    content = (tmp_path / PICKLED).read_bytes()
    errors = []
    for _ in range(300):
        damaged = bytearray(content)
        damaged[generator.integers(len(content))] ^= 1 << generator.integers(8)
        (tmp_path / PICKLED).write_bytes(damaged)
        try:
            actual = read_all(tmp_path)
        except InputError as error:
            errors.append(str(error))
        else:
            assert_same(actual, arrays)
    assert len(errors) > 50  # more than half of so small a file is padding
    assert all(PICKLED in error and "\n" not in error for error in errors)


def test_tensors_of_unsupported_dtypes_are_listed(tmp_path):
    save_file({"a": torch.ones(3, dtype=torch.int64)}, tmp_path / SINGLE)
    assert hf_files.find(str(tmp_path))["a"].dtype == "I64"
    (tmp_path / SINGLE).unlink()
    torch.save({"a": torch.ones(3, dtype=torch.int64)}, tmp_path / PICKLED)
    assert hf_files.find(str(tmp_path))["a"].dtype == "I64"
