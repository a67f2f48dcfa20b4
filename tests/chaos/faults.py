"""The faults, and their places: the n-th call of a function of the package or of PyTorch within some place.

Python calls a profile function at each call. A place covers the calls of its own functions and of their callees; a
fault is injected at one of these calls, on one rank. Neither the package nor a rank's memory is modified, so a rank
without a fault runs as in a user's job.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

WORDS = "chaos has struck"

# Path fragments whose calls count.
_WATCHED = ("/fusedmoe/", "/torch/distributed/", "/torch/optim/")


class Place(NamedTuple):
    """Functions: (end of a path or a folder in it, name; "" for all). `backward`: only in one pass; None: in any."""

    functions: tuple[tuple[str, str], ...]
    backward: bool | None = None


def _both(**functions: tuple[tuple[str, str], ...]) -> dict[str, Place]:
    return {
        f"{name.replace('_', '-')} {phase}": Place(of, phase == "backward")
        for name, of in functions.items()
        for phase in ("forward", "backward")
    }


PLACES: dict[str, Place] = {
    "topology": Place((("comm/topology.py", "from_sizes"),)),
    "layer": Place((("layers/moe.py", "__init__"), ("blocks/pipeline.py", "__init__"))),
    **_both(
        gate=(("gates/", ""), ("autograd/gate.py", ""), ("kernels/gate.py", ""), ("layers/input_checks.py", "")),
        dispatch=(("comm/exchange.py", "dispatch"), ("comm/exchange.py", "all_gather")),
        experts=(("engine/chunk_experts.py", ""), ("kernels/experts.py", ""), ("autograd/experts.py", "")),
        combine=(("comm/exchange.py", "combine"), ("comm/exchange.py", "reduce_scatter")),
    ),
    "counts": Place((("comm/exchange.py", "exchange_metadata"),)),
    "gradient sync": Place(
        (
            ("training/data_parallel.py", "sync_gradients"),
            ("training/data_parallel.py", "_finish_backward"),
            ("training/gradient_buckets.py", ""),
        )
    ),
    "clip": Place((("training/grad_norm.py", "clip_grad_norm"),)),
    "optimizer": Place((("torch/optim/", ""),)),
    "save": Place((("training/checkpoint.py", "save_checkpoint"),)),
    "load": Place((("training/checkpoint.py", "load_checkpoint"),)),
    "survival": Place((("training/survival/", ""),)),
    "blocks": Place((("blocks/pipeline.py", ""), ("blocks/forward.py", ""), ("blocks/backward.py", ""))),
    "functions": Place((("autograd/moves.py", ""), ("comm/all_to_all.py", "make_all_to_all"))),
    "tutel": Place((("tutel/", ""),)),
    "integrations": Place(
        (
            ("fusedmoe/hf/", ""),
            ("fusedmoe/titan.py", ""),
            ("fusedmoe/megatron.py", ""),
            ("layers/scheduled_exchange.py", ""),
        )
    ),
    "graph": Place((("/graph/", ""), ("autograd/exchange_operators.py", ""))),
    "tuning": Place((("layers/measure.py", ""), ("layers/schedule.py", ""), ("runtime/profiler.py", ""))),
    "profile": Place((("runtime/cache.py", "cached_profile"),)),
    "plan": Place((("training/step_plan.py", "plan_step"),)),
    "one-sided": Place((("comm/one_sided/", ""),)),
    "copies": Place(
        (("placement/placed_experts.py", ""), ("placement/replicas.py", ""), ("placement/expert_transport.py", ""))
    ),
    "re-sharding": Place((("placement/sharded_experts.py", ""), ("placement/resharding.py", ""))),
    "waiting": Place((("comm/collectives.py", "wait"),)),
}


class Watcher:
    """Count the calls in some places on this rank, and act at one of them."""

    def __init__(
        self, places: dict[str, Place], act_at: tuple[str, int] | None = None, act: Callable[[], None] = id
    ) -> None:
        self.calls: Counter[str] = Counter()
        self._places, self._act_at, self._act = places, act_at, act
        self._of_code: dict[CodeType, tuple[bool, tuple[str, ...]]] = {}
        self._local = threading.local()
        self._acted = False

    @contextmanager
    def __call__(self) -> Iterator[Watcher]:
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        try:
            yield self
        finally:
            self._stop()

    def _stop(self) -> None:
        self._acted = True
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._acted:
            sys.setprofile(None)
            return
        # Keyed by the frame's id: a reference to the frame would keep its locals alive.
        inside: dict[str, int] = self._local.__dict__.setdefault("inside", {})
        if event == "return":
            for name in [name for name, root in inside.items() if root == id(frame)]:
                del inside[name]
        if event != "call":
            return
        known = self._of_code.get(frame.f_code)
        if known is None:
            known = self._of_code[frame.f_code] = self._places_of(frame.f_code)
        counts, begins = known
        for name in begins:
            backward = self._places[name].backward
            if name not in inside and backward in (None, torch._C._current_graph_task_id() >= 0):
                inside[name] = id(frame)
        if counts:
            for name in inside:
                self.calls[name] += 1
                if self._act_at == (name, self.calls[name]):
                    self._stop()
                    self._act()

    def _places_of(self, code: CodeType) -> tuple[bool, tuple[str, ...]]:
        path, name = code.co_filename, code.co_name
        found = [
            place
            for place, (functions, _) in self._places.items()
            if any(
                (path.endswith(at) if at.endswith(".py") else at in path) and of in ("", name) for at, of in functions
            )
        ]
        return any(part in path for part in _WATCHED), tuple(found)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _slow() -> None:
    time.sleep(0.4)


def _late(timeout_s: float = 2.5) -> None:
    time.sleep(timeout_s + 1.5)


def _raise() -> None:
    raise ValueError(WORDS)


def _interrupt() -> None:
    raise KeyboardInterrupt(WORDS)


def _exit() -> None:
    raise SystemExit(3)


def _no_memory() -> None:
    raise MemoryError(WORDS)


def _limit_memory() -> None:
    """Limit the address space to the currently reserved memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))


