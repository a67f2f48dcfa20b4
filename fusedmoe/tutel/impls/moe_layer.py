"""`moe_layer`, with Tutel's arguments, attributes and numbers."""

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
from fusedmoe.autograd.aux_loss import without_a_graph
from fusedmoe.construction import Constructed, facts_of
from fusedmoe.engine.recomputation import unselected
from fusedmoe.engine.wrappers import NotScripted, WrapperCheck, not_traced
from fusedmoe.environment import integer
from fusedmoe.errors import ConfigError
from fusedmoe.experts import NAMED, parameter_shardings
from fusedmoe.experts.sharding import UNKNOWN, require_equal
from fusedmoe.gates import outside_autocast
from fusedmoe.kernels.derivatives import count_flops
from fusedmoe.sizes import require_within
from fusedmoe.tutel.impls import described, losses
from fusedmoe.tutel.impls.communicate import get_world_rank, get_world_size, size_of, skips_all_to_all, topology_of
from fusedmoe.tutel.impls.dispatcher import Degree, LayerDispatcher, LocalExperts
from fusedmoe.tutel.impls.fast_dispatch import Choice, agreed_capacity, alignment_of, choose


class MOELayer(Constructed, nn.Module):
    """Tutel's layer: y = Σ over a token's experts of gate · expert(x).

    Args:
        gate_type: `{'type': 'top' | 'cosine_top' | 'custom', 'k': …, 'capacity_factor': …, 'gate_noise': …, …}`, a list
            of such (chosen by `gate_index`), or 'Top2Gate'.
        model_dim: D, even.
        experts: `{'type': 'ffn' | 'llama_ffn' | 'custom', 'num_experts_per_device': n, …}`, or `count_per_node`, by
            default 1; −n or 1/n: n ranks share an expert.
        scan_expert_func: called with the name of each expert parameter and the parameter.
        result_func: applied to the result.
        group: the ranks over which experts are spread; None for all.
        seeds: set before the experts, before gate i (plus i), and at the end: (gate, experts, after).
        a2a_ffn_overlap_degree: chunks whose travel overlaps with other chunks' computation, by Tutel's own plan; the
            capacity is rounded up to a multiple, as in Tutel. "auto": the library's scheduler chooses by what this
            machine takes, and nothing is rounded.
        is_postscore: gates multiply results; else what experts are given.
        batch_prioritized_routing: the surest tokens get their places first (also BATCH_PRIO=1).
        normalize_gate: with k > 1 the gates of a token are divided by their sum.
        is_gshard_loss: else the load-and-importance loss, which needs gate_noise > 0.
        parallel_type: how ranks that share an expert work: 'adaptive:R', 'data' (R = 1), 'model' (R = their number),
            'auto'. R = 0 gathers all experts everywhere, R ≥ 1 splits an expert's work in R parts; same results.
        use_2dh: all-to-all in two levels, across nodes of LOCAL_SIZE ranks and inside them.

    Attributes:
        l_aux: the loss of the last forward, also an attribute of its result.
        dispatch_count: [E] tokens of this rank that chose each expert (see `Choice.dispatch_count`).
        protected_shape: of the experts' last results, [e, rows, …].

    Parameters and buffers: `gates.i.…`, `experts.…`, `_num_global_experts`. A checkpoint without the latter is taken
    with a warning, one with another number raises AssertionError; an expert parameter that it lacks becomes zeros, and
    one with as many elements is viewed. A compiled model calls the layer as it is, with a graph break.

    Raises:
        ConfigError: arguments that cannot work, or that are unknown.
    """

    # By names of expert parameters; none in layers pickled by versions that did not keep them.
    _marks: dict[str, dict[str, Any]] = {}
    _num_global_experts: Tensor
    _require_wrapper: WrapperCheck | None = None  # of layers pickled by versions that made it in the first call

    __jit_ignored_attributes__ = NotScripted()

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
        # A process group cannot be copied: the holder lets deepcopy copy the layer.
        self._group = _Held(group)
        self.result_func = result_func
        self.skip_moe = integer("SKIP_MOE", 0) != 0
        self.world_size = size_of(group)
        E = self.global_expert_count(described.wanted_experts(experts), group)
        self.register_buffer("_num_global_experts", torch.tensor(E, device=None))
        # On the host beside the buffer, since to read that waits for the GPU.
        self.num_global_experts = E
        # Fewer experts than ranks: s consecutive ranks hold shards of the same one.
        self.num_local_experts = max(1, E // self.world_size)
        self.sharded_count = s = max(1, self.world_size // E)
        self.valid_rs = [0, *(r for r in range(1, s + 1) if s % r == 0)]
        self.adaptive_degree = self._degree_of(parallel_type)
        self.model_dim, self.is_postscore = model_dim, is_postscore
        self.batch_prioritized_routing = batch_prioritized_routing or integer("BATCH_PRIO", 0) != 0
        self.normalize_gate, self.is_gshard_loss = normalize_gate, is_gshard_loss
        self.a2a_ffn_overlap_degree, self.use_2dh = described.valid_degree(a2a_ffn_overlap_degree), use_2dh
        self.megablocks_size = 0
        self._dispatchers: dict[int, LayerDispatcher] = {}
        # Seeds go in Tutel's order, experts before gates, so that models begin with Tutel's numbers.
        gate_seed, expert_seed, last_seed = (*(seeds or ()), None, None, None)[:3]
        _seed(expert_seed)
        self.experts = described.make_experts(experts, model_dim, self.num_local_experts, s)
        for name, parameter in self.experts.named_parameters():
            if scan_expert_func is not None:
                scan_expert_func(name, parameter)
            # Tutel's mark: clients leave such gradients out of their own all-reduce.
            parameter._tutel_expert = True  # type: ignore[attr-defined]
        self._note_marks()
        # Experts may be of any class: hooks see their states.
        numbers = self._numbers()
        self.experts.register_state_dict_post_hook(partial(described.say_whose, numbers, E))
        self.experts.register_load_state_dict_pre_hook(partial(described.require_own, numbers))
        self.register_load_state_dict_post_hook(MOELayer._mark_again)
        self.gates = nn.ModuleList()
        for number, description in enumerate(described.gate_descriptions(gate_type)):
            _seed(None if gate_seed is None else gate_seed + number)
            self.gates.append(described.make_gate(description, model_dim, E))
        _seed(last_seed)
        if self.world_size > 1:
            rank, own = get_world_rank(), dist.get_process_group_ranks(self.group)
            # Ranks outside the group may be replicas; which, the client knows.
            replicas = set(range(get_world_size())).difference(own)
            self._require_wrapper = WrapperCheck(self.experts, rank, replicas | {rank})

    def reset_parameters(self) -> None:
        # Of this module's own, as after `to_empty`.
        self._num_global_experts.fill_(self.num_global_experts)

    @staticmethod
    def global_expert_count(num_local_experts: float, group: dist.ProcessGroup | None = None) -> int:
        """Returns E for n experts on each rank of the group, or for −n or 1/n: n ranks share one."""
        return described.experts_in_all(num_local_experts, get_world_size(group))

    @property
    def expert_ranks(self) -> dict[str, tuple[int, ...]]:
        """Returns the ranks over which experts are split: along ep they hold other experts, along esp shards."""
        s, at = self.sharded_count, get_world_rank(self.group)
        ranks = dist.get_process_group_ranks(self.group) if self.world_size > 1 else [get_world_rank()]
        return {"ep": tuple(ranks[at % s :: s]), "esp": tuple(ranks[at - at % s :][:s])}

    def _numbers(self) -> list[Any]:
        """Returns the numbers of the experts here, or with shards [number, shard, shards], as `Experts` do."""
        s, at, e = self.sharded_count, get_world_rank(self.group), self.num_local_experts
        numbers = range(at // s * e, at // s * e + e)
        return [[number, at % s, s] for number in numbers] if s > 1 else list(numbers)

    @property
    def shardings(self) -> dict[str, dict[str, int]]:
        """Returns how the experts are split over ep and esp, as `fusedmoe.training` asks."""
        # Experts may say so themselves, in their attribute `shardings`, as those of this package do. Of others a
        # parameter or buffer is each rank's own, as for Tutel's clients: [local experts, …] part of a whole, else one
        # without a whole; how ranks that share an expert split it is unknown.
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
        # A key of the dispatchers, which a tensor is not.
        return int(degree)

    def get_parameter_iterator(self, param_type: str) -> Iterator[tuple[str, nn.Parameter]]:
        """Returns named parameters of the gates ('gate') or of this rank's experts ('local_experts')."""
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
        """Computes […, D_out] of […, D] in the input's dtype. Ranks may have any number of tokens, none included.

        Args:
            gate_index: which gate routes.
            capacity_factor, top_k: in place of the gate's; a factor of 0 drops nothing, −f drops nothing up to f.
            a2a_ffn_overlap_degree, adaptive_r: in place of the layer's, from now on.
            reserve_dims: how many last dimensions make up a token; custom experts are given them as they are.
            inequivalent_tokens: the capacity rests on the largest number of tokens of any rank.
            megablocks_size: in evaluation by one process the capacity is rounded up to a multiple, as in Tutel.
        Raises:
            ConfigError: in one process, input or router weights that are NaN or infinite; on CUDA from a later call.
                Over ranks, PyTorch's DistributedDataParallel or FSDP2 around the experts.
            RankError: the same on every rank of a group, naming the rank at fault, before anything is sent; in the
                first call, gates that differ between ranks.
        """
        if self.skip_moe:
            self.l_aux = input.l_aux = None  # type: ignore[attr-defined]
            return input if self.result_func is None else self.result_func(input)
        if input.dim() < 2 or input.shape[-reserve_dims:].numel() != self.model_dim:
            raise ConfigError(
                f"moe_layer got input of shape {list(input.shape)}; it takes [tokens, …, model_dim = {self.model_dim}]"
            )
        if a2a_ffn_overlap_degree is not None:
            self.a2a_ffn_overlap_degree = described.valid_degree(a2a_ffn_overlap_degree)
        if adaptive_r is not None:
            self.adaptive_degree = self._valid_r(adaptive_r)
        if torch.jit.is_tracing():
            raise not_traced()
        gate: Any = self.gates[gate_index]
        if not self.is_gshard_loss and not gate.gate_noise > 0:
            raise ConfigError("the load-and-importance loss (is_gshard_loss=False) needs a gate with gate_noise > 0")
        alone = self.world_size == 1
        # Tutel rounds the capacity for sparse products in evaluation by one process only.
        effective = alone and self.num_local_experts > 1 and not torch.is_grad_enabled()
        self.megablocks_size = int(megablocks_size) if effective else 0
        token_shape = input.shape[-reserve_dims:]
        dispatcher = self._dispatcher()
        if self._require_wrapper is not None:
            self._require_wrapper()
        # A selective checkpoint would look for what ranks tell each other among the operators that it keeps.
        with topology_of(self.group).guard("moe_layer.forward"), unselected():
            # Bad numbers of forwards before, which on CUDA nobody has waited for.
            dispatcher.checks.tell_logits()
            x_SM = input.reshape(-1, token_shape.numel())
            # Cast before routing: Tutel's router sees the rounded tokens.
            x_SM = x_SM.to(self._row_dtype(x_SM))
            choice, l_aux = self._route(x_SM, gate, top_k)
            # Found before the capacity is agreed on: a rank that ended alone would leave the others in that all-reduce.
            refusal = dispatcher.agreed_refusal(x_SM, choice.weight_SK)
            self.dispatch_count = choice.dispatch_count()
            degree = self.a2a_ffn_overlap_degree
            # A degree that the scheduler picks must not change results, so only a given one rounds the capacity.
            alignment = alignment_of(self.sharded_count, 1 if degree == "auto" else degree, self.megablocks_size)
            factor = gate.capacity_factor if capacity_factor is None else capacity_factor
            capacity = agreed_capacity(choice, factor, alignment, self.group, inequivalent_tokens)
            experts = self._local_experts(x_SM, choice, token_shape, capacity)
            # Results are weighted in float32 at least.
            weight_SK = choice.weight_SK.to(torch.promote_types(choice.weight_SK.dtype, torch.float32))
            y_SM = dispatcher.through_experts(
                x_SM,
                choice,
                weight_SK,
                capacity,
                experts,
                postscore=self.is_postscore,
                degree=degree,
                places=self._places(capacity),
                stay=skips_all_to_all() and not alone,
                refusal=refusal,
            )
        y = y_SM.to(input.dtype).reshape(*input.shape[:-reserve_dims], *self.protected_shape[2:])
        # Without a graph, adding the loss to another one later is an error; it says so then.
        if not torch.is_grad_enabled():
            l_aux = without_a_graph(l_aux, "moe_layer.l_aux", next(gate.parameters(), None) if self.training else None)
        self.l_aux = y.l_aux = l_aux  # type: ignore[attr-defined]
        return y if self.result_func is None else self.result_func(y)

    def _row_dtype(self, x_SM: Tensor) -> torch.dtype:
        kind = x_SM.device.type
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return next((parameter.dtype for parameter in self.experts.parameters()), x_SM.dtype)

    def _route(self, x_SM: Tensor, gate: Any, top_k: int | None) -> tuple[Choice, Tensor]:
        E = self.num_global_experts
        # Autocast would round the router's product, and with it who goes where.
        with outside_autocast(x_SM.device.type):
            logits_SE = noisy_SE = gate(x_SM)
            if self.training and gate.gate_noise > 0:
                # Noise before softmax and top-k, by E: Tutel's formula.
                noisy_SE = logits_SE + gate.gate_noise * torch.randn_like(logits_SE) / E
            scores_SE = noisy_SE.softmax(1)
            first = self.batch_prioritized_routing
            choice = choose(scores_SE, top_k or gate.top_k, normalize=self.normalize_gate, prioritised=first)
            if self.is_gshard_loss:
                return choice, losses.gshard_loss(scores_SE, choice.expert_SK)
            chosen_SK = noisy_SE.gather(1, choice.expert_SK)
            return choice, losses.load_importance_loss(logits_SE.softmax(1), chosen_SK, E, gate.gate_noise)

    def _parts(self) -> int:
        """Returns r, into how many parts an expert's work is split, where it is split at all."""
        return min(self.adaptive_degree, 1) if getattr(self.experts, "whole_only", False) else self.adaptive_degree

    def _dispatcher(self) -> LayerDispatcher:
        """Returns the dispatcher of the adaptive degree; collective when a degree is used first."""
        r, s = self._parts(), self.sharded_count
        # Once, in the first call: it is collective.
        if not self._dispatchers and self.world_size > 1:
            self._compare_gates()
        if r not in self._dispatchers:
            if r == 0 or self.world_size == 1:
                made = LayerDispatcher(Topology(), beside=topology_of(self.group))
            else:
                made = LayerDispatcher(topology_of(self.group, s, r), "2dh" if self.use_2dh else "direct", s // r)
            self._dispatchers[r] = made
        return self._dispatchers[r]

    def _compare_gates(self) -> None:
        """Check that ranks made the same layer, and that gates begin alike: clients sum their gradients themselves."""
        topology = topology_of(self.group)
        # Rows of results have the second width; nobody else could refuse another one before it is sent.
        widths = {"model_dim": self.model_dim, "output_dim": getattr(self.experts, "output_dim", None)}
        facts = widths | {"experts": type(self.experts).__name__} | facts_of(self, "layer")
        if not type(self.experts).__module__.startswith("fusedmoe."):
            del facts["layer.experts"]
        topology.agree(facts, "moe_layer")
        gates = [
            (f"moe_layer: gates.{name}", topology.world, parameter)
            for name, parameter in self.gates.named_parameters()
            # Whoever shards gates gathers one value for all ranks.
            if parameter.requires_grad and not isinstance(parameter, DTensor)
        ]
        seed = "Call torch.manual_seed with the same seed on every rank before the model is made"
        require_equal(
            gates, topology, f"{seed}, or give moe_layer seeds=(1, rank + 1, 1), or broadcast what is no expert's"
        )

    def _places(self, capacity: int) -> int:
        """Returns the places for rows of one source in a local expert's block."""
        r, s = self._parts(), self.sharded_count
        return capacity if r == 0 or self.world_size == 1 else -(-capacity * r // s)

    def _local_experts(self, x_SM: Tensor, choice: Choice, token_shape: torch.Size, capacity: int) -> LocalExperts:
        gathered, module = self._parts() == 0, cast("Any", self.experts)
        count, sources = (self.num_global_experts, 1) if gathered else (self.num_local_experts, self.world_size)
        # Experts of this package may be one operation; a client's module is only called.
        fused = module.fused(self, x_SM, choice.expert_SK.numel()) if hasattr(module, "fused") else None
        if fused is not None:
            rows = sources * self._places(capacity)
            self.protected_shape = self._shape_like(token_shape, count, rows, fused[0].w2.shape[1])
        # Weights of ranks that share an expert are gathered here, once: inside a chunk the gathering would run at the
        # same time as the exchanges of other chunks, in an order that differs between ranks.
        joined = module.join(self) if fused is None and hasattr(module, "join") else None
        blocks = partial(self.expert_local, reserve_shape=token_shape)
        return LocalExperts(count, fused, blocks, module, joined)

    def expert_local(self, x: Tensor, reserve_shape: Sequence[int], joined: Any = None) -> Tensor:
        """Run the experts on [e, C, D], custom ones on [e, C, *reserve_shape]; return [e, C, …].

        Args:
            joined: weights that the experts' `join` gathered; None: the experts gather their own. Collective then.
        """
        # Experts of this package know nothing of a token's dimensions.
        if hasattr(self.experts, "fused"):
            y: Tensor = self.experts(x, self) if joined is None else self.experts(x, self, joined)
            self.protected_shape = self._shape_like(reserve_shape, *y.shape)
        else:
            y = self.experts(x.view(*x.shape[:2], *reserve_shape), self)
            self.protected_shape = y.shape
        return y.reshape(*y.shape[:2], y.shape[2:].numel())

    @staticmethod
    def _shape_like(token_shape: Sequence[int], *blocks: int) -> torch.Size:
        """Returns the shape of results [e, C, D_out]: that of tokens where they have as many elements."""
        same = torch.Size(token_shape).numel() == blocks[-1]
        return torch.Size((*blocks[:2], *token_shape) if same else blocks)

    def __getstate__(self) -> dict[str, Any]:
        self._note_marks()
        # Process groups and plans stay behind, and the loss leaves its graph: a copy makes dispatchers of its own.
        state = self.__dict__ | {"_dispatchers": {}}
        if state.get("l_aux") is not None:
            state["l_aux"] = state["l_aux"].detach()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark_again()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._note_marks()
        super()._apply(fn, recurse)
        self._mark_again()
        return self

    def _note_marks(self) -> None:
        """Keeps the marks of experts' parameters, by this layer, `scan_expert_func` or anybody."""
        # A copy of a parameter has no attributes.
        self._marks = {
            name: {key: value for key, value in vars(parameter).items() if isinstance(value, bool | int | str)}
            for name, parameter in self.experts.named_parameters()
        }

    def _mark_again(self, *_: Any) -> None:
        for name, parameter in self.experts.named_parameters():
            vars(parameter).update(self._marks.get(name, {"_tutel_expert": True}))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        count = prefix + "_num_global_experts"
        # Old files of Tutel have no counter.
        if count not in state_dict:
            logging.warning("%s is missing: a checkpoint of an old format; it is taken to fit", count)
            state_dict[count] = self._num_global_experts
        given = int(state_dict[count])
        assert given == self.num_global_experts, (
            f"{prefix or 'moe_layer'}: the checkpoint has {given} experts in all, this layer {self.num_global_experts}"
        )
        self._note_marks()
        for name, parameter in self.experts.named_parameters():
            key = f"{prefix}experts.{name}"
            if key not in state_dict:
                logging.warning("%s is missing in the checkpoint; it becomes zeros", key)
                state_dict[key] = torch.zeros_like(parameter)
            tensor = state_dict[key]
            # A plain dict does not say whose experts it holds; but those of another number of ranks show in the number
            # of experts, the first dimension, even where there are as many elements.
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


class _Held:
    """A process group that survives a deep copy of its layer, on the same ranks."""

    def __init__(self, value: dist.ProcessGroup | None) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> _Held:
        return self


def _seed(seed: int | None) -> None:
    if seed is not None:
        torch.manual_seed(seed)


@cache
def _keep_out_of_graphs() -> None:
    """Disables compilers for the layer. Done with the first layer, as it imports the compiler."""
    MOELayer.forward = torch.compiler.disable(MOELayer.forward)  # type: ignore[method-assign]


moe_layer = MOELayer
