//! Checks of everything that must hold between two calls, for tests to run after each.

use std::collections::BTreeSet;

use crate::error::{Result, ensure};
use crate::request::{Request, RequestStatus};
use crate::request_table::RequestIndex;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Checks queues, slots, reference counts, free list, prefix tree and every request's blocks.
    /// O(blocks + tokens).
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`] with the first rule that does not hold.
    pub fn check_integrity(&self) -> Result<()> {
        self.kv.check_integrity()?;
        self.check_queues()?;
        self.check_slots()?;
        self.check_reference_counts()?;
        for (index, request) in self.requests.iter() {
            match request.status {
                RequestStatus::Running => self.check_running(index, request)?,
                RequestStatus::Waiting | RequestStatus::Preempted => check_idle(request)?,
                RequestStatus::Finished(_) => {
                    ensure(false, "a live request is unfinished", request.id().0)?;
                }
            }
        }
        Ok(())
    }

    fn check_queues(&self) -> Result<()> {
        let running: BTreeSet<RequestIndex> = self.running.iter().copied().collect();
        let is_once = running.len() == self.running.len();
        ensure(is_once, "a request runs once", 0_u32)?;
        let max_num_seqs = self.config.max_num_seqs;
        let is_within = running.len() <= max_num_seqs as usize;
        ensure(is_within, "at most max_num_seqs run", max_num_seqs)?;
        let agree = running.len() + self.waiting.len() == self.requests.len();
        ensure(agree, "each request is in one queue", 0_u32)?;
        for (index, request) in self.requests.iter() {
            let is_running = request.status == RequestStatus::Running;
            let is_waiting = self.waiting.contains(&(request.rank, index));
            let agree = running.contains(&index) == is_running && is_waiting != is_running;
            ensure(agree, "a request's status names its queue", request.id().0)?;
        }
        Ok(())
    }

    fn check_slots(&self) -> Result<()> {
        let mut held = BTreeSet::new();
        for &index in &self.running {
            let request = self.requests.get(index)?;
            let id = request.id().0;
            ensure(request.slot.is_some(), "a running request has a slot", id)?;
            let Some(slot) = request.slot else { continue };
            ensure(!self.slots.is_free(slot), "a held slot is not free", slot.0)?;
            ensure(held.insert(slot), "a slot has one occupant", slot.0)?;
        }
        let num_slots = held.len() + self.slots.num_free();
        ensure(num_slots == self.config.max_num_seqs as usize, "no slot is lost", 0_u32)
    }

    fn check_reference_counts(&self) -> Result<()> {
        let pool = self.pool();
        let mut num_refs = vec![0_u32; pool.num_blocks().0 as usize];
        for (_, request) in self.requests.iter() {
            for block_id in request.block_ids() {
                pool.num_refs(*block_id)?;
                num_refs[block_id.index()] += 1;
            }
        }
        for (id, &counted) in (0..).zip(&num_refs) {
            let known = pool.num_refs(crate::ids::BlockId(id))?;
            ensure(known == counted, "a block counts its holders", id)?;
        }
        Ok(())
    }

    fn check_running(&self, index: RequestIndex, request: &Request) -> Result<()> {
        let id = request.id().0;
        self.kv.check_request(request)?;
        let num_tokens = request.num_tokens().0;
        let num_computed = request.num_computed_tokens.0;
        let row = request.row_in_flight.filter(|_| self.is_in_flight);
        let Some(row) = row else {
            ensure(request.row_in_flight.is_none(), "an idle request is in no row", id)?;
            return ensure(num_computed < num_tokens, "a token is left to compute", id);
        };
        ensure(self.rows.get(row).is_some_and(|row| row.index == index), "rows agree", id)?;
        let most = num_tokens + request.num_drafts();
        ensure(num_computed <= most, "a step computes known tokens and drafts", id)
    }
}

fn check_idle(request: &Request) -> Result<()> {
    let id = request.id().0;
    let holds_nothing = request.block_ids().is_empty() && request.slot.is_none();
    ensure(holds_nothing, "a waiting request holds no block and no slot", id)?;
    let is_quiet = request.drafts().is_empty() && request.row_in_flight.is_none();
    ensure(is_quiet, "a waiting request has no draft and no row", id)?;
    let is_at_root = request.num_registered_blocks == 0 && request.chain_end == request.root();
    ensure(is_at_root, "a waiting request has no cached block", id)?;
    let is_fresh = request.num_computed_tokens.0 == 0;
    ensure(is_fresh, "a waiting request has nothing computed", id)
}

#[cfg(test)]
mod tests {
    use crate::*;

    /// A scheduler with request 1 running and request 2 waiting, no step in flight.
    fn scheduler() -> Result<Scheduler> {
        let mut scheduler = Scheduler::new(SchedulerConfig {
            max_num_seqs: 1,
            max_num_batched_tokens: NumTokens(16),
            max_model_len: NumTokens(16),
            vocab_size: 10,
            block_size: BlockSize::new(2)?,
            num_blocks: NumBlocks(8),
            num_speculative_tokens: NumTokens(0),
            num_lookahead_tokens: NumTokens(0),
            policy: SchedulingPolicy::Fcfs,
            chunked_prefill: ChunkedPrefill::Disabled,
            enable_prefix_caching: true,
        })?;
        for id in [1, 2] {
            let prompt = vec![TokenId(1), TokenId(2), TokenId(3)];
            scheduler.add_request(NewRequest::new(RequestId(id), prompt, NumTokens(8)))?;
        }
        scheduler.schedule()?;
        let outcome = RowOutcome::Sampled(&[TokenId(4)]);
        scheduler.update(&[RequestResult { request_id: RequestId(1), outcome }])?;
        scheduler.check_integrity()?;
        Ok(scheduler)
    }

    /// The rule that a damaged scheduler breaks, and where.
    fn broken_by(damage: impl FnOnce(&mut Scheduler, &mut Request)) -> (&'static str, u64) {
        let mut scheduler = scheduler().unwrap();
        let index = scheduler.running[0];
        let mut request = scheduler.requests.remove(index).unwrap();
        damage(&mut scheduler, &mut request);
        scheduler.requests.insert(request);
        let error = scheduler.check_integrity().unwrap_err();
        let Error::Corrupt { rule, subject } = error else { panic!("{error}") };
        assert_eq!(error.to_string(), format!("invariant broken: {rule} (at {subject})"));
        (rule, subject)
    }

    #[test]
    fn integrity_notices_a_request_that_runs_twice() {
        let found = broken_by(|scheduler, _| scheduler.running.push(scheduler.running[0]));
        assert_eq!(found, ("a request runs once", 0));
    }

    #[test]
    fn integrity_notices_a_request_that_left_its_queue() {
        let found = broken_by(|scheduler, _| scheduler.waiting.clear());
        assert_eq!(found, ("each request is in one queue", 0));
    }

    #[test]
    fn integrity_notices_a_lost_slot() {
        let found = broken_by(|_, request| request.slot = None);
        assert_eq!(found, ("a running request has a slot", 1));
    }

    #[test]
    fn integrity_notices_a_slot_given_away() {
        let found = broken_by(|scheduler, _| scheduler.slots.release(SlotId(0)));
        assert_eq!(found, ("a held slot is not free", 0));
    }

    #[test]
    fn integrity_notices_a_lost_block() {
        let found = broken_by(|_, request| request.block_ids.truncate(1));
        assert_eq!(found, ("a block counts its holders", 1));
    }

    #[test]
    fn integrity_notices_a_count_of_tokens_never_computed() {
        let found = broken_by(|_, request| request.num_computed_tokens = NumTokens(4));
        assert_eq!(found, ("a token is left to compute", 1));
    }

    #[test]
    fn integrity_notices_a_registered_block_that_is_not_counted() {
        let found = broken_by(|_, request| request.num_registered_blocks = 0);
        assert_eq!(found, ("registered blocks, and they alone, are cached", 0));
    }

    #[test]
    fn integrity_notices_blocks_in_the_wrong_order() {
        let found = broken_by(|_, request| request.block_ids.swap(0, 1));
        assert_eq!(found, ("registered blocks, and they alone, are cached", 1));
    }
}
