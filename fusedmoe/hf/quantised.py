"""Frozen 4-bit or 8-bit expert matrices of transformers' models, dequantised one expert at a time.

Supported are parameters packed by bitsandbytes (`replace_parameter_4bit`) and torchao tensors of weight-only
quantisation (int8, float8).
"""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fusedmoe.errors import ConfigError

_BITSANDBYTES = "Bnb4bitParametrization"


class QuantisedMatrices:
    """Quantised matrices [E, out, in]. `quantised[e]` dequantises the matrix of one expert.

    Attributes:
        shape, dtype, device: shape of all matrices, dtype of dequantised ones, and device.
    """

    requires_grad = False

    def __init__(self, shape: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device

    def dim(self) -> int:
        return len(self.shape)

    def to(self, dtype: torch.dtype) -> QuantisedMatrices:
        return _CastMatrices(self, dtype)

    def __getitem__(self, expert: int) -> Tensor:
        raise NotImplementedError


class _CastMatrices(QuantisedMatrices):
    def __init__(self, stored: QuantisedMatrices, dtype: torch.dtype) -> None:
        super().__init__(stored.shape, dtype, stored.device)
        self._stored = stored

    def __getitem__(self, expert: int) -> Tensor:
        return self._stored[expert].to(self.dtype)


class _BitsandbytesMatrices(QuantisedMatrices):
    """Matrices packed by bitsandbytes: two values per byte, one scale per block, experts in order."""

    def __init__(self, name: str, packed: Tensor, state: Any) -> None:
        super().__init__(state.shape, state.dtype, packed.device)
        self._expert_elements = self.shape[1:].numel() if self.dim() == 3 else 1
        if self.dim() != 3 or self._expert_elements % state.blocksize:
            raise ConfigError(
                f"fusedmoe.hf: {name} is packed by bitsandbytes in blocks of {state.blocksize}, which do not end where "
                f"experts of shape {list(self.shape[1:])} do, so none can be unpacked alone; choose a blocksize that "
                "divides their size, or another experts_implementation"
            )
        self._functional: Any = import_module("bitsandbytes.functional")
        self._state, self._packed = state, packed.view(-1)

    @cached_property
    def _scales(self) -> Tensor:
        scales: Tensor = self._state.absmax
        # Double quantisation also packs the scales, one per block.
        if self._state.nested:
            scales = self._functional.dequantize_blockwise(scales, self._state.state2) + self._state.offset
        return scales.float()

    def __getitem__(self, expert: int) -> Tensor:
        state, numbers = self._state, self._expert_elements
        blocks = numbers // state.blocksize
        # As one row: bitsandbytes 0.50 on CPUs is wrong for matrices with fewer columns than the blocksize.
        own = self._functional.QuantState(
            self._scales[expert * blocks : (expert + 1) * blocks], shape=torch.Size([numbers]), code=state.code,
            blocksize=state.blocksize, quant_type=state.quant_type, dtype=state.dtype,
        )  # fmt: skip
        packed = self._packed[expert * numbers // 2 : (expert + 1) * numbers // 2].view(-1, 1)
        matrix: Tensor = self._functional.dequantize_4bit(packed, own).view(self.shape[1:])
        return matrix


class _TorchaoMatrices(QuantisedMatrices):
    """Quantised torchao tensor that supports slicing."""

    _sliceable_types: ClassVar[set[type]] = set()

    def __init__(self, name: str, tensor: Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype, tensor.device)
        try:
            if type(tensor) not in self._sliceable_types:
                tensor[0].dequantize()
                self._sliceable_types.add(type(tensor))
        except Exception as error:
            raise ConfigError(
                f"fusedmoe.hf: {name} is a {type(tensor).__name__} of torchao that cannot be sliced by expert "
                f"({type(error).__name__}: {error}); use weight-only int8 or float8 quantisation, or another "
                "experts_implementation"
            ) from error
        self._tensor = tensor

    def __getitem__(self, expert: int) -> Tensor:
        return self._tensor[expert].dequantize()


def quantised_matrices(experts: Any, name: str) -> QuantisedMatrices | None:
    """Return a quantised parameter of experts; None for other parameters. Evaluates no parametrisation.

    Raises `ConfigError` if experts cannot be dequantised separately.
    """
    who = f"{type(experts).__name__}.{name}"
    if not parametrize.is_parametrized(experts, name):
        tensor: Any = getattr(experts, name, None)
        # Compilers can trace this comparison, but not module names below.
        if type(tensor) is nn.Parameter or type(tensor) is Tensor or tensor is None:
            return None
        return _TorchaoMatrices(who, tensor) if type(tensor).__module__.startswith("torchao.") else None
    parametrisations = experts.parametrizations[name]
    if type(parametrisations[0]).__name__ != _BITSANDBYTES:
        return None
    return _BitsandbytesMatrices(who, parametrisations.original, parametrisations[0].quant_state)
