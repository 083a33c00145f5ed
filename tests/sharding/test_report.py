"""Reports of plans written by hand: the same words as before, well-formed pictures, nothing unescaped.

Separate because what a report says does not depend on how it was predicted.
Read next: `deepinfer_jax/sharding/report/`.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deepinfer_jax.sharding.layout import Layout
from deepinfer_jax.sharding.layout_plan import LayoutPlan
from deepinfer_jax.sharding.presets import PRESETS
from deepinfer_jax.sharding.report import (
    comparison_html,
    comparison_text,
    compiled_text,
    page,
    report_html,
    report_svg,
    report_text,
    show,
)
from deepinfer_jax.sharding.report.shares import shares_of
from deepinfer_jax.sharding.report.words import count_text, rate_text, share_text, size_text, time_text
from deepinfer_jax.testing.layout_plans import COMPILED, KIB, plan_of

GOLDEN = Path(__file__).parents[1] / "golden" / "layout_report.txt"
SVG = "{http://www.w3.org/2000/svg}"

PLANS: dict[str, Callable[[], LayoutPlan]] = {
    "one_device": lambda: plan_of("1", "single", memory=2**21),
    "two": lambda: plan_of("2", "tensor"),
    "grid": lambda: plan_of("2x4", "sequence", slots=16),
    "sixty_four": lambda: plan_of("64", "data+expert", slots=128),
    "square": lambda: plan_of("8x8", "weights-only", slots=128),
    "large": lambda: plan_of("16x32", "data", slots=1024),
    "cube": lambda: plan_of("2x2x2", "expert"),
    "too_small": lambda: plan_of("2", "single", memory=300 * KIB),
}

WIDTHS = (60, 80, 110, 160)


def test_the_text_of_a_small_plan() -> None:
    """Compare with `tests/golden/layout_report.txt`.

    Regenerate with `python tests/sharding/test_report.py`, then read the difference.
    """
    assert golden_text() == GOLDEN.read_text(encoding="utf-8")


def golden_text() -> str:
    """Write a plan that fits, one that does not, a comparison and the compiler's numbers."""
    plans = [PLANS["too_small"](), plan_of()]
    reports = [report_text(plan, 100) for plan in plans]
    return "\n".join([*reports, comparison_text(plans, 100), compiled_text(plan_of(), COMPILED, 100)])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PLANS)
def test_no_line_is_wider_than_asked(name: str, width: int) -> None:
    plan = PLANS[name]()
    report, comparison = report_text(plan, width), comparison_text([plan, plan_of()], width)
    for text in (report, comparison, compiled_text(plan, COMPILED, width)):
        assert max(len(line) for line in text.splitlines()) <= width
        # Nothing is cut, which rich would mark: a column that has no room is left out whole.
        assert text.isascii()
    assert size_text(plan.bytes_of()) in report and size_text(plan.bytes_of()) in comparison


def test_a_narrow_table_says_that_columns_are_missing() -> None:
    wide, narrow = comparison_text([plan_of()], 160), comparison_text([plan_of()], 80)
    assert "prefill tokens/s" in wide and "wider" not in wide
    assert "prefill tokens/s" not in narrow and "A wider terminal shows more columns." in narrow


def test_plain_text_has_no_escape_codes_whatever_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    plain, coloured = report_text(plan_of(), 100), report_text(plan_of(), 100, is_coloured=True)
    assert "\x1b" not in plain
    assert "\x1b[" in coloured
    without_codes = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in without_codes.splitlines()] == plain.splitlines()


def test_the_bar_is_as_long_as_the_memory() -> None:
    plan = plan_of()
    bar = next(line for line in report_text(plan, 102).splitlines() if line.startswith("["))
    for key, line in zip("abcdef", plan.memory, strict=True):
        assert abs(bar.count(key) - 100 * line.num_bytes / plan.device.memory_bytes) <= 1
    assert abs(bar.count(".") - 100 * plan.headroom / plan.device.memory_bytes) <= 1


