"""Text from a stream of token ids: never half a character, never one twice.

Separate because a token may hold part of a character, so text and tokens do not advance together.
Read next: `tokenizer.py`.
"""

from __future__ import annotations

from .tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"


class TextStream:
    """Decodes one completion as its tokens arrive.

    The pieces, joined, are the decoding of all tokens at once.

    Args:
        tokenizer: the model's tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Take a token and give the text that is complete by now.

        Args:
            token_id: the next token.

        Returns:
            New text, "" while a character is incomplete.
        """
        self._pending.append(token_id)
        text = self._tokenizer.decode(self._pending)
        if text.endswith(_INCOMPLETE):
            return ""
        self._pending.clear()
        return text

    def finish(self) -> str:
        """Give what is left: a character that was cut off becomes one U+FFFD."""
        text = self._tokenizer.decode(self._pending)
        self._pending.clear()
        return text
