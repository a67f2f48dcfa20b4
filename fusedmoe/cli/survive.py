"""`fusedmoe train --survive`: the job goes on after a rank or a node is lost, by torchrun's own restarts."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from fusedmoe import Topology
from fusedmoe.cli.job import Launch, Sizes, choose_sizes, settle
from fusedmoe.cli.settings import Settings
from fusedmoe.cli.trainer import Trainer
from fusedmoe.comm import on_all_ranks
from fusedmoe.comm.failure.board import RENEWED_S, tell_others
from fusedmoe.errors import ConfigError, RankError, printable
from fusedmoe.training import NodeMemory, Survival

_HOW = """\
torchrun's flags for it, the same on every node, are
  TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes MIN:MAX --max-restarts 100 \\
      --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id NAME \\
      --rdzv-conf last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3 …"""

# A rank that is at fault and alive may be about to say why, and to end.
_END_S = 2.0
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def check_launcher() -> None:
    """Raises `ConfigError` where this process is not started in a way that `--survive` needs."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise ConfigError(f"--survive needs torchrun, which starts ranks again: {_HOW}")
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS") == "0":
        raise ConfigError(f"--survive needs torchrun to start ranks again: give it --max-restarts. {_HOW}")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        raise ConfigError(
            "--survive needs a store of its own for the ranks of each restart, as those before have left theirs full: "
            f"set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun. {_HOW}"
        )


def end_with_launcher() -> None:
    """Makes this rank end as soon as its launcher is gone, however it ended, and as soon as the launcher asks for it.

    A node whose launcher is gone is lost: its ranks would be started nowhere again. And a rank that torchrun has forked
    has torchrun's own handlers of signals, which wait for whatever the rank waits for.
    """
    launcher = os.getppid()
    # The kernel then kills this rank when its parent dies, whatever the rank is doing.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The launcher may have died between the two calls: then the kernel tells nobody.
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)
    # A forked rank has inherited torchrun's handlers, which only set a flag for a loop that does not run here.
    if multiprocessing.parent_process() is not None:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Survivor:
    """A job that outlives its processes: its settings, its folder and its state. Making it is collective.

    Attributes:
        run_dir: the job's folder, None in a job that begins.
        settings, sizes: those with which it began, and the layout that these ranks allow.
        shares: batches of a step, once it has joined a topology.
    """

    shares: int

    def __init__(self, launch: Launch, settings: Settings) -> None:
        self._launch = launch
        self._memory = NodeMemory()
        if launch.local_rank == 0:
            # One process of a node keeps the memory alive while ranks come and go.
            self._memory.keep()
        # A topology of its own for this one question: the layout depends on the answer.
        with Topology.from_sizes(timeout_s=settings.timeout_s) as everyone:
            notes = on_all_ranks(everyone.world, "asking what job this is", self._memory.note)
        note: dict[str, Any] | None = next((note for note in notes if note is not None), None)
        self.run_dir: Path | None = None
        if note is not None:
            settings, self.run_dir = Settings.from_json(note["settings"]), Path(note["run_dir"])
        # Nodes that came later have an older note, or none: the largest number is the job's.
        self._shares = max((int(note["shares"]) for note in notes if note is not None), default=1)
        self.sizes, self.settings = settle(settings, launch, fitting_sizes)

    def join(self, topology: Topology) -> None:
        """Takes part in the ranks' topology, and finds what is left of the job's state. Collective."""
        # All ranks start again after any error, so none needs to wait long for the reason of a broken connection.
        if topology.job.board is not None:
            topology.job.board.exit_s = 2 * RENEWED_S
        self._topology, self._survival = topology, Survival(topology, self._memory)
        # As many batches a step as the job had replicas when it had the most.
        self.shares = max(self._shares, topology.dp.size)

    def restore(self, trainer: Trainer) -> dict[str, Any] | None:
        """Puts the newest whole state into the trainer and returns what `refresh` was given; None without one.
        Collective."""
        survival, first = self._survival, self._topology.is_first
        # Say why an older state is taken: two nodes that share a state were lost together.
        for step, keys in survival.lost.items():
            if first:
                lost = f"of the state of step {step}, {len(keys)} parts are on no node that is left"
                print(f"survival: {lost}", flush=True)
        if survival.step is None and survival.damaged:
            if first:
                print(printable(f"survival: damaged is {'; '.join(survival.damaged)}"), flush=True)
            return None
        return survival.restore(trainer.model, trainer.optimizer)

    def announce(self, run_dir: Path) -> None:
        """Leaves a note by which a restart goes on with this job."""
        if self._launch.local_rank == 0:
            note = {"settings": self.settings.to_json(), "run_dir": str(run_dir.absolute()), "shares": self.shares}
            self._memory.write_note(note)

    def refresh(self, trainer: Trainer, done: int, extra: dict[str, Any]) -> float:
        """Keeps the state after `done` steps; returns the seconds it took. Collective."""
        began = time.perf_counter()
        self._survival.refresh(done, trainer.model, trainer.optimizer, extra)
        trainer.interrupted()
        return time.perf_counter() - began

    def price(self, seconds: float) -> str:
        """Says what the last refresh cost, which took so many seconds."""
        nodes, price, every = self._survival.nodes, self._survival.price, self.settings.survive
        steps = f"every {every} steps" if every > 1 else "every step"
        sent = f"{price.sent_bytes / 1e6:.3g} MB to another node" if nodes > 1 else "nothing is sent: there is one node"
        kept = f"{price.memory_bytes / 1e6:.3g} MB of the host's memory for each rank"
        return f"{nodes} node{'s' * (nodes > 1)}, {kept}; {steps} {seconds:.2g} s, {sent}"


def fitting_sizes(settings: Settings, launch: Launch) -> Sizes:
    """Settles the sizes that were asked for, or, where these ranks are too few, those that would be chosen."""
    # Give up as little as possible of what was asked for: first ep, which nodes that are left bound.
    for given_up in ((), ("ep",), ("ep", "esp")):
        with suppress(ConfigError):
            return choose_sizes(settings.changed(dict.fromkeys(given_up)), launch)
    return choose_sizes(settings.changed(dict.fromkeys(("ep", "esp", "mp"))), launch)


def leave(topology: Topology, error: RankError) -> NoReturn:
    """Ends this process at once, after the others have heard why, so that torchrun starts all ranks anew.

    torchrun gives a rank that is frozen half a minute to end: it is ended here.
    """
    print(f"fusedmoe: error: {error}", file=sys.stderr, flush=True)
    tell_others(error)
    # torchrun sends SIGTERM first, which a stopped process does not see, and waits for half a minute.
    for process in _stopped_beside():
        _kill(process)
    board = topology.job.board
    # The rank at fault may be about to say why; its text is worth a moment.
    deadline = time.monotonic() + _END_S
    while board is not None and (guilty := board.at_fault()) is not None and guilty != os.getpid():
        if time.monotonic() > deadline:
            _kill(guilty)
            break
        time.sleep(0.02)
    sys.stdout.flush()
    # Destructors of process groups would wait for ranks that are gone.
    os._exit(1)


def _stopped_beside() -> list[int]:
    """Returns the ids of processes that the same launcher started here, and that are stopped."""
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
