"""fp8 between ranks (`wire="fp8"`) in the integrations: plans and micro-batches agree, near the exact results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedmoe import Schedule
from fusedmoe.errors import ConfigError
from fusedmoe.tutel import moe
from tests.cluster import Cluster

PLAN = Schedule("fsmoe", (2, 2))


def require_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name} {text}"
        )


def require_rounded(got: dict[str, Tensor], exact: dict[str, Tensor], name: str, most: float = 0.1) -> None:
    error = float((got[name] - exact[name]).norm() / exact[name].norm())
    assert 1e-5 < error < most, error


def run_hf(rank: int, world: int, folder: str) -> None:
    import fusedmoe.hf
    from tests.integrations.test_hf_blocks import SIZES, batches
    from tests.integrations.test_hf_schedule import found, load

    model, tokens = load(rank, world, folder, SIZES).train(), batches(rank)[:1]
    exact = found(model, tokens)
    fusedmoe.hf.apply(model, wire="fp8")
    expected = found(model, tokens)
    name = next(name for name in exact if "experts" in name)
    require_rounded(expected, exact, name)
    for schedule, wire in ((Schedule("fsmoe", (2, 3), wire="fp8"), None), (PLAN, "fp8")):
        fusedmoe.hf.apply(model, schedule, wire)
        require_equal(found(model, tokens), expected)
    fusedmoe.hf.pipeline(model, (2, 2))  # keeps the format of the schedule
    require_equal(found(model, tokens), expected)
    fusedmoe.hf.pipeline(model, None)
    fusedmoe.hf.apply(model, "off")
    require_equal(found(model, tokens), exact)
    fusedmoe.hf.pipeline(model, (2, 2), wire="fp8")
    require_equal(found(model, tokens), expected)
    with pytest.raises(ConfigError, match="choose bf16, fp8"):
        fusedmoe.hf.apply(model, wire="int8")


def test_hugging_face(cluster: Cluster, tmp_path: Path) -> None:
    from tests.integrations.test_hf_blocks import make

    make("qwen3").save_pretrained(tmp_path)
    cluster.run(2, run_hf, str(tmp_path))


def run_titan(rank: int, world: int) -> None:
    import fusedmoe.titan
    from fusedmoe.layers.scheduled_exchange import exchanges_in
    from tests.integrations.test_titan import batch
    from tests.integrations.test_titan_schedule import found, parallel

    tokens = [batch(0, 2 * world + 1)[: 1 + 2 * rank]]
    model, context = parallel(rank, world, None, {"dp_shard": 2, "tp": 1, "ep": 2})

    def run(schedule: Any) -> dict[str, Tensor]:
        for exchange in exchanges_in(model):
            exchange.set_schedule(schedule)
        with context():
            return found(model, tokens)

    exact, expected = run("off"), run(Schedule("off", wire="fp8"))
    require_rounded(expected, exact, next(name for name in exact if "experts" in name))
    require_equal(run(Schedule("fsmoe", (2, 3), wire="fp8")), expected)
    for exchange in exchanges_in(model):
        exchange.set_schedule("off")
    fusedmoe.titan.pipeline(model, (2, 2), wire="fp8")
    with context():
        require_equal(found(model, tokens), expected)


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_titan(cluster: Cluster) -> None:
    pytest.importorskip("torchtitan.distributed.fsdp", exc_type=ImportError)
    from tests.integrations.test_titan import config

    cluster.run(2, run_titan)
    from torchtitan.config.override import OverrideConfig, apply_overrides

    for override in ("fusedmoe.titan.routed_experts", "fusedmoe.titan.token_dispatcher"):
        job = config()
        apply_overrides(OverrideConfig(imports=[(override, {"wire": "fp8"})]), job)
        assert "wire='fp8'" in repr(job)


def run_megatron(rank: int, world: int) -> None:
    from functools import partial

    from tests.integrations.test_megatron import DIM, OURS, config, megatron
    from tests.integrations.test_megatron_schedule import Stack, found

    with megatron(expert_model_parallel_size=world):
        cfg = config(expert_model_parallel_size=world)
        batches = [torch.randn(12, 1, DIM, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)]
        for ours in OURS:
            results = []
            for schedule, wire in (("off", None), ("off", "fp8"), (PLAN, "fp8"), (Schedule("off", wire="fp8"), None)):
                torch.manual_seed(1)
                results.append(found(Stack(cfg, partial(ours, wire=wire), schedule), batches))
            exact, expected, *others = results
            require_rounded(expected, exact, "y0")
            for other in others:
                require_equal(other, expected)


def test_megatron(cluster: Cluster) -> None:
    pytest.importorskip("megatron.core")
    cluster.run(2, run_megatron)


def run_tutel(rank: int, world: int) -> None:
    def run(**options: Any) -> dict[str, Tensor]:
        torch.manual_seed(1)
        experts = {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": 24}
        layer = moe.moe_layer({"type": "top", "k": 2, "capacity_factor": 0}, 16, experts, **options).double()
        x_SM = torch.randn(20 + rank, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        x_SM.requires_grad_()
        y_SM = layer(x_SM)
        y_SM.square().sum().backward()
        assert x_SM.grad is not None
        gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
        return {"y": y_SM.detach(), "x": x_SM.grad, **gradients}

    exact, expected = run(), run(wire="fp8")
    require_rounded(expected, exact, "y")
    require_equal(run(wire="fp8", a2a_ffn_overlap_degree=2), expected)
    assert all(torch.equal(value, exact[name]) for name, value in run(wire="bf16").items())
    with pytest.raises(ConfigError, match="choose bf16, fp8"):
        run(wire="fp4")


def test_tutel(cluster: Cluster) -> None:
    cluster.run(2, run_tutel)
