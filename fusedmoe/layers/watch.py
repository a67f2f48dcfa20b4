"""Router logits that are not finite: seen on the device, told on the host, without making the host wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LogitsWatch:
    """Counts router logits that are NaN or +inf (−inf is an expert ruled out) over forwards of one layer.

    On CUDA the count stays on the device, also in a CUDA graph and in a compiled one; each `seen()` starts a copy to
    the host and gives what the last one that has arrived said. A copied layer starts with a watch of its own.
    """

    def __init__(self) -> None:
        self._bad: Tensor | None = None
        self._arriving: tuple[Tensor, torch.cuda.Event] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_bad": None, "_arriving": None}

    def note(self, logits_SE: Tensor) -> None:
        """Adds the logits' count; no host synchronisation."""
        bad = count_bad(logits_SE)
        if self._bad is None or self._bad.device != bad.device:
            self._bad = torch.zeros_like(bad)
        self._bad.add_(bad)

    def seen(self) -> int:
        """Bad logits in forwards that the device has finished, as far as the host knows; never waits."""
        if self._bad is None or not self._bad.is_cuda or torch.cuda.is_current_stream_capturing():
            return 0
        count = 0
        if self._arriving is not None:
            copy, event = self._arriving
            if not event.query():
                return 0
            count = int(copy)
        copy = torch.empty((), dtype=torch.long, pin_memory=True).copy_(self._bad, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._arriving = copy, event
        return count

    def wait(self) -> int:
        """Bad logits in all forwards so far; waits for the device. Starts again at none."""
        count = 0 if self._bad is None else int(self._bad)
        self._bad = self._arriving = None
        return count


def count_bad(logits_SE: Tensor) -> Tensor:
    """How many are NaN or +inf: an int64 scalar."""
    return logits_SE.numel() - (logits_SE < float("inf")).sum()
