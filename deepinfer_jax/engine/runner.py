"""Runs plans on the devices: owns the state, calls the steps, brings results back.

Separate from `engine.py` because nothing here knows a request: slots, snapshots and arrays only.
Read next: `../step.py`, `../slot_steps.py` (the functions it calls); `../plans.py` (what it is told).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from ..config import CacheConfig, ModelConfig
from ..model.numerics import Numerics
from ..model.weights import Weights
from ..plans import BARE_STEP, PLAIN_STEP, StepPlan
from ..slot_steps import (
    SEQUENCE_WORDS,
    Sequence,
    empty_snapshots,
    export_step,
    import_step,
    note_step,
    restore_step,
    save_step,
    slot_axis,
)
from ..speculate import PLAN_WORDS, speculate_step
from ..step import (
    ONE_DEVICE,
    StepOutput,
    Target,
    admit_step,
    decode_step,
    encode_step,
    initial_state,
    page_step,
    prefill_step,
)
from .drafting import Drafting
from .platform import program
from .progress import working_on
from .target import num_slot_shares, to_devices, to_host

_compiled: set[tuple[object, ...]] = set()
"""Programs of this process, so that only the first call of each says that it is compiled."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a plan will have given once the devices are done with it.

    Attributes:
        decode: of the slots that ran their latest token.
        prefill: of the slots whose prompt ends.
    """

    decode: StepOutput | None = None
    prefill: StepOutput | None = None


class Runner:
    """State of one engine on its devices.

    Args:
        weights: the loaded weights.
        config: the architecture.
        numerics: the choice of arithmetic.
        sizes: of the cache, over all devices.
        num_snapshots: over all devices.
        is_forbidden: bool [V], tokens that no request may get.
        target: where the weights lie.
        drafting: what steps are told of drafts; None to make none.
    """

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        numerics: Numerics,
        sizes: CacheConfig,
        num_snapshots: int,
        is_forbidden: np.ndarray,
        target: Target = ONE_DEVICE,
        drafting: Drafting | None = None,
    ) -> None:
        # Without drafts no step needs their weights, and all programs are those of a model without.
        is_unused = drafting is None and weights.draft is not None
        self.weights = weights.replace(draft=None) if is_unused else weights
        self.config, self.numerics, self.target = config, numerics, target
        self.drafting = drafting
        self.sizes, self.num_snapshots, self.is_forbidden = sizes, num_snapshots, is_forbidden
        self.slots_each = sizes.num_slots // num_slot_shares(target)
        self._static = {"config": config, "numerics": numerics, "target": target}
        self.state: Any = None
        self.snapshots: Any = None
        self.reset()

    @property
    def state_bytes(self) -> int:
        """Bytes of slots, pages and snapshots, over all devices."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.state, self.snapshots)))

    def reset(self) -> None:
        """Make the state of empty slots; what was there is given back."""
        self.close()
        is_forbidden = to_devices(self.is_forbidden, (), self.target)
        self.state = initial_state(is_forbidden, sizes=self.sizes, **self._static)
        if self.num_snapshots:
            self.snapshots = empty_snapshots(
                num_snapshots=self.num_snapshots, sizes=self.sizes, **self._static
            )

    def close(self) -> None:
        """Give the memory of slots, pages and snapshots back."""
        leaves = [leaf for leaf in jax.tree.leaves((self.state, self.snapshots)) if not leaf.is_deleted()]
        for leaf in leaves:
            # Memory that a step still works on must not go; what the step came to does not matter.
            with suppress(Exception):
                leaf.block_until_ready()
            leaf.delete()
        self.state = self.snapshots = None

    def run(self, plan: StepPlan) -> Outputs:
        """Give a plan to the devices, without waiting for them.

        Args:
            plan: what to do.

        Returns:
            What will be there.
        """
        self._move(plan)
        decode = prefill = None
        if plan.is_decoding is not None:
            decode = self._decode(plan.is_decoding, plan.draft_choice, plan.num_logprobs)
        if plan.encode is not None:
            self._step("encode", encode_step, plan.encode, len(plan.encode.token_ids), {})
        if plan.prefill is not None:
            options = {
                "num_logprobs": plan.num_logprobs,
                "num_prompt_logprobs": plan.num_prompt_logprobs,
            }
            prefill = self._step("prefill", prefill_step, plan.prefill, len(plan.prefill.token_ids), options)
        for snapshot, slot in plan.saves_after:
            self._save(snapshot, slot)
        outputs = Outputs(decode, prefill if plan.prefill is not None and _is_read(plan) else None)
        if self.target.mesh is None or not self.target.mesh.is_multi_process:
            for leaf in jax.tree.leaves((outputs.decode, outputs.prefill)):
                leaf.copy_to_host_async()
        return outputs

    def read(self, outputs: Outputs) -> Outputs:
        """Wait for a plan's results and bring them to the host, as NumPy arrays."""
        decode, prefill = to_host((outputs.decode, outputs.prefill), self.target)
        return Outputs(*jax.tree.map(np.asarray, (decode, prefill)))

    def export(self, slot: int, pages: np.ndarray) -> dict[str, np.ndarray]:
        """Bring all that the devices hold of a sequence to the host.

        Args:
            slot: where it runs.
            pages: int32 [pages of a slot], NOTHING after its own.

        Returns:
            Arrays by name, of the sequence's own pages only.
        """
        sequence = export_step(self.state, *self._numbers(slot), np.asarray(pages), target=self.target)
        sequence = to_host(sequence, self.target)
        share, num_pages = slot // self.slots_each, int((pages >= 0).sum())
        own = slice(share * len(pages), share * len(pages) + num_pages)
        slots, stored = _by_name(sequence)
        arrays = {name: np.asarray(array).take([share], slot_axis(name)) for name, array in slots.items()}
        return arrays | {name: np.asarray(array)[:, own] for name, array in stored.items()}

    def sequence_shapes(self, num_pages: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Describe the arrays that `export` gives of a sequence with some pages."""
        slots, stored = _by_name(self._exported_shape())
        axes = {name: slot_axis(name) for name in slots} | dict.fromkeys(stored, 1)
        sizes = dict.fromkeys(slots, 1) | dict.fromkeys(stored, num_pages)
        return {
            name: jax.ShapeDtypeStruct(
                (*one.shape[: axes[name]], sizes[name], *one.shape[axes[name] + 1 :]), one.dtype
            )
            for name, one in {**slots, **stored}.items()
        }

    def _exported_shape(self) -> Any:
        numbers = (np.int32(0), np.zeros(self.sizes.pages_per_slot, np.int32))
        return jax.eval_shape(partial(export_step, target=self.target), self.state, *numbers)

    def _import(self, slot: int, pages: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        """Put what `export` gave into a slot and its pages."""
        whole = jax.tree.map(lambda one: np.zeros(one.shape, one.dtype), self._exported_shape())
        share = slot // self.slots_each
        slots, stored = _by_name(whole)
        for name, array in slots.items():
            np.moveaxis(array, slot_axis(name), 0)[share] = np.moveaxis(arrays[name], slot_axis(name), 0)[0]
        for name, array in stored.items():
            first = share * len(pages)
            array[:, first : first + arrays[name].shape[1]] = arrays[name]
        sequence = to_devices(whole, SEQUENCE_WORDS, self.target)
        numbers = (*self._numbers(slot), np.asarray(pages))
        self.state = import_step(self.state, sequence, *numbers, target=self.target)

    def _decode(self, is_decoding: np.ndarray, choice: int, num_logprobs: int) -> StepOutput | None:
        """Run the latest tokens of some slots, with drafts behind them if any are made."""
        options: dict[str, Any] = {"num_logprobs": num_logprobs}
        if choice == BARE_STEP:
            weights = self.weights.replace(draft=None)
            return self._step(
                "decode without draft rows", decode_step, is_decoding, 1, options, weights=weights
            )
        if self.drafting is None or choice == PLAIN_STEP:
            return self._step("decode", decode_step, is_decoding, 1, options)
        options |= {"speculation": self.drafting.speculation}
        plan = self.drafting.plan(is_decoding, choice)
        return self._step("decode with drafts", speculate_step, plan, 1, options, PLAN_WORDS)

    def _move(self, plan: StepPlan) -> None:
        """Do all of a plan that computes nothing."""
        for snapshot, slot in plan.saves_before:
            self._save(snapshot, slot)
        for slot, snapshot in plan.restores:
            numbers = self._numbers(slot, snapshot)
            self.state = restore_step(self.state, self.snapshots, *numbers, target=self.target)
        for slot, pages, sequence in plan.imports:
            self._import(slot, pages, sequence)
        if plan.admission is not None:
            admission = to_devices(plan.admission, ("slots",), self.target)
            self.state = admit_step(self.state, admission, target=self.target)
        elif plan.page_table is not None:
            page_table = to_devices(plan.page_table, ("slots",), self.target)
            self.state = page_step(self.state, page_table, target=self.target)
        for slot, token_ids in plan.notes:
            # As long as a slot, so that all sequences have one shape.
            padded = np.zeros(self.sizes.capacity, np.int32)
            padded[: len(token_ids)] = token_ids
            numbers = (*self._numbers(slot), padded, *self._numbers(len(token_ids)))
            self.state = note_step(self.state, *numbers, target=self.target)

    def _save(self, snapshot: int, slot: int) -> None:
        numbers = self._numbers(snapshot, slot)
        self.snapshots = save_step(self.snapshots, self.state, *numbers, target=self.target)

    def _numbers(self, *numbers: int) -> tuple[np.ndarray, ...]:
        return tuple(np.array(number, np.int32) for number in numbers)

    def _step(
        self,
        name: str,
        step: Callable[..., Any],
        plan: Any,
        num_rows: int,
        options: dict[str, Any],
        words: Any = ("slots",),
        weights: Weights | None = None,
    ) -> StepOutput | None:
        """Call a step, and say so while it is compiled."""
        plan = to_devices(plan, words, self.target)
        key = (name, num_rows, self.sizes, *options.values(), *self._static.values())
        slots, capacity = self.sizes.num_slots, self.sizes.capacity
        message = f"compiling {name} for {slots} slots x {capacity} tokens, once per machine"
        with nullcontext() if key in _compiled else working_on(message):
            run = program(step, self.target, self.numerics)
            result = run(weights or self.weights, self.state, plan, **options, **self._static)
        _compiled.add(key)
        self.state, output = (result, None) if name == "encode" else result
        return output


def _by_name(sequence: Sequence) -> tuple[dict[str, Any], dict[str, Any]]:
    """Name the arrays of a sequence: those of its slot, and those of its pages."""
    stored = {
        f"pages.{ratio}.{name}": array
        for ratio, pages in sequence.pages.items()
        for name, array in vars(pages).items()
    }
    return vars(sequence.slot), stored


def _is_read(plan: StepPlan) -> bool:
    """Tell whether anything of a plan's prefill step is of interest."""
    assert plan.prefill is not None
    return plan.num_prompt_logprobs is not None or bool((plan.prefill.last_rows >= 0).any())
