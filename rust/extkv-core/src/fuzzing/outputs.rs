//! Decoders of outputs, as rows and as columns: both agree.

use std::mem::discriminant;

use bytes::Bytes;

use super::messages::{ALLOCATION_LIMIT, assert_same, check, check_decoder, check_stable};
use super::{Meter, for_every_profile, frames_of};
use crate::protocol::output::is_dead_marker;
use crate::protocol::{
    ColumnarOutputs, DecodeError, DecodeProblem, Decoded, EngineCoreOutputs, EngineCoreRequest,
    Profile, encode,
};
use crate::transport::peek;

/// What rows may allocate: an output of three bytes has some 250 of its own, and vectors double.
const ROWS_ALLOCATION_LIMIT: (usize, usize) = (192, 4096);

/// A batch of outputs.
pub(super) fn outputs(data: &[u8], meter: &Meter) {
    check_outputs(&frames_of(data, &[]), meter);
}

/// The statistics of a batch.
pub(super) fn stats(data: &[u8], meter: &Meter) {
    check_outputs(&frames_of(data, b"\x99\x00\x90"), meter);
}

/// The arrays of an output, and the embeddings of a request.
pub(super) fn arrays(data: &[u8], meter: &Meter) {
    check_outputs(&frames_of(data, b"\x99\x00\x91\xdc\x00\x12\xa1r\x91\x01"), meter);
    let frames = frames_of(data, b"\xdc\x00\x16\xa1r\xc0\xc0\xc0\xc0\x00\xc0\xc0\xc0");
    for_every_profile(|profile| drop(check::<EngineCoreRequest>(&frames, profile, meter)));
}

fn check_outputs(frames: &[Bytes], meter: &Meter) {
    let seen = peek::engine_index(frames);
    for_every_profile(|profile| {
        let rows =
            check_decoder::<EngineCoreOutputs>(frames, profile, ROWS_ALLOCATION_LIMIT, meter);
        let columns = check_decoder::<ColumnarOutputs>(frames, profile, ALLOCATION_LIMIT, meter);
        match (rows, columns) {
            (Ok(rows), Ok(columns)) => {
                assert!(!is_dead_marker(frames));
                let index = usize::try_from(rows.message.engine_index).ok();
                // An index that is left out is 0.
                assert!(seen == index || (seen.is_none() && index == Some(0)));
                check_agreement(&rows, &columns, profile);
            }
            (Err(rows), Err(columns)) => {
                assert!(holds_too_large_a_token(&columns) || is_same(&rows, &columns));
            }
            (Ok(_), Err(columns)) => assert!(holds_too_large_a_token(&columns), "{columns}"),
            (Err(rows), Ok(_)) => panic!("only rows refuse: {rows}"),
        }
    });
}

/// Whether columns refuse a token that rows hold.
fn holds_too_large_a_token(error: &DecodeError) -> bool {
    let expected = "an int in [0, 2**31)";
    matches!(error.problem(), DecodeProblem::OutOfRange { expected: e, .. } if *e == expected)
}

/// Whether both errors say the same of the same field, in words of their own.
fn is_same(rows: &DecodeError, columns: &DecodeError) -> bool {
    let of = |error: &DecodeError| (error.path(), discriminant(error.problem()));
    assert_eq!(of(rows), of(columns), "{rows} and {columns}");
    true
}

fn check_agreement(
    rows: &Decoded<EngineCoreOutputs>,
    columns: &Decoded<ColumnarOutputs>,
    profile: Profile,
) {
    assert_eq!(columns.skipped, rows.skipped);
    let (rows, columns) = (&rows.message, &columns.message);
    assert_eq!(columns.kind(), rows.kind());
    assert_same(&columns.to_rows().expect("decoded columns are rows"), rows);
    assert_eq!(encode(columns, profile), encode(rows, profile));
    check_stable(rows, profile, assert_same);
    check_stable(columns, profile, |found, expected| {
        assert_same(&found.to_rows(), &expected.to_rows());
    });
    check_columns(rows, columns);
}

fn check_columns(rows: &EngineCoreOutputs, columns: &ColumnarOutputs) {
    let columns = &columns.outputs;
    assert_eq!(columns.len(), rows.outputs.len());
    assert_eq!(columns.finish_reasons().len(), columns.len());
    assert_eq!(columns.token_offsets().len(), columns.len() + 1);
    for (index, row) in rows.outputs.iter().enumerate() {
        assert_eq!(columns.request_id(index), Some(row.request_id.as_str()));
        assert_eq!(columns.finish_reasons().get(index), Some(&row.finish_reason));
        let tokens = columns.tokens_of(index).iter().map(|id| id.unsigned_abs());
        assert!(tokens.eq(row.new_token_ids.iter().copied()));
    }
    let with_logprobs =
        rows.outputs.iter().enumerate().filter(|(_, row)| row.new_logprobs.is_some());
    let owners = columns.logprobs().iter().map(|(index, _)| *index as usize);
    assert!(owners.eq(with_logprobs.map(|(index, _)| index)));
    for (index, spans) in columns.logprobs() {
        let lists = rows.outputs.get(*index as usize).and_then(|row| row.new_logprobs.as_ref());
        let found = lists.map(|lists| &lists.logprob_token_ids);
        assert_eq!(spans.token_ids.resolve(columns.frames()).as_ref(), found);
    }
    if let Ok(stacked) = columns.stack(|spans| &spans.logprobs) {
        let arrays = rows.outputs.iter().filter_map(|row| row.new_logprobs.as_ref());
        let num_bytes: usize = arrays.map(|lists| lists.logprobs.data().len()).sum();
        assert_eq!(stacked.data().len(), num_bytes);
    }
}
