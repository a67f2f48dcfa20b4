"""Checkpoints: saved on one topology and loaded on another, refused when damaged or of another model."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.training import checkpoint_folder, load_checkpoint, save_checkpoint
from fusedmoe.training.survival.node_memory import NodeMemory
from fusedmoe.training.survival.survival import Survival
from tests.cluster import Cluster
from tests.training.toy import ONE, Sizes, Toy, make_optimizer, part, snapshot, train

GRID = Sizes(4, ep=2, esp=2, mp=2)
slow = partial(pytest.param, marks=pytest.mark.slow)

OTHERS = [
    Sizes(4, ep=4, mp=4),
    *map(slow, (ONE, Sizes(2, esp=2), Sizes(2, ep=2), Sizes(2, mp=2), Sizes(4))),
]


def _run(rank: int, world: int, sizes: Sizes, path: str | None, steps: range, to: str | None, *how: Any) -> Any:
    """Load if a path is given, train, save if a path is given. Return the rank's values before and after training."""
    kind, custom = how
    torch.manual_seed(rank)
    topology, model = sizes.topology(), Toy(sizes, rank, custom)
    optimizer, extra = make_optimizer(kind, model), None
    if path is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        for group in optimizer.param_groups:
            group["lr"] = 123.0
        extra = load_checkpoint(path, model, optimizer, topology)
    before = snapshot(model, optimizer)
    train(model, optimizer, sizes, rank, steps)
    if to is not None:
        save_checkpoint(to, model, optimizer, topology, {"step": steps.stop, "rng": torch.get_rng_state()})
    return before, snapshot(model, optimizer), extra


def _run_on_world(cluster: Cluster, sizes: Sizes, *args: Any) -> list[Any]:
    return [_run(0, 1, sizes, *args)] if sizes.world == 1 else cluster.run(sizes.world, _run, sizes, *args)


def _check(held: dict[str, Any], reference: dict[str, Any], sizes: Sizes, rank: int) -> None:
    if rank == 0 and not any("custom" in key for key in reference):
        assert held.keys() == reference.keys()
    for key, value in held.items():
        expected = reference[key]
        if value.shape != expected.shape:
            expected = part(expected, key.split(" ")[0], sizes, rank)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)


def _round_trip(cluster: Cluster, tmp_path: Path, saved: Sizes, loaded: Sizes, kind: str, custom: bool) -> None:
    """Two steps, a save, a load on another topology, two more steps: equal to four steps on one rank."""
    path = str(tmp_path / "checkpoint")
    (_, at_two, _), (_, at_four, _) = (_run(0, 1, ONE, None, range(n), None, kind, custom) for n in (2, 4))
    for rank, (_, held, _) in enumerate(_run_on_world(cluster, saved, None, range(2), path, kind, custom)):
        _check(held, at_two, saved, rank)
    for rank, (before, after, extra) in enumerate(
        _run_on_world(cluster, loaded, path, range(2, 4), None, kind, custom)
    ):
        _check(before, at_two, loaded, rank)
        _check(after, at_four, loaded, rank)
        torch.manual_seed(0)
        assert extra["step"] == 2 and torch.equal(extra["rng"], torch.get_rng_state())