def test_what_does_not_fit_says_what_to_change() -> None:
    text = " ".join(report_text(PLANS["too_small"](), 110).split())
    assert "It does not fit: 976 KiB are needed of the 300 KiB of each H200, 676 KiB (225%) too much." in text
    assert 'divide routed experts over all devices, by split={"experts": "*"} in the layout' in text
    assert 'as "data" and "data+expert" do: frees up to 128 KiB on each' in text
    assert "query heads" not in text.split("Memory of each device")[0]
    assert "take more devices, at least 4" in text
    assert "Not one slot can fit: the weights alone are 640 KiB" in text
    assert "tokens/s of all slots" not in text


def test_what_fits_says_how_fast_it_is() -> None:
    text = " ".join(report_text(plan_of(), 110).split())
    assert "It fits: 328 KiB are used of the 512 KiB of each H200; 184 KiB (36%) stay free." in text
    assert "With 256 tokens of context at most 12 slots fit; with 8 slots at most 384 tokens" in text
    assert "A decode step (makes the next token of every slot) takes 2.50 ms: 3,200 tokens/s" in text
    assert (
        "reading and writing the device's memory takes longest there. Sending between devices is 20%" in text
    )


def test_a_plan_without_times_is_reported_too() -> None:
    plan = replace(plan_of(), parts=(), collectives=(), max_slots=0, max_context=0)
    assert "none: no device waits for another" in report_text(plan, 110)
    assert "No number of slots fits" in report_text(plan, 110)
    assert "Layouts side by side" in comparison_text([plan], 110)
    assert "<table>" in report_html(plan) and "<table>" in comparison_html([plan])


def test_compiled_numbers_stand_beside_the_predicted_ones() -> None:
    lines = [line.split() for line in compiled_text(plan_of(), COMPILED, 110).splitlines()]
    assert ["arguments", "280", "KiB", "280", "KiB", "equal"] in lines
    assert ["temporaries", "40.0", "KiB", "50.0", "KiB", "+25.0%"] in lines
    assert ["all-gather", "4", "288", "B", "10", "10", "equal", "expert", "dispatch"] in lines
    assert ["reduce-scatter", "4", "2.25", "KiB", "10", "0", "-10", "expert", "return"] in lines
    assert ["all-reduce", "2", "64", "B", "0", "1", "+1"] in lines


@pytest.mark.parametrize("name", PLANS)
def test_pictures_are_well_formed_and_complete(name: str) -> None:
    plan = PLANS[name]()
    root = ElementTree.fromstring(report_svg(plan))
    assert root.tag == f"{SVG}svg"
    width, height = (float(root.attrib[key]) for key in ("width", "height"))
    assert root.attrib["viewBox"] == f"0 0 {width:.0f} {height:.0f}"
    for shape in root.iter(f"{SVG}rect"):
        left, top = float(shape.get("x", 0)), float(shape.get("y", 0))
        assert 0 <= left and left + float(shape.attrib["width"]) <= width + 0.1
        assert 0 <= top and top + float(shape.attrib["height"]) <= height + 0.1
    cells = list(root.iter(f"{SVG}g"))
    num_devices = plan.mesh.num_devices
    assert len(cells) == (num_devices if num_devices <= 64 else 7 * 7)
    words = "\n".join(element.text or "" for element in root.iter() if element.text)
    for share in shares_of(plan):
        assert share.summary() in words
    assert ("..." in words) == (num_devices > 64)


def test_every_part_of_every_axis_is_held() -> None:
    plan = plan_of("2x4", Layout("mixed", "", {"slots": "model", "experts": ("model", "data")}), slots=16)
    shares = {share.word: share for share in shares_of(plan)}
    # The last axis of the mesh runs fastest over the devices, the first axis named is the slowest of parts.
    places = [(data, model) for data in range(2) for model in range(4)]
    assert [shares["slots"].part_of(place, plan.mesh) for place in places] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [shares["experts"].part_of(place, plan.mesh) for place in places] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert [shares["vocab"].part_of(place, plan.mesh) for place in places] == [0] * 8
    assert shares["slots"].held(3) == "12 to 15"
    assert shares["vocab"].held(0) == "all"


