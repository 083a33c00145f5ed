"""Training state on disk: round trip within each format's precision, limits, refusals, atomicity.

Separate from the trainer's tests: arrays made here, no JAX.
Read next: `deepinfer_jax/training/state_files.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.training import state_files
from deepinfer_jax.training.state_files import StateError, config_hash, load_state, save_state

META = {"step": 40, "seed": 7, "config_hash": "abc", "loss_history": {"stories": [[0, 8.3], [40, 6.1]]}}


def example() -> tuple[dict[str, np.ndarray], dict[str, str]]:
    rng = np.random.default_rng(0)
    arrays = {
        "params/w": rng.normal(size=(3, 40, 64)).astype(np.float32),
        "mu/w": (rng.normal(size=(3, 40, 64)) * 10.0 ** rng.integers(-8, 3, (3, 40, 1))).astype(np.float32),
        "nu/w": 10.0 ** rng.uniform(-20, 2, (30, 8)).astype(np.float32),
        "count": np.array(123_456_789, np.int32),
        "key": np.array([2**32 - 1, 5], np.uint32),
        "bias": np.array([0.1, -0.2], np.float32),
        "mu/zero": np.zeros((2, 5), np.float32),
        "mu/scalar": np.array(0.25, np.float32),
        "mu/empty": np.zeros((0, 4), np.float32),
    }
    prefixes = {"params": "parameter", "mu": "first_moment", "nu": "second_moment"}
    return arrays, {name: prefixes.get(name.split("/")[0], "exact") for name in arrays}


def test_round_trip_keeps_each_kinds_precision(tmp_path: Path) -> None:
    arrays, kinds = example()
    save_state(tmp_path, arrays, kinds, META)
    loaded, meta = load_state(tmp_path, expected_config="abc")
    assert meta == META
    assert set(loaded) == set(arrays)
    for name, value in loaded.items():
        expected = arrays[name]
        assert value.shape == expected.shape and value.flags.writeable
        if kinds[name] == "exact":
            assert value.dtype == expected.dtype and np.array_equal(value, expected)
            continue
        assert value.dtype == np.float32
        if kinds[name] == "first_moment":
            largest = np.abs(expected).max(axis=-1, keepdims=True, initial=0.0)
            assert np.all(np.abs(value - expected) <= np.abs(expected) * 2**-4 + largest * 2**-18)
        else:
            assert np.array_equal(value, expected.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_saving_what_was_loaded_changes_nothing(tmp_path: Path) -> None:
    arrays, kinds = example()
    save_state(tmp_path / "a", arrays, kinds, META)
    first, _ = load_state(tmp_path / "a")
    save_state(tmp_path / "b", first, kinds, META)
    second, _ = load_state(tmp_path / "b")
    for name in first:
        np.testing.assert_allclose(second[name], first[name], rtol=1e-6, err_msg=name)


def test_nano_sized_state_fits_its_limits(tmp_path: Path) -> None:
    # 15.5 M parameters, of which a fifth (embedding, head, Engram) has second moments.
    sizes = {"matrices": 12_400_000, "tables": 3_100_000}
    arrays, kinds = {}, {}
    for name, size in sizes.items():
        value = np.full((size // 100, 100), 1e-3, np.float32)
        for prefix, kind in (("params", "parameter"), ("mu", "first_moment"), ("nu", "second_moment")):
            if prefix != "nu" or name == "tables":
                arrays[f"{prefix}/{name}"], kinds[f"{prefix}/{name}"] = value, kind
    save_state(tmp_path, arrays, kinds, META)
    files = [path.stat().st_size for path in tmp_path.iterdir()]
    assert max(files) < 15 * 2**20
    assert sum(files) < 60 * 2**20
    loaded, _ = load_state(tmp_path)
    assert all(np.allclose(loaded[name], 1e-3, rtol=0.01) for name in arrays)


def test_too_large_a_state_is_refused_before_writing(tmp_path: Path, monkeypatch) -> None:
    arrays, kinds = example()
    monkeypatch.setattr(state_files, "MAX_STATE_BYTES", 1000)
    with pytest.raises(StateError, match="expected at most 1000"):
        save_state(tmp_path / "a", arrays, kinds, META)
    assert not (tmp_path / "a").exists()


def test_new_state_replaces_the_old_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(state_files, "MAX_FILE_BYTES", 4096)
    arrays, kinds = example()
    save_state(tmp_path, arrays, kinds, META)
    before = {path.name for path in tmp_path.iterdir()}
    assert len(before) > 3
    arrays["params/w"] = arrays["params/w"] + 1
    save_state(tmp_path, arrays, kinds, {**META, "step": 41})
    listed = json.loads((tmp_path / "state.json").read_text())["files"]
    assert {path.name for path in tmp_path.iterdir()} == {"state.json", *listed}
    assert load_state(tmp_path)[1]["step"] == 41


def test_interrupted_save_leaves_the_old_state(tmp_path: Path, monkeypatch) -> None:
    arrays, kinds = example()
    save_state(tmp_path, arrays, kinds, META)
    write = state_files._write_renamed

    def fail_on_manifest(path: Path, content: bytes) -> None:
        if path.name == state_files.MANIFEST:
            raise OSError("disk full")
        write(path, content)

    monkeypatch.setattr(state_files, "_write_renamed", fail_on_manifest)
    changed = {name: value * 2 if kinds[name] == "parameter" else value for name, value in arrays.items()}
    with pytest.raises(OSError, match="disk full"):
        save_state(tmp_path, changed, kinds, {**META, "step": 41})
    loaded, meta = load_state(tmp_path)
    assert meta["step"] == 40
    assert np.allclose(loaded["params/w"], arrays["params/w"], rtol=0.01)


def test_state_of_another_config_is_refused(tmp_path: Path) -> None:
    save_state(tmp_path, *example(), META)
    with pytest.raises(StateError, match=r"got config abc, expected def.*use another folder"):
        load_state(tmp_path, expected_config="def")


def test_config_hash_ignores_key_order_only() -> None:
    assert config_hash({"a": 1, "b": [2]}) == config_hash({"b": [2], "a": 1})
    assert config_hash({"a": 1}) != config_hash({"a": 2})


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"got no state\.json"):
        load_state(tmp_path)
    save_state(tmp_path, *example(), META)
    (part,) = tmp_path.glob("state-*.bin")
    content = part.read_bytes()
    part.write_bytes(content[:-1])
    with pytest.raises(StateError, match=f"{part.name}.*copy it again"):
        load_state(tmp_path)
    part.unlink()
    with pytest.raises(StateError, match="no such file"):
        load_state(tmp_path)
    (tmp_path / "state.json").write_text("[]")
    with pytest.raises(StateError, match="expected JSON"):
        load_state(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_diverged_state_does_not_replace_a_good_one(tmp_path: Path, value: float) -> None:
    arrays, kinds = example()
    save_state(tmp_path, arrays, kinds, META)
    arrays["nu/w"][0, 0] = value
    with pytest.raises(StateError, match="'nu/w': got NaN or infinity"):
        save_state(tmp_path, arrays, kinds, META)
    load_state(tmp_path)


def test_inconsistent_arguments_are_refused(tmp_path: Path) -> None:
    arrays, kinds = example()
    with pytest.raises(StateError, match=r"got no \['seed'\]"):
        save_state(tmp_path, arrays, kinds, {k: v for k, v in META.items() if k != "seed"})
    with pytest.raises(StateError, match=r"\['count'\] in only one"):
        save_state(tmp_path, arrays, {k: v for k, v in kinds.items() if k != "count"}, META)
    with pytest.raises(StateError, match="got 'fp4', expected one of"):
        save_state(tmp_path, arrays, {**kinds, "count": "fp4"}, META)
