//! Decoders allocate no more than a small multiple of their input, whatever headers announce.

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
/// What an error and the decoder itself may need.
const LIMIT_FIXED: usize = 4096;

fn allocated<T: Wire>(frames: &[Bytes]) -> usize {
    let region = Region::new(ALLOCATOR);
    drop(decode::<T>(frames, Profile::V0_33));
    let change = region.change();
    change.bytes_allocated
}

fn check<T: Wire>(name: &str, bytes: Vec<u8>) {
    let limit = bytes.len() * LIMIT_PER_BYTE + LIMIT_FIXED;
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

#[test]
fn allocation_is_bounded_by_the_input() {
    let count = 20_000;
    let announced = vec![0xdd, 0xff, 0xff, 0xff, 0xff];
    check::<AbortRequests>("announced only", announced);
    check::<AbortRequests>("empty texts", array_of(b"\xa0", count));
    check::<AbortRequests>("wrong members", array_of(b"\x01", count));
    check::<UtilityCall>("nils", with_head(b"\x94\x00\x01\xa1f", &array_of(b"\xc0", count)));
    check::<UtilityCall>("lists", with_head(b"\x94\x00\x01\xa1f", &array_of(b"\x90", count)));
    let outputs = array_of(b"\x92\xa0\x90", count);
    check::<ColumnarOutputs>("smallest outputs", with_head(b"\x92\x00", &outputs));
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
}
