"""Power and clock of the GPU during a measurement, read through NVML.

A GPU at its power limit lowers its clock, so the energy of one kernel affects the speed of the
others in its step. Watts come from NVML's energy counter, so they are exact over any interval.
"""

import contextlib
import ctypes
import functools
import os
import statistics
import threading
import time
from typing import NamedTuple, Protocol, Self

import jax

INTERVAL_S = 0.02
SM_CLOCK = 1  # NVML's constant


class Gpu(Protocol):
    """The readings of a GPU."""

    def joules(self) -> float: ...  # since the driver was loaded

    def sm_mhz(self) -> float: ...  # now


class NvmlGpu(NamedTuple):
    """A GPU accessed through NVML."""

    library: ctypes.CDLL
    handle: ctypes.c_void_p

    def joules(self) -> float:
        millijoules = ctypes.c_ulonglong()
        read = self.library.nvmlDeviceGetTotalEnergyConsumption
        check(read(self.handle, ctypes.byref(millijoules)))
        return millijoules.value / 1e3

    def sm_mhz(self) -> float:
        clock = ctypes.c_uint()
        read = self.library.nvmlDeviceGetClockInfo
        check(read(self.handle, SM_CLOCK, ctypes.byref(clock)))
        return float(clock.value)


def check(code: int) -> None:
    """Raise OSError if an NVML function returned an error code."""
    if code:
        raise OSError(f"NVML returned {code}")


@functools.cache
def first_gpu() -> Gpu | None:
    """JAX's first GPU; None without one, or if NVML does not count its energy."""
    if jax.default_backend() != "gpu":
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    with contextlib.suppress(OSError, AttributeError):
        library, handle = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        check(library.nvmlInit_v2())
        number = int(visible) if visible.isdigit() else 0
        check(library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)))
        gpu = NvmlGpu(library, handle)
        return gpu if gpu.joules() and gpu.sm_mhz() else None
    return None


class Meter:
    """Context manager that measures a GPU's mean watts and median clock.

    gpu: default JAX's first one.
    """

    def __init__(self, gpu: Gpu | None = None):
        self.gpu = gpu or first_gpu()
        self.clocks: list[float] = []
        self.watts = 0.0

    def __enter__(self) -> Self:
        if self.gpu is not None:
            self.clocks, self.ended = [], threading.Event()
            self.thread = threading.Thread(target=self.sample, args=(self.gpu,), daemon=True)
            self.begin = time.perf_counter(), self.gpu.joules()
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.gpu is not None:
            joules, seconds = self.gpu.joules() - self.begin[1], time.perf_counter() - self.begin[0]
            self.watts = joules / seconds
            self.ended.set()
            self.thread.join()

    def sample(self, gpu: Gpu) -> None:
        """Sample the clock until the context ends."""
        while True:
            self.clocks.append(gpu.sm_mhz())
            if self.ended.wait(INTERVAL_S):
                return

    def figures(self) -> dict[str, float]:
        """`watts` and `sm_mhz`; empty if no GPU was read."""
        if not self.clocks:
            return {}
        return {"watts": self.watts, "sm_mhz": statistics.median(self.clocks)}
