"""Requests as lines of JSON: what they may say, and what each refusal says.

Separate from the records, which are what a request becomes.
Read next: `deepinfer_jax/text/jsonl.py`.
"""

from __future__ import annotations

import io
import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.sampling_params import RequestError, SamplingParams
from deepinfer_jax.text import jsonl
from deepinfer_jax.text.jsonl import (
    BatchRequest,
    LineError,
    line_keys,
    numbered_lines,
    parse_request,
    request_key,
)


def line_of(**names: Any) -> bytes:
    return json.dumps({"prompt": "Once", **names}).encode()


# What a line may say.


def test_a_prompt_is_enough() -> None:
    line = b'{"prompt": "Once"}'
    assert parse_request(line, 3) == BatchRequest(3, None, "Once", SamplingParams(), request_key(line, ""))


def test_a_prompt_of_token_ids() -> None:
    assert parse_request(b'{"prompt": [0, 17, 4]}', 1).prompt == [0, 17, 4]


EVERY_FIELD: dict[str, tuple[Any, Any]] = {
    "max_tokens": (5, 5),
    "temperature": (0, 0),
    "top_p": (0.5, 0.5),
    "seed": (2**64 - 1, 2**64 - 1),
    "ignore_eos": (True, True),
    "min_tokens": (2, 2),
    "top_k": (7, 7),
    "min_p": (0.25, 0.25),
    "repetition_penalty": (1.5, 1.5),
    "presence_penalty": (-1, -1),
    "frequency_penalty": (0.5, 0.5),
    "logit_bias": ({"17": 2.0, "0": -1}, {17: 2.0, 0: -1}),
    "bad_token_ids": ([3, 1], (1, 3)),
    "stop_token_ids": ([9], (9,)),
    "logprobs": (0, 0),
    "stop": (["\n", "."], ("\n", ".")),
    "include_stop": (True, True),
    "n": (2, 2),
    "prompt_logprobs": (3, 3),
}
"""Field of `SamplingParams` -> how a line says it, and what arrives."""


def test_every_sampling_parameter_arrives() -> None:
    assert set(EVERY_FIELD) == {field.name for field in fields(SamplingParams)}
    said = {name: value for name, (value, _) in EVERY_FIELD.items()}
    arrived = {name: value for name, (_, value) in EVERY_FIELD.items()}
    request = parse_request(line_of(custom_id="ä", **said), 1)
    assert request.params == SamplingParams(**arrived)
    assert request.custom_id == "ä"


def test_a_null_is_none_where_none_is_a_value() -> None:
    request = parse_request(line_of(custom_id=None, logprobs=None, prompt_logprobs=None), 1)
    assert (request.custom_id, request.params) == (None, SamplingParams())


def test_one_stop_string_needs_no_list() -> None:
    assert parse_request(line_of(stop="."), 1).params.stop_strings == (".",)


def test_escapes_and_a_byte_order_mark_are_read() -> None:
    line = b'\xef\xbb\xbf {"prompt": "\\ud83d\\ude00\\n", "custom_id": "\\u00e4"}'
    request = parse_request(line, 1)
    assert (request.prompt, request.custom_id) == ("😀\n", "ä")


@given(prompt=st.text(), custom_id=st.text() | st.none(), is_escaped=st.booleans())
def test_any_text_arrives_as_it_was_written(prompt: str, custom_id: str | None, is_escaped: bool) -> None:
    document = {"prompt": prompt, "custom_id": custom_id}
    request = parse_request(json.dumps(document, ensure_ascii=is_escaped).encode(), 1)
    assert (request.prompt, request.custom_id) == (prompt, custom_id)


# What is refused.

