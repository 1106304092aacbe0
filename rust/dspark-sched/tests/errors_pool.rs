//! Refusals of blocks, growth and shrink: condition, data, text, and that nothing changed.

#![allow(clippy::unwrap_used)]

mod support;

use dspark_sched::{BlockId, BlockPool, Error, NumBlocks, RequestId, Scheduler, TokenId};
use support::{scheduler, step};

const ONE: RequestId = RequestId(1);

/// A scheduler with request 1 verifying drafts 7 and a placeholder in step 2, still in flight.
fn verifying() -> Scheduler {
    let mut scheduler = scheduler(|_| {});
    scheduler.add_request(support::request(1, 0, 4)).unwrap();
    step(&mut scheduler);
    scheduler.set_drafts(ONE, &[Some(TokenId(7)), None]).unwrap();
    scheduler.schedule().unwrap();
    scheduler
}

#[test]
fn rejects_a_block_outside_the_pool() {
    let mut pool = BlockPool::new(NumBlocks(2)).unwrap();
    let (block_id, num_blocks) = (BlockId(2), NumBlocks(2));
    let error = Error::BlockOutOfRange { block_id, num_blocks };
    assert_eq!(pool.acquire(block_id).unwrap_err(), error);
    assert_eq!(pool.release(block_id).unwrap_err(), error);
    assert_eq!(pool.num_refs(block_id).unwrap_err(), error);
    assert_eq!(error.to_string(), "block 2 does not exist: the pool has 2 blocks");
}

#[test]
fn rejects_the_release_of_a_free_block() {
    let mut pool = BlockPool::new(NumBlocks(2)).unwrap();
    let error = pool.release(BlockId(1)).unwrap_err();
    assert_eq!(error, Error::BlockNotReferenced { block_id: BlockId(1) });
    assert_eq!(error.to_string(), "block 1 is free: it cannot be released");
    pool.check_integrity().unwrap();
}

#[test]
fn rejects_growth_and_shrink_in_the_wrong_direction() {
    let mut scheduler = scheduler(|_| {});
    let error = scheduler.grow(NumBlocks(63)).unwrap_err();
    let num_blocks = NumBlocks(64);
    assert_eq!(error, Error::GrowBelowCurrent { asked: NumBlocks(63), num_blocks });
    assert_eq!(error.to_string(), "cannot grow to 63 blocks: the pool has 64");
    let error = scheduler.shrink(NumBlocks(65)).unwrap_err();
    assert_eq!(error, Error::ShrinkAboveCurrent { asked: NumBlocks(65), num_blocks });
    assert_eq!(error.to_string(), "cannot shrink to 65 blocks: the pool has 64");
    let error = scheduler.shrink(NumBlocks(0)).unwrap_err();
    assert_eq!(error, Error::ZeroBudget { name: "num_blocks" });
}

#[test]
fn rejects_a_shrink_that_cuts_off_a_block_in_use() {
    let mut pool = BlockPool::new(NumBlocks(4)).unwrap();
    for _ in 0..3 {
        pool.try_allocate().unwrap();
    }
    pool.acquire(BlockId(2)).unwrap();
    let error = pool.shrink(NumBlocks(2)).unwrap_err();
    let (asked, num_blocks) = (NumBlocks(2), NumBlocks(4));
    assert_eq!(error, Error::BlockInUse { block_id: BlockId(2), num_refs: 2, asked, num_blocks });
    let text = "cannot shrink from 4 to 2 blocks: block 2 is in use (2 references)";
    assert_eq!(error.to_string(), text);
    pool.check_integrity().unwrap();
    pool.shrink(NumBlocks(3)).unwrap();
}

#[test]
fn rejects_a_shrink_below_what_a_live_request_may_need() {
    let mut scheduler = scheduler(|_| {});
    scheduler.add_request(support::request(1, 0, 4)).unwrap();
    let error = scheduler.shrink(NumBlocks(4)).unwrap_err();
    let (needed, asked) = (NumBlocks(5), NumBlocks(4));
    assert_eq!(error, Error::ShrinkBelowRequest { request_id: ONE, needed, asked });
    assert_eq!(error.to_string(), "cannot shrink to 4 blocks: request 1 may need 5");
    scheduler.shrink(NumBlocks(5)).unwrap();
}

#[test]
fn rejects_a_cache_reset_while_requests_run() {
    let mut scheduler = verifying();
    let error = scheduler.reset_prefix_cache().unwrap_err();
    assert_eq!(error, Error::PrefixCacheInUse { num_running: 1 });
    assert_eq!(error.to_string(), "cannot reset the prefix cache: 1 requests are running");
    scheduler.abort(ONE).unwrap();
    assert_eq!(scheduler.stats().num_cached_blocks, NumBlocks(1));
    scheduler.reset_prefix_cache().unwrap();
    assert_eq!(scheduler.stats().num_cached_blocks, NumBlocks(0));
}
