"""`moe_layer` with Tutel's arguments, attributes and numerical results."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fusedmoe import Topology
from fusedmoe.autograd.aux_loss import guard_aux_loss
from fusedmoe.comm.wire_format import find_wire_format
from fusedmoe.construction import Constructed, describe_part
from fusedmoe.engine.recomputation import without_selective_checkpoint
from fusedmoe.engine.wrappers import RefusesScripting, WrapperCheck, jit_error
from fusedmoe.environment import read_integer
from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import NAMED
from fusedmoe.experts.sharding import UNKNOWN, parameter_shardings, require_equal
from fusedmoe.gates.base import outside_autocast
from fusedmoe.kernels.derivatives import count_flops
from fusedmoe.sizes import require_within
from fusedmoe.tutel.impls import described, losses
from fusedmoe.tutel.impls.communicate import get_world_rank, get_world_size, size_of, skips_all_to_all, topology_of
from fusedmoe.tutel.impls.dispatcher import Degree, LayerDispatcher, LocalExperts
from fusedmoe.tutel.impls.fast_dispatch import Choice, agreed_capacity, alignment_of, choose


class MOELayer(Constructed, nn.Module):
    """Tutel's MoE layer: y = Σ over a token's experts of gate · expert(x).

    Args:
        gate_type: `{'type': 'top' | 'cosine_top' | 'custom', 'k': …, 'capacity_factor': …, 'gate_noise': …, …}`, a list
            of these (selected by `gate_index`), or 'Top2Gate'.
        model_dim: D, even.
        experts: `{'type': 'ffn' | 'llama_ffn' | 'custom', 'num_experts_per_device': n, …}`, or `count_per_node`, by
            default 1; −n or 1/n: n ranks share an expert.
        scan_expert_func: called with the name and the tensor of each expert parameter.
        result_func: applied to the result.
        group: ranks over which experts are distributed; None for all.
        seeds: (gate, experts, after): random seeds for gate i (gate + i), for the experts, and after construction.
        a2a_ffn_overlap_degree: number of chunks whose communication overlaps with computation, by Tutel's plan; the
            capacity is rounded up to a multiple. "auto": selected by predicted time on this machine, without rounding.
        is_postscore: gates multiply results, otherwise expert inputs.
        batch_prioritized_routing: the most confident tokens are placed first (also BATCH_PRIO=1).
        normalize_gate: for k > 1 the gates of a token are divided by their sum.
        is_gshard_loss: otherwise the load-and-importance loss, which needs gate_noise > 0.
        parallel_type: how ranks that share an expert divide its work: 'adaptive:R', 'data' or 'auto' (R = 1), 'model'
            (R = number of these ranks). R = 0 gathers all experts on all ranks, R ≥ 1 splits an expert's work into R
            parts, with equal results.
        use_2dh: two-level all-to-all, across and inside nodes of LOCAL_SIZE ranks.
        wire: format of rows between ranks, as for `fusedmoe.Schedule`: "fp8", "fp8-both", None for the rows' dtype.

    Attributes:
        l_aux: loss of the last forward, also an attribute of its result.
        dispatch_count: [E] tokens of this rank that chose each expert, as `Choice.dispatch_count` returns them.
        protected_shape: shape of the experts' last results, [e, rows, …].

    Loading a checkpoint with another number of experts raises AssertionError. Missing expert parameters become zeros,
    with a warning; parameters with an equal number of elements are reshaped. In a compiled model the layer runs
    eagerly, with a graph break.

    Raises:
        AssertionError: odd `model_dim`.
        ConfigError: other invalid arguments, or unknown ones.
    """

    # By name of expert parameter; absent in layers pickled by earlier versions.
    _marks: dict[str, dict[str, Any]] = {}
    _num_global_experts: Tensor
    # Absent in layers pickled by earlier versions.
    _require_wrapper: WrapperCheck | None = None
    wire: str | None = None

    __jit_ignored_attributes__ = RefusesScripting()

    rank_specific: ClassVar[Collection[str]] = described.RANK_SPECIFIC

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        _keep_out_of_graphs()
        count_flops()
        return super().__new__(cls, *args, **kwargs)

    def __init__(
        self,
        gate_type: str | described.Description | Sequence[described.Description],
        model_dim: int,
        experts: described.Description | None = None,
        scan_expert_func: Callable[[str, nn.Parameter], None] | None = None,
        result_func: Callable[[Tensor], Any] | None = None,
        group: dist.ProcessGroup | None = None,
        seeds: Sequence[int | None] | None = None,
        a2a_ffn_overlap_degree: Degree = 1,
        is_postscore: bool = True,
        batch_prioritized_routing: bool = False,
        normalize_gate: bool = True,
        is_gshard_loss: bool = True,
        parallel_type: str = "adaptive:1",
        use_2dh: bool = False,
        wire: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        assert model_dim % 2 == 0, f"model_dim must be even, not {model_dim}"
        require_within("moe_layer", model_dim=model_dim)
        if "pad_samples" in kwargs:
            logging.warning("pad_samples has no effect: nothing is ever padded")
            del kwargs["pad_samples"]
        if kwargs:
            raise ConfigError(f"moe_layer has no argument {', '.join(map(repr, kwargs))}")
        if not isinstance(experts, Mapping):
            raise ConfigError(f"moe_layer needs experts={{'type': …}}, and got {experts!r}")
        self._group = _GroupHolder(group)
        self.result_func = result_func
        self.skip_moe = read_integer("SKIP_MOE", 0) != 0
        self.world_size = size_of(group)
        E = self.global_expert_count(described.experts_per_rank(experts), group)
        self.register_buffer("_num_global_experts", torch.tensor(E, device=None))
        # Reading the buffer would synchronise with the GPU.
        self.num_global_experts = E
        self.num_local_experts = max(1, E // self.world_size)
        self.sharded_count = s = max(1, self.world_size // E)
        self.valid_rs = [0, *(r for r in range(1, s + 1) if s % r == 0)]
        self.adaptive_degree = self._degree_of(parallel_type)
        self.model_dim, self.is_postscore = model_dim, is_postscore
        self.batch_prioritized_routing = batch_prioritized_routing or read_integer("BATCH_PRIO", 0) != 0
        self.normalize_gate, self.is_gshard_loss = normalize_gate, is_gshard_loss
        self.a2a_ffn_overlap_degree, self.use_2dh = described.parse_degree(a2a_ffn_overlap_degree), use_2dh
        find_wire_format(wire)  # refuses unknown formats
        self.wire = wire
        self.megablocks_size = 0
        self._dispatchers: dict[int, LayerDispatcher] = {}
        # Tutel's order, experts before gates, for equal initial values.
        gate_seed, expert_seed, last_seed = (*(seeds or ()), None, None, None)[:3]
        _seed(expert_seed)
        self.experts = described.make_experts(experts, model_dim, self.num_local_experts, s)
        for name, parameter in self.experts.named_parameters():
            if scan_expert_func is not None:
                scan_expert_func(name, parameter)
            # Tutel's mark: clients exclude these gradients from their own all-reduce.
            parameter._tutel_expert = True  # type: ignore[attr-defined]
        self._record_expert_marks()
        numbers = self._numbers()
        self.experts.register_state_dict_post_hook(partial(described.store_expert_numbers, numbers, E))
        self.experts.register_load_state_dict_pre_hook(partial(described.require_same_experts, numbers))
        self.register_load_state_dict_post_hook(MOELayer._mark_again)
        self.gates = nn.ModuleList()
        for number, description in enumerate(described.gate_descriptions(gate_type)):
            _seed(None if gate_seed is None else gate_seed + number)
            self.gates.append(described.make_gate(description, model_dim, E))
        _seed(last_seed)
        if self.world_size > 1:
            rank, own = get_world_rank(), dist.get_process_group_ranks(self.group)
            # Ranks outside the group may be replicas.
            replicas = set(range(get_world_size())).difference(own)
            self._require_wrapper = WrapperCheck(self.experts, rank, replicas | {rank})

    def reset_parameters(self) -> None:
        self._num_global_experts.fill_(self.num_global_experts)

    @staticmethod
    def global_expert_count(num_local_experts: float, group: dist.ProcessGroup | None = None) -> int:
        """Return the number of experts for n on each rank of the group; −n and 1/n mean that n ranks share one."""
        return described.count_global_experts(num_local_experts, get_world_size(group))

    @property
    def expert_ranks(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks with different experts ("ep"), and the ranks with shards of the same experts ("esp")."""
        s, at = self.sharded_count, get_world_rank(self.group)
        ranks = dist.get_process_group_ranks(self.group) if self.world_size > 1 else [get_world_rank()]
        return {"ep": tuple(ranks[at % s :: s]), "esp": tuple(ranks[at - at % s :][:s])}

    def _numbers(self) -> list[Any]:
        s, at, e = self.sharded_count, get_world_rank(self.group), self.num_local_experts
        numbers = range(at // s * e, at // s * e + e)
        return [[number, at % s, s] for number in numbers] if s > 1 else list(numbers)

    @property
    def shardings(self) -> dict[str, dict[str, int]]:
        """Return the sharding of expert parameters over ep and esp, for `fusedmoe.training`.

        Experts may declare it in their attribute `shardings`. Without it, tensors [local experts, …] are parts of full
        tensors, and others are local to each rank.
        """
        stated = parameter_shardings(self.experts, marked=False)
        own = (*self.experts.named_parameters(), *self.experts.named_buffers())
        return {f"experts.{name}": stated[name] if name in stated else self._sharding(tensor) for name, tensor in own}

    def _sharding(self, tensor: Tensor) -> dict[str, int]:
        stacked = tensor.dim() > 0 and len(tensor) == self.num_local_experts
        axes = {"ep": 0 if stacked else NAMED}
        return axes | {"esp": UNKNOWN} if self.sharded_count > 1 else axes

    @property
    def group(self) -> dist.ProcessGroup | None:
        given = self._group.value
        return given if given is not None or not dist.is_initialized() else dist.group.WORLD

    def _degree_of(self, parallel_type: str) -> int:
        s = self.sharded_count
        if adaptive := re.fullmatch(r"adaptive:(-?\d+)", parallel_type):
            return self._valid_r(min(max(int(adaptive[1]), 0), s))
        known = {"data": 1, "model": s, "auto": 1}
        if parallel_type not in known:
            raise ConfigError(f"unknown parallel_type {parallel_type!r}; choose adaptive:R, {', '.join(known)}")
        return known[parallel_type]

    def _valid_r(self, degree: int) -> int:
        if degree not in self.valid_rs:
            sharers = f"{self.sharded_count} ranks share an expert"
            raise ConfigError(f"adaptive degree {degree}: {sharers}, so choose one of {self.valid_rs}")
        return int(degree)

    def get_parameter_iterator(self, param_type: str) -> Iterator[tuple[str, nn.Parameter]]:
        owners = {"gate": self.gates, "local_experts": self.experts}
        if param_type not in owners:
            raise ConfigError(f"unknown kind of parameters {param_type!r}; choose {' or '.join(owners)}")
        return owners[param_type].named_parameters()

    def forward(
        self,
        input: Tensor,
        gate_index: int = 0,
        capacity_factor: float | None = None,
        top_k: int | None = None,
        a2a_ffn_overlap_degree: Degree | None = None,
        reserve_dims: int = 1,
        inequivalent_tokens: bool = False,
        adaptive_r: int | None = None,
        megablocks_size: int = 0,
    ) -> Any:
        """Compute […, D_out] from […, D] in the input's dtype. Numbers of tokens may differ between ranks and may be 0.

        Args:
            capacity_factor, top_k: override the gate's values; factor 0 drops nothing, −f drops nothing up to factor f.
            gate_index: gate to use.
            a2a_ffn_overlap_degree, adaptive_r: replace the layer's values permanently.
            reserve_dims: number of trailing dimensions of a token; custom experts receive them unflattened.
            inequivalent_tokens: compute the capacity from the largest number of tokens on any rank.
            megablocks_size: in single-process evaluation the capacity is rounded up to a multiple of it, as in Tutel.
        Raises:
            ConfigError: invalid arguments; in one process, NaN or infinite input or router weights (on CUDA: in a later
                call); with several ranks, PyTorch's DistributedDataParallel or FSDP2 around the experts.
            RankError: NaN or infinite values on a rank of the group, before communication on all ranks; in the first
                call, gates that differ between ranks.
        """
        if self.skip_moe:
            self.l_aux = input.l_aux = None  # type: ignore[attr-defined]
            return input if self.result_func is None else self.result_func(input)
        if input.dim() < 2 or input.shape[-reserve_dims:].numel() != self.model_dim:
            raise ConfigError(
                f"moe_layer got input of shape {list(input.shape)}; it takes [tokens, …, model_dim = {self.model_dim}]"
            )
        if a2a_ffn_overlap_degree is not None:
            self.a2a_ffn_overlap_degree = described.parse_degree(a2a_ffn_overlap_degree)
        if adaptive_r is not None:
            self.adaptive_degree = self._valid_r(adaptive_r)
        if torch.jit.is_tracing():
            raise jit_error()
        gate: Any = self.gates[gate_index]
        if not self.is_gshard_loss and not gate.gate_noise > 0:
            raise ConfigError("the load-and-importance loss (is_gshard_loss=False) needs a gate with gate_noise > 0")
        alone = self.world_size == 1
        # Tutel rounds the capacity for sparse products only in single-process evaluation.
        effective = alone and self.num_local_experts > 1 and not torch.is_grad_enabled()
        self.megablocks_size = int(megablocks_size) if effective else 0
        token_shape = input.shape[-reserve_dims:]
        dispatcher = self._dispatcher()
        if self._require_wrapper is not None:
            self._require_wrapper()
        # A selective checkpoint would search the saved operators for the metadata exchange.
        with topology_of(self.group).guard("moe_layer.forward"), without_selective_checkpoint():
            dispatcher.checks.raise_deferred()
            x_SM = input.reshape(-1, token_shape.numel())
            x_SM = x_SM.to(self._row_dtype(x_SM))
            choice, l_aux = self._route(x_SM, gate, top_k)
            # Before the capacity all-reduce, which would wait for a rank that raised alone.
            refusal = dispatcher.exchange_values_error(x_SM, choice.weight_SK)
            self.dispatch_count = choice.dispatch_count()
            degree = self.a2a_ffn_overlap_degree
            # Results must not depend on an automatic degree.
            alignment = alignment_of(self.sharded_count, 1 if degree == "auto" else degree, self.megablocks_size)
            factor = gate.capacity_factor if capacity_factor is None else capacity_factor
            capacity = agreed_capacity(choice, factor, alignment, self.group, inequivalent_tokens)
            experts = self._local_experts(x_SM, choice, token_shape, capacity)
            weight_SK = choice.weight_SK.to(torch.promote_types(choice.weight_SK.dtype, torch.float32))
            y_SM = dispatcher.through_experts(
                x_SM,
                choice,
                weight_SK,
                capacity,
                experts,
                postscore=self.is_postscore,
                degree=degree,
                slots=self._slots(capacity),
                keep_local=skips_all_to_all() and not alone,
                refusal=refusal,
            )
        y = y_SM.to(input.dtype).reshape(*input.shape[:-reserve_dims], *self.protected_shape[2:])
        # Without a graph, adding this loss to another one raises an explanatory error.
        if not torch.is_grad_enabled():
            l_aux = guard_aux_loss(l_aux, "moe_layer.l_aux", next(gate.parameters(), None) if self.training else None)
        self.l_aux = y.l_aux = l_aux  # type: ignore[attr-defined]
        return y if self.result_func is None else self.result_func(y)

    def _row_dtype(self, x_SM: Tensor) -> torch.dtype:
        kind = x_SM.device.type
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return next((parameter.dtype for parameter in self.experts.parameters()), x_SM.dtype)

    def _route(self, x_SM: Tensor, gate: Any, top_k: int | None) -> tuple[Choice, Tensor]:
        E = self.num_global_experts
        # Autocast would change the routing.
        with outside_autocast(x_SM.device.type):
            logits_SE = noisy_SE = gate(x_SM)
            if self.training and gate.gate_noise > 0:
                # Noise before softmax and top-k, scaled by 1/E: Tutel's formula.
                noisy_SE = logits_SE + gate.gate_noise * torch.randn_like(logits_SE) / E
            scores_SE = noisy_SE.softmax(1)
            first = self.batch_prioritized_routing
            choice = choose(scores_SE, top_k or gate.top_k, normalize=self.normalize_gate, prioritised=first)
            if self.is_gshard_loss:
                return choice, losses.gshard_loss(scores_SE, choice.expert_SK)
            chosen_SK = noisy_SE.gather(1, choice.expert_SK)
            return choice, losses.load_importance_loss(logits_SE.softmax(1), chosen_SK, E, gate.gate_noise)

    def _parts(self) -> int:
        """Return the adaptive degree, at most 1 if the experts cannot be split."""
        return min(self.adaptive_degree, 1) if getattr(self.experts, "whole_only", False) else self.adaptive_degree

    def _dispatcher(self) -> LayerDispatcher:
        """Return the dispatcher for the adaptive degree. Collective on first use of a degree."""
        r, s = self._parts(), self.sharded_count
        if not self._dispatchers and self.world_size > 1:
            self._compare_gates()
        if r not in self._dispatchers:
            if r == 0 or self.world_size == 1:
                dispatcher = LayerDispatcher(Topology(), peers=topology_of(self.group))
            else:
                topology, algorithm = topology_of(self.group, s, r), "2dh" if self.use_2dh else "direct"
                dispatcher = LayerDispatcher(topology, algorithm, s // r, wire=self.wire)
            self._dispatchers[r] = dispatcher
        return self._dispatchers[r]

    def _compare_gates(self) -> None:
        """Raise `RankError` unless layers and initial gates agree over ranks. Collective."""
        topology = topology_of(self.group)
        widths = {"model_dim": self.model_dim, "output_dim": getattr(self.experts, "output_dim", None)}
        facts = widths | {"experts": type(self.experts).__name__} | describe_part(self, "layer")
        if not type(self.experts).__module__.startswith("fusedmoe."):
            del facts["layer.experts"]
        topology.require_equal_facts(facts, "moe_layer")
        gates = [
            (f"moe_layer: gates.{name}", topology.world, parameter)
            for name, parameter in self.gates.named_parameters()
            if parameter.requires_grad and not isinstance(parameter, DTensor)
        ]
        seed = "Call torch.manual_seed with the same seed on every rank before the model is made"
        require_equal(
            gates, topology, f"{seed}, or give moe_layer seeds=(1, rank + 1, 1), or broadcast what is no expert's"
        )

    def _slots(self, capacity: int) -> int:
        r, s = self._parts(), self.sharded_count
        return capacity if r == 0 or self.world_size == 1 else -(-capacity * r // s)

    def _local_experts(self, x_SM: Tensor, choice: Choice, token_shape: torch.Size, capacity: int) -> LocalExperts:
        gathered, module = self._parts() == 0, cast("Any", self.experts)
        count, sources = (self.num_global_experts, 1) if gathered else (self.num_local_experts, self.world_size)
        fused = module.fused(self, x_SM, choice.expert_SK.numel()) if hasattr(module, "fused") else None
        if fused is not None:
            rows = sources * self._slots(capacity)
            self.protected_shape = self._shape_like(token_shape, count, rows, fused[0].w2.shape[1])
        # Gather weights once: inside chunks, gathers would run concurrently with other chunks' exchanges, in different
        # orders on different ranks.
        joined_weights = module.join(self) if fused is None and hasattr(module, "join") else None
        blocks = partial(self.expert_local, reserve_shape=token_shape)
        return LocalExperts(count, fused, blocks, module, joined_weights)

    def expert_local(self, x: Tensor, reserve_shape: Sequence[int], joined: Any = None) -> Tensor:
        """Run the experts on [e, C, D], custom experts on [e, C, *reserve_shape]; return [e, C, …].

        `joined` has the weights gathered by the experts' `join`; with None, the call may be collective.
        """
        if hasattr(self.experts, "fused"):
            y: Tensor = self.experts(x, self) if joined is None else self.experts(x, self, joined)
            self.protected_shape = self._shape_like(reserve_shape, *y.shape)
        else:
            y = self.experts(x.view(*x.shape[:2], *reserve_shape), self)
            self.protected_shape = y.shape
        return y.reshape(*y.shape[:2], y.shape[2:].numel())

    @staticmethod
    def _shape_like(token_shape: Sequence[int], *blocks: int) -> torch.Size:
        """Return the shape of results [e, C, D_out], with D_out as `token_shape` if it has equally many elements."""
        same = torch.Size(token_shape).numel() == blocks[-1]
        return torch.Size((*blocks[:2], *token_shape) if same else blocks)

    def __getstate__(self) -> dict[str, Any]:
        self._record_expert_marks()
        state = self.__dict__ | {"_dispatchers": {}}
        if state.get("l_aux") is not None:
            state["l_aux"] = state["l_aux"].detach()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark_again()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._record_expert_marks()
        super()._apply(fn, recurse)
        self._mark_again()
        return self

    def _record_expert_marks(self) -> None:
        """Save attributes of expert parameters, which copies of the parameters lose."""
        self._marks = {
            name: {key: value for key, value in vars(parameter).items() if isinstance(value, bool | int | str)}
            for name, parameter in self.experts.named_parameters()
        }

    def _mark_again(self, *_: Any) -> None:
        for name, parameter in self.experts.named_parameters():
            vars(parameter).update(self._marks.get(name, {"_tutel_expert": True}))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        count = prefix + "_num_global_experts"
        if count not in state_dict:
            logging.warning("%s is missing (old checkpoint format); assuming that the checkpoint fits", count)
            state_dict[count] = self._num_global_experts
        given = int(state_dict[count])
        assert given == self.num_global_experts, (
            f"{prefix or 'moe_layer'}: the checkpoint has {given} experts in all, this layer {self.num_global_experts}"
        )
        self._record_expert_marks()
        for name, parameter in self.experts.named_parameters():
            key = f"{prefix}experts.{name}"
            if key not in state_dict:
                logging.warning("%s is missing in the checkpoint; initialised to zeros", key)
                state_dict[key] = torch.zeros_like(parameter)
            tensor = state_dict[key]
            # A state of another number of ranks has another number of experts, even if the element counts agree.
            same_experts = tensor.dim() != parameter.dim() or len(tensor) == len(parameter)
            if tensor.numel() == parameter.numel() and same_experts:
                state_dict[key] = tensor.reshape(parameter.shape)
                continue
            args[-1].append(
                f"{key} is {list(tensor.shape)} in the checkpoint and {list(parameter.shape)} in this layer, whose "
                f"{self.world_size} ranks have {self.num_global_experts} experts; python -m fusedmoe.tutel.checkpoint."
                "gather and .scatter turn checkpoints into those of another number of ranks"
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        gates = [f"k={gate.top_k}, noise={gate.gate_noise}" for gate in self.gates]
        experts = f"Total-Experts = {self.num_global_experts} [managed by {self.world_size} device(s)]"
        return f"Top-K(s) = {gates}, {experts},"


class _GroupHolder:
    """Process group that survives a deep copy of its layer, with the same ranks."""

    def __init__(self, value: dist.ProcessGroup | None) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> _GroupHolder:
        return self


def _seed(seed: int | None) -> None:
    if seed is not None:
        torch.manual_seed(seed)


@cache
def _keep_out_of_graphs() -> None:
    """Exclude the layer from compilation; deferred to the first layer, because it imports the compiler."""
    MOELayer.forward = torch.compiler.disable(MOELayer.forward)  # type: ignore[method-assign]


moe_layer = MOELayer
