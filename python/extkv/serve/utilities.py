"""Methods that front ends call on an engine, by vLLM's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from extkv.errors import ExtkvError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from extkv.serve.work import EngineWork

PAUSE_MODES = ("abort", "wait", "keep")
_NO_LORA = "LoRA adapters are not supported by extkv"
_NO_SLEEP = "sleep mode is not supported by extkv"
_REFUSALS = {
    "add_lora": _NO_LORA,
    "remove_lora": _NO_LORA,
    "pin_lora": _NO_LORA,
    "sleep": _NO_SLEEP,
    "wake_up": _NO_SLEEP,
    "profile": "profiling is not supported by extkv",
    "collective_rpc": "extkv has no workers to call",
    "save_sharded_state": "extkv saves no weights",
}


class UtilityMethods:
    """Answer the calls of front ends.

    Args:
        work: What the engine works on.
    """

    def __init__(self, work: EngineWork) -> None:
        self._work = work
        self._methods: dict[str, Callable[..., Any]] = {
            "get_supported_tasks": lambda: ["generate"],
            "reset_mm_cache": lambda: None,
            "reset_encoder_cache": lambda: None,
            "reset_prefix_cache": self._reset_prefix_cache,
            "is_sleeping": lambda: False,
            "list_loras": list,
            "pause_scheduler": self._pause,
            "resume_scheduler": work.resume,
            "is_scheduler_paused": lambda: work.is_paused,
        }

    def call(self, method: str, args: Sequence[Any]) -> object:
        """Return what a method gives.

        Raises:
            InvalidArgumentError: If there is no such method, it is refused, or its arguments do not
                fit.
        """
        if method in _REFUSALS:
            raise InvalidArgumentError(_REFUSALS[method])
        found = self._methods.get(method)
        if found is None:
            raise InvalidArgumentError(
                f"{method} is no method of this engine, known: {', '.join(sorted(self._methods))}"
            )
        try:
            return found(*args)
        except TypeError as error:
            raise InvalidArgumentError(f"{len(args)} arguments do not fit: {error}") from error

    def failure_text(self, method: str, error: ExtkvError) -> str:
        """Return what a caller is told of a failure, in vLLM's words."""
        return f"Call to {method} method failed: {error}"

    def _reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached prefixes; False if requests run and may not be disturbed."""
        del reset_connector
        if reset_running_requests:
            raise InvalidArgumentError("running requests cannot be reset by extkv")
        return self._work.reset_prefix_cache()

    def _pause(self, mode: str = "abort", clear_cache: bool = True) -> None:
        if mode not in PAUSE_MODES:
            raise InvalidArgumentError(f"mode is {mode!r}, known: {', '.join(PAUSE_MODES)}")
        self._work.pause(mode, clear_cache=clear_cache)
