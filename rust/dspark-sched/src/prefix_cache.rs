//! Which block holds which prefix: a tree of full blocks, found by hash and proved by content.
//!
//! A node is one block's worth of tokens after one exact prefix: its parent is a node, or the
//! keys of the request at the root. A hash only finds candidates; tokens and parent are compared,
//! so a collision costs a comparison and never a wrong block. Several blocks can hold the same
//! content. A node lives while a block holds it or another node continues it.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use crate::error::{Error, Result, ensure};
use crate::ids::{BlockId, NumBlocks, TokenId};

/// What besides the tokens decides the content of a request's blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct CacheKeys {
    /// Requests share blocks only with requests of the same salt.
    pub cache_salt: Option<String>,
    /// Adapter, image hashes and the like, in the order the engine defines.
    pub extra_keys: Vec<u64>,
}

/// Hash of a block's tokens and of all before them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(pub u64);

/// Hashes a block after its parent. Any function is correct; a poor one is slow.
pub type BlockHashFn = fn(parent: BlockHash, token_ids: &[TokenId]) -> BlockHash;

/// SipHash with fixed keys: equal in every run, so that plans are reproducible.
#[must_use]
pub fn default_block_hash(parent: BlockHash, token_ids: &[TokenId]) -> BlockHash {
    let mut hasher = DefaultHasher::new();
    parent.hash(&mut hasher);
    token_ids.hash(&mut hasher);
    BlockHash(hasher.finish())
}

/// Hash of a request's keys: the parent of its first block.
pub(crate) fn root_hash(keys: &CacheKeys) -> BlockHash {
    let mut hasher = DefaultHasher::new();
    keys.hash(&mut hasher);
    BlockHash(hasher.finish())
}

/// A node of the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NodeId(usize);

/// What a chain of blocks has ended with so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ChainEnd {
    /// No block yet.
    Root(Arc<CacheKeys>),
    /// This block's content, after all before it.
    Node(NodeId),
}

/// A block's content, as asked or as stored.
#[derive(Clone, Copy)]
pub(crate) struct BlockContent<'a> {
    pub(crate) parent: &'a ChainEnd,
    pub(crate) hash: BlockHash,
    pub(crate) token_ids: &'a [TokenId],
}

#[derive(Debug)]
struct Node {
    parent: ChainEnd,
    hash: BlockHash,
    token_ids: Box<[TokenId]>,
    block_ids: Vec<BlockId>,
    num_children: u32,
}

type Buckets = HashMap<BlockHash, Vec<NodeId>, BuildHasherDefault<DefaultHasher>>;

/// The tree, and which node each block of the pool holds.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    nodes: Vec<Option<Node>>,
    vacant: Vec<NodeId>,
    buckets: Buckets,
    node_of_block: Vec<Option<NodeId>>,
    num_cached_blocks: u32,
}

impl PrefixCache {
    pub(crate) fn new(num_blocks: NumBlocks) -> Self {
        Self {
            nodes: Vec::new(),
            vacant: Vec::new(),
            buckets: Buckets::default(),
            node_of_block: vec![None; num_blocks.0 as usize],
            num_cached_blocks: 0,
        }
    }

    /// Follows the pool's size. Blocks cut off must have been forgotten.
    pub(crate) fn resize(&mut self, num_blocks: NumBlocks) {
        self.node_of_block.resize(num_blocks.0 as usize, None);
    }

    /// The node with this content.
    pub(crate) fn find(&self, content: BlockContent<'_>) -> Option<NodeId> {
        let bucket = self.buckets.get(&content.hash)?;
        bucket.iter().copied().find(|&id| {
            self.node(id).is_ok_and(|node| {
                node.parent == *content.parent && *node.token_ids == *content.token_ids
            })
        })
    }

    /// The block registered first among those that hold a node's content.
    pub(crate) fn block_of(&self, id: NodeId) -> Option<BlockId> {
        self.node(id).ok()?.block_ids.first().copied()
    }

    /// The node that a block holds.
    pub(crate) fn node_of(&self, block_id: BlockId) -> Option<NodeId> {
        self.node_of_block.get(block_id.index()).copied().flatten()
    }

    /// Makes a full block findable by its content, and returns its node.
    pub(crate) fn insert(&mut self, content: BlockContent<'_>, block: BlockId) -> Result<NodeId> {
        let id = match self.find(content) {
            Some(id) => id,
            None => self.add_node(content)?,
        };
        self.node_mut(id)?.block_ids.push(block);
        match self.node_of_block.get_mut(block.index()) {
            Some(entry) => self.num_cached_blocks += u32::from(entry.replace(id).is_none()),
            None => ensure(false, "a cached block is in the pool", block.0)?,
        }
        Ok(id)
    }

