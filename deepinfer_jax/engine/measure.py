"""Step times of an engine with drafts: measured once, kept in a file, found again by the next engine.

Separate because measuring runs an engine's own programs, and `spec_decode/costs.py` knows numbers only.
Read next: `../spec_decode/costs.py` (the table and its file), `start.py` (who looks for one).
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from ..config import ModelConfig
from ..engine_config import EngineConfig
from ..plans import DRAFT_MODES, PLAIN_STEP, ROWS_PER_BLOCK, Admission, PromptSpan, StepPlan, prefill_plans
from ..sampling_params import RequestError, SamplingParams
from ..sharding.place import mesh_shape
from ..slot_parameters import slot_parameters
from ..spec_decode.budgets import NO_DRAFT
from ..spec_decode.costs import CostTable, CostTableError, MeasuredEngine, default_path
from .drafting import row_tile
from .engine import Engine
from .load import Model
from .target import num_row_shares, num_slot_shares

type Progress = Callable[[int, int], object]
"""Called with (steps run, steps to run)."""

MOST_TOKENS = 10**6
"""Tokens that no slot reaches while it is measured."""

STEPS_TOGETHER = 2
"""Steps in a row that one sample is the mean of, after one that is not counted."""


class _Case(NamedTuple):
    """A step to time: what the schedule is told, and how many slots of each device run."""

    choice: int
    num_active: int


def refuse_without_drafts(config: ModelConfig) -> None:
    """Refuse a model that drafts nothing.

    Raises:
        RequestError: for it.
    """
    if not config.draft.num_stages:
        raise RequestError(
            "costs: got a model without draft stages (num_nextn_predict_layers is 0), expected one with "
            "them, as only their schedules weigh step times; use a checkpoint with `mtp.*` tensors"
        )


def identify(model: Model, options: EngineConfig) -> MeasuredEngine:
    """Say all that the step times of an engine depend on.

    Args:
        model: what runs; its weights are not read.
        options: how requests are run; where drafts are off, the engine is the one with drafts on.

    Returns:
        The words and sizes that name a table.

    Raises:
        RequestError: a model without draft stages, or a context beyond the model's.

    Source: spec/dspark.md section 5.3 (what a profile is keyed by).
    """
    target, numerics = model.target, model.numerics
    shares = num_slot_shares(target)
    with_drafts = options if options.drafts != DRAFT_MODES[0] else replace(options, drafts="dynamic")
    sizes = with_drafts.cache_sizes(model.config, shares)
    device, layout = jax.local_devices()[0].device_kind, target.layout.name
    if target.mesh is not None:
        axes = ",".join(f"{name}={size}" for name, size in mesh_shape(target.mesh).axes)
        device = f"{target.mesh.devices.flat[0].device_kind} x {target.mesh.size}"
        layout = f"{layout} on {axes}"
    words = [numerics.name, numerics.cache_format]
    words += [] if numerics.batch_invariant else ["not batch invariant"]
    words += [] if numerics.implementation is None else [f"kernels {numerics.implementation}"]
    # The other modes compare laws, which takes longer.
    words += [] if options.verification == "coupled" else [f"verification {options.verification}"]
    return MeasuredEngine(
        device=device,
        jax_version=jax.__version__,
        model=model.name,
        numerics=", ".join(words),
        num_slots=sizes.num_slots // shares,
        pages_per_slot=sizes.pages_per_slot,
        block_size=model.config.draft.block_size,
        row_tile=row_tile(numerics, target),
        layout=layout,
    )


def find_costs(model: Model, options: EngineConfig) -> tuple[CostTable | None, str | None]:
    """Look for the table that was measured for an engine.

    Args:
        model: what runs.
        options: how requests are run.

    Returns:
        The table and None; or None and why there is none that holds, with what to do.

    Raises:
        RequestError: as `identify`.
    """
    mesh = model.target.mesh
    if mesh is not None and mesh.is_multi_process:
        return None, "several processes share the mesh, and each may have another table; use drafts='fixed'"
    engine = identify(model, options)
    path = default_path(engine)
    try:
        table = CostTable.load(path)
    except FileNotFoundError:
        missing = "no step times were measured for this engine; measure them once"
        return None, _of_another_jax(engine) or missing
    except (CostTableError, OSError) as error:
        return None, str(error)
    reason = table.check(engine)
    return (table, None) if reason is None else (None, reason)


def measure_costs(
    model: Model,
    options: EngineConfig = EngineConfig(),  # noqa: B008 (frozen)
    steps: int = 5,
    progress: Progress | None = None,
    *,
    context: int | None = None,
    keep: bool = False,
) -> CostTable:
    """Time the steps that "dynamic" weighs, in an engine of the given sizes.

    Every slot holds a sequence of the given length. With T(c, R) the time of a step with choice c and R
    slots running, drafting takes T(smallest budget of R rows or more, R) - T(no draft, R), and verifying N
    rows takes T(budget N, R) less that; the step that knows no drafts is timed beside them. Times are medians
    of interleaved rounds, so that a device that slows down does so for all; the first step of each kind is
    not counted.

    Args:
        model: from `load`, with draft stages.
        options: sizes and verification of the engine; which schedule of drafts does not matter.
        steps: rounds.
        progress: told how far it is.
        context: tokens of every sequence; half of what a slot can hold by default.
        keep: whether to write the table where engines look for it.

    Returns:
        The table, in milliseconds.

    Raises:
        RequestError: a model without draft stages, processes that share a mesh, no steps, or a context that
            leaves no room for a block.

    Source: spec/dspark.md section 5.3.
    """
    refuse_without_drafts(model.config)
    mesh = model.target.mesh
    if steps < 1 or (mesh is not None and mesh.is_multi_process):
        raise RequestError(
            f"costs: got {steps} steps on mesh {mesh}, expected 1 or more, and one process; change the call"
        )
    identity, today = identify(model, options), datetime.date.today().isoformat()
    # Nothing is weighed by it: each step is told what to verify.
    unknown = CostTable(identity, today, {1: 1.0}, {1: 0.0}, 1.0)
    asked = replace(
        options, drafts="dynamic", max_drafts=None, choose_on_host=False, overlap=0, prefix_cache=False
    )
    arguments = (model.weights, model.config, model.numerics, asked, model.forbidden_ids, model.target)
    engine = Engine(*arguments, model.calibration, unknown)
    try:
        bench = _Bench(engine, context)
        counts, cases = bench.cases()
        times = _medians(bench, cases, steps, progress or (lambda done, total: None))
        table = _table(bench, counts, times, unknown)
    finally:
        engine.close()
    if keep:
        table.save(default_path(identity))
    return table


class _Bench:
    """An engine whose slots are full, and single steps of it."""

    def __init__(self, engine: Engine, context: int | None) -> None:
        assert engine.drafting is not None
        self.engine, self.runner, sizes = engine, engine.runner, engine.sizes
        self.budgets, self.uniform = engine.drafting.speculation.budgets, engine.drafting.speculation.uniform
        self.slots = engine.drafting.slots_each
        limit = min(sizes.capacity, engine.config.max_position_embeddings)
        most = limit - (1 + STEPS_TOGETHER) * (engine.drafting.block_size + 1)
        length = min(limit // 2, most) if context is None else context
        if not 1 <= length <= most:
            raise RequestError(
                f"context: got {length}, expected 1..{most}, as a slot holds {limit} tokens and each of "
                f"{1 + STEPS_TOGETHER} steps in a row adds a block; change it, or max_context"
            )
        self.admission = self._run_prompts(length)

    def _run_prompts(self, length: int) -> Admission:
        """Run a prompt in every slot, and say how all are put at the given length."""
        engine, sizes, target = self.engine, self.engine.sizes, self.engine.target
        slots, nothing = sizes.num_slots, np.zeros(sizes.num_slots, np.int32)
        # As long as one step allows, so that its program is the one that requests need.
        count = min(length, max(ROWS_PER_BLOCK, engine.options.max_rows // self.slots))
        allowed = np.flatnonzero(~self.runner.is_forbidden).astype(np.int32)
        prompts = np.random.default_rng(0).choice(allowed, (slots, count))
        params = SamplingParams(max_tokens=MOST_TOKENS, ignore_eos=True)
        admission = Admission(
            is_admitted=np.ones(slots, bool),
            page_table=self._page_table(),
            decoder_starts=nothing,
            lengths=nothing,
            tokens=nothing,
            is_running=np.zeros(slots, bool),
            prompt_lengths=np.full(slots, count, np.int32),
            num_generated=nothing,
            parameters=slot_parameters([params] * slots, engine.config.eos_token_id),
        )
        self.runner.run(StepPlan(admission=admission))
        spans = [PromptSpan(slot, prompts[slot], 0, count) for slot in range(slots)]
        shares = num_slot_shares(target), num_row_shares(target)
        for plan in prefill_plans(spans, slots, engine.options.max_rows, None, *shares):
            self.runner.run(StepPlan(prefill=plan))
        lengths, is_running = np.full(slots, length, np.int32), np.ones(slots, bool)
        return admission._replace(lengths=lengths, tokens=prompts[:, -1], is_running=is_running)

    def _page_table(self) -> np.ndarray:
        """Give every slot its pages; slots share some where there are fewer, which takes as long."""
        sizes, shares = self.engine.sizes, num_slot_shares(self.engine.target)
        pages_each = sizes.num_pages // shares
        own = np.arange(self.slots * sizes.pages_per_slot) % pages_each
        pages = own[None, :] + pages_each * np.arange(shares)[:, None]
        return pages.reshape(sizes.num_slots, sizes.pages_per_slot).astype(np.int32)

    def cases(self) -> tuple[list[int], list[_Case]]:
        """List the numbers of running slots that are tried, and the steps to time."""
        quarters = [-(-self.slots * part // 4) for part in range(1, 5)]
        # Stages run on whole tiles of slots.
        tile = self.engine.numerics.slot_tile
        whole = [min(self.slots, -(-count // tile) * tile) for count in quarters]
        counts = sorted({1, *whole, *(self.fitting(budget) for budget in self.budgets)})
        cases = [_Case(choice, count) for choice in (PLAIN_STEP, NO_DRAFT) for count in counts]
        cases += [_Case(self.smallest(count), count) for count in counts]
        cases += [_Case(1 + place, self.fitting(rows)) for place, rows in enumerate(self.budgets)]
        return counts, list(dict.fromkeys([*cases, _Case(self.uniform, self.slots)]))

    def smallest(self, count: int) -> int:
        """Give the choice whose budget just holds some running slots."""
        return 1 + next(place for place, rows in enumerate(self.budgets) if rows >= count)

    def fitting(self, budget: int) -> int:
        """Count the slots that a budget is timed with: all, or as many as it has rows."""
        return min(self.slots, budget)

    def milliseconds(self, case: _Case) -> float:
        """Time steps as an engine gives them, the next one before it reads the last: from read to read."""
        self.runner.run(StepPlan(admission=self.admission))
        jax.block_until_ready(self.runner.state)
        slots = np.arange(self.engine.sizes.num_slots) % self.slots
        plan = StepPlan(is_decoding=slots < case.num_active, draft_choice=case.choice)
        unread, read_at = self.runner.run(plan), []
        for _ in range(STEPS_TOGETHER):
            following = self.runner.run(plan)
            self.runner.read(unread)
            read_at.append(time.perf_counter())
            unread = following
        self.runner.read(unread)
        return 1000 * (time.perf_counter() - read_at[0]) / STEPS_TOGETHER


def _medians(bench: _Bench, cases: Sequence[_Case], steps: int, progress: Progress) -> dict[_Case, float]:
    """Run all cases in turn, several times over."""
    found: dict[_Case, list[float]] = {case: [] for case in cases}
    for number in range(1 + steps):
        for place, case in enumerate(cases):
            milliseconds = bench.milliseconds(case)
            if number:
                found[case].append(milliseconds)
            progress(number * len(cases) + place + 1, (1 + steps) * len(cases))
    return {case: float(np.median(values)) for case, values in found.items()}


def _table(bench: _Bench, counts: Sequence[int], times: dict[_Case, float], unknown: CostTable) -> CostTable:
    """Take the time of drafting out of the steps that drafted."""
    undrafted = {count: times[_Case(NO_DRAFT, count)] for count in counts}
    drafting = {
        count: max(times[_Case(bench.smallest(count), count)] - undrafted[count], 0.0) for count in counts
    }

    def verifying(case: _Case) -> float:
        # No more rows take less than the anchors alone.
        return max(times[case] - drafting[case.num_active], undrafted[case.num_active])

    verify = {
        rows: verifying(_Case(1 + place, bench.fitting(rows))) for place, rows in enumerate(bench.budgets)
    }
    if unknown.engine.row_tile is None:
        verify |= {count: undrafted[count] for count in counts if count < bench.budgets[0]}
    return replace(
        unknown,
        verify_ms=rising(verify),
        draft_ms=rising(drafting),
        uniform_ms=verifying(_Case(bench.uniform, bench.slots)),
        plain_ms=rising({count: times[_Case(PLAIN_STEP, count)] for count in counts}),
    )


def rising(points: Mapping[int, float]) -> dict[int, float]:
    """Average neighbours until no larger size takes less: the nearest rising times in least squares.

    A table goes on with the largest time so far, so one slow small step would count for all others.

    Args:
        points: size -> milliseconds.

    Returns:
        The same sizes in order, with times that never fall.
    """
    groups: list[tuple[float, int]] = []
    for size in sorted(points):
        mean, count = points[size], 1
        while groups and groups[-1][0] > mean:
            before, number = groups.pop()
            mean, count = (before * number + mean * count) / (number + count), number + count
        groups.append((mean, count))
    times = [mean for mean, count in groups for _ in range(count)]
    return dict(zip(sorted(points), times, strict=True))


def _of_another_jax(engine: MeasuredEngine) -> str | None:
    """Say that the same engine was measured with another version of JAX, None if it was not."""
    found: list[CostTable] = []
    for path in default_path(engine).parent.glob("*.json"):
        try:
            found.append(CostTable.load(path))
        except (CostTableError, OSError):
            # A damaged table of another engine is that engine's matter.
            continue
    same = [one for one in found if replace(one.engine, jax_version=engine.jax_version) == engine]
    return max(same, key=lambda one: one.date).check(engine) if same else None
