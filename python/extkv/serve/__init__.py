"""Serve extkv's engine behind vLLM's front ends: `EngineService` between an `LLM` and a connection."""

from extkv.serve.service import EngineService

__all__ = ["EngineService"]
