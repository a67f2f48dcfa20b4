"""Project rules that no other tool checks; `make lint` runs this. Prints violations and exits with 1 if there are any.

- Every file name and every class name occurs once outside `fusedmoe/tutel`, which mirrors Tutel's names.
- No file has more than 500 lines, and no package more lines than its budget.
- A module's docstring begins with a sentence. Docstrings and comments contain none of `PHRASES`.
- A Triton form has a contract of the same name in `fusedmoe/kernels`.
- Calls that create a tensor name its device.
- Private names of other packages occur in `fusedmoe/compat` only.
- Names without a meaning live for a few lines at most.

    python -m tests.house tests/chaos    # violations of the rules on words in another folder
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
#: Lines of each package; "." is the modules next to them. Additions are paid for by deletions in the same package, or
#: raise the budget in a commit that says why.
BUDGETS = {
    ".": 3026,
    "autograd": 2292,
    "blocks": 2845,
    "cli": 4842,
    "comm": 4477,
    "compat": 793,
    "engine": 3467,
    "experts": 1473,
    "gates": 1617,
    "graph": 3235,
    "hf": 1752,
    "kernels": 9141,
    "layers": 2703,
    "models": 1605,
    "placement": 3823,
    "runtime": 1580,
    "schedule": 6596,
    "training": 5265,
    "tutel": 3204,
}
# Phrases that are wrong in any docstring or comment, each with the words to use.
PHRASES = {
    r"\bwhat (travels|comes|goes|serves|becomes|makes)\b": "the noun",
    r"\b(goes|go|come|comes|came|went) (back|along|home|by)\b": "send, receive, return or follow",
    r"\b(tells|told|hears|heard)\b": "report, notify or receive",
    r"\bby turns\b": "interleaved",
    r"\bone after the other\b": "sequentially",
    r"\bbeside (the|an?|its?|that|this|other)\b": "alongside, overlapped with or compared with",
    r"^\W*(Of what|By what|What|Those that|That of)\b": "a noun and its verb",
}
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


def over_budget() -> Iterator[str]:
    sizes: dict[str, int] = defaultdict(int)
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        sizes[parts[0] if len(parts) > 1 else "."] += len(path.read_text().splitlines())
    for package, lines in sorted(sizes.items()):
        if lines > (budget := BUDGETS.get(package, 0)):
            yield f"package {package} has {lines} lines, more than its budget of {budget} (BUDGETS in tests/house.py)"


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
PRIVATE_NAMES = 40
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
    """Yield phrases in docstrings and comments that have a standard term, and empty names that live long."""
    files = [path for room in rooms for path in ([room] if room.is_file() else sorted(room.rglob("*.py")))]
    for path in files:
        for number, text in enumerate(path.read_text().splitlines(), 1):
            if text.lstrip().startswith("#"):
                yield from phrases(f"{path.relative_to(ROOT)}:{number}", text)
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            line = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
            yield from phrases(line, ast.get_docstring(node) or "")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from (f"{line} {name} lives for {lines} lines" for name, lines in long_lives(node))


def phrases(line: str, text: str) -> Iterator[str]:
    for pattern, better in PHRASES.items():
        for match in re.finditer(pattern, text):
            yield f"{line} {' '.join(match[0].split())!r}: write {better}"


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
    rules = (
        files_twice,
        classes_twice,
        long_files,
        over_budget,
        docstrings,
        kernels_without_contract,
        tensors_without_device,
    )
    rules += (private_names,)
    return [text for rule in rules for text in rule()] + list(plain([PACKAGE]))


if __name__ == "__main__":
    broken = list(plain(Path(name).resolve() for name in sys.argv[1:])) if sys.argv[1:] else broken_rules()
    print("\n".join(broken) or "The house keeps its rules.")
    sys.exit(bool(broken))
