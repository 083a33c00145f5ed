"""Rows of a verify step: the packing cases, and the way back from slots to rows.

Separate because packing knows no probabilities.
Read next: `test_draft_schedule.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from deepinfer_jax.config import NOTHING
from deepinfer_jax.spec_decode.pack import pack_rows

CASES = json.loads((Path(__file__).parents[1] / "golden" / "dspark_scheduler_cases.json").read_text())

pack = jax.jit(pack_rows, static_argnames="num_rows")


@pytest.mark.parametrize("case", CASES["packing_cases"], ids=lambda case: case["id"])
def test_rows_stand_by_slot_and_offset_with_padding_at_the_end(case: dict[str, Any]) -> None:
    lengths, is_active = np.array(case["lengths"], np.int32), np.array(case["active"], bool)
    packed = pack(lengths, is_active, num_rows=case["bucket"])
    slots, offsets = np.asarray(packed.slots), np.asarray(packed.offsets)
    assert slots.tolist() == case["expect"]["slot"]
    assert offsets.tolist() == case["expect"]["block_offset"]
    assert (slots != NOTHING).sum() == case["expect"]["rows"]
    for slot in np.flatnonzero(is_active):
        rows = packed.first_rows[slot] + np.arange(lengths[slot] + 1)
        assert (slots[rows] == slot).all()
        assert offsets[rows].tolist() == list(range(lengths[slot] + 1))


def test_full_budget_and_idle_slots_stay_in_range() -> None:
    packed = pack(np.array([1, 5, 1, 5], np.int32), np.array([True, False, True, False]), num_rows=4)
    assert np.asarray(packed.slots).tolist() == [0, 0, 2, 2]
    assert np.asarray(packed.first_rows)[[0, 2]].tolist() == [0, 2]
    assert (np.asarray(packed.first_rows) < 4).all()


def test_step_without_requests_is_all_padding() -> None:
    packed = pack(np.array([2, 2], np.int32), np.zeros(2, bool), num_rows=4)
    assert np.asarray(packed.slots).tolist() == [NOTHING] * 4
    assert not np.asarray(packed.offsets).any()
