"""Experts of transformers' models whose frozen matrices are stored in 4 or 8 bits: one expert's at a time are made.

Known are parameters that bitsandbytes has packed (`replace_parameter_4bit`: a parametrisation, whose parameter's every
read would make all of them), and tensors of torchao's weight-only quantisation (int8, float8).
"""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fusedmoe.errors import ConfigError

_PACKED = "Bnb4bitParametrization"


class QuantisedMatrices:
    """Matrices [E, out, in] that are stored in fewer bits.

    Attributes:
        shape, dtype, device: of the whole, as if it were a tensor; the dtype is that in which matrices are made.
        requires_grad: never.
    """

    requires_grad = False

    def __init__(self, shape: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device

    def dim(self) -> int:
        return len(self.shape)

    def to(self, dtype: torch.dtype) -> QuantisedMatrices:
        """Returns the same matrices, made in another dtype."""
        return _Converted(self, dtype)

    def __getitem__(self, expert: int) -> Tensor:
        """Returns [out, in] of an expert."""
        raise NotImplementedError


class _Converted(QuantisedMatrices):
    def __init__(self, stored: QuantisedMatrices, dtype: torch.dtype) -> None:
        super().__init__(stored.shape, dtype, stored.device)
        self._stored = stored

    def __getitem__(self, expert: int) -> Tensor:
        return self._stored[expert].to(self.dtype)


class _FourBits(QuantisedMatrices):
    """Matrices packed by bitsandbytes: two numbers in a byte, with a scale for each block of them, experts in turn."""

    def __init__(self, name: str, packed: Tensor, state: Any) -> None:
        super().__init__(state.shape, state.dtype, packed.device)
        self._numbers = self.shape[1:].numel() if self.dim() == 3 else 1
        if self.dim() != 3 or self._numbers % state.blocksize:
            raise ConfigError(
                f"fusedmoe.hf: {name} is packed by bitsandbytes in blocks of {state.blocksize}, which do not end where "
                f"experts of shape {list(self.shape[1:])} do, so that none can be unpacked alone; choose a blocksize "
                "that divides their numbers, or another experts_implementation"
            )
        self._functional: Any = import_module("bitsandbytes.functional")
        self._state, self._packed = state, packed.view(-1)

    @cached_property
    def _scales(self) -> Tensor:
        scales: Tensor = self._state.absmax
        # Scales that are packed themselves are few: one for each block.
        if self._state.nested:
            scales = self._functional.dequantize_blockwise(scales, self._state.state2) + self._state.offset
        return scales.float()

    def __getitem__(self, expert: int) -> Tensor:
        state, numbers = self._state, self._numbers
        blocks = numbers // state.blocksize
        # As a row: on CPUs bitsandbytes 0.50 unpacks matrices with fewer columns than a block has numbers wrongly.
        own = self._functional.QuantState(
            self._scales[expert * blocks : (expert + 1) * blocks], shape=torch.Size([numbers]), code=state.code,
            blocksize=state.blocksize, quant_type=state.quant_type, dtype=state.dtype,
        )  # fmt: skip
        packed = self._packed[expert * numbers // 2 : (expert + 1) * numbers // 2].view(-1, 1)
        matrix: Tensor = self._functional.dequantize_4bit(packed, own).view(self.shape[1:])
        return matrix


class _Sliced(QuantisedMatrices):
    """A quantised tensor of torchao, which knows how to give a slice."""

    _known: ClassVar[set[type]] = set()  # kinds of which a slice was made once

    def __init__(self, name: str, tensor: Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype, tensor.device)
        try:
            if type(tensor) not in self._known:
                tensor[0].dequantize()
                self._known.add(type(tensor))
        # Kinds that are packed over experts, and those that nobody has taught slices.
        except Exception as error:
            raise ConfigError(
                f"fusedmoe.hf: {name} is a {type(tensor).__name__} of torchao, which gives no expert alone "
                f"({type(error).__name__}: {error}); quantise to int8 or float8, weight only, or choose another "
                "experts_implementation"
            ) from error
        self._tensor = tensor

    def __getitem__(self, expert: int) -> Tensor:
        return self._tensor[expert].dequantize()


def quantised(experts: Any, name: str) -> QuantisedMatrices | None:
    """Returns a parameter of experts that is stored in fewer bits; None for others. Reads no parametrised one.

    Raises:
        ConfigError: a parameter of which no expert can be made alone.
    """
    who = f"{type(experts).__name__}.{name}"
    if not parametrize.is_parametrized(experts, name):
        tensor: Any = getattr(experts, name, None)
        # First, for compilers know these kinds, and no names of modules.
        if type(tensor) is nn.Parameter or type(tensor) is Tensor or tensor is None:
            return None
        return _Sliced(who, tensor) if type(tensor).__module__.startswith("torchao.") else None
    parametrisations = experts.parametrizations[name]
    if type(parametrisations[0]).__name__ != _PACKED:
        return None
    return _FourBits(who, parametrisations.original, parametrisations[0].quant_state)
