"""One step with drafts: draft, choose how many to verify, verify, accept, keep what was accepted.

Separate from `step.py` because an engine without drafts needs none of it; the tokens are those of its
`decode_step`, several at a time. One jitted call without a look at the host.
Read next: `spec_decode/draft.py`, `spec_decode/budgets.py`, `spec_decode/verify.py`, in the order of a step.

Where rows run in tiles on one device, tiles without rows are skipped, so that one program serves every
number of rows. Elsewhere each budget is a branch of its own, and the uniform block one more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .arithmetic import map_used_tiles, zeros_of
from .arrays import Array
from .config import ModelConfig
from .model.cache import Cache
from .model.draft_weights import words_of
from .model.numerics import Numerics
from .model.weights import Weights
from .plans import DRAFT_MODES, PROBE
from .sampling.logits import is_greedy
from .sampling.randomness import DRAFT_TOKEN, SAMPLE_TOKEN
from .sampling.state import RUNNING, SamplerState, finish_reasons, record_tokens
from .sharding.exchange import largest_of, total_of
from .sharding.layout import SINGLE, Layout
from .sharding.target import ONE_DEVICE, Target
from .spec_decode.budgets import (
    NO_DRAFT,
    StepCosts,
    budget_numerators,
    budget_thetas,
    choose_budget,
    chosen_lengths,
)
from .spec_decode.draft import Anchors, Drafts, draft_states, draft_tokens
from .spec_decode.schedule import (
    cap_survivals,
    early_stop_lengths,
    full_lengths,
    survivals,
    threshold_lengths,
)
from .spec_decode.verify import cut_at_stop
from .spec_decode.verify_pass import Verdict, verify_drafts
from .step_state import DraftOutput, DraftState, EngineState, StepOutput, state_words

DYNAMIC = DRAFT_MODES.index("dynamic")

PROBE_STEPS = 32
"""Steps without drafts after which one drafts, to see whether it would pay again."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Static choices of steps with drafts; how many drafts are verified is no such choice.

    Args:
        verification: one of `VERIFICATION_MODES`.
        budgets: rows of a verify step on each device that "dynamic" chooses from, rising; empty where the
            uniform block, or no draft, is all there is.
    """

    verification: str
    budgets: tuple[int, ...]

    @property
    def uniform(self) -> int:
        """The choice that verifies the full block of every slot."""
        return len(self.budgets) + 1


class SpeculationPlan(NamedTuple):
    """What the host tells a step with drafts.

    Attributes:
        is_active: bool [B]; other slots, and those that are not running, do not change.
        schedule: int32 [], place of the schedule in `DRAFT_MODES`.
        max_drafts: int32 [], drafts of a slot that are verified at most.
        choice: int32 [], 0 for no drafts, b for budget b, one more than there are for the uniform block;
            NOTHING to choose on the device, `PROBE` to draft and verify as little as can be.
        threshold: float32 [], confidence below which "threshold" stops.
        temperatures: float32 [3, K], of the confidence logits of greedy, sampled and filtered requests.
        shifts: float32 [3, K], added to the logits before.
        bases: float32 [3, K], 0 or more, added to the odds e^z of the logits z before that.
        costs: times of drafting, of verifying and of steps without either, on one device.
        row_ms: float32 [B (K + 1) + 1], time of verifying some rows, by their number, for "early_stop".
    """

    is_active: Any
    schedule: Any
    max_drafts: Any
    choice: Any
    threshold: Any
    temperatures: Any
    shifts: Any
    bases: Any
    costs: StepCosts
    row_ms: Any


PLAN_WORDS = SpeculationPlan(
    is_active=("slots",),
    schedule=(),
    max_drafts=(),
    choice=(),
    threshold=(),
    temperatures=(),
    shifts=(),
    bases=(),
    costs=StepCosts((), (), ()),
    row_ms=(),
)


_STATIC = ("config", "numerics", "speculation", "num_logprobs", "target")


@partial(jax.jit, static_argnames=_STATIC, donate_argnames=("state",))
def speculate_step(
    weights: Weights,
    state: EngineState,
    plan: SpeculationPlan,
    *,
    config: ModelConfig,
    numerics: Numerics,
    speculation: Speculation,
    num_logprobs: int = 0,
    target: Target = ONE_DEVICE,
) -> tuple[EngineState, StepOutput]:
    """Give each active slot its next tokens: drafts that the model confirms, and one more. Consumes `state`.

    Args:
        weights: the loaded weights, draft stages included.
        state: state of the slots, with rings of at least K rows more than the model reads.
        plan: what the host tells.
        config: the architecture.
        numerics: the choice of arithmetic.
        speculation: how drafts are scheduled and verified.
        num_logprobs: most probable tokens to report.
        target: where weights and state lie.

    Returns:
        The state, as if the tokens had come one by one, and the tokens.

    Source: spec/dspark.md sections 3 and 9.
    """
    layout = target.layout.while_decoding

    def run(weights: Weights, state: EngineState, plan: SpeculationPlan) -> tuple[EngineState, StepOutput]:
        is_active = jnp.asarray(plan.is_active) & state.is_running
        anchors = Anchors(state.tokens, state.lengths, is_active)
        caps = jnp.where(is_active, _caps(state, plan), 0)
        choice = _choose(state, plan, caps, is_active, speculation, layout)
        drafts = _draft(weights, state, choice, anchors, config, numerics, speculation, layout)
        chances = _survivals_of(drafts, state, plan)
        lengths = _lengths(choice, chances, plan, caps, is_active, speculation)
        verify = partial(
            verify_drafts,
            weights=weights,
            anchors=anchors,
            sampler=state.sampler,
            is_forbidden=state.is_forbidden,
            drafts=drafts,
            lengths=lengths,
            config=config,
            numerics=numerics,
            verification=speculation.verification,
            num_logprobs=num_logprobs,
            layout=layout,
        )
        cache, verdict = _in_budget(verify, state, choice, is_active, numerics, speculation, layout)
        has_drafted = choice != NO_DRAFT
        drafted = DraftState(
            survivals=jnp.where(
                (is_active & has_drafted)[:, None], chances.survivals, state.drafts.survivals
            ),
            choice=choice,
            num_skipped=jnp.where(has_drafted, 0, state.drafts.num_skipped + 1),
        )
        state, output = _commit(state.replace(cache=cache, drafts=drafted), verdict, is_active)
        told = DraftOutput(
            num_verified=lengths,
            num_accepted=jnp.minimum(verdict.num_tokens - 1, output.num_tokens),
            num_rows=jnp.where(is_active, 1 + lengths, 0),
            logits=drafts.confidences,
            choice=jnp.broadcast_to(choice, lengths.shape),
        )
        return state, output.replace(drafts=told)

    words = (words_of(weights, config), state_words(), PLAN_WORDS)
    return target.run(run, weights, state, plan, words=words, out=(state_words(), ("slots",)))


def _caps(state: EngineState, plan: SpeculationPlan) -> Array:
    """Count the drafts of each slot that may be verified, whatever they are: int32 [B].

    No more tokens than the request may get, and no row without a page.
    """
    cache, sampler = state.cache, state.sampler
    ratio, pages = next(iter(cache.compressed.items()))
    num_places = (cache.page_table >= 0).sum(axis=1, dtype=jnp.int32) * (pages.kv.shape[2] * ratio)
    room = jnp.minimum(sampler.max_tokens - sampler.num_generated, num_places - state.lengths) - 1
    return jnp.clip(room, 0, jnp.minimum(jnp.asarray(plan.max_drafts), state.drafts.survivals.shape[1]))


def _choose(
    state: EngineState,
    plan: SpeculationPlan,
    caps: Array,
    is_active: Array,
    speculation: Speculation,
    layout: Layout,
) -> Array:
    """Choose how many rows are verified, from what was known before this step's drafts: int32 []."""
    told = jnp.asarray(plan.choice)
    if not speculation.budgets:
        return jnp.where(told >= 0, told, speculation.uniform)
    costs = StepCosts(*(jnp.asarray(part) for part in plan.costs))
    capped = cap_survivals(state.drafts.survivals, caps, is_active)
    axes, most_rows = layout.axes_of("slots"), capped.size
    # 4 bytes a candidate over the axes of slots: all ranks choose the same.
    numerators = total_of(budget_numerators(capped, is_active, speculation.budgets), axes)
    most_active = largest_of(is_active.sum(dtype=jnp.int32), axes)
    thetas = budget_thetas(numerators, most_active, costs)
    chosen = choose_budget(thetas, state.drafts.choice)
    # A probe is to see confidences: the fewest rows there are, or all if no budget holds the anchors.
    holds = jnp.asarray((*speculation.budgets, most_rows), jnp.int32) >= most_active
    cheapest = 1 + jnp.argmax(holds).astype(jnp.int32)
    is_probe = (told == PROBE) | ((chosen == NO_DRAFT) & (state.drafts.num_skipped >= PROBE_STEPS))
    chosen = jnp.where(is_probe, cheapest, chosen)
    own = jnp.where(jnp.asarray(plan.schedule) == DYNAMIC, chosen, speculation.uniform)
    return jnp.where(told >= 0, told, own)


