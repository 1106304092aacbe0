//! The CUDA driver against a made-up `libcuda`: everything that can be wrong with a machine, and
//! the whole life of a buffer, with no GPU.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use super::{
    CheckedDriver, CudaDriver, CudaLibrary, CudaOptions, Device, DriverCall, Fence, Leftovers,
    Rdma, Shareable, VmmDriver,
};
use crate::error::{DriverError, Error, ProbeError};
use crate::memory::{BufferOptions, ChunkPolicy, ChunkSize, GrowableBuffer, Growth, SegmentLayout};

const GRANULE: u64 = 2 << 20;

/// Compiles the made-up driver with flags; each test has its own.
fn fake(name: &str, flags: &[&str]) -> Arc<CudaLibrary> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_libcuda.c");
    let path = fake_path(name);
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
        .arg(&path)
        .args(flags)
        .arg(source)
        .status()
        .expect("the C compiler that links Rust programs");
    assert!(status.success(), "cannot compile {source}");
    load(name).expect("a complete library")
}

fn fake_path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("extkv-fake-libcuda-{}-{name}.so", std::process::id()))
}

fn load(name: &str) -> Result<Arc<CudaLibrary>, ProbeError> {
    let path = fake_path(name);
    let library = CudaLibrary::load_from(path.to_str().expect("utf-8")).map(Arc::new);
    // The mapping outlives the name.
    std::fs::remove_file(path).expect("compiled");
    library
}

fn open(name: &str, flags: &[&str]) -> Result<CudaDriver, ProbeError> {
    CudaDriver::open(fake(name, flags), 0, CudaOptions::default())
}

fn reason(name: &str, flags: &[&str]) -> ProbeError {
    open(name, flags).map(|driver| panic!("{driver:?} opened")).unwrap_err()
}

#[test]
fn a_good_device_opens_and_reports_its_choices() {
    let driver = open("good", &[]).unwrap();
    assert_eq!(driver.granularity(), GRANULE);
    assert_eq!(driver.device(), Device::Cuda { ordinal: 0 });
    assert_eq!(driver.facts().name, "Fake H200");
    assert_eq!(driver.facts().driver_version, "13.0");
    assert!(driver.properties().posix_fd && driver.properties().gpu_direct_rdma);
    let info = driver.memory_info().unwrap();
    assert_eq!(info.free, info.total, "the trial growth gave everything back");
}

#[test]
fn a_missing_library_names_what_was_tried() {
    let error = CudaLibrary::load_from("/nonexistent/libcuda.so.1").unwrap_err();
    let ProbeError::LibraryMissing { tried, detail } = error else { panic!("{error}") };
    assert_eq!(tried, "/nonexistent/libcuda.so.1");
    assert!(detail.contains("cannot open shared object file"), "{detail}");
}

#[test]
fn a_stub_library_is_called_a_stub() {
    let error = reason("stub", &["-DINIT_CODE=34"]);
    assert!(matches!(error, ProbeError::StubLibrary { .. }), "{error}");
    assert!(error.to_string().contains("stubs folder"));
}

#[test]
fn a_driver_without_a_function_names_it() {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_libcuda.c");
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-DWITHOUT_MEMSET", source, "-o"])
        .arg(fake_path("symbol"))
        .status()
        .unwrap();
    assert!(status.success());
    let error = load("symbol").unwrap_err();
    let ProbeError::SymbolMissing { symbol, .. } = &error else { panic!("{error}") };
    assert_eq!(symbol, "cuMemsetD8Async");
}

#[test]
fn an_old_driver_tells_both_versions() {
    let error = reason("old", &["-DVERSION=11080"]);
    assert_eq!(error.to_string(), "CUDA driver version 11.8 is too old: at least 12.0 is needed");
}

#[test]
fn a_device_without_virtual_memory_management_is_refused() {
    let error = reason("novmm", &["-DHAS_VMM=0"]);
    assert_eq!(error.to_string(), "device cuda:0 (Fake H200) has no virtual memory management");
}

