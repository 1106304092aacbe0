"""Enumerations of the wire, with vLLM's names and numbers."""

from __future__ import annotations

import enum


class RequestType(enum.IntEnum):
    """What a request frame holds; one byte in a frame of its own before the payload."""

    ADD = 0
    ABORT = 1
    START_DP_WAVE = 2
    UTILITY = 3

    @property
    def frame(self) -> bytes:
        """The type frame."""
        return bytes([self])


class RequestOutputKind(enum.IntEnum):
    """When output of a request is wanted."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class FinishReason(enum.IntEnum):
    """Why a request ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


class EngineCoreEventType(enum.IntEnum):
    """What happened to a request."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3
