"""Small models that use the library without `MoELayer`.

They use its functions, Tutel's layer, and experts of transformers, torchtitan and Megatron-core. Gradients are summed
by hand, so only the integration communicates between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fusedmoe import autograd
from fusedmoe.autograd.order import take_pairs
from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.collectives import all_reduce
from fusedmoe.comm.exchange import exchange_metadata
from fusedmoe.comm.metadata import RowForm
from fusedmoe.comm.topology import Topology
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.layout import Layout
from fusedmoe.tutel import moe
from fusedmoe.tutel.impls import communicate
from tests.training.placed import DIM, EXPERTS

HIDDEN, K = 4, 2


def numbers(name: str, *shape: int) -> Tensor:
    """Draw values that are equal on every rank."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5


class Functions(nn.Module):
    """A dropless layer built from the library's functions, with its own router."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self._all_to_all, self._esp = make_all_to_all("direct", topology), topology.esp
        own = slice(*(EXPERTS * at // topology.size for at in (topology.rank, topology.rank + 1)))
        self.router = nn.Parameter(numbers("router", EXPERTS, DIM))
        self.w1 = nn.Parameter(numbers("w1", EXPERTS, 2, HIDDEN, DIM)[own].clone())
        self.w2 = nn.Parameter(numbers("w2", EXPERTS, DIM, HIDDEN)[own].clone())

    def shared(self) -> list[nn.Parameter]:
        return [self.router]

    def forward(self, x_SM: Tensor) -> Tensor:
        weight_SK, expert_SK = (x_SM @ self.router.t()).softmax(-1).topk(K)
        layout = autograd.order(expert_SK, EXPERTS)
        form = RowForm.of(x_SM, layout, weight_SK)
        exchange = exchange_metadata(self._all_to_all, self._esp, layout.counts_E, form)
        rows_NM, weight_N = autograd.permute(x_SM, layout), take_pairs(weight_SK, layout)

        def experts(rows_RM: Tensor, received: Layout, weight_R: Tensor | None) -> Tensor:
            return autograd.experts(rows_RM, received, weight_R, Weights(self.w1, self.w2), "swiglu")

        return autograd.unpermute(autograd.through_experts(rows_NM, weight_N, exchange, experts), layout)


class Tutel(nn.Module):
    """Tutel's layer without drops."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        # Tutel reads this from the environment at start-up.
        communicate.TUTEL_GLOBAL_TIMEOUT_SEC = topology.job.timeout_s
        count = EXPERTS // topology.size
        experts = {"type": "ffn", "num_experts_per_device": count, "hidden_size_per_expert": HIDDEN}
        self.layer = moe.moe_layer({"type": "top", "k": K, "capacity_factor": 0}, DIM, experts).double()
        own = slice(count * topology.rank, count * (topology.rank + 1))
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                shape = parameter.shape
                experts_of = name.startswith("experts.")
                whole = numbers(name, EXPERTS, *shape[1:]) if experts_of else numbers(name, *shape)
                parameter.copy_(whole[own] if experts_of else whole)

    def shared(self) -> list[nn.Parameter]:
        return list(self.layer.gates.parameters())

    def forward(self, x_SM: Tensor) -> Tensor:
        y_SM: Tensor = self.layer(x_SM)
        return y_SM


class _OwnRouter(nn.Module):
    """Base of models whose experts belong to another library: a router, and [E, ...] matrices of all experts.

    A world of one computes the definition, which uses neither library.
    """

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.router = nn.Parameter(numbers("router", EXPERTS, DIM))
        self._count, self._rank = EXPERTS // topology.size, topology.rank
        self.w1 = nn.Parameter(self._own(numbers("w1", EXPERTS, 2, HIDDEN, DIM)))
        self.w2 = nn.Parameter(self._own(numbers("w2", EXPERTS, DIM, HIDDEN)))

    def _own(self, whole: Tensor) -> Tensor:
        return whole[self._count * self._rank :][: self._count].clone()

    def shared(self) -> list[nn.Parameter]:
        return [self.router]

    def forward(self, x_SM: Tensor) -> Tensor:
        weight_SK, expert_SK = (x_SM @ self.router.t()).softmax(-1).topk(K)
        return self.routed(x_SM, expert_SK, weight_SK)

    def routed(self, x_SM: Tensor, expert_SK: Tensor, weight_SK: Tensor) -> Tensor:
        y_SM = torch.zeros_like(x_SM)
        for e, (w1, w2) in enumerate(zip(self.w1, self.w2, strict=True)):
            out_SM = (nn.functional.silu(x_SM @ w1[0].t()) * (x_SM @ w1[1].t())) @ w2.t()
            y_SM = y_SM + out_SM * (weight_SK * (expert_SK == e)).sum(1, keepdim=True)
        return y_SM


