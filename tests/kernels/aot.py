"""Compiles every Triton kernel in every configuration ahead of time, for GPUs that need not be there.

    python -m tests.kernels.aot                 # all cases, and writes bench/aot.json
    python -m tests.kernels.aot gather_sum 90   # those whose name contains the first word, for one target

To have a kernel checked give its module a function `aot_cases()`; fusedmoe/kernels/aot.py says what a case is. Modules
of fusedmoe.kernels are found by themselves.

A case fails if it does not compile, spills registers (stack, or loads and stores of local memory), takes more shared
memory than the GPU has, or lacks an instruction it is expected to have. Compiled kernels are kept in Triton's cache,
and so is what was read from them: a second run takes seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from pkgutil import walk_packages
from types import ModuleType
from typing import Any

from fusedmoe.kernels.aot import AotCase

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "bench" / "aot.json"
# Shared memory of one block, bytes.
SHARED = {80: 166_912, 90: 232_448, 100: 232_448}
PROCESSES = 2


def modules() -> Iterator[ModuleType]:
    import fusedmoe.kernels as package

    for info in walk_packages(package.__path__, f"{package.__name__}."):
        module = import_module(info.name)
        if hasattr(module, "aot_cases"):
            yield module


def cases() -> list[tuple[str, AotCase]]:
    """(module, case) of everything there is."""
    found = [(module.__name__, case) for module in modules() for case in module.aot_cases()]
    names = [case.name for _, case in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"several cases have the name {', '.join(sorted(twice))}")
    return found


def check(
    only: str = "", target: int | None = None, quick: bool = False, module: str = ""
) -> dict[str, dict[str, Any]]:
    """Name of case and target, e.g. "gather_sum bf16 K=8 @ sm_90" -> what was found; "error" where it failed."""
    tasks = [
        (found_in, case.name, at)
        for found_in, case in cases()
        for at in case.targets
        if only in case.name and target in (None, at) and (case.quick or not quick) and module in ("", found_in)
    ]
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        # A process that is to compile must not have interpreted kernels.
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = "0"
        try:
            found = list(pool.map(_compile, tasks, chunksize=4))
        finally:
            if before is None:
                del os.environ["TRITON_INTERPRET"]
            else:
                os.environ["TRITON_INTERPRET"] = before
    return {f"{name} @ sm_{at}": result for (_, name, at), result in zip(tasks, found, strict=True)}


def errors(found: dict[str, dict[str, Any]]) -> list[str]:
    return [f"{name}: {result['error']}" for name, result in found.items() if "error" in result]


def _compile(task: tuple[str, str, int]) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget

    module, name, target = task
    (case,) = (case for case in import_module(module).aot_cases() if case.name == name)
    try:
        source = triton.compiler.ASTSource(case.kernel, *case.specialise())
        compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=dict(case.options))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[-2000:]}"}
    found = {**_read(compiled.asm["cubin"]), "shared": compiled.metadata.shared}
    instructions = found.pop("instructions")
    missing = [word for word in case.expect.get(target, ()) if word not in instructions]
    if found["stack"] > case.spill_bytes or (found["local"] and not case.spill_bytes):
        found["error"] = f"spills: {found['stack']} bytes of stack, {found['local']} loads and stores"
    elif found["shared"] > SHARED[target]:
        found["error"] = f"takes {found['shared']} bytes of shared memory"
    elif missing:
        found["error"] = f"has no {', '.join(missing)}"
    return found


def _read(cubin: bytes) -> dict[str, Any]:
    """Registers, stack bytes, local memory accesses and the kinds of instructions of a kernel."""
    from triton import knobs

    cache = Path(knobs.cache.dir) / "fusedmoe-aot" / f"{hashlib.sha256(cubin).hexdigest()}.json"
    if cache.exists():
        return json.loads(cache.read_text())
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", "--dump-sass", file.name]
        text = subprocess.run(tool, check=True, capture_output=True, text=True).stdout
    usage = dict(re.findall(r"\b(REG|STACK):(\d+)", text))
    operations = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", text, re.M)
    local = sum(operation in ("LDL", "STL") for operation in operations)
    found = {"registers": int(usage["REG"]), "stack": int(usage["STACK"]), "local": local}
    found["instructions"] = sorted(set(operations))
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps(found))
    return found


def write(found: dict[str, dict[str, Any]]) -> None:
    """bench/aot.json, one line a case, so that two versions can be compared."""
    import triton

    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(result)}" for name, result in sorted(found.items()))
    REPORT.write_text(f'{{\n  "triton": "{triton.__version__}",\n  "cases": {{\n{lines}\n  }}\n}}\n')


def main() -> int:
    words = sys.argv[1:]
    found = check(words[0] if words else "", int(words[1]) if len(words) > 1 else None)
    for name, result in found.items():
        print(f"{name:70} {result}")
    if not words:
        write(found)
    bad = errors(found)
    print(*bad, f"{len(found)} compiled, {len(bad)} failed", sep="\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
