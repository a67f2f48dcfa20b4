"""Actual launches at the published shapes, compiled for GPUs that are absent here; see bench/aot."""

from __future__ import annotations

import fnmatch
import json
import random
import re
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton

from bench.aot import layers, record
from bench.aot.compiling import WITHOUT_LINES, compile_all
from bench.aot.machine_code import SHARED
from bench.aot.standin import TARGETS, Launch, recording, table_of
from bench.gpu.shapes import SHAPES
from fusedmoe.kernels.backend import INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET, reason="kernels are interpreted here")

ROOT = Path(__file__).parents[2]
SEED = random.randrange(2**32)  # appears in the tests' names
SOME = random.Random(SEED)
# One generation, and layers of one shape, in short tests: recording all launches takes many seconds.
TARGET, SHAPE = SOME.choice(TARGETS), SOME.choice(SHAPES)
HOW = "make aot writes bench/launches.json anew"


@cache
def some_launches() -> tuple[Launch, ...]:
    with recording(TARGET) as found:
        layers.run(SHAPE)
    return tuple(found)


def compile_and_compare(launches: list[Launch]) -> None:
    done = list(compile_all(launches, look=record.look, environment=WITHOUT_LINES))
    assert len(done) == len(launches) > 0 and not record.faults(done)
    recorded, version = record.read(), triton.__version__
    if version in record.versions(recorded):
        for one in done:
            known = recorded[one.launch.title][version][f"sm_{one.launch.target}"]
            assert record.numbers(one) == known, f"{one.launch}: {HOW}"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("target", TARGETS)
def test_every_launch_compiles(target: int) -> None:
    """Compile every candidate of the tuner, including puts."""
    compile_and_compare(list(record.launches(target)))


@pytest.mark.slow
def test_one_launch_compiles() -> None:
    print(f"seed {SEED}")
    compile_and_compare([SOME.choice(some_launches())])


def test_record_has_sampled_launches() -> None:
    recorded = record.read()
    for version in record.versions(recorded):
        known = {title for title, made in recorded.items() if f"sm_{TARGET}" in made.get(version, {})}
        assert known > {launch.title for launch in some_launches()}, f"seed {SEED}: {HOW}"


@pytest.mark.slow
def test_record_has_every_launch() -> None:
    """Every launch of a generation is recorded for each Triton version in the record, which are all supported ones."""
    print(f"seed {SEED}")
    recorded = record.read()
    assert {version.rpartition(".")[0] for version in record.versions(recorded)} == {"3.6", "3.7"}
    launches = record.launches(TARGET)
    titles = {launch.title for launch in launches}
    assert len(titles) == len(launches)
    for version in record.versions(recorded):
        known = {title for title, made in recorded.items() if f"sm_{TARGET}" in made.get(version, {})}
        assert titles == known, HOW


def test_recorded_launches_neither_spill_nor_exceed_limits() -> None:
    for title, made in record.read().items():
        for targets in made.values():
            for target, (registers, stack, shared) in targets.items():
                assert stack == 0 and 0 < registers <= 255, title
                assert 0 <= shared <= SHARED[int(target.removeprefix("sm_"))], title


def test_gpu_guide_table_equals_records() -> None:
    guide, recorded = (ROOT / "docs" / "guides" / "gpu.md").read_text(), record.read()
    cases = json.loads((ROOT / "bench" / "aot.json").read_text())["cases"]
    for target in TARGETS:
        (row,) = re.findall(rf"^\| sm_{target} \|.*$", guide, re.M)
        _, _, table, compiled, run, timed = (cell.strip() for cell in row.strip("|").split("|"))
        major, minor = table_of(target)
        assert table == f"sm_{major}{minor}"
        for version in record.versions(recorded):
            launches = sum(f"sm_{target}" in made.get(version, {}) for made in recorded.values())
            assert compiled == f"{launches}, {sum(f'sm_{target}' in at for at in cases.values())}", version
        results = (ROOT / "bench" / "results").glob("gpu_*.json")
        files = [file.name for file in results if json.loads(file.read_text())["gpu"]["capability"] == f"{target / 10}"]
        named = [file for pattern in re.findall(r"`([^`]+)`", timed) for file in fnmatch.filter(files, pattern)]
        assert sorted(named) == sorted(files) and (run, timed == "no") == (("yes", False) if files else ("no", True))


def test_merge_preserves_records_of_other_triton_versions() -> None:
    def done(title: str, target: int, registers: int) -> record.Compiled:
        launch = Launch("module", title, target, DATA)
        return record.Compiled(launch, 1.0, False, "", {"registers": registers, "stack": 0, "shared": 5})

    old = record.merged({}, "3.6.0", [done("a", 80, 10), done("a", 90, 11), done("gone", 80, 12)])
    new = record.merged(old, "3.7.1", [done("a", 80, 20), done("a", 90, 21), done("b", 90, 22)])
    name = {title: Launch("module", title, 80, DATA).title for title in "ab"}
    assert new == {
        name["a"]: {
            "3.6.0": {"sm_80": [10, 0, 5], "sm_90": [11, 0, 5]},
            "3.7.1": {"sm_80": [20, 0, 5], "sm_90": [21, 0, 5]},
        },
        name["b"]: {"3.7.1": {"sm_90": [22, 0, 5]}},
    }
    assert record.versions(new) == ["3.6.0", "3.7.1"]


DATA = (
    '{"constant_keys": [], "constant_vals": [], "attrs_keys": [], "attrs_vals": [], "signature": {}, "options": '
    '{"num_warps": 4, "num_stages": 3, "maxnreg": null, "enable_fp_fusion": true, "extern_libs": []}}'
)
