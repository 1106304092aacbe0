//! Building a plan: running requests first, then waiting ones while budgets and blocks last.
//!
//! When a running request finds no block, the one served last gives up all of its own and will
//! compute its tokens again; nobody is admitted in such a step. The request served first is never
//! a victim of others, and each request fits the pool alone, so some request always advances.

use crate::error::Result;
use crate::ids::{NumTokens, StepId};
use crate::plan::{PlanRow, SchedulePlan};
use crate::request::{Request, RequestStatus};
use crate::request_table::RequestIndex;
use crate::scheduler::{Scheduler, StepRow};

impl Scheduler {
    /// Plans the next step. The plan stays the scheduler's: its memory is used again.
    ///
    /// # Errors
    /// [`crate::Error::StepInFlight`].
    pub fn schedule(&mut self) -> Result<&SchedulePlan> {
        self.ensure_idle()?;
        self.plan.begin(StepId(self.plan.step_id.0 + 1));
        self.rows.clear();
        self.token_budget = self.config.max_num_batched_tokens.0;
        let num_preempted_between = self.newly_preempted.len();
        self.schedule_running()?;
        if self.newly_preempted.len() == num_preempted_between {
            self.schedule_waiting()?;
        }
        self.rows.sort_by_key(|row| !row.is_decode);
        self.fill_plan()?;
        self.drop_stale_drafts()?;
        self.is_in_flight = !self.plan.is_empty();
        Ok(&self.plan)
    }

    fn schedule_running(&mut self) -> Result<()> {
        let mut cursor = 0;
        while self.token_budget > 0 {
            let Some(&index) = self.running.get(cursor) else {
                break;
            };
            let request = self.requests.get(index)?;
            let num_computed = request.num_computed_tokens;
            let num_tokens = self.num_tokens_to_schedule(request, num_computed);
            let num_slots = self.num_slots(num_computed, num_tokens);
            if self.make_room(index, num_slots, &mut cursor)? {
                self.push_row(index, num_tokens)?;
                cursor += 1;
            }
        }
        Ok(())
    }

    /// Allocates for the running request at `cursor`, preempting until it fits. `false` when the
    /// request itself had to go. Keeps `cursor` on the request, or on the one after it.
    fn make_room(
        &mut self,
        index: RequestIndex,
        num_slots: NumTokens,
        cursor: &mut usize,
    ) -> Result<bool> {
        while !self.kv.try_extend(self.requests.get_mut(index)?, num_slots)? {
            let Some(victim) = self.served_last()? else {
                return Ok(false);
            };
            let place = self.preempt(victim)?;
            if victim == index {
                return Ok(false);
            }
            if place < *cursor {
                *cursor -= 1;
            }
        }
        Ok(true)
    }

    fn served_last(&self) -> Result<Option<RequestIndex>> {
        let mut last = None;
        for &index in &self.running {
            last = last.max(Some((self.requests.get(index)?.rank, index)));
        }
        Ok(last.map(|(_, index)| index))
    }

    /// Takes everything from a running request and queues it again; returns its former place in
    /// `running`. If it was scheduled in the step being built, its tokens return to the budget.
    pub(crate) fn preempt(&mut self, index: RequestIndex) -> Result<usize> {
        if let Some(row) = self.rows.iter().position(|row| row.index == index) {
            self.token_budget += self.rows.remove(row).num_tokens;
        }
        let request = self.requests.get_mut(index)?;
        self.kv.release(request)?;
        if let Some(slot) = request.slot {
            self.slots.release(slot);
        }
        request.reset_for_recompute();
        self.waiting.insert((request.rank, index));
        self.newly_preempted.push(request.id());
        self.stats.num_preemptions += 1;
        let place = self.running.iter().position(|&other| other == index);
        Ok(place.map_or(0, |place| {
            self.running.remove(place);
            place
        }))
    }

    fn schedule_waiting(&mut self) -> Result<()> {
        while self.token_budget > 0 && self.running.len() < self.config.max_num_seqs as usize {
            let Some(&(rank, index)) = self.waiting.first() else {
                break;
            };
            let Some(num_tokens) = self.try_admit(index)? else {
                break;
            };
            self.waiting.remove(&(rank, index));
            self.running.push(index);
            self.push_row(index, num_tokens)?;
        }
        Ok(())
    }

