//! One layer of a cache plan: its name, what it caches, where the bytes lie, and whose memory it
//! uses if not its own.

use super::error::PlanError;
use crate::kv::layout::{CacheOrder, Layout};
use crate::kv::spec::{KvSpec, MambaSpec};

/// Where a layer's blocks lie.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum LayerLayout {
    /// A tensor of its own, or several one after another (keys, then values of another width).
    Strided(Vec<Layout>),
    /// A slice of one tensor `[L, B, H, N, C]`, together with every layer of the same order and
    /// block shape.
    Stacked(CacheOrder),
    /// The state block of its [`MambaSpec`].
    State,
}

impl LayerLayout {
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Strided(_) => "strided",
            Self::Stacked(_) => "stacked",
            Self::State => "state",
        }
    }
}

/// How a layer uses the memory of an earlier one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Shared {
    /// It reads the blocks that the other layer writes, under the same block ids: the same spec
    /// and layout.
    Blocks {
        /// The earlier layer.
        with: String,
    },
    /// It has block ids of its own in the same pool: only the bytes of a block must agree, as
    /// where an attention layer and Mamba layers of a hybrid model take turns.
    Pool {
        /// The earlier layer.
        with: String,
    },
}

impl Shared {
    /// The layer whose memory is used.
    #[must_use]
    pub fn with(&self) -> &str {
        match self {
            Self::Blocks { with } | Self::Pool { with } => with,
        }
    }
}

/// One layer as an engine describes it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Layer {
    /// The engine's name, unique in a plan.
    pub name: String,
    /// What it caches.
    pub spec: KvSpec,
    /// Where the bytes lie.
    pub layout: LayerLayout,
    /// Whose memory it uses; `None` for its own.
    pub shared: Option<Shared>,
}

impl Layer {
    /// A layer with a tensor of its own.
    #[must_use]
    pub fn strided(name: impl Into<String>, spec: KvSpec, layout: Layout) -> Self {
        Self::with_layout(name, spec, LayerLayout::Strided(vec![layout]))
    }

    /// A layer in a whole-cache tensor.
    #[must_use]
    pub fn stacked(name: impl Into<String>, spec: KvSpec, order: CacheOrder) -> Self {
        Self::with_layout(name, spec, LayerLayout::Stacked(order))
    }

    /// A recurrent layer.
    #[must_use]
    pub fn state(name: impl Into<String>, spec: MambaSpec) -> Self {
        Self::with_layout(name, KvSpec::Mamba(spec), LayerLayout::State)
    }

    /// A layer with any layout.
    #[must_use]
    pub fn with_layout(name: impl Into<String>, spec: KvSpec, layout: LayerLayout) -> Self {
        Self { name: name.into(), spec, layout, shared: None }
    }

    /// Reads the blocks of the earlier layer `with`.
    #[must_use]
    pub fn sharing_blocks(mut self, with: impl Into<String>) -> Self {
        self.shared = Some(Shared::Blocks { with: with.into() });
        self
    }

    /// Takes its own block ids in the pool of the earlier layer `with`.
    #[must_use]
    pub fn sharing_pool(mut self, with: impl Into<String>) -> Self {
        self.shared = Some(Shared::Pool { with: with.into() });
        self
    }

    /// Pads every block of the layer to `bytes`, so that layers can share a pool.
    ///
    /// # Errors
    /// [`PlanError::NotOneSegment`] unless a block is one run of bytes;
    /// [`PlanError::Layout`] for a size too small or misaligned.
    pub fn padded_to(mut self, bytes: u64) -> Result<Self, PlanError> {
        match (&mut self.layout, &mut self.spec) {
            (LayerLayout::State, KvSpec::Mamba(mamba)) => {
                *mamba = mamba.clone().padded_to(bytes)?
            }
            (LayerLayout::Strided(parts), _) => match parts.as_mut_slice() {
                [only] if only.num_segments() == 1 => *only = only.clone().padded_to(bytes)?,
                _ => return Err(PlanError::NotOneSegment { layer: self.name }),
            },
            _ => return Err(PlanError::NotOneSegment { layer: self.name }),
        }
        Ok(self)
    }
}
