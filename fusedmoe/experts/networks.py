"""Expert networks: the base of all experts, feed-forward networks and SwiGLU, and any module of the user's.

Where to add one: a network with its own kernels derives from `Experts` (`FeedForward` is the example: parameters in
`make`, products in `forward`, and `in_chunks` for plans); one that takes sorted rows from `RowExperts`.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fusedmoe.autograd.checks import check_results
from fusedmoe.autograd.experts import experts as grouped_experts
from fusedmoe.autograd.low_rank import low_rank_experts
from fusedmoe.autograd.order import permute, unpermute
from fusedmoe.comm.topology import Topology
from fusedmoe.construction import Constructed
from fusedmoe.engine.chunk_experts import AutogradExperts, ChunkExperts, GroupedExperts, LowRankChunks
from fusedmoe.engine.wrappers import require_swaps
from fusedmoe.errors import ConfigError
from fusedmoe.experts.adapters import adapted
from fusedmoe.experts.initialisation import draw_seed, fill_again
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.backend import require_floats
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.layout import Layout
from fusedmoe.sizes import require_room, require_within

if TYPE_CHECKING:  # only plans by cost ask for it
    from fusedmoe.schedule.workload import Workload

__all__ = ["NAMED", "Custom", "Experts", "FeedForward", "Place", "RowExperts", "SwiGLU"]

# In place of a dimension in `shardings`: the parameter is not a slice of a larger tensor along this axis, but has a
# name of its own on each rank.
NAMED = -1


@dataclass(frozen=True)
class Place:
    """The experts that a rank holds, and the shard of them.

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
        """Numbers of the experts here, among all."""
        return range(self.first, self.first + self.local)


#: In the state of a layer's experts: which experts the parameters are of, [e], or with shards [e, 3], each expert's
#: number, the number of the shard, and of how many.
NUMBERS = "numbers"


def even_place(experts: int, topology: Topology) -> Place:
    """Places experts evenly: as many on each rank of ep, in order.

    Raises:
        ConfigError: their number does not allow it.
    """
    ep, esp = topology.ep, topology.esp
    if experts % ep.size:
        raise ConfigError(
            f"{experts} experts cannot be split over ep = {ep.size} ranks; choose a multiple of {ep.size} experts, or "
            "another topology"
        )
    local = experts // ep.size
    return Place(ep.index * local, local, esp.index, esp.size)


class RanksOwn(Tensor):
    """A tensor in the state of a rank that has a part of all experts, which torch.distributed.checkpoint refuses.

    Saved any other way it is a plain tensor, as is what is computed from it; copies are of this class.
    """

    # A checkpoint takes tensors of one name for copies and keeps those of one rank: the save would lose experts.
    _COPIES: ClassVar = {Tensor.clone, Tensor.cpu, Tensor.detach, Tensor.new_empty, Tensor.to}

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return result.as_subclass(cls) if function in cls._COPIES else result

    def __create_write_items__(self, fqn: str, _: Any) -> Any:
        raise ConfigError(
            f"{fqn}: each rank has experts of its own under the same names, and torch.distributed.checkpoint would "
            "keep those of one rank. Save by fusedmoe.training.save_checkpoint; or save each rank's state_dict() by "
            "torch.save, to a file of its own"
        )

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # torch.load(weights_only=True) knows no other class


