"""Jobs of torchtitan: TOML with a flavor, or with the names of a module and a config."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fusedmoe.errors import ConfigError
from fusedmoe.models.job_files import read_job
from fusedmoe.models.transformer import Transformer

pytest.importorskip("torchtitan")
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.deepseek_v3 import model_registry

FILES = Path(__file__).parents[1] / "data" / "job_files"


def job(folder: Path, text: str) -> Any:
    path = folder / "job.toml"
    path.write_text(text)
    return read_job(path)


def test_recorded_job_has_published_parameters_and_its_sizes() -> None:
    read = read_job(FILES / "qwen3_30b_a3b_titan.toml")
    total = sum(parameter.numel() for parameter in Transformer(read.model, device="meta").parameters())
    assert total == pytest.approx(30.5e9, rel=0.01)
    assert (read.model.batch, read.model.seq_len) == (2, 4096)
    assert read.settings == {"mp": 1, "ep": 8, "esp": 1, "recompute": True}
    assert read.state is not None and read.state.sharded == "all"


@pytest.mark.parametrize(("name", "flavor", "billions"), [("deepseek_v3", "671B", 671), ("gpt_oss", "120b", 117)])
def test_flavors_have_published_parameters(name: str, flavor: str, billions: float, tmp_path: Path) -> None:
    read = job(tmp_path, f'[model]\nname = "{name}"\nflavor = "{flavor}"\n')
    total = sum(parameter.numel() for parameter in Transformer(read.model, device="meta").parameters())
    assert total == pytest.approx(billions * 1e9, rel=0.01) and read.settings == {}


def test_module_and_config_names_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for torchtitan's registry, which imports tensorboard and datasets."""
    registry: Any = ModuleType("torchtitan.models.deepseek_v3.config_registry")
    registry.deepseek_v3_debugmodel = lambda: SimpleNamespace(
        model_spec=model_registry("debugmodel"),
        training=TrainingConfig(local_batch_size=8, seq_len=1024),
        parallelism=ParallelismConfig(expert_parallel_degree=4),
        activation_checkpoint=SelectiveAC.Config(),
    )
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    text = 'module = "deepseek_v3"\nconfig = "deepseek_v3_debugmodel"\n[training]\n'
    text += "local_batch_size = 3\nglobal_batch_size = 24\n"
    read = job(tmp_path, text)
    assert (read.model.batch, read.model.seq_len, read.model.layers, read.global_batch) == (3, 1024, 6, 24)
    assert read.settings == {"mp": 1, "ep": 4, "esp": 1} and read.selective == "activation_checkpoint"
    with pytest.raises(ConfigError, match="no 'other'"):
        job(tmp_path, text.replace("deepseek_v3_debugmodel", "other"))


PIPELINED = '[model]\nname = "qwen3"\nflavor = "30B-A3B"\n[parallelism]\npipeline_parallel_degree = 2'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[model]\nname = "qwen3"\nflavor = "31B"', "model.flavor = '31B'"),
        ('[model]\nname = "qwen3"\nflavor = "8B"', "no experts"),
        ('[model]\nname = "../qwen3"\nflavor = "8B"', "model.name"),
        ('[model]\nname = "unheard_of"\nflavor = "8B"', "unheard_of"),
        (
            '[model]\nname = "qwen3"\nflavor = "30B-A3B"\n[parallelism]\ncontext_parallel_degree = 2',
            "context_parallel_degree = 2",
        ),
        ('[training]\nlocal_batch_size = "2"', "model.name"),
        ("training = 1", "expected the tables"),
        ("[model", "invalid TOML"),
    ],
)
def test_unsupported_job_error_names_field_and_file(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        job(tmp_path, text)
    assert "job.toml" in str(error.value)


def test_missing_torchtitan_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    with pytest.raises(ConfigError, match="pip install torchtitan"):
        job(tmp_path, '[model]\nname = "qwen3"\nflavor = "30B-A3B"')
