"""Selective activation checkpointing in which this library's exchanges run once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.distributed import activation_checkpoint

from fusedmoe.training.activation_checkpoint import KEPT


class SelectiveAC(activation_checkpoint.SelectiveAC):
    """Torchtitan's policy, which saves what travelled, too (`fusedmoe.training.save_communication`).

    A block that backward computes again takes the rows, and the numbers of rows, that came the first time. What the
    experts computed is computed again.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(activation_checkpoint.SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() | KEPT
