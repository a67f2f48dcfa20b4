"""`make lint` runs this: rules of the house that no other tool checks. Prints what breaks them; ends with 1 then.

Outside `fusedmoe/tutel`, whose modules have Tutel's names, every file name and every class name occurs once; no file
has more than 500 lines; a module's docstring begins with a sentence; what has a Triton form has a contract of the same
name in `fusedmoe/kernels`; who makes a tensor names its device. Private names of other packages are in
`fusedmoe/compat` alone. Docstrings begin with a verb or a noun; names that say nothing live for a few lines only.

    python -m tests.house tests/chaos    # what the rules on words find in another folder
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fusedmoe"
LINES = 500
# A docstring that begins so is no sentence, or one whose subject stands elsewhere.
FRAGMENTS = set(
    re.findall(
        r"\w+",
        "of what that those these where how by as which who whose whom when while whether for from in on at to into "
        "with without if unless until than and or but else it its they their there so such same other others",
    )
)
# Names that say nothing, and for how many lines one may live in a function.
EMPTY_NAMES = {"found", "one", "ones", "of", "there", "here", "such", "other", "others", "what", "every", "thing"}
EMPTY_LINES = 8


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
        by_rule |= place.parts[0] == "compat"  # one module per library
        if path.stem not in ("__init__", "__main__") and not by_rule:
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


# What these make lies on the default device unless they name one: host-side tensors would move with a user's setting.
MAKERS = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"}
MAKERS |= {"scalar_tensor", "tensor", "zeros"}


def tensors_without_device() -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in {f"torch.{name}" for name in MAKERS}:
                continue
            named = {keyword.arg for keyword in node.keywords}
            if named.isdisjoint({"device", None}):
                call = ast.unparse(node)
                yield f"{path.relative_to(ROOT)}:{node.lineno} {call[:60]} names no device (None: the default device)"


COMPAT = PACKAGE / "compat"
#: The most private names of other packages that `compat` may use.
PRIVATE_NAMES = 45
# Names with an underscore that their packages document, for anybody's use; `compat` has those of PyTorch all the same.
DOCUMENTED = {"_asdict", "_exit", "_fields", "_getframe", "_make", "_replace"}
# In "Extending PyTorch", "Custom Backends", "Autograd mechanics" and at `torch.profiler.profile`.
DOCUMENTED_PATHS = {"TorchDispatchMode", "aot_autograd", "_version", "_ExperimentalConfig"}
# Attributes that fusedmoe gives to objects of other packages begin so. Tutel's mark of experts is its interface.
OWN_MARKS = ("_fusedmoe", "_tutel_expert")
# State of modules and tensors, whose names also occur as names of our own: private wherever it is not `self`'s.
PYTORCH_STATE = {"_buffers", "_cdata", "_modules", "_parameters", "_version"}
# Namespaces of operators, which graphs and dispatchers name.
NAMESPACES = {"_c10d_functional", "_c10d_functional_autograd"}
READERS = {"attrgetter", "delattr", "getattr", "hasattr", "setattr"}


def is_private(name: str) -> bool:
    dunder = name.startswith("__") or name == "_" * len(name)
    return name.startswith("_") and not dunder and not name.startswith(OWN_MARKS) and name not in DOCUMENTED


def own_names(trees: Iterable[ast.Module]) -> set[str]:
    """All names that modules define: functions, classes, variables, attributes of `self`."""
    names: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return names


def foreign_names(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """Lines and private names of other packages, as far as the text shows: imports, attributes, names in strings."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = [(alias.name, alias.asname or alias.name.partition(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            paths = [(f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
        else:
            continue
        for path, name in paths:
            if path.partition(".")[0] not in ("fusedmoe", "__future__"):
                imported[name] = path
                if any(map(is_private, path.split("."))):
                    yield node.lineno, path
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in NAMESPACES:
            root = ast.unparse(node.value).partition(".")[0]
            if ast.unparse(node.value).startswith("torch.ops."):
                continue  # an operator
            state = node.attr in PYTORCH_STATE and root not in ("self", "cls")
            if node.attr not in own or root in imported or state:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in READERS:
            for constant in (argument for argument in node.args if isinstance(argument, ast.Constant)):
                if isinstance(constant.value, str) and is_private(constant.value) and constant.value not in own:
                    yield node.lineno, constant.value


def private_names() -> Iterator[str]:
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    own = own_names(tree for path, tree in trees.items() if COMPAT not in path.parents)
    for path, tree in trees.items():
        if COMPAT not in path.parents:
            for line, name in foreign_names(tree, own):
                yield f"{path.relative_to(ROOT)}:{line} uses {name}, private to another package; move it to `compat`"
    count = len(names_of_compat())
    if count > PRIVATE_NAMES:
        yield f"fusedmoe/compat uses {count} private names of other packages, more than {PRIVATE_NAMES}"


def names_of_compat() -> set[str]:
    """Private names that `compat` uses, each once for its library. A private module around one does not count."""
    names: set[str] = set()
    for path in sorted(set(COMPAT.glob("*.py")) - {COMPAT / "python.py"}):  # Python itself is no other package
        tree = ast.parse(path.read_text())
        own = own_names([tree])
        found = {name.rpartition(".")[2] for _, name in foreign_names(tree, own)}
        nodes = list(ast.walk(tree))
        parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        constants = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in parts]
        texts = {value for value in constants if isinstance(value, str)}
        found |= {text for text in texts if text.isidentifier() and is_private(text)} - NAMESPACES
        attributes = [node for node in nodes if isinstance(node, ast.Attribute) and is_private(node.attr)]
        on_the_way = {ast.unparse(node.value).rpartition(".")[2] for node in attributes}
        names |= {f"{path.stem.partition('_')[0]}: {name}" for name in found - on_the_way - DOCUMENTED_PATHS}
    return names


def plain(rooms: Iterable[Path]) -> Iterator[str]:
    """Says where words are not plain: docstrings that begin with a fragment, empty names that live long."""
    files = [path for room in rooms for path in ([room] if room.is_file() else sorted(room.rglob("*.py")))]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            line = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
            words = (ast.get_docstring(node) or "").split()
            if words and words[0].strip("`*(:,.").lower() in FRAGMENTS | ({"the"} if words[1:2] == ["same"] else set()):
                yield f"{line} a docstring begins with a fragment: {' '.join(words[:6])} …"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from (f"{line} {name} lives for {lines} lines" for name, lines in long_lives(node))


def long_lives(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, int]]:
    """Empty names of a function, parameters included, and the lines between first and last use of each."""
    lines = defaultdict(set)
    for node in ast.walk(function):
        name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else None
        if name in EMPTY_NAMES:
            lines[name].add(node.lineno)  # type: ignore[attr-defined]
    for name, at in sorted(lines.items()):
        if max(at) - min(at) > EMPTY_LINES:
            yield name, max(at) - min(at)


def broken_rules() -> list[str]:
    rules = (files_twice, classes_twice, long_files, docstrings, kernels_without_contract, tensors_without_device)
    rules += (private_names,)
    return [text for rule in rules for text in rule()] + list(plain([PACKAGE]))


if __name__ == "__main__":
    broken = list(plain(Path(name).resolve() for name in sys.argv[1:])) if sys.argv[1:] else broken_rules()
    print("\n".join(broken) or "The house keeps its rules.")
    sys.exit(bool(broken))
