//! What one step computes, as flat arrays that a runner uploads as they are.
//!
//! Rows are requests: first those that decode (their last token and its drafts), then those that
//! compute more of their tokens; each part in the order of service. Token arrays are the rows'
//! tokens one after another. Apply `preempted_request_ids` and `finished_request_ids` before the
//! rows: an id may end there and come back as a row.

use crate::ids::{BlockSize, Generation, RequestId, StepId, TokenId, saturating_u32};
use crate::request::Request;

/// One step. `R` is the number of rows, `T` the number of tokens, `S` of sampled rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SchedulePlan {
    /// The step.
    pub step_id: StepId,
    /// Requests preempted since the last plan: what a runner keeps for them is void.
    pub preempted_request_ids: Vec<RequestId>,
    /// Requests that ended since the last plan, for whatever reason.
    pub finished_request_ids: Vec<RequestId>,

    /// `[R]` request of each row.
    pub request_ids: Vec<RequestId>,
    /// `[R]` its slot in the persistent batch.
    pub request_slots: Vec<i32>,
    /// `[R]` generation of the slot; a new one means a new occupant.
    pub slot_generations: Vec<u32>,
    /// How many rows, from the first, decode.
    pub num_decode_requests: u32,
    /// `[R]` tokens computed in this step, drafts included.
    pub num_scheduled_tokens: Vec<i32>,
    /// `[R]` tokens already in the cache: the position of the row's first token.
    pub num_computed_tokens: Vec<i32>,
    /// `[R]` the sum of the two: the attention length of the row's last token.
    pub seq_lens: Vec<i32>,
    /// `[R]` drafts among the row's tokens; they come last.
    pub num_draft_tokens: Vec<i32>,
    /// `[R + 1]` first token of each row, and the end.
    pub query_start_loc: Vec<i32>,

    /// `[T]` token ids; -1 for a draft whose token is not known here. The runner puts its own
    /// draft there, or clamps it for the embedding only and rejects it.
    pub input_token_ids: Vec<i32>,
    /// `[T]` position of each token in its sequence.
    pub positions: Vec<i64>,
    /// `[T]` KV slot of each token: block id · block size + offset.
    pub slot_mapping: Vec<i64>,

    /// `[S]` index in the token arrays of each token after which to sample, in row order: the
    /// last committed token and every draft.
    pub sample_rows: Vec<i32>,
    /// `[R + 1]` first entry of `sample_rows` for each row, and the end. Empty for a row that has
    /// committed tokens left to compute.
    pub sample_start_loc: Vec<i32>,

    /// Columns of `block_tables`: the longest row's blocks.
    pub block_table_width: u32,
    /// `[R, block_table_width]` blocks of each row, lookahead included, padded with block 0.
    pub block_tables: Vec<i32>,
}

impl SchedulePlan {
    /// Number of rows.
    #[must_use]
    pub fn num_requests(&self) -> usize {
        self.request_ids.len()
    }

    /// Number of tokens.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.input_token_ids.len()
    }

    /// Whether there is nothing to run; such a plan wants no update.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.request_ids.is_empty()
    }

    /// Whether every row decodes: the shape of a captured graph.
    #[must_use]
    pub fn is_pure_decode(&self) -> bool {
        !self.is_empty() && self.num_decode_requests as usize == self.num_requests()
    }

    /// Empties the arrays and keeps their memory.
    pub(crate) fn begin(&mut self, step_id: StepId) {
        self.step_id = step_id;
        self.preempted_request_ids.clear();
        self.finished_request_ids.clear();
        self.request_ids.clear();
        self.request_slots.clear();
        self.slot_generations.clear();
        self.num_decode_requests = 0;
        self.num_scheduled_tokens.clear();
        self.num_computed_tokens.clear();
        self.seq_lens.clear();
        self.num_draft_tokens.clear();
        self.query_start_loc.clear();
        self.query_start_loc.push(0);
        self.input_token_ids.clear();
        self.positions.clear();
        self.slot_mapping.clear();
        self.sample_rows.clear();
        self.sample_start_loc.clear();
        self.sample_start_loc.push(0);
        self.block_table_width = 0;
        self.block_tables.clear();
    }

    /// Sets the columns of the block tables, before the first row.
    pub(crate) fn set_block_table_width(&mut self, width: usize) {
        self.block_table_width = saturating_u32(width);
    }

    /// Appends a row; `request.num_computed_tokens` is still the count before the step.
    pub(crate) fn push_row(&mut self, row: &PlanRow<'_>) {
        let request = row.request;
        let num_computed = request.num_computed_tokens.0;
        self.request_ids.push(request.id());
        self.request_slots.push(request.slot.map_or(-1, |slot| slot.0.cast_signed()));
        self.slot_generations.push(row.generation.0);
        self.num_scheduled_tokens.push(row.num_tokens.cast_signed());
        self.num_computed_tokens.push(num_computed.cast_signed());
        self.seq_lens.push((num_computed + row.num_tokens).cast_signed());
        self.num_draft_tokens.push(request.num_drafts().cast_signed());
        self.push_tokens(row);
        let end = saturating_u32(self.input_token_ids.len());
        self.query_start_loc.push(end.cast_signed());
        if row.is_sampled {
            let first = end - 1 - request.num_drafts();
            self.sample_rows.extend((first..end).map(u32::cast_signed));
        }
        self.sample_start_loc.push(saturating_u32(self.sample_rows.len()).cast_signed());
        self.push_block_table(request);
    }

    fn push_tokens(&mut self, row: &PlanRow<'_>) {
        let request = row.request;
        let first = request.num_computed_tokens.0;
        let num_committed = row.num_tokens - request.num_drafts();
        let committed = request.token_ids().iter().copied().map(TokenId::as_int32);
        let wanted = committed.skip(first as usize).take(num_committed as usize);
        self.input_token_ids.extend(wanted);
        self.input_token_ids.extend(request.drafts_as_int32());
        let last = first + row.num_tokens;
        self.positions.extend((first..last).map(i64::from));
        let block_size = row.block_size.get();
        self.slot_mapping.extend((first..last).map(|position| {
            let block_id = request.block_ids[(position / block_size) as usize];
            i64::from(block_id.0) * i64::from(block_size) + i64::from(position % block_size)
        }));
    }

    fn push_block_table(&mut self, request: &Request) {
        self.block_tables.extend(request.block_ids.iter().map(|block_id| block_id.0.cast_signed()));
        let num_rows = self.request_ids.len();
        self.block_tables.resize(num_rows * self.block_table_width as usize, 0);
    }
}

/// What a row of the plan is made from.
pub(crate) struct PlanRow<'a> {
    pub(crate) request: &'a Request,
    pub(crate) generation: Generation,
    pub(crate) num_tokens: u32,
    pub(crate) is_sampled: bool,
    pub(crate) block_size: BlockSize,
}
