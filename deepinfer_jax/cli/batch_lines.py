"""From lines of requests to lines of results, a few in memory at a time.

Separate from `batch.py` so that tests and notebooks run lines with an engine of their own.
Read next: `../text/records.py` (what is written), `../engine/llm.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..text.jsonl import BatchRequest, LineError, parse_request, request_key
from ..text.records import error_record, result_record

if TYPE_CHECKING:
    from ..engine.jobs import Job
    from ..engine.llm import LLM

PENDING_PER_SLOT = 4
"""Requests read ahead for each slot by default, so that no slot waits for the file."""


@dataclass(slots=True)
class Tally:
    """How far a run is.

    Attributes:
        num_lines: requests of the input.
        num_before: lines that an earlier run finished.
        num_done: lines that have a record, earlier ones included.
        num_failed: of those, how many are errors.
        num_tokens: generated in this run, of lines that have a record or soon will.
    """

    num_lines: int = 0
    num_before: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_tokens: int = 0


def run_batch(
    lines: Iterable[tuple[int, bytes]],
    write: Callable[[bytes], None],
    llm: LLM,
    *,
    settings: str = "",
    in_order: bool = True,
    max_pending: int = PENDING_PER_SLOT,
    tally: Tally | None = None,
    refresh: Callable[[], None] = lambda: None,
) -> Tally:
    """Run requests, a few in memory at a time, and write a record for each.

    Args:
        lines: number and bytes of each line; read only as there is room.
        write: receives every record once, a line with its ending.
        llm: what runs them: `submit`, `step`.
        settings: what the records' keys depend on besides the lines.
        in_order: whether records come in the order of the lines, or else as they finish.
        max_pending: lines that are read and not written, at most.
        tally: counts on; from zero by default.
        refresh: called after every step.

    Returns:
        The tally.
    """
    batch = _Batch(write, llm, settings, in_order, Tally() if tally is None else tally)
    source = iter(lines)
    is_more = True
    while is_more or batch.running:
        while is_more and len(batch.records) < max_pending:
            line = next(source, None)
            is_more = line is not None
            if line is not None:
                batch.start(*line)
        if batch.running:
            for job in llm.step():
                batch.finish(job)
        refresh()
    return batch.tally


class _Batch:
    """Lines that are read and have no record in the output yet.

    Attributes:
        records: line number -> its record, None while there is none; in the order of the lines.
        running: identity of a job -> the job and its request.
        tally: counts.
    """

    def __init__(
        self, write: Callable[[bytes], None], llm: LLM, settings: str, in_order: bool, tally: Tally
    ) -> None:
        self._write, self._llm, self._settings, self._in_order = write, llm, settings, in_order
        self.records: dict[int, bytes | None] = {}
        self.running: dict[int, tuple[Job, BatchRequest]] = {}
        self.tally = tally

    def start(self, number: int, line: bytes) -> None:
        """Give a line to the engine, or an error to the output."""
        self.records[number] = None
        try:
            request = parse_request(line, number, self._settings)
            job = self._submit(request)
        except LineError as error:
            key = request_key(line, self._settings)
            self._fail(number, key, str(error), error.custom_id)
            return
        # The job is kept too, so that nothing else gets its identity.
        self.running[id(job)] = (job, request)
        if job.is_done:
            # Without a token to generate; no step tells of it.
            self.finish(job)

    def finish(self, job: Job) -> None:
        """Write what a job became."""
        _, request = self.running.pop(id(job))
        outputs = job.completions
        self.tally.num_tokens += sum(len(output.token_ids) for output in outputs)
        if any(output.finish_reason == "invalid" for output in outputs):
            message = "the model's logits held NaN or infinity, expected numbers; check the weights"
            self._fail(request.number, request.key, f"line {request.number}: {message}", request.custom_id)
        else:
            self._put(request.number, result_record(request, outputs))

    def _submit(self, request: BatchRequest) -> Job:
        try:
            return self._llm.submit(request.prompt, request.params)
        except (ValueError, NotImplementedError) as error:
            raise LineError(f"line {request.number}: {error}", request.custom_id) from error

    def _fail(self, number: int, key: str, message: str, custom_id: str | None) -> None:
        self.tally.num_failed += 1
        self._put(number, error_record(number, key, message, custom_id))

    def _put(self, number: int, record: bytes) -> None:
        self.records[number] = record
        if not self._in_order:
            self._release(number)
        while self.records and self.records[first := next(iter(self.records))] is not None:
            self._release(first)

    def _release(self, number: int) -> None:
        record = self.records[number]
        assert record is not None
        self._write(record)
        del self.records[number]
        self.tally.num_done += 1
