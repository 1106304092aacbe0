"""The native scheduler, typed: which requests run in the next step, and on which blocks."""

from extkv.sched.scheduler import Scheduler, SchedulingPolicy
from extkv.sched.steps import (
    FinishReason,
    PrefixCacheStats,
    RequestOutput,
    SchedulerStats,
    StepOutput,
    StepPlan,
)

__all__ = [
    "FinishReason",
    "PrefixCacheStats",
    "RequestOutput",
    "Scheduler",
    "SchedulerStats",
    "SchedulingPolicy",
    "StepOutput",
    "StepPlan",
]
