"""The batch command: order, memory, resuming, refusals; with an engine that only pretends.

Separate from `test_batch_killed.py`, which runs the real command and kills it.
Read next: `deepinfer_jax/cli/batch.py`, `deepinfer_jax/cli/batch_lines.py`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from deepinfer_jax.cli import EXIT_REFUSED, main
from deepinfer_jax.cli.batch import EXIT_FAILED, EXIT_INTERRUPTED
from deepinfer_jax.cli.batch_lines import run_batch
from deepinfer_jax.sampling_params import RequestError, SamplingParams


class FakeJob:
    """A request that ends after as many steps as it has tokens."""

    def __init__(self, prompt: Any, params: SamplingParams) -> None:
        self.prompt, self.params, self.num_steps = prompt, params, 0

    @property
    def is_done(self) -> bool:
        return self.num_steps >= self.params.max_tokens

    @property
    def completions(self) -> list[SimpleNamespace]:
        reason = "invalid" if self.prompt == "invalid" else "length"
        given = {"text": f"after {self.prompt}", "token_ids": [7] * self.params.max_tokens}
        given |= {"finish_reason": reason, "stop_reason": None, "prompt_ids": [1, 2]}
        return [SimpleNamespace(**given, logprobs=[], prompt_logprobs=[])] * self.params.n


class FakeLLM:
    """Runs up to `slots` jobs at a time; `on_step` is called with the number of each step."""

    made = 0
    on_step: Callable[[int], None] = staticmethod(lambda step: None)

    def __init__(self, model: str | None = None, slots: int = 2, **options: Any) -> None:
        type(self).made += 1
        self.model, self.options, self.num_steps, self.is_open = model, options, 0, True
        self.jobs: list[FakeJob] = []
        self.most_jobs = 0
        self.stats = SimpleNamespace(slots=slots, generated_tokens=0, draft=None)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_open = False

    def submit(self, prompt: Any, params: SamplingParams) -> FakeJob:
        if prompt == "refused":
            raise RequestError("prompt: got 900 tokens, expected at most 512; shorten it")
        job = FakeJob(prompt, params)
        if not job.is_done:
            self.jobs.append(job)
        self.most_jobs = max(self.most_jobs, len(self.jobs))
        return job

    def step(self) -> list[FakeJob]:
        self.on_step(self.num_steps)
        self.num_steps += 1
        running = self.jobs[: self.stats.slots]
        for job in running:
            job.num_steps += 1
        done = [job for job in running if job.is_done]
        self.jobs = [job for job in self.jobs if not job.is_done]
        return done


def line_of(max_tokens: int, prompt: Any = "p", **names: Any) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": max_tokens, **names}).encode()


def run_lines(lines: Sequence[bytes], **options: Any) -> tuple[list[dict[str, Any]], Any]:
    """Run lines numbered from 1: the records, and the tally."""
    written: list[bytes] = []
    llm: Any = options.pop("llm", None) or FakeLLM()
    tally = run_batch(enumerate(lines, start=1), written.append, llm, **options)
    assert all(record.endswith(b"\n") and record.count(b"\n") == 1 for record in written)
    return [json.loads(record) for record in written], tally


# The loop.


def test_records_come_in_the_order_of_the_lines_or_as_they_finish() -> None:
    lines = [line_of(5), line_of(1), line_of(3), line_of(1)]
    in_order, _ = run_lines(lines, in_order=True, llm=FakeLLM(slots=4))
    as_finished, _ = run_lines(lines, in_order=False, llm=FakeLLM(slots=4))
    assert [record["line"] for record in in_order] == [1, 2, 3, 4]
    assert [record["line"] for record in as_finished] == [2, 4, 3, 1]
    assert sorted(as_finished, key=lambda record: record["line"]) == in_order


def test_a_record_is_written_as_soon_as_its_turn_comes() -> None:
    written: list[bytes] = []
    llm: Any = FakeLLM(slots=3)
    after_step: list[int] = []
    lines = enumerate([line_of(2), line_of(1), line_of(4)], start=1)
    run_batch(lines, written.append, llm, refresh=lambda: after_step.append(len(written)))
    assert after_step == [0, 2, 2, 3]


@pytest.mark.parametrize("in_order", [True, False])
def test_few_lines_are_in_memory_and_the_rest_is_not_read(in_order: bool) -> None:
    num_read = num_written = most = 0

    def lines() -> Iterator[tuple[int, bytes]]:
        nonlocal num_read, most
        for number in range(1, 101):
            num_read += 1
            most = max(most, num_read - num_written)
            # The first takes longest, so in the input's order all others wait for it.
            yield number, line_of(40 if number == 1 else 1)

    def write(_: bytes) -> None:
        nonlocal num_written
        num_written += 1

    llm: Any = FakeLLM(slots=2)
    run_batch(lines(), write, llm, in_order=in_order, max_pending=6)
    assert (num_read, num_written) == (100, 100)
    assert most == 6
    assert llm.most_jobs <= 6


@pytest.mark.parametrize("in_order", [True, False])
def test_a_bad_line_gives_an_error_and_the_rest_goes_on(in_order: bool) -> None:
    lines = [
        b"nonsense",
        line_of(2, custom_id="a"),
        line_of(2, "refused", custom_id="b"),
        line_of(2, "invalid", custom_id="c"),
        line_of(2, custom_id="d", top_p=5),
        line_of(2, [1, 2]),
    ]
    records, tally = run_lines(lines, in_order=in_order)
    by_line = {record["line"]: record for record in records}
    assert sorted(by_line) == [1, 2, 3, 4, 5, 6]
    assert [by_line[number].get("custom_id") for number in range(1, 7)] == [None, "a", "b", "c", "d", None]
    assert "no valid JSON" in by_line[1]["error"]
    assert by_line[3]["error"] == "line 3: prompt: got 900 tokens, expected at most 512; shorten it"
    assert "logits held NaN" in by_line[4]["error"] and by_line[4]["error"].startswith("line 4: ")
    assert by_line[5]["error"].startswith("line 5: top_p: got 5")
    assert [number for number in by_line if "outputs" in by_line[number]] in ([2, 6], [6, 2])
    assert (tally.num_done, tally.num_failed) == (6, 4)


def test_lines_without_a_token_to_generate_end_without_a_step() -> None:
    llm = FakeLLM()
    records, _ = run_lines([line_of(0), line_of(0)], llm=llm)
    assert [record["line"] for record in records] == [1, 2]
    assert llm.num_steps == 0


def test_all_outputs_of_a_line_are_in_its_record() -> None:
    records, tally = run_lines([line_of(3, n=2)])
    assert [one["token_ids"] for one in records[0]["outputs"]] == [[7, 7, 7]] * 2
    assert records[0]["usage"] == {"prompt_tokens": 2, "completion_tokens": 6}
    assert tally.num_tokens == 6


@given(
    lengths=st.lists(st.integers(0, 9), max_size=30),
    slots=st.integers(1, 5),
    max_pending=st.integers(1, 12),
    in_order=st.booleans(),
)
def test_every_line_gets_one_record_whatever_the_sizes(
    lengths: list[int], slots: int, max_pending: int, in_order: bool
) -> None:
    lines = [line_of(length) if length else b"bad" for length in lengths]
    records, _ = run_lines(lines, llm=FakeLLM(slots=slots), max_pending=max_pending, in_order=in_order)
    numbers = [record["line"] for record in records]
    assert sorted(numbers) == list(range(1, len(lengths) + 1))
    if in_order:
        assert numbers == sorted(numbers)


# The command.


class Output(NamedTuple):
    """What a command left: exit code, standard error, and the output file."""

    code: int
    err: str
    records: bytes


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the fake in the place of the engine, and count how many are made."""
    monkeypatch.setattr("deepinfer_jax.engine.llm.LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "made", 0)


@pytest.fixture
def batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Output]:
    """Run the command in this process, on `in.jsonl` and `out.jsonl`."""

    def run(*words: str, source: str = "in.jsonl", output: str = "out.jsonl") -> Output:
        path = tmp_path / output
        code = main(["batch", str(tmp_path / source), "-o", str(path), *words])
        streams = capsys.readouterr()
        assert streams.out == ""
        return Output(code, streams.err, path.read_bytes() if path.is_file() else b"")

    return run