def _draft(
    weights: Weights,
    state: EngineState,
    choice: Array,
    anchors: Anchors,
    config: ModelConfig,
    numerics: Numerics,
    speculation: Speculation,
    layout: Layout,
) -> Drafts:
    """Draft a block for every active slot, or nothing at all."""
    is_coupled = speculation.verification == "coupled"
    num_slots = anchors.token_ids.shape[0]
    # Coupled output does not depend on what is drafted, so drafts need not be the same in every company.
    own = replace(numerics, batch_invariant=numerics.batch_invariant and not is_coupled)

    def draft_slots(slots: tuple[Anchors, SamplerState, Array]) -> Drafts:
        anchors, sampler, numbers = slots
        states = draft_states(weights, config, anchors, state.cache, own, layout, numbers)
        return draft_tokens(
            *(states, weights, config, anchors, sampler, state.is_forbidden, own),
            purpose=SAMPLE_TOKEN if is_coupled else DRAFT_TOKEN,
            wants_laws=not is_coupled,
            layout=layout,
        )

    def draft() -> Drafts:
        slots = (anchors, state.sampler, jnp.arange(num_slots, dtype=jnp.int32))
        if own.batch_invariant or layout != SINGLE:
            return draft_slots(slots)
        return map_used_tiles(draft_slots, slots, anchors.is_active, min(own.slot_tile, num_slots))

    return lax.cond(choice != NO_DRAFT, draft, lambda: zeros_of(draft))


