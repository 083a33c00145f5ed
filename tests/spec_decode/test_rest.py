"""Steps without drafts: begun by a choice, ended by a probe, longer each time it finds the same.

Separate because it is a small machine of its own, without devices.
"""

from __future__ import annotations

from deepinfer_jax.config import NOTHING
from deepinfer_jax.plans import BARE_STEP, PLAIN_STEP, PROBE
from deepinfer_jax.spec_decode import budgets, rest
from deepinfer_jax.spec_decode.rest import FIRST_REST, LONGEST_REST, NO_DRAFT, Rest

DRAFTS = 3
WINDOW = 24


def length_of_rest(machine: Rest, num_active: int = 8) -> int:
    """Count plain steps up to the probe."""
    count = 0
    while (told := machine.next(num_active)) in (PLAIN_STEP, BARE_STEP):
        machine.note(told, NO_DRAFT, num_active)
        count += 1
    assert told == PROBE
    machine.note(PROBE, DRAFTS, num_active)
    return count


def test_devices_choose_until_no_draft_pays() -> None:
    machine = Rest(LONGEST_REST)
    for _ in range(5):
        assert machine.next(8) == NOTHING
        machine.note(NOTHING, DRAFTS, 8)
    machine.note(NOTHING, NO_DRAFT, 8)
    assert length_of_rest(machine) == FIRST_REST - 1
    assert machine.next(8) == NOTHING


def test_rests_lengthen_while_probes_find_the_same_and_begin_anew_after_drafts() -> None:
    machine, lengths = Rest(LONGEST_REST), []
    for _ in range(7):
        assert machine.next(8) == NOTHING
        machine.note(NOTHING, NO_DRAFT, 8)
        lengths.append(1 + length_of_rest(machine))
    assert lengths == [32, 128, 512, 512, 512, 512, 512] and lengths[-1] == LONGEST_REST
    machine.note(NOTHING, DRAFTS, 8)
    machine.note(NOTHING, NO_DRAFT, 8)
    assert 1 + length_of_rest(machine) == FIRST_REST


def test_a_step_that_was_on_its_way_does_not_count_twice() -> None:
    """With overlap one more step has been given to the devices when the choice of one is read."""
    machine = Rest(LONGEST_REST)
    machine.note(NOTHING, NO_DRAFT, 8)
    assert machine.next(8) == PLAIN_STEP
    machine.note(NOTHING, NO_DRAFT, 8)
    assert length_of_rest(machine) == FIRST_REST - 2


def test_a_rest_ends_early_when_many_sequences_have_ended() -> None:
    machine = Rest(LONGEST_REST)
    machine.note(NOTHING, NO_DRAFT, 16)
    assert machine.next(12) == PLAIN_STEP
    assert machine.next(11) == PROBE
    assert machine.next(11) == NOTHING


def test_only_the_last_window_of_a_rest_leaves_rows_for_drafts() -> None:
    machine = Rest(WINDOW)
    for length in (32, 128, 512):
        machine.note(NOTHING, NO_DRAFT, 8)
        told = [machine.next(8) for _ in range(length)]
        assert told == [BARE_STEP] * (length - 1 - WINDOW) + [PLAIN_STEP] * WINDOW + [PROBE]


def test_a_rest_that_ends_early_fills_the_window_first_if_some_is_missing() -> None:
    machine = Rest(WINDOW)
    machine.note(NOTHING, NO_DRAFT, 16)
    assert [machine.next(16) for _ in range(3)] == [BARE_STEP] * 3
    assert [machine.next(4) for _ in range(WINDOW + 1)] == [PLAIN_STEP] * WINDOW + [PROBE]


def test_the_choice_without_drafts_has_one_number() -> None:
    assert rest.NO_DRAFT == budgets.NO_DRAFT
