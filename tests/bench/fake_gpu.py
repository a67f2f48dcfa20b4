"""A pytest plugin: the pretended GPU, on which a peer or a shape costs the process, or a shape fails, as asked for."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from bench.gpu import pretend as pretend  # first: it replaces what others import
from bench.gpu import reference
from bench.gpu.case import Case
from bench.gpu.layer import Layer
from bench.gpu.peers import PEERS, torch_grouped
from bench.gpu.rehearsal import TINY


def _deadly(case: Case) -> Layer:
    """A peer that ends its process at the second shape."""
    if case.shape == TINY[1]:
        os._exit(9)
    return replace(torch_grouped.make(case), name="liger_kernel")


def _fail(case: Case, dtype: torch.dtype) -> reference.Reference:
    if case.shape == TINY[0]:
        raise RuntimeError("out of memory")
    return _make_reference(case, dtype)


def _die_once(case: Case, dtype: torch.dtype) -> reference.Reference:
    """The first shape ends its process for as long as the file of that name is not there."""
    marker = Path(os.environ["FAKE_DEATH"])
    if case.shape == TINY[0] and not marker.exists():
        marker.touch()
        os._exit(9)
    return _make_reference(case, dtype)


_make_reference = reference.make_reference
if "FAKE_FAILURE" in os.environ:
    reference.make_reference = _fail
if "FAKE_DEATH" in os.environ:
    reference.make_reference = _die_once
if "FAKE_PEER" in os.environ:
    PEERS["liger_kernel"] = _deadly
