"""Session set-up: 8 simulated CPU devices, strict promotion, a compilation cache the workers share.

Separate because JAX reads most of this once, before any test module imports it.
Read next: `test_layering.py`, the rules of the tree; tolerances are in `deepinfer_jax.testing`.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count=8"
CACHE_DIR = Path(__file__).parents[1] / ".jax_cache"
GOLDEN = Path(__file__).parent / "golden"

# Through the environment, so that the processes that tests start inherit it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICE_COUNT_FLAG}".strip()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE_DIR))
# JAX locks its cache only when it is bounded; unlocked, a worker may read what another is still writing.
os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(2**30))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

from deepinfer_jax.config_json import parse_config  # noqa: E402
from deepinfer_jax.testing.presets import SMALLEST  # noqa: E402

# Only in this process: what tests start runs with a user's settings.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# No deadline: the first example of a property compiles. Derandomised: the same examples on every run.
hypothesis.settings.register_profile("deepinfer", deadline=None, derandomize=True)
hypothesis.settings.load_profile("deepinfer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where JAX does not run on one."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU; run with JAX_PLATFORMS=cuda"))


@pytest.fixture
def key(request: pytest.FixtureRequest) -> jax.Array:
    """A random key that depends on the test's id only, not on the order or the worker."""
    return jax.random.key(zlib.crc32(request.node.nodeid.encode()))


MOST_MEMORY_MAPS = 20_000
"""Of the 65,530 that Linux lets a process have; each compiled program takes several, a module thousands."""


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Forget compiled programs before a worker runs out of memory maps, which ends in a crash of LLVM."""
    yield
    maps = Path("/proc/self/maps")
    if maps.is_file() and maps.read_bytes().count(b"\n") > MOST_MEMORY_MAPS:
        jax.clear_caches()


@pytest.fixture
def without_compilation_cache():
    """Compile for real: for tests that measure how long compilation takes."""
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def smallest_document() -> dict[str, Any]:
    """A config.json that says `SMALLEST` in the official mixed storage."""
    document = json.loads((GOLDEN / "tiny_fp8fp4" / "config.json").read_text())
    text = document["text_config"]
    for key in [key for key in text if key.startswith("dspark") or key == "num_nextn_predict_layers"]:
        del text[key]
    for key in ("num_hidden_layers", "compress_ratios", "kv_source_layer_ids", "index_source_layer_ids"):
        text[key] = getattr(SMALLEST, key)
    for key in ("candidate_source_layer_id", "engram_layer_ids", "engram_num_embeddings"):
        text[key] = getattr(SMALLEST, key)
    document = json.loads(json.dumps(document))
    assert parse_config(document) == replace(SMALLEST, is_quantized=True)
    return document