class HuggingFace(_OwnRouter):
    """Mixtral's experts with `ep_implementation="fusedmoe"`."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self._call: Callable[..., Tensor] | None = None
        if topology.size > 1:
            self._call = self._over_ranks(topology)

    def _over_ranks(self, topology: Topology) -> Callable[..., Tensor]:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        from fusedmoe.hf import expert_parallel

        sizes = {"hidden_size": DIM, "intermediate_size": HIDDEN, "num_local_experts": self._count}
        experts: Any = MixtralExperts(MixtralConfig(**sizes)).double()
        experts.gate_up_proj, experts.down_proj = (nn.Parameter(w.detach()) for w in (self.w1.flatten(1, 2), self.w2))
        self.w1, self.w2 = experts.gate_up_proj, experts.down_proj
        alone = dist.new_group([topology.rank], use_local_synchronization=True)
        # The integration's time-out for peers is 300 s.
        bounded = partial(expert_parallel.shared_topology, timeout_s=topology.job.timeout_s)
        with patch.object(expert_parallel, "shared_topology", bounded):
            return expert_parallel.ExpertParallel(experts, _mesh(topology.ep.handle), _mesh(alone))

    def routed(self, x_SM: Tensor, expert_SK: Tensor, weight_SK: Tensor) -> Tensor:
        if self._call is None:
            return super().routed(x_SM, expert_SK, weight_SK)
        return self._call(x_SM, expert_SK, weight_SK)


class Titan(_OwnRouter):
    """Torchtitan's routed experts with `fusedmoe.titan.routed_experts`."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self._routed: Any = None
        if topology.size > 1:
            self._routed = self._over_ranks(topology)

    def _over_ranks(self, topology: Topology) -> Any:
        from torchtitan.models.common.config_utils import make_routed_experts_config

        import fusedmoe.titan

        init = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), nn.init.zeros_)
        sizes = {"dim": DIM, "hidden_dim": HIDDEN, "num_experts": EXPERTS, "top_k": K}
        cfg = make_routed_experts_config(**sizes, param_init=init, comm_backend="standard")
        module = fusedmoe.titan.routed_experts(cfg, timeout_s=topology.job.timeout_s).build().double()
        module.token_dispatcher.wire_meshes(ep_mesh=_mesh(topology.ep.handle))
        own = module.inner_experts
        own.w1_EFD, own.w3_EFD = (nn.Parameter(self.w1.detach()[:, half].clone()) for half in (0, 1))
        own.w2_EDF = nn.Parameter(self.w2.detach())
        del self.w1, self.w2  # the integration's parameters are updated instead
        return module

    def routed(self, x_SM: Tensor, expert_SK: Tensor, weight_SK: Tensor) -> Tensor:
        if self._routed is None:
            return super().routed(x_SM, expert_SK, weight_SK)
        y_1SM: Tensor = self._routed(x_SM[None], weight_SK[None], expert_SK[None], torch.zeros(EXPERTS))
        return y_1SM[0]


class _GivenRouting(nn.Module):
    """Router of a Megatron layer that returns the routing it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.routing: tuple[Tensor, Tensor] | None = None

    def forward(self, *_: Any) -> tuple[Tensor, Tensor]:
        assert self.routing is not None
        return self.routing

    def set_layer_number(self, number: int) -> None:
        """Called by Megatron's layer."""


