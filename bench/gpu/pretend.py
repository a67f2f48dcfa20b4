"""Pytest plugin that runs the GPU benchmarks on a CPU, at tiny shapes, with a fake clock."""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path

import torch

from bench.gpu import case, device, shapes
from bench.gpu.case import Case
from bench.gpu.rehearsal import TINY, FakeClock
from bench.gpu.shapes import Shape

shapes.SHAPES = TINY  # before other modules import it
device.has_gpu = lambda: True
torch.cuda.synchronize = lambda device=None: None
_make_case = case.make_case
_earlier: list[weakref.ref[Case]] = []


def _only_case(shape: Shape, device: torch.device) -> Case:
    """Create a case after freeing the previous one: the largest shapes fill a GPU."""
    assert [ref() for ref in _earlier if ref() is not None] == []
    made = _make_case(shape, device)
    _earlier.append(weakref.ref(made))
    return made


case.make_case = _only_case

from bench.gpu import session  # noqa: E402
from bench.gpu.spool import Spool  # noqa: E402


def _open(spool_file: Path | None, seconds: float) -> session.Session:
    return session.Session(torch.device("cpu"), FakeClock(2.0, 3.0, 5.0), Spool(spool_file), seconds)


session.open_session = _open
session.measure_ceilings = partial(session.measure_ceilings, size=64, copied_bytes=4096)
