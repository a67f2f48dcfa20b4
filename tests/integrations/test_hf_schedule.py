"""Schedules of the Hugging Face integration: results and gradients equal those without, under all trainer features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import EPImplementationInterface

import fusedmoe.hf
from fusedmoe import Schedule
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.hf import PlanTuningCallback
from fusedmoe.layers.scheduled_exchange import exchanges_in
from fusedmoe.schedule.cost import CostModel, Line, Observed
from tests.cluster import Cluster
from tests.integrations.models import VOCABULARY, make
from tests.integrations.plans_run import plans_run
from tests.marks import slowly

# Families whose experts run as one operation, and families that autograd differentiates chunk by chunk.
DEGREES = {"mixtral": (2, 3), "qwen3": (4, 1), "gpt-oss": (2, 2)}


def load(rank: int, world: int, folder: str, sizes: dict[str, int], implementation: str = "fusedmoe") -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", world)):
            patch.setenv(name, str(value))
        config = DistributedConfig(**sizes, ep_implementation=implementation)
        return AutoModelForCausalLM.from_pretrained(
            folder, experts_implementation="fusedmoe", distributed_config=config, dtype="auto"
        )


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())


def found(model: Any, tokens: list[Tensor], *, autocast: bool = False, last_syncs: bool = False) -> dict[str, Tensor]:
    """Return losses and accumulated gradients of batches; with `last_syncs` gradients are reduced at the end."""
    losses = []
    for number, batch in enumerate(tokens):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(not last_syncs or number == len(tokens) - 1)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.detach())
    grads = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grads[name] = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    model.zero_grad()
    return {"losses": torch.stack(losses), **grads}


def evaluated(model: Any, tokens: list[Tensor]) -> dict[str, Tensor]:
    model.eval()
    with torch.no_grad():
        values = {"logits": model(input_ids=tokens[0]).logits}
    model.train()
    return values


def checkpointed(model: Any, tokens: list[Tensor], reentrant: bool) -> dict[str, Tensor]:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    values = found(model, tokens)
    model.gradient_checkpointing_disable()
    return values


CASES: dict[str, Callable[[Any, list[Tensor]], dict[str, Tensor]]] = {
    "step": lambda model, tokens: found(model, tokens[:1]),
    "autocast": lambda model, tokens: found(model, tokens[:1], autocast=True),
    "accumulated": lambda model, tokens: found(model, tokens),
    "no sync": lambda model, tokens: found(model, tokens, last_syncs=True),
    "evaluation": evaluated,
    "checkpoints": lambda model, tokens: checkpointed(model, tokens, reentrant=False),
    "reentrant checkpoints": lambda model, tokens: checkpointed(model, tokens, reentrant=True),
}


def compare(
    rank: int,
    world: int,
    folder: str,
    sizes: dict[str, int],
    degrees: tuple[int, int],
    cases: Sequence[str] = tuple(CASES),
) -> None:
    model = load(rank, world, folder, sizes).train()
    replica = rank // sizes["tp_size"]
    tokens = [torch.randint(0, VOCABULARY, (1, n), generator=torch.Generator().manual_seed(n + replica))
              for n in (9 + 4 * replica, 6)]  # fmt: skip
    for name in cases:
        case = CASES[name]
        fusedmoe.hf.apply(model, schedule="off")
        with plans_run() as ran:
            wanted = case(model, tokens)
        assert not ran
        fusedmoe.hf.apply(model, schedule=Schedule("fsmoe", degrees))
        with plans_run() as ran:
            values = case(model, tokens)
        # Chunks with separate graphs, inside checkpoints that pack saved tensors, run one after the other.
        by_plan = name != "checkpoints" or degrees[0] != degrees[1]
        assert set(ran) == ({degrees} if by_plan else set()), name
        assert values.keys() == wanted.keys() and len(wanted) > (1 if name != "evaluation" else 0)
        if name == "autocast":
            for key, value in wanted.items():
                least = max(float(value.norm()), 1e-3)
                assert float((values[key] - value).norm()) < 1e-2 * least, (name, key)
        else:
            for key, value in wanted.items():
                torch.testing.assert_close(values[key], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("family", "cases"),
    [
        ("mixtral", ("accumulated",)),
        *slowly(("mixtral", tuple(CASES)), ("gpt-oss", tuple(CASES))),
    ],
)
def test_scheduled_model_equals_unscheduled(
    cluster: Cluster, tmp_path: Path, family: str, cases: Sequence[str]
) -> None:
    make(family, "eager", torch.float64).save_pretrained(tmp_path)
    sizes = {"fsdp_size": 2, "ep_size": 2, "tp_size": 1}
    cluster.run(2, compare, str(tmp_path), sizes, DEGREES[family], cases)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fsdp", "ep", "tp"), [("mixtral", 4, 2, 1), ("gpt-oss", 2, 4, 2), ("qwen3", 1, 4, 4)]
)
def test_scheduled_model_equals_unscheduled_on_four_ranks(
    cluster: Cluster, tmp_path: Path, family: str, fsdp: int, ep: int, tp: int
) -> None:
    make(family, "eager", torch.float64).save_pretrained(tmp_path)
    sizes = {"fsdp_size": fsdp, "ep_size": ep, "tp_size": tp}
    cluster.run(4, compare, str(tmp_path), sizes, DEGREES[family], timeout_s=300)


def configure_schedules(rank: int, world: int, folder: str) -> None:
    """Schedule names in a configuration, their errors, and ranks with different names."""
    sizes = {"fsdp_size": 2, "ep_size": 2, "tp_size": 1}
    model = load(rank, world, folder, sizes, "fusedmoe-auto")
    exchanges = exchanges_in(model)
    assert len(exchanges) == 2 and all(one.can_plan for one in exchanges)
    assert "fusedmoe-fsmoe" in EPImplementationInterface() and "fusedmoe-off" not in EPImplementationInterface()
    assert all(one.topology.ep.downward is not None for one in exchanges)
    fusedmoe.hf.apply(model, schedule="off")
    assert not any(one.can_plan for one in exchanges)
    # Settings that a call omits stay.
    fusedmoe.hf.apply(fusedmoe.hf.apply(model, schedule="tutel"))
    assert all(one.can_plan for one in exchanges)
    with pytest.raises(ConfigError, match="unknown schedule 'fast'; choose off, auto"):
        fusedmoe.hf.apply(model, schedule="fast")
    with pytest.raises(RankError, match="schedule is 'off' on ranks .0. and 'tutel' on ranks .1."):
        fusedmoe.hf.apply(model, schedule=("off", "tutel")[rank])
    theirs = load(rank, world, folder, sizes, "all_to_all")
    with pytest.raises(ConfigError, match="transformers itself sends.*ep_implementation='fusedmoe'"):
        fusedmoe.hf.apply(theirs, schedule="auto")
    fusedmoe.hf.apply(theirs, schedule="off")


def tune_in_trainer(rank: int, world: int, folder: str) -> None:
    """Run steps as `Trainer` calls them, compared with a model that is not tuned."""
    sizes = {"fsdp_size": 2, "ep_size": 2, "tp_size": 1}
    plain, model = (load(rank, world, folder, sizes).train() for _ in range(2))
    tokens, told = [torch.arange(9 + rank)[None]], list[str]()
    callback = PlanTuningCallback(limit=3, tell=told.append)
    line = Line(1e-5, 1e-7)
    costs = CostModel({"all-to-all/ep": line, "gemm": Line(0.0, 1e-9), "all-reduce/dp": line})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEDMOE_CACHE", folder)
        patch.setattr("fusedmoe.layers.measure.measured_costs", lambda *_: costs)
        patch.setattr("fusedmoe.layers.measure.time_layer", lambda *_: Observed({}))
        callback.on_train_begin(None, None, None, model=model)
        wanted = found(plain, tokens)
        with plans_run() as ran:
            for _ in range(8):
                callback.on_step_begin(None, None, None)
                values = found(model, tokens)
                callback.on_step_end(None, None, None)
                for key, value in wanted.items():
                    torch.testing.assert_close(values[key], value, rtol=1e-10, atol=1e-10)
    assert callback.tuning is not None
    # The first step runs without a plan, and at least one later step does, too.
    assert ran and callback.tuning.trials.num_tried > 2
    theirs = load(rank, world, folder, sizes, "all_to_all")
    with pytest.raises(ConfigError, match="tune_model: the model has no experts"):
        PlanTuningCallback().on_train_begin(None, None, None, model=theirs)


@pytest.mark.slow
def test_plan_tuning_callback_preserves_results(cluster: Cluster, tmp_path: Path) -> None:
    make("mixtral", "eager", torch.float64).save_pretrained(tmp_path)
    cluster.run(2, tune_in_trainer, str(tmp_path))
    callback = PlanTuningCallback()
    callback.on_train_begin(None, None, None, model=make("mixtral", "fusedmoe"))
    callback.on_step_begin(None, None, None)
    callback.on_step_end(None, None, None)
    assert callback.tuning is None  # nothing is sent
    with pytest.raises(ConfigError, match="tune_model: the model has no experts"):
        callback.on_train_begin(None, None, None, model=torch.nn.Linear(2, 2))


@pytest.mark.slow
def test_schedule_names_are_applied_and_checked(cluster: Cluster, tmp_path: Path) -> None:
    make("mixtral", "eager").save_pretrained(tmp_path)
    cluster.run(2, configure_schedules, str(tmp_path))


def test_schedule_name_in_one_process_is_checked() -> None:
    """One process sends nothing, so the choice has no effect, but an unknown name is an error."""
    model = make("mixtral", "eager")
    assert fusedmoe.hf.apply(model, schedule="auto") is model
    with pytest.raises(ConfigError, match="unknown schedule"):
        fusedmoe.hf.apply(model, schedule="fast")
