"""One rank of a setting: measure its parts in sequence.

Started by `bench.cluster` inside a node, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Rank 0 writes `PART.json`
after each part, and plots, to the given folder, which contains the result of `balance`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import warnings
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fusedmoe
from bench.cluster import balance, blocks, captured, doors, job, model, placed, price, shared, stacks, tokens
from bench.cluster import layer as layers
from bench.cluster.network import set_rate
from bench.cluster.profile import StackProfile, profile_stack
from bench.cluster.setting import SETTINGS, Setting
from bench.cluster.step import Step, computation
from bench.cluster.turns import setting_json, tell
from bench.own_policy import register_from_environment
from fusedmoe.comm.topology import Topology
from fusedmoe.runtime.cache import CACHE, cached_profile, write_or_warn
from fusedmoe.schedule.cost import Contention

_WAIT_S = 60.0


class Parts:
    """Measurable parts of a setting, one method each. Collective."""

    def __init__(self, setting: Setting, topology: Topology, rounds: int, folder: Path) -> None:
        self._setting, self._topology, self._rounds, self._folder = setting, topology, rounds, folder

    def layer(self) -> dict[str, Any]:
        return layers.measure(self._setting, self._topology, self._rounds)

    def model(self) -> dict[str, Any]:
        return model.measure(self._setting, self._topology, self._rounds)

    def job(self) -> dict[str, Any]:
        return job.measure(self._setting, self._topology, self._rounds)

    def price(self) -> dict[str, Any]:
        return price.measure(self._setting, self._topology, self._rounds)

    def captured(self) -> dict[str, Any]:
        return captured.measure(self._setting, self._topology, self._rounds)

    def steps(self) -> dict[str, Any]:
        step, profile = self._stack
        return stacks.measure_steps(self._setting, self._topology, step, profile, self._rounds, self._folder)

    def sweep(self) -> dict[str, Any]:
        step, profile = self._stack
        return stacks.measure_sweep(self._topology, step, profile.stack, self._rounds)

    def buckets(self) -> dict[str, Any]:
        step, profile = self._stack
        return blocks.measure_buckets(self._topology, step, profile.stack, self._rounds)

    def placement(self) -> dict[str, Any]:
        return placed.measure(self._setting, self._topology, self._rounds)

    def routers(self) -> dict[str, Any]:
        return placed.measure_routers(self._setting, self._topology, self._rounds)

    def tokens(self) -> dict[str, Any]:
        return tokens.measure(self._setting, self._topology, self._rounds)

    def shared(self) -> dict[str, Any]:
        return shared.measure(self._setting, self._topology, self._rounds)

    def doors(self) -> dict[str, Any]:
        setting, off = self._door
        return doors.measure(setting, self._topology, off, self._rounds)

    def tuning(self) -> dict[str, Any]:
        setting, off = self._door
        return doors.measure_tuning(setting, self._topology, off)

    @cached_property
    def _door(self) -> tuple[Setting, doors.Door]:
        off = doors.make(self._setting)
        return doors.balanced(self._setting, self._topology, off, set_rate), off

    @cached_property
    def _stack(self) -> tuple[Step, StackProfile]:
        torch.manual_seed(0)
        step = Step(self._setting, self._topology, computation(self._setting))
        tell(self._topology, "profile")
        return step, profile_stack(self._setting, self._topology, step)


def main() -> None:
    name, names, rounds, seconds, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    signal.alarm(seconds)  # timeout of this process
    out = Path(folder)
    register_from_environment()
    reword_noise()
    setting = setting_of(name, out)
    os.environ[CACHE] = str(out / "cache")  # measurements are specific to these links
    torch.set_num_threads(1)
    fusedmoe.keep_memory()
    dist.init_process_group("gloo", timeout=timedelta(seconds=_WAIT_S))
    try:
        topology = Topology.from_sizes(
            ep=setting.ep,
            esp=setting.esp,
            mp=setting.esp,
            ranks_per_node=setting.ranks_per_node,
            timeout_s=_WAIT_S,
            duplex=True,
        )
        with topology.guard("the benchmark"):
            if setting.emulated_flops is not None:
                leave_waits_alone(topology)
            parts = Parts(setting, topology, rounds, out)
            for part in names.split(","):
                tell(topology, f"{setting.name}: {part}")
                found = {"setting": setting_json(setting), **getattr(parts, part)()}
                if topology.rank == 0:
                    new = out / f"{part}.new"
                    new.write_text(json.dumps(found))
                    new.rename(out / f"{part}.json")  # atomic
    finally:
        dist.destroy_process_group()


def reword_noise() -> None:
    """Print the profiler's warning without its command, which would measure other links and another cache."""
    show = warnings.showwarning

    def reworded(message: Warning | str, *where: Any, **options: Any) -> None:
        if noisy := re.search(r"measured times of (.*) are noisy", str(message)):
            print(f"  measured times of {noisy[1]} are noisy: predictions and plans may be poor", flush=True)
        else:
            show(message, *where, **options)

    warnings.showwarning = reworded


def leave_waits_alone(topology: Topology) -> None:
    """Measure and cache the machine without contention: communication does not slow timed waits. Collective."""
    found, path = cached_profile(topology, torch.device("cpu"))
    measured = found.costs.contention
    links = Contention(intra_beside_inter=measured.intra_beside_inter, inter_beside_intra=measured.inter_beside_intra)
    if topology.is_first:
        write_or_warn(path, replace(found, costs=replace(found.costs, contention=links)).to_json(), "what was measured")


def setting_of(name: str, folder: Path) -> Setting:
    """Return the named setting, with its calibrated link rate if there is one."""
    setting = SETTINGS[name]
    if setting.inter_mbit is not None:
        return setting
    return replace(setting, **json.loads((folder / balance.FILE).read_text()))


if __name__ == "__main__":
    main()
    os._exit(0)  # Gloo threads could block the exit
