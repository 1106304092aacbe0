//! What holds for every input of every decoder, as functions that a fuzzer and the tests call.
//!
//! Each target takes any bytes, runs its decoders in every wire profile, and panics if a property is
//! broken: a decoder panics or allocates more than its input allows, an error of a field has no path,
//! rows and columns differ, or what was decoded does not come back from its own encoding.

#![allow(clippy::panic, clippy::expect_used, reason = "a broken property ends the fuzzer's run")]

mod messages;
mod outputs;

use bytes::Bytes;

use crate::protocol::Profile;

/// A fuzz target: its name, and the function that checks one input.
pub type Target = (&'static str, fn(&[u8], &Meter));

/// Every target.
pub const TARGETS: [Target; 9] = [
    ("request", messages::request),
    ("outputs", outputs::outputs),
    ("arrays", outputs::arrays),
    ("stats", outputs::stats),
    ("utility", messages::utility),
    ("handshake", messages::handshake),
    ("coordinator", messages::coordinator),
    ("zmtp_handshake", crate::transport::fuzzing::handshake),
    ("zmtp_messages", crate::transport::fuzzing::messages),
];

/// The target of this name.
#[must_use]
pub fn target(name: &str) -> Option<Target> {
    TARGETS.into_iter().find(|(known, _)| *known == name)
}

/// Counts what decoders allocate.
#[derive(Debug, Clone, Copy)]
pub struct Meter {
    /// Bytes that were allocated so far, growth included.
    pub allocated_bytes: fn() -> usize,
}

impl Meter {
    /// Runs a decoder and checks that it allocates at most `per_byte` bytes for each byte of input,
    /// and `fixed` bytes.
    pub(crate) fn measure<T>(
        &self,
        num_input_bytes: usize,
        (per_byte, fixed): (usize, usize),
        decode: impl FnOnce() -> T,
    ) -> T {
        let before = (self.allocated_bytes)();
        let result = decode();
        let allocated = (self.allocated_bytes)() - before;
        let limit = num_input_bytes * per_byte + fixed;
        assert!(
            allocated <= limit,
            "{allocated} bytes allocated for {num_input_bytes} bytes of input, the limit is {limit}"
        );
        result
    }
}

/// Most auxiliary frames of an input.
const MAX_AUX_FRAMES: usize = 8;
/// The data of all auxiliary frames: what it is decides nothing.
static AUX_DATA: [u8; 1 << 16] = [7; 1 << 16];

/// The frames that an input stands for. It begins with the number of auxiliary frames and their
/// lengths, two bytes each; the first frame is the rest after `head`.
fn frames_of(data: &[u8], head: &[u8]) -> Vec<Bytes> {
    let (count, mut rest) = data.split_first().unwrap_or((&0, &[]));
    let mut aux_frames = Vec::new();
    for _ in 0..usize::from(*count).min(MAX_AUX_FRAMES) {
        let Some((len, after)) = rest.split_first_chunk::<2>() else { break };
        let len = usize::from(u16::from_be_bytes(*len));
        aux_frames.push(Bytes::from_static(AUX_DATA.get(..len).unwrap_or(&AUX_DATA)));
        rest = after;
    }
    [vec![[head, rest].concat().into()], aux_frames].concat()
}

fn for_every_profile(check: impl FnMut(Profile)) {
    Profile::ALL.into_iter().for_each(check);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{AbortRequests, DecodeError, DecodeProblem, DecodeResult, Wire, Writer};
    use std::sync::atomic::{AtomicUsize, Ordering};

    const NO_METER: Meter = Meter { allocated_bytes: || 0 };

    #[test]
    fn every_target_takes_an_empty_input() {
        for (_, run) in TARGETS {
            run(&[], &NO_METER);
        }
    }

    #[test]
    #[should_panic(expected = "100 bytes allocated for 3 bytes of input, the limit is 34")]
    fn a_decoder_that_allocates_too_much_is_found() {
        static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
        let meter = Meter { allocated_bytes: || ALLOCATED.load(Ordering::Relaxed) };
        meter.measure(3, (8, 10), || ALLOCATED.fetch_add(100, Ordering::Relaxed));
    }

    #[test]
    fn auxiliary_frames_have_the_lengths_that_the_input_says() {
        let frames = frames_of(b"\x02\x00\x03\x01\x00rest", b"head");
        let lengths: Vec<usize> = frames.iter().map(Bytes::len).collect();
        assert_eq!(lengths, [8, 3, 256]);
        assert_eq!(frames[0], "headrest");
        assert_eq!(frames_of(b"\x02\x00", b"").len(), 1);
    }

    /// A message whose decoder names no field, or whose encoder writes one member too few.
    #[derive(Debug, PartialEq)]
    struct Broken(AbortRequests);

    impl Wire for Broken {
        fn read(reader: &mut crate::protocol::Reader<'_>) -> DecodeResult<Self> {
            let ids = AbortRequests::read(reader)?;
            if ids.request_ids.len() > 2 {
                return Err(DecodeError::from(DecodeProblem::MissingKey));
            }
            Ok(Self(ids))
        }

        fn write(&self, writer: &mut Writer) {
            let request_ids = self.0.request_ids.iter().skip(1).cloned().collect();
            AbortRequests { request_ids }.write(writer);
        }
    }

    #[test]
    #[should_panic(expected = "no path: required, but missing")]
    fn an_error_without_a_path_is_found() {
        messages::check::<Broken>(
            &[Bytes::from_static(b"\x93\xa0\xa0\xa0")],
            Profile::V0_33,
            &NO_METER,
        );
    }

    #[test]
    #[should_panic(expected = "assertion `left == right` failed")]
    fn an_encoder_that_loses_something_is_found() {
        messages::check::<Broken>(
            &[Bytes::from_static(b"\x92\xa0\xa0")],
            Profile::V0_33,
            &NO_METER,
        );
    }
}
