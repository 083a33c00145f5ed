"""Offline inference for DeepSeek-V4.1-Flash as pure functions in JAX.

Separate names are loaded on first use, so that reading a configuration imports no JAX.
Read next: `step.py` (the whole algorithm in names), `engine/llm.py` (what a user calls).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import ConfigError, ModelConfig
    from .config_json import read_config
    from .engine.completion import Completion, Completions, StreamEvent
    from .engine.handoff import HandoffError, PrefilledRequest
    from .engine.llm import LLM
    from .engine.load import Model, load
    from .engine.measure import measure_costs
    from .engine.one_call import generate
    from .engine_config import EngineConfig
    from .sampling_params import InvalidOutputError, RequestError, SamplingParams
    from .sharding.errors import LayoutError
    from .sharding.layout import Layout

_HOMES = {
    "LLM": "engine.llm",
    "Completion": "engine.completion",
    "Completions": "engine.completion",
    "ConfigError": "config",
    "EngineConfig": "engine_config",
    "HandoffError": "engine.handoff",
    "InvalidOutputError": "sampling_params",
    "Layout": "sharding.layout",
    "LayoutError": "sharding.errors",
    "Model": "engine.load",
    "ModelConfig": "config",
    "PrefilledRequest": "engine.handoff",
    "RequestError": "sampling_params",
    "SamplingParams": "sampling_params",
    "StreamEvent": "engine.completion",
    "generate": "engine.one_call",
    "load": "engine.load",
    "measure_costs": "engine.measure",
    "read_config": "config_json",
}

__all__ = [
    "LLM",
    "Completion",
    "Completions",
    "ConfigError",
    "EngineConfig",
    "HandoffError",
    "InvalidOutputError",
    "Layout",
    "LayoutError",
    "Model",
    "ModelConfig",
    "PrefilledRequest",
    "RequestError",
    "SamplingParams",
    "StreamEvent",
    "generate",
    "load",
    "measure_costs",
    "read_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
