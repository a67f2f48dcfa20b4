"""Pipeline stages: each is trained, clipped and saved independently of other stages' ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fusedmoe.comm.collectives import on_all_ranks
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.transformer import Transformer
from fusedmoe.training import clip_grad_norm, load_checkpoint, save_checkpoint, sync_gradients
from tests.cluster import Cluster

CONFIG = ModelConfig(layers=2, model_dim=8, heads=4, hidden=6, experts=4, k=2, seq_len=5)


def train_and_save_stage(topology: Topology, stage: int, folder: Path) -> dict[str, Tensor]:
    """Train a step of a model of the stage and save it; return its norm and parameters on this rank."""
    torch.manual_seed(stage)
    model = Transformer(CONFIG, topology, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(10 * stage + topology.dp.index)
    tokens, targets = torch.randint(256, (2, 3, 5), generator=generator)
    loss = model(tokens, targets)
    (loss.nats + 0.3 * loss.aux).backward()
    sync_gradients(model, topology)
    norm = clip_grad_norm(model, topology, 0.01)
    optimizer.step()
    save_checkpoint(folder, model, optimizer, topology, {"stage": stage})
    return {"norm": torch.as_tensor(norm), **{name: p.detach() for name, p in model.named_parameters()}}


def train_stages(rank: int, world: int, folder: str, order: list[list[int]]) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep") if order[0][1] == 1 else ("ep", "pp"))
    with Topology.from_mesh(mesh, ep="ep", pp="pp", timeout_s=30) as topology:
        stage = next(number for number, ranks in enumerate(order) if rank in ranks)
        assert topology.world.ranks == topology.ep.ranks == topology.dp.ranks == tuple(order[stage])
        assert topology.size == 2 and topology.is_first == (rank == order[stage][0])
        assert topology.expert_mesh is not None and topology.expert_mesh.mesh.flatten().tolist() == order[stage]

        def refuse() -> None:
            if rank == order[stage][1]:
                raise ValueError("no")

        with pytest.raises(RankError, match=f"failed on rank {order[stage][1]}: ValueError"):
            on_all_ranks(topology.world, "a test", refuse)
        return train_and_save_stage(topology, stage, Path(folder) / str(stage))


def train_stage_alone(rank: int, world: int, stage: int, folder: str) -> dict[str, Tensor]:
    """The same without other ranks; the stage's checkpoint loads here."""
    with Topology.from_sizes(ep=2, timeout_s=30) as topology:
        found = train_and_save_stage(topology, stage, Path(folder) / f"alone {stage}")
        model = Transformer(CONFIG, topology, dtype=torch.float64)
        extra = load_checkpoint(Path(folder) / str(stage), model, None, topology)
        assert extra == {"stage": stage}
        assert all(torch.equal(parameter, found[name]) for name, parameter in model.named_parameters())
        return found


@pytest.mark.slow
@pytest.mark.parametrize("order", [[[0, 1], [2, 3]], pytest.param([[0, 2], [1, 3]], marks=pytest.mark.slow)])
def test_pipeline_stage_equals_separate_job(cluster: Cluster, tmp_path: Path, order: list[list[int]]) -> None:
    found = cluster.run(4, train_stages, str(tmp_path), order)
    for stage, ranks in enumerate(order):
        alone = cluster.run(2, train_stage_alone, stage, str(tmp_path))
        for rank, wanted in zip(ranks, alone, strict=True):
            assert found[rank].keys() == wanted.keys()
            for name in wanted:
                torch.testing.assert_close(found[rank][name], wanted[name], rtol=0, atol=0, msg=name)


def check_stage_of_one_rank(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    with Topology.from_mesh(mesh, pp="pp", timeout_s=30) as topology:
        assert topology.size == 1 and topology.is_first and topology.expert_mesh is None
    for names, text in (({"ep": "pp"}, "ep and pp name the same"), ({"mp": "pp"}, "mp and pp name the same")):
        with pytest.raises(ConfigError, match=text):
            Topology.from_mesh(mesh, pp="pp", timeout_s=30, **names)
    with pytest.raises(ConfigError, match="pp='stage' is not a dimension"):
        Topology.from_mesh(mesh, pp="stage", timeout_s=30)


def test_pipeline_stages_of_one_rank(cluster: Cluster) -> None:
    cluster.run(2, check_stage_of_one_rank)
