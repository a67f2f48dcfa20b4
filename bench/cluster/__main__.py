"""`make bench-cluster`: measure every policy on two emulated nodes and compare it with its prediction.

Requires root for network namespaces, and an otherwise idle machine. Settings with real computation start with a
calibration of half a minute, which selects the inter-node link rate at which communication takes as long as
computation. Results are measured in parts (`--settings computed:job`). Each part is written on completion, with commit,
rounds, load and machine, to a file of bench/results/: cluster.json, blocks.json for schedules of whole models,
placement.json for expert placements; with plots of predicted and measured timelines.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from bench.cluster import balance, own
from bench.cluster.network import ADDRESSES, TwoNodes, missing
from bench.cluster.report import MEASURED, show
from bench.cluster.setting import SETTINGS, Setting
from bench.console import stdout_console
from bench.gpu.process import ROOT, Process
from bench.own_policy import add_policy_flags, policy_environment, register_own
from bench.provenance import provenance
from fusedmoe.errors import ConfigError

_PORT = 29555  # inside our own namespace
_SECONDS = 1800  # timeout of a setting, or twice the estimate of its parts
# Seconds per part for five rounds on an idle machine of two cores, if there are no earlier results.
_PART_S = dict(
    layer=120,
    shared=150,
    model=240,
    job=480,
    price=600,
    captured=300,
    steps=300,
    sweep=300,
    buckets=240,
    placement=1700,
    routers=1500,
    tokens=90,
    doors=540,
    tuning=900,
)
_START_S = 30  # start-up time of a setting, before its first part

#: A setting and the parts to measure.
Wanted = tuple[Setting, list[str]]


def main() -> int:
    options = _options()
    console = stdout_console()
    wanted = options.settings
    if options.show:
        found = _stored(options.results, wanted)
        show(found, console)
        if not found:
            names = ", ".join(setting.name for setting, _ in wanted)
            console.print(f"no results of {names} in {options.results} yet", highlight=False)
        return 0
    lacking = missing()
    if lacking is not None:
        console.print(f"cluster benchmark skipped: {lacking}")
        return 0
    if options.policy is not None:
        name = options.policy.partition(":")[2]
        console.print(f"{name} is compared in {own.parts_text(wanted, options.whole)}", highlight=False)
    if (load := os.getloadavg()[0]) > 1:
        console.print(f"load {load:.1f}: other processes are running, so times will be larger", highlight=False)
    signal.signal(signal.SIGTERM, _interrupt)
    ends = time.monotonic() + 60 * options.minutes
    written: list[str] = []
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, (setting, parts) in enumerate(wanted):
            fitting, takes_s = _fitting(setting, parts, options, ends - time.monotonic())
            later_s = sum(_fitting(*one, options, float("inf"))[1] for one in wanted[number + 1 :])
            left_out = [part for part in parts if part not in fitting]
            if left_out:
                console.print(f"{setting.name}: no time for {', '.join(left_out)}", highlight=False)
            if not fitting:
                continue
            console.print(
                f"{setting.name}, {setting.ranks} ranks: {', '.join(fitting)}; about {takes_s / 60:.0f} min"
                + (f", and {later_s / 60:.0f} min after it" if later_s else ""),
                highlight=False,
            )
            out = Path(folder) / f"{number}-{setting.name}"
            out.mkdir()
            begun = provenance(MEASURED) | {"rounds": options.rounds}

            def keep(part: str, found: dict[str, Any], seconds: float) -> None:
                result = {"run": begun | {"seconds": round(seconds)}, **found}  # noqa: B023  called in this turn only
                _store(options.results, setting, part, result)  # noqa: B023
                written.append(f"{setting.name}:{part}")  # noqa: B023

            try:
                own_policy = policy_environment(options.policy, options.whole)
                run(setting, fitting, options.rounds, out, keep, max(_SECONDS, round(2 * takes_s)), own_policy)
            except KeyboardInterrupt:
                done = f"{' and '.join(written)} written" if written else "nothing is written"
                console.print(f"interrupted: all processes have ended, {done}")
                return 130
            except RuntimeError as error:  # other settings may succeed
                console.print(f"{setting.name}: {error}", highlight=False, markup=False)
                code = 1
            for picture in out.glob("*.png"):
                options.pictures.mkdir(parents=True, exist_ok=True)
                (options.pictures / f"{setting.name}-{picture.name}").write_bytes(picture.read_bytes())
    found = _stored(options.results, wanted)
    show(
        {
            name: {part: of for part, of in parts.items() if f"{name}:{part}" in written}
            for name, parts in found.items()
        },
        console,
    )
    files = dict.fromkeys(str(_file(options.results, setting)) for setting, _ in wanted)
    console.print(f"\n{', '.join(written) or 'nothing'} written: {' and '.join(files)}", highlight=False)
    return code


def _fitting(
    setting: Setting, parts: list[str], options: argparse.Namespace, seconds: float
) -> tuple[list[str], float]:
    """Return the parts that fit into `seconds`, and their duration according to earlier results or estimates."""
    before = _stored(options.results, [(setting, list(parts))]).get(setting.name, {})
    fitting, total_s = [], float(_START_S)
    for part in parts:
        run = before.get(part, {}).get("run", {})
        known_s = run.get("seconds", _PART_S[part]) / run.get("rounds", 5)
        takes_s = known_s * options.rounds
        if total_s + takes_s <= seconds:
            fitting.append(part)
            total_s += takes_s
    return fitting, total_s if fitting else 0.0


def _file(folder: Path, setting: Setting) -> Path:
    return folder / setting.file


def _store(folder: Path, setting: Setting, part: str, found: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = _file(folder, setting)
    settings = json.loads(file.read_text())["settings"] if file.exists() else {}
    settings[setting.name] = settings.get(setting.name, {}) | {part: found}
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"settings": settings}, indent=1) + "\n")
    new.replace(file)


def _stored(folder: Path, wanted: Sequence[Wanted]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for setting, parts in wanted:
        file = _file(folder, setting)
        settings = json.loads(file.read_text())["settings"] if file.exists() else {}
        own = {part: of for part, of in settings.get(setting.name, {}).items() if part in parts}
        found.update({setting.name: found.get(setting.name, {}) | own} if own else {})
    return found


Keep = Callable[[str, dict[str, Any], float], None]


def run(
    setting: Setting,
    parts: Sequence[str],
    rounds: int,
    folder: Path,
    keep: Keep,
    seconds: int = _SECONDS,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run all ranks of a setting, with plots to `folder`; `keep` receives each finished part with results and seconds.

    `variables`: further environment variables of the ranks. Ends all processes and namespaces. Raises `RuntimeError`
    for ranks that fail or time out.
    """
    waiting, since = list(parts), time.monotonic()

    def look() -> None:
        nonlocal since
        while waiting and (file := folder / f"{waiting[0]}.json").exists():
            now = time.monotonic()
            keep(waiting.pop(0), json.loads(file.read_text()), now - since)
            since = now

    if setting.inter_mbit is None:
        setting = _balanced(setting, folder)
    assert setting.inter_mbit is not None
    nodes = TwoNodes(setting.inter_mbit, setting.intra_mbit, setting.bucket_kb)
    try:
        nodes.make()
        names = ",".join(parts)
        module = ("-m", "bench.cluster.rank", setting.name, names, str(rounds), str(seconds), str(folder))
        since = time.monotonic()
        commands, environments = [], []
        for rank in range(setting.ranks):
            node = rank // setting.ranks_per_node
            commands.append(nodes.command(node, sys.executable, *module))
            environments.append(
                {
                    "MASTER_ADDR": ADDRESSES[0],
                    "MASTER_PORT": str(_PORT),
                    "GLOO_SOCKET_IFNAME": nodes.interfaces[node],
                    "TORCH_CPP_LOG_LEVEL": "ERROR",  # addresses have no host names here
                    **(variables or {}),
                }
            )
        run_ranks(commands, environments, seconds, look)
    finally:
        with _undisturbed():
            nodes.remove()


