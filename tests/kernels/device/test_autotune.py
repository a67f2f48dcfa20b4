"""Configurations are timed, chosen and remembered; here with made-up times and faults, then through the launchers."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusedmoe.files import write_kept
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.grouped import define_dweight
from fusedmoe.kernels.layout import contiguous_layout
from fusedmoe.kernels.triton import experts as triton_experts
from fusedmoe.kernels.triton.grouped import autotune, verified
from fusedmoe.kernels.triton.grouped.autotune import Record, Tuner
from fusedmoe.kernels.triton.grouped.call import GroupedCall
from fusedmoe.kernels.triton.grouped.configs import Config, HopperConfig, Key, Variant
from fusedmoe.kernels.triton.grouped.dweight import dweight
from fusedmoe.kernels.triton.grouped.holder import hold_kernel
from fusedmoe.kernels.triton.grouped.product import product
from tests.kernels.device.test_configurations import variant

# Warnings of configurations that are named and left out.
pytestmark = pytest.mark.filterwarnings("ignore:.*is not used.*:RuntimeWarning")

SLOW, FAST, BROKEN = (Config(16 * i, 64, 32, 4, 1) for i in (1, 2, 3))
KEY = Key(variant("up"), 4096, 1024, 64, 1024)


class Fake:
    """A tuner whose times and faults are made up; it counts what it is asked."""

    def __init__(self, file: Path | None = None, allowed: bool = True) -> None:
        self.timed = 0
        self.launched: list[Config] = []
        self.allowed, self.fixed = allowed, False
        self.faults: dict[Config, Exception] = {BROKEN: RuntimeError("misaligned address")}
        record = Record(file)
        states: Any = {"allowed": lambda: self.allowed, "fixed": lambda: self.fixed}
        self.tuner = Tuner(lambda key: [SLOW, BROKEN, FAST], self._measure, record, **states)

    def _measure(self, run: Callable[[], object], shared: bool) -> Callable[[], float]:
        run()
        config = self.launched[-1]
        if config in self.faults:
            raise self.faults[config]
        self.timed += 1
        return lambda: {SLOW: 2e-3, FAST: 1e-3, BROKEN: 1e-6}[config]

    def choose(self, key: Key = KEY) -> Config:
        return self.tuner.choose(key, self.launched.append)


def two(file: Path) -> Fake:
    """A tuner without the configuration that fails at once."""
    fake = Fake(file)
    fake.tuner._candidates = lambda key: [SLOW, FAST]
    return fake


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "grouped.json"


def test_the_fastest_of_those_that_run(file: Path) -> None:
    fake = Fake(file)
    assert fake.choose() == FAST
    assert fake.launched == [SLOW, BROKEN, FAST]
    assert fake.choose() == FAST and fake.timed == 2, "tuned again"
    found = json.loads(file.read_text())
    assert found["faults"] == {f"{KEY.variant}, {BROKEN}": "RuntimeError: misaligned address"}
    assert found["choices"][str(KEY)] == {
        "config": str(FAST),
        "microseconds": {str(SLOW): 2000.0, str(FAST): 1000.0},
    }


def test_one_that_fails_is_told() -> None:
    with pytest.warns(RuntimeWarning, match=f"{BROKEN} is not used: RuntimeError: misaligned address"):
        Fake().choose()


def test_a_fault_holds_for_other_keys_of_the_variant_only() -> None:
    fake = Fake()
    fake.choose()
    fake.choose(KEY._replace(rows=2048))
    assert fake.launched.count(BROKEN) == 1 and fake.timed == 4
    fake.choose(KEY._replace(variant=KEY.variant._replace(gather=False)))
    assert fake.launched.count(BROKEN) == 2 and fake.timed == 6


def test_one_candidate_is_not_timed(file: Path) -> None:
    """As on a GPU without verified configurations."""
    fake = Fake(file)
    fake.tuner._candidates = lambda key: [SLOW]
    assert fake.choose() == SLOW and not fake.launched and not file.exists()


def test_what_is_recorded_is_used(file: Path) -> None:
    Fake(file).choose()
    fake = Fake(file)
    assert fake.choose() == FAST and not fake.launched and not fake.timed
    assert fake.choose(KEY._replace(experts=8)) == FAST and fake.launched == [SLOW, FAST] and fake.timed == 2


def test_a_recorded_choice_that_is_gone_or_fails_is_not_used(file: Path) -> None:
    Fake(file).choose()
    for config in ("999x64x32 w4 s1 g8", str(BROKEN), 7, None):
        found = json.loads(file.read_text())
        found["choices"][str(KEY)]["config"] = config
        write_kept(file, json.dumps(found))
        fake = Fake(file)
        assert fake.choose() == FAST and fake.timed == 2


def test_a_choice_among_fewer_is_made_again(file: Path) -> None:
    """Once a configuration has been verified that was not among the candidates."""
    fake = Fake(file)
    fake.tuner._candidates = lambda key: [SLOW, BROKEN]
    assert fake.choose() == SLOW
    assert Fake(file).choose() == FAST


def test_one_that_never_ends_ends_one_run_only(file: Path) -> None:
    fake = Fake(file)
    ended = iter([False, False, True])
    autotune.wait(lambda: next(ended), 60)
    with pytest.raises(TimeoutError, match=r"has not ended after 0.01 seconds") as late:
        autotune.wait(lambda: False, 0.01)
    fake.faults[SLOW] = late.value
    with pytest.raises(RuntimeError, match="has not ended after 0.01 seconds.*please start again"):
        fake.choose()
    again = Fake(file)
    assert again.choose() == FAST and SLOW not in again.launched


def test_one_that_takes_the_gpu_ends_one_run_only(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal access nothing runs in this process: that is no fault of the configurations behind."""
    fake, lost = Fake(file), [True]
    fake.faults = dict.fromkeys((SLOW, BROKEN, FAST), RuntimeError("an illegal memory access was encountered"))
    monkeypatch.setattr(autotune, "_is_lost", lambda: bool(lost))
    with pytest.raises(RuntimeError, match="illegal memory access.*nothing else can run.*please start again"):
        fake.choose()
    assert fake.launched == [SLOW]
    assert json.loads(file.read_text())["faults"] == {
        f"{KEY.variant}, {SLOW}": "RuntimeError: an illegal memory access was encountered"
    }
    lost.clear()
    again = Fake(file)
    assert again.choose() == FAST and SLOW not in again.launched


