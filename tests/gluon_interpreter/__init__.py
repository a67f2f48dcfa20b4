"""Interpreter for Gluon kernels on a CPU, to find faults that a GPU shows only in some orders of events.

A program's partitions run one at a time and switch at every access to memory or a barrier, in an order drawn from a
seed. Asynchronous copies and products take effect as late or as early as the seed decides and the hardware permits.

The check of memory accesses does not depend on that order: every access is compared with earlier ones, and a path must
order the two through waits, barriers and, if tensor cores or bulk copies read data written by threads or their copies,
a fence (`shared`, `clocks`). Most faults are therefore found under any seed; deadlocks need several seeds.

Threads of a partition count as one: faults visible to only some of these threads are not found.
"""

from __future__ import annotations

from tests.gluon_interpreter.faults import KernelFault, NotInterpreted
from tests.gluon_interpreter.launch import interpret

__all__ = ["KernelFault", "NotInterpreted", "interpret"]
