//! The functions of `libcuda` that growable memory needs, looked up one by one.
//!
//! Types and constants are those of `cudarc::driver::sys`; the functions are loaded here and not
//! through its function table, because that table panics when the library or one of its several
//! hundred symbols is missing, and prefers a toolkit stub over the driver. See
//! `docs/decisions/2026-11-30-cuda-function-table.md`. Each method is one call that returns the
//! driver's error number; contexts and meaning are the business of `cuda.rs`.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint};

use cudarc::driver::sys;
use libloading::Library;

use crate::error::ProbeError;

/// The driver's error number, 0 for success.
pub(super) type Code = u32;
/// A context or stream as the driver numbers it.
pub(super) type Opaque = u64;

macro_rules! function_table {
    ($($field:ident = $symbol:literal ( $($arg:ty),* );)+) => {
        #[derive(Debug)]
        struct Functions { $($field: unsafe extern "C" fn($($arg),*) -> Code,)+ }

        impl Functions {
            fn look_up(library: &Library, name: &str) -> Result<Self, ProbeError> {
                Ok(Self { $($field: {
                    // SAFETY: the signature is the one `cuda.h` gives for this symbol, and the
                    // pointer is only called while `CudaLibrary` keeps the library loaded.
                    let symbol = unsafe { library.get(concat!($symbol, "\0").as_bytes()) };
                    *symbol.map_err(|_| ProbeError::SymbolMissing {
                        library: name.to_owned(),
                        symbol: $symbol.to_owned(),
                    })?
                },)+ })
            }
        }
    };
}

function_table! {
    init = "cuInit"(c_uint);
    driver_get_version = "cuDriverGetVersion"(*mut c_int);
    get_error_name = "cuGetErrorName"(Code, *mut *const c_char);
    device_get_count = "cuDeviceGetCount"(*mut c_int);
    device_get = "cuDeviceGet"(*mut c_int, c_int);
    device_get_name = "cuDeviceGetName"(*mut c_char, c_int, c_int);
    device_get_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, c_int);
    primary_ctx_retain = "cuDevicePrimaryCtxRetain"(*mut Opaque, c_int);
    primary_ctx_release = "cuDevicePrimaryCtxRelease_v2"(c_int);
    ctx_push_current = "cuCtxPushCurrent_v2"(Opaque);
    ctx_pop_current = "cuCtxPopCurrent_v2"(*mut Opaque);
    ctx_get_current = "cuCtxGetCurrent"(*mut Opaque);
    ctx_get_device = "cuCtxGetDevice"(*mut c_int);
    ctx_synchronize = "cuCtxSynchronize"();
    ctx_get_stream_priority_range = "cuCtxGetStreamPriorityRange"(*mut c_int, *mut c_int);
    stream_create_with_priority = "cuStreamCreateWithPriority"(*mut Opaque, c_uint, c_int);
    stream_destroy = "cuStreamDestroy_v2"(Opaque);
    stream_get_ctx = "cuStreamGetCtx"(Opaque, *mut Opaque);
    stream_synchronize = "cuStreamSynchronize"(Opaque);
    exchange_capture_mode = "cuThreadExchangeStreamCaptureMode"(*mut c_uint);
    mem_address_reserve = "cuMemAddressReserve"(*mut u64, usize, usize, u64, u64);
    mem_address_free = "cuMemAddressFree"(u64, usize);
    mem_create = "cuMemCreate"(*mut u64, usize, *const sys::CUmemAllocationProp, u64);
    mem_release = "cuMemRelease"(u64);
    mem_map = "cuMemMap"(u64, usize, usize, u64, u64);
    mem_unmap = "cuMemUnmap"(u64, usize);
    mem_set_access = "cuMemSetAccess"(u64, usize, *const sys::CUmemAccessDesc, usize);
    mem_get_granularity = "cuMemGetAllocationGranularity"(
        *mut usize, *const sys::CUmemAllocationProp, c_uint
    );
    mem_get_info = "cuMemGetInfo_v2"(*mut usize, *mut usize);
    memset_d8_async = "cuMemsetD8Async"(u64, u8, usize, Opaque);
}

/// One call through the table: `call!(self.field(args))`.
macro_rules! call {
    ($self:ident . $field:ident ( $($arg:expr),* )) => {
        // SAFETY: the pointer was looked up with this signature by `Functions::look_up` and its
        // library is kept loaded by `self.library`; every pointer argument is a live local of the
        // calling method, and handles are only numbers that the driver validates.
        unsafe { ($self.functions.$field)($($arg),*) }
    };
}

