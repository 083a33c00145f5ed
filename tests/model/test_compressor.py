"""How many groups a query may see; `test_golden.py` holds what the compressor makes of them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.model.compressor import num_visible_groups


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_bc03_number_of_visible_groups(ratio: int) -> None:
    found = num_visible_groups(jnp.arange(16, dtype=jnp.int32), ratio)
    assert np.asarray(found).tolist() == [(q + 1) // ratio for q in range(16)]
