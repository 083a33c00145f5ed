"""States, programs and step times of a number of sequences together: what the benchmark of drafts runs.

Separate from `spec.py`, which lets the arms take turns and says what came of it.
Read next: `spec.py`.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from spec_models import PROMPT_TOKENS, SpecModel

from deepinfer_jax import EngineConfig, SamplingParams
from deepinfer_jax.config import NOTHING, CacheConfig
from deepinfer_jax.engine.drafting import Drafting, row_tile
from deepinfer_jax.engine.platform import REPEATABLE, compiled_with, program
from deepinfer_jax.plans import BARE_STEP, PLAIN_STEP, SLOT_BUCKETS, Admission, bucket_for
from deepinfer_jax.slot_parameters import slot_parameters
from deepinfer_jax.spec_decode.costs import CostTable, MeasuredEngine
from deepinfer_jax.speculate import SpeculationPlan, speculate_step
from deepinfer_jax.step import ONE_DEVICE, admit_step, decode_step, initial_state
from deepinfer_jax.step_state import DraftOutput, EngineState, StepOutput

ARMS = ("none", "fixed", "dynamic")
WARM_TOKENS = 8
"""Tokens of its own that the model writes before the state that every segment starts from."""

CUT_CONTEXT = 1024
"""Tokens of each sequence of the cut model, whatever they are: steps cost by the context."""

COST_STEPS, CUT_COST_STEPS = 6, 2
"""Steps timed together for one entry of the cost table: fewer of the cut model, whose steps take long."""

MOST_BUDGETS = 7
"""Budgets that are timed; the table is linear between."""

STARTED = time.perf_counter()

type Step = Callable[[EngineState], tuple[EngineState, StepOutput]]


def seconds_so_far() -> float:
    """Give the seconds since the start."""
    return time.perf_counter() - STARTED


def say(text: str) -> None:
    """Print progress with the seconds since the start."""
    print(f"[{seconds_so_far():7.1f} s] {text}", flush=True)


def engine_options(model: SpecModel, concurrency: int, tokens: int, drafts: str) -> EngineConfig:
    """Size an engine so that no sequence fills its pages: some get thrice as many tokens as the mean."""
    context = PROMPT_TOKENS + WARM_TOKENS + 3 * tokens + 8 * COST_STEPS
    if model.name == "cut":
        context = max(context, CUT_CONTEXT)
    slots = bucket_for(concurrency, SLOT_BUCKETS, "concurrency")
    return EngineConfig(num_slots=slots, max_context=context, drafts=drafts)


def admitted(model: SpecModel, sizes: CacheConfig, concurrency: int, prompts: np.ndarray) -> EngineState:
    """Make a state in which each sequence has its first prompt token."""
    slots, config = sizes.num_slots, model.config
    is_forbidden = np.zeros(config.vocab_size, bool)
    is_forbidden[[config.image_token_id, *model.forbidden_ids]] = True
    params = [
        SamplingParams(max_tokens=10**6, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(slots)
    ]
    nothing = np.zeros(slots, np.int32)
    is_there = np.arange(slots) < concurrency
    admission = Admission(
        is_admitted=is_there,
        page_table=np.arange(sizes.num_pages, dtype=np.int32).reshape(slots, -1),
        decoder_starts=nothing,
        lengths=nothing,
        tokens=prompts[:, 0],
        is_running=is_there,
        prompt_lengths=np.full(slots, prompts.shape[1], np.int32),
        num_generated=nothing,
        parameters=slot_parameters(params, config.eos_token_id),
    )
    state = initial_state(is_forbidden, sizes=sizes, config=config, numerics=model.numerics)
    return admit_step(state, admission)


def with_prompts(step: Step, state: EngineState, prompts: np.ndarray) -> EngineState:
    """Run the prompts token by token in the program that is timed later, then tokens of the model's own."""
    for place in range(1, prompts.shape[1]):
        state, _ = step(state)
        state = state.replace(tokens=jnp.asarray(prompts[:, place]))
    for _ in range(WARM_TOKENS):
        state, _ = step(state)
    return jax.block_until_ready(state)


