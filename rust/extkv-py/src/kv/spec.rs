//! What one layer caches.

use extkv_core::dtype::Dtype;
use extkv_core::kv::{
    AttentionSpec, KvSpec, LayoutError, MambaSpec, MlaFormat, MlaSpec, RequestShape, StateSpec,
};
use pyo3::prelude::*;

use crate::error::{BindingError, BindingResult};

/// What one layer caches.
#[pyclass(frozen, eq, hash, name = "KvSpec", module = "extkv._extkv")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PyKvSpec {
    pub(super) inner: KvSpec,
}

#[pymethods]
impl PyKvSpec {
    /// Keys and values of every token.
    #[staticmethod]
    fn full_attention(
        block_size: u64,
        num_kv_heads: u64,
        head_dim: u64,
        head_dim_v: u64,
        dtype: DtypeArg,
    ) -> BindingResult<Self> {
        let attention = AttentionSpec::new(block_size, num_kv_heads, head_dim, dtype.0)?;
        let inner = KvSpec::FullAttention(attention.with_head_dim_v(head_dim_v)?);
        Ok(Self { inner })
    }

    /// Keys and values of the last tokens.
    #[staticmethod]
    fn sliding_window(
        block_size: u64,
        num_kv_heads: u64,
        head_dim: u64,
        head_dim_v: u64,
        dtype: DtypeArg,
        window: u64,
    ) -> BindingResult<Self> {
        let attention = AttentionSpec::new(block_size, num_kv_heads, head_dim, dtype.0)?;
        let inner = KvSpec::sliding_window(attention.with_head_dim_v(head_dim_v)?, window)?;
        Ok(Self { inner })
    }

    /// Plain latents.
    #[staticmethod]
    fn mla(block_size: u64, latent_dim: u64, dtype: DtypeArg) -> BindingResult<Self> {
        let dtype = dtype.0;
        let spec = MlaSpec::new(block_size, MlaFormat::Latent { latent_dim, dtype })?;
        Ok(Self { inner: KvSpec::Mla(spec) })
    }

    /// Packed FP8 latents.
    #[staticmethod]
    fn fp8_ds_mla(block_size: u64) -> BindingResult<Self> {
        let inner = KvSpec::Mla(MlaSpec::new(block_size, MlaFormat::Fp8DsMla)?);
        Ok(Self { inner })
    }

    /// Recurrent states of (name, shape, dtype, dim that speculation widens).
    #[staticmethod]
    fn mamba(
        block_size: u64,
        states: Vec<StateArg>,
        num_speculative_tokens: u64,
        padded_bytes: Option<u64>,
    ) -> BindingResult<Self> {
        let states: Result<Vec<_>, _> = states.into_iter().map(StateArg::spec).collect();
        let mut spec = MambaSpec::new(block_size, &states?, num_speculative_tokens)?;
        if let Some(bytes) = padded_bytes {
            spec = spec.padded_to(bytes)?;
        }
        Ok(Self { inner: KvSpec::Mamba(spec) })
    }

    /// Tokens per block.
    #[getter]
    fn block_size(&self) -> u64 {
        self.inner.block_size()
    }

    /// Bytes of one block.
    #[getter]
    fn bytes_per_block(&self) -> u64 {
        self.inner.bytes_per_block()
    }

    /// What every block start is a multiple of.
    #[getter]
    fn alignment_bytes(&self) -> u64 {
        self.inner.alignment_bytes()
    }

    /// Blocks that one request holds at most.
    fn blocks_per_request(&self, max_model_len: u64, max_num_batched_tokens: u64) -> u64 {
        self.inner.blocks_per_request(&RequestShape { max_model_len, max_num_batched_tokens })
    }
}

/// The smallest block that each of the layers can be padded to.
#[pyfunction]
pub(crate) fn common_block_bytes(specs: Vec<Py<PyKvSpec>>) -> BindingResult<u64> {
    let specs: Vec<KvSpec> = specs.iter().map(|spec| spec.get().inner.clone()).collect();
    Ok(extkv_core::kv::common_block_bytes(&specs)?)
}

/// Torch's name of an element type, and its bytes.
#[pyfunction]
pub(crate) fn dtype_of(dtype: DtypeArg) -> (&'static str, u64) {
    (dtype.0.torch_name(), dtype.0.size_bytes())
}

/// An element type, as a `torch.dtype` or a name of one.
pub(crate) struct DtypeArg(pub(crate) Dtype);

impl<'py> FromPyObject<'_, 'py> for DtypeArg {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let name = value.str()?;
        let dtype: Result<Dtype, _> = name.to_cow()?.parse();
        Ok(Self(dtype.map_err(BindingError::from)?))
    }
}

#[derive(FromPyObject)]
struct StateArg(String, Vec<u64>, DtypeArg, Option<usize>);

impl StateArg {
    fn spec(self) -> Result<StateSpec, LayoutError> {
        let Self(name, shape, dtype, widened_dim) = self;
        let state = StateSpec::new(name, shape, dtype.0)?;
        match widened_dim {
            Some(dim) => state.widened_along(dim),
            None => Ok(state),
        }
    }
}
