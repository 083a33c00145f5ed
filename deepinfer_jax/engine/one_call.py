"""Generate in one call, with an engine of the right size that is gone afterwards.

Separate from `llm.py`, whose engine stays: here the prompts are known, and sizes follow from them.
Read next: `llm.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import overload

from ..engine_config import EngineConfig, fitted
from ..sampling_params import SamplingParams, check_request
from .completion import Completion, Completions
from .generate import params_of_each
from .llm import LLM
from .load import Model, Prompt, load
from .target import num_slot_shares


@overload
def generate(
    prompts: str, params: SamplingParams = ..., model: Model | None = ..., options: EngineConfig = ...
) -> Completion: ...
@overload
def generate(
    prompts: list[Prompt] | list[str] | list[list[int]],
    params: SamplingParams | Sequence[SamplingParams] = ...,
    model: Model | None = ...,
    options: EngineConfig = ...,
) -> Completions: ...
def generate(
    prompts: str | list[Prompt] | list[str] | list[list[int]],
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 (frozen)
    model: Model | None = None,
    options: EngineConfig = EngineConfig(),  # noqa: B008 (frozen)
) -> Completion | Completions:
    """Generate with an engine of the size of these prompts, which is gone afterwards.

    Args:
        prompts: a text, or a list whose entries are texts or lists of token ids.
        params: for all prompts, or one for each.
        model: from `load`; the embedded nano model by default.
        options: how to run them; sizes that are left open fit these prompts.

    Returns:
        As `LLM.generate`.

    Raises:
        RequestError: a prompt or parameter that is refused, before any is run.
        InvalidOutputError: a prompt whose logits are no distribution; the others' results are in it.
    """
    model = _default_model() if model is None else model
    many = [prompts] if isinstance(prompts, str) else list(prompts)
    each = params_of_each(params, len(many))
    ids = [model.encode(prompt) for prompt in many]
    sizes = size_for(options, ids, each, model)
    if not many:
        return Completions()
    with LLM(model, options=sizes) as llm:
        completions = llm.generate(ids, each)
    return completions[0] if isinstance(prompts, str) and len(completions) == 1 else completions


@cache
def _default_model() -> Model:
    return load()


def size_for(
    options: EngineConfig, prompts: Sequence[list[int]], each: Sequence[SamplingParams], model: Model
) -> EngineConfig:
    """Check prompts, and fill sizes that are left open in with the smallest that fit them.

    Args:
        options: as the user gave them.
        prompts: token ids of each.
        each: parameters of each.
        model: what will run them.

    Returns:
        The options with all sizes.

    Raises:
        RequestError: a prompt or parameter that is refused, by number.
    """
    num_tokens = []
    for number, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
        check_request(prompt, one, model.config, f"prompt {number}")
        num_tokens += [len(prompt) + one.max_tokens] * one.n
    return fitted(options, num_tokens, model.config, num_slot_shares(model.target))
