"""Text from a stream of token ids: never half a character, never one twice, nothing of a stop string.

Separate because a token may hold part of a character, or of a stop string, so text and tokens do not
advance together.
Read next: `tokenizer.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Protocol

_REPLACEMENT = "\ufffd"

_LONGEST_CUT = 3
"""Bytes of a UTF-8 character that can have come without the last."""


class Decoder(Protocol):
    """What a stream needs of a tokenizer."""

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into text; bytes that are no complete UTF-8 become U+FFFD."""
        ...


class TextStream:
    """Decodes one completion as its tokens arrive, up to the first of some stop strings.

    The pieces, joined, are the decoding of all tokens at once, up to the stop string. Text that may turn
    out to be the beginning of a stop string waits, so nothing of one that completes was given before.
    A push takes constant time per token and new character, whatever came before.

    Args:
        tokenizer: the model's tokenizer.
        stop: the stop strings, none empty. Of several the one that is complete first counts, of those
            that end together the longest.
        include_stop: whether the stop string itself is part of the text.

    Attributes:
        stop_found: the stop string that ended the text, None so far.
    """

    def __init__(self, tokenizer: Decoder, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        self._tokenizer = tokenizer
        self._automaton = _automaton((stop,) if isinstance(stop, str) else tuple(stop))
        self._include_stop = include_stop
        self._state = self._automaton.root
        self._held = ""
        # The newest tokens, if their text may end within a character, and how much of it was given.
        self._pending: list[int] = []
        self._num_given = 0
        self.stop_found: str | None = None

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """Take a token and give the text that is complete, and no beginning of a stop string, by now.

        Args:
            token_id: the next token.
            may_stop: whether a stop string that becomes complete with this token counts; if not, it
                is ordinary text for ever.

        Returns:
            New text, "" while all of it waits and after a stop string.
        """
        if self.stop_found is not None:
            return ""
        return self._until_stop(self._characters(token_id), may_stop)

    def finish(self) -> str:
        """Give what waits, as nothing more comes: a character that was cut off becomes one U+FFFD."""
        if self.stop_found is not None:
            return ""
        rest = self._tokenizer.decode(self._pending)[self._num_given :] if self._pending else ""
        text = self._held + rest
        self._pending, self._num_given = [], 0
        self._held, self._state = "", self._automaton.root
        return text

    def _characters(self, token_id: int) -> str:
        """Give the characters that are complete with a token."""
        if not self._tokenizer.decode([token_id]):
            # A special token: its place among the bytes of a character does not matter.
            return ""
        self._pending.append(token_id)
        text = self._tokenizer.decode(self._pending)
        # Complete but for the last character, which may also be a true U+FFFD: the next token tells.
        num_complete = len(text) - text.endswith(_REPLACEMENT)
        new = text[self._num_given : num_complete]
        if num_complete == len(text):
            self._pending, self._num_given = [], 0
            return new
        # What is cut has at most as many bytes as there are tokens left. These may begin within an
        # earlier character, but that changes nothing after it, so the end of the text stays the same.
        if len(self._pending) > _LONGEST_CUT:
            self._pending = self._pending[-_LONGEST_CUT:]
            num_complete = len(self._tokenizer.decode(self._pending)) - 1
        self._num_given = num_complete
        return new

    def _until_stop(self, new: str, may_stop: bool) -> str:
        """Give the text that cannot belong to a stop string any more, and notice one that completes."""
        if not self._automaton.has_stops:
            return new
        state, text = self._state, self._held + new
        for count, character in enumerate(new, start=len(self._held) + 1):
            state = state.after(character)
            if may_stop and state.stop is not None:
                self.stop_found, self._held = state.stop, ""
                return text[: count if self._include_stop else count - len(state.stop)]
        while not state.longer and state.shorter is not None:
            # A stop string that did not count: only what may become another one waits.
            state = state.shorter
        self._state = state
        num_free = len(text) - state.depth
        self._held = text[num_free:]
        return text[:num_free]


class _State:
    """The longest beginning of a stop string that the text ends with.

    Attributes:
        depth: its length.
        stop: the longest stop string that the text ends with, if any.
        shorter: the next shorter beginning that the text ends with, None for the empty one.
        longer: the states after one more character of the same stop string.
    """

    __slots__ = ("depth", "longer", "shorter", "stop")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.stop: str | None = None
        self.shorter: _State | None = None
        self.longer: dict[str, _State] = {}

    def after(self, character: str) -> _State:
        """Follow the text by one character."""
        state = self
        while character not in state.longer:
            if state.shorter is None:
                return state
            state = state.shorter
        return state.longer[character]


class _Automaton:
    """The states of a set of stop strings.

    Source: A. V. Aho and M. J. Corasick, "Efficient string matching: an aid to bibliographic search".
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if "" in stops:
            raise ValueError("stop: got an empty string, expected text; leave it out")
        self.has_stops = bool(stops)
        self.root = _State(0)
        for stop in stops:
            state = self.root
            for character in stop:
                state = state.longer.setdefault(character, _State(state.depth + 1))
            state.stop = stop
        self._link()

    def _link(self) -> None:
        """Point every state to the next shorter one, the shortest first."""
        level = [self.root]
        while level:
            following = []
            for state in level:
                for character, longer in state.longer.items():
                    shorter = self.root if state.shorter is None else state.shorter.after(character)
                    longer.shorter = shorter
                    longer.stop = longer.stop or shorter.stop
                    following.append(longer)
            level = following


@lru_cache(maxsize=16)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)
