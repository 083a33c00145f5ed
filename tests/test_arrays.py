"""Random weights as bytes: their statistics, their shapes, and what is held while they are drawn."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import arrays
from deepinfer_jax.arrays import (
    ArraySpec,
    Initializer,
    QuantArray,
    Storage,
    random_arrays,
    random_resident_arrays,
)
from deepinfer_jax.kernels import dequantize

AXES = ("ffn", "embed")
SPECS = {
    "experts": ArraySpec(
        "e.{layer}.{expert}.weight", (32, 192), AXES, Storage.MXFP4, layers=(0, 3), experts=3
    ),
    "block": ArraySpec("b.{layer}.weight", (96, 160), AXES, Storage.FP8_BLOCK, layers=(1, 2)),
    "table": ArraySpec("t.weight", (304, 32), AXES, Storage.FP8_ROW, Initializer(32**0.5)),
    "plain": ArraySpec("p.weight", (64, 96), AXES),
    "norm": ArraySpec("n.weight", (96,), ("embed",), Storage.F32, Initializer(constant=1.0, noise=0.1)),
}
QUANTISED = ("experts", "block", "table")


@pytest.fixture(scope="module")
def drawn() -> dict:
    return jax.jit(lambda key: random_resident_arrays(SPECS, key, jnp.bfloat16))(jax.random.key(7))


@pytest.mark.parametrize("name", QUANTISED)
def test_bytes_have_the_stored_shapes(drawn: dict, name: str) -> None:
    spec, weight = SPECS[name], drawn[name]
    assert isinstance(weight, QuantArray) and (weight.storage, weight.axes) == (spec.storage, AXES)
    assert weight.shape == spec.stacked_shape
    stack = spec.stacked_shape[:-2]
    (_, payload_shape, _), (_, scale_shape, _) = spec.stored_shapes(True)
    assert (weight.payload.shape, weight.scales.shape) == (stack + payload_shape, stack + scale_shape)
    assert weight.payload.dtype == (jnp.uint8 if name == "experts" else jnp.float8_e4m3fn)
    assert weight.num_bytes == weight.payload.nbytes + weight.scales.nbytes


@pytest.mark.parametrize("name", QUANTISED)
def test_values_are_finite_with_the_asked_deviation(drawn: dict, name: str) -> None:
    spec = SPECS[name]
    values = np.asarray(jax.jit(dequantize, static_argnums=1)(drawn[name], jnp.float32))
    assert np.isfinite(values).all()
    expected = spec.initializer.scale / spec.shape[-1] ** 0.5
    # Scales vary from group to group, so the estimate of a few hundred groups scatters by some percent.
    assert 0.9 * expected < values.std() < 1.1 * expected
    assert abs(values.mean()) < 0.1 * expected
    assert len(np.unique(values)) > 12


def test_layers_and_experts_differ(drawn: dict) -> None:
    slices = np.asarray(drawn["experts"].payload).reshape(6, -1)
    assert len(np.unique(slices, axis=0)) == 6


def test_other_arrays_are_those_of_the_plain_draw(key: jax.Array) -> None:
    specs = {name: SPECS[name] for name in ("plain", "norm")}
    found = random_resident_arrays(specs, key, jnp.bfloat16)
    for name, expected in random_arrays(specs, key, jnp.bfloat16).items():
        assert found[name].dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(expected))


@pytest.mark.parametrize("at_once", [64, 1000, 2**24])
def test_blocks_of_rows_cover_the_whole_array(at_once: int) -> None:
    # 21 rows: the last block of four overlaps the one before. The forced bit shows what was written.
    found = np.asarray(arrays._random_bytes(jax.random.key(1), (3, 7, 16), 0x0F, 0x40, at_once))
    assert found.shape == (3, 7, 16) and found.dtype == np.uint8
    assert (found & 0xF0 == 0x40).all()
    assert len(np.unique(found)) == 16


def test_no_wide_copy_of_a_quantised_stack_is_made() -> None:
    spec = ArraySpec("e.{layer}.weight", (512, 2048), AXES, Storage.MXFP4, layers=tuple(range(64)))
    compiled = (
        jax.jit(lambda key: random_resident_arrays(spec, key, jnp.bfloat16))
        .lower(jax.random.key(0))
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes == pytest.approx(64 * 512 * (1024 + 64), rel=0.01)
    in_float32 = 64 * 512 * 2048 * 4
    assert memory.temp_size_in_bytes < 8 * arrays._BYTES_AT_ONCE < in_float32 / 1.9
