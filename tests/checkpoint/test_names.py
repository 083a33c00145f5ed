from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from deepinfer_jax.arrays import ArraySpec
from deepinfer_jax.checkpoint import CheckpointError, ExpectedTensor, names, tensor_table
from deepinfer_jax.checkpoint.names import is_vision_tensor
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.config_json import parse_config, read_config

GOLDEN = Path(__file__).parents[1] / "golden"
VISION_TENSORS = 263
IMAGE_VECTORS = 3


@pytest.fixture(scope="module")
def released() -> ModelConfig:
    return parse_config(json.loads((GOLDEN / "released_config.json").read_text()))


@pytest.fixture(scope="module")
def table(released: ModelConfig) -> dict[str, ExpectedTensor]:
    return tensor_table(released)


def num_bytes(table: dict[str, ExpectedTensor], *starts: str) -> int:
    return sum(tensor.num_bytes for name, tensor in table.items() if name.startswith(starts))


def test_released_table_has_every_text_tensor(table: dict[str, ExpectedTensor]) -> None:
    assert len(table) == 96_085 - VISION_TENSORS - IMAGE_VECTORS


def test_released_layers_have_the_published_number_of_tensors(table: dict[str, ExpectedTensor]) -> None:
    layers = Counter(
        name.split(".")[1] for name in table if name.startswith("layers.") and ".engram." not in name
    )
    expected = dict.fromkeys(map(str, range(40)), 2_334)
    expected |= dict.fromkeys(("24", "28", "32", "36"), 2_337) | dict.fromkeys(("2", "8", "14"), 2_342)
    assert layers == expected | {"20": 2_341}
    stages = Counter(name.split(".")[1] for name in table if name.startswith("mtp."))
    assert stages == {"0": 801, "1": 798, "2": 802}
    assert sum(".engram." in name for name in table) == 12


def test_released_layers_have_the_published_bytes(table: dict[str, ExpectedTensor]) -> None:
    plain = num_bytes(table, "layers.0.")
    assert plain == 7_389_500_888
    assert num_bytes(table, "layers.2.") - plain == 16_193_792
    experts = [tensor for name, tensor in table.items() if ".ffn.experts." in name]
    assert len(experts) == 94_464
    assert round(sum(tensor.num_bytes for tensor in experts) / 2**30, 2) == 275.67
    assert num_bytes(table, "layers.0.ffn.experts.7.") == 18_800_640


def test_released_engram_fills_its_files_to_the_byte(table: dict[str, ExpectedTensor]) -> None:
    header_bytes = 664
    assert num_bytes(table, "layers.1.engram.") + header_bytes == 101_535_150_936
    both = num_bytes(table, "layers.1.engram.", "layers.14.engram.")
    assert round(both / 2**30, 2) == 189.13


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.0.attn.wq_b.scale", "F8_E8M0", (1024, 40)),
        ("layers.20.attn.compressor.wkv.weight", "BF16", (512, 5120)),
        ("layers.39.ffn.experts.383.w2.weight", "I8", (5120, 1152)),
        ("layers.39.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384_016_682, 8)),
        ("layers.5.hc_ffn_fn", "F32", (24, 20480)),
        ("mtp.0.main_proj.weight", "F8_E4M3", (5120, 15360)),
        ("mtp.0.main_proj.scale", "F8_E8M0", (160, 480)),
        ("mtp.1.ffn.gate.weight", "BF16", (128, 5120)),
        ("mtp.2.markov_head.head.weight", "BF16", (129280, 256)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
    ],
)
def test_released_tensor_is_declared_as_published(
    table: dict[str, ExpectedTensor], name: str, dtype: str, shape: tuple[int, ...]
) -> None:
    assert (table[name].dtype, table[name].shape) == (dtype, shape)


@pytest.mark.parametrize(
    "name",
    [
        "layers.20.attn.compressor.wgate.weight",
        "layers.24.attn.indexer.wk.weight",
        "layers.0.attn.indexer.wq_b.weight",
        "mtp.0.norm.weight",
        "mtp.1.markov_head.embed.weight",
        "mtp.0.embed.weight",
    ],
)
def test_tensor_absent_by_design_is_not_expected(table: dict[str, ExpectedTensor], name: str) -> None:
    assert name not in table


@pytest.mark.parametrize("model", ["tiny_bf16", "tiny_fp8fp4"])
def test_golden_header_equals_the_table(golden: Path, raw_tensors, model: str) -> None:
    table = tensor_table(read_config(golden / model))
    raw = raw_tensors(golden / model)
    expected = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in table.items()}
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in raw.items()} == expected


def test_bc57_names_that_contain_each_other_stay_apart(table: dict[str, ExpectedTensor]) -> None:
    similar = [
        *("layers.0.ffn.gate.bias", "layers.0.ffn.gate.bias_vl", "layers.0.ffn.shared_experts.w1.weight"),
        *("layers.0.ffn.experts.1.w1.weight", "layers.0.ffn.experts.10.w1.weight"),
        *("layers.1.ffn.experts.1.w1.weight", "layers.10.ffn.experts.1.w1.weight"),
    ]
    assert [table[name].name for name in similar] == similar
    assert len({tensor.name for tensor in table.values()}) == len(table)


def test_bc57_two_arrays_with_one_tensor_are_refused(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    duplicate = ArraySpec("norm.weight", (64,), ("embed",))
    monkeypatch.setattr(names, "draft_weight_specs", lambda config: {"again": duplicate})
    with pytest.raises(CheckpointError, match=r"'again' of the draft claims tensor 'norm\.weight'"):
        tensor_table(read_config(golden / "tiny_bf16"))


@pytest.mark.parametrize(
    ("name", "is_vision"),
    [
        ("vision.blocks.0.norm1.weight", True),
        ("aligner.w1.bias", True),
        ("image_start", True),
        ("image_starts", False),
        ("visionary.weight", False),
        ("layers.0.vision.weight", False),
    ],
)
def test_bc57_vision_tensors_are_told_by_their_whole_first_word(name: str, is_vision: bool) -> None:
    assert is_vision_tensor(name) == is_vision
