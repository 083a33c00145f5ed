"""An engine on a mesh: reuse, samples, hand-over and closing, with the tokens of one device.

Separate from `test_layouts.py`, which compares layouts: here sequences move, between slots and snapshots of
one share, and between a mesh and one device.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import pytest

from deepinfer_jax import LLM, Completion, EngineConfig, Model, SamplingParams
from deepinfer_jax.engine.target import make_target, put_on
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.testing.presets import DIVISIBLE, random_weights, shared_prefix_prompts

PROMPTS = shared_prefix_prompts((129, 130, 260, 7), DIVISIBLE.vocab_size)
PARAMS = SamplingParams(max_tokens=5, seed=3, repetition_penalty=1.3, ignore_eos=True, logprobs=2)
OPTIONS: dict[str, Any] = {"max_context": 512, "max_rows": 64}


@cache
def model_on(mesh: str | None, layout: str | None = None) -> Model:
    target = make_target(DIVISIBLE, mesh, layout)
    weights = put_on(random_weights(DIVISIBLE, jax.random.key(8)), DIVISIBLE, target)
    return Model(DIVISIBLE, weights, FLOAT32, None, target)


def one_device() -> LLM:
    return LLM(model_on(None), options=EngineConfig(num_slots=8, **OPTIONS))


@cache
def expected() -> list[Completion]:
    with LLM(model_on(None), options=EngineConfig(num_slots=8, prefix_cache=False, **OPTIONS)) as llm:
        return [llm.generate([prompt], PARAMS)[0] for prompt in PROMPTS]


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "layout"), [("2x4", "data+expert"), ("8", "sequence")])
def test_sequences_move_within_a_mesh_and_out_of_it(mesh: str, layout: str) -> None:
    slots = 1 if layout == "data+expert" else 8
    with (
        LLM(model_on(mesh, layout), options=EngineConfig(num_slots=slots, **OPTIONS)) as llm,
        one_device() as one,
    ):
        assert list(llm.generate(PROMPTS, PARAMS)) == expected()
        # Each prompt is on one share only, and the second time it is found there.
        again = [llm.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
        assert again == expected()
        assert [completion.timing.num_cached for completion in again] == [128, 128, 256, 0]
        samples = SamplingParams(max_tokens=4, seed=7, n=3, logprobs=2)
        assert llm.generate([PROMPTS[2]], samples) == one.generate([PROMPTS[2]], samples)
        reported = replace(PARAMS, prompt_logprobs=2)
        assert llm.generate([PROMPTS[2]], reported) == one.generate([PROMPTS[2]], reported)
        # From the mesh to one device, and back.
        assert list(one.resume(llm.prefill(PROMPTS, PARAMS))) == expected()
        assert list(llm.resume(one.prefill(PROMPTS, PARAMS))) == expected()
    assert llm.memory["state"] == 0
