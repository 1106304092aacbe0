//! A layer whose spec and layout were found to fit each other: what the planner works on.

use super::error::PlanError;
use super::layer::{Layer, LayerLayout};
use crate::kv::checked::{add, mul};
use crate::kv::error::LayoutError;
use crate::kv::layout::{CacheOrder, LAYER_DIM, Layout, TensorView};
use crate::kv::spec::{BlockShape, KvSpec, NumBlocks, StateBlock};
use crate::units::Bytes;

/// Equal segments in a row: how many, and their bytes per block.
pub(super) type SegmentRun = (u64, u64);

/// Where a layer's blocks lie, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Form {
    Parts(Vec<Layout>),
    State(StateBlock),
    Stack(Stack),
}

/// The layers that may be in one tensor `[L, B, H, N, C]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stack {
    order: CacheOrder,
    block: BlockShape,
}

impl Form {
    pub(super) fn of(layer: &Layer) -> Result<Self, PlanError> {
        match (&layer.layout, &layer.spec, layer.spec.block_shape()) {
            (LayerLayout::State, KvSpec::Mamba(mamba), _) => Ok(Self::State(mamba.block().clone())),
            (LayerLayout::Stacked(order), _, Some(block)) => {
                let order = *order;
                Ok(Self::Stack(Stack { order, block }))
            }
            (LayerLayout::Strided(parts), _, Some(_)) => {
                check_bytes(layer, parts)?;
                Ok(Self::Parts(parts.clone()))
            }
            (layout, ..) => {
                let (layer, layout) = (layer.name.clone(), layout.kind());
                Err(PlanError::LayoutKind { layer, layout })
            }
        }
    }

    pub(super) fn is_stack(&self) -> bool {
        matches!(self, Self::Stack(_))
    }

    /// The segments of a buffer that holds `num_layers` layers of this form, equal ones together.
    pub(super) fn segment_runs(&self, num_layers: u64) -> Result<Vec<SegmentRun>, LayoutError> {
        match self {
            Self::State(block) => Ok(vec![(1, block.bytes_per_block())]),
            Self::Stack(stack) => Ok(vec![run(&stack.layout(num_layers)?)]),
            Self::Parts(parts) => {
                let mut runs: Vec<SegmentRun> = Vec::with_capacity(parts.len());
                for (count, bytes) in parts.iter().map(run) {
                    match runs.last_mut() {
                        Some((so_far, same)) if *same == bytes => *so_far += count,
                        _ => runs.push((count, bytes)),
                    }
                }
                Ok(runs)
            }
        }
    }

    /// The tensors of a layer: number `slice` of `num_layers` in a stack, else the only one.
    pub(super) fn tensors(
        &self,
        (slice, num_layers): (u64, u64),
        max_blocks: NumBlocks,
    ) -> Result<Vec<TensorView>, LayoutError> {
        match self {
            Self::Parts(parts) => strided_views(parts, max_blocks),
            Self::State(block) => state_views(block, max_blocks),
            Self::Stack(stack) => {
                let sized = stack.layout(num_layers)?.at(max_blocks)?;
                Ok(vec![sized.select(LAYER_DIM, slice)?])
            }
        }
    }
}

impl Stack {
    fn layout(&self, num_layers: u64) -> Result<Layout, LayoutError> {
        self.order.layout(num_layers, &self.block)
    }
}

fn run(layout: &Layout) -> SegmentRun {
    (layout.num_segments(), layout.bytes_per_block_per_segment())
}

/// Refuses parts that are not the spec's bytes, whose blocks are not aligned as its readers need, or
/// that misalign each other whatever the number of blocks.
fn check_bytes(layer: &Layer, parts: &[Layout]) -> Result<(), PlanError> {
    let what = "bytes per block of a layer";
    let (mut layout_bytes, mut offset) = (0, 0_u64);
    for part in parts {
        let dtype = part.dtype();
        if !offset.is_multiple_of(dtype.size_bytes()) {
            let layer = layer.name.clone();
            return Err(PlanError::PartMisaligned { layer, offset, dtype });
        }
        let (bytes, alignment) = (part.bytes_per_block_per_segment(), layer.spec.alignment_bytes());
        if !bytes.is_multiple_of(alignment) {
            let (bytes, alignment) = (Bytes(bytes), Bytes(alignment));
            return Err(LayoutError::BlockMisaligned { bytes, alignment }.into());
        }
        layout_bytes = add(what, layout_bytes, part.unpadded_bytes_per_block())?;
        offset = add(what, offset, part.bytes_per_block())?;
    }
    let spec_bytes = layer.spec.bytes_per_block();
    if layout_bytes == spec_bytes {
        return Ok(());
    }
    let layer = layer.name.clone();
    Err(PlanError::LayoutBytes { layer, layout_bytes, spec_bytes })
}

/// Tensors one after another, each over the full capacity of its segments.
fn strided_views(parts: &[Layout], max_blocks: NumBlocks) -> Result<Vec<TensorView>, LayoutError> {
    let mut views = Vec::with_capacity(parts.len());
    let mut offset = 0;
    for layout in parts {
        let sized = layout.at(max_blocks)?;
        views.push(sized.view(offset));
        offset = add("bytes of a layer", offset, sized.capacity_bytes())?;
    }
    Ok(views)
}

/// State `s` of all blocks: shape `(N, *s.shape)`, contiguous inside a block.
fn state_views(block: &StateBlock, max_blocks: NumBlocks) -> Result<Vec<TensorView>, LayoutError> {
    let mut views = Vec::with_capacity(block.tensors().len());
    for state in block.tensors() {
        let mut strides = vec![0; state.shape.len()];
        let mut step = 1;
        for (stride, &size) in strides.iter_mut().zip(&state.shape).rev() {
            *stride = step;
            step = mul("stride of a state", step, size)?;
        }
        strides.insert(0, block.bytes_per_block() / state.dtype.size_bytes());
        let mut shape = state.shape.clone();
        shape.insert(0, max_blocks.0);
        let (offset_bytes, dtype) = (state.offset_bytes, state.dtype);
        views.push(TensorView {
            name: Some(state.name.clone()),
            offset_bytes,
            dtype,
            shape,
            strides,
        });
    }
    Ok(views)
}
