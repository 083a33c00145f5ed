"""How completions and an engine look: one line in a terminal, a small table in a notebook.

Separate so that what is shown is plain text made of plain values: no JAX, no device is asked.
Read next: `completion.py` and `llm.py`, which are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..spec_decode.summary import DraftSummary
    from .completion import Completion
    from .llm import LLM
    from .prefix import PrefixCounters
    from .stats import EngineStats

MOST_ROWS = 20
"""Completions of a table; how many more there are is said below it."""

LINE_CHARACTERS = 60
CELL_CHARACTERS = 300
MOST_CHARACTERS = 10_000
"""Characters of a text in one line, in a table of several, and alone."""

NUMBER_COLUMNS = ("finish", "tokens", "tokens/s", "first token", "cached prompt tokens")
"""What stands beside a text in a table."""

NOTHING_KNOWN = "-"
"""Shown for a number that is not known."""

# Lines and shades only: the colours of text and ground are the notebook's, light or dark.
_LINE = "1px solid rgba(128,128,128,0.4)"
_TABLE = "border-collapse:collapse;margin:4px 0;font-variant-numeric:tabular-nums"
_HEAD = f"text-align:left;vertical-align:bottom;padding:2px 12px 2px 0;border:0;border-bottom:{_LINE}"
_CELL = "text-align:left;vertical-align:top;padding:2px 12px 2px 0;border:0"
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;max-width:60em"
_NOTE = "margin:2px 0;opacity:0.7"


def completion_text(completion: Completion) -> str:
    """Write a completion in one line.

    Args:
        completion: to show.

    Returns:
        Such as `Completion('Once upon a...', 42 tokens, stop, 38.1 tokens/s)`.
    """
    parts = [
        repr(_cut(completion.text, LINE_CHARACTERS)),
        _counted(len(completion.token_ids), "token"),
        _finish(completion),
    ]
    rate = _rate(completion)
    if rate is not None:
        parts.append(f"{rate:,.1f} tokens/s")
    return f"Completion({', '.join(parts)})"


def completion_html(completion: Completion) -> str:
    """Write a completion as an HTML element: its text, and a row of numbers.

    Args:
        completion: to show.

    Returns:
        A `div` that loads nothing.
    """
    text = escape(_cut(completion.text, MOST_CHARACTERS))
    table = _table(NUMBER_COLUMNS, [_numbers(completion)])
    return f'<div><div style="{_TEXT}">{text}</div>{table}</div>'


def completions_html(completions: Sequence[Completion]) -> str:
    """Write completions as an HTML table, in order; the outputs of one prompt share its number.

    Args:
        completions: to show; those of one prompt follow each other with rising `index`.

    Returns:
        A `div` that loads nothing, with the first `MOST_ROWS` and the number of all others.
    """
    shown = completions[:MOST_ROWS]
    has_samples = any(one.index for one in completions)
    rows, prompt, latest = [], -1, 0
    for number, one in enumerate(shown):
        if number == 0 or one.index <= latest:
            prompt += 1
        latest = one.index
        places = [str(prompt), str(one.index)] if has_samples else [str(prompt)]
        rows.append([*places, _cut(one.text, CELL_CHARACTERS), *_numbers(one)])
    places = ["prompt", "sample"] if has_samples else ["prompt"]
    parts = [_table([*places, "text", *NUMBER_COLUMNS], rows)]
    if len(completions) > len(shown):
        parts.append(f'<p style="{_NOTE}">and {len(completions) - len(shown):,} more</p>')
    return f"<div>{''.join(parts)}</div>"


def engine_text(engine: LLM) -> str:
    """Write an engine in a few lines, as it is now.

    Args:
        engine: to show.

    Returns:
        Its model and place, and below how full and how fast it is.
    """
    rows = _engine_rows(engine)
    width = max(len(name) for name, _ in rows)
    return "\n".join([_engine_title(engine), *(f"  {name:<{width}}  {words}" for name, words in rows)])


def engine_html(engine: LLM) -> str:
    """Write an engine as an HTML table, as it is now.

    Args:
        engine: to show.

    Returns:
        A `div` that loads nothing.
    """
    rows = "".join(
        f'<tr><th style="{_CELL};opacity:0.7;font-weight:normal">{escape(name)}</th>'
        f'<td style="{_CELL}">{escape(words)}</td></tr>'
        for name, words in _engine_rows(engine)
    )
    title = escape(_engine_title(engine))
    return f'<div><div><b>{title}</b></div><table style="{_TABLE}">{rows}</table></div>'


def _engine_title(engine: LLM) -> str:
    model = engine.model
    closed = " (closed)" if getattr(engine, "is_closed", False) else ""
    return f"LLM {model.name}{closed}, numerics {model.numerics.name}, {_place(engine)}"


def _place(engine: LLM) -> str:
    target = engine.model.target
    if target.mesh is None:
        return "on one device"
    sizes = ", ".join(f"{axis}={size}" for axis, size in target.mesh.shape.items())
    return f"layout {target.layout.name} on {_counted(target.mesh.size, 'device')} ({sizes})"


def _engine_rows(engine: LLM) -> list[tuple[str, str]]:
    stats, memory = engine.stats, engine.memory
    rows = [
        ("slots", f"{stats.slots_running:,} of {stats.slots:,} running, {stats.waiting:,} waiting"),
        ("pages", f"{stats.pages_used:,} of {stats.pages:,} used or kept for reuse"),
        ("device memory", f"{_size(memory['weights'])} weights, {_size(memory['state'])} state"),
        ("speed", _speed(stats)),
        ("prefix cache", _prefix(stats.prefix)),
        ("acceptance", _acceptance(stats.draft)),
    ]
    if stats.draft is not None and stats.draft.steps:
        rows.append(("rows verified", _choices(stats.draft)))
    return rows


def _speed(stats: EngineStats) -> str:
    done = f"{stats.generated_tokens:,} generated from {stats.prompt_tokens:,} of prompts"
    return f"{stats.tokens_per_second:,.1f} tokens/s ({done})" if stats.generated_tokens else "nothing yet"


def _prefix(counters: PrefixCounters) -> str:
    hits = f"{_counted(counters.hits, 'hit')} ({_counted(counters.hit_tokens, 'token')})"
    reasons = [f"{count:,} {reason}" for reason, count in sorted(counters.misses.items()) if count]
    misses = "no misses"
    if reasons:
        total = sum(counters.misses.values())
        misses = f"{total:,} {'miss' if total == 1 else 'misses'} ({', '.join(reasons)})"
    return f"{hits}, {misses}"


def _acceptance(draft: DraftSummary | None) -> str:
    """Say what came of drafts."""
    if draft is None:
        return "no drafts"
    if not draft.rounds:
        return "nothing yet"
    share = f" ({draft.draft_acceptance:.0%})" if draft.verified else ""
    drafts = f"{draft.accepted:,} of {draft.verified:,} drafts accepted{share}"
    return f"{draft.tau:.2f} tokens a round (tau), {drafts}"


def _choices(draft: DraftSummary) -> str:
    """Say how many steps verified how much, the most frequent first."""
    counted = sorted(draft.choices.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} in {count / draft.steps:.0%} of steps" for name, count in counted)


def _numbers(completion: Completion) -> list[str]:
    """Write what stands beside a text."""
    rate, first = _rate(completion), completion.timing.first_token
    return [
        _finish(completion),
        f"{len(completion.token_ids):,}",
        NOTHING_KNOWN if rate is None else f"{rate:,.1f}",
        f"{1000 * first:,.0f} ms" if first else NOTHING_KNOWN,
        f"{completion.timing.num_cached:,}",
    ]


def _finish(completion: Completion) -> str:
    """Say why it ended, and at which stop string or stop token."""
    reason = completion.stop_reason
    if reason is None:
        return completion.finish_reason
    what = repr(_cut(reason, LINE_CHARACTERS)) if isinstance(reason, str) else f"token {reason}"
    return f"{completion.finish_reason} at {what}"


def _rate(completion: Completion) -> float | None:
    """Give its tokens for each second in a slot, None where no time passed."""
    seconds = completion.timing.total - completion.timing.queued
    return len(completion.token_ids) / seconds if seconds > 0 else None


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay escaped cells out, the text column with its own line breaks."""
    styles = [f"{_CELL};{_TEXT}" if column == "text" else _CELL for column in columns]
    head = "".join(f'<th style="{_HEAD}">{escape(column)}</th>' for column in columns)
    body = "".join(
        "<tr>"
        + "".join(f'<td style="{style}">{escape(cell)}</td>' for style, cell in zip(styles, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<table style="{_TABLE}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _size(num_bytes: int) -> str:
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:,.0f} {units[0]}" if units[0] == "B" or size >= 99.95 else f"{size:,.1f} {units[0]}"
