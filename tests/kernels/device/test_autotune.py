"""Configurations are timed, chosen and cached; first with simulated times and faults, then through the launchers."""

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

from fusedmoe.files import write_cache_file
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.grouped import define_dweight
from fusedmoe.kernels.layout import contiguous_layout
from fusedmoe.kernels.triton import experts as triton_experts
from fusedmoe.kernels.triton.grouped import autotune, configs
from fusedmoe.kernels.triton.grouped.autotune import Tuner, TuningRecord, hold_kernel
from fusedmoe.kernels.triton.grouped.call import GroupedCall
from fusedmoe.kernels.triton.grouped.configs import Config, HopperConfig, Key, Variant
from fusedmoe.kernels.triton.grouped.dweight import dweight
from fusedmoe.kernels.triton.grouped.product import product
from tests.kernels.device.test_configurations import variant

# Warnings that name excluded configurations.
pytestmark = pytest.mark.filterwarnings("ignore:.*is not used.*:RuntimeWarning")

SLOW, FAST, BROKEN = (Config(16 * i, 64, 32, 4, 1) for i in (1, 2, 3))
KEY = Key(variant("up"), 4096, 1024, 64, 1024)


class FakeTuner:
    """Tuner with simulated times and faults; it counts its runs."""

    def __init__(self, file: Path | None = None, allowed: bool = True) -> None:
        self.timed = 0
        self.launched: list[Config] = []
        self.allowed, self.fixed = allowed, False
        self.faults: dict[Config, Exception] = {BROKEN: RuntimeError("misaligned address")}
        record = TuningRecord(file)
        states: Any = {"is_allowed": lambda: self.allowed, "is_deterministic": lambda: self.fixed}
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


def tuner_without_broken(file: Path) -> FakeTuner:
    """Build a tuner without the configuration that fails at once."""
    fake = FakeTuner(file)
    fake.tuner._candidates = lambda key: [SLOW, FAST]
    return fake


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "grouped.json"


def test_fastest_working_configuration_is_chosen_and_cached(file: Path) -> None:
    fake = FakeTuner(file)
    assert fake.choose() == FAST
    assert fake.launched == [SLOW, BROKEN, FAST]
    assert fake.choose() == FAST and fake.timed == 2, "tuned again"
    found = json.loads(file.read_text())
    assert found["faults"] == {f"{KEY.variant}, {BROKEN}": "RuntimeError: misaligned address"}
    assert found["choices"][str(KEY)] == {
        "config": str(FAST),
        "microseconds": {str(SLOW): 2000.0, str(FAST): 1000.0},
    }


def test_failing_configuration_warns() -> None:
    with pytest.warns(RuntimeWarning, match=f"{BROKEN} is not used: RuntimeError: misaligned address"):
        FakeTuner().choose()


def test_fault_applies_to_all_keys_of_its_variant_only() -> None:
    fake = FakeTuner()
    fake.choose()
    fake.choose(KEY._replace(rows=2048))
    assert fake.launched.count(BROKEN) == 1 and fake.timed == 4
    fake.choose(KEY._replace(variant=KEY.variant._replace(gather=False)))
    assert fake.launched.count(BROKEN) == 2 and fake.timed == 6


def test_single_candidate_is_not_timed(file: Path) -> None:
    """As on a GPU without verified configurations."""
    fake = FakeTuner(file)
    fake.tuner._candidates = lambda key: [SLOW]
    assert fake.choose() == SLOW and not fake.launched and not file.exists()


def test_recorded_choice_is_reused(file: Path) -> None:
    FakeTuner(file).choose()
    fake = FakeTuner(file)
    assert fake.choose() == FAST and not fake.launched and not fake.timed
    assert fake.choose(KEY._replace(experts=8)) == FAST and fake.launched == [SLOW, FAST] and fake.timed == 2


def test_invalid_or_failing_recorded_choice_is_ignored(file: Path) -> None:
    FakeTuner(file).choose()
    for config in ("999x64x32 w4 s1 g8", str(BROKEN), 7, None):
        found = json.loads(file.read_text())
        found["choices"][str(KEY)]["config"] = config
        write_cache_file(file, json.dumps(found))
        fake = FakeTuner(file)
        assert fake.choose() == FAST and fake.timed == 2


