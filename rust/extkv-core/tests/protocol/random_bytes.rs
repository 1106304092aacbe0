//! Random and mutated bytes: no decoder panics, and what decodes encodes to something that decodes
//! to the same bytes again.

use bytes::Bytes;
use extkv_core::protocol::{
    AbortRequests, ColumnarOutputs, CoordinatorCommand, CoordinatorNews, EngineCoreOutputs,
    EngineCoreReadyResponse, EngineCoreRequest, EngineHandshakeMetadata, HandshakeMessage, Profile,
    StartDpWave, UtilityCall, Wire, decode, encode,
};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::golden::golden_of_both;

fn check_one<T: Wire>(frames: &[Bytes], profile: Profile) {
    let Ok(decoded) = decode::<T>(frames, profile) else { return };
    let Ok(first) = encode(&decoded.message, profile) else { return };
    let again = decode::<T>(&first, profile).unwrap();
    assert!(again.skipped.is_empty());
    assert_eq!(encode(&again.message, profile).unwrap(), first);
}

/// Runs every decoder over the frames in every profile.
pub(crate) fn check_all(frames: &[Bytes]) {
    for profile in Profile::ALL {
        check_one::<EngineCoreOutputs>(frames, profile);
        check_one::<ColumnarOutputs>(frames, profile);
        check_one::<EngineCoreRequest>(frames, profile);
        check_one::<UtilityCall>(frames, profile);
        check_one::<AbortRequests>(frames, profile);
        check_one::<StartDpWave>(frames, profile);
        check_one::<HandshakeMessage>(frames, profile);
        check_one::<EngineHandshakeMetadata>(frames, profile);
        check_one::<EngineCoreReadyResponse>(frames, profile);
        check_one::<CoordinatorNews>(frames, profile);
        check_one::<CoordinatorCommand>(frames, profile);
        let rows = decode::<EngineCoreOutputs>(frames, profile);
        if let Ok(columns) = decode::<ColumnarOutputs>(frames, profile) {
            let rows = rows.unwrap();
            assert_eq!(columns.skipped, rows.skipped);
            let from_columns = encode(&columns.message, profile).unwrap();
            assert_eq!(from_columns, encode(&rows.message, profile).unwrap());
        }
    }
}

/// All golden messages of both versions.
pub(crate) fn corpus() -> Vec<Vec<Bytes>> {
    let files = ["request", "outputs", "utility_output", "utility_request", "control", "handshake"];
    let lines = files.into_iter().flat_map(golden_of_both);
    lines.chain(golden_of_both("coordinator")).map(|(_, line)| line.frames).collect()
}

/// A change of one place of the first frame.
#[derive(Debug, Clone)]
pub(crate) enum Mutation {
    Set(Index, u8),
    Insert(Index, Vec<u8>),
    Remove(Index, usize),
    Copy(Index, Index, usize),
    Cut(Index),
}

pub(crate) fn mutation() -> impl Strategy<Value = Mutation> {
    // Bytes that begin something are likelier to lead far into a decoder.
    let interesting = prop_oneof![
        any::<u8>(),
        prop::sample::select(vec![
            0x00, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xc0, 0xc1, 0xc3, 0xc4, 0xc7, 0xca, 0xcb,
            0xcc, 0xcf, 0xd3, 0xd4, 0xd8, 0xd9, 0xdb, 0xdc, 0xdd, 0xde, 0xdf, 0xe0, 0xff,
        ])
    ];
    prop_oneof![
        4 => (any::<Index>(), interesting.clone()).prop_map(|(at, byte)| Mutation::Set(at, byte)),
        2 => (any::<Index>(), prop::collection::vec(interesting, 1..6))
            .prop_map(|(at, bytes)| Mutation::Insert(at, bytes)),
        1 => (any::<Index>(), 1..8_usize).prop_map(|(at, len)| Mutation::Remove(at, len)),
        1 => (any::<Index>(), any::<Index>(), 1..32_usize)
            .prop_map(|(from, to, len)| Mutation::Copy(from, to, len)),
        1 => any::<Index>().prop_map(Mutation::Cut),
    ]
}

impl Mutation {
    pub(crate) fn apply(&self, bytes: &mut Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        let size = bytes.len();
        match self {
            Self::Set(at, byte) => bytes[at.index(size)] = *byte,
            Self::Insert(at, inserted) => {
                let at = at.index(size);
                drop(bytes.splice(at..at, inserted.iter().copied()));
            }
            Self::Remove(at, len) => {
                let at = at.index(size);
                drop(bytes.drain(at..size.min(at + len)));
            }
            Self::Copy(from, to, len) => {
                let from = from.index(size);
                let copied = bytes[from..size.min(from + len)].to_vec();
                let to = to.index(size);
                drop(bytes.splice(to..to, copied));
            }
            Self::Cut(at) => bytes.truncate(at.index(size)),
        }
    }
}

/// Cases per test: few for every run, more with `EXTKV_FUZZ_CASES` for a search.
fn num_cases() -> u32 {
    std::env::var("EXTKV_FUZZ_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(2000)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: num_cases(), failure_persistence: None, ..Default::default() })]

    #[test]
    fn random_bytes_never_panic(
        frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 0..3)
    ) {
        check_all(&frames.into_iter().map(Bytes::from).collect::<Vec<_>>());
    }

    #[test]
    fn mutated_golden_messages_never_panic(
        which in any::<Index>(),
        mutations in prop::collection::vec(mutation(), 1..5)
    ) {
        let corpus = corpus_once();
        let mut frames = which.get(corpus).clone();
        let mut bytes = frames[0].to_vec();
        for mutation in mutations {
            mutation.apply(&mut bytes);
        }
        frames[0] = bytes.into();
        check_all(&frames);
    }
}

fn corpus_once() -> &'static [Vec<Bytes>] {
    static CORPUS: std::sync::OnceLock<Vec<Vec<Bytes>>> = std::sync::OnceLock::new();
    CORPUS.get_or_init(corpus)
}
