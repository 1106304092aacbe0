//! The pool against a plain model: a queue of free ids and a count per id.

#![allow(clippy::unwrap_used)]
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]

use std::collections::VecDeque;

use dspark_sched::{BlockId, BlockPool, Error, NumBlocks};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Call {
    Allocate,
    Acquire(u32),
    Release(u32),
    Grow(u32),
    Shrink(u32),
}

#[derive(Debug)]
struct Model {
    free: VecDeque<u32>,
    num_refs: Vec<u32>,
}

impl Model {
    fn new(num_blocks: u32) -> Self {
        Self { free: (0..num_blocks).collect(), num_refs: vec![0; num_blocks as usize] }
    }

    fn allocate(&mut self) -> Option<BlockId> {
        let id = self.free.pop_front()?;
        self.num_refs[id as usize] = 1;
        Some(BlockId(id))
    }

    fn acquire(&mut self, id: u32) -> bool {
        let Some(num_refs) = self.num_refs.get_mut(id as usize) else {
            return false;
        };
        *num_refs += 1;
        self.free.retain(|&other| other != id);
        true
    }

    fn release(&mut self, id: u32) -> bool {
        let Some(num_refs) = self.num_refs.get_mut(id as usize) else {
            return false;
        };
        if *num_refs == 0 {
            return false;
        }
        *num_refs -= 1;
        if *num_refs == 0 {
            self.free.push_back(id);
        }
        true
    }

    fn resize(&mut self, num_blocks: u32) {
        let old = self.num_refs.len() as u32;
        self.num_refs.resize(num_blocks as usize, 0);
        self.free.retain(|&id| id < num_blocks);
        for id in (old..num_blocks).rev() {
            self.free.push_front(id);
        }
    }

    fn can_shrink(&self, num_blocks: u32) -> bool {
        let tail = self.num_refs.get(num_blocks as usize..);
        num_blocks > 0 && tail.is_some_and(|tail| tail.iter().all(|&num_refs| num_refs == 0))
    }
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        4 => Just(Call::Allocate),
        2 => (0_u32..20).prop_map(Call::Acquire),
        5 => (0_u32..20).prop_map(Call::Release),
        1 => (0_u32..20).prop_map(Call::Grow),
        1 => (0_u32..20).prop_map(Call::Shrink),
    ]
}

proptest! {
    #[test]
    fn pool_agrees_with_a_plain_queue(
        num_blocks in 1_u32..12,
        calls in prop::collection::vec(call(), 0..120),
    ) {
        let mut pool = BlockPool::new(NumBlocks(num_blocks)).unwrap();
        let mut model = Model::new(num_blocks);
        for call in calls {
            let current = model.num_refs.len() as u32;
            match call {
                Call::Allocate => prop_assert_eq!(pool.try_allocate(), model.allocate()),
                Call::Acquire(id) => {
                    prop_assert_eq!(pool.acquire(BlockId(id)).is_ok(), model.acquire(id));
                }
                Call::Release(id) => {
                    prop_assert_eq!(pool.release(BlockId(id)).is_ok(), model.release(id));
                }
                Call::Grow(to) => {
                    prop_assert_eq!(pool.grow(NumBlocks(to)).is_ok(), to >= current);
                    model.resize(to.max(current));
                }
                Call::Shrink(to) => {
                    let can = model.can_shrink(to);
                    prop_assert_eq!(pool.shrink(NumBlocks(to)).is_ok(), can);
                    model.resize(if can { to } else { current });
                }
            }
            pool.check_integrity().unwrap();
            let free: Vec<u32> = pool.free_blocks().map(|id| id.0).collect();
            prop_assert_eq!(&free, &Vec::from(model.free.clone()));
            prop_assert_eq!(pool.num_free(), NumBlocks(model.free.len() as u32));
            let in_use = model.num_refs.iter().rposition(|&num_refs| num_refs > 0);
            prop_assert_eq!(pool.last_in_use(), in_use.map(|id| BlockId(id as u32)));
        }
    }
}

#[test]
fn blocks_are_handed_out_lowest_first_then_in_the_order_of_release() {
    let mut pool = BlockPool::new(NumBlocks(3)).unwrap();
    let first: Vec<u32> = (0..3).map(|_| pool.try_allocate().unwrap().0).collect();
    assert_eq!(first, [0, 1, 2]);
    assert_eq!(pool.try_allocate(), None);
    for id in [1, 2, 0] {
        pool.release(BlockId(id)).unwrap();
    }
    assert_eq!(pool.free_blocks().map(|id| id.0).collect::<Vec<u32>>(), [1, 2, 0]);
}

#[test]
fn a_block_in_the_middle_of_the_free_list_can_be_acquired() {
    let mut pool = BlockPool::new(NumBlocks(5)).unwrap();
    pool.acquire(BlockId(2)).unwrap();
    assert_eq!(pool.free_blocks().map(|id| id.0).collect::<Vec<u32>>(), [0, 1, 3, 4]);
}

#[test]
fn new_blocks_are_used_before_those_with_old_content() {
    let mut pool = BlockPool::new(NumBlocks(2)).unwrap();
    pool.grow(NumBlocks(4)).unwrap();
    assert_eq!(pool.free_blocks().map(|id| id.0).collect::<Vec<u32>>(), [2, 3, 0, 1]);
}

#[test]
fn a_pool_of_one_block_works() {
    let mut pool = BlockPool::new(NumBlocks(1)).unwrap();
    let block_id = pool.try_allocate().unwrap();
    assert!(matches!(pool.shrink(NumBlocks(0)), Err(Error::ZeroBudget { .. })));
    pool.release(block_id).unwrap();
    assert_eq!(pool.try_allocate(), Some(block_id));
}
