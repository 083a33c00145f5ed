"""Train the draft stages of the embedded nano model: sample the target's answers, train on them, export.

Each part is asked for by its option, and a part that was cut short goes on when it is asked for again:
`python -m deepinfer_jax.training.draft --help`.
Read next: `draft_sampling.py`, `draft_steps.py`, `draft_state.py`.
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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..assets import NANO_FOLDER
from ..checkpoint import load_weights
from ..config_json import parse_config, read_config
from ..model.numerics import OFFICIAL
from ..model.weights import Weights, plain_weights
from ..text.tokenizer import Tokenizer
from .draft_data import read_prompts, read_samples
from .draft_sampling import SamplingRun, sample_answers
from .draft_state import DraftState, export_draft
from .draft_steps import (
    BIAS_STEP,
    DraftRun,
    Features,
    StepReport,
    Trunk,
    block_loss,
    initial_draft,
    learning_rate,
    make_features,
    make_features_step,
    make_optimizer,
    make_steps,
)
from .evaluate import device_rows
from .mixture import Mixture, steps_indices
from .nano_config import nano_config_document
from .packing import PackedRows
from .state_files import MANIFEST

DECAY_START = 0.6
"""Part of the steps after which the length of a run is settled, as the rate falls from there."""

_HELD_OUT_PART = 32
_SECONDS_TO_FINISH = 10.0
_SECONDS_BETWEEN_SAVES = 60.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How far a command goes, and in which strides.

    Args:
        num_steps: steps of the whole run, at most.
        until: step at which this command ends.
        call_steps: steps of one call, and between reports; all step counts are multiples of it.
        time_limit: seconds after which no call is begun.
        fits_time: whether the run is shortened so that its last step comes within the limit.
        rows_at_once: rows of one call of the trunk, at most.
    """

    num_steps: int
    until: int
    call_steps: int = 25
    time_limit: float = 540.0
    fits_time: bool = False
    rows_at_once: int = 64


def train(
    run: DraftRun,
    document: dict[str, Any],
    trunk_weights: Weights,
    samples: PackedRows,
    state_folder: Path,
    pace: Pace,
    log: Callable[[str], None],
) -> DraftState:
    """Continue a run from its state folder up to a step or a time limit, and save it.

    Args:
        run: the run.
        document: the config document, whose hash the state carries.
        trunk_weights: the target.
        samples: its answers; the last rows are held out.
        state_folder: folder of the state files.
        pace: how far to go.
        log: receives one line per report.

    Returns:
        The state.
    """
    started = time.monotonic()
    plain = jax.jit(plain_weights, static_argnums=1)(trunk_weights, run.numerics.compute_dtype)
    trunk = Trunk(plain.embed, plain.head)
    rows_at_once = min(pace.rows_at_once, len(samples))
    programs = _Programs(run, plain, trunk, samples, rows_at_once, pace.call_steps)
    state = DraftState(run, trunk_weights.norm, pace.num_steps)
    if (state_folder / MANIFEST).is_file():
        state.restore(state_folder, document)
        # What this command asks for: a run that was shortened, or has ended, may go on.
        state.num_steps = max(pace.num_steps, state.step)
        log(f"continuing from step {state.step} of {state.num_steps}")
    num_trained = max(1, len(samples) - max(1, len(samples) // _HELD_OUT_PART))
    held_out_rows = np.arange(min(num_trained, len(samples) - 1), len(samples))
    features = make_features(programs.features.result(), plain, samples, rows_at_once)
    features = jax.block_until_ready(features)
    log(f"features of {len(samples)} rows after {time.monotonic() - started:.0f} s")
    steps = programs.steps.result()
    log(f"steps compiled after {time.monotonic() - started:.0f} s")
    saved = time.monotonic()
    while state.step < min(pace.until, state.num_steps):
        began = time.monotonic()
        _run_call(state, steps, trunk, features, num_trained, pace.call_steps, log)
        now = time.monotonic()
        left = pace.time_limit - _SECONDS_TO_FINISH - (now - started)
        if pace.fits_time:
            seconds = (now - began) / pace.call_steps
            state.fit(pace.num_steps, left, seconds, pace.call_steps, DECAY_START)
        if left < now - began:
            log(f"time limit reached at step {state.step} of {state.num_steps}")
            break
        if now - saved > _SECONDS_BETWEEN_SAVES:
            state.save(state_folder, document)
            saved = now
    state.save(state_folder, document)
    _evaluate(state, programs.evaluation.result(), trunk, features, held_out_rows, log)
    state.save(state_folder, document)
    log(f"saved step {state.step} of {state.num_steps} after {time.monotonic() - started:.0f} s")
    return state


def _run_call(
    state: DraftState,
    steps: Callable[..., Any],
    trunk: Trunk,
    features: Features,
    num_rows: int,
    call_steps: int,
    log: Callable[[str], None],
) -> None:
    """Run one call of steps and report it."""
    run, began = state.run, time.monotonic()
    numbers = range(state.step, state.step + call_steps)
    mixture = Mixture((num_rows,), run.batch_rows, numbers.stop, (1.0,))
    indices = steps_indices(mixture, run.seed, state.step, call_steps)
    rates = [learning_rate(step, state.num_steps) for step in numbers]
    bias_steps = [BIAS_STEP if step < 0.9 * state.num_steps else 0.0 for step in numbers]
    keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(run.seed)))(jnp.asarray(numbers))
    state.weights, state.moments, reports = steps(
        *(state.weights, state.moments, trunk, features, keys, jnp.asarray(indices)),
        *(jnp.asarray(rates, jnp.float32), jnp.asarray(bias_steps, jnp.float32)),
    )
    reports = jax.tree.map(np.asarray, reports)
    state.step = numbers.stop
    found = summary(reports)
    state.history["train"].append([state.step, found])
    loads, milliseconds = reports.loads[-1], (time.monotonic() - began) / call_steps * 1000
    log(
        f"step {state.step} of {state.num_steps}: {_words(found)}, "
        f"loads {loads.min():.2f}..{loads.max():.2f}, {milliseconds:.0f} ms a step"
    )


