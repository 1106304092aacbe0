"""Writing a safetensors file, one tensor at a time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from extkv.errors import InvalidArgumentError
from extkv.models.safetensors_file import LENGTH_BYTES, METADATA_KEY
from extkv.whole_file import whole_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
# The data begins at a multiple of this many bytes, as in files of the format's own library.
ALIGNMENT = 8


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to a file that appears under its name only when it is whole.

    Args:
        path: The file; replaced where it exists.
        tensors (any device): Tensors by name; a tensor that is not contiguous is copied.

    Raises:
        InvalidArgumentError: If a tensor has a dtype that is not in `DTYPE_NAMES`.
        OSError: If the file cannot be written.
    """
    header: dict[str, object] = {METADATA_KEY: {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            known = ", ".join(map(str, DTYPE_NAMES))
            msg = f"tensor {name} has dtype {tensor.dtype}, a file can hold: {known}"
            raise InvalidArgumentError(msg)
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    with whole_file(path) as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little"))
        file.write(text)
        for tensor in tensors.values():
            data = tensor.detach().cpu().contiguous().view(-1)
            if data.numel() > 0:
                file.write(data.view(torch.uint8).numpy().data)