@pytest.mark.parametrize("other", OTHERS, ids=str)
@pytest.mark.parametrize("kind", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
def test_checkpoint_resumes_on_other_topology(cluster: Cluster, tmp_path: Path, other: Sizes, kind: str) -> None:
    saved, loaded = (GRID, other) if kind == "adamw" else (other, GRID)
    _round_trip(cluster, tmp_path, saved, loaded, kind, custom=False)


@pytest.mark.parametrize(("saved", "loaded"), [slow(Sizes(4, ep=2), Sizes(4, ep=4)), (Sizes(2, ep=2), ONE)], ids=str)
def test_experts_with_rank_specific_names_resume(cluster: Cluster, tmp_path: Path, saved: Sizes, loaded: Sizes) -> None:
    _round_trip(cluster, tmp_path, saved, loaded, "adamw", custom=True)
    shutil.rmtree(tmp_path / "checkpoint")
    _round_trip(cluster, tmp_path, loaded, saved, "adamw", custom=True)


def test_same_topology_resumes_bitwise_equal(cluster: Cluster, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    straight = cluster.run(4, _run, GRID, None, range(4), None, "adamw", False)
    saved = cluster.run(4, _run, GRID, None, range(2), path, "adamw", False)
    resumed = cluster.run(4, _run, GRID, path, range(2, 4), None, "adamw", False)
    for (_, whole_run, _), (_, at_two, _), (loaded, after, _) in zip(straight, saved, resumed, strict=True):
        assert loaded.keys() == at_two.keys() and after.keys() == whole_run.keys()
        assert all(torch.equal(loaded[key], at_two[key]) for key in at_two)
        assert all(torch.equal(after[key], whole_run[key]) for key in whole_run)


def test_tensors_are_stored_once_and_readable_by_safetensors(cluster: Cluster, tmp_path: Path) -> None:
    """safetensors, and torch.distributed.checkpoint's reader of its files."""
    path = tmp_path / "checkpoint"
    cluster.run(4, _run, GRID, None, range(2), str(path), "adamw", False)
    files = sorted(path.glob("*.safetensors"))
    assert {file.name[:10] for file in files} == {f"rank-{rank:05d}" for rank in range(4)}, "all ranks write"
    stored: dict[str, int] = {}
    for file in files:
        for key, tensor in safetensors.torch.load_file(file).items():
            stored[key] = stored.get(key, 0) + tensor.numel()
    _, reference, _ = _run(0, 1, ONE, None, range(2), None, "adamw", False)
    state = Toy().state_dict()
    assert all(stored[f"model.{key}"] == value.numel() for key, value in state.items())
    metadata = HuggingFaceStorageReader(str(path)).read_metadata()
    assert metadata.state_dict_metadata.keys() == stored.keys()
    read: dict[str, Any] = {f"model.{key}": torch.full_like(value, float("nan")) for key, value in state.items()}
    read["optimizer.state.dense.weight.step"] = torch.tensor(0.0)
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    model = Toy()
    model.load_state_dict({key.removeprefix("model."): read[key] for key in read if key.startswith("model.")})
    _check(snapshot(model, None), {key: reference[key] for key in model.state_dict()}, ONE, 0)
    assert read["optimizer.state.dense.weight.step"] == 2


def _other_model(rank: int, change: str) -> Toy:
    model = Toy(GRID, rank)
    if change == "shape":
        model.attention.rows = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
    elif change == "expert shape":
        model.experts.w1 = nn.Parameter(torch.zeros(2, 4, 3, dtype=torch.float64))
    elif change == "missing":
        model.dense.register_parameter("extra_bias", nn.Parameter(torch.zeros(3)))
    elif change == "unknown":
        del model.experts.w2, model.experts.shardings["w2"]
    return model


def _load_into_other_model(rank: int, world: int, path: str, change: str) -> tuple[str, bool]:
    topology, model = GRID.topology(), _other_model(rank, change)
    optimizer = make_optimizer("adamw", model)
    before = snapshot(model, optimizer)
    with pytest.raises(ConfigError) as error:
        load_checkpoint(path, model, optimizer, topology)
    after = snapshot(model, optimizer)
    return str(error.value), before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        slow("shape", r"attention\.rows is of shape \[3, 6\] in the checkpoint and of shape \[4, 6\] here"),
        ("expert shape", r"experts\.w1 is of shape \[4, 5, 3\] in the checkpoint and of shape \[4, 8, 3\] here"),
        slow("missing", r"dense\.extra_bias is not in the checkpoint"),
        ("unknown", r"experts\.w2 is in the checkpoint only"),
    ],
)
def test_checkpoint_of_other_model_is_rejected_without_changes(
    cluster: Cluster, tmp_path: Path, change: str, message: str
) -> None:
    path = str(tmp_path / "checkpoint")
    _run(0, 1, ONE, None, range(1), path, "adamw", False)
    results = cluster.run(4, _load_into_other_model, path, change)
    texts = {text for text, _ in results}
    assert len(texts) == 1, "the same error on every rank"
    assert (tmp_path / "checkpoint").name in texts.copy().pop()
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(texts.pop())
    assert all(untouched for _, untouched in results)


def test_state_of_other_optimizer_is_rejected_without_changes(tmp_path: Path) -> None:
    path, alone = tmp_path / "checkpoint", Topology()
    _run(0, 1, ONE, None, range(1), str(path), "adamw", False)
    model = Toy()
    before = snapshot(model, None)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with pytest.raises(ConfigError, match="is of AdamW, whose setting .* SGD does not have"):
        load_checkpoint(path, model, make_optimizer("sgd", model), alone)
    with pytest.raises(ConfigError, match="2 parameter groups, this optimizer 1"):
        load_checkpoint(path, model, torch.optim.AdamW(trained), alone)
    with pytest.raises(ConfigError, match="only this optimizer has dense.scale in parameter group 0"):
        load_checkpoint(path, model, torch.optim.AdamW([{"params": trained[1:]}, {"params": trained[:1]}]), alone)
    with pytest.raises(ConfigError, match="group 0 of the optimizer has a parameter of shape .* not in the model"):
        load_checkpoint(path, model, torch.optim.AdamW([torch.zeros(3, requires_grad=True)]), alone)
    save_checkpoint(path, model, None, alone)
    with pytest.raises(ConfigError, match="saved without an optimizer"):
        load_checkpoint(path, model, make_optimizer("sgd", model), alone)
    assert all(torch.equal(value, before[name]) for name, value in snapshot(model, None).items())
    assert load_checkpoint(path, model, None, alone) == {}


