"""Reliability diagrams of the draft's confidences as a picture.

Separate so that matplotlib, which only this needs, is imported when a plot is asked for.
Read next: `calibrate.py`, which makes the data.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .calibrate import Reliability

if TYPE_CHECKING:
    from matplotlib.figure import Figure

type Series = dict[str, list[Reliability]]


def plot_reliability(
    series: Series, path: str | Path | None = None, title: str = "Survival of drafts: predicted, observed"
) -> Figure:
    """Draw one reliability diagram a position, with a line for each series.

    Args:
        series: name, such as "before" and "after", to the reliability of positions 1..K in order.
        path: a PNG or SVG file to write, or None; its folder is made if needed.
        title: heading of the picture.

    Returns:
        The figure; a notebook shows it.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no series, or series of different lengths.

    Source: spec/dspark.md section 7.
    """
    lengths = {name: len(rows) for name, rows in series.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(
            f"reliability: got positions {lengths}, expected one or more, as many in every series; give all"
        )
    figure = _new_figure(next(iter(lengths.values())))
    for k, axes in enumerate(figure.axes):
        axes.plot([0, 1], [0, 1], color="0.6", linewidth=1, linestyle="--")
        for index, (name, rows) in enumerate(series.items()):
            _draw(axes, rows[k], f"C{index}", f"{name}: {100 * rows[k].error:.1f} %")
        axes.set(xlabel="predicted", title=f"position {k + 1}", xlim=(0, 1), ylim=(0, 1), aspect="equal")
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, loc="upper left", title="calibration error", title_fontsize=8)
    figure.axes[0].set_ylabel("observed")
    figure.suptitle(title)
    if path is not None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        from matplotlib import rc_context

        # Text stays text in an SVG, instead of one outline a letter.
        with rc_context({"svg.fonttype": "none"}):
            figure.savefig(target, dpi=120)
    return figure


def _new_figure(num_panels: int) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plotting: got no matplotlib, expected it installed; pip install matplotlib, or do not plot"
        ) from error
    figure = Figure(figsize=(3.2 * num_panels, 3.8), layout="constrained")
    FigureCanvasAgg(figure)  # draws to a file without a display and without global state
    figure.subplots(1, num_panels)
    return figure


def _draw(axes: Any, rows: Reliability, color: str, label: str) -> None:
    """Draw a line through the bins that hold anything, with marks as large as the bins are full."""
    is_used = rows.number > 0
    predicted, observed, number = (column[is_used] for column in rows)
    axes.plot(predicted, observed, color=color, linewidth=1, label=label)
    # Diamonds have four corners, where an SVG draws each circle by eight curves.
    axes.scatter(predicted, observed, s=60 * _shares(number), color=color, marker="D", linewidths=0)


def _shares(number: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(number, np.float64)
    return values / values.max(initial=1.0)
