"""Compiles every Triton and Gluon kernel in every configuration ahead of time, for GPUs that need not be there.

    python -m tests.kernels.aot                 # all but the rare ones, and writes bench/aot.json: a quarter of an hour
    python -m tests.kernels.aot gather_sum 90   # those whose name contains the first word, for one target
    python -m tests.kernels.aot --write nvshmem # those whose name contains the word, and writes them beside the others

To have a kernel checked add it to a function `aot_cases()` of a module in tests/kernels/cases/, which says what a case
is. Modules there are found by themselves.

A case fails if it does not compile, spills registers (takes memory for a stack), takes more shared memory than the GPU
has, or lacks an instruction it is expected to have. Compiled kernels are kept in Triton's cache, and so is what was
read from them: a run that was interrupted goes on where it was.

Cases that are linked with a library which is not installed are left out, and said to be; the whole record cannot be
written without them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from bench.aot.compiling import WITHOUT_LINES, processes
from bench.aot.machine_code import judge
from bench.aot.standin import driving
from fusedmoe.errors import ConfigError
from tests.kernels.cases import AotCase

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "bench" / "aot.json"
# What the record has of a case and target.
COLUMNS = ("registers", "stack", "shared")

Found = dict[tuple[str, int], dict[str, Any]]


def modules() -> Iterator[ModuleType]:
    """Those with cases."""
    import tests.kernels.cases as package

    for info in iter_modules(package.__path__, f"{package.__name__}."):
        yield import_module(info.name)


def cases() -> list[tuple[str, AotCase]]:
    """(module, case) of everything there is."""
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
    """Why the case cannot be linked here; "" where it can."""
    try:
        case.libraries()
    except ConfigError as error:
        return f"{case.name}: {error}"
    return ""


def left_out(only: str = "", module: str = "") -> list[str]:
    """Why cases are left out here, of those in question."""
    found = (absent(case) for found_in, case in cases() if only in case.name and module in ("", found_in))
    return [why for why in found if why]


def check(
    only: str = "",
    target: int | None = None,
    quick: bool = False,
    rare: bool = False,
    module: str = "",
    part: slice = slice(None),
    progress: bool = False,
) -> Found:
    """(case, target) -> what was found; "error" where it failed.

    Args:
        only: a part of the names.
        quick: the small selection alone; rare: those cases too that are compiled where they are asked for by name.
        part: of all these, in their order.
        progress: tell on stderr how far it is.
    """
    tasks = [
        (found_in, case.name, at)
        for found_in, case in cases()
        for at in case.targets
        if only in case.name and target in (None, at) and module in ("", found_in)
        if (case.quick or not quick) and (rare or not case.rare) and not absent(case)
    ]
    tasks = tasks[part]
    found, start = {}, time.monotonic()
    with processes(environment=WITHOUT_LINES) as pool:
        for (_, name, at), result in zip(tasks, pool.map(compile_case, tasks, chunksize=4), strict=True):
            found[name, at] = result
            if progress and len(found) % 100 == 0:
                print(f"{len(found)} of {len(tasks)}, {time.monotonic() - start:.0f} s", file=sys.stderr)
    return found


def errors(found: Found) -> list[str]:
    return [f"{name} @ sm_{at}: {result['error']}" for (name, at), result in found.items() if "error" in result]


@cache
def _cases_of(module: str) -> dict[str, AotCase]:
    return {case.name: case for case in import_module(module).aot_cases()}


def compile_case(task: tuple[str, str, int]) -> dict[str, Any]:
    """What is found of one case, (module, name, target)."""
    from triton.backends.compiler import GPUTarget

    module, name, target = task
    case = _cases_of(module)[name]
    try:
        options = {**case.options, "extern_libs": dict(case.libraries())}
        with driving(target):
            case.kernel.create_binder()  # so that it compiles as it does for launches, Gluon as Gluon
            source = case.kernel.ASTSource(case.kernel, *case.specialise())
            compiled = case.kernel.compile(source, target=GPUTarget("cuda", target, 32), options=options)
        return judge(compiled, target, case.expect.get(target, ()))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[-2000:]}"}


def write(found: Found) -> None:
    """bench/aot.json, one line a case, so that two versions can be compared."""
    import triton

    by_name: dict[str, dict[str, list[int]]] = {}
    for (name, at), result in found.items():
        by_name.setdefault(name, {})[f"sm_{at}"] = [result[column] for column in COLUMNS]
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(targets)}" for name, targets in sorted(by_name.items()))
    head = f'  "triton": "{triton.__version__}",\n  "columns": {json.dumps(COLUMNS)},\n'
    RECORD.write_text(f'{{\n{head}  "cases": {{\n{lines}\n  }}\n}}\n')


def recorded() -> tuple[str, Found]:
    """Triton's version, and what bench/aot.json knows."""
    record = json.loads(RECORD.read_text())
    found = {
        (name, int(target.removeprefix("sm_"))): dict(zip(record["columns"], values, strict=True))
        for name, targets in record["cases"].items()
        for target, values in targets.items()
    }
    return record["triton"], found


def beside_others(found: Found) -> Found:
    """What was found, and of the other cases that there are what bench/aot.json knows.

    Raises:
        ValueError: the record was made by another Triton, so that only a whole one can be written.
    """
    import triton

    version, record = recorded()
    if version != triton.__version__:
        raise ValueError(f"the record is of Triton {version}, this is {triton.__version__}: write all of it")
    known = in_question()
    return {at: result for at, result in {**record, **found}.items() if at in known}


def missing(record: Found) -> list[tuple[str, int]]:
    """What can be compiled and is not in the record."""
    return [at for at in in_question() if at not in record]


def in_question() -> dict[tuple[str, int], None]:
    """What the record is of: (case, target) of all that are not rare."""
    return {(case.name, at): None for _, case in cases() if not case.rare for at in case.targets}


def main() -> int:
    words, start = sys.argv[1:], time.monotonic()
    writes = not words or words[0] == "--write"
    words = [word for word in words if word != "--write"]
    only, target = words[0] if words else "", int(words[1]) if len(words) > 1 else None
    found = check(only, target, rare=bool(words) and not writes, progress=not words)
    bad, without = errors(found), left_out(only)
    if words:
        for (name, at), result in found.items():
            print(f"{name} @ sm_{at}: {result}")
    if writes and not bad and not without:
        write(beside_others(found) if words else found)
    print(*bad, *(f"left out: {why}" for why in without), sep="\n")
    most = max((result.get("registers", 0) for result in found.values()), default=0)
    print(f"{len(found)} compiled, {len(bad)} failed, {most} registers at most, {time.monotonic() - start:.0f} s")
    return 1 if bad or (writes and without) else 0


if __name__ == "__main__":
    sys.exit(main())
