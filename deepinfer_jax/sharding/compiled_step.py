"""What the compiler says of a step that it compiled for abstract devices. Values only.

Separate so that who compiles (`../lab_compile.py`) and who draws (`report/`) meet here, as predictions do.
Read next: `layout_plan.py`, the same things predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from .layout_plan import Collective


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """XLA's own numbers for one step, on each device.

    Args:
        step: "prefill" or "decode".
        target: what it was compiled for: "cpu" or "b200".
        seconds_to_compile: wall time of the compilation.
        argument_bytes: weights, state and plan that the step is given.
        output_bytes: what it gives back, the donated part included.
        alias_bytes: part of the output that lies where a donated argument was.
        temporary_bytes: values that live only inside the step.
        peak_bytes: most bytes in use at once.
        host_peak_bytes: most memory that the compiler itself used.
        collectives: found in the compiled program; loops count each time around.
    """

    step: str
    target: str
    seconds_to_compile: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    peak_bytes: int
    host_peak_bytes: int
    collectives: tuple[Collective, ...]
