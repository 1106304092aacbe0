//! Growable memory on a CUDA device.
//!
//! Opening a driver probes everything the later calls rely on: library, symbols, version, device,
//! attribute, allocation properties, and a two-granule trial growth. Calls run in the device's
//! primary context (the one torch uses), pushed for the call and popped after it, so that the
//! caller's current context is as before; and in relaxed capture mode, so that a growth does not
//! break a graph capture of another stream.

use std::sync::Arc;

use cudarc::driver::sys;

use super::cuda_library::{Code, CudaLibrary, Opaque};
use super::cuda_probe::{
    CudaOptions, DeviceFacts, init_failed, is_started_here, property_candidates, start,
    version_text,
};
use super::{AllocationProperties, Device, DriverCall, Fence, HandleId, MemoryInfo, VmmDriver};
use crate::error::{DriverError, DriverResult, ProbeError};
use crate::units::Bytes;

const OUT_OF_MEMORY: Code = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as Code;
const INVALID_VALUE: Code = sys::CUresult::CUDA_ERROR_INVALID_VALUE as Code;
const DEINITIALIZED: Code = sys::CUresult::CUDA_ERROR_DEINITIALIZED as Code;

const CAPTURE_MODE_RELAXED: u32 = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32;
const STREAM_NON_BLOCKING: u32 = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
/// Streams 0, 1 and 2 are names (null, legacy, per-thread), valid in any context.
const LAST_NAMED_STREAM: Opaque = 2;

/// Driver of one CUDA device.
#[derive(Debug)]
pub struct CudaDriver {
    library: Arc<CudaLibrary>,
    ordinal: u32,
    device: i32,
    context: Opaque,
    fill_stream: Opaque,
    granularity: u64,
    properties: AllocationProperties,
    facts: DeviceFacts,
}

impl CudaDriver {
    /// Number of devices that this process sees. Starts the driver.
    ///
    /// # Errors
    /// Why CUDA cannot be used at all.
    pub fn device_count(library: &CudaLibrary) -> Result<u32, ProbeError> {
        start(library)?;
        library.device_count().map_err(|code| init_failed(library, code))
    }

    /// Probes device `ordinal` and opens a driver on it. Retains its primary context.
    ///
    /// # Errors
    /// The first thing found wrong, in the order of the variants of [`ProbeError`].
    pub fn open(
        library: Arc<CudaLibrary>,
        ordinal: u32,
        options: CudaOptions,
    ) -> Result<Self, ProbeError> {
        let version = start(&library)?;
        let count = Self::device_count(&library)?;
        let no_such_device = ProbeError::NoSuchDevice { ordinal, count };
        let index = i32::try_from(ordinal).map_err(|_| no_such_device.clone())?;
        if ordinal >= count {
            return Err(no_such_device);
        }
        let fail = |code| init_failed(&library, code);
        let device = library.device(index).map_err(fail)?;
        let name = library.device_name(device).map_err(fail)?;
        let has = |attribute: sys::CUdevice_attribute| {
            library.device_attribute(attribute as i32, device).is_ok_and(|value| value != 0)
        };
        if !has(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
            return Err(ProbeError::VmmUnsupported { ordinal, name });
        }
        let can_export = has(
            sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        );
        let can_rdma = has(
            sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
        );
        let candidates = property_candidates(options, can_export, can_rdma, ordinal)?;
        let facts = DeviceFacts {
            name,
            driver_version: version_text(version),
            library: library.name().to_owned(),
        };
        let context = library.retain_primary_context(device).map_err(fail)?;
        let mut driver = Self {
            library,
            ordinal,
            device,
            context,
            fill_stream: 0,
            granularity: 0,
            properties: AllocationProperties { posix_fd: false, gpu_direct_rdma: false },
            facts,
        };
        driver.refuse_foreign_context()?;
        driver.open_fill_stream()?;
        driver.choose_properties(&candidates)?;
        Ok(driver)
    }

    /// What the probe found out.
    #[must_use]
    pub fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// Memory in a context that is not primary could not be used by torch's kernels.
    fn refuse_foreign_context(&self) -> Result<(), ProbeError> {
        let fail = |code| init_failed(&self.library, code);
        let current = self.library.current_context().map_err(fail)?;
        if current == 0 || current == self.context {
            return Ok(());
        }
        let device = self.library.current_device().map_err(fail)?;
        if device == self.device {
            let (ordinal, context) = (self.ordinal, current);
            return Err(ProbeError::ForeignContext { ordinal, context });
        }
        Ok(())
    }