class Megatron(_OwnRouter):
    """Megatron-core's MoE layer with `fusedmoe.megatron.routed_experts`."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self._layer: Any = None
        if topology.size > 1:
            self._layer = self._over_ranks(topology)

    def _over_ranks(self, topology: Topology) -> Any:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.transformer_config import TransformerConfig

        import fusedmoe.megatron

        config = TransformerConfig(
            num_layers=1,
            num_attention_heads=1,
            hidden_size=DIM,
            ffn_hidden_size=HIDDEN,
            moe_ffn_hidden_size=HIDDEN,
            num_moe_experts=EXPERTS,
            moe_router_topk=K,
            expert_model_parallel_size=topology.size,
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=nn.functional.silu,
            bias_activation_fusion=False,
            use_cpu_initialization=True,
            params_dtype=torch.float64,
        )
        own, alone = topology.ep.handle, dist.new_group([topology.rank], use_local_synchronization=True)
        single = dict.fromkeys(("tp", "cp", "tp_cp", "expt_tp", "expt_dp"), alone)
        groups = ProcessGroupCollection(ep=own, tp_ep=own, tp_dp_cp=own, **single)
        spec = get_gpt_layer_local_spec(num_experts=EXPERTS).submodules.mlp
        layer: Any = fusedmoe.megatron.routed_experts(spec, timeout_s=topology.job.timeout_s)(
            config=config, pg_collection=groups
        )
        layer.router = _GivenRouting()
        with torch.no_grad():
            for w1, w2, expert in zip(self.w1, self.w2, layer.experts.local_experts, strict=True):
                expert.linear_fc1.weight.copy_(w1.flatten(0, 1))
                expert.linear_fc2.weight.copy_(w2)
        del self.w1, self.w2  # Megatron's parameters are updated instead
        return layer

    def routed(self, x_SM: Tensor, expert_SK: Tensor, weight_SK: Tensor) -> Tensor:
        if self._layer is None:
            return super().routed(x_SM, expert_SK, weight_SK)
        zeros_SE = x_SM.new_zeros(len(x_SM), EXPERTS)
        chosen_SE = zeros_SE.bool().scatter(1, expert_SK, True)
        self._layer.router.routing = (zeros_SE.scatter(1, expert_SK, weight_SK), chosen_SE)
        y_S1M, _ = self._layer(x_SM[:, None])
        return y_S1M[:, 0]


def _mesh(group: Any) -> DeviceMesh:
    """Return a mesh over an existing group: errors of PyTorch's mesh construction are out of scope."""
    return DeviceMesh.from_group(group, "cpu")


Door = Functions | Tutel | HuggingFace | Titan | Megatron
# Modules that the integrations' models import.
LIBRARIES = {
    "hf": ("transformers.models.mixtral.modeling_mixtral", "fusedmoe.hf.expert_parallel"),
    "titan": ("torchtitan.models.common.config_utils", "fusedmoe.titan"),
    "megatron": ("megatron.core.models.gpt.gpt_layer_specs", "fusedmoe.megatron"),
}

DOORS: dict[str, Callable[[Topology], Door]] = {
    "functions": Functions,
    "tutel": Tutel,
    "hf": HuggingFace,
    "titan": Titan,
    "megatron": Megatron,
}


def train(model: Door, topology: Topology, batches: list[list[Tensor]], probe: Tensor) -> list[list[Tensor]]:
    """Run gradient descent on batches [step][rank]; return losses and probe results.

    Batches and results cover the ranks that this process stands for.
    """
    found: list[list[Tensor]] = [[] for _ in batches[0]]
    for step in batches:
        model.zero_grad()
        for x_SM, mine in zip(step, found, strict=True):
            loss = model(x_SM).square().sum() / 50
            loss.backward()
            mine.append(loss.detach())
        for parameter in model.shared():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            all_reduce(topology.world, parameter.grad, operation="gradient sum")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    with torch.no_grad():
        for mine in found:
            mine.append(model(probe))
    return found
