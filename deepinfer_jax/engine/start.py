"""Make the engine of a loaded model, with the calibration and the step times that belong to it.

Separate from `engine.py`, which is given both, and from `llm.py`, which knows no file: here they are looked
up, and a user is told what is missing and how to get it.
Read next: `measure.py`.
"""

from __future__ import annotations

import shlex
import warnings
from dataclasses import replace

from ..assets import NANO_FOLDER
from ..engine_config import EngineConfig
from ..model.numerics import NUMERICS
from ..sharding.place import mesh_shape
from ..sharding.presets import PRESETS
from .drafting import NEEDS_COSTS
from .engine import Engine
from .load import Model
from .measure import find_costs
from .target import num_slot_shares


def engine_for(model: Model, options: EngineConfig) -> Engine:
    """Make the engine of a model.

    A schedule of drafts that weighs step times needs a table of them. Without one that holds, all drafts are
    verified, and a warning says why and what to run.

    Args:
        model: what runs.
        options: how requests are run.

    Returns:
        The engine.

    Raises:
        RequestError: sizes or drafts that the model cannot have.

    Source: spec/dspark.md section 5.3.
    """
    costs = notice = None
    if options.drafts in NEEDS_COSTS:
        costs, reason = find_costs(model, options)
        if reason is not None:
            how = measuring_command(model, options)
            hint = "" if how is None else f" ({how})"
            notice = f"drafts={options.drafts!r}: {reason}{hint}; until then all drafts are verified"
            # At the line that made the `LLM`.
            warnings.warn(notice, RuntimeWarning, stacklevel=3)
            options = replace(options, drafts="fixed")
    arguments = (model.weights, model.config, model.numerics, options, model.forbidden_ids, model.target)
    engine = Engine(*arguments, model.calibration, costs)
    if notice is not None:
        assert engine.drafting is not None
        engine.drafting.notice = notice
    return engine


def measuring_command(model: Model, options: EngineConfig) -> str | None:
    """Say how the step times of an engine are measured.

    Args:
        model: what runs.
        options: how requests are run.

    Returns:
        A command, or a call for a model that no command loads; None where processes share a mesh.
    """
    numerics, target = model.numerics, model.target
    if target.mesh is not None and target.mesh.is_multi_process:
        return None
    named = NUMERICS.get(numerics.name)
    plain = replace(numerics, batch_invariant=True)
    is_loadable = named is not None and replace(plain, cache_format=named.cache_format) == named
    has_layout = target.mesh is None or target.layout.name in PRESETS
    if model.folder is None or named is None or not is_loadable or not has_layout:
        return "run: deepinfer_jax.measure_costs(model, options, keep=True)"
    sizes = options.cache_sizes(model.config, num_slot_shares(target))
    slots = sizes.num_slots // num_slot_shares(target)
    context = min(sizes.capacity, model.config.max_position_embeddings)
    words = [] if model.folder == NANO_FOLDER else ["--model", str(model.folder)]
    words += ["--slots", str(slots), "--max-context", str(context)]
    words += [] if numerics.name == "official" else ["--numerics", numerics.name]
    words += [] if plain == named else ["--cache-format", numerics.cache_format]
    words += [] if numerics.batch_invariant else ["--no-batch-invariant"]
    words += [] if options.verification == "coupled" else ["--verification", options.verification]
    if target.mesh is not None:
        axes = ",".join(f"{name}={size}" for name, size in mesh_shape(target.mesh).axes)
        words += ["--mesh", axes, "--layout", target.layout.name]
    return f"run: {shlex.join(['deepinfer_jax', 'costs', *words])}"
