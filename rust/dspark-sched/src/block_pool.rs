//! The fixed set of KV blocks: reference counts, and a free list in least-recently-used order.
//!
//! - allocate, acquire and release are O(1); grow and shrink are O(blocks added or removed).
//! - A block is in the free list exactly when nobody references it.
//! - The list runs from the block freed longest ago (handed out next) to the one freed last;
//!   blocks that never held anything come first, lowest id first.
//! - Freeing a block forgets nothing: its content stays usable, through [`BlockPool::acquire`],
//!   until [`BlockPool::try_allocate`] hands it out.
//! - Ids are `0..num_blocks` and never move; growth and shrink act at the end only.

use crate::error::{Error, Result, ensure};
use crate::ids::{BlockId, MAX_INT32, NumBlocks, saturating_u32};

/// Neighbours in the free list, as node numbers: node 0 is the list itself, block b is b + 1.
#[derive(Debug, Clone, Copy)]
struct Link {
    prev: usize,
    next: usize,
}

/// Both ends of the circular list.
const LIST: usize = 0;

fn node_of(block_id: BlockId) -> usize {
    block_id.index() + 1
}

fn block_of(node: usize) -> BlockId {
    BlockId(saturating_u32(node - 1))
}

/// Reference-counted blocks with an intrusive free list. See the module for the invariants.
#[derive(Debug, Clone)]
pub struct BlockPool {
    links: Vec<Link>,
    num_refs: Vec<u32>,
    num_free: u32,
}

impl BlockPool {
    /// A pool of free blocks `0..num_blocks`.
    ///
    /// # Errors
    /// [`Error::ZeroBudget`] or [`Error::BudgetTooLarge`].
    pub fn new(num_blocks: NumBlocks) -> Result<Self> {
        if num_blocks.0 == 0 {
            return Err(Error::ZeroBudget { name: "num_blocks" });
        }
        let mut pool = Self {
            links: vec![Link { prev: LIST, next: LIST }],
            num_refs: Vec::new(),
            num_free: 0,
        };
        pool.grow(num_blocks)?;
        Ok(pool)
    }

    /// Blocks of the pool.
    #[must_use]
    pub fn num_blocks(&self) -> NumBlocks {
        NumBlocks(saturating_u32(self.num_refs.len()))
    }

    /// Blocks that nobody references, cached ones included.
    #[must_use]
    pub fn num_free(&self) -> NumBlocks {
        NumBlocks(self.num_free)
    }

    /// References to a block.
    ///
    /// # Errors
    /// [`Error::BlockOutOfRange`].
    pub fn num_refs(&self, block_id: BlockId) -> Result<u32> {
        self.num_refs
            .get(block_id.index())
            .copied()
            .ok_or(Error::BlockOutOfRange { block_id, num_blocks: self.num_blocks() })
    }

