"""A request on its way from one engine to another: what is said of it, and what must agree.

Separate from `handoff.py`, which is the file, and from `engine.py`, which moves the arrays.
Read next: `handoff.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import jax
import numpy as np

from ..config import PAGE_TOKENS, CacheConfig, ModelConfig
from ..engine_config import EngineConfig
from ..model.numerics import Numerics
from ..model.weights import Weights
from ..sampling_params import SamplingParams
from .handoff import HandoffError, PrefilledRequest, check_header
from .request import Request, TokenLogprobs


def settings_of(
    weights: Weights, config: ModelConfig, numerics: Numerics, options: EngineConfig, sizes: CacheConfig
) -> dict[str, Any]:
    """List what two engines must have in common to hand requests over.

    Args:
        weights: told apart by their norms, which every layer has and every layout keeps whole.
        config: the architecture.
        numerics: the choice of arithmetic.
        options: gives the mode of prefill.
        sizes: gives slack and page length.

    Returns:
        Values by name.

    Source: spec/serving.md section 7 (what an importer must check).
    """
    architecture = hashlib.sha256(repr(config).encode()).hexdigest()[:16]
    norms = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(weights):
        if "norm" in jax.tree_util.keystr(path) and leaf.is_fully_addressable:
            norms.update(np.asarray(leaf).tobytes())
    return {
        "architecture": architecture,
        "weights": norms.hexdigest()[:16],
        "numerics": repr(numerics),
        "prefill": options.prefill,
        "sliding_window": config.sliding_window,
        "window_slack": sizes.window_slack,
        "draft_layers": sizes.num_draft_layers,
        "page_tokens": PAGE_TOKENS,
    }


def describe(
    request: Request, settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> PrefilledRequest:
    """Make a value of a request and its arrays.

    Args:
        request: with its first token, or over.
        settings: of its engine.
        arrays: what the devices hold of it, nothing if it is over.

    Returns:
        The value.
    """
    header = {
        **settings,
        "prompt": request.prompt.tolist(),
        "params": asdict(request.params),
        "decoder_start": request.decoder_start,
        "token_ids": request.token_ids,
        "logprobs": [_as_list(one) for one in request.logprobs],
        "prompt_logprobs": [_as_list(one) for one in request.prompt_logprobs],
        "finish_reason": request.finish_reason,
        "stop_token": request.stop_token,
    }
    return PrefilledRequest(header, dict(arrays))


def restore(prefilled: PrefilledRequest, settings: Mapping[str, Any], which: str) -> Request:
    """Make a request of such a value.

    Args:
        prefilled: the value.
        settings: of the engine that goes on with it.
        which: names it in messages.

    Returns:
        The request, over or with its arrays as `sequence`.

    Raises:
        HandoffError: settings that differ, or a header that describes no request.
    """
    header = prefilled.header
    check_header(header, dict(settings), which)
    try:
        request = Request(
            number=0,
            prompt=np.asarray(header["prompt"], np.int32),
            params=SamplingParams(**header["params"]),
            decoder_start=int(header["decoder_start"]),
            token_ids=[int(token) for token in header["token_ids"]],
            logprobs=[_from_list(one) for one in header["logprobs"]],
            prompt_logprobs=[_from_list(one) for one in header["prompt_logprobs"]],
            finish_reason=header["finish_reason"],
            stop_token=header["stop_token"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise HandoffError(
            f"{which}: got a header without a proper {error}, expected one that an engine wrote; export the "
            "request again"
        ) from error
    if not request.is_over:
        request.sequence = dict(prefilled.arrays)
    return request


def check_arrays(arrays: Mapping[str, np.ndarray], expected: Mapping[str, Any], which: str) -> None:
    """Refuse arrays that are not those of a slot here.

    Args:
        arrays: what the devices held of a request.
        expected: shapes and dtypes by name.
        which: names the request in messages.

    Raises:
        HandoffError: a missing or unknown array, another shape or dtype.
    """
    if set(arrays) != set(expected):
        raise HandoffError(
            f"{which}: got arrays {sorted(arrays)}, expected {sorted(expected)}; export it again"
        )
    for name, one in expected.items():
        found = arrays[name]
        if found.shape != one.shape or found.dtype != one.dtype:
            raise HandoffError(
                f"{which}: {name}: got {found.dtype} {list(found.shape)}, expected {one.dtype} "
                f"{list(one.shape)}; export it again"
            )


def _as_list(one: TokenLogprobs) -> list[Any]:
    return [one.logprob, [[token, value] for token, value in one.top.items()]]


def _from_list(one: list[Any]) -> TokenLogprobs:
    return TokenLogprobs(float(one[0]), {int(token): float(value) for token, value in one[1]})
