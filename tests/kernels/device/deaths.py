"""A rank is killed at a random point of fused operations; the remaining ranks must raise an error that reports it."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Sequence

import torch

from fusedmoe.comm.one_sided.receive_buffers import BufferSizes, ReceiveBuffers
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import RankError
from tests.cluster import Cluster
from tests.kernels.device.on_buffers import EXPERTS, SLOTS, WIDTH, Case, by_puts, heap_over
from tests.lifetime import left_in_shared_memory


def die_at_random(rank: int, world: int, seed: int, timeout_s: float, nodes: Sequence[int] = ()) -> tuple[str, float]:
    """Kill rank 1 during a few training steps; return the other ranks' errors and the seconds until each."""
    topology = Topology.from_sizes(ep=world, timeout_s=timeout_s)
    delay_s = random.Random(seed).uniform(0.0, 2.5)
    try:
        with heap_over(topology.ep, nodes) as heap:
            buffers = ReceiveBuffers(heap, BufferSizes(20, SLOTS, EXPERTS, WIDTH, torch.float32))
            case = Case(rank, world, 20, seed, True)
            topology.require_equal_facts({}, "test")
            start = time.monotonic()
            if rank == 1:
                timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
                timer.daemon = True
                timer.start()
            while time.monotonic() < start + delay_s + 3 * timeout_s:
                by_puts(case, buffers, 1 + seed % 3)
    except RankError as error:
        return str(error), time.monotonic() - start - delay_s
    return "went on alone", 0.0


def check_death(cluster: Cluster, seed: int, nodes: Sequence[int]) -> None:
    """Check that the death is reported as a death, rather than as a time-out. `nodes`: as in `heap_over`."""
    timeout_s = 60.0
    survivor, killed = cluster.outcomes(2, die_at_random, seed, timeout_s, nodes)
    assert killed.error is not None and survivor.error is None, survivor.error
    message, seconds = survivor.value
    assert re.search(r"^rank 0: .*waiting for .* of rank 1, expected signal \d+, seen \d+", message), message
    assert "rank 1 failed in" in message and "its process ended" in message, message
    assert seconds < timeout_s / 2, seconds
    assert not left_in_shared_memory()
