"""The loads of a training job: what its gates chose in each step, on every rank, for `fusedmoe loads --trace`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusedmoe.cli.rundir import RunDir
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.placement.load_trace import LoadTrace

#: Steps between two gatherings. Ranks keep so many steps' counts, and a job that is killed loses as many.
EVERY = 50

#: Bytes that the file may grow to; the steps after that are left out.
MOST_BYTES = 32 * 2**20


class LoadLog:
    """Writes loads.json into a run folder: counts[step][layer][rank][expert].

    A step costs a small copy on this rank's device; ranks exchange counts when a chunk of steps is full, or asked to.

    Args:
        source: what the file says of itself.
        done: steps that a resumed job has behind it. The file goes on after them; where it is of other layers, ranks or
            experts, or lacks some of these steps, it begins anew.
    """

    def __init__(self, folder: RunDir, topology: Topology, source: str, done: int) -> None:
        self._path, self._topology = folder.loads, topology
        self._source = f"{source}, from step {done + 1}" if done else source
        self._earlier = _read(self._path, done) if topology.rank == 0 else None
        self._begun = False
        self._kept: list[Tensor] = []

    def note(self, load_LE: Tensor) -> None:
        """The counts of one step, on this rank; all ranks note all steps. Collective where a chunk is full."""
        self._kept.append(load_LE)
        if len(self._kept) == EVERY:
            self.flush()

    def flush(self) -> None:
        """Writes what is kept; collective."""
        if not self._kept:
            return
        kept_ILE = torch.stack(self._kept).cpu().int().numpy()
        self._kept = []
        found = all_gather_object(self._topology.world, kept_ILE, "gathering expert loads")
        if self._topology.rank == 0:
            self._write(np.stack(found, axis=2).astype(np.int64))

    def _write(self, tokens_ILWE: NDArray[np.int64]) -> None:
        if not self._begun:
            self._begun = True
            earlier = self._earlier
            if earlier is None or earlier.tokens_ILWE.shape[1:] != tokens_ILWE.shape[1:]:
                self._path.write_text(LoadTrace(tokens_ILWE, self._source).to_json(), encoding="utf-8")
                return
            self._path.write_text(earlier.to_json(), encoding="utf-8")
        if self._path.stat().st_size < MOST_BYTES:
            LoadTrace(tokens_ILWE).append_to(self._path)


def _read(path: Path, steps: int) -> LoadTrace | None:
    """The first steps of a file; None where there are none, or not all of them though it has not grown full."""
    if not steps or not path.exists():
        return None
    try:
        trace = LoadTrace.from_json(path.read_text(encoding="utf-8"))
    except ConfigError:  # cut short when its writer was killed
        return None
    if len(trace) < steps and path.stat().st_size < MOST_BYTES:
        return None
    return LoadTrace(trace.tokens_ILWE[:steps], trace.source)
