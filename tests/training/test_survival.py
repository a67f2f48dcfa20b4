"""State in node memory: stored on two nodes, restored whole or not at all, and redistributed to any other ranks."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedmoe import MoELayer, experts, gates
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.training import ShardedExperts, sync_gradients
from fusedmoe.training.survival import snapshot
from fusedmoe.training.survival.node_memory import NodeMemory
from fusedmoe.training.survival.snapshot import JobNodes
from fusedmoe.training.survival.survival import Survival
from tests.cluster import Cluster
from tests.training.toy import ONE, Sizes, Toy, make_optimizer, part, train
from tests.training.toy import snapshot as held_by

ALONE = Topology()
GRID = Sizes(4, ep=2, esp=2, mp=2)  # an expert's parts are on one node each


def test_parts_are_stored_on_two_nodes() -> None:
    rng = random.Random()
    for _ in range(200):
        shape = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
        nodes = JobNodes.from_names([f"node {n}" for n, ranks in enumerate(shape) for _ in range(ranks)])
        ranks = range(sum(shape))
        assert nodes.count == len(shape) and [nodes.ranks(n) for n in range(nodes.count)] == [
            [rank for rank in ranks if nodes.node_of_rank[rank] == n] for n in range(nodes.count)
        ]
        holders = rng.sample(ranks, rng.randint(1, len(ranks)))
        for key in ("a", "b", "experts.w1"):
            keepers = [rank for rank in holders if nodes.is_keeper(key, holders, rank)]
            assert sorted(nodes.node_of_rank[rank] for rank in keepers) == sorted(
                {nodes.node_of_rank[r] for r in holders}
            )
        assert nodes.is_on_one_node(holders) == (len({nodes.node_of_rank[rank] for rank in holders}) == 1)
        for rank in ranks:
            buddy = nodes.buddy(rank)
            assert (buddy is None) == (len(shape) == 1)
            if buddy is not None:
                assert nodes.node_of_rank[buddy] != nodes.node_of_rank[rank] and rank in nodes.source_ranks(buddy)
        assert sum(nodes.is_node_leader(rank) for rank in ranks) == len(shape)


def test_slot_is_invisible_until_committed(tmp_path: Path) -> None:
    memory = NodeMemory(os.getpid(), tmp_path)
    slot = memory.slot("1-0-0")
    for size in (300, 5000, 0, 64):
        data = torch.randint(256, (size,), dtype=torch.uint8)
        slot.begin(size).copy_(data)
        assert memory.headers() == {} and memory.slots() == ["1-0-0"]
        slot.complete({"bytes": size})
        assert memory.headers() == {"1-0-0": {"bytes": size}}
        assert torch.equal(memory.slot("1-0-0").read(size), data)
        memory.slot("1-0-0").read(size).fill_(7)  # each read returns a private copy
        assert torch.equal(memory.slot("1-0-0").read(size), data)
    with pytest.raises(ConfigError, match="64 bytes of 65"):
        memory.slot("1-0-0").read(65)
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
    memory.remove("1-0-0")
    assert not list(tmp_path.iterdir())
    memory.write_note({"run": 1})
    assert NodeMemory(os.getpid(), tmp_path).note() == {"run": 1} and memory.slots() == []
    assert NodeMemory(os.getppid(), tmp_path).note() is None


def test_damaged_header_or_note_is_reported(tmp_path: Path) -> None:
    memory = NodeMemory(os.getpid(), tmp_path)
    memory.slot("1-0-0").begin(1)
    memory.slot("1-0-0").complete({"bytes": 1})
    memory.write_note({"run": 1})
    (header,), (note,) = tmp_path.glob("*.json"), tmp_path.glob("*note")
    header.write_text("{")
    with pytest.warns(UserWarning, match=f"{header} is damaged"):
        assert memory.headers() == {"1-0-0": None}
    note.write_text(note.read_text().replace("1", "2", 1))
    with pytest.raises(ConfigError, match=rf"{note} is damaged \(digest mismatch\). Remove it"):
        memory.note()


def _flip(chance: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:survival")
def test_flipped_bit_never_restores_wrong_values(tmp_path: Path) -> None:
    """One flipped bit anywhere: the previous state is restored, and without one the restore raises."""
    states, memory = [], NodeMemory(os.getpid(), tmp_path)
    model, survival = Toy(), Survival(ALONE, memory)
    optimizer = make_optimizer("adamw", model)
    chance = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")

    def restored() -> tuple[Any, dict[str, Any]]:
        model = Toy()
        optimizer = make_optimizer("adamw", model)
        return Survival(ALONE, memory).restore(model, optimizer), held_by(model, optimizer)

    for step in (1, 2):
        train(model, optimizer, ONE, 0, range(step - 1, step))
        survival.refresh(step, model, optimizer, {"step": step})
        states.append(held_by(model, optimizer))
        files = {path: path.read_bytes() for path in tmp_path.iterdir()}
        newest = sorted(path for path in files if path.stem.endswith(f"-{step - 1}"))
        assert len(newest) == 2 and restored()[0] == {"step": step}
        for number in range(40):
            _flip(chance, newest[number % 2])
            if step == 1:
                with pytest.raises(ConfigError, match=r"state of the job is damaged.*Resume from a checkpoint"):
                    restored()
            else:
                extra, found = restored()
                assert extra == {"step": 1} and all(torch.equal(found[key], states[0][key]) for key in found)
            newest[number % 2].write_bytes(files[newest[number % 2]])
    for path in files:
        _flip(chance, path)
    again = Survival(ALONE, memory)
    assert again.step is None and len(again.damaged) == 2
    again.refresh(3, model, optimizer, {"step": 3})  # for example after a checkpoint
    assert restored()[0] == {"step": 3} and len(list(tmp_path.iterdir())) == 2


def test_damaged_node_is_restored_from_other_node(cluster: Cluster, tmp_path: Path) -> None:
    sizes, chance = Sizes(2, ep=2), random.Random()
    _run_job(cluster, sizes, [0, 1], tmp_path, range(2))
    for path in Path(tmp_path, "node 1").iterdir():
        _flip(chance, path)
    for rank, (before, _, start, lost, _, _) in enumerate(_run_job(cluster, sizes, [0, 1], tmp_path, range(2))):
        assert start == 2 and not lost
        _check(before, 2, sizes, rank)


def _refresh_with_rank_specific_extra(rank: int, world: int, folder: str) -> str:
    """Equal values may consist of other objects, in another order."""
    model, topology = torch.nn.Linear(2, 2), Sizes(2).topology()
    survival, word = Survival(topology, _memory(folder, 0)), "word" if rank else "".join(["wo", "rd"])
    same = {"a": word, "b": [word, 1.5, None], "c": torch.arange(3), "d": {1: True}}
    survival.refresh(1, model, None, dict(reversed(same.items())) if rank else same)
    with pytest.raises(RankError) as caught:
        survival.refresh(2, model, None, {**same, "c": torch.arange(3) + rank})
    return str(caught.value)


def test_different_extra_across_ranks_is_rejected(cluster: Cluster, tmp_path: Path) -> None:
    for said in cluster.run(2, _refresh_with_rank_specific_extra, str(tmp_path)):
        assert "differs between rank 0 and rank 1" in said and "gather values that differ" in said


def _replace_file(path: Path, how: str) -> None:
    """Replace a file by a link, a pipe, a folder, or a file with other permissions, owner or names."""
    text, elsewhere = path.read_bytes(), path.with_name(f"elsewhere {path.name}")
    path.unlink()
    if how == "symlink":
        path.symlink_to(elsewhere)
        elsewhere.write_bytes(text)
    elif how == "named pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    else:
        path.write_bytes(text)
        path.chmod(0o644 if how == "world-readable file" else 0o600)
        if how == "file of other user":
            os.chown(path, 65534, 65534)
        elif how == "hard link":
            elsewhere.hardlink_to(path)


@pytest.mark.parametrize(
    "how", ["symlink", "named pipe", "folder", "world-readable file", "hard link", "file of other user"]
)
def test_planted_files_are_ignored(tmp_path: Path, how: str) -> None:
    """Planted notes, headers and bytes, each with the right content."""
    if how == "file of other user" and os.geteuid() != 0:
        pytest.skip("needs root to make another user's file")
    memory, model = NodeMemory(os.getpid(), tmp_path), Toy()
    Survival(ALONE, memory).refresh(1, model, None, {"step": 1})
    memory.write_note({"run": 1})
    (header,), (note,) = tmp_path.glob("*.json"), tmp_path.glob("*note")
    _replace_file(note, how)
    with pytest.warns(UserWarning, match=f"{note} is not this job's and is ignored"):
        assert memory.note() is None
    data = header.with_suffix("")
    _replace_file(data, how)
    with pytest.warns(UserWarning, match=f"{data} cannot be read"):
        survival = Survival(ALONE, memory)
    with pytest.raises(ConfigError, match="state of the job is damaged"):
        survival.restore(model, None)
    _replace_file(header, how)
    with pytest.warns(UserWarning, match=f"{header} is not this job's and is ignored"):
        assert memory.headers() == {} and memory.slots() == []
    with pytest.raises(ConfigError, match=r"is not this job's: .*Another user owns this name"):
        memory.slot("1-0-0").begin(4)


def test_foreign_file_names_are_ignored(tmp_path: Path) -> None:
    memory = NodeMemory(os.getpid(), tmp_path)
    prefix = tmp_path / memory.name.rpartition("/")[2]
    for name in ("9-x-0", "99999999999999999999-0-0", "--", "9-0-0.json.json", "\udcff-0-0", "keeper", "9-9"):
        Path(f"{prefix}{name}").write_text("{}")
        Path(f"{prefix}{name}.json").write_text("{}")
    with pytest.warns(UserWarning, match="is not this job's and is ignored"):
        assert Survival(ALONE, memory).step is None
    assert memory.slots() == []


def test_memory_is_removed_when_agent_dies(tmp_path: Path) -> None:
    agent = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
    try:
        memory = NodeMemory(agent.pid, tmp_path)
        memory.keep()
        memory.keep()  # the second ends without a request
        memory.write_note({})
        memory.slot("1-0-0").begin(100)
        memory.check()
    finally:
        agent.kill()
        agent.wait()
    with pytest.raises(RankError, match="torchrun"):
        memory.check()
    deadline = time.monotonic() + 60
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline, list(tmp_path.iterdir())
        time.sleep(0.02)


def test_memory_of_dead_agents_is_removed(tmp_path: Path) -> None:
    agent = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
    try:
        left, own = NodeMemory(agent.pid, tmp_path), NodeMemory(os.getpid(), tmp_path)
        left.write_note({"of": "another"})
        own.write_note({"of": "this"})
        NodeMemory(os.getpid(), tmp_path)
        assert left.note() is not None  # its agent lives
    finally:
        agent.kill()
        agent.wait()
    NodeMemory(os.getpid(), tmp_path)
    assert left.note() is None and own.note() == {"of": "this"}


def _memory(folder: str, node: int) -> NodeMemory:
    place = Path(folder, f"node {node}")
    place.mkdir(parents=True, exist_ok=True)
    return NodeMemory(os.getppid(), place)


def _resume_and_train(
    rank: int, world: int, sizes: Sizes, nodes: list[int], folder: str, steps: range, every: int, custom: bool
) -> Any:
    """A job on these nodes (one number for each rank): resumes from memory if there is a state, over nonsense
    parameters, and refreshes. Return the values at the start and at the end, the start step and the lost ranks.
    """
    topology, model = sizes.topology(), Toy(sizes, rank, custom)
    optimizer = make_optimizer("adamw", model)
    survival = Survival(topology, _memory(folder, nodes[rank]))
    extra = None
    if survival.step is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        extra = survival.restore(model, optimizer)
    else:
        assert survival.restore(model, optimizer) is None
    before = held_by(model, optimizer)
    start = 0 if extra is None else extra["step"]
    assert start == (survival.step or 0)
    for step in range(start, steps.stop):
        train(model, optimizer, sizes, rank, range(step, step + 1))
        if (step + 1) % every == 0:
            survival.refresh(step + 1, model, optimizer, {"step": step + 1})
    slots = len(_memory(folder, nodes[rank]).slots())
    return before, held_by(model, optimizer), start, survival.lost, slots, survival.price


def _run_job(cluster: Cluster, sizes: Sizes, nodes: list[int], folder: Path, steps: range, every: int = 1) -> list[Any]:
    given = (sizes, nodes, str(folder), steps, every, False)
    return cluster.run(sizes.world, _resume_and_train, *given)  # all ranks of one agent, which is their parent


def _reference(steps: int) -> dict[str, Any]:
    model = Toy()
    optimizer = make_optimizer("adamw", model)
    train(model, optimizer, ONE, 0, range(steps))
    return held_by(model, optimizer)


def _check(held: dict[str, Any], steps: int, sizes: Sizes, rank: int) -> None:
    reference = _reference(steps)
    for key, value in held.items():
        expected = reference[key]
        if value.shape != expected.shape:
            expected = part(expected, key.split(" ")[0], sizes, rank)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("sizes", "nodes"),
    [
        pytest.param(Sizes(2, esp=2, mp=2), [1, 1], marks=pytest.mark.slow),  # node 0 is lost
        pytest.param(Sizes(2, ep=2), [0, 0], marks=pytest.mark.slow),  # node 1 is
        (Sizes(4, ep=4), [2, 2, 1, 1]),  # one returns empty, and the order of nodes is another
        pytest.param(GRID, [0, 0, 1, 1], marks=pytest.mark.slow),  # a rank was killed
        pytest.param(Sizes(3), [3, 0, 4], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_resumes_on_remaining_nodes(cluster: Cluster, tmp_path: Path, sizes: Sizes, nodes: list[int]) -> None:
    for rank, (_, held, _, _, slots, price) in enumerate(_run_job(cluster, GRID, [0, 0, 1, 1], tmp_path, range(3))):
        _check(held, 3, GRID, rank)
        assert slots == 4 and price.memory_bytes > 2 * price.sent_bytes > 0
    for rank, (before, after, start, lost, slots, _) in enumerate(_run_job(cluster, sizes, nodes, tmp_path, range(5))):
        assert start == 3 and not lost
        _check(before, 3, sizes, rank)
        _check(after, 5, sizes, rank)
        assert slots == 2 * nodes.count(nodes[rank])  # no state of the first ranks remains


def test_one_rank_resumes_from_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    _run_job(cluster, Sizes(2, ep=2), [0, 1], tmp_path, range(2))
    ((before, after, start, _, _, _),) = _run_job(cluster, ONE, [1], tmp_path, range(3))
    assert start == 2
    _check(before, 2, ONE, 0)
    _check(after, 3, ONE, 0)


def _interrupted_refresh(rank: int, world: int, folder: str, when: str) -> list[int]:
    """Two states; in the second refresh rank 3's process is lost, at some moment."""
    model, topology = Toy(GRID, rank), GRID.topology()
    optimizer = make_optimizer("adamw", model)
    memory = _memory(folder, rank // 2)
    survival = Survival(topology, memory)
    for step in (1, 2):
        train(model, optimizer, GRID, rank, range(step - 1, step))
        survival.refresh(step, model, optimizer, {"step": step})
    # The third refresh is interrupted.
    train(model, optimizer, GRID, rank, range(2, 3))

    def lose(*_: Any) -> Any:
        raise RuntimeError("killed")

    with pytest.MonkeyPatch.context() as patch, pytest.raises((RankError, RuntimeError)):
        if rank == 3 and when == "sending":
            patch.setattr(snapshot, "all_to_all_rows", lose)
        elif rank == 3:
            patch.setattr(snapshot.Slot, "complete", lose)
        with topology.guard():
            survival.refresh(3, model, optimizer, {"step": 3})
            if rank != 3:
                all_gather_object(topology.world, None)  # the next step
    return sorted(header["step"] for header in memory.headers().values())


@pytest.mark.slow
@pytest.mark.parametrize("when", ["sending", pytest.param("the end", marks=pytest.mark.slow)])
def test_interrupted_refresh_keeps_previous_state(cluster: Cluster, tmp_path: Path, when: str) -> None:
    steps = cluster.run(4, _interrupted_refresh, str(tmp_path), when)
    assert steps[2] == ([2, 2] if when == "sending" else [2, 2, 3])
    small = Sizes(2, ep=2)
    for rank, (before, after, start, lost, _, _) in enumerate(_run_job(cluster, small, [1, 1], tmp_path, range(4))):
        assert start == 2 and set(lost) == (set() if when == "sending" else {3})
        _check(before, 2, small, rank)
        _check(after, 4, small, rank)


def test_lost_state_is_reported(cluster: Cluster, tmp_path: Path) -> None:
    three = Sizes(3, ep=3)
    _run_job(cluster, three, [0, 1, 2], tmp_path, range(2))
    ((_, _, start, lost, _, _),) = _run_job(cluster, ONE, [2], tmp_path, range(1))
    assert start == 0
    assert set(lost) == {1, 2} and any("experts.w1" in key for key in lost[2])
    assert not any("dense" in key for key in lost[2])


def _refresh_without_space(rank: int, world: int, folder: str) -> str:
    model, topology = Toy(Sizes(2, ep=2), rank), Sizes(2, ep=2).topology()
    survival = Survival(topology, _memory(folder, rank))
    for step in (1, 2):
        survival.refresh(step, model, None, {"step": step})

    def no_room(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    larger = torch.nn.Module()
    larger.toy, larger.more = model, torch.nn.Linear(100, 100)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(os, "posix_fallocate", no_room)
        with pytest.raises(RankError) as caught:
            survival.refresh(3, larger, None, {"step": 3})
    again = Survival(topology, _memory(folder, rank))
    assert again.step == 2
    return str(caught.value)


def test_full_memory_raises_on_all_ranks_and_keeps_state(cluster: Cluster, tmp_path: Path) -> None:
    for said in cluster.run(2, _refresh_without_space, str(tmp_path)):
        assert "failed on rank 1" in said and "no room" in said and "--shm-size" in said


def _other_model(rank: int, world: int, folder: str) -> str:
    topology = Sizes(2, ep=2).topology()
    survival = Survival(topology, _memory(folder, rank))
    with pytest.raises(ConfigError) as caught:
        survival.restore(torch.nn.Linear(3, 3), None)
    return str(caught.value)


def test_state_of_other_model_is_rejected(cluster: Cluster, tmp_path: Path) -> None:
    _run_job(cluster, Sizes(2, ep=2), [0, 1], tmp_path, range(1))
    for said in cluster.run(2, _other_model, str(tmp_path)):
        assert "of another model" in said and "weight is not in the checkpoint" in said


def test_rank_specific_names_and_small_messages(cluster: Cluster, tmp_path: Path) -> None:
    for rank, held in enumerate(cluster.run(2, _resume_with_small_messages, str(tmp_path), [0, 1], 0)):
        assert held == rank
    held = cluster.run(2, _resume_with_small_messages, str(tmp_path), [5, 1], 1)  # the first rank's node is a new one
    assert held == [0, 1]


def _resume_with_small_messages(rank: int, world: int, folder: str, nodes: list[int], run: int) -> int:
    """Experts with rank-specific names, and few bytes at once."""
    sizes = Sizes(2, ep=2)
    topology, model = sizes.topology(), Toy(sizes, rank, custom=True)
    optimizer = make_optimizer("adamw", model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "CHUNK_BYTES", 100)
        survival = Survival(topology, _memory(folder, nodes[rank]))
        train(model, optimizer, sizes, rank, range(2))
        expected = held_by(model, optimizer)
        if run == 0:
            survival.refresh(2, model, optimizer, {"step": 2})
            return rank
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        assert survival.restore(model, optimizer) == {"step": 2}
        found = held_by(model, optimizer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    return rank


def _train_with_moving_experts(rank: int, world: int, folder: str, nodes: list[int], first: bool) -> Any:
    """A layer whose experts move: three steps and a refresh, or the restored state; outputs of the whole batch."""
    sizes = Sizes(world, ep=world)
    topology = sizes.topology()
    torch.manual_seed(1)
    gate, network, dtype = gates.TopK(experts=8, k=2), experts.SwiGLU(hidden=6), torch.float64
    layer = MoELayer(8, gate, network, topology=topology, placement="fssdp", dtype=dtype)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    with closing(ShardedExperts(layer, optimizer, topology, memory=2, overlap=2)) as moving:
        survival = Survival(topology, _memory(folder, nodes[rank]))
        if first:
            for step in range(3):
                seeded = torch.Generator().manual_seed(10 * step + rank)
                x_SM = torch.randn(16, 8, generator=seeded, dtype=torch.float64)
                layer(x_SM * torch.linspace(0, 3, 8, dtype=torch.float64)).square().mean().backward()
                sync_gradients(layer, topology)
                optimizer.step()
                optimizer.zero_grad()
            survival.refresh(3, layer, optimizer, {"placement": moving.state_dict()})
        else:
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.fill_(float("nan"))
            extra = survival.restore(layer, optimizer)
            assert extra is not None
            moving.load_state_dict(extra["placement"])
        layer.eval()
        x_SM = torch.randn(16, 8, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
        with torch.no_grad():
            return layer(x_SM)


@pytest.mark.slow
def test_moved_experts_are_restored(cluster: Cluster, tmp_path: Path) -> None:
    expected = cluster.run(4, _train_with_moving_experts, str(tmp_path), [0, 0, 1, 1], True)
    for found in cluster.run(2, _train_with_moving_experts, str(tmp_path), [1, 1], False):
        torch.testing.assert_close(found, expected[0], rtol=1e-10, atol=1e-12)
