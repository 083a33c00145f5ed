"""What a user calls, on fake devices: jobs, streams, stop strings, samples, tasks, closing.

Separate from `test_nano.py`, where a real model says something, because text, jobs and events do not
depend on who makes the tokens.
Read next: `deepinfer_jax/testing/fake_device.py`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from deepinfer_jax import LLM, Completion, EngineConfig, Model, RequestError, SamplingParams, StreamEvent
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.testing.fake_device import plain_token
from deepinfer_jax.testing.presets import SMALLEST

PROMPT = [5, 6, 7]
ALPHABET = "abcdefgh"


class LetterTokenizer:
    """A token is one of eight letters or the first or the second half of the character é."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(letter) % 90 for letter in text]

    def decode(self, ids: Iterable[int], keep_special: bool = False) -> str:
        halves = {0: b"\xc3", 1: b"\xa9"}
        parts = (halves.get(i % 4, ALPHABET[i // 4 % 8].encode()) for i in ids)
        return b"".join(parts).decode("utf-8", "replace")

    def placeholder_ids(self) -> list[int]:
        return []


pytestmark = pytest.mark.usefixtures("fake_devices")


def llm_of(tokenizer: Any = LetterTokenizer(), **options: Any) -> LLM:  # noqa: B008 (it has no state)
    model = Model(SMALLEST, None, FLOAT32, tokenizer)  # pyright: ignore[reportArgumentType]
    return LLM(model, options=EngineConfig(**{"num_slots": 8, "max_context": 512, **options}))


def plain_tokens(seed: int, count: int, prompt: list[int] = PROMPT) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(plain_token([*prompt, *tokens], seed, SMALLEST.vocab_size))
    return tokens


def plain(seed: int = 0, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "seed": seed, "ignore_eos": True, **changes})


def test_a_text_gives_one_completion_and_a_list_gives_a_list() -> None:
    llm = llm_of()
    one = llm.generate("king", plain())
    many = llm.generate(["king", PROMPT], plain())
    assert isinstance(one, Completion)
    assert [completion.prompt_ids for completion in many] == [LetterTokenizer().encode("king"), PROMPT]
    assert many[0] == one
    assert many[1].token_ids == plain_tokens(0, 20)
    assert many[1].text == LetterTokenizer().decode(many[1].token_ids)


def test_thousands_of_prompts_run_in_a_few_slots_and_keep_their_order() -> None:
    llm = llm_of(num_slots=8)
    prompts = [[3 + i % 100, 4 + i // 100] for i in range(1500)]
    found = llm.generate(prompts, plain(max_tokens=2))
    assert [one.token_ids for one in found] == [plain_tokens(0, 2, prompt) for prompt in prompts]


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_stream_joins_to_the_completion(overlap: int) -> None:
    llm = llm_of(overlap=overlap)
    params = plain(seed=4, max_tokens=60)
    events = list(llm.stream(PROMPT, params))
    expected = llm.generate([PROMPT], params)[0]
    assert "é" in expected.text and "\ufffd" in expected.text
    assert "".join(event.text for event in events) == expected.text
    assert [token for event in events for token in event.token_ids] == expected.token_ids
    assert [event.completion for event in events[:-1]] == [None] * (len(events) - 1)
    assert (events[-1].completion, events[-1].finish_reason) == (expected, "length")


def test_two_streams_and_a_call_share_the_steps() -> None:
    llm = llm_of()
    streams = [llm.stream(PROMPT, plain(seed)) for seed in (1, 2)]
    firsts = [next(stream) for stream in streams]
    other = llm.generate([PROMPT], plain(3))[0]
    both = zip(firsts, streams, strict=True)
    texts = ["".join([first.text, *(event.text for event in stream)]) for first, stream in both]
    assert texts == [LetterTokenizer().decode(plain_tokens(seed, 20)) for seed in (1, 2)]
    assert other.token_ids == plain_tokens(3, 20)
    assert llm.stats.steps < 2 * 22


def test_leaving_a_stream_early_ends_its_request() -> None:
    llm = llm_of()
    stream = llm.stream(PROMPT, plain())
    next(stream)
    assert llm.stats.slots_running == 1
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert llm.stats.slots_running == 0
    while llm.has_work:
        llm.step()
    assert llm.generate([PROMPT], plain())[0].token_ids == plain_tokens(0, 20)


def test_tasks_of_a_running_loop_stream_at_the_same_time() -> None:
    llm = llm_of()

    async def read(seed: int) -> list[StreamEvent]:
        return [event async for event in llm.astream(PROMPT, plain(seed))]

    async def main() -> list[list[StreamEvent]]:
        # A plain call works inside the loop, as in a notebook.
        assert llm.generate([PROMPT], plain(9))[0].token_ids == plain_tokens(9, 20)
        return await asyncio.gather(*(read(seed) for seed in range(5)))

    for seed, events in enumerate(asyncio.run(main())):
        assert [token for event in events for token in event.token_ids] == plain_tokens(seed, 20)


def test_threads_take_turns() -> None:
    llm, found = llm_of(), {}

    def work(seed: int) -> None:
        found[seed] = llm.generate([PROMPT], plain(seed))[0].token_ids

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {seed: plain_tokens(seed, 20) for seed in range(12)}


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("overlap", [0, 1])
def test_bc24_a_stop_string_across_tokens_ends_the_text_and_leaves_no_trace(
    include: bool, overlap: int
) -> None:
    llm = llm_of(overlap=overlap)
    whole = llm.generate([PROMPT], plain(seed=4, max_tokens=60))[0]
    stop = whole.text[11:14]
    place = whole.text.index(stop)
    params = plain(seed=4, max_tokens=60, stop=[stop, "never there"], include_stop=include)
    events = list(llm.stream(PROMPT, params))
    ended = events[-1].completion
    assert ended is not None
    assert ended.text == whole.text[: place + (len(stop) if include else 0)]
    assert "".join(event.text for event in events) == ended.text
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
    assert ended.token_ids == whole.token_ids[: len(ended.token_ids)]
    assert stop in LetterTokenizer().decode(ended.token_ids)
    assert stop not in LetterTokenizer().decode(ended.token_ids[:-1])
    # Who comes after finds slots, pages and prefixes as if nothing had run too far.
    again = llm.generate([PROMPT] * 2, plain(seed=4, max_tokens=60))
    assert [one.token_ids for one in again] == [whole.token_ids] * 2


def test_a_stop_string_does_not_count_before_min_tokens() -> None:
    llm = llm_of()
    whole = llm.generate([PROMPT], plain(seed=4, max_tokens=60))[0]
    letter = next(letter for letter in whole.text if letter in ALPHABET)
    early = llm.generate([PROMPT], plain(seed=4, max_tokens=60, stop=letter))[0]
    late = llm.generate([PROMPT], plain(seed=4, max_tokens=60, stop=letter, min_tokens=15))[0]
    assert len(early.token_ids) < 15 <= len(late.token_ids)
    assert late.text == LetterTokenizer().decode(late.token_ids)[:-1]


def test_stop_reasons_say_what_ended_the_output() -> None:
    llm, tokens = llm_of(), plain_tokens(0, 20)
    assert SMALLEST.eos_token_id not in tokens
    stopped = llm.generate([PROMPT], plain(stop_token_ids=(tokens[6],)))[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", tokens[6])
    assert llm.generate([PROMPT], plain())[0].stop_reason is None


def test_bc30_samples_of_one_seed_differ_and_repeat() -> None:
    llm = llm_of()
    four = llm.generate([PROMPT, [9]], plain(seed=3, n=4))
    again = llm.generate([PROMPT, [9]], plain(seed=3, n=4))
    assert len(four) == 8 and four == again
    assert [one.index for one in four] == [0, 1, 2, 3] * 2
    assert len({tuple(one.token_ids) for one in four[:4]}) == 4
    two = llm.generate([PROMPT, [9]], plain(seed=3, n=2))
    assert list(two) == [*four[:2], *four[4:6]]
    assert llm.generate([PROMPT], plain(seed=3))[0] == four[0]
    events = [event for event in llm.stream(PROMPT, plain(seed=3, n=2)) if event.completion]
    assert sorted(event.index for event in events) == [0, 1]


def test_bc23_exactly_as_many_tokens_as_asked_for() -> None:
    found = llm_of().generate([PROMPT] * 3, [plain(max_tokens=count) for count in (37, 1, 0)])
    assert [len(one.token_ids) for one in found] == [37, 1, 0]
    assert [one.finish_reason for one in found] == ["length"] * 3


@pytest.mark.parametrize("prompts", [[""], [[]], ["hello", ""]])
def test_bc17_a_refused_prompt_leaves_nothing_behind(prompts: list[Any]) -> None:
    llm = llm_of()
    with pytest.raises(RequestError, match=f"prompt {len(prompts) - 1}: got "):
        llm.generate(prompts, plain())
    assert not llm.has_work
    assert llm.generate([PROMPT], plain())[0].token_ids == plain_tokens(0, 20)


def test_a_prompt_over_the_limit_is_named_with_the_number() -> None:
    with pytest.raises(
        RequestError, match=r"prompt 1: got 510 prompt tokens \+ max_tokens 20 = 530, expected"
    ):
        llm_of().generate([PROMPT, [5] * 510], plain())


def test_text_controls_without_a_tokenizer_are_refused_by_name() -> None:
    llm = llm_of(tokenizer=None)
    with pytest.raises(RequestError, match=r"stop: got .* as this model has no tokenizer"):
        llm.generate([PROMPT], plain(stop="x"))
    with pytest.raises(RequestError, match="got text, expected token ids"):
        llm.generate("king", plain())
    assert llm.generate([PROMPT], plain())[0].text == ""


def test_jobs_can_be_stepped_by_hand_and_aborted() -> None:
    llm = llm_of()
    jobs = [llm.submit(PROMPT, plain(seed, max_tokens=count)) for seed, count in ((0, 3), (1, 9), (2, 200))]
    done = []
    while len(done) < 2:
        done += llm.step()
    assert done == jobs[:2] and not jobs[2].is_done
    llm.abort(jobs[2])
    completion = jobs[2].completions[0]
    assert completion.finish_reason == "aborted"
    assert completion.token_ids == plain_tokens(2, 200)[: len(completion.token_ids)]
    assert len(completion.token_ids) >= 9
    llm.abort(jobs[2])
    assert jobs[2].completions == [completion]


def test_an_interrupt_ends_what_was_asked_for_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of()
    other = llm.submit(PROMPT, plain(5))
    real, calls = llm.engine.runner.run, []

    def interrupted(plan: Any) -> Any:
        calls.append(plan)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(plan)

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT], plain())
    while llm.has_work:
        llm.step()
    assert other.completions[0].token_ids == plain_tokens(5, 20)
    assert llm.stats.slots_running == 0


def test_a_closed_engine_says_so() -> None:
    with llm_of() as llm:
        job = llm.submit(PROMPT, plain())
    assert job.completions[0].finish_reason == "aborted"
    assert not llm.has_work
    llm.close()
    with pytest.raises(RequestError, match="LLM: got a call after close"):
        llm.generate([PROMPT], plain())
    assert "closed" in repr(llm)


def test_a_loaded_model_and_how_to_load_it_exclude_each_other() -> None:
    model = Model(SMALLEST, None, FLOAT32, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RequestError, match="LLM: got a loaded model and how to load it"):
        LLM(model, numerics="float32")


def test_timing_and_counters_tell_what_happened() -> None:
    llm = llm_of()
    completion = llm.generate([PROMPT], plain())[0]
    assert 0 < completion.timing.first_token <= completion.timing.total
    assert 0 <= completion.timing.queued <= completion.timing.first_token
    stats = llm.stats
    assert (stats.prompt_tokens, stats.generated_tokens) == (3, 20)
    assert stats.encoder_rows == stats.decoder_rows == 3 + 19
    assert stats.tokens_per_second > 0 and stats.slots_running == stats.waiting == 0
    assert replace(completion, timing=completion.timing) == completion
