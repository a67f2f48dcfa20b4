"""Calibrate the inter-node link rate at which communication takes as long as computation.

A machine's speed varies by a third from day to day, and there is little to overlap if one side dominates. Settings with
real computation therefore have no fixed rate. Before the nodes are created, all ranks concurrently run a step's
computation, on one thread each and without communication; the rate then makes the step's bytes take equally long.

    python -m bench.cluster.balance SETTING FOLDER    # on every rank; rank 0 writes FOLDER/balance.json
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import fusedmoe
from bench.cluster import doors
from bench.cluster.captured import make_step
from bench.cluster.layer import make_layer, run
from bench.cluster.setting import SETTINGS, Setting
from bench.cluster.step import Computed

#: File with `inter_mbit` and `computation_s`, the fields of `Setting`.
FILE = "balance.json"
#: Timeout of the measurement.
SECONDS = 120
#: Limits in Mbit/s. On a slower link a step takes minutes. A faster one drains its bucket before a busy processor
#: refills it.
LEAST, MOST = 8, 160
# All-to-alls per layer and step: dispatch and combine, forward and backward.
_EXCHANGES = 4
# Gloo's own all-to-all, used by the plain PyTorch model, does not send and receive at the same time.
_IN_TURN = 2
_STEPS = 3


def step_bytes(setting: Setting, gradient_bytes: int) -> int:
    """Return the bytes that a step sends between the nodes; dense gradients have `gradient_bytes` per layer.

    Half of an all-to-all's rows stay on their node. An all-reduce over two nodes sends its full size: half before and
    half after the reduction.
    """
    return setting.ranks_per_node * setting.layers * (_EXCHANGES * setting.row_bytes // 2 + gradient_bytes)


def rate_mbit(sent_bytes: int, seconds: float) -> int:
    """Return the rate, in whole Mbit/s from `LEAST` to `MOST`, at which `sent_bytes` take `seconds`."""
    return min(MOST, max(LEAST, round(8e-6 * sent_bytes / seconds)))


def compute_s(setting: Setting, of: Computed) -> float:
    """Return the slowest rank's computation time in seconds, equal on all ranks. Collective."""
    rows, chunk = slice(0, setting.S), slice(0, setting.S // setting.E)
    x_SM, dy_SM = torch.randn(2, setting.S, setting.M)
    x_PeCM, dy_PeCM = torch.randn(2, setting.ranks, setting.E // 2, chunk.stop, setting.M)
    gradient = torch.zeros(of.gradient_bytes // 4)

    def step() -> None:
        for layer in range(setting.layers):
            of.attention(layer, x_SM, rows)
            of.experts(layer, x_PeCM, chunk)
        for layer in reversed(range(setting.layers)):
            of.experts_backward(layer, dy_PeCM, chunk, True)
            of.attention_backward(layer, dy_SM, rows, gradient)

    return _slowest_s(step)


def layer_s(setting: Setting) -> float:
    """Return the slowest rank's computation time of both passes of the library's layer, in seconds. Collective.

    All experts are local, so there is no communication, and the number of rows is that of a distributed step.
    """
    layer = make_layer(setting, None, None)
    x_SM, dy_SM = torch.randn(2, setting.S // setting.k, setting.M)
    return _slowest_s(partial(run, layer, x_SM.requires_grad_(), dy_SM))


def _slowest_s(step: Callable[[], object]) -> float:
    taken = torch.zeros(1 + _STEPS)
    for number in range(1 + _STEPS):  # the first is a warm-up
        dist.barrier()
        start = time.perf_counter()
        step()
        taken[number] = time.perf_counter() - start
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken[1:].median())


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    signal.alarm(SECONDS)
    setting, rank = SETTINGS[name], int(os.environ["RANK"])
    torch.set_num_threads(1)
    fusedmoe.keep_memory()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder.absolute()}/store",
        rank=rank,
        world_size=setting.ranks,
        timeout=timedelta(seconds=60),
    )
    try:
        if setting.captured:
            seconds = _slowest_s(make_step(setting, None)[0])
            sent_bytes = _IN_TURN * step_bytes(setting, 0)
        elif setting.door is not None:
            seconds, sent_bytes = _slowest_s(doors.make(setting, alone=True).step), doors.sent_bytes(setting)
        elif setting.alone:
            seconds, sent_bytes = layer_s(setting), step_bytes(setting, 0)
        else:
            of = Computed(setting)
            seconds, sent_bytes = compute_s(setting, of), step_bytes(setting, of.gradient_bytes)
        rate = rate_mbit(sent_bytes, seconds)
        if rank == 0:
            (folder / FILE).write_text(json.dumps({"inter_mbit": rate, "computation_s": seconds}))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # Gloo threads could block the exit
