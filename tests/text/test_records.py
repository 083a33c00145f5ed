"""Results as lines of JSON, and what a file of them says about what is done.

Separate from the requests; what becomes of the file when a process dies is in `tests/cli`.
Read next: `deepinfer_jax/text/records.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deepinfer_jax.sampling_params import RequestError, SamplingParams
from deepinfer_jax.text.jsonl import BatchRequest, line_keys, request_key
from deepinfer_jax.text.records import DoneLines, done_lines, error_record, result_record


def output(text: str = "text", **names: Any) -> SimpleNamespace:
    given = {"text": text, "token_ids": [5, 7], "finish_reason": "length", "stop_reason": None}
    given |= {"prompt_ids": [0, 1, 2], "logprobs": [], "prompt_logprobs": []}
    return SimpleNamespace(**(given | names))


def request(custom_id: str | None = None, **params: Any) -> BatchRequest:
    return BatchRequest(4, custom_id, "prompt", SamplingParams(**params), "0123456789abcdef")


# What is written.


def test_a_result_is_one_line_of_known_bytes() -> None:
    record = result_record(request("é"), [output("a\nb😀")])
    assert record.decode() == (
        '{"line":4,"custom_id":"é","key":"0123456789abcdef","outputs":[{"text":"a\\nb😀","token_ids":[5,7],'
        '"finish_reason":"length"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n'
    )


def test_stop_reasons_and_several_outputs() -> None:
    outputs = [output(stop_reason="."), output(stop_reason=9, token_ids=[1])]
    document = json.loads(result_record(request(n=2), outputs))
    assert [one["stop_reason"] for one in document["outputs"]] == [".", 9]
    assert document["usage"] == {"prompt_tokens": 3, "completion_tokens": 3}


def test_log_probabilities_are_there_only_if_asked_for() -> None:
    tokens = [SimpleNamespace(logprob=-0.5, top={9: -0.25, 3: -inf}), SimpleNamespace(logprob=nan, top={})]
    both = {"logprobs": tokens, "prompt_logprobs": tokens[:1]}
    asked = json.loads(result_record(request(logprobs=2, prompt_logprobs=0), [output(**both)]))
    expected = [{"logprob": -0.5, "top": [[9, -0.25], [3, None]]}, {"logprob": None, "top": []}]
    assert asked["outputs"][0]["logprobs"] == expected
    assert asked["prompt_logprobs"] == expected[:1]
    not_asked = json.loads(result_record(request(), [output(**both)]))
    assert "prompt_logprobs" not in not_asked and "logprobs" not in not_asked["outputs"][0]


def test_numbers_of_numpy_are_written_as_numbers() -> None:
    token = SimpleNamespace(logprob=np.float32(-0.5), top={np.int32(9): np.float32(-0.25)})
    one = output(token_ids=np.array([5, 7], np.int32), logprobs=[token])
    document = json.loads(result_record(request(logprobs=1), [one]))
    assert document["outputs"][0]["token_ids"] == [5, 7]
    assert document["outputs"][0]["logprobs"] == [{"logprob": -0.5, "top": [[9, -0.25]]}]


def test_whatever_ends_a_line_for_some_reader_is_escaped() -> None:
    text = "a\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029b"
    record = result_record(request(), [output(text)])
    assert len(record.decode().splitlines()) == 1
    assert json.loads(record)["outputs"][0]["text"] == text


def test_an_error_is_one_short_line() -> None:
    assert error_record(3, "0123456789abcdef", "line 3: got\nthis", "mine") == (
        b'{"line":3,"custom_id":"mine","key":"0123456789abcdef","error":"line 3: got this"}\n'
    )
    long = error_record(3, "0123456789abcdef", "x" * 10_000)
    assert "custom_id" not in json.loads(long)
    assert len(long) < 600


def test_half_a_surrogate_pair_in_an_error_comes_back_as_it_was() -> None:
    assert json.loads(error_record(1, "k", "message", "\ud800"))["custom_id"] == "\ud800"


# What a file has.

LINES = [b"one", b"two", b"", b"four"]
KEYS = [request_key(line, "") for line in LINES]


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., DoneLines]:
    """Look at an output of `LINES` with some content."""

    def done(content: bytes, in_order: bool = False) -> DoneLines:
        source, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_bytes(b"\n".join(LINES))
        path.write_bytes(content)
        with source.open("rb") as lines, path.open("rb") as file:
            return done_lines(file, line_keys(lines, ""), "out.jsonl", in_order)

    return done


def result(number: int) -> bytes:
    return result_record(BatchRequest(number, None, "", SamplingParams(), KEYS[number - 1]), [output()])


def failure(number: int) -> bytes:
    return error_record(number, KEYS[number - 1], f"line {number}: wrong")


def test_whole_records_are_counted(read: Callable[..., DoneLines]) -> None:
    content = result(4) + failure(1)
    done = read(content)
    assert [number for number in range(1, 9) if number in done] == [1, 4]
    assert (done.num_done, done.num_failed, done.size) == (2, 1, len(content))
    assert read(b"").num_done == 0


def test_an_end_that_was_cut_at_any_byte_is_left_out(read: Callable[..., DoneLines]) -> None:
    whole, last = result(1), result(2)
    for length in range(len(last)):
        done = read(whole + last[:length])
        assert (done.num_done, done.size) == (1, len(whole)), length
    assert read(whole + last).num_done == 2


@pytest.mark.parametrize("end", [b"\0" * 50, b"\0" * 50 + b"\n", b'{"line":2,"key":\0\0\0\n'])
def test_what_a_crashed_machine_leaves_at_the_end_is_left_out(
    read: Callable[..., DoneLines], end: bytes
) -> None:
    assert read(result(1) + end).size == len(result(1))


FOREIGN: dict[str, tuple[bytes, str]] = {
    "no_json_in_the_middle": (result(1) + b"nonsense\n" + result(2), "out.jsonl line 2: got no record"),
    "cut_in_the_middle": (result(1)[:-20] + b"\n" + result(2), "out.jsonl line 1: got no record"),
    "blank_in_the_middle": (result(1) + b"\n" + result(2), "out.jsonl line 2: got no record"),
    "somebody_elses_text": (b"dear diary", "out.jsonl line 1: got no record"),
    "somebody_elses_json": (b'{"a": 1}\n', "out.jsonl line 1: got no record"),
    "somebody_elses_lines": (b'{"line":1,"key":"a"}\n', "out.jsonl line 1: got no record"),
    "other_key": (
        result(2) + error_record(1, "0" * 16, "wrong"),
        "out.jsonl line 2: got a record made from another input or with other options, expected the same",
    ),
    "line_out_of_range": (error_record(5, KEYS[0], "wrong"), "line 1: got a record made from another input"),
    "line_zero": (error_record(0, KEYS[3], "wrong"), "line 1: got a record made from another input"),
    "blank_line": (error_record(3, "0" * 16, "wrong"), "line 1: got a record made from another input"),
    "twice": (result(2) + failure(2), "out.jsonl line 2: got line 2 twice, expected it once"),
}
"""Content of an output, and what the refusal must say."""


@pytest.mark.parametrize("name", FOREIGN)
def test_what_this_command_did_not_write_is_refused(read: Callable[..., DoneLines], name: str) -> None:
    content, message = FOREIGN[name]
    with pytest.raises(RequestError) as refused:
        read(content)
    assert message in str(refused.value)
    assert str(refused.value).endswith("; give another -o, or --overwrite")


def test_in_order_the_records_must_be_those_of_the_first_lines(read: Callable[..., DoneLines]) -> None:
    assert read(result(1) + result(2) + result(4), in_order=True).num_done == 3
    with pytest.raises(RequestError, match=r"line 2: got the record of line 4, expected that of line 2"):
        read(result(1) + result(4), in_order=True)
    assert read(result(1) + result(4)).num_done == 2
