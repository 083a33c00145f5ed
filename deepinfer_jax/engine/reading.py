"""What a step gave, noted on the requests it belongs to.

Separate from `engine.py` because nothing here acts: it reads arrays of a step. No JAX.
Read next: `engine.py`.
"""

from __future__ import annotations

import numpy as np

from .request import INVALID_REASON, LENGTH_REASON, STOP_REASON, Request, TokenLogprobs

STOPPED, LENGTH = 1, 2
"""Finish reasons of the devices, as in `sampling.state`, which imports JAX; a test compares them."""


def read_tokens(request: Request, slot: int, output) -> str | None:
    """Note the tokens that a slot gave its request.

    Args:
        request: whom the slot belonged to.
        slot: which slot.
        output: of the step, as NumPy arrays.

    Returns:
        The reason why the request is over now, None if it goes on.
    """
    tokens = output.tokens[slot, : output.num_tokens[slot]].tolist()
    finish = int(output.finish[slot]) if tokens else None
    if finish == STOPPED:
        request.stop_token = tokens.pop()
    request.token_ids += tokens
    if request.params.logprobs is not None:
        request.logprobs += [
            _logprobs(output, (slot, place), request.params.logprobs) for place in range(len(tokens))
        ]
    if finish == STOPPED or finish == LENGTH:
        return STOP_REASON if finish == STOPPED else LENGTH_REASON
    return INVALID_REASON if output.is_invalid[slot] else None


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


def _logprobs(arrays, row: int | tuple[int, int], count: int) -> TokenLogprobs:
    ids, values = arrays.top_ids[row][:count].tolist(), arrays.top_logprobs[row][:count].tolist()
    return TokenLogprobs(float(np.asarray(arrays.logprobs)[row]), dict(zip(ids, values, strict=True)))
