"""What the devices are told of requests that get a slot, as arrays of fixed shape.

Separate from `scheduler.py` because nothing here decides. No JAX.
Read next: `../plans.py` (`Admission`, `StepPlan`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..config import NOTHING
from ..plans import Admission, StepPlan
from ..slot_parameters import slot_parameters
from .request import Request


def admission_of(admitted: Sequence[Request], page_table: np.ndarray, eos_token_id: int) -> Admission:
    """Lay out what the devices must know of requests that got a slot.

    Args:
        admitted: the requests.
        page_table: int32 [B, pages of a slot].
        eos_token_id: the end of sequence.

    Returns:
        The arrays.
    """
    num_slots = len(page_table)
    params = {one.slot: one.params for one in admitted}
    parameters = [params.get(slot) for slot in range(num_slots)]
    admission = Admission(
        is_admitted=np.zeros(num_slots, bool),
        page_table=page_table.copy(),
        decoder_starts=np.zeros(num_slots, np.int32),
        lengths=np.zeros(num_slots, np.int32),
        tokens=np.zeros(num_slots, np.int32),
        is_running=np.zeros(num_slots, bool),
        prompt_lengths=np.zeros(num_slots, np.int32),
        num_generated=np.zeros(num_slots, np.int32),
        parameters=slot_parameters(parameters, eos_token_id),
    )
    for request in admitted:
        slot, is_imported = request.slot, request.sequence is not None
        admission.is_admitted[slot] = True
        admission.decoder_starts[slot] = request.decoder_start
        admission.lengths[slot] = request.num_reused
        admission.is_running[slot] = is_imported
        admission.tokens[slot] = request.token_ids[-1] if is_imported else 0
        admission.prompt_lengths[slot] = len(request.prompt)
        admission.num_generated[slot] = max(0, _num_noted(request) - len(request.prompt))
    return admission


def notes_of(admitted: Sequence[Request]) -> list[tuple[int, np.ndarray]]:
    """List the tokens that penalties must count although they will not come as rows: (slot, ids) each."""
    return [
        (request.slot, request.known_ids()[: _num_noted(request)])
        for request in admitted
        if _num_noted(request) and _has_penalty(request)
    ]


def moving_plans(page_table: np.ndarray, eos_token_id: int, has_snapshots: bool) -> list[StepPlan]:
    """Make plans that do all that moves and admits sequences, to nobody.

    Args:
        page_table: int32 [B, pages of a slot], which stays as it is.
        eos_token_id: the end of sequence.
        has_snapshots: whether there is a prefix cache.

    Returns:
        The plans.
    """
    nowhere = [(NOTHING, NOTHING)] if has_snapshots else []
    admit = StepPlan(
        saves_before=nowhere,
        restores=nowhere,
        admission=admission_of([], page_table, eos_token_id),
        notes=[(0, np.zeros(0, np.int32))],
    )
    return [admit, StepPlan(page_table=page_table.copy())]


def _num_noted(request: Request) -> int:
    """Count the tokens of a request that got a slot that will not come as rows."""
    return request.num_known if request.sequence is not None else request.num_reused


def _has_penalty(request: Request) -> bool:
    params = request.params
    penalties = (params.presence_penalty, params.frequency_penalty)
    return params.repetition_penalty != 1 or any(penalties)