def summary(reports: StepReport) -> dict[str, Any]:
    """Average reports with a leading axis into JSON values."""
    loss = reports.loss
    values = {name: round(float(getattr(loss, name).mean()), 5) for name in ("ce", "l1", "confidence", "tau")}
    return {**values, "accept_rates": [round(float(rate), 4) for rate in loss.accept_rates.mean(axis=0)]}


def _words(found: dict[str, Any]) -> str:
    rates = " ".join(f"{rate:.3f}" for rate in found["accept_rates"])
    return (
        f"ce {found['ce']:.3f}, l1 {found['l1']:.3f}, confidence {found['confidence']:.3f}, "
        f"accepted {rates}, tau {found['tau']:.3f}"
    )


def _evaluate(
    state: DraftState,
    evaluation: Callable[..., StepReport],
    trunk: Trunk,
    features: Features,
    rows: np.ndarray,
    log: Callable[[str], None],
) -> None:
    """Measure held-out rows at fixed anchors."""
    run, reports = state.run, []
    for start in range(0, len(rows), run.batch_rows):
        chosen = np.resize(rows[start : start + run.batch_rows], run.batch_rows)
        key = jax.random.fold_in(jax.random.key(0), start)
        indices = jnp.asarray(chosen.astype(np.int32))
        report = evaluation(state.weights, trunk, features, indices, key)
        reports.append(jax.tree.map(np.asarray, report))
    found = summary(jax.tree.map(lambda *parts: np.stack(parts), *reports))
    state.history["held_out"].append([state.step, found])
    log(f"held out: {_words(found)}")


class _Programs:
    """Compiles all that a training command needs, each program in its own thread.

    Attributes:
        features: the trunk's pass over some rows.
        steps: a call of steps.
        evaluation: the loss alone.
    """

    features: Future[Any]
    steps: Future[Any]
    evaluation: Future[Any]

    def __init__(
        self,
        run: DraftRun,
        weights: Weights,
        trunk: Trunk,
        samples: PackedRows,
        rows_at_once: int,
        calls: int,
    ) -> None:
        config, optimizer = run.config, make_optimizer()
        data = device_rows(samples)
        rows, length = samples.tokens.shape
        dtype, width = run.numerics.compute_dtype, config.hidden_size

        def of(*shape: int, dtype: Any = jnp.float32) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype)

        features = Features(
            *(of(*part.shape, dtype=part.dtype) for part in data),
            inputs=of(rows, length, len(config.draft.target_layer_ids) * width, dtype=dtype),
            hidden=of(rows, length, width, dtype=dtype),
        )
        key = jax.eval_shape(lambda: jax.random.key(0))
        keys = of(calls, dtype=key.dtype)
        indices = of(calls, run.batch_rows, dtype=jnp.int32)
        pool = ThreadPoolExecutor(3)

        def compile_program(function: Any, arguments: tuple[Any, ...], donated: tuple[int, ...] = ()) -> Any:
            shapes = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), arguments)
            return pool.submit(lambda: jax.jit(function, donate_argnums=donated).lower(*shapes).compile())

        some_rows = of(rows_at_once, dtype=jnp.int32)
        masters = jax.eval_shape(partial(initial_draft, run=run), weights.norm)
        moments = jax.eval_shape(optimizer.init, masters)
        self.features = compile_program(make_features_step(run), (weights, data, some_rows))
        self.steps = compile_program(
            make_steps(run, optimizer),
            (masters, moments, trunk, features, keys, indices, of(calls), of(calls)),
            donated=(0, 1),
        )
        self.evaluation = compile_program(
            partial(block_loss, run=run),
            (masters, trunk, features, of(run.batch_rows, dtype=jnp.int32), key),
        )
        pool.shutdown(wait=False)