@pytest.fixture
def lines(tmp_path: Path) -> list[bytes]:
    """An input of 20 requests of different lengths."""
    lengths = random.Random(3)
    made = [line_of(lengths.randint(1, 9), custom_id=str(number)) for number in range(20)]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(made) + b"\n")
    return made


def test_a_run_writes_all_records_and_one_line_of_summary(
    batch: Callable[..., Output], lines: list[bytes]
) -> None:
    done = batch()
    records = [json.loads(record) for record in done.records.splitlines()]
    assert [record["custom_id"] for record in records] == [str(number) for number in range(20)]
    assert done.code == 0
    num_tokens = sum(json.loads(line)["max_tokens"] for line in lines)
    assert done.err.startswith(f"done: 20 lines, 0 failed, {num_tokens} tokens in ")
    assert done.err.endswith("tokens/s)\n") and done.err.count("\n") == 1


def test_the_summary_says_what_came_of_drafts(
    batch: Callable[..., Output], lines: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Drafting(FakeLLM):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.stats.draft = SimpleNamespace(rounds=4, tau=2.5, draft_acceptance=0.375)

    monkeypatch.setattr("deepinfer_jax.engine.llm.LLM", Drafting)
    said = batch("--drafts", "fixed").err
    assert said.endswith(" tokens/s), tau 2.50 (tokens a round of drafts; 38% of drafts accepted)\n")
    assert said.count("\n") == 1
    assert "tau" not in batch("--drafts", "fixed").err


def test_a_finished_run_is_not_run_again_and_loads_no_model(
    batch: Callable[..., Output], lines: list[bytes]
) -> None:
    first = batch()
    assert FakeLLM.made == 1
    again = batch()
    assert FakeLLM.made == 1
    assert again == Output(0, "done: 20 lines, 0 failed, nothing left to do\n", first.records)
    assert batch("--overwrite").records == first.records
    assert FakeLLM.made == 2


@pytest.mark.parametrize("order", ["input", "finish"])
def test_a_run_cut_at_any_byte_continues(
    batch: Callable[..., Output], lines: list[bytes], tmp_path: Path, order: str
) -> None:
    whole = batch("--order", order).records
    for length in [0, 1, *range(5, len(whole), 97), len(whole) - 1]:
        (tmp_path / "out.jsonl").write_bytes(whole[:length])
        done = batch("--order", order)
        assert done.code == 0
        if order == "input":
            assert done.records == whole
        assert sorted(done.records.splitlines()) == sorted(whole.splitlines())


def test_an_interrupted_run_says_how_to_go_on(
    batch: Callable[..., Output], lines: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = batch(output="whole.jsonl").records

    def interrupt(step: int) -> None:
        if step == 9:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FakeLLM, "on_step", staticmethod(interrupt))
        stopped = batch()
        overwriting = batch("--overwrite", output="other.jsonl")
    assert "; the same command without --overwrite goes on" in overwriting.err
    assert stopped.code == EXIT_INTERRUPTED == 130
    num_written = stopped.records.count(b"\n")
    assert 0 < num_written < 20 and whole.startswith(stopped.records)
    assert stopped.err == (f"interrupted: {num_written} of 20 lines are written; the same command goes on\n")
    done = batch()
    assert (done.code, done.records) == (0, whole)
    assert done.err.endswith(f"({num_written} lines were done before)\n")


def test_the_exit_code_says_whether_any_line_ever_failed(
    batch: Callable[..., Output], lines: list[bytes], tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([b"nonsense", *lines]))
    first = batch()
    assert first.code == EXIT_FAILED == 1
    assert first.err.startswith("done: 21 lines, 1 failed, ")
    (tmp_path / "out.jsonl").write_bytes(b"".join(first.records.splitlines(keepends=True)[:5]))
    continued = batch()
    assert (continued.code, continued.records) == (1, first.records)
    assert continued.err.startswith("done: 21 lines, 1 failed, ")
    assert batch() == Output(1, "done: 21 lines, 1 failed, nothing left to do\n", first.records)


def test_an_empty_input_is_done(batch: Callable[..., Output], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"\n \n")
    assert batch() == Output(0, "done: 0 lines, 0 failed, nothing left to do\n", b"")
    assert FakeLLM.made == 0


def assert_refused(output: Output, *parts: str) -> None:
    assert output.code == EXIT_REFUSED == 2
    assert output.err.count("\n") == 1 and output.err.startswith("deepinfer_jax batch: ")
    missing = [part for part in ("got", "expected", ";", *parts) if part not in output.err]
    assert missing == [], output.err
    assert FakeLLM.made == 0


def test_paths_that_cannot_be_used_are_refused_before_the_model_is_loaded(
    batch: Callable[..., Output], lines: list[bytes], tmp_path: Path
) -> None:
    assert_refused(batch(source="nowhere.jsonl"), "input", "nowhere.jsonl", "no such file")
    assert_refused(batch(source="."), "input", "a folder")
    assert_refused(batch(output="nowhere/out.jsonl"), "output", "can be written", "-o")
    assert_refused(batch(output="."), "output", "can be written")
    assert_refused(batch(output="in.jsonl"), "the input itself", "-o")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "in.jsonl")
    assert_refused(batch("--overwrite", output="link.jsonl"), "the input itself")
    assert (tmp_path / "in.jsonl").read_bytes() == b"\n".join(lines) + b"\n"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--slots", "3"], ["num_slots", "3", "[None, 1, 8, 16, 64, 256]"]),
        (["--max-context", "0"], ["max_context", "0"]),
        (["--max-pending", "0"], ["--max-pending", "0", "1 or more"]),
        (["--max-drafts", "0"], ["max_drafts", "0", "1 or more"]),
        (["--draft-threshold", "-0.5"], ["draft_threshold", "-0.5", "between 0 and 1"]),
        (["--model", "nowhere"], ["model folder", "nowhere"]),
    ],
    ids=lambda words: words[0].strip("-"),
)
def test_options_that_cannot_be_used_touch_no_file(
    batch: Callable[..., Output], lines: list[bytes], tmp_path: Path, words: list[str], parts: list[str]
) -> None:
    assert_refused(batch(*words), *parts)
    assert not (tmp_path / "out.jsonl").exists()


