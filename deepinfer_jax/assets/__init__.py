"""Files that ship with the package.

Separate so that nobody spells out where they lie.
Read next: `nano/MODEL_CARD.md`; `released/config.json` is the published model's, without weights.
"""

from __future__ import annotations

from pathlib import Path

NANO_FOLDER = Path(__file__).parent / "nano"
"""The embedded model: configuration, weights, tokenizer."""

RELEASED_FOLDER = Path(__file__).parent / "released"
"""The configuration of DeepSeek-V4.1-Flash, for what needs no weights."""
