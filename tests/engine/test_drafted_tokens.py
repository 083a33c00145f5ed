"""Steps that give a slot several tokens, on fake devices: which of them count, and what they need.

Separate from `test_scheduler.py`, which says that drafts change no token whatever else happens: here each
rule that is about drafts alone is named.
Read next: `deepinfer_jax/engine/lengths.py`, `deepinfer_jax/testing/fake_device.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deepinfer_jax import LLM, EngineConfig, Model, RequestError, SamplingParams
from deepinfer_jax.engine import lengths
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.reading import read_tokens
from deepinfer_jax.engine.request import Phase, Request, TokenLogprobs
from deepinfer_jax.engine_config import fitted
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.plans import DEFAULT_SLOTS, DRAFT_MODES, SLOT_BUCKETS
from deepinfer_jax.sampling.state import LENGTH, RUNNING, STOPPED
from deepinfer_jax.testing.fake_device import plain_token, with_drafts
from deepinfer_jax.testing.presets import SMALLEST, TINY

BLOCK = 5
CONFIG = with_drafts(replace(SMALLEST, max_position_embeddings=2048), BLOCK)
PROMPT = [5, 6, 7]

each_overlap = pytest.mark.parametrize("overlap", [0, 1])
each_drafter = pytest.mark.parametrize("oracle", [False, True], ids=["some_accepted", "all_accepted"])

pytestmark = pytest.mark.usefixtures("fake_devices")


def engine_of(oracle: bool = False, **options: Any) -> Engine:
    options = {"num_slots": 8, "max_context": 1024, "drafts": "fixed", **options}
    engine = Engine(None, CONFIG, FLOAT32, EngineConfig(**options))  # pyright: ignore[reportArgumentType]
    engine.runner.oracle = oracle  # pyright: ignore[reportAttributeAccessIssue]
    return engine


def plain_tokens(prompt: Sequence[int], seed: int, count: int) -> list[int]:
    """The next tokens of a sequence, from the definition of the fake devices alone."""
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(plain_token([*prompt, *tokens], seed, CONFIG.vocab_size))
    return tokens


def run(engine: Engine, requests: Iterable[tuple[list[int], SamplingParams]]) -> list[Request]:
    submitted = [engine.submit(prompt, params) for prompt, params in requests]
    while engine.has_work:
        engine.step()
    return submitted


@each_overlap
@each_drafter
def test_bc23_exactly_37_tokens_come_in_blocks_of_5(oracle: bool, overlap: int) -> None:
    engine = engine_of(oracle, overlap=overlap)
    params = SamplingParams(max_tokens=37, seed=3, ignore_eos=True)
    request = run(engine, [(PROMPT, params)])[0]
    assert (request.token_ids, request.finish_reason) == (plain_tokens(PROMPT, 3, 37), "length")
    assert engine.stats.generated_tokens == 37
    # The prompt's step gives one token; the others come six at a time at best.
    assert (engine.stats.steps - overlap <= 1 + 36 // 6) == oracle


def seed_of_stop(place: int) -> int:
    """Give a seed with which the token at some place of the output is the first end of sequence."""

    def is_there(seed: int) -> bool:
        tokens = plain_tokens(PROMPT, seed, place + 1)
        return CONFIG.eos_token_id in tokens and tokens.index(CONFIG.eos_token_id) == place

    return next(seed for seed in range(20000) if is_there(seed))


@each_overlap
# Token 0 is the prompt's; tokens 1 to 6 come in one step.
@pytest.mark.parametrize("place", [1, 3, 6])
def test_bc21_nothing_comes_after_a_stop_inside_an_accepted_block(place: int, overlap: int) -> None:
    engine, seed = engine_of(oracle=True, overlap=overlap), seed_of_stop(place)
    news: list[list[int]] = []
    request = engine.submit(PROMPT, SamplingParams(max_tokens=50, seed=seed))
    while engine.has_work:
        news += [list(one.token_ids) for one in engine.step()]
    expected = plain_tokens(PROMPT, seed, place)
    assert (request.token_ids, request.finish_reason) == (expected, "stop")
    assert request.stop_token == CONFIG.eos_token_id
    assert news == [expected[:1], expected]
    assert engine.stats.generated_tokens == place


@each_overlap
@each_drafter
def test_bc36_statistics_count_what_requests_got(
    monkeypatch: pytest.MonkeyPatch, oracle: bool, overlap: int
) -> None:
    engine = engine_of(oracle, overlap=overlap, num_pages=12)
    given, accepted, steps = 0, 0, 0

    def count(params: dict[int, SamplingParams], output: Any, *_: object) -> None:
        nonlocal given, accepted, steps
        for slot in params:
            if output.num_tokens[slot]:
                given += int(output.num_tokens[slot])
                accepted += int(output.drafts.num_accepted[slot])
                steps += 1

    assert engine.drafting is not None
    monkeypatch.setattr(engine.drafting, "note", count)
    prompts = [[*PROMPT, 3 + i] for i in range(20)]
    requests = run(
        engine, [(prompt, SamplingParams(max_tokens=90, seed=i)) for i, prompt in enumerate(prompts)]
    )
    num_stopped = sum(request.stop_token is not None for request in requests)
    assert num_stopped > 2
    # Every request got one token of its prompt's step, but for those that were computed again.
    from_prompts = sum(1 + request.num_preemptions for request in requests)
    assert given + from_prompts == sum(len(request.token_ids) for request in requests) + num_stopped
    assert 0 < accepted == given - steps


@each_overlap
def test_the_rows_of_verified_drafts_are_counted(monkeypatch: pytest.MonkeyPatch, overlap: int) -> None:
    engine, rows = engine_of(overlap=overlap, prefix_cache=False), []
    assert engine.drafting is not None
    monkeypatch.setattr(
        engine.drafting, "note", lambda _, output, *__: rows.append(output.drafts.num_rows.sum())
    )
    run(engine, [([5] * length, SamplingParams(max_tokens=20, seed=length)) for length in range(1, 12)])
    assert engine.stats.decoder_rows == engine.stats.encoder_rows == sum(range(1, 12)) + sum(rows)
    assert sum(rows) > engine.stats.generated_tokens


@each_overlap
@each_drafter
def test_a_sequence_owns_no_page_that_it_cannot_fill(oracle: bool, overlap: int) -> None:
    """All rows of a step have pages, as the devices assert; none is at the last token or after it."""
    max_tokens = 130
    for length in range(120, 135):
        engine = engine_of(oracle, overlap=overlap, prefix_cache=False, num_pages=3, max_context=384)
        used: list[int] = []
        real = engine.scheduler.plan
        engine.scheduler.plan = lambda: (real(), used.append(engine.stats.pages_used))[0]  # noqa: B023
        run(engine, [([5] * length, SamplingParams(max_tokens=max_tokens, seed=length, ignore_eos=True))])
        assert max(used) == -(-(length + max_tokens - 1) // 128)
        assert engine.stats.preemptions == 0


@pytest.mark.parametrize(("max_drafts", "chunk"), [(None, 32), (1, 48)])
def test_drafts_leave_less_of_the_budget_to_prompts(max_drafts: int | None, chunk: int) -> None:
    engine = engine_of(token_budget=50, max_drafts=max_drafts, overlap=0)
    engine.submit(PROMPT, SamplingParams(max_tokens=500, ignore_eos=True))
    engine.step()
    engine.submit([5] * 200, SamplingParams(max_tokens=2))
    plans: list[Any] = []
    real = engine.runner.run
    engine.runner.run = lambda plan: (plans.append(plan), real(plan))[1]
    engine.step()
    # 50 rows less those of the running sequence, in whole blocks of 16.
    assert plans[0].is_decoding.sum() == 1
    assert plans[0].prefill.is_valid.sum() == chunk


def test_a_bounded_prefill_keeps_as_many_tokens_with_drafts_as_without() -> None:
    starts = []
    for drafts in ("off", "fixed"):
        engine = engine_of(drafts=drafts, prefill="bounded")
        starts.append(engine.submit([5] * 200, SamplingParams(max_tokens=1)).decoder_start)
    assert starts == [200 - CONFIG.sliding_window] * 2


class Letters:
    """A token is one of eight letters."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(letter) % 90 for letter in text]

    def decode(self, ids: Iterable[int], keep_special: bool = False) -> str:
        return "".join("abcdefgh"[i % 8] for i in ids)

    def placeholder_ids(self) -> list[int]:
        return []


