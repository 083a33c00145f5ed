"""Loss curves of a training run as a picture.

Separate so that matplotlib, which only this needs, is imported when a plot is asked for.
Read next: `lm.py`, which records the history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

type Series = Sequence[Sequence[float]]
"""Pairs of step and loss in nats a token (after JSON, lists of two)."""


def plot_losses(
    path: str | Path,
    training: Mapping[str, Series],
    held_out: Mapping[str, Series],
    phases: Mapping[str, int] | None = None,
    title: str = "Training loss",
) -> None:
    """Draw training and held-out loss by kind of text into a PNG file.

    Args:
        path: the file; its folder is made if needed.
        training: series by kind, drawn as thin smoothed lines.
        held_out: series by kind, drawn as marked lines in the same colours.
        phases: name and first step of each phase, drawn as labelled vertical lines.
        title: heading of the picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plotting: got no matplotlib, expected it installed; pip install matplotlib, or do not plot"
        ) from error
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)  # draws to a file without a display and without global state
    axes = figure.add_subplot()
    for index, kind in enumerate(dict.fromkeys([*training, *held_out])):
        color = f"C{index}"
        if training.get(kind):
            steps, losses = _columns(training[kind])
            axes.plot(steps, _smooth(losses), color=color, alpha=0.5, linewidth=1, label=f"{kind}, training")
        if held_out.get(kind):
            axes.plot(
                *_columns(held_out[kind]), color=color, marker="o", markersize=4, label=f"{kind}, held out"
            )
    for name, step in (phases or {}).items():
        axes.axvline(step, color="0.6", linewidth=1, linestyle="--")
        axes.annotate(
            *(name, (step, 1.0)),
            xycoords=("data", "axes fraction"),
            **{"xytext": (3, -3), "textcoords": "offset points", "rotation": 90, "va": "top", "fontsize": 8},
        )
    axes.set(xlabel="step", ylabel="nats a token", title=title)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)


def _columns(series: Series) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.asarray(series, np.float64)
    return pairs[:, 0], pairs[:, 1]


def _smooth(losses: np.ndarray) -> np.ndarray:
    """Average over the preceding fiftieth of the run, as single batches hide the slope."""
    width = max(len(losses) // 50, 1)
    sums = np.cumsum(np.concatenate([[0.0], losses]))
    ends = np.arange(1, len(losses) + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
