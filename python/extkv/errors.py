"""Every exception that extkv raises on purpose.

All derive from `ExtkvError`. Mistakes in arguments are also `ValueError`, a full device is also
`MemoryError`; so code written for vLLM's or torch's classes catches what it expects.
"""

from __future__ import annotations


class ExtkvError(Exception):
    """Base of all errors of extkv."""


class InvalidArgumentError(ExtkvError, ValueError):
    """An argument has a value that can never work; the message says which and why."""


class CapacityError(InvalidArgumentError):
    """More bytes were asked for than a segment reserved."""


class GrowOnlyError(InvalidArgumentError):
    """A growing call was asked for a smaller size."""


class NoSuchDeviceError(InvalidArgumentError):
    """The device index does not exist."""


class OutOfMemoryError(ExtkvError, MemoryError):
    """The device or the address space is too full. Nothing changed.

    Attributes:
        requested: Bytes that the whole operation needed.
        available: Bytes that were free after it was undone; None where that is not known.
    """

    def __init__(
        self, message: str, *, requested: int | None = None, available: int | None = None
    ) -> None:
        super().__init__(message)
        self.requested = requested
        self.available = available


class FreedError(ExtkvError, RuntimeError):
    """The tensor was freed."""


class LiveViewsError(ExtkvError, RuntimeError):
    """A strict free was asked for while views live.

    Attributes:
        num_views: Number of live views.
    """

    def __init__(self, message: str, *, num_views: int = 0) -> None:
        super().__init__(message)
        self.num_views = num_views


class PoisonedError(ExtkvError, RuntimeError):
    """An earlier failure could not be undone; the tensor can only be freed."""


class StaleGrowthError(ExtkvError, RuntimeError):
    """A prepared growth no longer matches its tensor."""


class ForkedProcessError(ExtkvError, RuntimeError):
    """Memory of a parent process was used in a forked child."""


class DriverUnavailableError(ExtkvError, RuntimeError):
    """The device's driver cannot be used; the message says why."""


class DriverError(ExtkvError, RuntimeError):
    """A driver call failed for another reason than memory. Nothing changed.

    Attributes:
        call: Name of the call, for example ``"set_access"``.
        code: The driver's error number, None where it gave none.
    """

    def __init__(self, message: str, *, call: str | None = None, code: int | None = None) -> None:
        super().__init__(message)
        self.call = call
        self.code = code


class MappingLimitError(DriverError, MemoryError):
    """The process holds as many memory mappings as the kernel allows (`vm.max_map_count`)."""


class LayoutError(InvalidArgumentError):
    """A spec, a layout or a cache plan cannot be, or was asked about blocks it does not have."""


class SizingError(ExtkvError, ValueError):
    """A size of the cache cannot be given; the message says why and what to change."""


class CacheTooSmallError(SizingError, MemoryError):
    """Too few blocks fit for one request of the longest length.

    Attributes:
        longest_len: Tokens of the longest request that fits.
        needed_blocks: Blocks that one request of `max_model_len` tokens needs.
        available_blocks: Blocks that fit.
    """

    def __init__(
        self,
        message: str,
        *,
        longest_len: int = 0,
        needed_blocks: int = 0,
        available_blocks: int = 0,
    ) -> None:
        super().__init__(message)
        self.longest_len = longest_len
        self.needed_blocks = needed_blocks
        self.available_blocks = available_blocks


class RankError(ExtkvError, RuntimeError):
    """Ranks could not agree; every rank raises it and keeps its old state."""


class SizingOrderError(ExtkvError, RuntimeError):
    """The steps of sizing were called in an order that cannot work."""


class SchedulerError(ExtkvError, ValueError):
    """A call that the scheduler refuses. Nothing changed, and a step in flight is still in flight.

    The message says what was asked, what was found and the limit.
    """


class InvalidRequestError(SchedulerError):
    """A new request can never run: it is empty, too long, too large, or its id is in use."""


class UnknownRequestError(SchedulerError):
    """No live request has this id; perhaps it has ended."""


class SpeculationError(ExtkvError, ValueError):
    """A call of planning, estimating or deciding about drafts that cannot be. Nothing changed."""


class CalibrationError(SpeculationError):
    """Rounds or a temperature file cannot be used; the message says why."""


class CostTableError(SpeculationError):
    """A cost table is flat, noisy, damaged or not one; the message says why."""


class ModelFileError(ExtkvError, ValueError):
    """A model file is missing, damaged, or of a kind that extkv does not know."""


class DeviceLostError(ExtkvError, RuntimeError):
    """A device reported an error while it computed; what it computed last is not to be used."""


class MissingPackageError(ExtkvError, ImportError):
    """A package that extkv does not need otherwise is not installed; the message says which."""


class UnsupportedDrafterError(ModelFileError):
    """A drafter is of a known kind that extkv cannot run yet; the message says which."""


class DrafterMismatchError(InvalidArgumentError):
    """A drafter cannot draft for this target; the message names the two values that differ."""


class ProtocolError(ExtkvError, ValueError):
    """Bytes that are no message; nothing of them was used.

    Attributes:
        path: Where they are wrong, such as ``"outputs[3].new_logprobs.logprobs"``; empty for the
            message itself.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class InvalidMessageError(InvalidArgumentError, TypeError):
    """A field of a message was given a value that it cannot have.

    Attributes:
        path: The field.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class TransportError(ExtkvError, RuntimeError):
    """A connection to an engine or a front end cannot be made or used; the message says which."""


class TransportClosedError(TransportError):
    """The transport was closed."""


class NotConnectedError(TransportError, ConnectionError):
    """A peer has not come or has gone."""


class StalledPeerError(TransportError):
    """A peer does not read what it is sent, and too much waits for it. Nothing was sent."""


class TransportTimeoutError(TransportError, TimeoutError):
    """Something did not come in time."""


class MalformedMessageError(TransportError, ValueError):
    """A message cannot be read; the message says where."""


class EngineDeadError(TransportError):
    """An engine died or its connection broke; its requests and calls have ended."""


class SlowReaderError(TransportError):
    """A stream was ended because too much waited in it and nobody took it."""


class UtilityCallError(TransportError):
    """An engine says that a call has failed; the message is the engine's text."""


class UnsupportedRequestError(InvalidArgumentError):
    """A request asks for something that this engine cannot do."""


class GrammarError(InvalidArgumentError):
    """A constraint of structured outputs cannot be used; the message has the reason."""


def parameter_error(name: str, value: object, expected: str) -> InvalidArgumentError:
    """Return the error for a parameter: what it is and what was expected."""
    return InvalidArgumentError(f"{name} is {value!r:.100}, expected {expected}")