    /// Gives a waiting request blocks and a slot; returns how many of its tokens to compute.
    fn try_admit(&mut self, index: RequestIndex) -> Result<Option<u32>> {
        let hit = self.kv.find_prefix(self.requests.get_mut(index)?);
        let num_hit = self.kv.num_hit_tokens(&hit);
        let request = self.requests.get(index)?;
        let num_tokens = self.num_tokens_to_schedule(request, num_hit);
        let is_cut = num_hit.0 + num_tokens < request.num_tokens().0;
        if is_cut && !self.config.is_chunking() {
            return Ok(None);
        }
        let num_slots = self.num_slots(num_hit, num_tokens);
        let request = self.requests.get_mut(index)?;
        if !self.kv.try_admit(request, &hit, num_slots)? {
            return Ok(None);
        }
        if request.status == RequestStatus::Waiting {
            request.num_cached_tokens = num_hit;
            self.stats.prefix_cache.record(request.num_tokens(), num_hit);
        } else {
            self.stats.prefix_cache_resumed.record(request.num_tokens(), num_hit);
        }
        request.slot = self.slots.try_assign();
        request.status = RequestStatus::Running;
        Ok(Some(num_tokens))
    }

    /// Tokens of a request to compute in this step, drafts included, as the budgets allow.
    fn num_tokens_to_schedule(&self, request: &Request, num_computed: NumTokens) -> u32 {
        let wanted = request.num_tokens().0 + request.num_drafts() - num_computed.0;
        // The last position is never an input: a request ends when it gets the token for it.
        let up_to_model_len = self.config.max_model_len.0 - 1 - num_computed.0;
        let threshold = self.config.long_prefill_token_threshold().map_or(u32::MAX, |most| most.0);
        wanted.min(threshold).min(up_to_model_len).min(self.token_budget)
    }

    /// KV slots that a request needs for this step and for the drafts made after it.
    fn num_slots(&self, num_computed: NumTokens, num_tokens: u32) -> NumTokens {
        num_computed
            .saturating_add(NumTokens(num_tokens))
            .saturating_add(self.config.num_lookahead_tokens)
            .min(self.config.max_model_len)
    }

    /// Adds a running request to the step, and drops the drafts that were not scheduled.
    fn push_row(&mut self, index: RequestIndex, num_tokens: u32) -> Result<()> {
        let request = self.requests.get_mut(index)?;
        let (is_decode, num_committed) = (request.is_decoding(), request.num_tokens().0);
        let end = request.num_computed_tokens.0 + num_tokens;
        request.drafts.truncate(end.saturating_sub(num_committed) as usize);
        let is_sampled = end >= num_committed;
        self.rows.push(StepRow { index, num_tokens, is_decode, is_sampled });
        self.token_budget -= num_tokens;
        Ok(())
    }

    /// Writes the rows to the plan and counts their tokens as computed.
    fn fill_plan(&mut self) -> Result<()> {
        let plan = &mut self.plan;
        plan.preempted_request_ids.append(&mut self.newly_preempted);
        plan.finished_request_ids.append(&mut self.newly_finished);
        let mut width = 0;
        for row in &self.rows {
            width = width.max(self.requests.get(row.index)?.block_ids().len());
        }
        self.plan.set_block_table_width(width);
        for (number, row) in self.rows.iter().enumerate() {
            let request = self.requests.get_mut(row.index)?;
            self.plan.push_row(&PlanRow {
                request,
                generation: request
                    .slot
                    .map(|slot| self.slots.generation(slot))
                    .unwrap_or_default(),
                num_tokens: row.num_tokens,
                is_sampled: row.is_sampled,
                block_size: self.config.block_size,
            });
            self.plan.num_decode_requests += u32::from(row.is_decode);
            request.row_in_flight = Some(number);
            request.num_computed_tokens.0 += row.num_tokens;
        }
        Ok(())
    }

    /// Drafts belong to the step after the one they were made in: whoever misses it loses them.
    fn drop_stale_drafts(&mut self) -> Result<()> {
        for &index in &self.running {
            let request = self.requests.get_mut(index)?;
            if request.row_in_flight.is_none() {
                request.drafts.clear();
            }
        }
        Ok(())
    }
}
