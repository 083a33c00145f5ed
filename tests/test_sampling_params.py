"""Sampling parameters at the boundary: what is refused, what is normalised, how arrays are laid out.

Separate because a request is judged before any device is touched.
Read next: `sampling/test_state.py`, where the arrays arrive on the device.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.arrays import MASKED_SCORE, NOTHING
from deepinfer_jax.sampling_params import (
    MAX_BIASED_TOKENS,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    RequestError,
    SamplingParams,
    check_request,
    sample_seed,
    stop_ids_of,
)
from deepinfer_jax.slot_parameters import seed_words, slot_parameters
from deepinfer_jax.testing.presets import SMALLEST, TINY

LIMIT = TINY.max_position_embeddings
EOS = TINY.eos_token_id
NOT_NUMBERS = ("1", None, True, math.nan)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_tokens", value) for value in (-1, 1.5, True, "8", None, 2**31)],
        *[("min_tokens", value) for value in (-1, 1.5, True, None, 129)],
        *[("temperature", value) for value in (-0.1, math.inf, 1.1e30, *NOT_NUMBERS)],
        *[("top_k", value) for value in (-2, 1.0, 2**31, *NOT_NUMBERS)],
        *[("top_p", value) for value in (0, 0.0, -0.5, 1.01, *NOT_NUMBERS)],
        *[("min_p", value) for value in (-0.1, 1.01, *NOT_NUMBERS)],
        *[("repetition_penalty", value) for value in (0, 0.009, 101, -1, math.inf, *NOT_NUMBERS)],
        *[("presence_penalty", value) for value in (-100.1, 101, math.inf, *NOT_NUMBERS)],
        *[("frequency_penalty", value) for value in (-100.1, 101, -math.inf, *NOT_NUMBERS)],
        *[("logit_bias", value) for value in ({-1: 1.0}, {2: 1001}, {2: math.nan}, {"2": 1}, {True: 1}, 5)],
        *[("logit_bias", value) for value in (((2, 1.0), (2, 2.0)), (2, 3), ((2,),), "ab", None)],
        *[("bad_token_ids", value) for value in ((-1,), (1.0,), (True,), 3, "12", None, ((1, 2),))],
        *[("stop_token_ids", value) for value in ((-1,), (1.0,), 3, b"ab", range(MAX_STOP_TOKENS + 1))],
        *[("ignore_eos", value) for value in (0, 1, None, "yes")],
        *[("seed", value) for value in (-1, 2**64, 0.5, None, True)],
        *[("logprobs", value) for value in (-1, MAX_LOGPROBS + 1, 1.0, True, "2")],
        *[("prompt_logprobs", value) for value in (-1, MAX_LOGPROBS + 1, 1.0, True, "2")],
        *[("stop", value) for value in ("", ("a", ""), (1,), 5, None, b"ab", ("a", None))],
        ("stop", [str(number) for number in range(MAX_STOP_STRINGS + 1)]),
        *[("include_stop", value) for value in (0, 1, None, "yes")],
        *[("n", value) for value in (0, -1, MAX_SAMPLES + 1, 1.0, None, True)],
    ],
)
def test_sampling_parameters_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as raised:
        SamplingParams(**{name: value})
    message = str(raised.value)
    assert message.startswith(f"{name}: got {value!r}, expected ")
    assert message.endswith(f"change the request's {name}")


def test_sampling_parameters_at_the_edges_are_accepted() -> None:
    SamplingParams(max_tokens=0, temperature=0, top_p=1, seed=2**64 - 1)
    SamplingParams(temperature=1e30, top_p=1e-30, seed=0, top_k=-1, min_p=1, logprobs=0)
    SamplingParams(max_tokens=2**31 - 1, min_tokens=2**31 - 1, top_k=2**31 - 1, logprobs=MAX_LOGPROBS)
    SamplingParams(repetition_penalty=0.01, presence_penalty=-100, frequency_penalty=100)
    SamplingParams(repetition_penalty=100, logit_bias={0: -1000, 5: 1000})
    SamplingParams(stop="\n", include_stop=True, n=MAX_SAMPLES, prompt_logprobs=MAX_LOGPROBS)
    SamplingParams(stop=[str(number) for number in range(MAX_STOP_STRINGS)], n=1, prompt_logprobs=0)
    # NumPy's numbers are numbers.
    SamplingParams(np.int64(3), np.float32(0.5), np.float32(0.5), np.uint64(2**64 - 1))  # type: ignore[arg-type]
    SamplingParams(bad_token_ids=np.arange(3), ignore_eos=np.bool_(True), top_k=np.int32(4))  # type: ignore[arg-type]


def test_defaults_are_off() -> None:
    one = SamplingParams()
    assert {field.name: getattr(one, field.name) for field in fields(one)} == {
        **{"max_tokens": 128, "temperature": 1.0, "top_p": 1.0, "seed": 0, "ignore_eos": False},
        **{"min_tokens": 0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0},
        **{"frequency_penalty": 0.0, "logit_bias": (), "bad_token_ids": (), "stop_token_ids": ()},
        **{"logprobs": None, "stop": (), "include_stop": False, "n": 1, "prompt_logprobs": None},
    }


def test_equal_requests_are_equal_and_hashable() -> None:
    one = SamplingParams(logit_bias={5: 1, 3: -2.5}, bad_token_ids=[4, 2, 4], stop_token_ids={9})  # type: ignore[arg-type]
    other = SamplingParams(logit_bias=((3, -2.5), (5, 1.0)), bad_token_ids=(2, 4), stop_token_ids=(9,))
    assert one == other
    assert hash(one) == hash(other)
    assert one.logit_bias == ((3, -2.5), (5, 1.0))
    assert replace(one, seed=3).logit_bias == one.logit_bias


def test_stop_strings_are_a_sorted_tuple_however_they_are_given() -> None:
    one = SamplingParams(stop="end")
    assert one == SamplingParams(stop=("end",)) == SamplingParams(stop=["end", "end"])
    assert (one.stop, one.stop_strings) == (("end",), ("end",))
    several = SamplingParams(stop={"b", "a", "ab"})  # type: ignore[arg-type]
    assert several.stop_strings == ("a", "ab", "b")
    assert hash(several) == hash(SamplingParams(stop=("ab", "b", "a")))
    assert replace(several, seed=3).stop_strings == several.stop_strings
    # A text of several characters is one stop string, not several.
    assert SamplingParams(stop="ab").stop_strings == ("ab",)


def test_the_first_sample_has_the_seed_itself() -> None:
    one = SamplingParams(seed=2**64 - 1, n=5, temperature=0.5, stop="x", logprobs=2)
    assert one.for_sample(0) == replace(one, n=1)
    assert one.for_sample(3) == replace(one, n=1, seed=sample_seed(one.seed, 3))
    # More samples do not change the ones before.
    assert [one.for_sample(index) for index in range(3)] == [
        replace(one, n=3).for_sample(index) for index in range(3)
    ]


@given(seed=st.integers(0, 2**64 - 1))
def test_samples_have_seeds_of_their_own(seed: int) -> None:
    seeds = [sample_seed(seed, index) for index in range(MAX_SAMPLES)]
    assert seeds[0] == seed
    assert len(set(seeds)) == MAX_SAMPLES
    assert all(0 <= one < 2**64 for one in seeds)
    # Nearby seeds are those of other requests: what they make must not meet.
    assert not set(seeds) & {sample_seed((seed + 1) % 2**64, index) for index in range(MAX_SAMPLES)}
    assert [sample_seed(np.uint64(seed), index) for index in range(3)] == seeds[:3]  # type: ignore[arg-type]


def test_sample_seeds_are_those_of_splitmix64() -> None:
    """Published outputs of the generator started at 0 (the reference C code of Vigna)."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [sample_seed(0, index) for index in range(1, 5)] == expected


