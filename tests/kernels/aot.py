"""Compile every Triton and Gluon kernel in every configuration ahead of time, for GPUs that may be absent.

    python -m tests.kernels.aot                 # all but the rare cases; writes bench/aot.json in a quarter of an hour
    python -m tests.kernels.aot gather_sum 90   # cases whose name contains the first word, for one target
    python -m tests.kernels.aot --write nvshmem # cases whose name contains the word; merges them into the record

To check a kernel, add it to a function `aot_cases()` of a module in tests/kernels/cases/, whose docstring defines a
case. Modules there are discovered automatically.

A case fails if it does not compile, spills registers (uses a stack in memory), uses more shared memory than the GPU
has, or lacks an expected instruction. Compiled kernels are kept in Triton's cache, with the values read from them: an
interrupted run resumes from there.

Cases that link a library which is not installed are skipped and reported; the whole record cannot be written without
them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from bench.aot.compiling import WITHOUT_LINES, processes
from bench.aot.machine_code import judge
from bench.aot.standin import TARGETS, driving
from fusedmoe.errors import ConfigError
from tests.kernels.cases import AotCase

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "bench" / "aot.json"
# Recorded fields of a case and target.
COLUMNS = ("registers", "stack", "shared")

Found = dict[tuple[str, int], dict[str, Any]]


def modules() -> Iterator[ModuleType]:
    """List the modules with cases."""
    import tests.kernels.cases as package

    for info in iter_modules(package.__path__, f"{package.__name__}."):
        yield import_module(info.name)


def cases() -> list[tuple[str, AotCase]]:
    """List every (module, case)."""
    found = [(module.__name__, case) for module in modules() for case in module.aot_cases()]
    names = set()
    for _, case in found:
        if case.name in names:
            raise ValueError(f"several cases have the name {case.name}")
        if len({*case.targets}) < len(case.targets):
            raise ValueError(f"{case.name} has a target twice")
        names.add(case.name)
    return found


def absent(case: AotCase) -> str:
    """Return the reason why the case cannot be linked here, or ""."""
    try:
        case.libraries()
    except ConfigError as error:
        return f"{case.name}: {error}"
    return ""


def left_out(only: str = "", module: str = "") -> list[str]:
    """Return the reasons for skipped cases among the given ones."""
    found = (absent(case) for found_in, case in cases() if only in case.name and module in ("", found_in))
    return [why for why in found if why]


def check(
    only: str = "",
    target: int | None = None,
    quick: bool = False,
    rare: bool = False,
    module: str = "",
    part: slice = slice(None),
    report: Callable[[int, int, str, int, dict[str, Any]], None] = lambda *_: None,
) -> Found:
    """(case, target) -> the measured values; "error" if it failed.

    Args:
        only: a part of the names.
        quick: only the small selection.
        rare: include the cases that are otherwise compiled only when requested by name.
        part: of all these, in their order.
        report: called after each case with its index from 1, the number of cases, name, target and values.
    """
    tasks = [
        (found_in, case.name, at)
        for found_in, case in cases()
        for at in case.targets
        if only in case.name and target in (None, at) and module in ("", found_in)
        if (case.quick or not quick) and (rare or not case.rare) and not absent(case)
    ]
    tasks = tasks[part]
    found: Found = {}
    if not tasks:  # starting the processes takes seconds
        return found
    with processes(environment=WITHOUT_LINES) as pool:
        for (_, name, at), result in zip(tasks, pool.map(compile_case, tasks), strict=True):
            found[name, at] = result
            report(len(found), len(tasks), name, at, result)
    return found


def errors(found: Found) -> list[str]:
    return [f"{name} @ sm_{at}: {result['error']}" for (name, at), result in found.items() if "error" in result]


@cache
def _cases_of(module: str) -> dict[str, AotCase]:
    return {case.name: case for case in import_module(module).aot_cases()}


def compile_case(task: tuple[str, str, int]) -> dict[str, Any]:
    """Compile one case, (module, name, target), and return its measured values."""
    from triton.backends.compiler import GPUTarget

    module, name, target = task
    case = _cases_of(module)[name]
    try:
        options = {**case.options, "extern_libs": dict(case.libraries())}
        with driving(target):
            case.kernel.create_binder()  # compile as launches do, Gluon as Gluon
            source = case.kernel.ASTSource(case.kernel, *case.specialise())
            compiled = case.kernel.compile(source, target=GPUTarget("cuda", target, 32), options=options)
        return judge(compiled, target, case.expect.get(target, ()))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[-2000:]}"}


def write(found: Found) -> None:
    """Write bench/aot.json, one line per case, so two versions can be compared."""
    import triton

    by_name: dict[str, dict[str, list[int]]] = {}
    for (name, at), result in found.items():
        by_name.setdefault(name, {})[f"sm_{at}"] = [result[column] for column in COLUMNS]
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(targets)}" for name, targets in sorted(by_name.items()))
    head = f'  "triton": "{triton.__version__}",\n  "columns": {json.dumps(COLUMNS)},\n'
    RECORD.write_text(f'{{\n{head}  "cases": {{\n{lines}\n  }}\n}}\n')


def recorded() -> tuple[str, Found]:
    """Return Triton's version and the contents of bench/aot.json."""
    record = json.loads(RECORD.read_text())
    found = {
        (name, int(target.removeprefix("sm_"))): dict(zip(record["columns"], values, strict=True))
        for name, targets in record["cases"].items()
        for target, values in targets.items()
    }
    return record["triton"], found


