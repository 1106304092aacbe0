"""Figures of schedules and calibrations. Needs matplotlib: `pip install 'extkv[plot]'`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from extkv.errors import MissingPackageError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from extkv.bench.reliability import ReliabilityBin
    from extkv.bench.schedule import ScheduleResult

SYNTHETIC = "synthetic acceptance: not lossless"
# Colours that people with any kind of colour vision tell apart (Okabe and Ito).
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442")
_SCHEDULED, _PLAIN = "#D55E00", "#000000"


def require_matplotlib() -> None:
    """Check that figures can be drawn, before anything is measured for them.

    Raises:
        MissingPackageError: If matplotlib is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: F401, only whether it is there
    except ImportError as error:
        raise MissingPackageError(
            "figures need matplotlib, which is not installed: run `pip install 'extkv[plot]'`"
        ) from error


def plot_schedule(result: ScheduleResult, path: str | os.PathLike[str]) -> None:
    """Draw throughput per user over total throughput, a line per schedule, a point per load.

    Raises:
        MissingPackageError: If matplotlib is not installed.
    """
    figure = _figure(9.0, 6.0)
    axes = figure.add_subplot()
    colours = iter(_COLOURS * 2)
    for name in result.schedules:
        points = [point for point in result.points if point.schedule == name]
        colour = {"no drafts": _PLAIN, "scheduled": _SCHEDULED}.get(name) or next(colours)
        is_wide = name == "scheduled"
        axes.plot(
            [point.tokens_per_second for point in points],
            [point.tokens_per_second_per_user for point in points],
            marker="o",
            markersize=6 if is_wide else 4,
            linewidth=2.5 if is_wide else 1.3,
            linestyle="--" if name == "no drafts" else "-",
            color=colour,
            label=name,
        )
        if name in {"no drafts", "scheduled"}:
            for point in points:
                axes.annotate(
                    str(point.num_requests),
                    (point.tokens_per_second, point.tokens_per_second_per_user),
                    textcoords="offset points",
                    xytext=(5, 6) if is_wide else (-5, -12),
                    fontsize=8,
                    color=colour,
                )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("total throughput [tokens/s]")
    axes.set_ylabel("throughput per user [tokens/s]")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(title="drafts verified per request", fontsize=9)
    source = result.source
    title = f"{source['model']}, {source['device']}; numbers at points: requests at once"
    if result.is_synthetic:
        rates = ", ".join(f"{rate:g}" for rate in result.acceptance_rates or ())
        title += f"\n{SYNTHETIC} (rates {rates})"
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=150)


def plot_reliability(
    before: Sequence[Sequence[ReliabilityBin]],
    after: Sequence[Sequence[ReliabilityBin]],
    path: str | os.PathLike[str],
    *,
    title: str,
) -> None:
    """Draw promised against observed survival by position, before and after calibration.

    Args:
        before: Bins of each position with temperatures of 1.
        after: The same with the fitted ones.
        path: The PNG file.
        title: Above the figure.

    Raises:
        MissingPackageError: If matplotlib is not installed.
    """
    count = len(before)
    figure = _figure(2.4 * max(count, 2), 5.6)
    rows = figure.subplots(2, count, sharex=True, sharey=True, squeeze=False)
    for row, (name, positions) in enumerate((("before", before), ("after", after))):
        for place, bins in enumerate(positions):
            axes = rows[row][place]
            axes.plot([0, 1], [0, 1], color="#888888", linewidth=0.8, linestyle="--")
            largest = max((one.num_rounds for one in bins), default=1)
            axes.scatter(
                [one.promised for one in bins],
                [one.observed for one in bins],
                s=[8 + 60 * one.num_rounds / largest for one in bins],
                color=_COLOURS[0] if row == 0 else _SCHEDULED,
                alpha=0.8,
            )
            axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
            axes.set_title(f"{name}, draft {place + 1}\nECE {_ece(bins):.3f}", fontsize=8)
            axes.tick_params(labelsize=7)
    figure.supxlabel("promised chance that all drafts up to here are accepted", fontsize=9)
    figure.supylabel("observed share", fontsize=9)
    figure.suptitle(f"{title}\narea of a point: rounds in its bin", fontsize=10)
    figure.savefig(path, dpi=150)


def _ece(bins: Sequence[ReliabilityBin]) -> float:
    total = sum(one.num_rounds for one in bins)
    gaps = sum(one.num_rounds * abs(one.promised - one.observed) for one in bins)
    return gaps / total if total else 0.0


def _figure(width: float, height: float) -> Any:  # noqa: ANN401, matplotlib is optional
    require_matplotlib()
    # Not pyplot: no global state, no window.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
