//! Explicit strides, as an attention backend reports them, back to a [`Layout`].
//!
//! Strides are accepted only if the tensor tiles its memory: each dim steps over exactly what the
//! dims inside it span. Anything else is refused with the dim that breaks it.

use super::{Dim, Layout, check_dims};
use crate::dtype::Dtype;
use crate::kv::checked::mul;
use crate::kv::error::LayoutError;

impl Layout {
    /// Derives the layout of a tensor with these dims and strides (in elements).
    ///
    /// The block dim must have its real size, at least 2: the stride of a dim of size 1 says
    /// nothing. Strides of other dims of size 1 are ignored.
    ///
    /// # Errors
    /// [`LayoutError::BlockDimOutOfRange`], [`LayoutError::ZeroDim`],
    /// [`LayoutError::StrideCount`], [`LayoutError::NegativeStride`],
    /// [`LayoutError::AmbiguousBlockDim`]; [`LayoutError::StridesAlias`] where two indices share
    /// an element; [`LayoutError::StridesLeaveGap`] where an element belongs to no index;
    /// [`LayoutError::Overflow`].
    pub fn from_strides(
        dims: Vec<Dim>,
        strides: &[i64],
        block_dim: usize,
        dtype: Dtype,
    ) -> Result<Self, LayoutError> {
        check_dims(&dims, block_dim)?;
        if dims.len() != strides.len() {
            let (expected, found) = (dims.len(), strides.len());
            return Err(LayoutError::StrideCount { expected, found });
        }
        if dims.get(block_dim).is_some_and(|dim| dim.size == 1) {
            return Err(LayoutError::AmbiguousBlockDim);
        }
        let mut steps = Vec::with_capacity(dims.len());
        for (index, (dim, &stride)) in dims.iter().zip(strides).enumerate() {
            let negative = || LayoutError::NegativeStride { dim: dim.name.to_string(), stride };
            let stride = u64::try_from(stride).map_err(|_| negative())?;
            steps.push(Step { index, dim, stride });
        }
        // Outermost first; a dim of size 1 goes anywhere, so a tie keeps the logical order.
        steps.sort_by_key(|step| std::cmp::Reverse(step.stride));
        check_tiling(&steps)?;
        let stride_order = steps.iter().map(|step| step.index).collect();
        Self::new(dims, stride_order, block_dim, dtype)
    }
}

struct Step<'a> {
    index: usize,
    dim: &'a Dim,
    stride: u64,
}

fn check_tiling(outermost_first: &[Step<'_>]) -> Result<(), LayoutError> {
    let mut span = 1;
    for step in outermost_first.iter().rev().filter(|step| step.dim.size > 1) {
        let (dim, stride) = (step.dim.name.to_string(), step.stride);
        if stride < span {
            return Err(LayoutError::StridesAlias { dim, stride, span });
        }
        if stride > span {
            return Err(LayoutError::StridesLeaveGap { dim, stride, span });
        }
        span = mul("elements of a layout", span, step.dim.size)?;
    }
    Ok(())
}
