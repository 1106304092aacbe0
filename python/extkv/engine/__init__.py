"""Engine: many requests in one batch over a cache that is sized after everything else."""

from extkv.engine.llm import LLM

__all__ = ["LLM"]