class _Chances(NamedTuple):
    """Calibrated confidences and their products, float32 [B, K] each."""

    confidences: Array
    survivals: Array


def _survivals_of(drafts: Drafts, state: EngineState, plan: SpeculationPlan) -> _Chances:
    """Calibrate the confidences, each slot as it samples.

    c = sigmoid((log(e^z + base) + shift) / temperature).
    """
    sampler = state.sampler
    is_filtered = (sampler.top_k > 0) | (sampler.top_p < 1) | (sampler.min_p > 0)
    regime = jnp.where(is_greedy(sampler.temperature), 0, jnp.where(is_filtered, 2, 1))
    tables = plan.temperatures, plan.shifts, plan.bases
    temperatures, shifts, bases = (jnp.asarray(table)[regime] for table in tables)
    # No base has the logarithm minus infinity, which leaves the logit as it is, to the last bit.
    logits = jnp.logaddexp(drafts.confidences, jnp.log(bases))
    confidences = jax.nn.sigmoid((logits + shifts) / temperatures)
    return _Chances(confidences, survivals(confidences))


def _lengths(
    choice: Array,
    chances: _Chances,
    plan: SpeculationPlan,
    caps: Array,
    is_active: Array,
    speculation: Speculation,
) -> Array:
    """Count the drafts of each slot that are verified: int32 [B]."""
    capped = cap_survivals(chances.survivals, caps, is_active)
    draft_ms = jnp.asarray(plan.costs.draft_ms)[is_active.sum(dtype=jnp.int32)]
    lengths_of = {
        "fixed": full_lengths(caps, is_active),
        "dynamic": chosen_lengths(choice, capped, caps, is_active, speculation.budgets),
        "threshold": threshold_lengths(chances.confidences, jnp.asarray(plan.threshold), caps, is_active),
        "early_stop": early_stop_lengths(capped, is_active, draft_ms + jnp.asarray(plan.row_ms)),
    }
    schedules = jnp.stack([lengths_of[name] for name in DRAFT_MODES[1:]])
    return jnp.where(choice == NO_DRAFT, 0, schedules[jnp.asarray(plan.schedule) - 1])


