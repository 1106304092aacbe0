//! Layers, and the buffers and tensors that they make together.

use extkv_core::kv::{
    BlockId, CacheOrder, CachePlan, Capacity, Layer, LayerLayout, NumBlocks, Region, RequestShape,
    TensorView,
};
use pyo3::prelude::*;

use super::layout::PyLayout;
use super::spec::PyKvSpec;
use crate::error::BindingResult;

type RegionTuple = (usize, usize, u64, u64);
type BufferTuple = (Vec<String>, Vec<(u64, u64, u64)>, u64);
type TensorTuple = (String, u64, &'static str, Vec<u64>, Vec<u64>);
type LayerTuple = (String, usize, Vec<TensorTuple>);

/// One layer of a cache.
#[pyclass(frozen, eq, hash, name = "Layer", module = "extkv._extkv")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PyLayer {
    inner: Layer,
}

impl From<Layer> for PyLayer {
    fn from(inner: Layer) -> Self {
        Self { inner }
    }
}

#[pymethods]
impl PyLayer {
    /// A layer with one tensor per layout.
    #[staticmethod]
    fn strided(name: String, spec: &PyKvSpec, layouts: Vec<Py<PyLayout>>) -> Self {
        let parts = layouts.iter().map(|l| l.get().inner.clone()).collect();
        Layer::with_layout(name, spec.inner.clone(), LayerLayout::Strided(parts)).into()
    }

    /// A layer in a whole-cache tensor.
    #[staticmethod]
    fn stacked(name: String, spec: &PyKvSpec, order: &str) -> BindingResult<Self> {
        let order: CacheOrder = order.parse()?;
        Ok(Layer::stacked(name, spec.inner.clone(), order).into())
    }

    /// A layer of recurrent state.
    #[staticmethod]
    fn state(name: String, spec: &PyKvSpec) -> Self {
        Layer::with_layout(name, spec.inner.clone(), LayerLayout::State).into()
    }

    /// The layer, reading the blocks of an earlier one.
    fn sharing_blocks(&self, other_name: String) -> Self {
        self.inner.clone().sharing_blocks(other_name).into()
    }

    /// The layer, with block ids of its own in the pool of an earlier one.
    fn sharing_pool(&self, other_name: String) -> Self {
        self.inner.clone().sharing_pool(other_name).into()
    }

    /// The layer with every block padded.
    fn padded_to(&self, num_bytes: u64) -> BindingResult<Self> {
        Ok(self.inner.clone().padded_to(num_bytes)?.into())
    }

    /// The engine's name.
    #[getter]
    fn name(&self) -> &str {
        &self.inner.name
    }

    /// One layout per tensor; empty for state and stacked layers.
    #[getter]
    fn layouts(&self) -> Vec<PyLayout> {
        match &self.inner.layout {
            LayerLayout::Strided(parts) => parts.iter().cloned().map(PyLayout::from).collect(),
            LayerLayout::Stacked(_) | LayerLayout::State => Vec::new(),
        }
    }
}

/// Re-stride the attention layers of a hybrid model.
#[pyfunction]
pub(crate) fn hybrid_layers(layers: Vec<Py<PyLayer>>) -> BindingResult<Vec<PyLayer>> {
    let layers = extkv_core::kv::hybrid_layers(inner(&layers))?;
    Ok(layers.into_iter().map(PyLayer::from).collect())
}

/// The buffers and tensors of a whole cache.
#[pyclass(frozen, name = "CachePlan", module = "extkv._extkv")]
pub(crate) struct PyCachePlan {
    inner: CachePlan,
}

#[pymethods]
impl PyCachePlan {
    /// Plan a cache of at most this many blocks.
    #[staticmethod]
    fn of_blocks(layers: Vec<Py<PyLayer>>, max_blocks: u64) -> BindingResult<Self> {
        let inner = CachePlan::new(inner(&layers), Capacity::Blocks(NumBlocks(max_blocks)))?;
        Ok(Self { inner })
    }

    /// Plan a cache of as many whole blocks as fit the bytes.
    #[staticmethod]
    fn of_bytes(layers: Vec<Py<PyLayer>>, max_bytes: u64) -> BindingResult<Self> {
        let inner = CachePlan::new(inner(&layers), Capacity::Bytes(max_bytes))?;
        Ok(Self { inner })
    }

