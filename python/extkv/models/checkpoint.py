"""The weights of a Hugging Face directory: one safetensors file, or shards with an index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extkv.errors import ModelFileError
from extkv.models.chunk_buffers import ChunkComparison
from extkv.models.json_file import JsonObject, read_json
from extkv.models.safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path

    import torch

    from extkv.models.chunk_buffers import ChunkBuffers
    from extkv.models.weights import WeightSlot

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_SUFFIX = ".safetensors"

# Old Llama checkpoints store the rotary frequencies; they follow from the configuration.
DERIVED_SUFFIX = ".rotary_emb.inv_freq"
LM_HEAD = "lm_head.weight"


class Checkpoint:
    """Read the weights of a Hugging Face directory, slot by slot.

    Attributes:
        directory: The directory.
    """

    def __init__(self, directory: Path) -> None:
        """Open the headers of all files.

        Raises:
            ModelFileError: If there is neither a single file nor an index, a shard is missing or
                corrupt, or the index names a tensor that is not in its shard.
        """
        self.directory = directory
        single = directory / SINGLE_FILE
        index = directory / INDEX_FILE
        if single.exists():
            file = SafetensorsFile(single)
            self._files = dict.fromkeys(file.entries, file)
        elif index.exists():
            self._files = _open_shards(directory, read_json(index))
        else:
            msg = f"model file {directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}"
            raise ModelFileError(msg)

    @property
    def tensor_names(self) -> frozenset[str]:
        """Names of the tensors of all files."""
        return frozenset(self._files)

    def describe(self, slot: WeightSlot) -> str:
        """Return what errors call the tensor of a slot."""
        return f"model file {self._files[slot.name].path}: tensor {slot.name}"

    def check(self, slot: WeightSlot) -> None:
        """Check that the tensor of a slot can be read.

        Raises:
            ModelFileError: If it is missing, has another shape, or is not of a float dtype.
        """
        self._file_of(slot.name, slot.shape).check(slot.name, slot.shape)

    def read_table(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read a table of integers or flags; see `SafetensorsFile.read_table`."""
        return self._file_of(name, shape).read_table(name, shape)

    def _file_of(self, name: str, shape: tuple[int, ...]) -> SafetensorsFile:
        file = self._files.get(name)
        if file is None:
            msg = (
                f"model file {self.directory}: tensor {name} is missing, "
                f"expected shape {list(shape)}"
            )
            raise ModelFileError(msg)
        return file

    def check_rest(self, slots: Container[str], *, is_tied: bool) -> None:
        """Check that the files hold no tensor that the model would ignore.

        A tied head may be stored again, and so may what follows from the configuration.

        Args:
            slots: Names of the tensors that the model uses.
            is_tied: Whether the head is the embedding.

        Raises:
            ModelFileError: If there is another tensor.
        """
        rest = {name for name in self._files if name not in slots and not is_derived(name)}
        if is_tied:
            rest.discard(LM_HEAD)
        if rest:
            first = min(rest)
            msg = (
                f"model file {self._files[first].path}: {len(rest)} tensors have no use in a model "
                f"of this configuration, first: {first}"
            )
            raise ModelFileError(msg)

    def fill(self, slot: WeightSlot, destination: torch.Tensor, buffers: ChunkBuffers) -> None:
        """Read the tensor of a slot into place; see `SafetensorsFile.read_into`."""
        self._files[slot.name].read_into(slot.name, destination, buffers)

    def is_equal(self, slot: WeightSlot, tensor: torch.Tensor) -> bool:
        """Return whether the tensor of a slot that was checked has these values.

        Args:
            slot: The slot.
            tensor (any float dtype, any shape, any device): Contiguous. The file's values are
                rounded to its dtype before they are compared.
        """
        if tuple(tensor.shape) != slot.shape:
            return False
        comparison = ChunkComparison(tensor.device)
        self._files[slot.name].read_into(slot.name, tensor, comparison)
        return comparison.is_equal


def is_derived(name: str) -> bool:
    """Return whether a tensor follows from the configuration, so that it is never read."""
    return name.endswith(DERIVED_SUFFIX)


def read_weight_map(index: JsonObject) -> dict[str, str]:
    """Return the shard of each tensor that an index names.

    Raises:
        ModelFileError: If the index has no `weight_map`, or names something else than a file of
            its own directory.
    """
    weight_map = index.find_object("weight_map")
    if weight_map is None:
        raise index.error("weight_map", "is missing", "an object")
    shards = {name: weight_map.require(name, str) for name in weight_map.values}
    for name, shard in shards.items():
        # A path would let a downloaded index open any file.
        if "/" in shard or not shard.endswith(SHARD_SUFFIX):
            raise weight_map.error(name, f"is {shard!r:.80}", f"the name of a {SHARD_SUFFIX} file")
    return shards


def _open_shards(directory: Path, index: JsonObject) -> dict[str, SafetensorsFile]:
    shards = read_weight_map(index)
    opened = {shard: SafetensorsFile(directory / shard) for shard in sorted(set(shards.values()))}
    for name, shard in shards.items():
        if name not in opened[shard].entries:
            msg = (
                f"model file {opened[shard].path}: tensor {name} is missing, "
                f"{index.path.name} says it is here"
            )
            raise ModelFileError(msg)
    return {name: opened[shard] for name, shard in shards.items()}