def print_now(line: str) -> None:
    """Print a line so that it is seen at once, whatever reads the output."""
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train the draft stages of the embedded nano model.")
    parser.add_argument("--sample", action="store_true", help="let the target write answers to train on")
    parser.add_argument("--train", action="store_true", help="train on the samples")
    parser.add_argument(
        "--export", type=Path, default=None, help="write trunk and draft as a checkpoint here"
    )
    parser.add_argument("--corpus", type=Path, default=None, help="folder of the corpus files, for --sample")
    parser.add_argument("--samples", type=Path, required=True, help="folder of sampled rows")
    parser.add_argument("--state", type=Path, required=True, help="folder of the resumable state")
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds, of each part by itself")
    parser.add_argument("--seed", type=int, default=41)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--prompts", type=int, default=20000, help="prompts to choose from")
    sampling.add_argument("--slots", type=int, default=1024, help="sequences written at once")
    sampling.add_argument("--sample-steps", type=int, default=1024, help="steps, a token of each slot")
    sampling.add_argument("--chunk-steps", type=int, default=32, help="steps of one call")
    sampling.add_argument("--max-tokens", type=int, default=256, help="tokens of a sequence, prompt included")
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=1500, help="steps of the whole run")
    training.add_argument("--until", type=int, default=None, help="step at which this command ends")
    training.add_argument("--fit-time", action="store_true", help="shorten the run to end within the limit")
    training.add_argument("--call-steps", type=int, default=25, help="steps of one call, and of a report")
    training.add_argument("--batch-rows", type=int, default=32, help="rows of 512 tokens of a step")
    training.add_argument("--anchors", type=int, default=64, help="blocks of a row")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and run the parts it asks for, in order."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not (options.sample or options.train or options.export):
        parser.error("nothing to do: got none of --sample, --train, --export; name at least one")
    if options.sample and options.corpus is None:
        parser.error("--sample: got no --corpus, expected the folder of the corpus files; add it")
    document = nano_config_document(with_draft=True)
    run = DraftRun(parse_config(document), OFFICIAL, options.batch_rows, options.anchors, options.seed)
    trunk_config = read_config(NANO_FOLDER)
    weights = load_weights(NANO_FOLDER, trunk_config, OFFICIAL.compute_dtype).replace(draft=None)
    tokenizer = Tokenizer.from_folder(NANO_FOLDER)
    print_now(f"on {jax.devices()[0].device_kind}")
    if options.sample:
        prompts = read_prompts(options.corpus, tokenizer, options.prompts, options.seed)
        sizes = (options.slots, options.sample_steps, options.chunk_steps, options.max_tokens, options.seed)
        plain = jax.jit(plain_weights, static_argnums=1)(weights, OFFICIAL.compute_dtype)
        sample_answers(
            *(SamplingRun(*sizes), plain, trunk_config, prompts, options.samples),
            *(tokenizer.pad_token_id, options.time_limit, print_now),
        )
    if options.train:
        strides = -(-options.steps // options.call_steps)
        num_steps = strides * options.call_steps
        pace = Pace(
            num_steps=num_steps,
            until=num_steps if options.until is None else options.until,
            call_steps=options.call_steps,
            time_limit=options.time_limit,
            fits_time=options.fit_time,
        )
        train(run, document, weights, read_samples(options.samples), options.state, pace, print_now)
    if options.export is not None:
        state = DraftState(run, weights.norm, options.steps)
        state.restore(options.state, document)
        export_draft(state, document, weights, options.export)
        print_now(json.dumps({"exported": str(options.export), "step": state.step, "of": state.num_steps}))


if __name__ == "__main__":
    main()
