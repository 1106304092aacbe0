"""Safetensors files: good ones read into place, and each defect is named by its error."""

import contextlib
import json

import pytest
import torch
from extkv.errors import ModelFileError
from extkv.models import chunk_buffers
from extkv.models.chunk_buffers import ChunkBuffers
from extkv.models.safetensors_file import SafetensorsFile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

CPU = torch.device("cpu")
FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.fixture
def tensors():
    return {"matrix": random(5, 3), "norm": random(7, dtype=torch.bfloat16)}


@pytest.fixture
def path(tmp_path, tensors):
    save_file(tensors, tmp_path / "good.safetensors", metadata={"format": "pt"})
    return tmp_path / "good.safetensors"


def read(path, name, shape, dtype):
    file = SafetensorsFile(path)
    file.check(name, shape)
    destination = torch.full(shape, float("nan"), dtype=dtype)
    file.read_into(name, destination, ChunkBuffers(CPU))
    return destination


def write(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape=(2,), dtype="F32", offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("chunk_bytes", [16, 24, 1000])
@pytest.mark.parametrize("stored", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES[1:], ids=str)
def test_reads_any_float_dtype_in_chunks(tmp_path, stored, dtype, chunk_bytes, monkeypatch):
    monkeypatch.setattr(chunk_buffers, "CHUNK_BYTES", chunk_bytes)
    expected = random(7, 5, dtype=stored)
    save_file({"x": expected}, tmp_path / "file")
    assert torch.equal(read(tmp_path / "file", "x", (7, 5), dtype), expected.to(dtype))


def test_reads_into_part_of_a_larger_tensor(path, tensors):
    whole = torch.zeros(9, 3)
    SafetensorsFile(path).read_into("matrix", whole[2:7], ChunkBuffers(CPU))
    assert torch.equal(whole[2:7], tensors["matrix"])
    assert whole[:2].sum() == whole[7:].sum() == 0


def test_a_header_of_odd_length_is_read(tmp_path):
    data = torch.arange(2.0)
    path = write(tmp_path / "odd", {"long_name": entry()}, data.numpy().tobytes())
    assert torch.equal(read(path, "long_name", (2,), torch.float32), data)


def test_tensors_of_no_elements_are_allowed(tmp_path):
    save_file({"none": torch.zeros(0, 4), "one": torch.ones(1)}, tmp_path / "file")
    assert set(SafetensorsFile(tmp_path / "file").entries) == {"none", "one"}


def test_rejects_a_missing_file(tmp_path):
    with pytest.raises(ModelFileError, match="none: cannot be opened: No such file"):
        SafetensorsFile(tmp_path / "none")


def test_rejects_a_directory(tmp_path):
    with pytest.raises(ModelFileError, match="cannot be opened: Is a directory"):
        SafetensorsFile(tmp_path)


@pytest.mark.parametrize("num_bytes", [0, 7])
def test_rejects_a_file_shorter_than_the_length(path, num_bytes):
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ModelFileError, match=f"truncated: has {num_bytes} bytes"):
        SafetensorsFile(path)


def test_rejects_a_truncated_header(path):
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ModelFileError, match=r"the header ends at byte \d+, the file has 40"):
        SafetensorsFile(path)


def test_rejects_a_header_that_is_too_large(path):
    path.write_bytes((2**60).to_bytes(8, "little") + path.read_bytes())
    with pytest.raises(ModelFileError, match="header is 1152921504606846976 bytes long, expected"):
        SafetensorsFile(path)


@pytest.mark.parametrize("num_bytes", [1, 14, 30])
def test_rejects_truncated_data_with_the_tensor(path, num_bytes):
    path.write_bytes(path.read_bytes()[:-num_bytes])
    with pytest.raises(ModelFileError, match=r"tensor \w+ lies in bytes \d+ to \d+, the file has"):
        SafetensorsFile(path)


