//! A model whose next token is a hash of all before it, run through a paged cache.
//!
//! The toy attention reads every earlier position through the block table and checks that it was
//! written, by the same keys, at that position; a wrong token there changes what follows.

use std::hash::{DefaultHasher, Hash, Hasher};

use dspark_sched::{FinishReason, Finished, NewRequest, SchedulePlan, TokenId};

/// A small deterministic random source (splitmix64).
#[derive(Debug, Clone)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % end
    }

    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// The model: `key` stands for an adapter.
pub(crate) fn next_token(
    key: u64,
    prefix: impl IntoIterator<Item = TokenId>,
    vocab_size: u32,
) -> TokenId {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    for token_id in prefix {
        token_id.hash(&mut hasher);
    }
    TokenId((hasher.finish() % u64::from(vocab_size)) as u32)
}

/// The output of a request that runs alone with all the memory it wants, one token at a time.
pub(crate) fn unconstrained(
    new: &NewRequest,
    vocab_size: u32,
    max_model_len: u32,
) -> (Vec<TokenId>, Finished) {
    let key = key_of(new);
    let rules = &new.stopping;
    let mut all = new.prompt_token_ids.clone();
    let mut output = Vec::new();
    loop {
        let token_id = next_token(key, all.iter().copied(), vocab_size);
        all.push(token_id);
        output.push(token_id);
        let may_stop = output.len() >= rules.min_tokens.0 as usize;
        let is_eos = !rules.ignore_eos && rules.eos_token_id == Some(token_id);
        let is_stop = rules.stop_token_ids.contains(&token_id);
        if may_stop && (is_eos || is_stop) {
            let stop_token_id = (!is_eos).then_some(token_id);
            return (output, Finished { reason: FinishReason::Stop, stop_token_id });
        }
        if output.len() >= rules.max_tokens.0 as usize || all.len() >= max_model_len as usize {
            return (output, FinishReason::Length.into());
        }
    }
}

pub(crate) fn key_of(new: &NewRequest) -> u64 {
    new.cache_keys.extra_keys.first().copied().unwrap_or(0)
}

/// What a KV slot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cell {
    key: u64,
    position: i64,
    /// `None` after a placeholder: whoever reads it must be rejected.
    token_id: Option<TokenId>,
}

/// The device: a paged cache that starts, and grows, full of poison.
#[derive(Debug)]
pub(crate) struct ToyRunner {
    cells: Vec<Option<Cell>>,
    block_size: usize,
    vocab_size: u32,
}

impl ToyRunner {
    pub(crate) fn new(num_blocks: u32, block_size: u32, vocab_size: u32) -> Self {
        let block_size = block_size as usize;
        Self { cells: vec![None; num_blocks as usize * block_size], block_size, vocab_size }
    }

    pub(crate) fn resize(&mut self, num_blocks: u32) {
        self.cells.resize(num_blocks as usize * self.block_size, None);
    }

    /// Runs a plan: accepted tokens of each row, empty for rows that sample nothing.
    pub(crate) fn run(&mut self, plan: &SchedulePlan, keys: &[u64]) -> Vec<Vec<TokenId>> {
        for (row, &key) in keys.iter().enumerate() {
            self.write_row(plan, row, key);
        }
        (0..plan.num_requests()).map(|row| self.verify_row(plan, row, keys[row])).collect()
    }

    fn write_row(&mut self, plan: &SchedulePlan, row: usize, key: u64) {
        let end = plan.query_start_loc[row + 1] as usize;
        for index in plan.query_start_loc[row] as usize..end {
            let id = plan.input_token_ids[index];
            let is_draft = index + plan.num_draft_tokens[row] as usize >= end;
            let is_placeholder = id == -1 && is_draft;
            assert!(is_placeholder || (0..self.vocab_size as i32).contains(&id), "embeds {id}");
            let token_id = (!is_placeholder).then_some(TokenId(id as u32));
            let slot = plan.slot_mapping[index] as usize;
            self.cells[slot] = Some(Cell { key, position: plan.positions[index], token_id });
        }
    }

    fn verify_row(&self, plan: &SchedulePlan, row: usize, key: u64) -> Vec<TokenId> {
        let first = plan.sample_start_loc[row] as usize;
        let end = plan.sample_start_loc[row + 1] as usize;
        let mut accepted = Vec::new();
        for &index in &plan.sample_rows[first..end] {
            let index = index as usize;
            let prefix = self.attend(plan, row, key, plan.positions[index]);
            let target = next_token(key, prefix, self.vocab_size);
            accepted.push(target);
            let draft = plan.input_token_ids.get(index + 1).copied().unwrap_or(-1);
            if draft != target.as_int32() {
                break;
            }
        }
        accepted.truncate(end - first);
        accepted
    }

    fn attend(&self, plan: &SchedulePlan, row: usize, key: u64, last: i64) -> Vec<TokenId> {
        let width = plan.block_table_width as usize;
        let table = &plan.block_tables[row * width..(row + 1) * width];
        (0..=last)
            .map(|position| {
                let (block, offset) =
                    (position as usize / self.block_size, position as usize % self.block_size);
                let slot = table[block] as usize * self.block_size + offset;
                let cell = self.cells[slot].expect("reads a slot that was never written");
                assert_eq!((cell.key, cell.position), (key, position), "reads another's slot");
                cell.token_id.expect("reads a placeholder as context")
            })
            .collect()
    }
}
