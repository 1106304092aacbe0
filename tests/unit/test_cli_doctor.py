"""`extkv doctor`: one report for each device, as a table or as JSON."""

import json

import extkv
import pytest
from extkv.cli import app
from extkv.cli.doctor import probe_devices
from typer.testing import CliRunner

RUNNER = CliRunner()


def test_json_holds_the_report_of_each_device():
    result = RUNNER.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    reports = json.loads(result.stdout)
    assert [report["device"] for report in reports[:2]] == ["cpu", "cuda:0"]
    assert reports[0]["is_available"] is True
    assert reports[0]["granularity"] > 0


def test_table_has_a_column_for_each_device():
    result = RUNNER.invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for text in ("cpu", "cuda:0", "is available", "granularity", "gpu direct rdma"):
        assert text in result.stdout


@pytest.mark.skipif(extkv.cuda_is_available(), reason="needs a machine without CUDA")
def test_without_cuda_the_report_says_why():
    host, cuda = probe_devices()
    assert host.is_available
    assert not cuda.is_available
    assert cuda.reason


def test_each_cuda_device_is_probed(monkeypatch):
    probed = []
    monkeypatch.setattr(extkv, "cuda_is_available", lambda: True)
    monkeypatch.setattr(extkv, "probe", lambda device: probed.append(device) or device)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert probe_devices() == probed == ["cpu", "cuda:0", "cuda:1", "cuda:2"]
