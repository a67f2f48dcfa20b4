"""Provenance of numbers: commit, machine and load of a run; whether the code that they measure is another since.

A row that is older than its code says so in every table, and rows of different commits or machines are in none
together: a difference between them may be that of the code, or of the machine.
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
    """Asks git in this repository; returns None where it is none, or git fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def provenance(measured: Sequence[str]) -> dict[str, Any]:
    """Notes the provenance of a run that begins now. `measured`: the paths that its numbers are of."""
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
    """Says how a run is older than the code that it measured, as that is here now; None where it is not.

    `run`: as by `provenance`. Where git does not know the commit, nobody can tell, and that is said.
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
    """A line for below a table: commit, rounds, load, machine, date, and the run's age."""
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
    """Why rows of these runs are no comparison: other commits, or machines. None where they are one."""
    found = list(runs)
    commits = sorted({str(run.get("commit")) for run in found})
    if len(commits) > 1:
        return f"rows of commits {', '.join(commit[:10] for commit in commits)}"
    machines = {tuple(sorted((run.get("machine") or {}).items())) for run in found}
    return "rows of different machines" if len(machines) > 1 else None
