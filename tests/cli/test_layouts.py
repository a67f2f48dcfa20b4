"""Memory of a rank compared with counted tensors, and layouts that fit a machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch

from fusedmoe.cli.job import Sizes, make_optimizer
from fusedmoe.cli.layouts import ParallelLayout, chosen_settings, find_remedy, layouts, rank_memory
from fusedmoe.cli.settings import Settings
from fusedmoe.cli.step_plans import make_meta_model
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.external_job import ExternalJob, TrainingState
from fusedmoe.models.transformer import Transformer
from fusedmoe.schedule.machines import MACHINES, SourcedValue
from tests.marks import slowly

MODEL = ModelConfig(
    **{"layers": 4, "model_dim": 128, "heads": 4, "kv_heads": 2, "head_dim": 48, "hidden": 96, "experts": 8, "k": 2},
    **{"dense_layers": 1, "dense_hidden": 160, "shared_hidden": 64, "vocab_size": 1000, "capacity_factor": None},
    **{"seq_len": 64, "batch": 4},
)
LATENT = {"kv_heads": None, "q_rank": 24, "kv_rank": 20, "rope_dim": 16, "value_dim": 32}
ALONE = Sizes(1, 1, 1, 1)


def nbytes(tensors: object) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", [{}, LATENT, *slowly({"k": 4}, {"heads": 8}, {"hidden": 192}, {"vocab_size": 4000})])
def test_memory_equals_counted_tensors(change: dict[str, int]) -> None:
    """Of one rank in float32: exactly for the training state, within 10% for the saved tensors."""
    settings = Settings(replace(MODEL, **change))
    model = Transformer(settings.model, dtype=torch.float32)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.randint(settings.model.vocabulary, (settings.model.batch, settings.model.seq_len))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, tokens)
    counted = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    (loss.nats + loss.aux).backward()
    optimizer = make_optimizer(model, settings)
    optimizer.step()
    found = rank_memory(settings, 1, ALONE, make_meta_model(settings))
    assert found.parameters == nbytes(model.parameters())
    assert found.gradients == nbytes(parameter.grad for parameter in model.parameters())
    moments = chain.from_iterable(state.values() for state in optimizer.state.values())
    assert found.optimizer == nbytes(moment for moment in moments if moment.dim())
    assert found.activations == pytest.approx(counted, rel=0.1)


def test_split_and_sharded_state_take_their_share() -> None:
    settings = Settings(MODEL)
    meta, alone = make_meta_model(settings), rank_memory(settings, 1, ALONE, make_meta_model(settings))
    sizes = Sizes(8, 2, 2, 2)
    split = rank_memory(settings, 8, sizes, meta)
    experts = 4 * sum(p.numel() for layer in meta.moe_layers() for p in layer.experts.parameters())
    assert alone.parameters - 3 / 4 * experts > split.parameters > alone.parameters / 4
    sharded = rank_memory(settings, 8, sizes, meta, TrainingState(sharded="all"))
    assert sharded.parameters == pytest.approx(alone.parameters / 8)
    # Gathered float32 parameters of two of the four blocks, and gradients of one.
    assert sharded.workspace == pytest.approx(split.workspace + 3 / 4 * split.parameters)
    zero = rank_memory(settings, 8, sizes, meta, TrainingState(2, 4, 12, "optimizer"))
    assert zero.parameters == split.parameters / 2 and zero.optimizer == pytest.approx(alone.parameters * 3 / 8)
    assert rank_memory(replace(settings, recompute=True), 8, sizes, meta).activations < split.activations


def test_layouts_fit_the_memory_or_come_by_memory() -> None:
    machine = MACHINES["dgx-h100"]
    settings = Settings(replace(MODEL, vocab_size=60_000), dtype="bf16", mp=2)
    meta = make_meta_model(settings)
    every = layouts(settings, 16, machine, ExternalJob(MODEL), meta)
    assert all(
        (layout.sizes.esp, layout.sizes.mp) == (1, 2) and 16 % (layout.sizes.ep * layout.sizes.esp) == 0
        for layout in every
    )
    assert [layout.token_s for layout in every] == sorted(layout.token_s for layout in every)
    totals = sorted(layout.memory.total for layout in every)
    some = replace(machine, memory_bytes=SourcedValue(totals[len(totals) // 2], "chosen"))
    fitting = layouts(settings, 16, some, ExternalJob(MODEL), meta)
    assert 0 < len(fitting) < len(every) and all(layout.memory.total <= totals[len(totals) // 2] for layout in fitting)
    none = layouts(settings, 16, replace(machine, memory_bytes=SourcedValue(1.0, "chosen")), ExternalJob(MODEL), meta)
    assert [layout.memory.total for layout in none] == totals


def test_remedy_is_the_smallest_change_that_fits() -> None:
    settings, sizes = Settings(replace(MODEL, batch=4)), Sizes(8, 2, 1, 1)
    meta = make_meta_model(settings)

    def total(state: TrainingState | None = None, ep: int = 2, **changes: object) -> float:
        return rank_memory(settings.changed(changes), 8, replace(sizes, ep=ep), meta, state).total

    sharded, least = TrainingState(sharded="all"), {"recompute": True, "model.batch": 1}
    for changes, room in (
        ("--recompute", total(recompute=True)),
        ("--recompute, --batch 1", total(**least)),
        ("--recompute, --batch 1, --ep 8", total(ep=8, **least)),
        ("--recompute, --batch 1, state sharded over all ranks (FSDP)", total(sharded, **least)),
    ):
        assert find_remedy(settings, 8, sizes, meta, TrainingState(), room) == {"changes": changes, "total": room}
    assert find_remedy(settings, 8, sizes, meta, TrainingState(), 1.0) is None


def test_least_memory_is_chosen_of_similar_times() -> None:
    settings, meta = Settings(MODEL), make_meta_model(Settings(MODEL))
    memory = [rank_memory(settings, 8, Sizes(8, ep, 1, 1), meta) for ep in (1, 2, 4)]
    found = [ParallelLayout(Sizes(8, 2**at, 1, 1), memory[at], token_s) for at, token_s in enumerate((1.0, 1.1, 1.2))]
    assert chosen_settings(settings, found).ep == 2
