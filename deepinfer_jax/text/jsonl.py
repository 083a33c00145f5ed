"""Requests as lines of JSON: what a line may say, checked by name, before anything runs.

Separate from the command because notebooks read such files too, and because no model is needed.
Read next: `records.py` (what a request becomes), `../sampling_params.py` (what the names mean).
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, BinaryIO, NoReturn

from ..sampling_params import RequestError, SamplingParams

LINE_LIMIT = 64 * 2**20
"""Bytes of one line at most, so that a file that is no JSONL does not fill the memory."""

PARAMETER_NAMES = tuple(field.name for field in fields(SamplingParams))
KNOWN_NAMES = ("prompt", "custom_id", *PARAMETER_NAMES)
"""What a line may have."""

LISTS = ("bad_token_ids", "stop_token_ids")
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_MOST_CHARACTERS = 500


class LineError(RequestError):
    """A line that is refused.

    Attributes:
        custom_id: the line's own name for itself, if it could be read.
    """

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line, understood.

    Attributes:
        number: which line of the input, from 1.
        custom_id: the user's own name of it.
        prompt: text or token ids.
        params: how its tokens are chosen.
        key: fingerprint of the line and of what else its result depends on.
    """

    number: int
    custom_id: str | None
    prompt: str | list[int]
    params: SamplingParams
    key: str


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Read a file line by line; blank lines are counted but not given.

    Args:
        file: opened in binary mode.

    Yields:
        Line number from 1, and the line without its ending. Of a line over `LINE_LIMIT` comes the
        beginning, one byte longer than the limit, which `parse_request` refuses.
    """
    number = 0
    while line := file.readline(LINE_LIMIT + 1):
        number += 1
        if line.endswith(b"\n"):
            line = line.removesuffix(b"\n").removesuffix(b"\r")
        elif len(line) > LINE_LIMIT:
            while (rest := file.readline(2**20)) and not rest.endswith(b"\n"):
                pass
        if line.strip():
            yield number, line


def request_key(line: bytes, settings: str) -> str:
    """Make the fingerprint of a line and of what else its result depends on.

    Args:
        line: without its ending.
        settings: the model and the options, in any fixed spelling.

    Returns:
        16 hexadecimal digits.
    """
    digest = hashlib.blake2b(settings.encode("utf-8", "backslashreplace"), digest_size=8)
    digest.update(b"\n")
    digest.update(line)
    return digest.hexdigest()


def line_keys(file: BinaryIO, settings: str) -> array[int]:
    """Count the lines of an input and take their fingerprints, 8 bytes of memory for each.

    Args:
        file: opened in binary mode.
        settings: as in `request_key`.

    Returns:
        The key of line n at place n - 1, as a number; 0 for a blank line.
    """
    keys = array("Q")
    for number, line in numbered_lines(file):
        keys.extend([0] * (number - 1 - len(keys)))
        keys.append(int(request_key(line, settings), 16))
    return keys


def parse_request(line: bytes, number: int, settings: str = "") -> BatchRequest:
    """Understand one line: an object with `prompt`, perhaps `custom_id`, and any `SamplingParams` field.

    Args:
        line: one JSON object in UTF-8, without the line ending.
        number: which line of the input, from 1.
        settings: as in `request_key`.

    Returns:
        The request.

    Raises:
        LineError: what is wrong, as "line 3: ..."; a `RequestError`.
    """
    custom_id = None
    try:
        document = _parse_object(line)
        custom_id = _custom_id(document)
        _check_names(document)
        prompt = _prompt(document)
        values = {name: _value(name, document[name]) for name in PARAMETER_NAMES if name in document}
        params = SamplingParams(**values)
    except RequestError as error:
        raise LineError(shorten(f"line {number}: {error}"), custom_id) from None
    return BatchRequest(number, custom_id, prompt, params, request_key(line, settings))


def shorten(message: str) -> str:
    """Cut a message that quotes a long value, and put it on one line."""
    words = " ".join(message.split())
    return words if len(words) <= _MOST_CHARACTERS else f"{words[: _MOST_CHARACTERS - 3]}..."


def _parse_object(line: bytes) -> dict[str, Any]:
    if len(line) > LINE_LIMIT:
        _refuse(f"got more than {LINE_LIMIT >> 20} MiB", "a shorter line", "is this a JSONL file?")
    try:
        # Some editors begin a file with a byte order mark.
        text = line.decode("utf-8-sig")
        document = json.loads(text, object_pairs_hook=_without_doubles, parse_constant=_refuse_constant)
    except RequestError:
        raise
    except UnicodeDecodeError as error:
        where = f"byte {error.start + 1}"
        _refuse(f"got a {where} that is no UTF-8", "UTF-8 text", "save the file as UTF-8")
    except json.JSONDecodeError as error:
        what = f"got no valid JSON ({error.msg} at character {error.pos + 1})"
        _refuse(what, "one JSON object in one line", "fix the line")
    except (RecursionError, ValueError):
        _refuse("got JSON too deep, or with too long a number", "one simple JSON object", "fix the line")
    if not isinstance(document, dict):
        _refuse(f"got {_quote(document)}", 'an object such as {"prompt": "Once"}', "fix the line")
    if b"\\u" in line:
        _check_characters(document)
    return document


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        _refuse(f"got {_quote(double)} twice", "each name once", "remove one")
    return document


def _refuse_constant(name: str) -> NoReturn:
    _refuse(f"got {name}", "JSON, which has no such number", "write a number")


def _check_characters(document: dict[str, Any]) -> None:
    """Refuse halves of surrogate pairs: escapes can spell them, but they are no text."""
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        _refuse(f"got half a character, {half}", "pairs of surrogates", "fix the line")


def _custom_id(document: dict[str, Any]) -> str | None:
    custom_id = document.get("custom_id")
    if custom_id is not None and not isinstance(custom_id, str):
        _refuse(f"custom_id: got {_quote(custom_id)}", "text", "put it in quotes")
    return custom_id


def _check_names(document: dict[str, Any]) -> None:
    unknown = [name for name in document if name not in KNOWN_NAMES]
    if unknown:
        close = get_close_matches(unknown[0], KNOWN_NAMES, n=1)
        fix = f"did you mean {close[0]!r}?" if close else "remove it"
        _refuse(f"got {_quote(unknown[0])}", f"only {', '.join(KNOWN_NAMES)}", fix)


def _prompt(document: dict[str, Any]) -> str | list[int]:
    if "prompt" not in document:
        _refuse("prompt: got none", "text or a list of token ids", "give one")
    prompt = document["prompt"]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        _refuse(f"prompt: got {_quote(prompt)}", "text or a list of token ids", "give one of them")
    wrong = [token for token in prompt if not isinstance(token, int) or isinstance(token, bool)]
    if wrong:
        _refuse(f"prompt: got {_quote(wrong[0])} in a list", "token ids", "give text or a list of integers")
    return prompt


def _value(name: str, value: Any) -> Any:
    """Check what JSON can say and `SamplingParams` would take for something else."""
    if name in LISTS and not isinstance(value, list):
        _refuse(f"{name}: got {_quote(value)}", "a list of token ids", "write it as in [5, 7]")
    if name == "stop" and not isinstance(value, str | list):
        _refuse(f"stop: got {_quote(value)}", "text or a list of texts", 'write it as in ["\\n"]')
    if name != "logit_bias":
        return value
    if not isinstance(value, dict):
        _refuse(f"logit_bias: got {_quote(value)}", "an object", 'write it as in {"17": 2.0}')
    wrong = [token for token in value if not _TOKEN_ID.fullmatch(token)]
    if wrong:
        _refuse(f"logit_bias: got {_quote(wrong[0])}", "token ids as names", 'write it as in {"17": 2.0}')
    return {int(token): bias for token, bias in value.items()}


def _quote(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refuse(what: str, expected: str, fix: str) -> NoReturn:
    raise RequestError(f"{what}, expected {expected}; {fix}")
