"""Moments in what a device does, and the time between two of them."""

from __future__ import annotations

import time

import torch


class Moment:
    """A moment in what the device does."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        self._clock_s = 0.0

    def note(self, device: torch.device) -> None:
        """It is now; on CUDA, when the current stream gets there."""
        self._clock_s = time.perf_counter()
        if device.type == "cuda":
            self._event = self._event or torch.cuda.Event(enable_timing=True)
            self._event.record()

    def after(self, other: Moment) -> float:
        """Seconds from another one. On CUDA this waits for both."""
        if self._event is None or other._event is None:
            return self._clock_s - other._clock_s
        other._event.synchronize()
        self._event.synchronize()
        return other._event.elapsed_time(self._event) / 1000
