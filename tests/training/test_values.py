"""Values in checkpoints and node memory: a load returns each value that a save accepts; a save rejects any other."""

from __future__ import annotations

import enum
import json
import math
import os
import random
import re
import struct
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from torch import nn

from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.training import load_checkpoint, save_checkpoint
from fusedmoe.training.plain_values import DTYPES, decode_value, encode_value, tensor_bytes
from fusedmoe.training.survival.node_memory import NodeMemory
from fusedmoe.training.survival.survival import Survival
from tests.cluster import Cluster
from tests.training.toy import Sizes, Toy

ALONE = Topology()


class WithState(nn.Linear):
    """A module whose extra state is the state of an average."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.average = nn.BatchNorm1d(2).state_dict()

    def get_extra_state(self) -> Any:
        return self.average

    def set_extra_state(self, state: Any) -> None:
        self.average = state


class Counting(torch.optim.SGD):
    """An optimizer that stores plain values for each parameter."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"step": 1, "counts": OrderedDict(steps=1), "kind": "text", "array": np.arange(3.0)}
            self.state[parameter] |= {"tensors": [torch.ones(2)], "size": torch.Size([2, 3])}


def test_ordered_dicts_round_trip(tmp_path: Path) -> None:
    path, model, average = tmp_path / "checkpoint", WithState(), nn.BatchNorm1d(3)
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.step()
    save_checkpoint(path, model, optimizer, ALONE, {"average": average.state_dict()})
    loaded = WithState()
    loaded.average = None
    other = Counting(loaded.parameters(), lr=0.1)
    extra = load_checkpoint(path, loaded, other, ALONE)
    found = extra["average"]
    assert type(found) is OrderedDict and found._metadata == average.state_dict()._metadata
    nn.BatchNorm1d(3).load_state_dict(found)
    assert all(torch.equal(value, found[key]) for key, value in average.state_dict().items())
    assert type(loaded.average) is OrderedDict and list(loaded.average) == list(model.average)
    assert len(other.state) == 2
    for key, value in optimizer.state[model.weight].items():
        assert_same(other.state[loaded.weight][key], value)


EXTRA_STATES = [torch.arange(3), torch.zeros(0), torch.tensor(2.5), None, {"a": torch.ones(2)}]


@pytest.mark.parametrize("before", range(len(EXTRA_STATES)))
def test_extra_state_of_other_shape_is_loaded(tmp_path: Path, before: int) -> None:
    """A new module has none yet, or a tensor of another shape or dtype."""
    model, loaded = WithState(), WithState()
    for state in EXTRA_STATES:
        model.average = state
        save_checkpoint(tmp_path / "checkpoint", model, None, ALONE)
        Survival(ALONE, NodeMemory(os.getpid(), tmp_path)).refresh(1, model, None)
        for load in (
            lambda: load_checkpoint(tmp_path / "checkpoint", loaded, None, ALONE),
            lambda: Survival(ALONE, NodeMemory(os.getpid(), tmp_path)).restore(loaded, None),
        ):
            loaded.average = EXTRA_STATES[before]
            load()
            assert_same(loaded.average, state)


def _refresh_with_unsupported_value(rank: int, world: int, folder: Path) -> str:
    topology, model = Topology.from_sizes(ep=1), nn.Linear(2, 2)
    memory = NodeMemory(os.getppid(), folder)
    Survival(topology, memory).refresh(1, model, None, {"step": 1})
    survival = Survival(topology, memory)
    with pytest.raises(RankError) as caught:
        survival.refresh(2, model, None, {"step": 2, "mine": ALONE if rank else 3})
    found = Survival(topology, memory).restore(model, None)
    assert found == {"step": 1}
    return str(caught.value)


def test_refresh_rejects_unreadable_values_on_all_ranks(cluster: Cluster, tmp_path: Path) -> None:
    texts = cluster.run(2, _refresh_with_unsupported_value, tmp_path)
    assert len(set(texts)) == 1 and "failed on rank 1" in texts[0] and "is of class fusedmoe" in texts[0]


