//! Where the blocks of one tensor lie.

use extkv_core::kv::{BlockId, Dim, Layout, NumBlocks};
use pyo3::prelude::*;

use super::spec::{DtypeArg, PyKvSpec};
use crate::error::BindingResult;

/// Where the elements of every block lie.
#[pyclass(frozen, eq, hash, name = "Layout", module = "extkv._extkv")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PyLayout {
    pub(super) inner: Layout,
}

impl From<Layout> for PyLayout {
    fn from(inner: Layout) -> Self {
        Self { inner }
    }
}

#[pymethods]
impl PyLayout {
    /// Lay named dims out in a stride order.
    #[staticmethod]
    fn ordered(
        dims: Vec<(String, u64)>,
        stride_order: Vec<usize>,
        block_dim: usize,
        dtype: DtypeArg,
    ) -> BindingResult<Self> {
        Ok(Layout::new(named(dims), stride_order, block_dim, dtype.0)?.into())
    }

    /// Take the strides that a backend reports.
    #[staticmethod]
    fn from_strides(
        dims: Vec<(String, u64)>,
        strides: Vec<i64>,
        block_dim: usize,
        dtype: DtypeArg,
    ) -> BindingResult<Self> {
        Ok(Layout::from_strides(named(dims), &strides, block_dim, dtype.0)?.into())
    }

    /// All keys, then all values.
    #[staticmethod]
    fn kv_split(spec: &PyKvSpec) -> BindingResult<Self> {
        Ok(Layout::kv_split(spec.inner.attention()?)?.into())
    }

    /// Keys and values of a block side by side.
    #[staticmethod]
    fn block_major(spec: &PyKvSpec) -> BindingResult<Self> {
        Ok(Layout::block_major(spec.inner.attention()?)?.into())
    }

    /// Key and value of a head side by side.
    #[staticmethod]
    fn fused(spec: &PyKvSpec) -> BindingResult<Self> {
        Ok(Layout::fused(spec.inner.attention()?)?.into())
    }

    /// The keys alone.
    #[staticmethod]
    fn split_keys(spec: &PyKvSpec) -> BindingResult<Self> {
        Ok(Layout::split_keys(spec.inner.attention()?)?.into())
    }

    /// The values alone.
    #[staticmethod]
    fn split_values(spec: &PyKvSpec) -> BindingResult<Self> {
        Ok(Layout::split_values(spec.inner.attention()?)?.into())
    }

    /// The latents of an MLA layer.
    #[staticmethod]
    fn mla(spec: &PyKvSpec) -> BindingResult<Self> {
        Ok(Layout::mla(spec.inner.mla()?)?.into())
    }

    /// The same shape in another physical order.
    fn with_stride_order(&self, stride_order: Vec<usize>) -> BindingResult<Self> {
        Ok(self.inner.clone().with_stride_order(stride_order)?.into())
    }

    /// The same layout with a longer block in each segment.
    fn padded_to(&self, num_bytes: u64) -> BindingResult<Self> {
        Ok(self.inner.clone().padded_to(num_bytes)?.into())
    }

    /// Names and sizes of the dims; the block dim has size 1.
    #[getter]
    fn dims(&self) -> Vec<(String, u64)> {
        let named = |dim: &Dim| (dim.name.to_string(), dim.size);
        self.inner.dims().iter().map(named).collect()
    }

    /// Dims from the outermost in memory to the innermost.
    #[getter]
    fn stride_order(&self) -> Vec<usize> {
        self.inner.stride_order().to_vec()
    }

    /// Index of the dim that counts blocks.
    #[getter]
    fn block_dim(&self) -> usize {
        self.inner.block_dim()
    }

    /// Element type as torch names it.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.inner.dtype().torch_name()
    }

    /// Separate runs of memory.
    #[getter]
    fn num_segments(&self) -> u64 {
        self.inner.num_segments()
    }

    /// Bytes of a block in one segment.
    #[getter]
    fn bytes_per_block_per_segment(&self) -> u64 {
        self.inner.bytes_per_block_per_segment()
    }

    /// Bytes of a block in all segments.
    #[getter]
    fn bytes_per_block(&self) -> u64 {
        self.inner.bytes_per_block()
    }

    /// Shape for a number of blocks.
    fn shape(&self, num_blocks: u64) -> BindingResult<Vec<u64>> {
        Ok(self.inner.at(NumBlocks(num_blocks))?.shape().to_vec())
    }

    /// Strides in elements for a number of blocks.
    fn strides(&self, num_blocks: u64) -> BindingResult<Vec<u64>> {
        Ok(self.inner.at(NumBlocks(num_blocks))?.strides().to_vec())
    }

    /// First byte and end of a block in each segment.
    fn block_ranges(&self, block: u64, num_blocks: u64) -> BindingResult<Vec<(u64, u64)>> {
        let sized = self.inner.at(NumBlocks(num_blocks))?;
        let ranges = sized.block_ranges(BlockId(block))?;
        Ok(ranges.into_iter().map(|r| (r.start, r.end)).collect())
    }
}

fn named(dims: Vec<(String, u64)>) -> Vec<Dim> {
    let dims = dims.into_iter().map(|(name, size)| Dim::new(name, size));
    dims.collect()
}
