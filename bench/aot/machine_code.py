"""Faults of compiled code that can be detected without a GPU.

Checks for spills, excessive shared memory, missing instructions, and on Hopper and Blackwell for products that may read
shared memory before asynchronous copies to it are visible (`unfenced`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Shared memory per block, in bytes.
SHARED = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}


def judge(compiled: Any, target: int, expected: Sequence[str] = (), unwanted: Sequence[str] = ()) -> dict[str, Any]:
    """Return registers, stack and shared memory of a kernel, and "error" on a fault.

    Args:
        compiled: a `triton.compiler.CompiledKernel`.
        expected: instructions that the machine code must contain, e.g. "HGMMA" or, with modifiers, "STG.E.128".
        unwanted: instructions that it must not contain.
    """
    cubin = compiled.asm["cubin"]
    found: dict[str, Any] = {**read_usage(cubin), "shared": compiled.metadata.shared}
    # Disassembling takes as long as compiling, so only if there are instructions to check.
    instructions = read_instructions(cubin) if expected or unwanted else []
    missing = [word for word in expected if word not in instructions]
    extra = [word for word in unwanted if word in instructions]
    if found["stack"] or {"LDL", "STL"} & {*instructions}:
        found["error"] = f"spills: takes {found['stack']} bytes of stack"
    elif found["shared"] > SHARED[target]:
        found["error"] = f"takes {found['shared']} bytes of shared memory"
    elif missing:
        found["error"] = f"has no {', '.join(missing)}"
    elif extra:
        found["error"] = f"has {', '.join(extra)}"
    elif bad := unfenced(compiled.asm["ptx"]):
        found["error"] = f"has no fence.proxy.async between asynchronous copies and {bad[0]} ({len(bad)} such products)"
    elif "setmaxnreg" in compiled.asm["ptx"] and (slow := slow_loops(_dump(cubin, "--dump-sass"))):
        found["error"] = slow
    return found


def read_usage(cubin: bytes) -> dict[str, int]:
    """Return registers per thread and stack bytes, which hold spilled registers."""
    usage = dict(re.findall(r"\b(REG|STACK):(\d+)", _dump(cubin, "--dump-resource-usage")))
    return {"registers": int(usage["REG"]), "stack": int(usage["STACK"])}


def read_instructions(cubin: bytes) -> list[str]:
    """Return the kinds of instructions in the machine code, each with and without its modifiers."""
    from triton import knobs

    cache = Path(knobs.cache.dir) / "fusedmoe-aot-modifiers" / f"{hashlib.sha256(cubin).hexdigest()}.json"
    if cache.exists():
        return json.loads(cache.read_text())
    text = _dump(cubin, "--dump-sass")
    whole = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", text, re.M)
    found = sorted({*whole, *(word.partition(".")[0] for word in whole)})
    cache.parent.mkdir(parents=True, exist_ok=True)
    # Atomic: a run may be interrupted.
    part = cache.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(found))
    part.replace(cache)
    return found


_MACHINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*?)\s*;", re.M)


def slow_loops(sass: str) -> str:
    """Return what prevents Hopper's products from running back to back in a warp-specialised kernel, or "".

    In the product loops, one per warp group, the previous step's products are awaited while the current ones run,
    nothing is loaded, and no barrier includes more warps than the group's. A kernel without products has no such loops.
    """
    code = [(int(place, 16), text) for place, text in _MACHINE.findall(sass)]
    jumps = [
        (int(to[1], 16), place) for place, text in code if (to := re.match(r"BRA\S*\s+(?:!?U?P\w+, )?0x(\w+)", text))
    ]
    loops = set()
    for place, text in code:
        if text.startswith("HGMMA"):
            around = [(start, end) for start, end in jumps if start <= place <= end]
            if not around:
                continue  # a peeled first or last step
            loops.add(min(around, key=lambda loop: loop[1] - loop[0]))
    if not any(text.startswith("HGMMA") for _, text in code):
        return ""
    if len(loops) < 2:
        return f"has {len(loops)} loops with products, not one for each group of warps"
    for start, end in loops:
        body = [text for place, text in code if start <= place <= end]
        waits = [text for text in body if text.startswith("WARPGROUP.DEPBAR")]
        loads = [text for text in body if text.startswith(("LDG", "UTMALDG"))]
        barriers = [text for text in body if text.startswith("BAR.") and not text.endswith(", 0x80")]
        if not waits or any(not text.endswith(", 0x1") for text in waits):
            return f"waits for all products at each step: {', '.join(waits) or 'no wait'}"
        if loads or barriers:
            return f"has {(loads + barriers)[0]} between its products"
    return ""


def _dump(cubin: bytes, what: str) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = [knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(tool, check=True, capture_output=True, text=True).stdout


class _State(NamedTuple):
    """State of a thread: asynchronous copies in flight, or completed ones that may be invisible to products."""

    under_way: bool = False
    unseen: bool = False


_LABEL = re.compile(r"^(\$[\w$]+):")
_INSTRUCTION = re.compile(r"^(@!?[%\w]+\s+)?([a-z][\w.:]*)\s*([^;]*);?")
_PRODUCTS = ("wgmma.mma_async", "tcgen05.mma.")


def unfenced(ptx: str) -> list[str]:
    """Return the products that may read data of asynchronous copies (`cp.async`) without a fence in between.

    Follows every control-flow path of a kernel. Ordinary stores are ignored: the text does not show which product reads
    them, and most are for threads. Bulk copies need no fence, since they use the proxy that products read from.
    """
    code = ptx[ptx.index(".entry") :].split("\n.func", 1)[0]
    blocks, order = _blocks(code.splitlines())
    seen = sum(word.startswith(_PRODUCTS) for block in blocks.values() for _, word, _ in block)
    if seen != sum(code.count(word) for word in _PRODUCTS):
        raise ValueError("this PTX has products in unexpected places")
    at: dict[str, _State] = {order[0]: _State()}
    todo, bad = [order[0]], {}
    while todo:
        name = todo.pop()
        state, following = at[name], order[order.index(name) + 1 : order.index(name) + 2]
        for place, (condition, word, rest) in enumerate(blocks[name]):
            if word.startswith(_PRODUCTS):
                if state.unseen:
                    bad[name, place] = f"{word} in {name}"
            elif word.startswith(("bra", "brx")):
                for label in re.findall(r"\$[\w$]+", rest):
                    _join(at, todo, label, state)
                if not condition:
                    following = []
                    break
            elif word in ("ret", "exit", "trap") and not condition:
                following = []
                break
            else:
                state = _after(state, word, rest)
        for label in following:
            _join(at, todo, label, state)
    return [bad[where] for where in sorted(bad, key=lambda where: (order.index(where[0]), where[1]))]


def _blocks(lines: list[str]) -> tuple[dict[str, list[tuple[str, str, str]]], list[str]]:
    """Return the instructions (condition, opcode, operands) by preceding label, and the labels in order."""
    blocks: dict[str, list[tuple[str, str, str]]] = {"the beginning": []}
    name = "the beginning"
    for line in lines:
        line = line.strip()
        if label := _LABEL.match(line):
            name = label[1]
            blocks[name] = []
        elif found := _INSTRUCTION.match(line):
            blocks[name].append((found[1] or "", found[2], found[3]))
    return blocks, list(blocks)


def _after(state: _State, word: str, rest: str) -> _State:
    if word.startswith(("cp.async.ca.", "cp.async.cg.")):
        return state._replace(under_way=True)
    if word.startswith("cp.async.wait_") and state.under_way:
        return _State(word.startswith("cp.async.wait_group") and int(rest, 0) > 0, True)
    if word.startswith("fence.proxy.async"):
        return state._replace(unseen=False)
    return state


def _join(at: dict[str, _State], todo: list[str], label: str, state: _State) -> None:
    before = at.get(label)
    after = state if before is None else _State(before.under_way or state.under_way, before.unseen or state.unseen)
    if after != before:
        at[label] = after
        todo.append(label)
