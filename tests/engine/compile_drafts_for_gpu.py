"""Compile a step with drafts for an H200 that is not there, with the options that an engine gives it.

Separate because what XLA is to write down of it is said before JAX starts: `test_platform.py` runs this in a
process of its own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from deepinfer_jax import EngineConfig
from deepinfer_jax.engine.drafting import Drafting
from deepinfer_jax.engine.platform import COMMAND_BUFFERS, suited
from deepinfer_jax.model.numerics import OFFICIAL
from deepinfer_jax.sharding.gpu_targets import GPU_TARGETS, topology
from deepinfer_jax.speculate import speculate_step
from deepinfer_jax.step import initial_state
from deepinfer_jax.testing.presets import SMALLEST_DRAFTED, as_resident, random_weights


def main() -> None:
    """Compile it for 64 slots: more than one tile of rows, and several of sampled rows."""
    # Packed, as released: weights that can have a gradient are scanned, see `grouped_experts/ref.py`.
    config, numerics = replace(SMALLEST_DRAFTED, is_quantized=True), suited(OFFICIAL, "gpu")
    options = EngineConfig(num_slots=64, max_context=256, drafts="fixed")
    sizes = options.cache_sizes(config)
    control = Drafting(config, options, sizes, numerics)
    weights = as_resident(random_weights(config, jax.random.key(0), numerics.compute_dtype), config)
    is_forbidden = jax.ShapeDtypeStruct((config.vocab_size,), jnp.bool_)
    state = jax.eval_shape(
        partial(initial_state, config=config, sizes=sizes, numerics=numerics), is_forbidden
    )
    plan = control.plan(np.ones(64, bool), -1)
    (device,) = topologies.get_topology_desc(
        platform="cuda", target_config=GPU_TARGETS["h200"].description(), topology=topology(1)
    ).devices

    def placed(tree: Any) -> Any:
        where = SingleDeviceSharding(device)
        return jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=where), tree)

    static: dict[str, Any] = {"config": config, "numerics": numerics, "speculation": control.speculation}
    with jax.default_device(device):
        lowered = speculate_step.lower(placed(weights), placed(state), placed(plan), **static)
        lowered.compile(dict(COMMAND_BUFFERS))


if __name__ == "__main__":
    main()
