"""The exact law of what verification emits, by running its code on every draft and every uniform number.

Acceptance changes with a uniform number at thresholds only. They are measured by halving, with the code
itself; then the code runs in the middle of every cell between them, and cells count by their volume. No
formula of acceptance is written down here, so a wrong one cannot hide.
Separate because single requests and requests that compete for rows need the same enumeration.
Read next: `../spec_decode/verify.py`, which is judged by it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ..arrays import Array

type Accept = Callable[[Array, Array, Array, Array, Array], tuple[Array, Array]]
"""`accept_rejection`, `accept_block` or one like them: laws, drafts, lengths, uniforms to (m, law)."""

type Law = Callable[[tuple[int, ...]], Sequence[float]]
"""Probabilities of the next token after a prefix."""

HALVINGS = 30
"""Until two float32 numbers in [0, 1] that may part a threshold are neighbours, or nearly."""


@dataclass(frozen=True, slots=True)
class ToyLaws:
    """A target and a draft whose laws are tables small enough to enumerate.

    Args:
        target: law of the next token after a prefix.
        draft: the same of the draft.
        vocab_size: V.
        num_drafts: K.
    """

    target: Law
    draft: Law
    vocab_size: int
    num_drafts: int

    def paths(self) -> list[tuple[int, ...]]:
        """List every draft of K tokens, in order."""
        return list(itertools.product(range(self.vocab_size), repeat=self.num_drafts))

    def path_probabilities(self) -> NDArray[np.float64]:
        """Give the probability that each path is drafted: [paths]."""
        return np.array([probability(self.draft, path) for path in self.paths()])

    def rows(self) -> tuple[Array, Array, Array]:
        """Give what verification reads for each path: p [paths, K + 1, V], q [paths, K, V], drafts."""
        places = range(self.num_drafts)
        target = [
            [self.target(path[:place]) for place in (*places, self.num_drafts)] for path in self.paths()
        ]
        draft = [[self.draft(path[:place]) for place in places] for path in self.paths()]
        rows = jnp.asarray(target, jnp.float32), jnp.asarray(draft, jnp.float32)
        return *rows, jnp.asarray(self.paths(), jnp.int32)

    def target_outputs(self, horizon: int) -> NDArray[np.float64]:
        """Give the law of the first tokens under plain decoding: [V ** horizon]."""
        outputs = itertools.product(range(self.vocab_size), repeat=horizon)
        return np.array([probability(self.target, output) for output in outputs])


@dataclass(frozen=True, slots=True)
class Emission:
    """What each drafted path leads to.

    Args:
        outputs: float64 [paths, V ** horizon], law of the first tokens; what verification does not
            emit is decoded plainly.
        num_accepted: float64 [paths], expected accepted drafts.
    """

    outputs: NDArray[np.float64]
    num_accepted: NDArray[np.float64]


def probability(law: Law, tokens: tuple[int, ...]) -> float:
    """Give the probability of a sequence of tokens."""
    return float(np.prod([law(tokens[:place])[token] for place, token in enumerate(tokens)]))


def emission(accept: Accept, laws: ToyLaws, lengths: Sequence[int], horizon: int) -> Emission:
    """Run verification on every drafted path and integrate over its uniform numbers.

    Args:
        accept: the code under test.
        laws: target and draft.
        lengths: verified drafts of each path.
        horizon: tokens of the output that are told apart.

    Returns:
        The law of the output of each path.
    """
    run = jax.jit(accept)
    rows = (*laws.rows(), jnp.asarray(lengths, jnp.int32))
    thresholds = accept_thresholds(run, *rows)
    sides = np.array(list(itertools.product((False, True), repeat=laws.num_drafts)))
    # [cells, paths, K]: below the threshold, in the middle, or above it.
    middles = np.where(sides[:, None], (thresholds + 1) / 2, thresholds / 2)
    volumes = np.where(sides[:, None], 1 - thresholds, thresholds).prod(axis=-1)
    outputs = np.zeros((len(volumes[0]), laws.vocab_size**horizon))
    num_accepted = np.zeros(len(volumes[0]))
    for uniforms, volume in zip(middles.astype(np.float32), volumes, strict=True):
        accepted, final = (np.asarray(part) for part in run(*rows, jnp.asarray(uniforms)))
        num_accepted += volume * accepted
        for index, path in enumerate(laws.paths()):
            if volume[index]:
                law = _completed(laws, path[: accepted[index]], final[index], horizon)
                outputs[index] += volume[index] * law
    return Emission(outputs, num_accepted)


def accept_thresholds(
    accept: Accept, target_law: Array, draft_law: Array, drafts: Array, lengths: Array
) -> NDArray[np.float64]:
    """Measure the uniform number below which each draft is accepted, those before it being so if they can.

    Args:
        accept: the code under test, compiled.
        target_law: [B, K + 1, V].
        draft_law: [B, K, V].
        drafts: [B, K].
        lengths: [B].

    Returns:
        float64 [B, K], within 1e-7; 0 where a draft is never accepted.
    """
    place = np.arange(drafts.shape[1])
    found = np.zeros(drafts.shape)
    for tried in place:
        low, high = np.zeros(len(drafts)), np.ones(len(drafts))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            # Before it nothing is in the way, after it 1 is never below a threshold of block verification.
            uniforms = np.where(place == tried, middle[:, None], (place > tried).astype(np.float64))
            accepted, _ = accept(target_law, draft_law, drafts, lengths, jnp.asarray(uniforms, jnp.float32))
            is_accepted = np.asarray(accepted) > tried
            low, high = np.where(is_accepted, middle, low), np.where(is_accepted, high, middle)
        # Halving ends beside the ends of the interval, not on them.
        near = (low + high) / 2
        found[:, tried] = np.where(near > 1 - 1e-7, 1.0, np.where(near < 1e-7, 0.0, near))
    return found


def _completed(
    laws: ToyLaws, accepted: tuple[int, ...], final: NDArray[np.float32], horizon: int
) -> NDArray[np.float64]:
    """Give the law of the first tokens: the accepted drafts, one of the final law, then plain decoding."""
    law = np.zeros((laws.vocab_size,) * horizon)
    emitted = {(*accepted, token): float(final[token]) for token in range(laws.vocab_size)}
    for tokens, chance in emitted.items():
        missing = max(horizon - len(tokens), 0)
        for rest in itertools.product(range(laws.vocab_size), repeat=missing):
            sequence = (*tokens, *rest)
            plain = [laws.target(sequence[:place])[sequence[place]] for place in range(len(tokens), horizon)]
            law[sequence[:horizon]] += chance * float(np.prod(plain))
    return law.reshape(-1)