def _in_budget(
    verify: Callable[..., tuple[Cache, Verdict]],
    state: EngineState,
    choice: Array,
    is_active: Array,
    numerics: Numerics,
    speculation: Speculation,
    layout: Layout,
) -> tuple[Cache, Verdict]:
    """Verify in a program with as many rows as were chosen."""
    if numerics.batch_invariant and layout == SINGLE:
        return verify(state.cache, is_dense=False, num_rows=None)
    dense = partial(verify, is_dense=True, num_rows=None)
    budgets = speculation.budgets
    if not budgets:
        return dense(state.cache)
    branches = [partial(verify, is_dense=False, num_rows=num_rows) for num_rows in budgets]
    # 4 bytes over the axes of slots: without drafts, the smallest budget that holds the fullest rank.
    most_active = largest_of(is_active.sum(dtype=jnp.int32), layout.axes_of("slots"))
    smallest = jnp.argmax(jnp.asarray(budgets, jnp.int32) >= most_active).astype(jnp.int32)
    branch = jnp.where(choice == NO_DRAFT, smallest, choice - 1)
    return lax.switch(branch, [*branches, dense], state.cache)


def _commit(state: EngineState, verdict: Verdict, is_active: Array) -> tuple[EngineState, StepOutput]:
    """Note the tokens as if they had come one by one, up to a stop token or a row without a distribution."""
    num_places = verdict.tokens.shape[1]
    places = jnp.arange(num_places, dtype=jnp.int32)[None, :]
    invalid_at = jnp.where(verdict.is_invalid, places, num_places).min(axis=1)
    num_valid = jnp.where(is_active, jnp.minimum(verdict.num_tokens, invalid_at), 0)
    num_tokens, is_stopped = cut_at_stop(verdict.tokens, num_valid, state.sampler.stop_ids)
    is_invalid = is_active & ~is_stopped & (invalid_at < verdict.num_tokens)
    last = jnp.take_along_axis(verdict.tokens, jnp.maximum(num_tokens - 1, 0)[:, None], axis=1)[:, 0]
    sampler = record_tokens(state.sampler, verdict.tokens, places < num_tokens[:, None])
    finish = finish_reasons(sampler, last, num_tokens > 0)
    output = StepOutput(
        tokens=verdict.tokens,
        num_tokens=num_tokens,
        finish=finish,
        is_invalid=is_invalid,
        logprobs=verdict.logprobs,
        top_ids=verdict.top_ids,
        top_logprobs=verdict.top_logprobs,
    )
    state = state.replace(
        sampler=sampler,
        lengths=state.lengths + num_tokens,
        tokens=jnp.where(num_tokens > 0, last, state.tokens),
        is_running=jnp.where(is_active, (finish == RUNNING) & ~is_invalid, state.is_running),
    )
    return state, output