def _failing_save(rank: int, world: int, path: str, where: str) -> str:
    """A save that one rank cannot finish; return the error of this rank."""
    topology, model = GRID.topology(), Toy(GRID, rank)
    train(model, torch.optim.SGD(model.parameters(), lr=1.0), GRID, rank, range(1))

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    def gone(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if where == "write" and rank == 2:
            patch.setattr(checkpoint_folder, "write_parts", full)
        elif where == "index" and rank == 0:
            patch.setattr(checkpoint_folder, "write_index", full)
        elif where == "extra":
            extra = {"cannot be pickled": lambda: None}
            with pytest.raises(RankError) as error:
                save_checkpoint(path, model, None, topology, extra)
            return str(error.value)
        with pytest.raises(RankError) as error:
            save_checkpoint(path, model, None, topology)
    return str(error.value)


@pytest.mark.parametrize(("where", "rank"), [("write", 2), slow("index", 0), slow("extra", 0)])
def test_failed_save_keeps_last_checkpoint_and_names_rank(
    cluster: Cluster, tmp_path: Path, where: str, rank: int
) -> None:
    path = tmp_path / "checkpoint"
    cluster.run(4, _run, GRID, None, range(2), str(path), "adamw", False)
    texts = cluster.run(4, _failing_save, str(path), where)
    assert len(set(texts)) == 1
    assert f"saving checkpoint {path} failed on rank {rank}: " in texts[0]
    assert where == "extra" or "No space left on device" in texts[0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"], "something is left"
    _, reference, _ = _run(0, 1, ONE, None, range(2), None, "adamw", False)
    before, after, _ = _run(0, 1, ONE, str(path), range(0), str(path), "adamw", False)
    _check(before, reference, ONE, 0)


@pytest.mark.parametrize("rename", [1, 2])
def test_save_killed_between_renames_leaves_loadable_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rename: int
) -> None:
    """After a kill at any rename, the old or the new checkpoint can be loaded, and saving continues."""
    path, alone, old, new = tmp_path / "checkpoint", Topology(), Toy(), Toy()
    train(new, torch.optim.SGD(new.parameters(), lr=1.0), ONE, 0, range(1))
    save_checkpoint(path, old, None, alone, {"which": "old"})
    renames: list[Path] = []
    true_rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if target.parent == tmp_path:  # except torch's renames inside the folder
            renames.append(self)
            if len(renames) == rename:
                raise KeyboardInterrupt
        return true_rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(path, new, None, alone, {"which": "new"})
    assert load_checkpoint(path, Toy(), None, alone) == {"which": "old"}
    save_checkpoint(path, new, None, alone, {"which": "new"})
    loaded = Toy()
    assert load_checkpoint(path, loaded, None, alone) == {"which": "new"}
    assert torch.equal(loaded.dense.weight, new.dense.weight)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint"]


def test_non_checkpoint_folder_is_not_loaded_or_replaced(tmp_path: Path) -> None:
    alone, model = Topology(), Toy()
    with pytest.raises(ConfigError, match="no checkpoint at"):
        load_checkpoint(tmp_path / "nowhere", model, None, alone)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="is not a checkpoint"):
        save_checkpoint(tmp_path / "mine", model, None, alone)
    assert (tmp_path / "mine" / "thesis.tex").exists()
    (tmp_path / "empty").mkdir()
    save_checkpoint(tmp_path / "empty", model, None, alone)
    save_checkpoint(tmp_path / "a" / "b", model, None, alone)
    assert load_checkpoint(tmp_path / "empty", model, None, alone) == {}


@pytest.mark.parametrize("damage", ["truncated", "removed", "index"])
def test_damaged_checkpoint_is_rejected_without_changes(tmp_path: Path, damage: str) -> None:
    path, alone, model = tmp_path / "checkpoint", Topology(), Toy()
    save_checkpoint(path, model, None, alone)
    file = path / ("rank-00000.safetensors" if damage != "index" else "index.jsonl")
    if damage == "removed":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-40])
    train(model, torch.optim.SGD(model.parameters(), lr=1.0), ONE, 0, range(1))
    before = snapshot(model, None)
    with pytest.raises(ConfigError, match="is damaged: .*"):
        load_checkpoint(path, model, None, alone)
    assert all(torch.equal(value, before[name]) for name, value in snapshot(model, None).items())


