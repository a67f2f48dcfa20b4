"""Nodes of a job on this machine: an agent of torchrun each, with its ranks, that can be lost one by one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

FLAGS = {"last_call_timeout": 3, "keep_alive_interval": 1, "keep_alive_max_attempt": 6, "is_host": "false"}


class Agents:
    """`fusedmoe train` on nodes of `per_node` ranks each; the store in which they meet is this process's.

    Attributes:
        outputs: a file of each agent that was started.
    """

    def __init__(self, folder: Path, nodes: int, per_node: int, *arguments: str) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder, self._arguments, self._nodes, self._per_node = folder, arguments, nodes, per_node
        self.running: list[subprocess.Popen[bytes]] = []
        self.outputs: list[Path] = []
        for _ in range(nodes):
            self.start()

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in list(self.running):
            self.lose(agent)

    def start(self) -> None:
        """Another node."""
        settings = ",".join(f"{name}={value}" for name, value in FLAGS.items())
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{self._nodes}"]
        command += ["--nproc-per-node", str(self._per_node), "--max-restarts", "100", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", f"127.0.0.1:{self._store.port}", "--rdzv-id", f"test-{os.getpid()}"]
        command += ["--rdzv-conf", settings, "--local-addr", "127.0.0.1", "-m", "fusedmoe.cli", "train"]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONUNBUFFERED": "1"}
        self.outputs.append(self._folder / f"agent-{len(self.outputs)}.txt")
        with self.outputs[-1].open("wb") as output:
            self.running.append(
                subprocess.Popen(
                    [*command, *self._arguments],
                    cwd=self._folder,
                    env={**os.environ, **environment},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def ranks(self, agent: subprocess.Popen[bytes]) -> list[int]:
        """The processes of an agent's ranks."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                command = (entry / "cmdline").read_bytes()
                if int(fields[1]) == agent.pid and fields[0] != "Z" and b"fusedmoe.cli" in command:
                    found.append(int(entry.name))
        return sorted(found)

    def lose(self, agent: subprocess.Popen[bytes]) -> None:
        """Ends a node, all at once."""
        ranks = self.ranks(agent)
        for process in (agent.pid, *ranks, *self.ranks(agent)):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        agent.wait()
        self.running.remove(agent)

    def wait(self, seconds: float) -> list[int]:
        """The exit codes of the nodes that are left."""
        deadline = time.monotonic() + seconds
        for agent in self.running:
            with suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.0, deadline - time.monotonic()))
        return [-1000 if agent.poll() is None else agent.returncode for agent in self.running]

    def wait_for_step(self, run: Path, step: int, seconds: float) -> None:
        """Until so many steps are done."""
        deadline = time.monotonic() + seconds
        while max((record["step"] for record in metrics(run)), default=0) < step:
            assert time.monotonic() < deadline, self.said()
            assert any(agent.poll() is None for agent in self.running), self.said()
            time.sleep(0.02)

    def said(self) -> str:
        """What all of them wrote, the end of it."""
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}" for path in self.outputs)


def metrics(run: Path) -> list[dict[str, Any]]:
    """The whole lines of a job's metrics."""
    file = run / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def kept_files() -> list[str]:
    """What is left in this system's memory of jobs whose agents are gone, once their keepers had time."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        left = [path.name for path in Path("/dev/shm").glob("fusedmoe-survive-*") if not _lives(path.name)]
        if not left:
            return []
        time.sleep(0.1)
    return left


def _lives(name: str) -> bool:
    return Path("/proc", name.split("-")[3]).exists()
