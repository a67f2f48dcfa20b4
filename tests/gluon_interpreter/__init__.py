"""Runs Gluon kernels on a CPU, to find in them what only some orders of events would show on a GPU.

A program's partitions run one at a time and change places wherever they touch memory or a barrier, in an order drawn
from a seed; asynchronous copies and products take place as late, or as early, as that seed says and the hardware may.

Whether memory may be touched does not depend on that order: every access is compared with those before it, and there
must be a way from one to the other over waits, barriers and, where tensor cores or bulk copies read what threads or
their copies wrote, a fence (`shared`, `clocks`). So most faults are found whichever the seed; seeds are for those that
wait for each other.

Threads of a partition count as one: what only some of them would see, or be late for, is not found.
"""

from __future__ import annotations

from tests.gluon_interpreter.faults import KernelFault, NotInterpreted
from tests.gluon_interpreter.launch import interpret

__all__ = ["KernelFault", "NotInterpreted", "interpret"]