def test_rejected_value_keeps_checkpoint(tmp_path: Path) -> None:
    path, model = tmp_path / "checkpoint", nn.Linear(2, 2)
    save_checkpoint(path, model, None, ALONE, {"step": 1})
    with pytest.raises(ConfigError, match=r"extra\['mine'\] is of class .*\.Topology"):
        save_checkpoint(path, model, None, ALONE, {"step": 2, "mine": ALONE})
    assert load_checkpoint(path, model, None, ALONE) == {"step": 1}


class Plain(NamedTuple):
    """A named tuple, which is no plain tuple."""

    number: int = 1


class Colour(enum.IntEnum):
    """An int subclass."""

    RED = 1


class Rows(list[int]):
    """A list subclass."""


class Tagged(torch.Tensor):
    """A tensor subclass."""


def kept_values() -> dict[str, Any]:
    """Values of every kind that a checkpoint stores."""
    tensor = torch.arange(12.0).view(3, 4)
    zone = timezone(timedelta(hours=2))
    values: dict[str, Any] = {
        "constants": [None, True, False, 0, -1, 2**63, -(2**64), 10**5000],
        "floats": [0.1, -0.0, 1e-320, math.inf, -math.inf, math.nan, struct.unpack(">d", b"\x7f\xf8\0\0\0\0\0\7")[0]],
        "text": ["", "é\x1b\ud800", "$tuple", b"\0\xff"],
        "tuples": ((), (1, (2, [3]))),
        "sets": [{1, "a", (2, 3)}, frozenset({4}), set()],
        "keys": {10**5000: 1, (10**5000,): 2, 1: "a", None: 2, (1, "b"): 3, b"c": 4, 2.5: 5, torch.float16: 6},
        "tags": {"$tuple": [1], "a": {"$": 2}},
        "ordered": OrderedDict(b=1, a=OrderedDict()),
        "counter": Counter("abca"),
        "torch": [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 0])],
        "numpy": [np.float64(0.1), np.float32(0.1), np.int8(-3), np.bool_(True), np.complex64(1 + 2j)],
        "arrays": [
            np.arange(6)[::2],
            np.zeros((2, 0), ">f4"),
            np.array(5),
            np.array(["a", "bc"]),
            np.arange(4).reshape(2, 2).T,
        ],
        "times of numpy": [np.datetime64("2026-11-28T01:02", "m"), np.timedelta64(3, "s"), np.array(["NaT"], "M8[ns]")],
        "generators": [
            np.random.get_state(),
            np.random.default_rng(1).bit_generator.state,
            np.random.Generator(np.random.MT19937(3)).bit_generator.state,
            random.getstate(),
            torch.get_rng_state(),
        ],
        "paths": [Path("a/\udcff"), Path()],
        "times": [datetime(2026, 1, 1, fold=1, tzinfo=zone), datetime.now(UTC), datetime.now(), date(1, 1, 1)],
        "more times": [datetime(2026, 1, 1, 1, 2, 3, 4), timedelta(days=-1, microseconds=5)],
        "state": nn.BatchNorm1d(3).state_dict(),
        "parameters": [
            nn.Parameter(torch.ones(2)),
            nn.Parameter(torch.ones(2), requires_grad=False),
            nn.Buffer(tensor),  # PyTorch returns a plain tensor
        ],
        "tensors": [
            tensor.t(),
            tensor[:, ::2],
            tensor.expand(2, 3, 4),
            torch.tensor(3),
            torch.ones(2, requires_grad=True),
        ],
        "bits": [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag],
        "empty": [torch.empty(0, 3), torch.empty(2, 0, dtype=torch.complex128)],
        "dtypes": [torch.arange(48, dtype=torch.uint8).view(dtype) for dtype in DTYPES.values() if dtype != torch.bool],
    }
    return values


