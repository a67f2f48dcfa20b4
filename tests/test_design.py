"""The design page, and the existence of the files and definitions that the reference and it cite."""

from __future__ import annotations

import ast
import re
import textwrap
from importlib import import_module
from pathlib import Path

import pytest

import fusedmoe
from tests.test_docs import MISSING, PAGES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/design.md").read_text(encoding="utf-8")
# A file, and the names that follow it: `engine/run.py` `PassRun.dispatch` and `PassRun.combine`.
_CITED = re.compile(r"`([\w/]+\.py)`((?:(?:,| and|)\s+`(?![\w.]*\.py`)[A-Za-z_][\w.]*`)*)")


def cited_definitions() -> list[tuple[str, str]]:
    """List files below `fusedmoe/` with the definitions that the page cites; "" for a file alone."""
    pairs = []
    for path, names in _CITED.findall(PAGE):
        if Path(path).stem not in ("NAME", "X") and path != "tests/house.py":
            pairs += [(path, name) for name in re.findall(r"`([\w.]+)`", names) or [""]]
    return sorted(set(pairs))


def names_in(tree: ast.Module | ast.ClassDef) -> dict[str, ast.stmt]:
    """Map the names that a module or a class defines, or a module imports, to the statement."""
    names: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id: node for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: node for alias in node.names}
    return names


@pytest.mark.parametrize(("path", "name"), cited_definitions())
def test_definitions_cited_in_design_exist(path: str, name: str) -> None:
    file = ROOT / "fusedmoe" / path
    assert file.is_file(), f"docs/design.md names {path}, which is not there"
    place: ast.Module | ast.ClassDef = ast.parse(file.read_text(encoding="utf-8"))
    for part in filter(None, name.split(".")):
        names = names_in(place)
        assert part in names, f"docs/design.md says that {path} has {name}"
        if isinstance(node := names[part], ast.ClassDef):
            place = node


def test_design_cites_core_files() -> None:
    files = {path for path, _ in cited_definitions()}
    assert len(cited_definitions()) > 40 and {"engine/dispatcher.py", "gates/base.py"} <= files


#: The most names of the public interface. An addition needs a use that no public name serves.
PUBLIC_NAMES = 120
# Programs that register a policy call the command; its module has no other public name.
COMMAND = ("fusedmoe.cli.main", "main")


def public_names() -> set[tuple[str, str]]:
    """Return (module, name) of each `__all__` outside `fusedmoe.tutel`, whose names are Tutel's, and the command."""
    names = {COMMAND, *(("fusedmoe", name) for name in fusedmoe.__all__)}
    for path in sorted((ROOT / "fusedmoe").rglob("*.py")):
        folders = path.relative_to(ROOT).with_suffix("").parts
        if path.parent.name == "fusedmoe" and path.stem == "__init__" or "tutel" in folders:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                module = ".".join(folders).removesuffix(".__init__")
                names |= {(module, name) for name in ast.literal_eval(node.value)}
    return names


def documented_names() -> set[str]:
    """Return the names under a heading, in a list of members, or in a table of the reference."""
    names = set()
    for page in (ROOT / "docs/reference").glob("*.md"):
        if page.stem == "environment":  # variables
            continue
        text = page.read_text(encoding="utf-8")
        names |= {name.rpartition(".")[2] for name in re.findall(r"^(?:::: |\| `)([\w.]+)", text, re.MULTILINE)}
        names |= {name for members in re.findall(r"members: \[(.*)\]", text) for name in members.split(", ")}
    return names


def test_public_names_are_few_and_in_the_reference() -> None:
    public = public_names()
    assert len(public) <= PUBLIC_NAMES, f"{len(public)} public names; PUBLIC_NAMES above is {PUBLIC_NAMES}"
    undocumented = sorted({name for _, name in public - {COMMAND}} - documented_names())
    assert not undocumented, f"add {undocumented} to docs/reference, or take them out of __all__"
    modules = {module.rpartition(".")[2] for module, _ in public}
    rest = sorted(documented_names() - {name for _, name in public} - modules)
    assert not rest, f"docs/reference has {rest}, which no `__all__` has"


def test_pages_and_examples_import_public_names() -> None:
    """Python shown to readers imports from the library only public names and their modules."""
    public = {f"{module}.{name}" for module, name in public_names()}
    modules = {f"fusedmoe{folder}" for folder in ("", ".tutel")} | {module for module, _ in public_names()}
    for page in PAGES:
        for code in re.findall(
            r"^[ ]*```python\n(.*?)^[ ]*```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            assert not imported(textwrap.dedent(code)) - public - modules, page
    for program in sorted((ROOT / "examples").glob("*.py")):
        assert not imported(program.read_text(encoding="utf-8")) - public - modules, program


def imported(code: str) -> set[str]:
    """Return the paths below `fusedmoe` that the code imports."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {path for path in found if path.partition(".")[0] == "fusedmoe" and not path.startswith("fusedmoe.tutel.")}


@pytest.mark.parametrize("page", sorted((ROOT / "docs/reference").glob("*.md")), ids=lambda page: page.stem)
def test_reference_entries_exist(page: Path) -> None:
    if page.stem == "titan" and "torchtitan" in MISSING or page.stem in MISSING:
        pytest.skip("its library is not installed")
    for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        module, _, rest = name.rpartition(".")
        try:
            import_module(name)
        except ModuleNotFoundError:
            assert hasattr(import_module(module), rest), f"{page.name} names {name}"
