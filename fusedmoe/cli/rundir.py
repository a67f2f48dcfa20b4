"""The folder of a run: where everything that a job leaves behind lies, and under which name."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedmoe.cli.layout import Launch, Sizes
from fusedmoe.cli.settings import Settings
from fusedmoe.errors import ConfigError


@dataclass(frozen=True)
class RunDir:
    """A run folder: config.json, metrics.jsonl, loads.json, checkpoint/, timeline.png, trace.json, and with a schedule
    costs.json and plan.txt. Only rank 0 writes files."""

    path: Path

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    @property
    def picture(self) -> Path:
        return self.path / "timeline.png"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def costs(self) -> Path:
        """What this machine takes, where a schedule was made by it: a resumed job keeps to the plan."""
        return self.path / "costs.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.txt"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def loads(self) -> Path:
        """What gates chose: counts by step, layer, rank and expert."""
        return self.path / "loads.json"

    def note(self, record: dict[str, Any]) -> None:
        """Adds a line to the metrics."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    @classmethod
    def make(cls, path: Path | None) -> RunDir:
        """A new run folder, by default runs/<date-time>. To be called on rank 0.

        Raises:
            ConfigError: the folder holds a run already.
        """
        if path is not None:
            if (path / "config.json").exists():
                raise ConfigError(f"{path} holds a run already: go on with --resume {path}, or name another --run-dir")
            path.mkdir(parents=True, exist_ok=True)
            return cls(path)
        name, number = time.strftime("%Y-%m-%d_%H-%M-%S"), 1
        while True:  # two jobs may start in the same second
            path = Path("runs") / (name if number == 1 else f"{name}_{number}")
            try:
                path.mkdir(parents=True)
                return cls(path)
            except FileExistsError:
                number += 1

    def write_config(self, settings: Settings, launch: Launch, sizes: Sizes, facts: dict[str, Any]) -> None:
        """config.json: the settings as `--resume` reads them, and what was chosen or found when the job started."""
        layout = {"ranks": launch.ranks, **vars(sizes)}
        chosen = {"lr": settings.peak_lr, "warmup": settings.warmup_steps}
        config = {"settings": settings.to_json(), "layout": layout, "chosen": chosen, **facts}
        _write(self.path / "config.json", json.dumps(config, indent=2) + "\n")

    def forget_after(self, step: int) -> None:
        """Drops the metrics of steps that will be done again, and of the end that is still to come."""
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines(keepends=True):
            if not line.endswith("}\n"):  # cut short when its writer was killed
                continue
            record = json.loads(line)
            if "loss" in record and record["step"] <= step:
                kept.append(line)
        _write(self.metrics, "".join(kept))


def _write(path: Path, text: str) -> None:
    """So that a reader sees the old file or the new one, never a part."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
