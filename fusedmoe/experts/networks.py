"""Expert networks: the base class, feed-forward networks, SwiGLU, and arbitrary user modules.

To add a network with its own kernels, derive from `Experts` (as `FeedForward`: parameters in `make`, GEMMs in
`forward`, and in `in_chunks` for plans). For experts on sorted rows, derive from `RowExperts` or `fusedmoe.ExpertBase`.
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
from fusedmoe.engine.chunk_experts import AutogradExperts, ChunkExperts, GroupedExperts, LowRankExperts
from fusedmoe.engine.wrappers import require_swappable
from fusedmoe.errors import ConfigError
from fusedmoe.experts.adapters import frozen_weights_and_adapters
from fusedmoe.experts.initialisation import draw_linear, draw_seed, reinitialise
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.backend import require_float_dtype
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.layout import Layout
from fusedmoe.sizes import require_elements, require_within

if TYPE_CHECKING:  # needed only by cost-based plans
    from fusedmoe.schedule.workload import Workload

# Special dimension in `shardings`: each rank of this axis has a separate tensor with its own name.
NAMED = -1


@dataclass(frozen=True)
class Place:
    """The experts that a rank holds: numbers first … first + local − 1 over all ranks.

    Of each expert it holds part `shard` of `shards` of the hidden dimension.
    """

    first: int = 0
    local: int = 1
    shard: int = 0
    shards: int = 1

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.local)


#: State entry with global expert numbers [e], or with shards [e, 3]: expert, shard, number of shards.
NUMBERS = "numbers"


def assign_evenly(experts: int, topology: Topology) -> Place:
    """Assign the same number of experts to each ep rank, in order. Raises `ConfigError` for a remainder."""
    ep, esp = topology.ep, topology.esp
    if experts % ep.size:
        raise ConfigError(
            f"{experts} experts cannot be split over ep = {ep.size} ranks; choose a multiple of {ep.size} experts, or "
            "another topology"
        )
    local = experts // ep.size
    return Place(ep.index * local, local, esp.index, esp.size)


class PerRankTensor(Tensor):
    """A state_dict tensor that holds different experts on each rank under one name.

    torch.distributed.checkpoint, which would keep one rank's tensor, refuses to save it; `torch.save` saves a plain
    tensor. Only copies keep the class.
    """

    _CLASS_PRESERVING: ClassVar = {Tensor.clone, Tensor.cpu, Tensor.detach, Tensor.new_empty, Tensor.to}

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return result.as_subclass(cls) if function in cls._CLASS_PRESERVING else result

    def __create_write_items__(self, fqn: str, _: Any) -> Any:
        raise ConfigError(
            f"{fqn}: each rank has different experts under the same names, and torch.distributed.checkpoint would "
            "keep those of one rank. Use fusedmoe.training.save_checkpoint, or torch.save each rank's state_dict() to "
            "a separate file"
        )

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # torch.load(weights_only=True) rejects other classes


class Experts(Constructed, nn.Module):
    """Base class of experts. Constructed without dimensions; the layer calls `setup` once.

    Attributes:
        shardings: own parameter name -> {axis: dimension}, for parameters that differ between ranks.
        own_numbers: global numbers of the experts here, once a layer has them; None if all ranks have the same experts.
            Saved as `numbers` in the state. Loading requires equal numbers and shards, or a state without them (older
            versions).
        num_experts: the layer's experts over all ranks; 0 before `setup`.
        is_placed: True if a placement may change the owners of the experts.
        can_compile_chunks: True if compiled graphs can contain a planned layer with these experts.
        reads_parameters_once: True if `in_chunks` reads parameters once and chunks read none.
    """

    can_compile_chunks: ClassVar[bool] = False
    reads_parameters_once: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.place: Place | None = None
        self.model_dim = 0
        self.shardings: dict[str, dict[str, int]] = {}
        self.own_numbers: tuple[int, ...] | None = None
        self._given_numbers: Tensor | None = None
        self.num_experts = 0
        self.is_placed = False
        self._dtype: torch.dtype | None = None

    def setup(
        self,
        model_dim: int,
        place: Place,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the parameters of the experts at `place`.

        Initial values depend only on the default generator's state and the expert's number: ranks with equal seeds hold
        the shards of one model. Raises `ConfigError` if called twice, for experts that cannot be split this way, and
        for a dtype that is not floating-point.
        """
        require_float_dtype(type(self).__name__, dtype)
        if self.place is not None:
            raise ConfigError(f"these experts already belong to a layer ({self}); create separate experts per layer")
        self.place, self.model_dim, self._dtype = place, model_dim, dtype
        self.make(model_dim, place, draw_seed(), device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Reinitialise the parameters as a new construction would, for experts after `to_empty`."""
        reinitialise(self, self._dtype, draw_seed())

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        require_swappable(self)
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.own_numbers is not None:
            numbers = torch.tensor(self._numbers_and_shards(), dtype=torch.long, device="cpu")
            whole = numbers.dim() == 1 and len(numbers) == self.num_experts
            destination[prefix + NUMBERS] = numbers if whole else numbers.as_subclass(PerRankTensor)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        require_swappable(self)
        self.require_same_experts(state_dict, prefix)
        # Not a parameter: PyTorch would report it as unexpected.
        state_dict.pop(prefix + NUMBERS, None)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @property
    def numbers(self) -> Tensor | None:
        """The `numbers` entry of a state passed to `torch.func.functional_call`, during the call; else None.

        Setting it raises `ConfigError` if the state belongs to other experts.
        """
        return self._given_numbers

    @numbers.setter
    def numbers(self, given: Tensor | None) -> None:
        self.require_same_experts({NUMBERS: given}, "")
        self._given_numbers = given

    def _numbers_and_shards(self) -> list[Any]:
        assert self.own_numbers is not None and self.place is not None
        shard = [self.place.shard, self.place.shards]
        return [[number, *shard] for number in self.own_numbers] if self.place.shards > 1 else list(self.own_numbers)

    def require_same_experts(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Raise `ConfigError` if the numbers in the state under `prefix` are not those of this rank's experts."""
        # Shapes match on any rank, so another rank's state would load without an error.
        saved = state_dict.get(prefix + NUMBERS)
        if saved is None or self.own_numbers is None:
            return
        # Older versions saved no shards or no numbers.
        held = list(self.own_numbers) if saved.dim() == 1 else self._numbers_and_shards()
        if saved.tolist() != held:
            raise wrong_experts_error(
                prefix, saved.tolist(), held, f"In a manually assembled state omit {prefix}{NUMBERS}"
            )

    def make(
        self, model_dim: int, place: Place, seed: int, *, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """Create the parameters of the experts at `place`: expert number n is drawn with the seed `seed` + n."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return a text that identifies these experts within their class, as a key of measurements."""
        return type(self).__name__

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        """Return these experts for execution in chunks, for rows like `x_SM`."""
        return AutogradExperts(self, tuple(self.parameters()))

    def workload(self, rows: int, itemsize: int, ep: int, esp: int) -> Workload:
        """Describe the work of sending `rows` rows to these experts, for choosing a schedule.

        Raises `ConfigError` if the experts do not define their work.
        """
        raise ConfigError(
            f"{type(self).__name__} does not define its work, so no degree can be chosen for it: pass "
            "Schedule(…, degrees=(forward, backward)), or define workload()"
        )

    def row_dtype(self, x_SM: Tensor) -> torch.dtype:
        """Return the dtype in which rows are sent to these experts: autocast's dtype, or the dtype of `x_SM`."""
        return torch.get_autocast_dtype(x_SM.device.type) if torch.is_autocast_enabled(x_SM.device.type) else x_SM.dtype

    def forward(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        """Return y_SM: for each row s of x_SM the sum over its sorted rows n of weight_N[n]·expert(x_SM[s]).

        With shards, the result is this shard's summand.
        """
        raise NotImplementedError


class ExpertsModule(nn.Module):
    """Calls a function with its experts. `torch.func.functional_call` of this module replaces their parameters."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, function: Callable[[Experts, Any], Any], argument: Any) -> Any:
        return function(self.experts, argument)


def experts_of(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    """Yield a model's experts, each with the prefix of its parameter names."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Experts):
            yield f"{name}." if name else "", module


def require_own_experts(model: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Pre-hook of `load_state_dict`: check the experts of `model` before any of its tensors is loaded."""
    for name, experts in experts_of(model):
        experts.require_same_experts(state_dict, prefix + name)


def wrong_experts_error(prefix: str, saved: list[Any], held: list[Any], hint: str = "") -> ConfigError:
    """Return the error for a state of other experts. `hint`: a sentence appended to it.

    `saved`, `held`: experts of the state and of this rank, as numbers, names, or [number, shard, number of shards].
    """

    def describe(experts: list[Any]) -> str:
        if experts and isinstance(experts[0], list):
            return f"shard {experts[0][1]} of {experts[0][2]} of experts {[number for number, *_ in experts]}"
        return f"experts [{', '.join(map(str, experts))}]"

    return ConfigError(
        f"this state has {describe(saved)} under {prefix.rstrip('.') or 'the model'}, but this rank now has "
        f"{describe(held)}: the state is another rank's, or owners have changed. A state_dict() "
        "belongs to one rank; save_checkpoint and load_checkpoint identify experts by number, and reshard=False keeps "
        f"the current owners. {hint}".rstrip()
    )


class RowExperts(Experts):
    """Experts that map sorted rows to rows, in `compute`. This class gathers, weights and sums the rows."""

    def forward(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        layout = layout.exact()  # padding rows belong to no expert
        rows_NM = permute(x_SM, layout)
        out_NM = self.compute(rows_NM, layout.counts)
        check_results(type(self).__name__, out_NM, rows_NM)
        if weight_N is not None:
            out_NM = out_NM * weight_N[: layout.rows, None].to(out_NM.dtype)
        return unpermute(out_NM, layout)

    def compute(self, rows_NM: Tensor, counts: list[int]) -> Tensor:
        """Return results of rows sorted by local expert; expert i has `counts[i]` rows, possibly 0."""
        raise NotImplementedError


class Custom(RowExperts):
    """Experts from user modules, one per expert: rows [n, M] -> [n, M], row by row, including n = 0.

    Modules are keyed by global expert number: `experts.experts["3"]`. Example:
    `Custom(lambda model_dim: nn.Sequential(nn.Linear(model_dim, 64), nn.ReLU(), nn.Linear(64, model_dim)))`

    A loop that calls `reset_parameters` of all modules, as after `to_empty`, also resets the layers inside the experts,
    with the same values on all ranks. Call `reset_parameters` of these experts after it.

    Args:
        factory: called as `factory(model_dim)` for each local expert, with a random seed that depends on the expert's
            number. If it also accepts `shard` and `shards`, experts can be split over ESP: the module then computes
            shard number `shard`, and the layer sums the results of all shards.
    """

    def __init__(self, factory: Callable[..., nn.Module]) -> None:
        super().__init__()
        if isinstance(factory, nn.Module) or not callable(factory):
            raise ConfigError(
                f"Custom takes a function that makes one expert, lambda model_dim: nn.Linear(model_dim, model_dim), "
                f"got {factory!r}"
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
            if any(module is other for other in self.experts.values()):
                raise ConfigError(f"Custom: the factory returned an earlier expert's module for expert {number}")
            # The number in the name identifies the expert on any rank.
            name = str(number) if place.shards == 1 else f"{number}_shard{place.shard}of{place.shards}"
            self.experts[name] = module
            for key, _ in itertools.chain(module.named_parameters(), module.named_buffers()):
                self.shardings[f"experts.{name}.{key}"] = {"ep": NAMED, "esp": NAMED}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super(Experts, self)._save_to_state_dict(destination, prefix, keep_vars)  # the names have the numbers

    def require_same_experts(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        start = f"{prefix}experts."
        saved = {name.removeprefix(start).partition(".")[0] for name in state_dict if name.startswith(start)}
        held = [name for name, module in self.experts.items() if module.state_dict()]
        if saved and not saved.issuperset(held):
            raise wrong_experts_error(prefix, sorted(saved, key=lambda name: (len(name), name)), held)

    def compute(self, rows_NM: Tensor, counts: list[int]) -> Tensor:
        parts = rows_NM.split(counts)
        return torch.cat([module(part) for module, part in zip(self.experts.values(), parts, strict=True)])


class FeedForward(Experts):
    """FFN(x) = act(x·W1ᵀ + b1)·W2ᵀ + b2: GPT's feed-forward network, two GEMMs.

    Parameters, for e experts on this rank, M = model_dim and H = hidden (with ESP, the shard's part of it):
        w1: [e, H, M], or [e, 2, H, M] for a gated activation (gate half, then value half).
        w2: [e, M, H].
        b1: [e, H] or [e, 2, H]; b2: [e, M], or the shard's slice of it. None without bias.
    Each expert is initialised like `nn.Linear`: uniform in ±1/√fan_in.

    Args:
        hidden: hidden dimension of one expert, over all shards.
        activation: "gelu", "gelu_tanh", "relu", "silu", or gated: "swiglu", "geglu".

    Saves for backward, for N rows on this rank: the rows' source x and the pre-activation, N·H elements (gated: 2·N·H).
    """

    can_compile_chunks = reads_parameters_once = True

    def __init__(self, hidden: int, activation: str = "gelu", bias: bool = True) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError(f"unknown activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}")
        if not isinstance(hidden, int) or isinstance(hidden, bool) or hidden < 1:
            raise ConfigError(f"hidden = {hidden!r}; an expert's hidden dimension is an integer of at least 1")
        require_within(type(self).__name__, hidden=hidden)
        self.hidden, self.activation, self.bias = hidden, activation, bias
        # Initial values of an expert by its number and shapes (`from_modules`); None: random.
        self.source: Callable[[int, Mapping[str, tuple[int, ...]]], Mapping[str, Tensor]] | None = None
        self.w1: nn.Parameter
        self.w2: nn.Parameter
        self.b1: nn.Parameter | None
        self.b2: nn.Parameter | None
        # The names exist before `make`, and are None without bias.
        self.register_parameter("b1", None)
        self.register_parameter("b2", None)

    def make(
        self, model_dim: int, place: Place, seed: int, *, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        if self.hidden % place.shards:
            raise ConfigError(
                f"hidden = {self.hidden} cannot be split over esp = {place.shards} shards; choose a multiple of it"
            )
        # Shards' results are summed, so each shard adds only its slice of the output bias.
        self.b2_start = min(model_dim, -(-model_dim // place.shards) * place.shard)
        halves = (2,) if ACTIVATIONS[self.activation].gated else ()
        shapes = {"w1": (*halves, self.hidden, model_dim), "w2": (model_dim, self.hidden)}
        split = {"w1": len(halves), "w2": 1}
        if self.bias:
            shapes |= {"b1": (*halves, self.hidden), "b2": (model_dim,)}
            split |= {"b1": len(halves), "b2": 0}

        def take_shard(whole: Tensor, dim: int) -> Tensor:
            parts = whole.chunk(place.shards, dim=dim)
            # torch.chunk may return fewer parts than shards for a small output bias.
            return parts[place.shard] if place.shard < len(parts) else whole.narrow(dim, 0, 0)

        made = dict[str, Tensor]()
        for name, shape in shapes.items():
            require_elements(type(self).__name__, name, (place.local, *shape))
            like = take_shard(torch.empty(shape, device="meta"), split[name])
            made[name] = torch.empty((place.local, *like.shape), dtype=dtype, device=device)
            self.shardings[name] = {"ep": 0, "esp": split[name] + 1}
        for at, number in enumerate([] if made["w1"].is_meta else place.numbers):
            # Each expert is made whole, so shards belong to one model.
            whole = draw_linear(shapes, seed + number) if self.source is None else self.source(number, shapes)
            for name, value in whole.items():
                made[name][at] = take_shard(value, split[name])
        for name, value in made.items():
            self.register_parameter(name, nn.Parameter(value))
        self.source = self.source if made["w1"].is_meta else None  # the other model may be freed

    def weights(self, dtype: torch.dtype | None) -> Weights:
        """Return the parameters in `dtype`, default w1's. Evaluates parametrisations once."""
        w1, w2 = self.w1, self.w2
        dtype = dtype or w1.dtype
        b1, b2 = (None if bias is None else bias.to(dtype) for bias in (self.b1, self.b2))
        return Weights(w1.to(dtype), w2.to(dtype), b1, b2, self.b2_start)

    def forward(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        x_SM = x_SM.to(self.row_dtype(x_SM))
        cast = torch.is_autocast_enabled(x_SM.device.type)
        if (
            is_parametrized(self)
            and (low_rank := frozen_weights_and_adapters(self, x_SM.dtype if cast else None)) is not None
        ):
            return low_rank_experts(x_SM, layout, weight_N, *low_rank, self.activation)
        weights = self.weights(x_SM.dtype if cast else None)
        return grouped_experts(x_SM, layout, weight_N, weights, self.activation)

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        if is_parametrized(self) and (low_rank := frozen_weights_and_adapters(self, x_SM.dtype)) is not None:
            return LowRankExperts(*low_rank, self.activation)
        return GroupedExperts(self.weights(x_SM.dtype), self.activation)

    def workload(self, rows: int, itemsize: int, ep: int, esp: int) -> Workload:
        from fusedmoe.schedule.workload import Workload

        assert self.place is not None
        experts = max(1, self.place.local) * ep  # under a placement a rank may own none
        # By name: reading a parametrised weight (parametrizations.w1.original) would evaluate it.
        trained_names = {part for name, one in self.named_parameters() if one.requires_grad for part in name.split(".")}
        trained = tuple(name for name in ("w1", "w2") if name in trained_names)
        gated = ACTIVATIONS[self.activation].gated
        whole = Workload.of_rows(rows, self.model_dim, self.hidden, experts, gated, itemsize, ep, esp)
        return replace(whole, trained=trained)

    def describe(self) -> str:
        return f"{type(self).__name__}(hidden={self.hidden}, activation={self.activation!r}, bias={self.bias})"

    def extra_repr(self) -> str:
        return f"hidden={self.hidden}, activation={self.activation!r}, bias={self.bias}, {self.place}"


class SwiGLU(FeedForward):
    """FFN(x) = (silu(x·W1gᵀ) ∘ x·W1uᵀ)·W2ᵀ: network of Mixtral and LLaMA; three GEMMs, bias optional."""

    def __init__(self, hidden: int, bias: bool = False) -> None:
        super().__init__(hidden, "swiglu", bias)
