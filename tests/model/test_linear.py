"""Products with resident quantised weights are those with their values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.arrays import ArraySpec, Storage, random_resident_arrays
from deepinfer_jax.kernels import dequantize
from deepinfer_jax.model.linear import linear, linear_float32, weight_values

each_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


@each_dtype
@pytest.mark.parametrize("storage", [Storage.FP8_BLOCK, Storage.MXFP4], ids=lambda storage: storage.name)
def test_quantised_weights_multiply_as_their_values(key: jax.Array, storage: Storage, dtype) -> None:
    spec = ArraySpec("w.weight", (64, 96), ("ffn", "embed"), storage)
    weight = random_resident_arrays(spec, key, dtype)
    x = jax.random.normal(key, (5, 96)).astype(dtype)
    values = dequantize(weight, dtype)
    assert weight_values(weight, dtype).dtype == dtype
    np.testing.assert_array_equal(np.asarray(weight_values(weight, dtype)), np.asarray(values))
    for product in (linear_float32, linear):
        found, expected = jax.jit(product)(x, weight), jax.jit(product)(x, values)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
