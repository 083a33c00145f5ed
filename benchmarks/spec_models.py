"""Models for the benchmark of drafts: the embedded one, and a cut of released widths with forced acceptance.

Separate from `spec.py`, which times steps of any model. The cut model's weights are random, so its drafts
would never be accepted: acceptance is drawn from a published curve, while draft and target really run.
Read next: `spec.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import load, speculate
from deepinfer_jax.arrays import Array
from deepinfer_jax.config import DraftConfig, ModelConfig
from deepinfer_jax.engine.load import use_compilation_cache
from deepinfer_jax.engine.platform import suited
from deepinfer_jax.model.cache import Cache
from deepinfer_jax.model.numerics import FLOAT32, OFFICIAL, Numerics
from deepinfer_jax.model.weights import Weights
from deepinfer_jax.sampling.randomness import ACCEPT_DRAFT, uniform
from deepinfer_jax.spec_decode.calibration import Calibration
from deepinfer_jax.spec_decode.draft import Anchors, Drafts, draft_tokens
from deepinfer_jax.spec_decode.schedule import full_lengths, leading_count
from deepinfer_jax.spec_decode.verify_pass import Verdict, verify_drafts
from deepinfer_jax.testing.presets import (
    SMALLEST_DRAFTED,
    random_resident_weights,
    random_weights,
    released_cut,
)

PUBLIC_CURVE = (1.88, 2.62, 3.27, 3.73, 4.07)
"""Tokens of a round by verified drafts 1..5, the target's own included (spec/dspark.md section 8.4)."""

REAL, SYNTHETIC = "real", "synthetic"
"""Whether drafts were accepted by what they are, or by draws from `PUBLIC_CURVE`."""

PROMPT_TOKENS = 12

OPENINGS = (
    "Once upon a time there was a little girl who lived with her mother in the wood",
    "The old king called his three sons to him and said to them that he would",
    "There was once a poor miller who had nothing in the world but his mill and",
    "In the garden behind the castle there stood a tree that bore golden apples, and",
    "A ship came over the sea one morning, and on the ship there was a man",
    "At night, when everyone in the house was asleep, the door was opened and the",
    "She went to the window and looked out, and there she saw the snow on the",
    "He said to the wolf that he would not go with him into the wood, for",
)
"""Prompts of the embedded model; after them the text is its own."""


@dataclass(frozen=True, slots=True)
class SpecModel:
    """A model whose steps are timed.

    Attributes:
        name: in the results.
        config: the architecture, with draft stages.
        weights: draft stages included.
        numerics: the choice of arithmetic.
        prompts: token ids, `PROMPT_TOKENS` of each.
        calibration: of the draft's confidences, None to leave them as they are.
        acceptance: `REAL` or `SYNTHETIC`.
        forbidden_ids: tokens that no request may get.
    """

    name: str
    config: ModelConfig
    weights: Weights
    numerics: Numerics
    prompts: list[list[int]]
    calibration: Calibration | None
    acceptance: str
    forbidden_ids: list[int]


def released_draft_cut() -> ModelConfig:
    """Give the cut of four released layers with three draft stages of released sizes."""
    config = released_cut()
    draft = DraftConfig(
        num_stages=3,
        block_size=5,
        noise_token_id=128799,
        target_layer_ids=(2, 3),
        markov_rank=256,
        n_routed_experts=128,
        num_experts_per_tok=3,
    )
    return replace(config, compress_ratios=(*config.compress_ratios, 0, 0, 0), draft=draft)


