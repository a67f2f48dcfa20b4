"""Tokens over the ranks of a model-parallel group: which of them each rank routes, and what all of them get back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fusedmoe.autograd.parallel import join_rows, mean_over, reduce_scatter_rows, split_counts, split_rows, sum_gradient
from fusedmoe.comm.group import Group
from fusedmoe.errors import ConfigError
from fusedmoe.runtime.recorder import Recorder

MpInput = Literal["replicated", "split", "partial"]


class MpTokens:
    """The tokens of an MP group.

    Attributes:
        joint: the ranks pass in the same tokens, or summands of them; each routes a slice, and all get all results.

    Raises:
        ConfigError: an unknown `mp_input`.
    """

    def __init__(self, group: Group, mp_input: MpInput) -> None:
        if mp_input not in ("replicated", "split", "partial"):
            raise ConfigError(f"mp_input = {mp_input!r}; choose replicated, split or partial")
        self.group, self.mp_input = group, mp_input
        self.joint = group.size > 1 and mp_input != "split"

    def counts(self, tokens: int) -> list[int]:
        """Counts the tokens, of those that this rank is given, that each rank routes: those of the first, and so on."""
        return split_counts(tokens, self.group) if self.joint else [tokens]

    def take(self, x_SM: Tensor, counts: Sequence[int], recorder: Recorder | None = None) -> Tensor:
        """The tokens that this rank routes. Collective, where tokens are partial; else its backward is."""
        if not self.joint:
            return x_SM
        return (reduce_scatter_rows if self.mp_input == "partial" else split_rows)(x_SM, self.group, counts, recorder)

    def join(self, y_SM: Tensor, counts: Sequence[int], recorder: Recorder | None = None) -> Tensor:
        """The results of all ranks' tokens. Collective; its backward is not."""
        return join_rows(y_SM, self.group, counts, recorder) if self.joint else y_SM

    def call(self, module: nn.Module, *inputs: Any) -> Any:
        """Calls a module whose parameters all ranks have on the tokens that this rank routes."""
        if not self.joint:
            return module(*inputs)
        parameters = {name: self.whole_gradient(parameter) for name, parameter in module.named_parameters()}
        return torch.func.functional_call(module, parameters, inputs)

    def whole_gradient(self, parameter: Tensor) -> Tensor:
        """Gives each rank the whole gradient, as of all that is replicated over MP."""
        return sum_gradient(parameter, self.group) if self.joint else parameter

    def aux(self, aux: Tensor) -> Tensor:
        """The group's mean of an auxiliary loss, as each rank has to add it to its loss."""
        return aux / self.group.size if self.mp_input == "split" else mean_over(aux, self.group)
