"""Stopping when asked to: signals become a wish that the training loop sees between two steps."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class StopRequest:
    """While the context lasts, SIGINT (Ctrl-C), SIGTERM and SIGHUP only set `wanted`; after it they do what they did.

    A launcher passes a signal on to every rank, but never at the same moment: the ranks must agree on the step after
    which they stop, so each of them sends its wish along with the loss.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True
