"""`make lint` runs this: rules of the house that no other tool checks. Prints what breaks them; ends with 1 then.

Outside `fusedmoe/tutel`, whose modules have Tutel's names, every file name and every class name occurs once; no file
has more than 500 lines; a module's docstring begins with a sentence; what has a Triton form has a contract of the same
name in `fusedmoe/kernels`.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fusedmoe"
LINES = 500
# The parts that users import by a short name, `fusedmoe.gates`, say, have the name of the room that holds them.
FRONT_DOORS = {"experts", "gates", "hooks", "losses", "ops", "orders", "puts", "errors"}


def modules() -> list[Path]:
    """All modules but Tutel's."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if PACKAGE / "tutel" not in path.parents]


def names_twice(found: dict[str, list[str]], what: str) -> Iterator[str]:
    for name, places in sorted(found.items()):
        if len(places) > 1:
            yield f"{what} {name} occurs {len(places)} times: {', '.join(places)}"


def files_twice() -> Iterator[str]:
    """A contract in `kernels/`, its form in `kernels/triton/` and its gradient in `autograd/` share a name, by rule."""
    found = defaultdict(list)
    for path in modules():
        place = path.relative_to(PACKAGE)
        by_rule = place.parts[:2] in (("kernels", "triton"), ("kernels", "gluon"))
        by_rule |= place.parts[0] == "autograd" and (PACKAGE / "kernels" / path.name).exists()
        front = len(place.parts) == 1 and path.stem in FRONT_DOORS
        if path.stem not in ("__init__", "__main__") and not by_rule and not front:
            found[path.name].append(str(place))
    yield from names_twice(found, "the file name")


def classes_twice() -> Iterator[str]:
    found = defaultdict(list)
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    yield from names_twice(found, "the class name")


def long_files() -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        count = len(path.read_text().splitlines())
        if count > LINES:
            yield f"{path.relative_to(PACKAGE)} has {count} lines, more than {LINES}: is it still of one idea?"


def docstrings() -> Iterator[str]:
    for path in modules():
        tree = ast.parse(path.read_text())
        if not tree.body:
            continue
        first = (ast.get_docstring(tree) or "").split("\n\n")[0]
        if not first.rstrip().endswith((".", ":")):
            yield f"{path.relative_to(PACKAGE)} has no docstring that begins with a sentence"


def kernels_without_contract() -> Iterator[str]:
    kernels = PACKAGE / "kernels"
    for form in ("triton", "gluon"):
        for path in sorted((kernels / form).glob("*")):
            name = path.stem
            if name.startswith("_") or name in ("jit", "interpreter"):
                continue
            if not (kernels / f"{name}.py").exists() and not (kernels / name).is_dir():
                yield f"kernels/{form}/{path.name} has no contract kernels/{name}.py"


def broken_rules() -> list[str]:
    rules = (files_twice, classes_twice, long_files, docstrings, kernels_without_contract)
    return [text for rule in rules for text in rule()]


if __name__ == "__main__":
    broken = broken_rules()
    print("\n".join(broken) or "The house keeps its rules.")
    sys.exit(bool(broken))
