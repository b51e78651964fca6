"""Tensor files, compared with the libraries that define the formats, and damaged files."""

import json
import math
import pickle
import re
import shutil
import struct
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file

from mesh_transformer.checkpoint import hf_files, stored_tensors, torch_files
from mesh_transformer.checkpoint.hf_files import Tensor
from mesh_transformer.checkpoint.stored_tensors import DTYPES, have_equal_values
from mesh_transformer.util import InputError

FLOATS = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
SINGLE = "model.safetensors"
PICKLED = "pytorch_model.bin"


def random_arrays(seed, count=12):
    rng = np.random.default_rng(seed)
    arrays = {}
    for i in range(count):
        shape = tuple(rng.integers(1, 9, rng.integers(0, 4)))
        arrays[f"leaf.{i}"] = np.asarray(rng.standard_normal(shape)).astype(FLOATS[i % 3])
    return arrays


def write(folder, arrays, shard_bytes=10**9):
    tensors = [Tensor(k, v.dtype, v.shape, lambda v=v: v) for k, v in arrays.items()]
    hf_files.write(str(folder), tensors, shard_bytes)


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
        math.prod(t.shape) * DTYPES[t.dtype].itemsize for t in hf_files.find(str(tmp_path)).values()
    ]
    offset = (tmp_path / SINGLE).stat().st_size - sum(sizes)
    raw = (tmp_path / SINGLE).read_bytes()[offset:]
    assert raw == b"".join(v.tobytes() for v in read_all(tmp_path).values())


@pytest.mark.parametrize("checksums", [True, False, "before 1.6"])
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
    save(state, tmp_path / PICKLED, checksums)
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
    index.write_bytes(DEEP)
    assert_refused(tmp_path, "index.json: not JSON .nested too deeply")
    for name in ("x" * 5000, "x\0y", "\ud800", "/etc/passwd", ["b"]):
        index.write_text(json.dumps({"weight_map": {"leaf.0": name}}))
        assert_refused(tmp_path, "is missing, though")
    index.write_text("{}")
    assert_refused(tmp_path, "index.json has no mapping `weight_map`")


def test_a_tensor_with_other_values_in_another_shard_is_refused(tmp_path):
    arrays = random_arrays(0)
    write(tmp_path, arrays, 1)
    values = json.loads((tmp_path / f"{SINGLE}.index.json").read_text())["weight_map"]
    first, last = min(values.values()), max(values.values())
    (name,) = (name for name, file in values.items() if file == first)
    (other,) = load_file(tmp_path / last).items()
    again = as_torch(arrays[name]).clone()
    save_file(dict([other, (name, again)]), tmp_path / last)
    assert_same(read_all(tmp_path), arrays)  # equal ones are no contradiction
    again.view(torch.uint8).view(-1)[0] ^= 1
    save_file(dict([other, (name, again)]), tmp_path / last)
    assert_refused(tmp_path, f"{last}: tensor {re.escape(name)} has other values in .*{first}")


POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0a" * 32 + "\nsize 548105171\n"
)


@pytest.mark.parametrize("name", [SINGLE, PICKLED, f"{SINGLE}.index.json"])
def test_a_pointer_of_git_lfs_is_called_one(tmp_path, name):
    (tmp_path / name).write_text(POINTER)
    assert_refused(tmp_path, f"{name} is a git-LFS pointer, not the file .* run `git lfs pull`")


@pytest.mark.parametrize("end", [0, 1, 50, 600, 1500])
def test_a_truncated_file_of_an_early_torch_is_reported(tmp_path, end):
    arrays = random_arrays(0)
    tensors = {k: as_torch(v) for k, v in arrays.items()}
    save(tensors | {"big": torch.ones(1000)}, tmp_path / PICKLED, "before 1.6")
    (tmp_path / PICKLED).write_bytes((tmp_path / PICKLED).read_bytes()[:end])
    assert_refused(tmp_path, "pytorch_model.bin(:| is truncated).*")
    save(tensors, tmp_path / PICKLED, "before 1.6")
    truncate(tmp_path / PICKLED, 1)
    assert_refused(tmp_path, "its list of tensors is damaged")