REFUSED: dict[str, tuple[bytes, list[str]]] = {
    "no_utf8": (b'{"prompt": "\xff"}', ["byte 13", "UTF-8", "save"]),
    "no_json": (b"nonsense", ["no valid JSON", "character 1", "fix"]),
    "half_a_line": (b'{"prompt": "Onc', ["no valid JSON", "character 12"]),
    "two_objects": (b'{"prompt": "a"} {"prompt": "b"}', ["no valid JSON", "Extra data at character 17"]),
    "a_list": (b'["Once"]', ["['Once']", "an object such as"]),
    "a_number": (b"7", ["got 7", "an object"]),
    "double_names": (b'{"prompt": "a", "n": 1, "n": 2}', ["'n' twice", "once", "remove"]),
    "double_bias": (b'{"prompt": "a", "logit_bias": {"5": 1, "5": 2}}', ["'5' twice"]),
    "nan": (b'{"prompt": "a", "temperature": NaN}', ["NaN", "JSON", "number"]),
    "infinity": (b'{"prompt": "a", "temperature": -Infinity}', ["-Infinity", "JSON"]),
    "too_large": (b'{"prompt": "a", "temperature": 1e999}', ["temperature", "inf", "a number in"]),
    "too_many_digits": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", ["too long a number"]),
    "too_deep": (b'{"prompt": ' + b"[" * 200_000, ["too deep", "fix"]),
    "half_a_pair": (b'{"prompt": "a\\ud800"}', ["half a character, \\ud800", "pairs"]),
    "half_a_pair_in_a_stop": (b'{"prompt": "a", "stop": ["\\uDC00"]}', ["half a character, \\udc00"]),
    "no_prompt": (b'{"max_tokens": 1}', ["prompt: got none", "text or a list of token ids", "give"]),
    "prompt_of_a_number": (b'{"prompt": 5}', ["prompt: got 5", "text or a list"]),
    "prompt_of_texts": (b'{"prompt": ["a", "b"]}', ["prompt: got 'a' in a list", "integers"]),
    "prompt_of_truths": (b'{"prompt": [1, true]}', ["prompt: got True in a list"]),
    "prompt_of_fractions": (b'{"prompt": [1.0]}', ["prompt: got 1.0 in a list"]),
    "custom_id": (line_of(custom_id=5), ["custom_id: got 5", "text", "quotes"]),
    "close_name": (line_of(max_token=5), ["'max_token'", "prompt, custom_id, max_tokens", "'max_tokens'?"]),
    "far_name": (line_of(zzz=5), ["'zzz'", "only prompt, custom_id, max_tokens", "remove"]),
    "chat": (line_of(messages=[]), ["'messages'", "only prompt"]),
    "text_for_a_number": (line_of(max_tokens="5"), ["max_tokens: got '5'", "an int"]),
    "fraction": (line_of(max_tokens=5.0), ["max_tokens: got 5.0", "an int"]),
    "truth_for_a_number": (line_of(temperature=True), ["temperature: got True", "a number"]),
    "null_for_a_number": (line_of(top_p=None), ["top_p: got None", "a number"]),
    "out_of_range": (line_of(top_p=0), ["top_p: got 0", "(0, 1]"]),
    "number_for_a_truth": (line_of(ignore_eos=1), ["ignore_eos: got 1", "True or False"]),
    "stop_object": (line_of(stop={"a": 1}), ["stop: got {'a': 1}", "text or a list of texts"]),
    "stop_null": (line_of(stop=None), ["stop: got None", "text or a list of texts"]),
    "stop_empty": (line_of(stop=[""]), ["stop: got ['']", "none empty"]),
    "ids_as_text": (line_of(stop_token_ids="5"), ["stop_token_ids: got '5'", "a list", "[5, 7]"]),
    "ids_as_object": (line_of(bad_token_ids={"5": 1}), ["bad_token_ids: got {'5': 1}", "a list"]),
    "bias_list": (line_of(logit_bias=[[5, 1.0]]), ["logit_bias: got [[5, 1.0]]", "an object", "{"]),
    "bias_name": (line_of(logit_bias={"a": 1}), ["logit_bias: got 'a'", "token ids"]),
    "bias_spelling": (line_of(logit_bias={"05": 1}), ["logit_bias: got '05'"]),
    "bias_digits": (line_of(logit_bias={"\u0665": 1}), ["logit_bias: got '\u0665'"]),
    "bias_value": (line_of(logit_bias={"5": "1"}), ["logit_bias", "number in [-1000, 1000]"]),
}
"""A line, and what the refusal must say."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_line_is_refused_in_one_line(name: str) -> None:
    line, parts = REFUSED[name]
    with pytest.raises(RequestError) as refused:
        parse_request(line, 12)
    message = str(refused.value)
    assert message.startswith("line 12: ")
    missing = [part for part in ("got", "expected", ";", *parts) if part not in message]
    assert missing == [], message
    assert "\n" not in message and len(message) <= 600


def test_a_refusal_knows_the_custom_id_if_it_could_be_read() -> None:
    def refused(line: bytes) -> str | None:
        with pytest.raises(LineError) as error:
            parse_request(line, 1)
        return error.value.custom_id

    assert refused(line_of(custom_id="mine", top_p=2)) == "mine"
    assert refused(line_of(custom_id="mine", unknown=1)) == "mine"
    assert refused(line_of(custom_id=5)) is None
    assert refused(b'{"custom_id": "mine"') is None


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused_by_number(line: bytes) -> None:
    try:
        assert parse_request(line, 5).number == 5
    except LineError as error:
        assert str(error).startswith("line 5: ")


# Lines and keys.


def test_blank_lines_count_and_are_not_given() -> None:
    file = io.BytesIO(b"\n{1}\r\n \t\n\r\n{2}")
    assert list(numbered_lines(file)) == [(2, b"{1}"), (5, b"{2}")]
    assert list(numbered_lines(io.BytesIO(b""))) == []


def test_a_line_over_the_limit_is_refused_and_the_next_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "LINE_LIMIT", 20)
    fits, over = b'{"prompt": "abcdef"}', b'{"prompt": "abcdef"} '
    assert len(fits) == 20
    lines = [fits, over, over * 9, b"x" * 19 + b"\r" + b"y" * 30, fits]
    found = list(numbered_lines(io.BytesIO(b"\n".join(lines))))
    assert [number for number, _ in found] == [1, 2, 3, 4, 5]
    assert found[0][1] == found[4][1] == fits
    for number, line in found[1:4]:
        assert len(line) == 21
        with pytest.raises(LineError, match=f"line {number}: got more than"):
            parse_request(line, number)
    assert parse_request(fits, 1).prompt == "abcdef"


def test_a_key_depends_on_the_line_and_the_settings_only() -> None:
    key = request_key(b'{"prompt": "a"}', "settings")
    assert len(key) == 16 and int(key, 16) >= 0
    assert parse_request(b'{"prompt": "a"}', 9, "settings").key == key
    others = {request_key(b'{"prompt": "b"}', "settings"), request_key(b'{"prompt": "a"}', "other"), key}
    assert len(others) == 3


def test_keys_of_all_lines_with_zeros_for_blank_ones() -> None:
    lines = b"\n\nfirst\r\n\nsecond\n\n"
    keys = line_keys(io.BytesIO(lines), "s")
    expected = [0, 0, int(request_key(b"first", "s"), 16), 0, int(request_key(b"second", "s"), 16)]
    assert list(keys) == expected
    assert keys.itemsize == 8
