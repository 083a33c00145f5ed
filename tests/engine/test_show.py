"""How completions and an engine look: what is said, what is cut, and that markup stays text.

Separate because nothing runs here: the values are written by hand.
Read next: `deepinfer_jax/engine/show.py`.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

from deepinfer_jax.engine.prefix import PrefixCounters
from deepinfer_jax.engine.show import (
    CELL_CHARACTERS,
    LINE_CHARACTERS,
    MOST_ROWS,
    NOTHING_KNOWN,
    completion_html,
    completion_text,
    completions_html,
    engine_html,
    engine_text,
)
from deepinfer_jax.engine.stats import EngineStats
from deepinfer_jax.spec_decode.stats import DraftStats

MARKUP = "<script>alert('a & b')</script>"


@dataclass
class Timing:
    """Seconds of a request."""

    queued: float = 0.0
    first_token: float = 0.25
    total: float = 2.0
    num_cached: int = 0


@dataclass
class Output:
    """One output."""

    text: str = "a text"
    token_ids: list[int] = field(default_factory=lambda: list(range(42)))
    finish_reason: str = "length"
    stop_reason: str | int | None = None
    index: int = 0
    timing: Timing = field(default_factory=Timing)


@dataclass
class Engine:
    """An engine with a model on a target."""

    model: Any
    stats: EngineStats = field(default_factory=EngineStats)
    memory: dict[str, int] = field(default_factory=lambda: {"weights": 15 * 2**20, "state": 512})


def engine_of(stats: EngineStats | None = None, mesh: Any = None, name: str = "nano") -> Engine:
    """Make an engine on one device, or on a mesh."""
    target = SimpleNamespace(mesh=mesh, layout=SimpleNamespace(name="data+expert"))
    model = SimpleNamespace(name=name, numerics=SimpleNamespace(name="official"), target=target)
    return Engine(model, EngineStats() if stats is None else stats)


def cells(html: str) -> list[list[str]]:
    """Read the rows of a table back; fails where the markup is broken."""
    rows = ElementTree.fromstring(html).iter("tr")
    return [["".join(cell.itertext()) for cell in row] for row in rows]


def test_a_completion_is_one_line_of_text_tokens_reason_and_speed() -> None:
    found = completion_text(Output("Once upon a time"))
    assert found == "Completion('Once upon a time', 42 tokens, length, 21.0 tokens/s)"


def test_a_long_text_is_cut_in_one_line_and_whole_alone() -> None:
    text = "".join(chr(ord("a") + number % 26) for number in range(CELL_CHARACTERS + 1))
    line = completion_text(Output(text))
    assert f"'{text[:LINE_CHARACTERS]}...'" in line and text[: LINE_CHARACTERS + 1] not in line
    assert text in completion_html(Output(text))


def test_a_text_of_just_the_length_is_not_cut() -> None:
    assert "..." not in completion_text(Output("x" * LINE_CHARACTERS))
    assert "..." not in completions_html([Output("x" * CELL_CHARACTERS)])
    assert "..." in completions_html([Output("x" * (CELL_CHARACTERS + 1))])


def test_line_breaks_stay_inside_the_line_of_a_completion() -> None:
    assert "\n" not in completion_text(Output("one\ntwo"))


def test_an_empty_completion_is_shown() -> None:
    empty = Output("", [], timing=Timing(first_token=0.0, total=0.0))
    assert completion_text(empty) == "Completion('', 0 tokens, length)"
    assert cells(completions_html([empty]))[1] == ["0", "", "length", "0", NOTHING_KNOWN, NOTHING_KNOWN, "0"]


def test_unknown_seconds_give_no_speed() -> None:
    output = Output(timing=Timing(0.0, 0.0, 0.0))
    assert "tokens/s" not in completion_text(output)
    assert cells(completion_html(output))[1] == ["length", "42", NOTHING_KNOWN, NOTHING_KNOWN, "0"]


def test_time_in_the_queue_is_not_speed() -> None:
    assert "42.0 tokens/s" in completion_text(Output(timing=Timing(queued=1.0, total=2.0)))


def test_what_ended_a_text_is_named() -> None:
    assert "stop at '\\n\\n'," in completion_text(Output(finish_reason="stop", stop_reason="\n\n"))
    assert "stop at token 17," in completion_text(Output(finish_reason="stop", stop_reason=17))
    assert "tokens, stop," in completion_text(Output(finish_reason="stop"))


def test_markup_in_texts_stays_text() -> None:
    output = Output(MARKUP, finish_reason="stop", stop_reason="</td>")
    engine = engine_html(engine_of(name=MARKUP))
    for html in (completion_html(output), completions_html([output]), engine):
        assert "<script" not in html and "&lt;script&gt;" in html
        assert MARKUP in "".join(ElementTree.fromstring(html).itertext())
    assert cells(completions_html([output]))[1][1:3] == [MARKUP, "stop at '</td>'"]


def test_a_table_names_its_columns_and_numbers_its_prompts() -> None:
    outputs = [Output("one", timing=Timing(num_cached=1280)), Output("two", [1], "stop")]
    assert cells(completions_html(outputs)) == [
        ["prompt", "text", "finish", "tokens", "tokens/s", "first token", "cached prompt tokens"],
        ["0", "one", "length", "42", "21.0", "250 ms", "1,280"],
        ["1", "two", "stop", "1", "0.5", "250 ms", "0"],
    ]


def test_outputs_of_one_prompt_share_its_number() -> None:
    outputs = [Output(index=index) for index in (0, 0, 1, 2, 0, 1)]
    header, *rows = cells(completions_html(outputs))
    assert header[:3] == ["prompt", "sample", "text"]
    found = [(row[0], row[1]) for row in rows]
    assert found == [("0", "0"), ("1", "0"), ("1", "1"), ("1", "2"), ("2", "0"), ("2", "1")]


def test_a_long_table_says_how_many_more_there_are() -> None:
    full = completions_html([Output()] * MOST_ROWS)
    longer = completions_html([Output()] * (MOST_ROWS + 1234))
    assert len(cells(full)) == len(cells(longer)) == MOST_ROWS + 1
    assert "and 1,234 more" in longer and "more" not in full


def test_an_empty_table_has_its_columns_only() -> None:
    assert len(cells(completions_html([]))) == 1


def test_an_engine_says_how_full_and_how_fast_it_is() -> None:
    stats = EngineStats(
        prompt_tokens=1_000,
        generated_tokens=2_400,
        busy_seconds=2.0,
        prefix=PrefixCounters(hits=1, hit_tokens=256, misses={"short": 1, "new": 2, "off": 0}),
        slots_running=3,
        slots=64,
        pages_used=12,
        pages=1024,
        waiting=5,
    )
    assert engine_text(engine_of(stats)).splitlines() == [
        "LLM nano, numerics official, on one device",
        "  slots          3 of 64 running, 5 waiting",
        "  pages          12 of 1,024 used or kept for reuse",
        "  device memory  15.0 MiB weights, 512 B state",
        "  speed          1,200.0 tokens/s (2,400 generated from 1,000 of prompts)",
        "  prefix cache   1 hit (256 tokens), 3 misses (2 new, 1 short)",
        "  acceptance     no drafts",
    ]


def draft_stats(choices: list[int]) -> DraftStats:
    """Count steps of two slots: four drafts verified and three accepted where any were made."""
    stats = DraftStats(5, budgets=(64, 128))
    for choice in choices:
        made = {"num_tokens": [1, 1], "num_verified": [0, 0], "num_accepted": [0, 0]}
        if choice:
            made = {"num_tokens": [3, 2], "num_verified": [2, 2], "num_accepted": [2, 1]}
        stats.add(**made, logits=[[0.0] * 5] * 2, regimes=[0, 0], choice=choice)
    return stats


def test_an_engine_with_drafts_says_what_came_of_them() -> None:
    stats = EngineStats(draft=draft_stats([0] + [3] * 2 + [1] * 5).summary())
    assert engine_text(engine_of(stats)).splitlines()[-2:] == [
        "  acceptance     2.50 tokens a round (tau), 21 of 28 drafts accepted (75%)",
        "  rows verified  64 rows in 62% of steps, full block in 25% of steps, no draft in 12% of steps",
    ]
    assert "rows verified" in engine_html(engine_of(stats))


def test_an_engine_that_made_no_draft_yet_is_shown() -> None:
    fresh = engine_text(engine_of(EngineStats(draft=draft_stats([]).summary()))).splitlines()
    assert fresh[-1] == "  acceptance     nothing yet"
    skipped = engine_text(engine_of(EngineStats(draft=draft_stats([0]).summary()))).splitlines()
    assert skipped[-2:] == [
        "  acceptance     nothing yet",
        "  rows verified  no draft in 100% of steps",
    ]


def test_an_engine_that_did_nothing_is_shown() -> None:
    found = engine_text(engine_of())
    assert "nothing yet" in found and "0 hits (0 tokens), no misses" in found


def test_an_engine_on_a_mesh_says_which() -> None:
    mesh = SimpleNamespace(size=8, shape={"data": 2, "model": 4})
    first = engine_text(engine_of(mesh=mesh)).splitlines()[0]
    assert first.endswith("layout data+expert on 8 devices (data=2, model=4)")


def test_page_and_text_of_an_engine_say_the_same() -> None:
    text = engine_text(engine_of())
    for row in cells(engine_html(engine_of())):
        assert all(words in text for words in row)


def test_colours_are_left_to_the_notebook() -> None:
    html = completion_html(Output()) + completions_html([Output()] * 30) + engine_html(engine_of())
    assert "background" not in html and ";color:" not in html and "#" not in html


def test_nothing_of_jax_is_imported() -> None:
    code = "import sys, deepinfer_jax.engine.show; print([name for name in sys.modules if 'jax' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'jax'" not in done.stdout