#[test]
fn no_device_and_a_wrong_index_tell_the_count() {
    let error = reason("nodevice", &["-DINIT_CODE=100"]);
    assert_eq!(error, ProbeError::NoSuchDevice { ordinal: 0, count: 0 });
    let library = fake("index", &[]);
    let error = CudaDriver::open(library, 7, CudaOptions::default()).unwrap_err();
    assert_eq!(error, ProbeError::NoSuchDevice { ordinal: 7, count: 2 });
    assert_eq!(error.to_string(), "device index 7 does not exist: 2 CUDA device(s) found");
}

#[test]
fn a_driver_that_does_not_start_gives_its_code() {
    let error = reason("init", &["-DINIT_CODE=999"]);
    assert!(matches!(error, ProbeError::InitFailed { code: 999, .. }), "{error}");
    // CUDA answers 3 in the fork of a process that started it.
    let error = reason("forked", &["-DINIT_CODE=3"]);
    assert!(error.to_string().contains("spawn"), "{error}");
}

#[test]
fn a_foreign_current_context_is_refused_on_its_own_device_only() {
    let library = fake("foreign", &["-DFOREIGN_CONTEXT"]);
    let error = CudaDriver::open(Arc::clone(&library), 0, CudaOptions::default()).unwrap_err();
    assert_eq!(error, ProbeError::ForeignContext { ordinal: 0, context: 0x9999 });
    let other = CudaDriver::open(Arc::clone(&library), 1, CudaOptions::default()).unwrap();
    other.memory_info().unwrap();
    assert_eq!(library.current_context(), Ok(0x9999), "restored after the calls");
}

#[test]
fn a_trial_growth_that_fails_is_reported_with_its_call() {
    let error = reason("trial", &["-DACCESS_FAILS"]);
    let ProbeError::TrialFailed { source, .. } = &error else { panic!("{error}") };
    assert_eq!(source.call(), DriverCall::SetAccess);
}

#[test]
fn properties_fall_back_unless_they_are_asked_for() {
    let cases = [
        ("fd", "-DPOSIX_FD_FAILS", (false, true)),
        ("rdma", "-DRDMA_FAILS", (true, false)),
        ("nofd", "-DHAS_POSIX_FD=0", (false, true)),
        ("nordma", "-DHAS_RDMA=0", (true, false)),
    ];
    for (name, flag, (posix_fd, gpu_direct_rdma)) in cases {
        let driver = open(name, &[flag]).unwrap();
        let chosen = driver.properties();
        assert_eq!(
            (chosen.posix_fd, chosen.gpu_direct_rdma),
            (posix_fd, gpu_direct_rdma),
            "{flag}"
        );
    }
    let wants_fd = CudaOptions { shareable: Shareable::PosixFd, rdma: Rdma::Auto };
    let wants_rdma = CudaOptions { shareable: Shareable::Auto, rdma: Rdma::On };
    let wants_none = CudaOptions { shareable: Shareable::None, rdma: Rdma::Off };
    let error = CudaDriver::open(fake("want1", &["-DHAS_POSIX_FD=0"]), 0, wants_fd).unwrap_err();
    assert!(error.to_string().contains("POSIX file descriptor"), "{error}");
    let error = CudaDriver::open(fake("want2", &["-DHAS_RDMA=0"]), 0, wants_rdma).unwrap_err();
    assert!(error.to_string().contains("GPUDirect RDMA"), "{error}");
    let error = CudaDriver::open(fake("want3", &["-DPOSIX_FD_FAILS"]), 0, wants_fd).unwrap_err();
    assert!(matches!(error, ProbeError::TrialFailed { .. }), "{error}");
    let plain = CudaDriver::open(fake("want4", &[]), 0, wants_none).unwrap().properties();
    assert!(!plain.posix_fd && !plain.gpu_direct_rdma);
}

