"""Which steps leave drafts out altogether, because it did not pay before. Plain Python.

Separate from `budgets.py`, which finds that no draft pays: a step that may draft costs a little more than
one that cannot, so the host gives the devices plain steps for a while, and then one that drafts, to see.
Draft stages read a window of tokens, so the first steps of a long rest need not leave them anything.
Read next: `budgets.py`, `../engine/drafting.py` (who asks).
"""

from __future__ import annotations

from ..config import NOTHING
from ..plans import BARE_STEP, PLAIN_STEP, PROBE

NO_DRAFT = 0
"""The devices' choice to draft nothing, as in `budgets.py`, which imports JAX; a test compares them."""

FIRST_REST, LONGEST_REST = 32, 512
"""Plain steps after a step in which no draft paid, longer each time that this is found again."""

LENGTHENING = 4
"""Times that a rest is longer than the one before: a probe costs as much as two or three plain steps."""

FEWER = 0.75
"""Share of the sequences below which a rest ends early: with fewer rows drafts pay sooner."""


class Rest:
    """Chooses between plain steps, steps that must draft, and steps in which the devices choose.

    Args:
        window: tokens before a draft that its stages read.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._length, self._left, self._num_active = FIRST_REST, 0, 0
        self._is_probing = False

    def next(self, num_active: int) -> int:
        """Say what the next step is.

        Args:
            num_active: sequences that run their latest token in it.

        Returns:
            `BARE_STEP`, `PLAIN_STEP`, `PROBE`, or NOTHING where the devices choose.
        """
        if not self._left:
            return NOTHING
        self._left -= 1
        if num_active < FEWER * self._num_active:
            # Not before the window is full again, if some of it was left out.
            self._left = min(self._left, self._window) if self._length > self._window else 0
        if self._left:
            return BARE_STEP if self._left > self._window else PLAIN_STEP
        self._is_probing = True
        return PROBE

    def note(self, told: int, choice: int, num_active: int) -> None:
        """Learn what the devices chose in a step that has been read.

        Args:
            told: what they were told, from `next`.
            choice: theirs.
            num_active: sequences that took part.
        """
        if told != NOTHING or self._left:
            return
        if choice != NO_DRAFT:
            self._length, self._is_probing = FIRST_REST, False
            return
        if self._is_probing:
            self._length = min(LENGTHENING * self._length, LONGEST_REST)
        self._left, self._num_active, self._is_probing = self._length, num_active, False
