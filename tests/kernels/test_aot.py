"""Kernels compiled ahead of time: every kernel has a case, and the recorded machine code has no spills."""

from __future__ import annotations

import random
import re

import pytest

pytest.importorskip("triton")

import triton

from bench.aot import machine_code
from bench.aot.standin import TARGETS
from tests.kernels import aot

HOW = "python -m tests.kernels.aot writes bench/aot.json anew"


def differences(found: aot.Found) -> list[str]:
    """List differences from the record, if the same compiler made it."""
    version, record = aot.recorded()
    if version != triton.__version__:
        return []
    return [f"{at}: {got}, recorded {record.get(at)}" for at, got in found.items() if got != record.get(at)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("module", [module.__name__ for module in aot.modules()])
def test_every_kernel_compiles(module: str, target: int) -> None:
    """Compile a random third of all configurations; `python -m tests.kernels.aot` compiles all."""
    found = aot.check(module=module, target=target, part=slice(random.randrange(3), None, 3))
    if not found:
        pytest.skip("; ".join(aot.left_out(module=module)))
    assert not aot.errors(found)
    assert not differences(found), HOW


@pytest.mark.slow
def test_quick_cases_compile_for_every_target() -> None:
    found = aot.check(quick=True)
    assert found and not aot.errors(found)
    assert not differences(found), HOW


def test_record_has_every_case() -> None:
    """A change that adds or removes a case must also compile and record it, or remove it from the record."""
    _, record = aot.recorded()
    missing = aot.missing(record)
    assert not missing, f"{len(missing)} cases are not recorded, e.g. {missing[:3]}: {HOW}"
    assert not record.keys() - aot.in_question().keys(), HOW


def test_recorded_kernels_neither_spill_nor_exceed_limits() -> None:
    for (name, at), found in aot.recorded()[1].items():
        assert found["stack"] == 0, (name, at)
        assert 0 < found["registers"] <= 255 and 0 <= found["shared"] <= machine_code.SHARED[at], (name, at)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--write", "gather_sun"], "no case name contains 'gather_sun'; operations with near names: gather_sum"),
        (["nonsense", "90"], "no case name contains 'nonsense'; operations: "),
        (["gluon", "80"], "gluon: no case for sm_80; its targets: [90]"),
        (["gather_sum", "70"], "invalid choice: 70"),
    ],
)
def test_part_without_cases_is_an_error(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        aot.main(words)
    assert message in capsys.readouterr().err


def test_rare_part_is_not_recorded() -> None:
    recorded = [name for name, _ in aot.in_question()]
    rare = next(case for _, case in aot.cases() if case.rare and not any(case.name in name for name in recorded))
    assert "only rare cases" in aot.no_case_error(rare.name, None, record=True)
    assert aot.no_case_error(rare.name, None, record=False) == ""


@pytest.mark.slow
def test_command_reports_each_case_as_it_is_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    name, at = next((case.name, case.targets[-1]) for _, case in aot.cases() if case.quick and not aot.absent(case))
    assert aot.main([name, str(at)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1/") and f"{name} @ sm_{at}: {{'registers': " in lines[0]
    assert " compiled, 0 failed, " in lines[-1]


def test_every_kernel_has_cases() -> None:
    """Launched kernels are named accordingly; the other device functions are parts of them."""
    written = {
        f"{file.relative_to(aot.ROOT).with_suffix('').as_posix().replace('/', '.')}.{name}"
        for folder in ("fusedmoe", "bench")
        for file in (aot.ROOT / folder).rglob("*.py")
        for name in re.findall(r"^@(?:triton\.|gluon\.)?jit.*\n(?:def (\w+_kernel)\()", file.read_text(), re.M)
    }
    covered = {f"{case.kernel.__module__}.{case.kernel.__name__}" for _, case in aot.cases()}
    assert written <= covered, f"add cases of {written - covered} to tests/kernels/cases"
    assert covered <= written, f"no file defines {covered - written}"


def test_half_precision_cases_require_hopper_instructions() -> None:
    """All of them use wgmma, and bulk copies for every even size."""
    products = [case for module, case in aot.cases() if module == "tests.kernels.cases.grouped" and 90 in case.targets]
    assert products
    for case in products:
        words = case.name.split()
        if words[1] in ("bfloat16", "float16"):
            assert "HGMMA" in case.expect[90], case.name
        assert ("UTMALDG" in case.expect[90]) == ("even" in words), case.name


@pytest.mark.parametrize(
    ("function", "wrong", "text"),
    [
        ("read_usage", {"registers": 255, "stack": 8}, "spills: takes 8 bytes"),
        ("read_instructions", ["HGMMA", "LDGSTS", "UTMALDG", "STL"], "spills"),
        ("read_instructions", ["HGMMA", "LDGSTS"], "has no UTMALDG"),
        ("read_instructions", ["HMMA", "LDGSTS", "UTMALDG"], "has no HGMMA"),
        ("SHARED", {90: 1000}, "bytes of shared memory"),
        ("unfenced", ["wgmma.mma_async in $L1"], "has no fence.proxy.async between asynchronous copies and wgmma"),
    ],
)
def test_injected_compile_fault_is_reported(
    function: str, wrong: object, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel is compiled, and then faults are inserted into its results."""
    module = "tests.kernels.cases.grouped"
    of_module = (case for found_in, case in aot.cases() if found_in == module)
    case = next(case for case in of_module if case.quick and "UTMALDG" in case.expect.get(90, ()))
    task = (module, case.name, 90)
    found = aot.compile_case(task)
    assert "error" not in found and 0 < found["registers"] <= 255 and found["shared"] > 1000
    monkeypatch.setattr(machine_code, function, wrong if function == "SHARED" else lambda code: wrong)
    assert text in aot.compile_case(task)["error"]


LOOP = [
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3",
    "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24, gsb0",
    "WARPGROUP.DEPBAR.LE gsb0, 0x1",
    "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80",
]


def machine_text(*loops: list[str]) -> str:
    """Build text in cuobjdump's format; each loop jumps back to its first instruction."""
    lines = ["MOV R1, c[0x0][0x28]"]
    for loop in loops:
        lines += [*loop, f"BRA 0x{16 * len(lines):x}"]
        lines.append("WARPGROUP.DEPBAR.LE gsb0, 0x0")
    lines += ["EXIT", f"BRA 0x{16 * len(lines) + 16:x}"]
    predicates = ("", "@!P0 ", "@UP1 ")
    return "\n".join(f"        /*{16 * i:04x}*/    {predicates[i % 3]}{line} ;" for i, line in enumerate(lines))


def test_overlapped_product_loops_pass_check() -> None:
    assert machine_code.slow_loops(machine_text(LOOP, ["NOP"], LOOP)) == ""


@pytest.mark.parametrize(
    ("line", "wrong", "text"),
    [
        ("WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "waits for all products at each step"),
        ("WARPGROUP.DEPBAR.LE gsb0, 0x1", "NOP", "no wait"),
        ("BAR.SYNC.DEFER_BLOCKING 0x2, 0x80", "BAR.SYNC.DEFER_BLOCKING 0x1", "has BAR.SYNC.DEFER_BLOCKING 0x1 between"),
        ("BAR.SYNC.DEFER_BLOCKING 0x2, 0x80", "LDGSTS.E.BYPASS.128 [R1], [R2.64]", "has LDGSTS.E"),
        ("BAR.SYNC.DEFER_BLOCKING 0x2, 0x80", "UTMALDG.2D [UR8], [UR6]", "has UTMALDG.2D"),
    ],
)
def test_product_loops_with_waits_are_reported(line: str, wrong: str, text: str) -> None:
    slow = [wrong if one == line else one for one in LOOP]
    assert text in machine_code.slow_loops(machine_text(LOOP, slow))


def test_missing_warp_group_loop_is_reported() -> None:
    assert "has 1 loops" in machine_code.slow_loops(machine_text(LOOP))