@each_overlap
@each_drafter
@pytest.mark.parametrize("place", [2, 3, 5])
def test_bc24_text_after_a_stop_string_inside_a_block_is_nobodys(
    place: int, oracle: bool, overlap: int
) -> None:
    """With an oracle tokens 1 to 6 of the output are one block."""
    tokens = plain_tokens(PROMPT, 0, 40)
    text = Letters().decode(tokens)
    stop = text[place - 1 : place + 1]
    end = text.index(stop) + 2
    options = EngineConfig(num_slots=1, max_context=256, drafts="fixed", overlap=overlap)
    model = Model(CONFIG, None, FLOAT32, Letters())  # pyright: ignore[reportArgumentType]
    params = SamplingParams(max_tokens=40, seed=0, ignore_eos=True, stop=[stop])
    with LLM(model, options=options) as llm:
        llm.engine.runner.oracle = oracle  # pyright: ignore[reportAttributeAccessIssue]
        found = llm.generate([PROMPT], params)[0]
        events = list(llm.stream(PROMPT, params))
        assert llm.stats.slots_running == 0
    assert (found.text, found.token_ids) == (text[: end - 2], tokens[:end])
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)
    assert "".join(event.text for event in events) == found.text
    assert [token for event in events for token in event.token_ids] == found.token_ids


