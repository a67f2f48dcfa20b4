"""Damages files of every kind that fusedmoe reads, thousands of them from a seed, and counts what comes of it.

    python -m tests.chaos.files --seed 1 --count 5000 --json files.json

What a load may do: give the right numbers, refuse with an error that names the file, ignore the file with a warning
that names it, or (where files have no checksums, because people write them) take it for another one that is sound.
Anything else is a failure: wrong numbers, another error, something that ran, was left, or did not end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.placement import loads
from bench.placement.made_loads import make_loads
from fusedmoe.cli import run_dir
from fusedmoe.cli.data import load_corpus
from fusedmoe.cli.load_trace import LoadTrace
from fusedmoe.cli.settings import Settings, read_costs, read_settings
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.files import dump_with_digest, read_text
from fusedmoe.runtime import cache
from fusedmoe.runtime.profiler import Profile, line_names
from fusedmoe.schedule.cost import Contention, CostModel, Line
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.timeline import Span, Timeline
from fusedmoe.training.survival.node_memory import NodeMemory
from fusedmoe.training.survival.survival import Survival
from tests.training.planted import rewrite, rewritten
from tests.training.test_checkpoint_folder import load, save
from tests.training.toy import ONE, Toy

ALONE = Topology()
#: Time limit of a load; a longer load counts as a hang.
LIMIT_S = 20
#: Forbidden events during a load. `pickle.find_class` stands for any code in a pickle.
FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen")
#: Memory limit, above the needs of any of these files.
MEMORY_BYTES = 6 * 2**30

SMALL_PLAN = (
    "phase: backward\nlayer: 3\ncompute: E0 E1\nintra: AG0 AG1 RS0 RS1\ninter: D0 D1 AR0(4096) C0 C1\nafter AR0: E0"
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7.5, -0.0, 1e300, -1e300, 1e-300, 10**30, -(10**400), 2**63, 2**64 - 1),
    *(float("nan"), float("inf"), "", "text", "\udcff", "\0", "1", [], {}, [[]], [[[[]]]], {"a": 1}, ["\ud800"]),
)


class Kind(NamedTuple):
    """Files of one kind.

    Attributes:
        make: write a sound file into a folder and return its path.
        read: load it as a user does; raises the errors a user sees.
        strict: the file has checksums, so only the right value may be returned.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    strict: bool = False