def test_another_input_or_other_options_are_refused_and_nothing_is_lost(
    batch: Callable[..., Output], lines: list[bytes], tmp_path: Path
) -> None:
    records = batch().records
    FakeLLM.made = 0
    changes = [["--numerics", "float32"], ["--prefill", "bounded"], ["--max-context", "512"]]
    # Drafts that are not coupled give other tokens.
    changes += [["--drafts", "fixed", "--verification", "block"]]
    for words in [*changes, ["--cache-format", "bf16"], ["--no-batch-invariant"], ["--mesh", "1"]]:
        refused = batch(*words)
        assert_refused(refused, "out.jsonl line 1", "another input or with other options", "--overwrite")
        assert refused.records == records
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([*lines[:7], line_of(3), *lines[8:]]))
    assert_refused(batch(), "out.jsonl line 8", "another input")
    # What changes no record may change.
    assert batch("--drafts", "dynamic", "--max-drafts", "2").records == records
    assert batch("--verification", "rejection").records == records
    (tmp_path / "in.jsonl").write_bytes(b"\r\n".join(lines))
    assert batch("--slots", "8", "--max-pending", "3", "--model", "nano").code == 0


def test_results_as_they_finish_are_not_continued_in_order(
    batch: Callable[..., Output], lines: list[bytes], tmp_path: Path
) -> None:
    records = batch("--order", "finish").records
    (tmp_path / "out.jsonl").write_bytes(b"".join(records.splitlines(keepends=True)[:9]))
    FakeLLM.made = 0
    assert_refused(batch(), "got the record of line", "--order finish")
    assert batch("--order", "finish").code == 0


