"""Streaming text: characters cut by tokens (BC64), stop strings cut by tokens (BC24).

Separate because the reference here looks at the whole text at once, which a stream never can.
Read next: `deepinfer_jax/text/stream.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer_jax.assets import NANO_FOLDER
from deepinfer_jax.text.stream import TextStream
from deepinfer_jax.text.tokenizer import Tokenizer


class FakeTokenizer:
    """Token i stands for the i-th bytes; `most_decoded` is the most tokens decoded at once."""

    def __init__(self, tokens: Sequence[bytes | str]) -> None:
        self.tokens = [token.encode() if isinstance(token, str) else token for token in tokens]
        self.most_decoded = 0

    def decode(self, ids: Iterable[int]) -> str:
        listed = list(ids)
        self.most_decoded = max(self.most_decoded, len(listed))
        return b"".join(self.tokens[i] for i in listed).decode("utf-8", "replace")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(NANO_FOLDER)


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(token) for token in ids), stream.finish()]


def streamed(
    tokens: Sequence[bytes | str],
    stop: Sequence[str] = (),
    include_stop: bool = False,
    may_stop: Sequence[bool] | None = None,
) -> tuple[list[str], str | None]:
    """Stream tokens given as what they stand for: the pieces, the last of them from `finish`."""
    stream = TextStream(FakeTokenizer(tokens), stop, include_stop)
    allowed = [True] * len(tokens) if may_stop is None else may_stop
    pieces = [stream.push(i, allowed[i]) for i in range(len(tokens))]
    return [*pieces, stream.finish()], stream.stop_found


def cuts(text: str, longest: int) -> Iterator[list[str]]:
    """Cut a text into tokens of 1 to `longest` characters in all ways."""
    if not text:
        yield []
    for length in range(1, min(longest, len(text)) + 1):
        for rest in cuts(text[length:], longest):
            yield [text[:length], *rest]


# Characters.


@pytest.mark.parametrize("text", ["😀", "ď", "삼겹살", "a😀b", "The café said “hi”.", "", "\ufffd"])
def test_bc64_pieces_join_to_the_text_and_hold_no_half_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_bos=False)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_bc64_emoji_spans_tokens_and_waits_for_the_last(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀", add_bos=False)
    assert len(ids) > 1
    assert pieces_of(tokenizer, ids) == [""] * (len(ids) - 1) + ["😀", ""]


def test_bc64_cut_tail_gives_one_replacement_at_the_end_only(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 😀", add_bos=False)[:-1]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == "ok \ufffd"
    assert pieces[-1] == "\ufffd"
    assert not any("\ufffd" in piece for piece in pieces[:-1])


@given(ids=st.lists(st.integers(0, 4095), max_size=12))
@settings(max_examples=100)
def test_any_tokens_stream_to_their_joint_decoding(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_special_token_within_a_character_changes_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀", add_bos=False)
    broken = [ids[0], tokenizer.pad_token_id, *ids[1:]]
    assert "".join(pieces_of(tokenizer, broken)) == tokenizer.decode(broken) == "😀"


def test_text_before_a_cut_character_does_not_wait_for_it() -> None:
    assert streamed([b"ok \xf0", b"\x9f\x98", b"\x80!"])[0] == ["ok ", "", "😀!", ""]


ENDLESS = {
    "true_replacements": ["\ufffd"],
    "invalid_bytes": [b"\x80"],
    "lone_starts": [b"\xf0"],
    "no_token_ends_a_character": [b"\x82\xac\xe2"],
    "replacements_cut_within": [b"\xbf\xbd\xef"],
    "half_starts": [b"\xf0\x9f"],
    "special_tokens_between": [b"\xe2", b"", b"\x82", b"", b"\xac"],
}
"""Tokens that, repeated, never end with a sure character, or seldom."""


@pytest.mark.parametrize("name", ENDLESS)
def test_bytes_without_a_sure_end_neither_wait_nor_slow_down(name: str) -> None:
    repeated = ENDLESS[name] * 300
    fake = FakeTokenizer(repeated)
    stream = TextStream(fake)
    given_so_far = ""
    for i in range(len(repeated)):
        given_so_far += stream.push(i)
        assert len(b"".join(fake.tokens[: i + 1]).decode("utf-8", "replace")) - len(given_so_far) <= 1
    assert fake.most_decoded <= 4
    assert given_so_far + stream.finish() == b"".join(fake.tokens).decode("utf-8", "replace")


# Stop strings.

ALPHABET = "ABCDEFGHIJKL"


def test_bc24_nothing_of_a_stop_string_is_given_however_it_is_cut() -> None:
    every_way = list(cuts(ALPHABET, 4))
    assert len(every_way) == 1490
    for tokens in every_way:
        pieces, found = streamed(tokens, ["DEFGHIJ"])
        assert ("".join(pieces), found) == ("ABC", "DEFGHIJ"), tokens
        assert streamed(tokens, ["DEFGHIJ"], include_stop=True) == (pieces_with(tokens, pieces), "DEFGHIJ")


def pieces_with(tokens: list[str], pieces: list[str]) -> list[str]:
    """Add the stop string to the piece of the token that completed it."""
    ends = [sum(map(len, tokens[: i + 1])) for i in range(len(tokens))]
    completing = next(i for i, end in enumerate(ends) if end >= len("ABCDEFGHIJ"))
    changed = list(pieces)
    changed[completing] += "DEFGHIJ"
    return changed


def test_bc24_a_near_miss_is_released_in_full_with_the_token_that_tells() -> None:
    for tokens in cuts(ALPHABET, 4):
        pieces, found = streamed(tokens, ["DEFGHIX"])
        assert ("".join(pieces), found) == (ALPHABET, None)
        # The J tells, and nothing after it is the beginning of a stop.
        told = next(i for i, token in enumerate(tokens) if "J" in token)
        assert "".join(pieces[: told + 1]) == "".join(tokens[: told + 1])
        assert pieces[told + 1 :] == [*tokens[told + 1 :], ""]


def test_the_rest_of_the_token_and_all_later_tokens_are_dropped() -> None:
    stream = TextStream(FakeTokenizer(["one st", "op two", "three"]), ["stop"])
    assert [stream.push(i) for i in range(3)] == ["one ", "", ""]
    assert (stream.finish(), stream.stop_found) == ("", "stop")


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        pytest.param("xabcd", ["abcd", "bc"], ("xa", "bc"), id="the_first_to_end"),
        pytest.param("xabcd", ["bcd", "abcd", "d"], ("x", "abcd"), id="the_longest_of_the_same_end"),
        pytest.param("aabaabaaac", ["aabaaa"], ("aab", "aabaaa"), id="a_beginning_within_a_near_miss"),
        pytest.param("a\n\nb", ["\n\n", "\n"], ("a", "\n"), id="one_is_the_beginning_of_the_other"),
        pytest.param("ab", ["abc"], ("ab", None), id="released_at_the_end"),
        pytest.param("고기 삼겹살!", ["겹"], ("고기 삼", "겹"), id="within_a_word"),
    ],
)
def test_which_stop_string_wins(text: str, stop: list[str], expected: tuple[str, str | None]) -> None:
    data = text.encode()
    for tokens in ([data], [data[i : i + 1] for i in range(len(data))]):
        pieces, found = streamed(tokens, stop)
        assert ("".join(pieces), found) == expected


def test_a_stop_string_that_may_not_stop_never_counts_later() -> None:
    assert streamed(["ab", "c"], ["ab"], may_stop=[False, True]) == (["ab", "c", ""], None)
    # Its end is the beginning of one that counts.
    pieces, found = streamed(["abab", "ab!"], ["abab"], may_stop=[False, True])
    assert (pieces, found) == (["ab", "", ""], "abab")
    # It is itself the beginning of a longer one that counts.
    pieces, found = streamed(["ab", "c"], ["ab", "abc"], may_stop=[False, True])
    assert (pieces, found) == (["", "", ""], "abc")


def test_a_stop_string_over_split_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("I like 삼겹살 and 😀 a lot", add_bos=False)
    stream = TextStream(tokenizer, ["겹살 and 😀"])
    assert "".join([*map(stream.push, ids), stream.finish()]) == "I like 삼"
    assert stream.stop_found == "겹살 and 😀"


def test_no_stop_is_found_by_finishing() -> None:
    assert streamed([b"a\xf0"], ["\ufffd"]) == (["a", "\ufffd"], None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop: got an empty string, expected text"):
        TextStream(FakeTokenizer([]), [""])


# Any bytes, any cuts, any stops, against a reference that sees the whole text.


def reference(
    tokens: list[bytes], stops: list[str], include_stop: bool, may_stop: list[bool]
) -> tuple[list[str], str | None]:
    """Give the text after each token and at the end, and the stop, by looking at whole texts only."""
    so_far, known = [], ""
    for i in range(len(tokens)):
        text = b"".join(tokens[: i + 1]).decode("utf-8", "replace")
        complete = text[: len(text) - text.endswith("\ufffd")]
        for end in range(len(known) + 1, len(complete) + 1):
            ending = [stop for stop in stops if complete[:end].endswith(stop)]
            if ending and may_stop[i]:
                found = max(ending, key=len)
                given = complete[: end if include_stop else end - len(found)]
                return so_far + [given] * (len(tokens) - i + 1), found
        if len(complete) > len(known):
            known = complete
        held = max(
            (size for stop in stops for size in range(1, len(stop)) if known.endswith(stop[:size])), default=0
        )
        so_far.append(known[: len(known) - held])
    return [*so_far, b"".join(tokens).decode("utf-8", "replace")], None


SHORT_TEXT = st.text("ab€😀\ufffd", max_size=10)
STOPS = st.lists(st.text("ab€😀\ufffd", min_size=1, max_size=4), max_size=4)
DATA = st.one_of(SHORT_TEXT.map(str.encode), st.lists(st.sampled_from(b"ab\x80\xe2\x82\xac\xf0\x9f\x98\xff")))


@given(data=DATA, stops=STOPS, include_stop=st.booleans(), draw=st.data())
@settings(max_examples=500)
@example(data=b"\xf0\x9f\x98\x80", stops=["\ufffd"], include_stop=False, draw=None)
def test_any_bytes_in_any_tokens_give_the_reference(
    data: bytes | list[int], stops: list[str], include_stop: bool, draw: st.DataObject | None
) -> None:
    data = bytes(data)
    if draw is None:
        places, may_stop = [1, 2, 3], [True] * 4
    else:
        places = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=len(data) + 2)))
        may_stop = draw.draw(st.lists(st.booleans(), min_size=len(places) + 1, max_size=len(places) + 1))
    edges = [0, *places, len(data)]
    tokens = [data[start:stop] for start, stop in pairwise(edges)]
    pieces, found = streamed(tokens, stops, include_stop, may_stop)
    so_far = ["".join(pieces[: i + 1]) for i in range(len(pieces))]
    assert (so_far, found) == reference(tokens, stops, include_stop, may_stop)
