"""Keys of a drafter's `config.json` that every producer spells in its own way."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from extkv.errors import ModelFileError

if TYPE_CHECKING:
    from extkv.models.json_file import JsonObject

NESTED = "dflash_config"


class Spelling(NamedTuple):
    """One way to spell a value.

    Attributes:
        key: The key.
        is_nested: Whether it stands in `dflash_config`.
        shift: What the file adds to a layer's id: 1 where 0 is the embedding output.
    """

    key: str
    is_nested: bool = False
    shift: int = 0

    @property
    def name(self) -> str:
        """The key with the object it stands in."""
        return f"{NESTED}.{self.key}" if self.is_nested else self.key

    def owner(self, values: JsonObject) -> JsonObject | None:
        """Return the object that would hold the key, None where the file has no such object."""
        return values.find_object(NESTED) if self.is_nested else values


MASK_TOKEN_SPELLINGS = (
    Spelling("mask_token_id", is_nested=True),
    Spelling("mask_token_id"),
    Spelling("dspark_noise_token_id"),
    Spelling("pard_token"),
    Spelling("ptd_token_id"),
)
TAP_SPELLINGS = (
    Spelling("aux_hidden_state_layer_ids", shift=1),
    Spelling("target_layer_ids", is_nested=True),
    Spelling("dspark_target_layer_ids"),
    Spelling("target_layer_ids"),
)


def read_mask_token_id(values: JsonObject) -> int:
    """Return the id of the mask token; the first spelling that the file has wins.

    Raises:
        ModelFileError: If the file has none, or its value is no integer.
    """
    spelling = mask_token_spelling(values)
    owner = spelling.owner(values)
    assert owner is not None
    return owner.require(spelling.key, int)


def mask_token_spelling(values: JsonObject) -> Spelling:
    """Return how a file spells the mask token.

    Raises:
        ModelFileError: If the file has none, or its value is no integer.
    """
    for spelling in MASK_TOKEN_SPELLINGS:
        owner = spelling.owner(values)
        if owner is not None and owner.find(spelling.key, int) is not None:
            return spelling
    raise _none_of(values, "a mask token id", MASK_TOKEN_SPELLINGS)


def read_tap_layer_ids(values: JsonObject) -> tuple[int, ...]:
    """Return the tapped layers, counted from 0 with -1 for the embedding output.

    The first spelling that the file has wins.

    Raises:
        ModelFileError: If the file has none, or its value is no array of integers.
    """
    spelling = tap_spelling(values)
    owner = spelling.owner(values)
    layer_ids = None if owner is None else owner.find_list(spelling.key, int)
    assert layer_ids is not None
    return tuple(layer_id - spelling.shift for layer_id in layer_ids)


def tap_spelling(values: JsonObject) -> Spelling:
    """Return how a file spells the tapped layers.

    Raises:
        ModelFileError: If the file has none, or its value is no array of integers.
    """
    for spelling in TAP_SPELLINGS:
        owner = spelling.owner(values)
        if owner is not None and owner.find_list(spelling.key, int) is not None:
            return spelling
    raise _none_of(values, "tap layers", TAP_SPELLINGS)


def read_samples_from_anchor(values: JsonObject, *, default: bool) -> bool:
    """Return whether every slot predicts: `sample_from_anchor`, or not `dspark_bonus_anchor`.

    Raises:
        ModelFileError: If the two contradict, or a value is no boolean.
    """
    samples = values.find("sample_from_anchor", bool)
    nested = values.find_object(NESTED)
    if samples is None and nested is not None:
        samples = nested.find("sample_from_anchor", bool)
    has_bonus = values.find("dspark_bonus_anchor", bool)
    if has_bonus is None:
        return default if samples is None else samples
    if samples is has_bonus:
        raise values.error(
            "dspark_bonus_anchor",
            f"is {has_bonus}",
            f"the opposite of sample_from_anchor {samples}",
        )
    return not has_bonus


def _none_of(values: JsonObject, what: str, spellings: tuple[Spelling, ...]) -> ModelFileError:
    names = ", ".join(spelling.name for spelling in spellings)
    return ModelFileError(f"model file {values.path}: names {what} under none of {names}")