DEEP = b'{"a":' * 200_000


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(struct.pack("<Q", len(DEEP)) + DEEP),
        lambda path: edit_header(
            path, lambda h: h.update(__metadata__={"mesh_transformer.crc32": "[" * 100_000})
        ),
        lambda path: edit_header(path, lambda h: h["leaf.1"].update(shape=[1.0])),
        lambda path: edit_header(path, lambda h: h["leaf.1"].update(shape=[-1])),
        lambda path: edit_header(path, lambda h: h["leaf.1"].update(shape=[True])),
        lambda path: edit_header(
            path,
            lambda h: h["leaf.1"].update(data_offsets=[*map(float, h["leaf.1"]["data_offsets"])]),
        ),
        lambda path: edit_header(path, lambda h: h["leaf.1"].update(data_offsets=[2**63, 2**70])),
    ],
)
def test_hostile_headers_are_one_line(tmp_path, damage):
    write(tmp_path, random_arrays(0))
    damage(tmp_path / SINGLE)
    assert_refused(tmp_path, "(header is damaged|is truncated or damaged)")


class Harmful:
    """An object whose pickle calls a function when it is loaded."""

    def __reduce__(self):
        return print, ("this must not run",)


def test_pickle_that_could_run_code_is_refused(tmp_path, capsys):
    torch.save({"leaf": Harmful()}, tmp_path / PICKLED)
    assert_refused(tmp_path, r"pytorch_model.bin: refused as unsafe: .* \('__builtin__.print'\)")
    (tmp_path / PICKLED).write_bytes(pickle.dumps({"leaf": Harmful()}))
    assert_refused(tmp_path, r"pytorch_model.bin: refused as unsafe: .* \('builtins.print'\)")
    for value in (3, {"a": 1}, None):
        (tmp_path / PICKLED).write_bytes(pickle.dumps(value, protocol=2))
        assert_refused(tmp_path, "not a file of torch.save .any other pickle is refused as unsafe")
    save({"leaf": Harmful()}, tmp_path / PICKLED, "before 1.6")
    assert_refused(tmp_path, r"pytorch_model.bin: refused as unsafe: .* \('__builtin__.print'\)")
    assert capsys.readouterr().out == ""


def test_error_names_a_damaged_bin_file(tmp_path):
    torch.save({"leaf": torch.ones(1000)}, tmp_path / PICKLED)
    truncate(tmp_path / PICKLED, 2000)
    assert_refused(tmp_path, "pytorch_model.bin is truncated or not a zip archive")
    torch.save([torch.ones(3)], tmp_path / PICKLED)
    assert_refused(tmp_path, "pytorch_model.bin: found no mapping of names to tensors")
    torch.save({"leaf": 3}, tmp_path / PICKLED)
    assert_refused(tmp_path, "pytorch_model.bin: found no mapping of names to tensors")


def save(values, path, checksums=True):
    """Save with torch, with or without checksums, or as PyTorch before 1.6 did."""
    if checksums == "before 1.6":
        torch.save(values, path, _use_new_zipfile_serialization=False)
        return
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checksums)
    try:
        torch.save(values, path)
    finally:
        torch.serialization.set_crc32_options(before)


@pytest.mark.quick(2)
@pytest.mark.parametrize("checksums", [True, False, "before 1.6"])
def test_a_flipped_bit_in_a_bin_file_is_reported_or_has_no_effect(tmp_path, checksums):
    generator = np.random.default_rng(0)
    arrays = random_arrays(0)
    save({k: as_torch(v) for k, v in arrays.items()}, tmp_path / PICKLED, checksums)
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
            if checksums is True:
                assert_same(actual, arrays)
    assert len(errors) > 20  # more than half of so small a file is padding
    assert all(PICKLED in error and "\n" not in error for error in errors)


def test_views_of_one_storage_are_read_once(tmp_path, monkeypatch):
    rows = torch.arange(60.0).reshape(6, 10)
    torch.save({f"{i}": row for i, row in enumerate(rows)}, tmp_path / PICKLED)
    reads, read = [], torch_files._read
    monkeypatch.setattr(
        torch_files, "_read", lambda *args: reads.append(args[2].name) or read(*args)
    )
    assert_same(read_all(tmp_path), {f"{i}": row.numpy() for i, row in enumerate(rows)})
    assert reads.count("pytorch_model/data/0") == 1


