//! Counters and gauges as dictionaries.

use dspark_sched::{PrefixCacheStats, SchedulerStats};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

pub(super) fn stats_dict<'py>(
    py: Python<'py>,
    stats: &SchedulerStats,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = [
        ("num_running", u64::from(stats.num_running)),
        ("num_waiting", u64::from(stats.num_waiting)),
        ("num_blocks", u64::from(stats.num_blocks.0)),
        ("num_free_blocks", u64::from(stats.num_free_blocks.0)),
        ("num_cached_blocks", u64::from(stats.num_cached_blocks.0)),
        ("num_preemptions", stats.num_preemptions),
        ("num_draft_tokens", stats.num_draft_tokens),
        ("num_accepted_tokens", stats.num_accepted_tokens),
    ]
    .into_py_dict(py)?;
    dict.set_item("prefix_cache", prefix_cache_dict(py, &stats.prefix_cache)?)?;
    dict.set_item("prefix_cache_resumed", prefix_cache_dict(py, &stats.prefix_cache_resumed)?)?;
    Ok(dict)
}

fn prefix_cache_dict<'py>(
    py: Python<'py>,
    stats: &PrefixCacheStats,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = [
        ("num_requests", stats.num_requests),
        ("num_query_tokens", stats.num_query_tokens),
        ("num_hit_tokens", stats.num_hit_tokens),
    ]
    .into_py_dict(py)?;
    dict.set_item("hit_ratio", stats.hit_ratio())?;
    Ok(dict)
}
