"""The page of the design, and the reference, name files and definitions that are there."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.test_docs import MISSING

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/design.md").read_text(encoding="utf-8")
# A file, and the names that follow it: `engine/run.py` `Pass.dispatch` and `Pass.combine`.
_CITED = re.compile(r"`([\w/]+\.py)`((?:(?:,| and|)\s+`(?![\w.]*\.py`)[A-Za-z_][\w.]*`)*)")


def cited() -> list[tuple[str, str]]:
    """Lists files below `fusedmoe/` with the names that the page says they define; "" for a file alone."""
    pairs = []
    for path, names in _CITED.findall(PAGE):
        if Path(path).stem not in ("NAME", "X") and path != "tests/house.py":
            pairs += [(path, name) for name in re.findall(r"`([\w.]+)`", names) or [""]]
    return sorted(set(pairs))


def names_in(tree: ast.Module | ast.ClassDef) -> dict[str, ast.stmt]:
    """Maps what a module or a class defines, or a module imports, to the statement."""
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


@pytest.mark.parametrize(("path", "name"), cited())
def test_what_the_page_names_is_there(path: str, name: str) -> None:
    file = ROOT / "fusedmoe" / path
    assert file.is_file(), f"docs/design.md names {path}, which is not there"
    place: ast.Module | ast.ClassDef = ast.parse(file.read_text(encoding="utf-8"))
    for part in filter(None, name.split(".")):
        names = names_in(place)
        assert part in names, f"docs/design.md says that {path} has {name}"
        if isinstance(node := names[part], ast.ClassDef):
            place = node


def test_the_page_answers_the_questions() -> None:
    files = {path for path, _ in cited()}
    assert len(cited()) > 40 and {"engine/dispatcher.py", "gates/base.py"} <= files


PUBLIC = "autograd comm experts gates graph hooks kernels losses metrics orders placement routing"
PUBLIC += " schedule training"


@pytest.mark.parametrize("package", ["", *PUBLIC.split()])
def test_public_names_are_on_a_page(package: str) -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    words = set(re.findall(r"\w+", "\n".join(page.read_text(encoding="utf-8") for page in pages)))
    public = import_module(f"fusedmoe.{package}".rstrip(".")).__all__
    assert not sorted(set(public) - words), "add these names to docs/reference, or take them out of __all__"


@pytest.mark.parametrize("page", sorted((ROOT / "docs/reference").glob("*.md")), ids=lambda page: page.stem)
def test_the_reference_names_what_is_there(page: Path) -> None:
    if page.stem == "titan" and "torchtitan" in MISSING or page.stem in MISSING:
        pytest.skip("its library is not installed")
    for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        module, _, rest = name.rpartition(".")
        try:
            import_module(name)
        except ModuleNotFoundError:
            assert hasattr(import_module(module), rest), f"{page.name} names {name}"
