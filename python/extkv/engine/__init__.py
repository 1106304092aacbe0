"""Engine: many requests in one batch over a cache that is sized after everything else."""

from extkv.engine.llm import LLM
from extkv.engine.outputs import CompletionOutput, RequestOutput
from extkv.engine.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]
