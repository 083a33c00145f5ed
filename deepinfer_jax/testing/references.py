"""Slow and obvious formulations in plain Python integers and NumPy float64.

Separate from the tests because several of them, and benchmarks, compare with the same formulas.
Read next: `tolerances.py`.
"""

from __future__ import annotations

from typing import NamedTuple

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


class StepRows(NamedTuple):
    """Who the rows of a step are: [R] each."""

    slots: NDArray
    positions: NDArray
    is_valid: NDArray


def sparse_attention(
    q: NDArray,
    ring: NDArray,
    window_rows: NDArray,
    pages: NDArray | None,
    page_table: NDArray,
    selection: NDArray | None,
    attn_sink: NDArray,
    rows: StepRows,
    window_starts: NDArray,
    window: int,
) -> NDArray[np.float64]:
    """Look every key up by slot and position, or by slot and group, and attend to what was found.

    Args:
        q: [R, N, H].
        ring: [B, ring, H], values of one layer's rings.
        window_rows: [R, H], values of this step's rows.
        pages: [P, entries, H], values of one source's pages, or None.
        page_table: int [B, pages_per_slot].
        selection: int [R, K], or None.
        attn_sink: [N].
        rows: who the rows are.
        window_starts: int [R].
        window: look-backs.

    Returns:
        [R, N, H].

    Source: spec/model.md section 5.
    """
    in_step = {
        (slot, position): row
        for row, (slot, position, is_valid) in enumerate(zip(*rows, strict=True))
        if is_valid
    }
    output = np.zeros(q.shape, np.float64)
    for row, (slot, position, is_valid) in enumerate(zip(*rows, strict=True)):
        if not is_valid:
            continue
        keys = []
        for wanted in range(position, position - window, -1):
            if wanted >= max(window_starts[row], 0):
                own = in_step.get((slot, wanted))
                keys.append(ring[slot, wanted % ring.shape[1]] if own is None else window_rows[own])
        if pages is not None and selection is not None:
            found = (_entry(pages, page_table[slot], group) for group in selection[row])
            keys += [key for key in found if key is not None]
        seen = np.array(keys).reshape(1, len(keys), q.shape[-1])
        output[row] = attention(q[row : row + 1], seen, np.ones((1, len(keys)), bool), attn_sink)[0]
    return output


def _entry(pages: NDArray, table: NDArray, group: int) -> NDArray | None:
    num_pages, entries = pages.shape[:2]
    if not 0 <= group < len(table) * entries:
        return None
    page = table[group // entries]
    return pages[page, group % entries] if 0 <= page < num_pages else None


def index_scores(
    queries: NDArray, heads: NDArray, pages: NDArray, table: NDArray, num_visible: int
) -> NDArray[np.float64]:
    """Score the groups of one slot for one query; -inf where nothing is visible.

    Args:
        queries: [I, channels].
        heads: [I].
        pages: [P, entries, channels], values of one source's pages.
        table: int [pages_per_slot].
        num_visible: complete groups.

    Returns:
        [G].

    Source: spec/model.md section 7.
    """
    scores = np.full(len(table) * pages.shape[1], -np.inf)
    for group in range(min(num_visible, len(scores))):
        key = _entry(pages, table, group)
        if key is not None:
            products = queries.astype(np.float64) @ key.astype(np.float64)
            scores[group] = heads.astype(np.float64) @ np.maximum(products, 0)
    return scores


def best(scores: ArrayLike, count: int) -> set[int]:
    """Give the indices of the `count` highest finite scores, ties to the lower index."""
    values = np.asarray(scores)
    order = sorted(range(len(values)), key=lambda index: (-values[index], index))
    return {index for index in order[:count] if values[index] > -np.inf}


def candidate_blocks(scores: NDArray, num_visible: int, block_size: int, num_blocks: int) -> set[int]:
    """Choose the candidate blocks of one query.

    Args:
        scores: [G], -inf where nothing is visible.
        num_visible: complete groups.
        block_size: groups of a block.
        num_blocks: blocks kept.

    Returns:
        Their indices.

    Source: spec/model.md section 8.
    """
    highest = np.array(
        [max(scores[start : start + block_size]) for start in range(0, len(scores), block_size)]
    )
    if num_visible:
        highest[(num_visible - 1) // block_size] = np.inf
    return best(highest, num_blocks)


def hyper_mixes(
    streams: NDArray, fn: NDArray, base: NDArray, scale: NDArray, iterations: int, eps: float
) -> tuple[NDArray, NDArray, NDArray]:
    """Compute a site's mixes of one token.

    Args:
        streams: [M, D].
        fn: [M (M + 2), M D].
        base: [M (M + 2)].
        scale: [3].
        iterations: of the Sinkhorn normalisation.
        eps: the hyper-connection's.

    Returns:
        pre [M], post [M], comb [M from, M to].

    Source: spec/model.md section 4.
    """
    count = len(streams)
    flat = streams.astype(np.float64).reshape(-1)
    z = fn.astype(np.float64) @ flat / np.sqrt((flat**2).mean() + 1e-20)
    pre = 1 / (1 + np.exp(-(z[:count] * scale[0] + base[:count]))) + eps
    post = 2 / (1 + np.exp(-(z[count : 2 * count] * scale[1] + base[count : 2 * count])))
    logits = (z[2 * count :] * scale[2] + base[2 * count :]).reshape(count, count)
    return pre, post, sinkhorn(logits, iterations, eps)
