"""A pytest plugin that fakes a GPU, with a peer that ends its process at the second shape."""

from __future__ import annotations

import os
from dataclasses import replace

from bench.gpu import pretend as pretend  # first: it replaces modules that later imports bind
from bench.gpu.case import Case
from bench.gpu.layer import Layer
from bench.gpu.peers import PEERS, torch_grouped
from bench.gpu.rehearsal import TINY


def _deadly(case: Case) -> Layer:
    if case.shape == TINY[1]:
        os._exit(9)
    return replace(torch_grouped.make(case), name="liger_kernel")


PEERS["liger_kernel"] = _deadly
