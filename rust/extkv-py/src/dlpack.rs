//! DLPack capsules that own a view, versioned (1.0) and unversioned.
//!
//! The exported struct, its shape and the view live in one box. Whoever holds the capsule or took
//! the tensor out of it calls the deleter once; that may be any thread, with or without the
//! interpreter. Layout: <https://dmlc.github.io/dlpack/latest/c_api.html>.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};

use extkv_core::driver::Device;
use extkv_core::memory::BufferView;
use pyo3::exceptions::PyOverflowError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

const UNVERSIONED: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

const KIND_CPU: i32 = 1;
const KIND_CUDA: i32 = 2;

/// Element type as DLPack counts it: code, bits, lanes.
#[derive(Clone, Copy, FromPyObject)]
pub(crate) struct DataType(u8, u8, u16);

impl DataType {
    pub(crate) fn bits(self) -> u64 {
        u64::from(self.1)
    }
}

/// Kind and index of a device as DLPack counts them.
pub(crate) fn device_of(device: Device) -> (i32, i32) {
    match device {
        Device::Host => (KIND_CPU, 0),
        Device::Cuda { ordinal } => (KIND_CUDA, i32::try_from(ordinal).unwrap_or(i32::MAX)),
    }
}

#[repr(C)]
struct RawDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct RawTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    dtype: RawDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Unversioned {
    tensor: RawTensor,
    manager_ctx: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    manager_ctx: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: RawTensor,
}

/// The struct handed out and all that it points to.
#[repr(C)]
struct Exported<T> {
    managed: T,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _view: BufferView,
}

/// Makes a capsule over a contiguous tensor that fills the view.
pub(crate) fn export<'py>(
    py: Python<'py>,
    view: BufferView,
    shape: &[u64],
    dtype: DataType,
    is_versioned: bool,
) -> PyResult<Bound<'py, PyCapsule>> {
    let mut shape = shape
        .iter()
        .map(|dim| i64::try_from(*dim))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|_| PyOverflowError::new_err("a dimension exceeds 63 bits"))?;
    let mut strides = contiguous_strides(&shape);
    let tensor = raw_tensor(&view, &mut shape, &mut strides, dtype)?;
    let manager_ctx = std::ptr::null_mut();
    if is_versioned {
        let deleter = Some(delete::<Versioned> as unsafe extern "C" fn(*mut Versioned));
        let managed = Versioned { major: 1, minor: 0, manager_ctx, deleter, flags: 0, tensor };
        let exported = Box::new(Exported { managed, shape, strides, _view: view });
        capsule(py, Box::into_raw(exported), VERSIONED, destroy::<Versioned>)
    } else {
        let deleter = Some(delete::<Unversioned> as unsafe extern "C" fn(*mut Unversioned));
        let managed = Unversioned { tensor, manager_ctx, deleter };
        let exported = Box::new(Exported { managed, shape, strides, _view: view });
        capsule(py, Box::into_raw(exported), UNVERSIONED, destroy::<Unversioned>)
    }
}

fn raw_tensor(
    view: &BufferView,
    shape: &mut [i64],
    strides: &mut [i64],
    dtype: DataType,
) -> PyResult<RawTensor> {
    let (device_type, device_id) = device_of(view.device());
    let ndim =
        i32::try_from(shape.len()).map_err(|_| PyOverflowError::new_err("too many dimensions"))?;
    Ok(RawTensor {
        data: view.address() as *mut c_void,
        device_type,
        device_id,
        ndim,
        dtype: RawDataType { code: dtype.0, bits: dtype.1, lanes: dtype.2 },
        shape: shape.as_mut_ptr(),
        strides: strides.as_mut_ptr(),
        byte_offset: 0,
    })
}

fn contiguous_strides(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1i64; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim].saturating_mul(shape[dim].max(1));
    }
    strides
}

/// The name of the capsule while nobody took the tensor out of it.
trait Managed {
    const NAME: &'static CStr;
}

impl Managed for Unversioned {
    const NAME: &'static CStr = UNVERSIONED;
}

impl Managed for Versioned {
    const NAME: &'static CStr = VERSIONED;
}

fn capsule<'py, T>(
    py: Python<'py>,
    exported: *mut Exported<T>,
    name: &'static CStr,
    destructor: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Bound<'py, PyCapsule>> {
    // SAFETY: the interpreter is attached (`py`); the pointer is a live box and the name is static.
    let object = unsafe { ffi::PyCapsule_New(exported.cast(), name.as_ptr(), Some(destructor)) };
    // SAFETY: `object` is what PyCapsule_New returned: a new reference, or null with an error set.
    let object = unsafe { Bound::from_owned_ptr_or_err(py, object) };
    match object {
        Ok(capsule) => Ok(capsule.cast_into::<PyCapsule>()?),
        Err(error) => {
            // SAFETY: no capsule was made, so this is the box's only owner.
            drop(unsafe { Box::from_raw(exported) });
            Err(error)
        }
    }
}

/// Deleter of an exported tensor: drops the box, and with it the view.
unsafe extern "C" fn delete<T>(managed: *mut T) {
    if managed.is_null() {
        return;
    }
    // SAFETY: `managed` is the first field of the `Exported<T>` (repr C) that `export` boxed, so
    // both have one address; DLPack has the deleter called once.
    drop(unsafe { Box::from_raw(managed.cast::<Exported<T>>()) });
}

/// Destructor of a capsule: deletes the tensor unless a consumer took it (and renamed the capsule).
unsafe extern "C" fn destroy<T: Managed>(capsule: *mut ffi::PyObject) {
    // SAFETY: Python passes the capsule it is destroying.
    let is_unused = unsafe { ffi::PyCapsule_IsValid(capsule, T::NAME.as_ptr()) } == 1;
    if !is_unused {
        return;
    }
    // SAFETY: the capsule is valid under that name, so the pointer is the one `capsule` stored.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, T::NAME.as_ptr()) };
    // SAFETY: nobody took the tensor, so its deleter was not called yet.
    unsafe { delete(managed.cast::<T>()) };
}