def test_biases_and_bans_share_one_table() -> None:
    half = MAX_BIASED_TOKENS // 2
    biases = dict.fromkeys(range(half), 1.0)
    SamplingParams(logit_bias=biases, bad_token_ids=tuple(range(MAX_BIASED_TOKENS)))
    SamplingParams(logit_bias=biases, bad_token_ids=tuple(range(half, 2 * half)))
    with pytest.raises(
        RequestError, match=f"got {2 * half + 1} tokens, expected at most {MAX_BIASED_TOKENS}"
    ):
        SamplingParams(logit_bias=biases, bad_token_ids=tuple(range(half, 2 * half + 1)))


@pytest.mark.parametrize(
    ("temperature", "is_greedy"), [(0, True), (9.99e-6, True), (1e-5, False), (0.00001001, False), (1, False)]
)
def test_a_tiny_temperature_is_greedy(temperature: float, is_greedy: bool) -> None:
    one = SamplingParams(temperature=temperature)
    assert one.is_greedy == is_greedy
    on_device = slot_parameters([one], EOS).temperature[0]
    # The device compares with 1e-5 as a float32.
    assert (on_device < np.float32(1e-5)) == is_greedy


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "parts"),
    [
        ([], 1, ["got no tokens", "expected at least one", "give a non-empty prompt"]),
        ([128], 1, ["got token id 128", "expected ids in 0..127", "tokenizer"]),
        ([5, -1], 1, ["got token id -1", "expected ids in 0..127"]),
        ([5, 1.0], 1, ["got token id 1.0", "expected ids in 0..127"]),
        ([True], 1, ["got token id True", "expected ids in 0..127"]),
        ([5] * LIMIT, 1, [f"got {LIMIT} prompt tokens + max_tokens 1", f"at most {LIMIT}", "shorten"]),
        ([5], LIMIT, [f"max_tokens {LIMIT} = {LIMIT + 1}", "lower max_tokens"]),
    ],
)
def test_bc17_prompts_that_cannot_run_are_refused(
    prompt: list[Any], max_tokens: int, parts: list[str]
) -> None:
    with pytest.raises(RequestError) as raised:
        check_request(prompt, SamplingParams(max_tokens=max_tokens), TINY, "prompt 3")
    message = str(raised.value)
    assert message.startswith("prompt 3: ")
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize("name", ["logit_bias", "bad_token_ids", "stop_token_ids"])
def test_parameter_ids_outside_the_vocabulary_are_refused(name: str) -> None:
    values = {token: {token: 1.0} if name == "logit_bias" else (token,) for token in (127, 128)}
    check_request([5], SamplingParams(**{name: values[127]}), TINY, "prompt 0")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=rf"^prompt 0: {name}: got token id 128, expected ids in 0\.\.127"):
        check_request([5], SamplingParams(**{name: values[128]}), TINY, "prompt 0")  # type: ignore[arg-type]


