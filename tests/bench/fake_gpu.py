"""A pytest plugin that makes the GPU benchmarks run on a CPU, at tiny shapes, with a clock that only pretends."""

from __future__ import annotations

import os
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from bench.gpu import case, device, shapes
from bench.gpu.case import Case
from bench.gpu.shapes import Shape
from tests.bench.fakes import TINY, FakeClock

shapes.SHAPES = TINY  # before it is imported from there
device.has_gpu = lambda: True
torch.cuda.synchronize = lambda device=None: None
_make_case = case.make_case
_earlier: list[weakref.ref[Case]] = []


def _only_case(shape: Shape, device: torch.device) -> Case:
    """The largest shapes fit a GPU only if nothing of the one before is left."""
    assert [ref() for ref in _earlier if ref() is not None] == []
    made = _make_case(shape, device)
    _earlier.append(weakref.ref(made))
    return made


case.make_case = _only_case

from bench.gpu import reference, session  # noqa: E402
from bench.gpu.layer import Layer  # noqa: E402
from bench.gpu.peers import PEERS, torch_grouped  # noqa: E402
from bench.gpu.spool import Spool  # noqa: E402


def _open(spool_file: Path | None, seconds: float) -> session.Session:
    return session.Session(torch.device("cpu"), FakeClock(2.0, 3.0, 5.0), Spool(spool_file), seconds)


def _sleep(case: Case) -> Layer:
    """A peer that hangs at the second shape."""
    if case.shape == TINY[1]:
        time.sleep(600)
    return replace(torch_grouped.make(case), name="liger_kernel")


def _fail(case: Case, dtype: torch.dtype) -> reference.Reference:
    if case.shape == TINY[0]:
        raise RuntimeError("out of memory")
    return _make_reference(case, dtype)


_make_reference = reference.make_reference
if "FAKE_FAILURE" in os.environ:
    reference.make_reference = _fail
session.open_session = _open
session.measure_ceilings = partial(session.measure_ceilings, size=64, copied_bytes=4096)
if "FAKE_SLEEPER" in os.environ:
    PEERS["liger_kernel"] = _sleep
