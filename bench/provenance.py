"""Provenance of results: commit, machine and load of a run, and whether the measured code has changed since.

Rows older than their code are marked in every table. Rows of different commits or machines never share a table, because
their difference may be due to code or machine.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def git(*arguments: str) -> str | None:
    """Run a git command in this repository; None if it is no repository or git fails."""
    try:
        # Benchmarks that need root may run in another user's repository, which git refuses to read by default.
        command = ["git", "-c", f"safe.directory={ROOT}", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def provenance(measured: Sequence[str]) -> dict[str, Any]:
    """Record the provenance of a run that starts now. `measured`: paths of the measured code."""
    changed = git("status", "--porcelain", "--", *measured)
    return {
        "commit": git("rev-parse", "--short=12", "HEAD"),
        "changed_files": None if changed is None else len(changed.splitlines()),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "load": os.getloadavg()[0],
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "system": platform.release(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


def age(run: Mapping[str, Any], measured: Sequence[str]) -> str | None:
    """Describe by how much a run is older than the code it measured, or None if it is current.

    `run`: result of `provenance`. If git does not know the commit, the text states this.
    """
    commit = run.get("commit")
    if commit is None:
        return "OLD? its commit is not known"
    if run.get("changed_files"):
        return f"OLD? {run['changed_files']} of its files were not as in commit {commit[:10]}"
    names = git("diff", "--name-only", commit, "--", *measured)
    if names is None:
        return f"OLD? commit {commit[:10]} is not in this repository"
    if not names:
        return None
    last = git("log", "-1", "--format=%h of %cs", "--", *measured)
    return f"OLD: {len(names.splitlines())} files are not as in commit {commit[:10]}; the last commit to them is {last}"


def conditions(run: Mapping[str, Any], measured: Sequence[str]) -> str:
    """Return a caption for a table: commit, rounds, load, machine, date, and age of the run."""
    machine = run.get("machine") or {}
    parts = [
        f"commit {(run.get('commit') or 'unknown')[:10]}",
        *([f"medians of {run['rounds']} rounds"] if "rounds" in run else []),
        *([f"load {run['load']:.1f}"] if "load" in run else []),
        *([f"{machine['cores']} cores, torch {machine['torch']}"] if machine else []),
        str(run.get("date", "no date")),
    ]
    old = age(run, measured)
    return ", ".join(parts) + ("" if old is None else f"; {old}")


def difference(runs: Iterable[Mapping[str, Any]]) -> str | None:
    """Return why rows of these runs are not comparable (commits or machines differ), or None."""
    found = list(runs)
    commits = sorted({str(run.get("commit")) for run in found})
    if len(commits) > 1:
        return f"rows of commits {', '.join(commit[:10] for commit in commits)}"
    machines = {tuple(sorted((run.get("machine") or {}).items())) for run in found}
    return "rows of different machines" if len(machines) > 1 else None