def assert_same(found: Any, value: Any) -> None:
    assert type(found) is type(value)
    if isinstance(value, torch.Tensor):
        assert found.dtype == value.dtype and found.shape == value.shape and found.requires_grad == value.requires_grad
        assert torch.equal(tensor_bytes(found), tensor_bytes(value))
    elif isinstance(value, np.ndarray | np.generic):
        assert found.dtype == value.dtype and found.shape == value.shape and found.tobytes() == value.tobytes()
    elif isinstance(value, dict):
        assert list(found) == list(value)
        assert all(map(lambda pair: assert_same(*pair) is None, zip(found, value, strict=True)))
        for key in value:
            assert_same(found[key], value[key])
        assert getattr(found, "_metadata", None) == getattr(value, "_metadata", None)
    elif isinstance(value, list | tuple):
        assert len(found) == len(value)
        for each, right in zip(found, value, strict=True):
            assert_same(each, right)
    elif isinstance(value, float):
        assert struct.pack(">d", found) == struct.pack(">d", value)
    else:
        assert found == value
        assert isinstance(value, int | set | frozenset) or repr(found) == repr(value)


def rejected_values() -> dict[str, Any]:
    """Values that no checkpoint stores."""
    cycle: list[Any] = []
    cycle.append(cycle)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with_attribute = OrderedDict(a=1)
    with_attribute.mine = 2  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantised and nested tensors are prototypes, or deprecated
        quantised = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
        nested = torch.nested.nested_tensor([torch.ones(2)])
    return {
        "named tuple": Plain(),
        "enum": Colour.RED,
        "list subclass": Rows(),
        "defaultdict": defaultdict(list),
        "tensor subclass": torch.ones(2).as_subclass(Tagged),
        "generator": torch.Generator(),
        "NumPy generator": np.random.default_rng(1),
        "masked array": np.ma.masked_array([1]),
        "object array": np.array([object()]),
        "structured array": np.zeros(2, "i4,f4"),
        "sparse tensor": torch.ones(2).to_sparse(),
        "quantized tensor": quantised,
        "nested tensor": nested,
        "meta tensor": torch.ones(2, device="meta"),
        "uninitialized parameter": nn.UninitializedParameter(),
        "torch named tuple": torch.ones(2).max(0),
        "tensor as key": {torch.ones(1): 1},
        "function": len,
        "class": dict,
        "module": nn.Linear(1, 1),
        "ZoneInfo time zone": datetime(2026, 1, 1, tzinfo=ZoneInfo("UTC")),
        "named time zone": datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=2), "Home")),
        "time of day": time(1, 2),
        "complex number": 1 + 2j,
        "NumPy text": np.str_("x"),
        "NumPy bytes": np.bytes_(b"a"),
        "Windows path": PureWindowsPath("c:\\d"),
        "memory format": torch.channels_last,
        "cycle": cycle,
        "depth": deep,
        "tensor with attribute": with_attribute,
    }


def test_values_round_trip(tmp_path: Path) -> None:
    """Through a checkpoint, and through node memory."""
    path, model, values = tmp_path / "checkpoint", nn.Linear(2, 2), kept_values()
    save_checkpoint(path, model, None, ALONE, values)
    assert_same(load_checkpoint(path, model, None, ALONE), values)
    Survival(ALONE, NodeMemory(os.getpid(), tmp_path)).refresh(1, model, None, values)
    assert_same(Survival(ALONE, NodeMemory(os.getpid(), tmp_path)).restore(model, None), values)


def test_shared_tensors_stay_shared(tmp_path: Path) -> None:
    tensor, parameter = torch.ones(2), nn.Parameter(torch.ones(3))
    save_checkpoint(
        tmp_path / "checkpoint", nn.Linear(1, 1), None, ALONE, {"a": [tensor, tensor], "b": [parameter] * 2}
    )
    extra = load_checkpoint(tmp_path / "checkpoint", nn.Linear(1, 1), None, ALONE)
    assert extra["a"][0] is extra["a"][1] and extra["b"][0] is extra["b"][1]