def test_a_file_of_something_else_is_refused_unless_it_may_go(
    batch: Callable[..., Output], lines: list[bytes], tmp_path: Path
) -> None:
    (tmp_path / "out.jsonl").write_bytes(b"dear diary")
    refused = batch()
    assert_refused(refused, "out.jsonl line 1", "no record", "--overwrite")
    assert refused.records == b"dear diary"
    assert batch("--overwrite").records.startswith(b'{"line":1,')


def test_a_model_that_is_refused_leaves_the_old_results(
    batch: Callable[..., Output], lines: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = batch().records

    def refuse(*_: object, **__: object) -> None:
        raise RequestError("layout: got 'x', expected a name; choose one")

    monkeypatch.setattr("deepinfer_jax.engine.llm.LLM", refuse)
    refused = batch("--overwrite")
    assert (refused.code, refused.records) == (EXIT_REFUSED, records)


def test_every_option_arrives(
    batch: Callable[..., Output], lines: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepinfer_jax.assets import NANO_FOLDER
    from deepinfer_jax.engine_config import EngineConfig

    found: list[FakeLLM] = []

    class Kept(FakeLLM):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            found.append(self)

    monkeypatch.setattr("deepinfer_jax.engine.llm.LLM", Kept)
    words = ["--model", str(NANO_FOLDER), "--numerics", "float32", "--cache-format", "fp8"]
    words += ["--no-batch-invariant", "--prefill", "bounded", "--slots", "8", "--max-context", "256"]
    words += ["--drafts", "dynamic", "--verification", "rejection", "--max-drafts", "3"]
    words += ["--draft-threshold", "0.75"]
    assert batch(*words, "--mesh", "2x4", "--layout", "tensor", "--overwrite").code == 0
    assert found[0].model == str(NANO_FOLDER)
    assert found[0].options == {
        **{"numerics": "float32", "batch_invariant": False, "cache_format": "fp8"},
        **{"mesh": "2x4", "layout": "tensor"},
        "options": EngineConfig(
            **{"prefill": "bounded", "num_slots": 8, "max_context": 256, "drafts": "dynamic"},
            **{"verification": "rejection", "max_drafts": 3, "draft_threshold": 0.75},
        ),
    }
    assert batch("--overwrite").code == 0
    assert found[1].model is None
    assert found[1].options == {
        **{"numerics": "official", "batch_invariant": True, "cache_format": None},
        **{"mesh": None, "layout": None, "options": EngineConfig()},
    }
    assert not found[0].is_open and not found[1].is_open


def test_a_terminal_shows_how_far_it_is(
    batch: Callable[..., Output], lines: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(stderr=True, force_terminal=True)
    monkeypatch.setattr("deepinfer_jax.engine.progress._console", console)
    monkeypatch.setattr("deepinfer_jax.cli.batch.SECONDS_PER_REFRESH", 0.0)
    shown = batch().err
    for part in ("lines", "/20", "tokens/s", "failed", "left", "done: 20 lines"):
        assert part in shown


def test_the_help_has_an_example_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["batch", "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for part in ("deepinfer_jax batch in.jsonl -o out.jsonl", "exit code", "custom_id", "kill -9"):
        assert part in text