def test_rejects_bytes_after_the_last_tensor(path):
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ModelFileError, match=r"the tensors end at byte \d+, the file has \d+"):
        SafetensorsFile(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "header is not valid: Expecting"),
        (b"\xff\xfe", "header is not valid: 'utf-8' codec"),
        (b"[" * 5000, "header is not valid: "),
        (b"[]", r"header holds \[\], expected a JSON object"),
        (b'{"x": 1, "x": 2}', "header is not valid: 2 keys, only 1 different"),
        ({"__metadata__": [1]}, r"header has __metadata__ \[1\], expected texts by name"),
        ({"__metadata__": {"a": 1}}, "header has __metadata__ {'a': 1}, expected texts"),
        ({"x": 3}, "tensor x is described by 3, expected dtype, shape and data_offsets"),
        ({"x": entry(dtype=5)}, "tensor x is described by"),
        ({"x": entry(shape=(-2,))}, "tensor x is described by"),
        ({"x": entry(shape=(2.0,))}, "tensor x is described by"),
        ({"x": entry(offsets=(0,))}, "tensor x is described by"),
        ({"x": entry(offsets=(0, True))}, "tensor x is described by"),
        ({"x": entry(offsets=(0, 12))}, r"tensor x lies in bytes \d+ to \d+, the file has data"),
        ({"x": entry(offsets=(8, 0))}, r"tensor x lies in bytes \d+ to \d+"),
        ({"x": entry(shape=(3,))}, r"tensor x has 8 bytes, F32 of shape \[3\] needs 12"),
        ({"x": entry(shape=(2**40, 2**40))}, "tensor x has 8 bytes, F32 of shape"),
        ({"x": entry((1,), offsets=(4, 8))}, r"tensor x begins at byte \d+, expected \d+"),
        (
            {"x": entry(), "y": entry((1,), offsets=(4, 8))},
            r"tensor y begins at byte \d+, expected \d+",
        ),
    ],
)
def test_rejects_a_broken_header(tmp_path, header, message):
    with pytest.raises(ModelFileError, match=f"broken: {message}"):
        SafetensorsFile(write(tmp_path / "broken", header, b"\0" * 8))


def test_rejects_a_missing_tensor(path):
    with pytest.raises(ModelFileError, match=r"tensor head is missing, expected shape \[2, 3\]"):
        SafetensorsFile(path).check("head", (2, 3))


def test_rejects_another_shape(path):
    with pytest.raises(ModelFileError, match=r"tensor matrix has shape \[5, 3\], expected \[3, 5"):
        SafetensorsFile(path).check("matrix", (3, 5))


@pytest.mark.parametrize("dtype", ["I32", "F8_E4M3", "U8"])
def test_rejects_a_dtype_that_is_no_plain_float(tmp_path, dtype):
    path = write(tmp_path / "file", {"x": entry(dtype=dtype)}, b"\0" * 8)
    with pytest.raises(ModelFileError, match=f"tensor x has dtype {dtype}, expected one of F64"):
        SafetensorsFile(path).check("x", (2,))


def test_a_file_that_became_shorter_is_a_typed_error(path):
    file = SafetensorsFile(path)
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(ModelFileError, match=r"tensor matrix cannot be read: the file ends \d+"):
        file.read_into("matrix", torch.empty(5, 3), ChunkBuffers(CPU))


FUZZ = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FUZZ
@given(at=st.integers(0, 200), value=st.binary(min_size=1, max_size=8), insert=st.booleans())
def test_what_is_read_from_a_damaged_file_is_what_the_library_reads(path, at, value, insert):
    content = path.read_bytes()
    mutant = path.with_name("mutant")
    mutant.write_bytes(content[:at] + value + content[at if insert else at + len(value) :])
    # Any other exception fails the test. The library accepts no less than we do.
    with contextlib.suppress(ModelFileError):
        file = SafetensorsFile(mutant)
        for name, found in file.entries.items():
            file.check(name, found.shape)
        with safe_open(mutant, "pt") as reference:
            assert set(reference.keys()) == set(file.entries)
            for name in file.entries:
                expected = reference.get_tensor(name)
                assert file.entries[name].shape == tuple(expected.shape)
                found = torch.empty(expected.shape, dtype=expected.dtype)
                file.read_into(name, found, ChunkBuffers(CPU))
                assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@FUZZ
@given(num_bytes=st.integers(0, 200))
def test_any_truncation_is_refused_here_and_by_the_library(path, num_bytes):
    content = path.read_bytes()
    mutant = path.with_name("mutant")
    mutant.write_bytes(content[: min(num_bytes, len(content) - 1)])
    with pytest.raises(ModelFileError):
        SafetensorsFile(mutant)
    with pytest.raises(SafetensorError):
        safe_open(mutant, "pt")
