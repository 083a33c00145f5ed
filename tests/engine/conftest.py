"""Fixtures of the engine's tests.

Separate because several files run the engine on devices that are not there.
"""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_jax.testing.fake_device import FakeRunner


@pytest.fixture
def fake_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every engine that is made run on fake devices."""

    def make(_weights: Any, config: Any, _numerics: Any, sizes: Any, count: int, *rest: Any) -> FakeRunner:
        _is_forbidden, _target, drafting = rest
        return FakeRunner(
            config, sizes, count, 0 if drafting is None else drafting.options.num_drafts(config)
        )

    monkeypatch.setattr("deepinfer_jax.engine.engine.Runner", make)
