"""`make bench-cluster`: every policy on two nodes of one machine, measured beside its prediction.

Needs root, for network namespaces; says so and ends where it cannot be. Takes eight to fifteen minutes a setting, and
wants the machine for itself. Settings that really compute begin with half a minute of nothing else: by it the rate of
the link between the nodes is chosen, such that communication takes as long as computation. Writes
bench/results/cluster.json, or blocks.json for schedules of whole models, placement.json for placements of experts, and
pictures of predicted and measured timelines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from bench.cluster import balance
from bench.cluster.network import ADDRESSES, TwoNodes, missing
from bench.cluster.report import show
from bench.cluster.setting import SETTINGS, Setting
from bench.gpu.process import ROOT, Process

_PORT = 29555  # in a namespace of our own
_SECONDS = 1500  # that a setting may take


def main() -> int:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 150)
    if options.show:
        found = _stored(options.results, options.settings)
        show(found, console)
        if not found:
            console.print(f"no results of {', '.join(options.settings)} in {options.results} yet", highlight=False)
        return 0
    lacking = missing()
    if lacking is not None:
        console.print(f"cluster benchmark skipped: {lacking}")
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.settings:
            out = Path(folder) / name
            out.mkdir()
            console.print(f"{SETTINGS[name].ranks} ranks, {name}", highlight=False)
            try:
                run(SETTINGS[name], options.rounds, out)
            except KeyboardInterrupt:
                done = f"{' and '.join(results)} written" if results else "nothing is written"
                console.print(f"interrupted: nothing is left running, {done}")
                return 130
            results[name] = {"machine": _machine(), **json.loads((out / "result.json").read_text())}
            _store(options.results, name, results[name])
            options.pictures.mkdir(parents=True, exist_ok=True)
            for picture in out.glob("*.png"):
                (options.pictures / f"{name}-{picture.name}").write_bytes(picture.read_bytes())
    show(results, console)
    written = dict.fromkeys(str(_file(options.results, SETTINGS[name])) for name in results)
    console.print(f"\n{' and '.join(written)}; pictures in {options.pictures}", highlight=False)
    return 0


def _file(folder: Path, setting: Setting) -> Path:
    return folder / setting.file


def _store(folder: Path, name: str, found: dict[str, Any]) -> None:
    """Writes a setting's results into their file, in which other settings' stay as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    file = _file(folder, SETTINGS[name])
    before = json.loads(file.read_text())["settings"] if file.exists() else {}
    file.write_text(json.dumps({"settings": before | {name: found}}, indent=1) + "\n")


def _stored(folder: Path, names: list[str]) -> dict[str, Any]:
    """Results of these settings, as far as there are any."""
    found: dict[str, Any] = {}
    for name in names:
        file = _file(folder, SETTINGS[name])
        settings = json.loads(file.read_text())["settings"] if file.exists() else {}
        found.update({name: settings[name]} if name in settings else {})
    return found


def run(setting: Setting, rounds: int, folder: Path, seconds: int = _SECONDS) -> None:
    """Runs all ranks of a setting; `result.json` and pictures are in `folder` afterwards.

    Nothing outlives it: neither processes nor namespaces. Raises `RuntimeError` for ranks that fail or take longer.
    """
    if setting.inter_mbit is None:
        setting = _balanced(setting, folder)
    assert setting.inter_mbit is not None
    nodes = TwoNodes(setting.inter_mbit, setting.intra_mbit, setting.bucket_kb)
    try:
        nodes.make()
        module = ("-m", "bench.cluster.rank", setting.name, str(rounds), str(seconds), str(folder))
        commands, environments = [], []
        for rank in range(setting.ranks):
            node = rank // setting.ranks_per_node
            commands.append(nodes.command(node, sys.executable, *module))
            environments.append(
                {
                    "MASTER_ADDR": ADDRESSES[0],
                    "MASTER_PORT": str(_PORT),
                    "GLOO_SOCKET_IFNAME": nodes.interfaces[node],
                    "TORCH_CPP_LOG_LEVEL": "ERROR",  # addresses here have no names
                }
            )
        _run_ranks(commands, environments, seconds)
    finally:
        with _undisturbed():
            nodes.remove()


def _balanced(setting: Setting, folder: Path) -> Setting:
    """With a rate of the link between the nodes by what this machine computes now; also left in `folder`."""
    command = [sys.executable, "-m", "bench.cluster.balance", setting.name, str(folder)]
    _run_ranks([command] * setting.ranks, [{"GLOO_SOCKET_IFNAME": "lo"}] * setting.ranks, balance.SECONDS)
    found = json.loads((folder / balance.FILE).read_text())
    rate, seconds = found["inter_mbit"], found["computation_s"]
    print(f"  {rate} Mbit/s between the nodes: a step's computation takes {seconds:.2f} s", flush=True)
    return replace(setting, **found)


def _run_ranks(commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], seconds: float) -> None:
    """Runs one process a rank until all have ended well. Raises `RuntimeError`, and ends all, if that is not so."""
    running: dict[int, Process] = {}
    try:
        for rank, (command, own) in enumerate(zip(commands, environments, strict=True)):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(commands)),
                "OMP_NUM_THREADS": "1",
                # Memory that is given back to the system comes again page by page, in no time that repeats itself.
                "MALLOC_MMAP_THRESHOLD_": str(2**25),
                "MALLOC_TRIM_THRESHOLD_": str(2**33),
                "MALLOC_TOP_PAD_": str(2**26),
                **own,
            }
            running[rank] = Process(command, environment, show=rank == 0)
        _wait(running, time.monotonic() + seconds)
    finally:
        with _undisturbed():
            for process in running.values():
                process.ended(kill=True)


def _wait(running: dict[int, Process], deadline: float) -> None:
    """Until all ranks have ended well, and are gone from `running`. The first that does not ends the wait."""
    while running:
        for rank in [rank for rank, process in running.items() if not process.running]:
            ended = running.pop(rank).ended()
            if ended.code != 0:
                raise RuntimeError(f"rank {rank} ended with {ended.code}\n{ended.output}")
        if time.monotonic() > deadline:
            raise RuntimeError("the ranks took too long; is the machine busy?")
        time.sleep(0.2)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C must not keep the first one from tidying up."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _machine() -> dict[str, Any]:
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "load": os.getloadavg()[0],
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.cluster", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=SETTINGS,
        default=list(SETTINGS),
        help="others stay in the file (default: all); those that really compute get a link between the nodes at whose "
        "rate communication takes as long as computation, which is measured first",
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured runs of each (default 5)")
    parser.add_argument("--results", type=Path, default=ROOT / "bench/results", help="folder of the numbers")
    parser.add_argument("--show", action="store_true", help="the tables of the numbers there; nothing is run")
    parser.add_argument("--pictures", type=Path, default=ROOT / "runs/cluster", help="folder of the timelines")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