def _write(name: str, text: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
        return folder / name

    return make


def _line(number: float) -> Line:
    return Line(1e-6 * number, 1e-12, 0.95)


def _profile(*_: Any, **how: Any) -> Profile:
    costs = CostModel(
        dict.fromkeys(line_names(ALONE), _line(1)), Contention.between_links(0.5), how["machine"], tiled=True
    )
    return Profile(costs, {name: ((1.0, 2.0), (3.0, 4.0)) for name in costs.lines}, 1.5)


def _cached(path: Path) -> Any:
    """Return the profile and the number of measurements."""
    os.environ[cache.CACHE] = str(path.parent)
    found, where = cache.cached_profile(ALONE, torch.device("cpu"))
    assert where == path
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if not path.is_dir():
            assert cache.cached_profile(ALONE, torch.device("cpu"))[0] == found
    return found


def _make_cached(folder: Path) -> Path:
    os.environ[cache.CACHE] = str(folder)
    return cache.cached_profile(ALONE, torch.device("cpu"))[1]


def _same(value: Any, again: Any) -> Any:
    """Require that a sound value survives a write and a read."""
    assert repr(again) == repr(value), "what was read cannot be written and read back"
    return value


def _costs(path: Path) -> Any:
    found = read_costs(path)
    return _same(found, CostModel.from_json(found.to_json()))


def _settings(path: Path) -> Any:
    found = read_settings(path.parent)
    return _same(found, Settings.from_dict(json.loads(json.dumps(found.to_dict()))))


def _loads(path: Path) -> Any:
    found = loads._trace(argparse.Namespace(trace=path))
    assert found.load_ILE.min() >= 0
    return _same(found.to_json(), LoadTrace.from_json(found.to_json()).to_json())


def _resumed_loads(path: Path) -> Any:
    found = run_dir._read_first_steps(path, 3)
    return None if found is None else (found.tokens_ILWE.shape, found.load_ILE.min() >= 0)


def _metrics(path: Path) -> Any:
    run_dir.RunDir(path.parent).drop_metrics_after(3)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(line["step"] <= 3 and "loss" in line for line in lines)
    return repr(lines)


def _plan(path: Path) -> Any:
    found = Plan.parse(read_text(path))
    return _same(found, Plan.parse(str(found)))


def _timeline(path: Path) -> Any:
    found = Timeline.from_json(read_text(path))
    return _same(found, Timeline.from_json(found.to_json()))


def _data(path: Path) -> Any:
    found = load_corpus(path.parent, "*", 0.3)
    assert len(found.train) and len(found.held_out)
    return found.fingerprint


def _make_data(folder: Path) -> Path:
    for name in ("a.txt", "b.txt", "c.txt", "\udcff.txt"):
        (folder / name).write_text(f"The text of {name!r}.\n" * 20)
    return folder / "b.txt"


def _survival(folder: Path) -> tuple[Survival, Toy]:
    torch.manual_seed(1)
    return Survival(ALONE, NodeMemory(os.getpid(), folder)), Toy()


def _make_kept(suffix: str) -> Callable[[Path], Path]:
    """Save a state in node memory with its note; return the path with the given suffix."""

    def make(folder: Path) -> Path:
        survival, model = _survival(folder)
        survival.refresh(1, model, None, {"step": 1})
        NodeMemory(os.getpid(), folder).write_note({"settings": {"lr": 0.125, "steps": 40}, "shares": 3})
        return next(path for path in folder.iterdir() if path.name.endswith(suffix))

    return make


def _kept(path: Path) -> Any:
    note = NodeMemory(os.getpid(), path.parent).note()
    survival, model = _survival(path.parent)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    extra = survival.restore(model, None)
    if extra is None or note is None:  # its own file is missing or foreign
        raise ConfigError(f"nothing is kept in {path.parent}")
    return extra, note, {name: value.tolist() for name, value in model.state_dict().items()}


SPANS = tuple(Span(f"D{i}", "dispatch", "inter", 0.5 * i, 0.5 * i + 0.25, i, 0, "forward") for i in range(3))
METRICS = "".join(json.dumps({"step": step, "loss": 1.0 / step, "time": 7e8}) + "\n" for step in range(1, 6))
COSTS = next(iter(TESTBEDS.values())).costs.to_json()
KINDS = {
    "costs": Kind(_write("costs.json", COSTS), _costs),
    "costs of a run": Kind(_write("costs.json", dump_with_digest(json.loads(COSTS))), _costs, strict=True),
    "settings": Kind(
        _write("config.json", dump_with_digest({"settings": Settings().to_dict()}, 2)), _settings, strict=True
    ),
    "loads": Kind(_write("loads.json", make_loads(4, 2, 2, 3, tokens=50).to_json()), _loads, strict=True),
    "loads of a run": Kind(_write("loads.json", make_loads(4, 2, 2, 3, tokens=50).to_json()), _resumed_loads),
    "metrics": Kind(_write("metrics.jsonl", METRICS), _metrics),
    "plan": Kind(_write("plan.txt", SMALL_PLAN), _plan),
    "timeline": Kind(_write("timeline.json", Timeline(1, SPANS, "predicted").to_json()), _timeline),
    "data": Kind(_make_data, _data),
    "cache": Kind(_make_cached, _cached, strict=True),
    "kept bytes": Kind(_make_kept("-0"), _kept, strict=True),
    "kept header": Kind(_make_kept(".json"), _kept, strict=True),
    "kept note": Kind(_make_kept("note"), _kept, strict=True),
}


# Damage


def _flipped(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 50))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _cut(chance: random.Random, data: bytes) -> bytes:
    return data[: chance.randrange(len(data))]


def _moved(chance: random.Random, data: bytes) -> bytes:
    """Duplicate, delete or move a slice of the data."""
    first, last, place = sorted(chance.randrange(len(data) + 1) for _ in range(3))
    return chance.choice(
        (data[:last] + data[first:], data[:first] + data[last:], data[:first] + data[last:place] + data[first:last])
    )


def _junk(chance: random.Random, data: bytes) -> bytes:
    noise = chance.randbytes(chance.choice((0, 1, 100, 5000)))
    place = chance.randrange(len(data))
    return chance.choice((noise, data + noise, noise + data, data[:place] + noise + data[place:], bytes(len(data))))


def _deep(chance: random.Random, data: bytes) -> bytes:
    return chance.choice((b"[" * 200_000, b'{"a":' * 200_000, b"[" * 100_000 + b"]" * 100_000, b"1" * 5000))


def _odd(chance: random.Random, data: bytes) -> bytes:
    """Replace a value in JSON or in one of its lines; otherwise duplicate a word."""
    lines = data.split(b"\n") if data.startswith(b'{"step"') else [data]
    number = chance.randrange(len(lines))
    try:
        value = json.loads(lines[number])
    except ValueError:
        words = data.split(b" ")
        number = chance.randrange(len(words))
        return b" ".join([*words[:number], chance.choice((b"E7", b"-1", b"x" * 1000, b"9" * 5000)), *words[number:]])
    spots = list(_spots(value))
    if not spots:
        return b"7"
    holder, key = chance.choice(spots)
    if chance.random() < 0.2:
        del holder[key]
    else:
        holder[key] = chance.choice(ODD)
    with _long_numbers():
        lines[number] = json.dumps(value).encode()
    return b"\n".join(lines)


