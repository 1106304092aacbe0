"""Serve extkv's engine behind vLLM's front ends: a service joins an `LLM` and a connection."""

from extkv.serve.service import EngineService

__all__ = ["EngineService"]