    fn open_fill_stream(&mut self) -> Result<(), ProbeError> {
        let stream = {
            let _context = self.enter(DriverCall::Fill).map_err(|source| self.trial(source))?;
            self.library
                .greatest_priority()
                .and_then(|priority| self.library.create_stream(STREAM_NON_BLOCKING, priority))
        };
        self.fill_stream = stream.map_err(|code| init_failed(&self.library, code))?;
        Ok(())
    }

    /// Takes the first candidate with which a trial growth works.
    fn choose_properties(&mut self, candidates: &[AllocationProperties]) -> Result<(), ProbeError> {
        let mut last = None;
        for candidate in candidates {
            self.properties = *candidate;
            match self.try_growth() {
                Ok(()) => return Ok(()),
                Err(error) => last = Some(self.trial(error)),
            }
        }
        Err(last.unwrap_or(ProbeError::PropertyUnsupported {
            device: VmmDriver::device(self),
            property: "the allocation properties asked for",
        }))
    }

    /// Grows a two-granule range granule by granule and takes it down again.
    fn try_growth(&mut self) -> DriverResult<()> {
        self.granularity = {
            let _context = self.enter(DriverCall::Create)?;
            let properties = self.raw_properties();
            self.library
                .granularity(&properties)
                .map_err(|code| self.error(DriverCall::Create, code))?
        };
        let granule = self.granularity;
        let base = self.reserve(2 * granule)?;
        let mut result = Ok(());
        for address in [base, base + granule] {
            result = result.and_then(|()| self.try_granule(address));
        }
        for address in [base + granule, base] {
            // A granule that was never mapped refuses; the trial's own error is the one to report.
            let _ = self.unmap(address, granule);
        }
        let freed = self.free_address(base, 2 * granule);
        result.and(freed)
    }

    fn try_granule(&self, address: u64) -> DriverResult<()> {
        let handle = self.create(self.granularity)?;
        let mapped = self
            .map(address, self.granularity, handle)
            .and_then(|()| self.set_access(address, self.granularity));
        mapped.and(self.release(handle))
    }

    fn trial(&self, source: DriverError) -> ProbeError {
        ProbeError::TrialFailed { device: VmmDriver::device(self), source }
    }

    fn location(&self) -> sys::CUmemLocation {
        sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: self.device,
        }
    }

    fn raw_properties(&self) -> sys::CUmemAllocationProp {
        let handle_type = if self.properties.posix_fd {
            sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        } else {
            sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE
        };
        sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: handle_type,
            location: self.location(),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: u8::from(self.properties.gpu_direct_rdma),
                usage: 0,
                reserved: [0; 4],
            },
        }
    }

    /// Makes the primary context current until the guard drops.
    fn enter(&self, call: DriverCall) -> DriverResult<ContextGuard<'_>> {
        let is_current = self.library.current_context() == Ok(self.context);
        if !is_current {
            self.library.push_context(self.context).map_err(|code| self.error(call, code))?;
        }
        let previous_mode = self.library.exchange_capture_mode(CAPTURE_MODE_RELAXED).ok();
        Ok(ContextGuard { library: &self.library, previous_mode, is_pushed: !is_current })
    }

    /// Runs one driver call in the primary context.
    fn run<T>(
        &self,
        call: DriverCall,
        work: impl FnOnce(&CudaLibrary) -> Result<T, Code>,
    ) -> DriverResult<T> {
        let _context = self.enter(call)?;
        work(&self.library).map_err(|code| self.error(call, code))
    }

    /// Like [`Self::run`] for calls that can find the device full.
    fn run_sized<T>(
        &self,
        call: DriverCall,
        length: u64,
        work: impl FnOnce(&CudaLibrary, usize) -> Result<T, Code>,
    ) -> DriverResult<T> {
        let size = self.size(call, length)?;
        self.run(call, |library| work(library, size)).map_err(|error| match error.code() {
            Some(code) if code == i64::from(OUT_OF_MEMORY) => {
                let (device, requested) = (VmmDriver::device(self), Bytes(length));
                DriverError::OutOfMemory { call, device, requested, code }
            }
            _ => error,
        })
    }

    /// Like [`Self::run`] for calls that take memory away. When the process is ending and the
    /// driver has shut down, the memory is gone already.
    fn run_teardown(
        &self,
        call: DriverCall,
        work: impl FnOnce(&CudaLibrary) -> Result<(), Code>,
    ) -> DriverResult<()> {
        match self.run(call, work) {
            Err(error) if error.code() == Some(DEINITIALIZED.into()) => Ok(()),
            result => result,
        }
    }

    fn error(&self, call: DriverCall, code: Code) -> DriverError {
        DriverError::Call {
            call,
            device: VmmDriver::device(self),
            code: code.into(),
            name: self.library.error_name(code),
        }
    }

    fn size(&self, call: DriverCall, length: u64) -> DriverResult<usize> {
        usize::try_from(length).map_err(|_| self.error(call, INVALID_VALUE))
    }

    fn synchronize_stream(&self, stream: Opaque) -> DriverResult<()> {
        let call = DriverCall::Synchronize;
        if stream > LAST_NAMED_STREAM {
            let context = self.run(call, |library| library.stream_context(stream))?;
            if context != self.context {
                return Err(DriverError::Illegal {
                    call,
                    device: VmmDriver::device(self),
                    rule: "the stream belongs to another context than the device's primary one",
                    address: stream,
                    length: Bytes(0),
                });
            }
        }
        self.run(call, |library| library.synchronize_stream(stream))
    }
}

