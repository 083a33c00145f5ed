"""A model that drafts, as a user runs it: the same text, from one engine to another, in one call.

Separate from `test_drafts.py`, which compares engines in every corner: here the way to drafts is the matter,
from a folder or a model to the completions.
Read next: `test_start.py`, `test_equivalences.py` (the same hand-over without drafts).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from deepinfer_jax import LLM, EngineConfig, HandoffError, Model, SamplingParams, generate, measure_costs
from deepinfer_jax.engine.handoff import PrefilledRequest
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.plans import DRAFT_MODES
from deepinfer_jax.spec_decode.guard import Guard
from deepinfer_jax.testing.presets import SMALLEST_DRAFTED, random_weights

SIZES: dict[str, Any] = {"num_slots": 8, "max_context": 512}
LIKELY = {token: 8.0 for token in (9, 33, 57)}
"""So that random weights guess right now and then."""

PROMPTS = [np.random.default_rng(seed).integers(3, 120, 4 + 67 * seed).tolist() for seed in range(5)]
PARAMS = [
    SamplingParams(
        max_tokens=40,
        seed=seed,
        temperature=float(seed % 2),
        repetition_penalty=1.1,
        logit_bias=LIKELY,
        ignore_eos=True,
        logprobs=2,
    )
    for seed in range(5)
]


@pytest.fixture(autouse=True)
def kept_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep tables in a folder of each test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@cache
def model() -> Model:
    return Model(SMALLEST_DRAFTED, random_weights(SMALLEST_DRAFTED, jax.random.key(4)), FLOAT32, None)


@cache
def plain() -> list[Any]:
    with LLM(model(), options=EngineConfig(**SIZES)) as llm:
        return list(llm.generate(PROMPTS, PARAMS))


def drafting_llm(drafts: str, **options: Any) -> LLM:
    """Make an engine that knows its step times, however much they vary here."""
    sizes = EngineConfig(**SIZES, drafts=drafts, **options)
    measure_costs(model(), sizes, steps=1, keep=True)
    llm = LLM(model(), options=sizes)
    assert llm.engine.drafting is not None
    llm.engine.drafting.guard = Guard(max_error=1e9)
    return llm


@pytest.mark.parametrize("drafts", DRAFT_MODES[1:])
def test_completions_are_those_without_drafts(drafts: str) -> None:
    with drafting_llm(drafts) as llm:
        assert list(llm.generate(PROMPTS, PARAMS)) == plain()
        assert llm.stats.draft.accepted > 0
        assert "tokens a round (tau)" in repr(llm)
        assert "rows verified" in llm._repr_html_()


def test_one_call_drafts_as_well() -> None:
    options = EngineConfig(**SIZES, drafts="dynamic")
    with pytest.warns(RuntimeWarning, match="no step times were measured for this engine"):
        found = generate(PROMPTS, PARAMS, model(), options)
    assert list(found) == plain()


def test_a_stream_with_drafts_joins_to_the_completion() -> None:
    with drafting_llm("fixed") as llm:
        events = list(llm.stream(PROMPTS[1], PARAMS[1]))
    assert [token for event in events for token in event.token_ids] == plain()[1].token_ids
    assert max(len(event.token_ids) for event in events) > 1


@pytest.mark.parametrize("others", ["fixed", "dynamic"])
def test_a_request_goes_on_in_another_engine_with_drafts(tmp_path: Path, others: str) -> None:
    with drafting_llm("dynamic") as prefilling, drafting_llm(others, overlap=0) as decoding:
        longer = replace(PARAMS[0], max_tokens=100)
        neighbour = decoding.submit([9, 8, 7], longer)
        decoding.step()
        paths = []
        for number, one in enumerate(prefilling.prefill(PROMPTS, PARAMS)):
            paths.append(tmp_path / f"{number}.safetensors")
            one.save(paths[-1])
        found = decoding.resume([PrefilledRequest.load(path) for path in paths])
        assert list(found) == plain()
        assert decoding.stats.draft.accepted > 0
        while not neighbour.is_done:
            decoding.step()
        # The neighbour did not notice.
        assert neighbour.completions[0] == prefilling.generate([[9, 8, 7]], longer)[0]


def test_an_engine_without_drafts_takes_no_request_of_one_with_them() -> None:
    with drafting_llm("fixed") as llm:
        prefilled = llm.prefill(PROMPTS[:1], PARAMS[:1])
    with LLM(model(), options=EngineConfig(**SIZES)) as other:
        with pytest.raises(HandoffError, match=r"window_slack: got 15, expected 0|draft_layers: got 2"):
            other.resume(prefilled)
        assert not other.has_work