@contextmanager
def _long_numbers() -> Iterator[None]:
    most = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(most)


def _spots(value: Any) -> Iterator[tuple[Any, Any]]:
    keys: Any = range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else ()
    for key in keys:
        yield value, key
        yield from _spots(value[key])


CONTENTS = {"flipped": _flipped, "cut": _cut, "moved": _moved, "junk": _junk, "deep": _deep, "odd": _odd}


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**42)


def _planted(path: Path) -> None:
    """Write bytes that would execute code on unpickling."""
    name = str(path.parent.parent / "canary")
    path.write_bytes(b"\x80\x02cposix\nopen\n(X" + len(name).to_bytes(4, "little") + name.encode() + b"MB\x02tR.")


OTHERS: dict[str, Callable[[Path], None]] = {
    "a folder": Path.mkdir,
    "a pipe": lambda path: os.mkfifo(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a circle": lambda path: path.symlink_to(path.name),
    "nothing": lambda path: None,
    "too large": _sparse,
    "planted": _planted,
}


def damage(chance: random.Random, path: Path) -> str:
    """Damage the file at a path; return the method."""
    if chance.random() < 0.15:
        how = chance.choice(list(OTHERS))
        path.unlink()
        OTHERS[how](path)
        return how
    how = chance.choice(list(CONTENTS))
    path.write_bytes(CONTENTS[how](chance, path.read_bytes()))
    return how


def one_bit(chance: random.Random, path: Path) -> str:
    """Flip a bit of a file; return its position."""
    data = bytearray(path.read_bytes())
    byte, bit = chance.randrange(len(data)), chance.randrange(8)
    data[byte] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {byte}"


#: Files with digests that jobs write for themselves: a flipped bit must never change the result.
KEPT = (*(name for name, kind in KINDS.items() if kind.strict), "checkpoint")
ALL = (*KINDS, "checkpoint", "checkpoint", "rewritten")

# Cases


class Watch:
    """Record forbidden events while `on`."""

    def __init__(self) -> None:
        self.on, self.seen = False, Counter[str]()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and event.startswith(FORBIDDEN):
            self.seen[f"{event} {str(args)[:100]}"] += 1


class Failed(AssertionError):
    """The outcome of a damaged file is not an allowed one."""


class Fuzzer:
    """Run cases in a private folder.

    Args:
        kinds: of files.   harm: the methods of damage.
    Attributes:
        outcomes: counts of each outcome, by kind.
        failures: case number, kind, damage, and the error.
    """

    def __init__(
        self,
        seed: int,
        folder: Path,
        kinds: Sequence[str] = ALL,
        harm: Callable[[random.Random, Path], str] = damage,
    ) -> None:
        self._seed, self._folder, self._watch = seed, folder, Watch()
        self._names, self._harm = kinds, harm
        self._whole = {name: folder / "whole" / str(number) for number, name in enumerate(KINDS)}
        self._right: dict[str, Any] = {}
        self._paths: dict[str, str] = {}
        for name, kind in KINDS.items():
            self._whole[name].mkdir(parents=True)
            self._paths[name] = kind.make(self._whole[name]).name
            self._right[name] = self._in_copy(name, kind.read)
        save(0, 1, ONE, folder / "checkpoint")
        self._held = load(folder / "checkpoint", ONE, 0, ALONE, trained=True)[2]
        self.outcomes: dict[str, Counter[str]] = {}
        self.failures: list[dict[str, Any]] = []

    def run(self, number: int) -> None:
        """Run the case of this number, deterministic in the seed."""
        chance = random.Random(f"{self._seed}/{number}")
        name = chance.choice(self._names)
        self._how, handles = "", len(os.listdir("/proc/self/fd"))
        self._watch.seen.clear()
        work, canary = self._folder / "work", self._folder / "canary"
        try:
            work.mkdir()
            with _bounded():
                case = self._checkpoint if name not in KINDS else self._file
                outcome = case(chance, name, work)
            shutil.rmtree(work)
            left = sorted({one.name for one in self._folder.iterdir()} - {"whole", "checkpoint"})
            _expect(not left, f"{left} is left")
            _expect(len(os.listdir("/proc/self/fd")) == handles, "a descriptor is left")
            _expect(not self._watch.seen, f"it ran {[*self._watch.seen]}")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome = "failure"
            text = f"{type(error).__name__}: {error}"[:500]
            self.failures.append({"case": number, "kind": name, "damage": self._how, "error": text})
        finally:
            self._watch.on = False
            shutil.rmtree(work, ignore_errors=True)
            canary.unlink(missing_ok=True)
        self.outcomes.setdefault(name, Counter())[outcome] += 1

    @contextmanager
    def _watched(self) -> Iterator[list[warnings.WarningMessage]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._watch.on = True
            try:
                yield caught
            finally:
                self._watch.on = False

    def _in_copy(self, name: str, read: Callable[[Path], Any]) -> Any:
        copy = self._folder / "copy"
        shutil.copytree(self._whole[name], copy)
        try:
            return read(copy / self._paths[name])
        finally:
            shutil.rmtree(copy)

    def _file(self, chance: random.Random, name: str, work: Path) -> str:
        kind, path = KINDS[name], work / "copy" / self._paths[name]
        shutil.copytree(self._whole[name], path.parent)
        self._how = self._harm(chance, path)
        there = sorted(one.name for one in path.parent.iterdir())
        with self._watched() as caught:
            try:
                found = kind.read(path)
                outcome = "right" if repr(found) == repr(self._right[name]) else "another"
            except (ConfigError, RankError) as error:
                told = str(path.parent) in str(error) or name in ("plan", "timeline")  # texts, which no command reads
                _expect(told, f"does not name the file: {error}")
                outcome = "refused"
            except OSError as error:  # `main` reports these
                _expect(error.filename is not None, f"does not name the file: {error}")
                outcome = "refused"
        texts = [str(one.message) for one in caught]
        _expect(all(str(path.parent) in text for text in texts), f"a warning without the file: {texts}")
        if texts and outcome != "refused":
            outcome = "ignored with a warning"
            _expect(not kind.strict or repr(found) == repr(self._right[name]), "wrong numbers")
        _expect(not (kind.strict and outcome == "another"), "wrong numbers")
        after = {one.name for one in path.parent.iterdir()} - {path.name}
        _expect(after == {*there} - {path.name}, f"something is left: {after}")
        _expect(not (self._folder / "canary").exists(), "something ran")
        return outcome

    def _checkpoint(self, chance: random.Random, name: str, work: Path) -> str:
        """Require that a checkpoint loads fully or not at all."""
        path = work / "checkpoint"
        shutil.copytree(self._folder / "checkpoint", path)
        if name == "rewritten":
            made = rewritten(path)
            self._how = chance.choice(list(made))
            rewrite(path, made[self._how])
        else:
            file = chance.choice(sorted(path.iterdir()))
            self._how = f"{file.name} {self._harm(chance, file)}"
        with self._watched():
            said, before, after = load(path, ONE, 0, ALONE, trained=chance.random() < 0.5)
        _expect(not (self._folder / "canary").exists(), "something ran")
        _expect(said is None or str(path) in said, f"does not name the file: {said}")
        _expect(after == (self._held if said is None else before), f"wrong numbers: {said}")
        _expect(name != "rewritten" or said is not None, "was not noticed")
        _expect([one.name for one in work.iterdir()] == ["checkpoint"], "something is left")
        return "right" if said is None else "refused"


def _expect(true: bool, else_: str) -> None:
    if not true:
        raise Failed(else_)


@contextmanager
def _bounded() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Failed(f"did not end within {LIMIT_S} s")

    handler = signal.signal(signal.SIGALRM, late)
    timer = signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def campaign(seed: int, count: int, **how: Any) -> dict[str, Any]:
    """Run `count` cases, with `how` as for `Fuzzer`; return outcomes in plain types, with every failure's number."""
    began, measured = time.monotonic(), cache.profile
    kept = os.environ.get(cache.CACHE)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_bytes() + MEMORY_BYTES, limits[1]))
    cache.profile = _profile
    try:
        with tempfile.TemporaryDirectory() as folder:
            fuzzer = Fuzzer(seed, Path(folder), **how)
            for number in range(count):
                fuzzer.run(number)
    finally:
        cache.profile = measured
        resource.setrlimit(resource.RLIMIT_AS, limits)
        if kept is None:
            os.environ.pop(cache.CACHE, None)
        else:
            os.environ[cache.CACHE] = kept
    outcomes = {kind: dict(sorted(found.items())) for kind, found in sorted(fuzzer.outcomes.items())}
    total: Counter[str] = sum(fuzzer.outcomes.values(), Counter())
    return {
        "what": "damaged files",
        "seed": seed,
        "count": count,
        "seconds": round(time.monotonic() - began, 1),
        "outcomes": dict(sorted(total.items())),
        "by_kind": outcomes,
        "failures": fuzzer.failures,
    }


def _address_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    found = campaign(arguments.seed, arguments.count)
    text = json.dumps(found, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
