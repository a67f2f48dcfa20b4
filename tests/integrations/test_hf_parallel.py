"""Expert parallelism configured through transformers, with this library's exchange, compared with the unsplit model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import fusedmoe.hf  # noqa: F401, registers "fusedmoe" in transformers
from fusedmoe.errors import RankError
from fusedmoe.hf import ExpertParallel
from fusedmoe.hf.callbacks import RouterMetrics
from fusedmoe.hf.module_experts import compute_experts
from fusedmoe.layers import input_checks
from fusedmoe.training import clip_grad_norm
from fusedmoe.training.replicated_parameters import local_part
from tests.cluster import Cluster
from tests.integrations.models import VOCABULARY, make


def load(rank: int, world: int, folder: str, sizes: dict[str, int] | None) -> Any:
    """Load the model over the ranks; without sizes, unsplit."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", world)):
            patch.setenv(name, str(value))
        config = None if sizes is None else DistributedConfig(**sizes, ep_implementation="fusedmoe")
        return AutoModelForCausalLM.from_pretrained(
            folder, experts_implementation="fusedmoe", distributed_config=config
        )


def step(
    rank: int, world: int, folder: str, sizes: dict[str, int], tokens: list[Tensor]
) -> tuple[float, list[int], float]:
    """Return the largest relative error of logits and gradients, this rank's received rows, and the imbalance.

    Rows are per layer. The imbalance is the busiest rank's load relative to the mean, from the metrics.
    """
    model = load(rank, world, folder, sizes)
    rows: list[int] = []
    metrics = RouterMetrics(model.train())

    def counted(*given: Any) -> Tensor:
        rows.append(given[3].rows)
        return compute_experts(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusedmoe.hf.expert_parallel.compute_experts", counted)
        own = tokens[rank // sizes["tp_size"]]
        out = model(input_ids=own)
    told = metrics.collect()["moe/rank_rows"]
    # Sum of all losses over the number of ranks with separate losses, matching FSDP's mean of gradients.
    loss(out.logits, own).backward()
    exact = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").double()
    total = sum(loss(exact(input_ids=each).logits, each) for each in tokens) / len(tokens)
    total.backward()
    found = {"logits": (out.logits.detach(), exact(input_ids=own).logits.detach())}
    wanted = dict(exact.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and wanted[name].grad is not None, name
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        found[name] = grad, wanted[name].grad
    # Some gradients are zero up to rounding.
    least = 1e-3 * max(b.norm() for name, (_, b) in found.items() if name != "logits")
    worst = max(float((a - b).norm() / b.norm().clamp(min=least)) for a, b in found.values())
    # No single mesh holds all gradients. Clipping to a tenth of the total norm scales the norm and each gradient by a
    # tenth.
    norm = torch.stack([grad.norm() for name, (_, grad) in found.items() if name != "logits"]).norm()
    before = {name: local_part(parameter.grad).clone() for name, parameter in model.named_parameters()}
    for wants in (norm, norm / 10):
        assert float(clip_grad_norm(model, None, float(norm) / 10)) == pytest.approx(float(wants), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(local_part(parameter.grad), before[name] / 10, rtol=1e-4, atol=0)
    return worst, rows, told


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])


def test_expert_parallel_model_equals_unsplit(cluster: Cluster, tmp_path: Path) -> None:
    make("mixtral", "eager").save_pretrained(tmp_path)
    sizes = {"fsdp_size": 2, "ep_size": 2, "tp_size": 1}
    tokens = [torch.randint(0, VOCABULARY, (1, length)) for length in (3, 11)]
    results = cluster.run(2, step, str(tmp_path), sizes, tokens)
    assert all(worst < 1e-5 for worst, *_ in results), results
    # The row count is tokens times experts per token, for every distribution.
    each = list(zip(*(rows for _, rows, _ in results), strict=True))
    assert [sum(rows) for rows in each] == [2 * 14] * 2
    over_mean = sum(max(rows) / 14 for rows in each) / 2
    assert [told for *_, told in results] == pytest.approx([over_mean] * 2)


@pytest.mark.slow
def test_non_finite_input_on_one_rank_raises_on_both(cluster: Cluster, tmp_path: Path) -> None:
    make("mixtral", "eager").save_pretrained(tmp_path)
    cluster.run(2, run_non_finite, str(tmp_path), {"fsdp_size": 2, "ep_size": 2, "tp_size": 1})


def run_non_finite(rank: int, world: int, folder: str, sizes: dict[str, int]) -> None:
    """NaN on one rank ends the call on both, found by the host or by the exchange; the next call succeeds."""
    model = load(rank, world, folder, sizes)
    inputs = torch.randn(1, 7, model.config.hidden_size)
    bad = inputs.clone()
    if rank == 1:
        bad[0, 3] = torch.nan
    for on_device in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if on_device:
                patch.setattr(input_checks, "uses_triton", lambda tensor: True)
            with pytest.raises(RankError, match="rank 1.*Experts: tokens or router weights .* are NaN or infinite"):
                model(inputs_embeds=bad)
            assert model(inputs_embeds=inputs).logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fsdp", "ep", "tp"), [("mixtral", 4, 2, 1), ("gpt-oss", 2, 4, 2), ("deepseek", 1, 4, 4)]
)
def test_expert_parallel_families_on_four_ranks(
    cluster: Cluster, tmp_path: Path, family: str, fsdp: int, ep: int, tp: int
) -> None:
    """Uneven batches; ranks that share a batch; ranks without tokens."""
    make(family, "eager").save_pretrained(tmp_path)
    tokens = [torch.randint(0, VOCABULARY, (1, length)) for length in (3, 9, 5, 13)[:fsdp]]
    sizes = {"fsdp_size": fsdp, "ep_size": ep, "tp_size": tp}
    results = cluster.run(4, step, str(tmp_path), sizes, tokens)
    assert all(worst < 1e-5 for worst, *_ in results), results


def load_and_save(rank: int, world: int, folder: str, sizes: dict[str, int], before: str | None, after: str) -> Any:
    """Run a step, or load the state of another rank count; save. Return the unsplit state by name."""
    model = load(rank, world, folder, sizes if world > 1 else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    if before is None:
        model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
    found, moments = get_state_dict(model, optimizer)
    state = {"model": found, "optimizer": moments}
    if before is not None:
        torch.distributed.checkpoint.load(state, checkpoint_id=before)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        found, moments = get_state_dict(model, optimizer)
        state = {"model": found, "optimizer": moments}
    torch.distributed.checkpoint.save(state, checkpoint_id=after)
    named = [(name, tensor) for name, tensor in found.items() if isinstance(tensor, Tensor)]
    for name, values in moments["state"].items():
        named += [(f"{name}.{key}", value) for key, value in values.items() if isinstance(value, Tensor)]
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in named}
    return {name: value.detach().numpy().tobytes() for name, value in whole.items()} if rank == 0 else None


@pytest.mark.slow
def test_dcp_checkpoint_reshards_between_rank_counts(cluster: Cluster, tmp_path: Path) -> None:
    """With torch.distributed.checkpoint alone: experts over 2, 4, and 1 ranks, model and optimizer, bitwise equal."""
    make("mixtral", "eager").save_pretrained(tmp_path)
    states, before = [], None
    for world in (2, 4, 1):
        sizes, after = {"fsdp_size": world, "ep_size": world, "tp_size": 1}, str(tmp_path / f"of-{world}")
        states.append(cluster.run(world, load_and_save, str(tmp_path), sizes, before, after)[0])
        before = after
    assert any(name.endswith("exp_avg") for name in states[0]) and states[0] == states[1] == states[2]


def test_expert_parallel_implementation_is_registered() -> None:
    from transformers.distributed.expert_parallel import EPImplementationInterface

    assert EPImplementationInterface()["fusedmoe"] is ExpertParallel
