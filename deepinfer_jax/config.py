"""The published model configuration as frozen, validated values.

Separate so that everything else can depend on it while it depends on nothing.
Read next: `config_json.py` (how it is read), `arrays.py` (how tensors are declared).
"""

from __future__ import annotations

from dataclasses import dataclass, field

NOTHING = -1
"""Marks an absent index in integer arrays: an unused selection slot, a missing page, a dead Engram id."""


class ConfigError(ValueError):
    """A configuration that this package refuses, with the key, what it got and what it expects."""


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN rescaling of the rotary frequencies of layers that read compressed KV.

    Args:
        factor: context extension over `original_max_position_embeddings`, at least 1.
        beta_fast: rotations over the original context above which a frequency stays.
        beta_slow: rotations below which it is divided by `factor`.
        original_max_position_embeddings: context length of the unscaled frequencies, tokens.

    Source: spec/model.md section 2 (RoPE).
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """The DSpark draft stages (`mtp.*` tensors) as published.

    Args:
        num_stages: draft stages, 0 when the checkpoint has none.
        block_size: draft tokens of a block.
        noise_token_id: id that fills the block's unknown positions.
        target_layer_ids: backbone layers whose input streams the draft reads.
        markov_rank: rank of the Markov head's tables.
        n_routed_experts: routed experts of a draft stage.
        num_experts_per_tok: routed experts chosen per token.

    Source: spec/model.md section 15.
    """

    num_stages: int = 0
    block_size: int = 0
    noise_token_id: int = 0
    target_layer_ids: tuple[int, ...] = ()
    markov_rank: int = 0
    n_routed_experts: int = 0
    num_experts_per_tok: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture of one checkpoint: the keys of the published `text_config` and nothing else.

    Field names are the published keys, in tokens, channels, layers or ids as their names say.
    `is_quantized` tells the released mixed FP8/MXFP4 storage from plain BF16; `draft` groups the
    DSpark keys; `has_vision` says that `vision.*` tensors belong to the checkpoint.

    Raises:
        ConfigError: a value that contradicts another or that no implementation here covers.

    Source: spec/model.md section 1.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: YarnScaling
    max_position_embeddings: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    image_token_id: int
    bos_token_id: int | None = None
    eos_token_id: int = 1
    is_quantized: bool = False
    has_vision: bool = False
    draft: DraftConfig = field(default_factory=DraftConfig)

    def __post_init__(self) -> None:
        _check_types(self)
        _check_sizes(self)
        _check_layers(self)
        _check_token_ids(self)
        _check_draft(self)

    @property
    def engram_row_size(self) -> int:
        """Channels that one token reads from an Engram table over all n-gram sizes and heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads * self.engram_head_dim


PAGE_TOKENS = 128
"""Tokens of a page of compressed KV and index keys."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Sizes of a cache.

    Args:
        num_slots: sequences that it holds at once.
        pages_per_slot: pages that one sequence can have.
        num_pages: pages in all, shared by the slots.
        window_slack: positions by which a sequence can be shortened again: rows that every ring keeps
            beyond what the model reads.
        page_tokens: tokens of a page, an even number.
        num_draft_layers: draft stages whose context rows are kept beside the layers' window rows.

    Raises:
        ConfigError: a size that is not a positive integer, or an odd page.

    Source: spec/serving.md section 2.
    """

    num_slots: int
    pages_per_slot: int
    num_pages: int
    window_slack: int = 0
    page_tokens: int = PAGE_TOKENS
    num_draft_layers: int = 0

    def __post_init__(self) -> None:
        for name in ("num_slots", "pages_per_slot", "num_pages", "page_tokens"):
            value = getattr(self, name)
            require_size(isinstance(value, int) and value > 0, name, value, "a positive integer")
        for name in ("window_slack", "num_draft_layers"):
            value = getattr(self, name)
            require_size(value >= 0, name, value, "0 or more")
        is_even = self.page_tokens % 2 == 0
        require_size(is_even, "page_tokens", self.page_tokens, "an even number, as groups have 2 tokens")

    @classmethod
    def for_slots(
        cls, num_slots: int, capacity: int, window_slack: int = 0, page_tokens: int = PAGE_TOKENS
    ) -> CacheConfig:
        """Size a cache in which every slot can hold `capacity` tokens at once.

        Args:
            num_slots: sequences.
            capacity: tokens of each, rounded up to whole pages.
            window_slack: positions by which a sequence can be shortened.
            page_tokens: tokens of a page.

        Returns:
            The sizes.
        """
        pages = -(-capacity // page_tokens)
        return cls(num_slots, pages, num_slots * pages, window_slack, page_tokens)

    @property
    def capacity(self) -> int:
        """Tokens that one slot can hold."""
        return self.pages_per_slot * self.page_tokens


def require_size(condition: bool, key: str, got: object, expected: str) -> None:
    """Refuse a cache size: `ConfigError` if the condition is false."""
    if not condition:
        raise ConfigError(f"cache {key}: got {got!r}, expected {expected}; change CacheConfig({key}=...)")


def require(condition: bool, key: str, got: object, expected: str) -> None:
    """Refuse a configuration value.

    Args:
        condition: whether the value is accepted.
        key: the published key.
        got: its value.
        expected: what would be accepted.

    Raises:
        ConfigError: if the condition is false.
    """
    if not condition:
        raise ConfigError(
            f"config key {key!r}: got {got!r}, expected {expected}; "
            "fix config.json or use a checkpoint of this architecture"
        )


_EXPECTED_TYPES = {
    "int": "an integer",
    "int | None": "an integer or null",
    "float": "a number",
    "bool": "true or false",
    "tuple[int, ...]": "a list of integers",
}


def _check_types(config: ModelConfig) -> None:
    """Check every value against its annotation, as JSON may hold anything."""
    parts = [("", config), ("rope_scaling.", config.rope_scaling), ("draft.", config.draft)]
    for prefix, part in parts:
        for key, declared in part.__dataclass_fields__.items():
            expected = _EXPECTED_TYPES.get(str(declared.type))
            value = getattr(part, key)
            if expected is not None:
                require(_is_of_type(value, str(declared.type)), prefix + key, value, expected)


def _is_of_type(value: object, annotation: str) -> bool:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    match annotation:
        case "int":
            return is_int
        case "int | None":
            return is_int or value is None
        case "float":
            return is_int or isinstance(value, float)
        case "bool":
            return isinstance(value, bool)
        case _:
            return isinstance(value, tuple) and all(_is_of_type(item, "int") for item in value)


def _check_sizes(config: ModelConfig) -> None:
    optional = {
        *("bos_token_id", "image_token_id", "eos_token_id", "draft"),
        *("candidate_source_layer_id", "engram_pad_token_id"),
    }
    for key in config.__dataclass_fields__:
        value = getattr(config, key)
        if key not in optional and type(value) in (int, float):
            require(value > 0, key, value, "a positive number")
    rope = config.qk_rope_head_dim
    for head_key in ("head_dim", "index_head_dim"):
        head = getattr(config, head_key)
        require(rope % 2 == 0 and rope <= head, "qk_rope_head_dim", rope, f"even, <= {head_key}")
    heads, groups = config.num_attention_heads, config.o_groups
    require(heads % groups == 0, "o_groups", groups, f"a divisor of num_attention_heads={heads}")
    experts = config.n_routed_experts
    require(
        config.num_experts_per_tok <= experts,
        *("num_experts_per_tok", config.num_experts_per_tok, f"at most n_routed_experts={experts}"),
    )
    require(config.hc_mult > 1, "hc_mult", config.hc_mult, "at least 2 residual streams")
    ngram = config.engram_max_ngram_size
    require(ngram > 1, "engram_max_ngram_size", ngram, "at least 2")


def _check_layers(config: ModelConfig) -> None:
    layers = config.num_hidden_layers
    ratios = config.compress_ratios
    stages = config.draft.num_stages
    require(
        len(ratios) == layers + stages,
        *("compress_ratios", ratios, f"{layers} layers + {stages} draft stages = {layers + stages} entries"),
    )
    require(set(ratios) <= {0, 1, 2}, "compress_ratios", ratios, "entries 0, 1 or 2")
    require(not any(ratios[layers:]), "compress_ratios", ratios, "0 for every draft stage")
    for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        ids = getattr(config, key)
        is_sorted = list(ids) == sorted(set(ids)) and all(0 <= i < layers for i in ids)
        require(is_sorted, key, ids, f"increasing layer ids below {layers}")
    sources, index_sources = config.kv_source_layer_ids, config.index_source_layer_ids
    require(
        set(sources) <= set(index_sources),
        *("index_source_layer_ids", index_sources, f"to contain the KV sources {sources}"),
    )
    require(
        len(config.engram_num_embeddings) == len(config.engram_layer_ids),
        *("engram_num_embeddings", config.engram_num_embeddings, "one size per Engram layer"),
    )
    candidate = config.candidate_source_layer_id
    require(
        candidate == (sources[-1] if sources else None),
        *("candidate_source_layer_id", candidate, f"the last KV source of {sources}"),
    )
    for layer in range(layers):
        _check_layer_sources(config, layer)


def _check_layer_sources(config: ModelConfig, layer: int) -> None:
    ratios = config.compress_ratios
    if ratios[layer] == 0:
        is_source = layer in config.index_source_layer_ids
        require(not is_source, f"compress_ratios[{layer}]", 0, "1 or 2, as it is a source layer")
        return
    earlier = [source for source in config.kv_source_layer_ids if source <= layer]
    require(bool(earlier), f"compress_ratios[{layer}]", ratios[layer], "0 before the first KV source")
    require(
        ratios[earlier[-1]] == ratios[layer],
        *(f"compress_ratios[{layer}]", ratios[layer], f"the ratio of its KV source {earlier[-1]}"),
    )


def _check_token_ids(config: ModelConfig) -> None:
    for key in ("eos_token_id", "image_token_id", "engram_pad_token_id", "bos_token_id"):
        value = getattr(config, key)
        if value is not None:
            require(0 <= value < config.vocab_size, key, value, f"an id below {config.vocab_size}")


def _check_draft(config: ModelConfig) -> None:
    draft, layers = config.draft, config.num_hidden_layers
    if draft.num_stages == 0:
        return
    for key in ("block_size", "markov_rank", "n_routed_experts", "num_experts_per_tok"):
        require(getattr(draft, key) > 0, f"dspark_{key}", getattr(draft, key), "a positive number")
    targets, noise = draft.target_layer_ids, draft.noise_token_id
    is_sorted = bool(targets) and list(targets) == sorted(set(targets)) and 0 <= targets[0]
    require(
        is_sorted and targets[-1] < layers and not set(targets) & set(config.engram_layer_ids),
        *("dspark_target_layer_ids", targets, f"increasing layer ids below {layers}, none with Engram"),
    )
    require(
        0 <= noise < config.vocab_size,
        *("dspark_noise_token_id", noise, f"an id below {config.vocab_size}"),
    )
    require(
        draft.num_experts_per_tok <= draft.n_routed_experts,
        *("dspark_num_experts_per_tok", draft.num_experts_per_tok, f"at most {draft.n_routed_experts}"),
    )
