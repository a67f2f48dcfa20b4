"""Checkpoints: Tutel's keys and shapes; two ranks' files on one, four and eight, with the same evaluation loss."""

from __future__ import annotations

import copy
import io
import logging
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from fusedmoe.errors import ConfigError
from fusedmoe.tutel import moe
from fusedmoe.tutel.checkpoint import gather, scatter
from tests.cluster import Cluster

D, H = 8, 16


def model(experts: int, kind: str = "ffn", **more: Any) -> nn.ModuleDict:
    """4 experts in all; −n: n ranks share one."""
    described = {"type": kind, "num_experts_per_device": experts, "hidden_size_per_expert": H, **more}
    layer = moe.moe_layer({"type": "top", "k": 2, "capacity_factor": 0.0}, D, described)
    return nn.ModuleDict({"dense": nn.Linear(D, D), "moe": layer})


def evaluation_loss(m: nn.ModuleDict) -> float:
    x = torch.randn(12, D, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return float(m["moe"](m["dense"](x)).square().sum())


def train_and_save(rank: int, world: int, folder: str, kind: str) -> float:
    torch.manual_seed(0)
    m = model(4 // world, kind)
    torch.manual_seed(10 + rank)
    with torch.no_grad():
        for p in m["moe"].experts.parameters():
            p.copy_(torch.randn_like(p))
    torch.save(m.state_dict(), f"{folder}/{rank}-of-{world}.ckpt")
    return evaluation_loss(m)


def load(rank: int, world: int, folder: str, kind: str) -> float:
    m = model(4 // world if world <= 4 else -(world // 4), kind)
    state = torch.load(f"{folder}/{rank}-of-{world}.ckpt", weights_only=True)
    m.load_state_dict(state)
    after = m.state_dict()
    assert list(after) == list(state) and all(torch.equal(after[key], state[key]) for key in state)
    return evaluation_loss(m)


@pytest.mark.slow  # eight ranks
@pytest.mark.parametrize("kind", ["ffn", "llama_ffn"])
def test_checkpoint_of_two_ranks_loads_on_one_four_and_eight(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    expected = cluster.run(2, train_and_save, str(tmp_path), kind)
    assert expected[0] == expected[1]
    files = str(tmp_path / "{rank}-of-{size}.ckpt")
    whole = str(tmp_path / "whole.ckpt")
    gather.main(["--inputs", files, "--input_size", "2", "--output", whole])
    assert torch.load(whole, weights_only=True)["moe._num_global_experts"] == 4
    for world in (1, 4, 8):
        scatter.main(["--input", whole, "--output_size", str(world), "--outputs", files])
        losses = [load(0, 1, str(tmp_path), kind)] if world == 1 else cluster.run(world, load, str(tmp_path), kind)
        assert losses == pytest.approx([expected[0]] * world, rel=1e-5)
    gather.main(["--inputs", files, "--input_size", "8", "--output", str(tmp_path / "again.ckpt")])
    first, again = (torch.load(path, weights_only=True) for path in (whole, tmp_path / "again.ckpt"))
    assert list(first) == list(again) and all(torch.equal(first[key], again[key]) for key in first)


def save_and_load_with_dcp(rank: int, world: int, folder: str) -> None:
    """PyTorch's checkpoint refuses a rank's experts, of which it would store one rank's; the rest is plain tensors."""
    for experts in (2, -2):
        state = model(experts).state_dict()
        with pytest.raises(dcp.CheckpointException, match="moe.experts.batched_fc1_w: .*training.save_checkpoint"):
            dcp.save(state, checkpoint_id=folder)
        with pytest.raises(dcp.CheckpointException, match="batched_fc2_bias: .*training.save_checkpoint"):
            dcp.save({"batched_fc2_bias": copy.deepcopy(state["moe.experts.batched_fc2_bias"])}, checkpoint_id=folder)
        with pytest.raises(dcp.CheckpointException, match="training.save_checkpoint"):
            future = dcp.async_save(state, checkpoint_id=folder)
            future.result()  # type: ignore[union-attr]
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        assert {type(value) for value in torch.load(buffer, weights_only=True).values()} == {Tensor}
        assert type(state["moe.experts.batched_fc1_w"] + 1) is Tensor
        m = model(experts)
        m.load_state_dict(state, assign=True)
        assert {type(parameter) for parameter in m.parameters()} == {nn.Parameter}
        assert isinstance(nn.Parameter(state["moe.experts.batched_fc1_w"]), nn.Parameter)
    dcp.save({name: value for name, value in state.items() if ".experts." not in name}, checkpoint_id=folder)


def test_torch_distributed_checkpoint_round_trip(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(2, save_and_load_with_dcp, str(tmp_path / "state"))
    whole = model(2)
    before = copy.deepcopy(whole.state_dict())
    dcp.save(whole.state_dict(), checkpoint_id=tmp_path / "whole")
    dcp.load(whole.state_dict(), checkpoint_id=tmp_path / "whole")
    assert all(torch.equal(value, before[key]) for key, value in whole.state_dict().items())


OUTPUT = 5  # two ranks that share an expert hold three columns of its output bias each


def evaluate_shared_expert(rank: int, world: int, folder: str) -> float:
    """Two experts, each on half of the ranks; loading returns the experts of the file."""
    torch.manual_seed(rank)
    m = model(-(world // 2) if world > 2 else 2, output_dim=OUTPUT)
    m.load_state_dict(torch.load(f"{folder}/{rank}-of-{world}.ckpt", weights_only=True))
    return evaluation_loss(m)


def test_uneven_output_bias_shards_round_trip(cluster: Cluster, tmp_path: Path) -> None:
    m = model(2, output_dim=OUTPUT)
    with torch.no_grad():
        m["moe"].experts.batched_fc2_bias.copy_(torch.arange(1.0, 2 * OUTPUT + 1).view(2, OUTPUT))
    files, whole = str(tmp_path / "{rank}-of-{size}.ckpt"), str(tmp_path / "whole.ckpt")
    torch.save(m.state_dict(), whole)
    scatter.main(["--input", whole, "--output_size", "4", "--outputs", files])
    assert cluster.run(4, evaluate_shared_expert, str(tmp_path)) == pytest.approx([evaluation_loss(m)] * 4, rel=1e-5)
    gather.main(["--inputs", files, "--input_size", "4", "--output", str(tmp_path / "0-of-1.ckpt")])
    assert evaluate_shared_expert(0, 1, str(tmp_path)) == evaluation_loss(m)


def test_state_dict_keys_and_shapes_equal_tutel() -> None:
    layer = moe.moe_layer(
        [{"type": "top", "k": 2}, {"type": "cosine_top", "proj_dim": 6}],
        D,
        {"type": "ffn", "num_experts_per_device": 3, "hidden_size_per_expert": H, "output_dim": 10},
    )
    shapes = {key: tuple(value.shape) for key, value in layer.state_dict().items()}
    assert shapes == {
        "_num_global_experts": (),
        "experts.batched_fc1_w": (3, H, D),
        "experts.batched_fc2_w": (3, H, 10),
        "experts.batched_fc1_bias": (3, H),
        "experts.batched_fc2_bias": (3, 10),
        "gates.0.wg.weight": (3, D),
        "gates.1.temperature": (1,),
        "gates.1.sim_matrix": (6, 3),
        "gates.1.cosine_projector.weight": (6, D),
        "gates.1.cosine_projector.bias": (6,),
    }
    assert layer.state_dict()["_num_global_experts"].dtype == torch.int64
    bare = moe.moe_layer(
        {"type": "top"},
        D,
        {"type": "ffn", "hidden_size_per_expert": H, "has_fc1_bias": False, "has_fc2_bias": False},
    )
    assert not [key for key in bare.state_dict() if "bias" in key]
    llama = moe.moe_layer({"type": "top"}, D, {"type": "llama_ffn", "hidden_size_per_expert": H, "count_per_node": 2})
    assert {key: tuple(p.shape) for key, p in llama.experts.named_parameters()} == {
        name: (2 * D * H,) for name in ("W_fc1", "W_fc2", "W_fc3")
    }


def test_loading_incomplete_state_warns(caplog: pytest.LogCaptureFixture) -> None:
    m = model(4)
    state = m.state_dict()
    del state["moe._num_global_experts"], state["moe.experts.batched_fc2_bias"]
    state["moe.experts.batched_fc1_w"] = state["moe.experts.batched_fc1_w"].view(4, -1) + 1
    state["dense.weight"] = state["dense.weight"] + 1
    before = m["moe"].experts.batched_fc1_w.detach().clone()
    with torch.no_grad():
        m["moe"].experts.batched_fc2_bias.fill_(1)
    with caplog.at_level(logging.WARNING):
        m.load_state_dict(state)
    assert "_num_global_experts is missing" in caplog.text and "batched_fc2_bias is missing" in caplog.text
    assert m["moe"].experts.batched_fc2_bias.abs().sum() == 0
    torch.testing.assert_close(m["moe"].experts.batched_fc1_w.detach(), before + 1)
    kept = {key: value.clone() for key, value in m["moe"].state_dict().items()}
    wrong = {key: value + 1 for key, value in m.state_dict().items()} | {"moe._num_global_experts": torch.tensor(3)}
    given = dict(wrong)
    with pytest.raises(AssertionError, match="3 experts in all"):
        m.load_state_dict(wrong)
    assert all(torch.equal(value, kept[key]) for key, value in m["moe"].state_dict().items())  # nothing is loaded then
    assert wrong.keys() == given.keys() and all(wrong[key] is given[key] for key in given)
    strided = m.state_dict()
    parts = strided["moe.experts.batched_fc1_w"].view(2, 2, H, D)
    strided["moe.experts.batched_fc1_w"] = parts.transpose(0, 1).contiguous().transpose(0, 1)
    m.load_state_dict(strided)
    torch.testing.assert_close(m["moe"].experts.batched_fc1_w.detach(), before + 1)


def test_plain_state_of_other_world_size_is_rejected() -> None:
    """Also with equal element counts: 4 experts of H hidden units against 2 of 2H."""
    state = dict(model(4).state_dict())
    for key in [key for key in state if "experts." in key]:
        state[key] = state[key].reshape(2, -1, *state[key].shape[2:])
    with pytest.raises(
        RuntimeError, match=r"batched_fc1_w is \[2, 32, 8\] in the checkpoint and \[4, 16, 8\].*scatter"
    ):
        model(4).load_state_dict(state)
    state = {key: value[:2] if "experts." in key else value for key, value in model(4).state_dict().items()}
    with pytest.raises(RuntimeError, match=r"batched_fc2_w is \[2, 16, 8\].* 1 ranks have 4 experts"):
        model(4).load_state_dict(state)


def test_gather_reads_old_format_and_namespaces(tmp_path: Path) -> None:
    m = model(4)
    state = m.state_dict()
    del state["moe._num_global_experts"]
    for rank in range(2):
        parts = {key: value.chunk(2)[rank] if ".experts." in key else value for key, value in state.items()}
        torch.save({"epoch": 3, "model": parts}, tmp_path / f"old{rank}")
    command = ["--inputs", f"{tmp_path}/old{{rank}}", "--input_size", "2", "--output", f"{tmp_path}/whole"]
    with pytest.raises(ConfigError, match="old format"):
        gather.main([*command, "--namespace", "model"])
    gather.main([*command, "--namespace", "model", "--default_num_global_experts", "4"])
    found = torch.load(tmp_path / "whole", weights_only=True)
    assert found["epoch"] == 3 and int(found["model"]["moe._num_global_experts"]) == 4
    assert all(torch.equal(found["model"][key], state[key]) for key in state)
    with pytest.raises(ConfigError, match="cannot be held by 3 ranks"):
        scatter.main(
            ["--input", f"{tmp_path}/whole", "--namespace", "model", "--output_size", "3", "--outputs", "{rank}"]
        )


def test_scatter_prints_written_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(model(4).state_dict(), tmp_path / "whole")
    flags = ["--input", f"{tmp_path}/whole", "--outputs", f"{tmp_path}/parts/{{rank}}-of-{{size}}", "--output_size"]
    scatter.main([*flags, "2"])
    out = capsys.readouterr().out
    assert out.endswith(f"for 2 ranks, are in {tmp_path}/parts/0-of-2 to {tmp_path}/parts/1-of-2\n")
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["0-of-2", "1-of-2"]
    with pytest.raises(SystemExit):
        scatter.main([*flags, "0"])
    assert "--output_size 0 must be at least 1" in capsys.readouterr().err


def test_invalid_checkpoint_files_are_rejected(tmp_path: Path) -> None:
    command = ["--inputs", f"{tmp_path}/file", "--input_size", "1", "--output", f"{tmp_path}/whole"]
    torch.save({"model": model(4).state_dict(), "args": Fraction(1, 2)}, tmp_path / "file")
    with pytest.raises(ConfigError, match="no checkpoint of tensors and plain values; save state_dict"):
        gather.main([*command, "--namespace", "model"])
    torch.save({"model": model(4).state_dict()}, tmp_path / "file")
    with pytest.raises(ConfigError, match="has no 'module'; found 'model' instead of 'module'"):
        gather.main([*command, "--namespace", "module"])
    whole = (tmp_path / "file").read_bytes()
    for damaged in (b"", b"PK", whole[:-30], bytes(len(whole))):
        (tmp_path / "file").write_bytes(damaged)
        with pytest.raises(ConfigError, match=f"{tmp_path}/file"):
            gather.main([*command, "--namespace", "model"])
    (tmp_path / "file").unlink()
    for make in (lambda path: None, os.mkfifo):
        make(tmp_path / "file")
        with pytest.raises(ConfigError, match=f"{tmp_path}/file does not exist or is not a file"):
            gather.main([*command, "--namespace", "model"])
    assert not (tmp_path / "whole").exists()


class Modules(nn.Module):
    def __init__(self, model_dim: int, local_experts: int, sharded_count: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(model_dim, model_dim) for _ in range(local_experts))


def exchange_states_between_ranks(rank: int, world: int) -> None:
    for count, kind in ((2, "ffn"), (-2, "ffn"), (2, "llama_ffn"), (2, "custom")):
        more = {"module": Modules} if kind == "custom" else {"hidden_size_per_expert": H}
        experts = {"type": kind, "num_experts_per_device": count, **more}
        m = nn.Sequential(nn.Linear(D, D), moe.moe_layer({"type": "top"}, D, experts))
        own, theirs = m.state_dict(), [None] * world
        dist.all_gather_object(theirs, own)
        m.load_state_dict(theirs[rank])
        for state in (theirs[1 - rank], through_a_file(theirs[1 - rank])):
            for options in ({}, {"strict": False}, {"assign": True}):
                with pytest.raises(
                    ConfigError, match=r"this state has .*experts .* under 1\.experts, but this rank now has"
                ):
                    m.load_state_dict(state, **options)
        with pytest.raises(ConfigError, match="this state has"):
            m[1].experts.load_state_dict(through_a_file(m[1].experts.state_dict(), rank))
        # Tutel's own checkpoints do not name their ranks.
        m.load_state_dict({key: value.clone() for key, value in theirs[1 - rank].items()})


def through_a_file(state: Any, rank: int | None = None) -> Any:
    if rank is not None:
        every = [None, None]
        dist.all_gather_object(every, state)
        state = every[1 - rank]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_state_of_other_rank_is_handled(cluster: Cluster) -> None:
    cluster.run(2, exchange_states_between_ranks)
