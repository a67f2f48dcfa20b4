"""Faults of compiled code, as far as they can be seen without a GPU.

Spills, shared memory that a GPU does not have, instructions that are missing, and on Hopper and Blackwell products
that may read shared memory before what asynchronous copies have written there can be seen (`unfenced`).
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

# Shared memory of one block, bytes.
SHARED = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}


def judge(compiled: Any, target: int, expected: Sequence[str] = ()) -> dict[str, Any]:
    """Registers, stack and shared memory of a kernel; "error" where something is wrong.

    Args:
        compiled: a `triton.compiler.CompiledKernel`.
        expected: instructions that its machine code must have.
    """
    cubin = compiled.asm["cubin"]
    found: dict[str, Any] = {**read_usage(cubin), "shared": compiled.metadata.shared}
    # To take machine code apart takes as long as to make it: only where there is something to look for.
    instructions = read_instructions(cubin) if expected else []
    missing = [word for word in expected if word not in instructions]
    if found["stack"] or {"LDL", "STL"} & {*instructions}:
        found["error"] = f"spills: takes {found['stack']} bytes of stack"
    elif found["shared"] > SHARED[target]:
        found["error"] = f"takes {found['shared']} bytes of shared memory"
    elif missing:
        found["error"] = f"has no {', '.join(missing)}"
    elif bad := unfenced(compiled.asm["ptx"]):
        found["error"] = f"has no fence.proxy.async between asynchronous copies and {bad[0]} ({len(bad)} such products)"
    elif "setmaxnreg" in compiled.asm["ptx"] and (slow := slow_loops(_dump(cubin, "--dump-sass"))):
        found["error"] = slow
    return found


def read_usage(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack: what does not fit the registers is kept there."""
    usage = dict(re.findall(r"\b(REG|STACK):(\d+)", _dump(cubin, "--dump-resource-usage")))
    return {"registers": int(usage["REG"]), "stack": int(usage["STACK"])}


def read_instructions(cubin: bytes) -> list[str]:
    """The kinds of instructions that there are."""
    from triton import knobs

    cache = Path(knobs.cache.dir) / "fusedmoe-aot" / f"{hashlib.sha256(cubin).hexdigest()}.json"
    if cache.exists():
        return json.loads(cache.read_text())
    text = _dump(cubin, "--dump-sass")
    found = sorted({*re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", text, re.M)})
    cache.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: a run may be interrupted.
    part = cache.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(found))
    part.replace(cache)
    return found


_MACHINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*?)\s*;", re.M)


def slow_loops(sass: str) -> str:
    """Names what keeps products of Hopper from running on and on, in a kernel whose warps have tasks of their own; ""
    where nothing does.

    In the loops with products, one for each of two groups of warps, the last step's are awaited while this one's run,
    nothing is loaded, and nobody waits for more warps than the group's.
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
                continue  # a first or last step of its own
            loops.add(min(around, key=lambda loop: loop[1] - loop[0]))
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
    """State of a thread's asynchronous copies: whether some may be under way, and whether some that have ended may not
    be visible to products."""

    under_way: bool = False
    unseen: bool = False


_LABEL = re.compile(r"^(\$[\w$]+):")
_INSTRUCTION = re.compile(r"^(@!?[%\w]+\s+)?([a-z][\w.:]*)\s*([^;]*);?")
_PRODUCTS = ("wgmma.mma_async", "tcgen05.mma.")


def unfenced(ptx: str) -> list[str]:
    """The products that may read what asynchronous copies (`cp.async`) have written without a fence in between.

    Every way through the code of a kernel is followed. Ordinary stores are not looked at: which of them a product reads
    cannot be told from the text, and most are for threads. Bulk copies need no fence, they go where products read.
    """
    code = ptx[ptx.index(".entry") :].split("\n.func", 1)[0]
    blocks, order = _blocks(code.splitlines())
    seen = sum(word.startswith(_PRODUCTS) for block in blocks.values() for _, word, _ in block)
    if seen != sum(code.count(word) for word in _PRODUCTS):
        raise ValueError("this PTX has products where they are not looked for")
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
    """Instructions (condition, word, operands) by the label that they follow, and the labels in order."""
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