def test_new_candidate_triggers_retuning(file: Path) -> None:
    """A newly verified configuration that was not among the candidates triggers a new choice."""
    fake = FakeTuner(file)
    fake.tuner._candidates = lambda key: [SLOW, BROKEN]
    assert fake.choose() == SLOW
    assert FakeTuner(file).choose() == FAST


def test_hanging_configuration_is_excluded_in_next_run(file: Path) -> None:
    fake = FakeTuner(file)
    ended = iter([False, False, True])
    autotune.poll_until(lambda: next(ended), 60)
    with pytest.raises(TimeoutError, match=r"has not ended after 0.01 seconds") as late:
        autotune.poll_until(lambda: False, 0.01)
    fake.faults[SLOW] = late.value
    with pytest.raises(RuntimeError, match="has not ended after 0.01 seconds.*restart the process"):
        fake.choose()
    again = FakeTuner(file)
    assert again.choose() == FAST and SLOW not in again.launched


def test_illegal_access_excludes_only_one_configuration(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal access no launch runs in this process; the later configurations are not at fault."""
    fake, lost = FakeTuner(file), [True]
    fake.faults = dict.fromkeys((SLOW, BROKEN, FAST), RuntimeError("an illegal memory access was encountered"))
    monkeypatch.setattr(autotune, "_is_gpu_lost", lambda: bool(lost))
    with pytest.raises(RuntimeError, match="illegal memory access.*cannot use the GPU any more.*restart the process"):
        fake.choose()
    assert fake.launched == [SLOW]
    assert json.loads(file.read_text())["faults"] == {
        f"{KEY.variant}, {SLOW}": "RuntimeError: an illegal memory access was encountered"
    }
    lost.clear()
    again = FakeTuner(file)
    assert again.choose() == FAST and SLOW not in again.launched


@pytest.mark.parametrize("good", [0, 40])
@pytest.mark.parametrize("lost", [True, False])
def test_failure_while_timing_excludes_configuration(
    lost: bool, good: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tuner_without_broken(file)
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
    monkeypatch.setattr(autotune, "_is_gpu_lost", lambda: lost)
    if lost:
        with pytest.raises(RuntimeError, match="misaligned address.*restart the process"):
            fake.choose()
    else:
        assert fake.choose() == SLOW
    assert "misaligned" in json.loads(file.read_text())["faults"][f"{KEY.variant}, {FAST}"]
    assert tuner_without_broken(file).choose() == SLOW


def test_error_if_every_configuration_fails() -> None:
    fake = FakeTuner()
    fake.faults = dict.fromkeys((SLOW, FAST, BROKEN), RuntimeError("no image"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="every configuration of up float32.*no image.*FUSEDMOE_AUTOTUNE=0"):
            fake.choose()
        fake.allowed = False


def test_out_of_memory_is_not_recorded_as_fault(file: Path) -> None:
    fake = FakeTuner(file)
    fake.faults = {FAST: torch.OutOfMemoryError("none left")}
    assert fake.choose() == SLOW and fake.choose() == SLOW
    again = FakeTuner(file)
    assert again.choose() == FAST and again.timed == 2, "what lack of memory decided was written down"


class VariableSpeedTuner:
    """Tuner of a GPU whose speed changes as it works: `slow(now)` times slower, `now` its seconds of work so far."""

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

        self.tuner = Tuner(lambda key: [*times], measure, TuningRecord(None), lambda: True)

    def choose(self) -> Config:
        return self.tuner.choose(KEY, lambda config: None)


def test_warmup_launches_precede_timing() -> None:
    clocked = VariableSpeedTuner({SLOW: 2e-3, FAST: 1e-3}, lambda now: max(1.0, 6.0 - 60 * now))
    assert clocked.choose() == FAST
    assert clocked.tuner.tuning_times_us(KEY) == {str(SLOW): 2000.0, str(FAST): 1000.0}


@pytest.mark.parametrize("begin", [0.1, 0.12, 0.13, 0.14])
def test_transient_slowdown_does_not_change_choice(begin: float) -> None:
    """The slowdown covers more than half of a configuration's launches: consecutive launches would all be slow."""
    times = {SLOW: 1.2e-3, FAST: 1e-3}
    clocked = VariableSpeedTuner(times, lambda now: 1.85 if begin < now < begin + 0.02 else 1.0)
    assert clocked.choose() == FAST
    assert clocked.tuner.tuning_times_us(KEY) == {str(SLOW): 1200.0, str(FAST): 1000.0}


def test_fastest_three_are_timed_further() -> None:
    configs = [Config(16 * number, 64, 32, 4, 1) for number in range(1, 6)]
    clocked = VariableSpeedTuner({config: number * 1e-3 for number, config in enumerate(configs, 1)})
    assert clocked.choose() == configs[0]
    last = clocked.configs[-(5 * 3 + 3 * 17) :]
    assert [last.count(config) for config in configs] == [20, 20, 20, 3, 3] and last[:5] == configs


def test_long_launches_are_timed_in_three_rounds() -> None:
    clocked = VariableSpeedTuner({SLOW: 0.4, FAST: 0.3})
    assert clocked.choose() == FAST
    assert clocked.configs == [SLOW, FAST] * 2 + [FAST, SLOW] * 2, "first a round that does not count"


def test_autotune_variable_disables_tuning(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDMOE_AUTOTUNE", "0")
    fake = FakeTuner(file)
    assert fake.choose() == SLOW and not fake.launched and not file.exists()


def test_tuning_is_deferred_under_graph_capture(file: Path) -> None:
    """Under graph capture the table decides, and the next launch is tuned; cached choices are used even then."""
    fake = FakeTuner(file, allowed=False)
    assert fake.choose() == SLOW and not fake.launched
    fake.allowed = True
    assert fake.choose() == FAST
    fake = FakeTuner(file, allowed=False)
    assert fake.choose() == FAST
    fake.tuner.record.faults[f"{KEY.variant}, {SLOW}"] = "known to fail"
    assert fake.choose(KEY._replace(experts=8)) == FAST


def test_deterministic_mode_ignores_timed_choice(file: Path) -> None:
    """Times differ between machines, and with them the last bits."""
    FakeTuner(file).choose()
    fake = FakeTuner(file)
    fake.fixed = True
    assert fake.choose() == fake.choose() == SLOW
    fake.fixed = False
    assert fake.choose() == FAST
    fake.fixed = True
    assert fake.choose() == SLOW and not fake.timed


def test_recorded_fault_applies_to_untuned_launches(file: Path) -> None:
    """A fault found by a later, tuned launch also excludes the configuration from untuned launches."""
    FakeTuner(file).choose()
    fake, small = FakeTuner(file), KEY._replace(rows=1, experts=1)
    assert fake.choose(small) == SLOW
    fake.faults[SLOW] = RuntimeError("misaligned address")
    assert fake.choose(KEY._replace(experts=8)) == FAST
    assert fake.choose(small) == FAST


def test_small_launches_are_not_tuned() -> None:
    fake = FakeTuner()
    assert fake.choose(KEY._replace(rows=1, experts=1)) == SLOW and not fake.launched


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", '{"faults": 3, "choices": {}}', '{"faults": {"a": []}, "choices": {"b": 1}}', "\x00\xff"],
)
def test_damaged_cache_file_is_rewritten(text: str, file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(text.encode("latin-1"))
    with pytest.warns(UserWarning, match=str(file)):
        fake = FakeTuner(file)
        assert fake.choose() == FAST and fake.timed == 2
    again = FakeTuner(file)
    assert again.choose() == FAST and again.timed == 0


def test_unwritable_or_unreadable_cache_file_is_tolerated(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder is wanted")
    assert FakeTuner(blocked / "grouped.json").choose() == FAST
    folder = tmp_path / "grouped.json"
    folder.mkdir()
    with pytest.warns(UserWarning, match=f"{folder} cannot be read"):
        assert FakeTuner(folder).choose() == FAST
    assert sorted(os.listdir(tmp_path)) == ["blocked", "grouped.json"], "something is left"


def _write(file: Path, names: list[str]) -> None:
    record = TuningRecord(file)
    for name in names:
        record.faults[name] = "x" * 2000
        record.save()


def test_concurrent_writers_keep_cache_file_complete(file: Path) -> None:
    """Concurrent readers find a complete file; all results of each process are present once it writes alone."""
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


def test_launch_uses_fastest_working_configuration(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real launches: the fastest working configuration is chosen."""
    monkeypatch.setattr(autotune, "MIN_TUNED_FLOPS", 0)
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

    tuner = Tuner(lambda key: [broken, slow, fast], measure, TuningRecord(None), lambda: True)
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


@pytest.mark.parametrize("total", [torch.float32, torch.bfloat16], ids=["in_place", "widened"])
def test_tuned_accumulating_launch_adds_once(total: torch.dtype, device: torch.device) -> None:
    """A matrix gradient is added once, for any number of launches that tune its configuration."""
    slow, fast = (Config(bm, 64, 32, 4, 1) for bm in (32, 64))
    times, ran = {slow: 3.0, fast: 2.0}, 0

    def measure(run: Callable[[], object], shared: bool) -> Callable[[], float]:
        nonlocal ran
        ran += 1
        run()
        run()
        return lambda: times[run.args[0]]  # type: ignore[attr-defined]

    def choose(key: Key, launch: Callable[[Config], object]) -> Config:
        tuner = Tuner(lambda key: [*times], measure, TuningRecord(None), lambda: True)
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


def test_interpreter_is_never_tuned(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cuda":
        pytest.skip("there is a GPU")
    monkeypatch.setattr(autotune, "MIN_TUNED_FLOPS", 0)
    monkeypatch.setattr(triton_experts, "tuner", lambda device: pytest.fail("asked for a tuner"))
    layout = contiguous_layout(torch.tensor([3]), 3)
    x_SM, w1, w2 = torch.randn(3, 32), torch.randn(1, 32, 32), torch.randn(1, 32, 32)
    weights = Weights(w1, w2)
    y_SM, _ = triton_experts.experts_forward(x_SM, layout, None, weights, ACTIVATIONS["relu"])
    torch.testing.assert_close(y_SM, (x_SM @ w1[0].t()).relu() @ w2[0].t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared", [False, True])
def test_tuning_on_gpu(shared: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if device.type == "cpu":
        pytest.skip("there is no GPU")
    torch.use_deterministic_algorithms(False)  # this folder's fixture enables them
    monkeypatch.setenv("FUSEDMOE_CACHE", str(tmp_path))
    monkeypatch.setattr(autotune, "MIN_TUNED_FLOPS", 0)
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
def test_multiprocessor_holder_ends_on_release_or_poll_limit(
    flag: int, epoch: int, looks: int, device: torch.device
) -> None:
    """It ends when released, and without a release after a fixed number of polls."""
    flag_1 = torch.full((1,), flag, dtype=torch.int32, device=device)
    sink = torch.zeros(3 * 32, dtype=torch.int32, device=device)
    hold_kernel[(2,)](flag_1, sink, epoch, looks or 1000, NUMBERS=32, num_warps=1)
    assert sink.tolist() == [looks] * 64 + [0] * 32


class FakeHolder:
    """Stand-in for a holder; records the order of the measurement's calls."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def hold(self) -> None:
        self._said.append("hold")

    def release(self) -> None:
        self._said.append("let go")


def test_multiprocessors_are_held_around_each_timed_run(monkeypatch: pytest.MonkeyPatch) -> None:
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
    take = autotune._prepare_timer(torch.device("cpu"), lambda: said.append("run"), FakeHolder(said))  # type: ignore[arg-type]
    held = ["hold", "event", "run", "event", "let go"]
    # The host time per launch is measured last.
    assert said == ["run", *held, "all ends", "run", "event", "event"]
    said.clear()
    assert take() == 1e-3 and said == held


def test_gpu_tuner_times_verified_configurations_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuner times nothing on a GPU type that nobody has verified."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "stand-in")
    monkeypatch.setattr(configs, "TRITON_VERSION", "3.6.0")
    key = Key(Variant("down", "bfloat16", "ieee", "", False, False, True, True), 768, 2048, 8, 1024)

    def candidates(**changed: Any) -> list[Config]:
        gpu = {"major": 9, "minor": 0, "shared_memory_per_block_optin": 232_448, "multi_processor_count": 132}
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**(gpu | changed)))
        return [*autotune.tuner.__wrapped__(torch.device("cuda", 0))._candidates(key)]

    known = candidates()
    assert len(known) > 5 and any(isinstance(one, HopperConfig) for one in known)
    assert candidates(major=10) == known[:1]
