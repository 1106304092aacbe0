//! Runs one input of a target of [`extkv_core::fuzzing`], with an allocator that counts.

use std::alloc::System;

use extkv_core::fuzzing::Meter;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Counts this process's allocations.
pub const METER: Meter = Meter { allocated_bytes: || ALLOCATOR.stats().bytes_allocated };

/// The fuzz target of this name.
#[macro_export]
macro_rules! fuzz {
    ($name:literal) => {
        libfuzzer_sys::fuzz_target!(|data: &[u8]| {
            let (_, run) = extkv_core::fuzzing::target($name).expect("a known target");
            run(data, &$crate::METER);
        });
    };
}