def make_model(name: str, is_forced: bool) -> SpecModel:
    """Load or draw a model.

    Args:
        name: "nano", "cut" or "smallest".
        is_forced: whether acceptance is drawn from the curve; always so for "cut".

    Returns:
        The model, its weights on the device.

    Raises:
        SystemExit: the embedded model has no draft stages.
    """
    acceptance = SYNTHETIC if is_forced or name == "cut" else REAL
    if name == "nano":
        model = load()
        if not model.config.draft.num_stages:
            raise SystemExit("--model nano: got a checkpoint without draft stages, expected `mtp.*` tensors")
        assert model.tokenizer is not None
        prompts = [model.encode(text)[:PROMPT_TOKENS] for text in OPENINGS]
        calibration = model.calibration if acceptance == REAL else None
        parts = (model.config, model.weights, model.numerics, prompts, calibration)
        return SpecModel(name, *parts, acceptance, model.forbidden_ids)
    use_compilation_cache()
    if name == "cut":
        config, numerics = released_draft_cut(), suited(OFFICIAL, jax.devices()[0].platform)
        draw = jax.jit(lambda key: random_resident_weights(config, key))
        weights = jax.block_until_ready(draw(jax.random.key(0)))
    else:
        config, numerics = SMALLEST_DRAFTED, FLOAT32
        weights = random_weights(config, jax.random.key(4))
    random = np.random.default_rng(0)
    drawn = random.integers(3, config.vocab_size * 3 // 4, (len(OPENINGS), PROMPT_TOKENS))
    return SpecModel(name, config, weights, numerics, drawn.tolist(), None, acceptance, [])


def conditional_chances(curve: Sequence[float]) -> tuple[float, ...]:
    """Give the chance of each draft to be accepted if all before it were.

    Args:
        curve: tokens of a round by verified drafts 1..K, the target's own included.

    Returns:
        K chances: the curve's step at k over its step at k - 1.
    """
    survivals = np.diff([1.0, *curve])
    return tuple((survivals / np.append(1.0, survivals[:-1])).tolist())


@contextmanager
def forced_acceptance(chances: Sequence[float]) -> Iterator[None]:
    """Make steps that are traced meanwhile accept drafts by draws instead of by their tokens.

    All of a step's work is done: drafts are made and verified rows run. Of their results, confidences are
    replaced by the chances themselves, and the number of accepted drafts by independent draws, a function
    of seed and position. Confidences so know a draft's place but nothing of its request.

    Args:
        chances: of each draft of a block, if all before it were accepted.
    """
    logits = np.log(np.asarray(chances) / (1 - np.asarray(chances))).astype(np.float32)

    def drafted(*arguments: Any, **options: Any) -> Drafts:
        drafts = draft_tokens(*arguments, **options)
        forced = jnp.broadcast_to(jnp.asarray(logits), drafts.confidences.shape)
        # Without the barrier the head that is replaced would not run.
        _, forced = jax.lax.optimization_barrier((drafts.confidences, forced))
        return drafts._replace(confidences=forced)

    def verified(cache: Cache, **options: Any) -> tuple[Cache, Verdict]:
        cache, verdict = verify_drafts(cache, **options)
        lengths = full_lengths(options["lengths"], options["anchors"].is_active)
        count = drawn_lengths(options["anchors"], options["sampler"].seeds, lengths, chances)
        _, num_tokens = jax.lax.optimization_barrier((verdict.num_tokens, 1 + count))
        return cache, verdict.replace(num_tokens=num_tokens)

    # Neither may a program from before serve meanwhile, nor one from meanwhile afterwards.
    jax.clear_caches()
    try:
        with mock.patch.object(speculate, "draft_tokens", drafted):
            with mock.patch.object(speculate, "verify_drafts", verified):
                yield
    finally:
        jax.clear_caches()


def drawn_lengths(anchors: Anchors, seeds: Array, lengths: Array, chances: Sequence[float]) -> Array:
    """Draw how many of the verified drafts are accepted.

    Args:
        anchors: of B slots.
        seeds: uint32 [B, 2].
        lengths: int32 [B], verified drafts.
        chances: K, of each draft if all before it were accepted.

    Returns:
        int32 [B].
    """
    draws = [
        uniform(seeds, anchors.positions + place, ACCEPT_DRAFT) < chance
        for place, chance in enumerate(chances, start=1)
    ]
    return jnp.minimum(leading_count(jnp.stack(draws, axis=1)), lengths)
