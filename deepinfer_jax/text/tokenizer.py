"""Text to token ids and back, by the checkpoint's own `tokenizer.json`.

Separate so that the model and the engine know ids only, and so that this side needs no JAX.
Read next: `training/data.py`, which encodes a corpus with it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Backend

BEGIN_TEXT = "<｜begin▁of▁sentence｜>"
END_TEXT = "<｜end▁of▁sentence｜>"
PAD_TEXT = "<｜▁pad▁｜>"
USER_TEXT = "<｜User｜>"
ASSISTANT_TEXT = "<｜Assistant｜>"
THINK_END_TEXT = "</think>"
IMAGE_TEXT = "<｜deepseek_image｜>"
"""Spellings of the special tokens. Ids differ between tokenizers, so only the spelling is constant.

Source: spec/checkpoint.md section 5, spec/recipe.md section 2.
"""

PLACEHOLDER = re.compile("image|place[▁_]holder")
"""Found in the spelling of tokens that stand for images, or for nothing yet."""


class TokenizerError(ValueError):
    """A tokenizer or a text operation that is refused: what, got, expected, how to fix."""


class Tokenizer:
    """The byte-level BPE of a checkpoint, with its special tokens looked up by spelling.

    Args:
        backend: a `tokenizers.Tokenizer`.

    Raises:
        TokenizerError: begin, end or pad token missing.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.bos_token_id = self.special_id(BEGIN_TEXT)
        self.eos_token_id = self.special_id(END_TEXT)
        self.pad_token_id = self.special_id(PAD_TEXT)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read `tokenizer.json` of a checkpoint folder.

        Args:
            path: the checkpoint folder.

        Returns:
            The tokenizer.

        Raises:
            TokenizerError: no such folder or file, or a file that is no tokenizer.
        """
        folder, file = Path(path), Path(path) / "tokenizer.json"
        if not folder.is_dir():
            raise TokenizerError(
                f"tokenizer folder {str(folder)!r}: got no such folder, expected one with tokenizer.json; "
                "pass the checkpoint folder"
            )
        if not file.is_file():
            raise TokenizerError(
                f"tokenizer file {str(file)!r}: got no such file, expected the tokenizer.json that belongs "
                "to the checkpoint; copy it there, or pass token ids instead of text"
            )
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(
                f"tokenizer file {str(file)!r}: got {error}, expected a Hugging Face tokenizer.json; "
                "download the file again"
            ) from error
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex of the tokenizer's content, to tell stale encoded data."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    def special_id(self, text: str) -> int:
        """Look up the id of one special token by its spelling.

        Args:
            text: the exact spelling, such as `USER_TEXT`.

        Returns:
            The id.

        Raises:
            TokenizerError: the tokenizer has no such token.
        """
        found = self._backend.token_to_id(text)
        if found is None:
            raise TokenizerError(
                f"special token {text!r}: got a tokenizer of {self.vocab_size} ids without it, expected one "
                "of this architecture; use the tokenizer.json that belongs to the checkpoint"
            )
        return found

    def placeholder_ids(self) -> list[int]:
        """List the added tokens that stand for images or for nothing: no text has them, so none is sampled.

        Returns:
            Their ids in order.

        Source: spec/checkpoint.md section 5, spec/vision.md (sampling).
        """
        added = self._backend.get_added_tokens_decoder()
        return sorted(i for i, token in added.items() if PLACEHOLDER.search(token.content))

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Encode one text; spellings of special tokens inside it become their ids.

        Args:
            text: any text. Do not pass a user's words through this with markers around them: their
                own spelling of a marker would count as one.
            add_bos: whether to put the begin token in front.

        Returns:
            Token ids.
        """
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return [self.bos_token_id, *ids] if add_bos else ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode many texts on all cores, without begin tokens.

        Args:
            texts: any texts.

        Returns:
            int32 [tokens] for each text.
        """
        # The fast variant keeps no character offsets; with them a book needs 100 bytes a token.
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(item.ids, np.int32) for item in encoded]

    def decode(self, ids: Iterable[int], keep_special: bool = False) -> str:
        """Turn ids into text; bytes that are no complete UTF-8 become U+FFFD.

        Args:
            ids: token ids.
            keep_special: whether tokens that `tokenizer.json` flags as special are spelled out. Chat
                and thinking markers are not flagged there and are always spelled out.

        Returns:
            The text.

        Raises:
            TokenizerError: an id outside the vocabulary.
        """
        listed = [int(i) for i in ids]
        outside = [i for i in listed if not 0 <= i < self.vocab_size]
        if outside:
            raise TokenizerError(
                f"token ids: got {outside[:5]} outside the vocabulary, expected 0..{self.vocab_size - 1}; "
                "use the tokenizer that belongs to the model"
            )
        return self._backend.decode(listed, skip_special_tokens=not keep_special)

    def byte_lengths(self) -> np.ndarray:
        """Count the UTF-8 bytes of text that each id stands for.

        Returns:
            int32 [vocab]: bytes of ordinary tokens, 0 for added (special) tokens.
        """
        added = self._backend.get_added_tokens_decoder()
        # A byte-level token is spelled with one character for each of its bytes.
        spellings = (self._backend.id_to_token(i) or "" for i in range(self.vocab_size))
        return np.asarray([0 if i in added else len(text) for i, text in enumerate(spellings)], np.int32)
