"""The run folder of a training job and its log of expert loads."""

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
from fusedmoe.cli.job import Launch, Sizes, format_ranks
from fusedmoe.cli.load_trace import LoadTrace, plot_loads
from fusedmoe.cli.settings import Settings
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.errors import ConfigError, warn
from fusedmoe.files import dump_with_digest, parse_json, read_text, write_text

#: Steps between gatherings of loads: a killed job loses at most this many steps of the log.
GATHER_INTERVAL = 50
#: Maximum size of loads.json in bytes; later steps are not recorded.
MAX_LOG_BYTES = 32 * 2**20


class RunDir:
    """Paths of a run folder. Only rank 0 writes files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint, self.metrics = path / "checkpoint", path / "metrics.jsonl"
        self.loads, self.loads_figure_path = path / "loads.json", path / "loads.png"
        # Timeline of one step, and its comparison with the prediction as a table.
        self.timeline_figure_path, self.trace = path / "timeline.png", path / "trace.json"
        self.parts = path / "parts.txt"
        # Inputs of a resumed job.
        self.costs, self.plan, self.choice = path / "costs.json", path / "plan.txt", path / "schedule.json"

    def write_metrics(self, step: int, record: dict[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **record}) + "\n")

    @classmethod
    def make(cls, path: Path | None) -> RunDir:
        """Create a run folder, by default runs/<date-time>; refuse one with a run. Call on rank 0 only."""
        if path is not None:
            if (path / "config.json").exists():
                raise ConfigError(f"{path} contains a run: use --resume {path}, or another --run-dir")
            if path.exists() and not path.is_dir():
                raise ConfigError(f"--run-dir {path} is a file: choose a new or empty folder")
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

    def write_config(
        self, settings: Settings, launch: Launch, sizes: Sizes, sequences_per_step: int, facts: dict[str, Any]
    ) -> None:
        layout = {"ranks": launch.ranks, **vars(sizes)}
        chosen = {"lr": settings.peak_lr, "warmup": settings.warmup_steps, "sequences_per_step": sequences_per_step}
        config = {"settings": settings.to_dict(), "layout": layout, "chosen": chosen, **facts}
        write_text(self.path / "config.json", dump_with_digest(config, indent=2) + "\n")

    def layout_change(self, settings: Settings, launch: Launch, sizes: Sizes, sequences_per_step: int) -> str:
        """Return a line on a layout or number of sequences per step that differs from config.json; "" if equal."""
        path = self.path / "config.json"
        saved = parse_json(read_text(path), str(path))
        axes = ("ranks", "ep", "esp", "mp")
        before, now = saved["layout"], {"ranks": launch.ranks, **vars(sizes)}
        dp_before, dp = (layout["ranks"] // layout["mp"] for layout in (before, now))
        # Files of earlier versions lack the number of sequences.
        kept = saved["chosen"].get("sequences_per_step", saved["settings"]["model"]["batch"] * dp_before)
        if kept == sequences_per_step and all(before[axis] == now[axis] for axis in axes):
            return ""
        was, this = (
            f"{format_ranks(layout['ranks'])} (ep {layout['ep']}, esp {layout['esp']}, mp {layout['mp']}) with "
            f"{number} sequences per step"
            for layout, number in ((before, kept), (now, sequences_per_step))
        )
        # Each data-parallel rank draws its own text.
        differ = "will differ" if (kept, dp_before) != (sequences_per_step, dp) else "may differ"
        line = f"Note: the saved run trained on {was}, this job on {this}: losses {differ}."
        if kept == sequences_per_step:
            return line
        batch, rest = divmod(kept * settings.model.batch, sequences_per_step)
        return f"{line} " + (f"No --batch keeps {kept} on these ranks." if rest else f"--batch {batch} keeps {kept}.")

    def drop_metrics_after(self, step: int) -> None:
        """Drop metrics of steps after `step`, which will be repeated, and of the end of the job."""
        if not self.metrics.exists():
            return
        kept, damaged = [], 0
        lines = read_text(self.metrics, errors="replace").split("\n")
        # The last line is empty, or truncated if its writer was killed.
        for line in lines[:-1]:
            try:
                record = json.loads(line)
                # Repeated steps and the end of the job write their lines again.
                if record.get("loss") is not None and record["step"] <= step:
                    kept.append(line + "\n")
            except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
                damaged += 1
        if damaged:
            warn(f"{self.metrics}: dropped {damaged} unreadable lines", stacklevel=2)
        write_text(self.metrics, "".join(kept))


class LoadLog:
    """Write loads.json into a run folder: counts[step][layer][rank][expert], gathered every `GATHER_INTERVAL` steps.

    Args:
        source: description stored in the file.
        done: completed steps of a resumed job. The existing file is continued if it has these steps and equal sizes;
            otherwise a new file is started.
    """

    def __init__(self, folder: RunDir, topology: Topology, source: str, done: int) -> None:
        self._path, self._figure_path, self._topology = folder.loads, folder.loads_figure_path, topology
        self._source, self._next_step = f"{source}, from step {done + 1}" if done else source, done + 1
        self._earlier_trace = _read_first_steps(self._path, done) if topology.is_first else None
        self._has_written = False
        self._pending: list[Tensor] = []

    def record(self, load_LE: Tensor) -> None:
        """Record a step's counts of this rank. Call on all ranks: collective every `GATHER_INTERVAL` steps."""
        self._pending.append(load_LE)
        if len(self._pending) == GATHER_INTERVAL:
            self.flush()

    def flush(self) -> None:
        """Gather and write the pending counts. Collective."""
        if not self._pending:
            return
        pending_ILE = torch.stack(self._pending).cpu().int().numpy()
        self._pending = []
        ranks_ILE = all_gather_object(self._topology.world, pending_ILE, "gathering expert loads")
        if self._topology.is_first:
            self._write(np.stack(ranks_ILE, axis=2).astype(np.int64))

    def draw(self, title: str) -> None:
        if self._has_written:
            plot_loads(LoadTrace.from_json(read_text(self._path)), title=title).savefig(self._figure_path)

    def _write(self, tokens_ILWE: NDArray[np.int64]) -> None:
        if not self._has_written:
            self._has_written = True
            earlier = self._earlier_trace
            if earlier is None or earlier.tokens_ILWE.shape[1:] != tokens_ILWE.shape[1:]:
                write_text(self._path, LoadTrace(tokens_ILWE, self._source, self._next_step).to_json())
                return
            # Drops steps after a killed job's last checkpoint.
            write_text(self._path, earlier.to_json())
        if self._path.stat().st_size < MAX_LOG_BYTES:
            LoadTrace(tokens_ILWE).append_to(self._path)


def _read_first_steps(path: Path, steps: int) -> LoadTrace | None:
    """Return the first `steps` steps of a file; None if it lacks some, unless it has reached its size limit."""
    if not steps or not path.exists():
        return None
    try:
        trace = LoadTrace.from_truncated_json(read_text(path))
    except ConfigError as error:
        warn(f"starting a new {path}: {error}", stacklevel=2)
        return None
    kept = steps - trace.first + 1
    if kept < 1 or (len(trace) < kept and path.stat().st_size < MAX_LOG_BYTES):
        return None
    return LoadTrace(trace.tokens_ILWE[:kept], trace.source, trace.first)
