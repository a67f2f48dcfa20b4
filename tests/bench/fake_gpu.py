"""A pytest plugin: the pretended GPU, on which a peer hangs or a shape fails, as the environment asks for."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import torch

from bench.gpu import pretend as pretend  # first: it replaces what others import
from bench.gpu import reference
from bench.gpu.case import Case
from bench.gpu.layer import Layer
from bench.gpu.peers import PEERS, torch_grouped
from bench.gpu.rehearsal import TINY


def _sleep(case: Case) -> Layer:
    """A peer that hangs at the second shape."""
    if case.shape == TINY[1]:
        time.sleep(600)
    return replace(torch_grouped.make(case), name="liger_kernel")


def _fail(case: Case, dtype: torch.dtype) -> reference.Reference:
    if case.shape == TINY[0]:
        raise RuntimeError("out of memory")
    return _make_reference(case, dtype)


def _hang(case: Case, dtype: torch.dtype) -> reference.Reference:
    """The first shape hangs for as long as the file of that name is not there."""
    marker = os.environ["FAKE_HANG"]
    if case.shape == TINY[0] and not os.path.exists(marker):
        open(marker, "w").close()
        time.sleep(600)
    return _make_reference(case, dtype)


_make_reference = reference.make_reference
if "FAKE_FAILURE" in os.environ:
    reference.make_reference = _fail
if "FAKE_HANG" in os.environ:
    reference.make_reference = _hang
if "FAKE_SLEEPER" in os.environ:
    PEERS["liger_kernel"] = _sleep