def _different_models(rank: int, world: int, path: str, what: str) -> str:
    topology, sizes = Sizes(2, esp=2).topology(), Sizes(2, esp=2)
    model = Toy(sizes, rank)
    if what == "replicated" and rank == 1:
        model.dense.weight = nn.Parameter(torch.zeros(5, 4))
    elif what == "chunk":  # 5 columns over two ranks are 3 and 2
        model.experts.w2 = nn.Parameter(torch.zeros(4, 3, 2 if rank == 0 else 3))
    elif what == "path" and rank == 1:
        path += "-elsewhere"
    with pytest.raises((RankError, ConfigError)) as error:
        if what == "path":
            load_checkpoint(path, model, None, topology)
        else:
            save_checkpoint(path, model, None, topology)
    return str(error.value)


def test_inconsistent_ranks_are_rejected_on_all_ranks(cluster: Cluster, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    for text in cluster.run(2, _different_models, path, "replicated"):
        assert "dense.weight is of shape [5, " in text and "on rank 1" in text
    for rank, text in enumerate(cluster.run(2, _different_models, path, "chunk")):
        assert f"rank {rank}: experts.w2 has shape [4, 3, {2 + rank}] here and [4, 3, 5] over all ranks" in text
    save_checkpoint(path, Toy(), None, Topology())
    for text in cluster.run(2, _different_models, path, "path"):
        assert "failed on rank 1: there is no checkpoint at" in text


class _WithExtraState(nn.Module):
    def __init__(self, value: str) -> None:
        super().__init__()
        self.value, self.weight = value, nn.Parameter(torch.zeros(2))

    def get_extra_state(self) -> dict[str, str]:
        return {"value": self.value}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.value = state["value"]


def test_extra_state_dtype_conversion_and_compiled_models(tmp_path: Path) -> None:
    alone = Topology()
    saved, loaded = _WithExtraState("saved"), _WithExtraState("fresh").bfloat16()
    nn.init.normal_(saved.weight)
    save_checkpoint(tmp_path / "c", torch.compile(saved), None, alone)
    load_checkpoint(tmp_path / "c", loaded, None, alone)
    assert loaded.value == "saved"
    assert torch.equal(loaded.weight, saved.weight.bfloat16())
    with pytest.raises(ConfigError, match="weight is on the meta device"):
        load_checkpoint(tmp_path / "c", loaded.to("meta"), None, alone)


def test_load_reads_into_existing_memory(tmp_path: Path) -> None:
    """Parameters and optimizer state are read directly into their memory."""
    path = str(tmp_path / "checkpoint")
    _run(0, 1, ONE, None, range(2), path, "adamw", False)
    model = Toy()
    optimizer = make_optimizer("adamw", model)
    train(model, optimizer, ONE, 0, range(1))
    tensors = [*model.parameters(), *(optimizer.state[p]["exp_avg"] for p in optimizer.state)]
    places = [tensor.data_ptr() for tensor in tensors]
    load_checkpoint(path, model, optimizer, Topology())
    tensors = [*model.parameters(), *(optimizer.state[p]["exp_avg"] for p in optimizer.state)]
    assert [tensor.data_ptr() for tensor in tensors] == places


class _Numbers(nn.Module):
    def __init__(self, weight: torch.Tensor, buffer: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
        self.register_buffer("buffer", buffer)


LOST = [
    (1e300, torch.float64, torch.float32, r"has the float64 number 1e\+300, which float32 cannot hold"),
    (7e4, torch.float32, torch.float16, "70000.0"),
    (3.4e38, torch.float32, torch.bfloat16, r"3\.39\d*e\+38"),
    (1000.0, torch.float32, torch.float8_e4m3fn, "1000.0"),
    (float("inf"), torch.float32, torch.float8_e4m3fn, "inf"),
    (300, torch.int64, torch.uint8, "300"),
    (-1, torch.int64, torch.uint8, "-1"),
    (200, torch.uint8, torch.int8, "200"),
    (2**40, torch.int64, torch.int32, str(2**40)),
    (2.7, torch.float64, torch.int64, "2.7"),
    (float("nan"), torch.float32, torch.int32, "nan"),
    (2.0**63, torch.float64, torch.int64, "9.22"),
    (5, torch.int64, torch.bool, "5"),
    (0.5, torch.float32, torch.bool, "0.5"),
    (2**24 + 1, torch.int64, torch.float32, str(2**24 + 1)),
    (70_000, torch.int32, torch.float16, "70000"),
    (1 + 2j, torch.complex64, torch.float32, r"\(1\+2j\)"),
    (1e300 + 0j, torch.complex128, torch.complex64, r"1e\+300"),
]
KEPT = [
    (0.1, torch.float64, torch.bfloat16),
    (1e-300, torch.float64, torch.float16),
    (float("-inf"), torch.float64, torch.float16),
    (float("nan"), torch.float32, torch.bfloat16),
    (65_504, torch.int64, torch.float16),
    (255, torch.int64, torch.uint8),
    (3.0, torch.float32, torch.int8),
    (1, torch.uint8, torch.bool),
    (True, torch.bool, torch.float16),
    (1 + 0j, torch.complex64, torch.float64),
    (2**63 - 1, torch.uint64, torch.int64),
]


def _square(number: Any, dtype: torch.dtype) -> torch.Tensor:
    exact = {float: torch.float64, complex: torch.complex128}.get(type(number))
    return torch.tensor([[0, 1], [1, number]], dtype=exact).to(dtype)


@pytest.mark.parametrize(("number", "saved", "loaded", "message"), LOST)
def test_unrepresentable_values_are_rejected_without_changes(
    tmp_path: Path, number: Any, saved: torch.dtype, loaded: torch.dtype, message: str
) -> None:
    alone, value = Topology(), _square(number, saved)
    for name, numbers, target in (
        ("weight", (value, torch.ones(1)), (torch.zeros(2, 2, dtype=loaded), torch.zeros(1))),
        ("buffer", (torch.ones(1), value), (torch.zeros(1), torch.zeros(2, 2, dtype=loaded))),
    ):
        if name == "weight" and saved.is_complex:
            continue
        save_checkpoint(tmp_path / "c", _Numbers(*numbers), None, alone)
        model = _Numbers(*target)
        with pytest.raises(ConfigError, match=rf"was not loaded: model\.{name} .*{message}"):
            load_checkpoint(tmp_path / "c", model, None, alone)
        assert all(not tensor.to(torch.float32).any() for tensor in model.state_dict().values())
        survival = Survival(alone, NodeMemory(os.getpid(), tmp_path))
        survival.refresh(1, _Numbers(*numbers), None)
        with pytest.raises(ConfigError, match=rf"from memory: model\.{name} .*{message}"):
            Survival(alone, NodeMemory(os.getpid(), tmp_path)).restore(model, None)
        assert all(not tensor.to(torch.float32).any() for tensor in model.state_dict().values())


@pytest.mark.parametrize(("number", "saved", "loaded"), KEPT)
def test_rounding_conversions_are_allowed(tmp_path: Path, number: Any, saved: torch.dtype, loaded: torch.dtype) -> None:
    value = _square(number, saved)
    save_checkpoint(tmp_path / "c", _Numbers(torch.ones(1), value), None, Topology())
    model = _Numbers(torch.ones(1), torch.zeros(2, 2, dtype=loaded))
    load_checkpoint(tmp_path / "c", model, None, Topology())
    torch.testing.assert_close(model.buffer, value.to(loaded), rtol=0, atol=0, equal_nan=True)


def _load_in_float32(rank: int, world: int, path: str, large: str) -> str:
    """Load one rank's checkpoint on two ranks of float32."""
    sizes = Sizes(world, ep=world)
    model = Toy(sizes, rank).float()
    optimizer = make_optimizer("adamw", model)
    before = snapshot(model, optimizer)
    with pytest.raises((ConfigError, RankError)) as caught:
        load_checkpoint(path, model, optimizer, sizes.topology())
    after = snapshot(model, optimizer)
    assert all(torch.equal(before[key], after[key]) for key in before)
    return str(caught.value)


@pytest.mark.parametrize("large", ["weight", "exp_avg_sq"])
def test_overflow_in_float32_is_rejected_on_all_ranks(cluster: Cluster, tmp_path: Path, large: str) -> None:
    """Experts, and their optimizer state, which has the parameters' dtype."""
    path, model = str(tmp_path / "checkpoint"), Toy()
    optimizer = make_optimizer("adamw", model)
    train(model, optimizer, ONE, 0, range(1))
    weight = model.experts.w1
    with torch.no_grad():
        (weight if large == "weight" else optimizer.state[weight][large])[-1, -1, -1] = 1e300
    save_checkpoint(path, model, optimizer, Topology())
    for said in cluster.run(2, _load_in_float32, path, large):
        assert "failed on rank 1" in said and "experts.w1" in said and "1e+300, which float32 cannot hold" in said
