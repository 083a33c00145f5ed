"""GPUs that programs can be compiled for where none is: what the compiler must know of them.

Separate because these are numbers of devices, in the text form that XLA reads.
Read next: `../lab_compile.py`, which compiles for them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """What XLA asks of a GPU in order to compile for it; all but the capability steers heuristics only.

    Args:
        name: as the driver would say it.
        capability: compute capability, major and minor.
        num_cores: streaming multiprocessors.
        cache_bytes: of the second-level cache.
        memory_bytes: of the device.
        memory_bandwidth: bytes a second.
        clock_ghz: of the cores.
    """

    name: str
    capability: tuple[int, int]
    num_cores: int
    cache_bytes: int
    memory_bytes: int
    memory_bandwidth: int
    clock_ghz: float

    def description(self) -> str:
        """Write the device as XLA's text form of GpuTargetConfig.

        Source: spec/platform.md section 4; limits of threads, registers and shared memory are those of
        compute capabilities 9.0 and 10.0, which are equal.
        """
        major, minor = self.capability
        device = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 * 1024,
            "shared_memory_per_core": 228 * 1024,
            "shared_memory_per_block_optin": 227 * 1024,
            "threads_per_core_limit": 2048,
            "core_count": self.num_cores,
            "fpus_per_core": 128,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "memory_bandwidth": self.memory_bandwidth,
            "l2_cache_size": self.cache_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.memory_bytes,
            "registers_per_core_limit": 2**16,
            "registers_per_block_limit": 2**16,
            # From 12.3 on loops and conditionals can be part of CUDA graphs.
            "driver_version": '"13.0.0"',
            "runtime_version": '"13.0.0"',
        }
        fields = "\n".join(f"  {key}: {value}" for key, value in device.items())
        return (
            f"gpu_device_info {{\n{fields}\n"
            f"  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
            'platform_name: "CUDA"\n'
            "dnn_version_info { major: 9 minor: 12 patch: 0 }\n"
            "runtime_version { major: 13 minor: 0 patch: 0 }\n"
            f'device_description_str: "{self.name}"\n'
        )


GPU_TARGETS = {
    "b200": GpuTarget("NVIDIA B200", (10, 0), 148, 132_644_864, 191 * 10**9, 8 * 10**12, 1.965),
    "h200": GpuTarget("NVIDIA H200", (9, 0), 132, 62_914_560, 150 * 10**9, 4_800 * 10**9, 1.98),
}
"""Target by the word of the command line; numbers from the public specifications."""


def topology(num_devices: int) -> str:
    """Write a topology of slices, hosts and devices of a host, eight to a host where that divides.

    Args:
        num_devices: over all hosts.

    Returns:
        The text that XLA's compile-only client reads.
    """
    per_host = 8 if num_devices % 8 == 0 else num_devices
    return f"1x{num_devices // per_host}x{per_host}"
