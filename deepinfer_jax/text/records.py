"""Results as lines of JSON, and which of them a file has already.

Separate from `jsonl.py`, which reads what comes in: here a line is written once and never changed, so
that a run that was killed goes on after the last whole line.
Read next: `../cli/batch.py`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from ..sampling_params import RequestError
from .jsonl import BatchRequest, shorten

_RECORD_START = b'{"line":'
_OTHER_FILE = "give another -o, or --overwrite"

# JSON allows them inside of strings, but some readers end a line there.
_LINE_BREAKS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}


@dataclass(slots=True)
class DoneLines:
    """Which lines of the input have a record in a file.

    Attributes:
        is_done: 1 at place n - 1 if line n has one.
        num_done: how many have.
        num_failed: how many of these records are errors.
        size: bytes of the whole records; what follows was cut off while it was written.
    """

    is_done: bytearray
    num_done: int = 0
    num_failed: int = 0
    size: int = 0

    def __contains__(self, number: int) -> bool:
        return number <= len(self.is_done) and bool(self.is_done[number - 1])


def result_record(request: BatchRequest, outputs: Sequence[Any]) -> bytes:
    """Write what a request became, with no time or place in it: the same bytes in every run.

    Args:
        request: as it was read.
        outputs: its `n` completions, as the engine gives them.

    Returns:
        One line, with its ending.
    """
    record: dict[str, Any] = {"line": request.number, "custom_id": request.custom_id, "key": request.key}
    record["outputs"] = [_output(output, request.params.logprobs is not None) for output in outputs]
    if request.params.prompt_logprobs is not None:
        record["prompt_logprobs"] = _logprobs(outputs[0].prompt_logprobs)
    record["usage"] = {
        "prompt_tokens": len(outputs[0].prompt_ids),
        "completion_tokens": sum(len(output.token_ids) for output in outputs),
    }
    return _line(record)


def error_record(number: int, key: str, message: str, custom_id: str | None = None) -> bytes:
    """Write why a line has no result.

    Args:
        number: which line of the input, from 1.
        key: of the line.
        message: what, got, expected, how to fix.
        custom_id: the line's own name for itself, if known.

    Returns:
        One line, with its ending.
    """
    name = {} if custom_id is None else {"custom_id": custom_id}
    return _line({"line": number, **name, "key": key, "error": shorten(message)})


def done_lines(file: BinaryIO, keys: Sequence[int], name: str, in_order: bool = False) -> DoneLines:
    """Find out which lines of an input an output has already, one record in memory at a time.

    Args:
        file: the output, opened in binary mode, at its beginning.
        keys: of the input's lines, from `line_keys`.
        name: the output, for messages.
        in_order: whether the records must be those of the first lines, in order.

    Returns:
        What is done, and where the last whole record ends.

    Raises:
        RequestError: a record that no run with this input and these settings wrote, a line twice or out
            of order, or a line that is no record (at the end of the file: and no beginning of one).
    """
    done = DoneLines(bytearray(len(keys)))
    length = os.fstat(file.fileno()).st_size
    expected = (number for number, key in enumerate(keys, start=1) if key)
    for place, line in enumerate(file, start=1):
        where = f"{name} line {place}"
        record = _read_record(line)
        if record is None:
            if done.size + len(line) == length and _is_cut(line):
                break
            raise RequestError(f"{where}: got no record, expected one of this command; {_OTHER_FILE}")
        number = record["line"]
        if (
            not 1 <= number <= len(keys)
            or not keys[number - 1]
            or f"{keys[number - 1]:016x}" != record["key"]
        ):
            raise RequestError(
                f"{where}: got a record made from another input or with other options, expected the same; "
                f"{_OTHER_FILE}"
            )
        if number in done:
            raise RequestError(f"{where}: got line {number} twice, expected it once; {_OTHER_FILE}")
        if in_order and (due := next(expected)) != number:
            raise RequestError(
                f"{where}: got the record of line {number}, expected that of line {due}, as the order is "
                "the input's; use --order finish, give another -o, or --overwrite"
            )
        done.is_done[number - 1] = 1
        done.num_done += 1
        done.num_failed += "error" in record
        done.size += len(line)
    return done


def _read_record(line: bytes) -> dict[str, Any] | None:
    """Give a whole record, None for anything else."""
    document = _read_json(line) if line.endswith(b"\n") else None
    if not isinstance(document, dict) or ("outputs" in document) == ("error" in document):
        return None
    number, key = document.get("line"), document.get("key")
    is_record = isinstance(number, int) and not isinstance(number, bool) and isinstance(key, str)
    return document if is_record else None


def _read_json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_cut(line: bytes) -> bool:
    """Tell the beginning of a record, or zeros of a crashed file system, from somebody else's text."""
    begins = line.startswith(_RECORD_START) or _RECORD_START.startswith(line)
    is_zeros = not line.strip(b"\0\n")
    return is_zeros or (begins and (not line.endswith(b"\n") or _read_json(line) is None))


def _output(output: Any, with_logprobs: bool) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": output.text,
        "token_ids": [int(token) for token in output.token_ids],
        "finish_reason": output.finish_reason,
    }
    if output.stop_reason is not None:
        record["stop_reason"] = output.stop_reason
    if with_logprobs:
        record["logprobs"] = _logprobs(output.logprobs)
    return record


def _logprobs(tokens: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {
            "logprob": _number(token.logprob),
            "top": [[int(number), _number(value)] for number, value in token.top.items()],
        }
        for token in tokens
    ]


def _number(value: float) -> float | None:
    """Give a number as JSON can say it."""
    return float(value) if math.isfinite(value) else None


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":")).translate(_LINE_BREAKS)
    # Half a surrogate pair, which only a refused line can have, is spelled as its escape.
    return text.encode("utf-8", "backslashreplace") + b"\n"
