//! The scheduler: who runs in the next step, on which blocks, and what came of it.
//!
//! One step is in flight at most: [`Scheduler::schedule`] makes a plan, [`Scheduler::update`]
//! reports its result (or [`Scheduler::cancel_step`] gives it up). Requests may come and go at any
//! time, and the pool may grow or shrink, also in between. Equal calls give equal plans.

use std::collections::BTreeSet;

use crate::block_pool::BlockPool;
use crate::config::{SchedulerConfig, SchedulingPolicy};
use crate::error::{Error, Result};
use crate::ids::{NumTokens, RequestId, StepId, TokenId, saturating_u32};
use crate::kv_blocks::KvBlocks;
use crate::output::StepOutput;
use crate::plan::SchedulePlan;
use crate::prefix_cache::{BlockHashFn, default_block_hash};
use crate::request::{Draft, NewRequest, Rank, Request};
use crate::request_table::{RequestIndex, RequestTable};
use crate::slots::SlotTable;
use crate::stats::SchedulerStats;
use crate::stop::FinishReason;

/// A row of the step being built or in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepRow {
    pub(crate) index: RequestIndex,
    pub(crate) num_tokens: u32,
    /// Whether the row computes just the last committed token, and its drafts.
    pub(crate) is_decode: bool,
    /// Whether the row ends with the last committed token or a draft.
    pub(crate) is_sampled: bool,
}

/// What became of the drafts of [`Scheduler::set_drafts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftUse {
    /// The request's next step verifies them, if the token budget allows.
    Held,
    /// Dropped: the request is waiting, preempted, or still computing its prompt.
    Dropped,
}

/// Continuous batching over a paged KV cache. See the module for the order of calls.
#[derive(Debug)]
pub struct Scheduler {
    pub(crate) config: SchedulerConfig,
    pub(crate) kv: KvBlocks,
    pub(crate) requests: RequestTable,
    pub(crate) waiting: BTreeSet<(Rank, RequestIndex)>,
    /// In the order of admission.
    pub(crate) running: Vec<RequestIndex>,
    pub(crate) slots: SlotTable,
    /// Tokens left of the budget of the step being built.
    pub(crate) token_budget: u32,
    pub(crate) rows: Vec<StepRow>,
    pub(crate) plan: SchedulePlan,
    pub(crate) is_in_flight: bool,
    pub(crate) result_of_row: Vec<Option<usize>>,
    pub(crate) output: StepOutput,
    pub(crate) newly_preempted: Vec<RequestId>,
    pub(crate) newly_finished: Vec<RequestId>,
    pub(crate) stats: SchedulerStats,
    next_arrival: u64,
}

impl Scheduler {
    /// A scheduler without requests.
    ///
    /// # Errors
    /// What [`SchedulerConfig::validate`] finds.
    pub fn new(config: SchedulerConfig) -> Result<Self> {
        Self::with_block_hash(config, default_block_hash)
    }

    /// A scheduler whose prefix cache uses another hash. Output never depends on the hash.
    ///
    /// # Errors
    /// What [`SchedulerConfig::validate`] finds.
    pub fn with_block_hash(config: SchedulerConfig, hash: BlockHashFn) -> Result<Self> {
        config.validate()?;
        let is_caching = config.enable_prefix_caching;
        Ok(Self {
            kv: KvBlocks::new(config.num_blocks, config.block_size, hash, is_caching)?,
            requests: RequestTable::default(),
            waiting: BTreeSet::new(),
            running: Vec::new(),
            slots: SlotTable::new(config.max_num_seqs),
            token_budget: 0,
            rows: Vec::new(),
            plan: SchedulePlan::default(),
            is_in_flight: false,
            result_of_row: Vec::new(),
            output: StepOutput::default(),
            newly_preempted: Vec::new(),
            newly_finished: Vec::new(),
            stats: SchedulerStats::default(),
            next_arrival: 0,
            config,
        })
    }

    /// Queues a request.
    ///
    /// # Errors
    /// [`Error::DuplicateRequest`], [`Error::EmptyPrompt`], [`Error::PromptTooLong`],
    /// [`Error::TokenOutOfVocabulary`], [`Error::ZeroMaxTokens`], [`Error::MinTokensAboveMax`] or
    /// [`Error::NeverFits`].
    pub fn add_request(&mut self, new: NewRequest) -> Result<()> {
        self.check_new(&new)?;
        let priority = match self.config.policy {
            SchedulingPolicy::Fcfs => 0,
            SchedulingPolicy::Priority => new.priority,
        };
        let rank = Rank { priority, arrival: self.next_arrival };
        self.next_arrival += 1;
        let index = self.requests.insert(Request::new(new, rank));
        self.waiting.insert((rank, index));
        Ok(())
    }

