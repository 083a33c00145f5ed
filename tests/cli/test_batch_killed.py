"""The real batch command, killed without warning and started again: nothing lost, doubled or half written.

Separate from `test_batch.py` because each start costs seconds.
Read next: `deepinfer_jax/text/record_file.py`.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepinfer_jax.cli import main

REQUESTS = [
    {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0},
    {"prompt": "The fox", "max_tokens": 9, "seed": 1, "custom_id": "fox"},
    {"prompt": [0, 17, 4], "max_tokens": 40, "temperature": 0.7, "top_p": 0.9, "seed": 2},
    {"prompt": "A girl", "max_tokens": 3, "temperature": 0, "ignore_eos": True},
    {"prompt": "", "max_tokens": 3},
    {"prompt": "In the wood", "max_tokens": 17, "seed": 3, "stop": ["the"]},
    {"prompt": "He said", "max_tokens": 30, "seed": 4, "min_p": 0.1},
    {"prompt": "Down by the river", "max_tokens": 12, "temperature": 0, "frequency_penalty": 0.5},
    {"prompt": "A king", "max_tokens": 21, "seed": 5, "top_k": 20},
    {"prompt": "The end", "max_tokens": 1, "temperature": 0},
    {"prompt": "When it was night", "max_tokens": 33, "seed": 6, "repetition_penalty": 1.2},
    {"prompt": "They lived", "max_tokens": 14, "temperature": 0, "stop_token_ids": [16]},
]
"""Greedy and sampled requests of different lengths; one is refused."""

# So few that every process traces one prefill step and one decode step.
SIZES = ["--slots", "8", "--max-context", "256", "--max-pending", "4"]
QUICK = ["--numerics", "float32"]

NUM_FAILED = 1
MOST_SECONDS = 600
MOST_STARTING_SECONDS = 3.0


class Command:
    """The command on files of one folder, in a process of its own each time."""

    def __init__(self, folder: Path, order: str, *words: str) -> None:
        self.output = folder / f"{order}.jsonl"
        source = folder / "in.jsonl"
        source.write_text("".join(json.dumps(request) + "\n" for request in REQUESTS))
        files = ["batch", str(source), "-o", str(self.output), "--order", order]
        self._words = [*files, *SIZES, *words]
        self._process = [sys.executable, "-m", "deepinfer_jax", *self._words]

    def read(self) -> bytes:
        return self.output.read_bytes() if self.output.exists() else b""

    def run(self) -> bytes:
        """Run to the end and give the output."""
        done = subprocess.run(self._process, capture_output=True, text=True, timeout=MOST_SECONDS)
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        assert done.stderr.startswith(f"done: {len(REQUESTS)} lines, {NUM_FAILED} failed, ")
        return self.read()

    def run_here(self) -> bytes:
        """Do the same in this process, which traces the steps once for all runs."""
        assert main(self._words) == 1
        return self.read()

    def killed(self, num_lines: int, seconds: float) -> bool:
        """Start, wait for this many lines in the output and then some time, and kill.

        Returns:
            Whether it still ran then.
        """
        process = subprocess.Popen(self._process, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with process:
            deadline = time.monotonic() + MOST_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                if self.output.exists() and self.read().count(b"\n") >= num_lines:
                    break
                time.sleep(0.002)
            time.sleep(seconds)
            process.kill()
            _, errors = process.communicate(timeout=MOST_SECONDS)
        assert process.returncode in (-signal.SIGKILL, 1), errors.decode()
        return process.returncode == -signal.SIGKILL


def kill_once(command: Command, choices: random.Random) -> bool:
    """Kill a run at a random moment: while it starts, or around one of the lines that it writes."""
    num_before = command.read().count(b"\n")
    if choices.random() < 0.25:
        return command.killed(0, choices.uniform(0, MOST_STARTING_SECONDS))
    return command.killed(choices.randint(num_before + 1, len(REQUESTS) - 1), choices.uniform(0, 0.05))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The output of a run that nobody disturbed, in the order of the input."""
    return Command(tmp_path_factory.mktemp("whole"), "input", *QUICK).run_here()


def test_an_undisturbed_run_answers_every_line(whole: bytes) -> None:
    records = [json.loads(line) for line in whole.splitlines()]
    assert [record["line"] for record in records] == list(range(1, len(REQUESTS) + 1))
    assert [record["line"] for record in records if "error" in record] == [5]
    assert records[9]["usage"]["completion_tokens"] == 1


def test_a_run_killed_while_it_starts_and_while_it_writes_ends_as_an_undisturbed_one(
    whole: bytes, tmp_path: Path
) -> None:
    choices = random.Random(1)
    command = Command(tmp_path, "input", *QUICK)
    assert command.killed(0, choices.uniform(0, 0.5))
    assert command.killed(choices.randint(1, 6), choices.uniform(0, 0.02))
    assert 0 < command.read().count(b"\n") < len(REQUESTS)
    assert command.run_here() == whole


@pytest.mark.slow
@pytest.mark.parametrize("order", ["input", "finish"])
def test_a_run_killed_ten_times_at_random_ends_as_an_undisturbed_one(tmp_path: Path, order: str) -> None:
    whole = Command(tmp_path, "input").run()
    (tmp_path / "input.jsonl").unlink()
    choices = random.Random(order)
    command = Command(tmp_path, order)
    num_kills = num_ends = 0
    while num_kills < 10:
        num_kills += kill_once(command, choices)
        # Close to the end there is little left to kill.
        if command.read().count(b"\n") >= len(REQUESTS) - 2 or num_kills == 10:
            written = command.run()
            assert sorted(written.splitlines()) == sorted(whole.splitlines())
            if order == "input":
                assert written == whole
            command.output.unlink()
            num_ends += 1
    assert num_ends > 0