def beside_others(found: Found) -> Found:
    """Merge new results with bench/aot.json's results of the other existing cases.

    Raises:
        ValueError: another Triton version made the record, so only a whole record can be written.
    """
    import triton

    version, record = recorded()
    if version != triton.__version__:
        raise ValueError(f"the record is of Triton {version}, this is {triton.__version__}: write all of it")
    known = in_question()
    return {at: result for at, result in {**record, **found}.items() if at in known}


def missing(record: Found) -> list[tuple[str, int]]:
    """List the compilable cases that are not in the record."""
    return [at for at in in_question() if at not in record]


def in_question() -> dict[tuple[str, int], None]:
    """List the (case, target) pairs that the record covers: all that are not rare."""
    return {(case.name, at): None for _, case in cases() if not case.rare for at in case.targets}


def no_case_error(only: str, target: int | None, record: bool) -> str:
    """Return the reason why no case was compiled, with names near to `only`."""
    named = [case for _, case in cases() if only in case.name]
    if any(target in (None, *case.targets) and not (record and case.rare) for case in named):
        return ""  # skipped cases, reported by `left_out`
    if named and target is not None and all(target not in case.targets for case in named):
        return f"{only}: no case for sm_{target}; its targets: {sorted({at for case in named for at in case.targets})}"
    if named:
        return f"{only}: only rare cases, which the record omits; compile them without --write"
    operations = sorted({case.name.split()[0] for _, case in cases()})
    near = get_close_matches(only, operations, n=5)
    listed = f"operations with near names: {', '.join(near)}" if near else f"operations: {', '.join(operations)}"
    return f"no case name contains {only!r}; {listed}. Functions aot_cases() in tests/kernels/cases/ define the cases"


def main(words: list[str]) -> int:
    summary, _, text = (__doc__ or "").partition("\n")
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.kernels.aot", None, summary, text, formatter_class=formatter)
    parser.add_argument("only", nargs="?", default="", metavar="PART", help="part of the case names; default: all")
    parser.add_argument("target", nargs="?", type=int, choices=TARGETS, help="compute capability; default: all")
    parser.add_argument(
        "--write", action="store_true", help="merge the results into bench/aot.json; implied without PART"
    )
    chosen = parser.parse_args(words)
    only, target, start = chosen.only, chosen.target, time.monotonic()
    writes = chosen.write or not only

    def report(index: int, number: int, name: str, at: int, result: dict[str, Any]) -> None:
        if only:
            print(f"{index}/{number} {name} @ sm_{at}: {result}", flush=True)
        elif index % 100 == 0:
            print(f"{index} of {number}, {time.monotonic() - start:.0f} s", file=sys.stderr)

    found = check(only, target, rare=not writes, report=report)
    bad, without = errors(found), left_out(only)
    if not found and (nothing := no_case_error(only, target, writes)):
        parser.error(nothing)
    if writes and not bad and not without:
        write(beside_others(found) if only else found)
    for line in [*bad, *(f"left out: {why}" for why in without)]:
        print(line)
    most = max((result.get("registers", 0) for result in found.values()), default=0)
    print(f"{len(found)} compiled, {len(bad)} failed, {most} registers at most, {time.monotonic() - start:.0f} s")
    return 1 if bad or (writes and without) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
