//! The fuzz targets over their committed corpus and over changes of it: a short run of what
//! `make fuzz` does for as long as it is told.

#![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

#[path = "support/numbers.rs"]
mod numbers;

use std::alloc::System;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use extkv_core::fuzzing::{Meter, TARGETS, Target};
use numbers::Numbers;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const METER: Meter = Meter { allocated_bytes: || ALLOCATOR.stats().bytes_allocated };

/// Bytes that begin something: they are likelier to lead far into a decoder.
const MARKERS: [u8; 27] = [
    0x00, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xc0, 0xc1, 0xc3, 0xc4, 0xc7, 0xca, 0xcb, 0xcc, 0xcf,
    0xd3, 0xd4, 0xd8, 0xd9, 0xdb, 0xdc, 0xdd, 0xde, 0xdf, 0xe0, 0xff,
];

/// A byte that is likely to begin something.
fn byte(numbers: &mut Numbers) -> u8 {
    match numbers.below(3) {
        0 => numbers.next().to_le_bytes()[0],
        _ => numbers.choose(&MARKERS),
    }
}

/// Changes one place of an input.
fn change(numbers: &mut Numbers, input: &mut Vec<u8>) {
    let at = numbers.below(input.len() + 1);
    let end = input.len().min(at + 1 + numbers.below(16));
    match numbers.below(8) {
        0..4 if at < input.len() => input[at] = byte(numbers),
        4 => drop(input.drain(at..end)),
        5 => {
            let copied = input[at..end].to_vec();
            let to = numbers.below(input.len() + 1);
            drop(input.splice(to..to, copied));
        }
        6 => input.truncate(at),
        _ => input.insert(at, byte(numbers)),
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
    let mut corpus_bytes = 0;
    for target in TARGETS {
        let inputs = corpus(target.0);
        assert!(inputs.len() > 10, "{} inputs for {}", inputs.len(), target.0);
        for input in inputs {
            corpus_bytes += 2 * input.len() + 1;
            check(target, &input);
            for _ in 0..num_changed() {
                let mut changed = input.clone();
                for _ in 0..=numbers.below(4) {
                    change(&mut numbers, &mut changed);
                }
                check(target, &changed);
            }
        }
        for len in 0..200 {
            let random: Vec<u8> = (0..len).map(|_| byte(&mut numbers)).collect();
            check(target, &random);
        }
    }
    assert!(corpus_bytes <= 300_000, "{corpus_bytes} bytes in the files of the corpus");
}
