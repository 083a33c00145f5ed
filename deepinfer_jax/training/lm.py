"""Train the embedded nano model: every visible entry first, then real selection, then quantised.

Run it again to continue: `python -m deepinfer_jax.training.lm --help`. The state folder holds what
a later command needs; `--until` ends a command early.
Read next: `forward.py`, `losses.py`, `optimizer.py`, `export.py`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..arrays import Array
from ..assets import NANO_FOLDER
from ..checkpoint import read_token_map
from ..config import ModelConfig
from ..config_json import parse_config
from ..model.numerics import OFFICIAL, Numerics
from ..model.weights import Weights
from ..text.tokenizer import Tokenizer
from .data import KINDS, HeldOut, held_out, training_rows
from .evaluate import device_rows, evaluate, take_batch
from .export import export_checkpoint, write_evaluation
from .forward import Batch, TrainingMode
from .losses import LossParts, training_loss
from .mixture import Mixture, batch_indices
from .nano_config import nano_config_document
from .optimizer import balance_biases, compute_weights, initial_weights, make_optimizer
from .packing import concatenate_rows
from .plots import plot_losses
from .state_files import MANIFEST, config_hash, load_state, save_state

UNQUANTIZED = Numerics("bfloat16", jnp.bfloat16, quantizes_activations=False, cache_format="bf16")
"""Arithmetic of the first two phases."""

BIAS_STEP = 1e-3

SHARES = (0.66, 0.20, 0.14)
"""Share of each kind's rows once all are read: the two smaller kinds stay under ten epochs."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the run, from a fraction of its steps on.

    Args:
        name: word for logs and plots.
        start: fraction of all steps at which it begins.
        mode: static choices of the forward pass.
        is_quantized: whether weights are rounded to their storage.
    """

    name: str
    start: float
    mode: TrainingMode
    is_quantized: bool


PHASES = (
    Phase("dense", 0.0, TrainingMode(UNQUANTIZED, is_sparse=False), is_quantized=False),
    Phase("sparse", 0.55, TrainingMode(UNQUANTIZED, is_sparse=True), is_quantized=False),
    Phase("quantized", 0.8, TrainingMode(OFFICIAL, is_sparse=True), is_quantized=True),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One training run: what makes its result reproducible.

    Args:
        config: the architecture.
        num_steps: steps of the whole run.
        batch_rows: packed rows of 512 tokens per step.
        seed: of initial weights and of the order of rows.
    """

    config: ModelConfig
    num_steps: int
    batch_rows: int
    seed: int

    def phase(self, step: int) -> Phase:
        """Give the phase of a step."""
        return [phase for phase in PHASES if step >= round(phase.start * self.num_steps)][-1]


class TrainState:
    """Master weights and optimizer state of a run between steps."""

    def __init__(self, run: Run, token_map: np.ndarray) -> None:
        self.run = run
        self.optimizer = make_optimizer(run.config, run.num_steps)
        self.weights = initial_weights(run.config, run.seed).replace(token_map=None)
        self.token_map = jnp.asarray(token_map)
        self.moments: Any = self.optimizer.init(cast(Any, self.weights))
        self.step = 0
        self.history: dict[str, list[list[float]]] = {"train": [], **{kind: [] for kind in KINDS}}
        self.phases: dict[str, int] = {}

    def save(self, folder: Path, document: dict[str, Any]) -> None:
        """Write the state files."""
        arrays, kinds = {}, {}
        for name, value, kind in _state_entries(self.weights, self.moments):
            arrays[name], kinds[name] = np.asarray(value), kind
        meta = {"step": self.step, "seed": self.run.seed, "config_hash": config_hash(document)}
        save_state(folder, arrays, kinds, {**meta, "loss_history": self.history, "phases": self.phases})

    def restore(self, folder: Path, document: dict[str, Any]) -> None:
        """Read the state files over the initial state."""
        arrays, meta = load_state(folder, config_hash(document))
        self.step, self.history, self.phases = meta["step"], meta["loss_history"], meta.get("phases", {})
        trees = (self.weights, self.moments)
        names = iter(name for name, _, _ in _state_entries(*trees))
        leaves, structure = jax.tree.flatten(trees)
        restored = [jnp.asarray(arrays[next(names)], leaf.dtype).reshape(leaf.shape) for leaf in leaves]
        self.weights, self.moments = jax.tree.unflatten(structure, restored)