def test_padded_rows_are_not_shown() -> None:
    plan = plan_of("3", "expert")
    share = next(share for share in shares_of(plan) if share.word == "engram_rows")
    assert share.size == 462
    assert [share.held(part) for part in range(3)] == ["0 to 153", "154 to 307", "308 to 461"]
    uneven = replace(share, size=10, num_parts=4)
    assert [uneven.held(part) for part in range(4)] == ["0 to 2", "3 to 5", "6 to 8", "9"]


class Tags(HTMLParser):
    """Checks that tags are closed in order, and collects their names."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        for key, value in attrs:
            assert not key.startswith("on") and "javascript:" not in (value or "")
            assert key == "xmlns" or not re.match(r"(https?:)?//", value or ""), "loads from elsewhere"
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tags_of(text: str) -> set[str]:
    parser = Tags()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser.names


@pytest.mark.parametrize("name", PLANS)
def test_pages_are_well_formed_and_load_nothing(name: str) -> None:
    plan = PLANS[name]()
    assert {"div", "table", "svg", "style"} <= tags_of(report_html(plan))
    assert {"div", "table"} <= tags_of(comparison_html([plan, plan_of()]))
    assert {"html", "body", "div"} <= tags_of(page("a & b", report_html(plan)))


def test_html_and_pictures_escape_every_word() -> None:
    bad = "<script>alert('\"&')</script>"
    layout = replace(PRESETS["data+expert"], name=bad, intent=bad)
    plan = plan_of("2x2", layout)
    plan = replace(
        plan,
        device=replace(plan.device, name=bad),
        memory=tuple(replace(line, name=bad) for line in plan.memory),
        collectives=tuple(replace(one, part=bad, kind=bad) for one in plan.collectives),
        parts=tuple(replace(part, name=bad, bound=bad) for part in plan.parts),
    )
    for text in (report_html(plan), comparison_html([plan]), page(bad, ""), report_svg(plan)):
        assert "script" not in tags_of(text)
        assert bad not in text and "alert(" in text
    ElementTree.fromstring(report_svg(plan))


def test_what_a_notebook_shows() -> None:
    plan = plan_of()
    one, several = show(plan), show([plan, plan])
    assert one._repr_html_() == report_html(plan)
    assert str(one) == repr(one) == report_text(plan)
    assert several._repr_html_() == comparison_html([plan, plan])
    assert str(several) == comparison_text([plan, plan])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (size_text(0), "0 B"),
        (size_text(1023), "1,023 B"),
        (size_text(1024), "1.00 KiB"),
        (size_text(-3 * 2**30), "-3.00 GiB"),
        (size_text(999.6 * 2**20), "0.98 GiB"),
        (size_text(4321 * 2**30), "4,321 GiB"),
        (time_text(0.0), "0.000 ms"),
        (time_text(2e-5), "0.020 ms"),
        (time_text(0.0137), "13.7 ms"),
        (time_text(2.5), "2.50 s"),
        (count_text(0), "0"),
        (count_text(999), "999"),
        (count_text(1.25e12), "1.25 T"),
        (count_text(48_002_086), "48.0 M"),
        (rate_text(160_938.4), "161,000"),
        (rate_text(3.14159), "3.14"),
        (share_text(1, 12), "8.3%"),
        (share_text(0, 5), "0%"),
        (share_text(1, 9999), "<0.1%"),
        (share_text(5, 0), "-"),
    ],
)
def test_numbers_have_three_digits(text: str, expected: str) -> None:
    assert text == expected


if __name__ == "__main__":
    GOLDEN.write_text(golden_text(), encoding="utf-8")
