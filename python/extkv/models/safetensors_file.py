"""One safetensors file: its header, checked whole, and its tensors, read straight into place.

A file is the length of the header (8 bytes, little endian), the header (JSON: name to dtype, shape
and `data_offsets`), and the data. Nothing is memory-mapped, so a page of the file is never resident
beside the weight that was read from it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, NoReturn, TypeGuard

import torch

from extkv.errors import ModelFileError
from extkv.models.chunk_buffers import ChunkBuffers

if TYPE_CHECKING:
    from io import FileIO
    from pathlib import Path

LENGTH_BYTES = 8
# The limit of the format's own library.
MAX_HEADER_BYTES = 100_000_000
METADATA_KEY = "__metadata__"

FLOAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Tables of ids and flags. A flag is a byte.
TABLE_DTYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.uint8,
    "U8": torch.uint8,
}
STORED_DTYPES = FLOAT_DTYPES | TABLE_DTYPES


@dataclass(frozen=True)
class TensorEntry:
    """Describe one tensor of a file.

    Attributes:
        dtype: Name of its dtype in the format, such as `BF16`.
        shape: Its shape.
        start: Offset of its first byte in the file.
        end: Offset past its last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """Give access to the tensors of one file.

    Attributes:
        path: The file.
        entries: Its tensors by name.
    """

    def __init__(self, path: Path) -> None:
        """Read and check the header.

        Raises:
            ModelFileError: If the file cannot be opened, is truncated, or its header is too large,
                is no valid JSON, or describes tensors that do not fit the file.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                header = self._read_header(file, size)
        except ModelFileError:
            raise
        except (OSError, ValueError) as error:
            self._refuse(f"cannot be opened: {getattr(error, 'strerror', error)}", error)
        data_start = LENGTH_BYTES + len(header)
        self.entries = {
            name: self._parse_entry(name, value, data_start, size)
            for name, value in self._parse_header(header).items()
            if name != METADATA_KEY
        }
        self._check_coverage(data_start, size)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that a tensor can be read.

        Raises:
            ModelFileError: If it is missing, has another shape, or is not of a float dtype.
        """
        self._check(name, shape, FLOAT_DTYPES)

    def read_table(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read a table of integers or flags.

        Returns:
            Tensor (int64, `shape`, host).

        Raises:
            ModelFileError: If it is missing, has another shape, is not of an integer or flag dtype,
                or the file became unreadable since it was opened.
        """
        self._check(name, shape, TABLE_DTYPES)
        entry = self.entries[name]
        expected = math.prod(shape) * TABLE_DTYPES[entry.dtype].itemsize
        if entry.end - entry.start != expected:
            self._refuse(
                f"tensor {name} has {entry.end - entry.start} bytes, "
                f"{entry.dtype} of shape {list(shape)} needs {expected}"
            )
        table = torch.empty(shape, dtype=torch.int64)
        self.read_into(name, table, ChunkBuffers(table.device))
        return table

    def read_into(self, name: str, destination: torch.Tensor, buffers: ChunkBuffers) -> None:
        """Read a tensor that was checked into memory of its shape.

        Args:
            name: Name in the file.
            destination (any float dtype, shape of the tensor, any device): Contiguous.
            buffers: Pass on what needs another dtype or device.

        Raises:
            ModelFileError: If the file became shorter or unreadable since it was opened.
        """
        entry = self.entries[name]
        try:
            # Unbuffered: reads go straight to the destination.
            with self.path.open("rb", buffering=0) as file:
                file.seek(entry.start)
                buffers.fill(destination, STORED_DTYPES[entry.dtype], _Reader(file).read_into)
        except (OSError, EOFError) as error:
            self._refuse(f"tensor {name} cannot be read: {error}", error)

    def _check(self, name: str, shape: tuple[int, ...], dtypes: dict[str, torch.dtype]) -> None:
        entry = self.entries.get(name)
        if entry is None:
            self._refuse(f"tensor {name} is missing, expected shape {list(shape)}")
        if entry.dtype not in dtypes:
            known = ", ".join(dtypes)
            self._refuse(f"tensor {name} has dtype {entry.dtype}, expected one of {known}")
        if entry.shape != shape:
            self._refuse(f"tensor {name} has shape {list(entry.shape)}, expected {list(shape)}")

    def _read_header(self, file: BinaryIO, size: int) -> bytes:
        if size < LENGTH_BYTES:
            self._refuse(f"truncated: has {size} bytes, a safetensors file has at least 8")
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > MAX_HEADER_BYTES:
            self._refuse(
                f"header is {length} bytes long, expected at most {MAX_HEADER_BYTES}: "
                "not a safetensors file"
            )
        if LENGTH_BYTES + length > size:
            self._refuse(
                f"truncated: the header ends at byte {LENGTH_BYTES + length}, the file has {size}"
            )
        return file.read(length)

    def _parse_header(self, header: bytes) -> dict[str, object]:
        try:
            values = json.loads(header.decode(), object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError) as error:
            self._refuse(f"header is not valid: {error}", error)
        if not isinstance(values, dict):
            self._refuse(f"header holds {values!r:.80}, expected a JSON object")
        metadata = values.get(METADATA_KEY, {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            self._refuse(f"header has {METADATA_KEY} {metadata!r:.80}, expected texts by name")
        return values

    def _parse_entry(self, name: str, value: object, data_start: int, size: int) -> TensorEntry:
        fields = value if isinstance(value, dict) else {}
        dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not (
            isinstance(dtype, str) and _is_sizes(shape) and _is_sizes(offsets) and len(offsets) == 2  # noqa: PLR2004, start and end
        ):
            self._refuse(
                f"tensor {name} is described by {value!r:.120}, "
                "expected dtype, shape and data_offsets"
            )
        start, end = (data_start + offset for offset in offsets)
        if start > end or end > size:
            self._refuse(
                f"tensor {name} lies in bytes {start} to {end}, "
                f"the file has data from {data_start} to {size}"
            )
        if dtype in FLOAT_DTYPES:
            expected = math.prod(shape) * FLOAT_DTYPES[dtype].itemsize
            if end - start != expected:
                self._refuse(
                    f"tensor {name} has {end - start} bytes, "
                    f"{dtype} of shape {shape} needs {expected}"
                )
        return TensorEntry(dtype, tuple(shape), start, end)

    def _check_coverage(self, data_start: int, size: int) -> None:
        """Check that the tensors cover the data without a gap or an overlap."""
        position = data_start
        in_file_order = sorted(self.entries.items(), key=lambda item: (item[1].start, item[1].end))
        for name, entry in in_file_order:
            if entry.start != position:
                self._refuse(f"tensor {name} begins at byte {entry.start}, expected {position}")
            position = entry.end
        if position != size:
            self._refuse(f"the tensors end at byte {position}, the file has {size}")

    def _refuse(self, reason: str, cause: Exception | None = None) -> NoReturn:
        msg = f"model file {self.path}: {reason}"
        raise ModelFileError(msg) from cause


class _Reader:
    """Fill memory from a file, however little one read returns."""

    def __init__(self, file: FileIO) -> None:
        self._file = file

    def read_into(self, memory: memoryview) -> None:
        num_read = 0
        while num_read < len(memory):
            count = self._file.readinto(memory[num_read:])
            if not count:
                msg = f"the file ends {len(memory) - num_read} bytes too early"
                raise EOFError(msg)
            num_read += count


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        msg = f"{len(pairs)} keys, only {len(values)} different"
        raise ValueError(msg)
    return values


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
