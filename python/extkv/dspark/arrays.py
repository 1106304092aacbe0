"""numpy arrays as the buffers that the native module takes, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from extkv.errors import SpeculationError

if TYPE_CHECKING:
    import numpy.typing as npt


def buffer_of(
    name: str, values: npt.ArrayLike, dtype: npt.DTypeLike, shape: tuple[int, ...]
) -> bytes:
    """Return values as native bytes of a dtype, checked to have a shape.

    Raises:
        SpeculationError: If the shape differs, or an integer does not fit the dtype.
    """
    given: npt.NDArray[Any] = np.asarray(values)
    if given.size == 0 and 0 in shape:
        return b""
    if given.shape != shape:
        raise SpeculationError(f"{name} has shape {given.shape}: {shape} needed")
    wanted = np.dtype(dtype)
    if given.dtype == wanted:
        return given.tobytes()
    if wanted.kind in "iu":
        is_of_same_size = given.dtype.kind == "i" and given.itemsize == wanted.itemsize
        if is_of_same_size and int(given.min()) >= 0:
            # The same bits, whether signed or not.
            return given.tobytes()
        return _integers(name, given, wanted)
    return given.astype(wanted).tobytes()


def _integers(name: str, given: npt.NDArray[Any], wanted: np.dtype[Any]) -> bytes:
    if given.dtype.kind not in "iub":
        raise SpeculationError(f"{name} has dtype {given.dtype}: integers needed")
    bounds = np.iinfo(wanted)
    if given.size and (int(given.min()) < bounds.min or int(given.max()) > bounds.max):
        found = (int(given.min()), int(given.max()))
        raise SpeculationError(
            f"{name} has values from {found[0]} to {found[1]}: [{bounds.min}, {bounds.max}] needed"
        )
    return given.astype(wanted).tobytes()
