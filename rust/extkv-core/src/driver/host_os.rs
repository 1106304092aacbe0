//! The system calls of the host driver, each with one `unsafe` block, and their error numbers.

#![allow(unsafe_code)]

use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::LazyLock;

use super::{Device, DriverCall};
use crate::error::DriverError;

const RESERVE_FLAGS: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// Reserves inaccessible address space whose base is a multiple of `alignment`.
pub(super) fn reserve_address(length: u64, alignment: u64) -> Result<u64, i32> {
    let slack = alignment - page_size().min(alignment);
    let padded = length.checked_add(slack).ok_or(libc::ENOMEM)?;
    let size = usize::try_from(padded).map_err(|_| libc::ENOMEM)?;
    // SAFETY: no address is forced, so the kernel picks a range that nothing uses.
    let mapped =
        unsafe { libc::mmap(std::ptr::null_mut(), size, libc::PROT_NONE, RESERVE_FLAGS, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return Err(errno());
    }
    let start = mapped as u64;
    let base = start.next_multiple_of(alignment);
    unreserve_address(start, base - start);
    unreserve_address(base + length, slack - (base - start));
    Ok(base)
}

/// Unmaps an address range that `reserve_address` gave; returns 0 or the error number.
pub(super) fn unreserve_address(base: u64, length: u64) -> i32 {
    let Ok(size) = usize::try_from(length) else {
        return libc::EINVAL;
    };
    if size == 0 {
        return 0;
    }
    // SAFETY: both callers pass ranges that came from `reserve_address` and hold no mapping that
    // the table knows, so nothing can still refer to them.
    let code = unsafe { libc::munmap(base as *mut libc::c_void, size) };
    if code == 0 { 0 } else { errno() }
}

/// Replaces whatever is mapped in a reserved range by inaccessible address space.
pub(super) fn protect_address(address: u64, length: u64) -> Result<(), i32> {
    let size = usize::try_from(length).map_err(|_| libc::EINVAL)?;
    let flags = RESERVE_FLAGS | libc::MAP_FIXED;
    let at = address as *mut libc::c_void;
    // SAFETY: callers checked under the lock that whole mappings of the table cover the range, so
    // MAP_FIXED replaces only address space that this driver owns.
    let mapped = unsafe { libc::mmap(at, size, libc::PROT_NONE, flags, -1, 0) };
    if mapped == libc::MAP_FAILED { Err(errno()) } else { Ok(()) }
}

pub(super) fn page_size() -> u64 {
    // SAFETY: sysconf reads a constant of the system and touches no memory of ours.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}

/// A new sparse file that lives as long as its descriptor and its mappings.
pub(super) fn open_memfd() -> Result<OwnedFd, String> {
    // SAFETY: the name is a NUL-terminated literal; the kernel copies it.
    let fd = unsafe { libc::memfd_create(c"extkv".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(format!("memfd_create: {}", std::io::Error::last_os_error()));
    }
    // SAFETY: `fd` was returned by memfd_create just above and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes the file `end` bytes long. A hole costs nothing.
pub(super) fn extend_file(file: &OwnedFd, end: u64) -> Result<(), i32> {
    let end = libc::off_t::try_from(end).map_err(|_| libc::EFBIG)?;
    // SAFETY: the descriptor is owned by `file`; the call touches no memory of ours.
    let code = unsafe { libc::ftruncate(file.as_raw_fd(), end) };
    if code == 0 { Ok(()) } else { Err(errno()) }
}

/// Maps `length` file bytes from `offset` at `address`, readable and writable.
///
/// The caller holds the driver's lock and has checked that a reservation of its own covers the
/// whole range.
pub(super) fn map_file(file: &OwnedFd, address: u64, length: u64, offset: u64) -> Result<(), i32> {
    let length = usize::try_from(length).map_err(|_| libc::EOVERFLOW)?;
    let offset = libc::off_t::try_from(offset).map_err(|_| libc::EOVERFLOW)?;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    let at = address as *mut libc::c_void;
    // SAFETY: `HostDriver::set_access` checked under its lock that mappings of its table cover the
    // range, so MAP_FIXED replaces only address space that the driver owns.
    let mapped = unsafe { libc::mmap(at, length, prot, flags, file.as_raw_fd(), offset) };
    if mapped == libc::MAP_FAILED { Err(errno()) } else { Ok(()) }
}

/// Drops the file's pages in a range. On a memfd this fails only for bad arguments.
pub(super) fn punch_hole(file: &OwnedFd, start: u64, length: u64) {
    let (Ok(start), Ok(length)) = (libc::off_t::try_from(start), libc::off_t::try_from(length))
    else {
        return;
    };
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    loop {
        // SAFETY: the descriptor is owned by `file`; `HostDriver::bury` passes ranges of handles
        // that are mapped nowhere, so no live reference sees the pages go.
        let code = unsafe { libc::fallocate(file.as_raw_fd(), mode, start, length) };
        if code == 0 || errno() != libc::EINTR {
            return;
        }
    }
}

/// Sets `length` bytes at `address`.
///
/// The caller holds the driver's lock and has checked that the range is mapped and accessible.
pub(super) fn fill(address: u64, length: u64, value: u8) -> Result<(), i32> {
    let count = usize::try_from(length).map_err(|_| libc::EOVERFLOW)?;
    // SAFETY: `HostDriver::fill` checked under its lock that every byte is mapped readable and
    // writable, and no unmap can come between; plain bytes have no invalid values.
    unsafe { std::ptr::write_bytes(address as *mut u8, value, count) };
    Ok(())
}

/// Copies bytes out of a range that the caller checked under the driver's lock.
#[cfg(any(test, feature = "test-util"))]
pub(super) fn copy_out(address: u64, bytes: &mut [u8]) {
    // SAFETY: `HostDriver::read` checked under its lock that the whole range is mapped readable;
    // the destination is a slice of ours.
    unsafe {
        std::ptr::copy_nonoverlapping(address as *const u8, bytes.as_mut_ptr(), bytes.len());
    }
}

/// Copies bytes into a range that the caller checked under the driver's lock.
#[cfg(any(test, feature = "test-util"))]
pub(super) fn copy_in(address: u64, bytes: &[u8]) {
    // SAFETY: `HostDriver::write` checked under its lock that the whole range is mapped writable;
    // the source is a slice of ours.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

pub(super) fn call_error(call: DriverCall, code: i32) -> DriverError {
    DriverError::Call {
        call,
        device: Device::Host,
        code: code.into(),
        name: std::io::Error::from_raw_os_error(code).to_string(),
    }
}

/// Separate mappings that host memory of the process may have: three quarters of the kernel's
/// limit. The rest is for everybody else: when the process has none left, allocators abort it.
pub(super) fn allowed_mappings() -> (u64, u64) {
    static LIMIT: LazyLock<u64> = LazyLock::new(|| {
        let text = fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
        text.trim().parse().unwrap_or(65_530)
    });
    (*LIMIT / 4 * 3, *LIMIT)
}
