"""What a step gave, noted on the requests it belongs to.

Separate from `engine.py` because nothing here acts: it reads arrays of a step. No JAX.
Read next: `engine.py`.
"""

from __future__ import annotations

import numpy as np

from .request import INVALID_REASON, LENGTH_REASON, STOP_REASON, Request, TokenLogprobs

STOPPED, LENGTH = 1, 2
"""Finish reasons of the devices, as in `sampling.state`, which imports JAX; a test compares them."""


def read_token(request: Request, slot: int, output) -> str | None:
    """Note the token that a slot sampled for its request.

    Args:
        request: whom the slot belonged to.
        slot: which slot.
        output: of the step, as NumPy arrays.

    Returns:
        The reason why the request is over now, None if it goes on.
    """
    if output.is_invalid[slot]:
        return INVALID_REASON
    token, finish = int(output.tokens[slot]), int(output.finish[slot])
    if finish == STOPPED:
        request.stop_token = token
        return STOP_REASON
    request.token_ids.append(token)
    if request.params.logprobs is not None:
        request.logprobs.append(_logprobs(output, slot, request.params.logprobs))
    return LENGTH_REASON if finish == LENGTH else None


def read_prompt_logprobs(request: Request, start: int, count: int, first_row: int, prompt) -> None:
    """Note the log-probabilities of prompt tokens.

    Args:
        request: whose prompt.
        start: position of the first of its rows.
        count: how many rows.
        first_row: place of that row in the step.
        prompt: log-probabilities after all rows of the step, as NumPy arrays.
    """
    wanted = request.params.prompt_logprobs or 0
    for position in range(start, min(start + count, len(request.prompt) - 1)):
        # A prompt that is computed again gives the same once more.
        if position == len(request.prompt_logprobs):
            request.prompt_logprobs.append(_logprobs(prompt, first_row + position - start, wanted))


def _logprobs(arrays, row: int, count: int) -> TokenLogprobs:
    ids, values = arrays.top_ids[row, :count].tolist(), arrays.top_logprobs[row, :count].tolist()
    return TokenLogprobs(float(np.asarray(arrays.logprobs)[row]), dict(zip(ids, values, strict=True)))
