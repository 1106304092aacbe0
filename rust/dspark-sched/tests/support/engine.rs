//! An engine of scheduler and toy runner that checks every plan against the limits, and every
//! request's output against its unconstrained run.

use std::collections::{BTreeMap, BTreeSet};

use dspark_sched::{
    BlockHashFn, BlockId, Draft, Error, FinishReason, Finished, NewRequest, NumBlocks, NumTokens,
    RequestId, RequestResult, RowOutcome, SchedulePlan, Scheduler, SchedulerConfig, TokenId,
};

use super::toy::{Random, ToyRunner, key_of, next_token, unconstrained};

/// A request that ended, with its whole output.
pub(crate) type Ended = (RequestId, Vec<TokenId>, Finished);

/// What the engine knows of a live request.
#[derive(Debug)]
struct Live {
    new: NewRequest,
    output: Vec<TokenId>,
}

#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) scheduler: Scheduler,
    pub(crate) runner: ToyRunner,
    pub(crate) random: Random,
    /// Chances in percent that a draft is right, and that it is a placeholder.
    pub(crate) draft_percent: (u64, u64),
    pub(crate) plans: Vec<SchedulePlan>,
    pub(crate) ended: Vec<Ended>,
    live: BTreeMap<RequestId, Live>,
    /// Last occupant of each (slot, generation).
    occupants: BTreeMap<(i32, u32), RequestId>,
}

impl Engine {
    pub(crate) fn new(config: SchedulerConfig, hash: BlockHashFn, seed: u64) -> Self {
        let (num_blocks, block_size) = (config.num_blocks.0, config.block_size.get());
        let runner = ToyRunner::new(num_blocks, block_size, config.vocab_size);
        Self {
            scheduler: Scheduler::with_block_hash(config, hash).unwrap(),
            runner,
            random: Random(seed),
            draft_percent: (70, 10),
            plans: Vec::new(),
            ended: Vec::new(),
            live: BTreeMap::new(),
            occupants: BTreeMap::new(),
        }
    }