    /// Makes a block's content unfindable through it, because the block is reused or removed.
    pub(crate) fn forget(&mut self, block_id: BlockId) -> Result<()> {
        let Some(id) = self.node_of(block_id) else {
            return Ok(());
        };
        self.node_of_block[block_id.index()] = None;
        self.num_cached_blocks -= 1;
        self.node_mut(id)?.block_ids.retain(|&held| held != block_id);
        self.prune(id)
    }

    /// Removes a node that nothing needs any more, and then its ancestors likewise.
    fn prune(&mut self, leaf: NodeId) -> Result<()> {
        let mut id = leaf;
        loop {
            let node = self.node(id)?;
            if node.num_children > 0 || !node.block_ids.is_empty() {
                return Ok(());
            }
            let (hash, parent) = (node.hash, node.parent.clone());
            self.nodes[id.0] = None;
            self.vacant.push(id);
            if let Some(bucket) = self.buckets.get_mut(&hash) {
                bucket.retain(|&other| other != id);
                if bucket.is_empty() {
                    self.buckets.remove(&hash);
                }
            }
            let ChainEnd::Node(parent) = parent else {
                return Ok(());
            };
            self.node_mut(parent)?.num_children -= 1;
            id = parent;
        }
    }

    fn add_node(&mut self, content: BlockContent<'_>) -> Result<NodeId> {
        if let ChainEnd::Node(parent) = *content.parent {
            self.node_mut(parent)?.num_children += 1;
        }
        let node = Node {
            parent: content.parent.clone(),
            hash: content.hash,
            token_ids: content.token_ids.into(),
            block_ids: Vec::new(),
            num_children: 0,
        };
        let id = self.vacant.pop().unwrap_or(NodeId(self.nodes.len()));
        if id.0 == self.nodes.len() {
            self.nodes.push(None);
        }
        self.nodes[id.0] = Some(node);
        self.buckets.entry(content.hash).or_default().push(id);
        Ok(id)
    }

    fn node(&self, id: NodeId) -> Result<&Node> {
        let node = self.nodes.get(id.0).and_then(Option::as_ref);
        node.ok_or(Error::Corrupt { rule: "a prefix node exists", subject: id.0 as u64 })
    }

    fn node_mut(&mut self, id: NodeId) -> Result<&mut Node> {
        let node = self.nodes.get_mut(id.0).and_then(Option::as_mut);
        node.ok_or(Error::Corrupt { rule: "a prefix node exists", subject: id.0 as u64 })
    }

    /// Checks that a node stands for these tokens after this parent.
    pub(crate) fn check_content(&self, id: NodeId, content: BlockContent<'_>) -> Result<()> {
        let node = self.node(id)?;
        let same = node.parent == *content.parent && *node.token_ids == *content.token_ids;
        ensure(same, "a held block has its request's content", id.0 as u64)
    }

    /// Checks links between nodes, buckets and blocks. O(nodes + blocks).
    pub(crate) fn check_integrity(&self) -> Result<()> {
        let mut num_children = vec![0; self.nodes.len()];
        let mut num_holding = 0;
        for (id, node) in self.live_nodes() {
            self.check_node(id, node)?;
            num_holding += node.block_ids.len();
            if let ChainEnd::Node(parent) = node.parent {
                self.node(parent)?;
                num_children[parent.0] += 1;
            }
        }
        for (id, node) in self.live_nodes() {
            let counted = node.num_children == num_children[id.0];
            ensure(counted, "a prefix node counts its children", id.0 as u64)?;
        }
        let num_cached = self.node_of_block.iter().flatten().count();
        let agree = num_cached == num_holding;
        ensure(agree, "every cached block is held by one node", 0_u32)?;
        let agree = num_cached == self.num_cached_blocks as usize;
        ensure(agree, "cached blocks are counted", self.num_cached_blocks)?;
        let num_bucketed: usize = self.buckets.values().map(Vec::len).sum();
        let agree = num_bucketed == self.live_nodes().count();
        ensure(agree, "buckets hold live nodes only", 0_u32)
    }

    fn check_node(&self, id: NodeId, node: &Node) -> Result<()> {
        let bucket = self.buckets.get(&node.hash);
        let is_bucketed = bucket.is_some_and(|bucket| bucket.contains(&id));
        ensure(is_bucketed, "a prefix node is in its bucket", id.0 as u64)?;
        let is_needed = node.num_children > 0 || !node.block_ids.is_empty();
        ensure(is_needed, "a prefix node is needed", id.0 as u64)?;
        for &block_id in &node.block_ids {
            let agree = self.node_of(block_id) == Some(id);
            ensure(agree, "a node and its block name each other", block_id.0)?;
        }
        Ok(())
    }

    fn live_nodes(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        let nodes = self.nodes.iter().enumerate();
        nodes.filter_map(|(index, node)| node.as_ref().map(|node| (NodeId(index), node)))
    }

    /// Blocks whose content can be found.
    pub(crate) fn num_cached_blocks(&self) -> NumBlocks {
        NumBlocks(self.num_cached_blocks)
    }
}
