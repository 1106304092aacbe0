"""`extkv doctor`: what growable memory this machine can do, per device."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import extkv


def doctor(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array of reports.")] = False,
) -> None:
    """Show for the host and each CUDA device whether growable memory works, and why not."""
    reports = probe_devices()
    if as_json:
        typer.echo(json.dumps([asdict(report) for report in reports]))
    else:
        _print_table(reports)


def probe_devices() -> list[extkv.DeviceReport]:
    """Probe the host and every CUDA device; without CUDA, the report of cuda:0 says why."""
    # Imported late: `extkv --help` must not pay for the native module.
    import extkv

    num_cuda_devices = 1
    if extkv.cuda_is_available():
        import torch

        num_cuda_devices = max(1, torch.cuda.device_count())
    devices = ["cpu", *(f"cuda:{index}" for index in range(num_cuda_devices))]
    return [extkv.probe(device) for device in devices]


def _print_table(reports: list[extkv.DeviceReport]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", *(report.device for report in reports), title="extkv doctor")
    for field in fields(reports[0]):
        if field.name != "device":
            values = (getattr(report, field.name) for report in reports)
            table.add_row(field.name.replace("_", " "), *map(_format_value, values))
    Console().print(table)


def _format_value(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