    /// Adds a request unless the pool is too small for it.
    pub(crate) fn add(&mut self, new: NewRequest) {
        match self.scheduler.add_request(new.clone()) {
            Ok(()) => {
                self.live.insert(new.request_id, Live { new, output: Vec::new() });
            }
            Err(Error::NeverFits { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    pub(crate) fn live_ids(&self) -> Vec<RequestId> {
        self.live.keys().copied().collect()
    }

    pub(crate) fn abort(&mut self, request_id: RequestId) {
        let ended = self.scheduler.abort(request_id).unwrap();
        assert!(ended.block_ids().is_empty());
        assert_eq!(ended.output_token_ids(), self.live[&request_id].output);
        self.end(request_id, FinishReason::Abort.into());
        self.check();
    }

    /// One whole step. `meanwhile` acts between plan and result; `failing` picks a row to fail.
    pub(crate) fn step(&mut self, meanwhile: impl FnOnce(&mut Self), failing: Option<u64>) {
        let Some((plan, accepted)) = self.launch() else {
            return;
        };
        meanwhile(self);
        if self.scheduler.step_in_flight().is_none() {
            return; // cancelled meanwhile
        }
        let failing = failing.map(|pick| pick as usize % plan.num_requests());
        let results: Vec<RequestResult<'_>> = (0..plan.num_requests())
            .map(|row| RequestResult {
                request_id: plan.request_ids[row],
                outcome: match failing {
                    Some(failing) if failing == row => RowOutcome::Failed,
                    _ => RowOutcome::Sampled(&accepted[row]),
                },
            })
            .collect();
        self.finish_step(&results);
        self.draft(&plan);
    }

    fn launch(&mut self) -> Option<(SchedulePlan, Vec<Vec<TokenId>>)> {
        let plan = self.scheduler.schedule().unwrap().clone();
        self.check();
        self.plans.push(plan.clone());
        assert_eq!(plan.is_empty(), self.live.is_empty(), "some request always advances");
        if plan.is_empty() {
            return None;
        }
        self.check_plan(&plan);
        let keys: Vec<u64> =
            plan.request_ids.iter().map(|request_id| key_of(&self.live[request_id].new)).collect();
        let accepted = self.runner.run(&plan, &keys);
        Some((plan, accepted))
    }

    fn finish_step(&mut self, results: &[RequestResult<'_>]) {
        let output = self.scheduler.update(results).unwrap().clone();
        for request in &output.requests {
            let Some(live) = self.live.get_mut(&request.request_id) else {
                panic!("output of an ended request")
            };
            live.output.extend_from_slice(output.new_token_ids(request));
            if let Some(finished) = request.finished {
                self.end(request.request_id, finished);
            }
        }
        self.check();
    }

    /// Proposes drafts for the next step, some right, some wrong, some placeholders.
    fn draft(&mut self, plan: &SchedulePlan) {
        let most = self.scheduler.config().num_speculative_tokens.0;
        let vocab_size = self.scheduler.config().vocab_size;
        for request_id in &plan.request_ids {
            let Some(request) = self.scheduler.request(*request_id) else {
                continue;
            };
            let key = key_of(&self.live[request_id].new);
            let mut prefix = request.token_ids().to_vec();
            let mut drafts: Vec<Draft> = Vec::new();
            for _ in 0..self.random.below(u64::from(most) + 1) {
                let right = next_token(key, prefix.iter().copied(), vocab_size);
                prefix.push(right);
                let is_right = self.random.chance(self.draft_percent.0);
                let wrong = TokenId(self.random.below(u64::from(vocab_size)) as u32);
                let token_id = if is_right { right } else { wrong };
                drafts.push((!self.random.chance(self.draft_percent.1)).then_some(token_id));
            }
            self.scheduler.set_drafts(*request_id, &drafts).unwrap();
        }
        self.check();
    }

    /// Removes an ended request and compares it with its unconstrained run.
    fn end(&mut self, request_id: RequestId, finished: Finished) {
        let Live { new, output } = self.live.remove(&request_id).unwrap();
        let config = self.scheduler.config();
        let (whole, end) = unconstrained(&new, config.vocab_size, config.max_model_len.0);
        match finished.reason {
            FinishReason::Stop | FinishReason::Length => {
                assert_eq!((&output, finished), (&whole, end), "request {request_id}");
            }
            FinishReason::Abort | FinishReason::Error => {
                assert_eq!(output, whole[..output.len()], "request {request_id}");
            }
        }
        self.ended.push((request_id, output, finished));
    }

    /// Runs until no request is left.
    pub(crate) fn drain(&mut self) {
        for _ in 0..5_000 {
            if self.live.is_empty() {
                break;
            }
            self.step(|_| {}, None);
        }
        assert!(self.live.is_empty(), "every request finishes");
        assert!(!self.scheduler.has_unfinished_requests());
        assert_eq!(self.scheduler.pool().num_free(), self.scheduler.pool().num_blocks());
    }

    pub(crate) fn grow(&mut self, num_blocks: u32) {
        self.runner.resize(num_blocks);
        self.scheduler.grow(NumBlocks(num_blocks)).unwrap();
        self.check();
    }

    /// Shrinks if nothing is in the way; the cache keeps its memory otherwise.
    pub(crate) fn try_shrink(&mut self, num_blocks: u32) -> Result<(), Error> {
        let before = self.scheduler.pool().num_blocks();
        let shrunk = self.scheduler.shrink(NumBlocks(num_blocks));
        match shrunk {
            Ok(()) => self.runner.resize(num_blocks),
            Err(_) => assert_eq!(self.scheduler.pool().num_blocks(), before),
        }
        self.check();
        shrunk
    }

    pub(crate) fn check(&self) {
        self.scheduler.check_integrity().unwrap();
        let mut holders: BTreeMap<BlockId, u32> = BTreeMap::new();
        for request in self.scheduler.requests() {
            for &block_id in request.block_ids() {
                *holders.entry(block_id).or_default() += 1;
            }
        }
        let pool = self.scheduler.pool();
        let free: BTreeSet<BlockId> = pool.free_blocks().collect();
        assert_eq!(free.len() + holders.len(), pool.num_blocks().0 as usize);
        for id in (0..pool.num_blocks().0).map(BlockId) {
            let held = holders.get(&id).copied().unwrap_or(0);
            assert_eq!((pool.num_refs(id).unwrap(), free.contains(&id)), (held, held == 0));
        }
    }

    fn check_plan(&mut self, plan: &SchedulePlan) {
        let config = self.scheduler.config().clone();
        let num_rows = plan.num_requests();
        assert!(num_rows <= config.max_num_seqs as usize);
        assert!(plan.num_tokens() <= config.max_num_batched_tokens.0 as usize);
        assert!(plan.sample_rows.len() <= config.max_num_sample_rows() as usize);
        assert_eq!(plan.query_start_loc.len(), num_rows + 1);
        assert_eq!(plan.block_tables.len(), num_rows * plan.block_table_width as usize);
        let slots: BTreeSet<i64> = plan.slot_mapping.iter().copied().collect();
        assert_eq!(slots.len(), plan.num_tokens(), "a slot is written once in a step");
        let rows: BTreeSet<i32> = plan.request_slots.iter().copied().collect();
        assert_eq!(rows.len(), num_rows, "a batch slot serves one row");
        for row in 0..num_rows {
            self.check_row(plan, row, &config);
        }
    }

    fn check_row(&mut self, plan: &SchedulePlan, row: usize, config: &SchedulerConfig) {
        let request_id = plan.request_ids[row];
        let occupant = (plan.request_slots[row], plan.slot_generations[row]);
        assert_eq!(*self.occupants.entry(occupant).or_insert(request_id), request_id);
        let request = self.scheduler.request(request_id).unwrap();
        let num_drafts = plan.num_draft_tokens[row];
        assert!(num_drafts >= 0 && num_drafts as u32 <= config.num_speculative_tokens.0);
        let (first, end) =
            (plan.query_start_loc[row] as usize, plan.query_start_loc[row + 1] as usize);
        assert_eq!((end - first) as i32, plan.num_scheduled_tokens[row]);
        assert!(end > first + num_drafts as usize, "a row computes a committed token");
        assert_eq!(plan.positions[first], i64::from(plan.num_computed_tokens[row]));
        assert!(plan.positions[end - 1] < i64::from(config.max_model_len.0) - 1);
        let is_sampled = plan.seq_lens[row] - num_drafts == request.num_tokens().0 as i32;
        let num_samples = plan.sample_start_loc[row + 1] - plan.sample_start_loc[row];
        assert_eq!(num_samples, if is_sampled { 1 + num_drafts } else { 0 });
        let num_committed = plan.num_scheduled_tokens[row] - num_drafts;
        let is_decode = is_sampled && num_committed == 1;
        assert_eq!(is_decode, row < plan.num_decode_requests as usize, "decode rows come first");
        let num_slots = NumTokens(plan.seq_lens[row] as u32)
            .saturating_add(config.num_lookahead_tokens)
            .min(config.max_model_len);
        let needed = num_slots.num_blocks(config.block_size).0 as usize;
        assert!(request.block_ids().len() >= needed, "lookahead slots are there");
        for index in first..end {
            let block = plan.slot_mapping[index] as u32 / config.block_size.get();
            let num_refs = self.scheduler.pool().num_refs(BlockId(block)).unwrap();
            assert_eq!(num_refs, 1, "a block that is written has one owner");
        }
    }
}
