"""Slow and obvious formulations in plain Python integers and NumPy float64.

Separate from the tests because several of them, and later issues, compare with the same formulas.
Read next: `tolerances.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..config import ModelConfig
from ..model.engram import engram_constants


def engram_table_rows(
    token_ids: ArrayLike, is_image: ArrayLike, token_map: ArrayLike, config: ModelConfig
) -> NDArray[np.int64]:
    """Hash every token of one sequence with Python's integers.

    Args:
        token_ids: int [T].
        is_image: bool [T].
        token_map: int [V], compressed ids.
        config: the architecture.

    Returns:
        [T, Engram layers, C] table rows.

    Source: spec/model.md section 10.
    """
    constants = engram_constants(config)
    compressed = [int(np.asarray(token_map)[token]) for token in np.asarray(token_ids)]
    image = [bool(flag) for flag in np.asarray(is_image)]
    pad = int(np.asarray(token_map)[config.engram_pad_token_id])
    table_rows = []
    for t in range(len(compressed)):
        tokens = []
        for k in range(config.engram_max_ngram_size):
            is_dead = t - k < 0 or any(image[t - k : t + 1])
            tokens.append(pad if is_dead else compressed[t - k])
        table_rows.append(
            [_layer_rows(tokens, constants, layer) for layer in range(len(config.engram_layer_ids))]
        )
    return np.array(table_rows, np.int64)


def _layer_rows(tokens: list[int], constants, layer: int) -> list[int]:
    multipliers = [int(value) for value in constants.multipliers[layer]]
    primes = [int(value) for value in constants.primes[layer]]
    heads = len(primes) // (len(tokens) - 1)
    found, offset = [], 0
    for column, prime in enumerate(primes):
        size = 2 + column // heads
        mixed = 0
        for token, multiplier in zip(tokens[:size], multipliers[:size], strict=True):
            mixed ^= token * multiplier
        found.append(mixed % prime + offset)
        offset += prime
    return found


def attention(
    q: ArrayLike, keys: ArrayLike, is_visible: ArrayLike, attn_sink: ArrayLike
) -> NDArray[np.float64]:
    """Attend row by row and head by head: softmax over the visible keys and the sink, sum of the keys.

    Args:
        q: [R, N, H].
        keys: [R, K, H], values too.
        is_visible: bool [R, K].
        attn_sink: [N].

    Returns:
        [R, N, H].

    Source: spec/model.md section 5.
    """
    q, keys, is_visible, attn_sink = (np.asarray(values) for values in (q, keys, is_visible, attn_sink))
    output = np.zeros(q.shape, np.float64)
    for row, head in np.ndindex(*q.shape[:2]):
        seen = keys[row][is_visible[row]].astype(np.float64)
        if len(seen):
            scores = seen @ q[row, head].astype(np.float64) / np.sqrt(q.shape[-1])
            highest = max(scores.max(), attn_sink[head])
            weights = np.exp(scores - highest)
            output[row, head] = weights @ seen / (weights.sum() + np.exp(attn_sink[head] - highest))
    return output


def expert(x: ArrayLike, w1: ArrayLike, w3: ArrayLike, w2: ArrayLike, limit: float) -> NDArray[np.float64]:
    """Compute one clamped SwiGLU expert for one token.

    Args:
        x: [D].
        w1: gate weights [F, D].
        w3: up weights [F, D].
        w2: down weights [D, F].
        limit: the clamp.

    Returns:
        [D].

    Source: spec/model.md section 9.
    """
    x, w1, w3, w2 = (np.asarray(values).astype(np.float64) for values in (x, w1, w3, w2))
    gate, up = np.minimum(w1 @ x, limit), np.clip(w3 @ x, -limit, limit)
    return w2 @ (gate / (1 + np.exp(-gate)) * up)


def sinkhorn(logits: ArrayLike, iterations: int, eps: float) -> NDArray[np.float64]:
    """Normalise rows and columns in turn, the first row pass being a softmax.

    Args:
        logits: [M from, M to].
        iterations: passes over rows and columns, the first included.
        eps: added to the softmax and to every sum.

    Returns:
        [M from, M to].

    Source: spec/model.md section 4.
    """
    matrix = np.exp(np.asarray(logits, np.float64))
    matrix = matrix / matrix.sum(axis=1, keepdims=True) + eps
    matrix = matrix / (matrix.sum(axis=0, keepdims=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(axis=1, keepdims=True) + eps)
        matrix = matrix / (matrix.sum(axis=0, keepdims=True) + eps)
    return matrix
