"""Holds some of a GPU's multiprocessors, as communication does, while a launch is timed."""

from __future__ import annotations

import torch
import triton.language as tl

from fusedmoe.kernels.triton.jit import jit

#: Multiprocessors that are held: one program on each.
HELD = 16
#: A program has as many threads as those of communication: what needs most of a multiprocessor does not fit beside it.
WARPS, NUMBERS = 16, 512
# After so many looks a program ends though nobody let it go, some hundred milliseconds; and how many are a moment.
_MOST_LOOKS, _MOMENT = 100_000, 200


@jit(do_not_specialize=["epoch", "most"])
def hold_kernel(flag_ptr, sink_ptr, epoch, most, NUMBERS: tl.constexpr):
    """Stays until the flag is `epoch`, or for `most` looks at it, and moves a few numbers meanwhile."""
    at = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    looks = 0
    seen = tl.load(flag_ptr, volatile=True)
    while (seen != epoch) & (looks < most):
        tl.store(sink_ptr + at, tl.load(sink_ptr + at, volatile=True) + 1)
        seen = tl.load(flag_ptr, volatile=True)
        looks += 1


class Holder:
    """Holds multiprocessors from `hold` to `let_go`, which the host calls around a launch on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._flag = torch.zeros(1, dtype=torch.int32, device=device)
        self._sink = torch.zeros((HELD + 1) * NUMBERS, dtype=torch.int32, device=device)
        self._epoch = 0

    def hold(self) -> None:
        self._epoch += 1
        self._stream.wait_stream(torch.cuda.current_stream())  # no sooner than what is to be timed could begin
        with torch.cuda.stream(self._stream):
            self._look(HELD, self._sink, self._epoch, _MOST_LOOKS)
        # A moment, so that they are there before the launch, whose programs could fill the GPU.
        self._look(1, self._sink[HELD * NUMBERS :], -1, _MOMENT)

    def let_go(self) -> None:
        self._flag.fill_(self._epoch)
        torch.cuda.current_stream().wait_stream(self._stream)  # nothing of it reaches into what is timed next

    def _look(self, programs: int, sink: torch.Tensor, epoch: int, most: int) -> None:
        hold_kernel[(programs,)](self._flag, sink, epoch, most, NUMBERS=NUMBERS, num_warps=WARPS)
