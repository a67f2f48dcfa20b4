"""Restarts by torchrun: find the run folder that an earlier attempt of the same launch created.

A run folder's launch.json lists the command's arguments and the torchrun agents of its job, one per node. An agent
outlives the attempts of its launch; host, boot, PID and start time identify it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fusedmoe import Topology
from fusedmoe.cli.settings import Settings, read_settings
from fusedmoe.comm.collectives import on_all_ranks
from fusedmoe.environment import read_integer
from fusedmoe.errors import ConfigError, printable
from fusedmoe.files import dump_with_digest, load_with_digest, read_text, write_text
from fusedmoe.training.survival.keeper import start_time

_FILE = "launch.json"


class Attempt(NamedTuple):
    """This attempt of a launch, equal on all ranks.

    Attributes:
        agents: the torchrun agents of all nodes; empty without torchrun.
        restarts: largest restart count of an agent. Agents do not count restarts after nodes join or leave.
        earlier: run folder of an earlier attempt; None if there is none.
        settings: of the earlier run; None if it ended before it wrote them.
    """

    agents: frozenset[str] = frozenset()
    restarts: int = 0
    earlier: Path | None = None
    settings: Settings | None = None


def find_attempt(run_dir: Path | None, timeout_s: float) -> Attempt:
    """Return this attempt, with the earlier run folder at `run_dir`, by default in runs/*. Collective under torchrun.

    Raises:
        ConfigError, RankError: a rank failed or did not join within `timeout_s`.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return Attempt()
    # A temporary topology: the job's parallel sizes may depend on the earlier run's settings.
    with Topology.from_sizes(timeout_s=timeout_s) as everyone:
        ranks = on_all_ranks(everyone.world, "comparing the launch of all ranks", _describe_rank)
        agents = frozenset(agent for agent, _ in ranks if agent)

        def find() -> tuple[Path | None, Settings | None]:
            # All ranks must agree, and file systems may be late on other nodes.
            run = _find_run(run_dir, agents) if everyone.is_first else None
            return run, read_settings(run) if run is not None and (run / "config.json").exists() else None

        earlier = on_all_ranks(everyone.world, "searching the run folder of an earlier attempt", find)[0]
    return Attempt(agents, max(restarts for _, restarts in ranks), *earlier)


def write_launch(run_dir: Path, agents: Iterable[str]) -> None:
    """Add the agents to a run folder's launch.json; a no-op without agents. Call on rank 0 only."""
    if agents := set(agents):
        # A node that joined in this attempt may be the only one to remain in the next.
        agents |= set(_read(run_dir / _FILE).get("agents", ()))
        write_text(run_dir / _FILE, dump_with_digest({"agents": sorted(agents), "arguments": sys.argv[1:]}) + "\n")


def describe_restart(attempt: Attempt, run_dir: Path, done: int, has_checkpoint: bool) -> str:
    if attempt.earlier is not None:
        where = f"continuing after step {done}" if has_checkpoint else "it has no checkpoint yet, starting at step 1"
        return printable(f"restart by torchrun: run folder {run_dir} of the earlier attempt: {where}")
    if attempt.restarts:
        return printable(
            f"restart by torchrun: no run folder of an earlier attempt found, starting at step 1 in {run_dir}"
        )
    return ""


def _describe_rank() -> tuple[str, int]:
    """Return the agent that started this rank ("" where /proc does not exist), and its restart count."""
    agent, boot = os.getppid(), Path("/proc/sys/kernel/random/boot_id")
    since = start_time(agent)
    name = f"{socket.gethostname()} {boot.read_text().strip()} {agent} {since}" if since and boot.exists() else ""
    return name, read_integer("TORCHELASTIC_RESTART_COUNT", 0, 0)


def _find_run(run_dir: Path | None, agents: frozenset[str]) -> Path | None:
    files = Path("runs").glob(f"*/{_FILE}") if run_dir is None else [run_dir / _FILE]
    for file in sorted(files, reverse=True):  # latest first
        launch = _read(file)
        # A program may start several jobs under one agent: their arguments differ.
        if launch.get("arguments") == sys.argv[1:] and not agents.isdisjoint(launch.get("agents", ())):
            return file.parent
    return None


def _read(file: Path) -> dict[str, Any]:
    with suppress(ConfigError, OSError):
        return load_with_digest(read_text(file), str(file))
    return {}
