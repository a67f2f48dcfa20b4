"""Any module as an expert."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fusedmoe.errors import ConfigError
from fusedmoe.layers.experts.base import NAMED, Place, RowExperts


class Custom(RowExperts):
    """One module of the user's for each expert: rows [n, M] -> [n, M], row by row, n = 0 included.

    Args:
        factory: called as `factory(model_dim)` for each local expert, with the random generator seeded by the expert's
            number. If it also accepts `shard` and `shards`, experts can be split over ESP: the module then computes
            shard number `shard`, and the layer sums the results of all shards.

    The modules are found under their number in all: `experts.experts["3"]`.

    Example:
        `Custom(lambda model_dim: nn.Sequential(nn.Linear(model_dim, 64), nn.ReLU(), nn.Linear(64, model_dim)))`
    """

    def __init__(self, factory: Callable[..., nn.Module]) -> None:
        super().__init__()
        self._factory = factory
        self.experts = nn.ModuleDict()

    def make(
        self,
        model_dim: int,
        place: Place,
        seed: int,
        *,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        arguments: dict[str, int] = {}
        if place.shards > 1:
            if not {"shard", "shards"} <= set(inspect.signature(self._factory).parameters):
                raise ConfigError(
                    f"esp = {place.shards} splits every expert, but the factory of these experts takes no `shard` and "
                    "`shards`. Add both (each shard's results are summed), or use esp=1."
                )
            arguments = {"shard": place.shard, "shards": place.shards}
        for number in place.numbers:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed((seed + number) % 2**63)
                module = self._factory(model_dim, **arguments).to(device=device, dtype=dtype)
            name = str(number) if place.shards == 1 else f"{number}_shard{place.shard}of{place.shards}"
            self.experts[name] = module
            for key, _ in itertools.chain(module.named_parameters(), module.named_buffers()):
                self.shardings[f"experts.{name}.{key}"] = {"ep": NAMED, "esp": NAMED}

    def compute(self, rows_NM: Tensor, counts: list[int]) -> Tensor:
        parts = rows_NM.split(counts)
        return torch.cat([module(part) for module, part in zip(self.experts.values(), parts, strict=True)])
