"""Compile a step with drafts and one without for an H200 that is not there, with an engine's options.

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
from deepinfer_jax.engine.platform import COMMAND_BUFFERS, REPEATABLE, suited
from deepinfer_jax.model.numerics import OFFICIAL
from deepinfer_jax.sharding.gpu_targets import GPU_TARGETS, topology
from deepinfer_jax.speculate import speculate_step
from deepinfer_jax.step import decode_step, initial_state
from deepinfer_jax.testing.presets import SMALLEST_DRAFTED, as_resident, random_weights


def main() -> None:
    """Compile them for 64 slots: more than one tile of rows with drafts, and several of sampled rows."""
    # Packed, as released: weights that can have a gradient are scanned, see `grouped_experts/ref.py`.
    config, numerics = replace(SMALLEST_DRAFTED, is_quantized=True), suited(OFFICIAL, "gpu")
    with_drafts = EngineConfig(num_slots=64, max_context=256, drafts="fixed")
    without = replace(with_drafts, drafts="off")
    control = Drafting(config, with_drafts, with_drafts.cache_sizes(config), numerics)
    weights = as_resident(random_weights(config, jax.random.key(0), numerics.compute_dtype), config)
    is_forbidden = jax.ShapeDtypeStruct((config.vocab_size,), jnp.bool_)
    (device,) = topologies.get_topology_desc(
        platform="cuda", target_config=GPU_TARGETS["h200"].description(), topology=topology(1)
    ).devices

    def placed(tree: Any) -> Any:
        where = SingleDeviceSharding(device)
        return jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=where), tree)

    def state_of(options: EngineConfig) -> Any:
        sizes = options.cache_sizes(config)
        make = partial(initial_state, config=config, sizes=sizes, numerics=numerics)
        return placed(jax.eval_shape(make, is_forbidden))

    static: dict[str, Any] = {"config": config, "numerics": numerics}
    compiler = {**REPEATABLE, **COMMAND_BUFFERS}
    is_active = np.ones(64, bool)
    with jax.default_device(device):
        drafted = placed(weights), state_of(with_drafts), placed(control.plan(is_active, -1))
        speculate_step.lower(*drafted, speculation=control.speculation, **static).compile(compiler)
        plain = placed(weights.replace(draft=None)), state_of(without), placed(is_active)
        decode_step.lower(*plain, **static).compile(compiler)


if __name__ == "__main__":
    main()
