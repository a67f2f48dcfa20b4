"""A nearly empty warp-specialised Gluon kernel, for compute-sanitizer's racecheck.

Each warp group stores one number at an address of its own (a compiler removes empty groups), and nothing is in shared
memory. A hazard that racecheck reports in it is therefore due to the dispatch of warp groups, which Triton generates.
`python -m bench.gpu.empty_warps` ends with the line of `exercise.PASSED`.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from bench.gpu.exercise import PASSED

_PROGRAMS = 8
#: Warp groups, the first included.
GROUPS = 3


@gluon.jit
def _store(out_ptr, GROUP: gl.constexpr, GROUPS: gl.constexpr):
    gl.store(out_ptr + gl.program_id(0) * GROUPS + GROUP, GROUP)


@gluon.jit
def warps_kernel(out_ptr, GROUPS: gl.constexpr):
    gl.warp_specialize(
        [(_store, (out_ptr, 0, GROUPS)), (_store, (out_ptr, 1, GROUPS)), (_store, (out_ptr, 2, GROUPS))],
        [4, 1],
        [40, 40],
    )


def main() -> None:
    out = torch.full((_PROGRAMS, GROUPS), -1, dtype=torch.int32, device="cuda")
    warps_kernel[(_PROGRAMS,)](out, GROUPS, num_warps=4)
    right = torch.arange(GROUPS, dtype=torch.int32, device="cuda").expand(_PROGRAMS, -1)
    if not torch.equal(out, right):
        raise AssertionError(f"the warp groups stored {out.tolist()}")
    print(PASSED)


if __name__ == "__main__":
    main()
