"""What is predicted of a layout: memory, collectives, times. Values only.

Separate so that who predicts (`cost.py`), who compiles (`../lab.py`) and who draws (`report.py`) meet here.
Read next: `cost.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import ModelConfig
from .layout import Layout
from .mesh import MeshShape

STEPS = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What one device can do; peaks, of which `efficiency` is what programs reach.

    Args:
        name: of the device.
        memory_bytes: that programs can use.
        memory_bandwidth: bytes a second.
        flops: bfloat16 multiply-adds count as two, a second.
        link_bandwidth: bytes a second that a device sends to its peers.
        link_latency: seconds of the smallest collective.
        efficiency: share of the peaks that is reached.
        source: where the numbers come from.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    flops: float
    link_bandwidth: float
    link_latency: float
    efficiency: float
    source: str


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """Bytes that one device holds of one kind of array.

    Args:
        group: "weights", "cache" or "activations".
        name: of the kind, such as "routed experts" or "window rings".
        num_bytes: on each device.
        total_bytes: of the whole array, counted once.
        divided: (logical axis, mesh axes) of what is divided.
    """

    group: str
    name: str
    num_bytes: int
    total_bytes: int
    divided: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Collective:
    """One kind of collective of a step.

    Args:
        step: "prefill" or "decode".
        part: what it is for, such as "expert dispatch".
        kind: "all-gather", "all-reduce", "reduce-scatter" or "all-to-all".
        axes: mesh axes.
        num_devices: that take part together.
        num_bytes: operand of one call on each device.
        calls: in one step; a round of expert dispatch is counted once.
        seconds: predicted, all calls together.
    """

    step: str
    part: str
    kind: str
    axes: tuple[str, ...]
    num_devices: int
    num_bytes: int
    calls: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a step on the roofline, on one device.

    Args:
        step: "prefill" or "decode".
        name: such as "routed experts".
        flops: of all layers.
        num_bytes: read and written of device memory.
        seconds: the longer of both, or of the collectives.
        bound: "compute", "memory" or "network".
    """

    step: str
    name: str
    flops: float
    num_bytes: float
    seconds: float
    bound: str


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """Everything predicted of one layout on one mesh.

    Args:
        config: the architecture.
        mesh: the grid.
        layout: on that mesh.
        device: what each place of the grid is.
        num_slots: sequences, over all devices.
        context: tokens that each slot can hold.
        prefill_rows: prompt rows of a prefill step, over all devices.
        memory: lines of each group.
        collectives: of both steps.
        parts: of both steps.
        max_slots: most slots that fit with this context, 0 for none.
        max_context: longest context that fits with these slots, tokens, 0 for none.
        temporaries: (step, moment, bytes on each device) of what lives only inside each step, at its largest;
            the larger of both is the line of activations.
    """

    config: ModelConfig
    mesh: MeshShape
    layout: Layout
    device: DeviceSpec
    num_slots: int
    context: int
    prefill_rows: int
    memory: tuple[MemoryLine, ...]
    collectives: tuple[Collective, ...]
    parts: tuple[Part, ...]
    max_slots: int
    max_context: int
    temporaries: tuple[tuple[str, str, int], ...] = ()

    def bytes_of(self, group: str | None = None) -> int:
        """Bytes on each device, of one group or of all."""
        return sum(line.num_bytes for line in self.memory if group in (None, line.group))

    @property
    def headroom(self) -> int:
        """Bytes of a device that stay free; negative if the plan does not fit."""
        return self.device.memory_bytes - self.bytes_of()

    @property
    def fits(self) -> bool:
        """Whether everything fits into each device's memory."""
        return self.headroom >= 0

    def seconds(self, step: str) -> float:
        """Predicted time of a step: the sum of its parts."""
        return sum(part.seconds for part in self.parts if part.step == step)

    @property
    def decode_rate(self) -> float:
        """Tokens a second while decoding, over all slots."""
        return self.num_slots / self.seconds("decode")

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second, over all devices."""
        return self.prefill_rows / self.seconds("prefill")
