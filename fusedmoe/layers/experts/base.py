"""What the layer expects of experts: the local ones of a rank, applied to rows sorted by expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusedmoe.autograd.checks import check_results
from fusedmoe.autograd.order import permute, unpermute
from fusedmoe.engine.chunk_experts import AutogradExperts, ChunkExperts
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.layout import Layout
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.workload import Workload

# In place of a dimension in `shardings`: the parameter is not a slice of a larger tensor along this axis, but has a
# name of its own on each rank.
NAMED = -1


@dataclass(frozen=True)
class Place:
    """Which experts a rank holds, and which shard of them.

    Attributes:
        first, local: the rank holds experts first … first + local − 1, of all of them.
        shard, shards: it holds part `shard` of `shards` of each one's hidden dimension.
    """

    first: int = 0
    local: int = 1
    shard: int = 0
    shards: int = 1

    @property
    def numbers(self) -> range:
        """Of the experts here, among all."""
        return range(self.first, self.first + self.local)


#: In the state of experts under a placement: which experts the parameters are of.
NUMBERS = "numbers"


class Experts(nn.Module):
    """Base of all experts. They are made without dimensions; the layer calls `setup` once.

    Attributes:
        shardings: own parameter name -> {axis: dimension}, for parameters that differ between ranks.
        numbers: which of all experts the parameters here are of, where `place` does not say: under a placement. Then
            the state has them, too, and loads where the parameters are of these experts only. `MoELayer`, models of
            this library and those under `ShardedExperts` refuse another state whole; of other modules around them
            PyTorch has loaded by then what comes before. `load_checkpoint` compares all first, always.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place: Place | None = None
        self.model_dim = 0
        self.shardings: dict[str, dict[str, int]] = {}
        self.recorder: Recorder | None = None
        self.numbers: tuple[int, ...] | None = None

    def setup(
        self,
        model_dim: int,
        place: Place,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Makes the parameters of the experts at `place`.

        What an expert is initialised to depends on the default generator's state and the expert's number only, not on
        how experts are spread over ranks: ranks that were seeded alike hold the shards of one and the same model.

        Raises:
            ConfigError: set up before, or the experts cannot be split so.
        """
        if self.place is not None:
            raise ConfigError(f"these experts belong to a layer already ({self}); give every layer experts of its own")
        self.place, self.model_dim = place, model_dim
        seed = int(torch.randint(2**62, ()))
        self.make(model_dim, place, seed, device=device, dtype=dtype)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.numbers is not None:
            destination[prefix + NUMBERS] = torch.tensor(self.numbers, dtype=torch.long)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.require_own(state_dict, prefix)
        state_dict.pop(prefix + NUMBERS, None)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def require_own(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Raises `ConfigError` if the state, whose names begin with `prefix`, is of other experts than those here.

        Without this the rows of one expert would become another one's.
        """
        saved, here = state_dict.get(prefix + NUMBERS), self.numbers
        if here is None and self.place is not None:
            here = tuple(self.place.numbers)
        if saved is not None and tuple(saved.tolist()) != here:
            raise ConfigError(
                f"this state has experts {saved.tolist()} under {prefix or 'the model'}, and this rank has "
                f"{list(here or ())} now: owners have changed. save_checkpoint and load_checkpoint know "
                "experts by their numbers; reshard=False keeps owners as they are"
            )

    def make(
        self,
        model_dim: int,
        place: Place,
        seed: int,
        *,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Makes parameters: expert number n from `seed` + n."""
        raise NotImplementedError

    def describe(self) -> str:
        """What must be the same on all ranks of a layer, as text."""
        return type(self).__name__

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        """These experts as the pipelined layer calls them, for rows like `x_SM`."""
        return AutogradExperts(self, tuple(self.parameters()))

    def workload(self, rows: int, itemsize: int, ep: int, esp: int) -> Workload:
        """What a pass of these experts amounts to for a rank that sends `rows` rows, for the choice of a schedule.

        Raises:
            ConfigError: these experts do not say how much they compute.
        """
        raise ConfigError(
            f"{type(self).__name__} does not say how much it computes, so no degree can be chosen for it: give "
            "Schedule(…, degrees=(forward, backward)), or define workload()"
        )

    def row_dtype(self, x_SM: Tensor) -> torch.dtype:
        """What rows are cast to before they travel to these experts: under autocast what the experts compute in."""
        return x_SM.dtype

    def forward(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        """y_SM: for each row s of x_SM the sum over its sorted rows n of weight_N[n]·expert(x_SM[s]).

        With shards, the result is this shard's summand.
        """
        raise NotImplementedError


def experts_of(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    """All experts of a model, each with what the names of its parameters begin with."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Experts):
            yield f"{name}." if name else "", module


def require_own_experts(model: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """A pre-hook of `load_state_dict`. Experts refuse the state of others; that comes when what stands before them in
    the model is loaded already, and here before any of `model` is.

    Raises:
        ConfigError: see `Experts.require_own`.
    """
    for name, experts in experts_of(model):
        experts.require_own(state_dict, prefix + name)


class RowExperts(Experts):
    """Experts that are given their rows sorted and return rows; gathering and weighting is done here."""

    def forward(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        layout = layout.exact()
        rows_NM = permute(x_SM, layout)
        out_NM = self.compute(rows_NM, layout.counts)
        check_results(type(self).__name__, out_NM, rows_NM)
        if weight_N is not None:
            out_NM = out_NM * weight_N[: layout.rows, None].to(out_NM.dtype)
        return unpermute(out_NM, layout)

    def compute(self, rows_NM: Tensor, counts: list[int]) -> Tensor:
        """Results of rows sorted by local expert; `counts[i]` rows belong to local expert i (any may be 0)."""
        raise NotImplementedError