def repickled(path, content):
    """Replace the pickle in a file of torch.save."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, old in files.items():
            archive.writestr(name, content if name.endswith("/data.pkl") else old)


STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x03tQ"
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n(%b%b%b%b\x89ccollections\nOrderedDict\n)RtR"
ONE = b"K\x03\x85"  # (3,)


@pytest.mark.parametrize(
    ("pickled", "line"),
    [
        (b"}(" + b"N" + b"\x85" * 10**6 + b"K\x00u.", "refused as unsafe: .*nested tuples"),
        (b"}r\xff\xff\xff\x7f.", "its list of tensors is damaged"),
        (b"cos\nsystem\n.", "refused as unsafe: .* \\('os.system'\\)"),
        (b"\x8c\x03o\ns\x8c\x01x\x93.", "refused as unsafe: "),
        (b"}K\x00" + TENSOR % (STORAGE, b"K\x00", ONE, ONE) + b"s.", "found no mapping of names"),
        (b"}X\x01\0\0\0a" + TENSOR % (b"K\x00", b"K\x00", ONE, ONE) + b"s.", "is damaged"),
        (b"}X\x01\0\0\0a" + TENSOR % (STORAGE, b"N", ONE, ONE) + b"s.", "is damaged"),
        (b"}X\x01\0\0\0a" + TENSOR % (STORAGE, b"K\x01", ONE, b"K\x01\x85") + b"s.", "is larger"),
        (b"}X\x01\0\0\0a" + TENSOR % (STORAGE, b"K\x00", ONE, b"N") + b"s.", "is damaged"),
    ],
)
def test_malformed_pickles_are_refused(tmp_path, pickled, line):
    path = tmp_path / PICKLED
    torch.save({"a": torch.arange(3.0)}, path)
    repickled(
        path, b"\x80\x02" + b"}X\x01\0\0\0a" + TENSOR % (STORAGE, b"K\0", ONE, b"K\x01\x85") + b"s."
    )
    assert_same(read_all(tmp_path), {"a": np.arange(3, dtype=np.float32)})
    repickled(path, b"\x80\x02" + pickled)
    with pytest.raises(InputError, match=line) as caught:
        read_all(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_bin_files_that_cannot_be_read_exactly_are_refused(tmp_path):
    path = tmp_path / PICKLED
    torch.save({"a": torch.complex(torch.ones(3), torch.arange(3.0)).conj().imag}, path)
    assert_refused(tmp_path, "a conjugated or negated view")
    torch.save({"a": torch.arange(3.0)}, path)
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    assert_refused(tmp_path, "is compressed; save it again with torch.save")
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, b"big" if name.endswith("byteorder") else content)
    assert_refused(tmp_path, "big-endian byte order")


def test_tensors_of_unsupported_dtypes_are_listed(tmp_path):
    save_file({"a": torch.ones(3, dtype=torch.int64)}, tmp_path / SINGLE)
    assert hf_files.find(str(tmp_path))["a"].dtype == "I64"
    (tmp_path / SINGLE).unlink()
    torch.save({"a": torch.ones(3, dtype=torch.int64)}, tmp_path / PICKLED)
    assert hf_files.find(str(tmp_path))["a"].dtype == "I64"
    torch.save({"a": torch.ones(3, dtype=torch.uint16)}, tmp_path / PICKLED)
    assert hf_files.find(str(tmp_path))["a"].dtype == "torch.uint16"


@pytest.mark.parametrize("seed", range(5))
def test_tensors_are_compared_up_to_the_first_difference(tmp_path, monkeypatch, seed):
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(stored_tensors, "COMPARED", size := int(rng.integers(1, 9)))
    values = rng.standard_normal((7, 5)).astype(FLOATS[seed % 3])
    other, at = values.copy(), int(rng.integers(values.size))
    other.flat[at] += 1
    arrays = {"a": values, "same": values, "other": other, "short": values[:6], "wide": values.T}
    write(tmp_path, arrays | {"cast": values.astype(np.float32)})
    parts: list[int] = []

    def counted(name):
        tensor = hf_files.find(str(tmp_path))[name]
        assert tensor.part is not None
        own = tensor.part

        def part(first, count):
            parts.append(first)
            return own(first, count)

        return tensor._replace(part=part)

    assert have_equal_values(counted("a"), counted("same"))
    assert have_equal_values(counted("a"), counted("cast"))
    assert parts == 2 * [first for first in range(0, 35, size) for _ in "ab"]
    parts.clear()
    assert not have_equal_values(counted("a"), counted("other"))
    assert parts == [first for first in range(0, at + 1, size) for _ in "ab"]
    parts.clear()
    for name, equal in (("a", True), ("short", False), ("wide", False)):
        assert have_equal_values(counted("a"), counted(name)) == equal
    assert not parts


def test_tensors_of_bin_files_are_compared(tmp_path):
    values = torch.randn(4, 3)
    torch.save({"a": values, "tied": values, "b": values + 1}, tmp_path / PICKLED)
    stored = hf_files.find(str(tmp_path))
    assert not have_equal_values(stored["a"], stored["b"])
    refused = stored["tied"]._replace(read=lambda: pytest.fail("read, though it is the same data"))
    assert have_equal_values(stored["a"], refused)
