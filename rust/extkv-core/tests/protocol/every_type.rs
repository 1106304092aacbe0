//! Every message type, with random fields: it decodes to itself, and tolerates one more element or
//! key, an int for a float, and nothing that cuts it short.

use std::fmt::Debug;

use bytes::Bytes;
use extkv_core::protocol::coordinator::EngineLoad;
use extkv_core::protocol::handshake::{EngineZmqAddresses, KvEventsConfig};
use extkv_core::protocol::multimodal::{
    BatchedField, FlatField, MultiModalField, MultiModalFieldElem, PlaceholderRange, SharedField,
    Slice,
};
use extkv_core::protocol::pooling::{LateChunkingParams, LateInteractionParams};
use extkv_core::protocol::request::{KvHintAction, KvHintsEnvelope};
use extkv_core::protocol::sampling::RepetitionDetectionParams;
use extkv_core::protocol::stats::{
    CudaGraphStat, DebugPerfStats, KvCacheEvictionEvent, PerfStats, PrefixCacheStats,
    RequestSpecDecodeMetrics, SchedulerIterationDetails, SpecDecodingStats,
};
use extkv_core::protocol::{
    AbortRequests, CoordinatorCommand, CoordinatorNews, EngineCoreEvent, EngineCoreOutput,
    EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest, EngineHandshakeMetadata,
    HandshakeMessage, LogprobsLists, LogprobsTensors, LoraRequest, MultiModalFeatureSpec,
    NumpyArray, PoolingParams, PrefillStats, Profile, RequestError, SamplingMaskLists,
    SamplingParams, SchedulerStats, StartDpWave, StructuredOutputsParams, TorchTensor, UtilityCall,
    UtilityOutput, UtilityResult, Visible, Wire, decode, encode,
};
use proptest::prelude::*;
use rmpv::Value;

use crate::numbers::Numbers;
use crate::pack::pack;
use crate::random_source::random;

fn tree_of(frames: &[Bytes]) -> Value {
    rmpv::decode::read_value(&mut frames[0].as_ref()).unwrap()
}

/// The same message with another first frame.
fn with_tree(frames: &[Bytes], tree: &Value) -> Vec<Bytes> {
    [vec![pack(tree)], frames[1..].to_vec()].concat()
}

/// Puts an int in the place of every float.
fn floats_to_ints(tree: &mut Value) {
    match tree {
        Value::F64(_) => *tree = 1.into(),
        Value::Array(members) => members.iter_mut().for_each(floats_to_ints),
        Value::Map(entries) => entries.iter_mut().for_each(|(_, value)| floats_to_ints(value)),
        _ => {}
    }
}

/// Checks a message of random fields, which is made what reading makes of it by `filled_in`.
fn check_filled<T: Wire + Visible + PartialEq + Debug>(seed: u64, filled_in: impl Fn(T) -> T) {
    let message = filled_in(random(&mut Numbers(seed)));
    for profile in Profile::ALL {
        let frames = encode(&message, profile).unwrap();
        let decoded = decode::<T>(&frames, profile).unwrap();
        assert!(decoded.skipped.is_empty());
        assert_eq!(encode(&decoded.message, profile).unwrap(), frames);
        if profile == Profile::V0_33 {
            assert_eq!(decoded.message, message);
        }
        check_tolerance::<T>(&decoded.message, &frames, profile);
    }
}

fn check_tolerance<T: Wire + PartialEq + Debug>(message: &T, frames: &[Bytes], profile: Profile) {
    let tree = tree_of(frames);
    let mut with_ints = tree.clone();
    floats_to_ints(&mut with_ints);
    assert!(decode::<T>(&with_tree(frames, &with_ints), profile).is_ok());

    let mut longer = tree;
    match &mut longer {
        Value::Array(elements) => elements.push("later".into()),
        Value::Map(entries) => entries.insert(0, ("later".into(), Value::Nil)),
        other => panic!("{other} is neither an array nor a map"),
    }
    let decoded = decode::<T>(&with_tree(frames, &longer), profile).unwrap();
    assert_eq!(decoded.skipped.elements() + decoded.skipped.keys(), 1);
    assert_eq!(decoded.skipped.keys() == 1, matches!(longer, Value::Map(_)));
    assert_eq!(&decoded.message, message);

    let cut = [vec![frames[0].slice(..frames[0].len() - 1)], frames[1..].to_vec()].concat();
    assert!(decode::<T>(&cut, profile).is_err());
}

fn request(mut request: EngineCoreRequest) -> EngineCoreRequest {
    request.sampling_params = request.sampling_params.map(|params| Box::new(params.filled_in()));
    request
}

/// Runs the check for every type of a list.
macro_rules! check_types {
    ($seed:ident: $($Type:ty),* $(,)?) => {
        $(check_filled::<$Type>($seed, |message| message);)*
    };
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..Default::default() })]

    #[test]
    fn every_request_type_keeps_its_random_fields(seed in any::<u64>()) {
        check_filled(seed, request);
        check_filled(seed, SamplingParams::filled_in);
        check_types!(seed:
            PoolingParams, LateInteractionParams, LateChunkingParams, LoraRequest,
            StructuredOutputsParams, RepetitionDetectionParams, KvHintAction, KvHintsEnvelope,
            MultiModalFeatureSpec, MultiModalFieldElem, MultiModalField, BatchedField, SharedField,
            FlatField, PlaceholderRange, Slice, TorchTensor, UtilityCall,
        );
    }

    #[test]
    fn every_output_type_keeps_its_random_fields(seed in any::<u64>()) {
        check_types!(seed:
            EngineCoreOutputs, EngineCoreOutput, EngineCoreEvent, RequestError, LogprobsLists,
            LogprobsTensors, SamplingMaskLists, NumpyArray, UtilityOutput, UtilityResult,
            SchedulerStats, PrefixCacheStats, KvCacheEvictionEvent, SpecDecodingStats,
            CudaGraphStat, SchedulerIterationDetails, DebugPerfStats, PerfStats, PrefillStats,
            RequestSpecDecodeMetrics,
        );
    }

    #[test]
    fn every_handshake_and_coordinator_type_keeps_its_random_fields(seed in any::<u64>()) {
        check_types!(seed:
            HandshakeMessage, EngineHandshakeMetadata, EngineZmqAddresses, KvEventsConfig,
            EngineCoreReadyResponse, StartDpWave, EngineLoad, CoordinatorNews, CoordinatorCommand,
        );
    }

    #[test]
    fn lists_of_requests_to_abort_keep_their_ids(ids in prop::collection::vec(".{0,40}", 0..40)) {
        let abort = AbortRequests { request_ids: ids };
        let frames = encode(&abort, Profile::V0_32).unwrap();
        prop_assert_eq!(decode::<AbortRequests>(&frames, Profile::V0_32).unwrap().message, abort);
    }
}