def _signal_twice() -> None:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Fault(NamedTuple):
    """A fault at a place.

    Attributes:
        ends: the process dies, or the watcher ends it.   harmless: the result must be right.
        share: of the campaign; slow faults are rare.   kind: the kind of jobs whose input carries the fault.
    """

    act: Callable[[], None]
    ends: bool = False
    harmless: bool = False
    share: float = 1.0
    kind: str = "train"


AT_PLACES: dict[str, Fault] = {
    "kill": Fault(_kill, ends=True),
    "exit": Fault(_exit, ends=True),
    "terminate": Fault(_terminate, ends=True, share=0.5),
    "stop": Fault(_stop, ends=True, share=0.3),
    "pause": Fault(_stop, harmless=True, share=0.5),
    "slow": Fault(_slow, harmless=True, share=0.5),
    "late": Fault(_late, share=0.2),
    "raise": Fault(_raise),
    "interrupt": Fault(_interrupt, share=0.5),
    "no memory": Fault(_no_memory),
    "memory limit": Fault(_limit_memory, share=0.5),
    "signals": Fault(_signal_twice, harmless=True, share=0.5),
    "signals, unhandled": Fault(_signal_twice, share=0.5),
}

#: Wrong or unusual input of one rank. "… , caught": a rank that catches the error continues with the next batch.
OF_INPUT: dict[str, Fault] = {
    "nan": Fault(id, share=0.5),
    "shape": Fault(id, share=0.5),
    "dtype": Fault(id, share=0.5),
    "order": Fault(id, share=0.8),
    "path": Fault(id, share=0.3, kind="checkpoint"),
    "nan, caught": Fault(id, harmless=True, share=0.3),
    "shape, caught": Fault(id, harmless=True, share=0.3),
    "dtype, caught": Fault(id, harmless=True, share=0.3),
    "part": Fault(id, share=0.4),
    "frozen": Fault(id, share=0.4),
    "averager": Fault(id, share=0.4),
    "hook": Fault(id, share=0.4),
    "default device": Fault(id, harmless=True, share=0.4),
    "seed": Fault(id, harmless=True, share=0.5),
    "empty": Fault(id, harmless=True, share=0.5),
    "skew": Fault(id, harmless=True, share=0.5),
}

#: A rank sends wrong metadata about its tokens (`tests.chaos.lies`).
OF_MESSAGES: dict[str, Fault] = {
    name: Fault(id, share=0.4)
    for name in (
        "wrong codes",
        "wrong pairs",
        "wrong tokens",
        "wrong table",
        "wrong form",
        "wrong message",
        "wrong rows",
    )
}
OF_INPUT |= OF_MESSAGES

FAULTS = AT_PLACES | OF_INPUT
