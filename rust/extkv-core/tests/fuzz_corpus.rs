//! The fuzz targets over their committed corpus and over changes of it: a short run of what
//! `make fuzz` does for as long as it is told.

#![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

use std::alloc::System;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use extkv_core::fuzzing::{Meter, TARGETS, Target};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const METER: Meter = Meter { allocated_bytes: || ALLOCATOR.stats().bytes_allocated };

/// Bytes that begin something: they are likelier to lead far into a decoder.
const MARKERS: [u8; 27] = [
    0x00, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xc0, 0xc1, 0xc3, 0xc4, 0xc7, 0xca, 0xcb, 0xcc, 0xcf,
    0xd3, 0xd4, 0xd8, 0xd9, 0xdb, 0xdc, 0xdd, 0xde, 0xdf, 0xe0, 0xff,
];

/// Numbers that are the same in every run (splitmix64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit as u64).unwrap()
    }

    fn byte(&mut self) -> u8 {
        match self.below(3) {
            0 => self.next().to_le_bytes()[0],
            _ => MARKERS[self.below(MARKERS.len())],
        }
    }

    /// Changes one place of an input.
    fn change(&mut self, input: &mut Vec<u8>) {
        let at = self.below(input.len() + 1);
        let end = input.len().min(at + 1 + self.below(16));
        match self.below(8) {
            0..4 if at < input.len() => input[at] = self.byte(),
            4 => drop(input.drain(at..end)),
            5 => {
                let copied = input[at..end].to_vec();
                let to = self.below(input.len() + 1);
                drop(input.splice(to..to, copied));
            }
            6 => input.truncate(at),
            _ => input.insert(at, self.byte()),
        }
    }
}

/// Inputs of a target, one a line in hexadecimal digits.
fn corpus(name: &str) -> Vec<Vec<u8>> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("fuzz/corpus/{name}.hex"));
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(bytes_of).collect()
}

fn bytes_of(hex: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    (0..hex.len()).step_by(2).map(byte).collect()
}

/// Changed inputs per input: few for every run, more with `EXTKV_FUZZ_CASES` for a search.
fn num_changed() -> usize {
    std::env::var("EXTKV_FUZZ_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(16)
}

fn check((name, run): Target, input: &[u8]) {
    let result = catch_unwind(AssertUnwindSafe(|| run(input, &METER)));
    let hex = || input.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert!(result.is_ok(), "target {name} fails for the input {}", hex());
}

/// Allocations are counted for the whole process, so there is one test.
#[test]
fn every_property_holds_for_the_corpus_for_changes_of_it_and_for_random_bytes() {
    let mut numbers = Numbers(1);
    for target in TARGETS {
        let inputs = corpus(target.0);
        assert!(inputs.len() > 10, "{} inputs for {}", inputs.len(), target.0);
        for input in inputs {
            check(target, &input);
            for _ in 0..num_changed() {
                let mut changed = input.clone();
                for _ in 0..=numbers.below(4) {
                    numbers.change(&mut changed);
                }
                check(target, &changed);
            }
        }
        for len in 0..200 {
            let random: Vec<u8> = (0..len).map(|_| numbers.byte()).collect();
            check(target, &random);
        }
    }
}