    /// The free blocks in the order they will be handed out.
    pub fn free_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        let first = self.links[LIST].next;
        std::iter::successors(Some(first), |&node| Some(self.links[node].next))
            .take_while(|&node| node != LIST)
            .map(block_of)
    }

    /// Hands out the least recently used free block with one reference, or `None` when all are
    /// held. The caller must forget what the block held before.
    pub fn try_allocate(&mut self) -> Option<BlockId> {
        let node = self.links[LIST].next;
        if node == LIST {
            return None;
        }
        self.unlink(node);
        let block_id = block_of(node);
        self.num_refs[block_id.index()] = 1;
        Some(block_id)
    }

    /// Adds a reference to a block whose content is wanted, free or not.
    ///
    /// # Errors
    /// [`Error::BlockOutOfRange`].
    pub fn acquire(&mut self, block_id: BlockId) -> Result<()> {
        if self.num_refs(block_id)? == 0 {
            self.unlink(node_of(block_id));
        }
        self.num_refs[block_id.index()] += 1;
        Ok(())
    }

    /// Drops a reference; the last one puts the block at the end of the free list.
    ///
    /// # Errors
    /// [`Error::BlockOutOfRange`] or [`Error::BlockNotReferenced`].
    pub fn release(&mut self, block_id: BlockId) -> Result<()> {
        match self.num_refs(block_id)? {
            0 => return Err(Error::BlockNotReferenced { block_id }),
            1 => self.link_between(node_of(block_id), self.links[LIST].prev, LIST),
            _ => {}
        }
        self.num_refs[block_id.index()] -= 1;
        Ok(())
    }

    /// Adds free blocks at the end; they are handed out before any that holds old content.
    ///
    /// # Errors
    /// [`Error::GrowBelowCurrent`] or [`Error::BudgetTooLarge`].
    pub fn grow(&mut self, new_num_blocks: NumBlocks) -> Result<()> {
        let num_blocks = self.num_blocks();
        if new_num_blocks < num_blocks {
            return Err(Error::GrowBelowCurrent { asked: new_num_blocks, num_blocks });
        }
        if new_num_blocks.0 > MAX_INT32 {
            let asked = new_num_blocks.0;
            return Err(Error::BudgetTooLarge { name: "num_blocks", asked, limit: MAX_INT32 });
        }
        self.num_refs.resize(new_num_blocks.0 as usize, 0);
        self.links.resize(new_num_blocks.0 as usize + 1, Link { prev: LIST, next: LIST });
        for id in (num_blocks.0..new_num_blocks.0).rev() {
            self.link_between(node_of(BlockId(id)), LIST, self.links[LIST].next);
        }
        Ok(())
    }

    /// Removes blocks `new_num_blocks..num_blocks`, which must all be free.
    ///
    /// # Errors
    /// [`Error::ShrinkAboveCurrent`], [`Error::ZeroBudget`], or [`Error::BlockInUse`] with the
    /// last block in use.
    pub fn shrink(&mut self, new_num_blocks: NumBlocks) -> Result<()> {
        let num_blocks = self.num_blocks();
        if new_num_blocks > num_blocks {
            return Err(Error::ShrinkAboveCurrent { asked: new_num_blocks, num_blocks });
        }
        if new_num_blocks.0 == 0 {
            return Err(Error::ZeroBudget { name: "num_blocks" });
        }
        if let Some(block_id) = self.last_in_use().filter(|last| last.0 >= new_num_blocks.0) {
            let num_refs = self.num_refs[block_id.index()];
            return Err(Error::BlockInUse {
                block_id,
                num_refs,
                asked: new_num_blocks,
                num_blocks,
            });
        }
        for id in new_num_blocks.0..num_blocks.0 {
            self.unlink(node_of(BlockId(id)));
        }
        self.num_refs.truncate(new_num_blocks.0 as usize);
        self.links.truncate(new_num_blocks.0 as usize + 1);
        Ok(())
    }

    /// The block with the highest id that is referenced: shrink can go down to just above it.
    #[must_use]
    pub fn last_in_use(&self) -> Option<BlockId> {
        let index = self.num_refs.iter().rposition(|&num_refs| num_refs > 0)?;
        Some(BlockId(saturating_u32(index)))
    }

    /// Checks the free list against the reference counts. O(num_blocks).
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub fn check_integrity(&self) -> Result<()> {
        let mut num_listed = 0;
        let mut node = LIST;
        loop {
            let next = self.links[node].next;
            let agree = self.links[next].prev == node && num_listed <= self.num_refs.len();
            ensure(agree, "the free list is one ring", next as u64)?;
            if next == LIST {
                break;
            }
            let is_free = self.num_refs(block_of(next))? == 0;
            ensure(is_free, "a listed block is unreferenced", block_of(next).0)?;
            num_listed += 1;
            node = next;
        }
        let num_unreferenced = self.num_refs.iter().filter(|&&count| count == 0).count();
        let agree = num_listed == num_unreferenced;
        ensure(agree, "every unreferenced block is listed", 0_u32)?;
        let agree = num_listed == self.num_free as usize;
        ensure(agree, "num_free counts the list", self.num_free)
    }

    fn unlink(&mut self, node: usize) {
        let Link { prev, next } = self.links[node];
        self.links[prev].next = next;
        self.links[next].prev = prev;
        self.num_free -= 1;
    }

    fn link_between(&mut self, node: usize, prev: usize, next: usize) {
        self.links[node] = Link { prev, next };
        self.links[prev].next = node;
        self.links[next].prev = node;
        self.num_free += 1;
    }
}