def _balanced(setting: Setting, folder: Path) -> Setting:
    command = [sys.executable, "-m", "bench.cluster.balance", setting.name, str(folder)]
    run_ranks([command] * setting.ranks, [{"GLOO_SOCKET_IFNAME": "lo"}] * setting.ranks, balance.SECONDS)
    found = json.loads((folder / balance.FILE).read_text())
    rate, seconds = found["inter_mbit"], found["computation_s"]
    print(f"  {rate} Mbit/s between the nodes: a step's computation takes {seconds:.2f} s", flush=True)
    return replace(setting, **found)


def run_ranks(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    seconds: float,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Run one process per rank, calling `look` periodically. If one fails, end all and raise `RuntimeError`."""
    running: dict[int, Process] = {}
    try:
        for rank, (command, own) in enumerate(zip(commands, environments, strict=True)):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(commands)),
                "OMP_NUM_THREADS": "1",
                # Allows threads to reuse memory freed by others: a dozen models have dozens of threads.
                "MALLOC_ARENA_MAX": "2",
                **own,
            }
            running[rank] = Process(command, environment, show=rank == 0)
        _wait(running, time.monotonic() + seconds, look)
    finally:
        with _undisturbed():
            for process in running.values():
                process.ended(kill=True)
            look()


def _wait(running: dict[int, Process], deadline: float, look: Callable[[], None]) -> None:
    """Wait until all ranks have succeeded and left `running`, or one has failed."""
    while running:
        for rank in [rank for rank, process in running.items() if not process.running]:
            ended = running.pop(rank).ended()
            if ended.code != 0:
                raise RuntimeError(f"rank {rank} ended with {ended.code}\n{ended.output}")
        if time.monotonic() > deadline:
            raise RuntimeError("the ranks took too long; is the machine busy?")
        look()
        time.sleep(0.2)


@contextmanager
def _undisturbed() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.cluster", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--settings",
        nargs="+",
        type=_wanted,
        default=[_wanted(name) for name in SETTINGS],
        metavar="NAME[:PART,…]",
        help="settings and parts to measure, in this order; other results are kept (default: all). "
        + "; ".join(f"{name}: {', '.join(setting.parts)}" for name, setting in SETTINGS.items()),
    )
    parser.add_argument(
        "--minutes", type=float, default=1e9, metavar="N", help="skip parts that would exceed this time"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default: 5)")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "bench/results", help="results folder (default: bench/results)"
    )
    parser.add_argument("--show", action="store_true", help="print tables of existing results without running anything")
    parser.add_argument(
        "--pictures",
        type=Path,
        default=ROOT / "runs/cluster",
        help="folder of the timeline plots (default: runs/cluster)",
    )
    add_policy_flags(parser)
    options = parser.parse_args()
    if options.policy is not None:
        if options.results == ROOT / "bench/results":
            parser.error("--policy: choose another --results folder; bench/results has the library's own policies only")
        try:
            name = register_own(options.policy, options.whole)
            if not options.show:
                own.check(name, options.whole, options.settings)
        except ConfigError as error:
            parser.exit(2, f"{parser.prog}: {error}\n")
    return options


def _wanted(text: str) -> Wanted:
    name, _, names = text.partition(":")
    if name not in SETTINGS:
        raise argparse.ArgumentTypeError(f"no setting {name!r}; choose from {', '.join(SETTINGS)}")
    setting = SETTINGS[name]
    parts = names.split(",") if names else list(setting.parts)
    if unknown := [part for part in parts if part not in setting.parts]:
        raise argparse.ArgumentTypeError(f"{name} has no part {unknown[0]!r}; choose from {', '.join(setting.parts)}")
    return setting, parts


if __name__ == "__main__":
    sys.exit(main())