impl Drop for CudaDriver {
    fn drop(&mut self) {
        if !is_started_here() {
            return;
        }
        if self.fill_stream != 0 {
            // Failing to end a stream leaves nothing that a caller could act on.
            let _ = self.run(DriverCall::Fill, |library| library.destroy_stream(self.fill_stream));
        }
        let _ = self.library.release_primary_context(self.device);
    }
}

impl VmmDriver for CudaDriver {
    fn device(&self) -> Device {
        Device::Cuda { ordinal: self.ordinal }
    }

    fn granularity(&self) -> u64 {
        self.granularity
    }

    fn fresh_memory_is_zero(&self) -> bool {
        false
    }

    fn properties(&self) -> AllocationProperties {
        self.properties
    }

    fn reserve(&self, length: u64) -> DriverResult<u64> {
        let call = DriverCall::Reserve;
        let size = self.size(call, length)?;
        self.run(call, |library| library.reserve(size)).map_err(|error| match error.code() {
            Some(code) if code == i64::from(OUT_OF_MEMORY) || code == i64::from(INVALID_VALUE) => {
                let (device, requested) = (VmmDriver::device(self), Bytes(length));
                DriverError::AddressSpaceExhausted { device, requested, code }
            }
            _ => error,
        })
    }

    fn free_address(&self, base: u64, length: u64) -> DriverResult<()> {
        let call = DriverCall::FreeAddress;
        let size = self.size(call, length)?;
        self.run_teardown(call, |library| library.free_address(base, size))
    }

    fn create(&self, length: u64) -> DriverResult<HandleId> {
        let properties = self.raw_properties();
        self.run_sized(DriverCall::Create, length, |library, size| {
            library.create(size, &properties)
        })
        .map(HandleId)
    }

    fn release(&self, handle: HandleId) -> DriverResult<()> {
        self.run_teardown(DriverCall::Release, |library| library.release(handle.0))
    }

    fn map(&self, address: u64, length: u64, handle: HandleId) -> DriverResult<()> {
        self.run_sized(DriverCall::Map, length, |library, size| {
            library.map(address, size, handle.0)
        })
    }

    fn set_access(&self, address: u64, length: u64) -> DriverResult<()> {
        let access = sys::CUmemAccessDesc {
            location: self.location(),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        self.run_sized(DriverCall::SetAccess, length, |library, size| {
            library.set_access(address, size, &access)
        })
    }

    fn unmap(&self, address: u64, length: u64) -> DriverResult<()> {
        let call = DriverCall::Unmap;
        let size = self.size(call, length)?;
        self.run_teardown(call, |library| library.unmap(address, size))
    }

    fn fill(&self, address: u64, length: u64, value: u8) -> DriverResult<()> {
        let call = DriverCall::Fill;
        let size = self.size(call, length)?;
        self.run(call, |library| library.fill(address, value, size, self.fill_stream))
    }

    fn synchronize(&self, fence: Fence<'_>) -> DriverResult<()> {
        let call = DriverCall::Synchronize;
        match fence {
            Fence::Fills => {
                self.run_teardown(call, |library| library.synchronize_stream(self.fill_stream))
            }
            Fence::Device => self.run_teardown(call, CudaLibrary::synchronize_context),
            Fence::Streams(streams) => {
                streams.iter().try_for_each(|stream| self.synchronize_stream(*stream))
            }
        }
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        let (free, total) = self.run(DriverCall::MemoryInfo, CudaLibrary::memory_info)?;
        Ok(MemoryInfo { free, total })
    }
}

/// Restores the thread's context and capture mode.
struct ContextGuard<'a> {
    library: &'a CudaLibrary,
    previous_mode: Option<u32>,
    is_pushed: bool,
}

impl Drop for ContextGuard<'_> {
    fn drop(&mut self) {
        if let Some(mode) = self.previous_mode {
            let _ = self.library.exchange_capture_mode(mode);
        }
        if self.is_pushed {
            // Pops the context that `enter` pushed; the stack below it was never touched.
            let _ = self.library.pop_context();
        }
    }
}