def copied(state: EngineState) -> EngineState:
    """Copy a state, as steps consume theirs."""
    return jax.tree.map(jnp.copy, state)


@dataclass
class Segment:
    """What one arm did in one round.

    Attributes:
        seconds: from the first step given to the device to the last one read.
        outputs: of all steps, still on the device.
        state: after it.
    """

    seconds: float
    outputs: list[StepOutput]
    state: EngineState

    @property
    def num_tokens(self) -> int:
        """Count the tokens of all sequences."""
        return sum(int(np.asarray(output.num_tokens).sum()) for output in self.outputs)


def run_segment(step: Step, state: EngineState, num_tokens: int) -> Segment:
    """Run steps until there are enough tokens, one step ahead of the host.

    Args:
        step: the arm's.
        state: to start from; consumed.
        num_tokens: of all sequences together; what a step has beyond counts too.

    Returns:
        The segment.
    """
    jax.block_until_ready(state)
    outputs: list[StepOutput] = []
    count, started = 0, time.perf_counter()
    while count < num_tokens:
        state, output = step(state)
        outputs.append(output)
        if len(outputs) > 1:
            latest = int(np.asarray(outputs[-2].num_tokens).sum())
            if not latest:
                raise RuntimeError(
                    "segment: got a step without tokens, expected some from every sequence; is a row of "
                    "logits no distribution, or a sequence at the end of its pages?"
                )
            count += latest
    outputs[-1].tokens.block_until_ready()
    return Segment(time.perf_counter() - started, outputs, state)