@pytest.mark.parametrize("good", [0, 40])
@pytest.mark.parametrize("lost", [True, False])
def test_one_that_fails_at_the_sizes_themselves(
    lost: bool, good: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = two(file)
    measure = fake.tuner._measure

    def failing(run: Callable[[], object], shared: bool) -> Callable[[], float]:
        take = measure(run, shared)
        if fake.launched[-1] != FAST:
            return take
        times = iter([1e-3] * good)

        def taken() -> float:
            if (time := next(times, None)) is None:
                raise RuntimeError("misaligned address")
            return time

        return taken

    fake.tuner._measure = failing
    monkeypatch.setattr(autotune, "_is_lost", lambda: lost)
    if lost:
        with pytest.raises(RuntimeError, match="misaligned address.*please start again"):
            fake.choose()
    else:
        assert fake.choose() == SLOW
    assert "misaligned" in json.loads(file.read_text())["faults"][f"{KEY.variant}, {FAST}"]
    assert two(file).choose() == SLOW


def test_all_fail() -> None:
    fake = Fake()
    fake.faults = dict.fromkeys((SLOW, FAST, BROKEN), RuntimeError("no image"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="every configuration of up float32.*no image.*FUSEDMOE_AUTOTUNE=0"):
            fake.choose()
        fake.allowed = False


def test_out_of_memory_is_no_fault(file: Path) -> None:
    fake = Fake(file)
    fake.faults = {FAST: torch.OutOfMemoryError("none left")}
    assert fake.choose() == SLOW and fake.choose() == SLOW
    again = Fake(file)
    assert again.choose() == FAST and again.timed == 2, "what lack of memory decided was written down"


class Clocked:
    """A tuner of a GPU whose speed changes as it works: `slow(now)` times slower, `now` its seconds of work so far."""

    def __init__(self, times: dict[Config, float], slow: Callable[[float], float] = lambda now: 1.0) -> None:
        self.now = 0.0
        self.configs: list[Config] = []

        def measure(run: Callable[[], object], shared: bool) -> Callable[[], float]:
            config = run.args[0]  # type: ignore[attr-defined]

            def taken() -> float:
                seconds = times[config] * slow(self.now)
                self.now += seconds
                self.configs.append(config)
                return seconds

            return taken

        self.tuner = Tuner(lambda key: [*times], measure, Record(None), lambda: True)

    def choose(self) -> Config:
        return self.tuner.choose(KEY, lambda config: None)


def test_a_gpu_that_idled_is_warm_before_times_count() -> None:
    clocked = Clocked({SLOW: 2e-3, FAST: 1e-3}, lambda now: max(1.0, 6.0 - 60 * now))
    assert clocked.choose() == FAST
    assert clocked.tuner.times(KEY) == {str(SLOW): 2000.0, str(FAST): 1000.0}


@pytest.mark.parametrize("begin", [0.1, 0.12, 0.13, 0.14])
def test_what_slows_the_gpu_for_a_while_slows_all(begin: float) -> None:
    """For more than half of the launches that a configuration has: in a row they would be all that is looked at."""
    times = {SLOW: 1.2e-3, FAST: 1e-3}
    clocked = Clocked(times, lambda now: 1.85 if begin < now < begin + 0.02 else 1.0)
    assert clocked.choose() == FAST
    assert clocked.tuner.times(KEY) == {str(SLOW): 1200.0, str(FAST): 1000.0}


def test_the_fastest_few_are_timed_on() -> None:
    configs = [Config(16 * number, 64, 32, 4, 1) for number in range(1, 6)]
    clocked = Clocked({config: number * 1e-3 for number, config in enumerate(configs, 1)})
    assert clocked.choose() == configs[0]
    last = clocked.configs[-(5 * 3 + 3 * 17) :]
    assert [last.count(config) for config in configs] == [20, 20, 20, 3, 3] and last[:5] == configs


def test_long_launches_are_timed_three_times() -> None:
    clocked = Clocked({SLOW: 0.4, FAST: 0.3})
    assert clocked.choose() == FAST
    assert clocked.configs == [SLOW, FAST] * 2 + [FAST, SLOW] * 2, "first a round that does not count"


def test_off(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDMOE_AUTOTUNE", "0")
    fake = Fake(file)
    assert fake.choose() == SLOW and not fake.launched and not file.exists()


def test_not_now(file: Path) -> None:
    """Under graph capture the table decides, and the next launch is tuned; what is known is used even then."""
    fake = Fake(file, allowed=False)
    assert fake.choose() == SLOW and not fake.launched
    fake.allowed = True
    assert fake.choose() == FAST
    fake = Fake(file, allowed=False)
    assert fake.choose() == FAST
    fake.tuner.record.faults[f"{KEY.variant}, {SLOW}"] = "known to fail"
    assert fake.choose(KEY._replace(experts=8)) == FAST


def test_deterministic_algorithms_go_by_the_table_whatever_was_timed(file: Path) -> None:
    """Times differ from machine to machine, and with them the last bits."""
    Fake(file).choose()
    fake = Fake(file)
    fake.fixed = True
    assert fake.choose() == fake.choose() == SLOW
    fake.fixed = False
    assert fake.choose() == FAST
    fake.fixed = True
    assert fake.choose() == SLOW and not fake.timed


def test_a_fault_counts_for_launches_without_tuning(file: Path) -> None:
    """One is found at the sizes of a launch that is tuned later."""
    Fake(file).choose()
    fake, small = Fake(file), KEY._replace(rows=1, experts=1)
    assert fake.choose(small) == SLOW
    fake.faults[SLOW] = RuntimeError("misaligned address")
    assert fake.choose(KEY._replace(experts=8)) == FAST
    assert fake.choose(small) == FAST


def test_small_launches_are_not_tuned() -> None:
    fake = Fake()
    assert fake.choose(KEY._replace(rows=1, experts=1)) == SLOW and not fake.launched


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", '{"faults": 3, "choices": {}}', '{"faults": {"a": []}, "choices": {"b": 1}}', "\x00\xff"],
)
def test_a_damaged_file_is_written_anew(text: str, file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(text.encode("latin-1"))
    with pytest.warns(UserWarning, match=str(file)):
        fake = Fake(file)
        assert fake.choose() == FAST and fake.timed == 2
    again = Fake(file)
    assert again.choose() == FAST and again.timed == 0


def test_a_file_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder is wanted")
    assert Fake(blocked / "grouped.json").choose() == FAST
    folder = tmp_path / "grouped.json"
    folder.mkdir()
    with pytest.warns(UserWarning, match=f"{folder} cannot be read"):
        assert Fake(folder).choose() == FAST
    assert sorted(os.listdir(tmp_path)) == ["blocked", "grouped.json"], "something is left"


def _write(file: Path, names: list[str]) -> None:
    record = Record(file)
    for name in names:
        record.faults[name] = "x" * 2000
        record.save()


def test_two_processes_write(file: Path) -> None:
    """Whoever reads meanwhile finds a whole file; each process's own news are all there once it writes alone."""
    context = multiprocessing.get_context("fork")
    names = [[f"{process} {i}" for i in range(40)] for process in "ab"]
    writers = [context.Process(target=_write, args=(file, mine)) for mine in names]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        if file.exists():
            found = json.loads(file.read_text())["faults"]
            assert all(len(fault) == 2000 for fault in found.values())
            seen += 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen
    _write(file, ["c"])
    found = json.loads(file.read_text())["faults"]
    assert any(set(mine) <= set(found) for mine in names) and "c" in found
    assert [path.name for path in file.parent.iterdir()] == [file.name]


# --- Through the launchers ---


def test_a_launch_is_tuned(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real launches: the fastest of those that run."""
    monkeypatch.setattr(autotune, "LEAST_FLOPS", 0)
    broken, slow, fast = (Config(bm, 64, 32, 4, 1) for bm in (16, 32, 64))
    times = {slow: 3.0, fast: 2.0}
    ran: list[Config] = []

    def measure(run: Callable[[], object], shared: bool) -> Callable[[], float]:
        run()
        config = run.args[0]  # type: ignore[attr-defined]
        if config == broken:
            raise RuntimeError("misaligned address")
        ran.append(config)
        return lambda: times[config]

    tuner = Tuner(lambda key: [broken, slow, fast], measure, Record(None), lambda: True)
    layout = contiguous_layout(torch.tensor([20, 0, 30], device=device), 50)
    call = GroupedCall(layout, torch.empty(0, device=device), tuner.choose, True)
    a, b = torch.randn(50, 64, device=device), torch.randn(3, 32, 64, device=device)
    out = product(call, "down", a, b, True)
    assert ran == [slow, fast]
    assert [*tuner._chosen.values()] == [fast]
    expert_N = torch.arange(3, device=device).repeat_interleave(torch.tensor([20, 0, 30], device=device))
    torch.testing.assert_close(out, torch.einsum("nk,nmk->nm", a, b[expert_N]), rtol=1e-4, atol=1e-4)
    product(call, "down", a, b, True)
    assert len(ran) == 2


@pytest.mark.parametrize("total", [torch.float32, torch.bfloat16], ids=["in place", "widened"])
def test_a_launch_that_adds_is_repeated_and_adds_once(total: torch.dtype, device: torch.device) -> None:
    """However often a gradient of matrices is launched to find its configuration."""
    slow, fast = (Config(bm, 64, 32, 4, 1) for bm in (32, 64))
    times, ran = {slow: 3.0, fast: 2.0}, 0

    def measure(run: Callable[[], object], shared: bool) -> Callable[[], float]:
        nonlocal ran
        ran += 1
        run()
        run()
        return lambda: times[run.args[0]]  # type: ignore[attr-defined]

    def choose(key: Key, launch: Callable[[Config], object]) -> Config:
        tuner = Tuner(lambda key: [*times], measure, Record(None), lambda: True)
        return tuner.choose(key._replace(rows=10**9), launch)

    layout = contiguous_layout(torch.tensor([20, 0, 30], device=device), 50)
    call = GroupedCall(layout, torch.empty(0, device=device), choose, True)
    left, right = torch.randn(50, 64, device=device), torch.randn(50, 32, device=device)
    total_EPQ = torch.randn(3, 64, 32, device=device).to(total)
    expert_N = torch.arange(3, device=device).repeat_interleave(torch.tensor([20, 0, 30], device=device))
    expected = total_EPQ.double() + define_dweight(left.double(), right.double(), expert_N, 3)
    before = total_EPQ.clone()
    out = dweight(call, "dw1", left, right, None, total_EPQ)
    assert ran == 2 and out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    in_place = total == torch.float32
    assert (out.data_ptr() == total_EPQ.data_ptr()) == in_place and torch.equal(total_EPQ, before) != in_place


def test_the_interpreter_is_never_tuned(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cuda":
        pytest.skip("there is a GPU")
    monkeypatch.setattr(autotune, "LEAST_FLOPS", 0)
    monkeypatch.setattr(triton_experts, "tuner", lambda device: pytest.fail("asked for a tuner"))
    layout = contiguous_layout(torch.tensor([3]), 3)
    x_SM, w1, w2 = torch.randn(3, 32), torch.randn(1, 32, 32), torch.randn(1, 32, 32)
    weights = Weights(w1, w2)
    y_SM, _ = triton_experts.experts_forward(x_SM, layout, None, weights, ACTIVATIONS["relu"])
    torch.testing.assert_close(y_SM, (x_SM @ w1[0].t()).relu() @ w2[0].t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared", [False, True])
def test_on_a_gpu(shared: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if device.type == "cpu":
        pytest.skip("there is no GPU")
    torch.use_deterministic_algorithms(False)  # the fixture of this folder asks for them
    monkeypatch.setenv("FUSEDMOE_CACHE", str(tmp_path))
    monkeypatch.setattr(autotune, "LEAST_FLOPS", 0)
    tuner = autotune.tuner.__wrapped__(torch.device("cuda", torch.cuda.current_device()))
    layout = contiguous_layout(torch.tensor([200, 0, 300], device=device), 500)
    a = torch.randn(500, 128, device=device, dtype=torch.bfloat16)
    b = torch.randn(3, 256, 128, device=device, dtype=torch.bfloat16)
    call = GroupedCall(layout, a, tuner.choose, torch.cuda.get_device_capability() >= (9, 0), shared)
    out = product(call, "down", a, b, True)
    (written,) = tmp_path.iterdir()
    (choice,) = json.loads(written.read_text())["choices"].values()
    assert choice["config"] in choice["microseconds"] and min(choice["microseconds"].values()) > 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = product(call, "down", a, b, True)
        product(call, "down", a[:, :64].contiguous(), b[:, :, :64].contiguous(), True)
    graph.replay()
    assert torch.equal(out, again)


@pytest.mark.parametrize(("flag", "epoch", "looks"), [(7, 7, 0), (6, 7, 5)])
def test_what_holds_a_multiprocessor_ends(flag: int, epoch: int, looks: int, device: torch.device) -> None:
    """When it is let go, and without that after so many looks."""
    flag_1 = torch.full((1,), flag, dtype=torch.int32, device=device)
    sink = torch.zeros(3 * 32, dtype=torch.int32, device=device)
    hold_kernel[(2,)](flag_1, sink, epoch, looks or 1000, NUMBERS=32, num_warps=1)
    assert sink.tolist() == [looks] * 64 + [0] * 32


class Held:
    """Stands for a holder; says what the measurement does in which order."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def hold(self) -> None:
        self._said.append("hold")

    def let_go(self) -> None:
        self._said.append("let go")


def test_multiprocessors_are_held_around_each_run_that_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            said.append("event")

        def query(self) -> bool:
            return True

        def elapsed_time(self, end: Event) -> float:
            return 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: said.append("all ends"))
    take = autotune._prepare(torch.device("cpu"), lambda: said.append("run"), Held(said))  # type: ignore[arg-type]
    held = ["hold", "event", "run", "event", "let go"]
    # At last what a launch takes of the host.
    assert said == ["run", *held, "all ends", "run", "event", "event"]
    said.clear()
    assert take() == 1e-3 and said == held


def test_the_tuner_of_a_gpu_times_what_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU whose kind nobody has checked it times nothing."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "stand-in")
    monkeypatch.setattr(verified, "TRITON_VERSION", "3.6.0")
    key = Key(Variant("down", "bfloat16", "ieee", "", False, False, True, True), 768, 2048, 8, 1024)

    def candidates(**changed: Any) -> list[Config]:
        gpu = {"major": 9, "minor": 0, "shared_memory_per_block_optin": 232_448, "multi_processor_count": 132}
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**(gpu | changed)))
        return [*autotune.tuner.__wrapped__(torch.device("cuda", 0))._candidates(key)]

    known = candidates()
    assert len(known) > 5 and any(isinstance(one, HopperConfig) for one in known)
    assert candidates(major=10) == known[:1]
