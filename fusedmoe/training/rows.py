"""Tensors whose rows lie on the ranks in any order, for torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Rows(Tensor):
    """Some rows of a whole tensor, or the same slice of each of them; a DTensor has its rows in order.

    It is written and read row by row, so that a checkpoint does not know how the rows were spread.

    Args:
        part: [n, ...], in whose memory they lie.
        numbers: which rows of the whole, n of them.
        shape: of the whole.
        starts: where `part` begins in the whole, by dimension; that of the rows is not read.
    """

    part: Tensor
    numbers: tuple[int, ...]
    starts: tuple[int, ...]

    @staticmethod
    def __new__(cls, part: Tensor, numbers: Sequence[int], shape: Sequence[int], starts: Sequence[int]) -> Rows:
        made: Rows = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=part.dtype, device=part.device)
        made.part, made.numbers, made.starts = part, tuple(numbers), tuple(starts)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of some rows of a tensor: they are for checkpoints alone")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Rows({list(self.numbers)} of {list(self.shape)})"

    # What torch.distributed.checkpoint asks of tensors that it does not know.

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        sizes = torch.Size((1, *self.part.shape[1:]))
        return [ChunkStorageMetadata(torch.Size((number, *self.starts[1:])), sizes) for number in self.numbers]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.part)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        row = self.numbers.index(index.offset[0])
        return self.part[row : row + 1]
