"""Snippets of the README and of docs/: Python runs, commands exist with all their flags.

The Python of a page runs in order in one namespace, on two ranks. The reader's own objects (a model, a file) are in the
page as an HTML comment that begins with `setup`.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from contextlib import chdir, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed.fsdp

from fusedmoe.cli.main import make_parser
from fusedmoe.schedule.cost import LINES, CostModel, Line
from tests.cluster import Cluster

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Not every environment has these (`constraints/titan.txt`, `constraints/megatron.txt`).
MISSING = {name for name in ("torchtitan", "megatron") if find_spec(name) is None}
if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    MISSING.add("torchtitan")  # torchtitan 0.3 imports it; PyTorch 2.11 does not have it
RUNNABLE = [page for page in PAGES if page.parent.name != "guides" or page.stem not in MISSING]
# A page shows a program by a link to its file; the program has a separate test.
_PYTHON = re.compile(r"<!-- setup\n(.*?)-->|^[ ]*```python\n(.*?)^[ ]*```", re.DOTALL | re.MULTILINE)
_SHELL = re.compile(r"^[ ]*```bash\n(.*?)^[ ]*```$", re.DOTALL | re.MULTILINE)


def python_of(page: Path) -> str:
    """The page's Python at its line numbers, so error messages name the line of the page."""
    text, lines = page.read_text(encoding="utf-8"), [""]
    for match in _PYTHON.finditer(text):
        group = 1 if match[1] is not None else 2
        if any(f"from {name}." in match[group] for name in MISSING):
            continue
        first = text.count("\n", 0, match.start(group)) + 1
        lines += [""] * (first - len(lines)) + textwrap.dedent(match[group]).splitlines()
    return "\n".join(lines[1:])


def run_pages(rank: int, world: int, folder: str) -> list[str]:
    """Return the output of each page on this rank; pages run one after the other. Link costs are synthetic."""
    costs, printed = CostModel({name: Line(1e-6, 1e-9) for name in LINES}), []
    with (
        patch.dict(os.environ, FUSEDMOE_CACHE=folder),
        patch("fusedmoe.layers.measure.measured_costs", lambda *_: costs),
        chdir(folder),  # some pages write files
    ):
        for page in RUNNABLE:
            torch.manual_seed(rank)  # torchrun's processes have other random numbers, too
            code = compile(python_of(page), str(page.relative_to(ROOT)), "exec", dont_inherit=True)
            with redirect_stdout(StringIO()) as out:
                exec(code, {"__name__": page.stem})
            printed.append(out.getvalue())
    return printed


@pytest.mark.slow
def test_python_snippets_run_on_two_ranks(cluster: Cluster, tmp_path: Path) -> None:
    # The integrations' topologies live as long as the world of ranks, and all pages share one.
    printed = cluster.run(2, run_pages, str(tmp_path), timeout_s=180, most_threads=100)
    refused = printed[0][[page.name for page in RUNNABLE].index("failures.md")]
    assert "rank 1" in refused and "finite" in refused


_FILE = re.compile(r'^```\{\.python title="([^"]+)"\}\n(.*?)^```', re.DOTALL | re.MULTILINE)
_RUN_FILES = """
import sys
from importlib import import_module
import pytest
for package in ("kernels", "kernels.triton", "autograd"):
    import_module(f"fusedmoe.{package}").__path__.append(f"fusedmoe/{package.replace('.', '/')}")
sys.exit(pytest.main(["-q", "-p", "tests.kernels.device.conftest", "--rootdir", ".", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_the_worked_kernel(tmp_path: Path) -> None:
    """The files of the contributing guide, next to the library's, pass their own test in Triton's interpreter."""
    pytest.importorskip("triton")
    page = ROOT / "docs/guides/contributing.md"
    files = dict(_FILE.findall(page.read_text(encoding="utf-8")))
    assert len(files) == 4
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    (test,) = (name for name in files if name.startswith("tests/"))
    command = [sys.executable, "-P", "-c", _RUN_FILES, test]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0 and "8 passed" in done.stdout, done.stdout + done.stderr


def commands() -> list[tuple[str, str]]:
    """(page, command) of all shell snippets; lines that end with a backslash are joined."""
    found = []
    for page in PAGES:
        for block in _SHELL.findall(page.read_text(encoding="utf-8")):
            for line in textwrap.dedent(block).replace("\\\n", " ").splitlines():
                command = line.split(" #")[0].strip()
                if command and not command.startswith("#") and "=$(" not in command:
                    found.append((str(page.relative_to(ROOT)), command))
    return found


def test_documented_commands_exist() -> None:
    parser, seen = make_parser(), 0
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page, command in commands():
        words = shlex.split(command)
        if words[0] == "make":
            for target in (word for word in words[1:] if "=" not in word):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page}: {command}"
        start = re.search(r"(?:^|-m )fusedmoe(?:\.cli)? (.*)", command)
        if start is not None:
            seen += 1
            try:
                parser.parse_args(shlex.split(start[1]))
            except SystemExit as end:
                assert end.code == 0, f"{page}: {command}"
        for word in words:
            if word.endswith(".py") and word.startswith("examples/"):
                assert (ROOT / word).is_file(), f"{page}: {command}"
    assert seen > 10


def test_front_page_links_of_readme_resolve() -> None:
    front_page = runpy.run_path(str(ROOT / ".ci/programs.py"))["front_page"]()
    assert "pip install ." in front_page and "<!--" not in front_page
    targets = re.findall(r"\]\(([^)]+)\)", front_page)
    assert len(targets) > 20
    for target in targets:
        assert "://" in target or (ROOT / "docs" / target).is_file(), target


# torchtitan's trainer imports these, too, and its parser calls none of them (`constraints/titan.txt`).
_PARSE_TITAN = """
import json, sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

class Absent(ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

class Finder(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        absent = ("torchdata", "datasets", "torch_checkpointing", "wandb", "torch.utils.tensorboard")
        ours = any(f"{name}.".startswith(f"{one}.") for one in absent)
        return ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec):
        return Absent(spec.name)

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Finder())
from torchtitan.config import ConfigManager
from torchtitan.config.override import apply_overrides
for words in json.load(sys.stdin):
    config = ConfigManager().parse_args(words)
    assert len(apply_overrides(config.override, config)) >= len(config.override.imports), words
"""


@pytest.mark.slow
@pytest.mark.skipif("torchtitan" in MISSING, reason="torchtitan is not installed")
def test_torchtitan_parser_accepts_documented_commands() -> None:
    """The real parser, which also refuses incompatible settings, accepts them; the overrides find their targets."""
    found = [shlex.split(command) for _, command in commands() if "-m torchtitan.train" in command]
    given = [words[words.index("torchtitan.train") + 1 :] for words in found]
    assert len(given) >= 2
    code = [sys.executable, "-c", _PARSE_TITAN]
    done = subprocess.run(code, input=json.dumps(given), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_documented_files_and_links_exist() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert "--8<--" not in text, f"{page.name}: GitHub shows this as it is; see .ci/programs.py"
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
        for named in re.findall(r"`((?:bench|examples|docs|tests|fusedmoe|csrc)/[\w./-]+\.\w+)`", text):
            assert (ROOT / named).is_file(), f"{page.name} names {named}"
