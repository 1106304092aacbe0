//! Decoders allocate no more than a small multiple of their input, whatever headers announce.

#[path = "protocol/golden.rs"]
#[allow(dead_code, clippy::unwrap_used, reason = "shared with the protocol tests")]
mod golden;

use std::alloc::System;

use bytes::Bytes;
use extkv_core::protocol::{
    AbortRequests, ColumnarOutputs, EngineCoreOutputs, EngineCoreRequest, Profile, UtilityCall,
    Wire, decode,
};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Bytes allocated in all, growth included, per byte of input.
const LIMIT_PER_BYTE: usize = 64;
/// The same for outputs as rows, of which each takes more than the three bytes that it may have.
const ROWS_LIMIT_PER_BYTE: usize = 192;
/// What an error and the decoder itself may need.
const LIMIT_FIXED: usize = 4096;

fn allocated<T: Wire>(frames: &[Bytes]) -> usize {
    let region = Region::new(ALLOCATOR);
    drop(decode::<T>(frames, Profile::V0_33));
    let change = region.change();
    change.bytes_allocated
}

fn check<T: Wire>(name: &str, bytes: Vec<u8>) {
    check_limit::<T>(name, bytes, LIMIT_PER_BYTE);
}

fn check_limit<T: Wire>(name: &str, bytes: Vec<u8>, limit_per_byte: usize) {
    let limit = bytes.len() * limit_per_byte + LIMIT_FIXED;
    let len = bytes.len();
    let found = allocated::<T>(&[bytes.into()]);
    assert!(found <= limit, "{name}: {found} bytes allocated for {len} bytes of input");
}

/// An array of `count` equal members.
fn array_of(member: &[u8], count: u32) -> Vec<u8> {
    let mut bytes = vec![0xdd];
    bytes.extend(count.to_be_bytes());
    bytes.extend(member.repeat(count as usize));
    bytes
}

fn with_head(head: &[u8], body: &[u8]) -> Vec<u8> {
    [head, body].concat()
}

/// Counts are of the whole process, so there is one test.
#[test]
fn allocation_is_bounded_by_the_input() {
    check_hand_made_messages();
    check_golden_messages();
}

fn check_hand_made_messages() {
    let count = 20_000;
    let announced = vec![0xdd, 0xff, 0xff, 0xff, 0xff];
    check::<AbortRequests>("announced only", announced);
    check::<AbortRequests>("empty texts", array_of(b"\xa0", count));
    check::<AbortRequests>("wrong members", array_of(b"\x01", count));
    check::<UtilityCall>("nils", with_head(b"\x94\x00\x01\xa1f", &array_of(b"\xc0", count)));
    check::<UtilityCall>("lists", with_head(b"\x94\x00\x01\xa1f", &array_of(b"\x90", count)));
    let outputs = array_of(b"\x92\xa0\x90", count);
    let smallest = with_head(b"\x92\x00", &outputs);
    check::<ColumnarOutputs>("smallest outputs", smallest.clone());
    check_limit::<EngineCoreOutputs>("smallest outputs", smallest, ROWS_LIMIT_PER_BYTE);
    let broken = with_head(b"\x92\x00", &array_of(b"\x91", count));
    check::<ColumnarOutputs>("broken outputs", broken.clone());
    check::<EngineCoreOutputs>("broken outputs", broken);
    // Words of bad_words_token_ids: a vector for each byte.
    let words =
        with_head(b"\x99\xa1r\xc0\xc0\x81\xb4_bad_words_token_ids", &array_of(b"\x90", count));
    check::<EngineCoreRequest>("bad words", words);
    // Members of NestedTensors: a tree node for each byte.
    let nested = with_head(
        b"\x99\xa1r\xc0\x91\x81\xa4data\x81\xa1x\x82\xa5field\x92\xa7batched\x80\xa4data",
        &array_of(b"\x90", count),
    );
    check::<EngineCoreRequest>("nested tensors", nested);
    let slices = with_head(
        b"\x99\xa1r\xc0\x91\x81\xa4data\x81\xa1x\x81\xa5field\x92\xa4flat\x81\xa6slices",
        &array_of(b"\x90", count),
    );
    check::<EngineCoreRequest>("nested slices", slices);
    // A set is sorted and then built anew.
    let head = b"\x96\x00\x90\xc0\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xc0";
    let different: Vec<u8> = (0..count)
        .flat_map(|i| [&[0xa4][..], &i.to_be_bytes().map(|byte| byte & 0x7f)].concat())
        .collect();
    let mut set = vec![0xdd];
    set.extend(count.to_be_bytes());
    set.extend(different);
    check::<EngineCoreOutputs>("set of texts", with_head(head, &set));
    check::<EngineCoreOutputs>("set of one text", with_head(head, &array_of(b"\xa0", count)));
    let stats = |key: &[u8], body: &[u8]| [b"\x93\x00\x90\x81", key, body].concat();
    let map =
        |entry: &[u8]| [&[0xdf][..], &count.to_be_bytes(), &entry.repeat(count as usize)].concat();
    let adapters = stats(b"\xb5waiting_lora_adapters", &map(b"\xa0\x00"));
    check::<EngineCoreOutputs>("map by text", adapters);
    let bias = with_head(b"\x99\xa1r\xc0\xc0\x81\xaalogit_bias", &map(b"\x00\x00"));
    check::<EngineCoreRequest>("map by token", bias);
    let ids = with_head(b"\x92\xa1r", &array_of(b"\x00", count));
    check::<EngineCoreRequest>("tokens", ids);
}

fn check_golden_messages() {
    for line in golden::golden("outputs.jsonl").into_iter().chain(golden::golden("request.jsonl")) {
        let size: usize = line.frames.iter().map(Bytes::len).sum();
        for found in [
            allocated::<EngineCoreOutputs>(&line.frames),
            allocated::<ColumnarOutputs>(&line.frames),
            allocated::<EngineCoreRequest>(&line.frames),
        ] {
            let limit = size * LIMIT_PER_BYTE + LIMIT_FIXED;
            assert!(found <= limit, "{}: {found} bytes for {size}", line.name);
        }
    }
}
