"""Nodes of a job on this machine, each a torchrun agent with its ranks, which can be lost individually."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.cluster.network import ADDRESSES, TwoNodes

ROOT = Path(__file__).parents[2]

#: torchrun rendezvous: wait for additional nodes, and heartbeat timeout of a lost node.
RENDEZVOUS = {"last_call_timeout": 15, "keep_alive_interval": 1, "keep_alive_max_attempt": 10, "is_host": "false"}

#: Imported by torchrun before it forks ranks; contains all imports of a rank.
PRELOAD = "import torch._dynamo, fusedmoe.cli.main; from torch.distributed.run import main; main()"

_STORE = """
import signal, sys
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False)
print("ready", flush=True)
signal.pause()
"""


class Agents:
    """`fusedmoe train` on nodes of `per_node` ranks each, with a rendezvous store outside of them.

    Args:
        folder: working directory and location of outputs.
        spaces: one network namespace per node; None: all on loopback.
        rendezvous: overrides of `RENDEZVOUS`.
        forked: torchrun forks the ranks; otherwise each is a new Python process with its own imports.
    Attributes:
        running: the agents.   outputs: output file of each started agent.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int,
        per_node: int,
        *arguments: str,
        spaces: TwoNodes | None = None,
        rendezvous: dict[str, Any] | None = None,
        forked: bool = True,
    ) -> None:
        self._folder, self._arguments, self._nodes, self._per_node = folder, arguments, nodes, per_node
        self._forked = forked
        self._spaces, self._rendezvous = spaces, RENDEZVOUS | (rendezvous or {})
        self._address = "127.0.0.1" if spaces is None else ADDRESSES[0]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.running: list[subprocess.Popen[bytes]] = []
        self.outputs: list[Path] = []
        self._places: dict[int, int] = {}
        command = self._in(0, sys.executable, "-c", _STORE, self._address, str(self._port))
        # It warns about addresses without host names.
        self._store = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=_end_with_parent
        )
        assert self._store.stdout is not None
        self._store.stdout.readline()
        for node in range(nodes):
            self.start(node)

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in list(self.running):
            self.lose(agent)
        self._store.kill()
        self._store.wait()
        if self._store.stdout is not None:
            self._store.stdout.close()

    def _in(self, node: int, *command: str) -> list[str]:
        return list(command) if self._spaces is None else self._spaces.command(node, *command)

    def start(self, node: int) -> None:
        """Start or restart a node."""
        address = "127.0.0.1" if self._spaces is None else ADDRESSES[node]
        interface = "lo" if self._spaces is None else self._spaces.interfaces[node]
        settings = ",".join(f"{name}={value}" for name, value in self._rendezvous.items())
        command, program = [sys.executable, "-m", "torch.distributed.run"], ["-m", "fusedmoe"]
        if self._forked:
            command = [sys.executable, "-u", "-c", PRELOAD, "--run-path", "--start-method", "fork"]
            program = [str(ROOT / "fusedmoe/__main__.py")]
        command += ["--nnodes", f"1:{self._nodes}"]
        command += ["--nproc-per-node", str(self._per_node), "--max-restarts", "100", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", f"{self._address}:{self._port}", "--rdzv-id", f"agents-{os.getpid()}"]
        command += ["--rdzv-conf", settings, "--local-addr", address, *program, "train"]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": interface}
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONUNBUFFERED": "1"}
        environment |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        self.outputs.append(self._folder / f"agent-{len(self.outputs)}.txt")
        with self.outputs[-1].open("wb") as output:
            agent = subprocess.Popen(
                [*self._in(node, *command), *self._arguments],
                cwd=self._folder,
                env={**os.environ, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        self._places[agent.pid] = node
        self.running.append(agent)

    def ranks(self, agent: subprocess.Popen[bytes]) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                command = (entry / "cmdline").read_bytes()
                if int(fields[1]) == agent.pid and fields[0] != "Z" and b"fusedmoe" in command:
                    found.append(int(entry.name))
        return sorted(found)

    def place(self, agent: subprocess.Popen[bytes]) -> int:
        return self._places[agent.pid]

    def lose(self, agent: subprocess.Popen[bytes], only_agent: bool = False) -> int:
        """Kill a node and return its number. `only_agent`: its ranks have to detect the loss."""
        for _ in range(2):  # kills ranks that it was just starting
            for process in (agent.pid,) if only_agent else (*self.ranks(agent), agent.pid):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        agent.wait()
        self.running.remove(agent)
        return self._places[agent.pid]

    def wait(self, seconds: float) -> list[int]:
        """Return the exit codes of the remaining nodes; -1000 for a running node."""
        deadline = time.monotonic() + seconds
        for agent in self.running:
            with suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.0, deadline - time.monotonic()))
        return [-1000 if agent.poll() is None else agent.returncode for agent in self.running]

    def wait_for_step(self, run: Path, step: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while max((record["step"] for record in metrics(run)), default=0) < step:
            assert time.monotonic() < deadline, self.said()
            assert any(agent.poll() is None for agent in self.running), self.said()
            time.sleep(0.02)

    def said(self, most: int = 6000) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-most:]}" for path in self.outputs)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def metrics(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def kept_files() -> list[str]:
    """List files in memory of jobs whose agents have ended, after their keepers had time to remove them."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        left = [path.name for path in Path("/dev/shm").glob("fusedmoe-survive-*") if not _lives(path.name)]
        if not left:
            return []
        time.sleep(0.1)
    return left


def _lives(name: str) -> bool:
    return Path("/proc", name.split("-")[3]).exists()
