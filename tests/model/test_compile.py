"""Compilation: one trace per shape, and a cost that follows the pattern of layers, not the depth."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.arrays import random_arrays
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.backbone import backbone, head_logits
from deepinfer_jax.model.numerics import FLOAT32, OFFICIAL, Numerics
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.weights import Weights, weight_specs
from deepinfer_jax.testing.golden import fresh_cache, make_rows
from deepinfer_jax.testing.presets import SMALLEST, released_pattern

COMPILE_LIMIT_SECONDS = 30  # on two CPU cores, for the 40-layer pattern at tiny widths


def row_shapes(count: int, rows_per_block: int) -> Rows:
    integers, flags = jax.ShapeDtypeStruct((count,), jnp.int32), jax.ShapeDtypeStruct((count,), bool)
    return Rows(integers, integers, integers, flags, flags, rows_per_block)


def lower(config: ModelConfig, rows: Rows):
    """Trace and lower a step under official numerics, from shapes alone."""

    def step(weights, rows, cache):
        hidden, _, cache = backbone(weights, config, rows, cache, OFFICIAL)
        return head_logits(hidden, weights, OFFICIAL), cache

    cache = jax.eval_shape(lambda: fresh_cache(config, 8, 256, OFFICIAL))
    return jax.jit(step).lower(weight_shapes(config, OFFICIAL), rows, cache)


def weight_shapes(config: ModelConfig, numerics: Numerics) -> Weights:
    specs = weight_specs(config)
    weights = jax.eval_shape(lambda: random_arrays(specs, jax.random.key(0), numerics.compute_dtype))
    return weights.replace(token_map=jax.ShapeDtypeStruct((config.vocab_size,), jnp.int32))


@pytest.mark.usefixtures("without_compilation_cache")
@pytest.mark.parametrize(
    ("count", "rows_per_block"),
    [
        pytest.param(8, 1, id="decode_of_8", marks=pytest.mark.slow),
        pytest.param(256, 64, id="prefill_of_256"),
    ],
)
def test_released_pattern_compiles_in_time(count: int, rows_per_block: int) -> None:
    # Processor time: with one core it would be the time on the clock, and other tests do not add to it.
    start = time.process_time()
    lower(released_pattern(), row_shapes(count, rows_per_block)).compile()
    assert time.process_time() - start <= COMPILE_LIMIT_SECONDS


def test_equal_layers_do_not_grow_the_program() -> None:
    sizes = [len(lower(released_pattern(extra), row_shapes(8, 1)).as_text()) for extra in (0, 2)]
    # Only numbers in the text, such as the sizes of weight stacks, may change their digits.
    assert abs(sizes[1] - sizes[0]) <= sizes[0] // 1000


@pytest.fixture(scope="module")
def traced_shapes() -> list[int]:
    """Rows of each trace while two shapes were given everything that may vary in them, uncompiled."""
    traces: list[int] = []

    @jax.jit
    def step(weights, rows, cache):
        traces.append(rows.token_ids.shape[0])
        return backbone(weights, SMALLEST, rows, cache, FLOAT32)

    weights, cache = weight_shapes(SMALLEST, FLOAT32), fresh_cache(SMALLEST, 4, 64, FLOAT32)
    for length in (1, 8):
        tokens = np.arange(4 * length).reshape(4, length)
        for start, counts, slots in (
            (0, [length] * 4, [0, 1, 2, 3]),
            (20, [1, 0, 1, 1], [3, 1, 0, 2]),
            ([0, 5, 9, 31], [length, 1, 0, 1], [1, 0, 2, 3]),
        ):
            is_image = tokens % 3 == 0
            rows = make_rows(tokens, start=start, is_image=is_image, lengths=counts, slots=slots)
            # Each step takes what the one before gives.
            _, _, cache = step.trace(weights, rows, cache).out_info
    return traces


def test_one_trace_for_each_shape(traced_shapes) -> None:
    assert traced_shapes == [4, 32]
