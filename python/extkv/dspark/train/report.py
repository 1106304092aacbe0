"""The log of a run, one JSON object a line, and a plot of it where matplotlib is installed."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os


class RunLog:
    """Append to a log file.

    Attributes:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open it; what is there stays."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._start = time.perf_counter()

    def write(self, event: str, **values: Any) -> None:  # noqa: ANN401, any JSON
        """Add a line with an event, the seconds since the run began, and figures."""
        elapsed = round(time.perf_counter() - self._start, 3)
        line = {"event": event, "elapsed_s": elapsed, **_rounded(values)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the lines of a log."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def plot_log(path: str | os.PathLike[str], image: str | os.PathLike[str]) -> bool:
    """Draw loss and accepted length over the steps.

    Args:
        path: The log.
        image: Where the image goes; its suffix is the format.

    Returns:
        Whether there is an image: matplotlib is optional.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    lines = read_log(path)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, points in _series(lines, "train", "loss").items():
        left.plot(*zip(*points, strict=True), label=name)
    left.set(xlabel="step", ylabel="loss")
    for name, points in _series(lines, "evaluation", "accepted_length").items():
        right.plot(*zip(*points, strict=True), marker="o", label=name)
    right.set(xlabel="step", ylabel="accepted length")
    for axes in (left, right):
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=6)
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(image)
    plt.close(figure)
    return True


def _series(
    lines: list[dict[str, Any]], event: str, figure: str
) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        if line["event"] == event and figure in line:
            name = " ".join(str(line[key]) for key in ("student", "texts") if key in line)
            found.setdefault(name, []).append((line["step"], line[figure]))
    return found


def _rounded(value: Any) -> Any:  # noqa: ANN401, any JSON
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value