    fn check_new(&self, new: &NewRequest) -> Result<()> {
        let request_id = new.request_id;
        let num_prompt_tokens = NumTokens::of(&new.prompt_token_ids);
        let max_model_len = self.config.max_model_len;
        if self.requests.find(request_id).is_some() {
            return Err(Error::DuplicateRequest { request_id });
        }
        if num_prompt_tokens.0 == 0 {
            return Err(Error::EmptyPrompt { request_id });
        }
        if num_prompt_tokens >= max_model_len {
            return Err(Error::PromptTooLong { request_id, num_prompt_tokens, max_model_len });
        }
        self.check_vocabulary(request_id, new.prompt_token_ids.iter().copied())?;
        self.check_limits(new)
    }

    fn check_limits(&self, new: &NewRequest) -> Result<()> {
        let request_id = new.request_id;
        let (min_tokens, max_tokens) = (new.stopping.min_tokens, new.stopping.max_tokens);
        if max_tokens.0 == 0 {
            return Err(Error::ZeroMaxTokens { request_id });
        }
        if min_tokens > max_tokens {
            return Err(Error::MinTokensAboveMax { request_id, min_tokens, max_tokens });
        }
        let num_prompt_tokens = NumTokens::of(&new.prompt_token_ids);
        let needed = self.config.num_blocks_needed(num_prompt_tokens, max_tokens);
        let num_blocks = self.pool().num_blocks();
        if needed > num_blocks {
            return Err(Error::NeverFits { request_id, needed, num_blocks });
        }
        Ok(())
    }

    pub(crate) fn check_vocabulary(
        &self,
        request_id: RequestId,
        token_ids: impl IntoIterator<Item = TokenId>,
    ) -> Result<()> {
        let vocab_size = self.config.vocab_size;
        match token_ids.into_iter().find(|token_id| token_id.0 >= vocab_size) {
            Some(token_id) => Err(Error::TokenOutOfVocabulary { request_id, token_id, vocab_size }),
            None => Ok(()),
        }
    }

    /// Replaces the drafts that the request's next step verifies. Call between steps; a request
    /// that misses a step loses them.
    ///
    /// # Errors
    /// [`Error::StepInFlight`], [`Error::UnknownRequest`], [`Error::TooManyDrafts`] or
    /// [`Error::TokenOutOfVocabulary`].
    pub fn set_drafts(&mut self, request_id: RequestId, drafts: &[Draft]) -> Result<DraftUse> {
        self.ensure_idle()?;
        let index = self.find(request_id)?;
        let (asked, limit) = (NumTokens::of(drafts), self.config.num_speculative_tokens);
        if asked > limit {
            return Err(Error::TooManyDrafts { request_id, asked, limit });
        }
        self.check_vocabulary(request_id, drafts.iter().copied().flatten())?;
        let request = self.requests.get_mut(index)?;
        request.drafts.clear();
        if !request.is_decoding() {
            return Ok(DraftUse::Dropped);
        }
        request.drafts.extend_from_slice(drafts);
        Ok(DraftUse::Held)
    }

    /// Ends a request from outside, at any time, and returns it as it was. Blocks and slot are
    /// free at once, and a result of the step in flight is ignored.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`].
    pub fn abort(&mut self, request_id: RequestId) -> Result<Request> {
        self.finish(request_id, FinishReason::Abort)
    }

    /// Like [`Self::abort`], for a reason that the engine found, such as a stop string.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`].
    pub fn finish(&mut self, request_id: RequestId, reason: FinishReason) -> Result<Request> {
        let index = self.find(request_id)?;
        self.remove(index, reason.into())
    }

    /// The limits it was made with; the pool's size may have changed since.
    #[must_use]
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// The block pool.
    #[must_use]
    pub fn pool(&self) -> &BlockPool {
        self.kv.pool()
    }

    /// Counters and gauges.
    #[must_use]
    pub fn stats(&self) -> SchedulerStats {
        SchedulerStats {
            num_running: saturating_u32(self.running.len()),
            num_waiting: saturating_u32(self.waiting.len()),
            num_blocks: self.pool().num_blocks(),
            num_free_blocks: self.pool().num_free(),
            num_cached_blocks: self.kv.num_cached_blocks(),
            ..self.stats
        }
    }

    /// A live request.
    #[must_use]
    pub fn request(&self, request_id: RequestId) -> Option<&Request> {
        self.requests.get(self.requests.find(request_id)?).ok()
    }

    /// Live requests in the order of their ids.
    pub fn requests(&self) -> impl Iterator<Item = &Request> {
        self.requests.iter().map(|(_, request)| request)
    }

    /// Whether any request is live.
    #[must_use]
    pub fn has_unfinished_requests(&self) -> bool {
        self.requests.len() > 0
    }

    /// The step in flight, if there is one.
    #[must_use]
    pub fn step_in_flight(&self) -> Option<StepId> {
        self.is_in_flight.then_some(self.plan.step_id)
    }

    pub(crate) fn ensure_idle(&self) -> Result<()> {
        match self.step_in_flight() {
            Some(step_id) => Err(Error::StepInFlight { step_id }),
            None => Ok(()),
        }
    }

    fn find(&self, request_id: RequestId) -> Result<RequestIndex> {
        self.requests.find(request_id).ok_or(Error::UnknownRequest { request_id })
    }
}
