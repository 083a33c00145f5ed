"""Text in, text out: load a model folder and generate.

Separate because it joins checkpoint, tokenizer and the loop over ids, which do not know each other.
Read next: `generate.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import overload

import jax
import numpy as np
from jax.sharding import Mesh

from ..assets import NANO_FOLDER
from ..checkpoint import load_weights
from ..config import ModelConfig
from ..config_json import read_config
from ..model.numerics import NUMERICS, Numerics
from ..model.weights import Weights
from ..sampling_params import RequestError, SamplingParams
from ..sharding.layout import Layout
from ..sharding.mesh import MeshShape
from ..step import ONE_DEVICE, Target
from ..text.tokenizer import Tokenizer
from .driver import DriverOptions, Timing, TokenLogprobs
from .generate import OnToken, generate_ids
from .progress import working_on
from .target import make_target, put_on

type Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """What one prompt became.

    Attributes:
        text: generated text, "" if the model has no tokenizer.
        token_ids: generated tokens, without the stop token.
        finish_reason: "stop" or "length".
        prompt_ids: tokens of the prompt.
        logprobs: one for each token, if asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model.

    Attributes:
        config: the architecture.
        weights: in device memory.
        numerics: the choice of arithmetic.
        tokenizer: None for a checkpoint without one; prompts are token ids then.
        target: where the weights lie.
    """

    config: ModelConfig
    weights: Weights
    numerics: Numerics
    tokenizer: Tokenizer | None
    target: Target = ONE_DEVICE

    def encode(self, prompt: Prompt) -> list[int]:
        """Turn a prompt into token ids.

        Raises:
            RequestError: text for a model without a tokenizer, or empty text.
        """
        if not isinstance(prompt, str):
            if not isinstance(prompt, Sequence):
                raise RequestError(
                    f"prompts: got {prompt!r} as one of them, expected texts or lists of token ids; put the "
                    "ids of one prompt into a list of their own"
                )
            return list(prompt)
        if self.tokenizer is None:
            raise RequestError(
                "prompt: got text, expected token ids as this model folder has no tokenizer.json; put one "
                "beside config.json or give token ids"
            )
        if not prompt:
            raise RequestError("prompt: got '', expected text; give a non-empty prompt")
        return self.tokenizer.encode(prompt)


def load(
    folder: str | Path | None = None,
    numerics: str = "official",
    batch_invariant: bool = True,
    cache_format: str | None = None,
    mesh: str | tuple[int, ...] | MeshShape | Mesh | None = None,
    layout: str | Layout | None = None,
    routing_counts: np.ndarray | None = None,
    redundant_experts: int = 0,
) -> Model:
    """Load a checkpoint folder, or the embedded nano model.

    Args:
        folder: config.json, safetensors, and tokenizer.json or engram_token_map.npy; None for nano.
        numerics: "official" or "float32".
        batch_invariant: whether a request's tokens are the same whatever runs beside it; without it
            few sequences at a time run faster.
        cache_format: "fp4", "fp8", "bf16" or "float32": how the cache is rounded and stored; that of the
            numerics by default.
        mesh: grid of devices, such as "8", "2x4" or "data=2,model=4", or a mesh of JAX; one device by
            default.
        layout: what lies where on the mesh: a preset's name or a `Layout`; "data+expert" by default.
        routing_counts: [L, E], how often each layer's experts were chosen, for a balanced placement of
            the experts; in order by default.
        redundant_experts: further places that hold the most used experts once more; needs the counts.

    Returns:
        The model, ready to generate.

    Raises:
        ValueError: a refused configuration, checkpoint, numerics or layout, before any compute.
    """
    if numerics not in NUMERICS:
        raise RequestError(f"numerics: got {numerics!r}, expected one of {sorted(NUMERICS)}; choose one")
    use_compilation_cache()
    path = NANO_FOLDER if folder is None else Path(folder)
    config = read_config(path)
    chosen = replace(NUMERICS[numerics], batch_invariant=batch_invariant)
    if cache_format is not None:
        chosen = replace(chosen, cache_format=cache_format)
    target = make_target(config, mesh, layout, redundant_experts)
    with working_on(f"loading {path.name}"):
        weights = load_weights(path, config, chosen.compute_dtype)
        weights = put_on(weights, config, target, routing_counts, redundant_experts)
    has_tokenizer = (path / "tokenizer.json").is_file()
    tokenizer = Tokenizer.from_folder(path) if has_tokenizer else None
    return Model(config, weights, chosen, tokenizer, target)


@cache
def _default_model() -> Model:
    return load()


def use_compilation_cache() -> Path:
    """Keep compiled programs on disk between processes, unless the user chose a place already.

    Returns:
        The folder in use.
    """
    configured = jax.config.jax_compilation_cache_dir
    if configured:
        return Path(configured)
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = base / "deepinfer_jax" / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder


@overload
def generate(
    prompts: str,
    params: SamplingParams = ...,
    model: Model | None = ...,
    on_token: OnToken | None = ...,
    timing: Timing | None = ...,
    options: DriverOptions = ...,
) -> Completion: ...
@overload
def generate(
    prompts: list[Prompt] | list[str] | list[list[int]],
    params: SamplingParams | Sequence[SamplingParams] = ...,
    model: Model | None = ...,
    on_token: OnToken | None = ...,
    timing: Timing | None = ...,
    options: DriverOptions = ...,
) -> list[Completion]: ...
def generate(
    prompts: str | list[Prompt] | list[str] | list[list[int]],
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 (frozen)
    model: Model | None = None,
    on_token: OnToken | None = None,
    timing: Timing | None = None,
    options: DriverOptions = DriverOptions(),  # noqa: B008 (frozen)
) -> Completion | list[Completion]:
    """Generate from one text, or from a list of texts and token id lists.

    Args:
        prompts: a text, or a list whose entries are texts or lists of token ids.
        params: for all prompts, or one for each.
        model: from `load`; the embedded nano model by default.
        on_token: receives (prompt number, token id) as tokens are known.
        timing: filled in.
        options: how to run them, such as `DriverOptions(prefill="bounded")`.

    Returns:
        A completion for a text, a list of completions for a list.

    Raises:
        RequestError: a prompt or parameter that is refused, before any is run.
        InvalidOutputError: a prompt whose logits are no distribution; the others' results are in it.
    """
    model = _default_model() if model is None else model
    many = [prompts] if isinstance(prompts, str) else prompts
    ids = [model.encode(prompt) for prompt in many]
    generations = generate_ids(
        *(model.weights, model.config, model.numerics, ids, params, on_token, timing, options),
        forbidden_ids=[] if model.tokenizer is None else model.tokenizer.placeholder_ids(),
        target=model.target,
    )
    completions = [
        Completion(
            text="" if model.tokenizer is None else model.tokenizer.decode(generation.token_ids),
            token_ids=generation.token_ids,
            finish_reason=generation.finish_reason or "",
            prompt_ids=generation.prompt_ids,
            logprobs=generation.logprobs,
        )
        for generation in generations
    ]
    return completions[0] if isinstance(prompts, str) else completions