@dataclass
class Bench:
    """Programs and states of one number of sequences.

    Attributes:
        model: whose steps run.
        concurrency: sequences.
        tokens: of a sequence in a segment, on average.
        compile_s: seconds until each program had run once.
    """

    model: SpecModel
    concurrency: int
    tokens: int
    compile_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model, config = self.model, self.model.config
        self.static = {"config": config, "numerics": model.numerics}
        modes = {"none": "off", "fixed": "fixed", "dynamic": "fixed"}
        self.options = {arm: engine_options(model, self.concurrency, self.tokens, modes[arm]) for arm in ARMS}
        self.sizes = {arm: self.options[arm].cache_sizes(config) for arm in ARMS}
        self.slots = self.sizes["none"].num_slots
        self.is_active = np.arange(self.slots) < self.concurrency
        self.drafting = {"fixed": self._control("fixed", None)}
        self.speculation = self.drafting["fixed"].speculation
        # An engine without drafts does not have their weights either.
        undrafted = model.weights.replace(draft=None)
        self.weights = {"none": undrafted, "bare": undrafted, "plain": model.weights, "fixed": model.weights}
        self.programs = {name: self.program(name) for name in self.weights}
        self.states = {name: self._prepared(name) for name in ("none", "fixed")}
        for name in ("plain", "bare"):
            started = time.perf_counter()
            jax.block_until_ready(self.plain_step(name)(copied(self.states["fixed"])))
            self._note_compiled(name, started)

    def _control(self, drafts: str, costs: CostTable | None) -> Drafting:
        options = engine_options(self.model, self.concurrency, self.tokens, drafts)
        sizes = options.cache_sizes(self.model.config)
        return Drafting(self.model.config, options, sizes, self.model.numerics, self.model.calibration, costs)

    def plan(self, arm: str = "fixed", choice: int = NOTHING) -> SpeculationPlan:
        """Give what steps of an arm are told, on the device."""
        return jax.device_put(self.drafting[arm].plan(self.is_active, choice))

    def program(self, name: str, compiler: dict[str, Any] | None = None) -> Callable[..., Any]:
        """Give "none" (decoding), "fixed" (decoding with drafts, whatever the schedule), "plain" or "bare"
        (steps of "dynamic" without), with options of the compiler: by default those of an engine here."""
        options: dict[str, Any] = dict(self.static)
        step = speculate_step if name == "fixed" else decode_step
        if name == "fixed":
            options["speculation"] = self.speculation
        if compiler is None:
            compiled = program(step, ONE_DEVICE, self.model.numerics)
        else:
            compiled = compiled_with(step, tuple(compiler.items()))
        return lambda weights, state, told: compiled(weights, state, told, **options)

    def step(self, arm: str, choice: int = NOTHING, program: Callable[..., Any] | None = None) -> Step:
        """Give the step of an arm, with everything but the state filled in."""
        name = "none" if arm == "none" else "fixed"
        run, weights = program or self.programs[name], self.weights[name]
        told = jax.device_put(self.is_active) if arm == "none" else self.plan(arm, choice)
        return lambda state: run(weights, state, told)

    def plain_step(self, name: str = "plain") -> Step:
        """Give the step that drafts nothing, in the state of an engine that does; or the "bare" one."""
        run, weights, is_active = self.programs[name], self.weights[name], jax.device_put(self.is_active)
        return lambda state: run(weights, state, is_active)

    def dynamic_step(self) -> Step:
        """Give the step of "dynamic" as an engine runs it: plain for a while where no draft paid."""
        drafting, slots = self.drafting["dynamic"], np.flatnonzero(self.is_active).tolist()
        unread: list[tuple[int, StepOutput]] = []
        plans: dict[int, SpeculationPlan] = {}
        without = {PLAIN_STEP: self.plain_step(), BARE_STEP: self.plain_step("bare")}
        nothing = jnp.zeros(self.slots, jnp.int32)
        logits = jnp.zeros((self.slots, self.model.config.draft.block_size), jnp.float32)
        is_active = jax.device_put(self.is_active)
        no_drafts = DraftOutput(nothing, nothing, is_active.astype(jnp.int32), logits, nothing)

        def step(state: EngineState) -> tuple[EngineState, StepOutput]:
            if len(unread) > 1:
                told, output = unread.pop(0)
                drafting.rest.note(told, int(np.asarray(output.drafts.choice)[0]), len(slots))
            told = drafting.choice(slots)
            if told in without:
                state, output = without[told](state)
                output = output.replace(drafts=no_drafts)
            else:
                if told not in plans:
                    plans[told] = self.plan("dynamic", told)
                state, output = self.programs["fixed"](self.weights["fixed"], state, plans[told])
            unread.append((told, output))
            return state, output

        return step

    def _note_compiled(self, name: str, started: float) -> None:
        self.compile_s[name] = round(time.perf_counter() - started, 1)
        say(f"{self.concurrency}: first step of {name!r} after {self.compile_s[name]} s")

    def _prompts(self) -> np.ndarray:
        prompts = [self.model.prompts[slot % len(self.model.prompts)] for slot in range(self.slots)]
        return np.asarray(prompts, np.int32)

    def _prepared(self, name: str) -> EngineState:
        """Run prompts, without any draft, so that both programs' states hold the same tokens."""
        prompts, started = self._prompts(), time.perf_counter()
        state = admitted(self.model, self.sizes[name], self.concurrency, prompts)
        step = self.step(name, choice=0)
        state, _ = step(state)
        jax.block_until_ready(state)
        self._note_compiled(name, started)
        state = admitted(self.model, self.sizes[name], self.concurrency, prompts)
        state = with_prompts(step, state, prompts)
        if self.model.name == "cut":
            left = 3 * self.tokens + 8 * COST_STEPS
            length = self.sizes[name].capacity - left
            state = state.replace(lengths=jnp.full(self.slots, length, jnp.int32))
        return state

    def _identity(self) -> MeasuredEngine:
        tile = row_tile(self.model.numerics, ONE_DEVICE)
        return MeasuredEngine(
            *(jax.devices()[0].device_kind, jax.__version__, self.model.name, "as run", self.slots),
            *(self.sizes["fixed"].pages_per_slot, self.model.config.draft.block_size, tile),
        )

    def measure_costs(self, repeats: int) -> CostTable:
        """Time steps of every kind in turn, and keep the table for "dynamic"."""
        budgets, uniform = self.speculation.budgets, self.speculation.uniform
        feasible = [1 + place for place, rows in enumerate(budgets) if rows >= self.concurrency]
        places = np.linspace(0, len(feasible) - 1, min(MOST_BUDGETS, len(feasible)))
        budgets_timed = [feasible[place] for place in sorted({int(place) for place in places})]
        # Told what to verify, by the schedule that obeys; nothing is weighed by these numbers.
        today = datetime.date.today().isoformat()
        unknown = CostTable(self._identity(), today, {1: 1.0}, {1: 0.0}, 1.0)
        self.drafting["dynamic"] = self._control("dynamic", unknown)
        steps = {choice: self.step("dynamic", choice) for choice in (0, *budgets_timed, uniform)}
        steps[PLAIN_STEP] = self.plain_step()
        times: dict[int, list[float]] = {choice: [] for choice in steps}
        count = CUT_COST_STEPS if self.model.name == "cut" else COST_STEPS
        # One repeat more: the first of each kind is not counted.
        for repeat in range(repeats + 1):
            for choice, step in steps.items():
                state = jax.block_until_ready(copied(self.states["fixed"]))
                started = time.perf_counter()
                for _ in range(count):
                    state, _ = step(state)
                jax.block_until_ready(state)
                if repeat:
                    times[choice].append(1000 * (time.perf_counter() - started) / count)
        step_ms = {choice: statistics.median(found) for choice, found in times.items()}
        table = cost_table(step_ms, budgets, self.concurrency, self._identity())
        self.drafting["dynamic"] = self._control("dynamic", table)
        return table

    def measure_dispatch(self, steps: int = 6) -> list[dict[str, Any]]:
        """Time calls until they return and until they are done, with an engine's options and without."""
        compilers = {"no options": {}, "no clock": REPEATABLE, "as an engine": None}
        found = []
        for name in ("none", "fixed"):
            for label, compiler in compilers.items():
                run = self.program(name, compiler)
                step, state = self.step(name, program=run), copied(self.states[name])
                state, output = step(state)
                output.tokens.block_until_ready()
                returned, done = [], []
                for _ in range(steps):
                    started = time.perf_counter()
                    state, output = step(state)
                    returned.append(1000 * (time.perf_counter() - started))
                    output.tokens.block_until_ready()
                    done.append(1000 * (time.perf_counter() - started))
                found.append(
                    {
                        "name": f"dispatch of a step, {name}, {label}",
                        "value": round(statistics.median(returned), 3),
                        "unit": "ms",
                        "step_ms": round(statistics.median(done), 3),
                    }
                )
        return found


def cost_table(
    step_ms: dict[int, float], budgets: Sequence[int], concurrency: int, engine: MeasuredEngine
) -> CostTable:
    """Make a cost table of the times of whole steps.

    Args:
        step_ms: milliseconds by choice: 0 without drafts, 1..G budgets (some may be missing), G + 1;
            `PLAIN_STEP` for the step that knows no drafts.
        budgets: rows of choices 1..G.
        concurrency: sequences that ran.
        engine: what was measured.

    Returns:
        The table. Drafting costs what a step of the fewest rows takes longer than the same rows without.
    """
    uniform = len(budgets) + 1
    measured = sorted(choice for choice in step_ms if 0 < choice < uniform)
    undrafted = step_ms[0]
    draft = max(step_ms[measured[0]] - undrafted, 0.0)
    # However noisy the clock, no number of rows takes less than the fewest.
    verify = {budgets[choice - 1]: max(step_ms[choice] - draft, undrafted) for choice in measured}
    today = datetime.date.today().isoformat()
    uniform_ms, plain = max(step_ms[uniform] - draft, undrafted), {concurrency: step_ms[PLAIN_STEP]}
    return CostTable(engine, today, verify, {concurrency: draft}, uniform_ms, plain)
