"""Occupy some multiprocessors of a GPU while a launch is timed, as communication does."""

from __future__ import annotations

import torch
import triton.language as tl

from fusedmoe.kernels.triton.jit import jit

# Occupied by one program each.
NUM_OCCUPIED = 16
# As in communication kernels: a program that needs most of a multiprocessor does not fit alongside.
WARPS, NUMBERS = 16, 512
# Maximum polls of a program, some hundred milliseconds; and of a short delay.
_MAX_POLLS, _DELAY_POLLS = 100_000, 200


@jit(do_not_specialize=["epoch", "max_polls"])
def hold_kernel(flag_ptr, sink_ptr, epoch, max_polls, NUMBERS: tl.constexpr):
    """Run until the flag equals `epoch`, at most `max_polls` polls; load and store a few numbers between polls."""
    at = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    polls = 0
    seen = tl.load(flag_ptr, volatile=True)
    while (seen != epoch) & (polls < max_polls):
        tl.store(sink_ptr + at, tl.load(sink_ptr + at, volatile=True) + 1)
        seen = tl.load(flag_ptr, volatile=True)
        polls += 1


class MultiprocessorHolder:
    """Occupies multiprocessors between `hold` and `release` around a launch on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._flag = torch.zeros(1, dtype=torch.int32, device=device)
        self._sink = torch.zeros((NUM_OCCUPIED + 1) * NUMBERS, dtype=torch.int32, device=device)
        self._epoch = 0

    def hold(self) -> None:
        self._epoch += 1
        self._stream.wait_stream(torch.cuda.current_stream())  # not before the timed launch could start
        with torch.cuda.stream(self._stream):
            self._launch(NUM_OCCUPIED, self._sink, self._epoch, _MAX_POLLS)
        # The programs must be resident before the launch, which could fill the GPU.
        self._launch(1, self._sink[NUM_OCCUPIED * NUMBERS :], -1, _DELAY_POLLS)

    def release(self) -> None:
        self._flag.fill_(self._epoch)
        torch.cuda.current_stream().wait_stream(self._stream)  # must not overlap the next timed launch

    def _launch(self, programs: int, sink: torch.Tensor, epoch: int, max_polls: int) -> None:
        hold_kernel[(programs,)](self._flag, sink, epoch, max_polls, NUMBERS=NUMBERS, num_warps=WARPS)
