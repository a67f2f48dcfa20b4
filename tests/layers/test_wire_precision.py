"""Under autocast rows are sent in its dtype: half of float32's bytes, in both passes, for all experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fusedmoe
from fusedmoe import MoELayer, Schedule, Topology, experts, gates
from fusedmoe.tutel import moe
from tests.cluster import Cluster
from tests.layers.test_lifetime import Dense, M, own


class Wide(nn.Module):
    """Experts of a Tutel user, with float32 results."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.weight_eMM, self.bias_M = nn.Parameter(torch.randn(2, M, M)), nn.Parameter(torch.randn(M))

    def forward(self, x_eCM: Tensor, _: Any) -> Tensor:
        return x_eCM @ self.weight_eMM + self.bias_M


def expert_with_norm(model_dim: int) -> nn.Module:
    """Autocast computes the norm, and thus the result, in float32."""
    return nn.Sequential(own(model_dim), nn.LayerNorm(model_dim))


def make_models(world: int) -> dict[str, nn.Module]:
    ep, esp = Topology.from_sizes(ep=world, timeout_s=30), Topology.from_sizes(1, world, timeout_s=30)

    def layer(network: experts.Experts | None = None, topology: Topology = ep, **options: Any) -> MoELayer:
        return MoELayer(M, gates.TopK(4, 2), network or experts.SwiGLU(4), topology=topology, **options)

    def tutel(degree: int, **described: Any) -> nn.Module:
        described |= {"num_experts_per_device": 4 // world}
        return moe.moe_layer({"type": "top", "k": 2}, M, described, a2a_ffn_overlap_degree=degree)

    networks = {
        "grouped": lambda: None,
        "own": lambda: experts.Custom(own),
        "norm": lambda: experts.Custom(expert_with_norm),
    }
    models: dict[str, nn.Module] = {"esp": layer(topology=esp), "2dh": layer(dispatch="2dh")}
    models["fssdp"] = layer(placement="fssdp")
    for name, network in networks.items():
        models[name] = layer(network())
        models[f"{name}, chunks"] = layer(network(), schedule=Schedule("fsmoe", (2, 2)))
        models[f"{name}, blocks"] = fusedmoe.pipeline([(Dense(), layer(network())) for _ in range(2)], (2, 2))
    for degree in (1, 2):
        models[f"tutel, {degree}"] = tutel(degree, type="ffn", hidden_size_per_expert=4)
        models[f"tutel's own, {degree}"] = tutel(degree, type="custom", module=Wide)
    return models


def bytes_and_dtypes_sent(rank: int, world: int) -> dict[str, list[tuple[int, set[torch.dtype]]]]:
    """Return per model the bytes and dtypes of the rows that this rank sends: in float32, then under autocast."""
    sent: list[Tensor] = []
    plain = dist.all_to_all_single

    def noted(output: Tensor, input: Tensor, *given: Any, **more: Any) -> Any:
        if input.shape[1:] == (M,):
            sent.append(input)
        return plain(output, input, *given, **more)

    found: dict[str, list[tuple[int, set[torch.dtype]]]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", noted)
        for name, model in make_models(world).items():
            for lower in (False, True):
                x_BLM = torch.randn(4, 3, M, generator=torch.Generator().manual_seed(rank)).requires_grad_()
                with torch.autocast("cpu", torch.bfloat16, enabled=lower):
                    y_BLM = model(x_BLM)
                y_BLM.float().square().sum().backward()
                bytes_, dtypes = sum(rows.nbytes for rows in sent), {rows.dtype for rows in sent}
                found.setdefault(name, []).append((bytes_, dtypes))
                sent.clear()
                assert x_BLM.grad is not None and x_BLM.grad.dtype == torch.float32
    return found


def test_autocast_halves_sent_bytes(cluster: Cluster) -> None:
    ranks = cluster.run(2, bytes_and_dtypes_sent)
    for name in ranks[0]:
        (whole, lower), (_, dtypes) = ([of[name][i][0] for of in ranks] for i in (0, 1)), ranks[0][name][1]
        # Sum over ranks: after the first block's bfloat16 products, gates may choose other experts, which shifts rows
        # between ranks.
        assert dtypes == {torch.bfloat16} and sum(lower) == sum(whole) / 2 > 0, (name, whole, lower, dtypes)
