"""Restarts by torchrun: the run folder of an earlier attempt, and jobs that survive the loss of a rank or node.

A run folder's launch.json lists the command's arguments and the torchrun agents of its job, one per node. An agent
outlives the attempts of its launch; host, boot, PID and start time identify it. With --survive, restarted ranks find
their job in the memory of their node.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fusedmoe import Topology
from fusedmoe.cli.job import Launch, Sizes, choose_sizes, resolve_sizes
from fusedmoe.cli.settings import Settings, describe_error, read_settings
from fusedmoe.cli.trainer import Trainer
from fusedmoe.comm.collectives import on_all_ranks
from fusedmoe.comm.failure.board import NOTE_RENEWAL_S, post_fatal_exception
from fusedmoe.environment import read_integer
from fusedmoe.errors import ConfigError, RankError, printable
from fusedmoe.files import dump_with_digest, load_with_digest, read_text, write_text
from fusedmoe.training import Survival
from fusedmoe.training.survival.keeper import start_time
from fusedmoe.training.survival.node_memory import NodeMemory

_FILE = "launch.json"
_TORCHRUN_FLAGS = """\
The torchrun flags, the same on every node:
  TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes MIN:MAX --max-restarts 100 \\
      --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id NAME \\
      --rdzv-conf last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3 …"""

# Seconds for a failing rank to print its error and exit.
_ERROR_WAIT_S = 2.0
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


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
    """Return this attempt, and the earlier run folder at `run_dir`, by default in runs/*. Collective under torchrun."""
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


def check_launcher() -> None:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise ConfigError(f"--survive needs torchrun, which restarts ranks. {_TORCHRUN_FLAGS}")
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS") == "0":
        raise ConfigError(f"--survive needs torchrun with --max-restarts > 0. {_TORCHRUN_FLAGS}")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        raise ConfigError(
            "--survive needs a new store for each restart, because keys of earlier restarts stay in a shared one: "
            f"set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun. {_TORCHRUN_FLAGS}"
        )


def end_with_launcher() -> None:
    """Terminate this rank when its launcher exits for any reason, or sends a signal.

    Nothing restarts the ranks of a node without its launcher. Signal handlers inherited from torchrun are removed: they
    only set a flag for a loop that does not run in this process.
    """
    launcher = os.getppid()
    # The kernel sends SIGKILL to this rank when its parent dies.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the launcher died before prctl, no signal is sent.
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)
    if multiprocessing.parent_process() is not None:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Survivor:
    """Job that outlives its processes: settings, run folder and in-memory state. Construction is collective.

    Restarted ranks read settings and run folder from a note in the memory of their node.

    Attributes:
        run_dir: the job's run folder; None for a new job.
        settings: of the job's first start.
        sizes: parallel sizes for the current ranks.
        batches_per_step: batches per step over all ranks: the job's largest number of replicas. Set by `join`.
    """

    batches_per_step: int

    def __init__(self, launch: Launch, settings: Settings) -> None:
        self._launch = launch
        self._memory = NodeMemory()
        if launch.local_rank == 0:
            # One process per node keeps the memory alive across restarts.
            self._memory.keep()
        # A temporary topology: the job's parallel sizes depend on the notes.
        with Topology.from_sizes(timeout_s=settings.timeout_s) as everyone:
            notes = on_all_ranks(everyone.world, "reading the job's note", self._memory.note)
        note: dict[str, Any] | None = next((note for note in notes if note is not None), None)
        self.run_dir: Path | None = None
        if note is not None:
            settings, self.run_dir = Settings.from_dict(note["settings"]), Path(note["run_dir"])
        # Nodes that joined later have an older note or none.
        self._batches_per_step = max((int(note["shares"]) for note in notes if note is not None), default=1)
        self.sizes, self.settings = resolve_sizes(settings, launch, sizes_for_ranks)

    def join(self, topology: Topology) -> None:
        """Use the topology of the ranks and find the surviving state. Collective."""
        # All ranks restart after any error: a short wait for the cause of a broken connection is enough.
        if topology.job.board is not None:
            topology.job.board.exit_s = 2 * NOTE_RENEWAL_S
        self._topology, self._survival = topology, Survival(topology, self._memory)
        self.batches_per_step = max(self._batches_per_step, topology.dp.size)

    def restore(self, trainer: Trainer) -> dict[str, Any] | None:
        """Load the newest complete state and return its `extra`, or None. Rank 0 prints lost states. Collective."""
        survival, first = self._survival, self._topology.is_first
        for step, keys in survival.lost.items():
            if first:
                lost = f"{len(keys)} parts of the state of step {step} are lost on all nodes"
                print(f"survival: {lost}", flush=True)
        if survival.step is None and survival.damaged:
            if first:
                print(printable(f"survival: damaged state: {'; '.join(survival.damaged)}"), flush=True)
            return None
        return survival.restore(trainer.model, trainer.optimizer)

    def write_note(self, run_dir: Path) -> None:
        """Write the job's settings and run folder to node memory."""
        if self._launch.local_rank == 0:
            note = {
                "settings": self.settings.to_dict(),
                "run_dir": str(run_dir.absolute()),
                "shares": self.batches_per_step,
            }
            self._memory.write_note(note)

    def refresh(self, trainer: Trainer, done: int, extra: dict[str, Any]) -> float:
        """Store the state after `done` steps and return the seconds it took. Collective."""
        began = time.perf_counter()
        self._survival.refresh(done, trainer.model, trainer.optimizer, extra)
        trainer.exclude_next_step()
        return time.perf_counter() - began

    def describe_cost(self, seconds: float) -> str:
        nodes, price, every = self._survival.nodes, self._survival.price, self.settings.survive
        steps = f"every {every} steps" if every > 1 else "every step"
        sent = f"{price.sent_bytes / 1e6:.3g} MB to another node" if nodes > 1 else "nothing sent (one node)"
        kept = f"{price.memory_bytes / 1e6:.3g} MB of host memory per rank"
        return f"{nodes} node{'s' * (nodes > 1)}, {kept}; {steps} {seconds:.2g} s, {sent}"


def sizes_for_ranks(settings: Settings, launch: Launch) -> Sizes:
    """Return the parallel sizes, without requested sizes that the current ranks do not allow."""
    # Drop as few requested sizes as possible, ep first: it depends on the number of nodes.
    for given_up in ((), ("ep",), ("ep", "esp")):
        with suppress(ConfigError):
            return choose_sizes(settings.changed(dict.fromkeys(given_up)), launch)
    return choose_sizes(settings.changed(dict.fromkeys(("ep", "esp", "mp"))), launch)


def exit_for_restart(topology: Topology, error: RankError) -> NoReturn:
    """Report the error to the other ranks and exit at once, so that torchrun restarts all ranks."""
    print(f"fusedmoe: error: {describe_error(error)}", file=sys.stderr, flush=True)
    post_fatal_exception(error)
    # A stopped process ignores torchrun's SIGTERM and would delay the restart by 30 s.
    for process in _stopped_siblings():
        _kill(process)
    board = topology.job.board
    # The failing rank may be about to print the cause.
    deadline = time.monotonic() + _ERROR_WAIT_S
    while board is not None and (guilty := board.culprit_pid()) is not None and guilty != os.getpid():
        if time.monotonic() > deadline:
            _kill(guilty)
            break
        time.sleep(0.02)
    sys.stdout.flush()
    # Destructors of process groups would wait for lost ranks.
    os._exit(1)


def _stopped_siblings() -> list[int]:
    """Return the PIDs of stopped (SIGSTOP) processes that the same launcher started on this host."""
    stopped = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == os.getppid() and fields[0] == "T":
                stopped.append(int(entry.name))
    return stopped


def _kill(process: int) -> None:
    with suppress(OSError):
        os.kill(process, signal.SIGKILL)
