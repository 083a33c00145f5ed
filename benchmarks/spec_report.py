"""Tables and plots of the benchmark of drafts, from its JSON lines.

Separate because it needs no device, and matplotlib only for the plots.
Read next: `spec.py`, which measures.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
ARMS = ("none", "fixed", "dynamic")
LABELS = {"none": "no drafts", "fixed": "all drafts verified", "dynamic": "dynamic"}

type Lines = dict[str, dict[str, Any]]
"""The JSON lines of one number of sequences, by arm."""


def read_lines(folder: Path) -> Iterable[dict[str, Any]]:
    """Give the benchmark's lines of all devices, in the order in which they were written."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            found = json.loads(line)
            if "arm" in found and "acceptance" in found:
                yield found


def latest(lines: Iterable[dict[str, Any]]) -> dict[tuple[str, str, str], dict[int, Lines]]:
    """Keep the last run of each device, model and number of sequences.

    Args:
        lines: of the benchmark.

    Returns:
        (device, model, acceptance) -> sequences -> lines by arm; only where all arms were measured.
    """
    found: dict[tuple[str, str, str], dict[int, Lines]] = {}
    for line in lines:
        group = found.setdefault((line["device"], line["model"], line["acceptance"]), {})
        group.setdefault(line["concurrency"], {})[line["arm"]] = line
    complete = {
        key: {count: by_arm for count, by_arm in sorted(group.items()) if {*ARMS, "ratio"} <= set(by_arm)}
        for key, group in sorted(found.items())
    }
    return {key: group for key, group in complete.items() if group}


def table(key: tuple[str, str, str], group: dict[int, Lines]) -> str:
    """Write the Markdown table of one device and model; every row says where its acceptance comes from."""
    device, model, acceptance = key
    rows = [
        f"**{model}** on {device}, {acceptance} acceptance, tokens/s:",
        "",
        "| together | acceptance | no drafts | fixed | dynamic | dynamic / best other (95 %) "
        "| tokens a round, fixed | rows a round, dynamic | choices of dynamic |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for count, lines in group.items():
        ratio, fixed, dynamic = lines["ratio"], lines["fixed"], lines["dynamic"]
        low, high = ratio["interval"]
        choices = ", ".join(f"{name} {100 * share:.0f} %" for name, share in dynamic["choices"].items())
        cells = [
            *(str(count), acceptance),
            *(f"{lines[arm]['value']:,.1f}" for arm in ARMS),
            f"{ratio['value']:.3f} ({low:.3f} to {high:.3f}) of {LABELS[ratio['best']]}",
            *(_number(fixed["tau"]), _number(dynamic["rows"]), choices),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    runs = {(line["date"][:10], line["jax"], line["commit"][:9], line["command"]) for line in _ratios(group)}
    rows += [
        "",
        *(f"{date}, JAX {jax}, commit {commit}, `{what}`" for date, jax, commit, what in sorted(runs)),
    ]
    return "\n".join(rows)


def plot(key: tuple[str, str, str], group: dict[int, Lines], folder: Path) -> Path:
    """Draw tokens/s by sequences together, and the ratio below, as an SVG file.

    Args:
        key: device, model and acceptance, all of them in the title.
        group: lines by sequences and arm.
        folder: for the file.

    Returns:
        The file.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    device, model, acceptance = key
    counts = list(group)
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    FigureCanvasSVG(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for arm in ARMS:
        values = [group[count][arm]["value"] for count in counts]
        above.plot(counts, values, marker="o", label=LABELS[arm])
    above.set(xscale="log", yscale="log", ylabel="tokens/s")
    above.set_title(f"{model} on {device}, {acceptance} acceptance")
    above.legend()
    ratios = [line["value"] for line in _ratios(group)]
    errors = [
        [value - line["interval"][0] for value, line in zip(ratios, _ratios(group), strict=True)],
        [line["interval"][1] - value for value, line in zip(ratios, _ratios(group), strict=True)],
    ]
    below.errorbar(counts, ratios, yerr=errors, marker="o", capsize=3, color="C2")
    below.axhline(1, color="0.5", linewidth=1)
    below.set(xlabel="sequences together", ylabel="dynamic / best other")
    below.set_xticks(counts, [str(count) for count in counts])
    below.minorticks_off()
    for axes in (above, below):
        axes.grid(alpha=0.25)
    words = "_".join([model, *([acceptance] if acceptance != "real" else []), device])
    path = folder / f"draft_speed_{words.lower().replace(' ', '_')}.svg"
    # Names and dates inside of the file would change with every run.
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None})
    return path


def report(folder: Path, docs: Path = DOCS) -> str:
    """Write the plots of all that was measured, and give the tables.

    Args:
        folder: of the JSON lines.
        docs: folder of the plots.

    Returns:
        Markdown.
    """
    groups = latest(read_lines(folder))
    if not groups:
        return "no results of step.py --spec yet"
    parts = []
    for key, group in groups.items():
        path = plot(key, group, docs)
        parts.append(f"{table(key, group)}\n\n![{', '.join(key)} acceptance]({path.name})")
    return "\n\n".join(parts)


def _ratios(group: dict[int, Lines]) -> list[dict[str, Any]]:
    return [lines["ratio"] for lines in group.values()]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
