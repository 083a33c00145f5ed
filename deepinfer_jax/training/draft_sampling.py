"""The target writes answers by itself, many at once, in one compiled scan.

Separate from the engine because nothing here waits for a request: a slot whose answer has ended goes on
with the next prompt in the next step, and prompts run token by token like answers, so that one shape
serves all.
Read next: `draft_data.py` (what becomes of the tokens), `../model/backbone.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from ..arrays import Array
from ..config import CacheConfig, ModelConfig
from ..model.backbone import backbone, head_logits
from ..model.cache import Cache, empty_cache, with_own_pages
from ..model.numerics import OFFICIAL, Numerics
from ..model.rows import chunk_rows
from ..model.weights import Weights
from .draft_data import Prompts, answer_rows, next_samples_file, write_samples
from .packing import PackedRows

SAMPLING = replace(OFFICIAL, batch_invariant=False)
"""The released arithmetic, all rows of a step at once."""

_SAVE_EVERY = 8
"""Chunks between two writes of the samples so far."""


class WritingState(struct.PyTreeNode):
    """What B slots carry from step to step.

    Attributes:
        cache: of the model.
        tokens: int32 [B], the token to run next.
        positions: int32 [B], its position.
        prompt_ids: int32 [B], the prompt that the slot's sequence began with.
    """

    cache: Cache
    tokens: Array
    positions: Array
    prompt_ids: Array


class Written(NamedTuple):
    """What each slot ran in each step, int32 [steps, B]: token, its position, its prompt."""

    # JAX arrays inside a step, NumPy arrays once fetched.
    tokens: Any
    positions: Any
    prompt_ids: Any


def initial_writing(
    config: ModelConfig, prompts: Prompts, num_slots: int, max_tokens: int, numerics: Numerics = SAMPLING
) -> WritingState:
    """Give each slot a prompt of its own and an empty cache.

    Args:
        config: the architecture.
        prompts: used in turn, over and over.
        num_slots: B.
        max_tokens: most tokens of a sequence, prompt included.
        numerics: the choice of arithmetic.

    Returns:
        The state.
    """
    prompt_ids = np.arange(num_slots, dtype=np.int32) % len(prompts.lengths)
    sizes = CacheConfig.for_slots(num_slots, max_tokens)
    return WritingState(
        cache=with_own_pages(empty_cache(config, sizes, numerics)),
        tokens=jnp.asarray(prompts.tokens[prompt_ids, 0]),
        positions=jnp.zeros(num_slots, jnp.int32),
        prompt_ids=jnp.asarray(prompt_ids),
    )


@partial(
    jax.jit,
    static_argnames=("config", "num_steps", "max_tokens", "numerics"),
    donate_argnames=("state",),
)
def write_tokens(
    weights: Weights,
    state: WritingState,
    prompts: Prompts,
    key: Array,
    *,
    config: ModelConfig,
    num_steps: int,
    max_tokens: int,
    numerics: Numerics = SAMPLING,
) -> tuple[WritingState, Written]:
    """Run a number of steps: each slot runs a token and samples the next, or takes it from its prompt.

    A slot begins its next prompt after an end of sequence that it wrote, or at its last token. Its cache is
    not cleared: nothing before position 0 is read.

    Args:
        weights: the loaded trunk.
        state: of the slots. Consumed.
        prompts: arrays of the prompts.
        key: of this chunk's draws.
        config: the architecture.
        num_steps: steps of the scan.
        max_tokens: most tokens of a sequence, prompt included.
        numerics: the choice of arithmetic.

    Returns:
        The state and what ran.
    """
    table, lengths, temperatures = (jnp.asarray(part) for part in prompts)

    def step(state: WritingState, key: Array) -> tuple[WritingState, Written]:
        rows = chunk_rows(state.tokens[:, None], state.positions, jnp.ones_like(state.positions))
        hidden, _, cache = backbone(weights, config, rows, state.cache, numerics)
        logits = head_logits(hidden, weights, numerics)
        sampled = _sample(logits, temperatures[state.prompt_ids], key)
        length, following = lengths[state.prompt_ids], state.positions + 1
        given = table[state.prompt_ids, jnp.minimum(following, table.shape[1] - 1)]
        is_end = (state.positions >= length) & (state.tokens == config.eos_token_id)
        is_end |= following >= max_tokens
        new_ids = (state.prompt_ids + state.tokens.shape[0]) % lengths.shape[0]
        continued = jnp.where(following < length, given, sampled)
        new = WritingState(
            cache=cache,
            tokens=jnp.where(is_end, table[new_ids, 0], continued),
            positions=jnp.where(is_end, 0, following),
            prompt_ids=jnp.where(is_end, new_ids, state.prompt_ids),
        )
        return new, Written(state.tokens, state.positions, state.prompt_ids)

    return lax.scan(step, state, jax.random.split(key, num_steps))


def _sample(logits: Array, temperatures: Array, key: Array) -> Array:
    """Draw int32 [B] from logits [B, V] at float32 [B] temperatures, the best where these are 0."""
    is_greedy = (temperatures == 0)[:, None]
    noise = jax.random.gumbel(key, logits.shape, jnp.float32)
    scores = logits / jnp.where(is_greedy, 1.0, temperatures[:, None]) + jnp.where(is_greedy, 0.0, noise)
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


@dataclass(frozen=True, slots=True)
class SamplingRun:
    """Sizes of a sampling run.

    Args:
        num_slots: sequences at once.
        num_steps: steps in all.
        chunk_steps: steps of one call, after which time is checked.
        max_tokens: most tokens of a sequence, prompt included.
        seed: of the draws, together with the number of the run.
    """

    num_slots: int
    num_steps: int
    chunk_steps: int
    max_tokens: int
    seed: int


def sample_answers(
    run: SamplingRun,
    weights: Weights,
    config: ModelConfig,
    prompts: Prompts,
    folder: Path,
    pad_token_id: int,
    time_limit: float,
    log: Callable[[str], None],
) -> Path:
    """Let the target write until the steps or the time are used up, and save its sequences as they come.

    Args:
        run: the sizes.
        weights: the loaded trunk.
        config: the architecture.
        prompts: what to answer.
        folder: receives one file for the run, beside those of earlier runs.
        pad_token_id: id for gaps in rows.
        time_limit: seconds after which no chunk is begun.
        log: receives one line per report.

    Returns:
        The file.
    """
    started = time.monotonic()
    path, number = next_samples_file(folder)
    key = jax.random.fold_in(jax.random.key(run.seed), number)
    first = number * run.num_slots % len(prompts.lengths)
    prompts = Prompts(*(np.roll(part, -first, axis=0) for part in prompts))
    state = initial_writing(config, prompts, run.num_slots, run.max_tokens)
    on_device = Prompts(*(jnp.asarray(part) for part in prompts))
    parts: list[Written] = []
    num_chunks = -(-run.num_steps // run.chunk_steps)
    for chunk in range(num_chunks):
        began = time.monotonic()
        state, written = write_tokens(
            *(weights, state, on_device, jax.random.fold_in(key, chunk)),
            config=config, num_steps=run.chunk_steps, max_tokens=run.max_tokens,
        )  # fmt: skip
        parts.append(Written(*(np.asarray(part) for part in written)))
        now = time.monotonic()
        # The first chunk compiles, so it says nothing of the next.
        expected = now - began if chunk else 0.0
        is_last = chunk + 1 == num_chunks or now - started + expected > time_limit
        if (chunk + 1) % _SAVE_EVERY == 0:
            _save(path, parts, prompts, pad_token_id)
        log(
            f"chunk {chunk + 1} of {num_chunks}: {(now - began) / run.chunk_steps * 1000:.0f} ms a step"
            f"{', compiling included' if chunk == 0 else ''}, {now - started:.0f} s in all"
        )
        if is_last:
            break
    rows = _save(path, parts, prompts, pad_token_id)
    answers = int((rows.loss_codes > 0).sum())
    log(f"{len(rows)} rows with {answers} answer tokens, {time.monotonic() - started:.0f} s in all")
    return path


def _save(path: Path, parts: list[Written], prompts: Prompts, pad_token_id: int) -> PackedRows:
    """Write the sequences so far over those that the file has."""
    joined = Written(*(np.concatenate(pieces) for pieces in zip(*parts, strict=True)))
    rows = answer_rows(*joined, prompts, pad_token_id)
    write_samples(path, rows)
    return rows