    /// Most blocks that can be committed.
    #[getter]
    fn max_blocks(&self) -> u64 {
        self.inner.max_blocks().0
    }

    /// Bytes of one block in all buffers.
    #[getter]
    fn bytes_per_block(&self) -> u64 {
        self.inner.bytes_per_block()
    }

    /// Segments of all buffers.
    #[getter]
    fn num_segments(&self) -> usize {
        self.inner.num_segments()
    }

    /// Bytes of address space.
    #[getter]
    fn capacity_bytes(&self) -> u64 {
        self.inner.capacity_bytes()
    }

    /// Per buffer: layer names, segments (offset, capacity, bytes per block), capacity in bytes.
    fn buffers(&self) -> Vec<BufferTuple> {
        let buffers = self.inner.buffers().iter();
        let tuple = |buffer: &extkv_core::kv::BufferPlan| {
            let segments = buffer.segments.iter();
            let segments =
                segments.map(|s| (s.offset_bytes, s.capacity_bytes, s.bytes_per_block)).collect();
            (buffer.layers.clone(), segments, buffer.capacity_bytes)
        };
        buffers.map(tuple).collect()
    }

    /// Per layer: name, buffer, tensors (name or "", offset in bytes, dtype, shape, strides).
    fn layers(&self) -> Vec<LayerTuple> {
        let layers = self.inner.layers().iter().map(|layer| {
            let tensors = layer.tensors.iter().map(tensor_tuple).collect();
            (layer.name.clone(), layer.buffer, tensors)
        });
        layers.collect()
    }

    /// Committed bytes: (buffer, segment, offset, length).
    fn regions(&self, num_blocks: NumBlocksArg) -> BindingResult<Vec<RegionTuple>> {
        Ok(tuples(self.inner.regions(num_blocks.0)?))
    }

    /// Bytes that growing adds: (buffer, segment, offset, length).
    fn grown_regions(
        &self,
        start: NumBlocksArg,
        end: NumBlocksArg,
    ) -> BindingResult<Vec<RegionTuple>> {
        Ok(tuples(self.inner.grown_regions(start.0, end.0)?))
    }

    /// Bytes of one block: (buffer, segment, offset, length).
    fn block_regions(&self, block: NumBlocksArg) -> BindingResult<Vec<RegionTuple>> {
        Ok(tuples(self.inner.block_regions(BlockId(block.0.0))?))
    }

    /// Logical bytes of a number of blocks.
    fn committed_bytes(&self, num_blocks: NumBlocksArg) -> BindingResult<u64> {
        Ok(self.inner.committed_bytes(num_blocks.0)?)
    }

    /// Physical bytes of a number of blocks in granules.
    fn physical_bytes(&self, num_blocks: NumBlocksArg, granule_bytes: u64) -> BindingResult<u64> {
        Ok(self.inner.physical_bytes(num_blocks.0, granule_bytes)?)
    }

    /// What sizing needs to know, as JSON.
    fn facts_json(&self, max_model_len: u64, max_num_batched_tokens: u64) -> BindingResult<String> {
        let facts = self.inner.facts(&RequestShape { max_model_len, max_num_batched_tokens })?;
        Ok(facts.to_json()?)
    }
}

fn inner(layers: &[Py<PyLayer>]) -> Vec<Layer> {
    layers.iter().map(|l| l.get().inner.clone()).collect()
}

fn tensor_tuple(view: &TensorView) -> TensorTuple {
    let (shape, strides) = (view.shape.clone(), view.strides.clone());
    let name = view.name.clone().unwrap_or_default();
    (name, view.offset_bytes, view.dtype.torch_name(), shape, strides)
}

fn tuples(regions: Vec<Region>) -> Vec<RegionTuple> {
    let tuple = |r: Region| (r.buffer, r.segment, r.offset_bytes, r.length_bytes);
    regions.into_iter().map(tuple).collect()
}

/// A number of blocks; anything outside 64 bits is more or less than any cache can have.
struct NumBlocksArg(NumBlocks);

impl<'py> FromPyObject<'_, 'py> for NumBlocksArg {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let refused = |error| crate::error::out_of_range(value, error);
        value.extract().map(NumBlocks).map(Self).map_err(refused)
    }
}
