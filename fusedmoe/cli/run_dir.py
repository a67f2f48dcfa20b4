"""The folder of a run, with everything that a job leaves behind, and the log of its experts' loads."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusedmoe import Topology
from fusedmoe.cli.job import Launch, Sizes
from fusedmoe.cli.load_trace import LoadTrace, draw_loads
from fusedmoe.cli.settings import Settings
from fusedmoe.comm import all_gather_object
from fusedmoe.errors import ConfigError, warn
from fusedmoe.files import read_text, sealed, write_text
from fusedmoe.metrics import JsonLines

#: Steps between two gatherings of loads: ranks keep so many steps' counts, and a job that is killed loses as many.
EVERY = 50
#: Bytes that the file may grow to; the steps after that are left out.
MOST_BYTES = 32 * 2**20


class RunDir:
    """A run folder: config.json and what the attributes name. Only rank 0 writes files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint, self.metrics = path / "checkpoint", path / "metrics.jsonl"
        # What gates chose, by step, layer, rank and expert.
        self.loads, self.loads_picture = path / "loads.json", path / "loads.png"
        # The timeline of one step, and the step beside its prediction, as a table.
        self.picture, self.trace, self.parts = path / "timeline.png", path / "trace.json", path / "parts.txt"
        # A resumed job keeps to the costs of its schedule, and to the plan that was measured to be the fastest.
        self.costs, self.plan, self.choice = path / "costs.json", path / "plan.txt", path / "schedule.json"

    def note(self, step: int, record: dict[str, Any]) -> None:
        """Adds a line to the metrics."""
        JsonLines(self.metrics).write(step, record)

    @classmethod
    def make(cls, path: Path | None) -> RunDir:
        """Makes a new run folder, by default runs/<date-time>. Called on rank 0."""
        if path is not None:
            if (path / "config.json").exists():
                raise ConfigError(f"{path} holds a run already: go on with --resume {path}, or name another --run-dir")
            if path.exists() and not path.is_dir():
                raise ConfigError(f"--run-dir {path} is a file: name a folder, new or empty")
            path.mkdir(parents=True, exist_ok=True)
            return cls(path)
        first = path = Path("runs", time.strftime("%Y-%m-%d_%H-%M-%S"))
        # Two jobs may start in the same second.
        for number in count(2):
            with suppress(FileExistsError):
                path.mkdir(parents=True)
                break
            path = first.with_name(f"{first.name}_{number}")
        return cls(path)

    def write_config(self, settings: Settings, launch: Launch, sizes: Sizes, facts: dict[str, Any]) -> None:
        """Writes config.json: the settings as `--resume` reads them, and what was chosen when the job started."""
        layout = {"ranks": launch.ranks, **vars(sizes)}
        chosen = {"lr": settings.peak_lr, "warmup": settings.warmup_steps}
        config = {"settings": settings.to_json(), "layout": layout, "chosen": chosen, **facts}
        write_text(self.path / "config.json", sealed(config, indent=2) + "\n")

    def forget_after(self, step: int) -> None:
        """Drops the metrics of steps that will be done again, and of the end that is still to come."""
        if not self.metrics.exists():
            return
        kept, damaged = [], 0
        lines = read_text(self.metrics, errors="replace").split("\n")
        # The last line is empty, or cut short where its writer was killed.
        for line in lines[:-1]:
            try:
                record = json.loads(line)
                # Lines of later steps would stand twice once these steps are done again.
                if record.get("loss") is not None and record["step"] <= step:
                    kept.append(line + "\n")
            except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
                damaged += 1
        if damaged:
            warn(f"{self.metrics}: {damaged} lines that cannot be read are left out", stacklevel=2)
        write_text(self.metrics, "".join(kept))


class LoadLog:
    """Writes loads.json into a run folder: counts[step][layer][rank][expert].

    A step costs a small copy on this rank's device; ranks exchange counts every `EVERY` steps, or when asked to.

    Args:
        source: what the file says of itself.
        done: steps that a resumed job has behind it. The file goes on after them; where it is of other layers, ranks or
            experts, or lacks some of these steps, it begins anew.
    """

    def __init__(self, folder: RunDir, topology: Topology, source: str, done: int) -> None:
        self._path, self._picture, self._topology = folder.loads, folder.loads_picture, topology
        self._source, self._next = f"{source}, from step {done + 1}" if done else source, done + 1
        self._earlier = _read(self._path, done) if topology.is_first else None
        self._begun = False
        self._kept: list[Tensor] = []

    def note(self, load_LE: Tensor) -> None:
        """Notes the counts of a step on this rank; all ranks note all steps. Collective every `EVERY` steps."""
        self._kept.append(load_LE)
        if len(self._kept) == EVERY:
            self.flush()

    def flush(self) -> None:
        """Writes what is kept; collective."""
        if not self._kept:
            return
        kept_ILE = torch.stack(self._kept).cpu().int().numpy()
        self._kept = []
        of_ranks = all_gather_object(self._topology.world, kept_ILE, "gathering expert loads")
        if self._topology.is_first:
            self._write(np.stack(of_ranks, axis=2).astype(np.int64))

    def draw(self, title: str) -> None:
        """Draws what was written, into the run folder; rank 0 does."""
        if self._begun:
            draw_loads(LoadTrace.from_json(read_text(self._path)), self._picture, title=title)

    def _write(self, tokens_ILWE: NDArray[np.int64]) -> None:
        if not self._begun:
            self._begun = True
            earlier = self._earlier
            if earlier is None or earlier.tokens_ILWE.shape[1:] != tokens_ILWE.shape[1:]:
                write_text(self._path, LoadTrace(tokens_ILWE, self._source, self._next).to_json())
                return
            # The file may have steps that a killed job did after its last checkpoint: they are done again.
            write_text(self._path, earlier.to_json())
        if self._path.stat().st_size < MOST_BYTES:
            LoadTrace(tokens_ILWE).append_to(self._path)


def _read(path: Path, steps: int) -> LoadTrace | None:
    """Reads a file up to a step; None where it has none of these steps, or lacks some though it is not full."""
    if not steps or not path.exists():
        return None
    try:
        trace = LoadTrace.from_cut_json(read_text(path))
    except ConfigError as error:
        warn(f"{path} begins anew: {error}", stacklevel=2)
        return None
    kept = steps - trace.first + 1
    if kept < 1 or (len(trace) < kept and path.stat().st_size < MOST_BYTES):
        return None
    return LoadTrace(trace.tokens_ILWE[:kept], trace.source, trace.first)