@pytest.mark.parametrize("what", rejected_values())
def test_unsupported_values_are_rejected_and_checkpoint_kept(tmp_path: Path, what: str) -> None:
    path, model, mine = tmp_path / "checkpoint", WithState(), rejected_values()[what]
    save_checkpoint(path, model, None, ALONE, {"step": 1})
    survival = Survival(ALONE, NodeMemory(os.getpid(), tmp_path))
    survival.refresh(1, model, None, {"step": 1})
    for call in (partial(save_checkpoint, path, model, None, ALONE), partial(survival.refresh, 2, model, None)):
        with pytest.raises(ConfigError, match=r"extra\['mine'\].*(do not store|contains itself)"):
            call({"mine": mine})
    if what in ("tensor subclass", "uninitialized parameter"):  # the model holds the value itself
        return
    model.average = mine
    for call in (partial(save_checkpoint, path, model, None, ALONE), partial(survival.refresh, 2, model, None)):
        with pytest.raises(ConfigError, match=r"model\._extra_state.*(do not store|contains itself)"):
            call({"step": 2})
    model.average = None
    assert load_checkpoint(path, WithState(), None, ALONE) == {"step": 1}
    assert Survival(ALONE, NodeMemory(os.getpid(), tmp_path)).restore(WithState(), None) == {"step": 1}


class Setting(enum.Enum):
    """An enum of text."""

    FAST = "fast"


@dataclass
class Record:
    """A dataclass."""

    number: int = 1


ADVICE: dict[str, tuple[Any, str]] = {
    "complex number": (1 + 2j, r"[value.real, value.imag]"),
    "enum": (Setting.FAST, "its value"),
    "integer enum": (Colour.RED, "its value"),
    "dataclass": (Record(), "dataclasses.asdict()"),
    "bit generator": (np.random.PCG64(1), "Store its state."),
    "time of day": (time(1, 2), "isoformat()"),
    "dtype": (torch.qint8, "str(dtype)"),
    "bits dtype": (torch.bits8, "str(dtype)"),
}


@pytest.mark.parametrize("what", ADVICE)
def test_rejection_names_position_and_replacement(what: str) -> None:
    value, advice = ADVICE[what]
    for held in (
        {"a": [0, {"b": value}]},
        {"a": [0, {"b": {value: 1}}]} if what != "dataclass" else {"a": [0, value]},
    ):
        with pytest.raises(ConfigError, match=r"^extra\['a'\]\[1\].*checkpoints do not store") as caught:
            encode_value(held, "extra")
        assert advice in str(caught.value)


DAMAGED = {
    "$datetime": ["2026-01-01T00:00:00", 0, None],
    "$path": ["PosixPath", "/a"],
    "$timedelta": [1, 2, 3, 4],
    "$numpy": ["<f8", "AAAAAAAAAAA=", 1],
    "$ndarray": ["<f8", [1], "AAAAAAAAAAA=", 1],
}


@pytest.mark.parametrize("tag", DAMAGED)
def test_payloads_with_extra_elements_are_rejected(tag: str) -> None:
    with pytest.raises(ValueError, match=rf"^it is no value of a checkpoint .*\{tag} has .*; expected") as caught:
        decode_value(json.dumps({tag: DAMAGED[tag]}), lambda *_: pytest.fail("no tensor"))
    assert "\n" not in str(caught.value)


INEXACT = {
    "surrogate pair": "\ud83d\ude00",
    "surrogate pair in key": {"\ud83d\ude00": 1},
    "surrogate pair in path": Path("\ud83d\ude00"),
    "negative size": torch.Size([-1]),
    "size with 65 dimensions": torch.Size([1] * 65),
}