def _state_entries(weights: Weights, moments: Any) -> list[tuple[str, Array, str]]:
    """List (name, array, kind of rounding in the state files) of everything a run carries."""
    entries = []
    for path, value in jax.tree_util.tree_flatten_with_path((weights, moments))[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        kind = "parameter"
        if not jnp.issubdtype(value.dtype, jnp.floating):
            kind = "exact"
        elif ".mu." in name:
            kind = "first_moment"
        elif ".nu." in name:
            kind = "second_moment"
        entries.append((name, value, kind))
    return entries


def make_step(run: Run, phase: Phase, optimizer: optax.GradientTransformation) -> Any:
    """Build the jitted optimisation step of a phase: (weights, moments, map, data, indices, bias step)."""

    def loss(weights: Weights, token_map: Array, batch: Batch) -> tuple[Array, LossParts]:
        computed = compute_weights(
            weights.replace(token_map=token_map),
            *(run.config, phase.mode.numerics.compute_dtype, phase.is_quantized),
        )
        return training_loss(computed, batch, run.config, phase.mode)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(weights, moments, token_map, data, indices, bias_step):
        batch = take_batch(data, indices)
        gradients, parts = jax.grad(loss, has_aux=True)(weights, token_map, batch)
        updates, moments = optimizer.update(gradients, moments, weights)
        weights = cast(Weights, optax.apply_updates(weights, updates))
        weights = balance_biases(weights, parts.loads, run.config, bias_step)
        return weights, moments, parts

    return step


def train(
    run: Run,
    document: dict[str, Any],
    corpus: Path,
    state_folder: Path,
    until: int,
    time_limit: float,
    log: Callable[[str], None] = print,
) -> TrainState:
    """Continue a run from its state folder up to a step or a time limit, and save it.

    Args:
        run: the run.
        document: the config document, whose hash the state carries.
        corpus: folder of the corpus files.
        state_folder: folder of the state files.
        until: step to stop before.
        time_limit: seconds after which to stop and save.
        log: receives one line per report.

    Returns:
        The state.
    """
    started = time.monotonic()
    tokenizer = Tokenizer.from_folder(NANO_FOLDER)
    state = TrainState(run, read_token_map(NANO_FOLDER, run.config))
    if (state_folder / MANIFEST).is_file():
        state.restore(state_folder, document)
        log(f"continuing from step {state.step}")
    parts = training_rows(corpus, tokenizer)
    texts = held_out(corpus, tokenizer)
    mixture = Mixture(tuple(len(parts[kind]) for kind in KINDS), run.batch_rows, run.num_steps, SHARES)
    data = device_rows(concatenate_rows([parts[kind] for kind in KINDS]))
    log(f"data ready after {time.monotonic() - started:.0f} s: {mixture.num_rows} rows")
    steps = _CompiledSteps(state, data, until)
    reported = time.monotonic()
    losses: list[tuple[int, LossParts]] = []
    while state.step < until:
        phase = run.phase(state.step)
        state.phases.setdefault(phase.name, state.step)
        compiled = steps.get(phase)
        indices = jnp.asarray(batch_indices(mixture, run.seed, state.step))
        bias_step = jnp.float32(BIAS_STEP if state.step < 0.9 * run.num_steps else 0.0)
        state.weights, state.moments, loss_parts = compiled(
            state.weights, state.moments, state.token_map, data, indices, bias_step
        )
        losses.append((state.step, loss_parts))
        state.step += 1
        is_late = time.monotonic() - started > time_limit
        if state.step % 50 == 0 or state.step == until or is_late:
            reported = _report(state, losses, reported, log)
        if state.step % 250 == 0 or state.step == until:
            _report_held_out(state, texts, log)
        if is_late:
            log(f"time limit reached at step {state.step}")
            break
    state.save(state_folder, document)
    series = {kind: state.history[kind] for kind in KINDS if state.history[kind]}
    plot_losses(state_folder / "losses.png", {"all text": state.history["train"]}, series, state.phases)
    return state


class _CompiledSteps:
    """Compiles the steps of all phases that a command needs, each in its own thread."""

    def __init__(self, state: TrainState, data: tuple[Array, Array, Array], until: int) -> None:
        run = state.run
        names = {run.phase(step).name for step in range(state.step, until)}
        self._pool = ThreadPoolExecutor(len(PHASES))
        arguments = (state.weights, state.moments, state.token_map, data)
        indices = jnp.zeros((run.batch_rows,), jnp.int32)
        self._steps: dict[str, Future[Any]] = {
            phase.name: self._pool.submit(self._compile, state, phase, (*arguments, indices, jnp.float32(0)))
            for phase in PHASES
            if phase.name in names
        }

    @staticmethod
    def _compile(state: TrainState, phase: Phase, arguments: tuple[Any, ...]) -> Any:
        shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arguments)
        return make_step(state.run, phase, state.optimizer).lower(*shapes).compile()

    def get(self, phase: Phase) -> Any:
        return self._steps[phase.name].result()