def output_of(tokens: list[int], finish: int = RUNNING, is_invalid: bool = False) -> Any:
    """What a step gave to slot 1 of 2, in a block of 4 tokens with two log-probabilities each."""
    padded = np.zeros((2, 4), np.int32)
    padded[1, : len(tokens)] = tokens
    return SimpleNamespace(
        tokens=padded,
        num_tokens=np.array([3, len(tokens)]),
        finish=np.array([RUNNING, finish]),
        is_invalid=np.array([False, is_invalid]),
        logprobs=-np.arange(8.0).reshape(2, 4),
        top_ids=np.arange(16).reshape(2, 4, 2),
        top_logprobs=-np.arange(16.0).reshape(2, 4, 2),
    )


@pytest.mark.parametrize(
    ("output", "token_ids", "reason", "stop_token"),
    [
        (output_of([7, 8, 9]), [7, 8, 9], None, None),
        (output_of([7, 8, 9], STOPPED), [7, 8], "stop", 9),
        (output_of([9], STOPPED), [], "stop", 9),
        (output_of([7, 8], LENGTH), [7, 8], "length", None),
        (output_of([7, 8], is_invalid=True), [7, 8], "invalid", None),
        (output_of([], is_invalid=True), [], "invalid", None),
    ],
    ids=["runs_on", "stop", "stop_at_once", "length", "invalid", "invalid_at_once"],
)
def test_tokens_of_a_block_are_read_up_to_its_end(
    output: Any, token_ids: list[int], reason: str | None, stop_token: int | None
) -> None:
    request = Request(0, np.array([5], np.int32), SamplingParams(logprobs=1))
    assert read_tokens(request, 1, output) == reason
    assert (request.token_ids, request.stop_token) == (token_ids, stop_token)
    assert request.logprobs == [
        TokenLogprobs(-4.0 - place, {8 + 2 * place: -8.0 - 2 * place}) for place in range(len(token_ids))
    ]


class TrueSlot:
    """A slot whose true length is known beside what the host knows of its request."""

    def __init__(self, prompt_length: int, max_tokens: int) -> None:
        self.request = Request(0, np.zeros(prompt_length, np.int32), SamplingParams(max_tokens=max_tokens))
        self.request.phase, self.request.slot, self.request.rows_to_run = (
            Phase.DECODING,
            0,
            self.request.prompt,
        )
        self.request.num_computed, self.request.in_flight = prompt_length, 1
        self.length = self.written = prompt_length
        self.unread, self.left, self.max_tokens = [1], max_tokens - 1, max_tokens

    @property
    def can_decode(self) -> bool:
        return len(self.request.token_ids) + self.request.in_flight < self.max_tokens

    @property
    def is_over(self) -> bool:
        return len(self.request.token_ids) == self.max_tokens

    def decode(self, verified: int, accepted: int) -> None:
        """Run a step as the devices do: nothing without tokens left, else no more drafts than those."""
        given = 0
        if self.left:
            verified = min(verified, self.left - 1)
            given = min(accepted, verified) + 1
            self.written = max(self.written, self.length + 1 + verified)
        self.length, self.left = self.length + given, self.left - given
        self.unread.append(given)
        self.request.num_computed += 1
        self.request.in_flight += 1

    def read(self) -> None:
        given = self.unread.pop(0)
        self.request.token_ids += [0] * given
        lengths.accept(self.request, given, is_last=self.is_over)


@pytest.mark.parametrize("num_drafts", [0, 1, 5])
@pytest.mark.parametrize("most_unread", [0, 1, 3])
def test_bounds_hold_whatever_unread_steps_give(most_unread: int, num_drafts: int) -> None:
    random, num_saves = np.random.default_rng(5), 0
    for _ in range(400):
        # Around a boundary, where there is something to decide.
        slot = TrueSlot(int(random.integers(122, 130)), int(random.integers(1, 20)))
        request, slack = slot.request, int(random.integers(0, 3 * num_drafts + 1))
        last_position = len(request.prompt) + slot.max_tokens - 2
        while not slot.is_over:
            if slot.can_decode:
                assert request.num_computed == request.num_known - 1 + request.in_flight
                boundary = lengths.boundary_to_save(request, num_drafts, slack)
                if boundary is not None:
                    num_saves += 1
                    assert boundary == 128 <= min(slot.length, request.num_known)
                    assert slot.written - boundary <= slack
                owned = lengths.positions_to_own(request, num_drafts)
                slot.decode(*random.integers(0, num_drafts + 1, 2).tolist())
                assert slot.written <= owned <= last_position + 1
            # A step that finds nothing to run is read when the request is over, and not noted.
            while (len(slot.unread) > most_unread or not slot.can_decode) and not slot.is_over:
                slot.read()
        assert request.num_computed == slot.length == request.num_known - 1
    assert num_saves > 40


