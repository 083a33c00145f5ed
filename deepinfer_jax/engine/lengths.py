"""How long a running sequence is while steps whose tokens nobody has read are on their way.

Separate because a step with drafts gives one token or several, so the host knows bounds where it used to
know a length, and every decision about pages and stored windows rests on them. No JAX.

While a request generates, `num_computed` is the length of its cache if each unread step gave one token:
a lower bound. Each of them may have given `num_drafts` more.
Read next: `scheduler.py`, which asks before each step; `engine.py`, which tells what a step gave.
"""

from __future__ import annotations

from ..config import NOTHING, PAGE_TOKENS
from .request import Request


def accept(request: Request, num_tokens: int, is_last: bool) -> None:
    """Note how many tokens an unread step gave to a request.

    Args:
        request: as it was before; the tokens themselves are noted elsewhere.
        num_tokens: that the step gave, 0 or more.
        is_last: whether the devices ended the request with them.
    """
    request.in_flight -= 1
    if request.slot == NOTHING:
        return
    request.num_computed += max(num_tokens - 1, 0)
    if is_last:
        # Steps that the devices were given after the last token found nothing to run.
        request.num_computed -= request.in_flight


def positions_to_own(request: Request, num_drafts: int) -> int:
    """Count the positions that must have pages before a request's next step, from the first on.

    n = num_computed, d = steps with drafts that nobody has read, k = num_drafts: the step's first row is at
    n + k d at most, its last one k positions later. No row is at the request's last token or after it.

    Args:
        request: one that generates.
        num_drafts: that a step may verify, 0 or more.

    Returns:
        Positions, at least that of the next row.
    """
    highest = request.num_computed + num_drafts * _num_unread(request) + 1 + num_drafts
    most = len(request.prompt) + request.params.max_tokens - 1
    return max(min(highest, most), request.num_computed + 1)


def boundary_to_save(request: Request, num_drafts: int, slack: int) -> int | None:
    """Give the page boundary whose window state a request's slot still holds, if it is new.

    A ring of `window + slack` rows, each at its position modulo the ring, has the window before a boundary
    as long as no row was written `slack` positions after it or later, accepted or not.

    Args:
        request: one that generates.
        num_drafts: that a step may verify, 0 or more.
        slack: rows of a ring beyond the window.

    Returns:
        The boundary, a multiple of `PAGE_TOKENS`; None if there is nothing to save.
    """
    known = min(request.num_computed, request.num_known)
    boundary = known // PAGE_TOKENS * PAGE_TOKENS
    is_new = boundary > request.num_saved
    return boundary if is_new and _num_written(request, num_drafts) - boundary <= slack else None


def _num_unread(request: Request) -> int:
    """Count the unread steps that ran the latest token, at most: the one that ended the prompt did not."""
    return request.in_flight if request.num_computed > request.target_length else 0


def _num_written(request: Request, num_drafts: int) -> int:
    """Count the positions up to the last row that any step may have written, at most."""
    # Where all steps are read, rows that the latest one rejected still lie after the length.
    return request.num_computed + num_drafts * max(_num_unread(request), 1)