class Experts(Constructed, nn.Module):
    """Base of all experts. They are made without dimensions; the layer calls `setup` once.

    Attributes:
        shardings: own parameter name -> {axis: dimension}, for parameters that differ between ranks.
        own_numbers: which of all experts the parameters here are of, once a layer has them; None for experts that all
            ranks have. The state has them as `numbers`, and loads where the parameters are of these experts (and
            shards) only, or where it does not say, as states of older versions do not. `MoELayer`, models of this
            library and those under `ShardedExperts` refuse another state whole; of other modules around them PyTorch
            has loaded by then what comes before. `load_checkpoint` compares all first, always.
        num_experts: of the layer, over all ranks; 0 before a layer has them. Where a rank has some of them or shards,
            torch.distributed.checkpoint refuses its state.
        moves: the experts change owners, under a placement.
        grouped: they compute chunks as `GroupedExperts`.   reads_once: `in_chunks` reads parameters once, chunks none.
        each_alone: the rows of one expert are computed by its own parameters, and no other's are read: copies of those
            may still be on their way.
    """

    grouped: ClassVar[bool] = False
    reads_once: ClassVar[bool] = False
    each_alone: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.place: Place | None = None
        self.model_dim = 0
        self.shardings: dict[str, dict[str, int]] = {}
        self.own_numbers: tuple[int, ...] | None = None
        self._given_numbers: Tensor | None = None
        self.num_experts = 0
        self.moves = False
        self._dtype: torch.dtype | None = None

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
            ConfigError: set up before, or the experts cannot be split so; a dtype that is none of floats.
        """
        require_floats(type(self).__name__, dtype)
        if self.place is not None:
            raise ConfigError(f"these experts belong to a layer already ({self}); give every layer experts of its own")
        self.place, self.model_dim, self._dtype = place, model_dim, dtype
        self.make(model_dim, place, draw_seed(), device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as a construction would now, for experts after `to_empty` (`fill_again`)."""
        fill_again(self, self._dtype, draw_seed())

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        require_swaps(self)
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.own_numbers is not None:
            numbers = torch.tensor(self._identity(), dtype=torch.long, device="cpu")
            whole = numbers.dim() == 1 and len(numbers) == self.num_experts
            destination[prefix + NUMBERS] = numbers if whole else numbers.as_subclass(RanksOwn)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        require_swaps(self)
        self.require_own(state_dict, prefix)
        # PyTorch would call it unexpected: it is no parameter.
        state_dict.pop(prefix + NUMBERS, None)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @property
    def numbers(self) -> Tensor | None:
        """Numbers that a state given to `torch.func.functional_call` has under this name, during the call; else None.

        Raises:
            ConfigError: when it is set: the state is of other experts.
        """
        return self._given_numbers

    @numbers.setter
    def numbers(self, given: Tensor | None) -> None:
        self.require_own({NUMBERS: given}, "")
        self._given_numbers = given

    def _identity(self) -> list[Any]:
        assert self.own_numbers is not None and self.place is not None
        shard = [self.place.shard, self.place.shards]
        return [[number, *shard] for number in self.own_numbers] if self.place.shards > 1 else list(self.own_numbers)

    def require_own(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Raises `ConfigError` if the state, whose names begin with `prefix`, is of other experts than those here."""
        # Shapes fit on any rank: without this the rows of one expert would become another one's.
        saved = state_dict.get(prefix + NUMBERS)
        if saved is None or self.own_numbers is None:
            return
        # Without shards it may be of a version that did not write them.
        held = list(self.own_numbers) if saved.dim() == 1 else self._identity()
        if saved.tolist() != held:
            raise other_experts(
                prefix, saved.tolist(), held, f"In a state put together by hand leave out {prefix}{NUMBERS}"
            )

    def make(
        self, model_dim: int, place: Place, seed: int, *, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """Makes parameters: expert number n from `seed` + n."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return what tells these experts from others of their class, for measurements that are kept."""
        return type(self).__name__

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        """Returns these experts as the engine calls them chunk by chunk, for rows like `x_SM`."""
        return AutogradExperts(self, tuple(self.parameters()))

    def workload(self, rows: int, itemsize: int, ep: int, esp: int) -> Workload:
        """Describes the work of these experts for a rank that sends `rows` rows, for the choice of a schedule.

        Raises:
            ConfigError: these experts do not say how much they compute.
        """
        raise ConfigError(
            f"{type(self).__name__} does not say how much it computes, so no degree can be chosen for it: give "
            "Schedule(…, degrees=(forward, backward)), or define workload()"
        )

    def row_dtype(self, x_SM: Tensor) -> torch.dtype:
        """The dtype in which rows travel to these experts: under autocast its dtype, else their own."""
        return torch.get_autocast_dtype(x_SM.device.type) if torch.is_autocast_enabled(x_SM.device.type) else x_SM.dtype

    def forward(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        """y_SM: for each row s of x_SM the sum over its sorted rows n of weight_N[n]·expert(x_SM[s]).

        With shards, the result is this shard's summand.
        """
        raise NotImplementedError


class WithExperts(nn.Module):
    """A module that passes on experts, whose parameters `functional_call` has put in their place."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, use: Callable[[Experts, Any], Any], more: Any) -> Any:
        return use(self.experts, more)


def experts_of(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    """Yields all experts of a model, each with what the names of its parameters begin with."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Experts):
            yield f"{name}." if name else "", module


def require_own_experts(model: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """A pre-hook of `load_state_dict`, which refuses the state of other experts before any of `model` is loaded.

    Raises:
        ConfigError: see `Experts.require_own`.
    """
    # Experts refuse it themselves, but only when what stands before them in the model is loaded already.
    for name, experts in experts_of(model):
        experts.require_own(state_dict, prefix + name)


def other_experts(prefix: str, saved: list[Any], held: list[Any], more: str = "") -> ConfigError:
    """Makes the refusal of a state of other experts, given as numbers or names, or as [number, shard, shards]."""

    def told(experts: list[Any]) -> str:
        if experts and isinstance(experts[0], list):
            return f"shard {experts[0][1]} of {experts[0][2]} of experts {[number for number, *_ in experts]}"
        return f"experts [{', '.join(map(str, experts))}]"

    return ConfigError(
        f"this state has {told(saved)} under {prefix.rstrip('.') or 'the model'}, and this rank has {told(held)} now: "
        "it is another rank's, or owners have changed. A state_dict() is a rank's own; save_checkpoint and "
        f"load_checkpoint know experts by their numbers, and reshard=False keeps owners as they are. {more}".rstrip()
    )


class RowExperts(Experts):
    """Experts that are given their rows sorted and return rows; gathering and weighting is done here."""

    def forward(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        layout = layout.exact()  # padding rows would belong to no expert
        rows_NM = permute(x_SM, layout)
        out_NM = self.compute(rows_NM, layout.counts)
        check_results(type(self).__name__, out_NM, rows_NM)
        if weight_N is not None:
            out_NM = out_NM * weight_N[: layout.rows, None].to(out_NM.dtype)
        return unpermute(out_NM, layout)

    def compute(self, rows_NM: Tensor, counts: list[int]) -> Tensor:
        """Results of rows sorted by local expert; `counts[i]` rows belong to local expert i (any may be 0)."""
        raise NotImplementedError


class Custom(RowExperts):
    """One module of the user's for each expert: rows [n, M] -> [n, M], row by row, n = 0 included.

    Args:
        factory: called as `factory(model_dim)` for each local expert, with the random generator seeded by the expert's
            number. If it also accepts `shard` and `shards`, experts can be split over ESP: the module then computes
            shard number `shard`, and the layer sums the results of all shards.

    The modules are found under their number in all: `experts.experts["3"]`. After `to_empty` call `reset_parameters` of
    these experts last: a loop over all modules resets the modules inside once more, alike on all ranks.

    Example:
        `Custom(lambda model_dim: nn.Sequential(nn.Linear(model_dim, 64), nn.ReLU(), nn.Linear(64, model_dim)))`
    """

    def __init__(self, factory: Callable[..., nn.Module]) -> None:
        super().__init__()
        if isinstance(factory, nn.Module) or not callable(factory):
            raise ConfigError(
                f"Custom takes a function that makes one expert, lambda model_dim: nn.Linear(model_dim, model_dim), "
                f"and was given {factory!r}"
            )
        self._factory = factory
        self.experts = nn.ModuleDict()

    def make(
        self, model_dim: int, place: Place, seed: int, *, device: torch.device | str | None, dtype: torch.dtype | None
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
            # The number is a part of the name: a state tells experts apart, wherever they are.
            name = str(number) if place.shards == 1 else f"{number}_shard{place.shard}of{place.shards}"
            self.experts[name] = module
            # Its tensors are no slices of larger ones: each has a name of its own on its rank.
            for key, _ in itertools.chain(module.named_parameters(), module.named_buffers()):
                self.shardings[f"experts.{name}.{key}"] = {"ep": NAMED, "esp": NAMED}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super(Experts, self)._save_to_state_dict(destination, prefix, keep_vars)  # the names have the numbers

    def require_own(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        start = f"{prefix}experts."
        saved = {name.removeprefix(start).partition(".")[0] for name in state_dict if name.startswith(start)}
        held = [name for name, module in self.experts.items() if module.state_dict()]
        if saved and not saved.issuperset(held):
            raise other_experts(prefix, sorted(saved, key=lambda name: (len(name), name)), held)

    def compute(self, rows_NM: Tensor, counts: list[int]) -> Tensor:
        parts = rows_NM.split(counts)
        return torch.cat([module(part) for module, part in zip(self.experts.values(), parts, strict=True)])


class FeedForward(Experts):
    """FFN(x) = act(x·W1ᵀ + b1)·W2ᵀ + b2: GPT's feed-forward network, two products.

    Parameters (H is the shard's part of `hidden` when experts are sharded over ESP):
        w1: [e, H, M], or [e, 2, H, M] for a gated activation (gate half, then value half).
        w2: [e, M, H].
        b1: [e, H] or [e, 2, H]; b2: [e, M], or the shard's slice of it. Absent without bias.
    Each expert is initialised like `nn.Linear`: uniform in ±1/√fan_in.

    Args:
        hidden: hidden dimension of one expert, over all shards.
        activation: "gelu", "gelu_tanh", "relu", "silu", or gated: "swiglu", "geglu".
        bias: adds b1 and b2.

    Saves for backward, for N rows on this rank: the rows' source x and the pre-activation, N·H elements (gated: 2·N·H).
    """

    grouped = reads_once = each_alone = True

    def __init__(self, hidden: int, activation: str = "gelu", bias: bool = True) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError(f"unknown activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}")
        if not isinstance(hidden, int) or isinstance(hidden, bool) or hidden < 1:
            raise ConfigError(f"hidden = {hidden!r}; an expert's hidden dimension is an integer of at least 1")
        require_within(type(self).__name__, hidden=hidden)
        self.hidden, self.activation, self.bias = hidden, activation, bias
        self.w1: nn.Parameter
        self.w2: nn.Parameter
        self.b1: nn.Parameter | None
        self.b2: nn.Parameter | None
        # None, so that the names are there before `make`, and stay without bias.
        self.register_parameter("b1", None)
        self.register_parameter("b2", None)

    def make(
        self, model_dim: int, place: Place, seed: int, *, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        if self.hidden % place.shards:
            raise ConfigError(
                f"hidden = {self.hidden} cannot be split over esp = {place.shards} shards; choose a multiple of it"
            )
        # Shards' results are summed: each adds its slice of the output bias, and no other.
        self.b2_start = min(model_dim, -(-model_dim // place.shards) * place.shard)
        halves = (2,) if ACTIVATIONS[self.activation].gated else ()
        shapes = {"w1": (*halves, self.hidden, model_dim), "w2": (model_dim, self.hidden)}
        split = {"w1": len(halves), "w2": 1}
        if self.bias:
            shapes |= {"b1": (*halves, self.hidden), "b2": (model_dim,)}
            split |= {"b1": len(halves), "b2": 0}
        # Each expert is drawn whole, from a generator of its own, and cut then: shards are those of one model.
        generators = [torch.Generator().manual_seed((seed + number) % 2**63) for number in place.numbers]

        def own(whole: Tensor, dim: int) -> Tensor:
            parts = whole.chunk(place.shards, dim=dim)
            # torch.chunk may give fewer parts than shards when an output bias is tiny.
            return parts[place.shard] if place.shard < len(parts) else whole.narrow(dim, 0, 0)

        for name, shape in shapes.items():
            require_room(type(self).__name__, name, (place.local, *shape))
            like = own(torch.empty(shape, device="meta"), split[name])
            # fan_in of the first product is M, of the second H, over all shards.
            bound = (model_dim if name in ("w1", "b1") else self.hidden) ** -0.5
            made = torch.empty((place.local, *like.shape), dtype=dtype, device=device)
            for at, generator in enumerate([] if made.is_meta else generators):
                whole = torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=generator)
                made[at] = own(whole, split[name])
            self.register_parameter(name, nn.Parameter(made))
            self.shardings[name] = {"ep": 0, "esp": split[name] + 1}

    def weights(self, dtype: torch.dtype | None) -> Weights:
        """The parameters in the dtype of the computation; None: in that of w1. Evaluates a parametrisation once."""
        w1, w2 = self.w1, self.w2
        dtype = dtype or w1.dtype
        b1, b2 = (None if bias is None else bias.to(dtype) for bias in (self.b1, self.b2))
        return Weights(w1.to(dtype), w2.to(dtype), b1, b2, self.b2_start)

    def forward(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        x_SM = x_SM.to(self.row_dtype(x_SM))
        cast = torch.is_autocast_enabled(x_SM.device.type)
        if is_parametrized(self) and (low_rank := adapted(self, x_SM.dtype if cast else None)) is not None:
            return low_rank_experts(x_SM, layout, weight_N, *low_rank, self.activation)
        weights = self.weights(x_SM.dtype if cast else None)
        return grouped_experts(x_SM, layout, weight_N, weights, self.activation)

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        if is_parametrized(self) and (low_rank := adapted(self, x_SM.dtype)) is not None:
            return LowRankChunks(*low_rank, self.activation)
        return GroupedExperts(self.weights(x_SM.dtype), self.activation)

    def workload(self, rows: int, itemsize: int, ep: int, esp: int) -> Workload:
        from fusedmoe.schedule.workload import Workload

        assert self.place is not None
        experts = max(1, self.place.local) * ep  # under a placement a rank may own none
        # By names: weights that are made of parameters (parametrizations.w1.original) would be made to be looked at.
        learnt = {part for name, one in self.named_parameters() if one.requires_grad for part in name.split(".")}
        trained = tuple(name for name in ("w1", "w2") if name in learnt)
        gated = ACTIVATIONS[self.activation].gated
        whole = Workload.of_rows(rows, self.model_dim, self.hidden, experts, gated, itemsize, ep, esp)
        return replace(whole, trained=trained)

    def describe(self) -> str:
        return f"{type(self).__name__}(hidden={self.hidden}, activation={self.activation!r}, bias={self.bias})"

    def extra_repr(self) -> str:
        return f"hidden={self.hidden}, activation={self.activation!r}, bias={self.bias}, {self.place}"


class SwiGLU(FeedForward):
    """FFN(x) = (silu(x·W1gᵀ) ∘ x·W1uᵀ)·W2ᵀ: Mixtral's and LLaMA's network, three products, no bias unless asked for."""

    def __init__(self, hidden: int, bias: bool = False) -> None:
        super().__init__(hidden, "swiglu", bias)