#[test]
fn a_buffer_lives_on_the_second_device_from_a_thread_without_context() {
    let library = fake("second", &[]);
    let driver = CudaDriver::open(Arc::clone(&library), 1, CudaOptions::default()).unwrap();
    let driver: Arc<dyn VmmDriver> = Arc::new(driver);
    let layout = SegmentLayout::equal(6 << 20, 2).unwrap();
    let buffer =
        GrowableBuffer::new(Arc::clone(&driver), layout, BufferOptions::default()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(library.current_context(), Ok(0));
            for (size, physical) in [(1 << 20, 4 << 20), (2 << 20, 6 << 20), (3 << 20, 6 << 20)] {
                buffer.grow_to(size, true).unwrap();
                assert_eq!(buffer.stats().unwrap().committed_bytes, physical);
                assert_eq!(library.current_context(), Ok(0), "a context stayed current");
            }
        });
    });
    let info = driver.memory_info().unwrap();
    assert_eq!(info.total - info.free, 6 << 20);
    buffer.free().unwrap();
    let info = driver.memory_info().unwrap();
    assert_eq!(info.total, info.free);
}

#[test]
fn every_failing_call_leaves_the_device_as_it_was() {
    let driver = Arc::new(open("inject", &[]).unwrap());
    let checked = Arc::new(CheckedDriver::new(driver.clone() as Arc<dyn VmmDriver>));
    let layout = SegmentLayout::equal(24 << 20, 4).unwrap();
    let policy = ChunkPolicy { size: ChunkSize::AtMost(GRANULE), growth: Growth::Exact };
    let dyn_driver = Arc::clone(&checked) as Arc<dyn VmmDriver>;
    let buffer = GrowableBuffer::new(dyn_driver, layout, BufferOptions { policy }).unwrap();
    let mut num_failures = 0;
    for index in 0.. {
        checked.fail_nth(index);
        let result = buffer.grow_to(5 << 20, true);
        checked.clear_faults();
        if result.is_ok() {
            break;
        }
        num_failures += 1;
        let info = driver.memory_info().unwrap();
        assert_eq!(info.free, info.total, "call {index} left memory behind");
    }
    // 12 creates, 12 maps, 1 set-access, 4 fills and 1 wait for them.
    assert_eq!(num_failures, 30);
    buffer.shrink_to(0, Fence::Streams(&[0, 2])).unwrap();
    drop(buffer);
    assert_eq!(checked.leftovers(), Leftovers::default());
}

#[test]
fn a_full_device_tells_what_was_asked_and_what_is_free() {
    let driver: Arc<dyn VmmDriver> = Arc::new(open("full", &[]).unwrap());
    let layout = SegmentLayout::equal(1 << 30, 1).unwrap();
    let buffer = GrowableBuffer::new(driver, layout, BufferOptions::default()).unwrap();
    buffer.grow_to(60 << 20, false).unwrap();
    let error = buffer.grow_to(100 << 20, false).unwrap_err();
    assert_eq!(error.to_string(), "cannot commit 40 MiB on cuda:0: 4 MiB free");
    assert!(matches!(
        error,
        Error::OutOfMemory { source: DriverError::OutOfMemory { code: 2, .. }, .. }
    ));
    let layout = SegmentLayout::equal(1 << 50, 1).unwrap();
    let driver: Arc<dyn VmmDriver> = Arc::new(open("space", &[]).unwrap());
    let error = GrowableBuffer::new(driver, layout, BufferOptions::default()).unwrap_err();
    assert!(matches!(error, Error::AddressSpaceExhausted { .. }), "{error}");
}

#[test]
fn streams_of_another_context_are_no_fence() {
    let driver = open("streams", &[]).unwrap();
    driver.synchronize(Fence::Device).unwrap();
    driver.synchronize(Fence::Streams(&[0, 1, 2])).unwrap();
    let error = driver.synchronize(Fence::Streams(&[4095])).unwrap_err();
    assert!(matches!(error, DriverError::Illegal { address: 4095, .. }), "{error}");
}
