"""Offline inference for DeepSeek-V4.1-Flash as pure functions in JAX.

Separate names are loaded on first use, so that reading a configuration imports no JAX.
Read next: `step.py` (the whole algorithm in names), `engine/llm.py` (load and generate).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import ConfigError, ModelConfig
    from .config_json import read_config
    from .engine.driver import DriverOptions
    from .engine.llm import Completion, Model, generate, load
    from .sampling_params import InvalidOutputError, RequestError, SamplingParams
    from .sharding.errors import LayoutError
    from .sharding.layout import Layout

_HOMES = {
    "Completion": "engine.llm",
    "ConfigError": "config",
    "DriverOptions": "engine.driver",
    "InvalidOutputError": "sampling_params",
    "Layout": "sharding.layout",
    "LayoutError": "sharding.errors",
    "Model": "engine.llm",
    "ModelConfig": "config",
    "RequestError": "sampling_params",
    "SamplingParams": "sampling_params",
    "generate": "engine.llm",
    "load": "engine.llm",
    "read_config": "config_json",
}

__all__ = [
    "Completion",
    "ConfigError",
    "DriverOptions",
    "InvalidOutputError",
    "Layout",
    "LayoutError",
    "Model",
    "ModelConfig",
    "RequestError",
    "SamplingParams",
    "generate",
    "load",
    "read_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
