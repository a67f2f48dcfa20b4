"""Obtain a suite's sources, run it in a subprocess, and compare two runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from bench.peer_suites import suites
from bench.peer_suites.suites import Suite

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "peer-suites"


@dataclass
class Result:
    """Outcomes of a suite with and without this library, by test name.

    Attributes:
        reason: why the suite was skipped or interrupted.
    """

    suite: Suite
    version: str = ""
    reason: str = ""
    without: dict[str, str] = field(default_factory=dict)
    with_ours: dict[str, str] = field(default_factory=dict)

    def counts(self) -> Counter[str]:
        return Counter(self.with_ours.values())

    def differences(self) -> list[str]:
        """Return a line per test whose outcomes differ; tests missing in one run are ignored."""
        both = sorted(self.without.keys() & self.with_ours.keys())
        changed = ((name, self.without[name], self.with_ours[name]) for name in both)
        return [f"{name}: {one} -> {other}" for name, one, other in changed if one != other]


def run_suite(
    suite: Suite, source: Path | None, limit_s: float, shown: Callable[[str, int, int], None], build: Path = BUILD
) -> Result:
    """Run a suite without and with this library, each for at most `limit_s`.

    Args:
        source: a checkout of the project; None: the source distribution of the installed version.
        shown: called with the current run, the number of finished tests, and their total.
    """
    result = Result(suite)
    try:
        result.version = metadata.version(suite.package)
        if not suite.switch:
            raise _Skipped("its tests make their layers in code, where nothing switches fusedmoe in from outside")
        root = source or _sdist(suite, result.version, build)
        if missing := [path for path in suite.paths if not (root / path).exists()]:
            kind = "the checkout" if source else "the source distribution"
            raise _Skipped(f"{kind} has no {missing[0]}; give a checkout: --source {suite.package}=FOLDER")
        work = _work_folder(suite, build)
    except metadata.PackageNotFoundError:
        result.reason = f"{suite.package} is not installed"
        return result
    except _Skipped as skipped:
        result.reason = str(skipped)
        return result
    for ours, outcomes in ((False, result.without), (True, result.with_ours)):
        outcomes |= _run(suite, root, work, ours, limit_s, shown, result)
    return result


class _Skipped(Exception):
    pass


def _sdist(suite: Suite, version: str, build: Path) -> Path:
    folder, name = build / "sources", f"{suite.package}=={version}"
    if not (found := [*folder.glob(f"{suite.package.replace('-', '[-_]')}-{version}/")]):
        folder.mkdir(parents=True, exist_ok=True)
        command = ["download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", folder, name]
        ended = _pip(*command)
        archives = [*folder.glob(f"{suite.package.replace('-', '[-_]')}-{version}.tar.gz")]
        # pip fails after the download if a build requirement is missing.
        if not archives:
            raise _Skipped(f"pip has no sources of {name}: {(ended.stderr.strip().splitlines() or ['no reason'])[-1]}")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(folder, filter="data")
        found = [*folder.glob(f"{suite.package.replace('-', '[-_]')}-{version}/")]
    # Source distributions may omit the `__init__.py` files of test folders.
    for path in suite.paths:
        for parent in (found[0] / path).parents:
            if parent == found[0]:
                break
            if parent.exists():
                (parent / "__init__.py").touch()
    return found[0]


def _pip(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def _work_folder(suite: Suite, build: Path) -> Path:
    """Create the tests' working folder, in which folders with models' names take precedence over the hub."""
    work = build / "work" / f"{suite.package}-{suite.name}"
    work.mkdir(parents=True, exist_ok=True)
    for name, kind in suite.models:
        suites.make_model(kind, work / name)
    packages = build / "packages"
    for name in suite.packages:
        if not (packages / name).exists() and _pip("install", "--no-deps", "--target", packages, name).returncode:
            raise _Skipped(f"its tests need {name}, which pip does not find")
    return work


def _run(
    suite: Suite,
    root: Path,
    work: Path,
    ours: bool,
    limit_s: float,
    shown: Callable[[str, int, int], None],
    result: Result,
) -> dict[str, str]:
    file, log = work / f"outcomes-{ours}.jsonl", work / f"log-{ours}.txt"
    file.unlink(missing_ok=True)
    (work / "pytest.ini").write_text("[pytest]\n")  # replaces the project's configuration, whose plugins may be missing
    paths = [str(ROOT), str(work.parents[1] / "packages"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PEER_OUTCOMES": str(file),
        "PEER_STAND_INS": ",".join(suite.stand_ins),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-c", work / "pytest.ini", "--rootdir", root]
    command += ["-p", "no:cacheprovider", "-p", "bench.peer_suites.report", *(("-p", suite.switch) if ours else ())]
    command += [*(("-k", suite.select) if suite.select else ()), *(root / path for path in suite.paths)]
    what = f"{suite.package} {suite.name} {'with' if ours else 'without'} fusedmoe"
    end = time.monotonic() + limit_s
    with (
        log.open("w") as out,
        subprocess.Popen([*map(str, command)], cwd=work, env=env, stdout=out, stderr=subprocess.STDOUT) as process,
    ):
        while process.poll() is None:
            if time.monotonic() > end:
                process.kill()
                result.reason = f"cut short after {limit_s:.0f} s"
                break
            time.sleep(0.1)
            outcomes, collected = read_outcomes(file)
            shown(what, len(outcomes), collected)
    outcomes, _ = read_outcomes(file)
    if not outcomes:
        result.reason = result.reason or f"pytest ran no test, see {log}"
    return outcomes


def read_outcomes(file: Path) -> tuple[dict[str, str], int]:
    outcomes: dict[str, str] = {}
    collected = 0
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:  # incomplete line of a test that is just finishing
            break
        collected = entry.get("collected", collected)
        # A failing teardown makes the test fail.
        if "test" in entry and outcomes.get(entry["test"]) != "failed":
            outcomes[entry["test"]] = entry["outcome"]
    return outcomes, collected