@pytest.mark.parametrize("what", INEXACT)
def test_inexact_values_are_rejected(tmp_path: Path, what: str) -> None:
    with pytest.raises(ConfigError, match="extra cannot be stored exactly"):
        save_checkpoint(tmp_path / "checkpoint", nn.Linear(1, 1), None, ALONE, {"mine": INEXACT[what]})
    assert not any(tmp_path.iterdir())


def test_extra_must_be_dictionary(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    for call in (
        partial(save_checkpoint, tmp_path / "checkpoint", model, None, ALONE),
        partial(Survival(ALONE, NodeMemory(os.getpid(), tmp_path)).refresh, 1, model, None),
    ):
        with pytest.raises(ConfigError, match="extra is of class list"):
            call([])
    assert not (tmp_path / "checkpoint").exists()


def test_optimizer_state_name_with_dot_is_rejected(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.state[model.weight]["a.b"] = torch.zeros(1, 1)
    with pytest.raises(ConfigError, match=r"names a state of weight 'a\.b', and checkpoints store names without dots"):
        save_checkpoint(tmp_path / "checkpoint", model, optimizer, ALONE)


class Buffers(nn.Module):
    """A module with one buffer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("buffer", buffer)


BUFFERS: dict[str, Callable[[], torch.Tensor]] = {
    **{
        name: lambda dtype=dtype: torch.ones(2, 4, dtype=torch.uint8).repeat(1, 4).view(dtype)
        for name, dtype in DTYPES.items()
    },
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "strided": lambda: torch.arange(6.0)[::2],
    "empty": lambda: torch.empty(2, 0, 3),
    "scalar": lambda: torch.tensor(2.5),
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j]).conj().imag,
    "windows": lambda: torch.arange(6.0).unfold(0, 3, 1),
}


@pytest.mark.parametrize("what", BUFFERS)
def test_buffers_round_trip(tmp_path: Path, what: str) -> None:
    path, buffer = tmp_path / "checkpoint", BUFFERS[what]()
    save_checkpoint(path, Buffers(buffer), None, ALONE)
    Survival(ALONE, NodeMemory(os.getpid(), tmp_path)).refresh(1, Buffers(buffer), None)
    for load in (
        lambda model: load_checkpoint(path, model, None, ALONE),
        lambda model: Survival(ALONE, NodeMemory(os.getpid(), tmp_path)).restore(model, None),
    ):
        loaded = Buffers(torch.empty(buffer.shape, dtype=buffer.dtype))
        assert load(loaded) == {}
        assert torch.equal(tensor_bytes(loaded.buffer), tensor_bytes(buffer)) and loaded.buffer.dtype == buffer.dtype


REJECTED_BUFFERS: dict[str, Callable[[], torch.Tensor]] = {
    "expanded": lambda: torch.ones(3).expand(2, 3),
    "sparse": lambda: torch.ones(2).to_sparse(),
    "int4": lambda: torch.ones(2, dtype=torch.uint8).view(torch.int4),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
}


@pytest.mark.parametrize("what", REJECTED_BUFFERS)
@pytest.mark.filterwarnings("ignore")
def test_unsupported_buffers_are_rejected_and_checkpoint_kept(tmp_path: Path, what: str) -> None:
    path = tmp_path / "checkpoint"
    save_checkpoint(path, Buffers(torch.ones(2, 3)), None, ALONE, {"step": 1})
    model = Buffers(REJECTED_BUFFERS[what]())
    with pytest.raises(ConfigError, match=r"model\.buffer (is|has)"):
        save_checkpoint(path, model, None, ALONE, {"step": 2})
    if what == "expanded":
        with pytest.raises(ConfigError, match=r"model\.buffer is expanded: .* clone\(\)"):
            load_checkpoint(path, model, None, ALONE)
        with pytest.raises(ConfigError, match=r"model\.buffer is expanded"):
            Survival(ALONE, NodeMemory(os.getpid(), tmp_path)).refresh(1, model, None)
    assert load_checkpoint(path, Buffers(torch.zeros(2, 3)), None, ALONE) == {"step": 1}


def test_unconvertible_dtypes_are_rejected(tmp_path: Path) -> None:
    four_bits = torch.ones(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    save_checkpoint(tmp_path / "checkpoint", Buffers(four_bits), None, ALONE)
    model = Buffers(torch.zeros(2))
    with pytest.raises(
        ConfigError, match=r"model\.buffer is float4_e2m1fn_x2, which PyTorch does not convert to float32"
    ):
        load_checkpoint(tmp_path / "checkpoint", model, None, ALONE)
    assert not model.buffer.any()


@pytest.mark.parametrize(
    ("have", "become", "number"),
    [
        (torch.float16, torch.float8_e8m0fnu, -1.0),
        (torch.complex32, torch.float8_e8m0fnu, -1.0),
        (torch.float8_e5m2, torch.float8_e5m2fnuz, math.inf),
    ],
)
def test_values_missing_in_float8_are_rejected(
    tmp_path: Path, have: torch.dtype, become: torch.dtype, number: float
) -> None:
    save_checkpoint(tmp_path / "checkpoint", Buffers(torch.tensor([number]).to(have)), None, ALONE)
    model = Buffers(torch.ones(1).to(become))
    with pytest.raises(ConfigError, match=f"which {str(become).removeprefix('torch.')} cannot hold"):
        load_checkpoint(tmp_path / "checkpoint", model, None, ALONE)
    assert model.buffer.float() == 1


def _reject_sparse(rank: int, world: int, path: Path) -> str:
    sizes = Sizes(2, ep=2)
    model = Toy(sizes, rank)
    optimizer = torch.optim.SGD([model.experts.w1])
    optimizer.state[model.experts.w1]["x"] = model.experts.w1.detach().to_sparse()
    with pytest.raises(ConfigError) as caught:
        save_checkpoint(path, model, optimizer, sizes.topology())
    return str(caught.value)


def test_sparse_state_of_split_parameters_is_rejected(cluster: Cluster, tmp_path: Path) -> None:
    for said in cluster.run(2, _reject_sparse, tmp_path / "checkpoint"):
        assert re.search(r"optimizer\.state\.experts\.w1\.x has layout sparse_coo.*to_dense", said), said


def _save_with_unsupported_value(rank: int, world: int, path: Path, what: str) -> tuple[str, dict[str, Any]]:
    topology, model = Topology.from_sizes(ep=1), nn.Linear(2, 2)
    save_checkpoint(path, model, None, topology, {"step": 1})
    optimizer, extra = None, {"step": 2}
    if what == "extra" and rank == 0:
        extra["mine"] = Rows()
    elif what == "optimizer" and rank == 1:
        optimizer = torch.optim.AdamW(model.parameters())
    elif what == "groups":
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}] if rank else parameters)
    with pytest.raises(RankError) as caught:
        save_checkpoint(path, model, optimizer, topology, extra)
    return str(caught.value), load_checkpoint(path, model, None, topology)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("extra", r"failed on rank 0: .*extra\['mine'\] is of class .*\.Rows"),
        (
            "optimizer",
            r"the optimizer is None on rank 0 and AdamW with 1 parameter groups on rank 1\. Pass every rank's",
        ),
        ("groups", r"the optimizer is AdamW with 1 parameter groups on rank 0 and AdamW with 2 .* on rank 1\."),
    ],
)
def test_rejection_on_one_rank_raises_on_all(cluster: Cluster, tmp_path: Path, what: str, message: str) -> None:
    for said, extra in cluster.run(2, _save_with_unsupported_value, tmp_path / "checkpoint", what):
        assert re.search(message, said), said
        assert extra == {"step": 1}
