"""The device that two engines share.

Invariant: after the end of a step, no work of the step runs on the device. All times are from one monotonic clock that
all processes of the device share.
"""

from __future__ import annotations

import time
from typing import Protocol


class LentDevice(Protocol):
    """The device on which a step begins and ends."""

    def clock(self) -> float:
        """The time of the shared clock, in seconds."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait without using the device."""
        ...

    def begin(self) -> None:
        """Begin a step."""
        ...

    def end(self) -> None:
        """End a step: wait until all its launched work is done."""
        ...


class Cores:
    """CPU cores, whose work is done when a call returns. With a `share` below 1 they emulate a slower device: the
    process with the token sleeps for the difference."""

    def __init__(self, share: float = 1.0) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share is {share:g}; give a share of the cores above 0, at most 1")
        self._share, self._cpu = share, 0.0

    def clock(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def begin(self) -> None:
        if self._share < 1:
            self._cpu = time.process_time()

    def end(self) -> None:
        if self._share < 1:
            time.sleep((time.process_time() - self._cpu) * (1 / self._share - 1))


class Accelerator:
    """The GPUs of this process. Kernels continue after the call that launched them, so a step's end waits for them."""

    def clock(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def begin(self) -> None:
        pass

    def end(self) -> None:
        import torch

        torch.accelerator.synchronize()


def device_here(share: float = 1.0) -> LentDevice:
    """The device of vLLM in this process."""
    from vllm.platforms import current_platform

    return Cores(share) if current_platform.is_cpu() else Accelerator()
