"""Engram's compressed vocabulary: which token ids count as the same word.

Separate because it is derived from the tokenizer, not stored with the weights.
Read next: `../model/engram.py`, which hashes the compressed ids.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

from ..config import ModelConfig
from .errors import CheckpointError

TOKEN_MAP_FILE = "engram_token_map.npy"
"""Name of a stored map; it wins over the tokenizer beside it."""

TOKENIZER_FILE = "tokenizer.json"

_UNDECODABLE = "�"


def engram_token_map(tokenizer_json_path: str | Path) -> np.ndarray:
    """Derive the compressed id of every token id.

    Tokens whose decoded text is equal after folding (NFKC, NFD, accents stripped, lower case, runs of
    whitespace as one space, ends stripped) share a class. Classes are numbered in order of first
    occurrence over the ids, added tokens included.

    Args:
        tokenizer_json_path: a `tokenizer.json` file.

    Returns:
        int32 [ids of the tokenizer].

    Raises:
        CheckpointError: a file that is no tokenizer, or whose ids have gaps.

    Source: spec/model.md section 10, "Compressed ids".
    """
    path = Path(tokenizer_json_path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{str(path)!r} is no tokenizer file: {error}; copy the checkpoint's tokenizer.json there"
        ) from error
    ids = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
    if ids != list(range(len(ids))):
        raise CheckpointError(
            f"{str(path)!r} has {len(ids)} token ids up to {ids[-1] if ids else None}, expected 0, 1, 2, ... "
            "without gaps; use the tokenizer that belongs to the checkpoint"
        )
    texts = tokenizer.decode_batch([[token_id] for token_id in ids], skip_special_tokens=False)
    fold, strip = _folding()
    classes: dict[str, int] = {}
    compressed = np.empty(len(ids), np.int32)
    for token_id, text in zip(ids, texts, strict=True):
        if _UNDECODABLE in text:
            key = tokenizer.id_to_token(token_id) or ""
        else:
            folded = fold.normalize_str(text)
            # A lone space is a word of its own; stripped, it would be empty.
            key = (folded if folded == " " else strip.normalize_str(folded)) or text
        compressed[token_id] = classes.setdefault(key, len(classes))
    return compressed


def _folding() -> tuple[normalizers.Normalizer, normalizers.Normalizer]:
    # The tokenizers library's own steps: Python's Unicode tables and its idea of accents and
    # whitespace differ from those that the model was trained with.
    fold = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        ]
    )
    return fold, normalizers.Strip()


def read_token_map(folder: str | Path, config: ModelConfig) -> np.ndarray:
    """Read the stored map of a checkpoint folder, or derive it from the tokenizer there.

    Args:
        folder: the checkpoint folder.
        config: the architecture, for the expected sizes.

    Returns:
        int32 [vocab], values 0..engram_compressed_vocab_size - 1, each of them used.

    Raises:
        CheckpointError: neither file, or a map that does not fit the configuration.
    """
    stored, tokenizer = Path(folder) / TOKEN_MAP_FILE, Path(folder) / TOKENIZER_FILE
    if stored.is_file():
        try:
            token_map = np.load(stored, allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise CheckpointError(
                f"{str(stored)!r} is no .npy array: {error}; delete it or write it again"
            ) from error
        _check_token_map(token_map, config, stored)
        return token_map.astype(np.int32)
    if tokenizer.is_file():
        token_map = engram_token_map(tokenizer)
        _check_token_map(token_map, config, tokenizer)
        return token_map
    raise CheckpointError(
        f"{str(folder)!r} has neither {TOKENIZER_FILE} nor {TOKEN_MAP_FILE}, expected one of them: the "
        "Engram layers hash compressed token ids that only the tokenizer defines; "
        "copy the tokenizer.json there"
    )


def _check_token_map(token_map: np.ndarray, config: ModelConfig, path: Path) -> None:
    vocab, classes = config.vocab_size, config.engram_compressed_vocab_size
    if token_map.shape != (vocab,) or not np.issubdtype(token_map.dtype, np.integer):
        raise CheckpointError(
            f"token map from {str(path)!r} is {token_map.dtype} of shape {token_map.shape}, expected "
            f"integers of shape ({vocab},), one per id of vocab_size; use the checkpoint's own tokenizer"
        )
    used = np.unique(token_map)
    if not np.array_equal(used, np.arange(classes)):
        raise CheckpointError(
            f"token map from {str(path)!r} has {len(used)} classes from {used[0]} to {used[-1]}, expected "
            f"engram_compressed_vocab_size = {classes} from 0; use the checkpoint's own tokenizer"
        )