/// A loaded CUDA driver library. Stays loaded as long as this value.
#[derive(Debug)]
pub struct CudaLibrary {
    functions: Functions,
    name: String,
    // Dropped last: the functions above point into it.
    #[expect(dead_code, reason = "keeps the functions' code loaded")]
    library: Library,
}

impl CudaLibrary {
    /// Names tried by [`Self::load`], in order. The first is the driver's own; the second can be
    /// a toolkit stub.
    pub const NAMES: [&'static str; 2] = ["libcuda.so.1", "libcuda.so"];

    /// Loads the driver of this machine. Does not start it.
    ///
    /// # Errors
    /// `LibraryMissing` or `SymbolMissing`.
    pub fn load() -> Result<Self, ProbeError> {
        let mut detail = String::new();
        for name in Self::NAMES {
            match Self::open(name) {
                Ok(library) => return Self::look_up(library, name),
                Err(message) => detail = message,
            }
        }
        Err(ProbeError::LibraryMissing { tried: Self::NAMES.join(", "), detail })
    }

    /// Loads the driver library at `path`.
    ///
    /// # Errors
    /// `LibraryMissing` or `SymbolMissing`.
    pub fn load_from(path: &str) -> Result<Self, ProbeError> {
        let library = Self::open(path)
            .map_err(|detail| ProbeError::LibraryMissing { tried: path.to_owned(), detail })?;
        Self::look_up(library, path)
    }

    fn open(name: &str) -> Result<Library, String> {
        // SAFETY: loading runs the library's initialisers; a file of this name is trusted to be a
        // CUDA driver, as torch and every other CUDA program of the process trusts it.
        unsafe { Library::new(name) }.map_err(|error| {
            // The loader's own words stand in the source.
            std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string)
        })
    }

    fn look_up(library: Library, name: &str) -> Result<Self, ProbeError> {
        let functions = Functions::look_up(&library, name)?;
        Ok(Self { functions, name: name.to_owned(), library })
    }

    /// The name or path that the library was loaded by.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The driver's name of an error number.
    pub(super) fn error_name(&self, code: Code) -> String {
        let mut text: *const c_char = std::ptr::null();
        if call!(self.get_error_name(code, &raw mut text)) != 0 || text.is_null() {
            return "unknown error".to_owned();
        }
        // SAFETY: on success the driver sets the pointer to a NUL-terminated constant of its own.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    pub(super) fn init(&self) -> Code {
        call!(self.init(0))
    }

    pub(super) fn driver_version(&self) -> Result<i32, Code> {
        let mut version = 0;
        check(call!(self.driver_get_version(&raw mut version)))?;
        Ok(version)
    }

