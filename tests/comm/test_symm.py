"""The heap over PyTorch's symmetric memory: its interface exists and is used correctly (no GPU)."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor

from fusedmoe.comm.group import Group
from fusedmoe.comm.one_sided.heaps import SymmHeap
from fusedmoe.errors import ConfigError, RankError

#: Members of `torch._C._distributed_c10d._SymmetricMemory` that `SymmHeap` uses, with arguments. Torch 2.11 and 2.13
#: agree.
INTERFACE: dict[str, tuple[str, ...] | None] = {
    "empty_strided_p2p": ("size", "stride", "dtype", "device"),
    "rendezvous": ("tensor", "group_name"),
    "buffer_ptrs": None,
    "rank": None,
}


@pytest.mark.parametrize("name", INTERFACE)
def test_installed_torch_has_symmetric_memory_interface(name: str) -> None:
    """By torch's type stubs, which are more precise than its compiled functions."""
    assert hasattr(c10d._SymmetricMemory, name)
    types = Path(str(torch.__path__[0]), "_C", "_distributed_c10d.pyi")
    found = methods_of_class(ast.parse(types.read_text()), "_SymmetricMemory")[name]
    kinds, arguments = [ast.unparse(one) for one in found.decorator_list], INTERFACE[name]
    if arguments is None:
        assert kinds == ["property"]
        return
    assert kinds == ["staticmethod"]
    names = tuple(one.arg for one in found.args.args)
    assert names[: len(arguments)] == arguments
    assert len(names) - len(found.args.defaults) <= len(arguments)  # no further argument is required


def methods_of_class(types: ast.Module, name: str) -> dict[str, ast.FunctionDef]:
    (found,) = (one for one in types.body if isinstance(one, ast.ClassDef) and one.name == name)
    return {one.name: one for one in found.body if isinstance(one, ast.FunctionDef)}


class Handle:
    def __init__(self, addresses: list[int], rank: int) -> None:
        self.buffer_ptrs, self.rank = addresses, rank


class FakeSymmetricMemory:
    """A fake `_SymmetricMemory` of two ranks; this process is the second."""

    made: ClassVar[list[Tensor]] = []
    peer: ClassVar[int] = 4096
    moved: ClassVar[int] = 0

    @classmethod
    def empty_strided_p2p(cls, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert tuple(stride) == (1,) and dtype == torch.uint8 and device == torch.device("cuda", 3)
        cls.made.append(torch.full(size, 7, dtype=dtype))
        return cls.made[-1]

    @classmethod
    def rendezvous(cls, tensor: Tensor, group_name: str) -> Handle:
        assert tensor is cls.made[-1] and group_name == "pair" and not tensor.any()
        return Handle([cls.peer, tensor.data_ptr() + cls.moved], 1)


class PairGroup:
    group_name = "pair"


def heap_of_two(monkeypatch: pytest.MonkeyPatch, device: str = "cuda", **state: int) -> SymmHeap:
    monkeypatch.setattr(
        "fusedmoe.comm.one_sided.heaps.SymmetricMemory", type("Fake", (FakeSymmetricMemory,), {"made": [], **state})
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(SymmHeap, "_all_gather", lambda self, thing: [thing, thing])
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *args, device=None, **more: tensor(*args, **more))
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    return SymmHeap(Group("ep", (0, 1), 1, PairGroup()), torch.device(device))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_heap_table_has_addresses_of_all_ranks(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    heap = heap_of_two(monkeypatch, device)
    assert heap.device == torch.device("cuda", 3)
    first, second = heap.allocate((5, 3), torch.float32), heap.allocate((300,), torch.uint8)
    assert first.own.shape == (5, 3) and not first.own.any() and not second.own.any()
    for one in (first, second):
        assert one.table.tolist() == [4096, one.own.data_ptr()]
    assert first.own.data_ptr() != second.own.data_ptr()
    heap.close()
    with pytest.raises(RankError, match="abandoned after an error"):
        heap.allocate((1,), torch.uint8)


@pytest.mark.parametrize("state", [{"peer": 0}, {"moved": 512}])
def test_memory_without_peer_addresses_is_rejected(monkeypatch: pytest.MonkeyPatch, state: dict[str, int]) -> None:
    """A backend reachable only by its own functions, or a tensor that is not at its table's address."""
    heap = heap_of_two(monkeypatch, **state)
    with pytest.raises(ConfigError, match=r"rank 0: .*no addresses of all peers on ranks \[0, 1\].*TORCH_SYMMMEM"):
        heap.allocate((5,), torch.float32)