def test_a_request_needs_a_token_that_may_come() -> None:
    free, image = 7, TINY.image_token_id
    bad = tuple(token for token in range(TINY.vocab_size) if token not in (free, image, EOS))
    with_eos = SamplingParams(bad_token_ids=bad, stop_token_ids=(free,))
    check_request([5], with_eos, TINY, "prompt 0")
    check_request([5], replace(with_eos, min_tokens=1, stop_token_ids=()), TINY, "prompt 0")
    check_request([5], replace(with_eos, min_tokens=1, ignore_eos=True), TINY, "prompt 0")
    for refused in (
        SamplingParams(bad_token_ids=(*bad, free, EOS)),
        SamplingParams(bad_token_ids=range(TINY.vocab_size)),  # type: ignore[arg-type]
        replace(with_eos, min_tokens=1),
    ):
        with pytest.raises(RequestError, match="prompt 0: bad_token_ids: got every token"):
            check_request([5], refused, TINY, "prompt 0")


def test_more_logprobs_than_tokens_are_refused() -> None:
    sizes = {"vocab_size": 8, "image_token_id": 7, "engram_compressed_vocab_size": 8}
    config = replace(SMALLEST, **sizes)
    for name in ("logprobs", "prompt_logprobs"):
        check_request([5], SamplingParams(**{name: 8}), config, "prompt 0")  # type: ignore[arg-type]
        with pytest.raises(RequestError, match=f"prompt 0: {name}: got 9, expected at most the 8 tokens"):
            check_request([5], SamplingParams(**{name: 9}), config, "prompt 0")  # type: ignore[arg-type]


def test_a_prompt_may_fill_every_position() -> None:
    check_request([0, 127] * (LIMIT // 2), SamplingParams(max_tokens=0), TINY, "prompt")
    check_request([5], SamplingParams(max_tokens=LIMIT - 1), TINY, "prompt")
    check_request(np.array([5, 6], np.int32), SamplingParams(), TINY, "prompt")  # type: ignore[arg-type]


@given(seed=st.integers(0, 2**64 - 1))
def test_seed_words_hold_all_64_bits(seed: int) -> None:
    for one in (seed, np.uint64(seed)):
        high, low = seed_words(one).tolist()  # type: ignore[arg-type]
        assert high << 32 | low == seed


def test_stop_tokens_include_the_end_of_sequence_unless_it_is_ignored() -> None:
    assert set(stop_ids_of(SamplingParams(stop_token_ids=(9, EOS)), EOS)) == {9, EOS}
    assert set(stop_ids_of(SamplingParams(stop_token_ids=(9,), ignore_eos=True), EOS)) == {9}
    # Whoever names it wants it, ignored or not.
    assert set(stop_ids_of(SamplingParams(stop_token_ids=(EOS,), ignore_eos=True), EOS)) == {EOS}


def test_full_tables_fit_their_slot() -> None:
    full = SamplingParams(
        logit_bias=dict.fromkeys(range(MAX_BIASED_TOKENS), 2.0),
        bad_token_ids=tuple(range(7)),
        stop_token_ids=tuple(range(100, 100 + MAX_STOP_TOKENS)),
    )
    arrays = slot_parameters([None, full], EOS)
    assert sorted(arrays.bias_ids[1].tolist()) == list(range(MAX_BIASED_TOKENS))
    assert (arrays.bias_values[1] == MASKED_SCORE).sum() == 7
    assert sorted(arrays.stop_ids[1].tolist()) == [EOS, *range(100, 100 + MAX_STOP_TOKENS)]
    # Slots of other shapes would be other programs.
    assert [array.shape for array in arrays] == [array.shape for array in slot_parameters([None] * 2, EOS)]
    assert (arrays.bias_ids[0] == NOTHING).all() and (arrays.stop_ids[0] == NOTHING).all()