    pub(super) fn device_count(&self) -> Result<u32, Code> {
        let mut count = 0;
        check(call!(self.device_get_count(&raw mut count)))?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    pub(super) fn device(&self, ordinal: i32) -> Result<i32, Code> {
        let mut device = 0;
        check(call!(self.device_get(&raw mut device, ordinal)))?;
        Ok(device)
    }

    pub(super) fn device_name(&self, device: i32) -> Result<String, Code> {
        let mut buffer = [0u8; 256];
        check(call!(self.device_get_name(buffer.as_mut_ptr().cast(), 256, device)))?;
        let length = buffer.iter().position(|byte| *byte == 0).unwrap_or(buffer.len());
        Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
    }

    pub(super) fn device_attribute(&self, attribute: i32, device: i32) -> Result<i32, Code> {
        let mut value = 0;
        check(call!(self.device_get_attribute(&raw mut value, attribute, device)))?;
        Ok(value)
    }

    pub(super) fn retain_primary_context(&self, device: i32) -> Result<Opaque, Code> {
        let mut context = 0;
        check(call!(self.primary_ctx_retain(&raw mut context, device)))?;
        Ok(context)
    }

    pub(super) fn release_primary_context(&self, device: i32) -> Result<(), Code> {
        check(call!(self.primary_ctx_release(device)))
    }

    pub(super) fn push_context(&self, context: Opaque) -> Result<(), Code> {
        check(call!(self.ctx_push_current(context)))
    }

    pub(super) fn pop_context(&self) -> Result<Opaque, Code> {
        let mut context = 0;
        check(call!(self.ctx_pop_current(&raw mut context)))?;
        Ok(context)
    }

    pub(super) fn current_context(&self) -> Result<Opaque, Code> {
        let mut context = 0;
        check(call!(self.ctx_get_current(&raw mut context)))?;
        Ok(context)
    }

    pub(super) fn current_device(&self) -> Result<i32, Code> {
        let mut device = 0;
        check(call!(self.ctx_get_device(&raw mut device)))?;
        Ok(device)
    }

    pub(super) fn synchronize_context(&self) -> Result<(), Code> {
        check(call!(self.ctx_synchronize()))
    }

    /// The numerically lowest stream priority, which is the most urgent.
    pub(super) fn greatest_priority(&self) -> Result<i32, Code> {
        let (mut least, mut greatest) = (0, 0);
        check(call!(self.ctx_get_stream_priority_range(&raw mut least, &raw mut greatest)))?;
        Ok(greatest)
    }

    pub(super) fn create_stream(&self, flags: u32, priority: i32) -> Result<Opaque, Code> {
        let mut stream = 0;
        check(call!(self.stream_create_with_priority(&raw mut stream, flags, priority)))?;
        Ok(stream)
    }

    pub(super) fn destroy_stream(&self, stream: Opaque) -> Result<(), Code> {
        check(call!(self.stream_destroy(stream)))
    }

    pub(super) fn stream_context(&self, stream: Opaque) -> Result<Opaque, Code> {
        let mut context = 0;
        check(call!(self.stream_get_ctx(stream, &raw mut context)))?;
        Ok(context)
    }

    pub(super) fn synchronize_stream(&self, stream: Opaque) -> Result<(), Code> {
        check(call!(self.stream_synchronize(stream)))
    }

    /// Sets this thread's stream capture mode and returns the previous one.
    pub(super) fn exchange_capture_mode(&self, mode: u32) -> Result<u32, Code> {
        let mut mode = mode;
        check(call!(self.exchange_capture_mode(&raw mut mode)))?;
        Ok(mode)
    }

    pub(super) fn reserve(&self, length: usize) -> Result<u64, Code> {
        let mut address = 0;
        check(call!(self.mem_address_reserve(&raw mut address, length, 0, 0, 0)))?;
        Ok(address)
    }

    pub(super) fn free_address(&self, address: u64, length: usize) -> Result<(), Code> {
        check(call!(self.mem_address_free(address, length)))
    }

    pub(super) fn create(
        &self,
        length: usize,
        properties: &sys::CUmemAllocationProp,
    ) -> Result<u64, Code> {
        let mut handle = 0;
        check(call!(self.mem_create(&raw mut handle, length, properties, 0)))?;
        Ok(handle)
    }

    pub(super) fn release(&self, handle: u64) -> Result<(), Code> {
        check(call!(self.mem_release(handle)))
    }

    pub(super) fn map(&self, address: u64, length: usize, handle: u64) -> Result<(), Code> {
        check(call!(self.mem_map(address, length, 0, handle, 0)))
    }

    pub(super) fn unmap(&self, address: u64, length: usize) -> Result<(), Code> {
        check(call!(self.mem_unmap(address, length)))
    }

    pub(super) fn set_access(
        &self,
        address: u64,
        length: usize,
        access: &sys::CUmemAccessDesc,
    ) -> Result<(), Code> {
        check(call!(self.mem_set_access(address, length, access, 1)))
    }

    pub(super) fn granularity(&self, properties: &sys::CUmemAllocationProp) -> Result<u64, Code> {
        let mut granularity = 0usize;
        // 0: CU_MEM_ALLOC_GRANULARITY_MINIMUM
        check(call!(self.mem_get_granularity(&raw mut granularity, properties, 0)))?;
        Ok(granularity as u64)
    }

    pub(super) fn memory_info(&self) -> Result<(u64, u64), Code> {
        let (mut free, mut total) = (0usize, 0usize);
        check(call!(self.mem_get_info(&raw mut free, &raw mut total)))?;
        Ok((free as u64, total as u64))
    }

    pub(super) fn fill(
        &self,
        address: u64,
        value: u8,
        length: usize,
        stream: Opaque,
    ) -> Result<(), Code> {
        check(call!(self.memset_d8_async(address, value, length, stream)))
    }
}

fn check(code: Code) -> Result<(), Code> {
    if code == 0 { Ok(()) } else { Err(code) }
}
