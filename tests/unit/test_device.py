"""Devices without a GPU: what is reported, and that nothing panics."""

from __future__ import annotations

import extkv
import pytest


def test_b116_import_and_queries_work_without_libcuda(run_python):
    result = run_python(
        """
        import sys
        import extkv
        assert "torch" not in sys.modules, "importing extkv imported torch"
        assert extkv.cuda_is_available() in (True, False)
        report = extkv.probe("cuda")
        assert report.is_available or report.reason
        assert extkv.probe("cpu").is_available
        assert extkv.memory_info("cpu").total > 0
        """
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.skipif(extkv.cuda_is_available(), reason="this machine has a CUDA device")
def test_b116_a_gpu_tensor_without_a_driver_names_the_library():
    with pytest.raises(extkv.DriverUnavailableError, match=r"libcuda\.so\.1"):
        extkv.ExtensibleTensor(1 << 20, "cuda")
    with pytest.raises(extkv.DriverUnavailableError, match=r"libcuda\.so\.1"):
        extkv.memory_info("cuda:0")


@pytest.mark.skipif(extkv.cuda_is_available(), reason="this machine has a CUDA device")
def test_no_device_means_the_host_where_there_is_no_gpu():
    assert extkv.ExtensibleTensor(1 << 20).device.type == "cpu"
    assert extkv.probe().device == "cpu"


def test_probe_answers_for_nonsense_too():
    assert not extkv.probe("tpu:0").is_available
    assert "tpu" in (extkv.probe("tpu:0").reason or "")
    assert not extkv.probe("cuda:99").is_available


def test_a_library_that_is_no_driver_is_an_error(run_python):
    result = run_python(
        """
        import os
        os.environ["EXTKV_LIBCUDA"] = "libc.so.6"
        import extkv
        report = extkv.probe("cuda")
        assert not report.is_available
        assert "libc.so.6 has no function cuInit" in report.reason, report.reason
        """
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_all_errors_share_one_base():
    classes = [value for value in vars(extkv).values() if isinstance(value, type)]
    errors = [c for c in classes if issubclass(c, Exception)]
    assert len(errors) >= 14
    assert all(issubclass(error, extkv.ExtkvError) for error in errors)