def _report(
    state: TrainState, losses: list[tuple[int, LossParts]], reported: float, log: Callable[[str], None]
) -> float:
    nats = [float(parts.nats) for _, parts in losses]
    now = time.monotonic()
    last = losses[-1][1]
    loads = np.asarray(last.loads)
    state.history["train"].extend([step, value] for (step, _), value in zip(losses, nats, strict=True))
    log(
        f"step {state.step} {state.run.phase(state.step - 1).name}: {np.mean(nats):.3f} nats, "
        f"index {float(last.index_divergence):.3f}, loads {loads.min():.2f}..{loads.max():.2f}, "
        f"{(now - reported) / len(losses) * 1000:.0f} ms a step"
    )
    losses.clear()
    return now


def _report_held_out(state: TrainState, texts: dict[str, HeldOut], log: Callable[[str], None]) -> None:
    results = _measure(state, state.run.phase(state.step - 1), texts)
    for kind, value in results.items():
        state.history[kind].append([state.step, value])
    log("held out: " + ", ".join(f"{kind} {value:.3f}" for kind, value in results.items()))


def _measure(state: TrainState, phase: Phase, texts: dict[str, HeldOut]) -> dict[str, float]:
    """Measure the state's held-out nats a token by kind, in the arithmetic of a phase."""
    config = state.run.config
    weights = compute_weights(
        state.weights.replace(token_map=state.token_map),
        *(config, phase.mode.numerics.compute_dtype, phase.is_quantized),
    )
    return evaluate(weights, config, phase.mode, texts, min(state.run.batch_rows, 64))


def finish(state: TrainState, document: dict[str, Any], corpus: Path, folder: Path) -> None:
    """Export a finished run and measure it in float arithmetic and as shipped.

    Args:
        state: the run at its last step.
        document: its config document.
        corpus: folder of the corpus files.
        folder: where the checkpoint goes.
    """
    run = state.run
    export_checkpoint(state.weights.replace(token_map=state.token_map), run.config, document, folder)
    texts = held_out(corpus, Tokenizer.from_folder(NANO_FOLDER))
    results: dict[str, Any] = {"steps": run.num_steps, "batch_rows": run.batch_rows, "seed": run.seed}
    for phase in PHASES[1:]:
        nats = _measure(state, phase, texts)
        results[phase.name] = {
            kind: {"nats": value, "bits_per_byte": texts[kind].bits_per_byte(value * texts[kind].num_tokens)}
            for kind, value in nats.items()
        }
    write_evaluation(results, folder)
    print(json.dumps(results))


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train the embedded nano model.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of the corpus files")
    parser.add_argument("--state", type=Path, required=True, help="folder of the resumable state")
    parser.add_argument("--steps", type=int, default=1800, help="steps of the whole run")
    parser.add_argument("--until", type=int, default=None, help="step at which this command ends")
    parser.add_argument("--batch-rows", type=int, default=128, help="rows of 512 tokens per step")
    parser.add_argument("--seed", type=int, default=41)
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds, then save and stop")
    parser.add_argument("--export", type=Path, default=None, help="write the finished checkpoint here")
    options = parser.parse_args(arguments)
    document = nano_config_document(with_draft=False)
    run = Run(parse_config(document), options.steps, options.batch_rows, options.seed)
    until = options.steps if options.until is None else min(options.until, options.steps)
    state = train(run, document, options.corpus, options.state, until, options.time_limit)
    print(json.dumps({"step": state.step, "of": run.num_steps}))
    if options.export is not None and state.step == run.num_steps:
        finish(state, document, options.corpus, options.export)


if __name__ == "__main__":
    main()
