"""Loading a folder: numerics, formats, and what is refused.

Separate because nothing is generated here.
Read next: `test_target.py`, loading onto a mesh.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from deepinfer_jax import LLM, EngineConfig, RequestError, load
from deepinfer_jax.model.numerics import FLOAT32, Numerics

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("name", ["tiny_bf16", "tiny_fp8fp4"])
def test_loading_a_folder(name: str) -> None:
    model = load(GOLDEN / name, "float32")
    assert model.tokenizer is None
    assert model.config.is_quantized == (name == "tiny_fp8fp4")
    assert isinstance(model.numerics, Numerics)
    assert model.numerics.batch_invariant
    assert model.weights.embed.shape == (model.config.vocab_size, model.config.hidden_size)


@pytest.mark.parametrize("changes", [{"batch_invariant": False}, {"cache_format": "fp8"}])
def test_loading_with_other_numerics(changes: dict[str, Any]) -> None:
    assert load(GOLDEN / "tiny_bf16", "float32", **changes).numerics == replace(FLOAT32, **changes)


def test_closing_gives_back_what_was_loaded() -> None:
    def live() -> int:
        return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())

    before = live()
    with LLM(GOLDEN / "tiny_bf16", numerics="float32", options=EngineConfig(num_slots=1)) as llm:
        memory = llm.memory
        assert memory["weights"] > 0 and memory["state"] > 0
        assert live() >= before + sum(memory.values())
    assert live() == before


def test_an_unknown_cache_format_is_refused() -> None:
    with pytest.raises(ValueError, match="cache_format: got 'int8', expected one of"):
        load(GOLDEN / "tiny_bf16", cache_format="int8")


def test_unknown_numerics_are_refused_before_the_folder_is_read() -> None:
    with pytest.raises(RequestError, match=r"numerics: got 'float16', expected one of \['float32', 'offi"):
        load("nowhere", "float16")
