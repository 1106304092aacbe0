"""Opening a GGUF file and reading its tensors; every defect of the file becomes a ModelFileError.

The `gguf` library parses and dequantises. It trusts lengths in the file, so the reader is bounded
here: a read past the end raises instead of returning fewer bytes.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import gguf
import numpy as np
import torch

from extkv.errors import ModelFileError
from extkv.models.gguf_metadata import GGUFMetadata

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

GGUF_MAGIC = b"GGUF"
KNOWN_VERSIONS = (2, 3)
HEADER_BYTES = 8
ARRAY_TYPE = gguf.GGUFValueType.ARRAY

# What the library raises on bytes that are no valid GGUF file.
PARSE_ERRORS = (ValueError, KeyError, IndexError, ArithmeticError, MemoryError, RecursionError)


class GGUFFile:
    """Give access to the metadata and tensors of one GGUF file.

    The file stays memory-mapped as long as the object lives; rows are returned as copies.

    Attributes:
        path: The file.
        metadata: Its key-value part.
    """

    def __init__(self, path: Path) -> None:
        """Open and parse a file.

        Raises:
            ModelFileError: If the file is missing, not a regular file, not readable, no GGUF file
                of a known version, truncated, or corrupt.
        """
        self.path = path
        _check_header(path)
        try:
            # Corrupt offsets overflow; that must raise and not wrap round.
            with np.errstate(over="raise"):
                reader = _BoundedReader(path)
            values = {key: field.contents() for key, field in reader.fields.items()}
        except ModelFileError:
            raise
        except (OSError, *PARSE_ERRORS) as error:
            msg = f"model file {path}: not a valid GGUF file: {error}"
            raise ModelFileError(msg) from error
        self.metadata = GGUFMetadata(path, values)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._data = reader.data

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the tensors, in file order."""
        return tuple(self._tensors)

    def check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that a tensor is there and has a shape, outermost dimension first.

        Raises:
            ModelFileError: If it is missing or has another shape.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            self._refuse(name, f"is missing, expected shape {list(shape)}")
        # GGUF writes dimensions innermost first.
        found = tuple(int(size) for size in reversed(tensor.shape))
        if found != shape:
            self._refuse(name, f"has shape {list(found)}, expected {list(shape)}")

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Return a dequantised copy of some rows of a tensor that was checked.

        The part of the file that was read does not stay resident.

        Args:
            name: Name in the file.
            first: First row.
            last: Row past the last one.

        Returns:
            Tensor (float32, [last - first, ...], CPU).

        Raises:
            ModelFileError: If the tensor has a quantisation the library cannot read.
        """
        tensor = self._tensors[name]
        try:
            values = gguf.quants.dequantize(tensor.data[first:last], tensor.tensor_type)
        except (NotImplementedError, *PARSE_ERRORS) as error:
            self._refuse(name, f"cannot be read as {tensor.tensor_type.name}: {error}", error)
        # Float32 rows come back as a view of the read-only file mapping.
        rows = torch.from_numpy(np.array(values, np.float32))
        mapping = self._data.base
        if isinstance(mapping, mmap.mmap):
            mapping.madvise(mmap.MADV_DONTNEED)
        return rows

    def _refuse(self, name: str, reason: str, cause: Exception | None = None) -> NoReturn:
        msg = f"model file {self.path}: tensor {name} {reason}"
        raise ModelFileError(msg) from cause


class _BoundedReader(gguf.GGUFReader):
    """Refuse to read past the end of the file.

    `_get` and `_get_field_parts` are the two places where the library takes lengths from the file.
    tests/unit/test_models_loader.py fails if a new version of the library renames them.
    """

    def _get(
        self,
        offset: int,
        dtype: npt.DTypeLike,
        count: int = 1,
        override_order: Literal["I", "S", "<"] | None = None,  # noqa: ARG002, files are native here
    ) -> npt.NDArray[Any]:
        self._check_bounds(offset, np.dtype(dtype).itemsize, count)
        return np.frombuffer(self.data, dtype, int(count), int(offset))

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[gguf.GGUFValueType]]:
        if raw_type == ARRAY_TYPE:
            item_type = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
            length = self._get(orig_offs + 4, np.uint64)
            scalar = self.gguf_scalar_to_np.get(item_type)
            if scalar is not None:
                # One read for all items; the library reads and keeps them one by one.
                items = self._get(orig_offs + 12, scalar, int(length[0]))
                return 12 + items.nbytes, [length, items], [1], [ARRAY_TYPE, item_type]
            # The shortest item is an empty string: its length, 8 bytes.
            self._check_bounds(orig_offs + 12, 8, int(length[0]))
        return super()._get_field_parts(orig_offs, raw_type)

    def _check_bounds(self, offset: int, item_bytes: int, count: int) -> None:
        end = int(offset) + item_bytes * int(count)
        if end > self.data.size:
            msg = (
                f"model file {self.data.filename}: truncated or corrupt: "
                f"bytes {int(offset)} to {end} are needed, the file has {self.data.size}"
            )
            raise ModelFileError(msg)


def _check_header(path: Path) -> None:
    try:
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        msg = f"model file {path}: cannot be opened: {reason}, expected a GGUF file"
        raise ModelFileError(msg) from error
    if header[:4] != GGUF_MAGIC:
        msg = f"model file {path}: found magic {header[:4]!r}, expected {GGUF_MAGIC!r}"
        raise ModelFileError(msg)
    version = int.from_bytes(header[4:], "little")
    if version not in KNOWN_VERSIONS:
        msg = f"model file {path}: GGUF version is {version}, known: {KNOWN_VERSIONS}"
        raise ModelFileError(msg)