@each_overlap
@each_drafter
def test_a_page_whose_last_row_never_ran_is_not_reused(oracle: bool, overlap: int) -> None:
    """The last token of an output is no row, also where a step that found nothing to run was on its way."""
    for length in range(100, 106):
        engine = engine_of(oracle, overlap=overlap)
        params = SamplingParams(max_tokens=256 - length, seed=length, ignore_eos=True)
        first = run(engine, [([5] * length, params)])[0]
        turn = [*first.prompt.tolist(), *first.token_ids, 9]
        # The first turn computes that page and stores the window at its end, the second one may reuse it.
        for num_cached in (128, 256):
            again = run(engine, [(turn, SamplingParams(max_tokens=4, seed=1, ignore_eos=True))])[0]
            assert again.num_cached == num_cached
            assert again.token_ids == plain_tokens(turn, 1, 4)


@each_overlap
@pytest.mark.parametrize("max_drafts", [None, 1])
def test_every_boundary_of_an_answer_is_saved(max_drafts: int | None, overlap: int) -> None:
    """The slack is enough for any number of tokens a step."""
    for seed in range(5):
        engine = engine_of(max_drafts=max_drafts, overlap=overlap)
        params = SamplingParams(max_tokens=420, seed=seed, ignore_eos=True)
        run(engine, [([5] * (100 + seed), params)])
        assert engine.stats.prefix.stored_snapshots == (100 + seed + 419) // 128


def test_drafts_of_a_model_without_draft_stages_are_refused() -> None:
    options = EngineConfig(drafts="dynamic")
    with pytest.raises(
        RequestError, match="drafts: got 'dynamic', expected 'off', as this model has no draft"
    ):
        options.cache_sizes(SMALLEST)
    assert EngineConfig().cache_sizes(SMALLEST).window_slack == 0


@pytest.mark.parametrize("drafts", DRAFT_MODES)
def test_sizes_make_room_for_what_drafts_leave(drafts: str) -> None:
    options = EngineConfig(drafts=drafts, max_drafts=2)
    sizes, is_on = options.cache_sizes(TINY), drafts != "off"
    assert sizes.window_slack == (3 * TINY.draft.block_size if is_on else 0)
    assert sizes.num_draft_layers == (TINY.draft.num_stages if is_on else 0)
    assert sizes.num_slots == DEFAULT_SLOTS
    assert options.num_drafts(TINY) == (2 if is_on else 0)
    assert replace(options, max_drafts=None).num_drafts(TINY) == (TINY.draft.block_size if is_on else 0)
    assert replace(options, max_drafts=99).num_drafts(TINY) == (TINY.draft.block_size if is_on else 0)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"drafts": "on"}, "drafts: got 'on', expected one of"),
        ({"verification": "exact"}, "verification: got 'exact', expected one of"),
        ({"max_drafts": 0}, "max_drafts: got 0, expected 1 or more"),
        ({"draft_threshold": 1.5}, "draft_threshold: got 1.5, expected a number between 0 and 1"),
        ({"draft_threshold": float("nan")}, "draft_threshold: got nan"),
        ({"draft_threshold": None}, "draft_threshold: got None"),
        ({"choose_on_host": "yes"}, "choose_on_host: got 'yes', expected one of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_that_is_no_choice_is_refused_by_name(option: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        EngineConfig(**option)


def test_more_slots_than_by_default_are_there_to_ask_for() -> None:
    most = SLOT_BUCKETS[-1]
    assert most > DEFAULT_SLOTS and DEFAULT_SLOTS in SLOT_BUCKETS
    assert EngineConfig(num_slots=most).cache_sizes(SMALLEST, 2).num_slots == 2 * most
    assert EngineConfig().snapshots() == 2 * DEFAULT_SLOTS
    assert fitted(EngineConfig(), [9] * 1000, SMALLEST).num_slots == DEFAULT_SLOTS
    assert fitted(EngineConfig(num_slots=most), [9] * 1000, SMALLEST).num_slots == most
