"""Metadata of the package, and the repository's address in what is released."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
ADDRESS = "https://example.org/people/fusedmoe"
# A released sdist has the address in place already, and no workflow.
pytestmark = pytest.mark.skipif(not (ROOT / ".github").is_dir(), reason="not a checkout")


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = spec_from_file_location("release", ROOT / ".ci/release.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def project(folder: Path = ROOT) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_release_without_an_address_is_refused(release: ModuleType, source: Path) -> None:
    text = (source / "pyproject.toml").read_text()
    for address in (release.PLACEHOLDER, "", "git.example.org/fusedmoe"):
        (source / "pyproject.toml").write_text(
            re.sub(r'^Repository = ".*"', f'Repository = "{address}"', text, flags=re.MULTILINE)
        )
        with pytest.raises(SystemExit, match=r"make dist REPOSITORY="):
            release.main(str(source))
    assert (source / "README.md").read_text() == (ROOT / "README.md").read_text()


def test_links_lead_into_the_repository(release: ModuleType, source: Path) -> None:
    release.main(str(source), f"{ADDRESS}/")
    readme = (source / "README.md").read_text()
    targets = re.findall(r"\]\(([^)]*)\)", readme)
    assert targets and all(target.startswith("https://") for target in targets)
    assert f"]({ADDRESS}/blob/HEAD/docs/tutorial.md)" in readme
    assert f"]({ADDRESS}/raw/HEAD/docs/images/step.svg)" in readme
    inside = [target for target in targets if target.startswith(ADDRESS)]
    for target in inside:
        path = re.sub(r"^/(blob|raw)/HEAD/|#.*", "", target.removeprefix(ADDRESS))
        assert (ROOT / path).exists(), target


def test_the_address_is_written_once(release: ModuleType, source: Path) -> None:
    address = project()["urls"]["Repository"]
    release.main(str(source), ADDRESS)
    if address == release.PLACEHOLDER:
        assert project(source)["urls"] == {"Repository": ADDRESS}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "mkdocs.yml", ROOT / "CITATION.cff"]
    assert not [page for page in pages if address in page.read_text(encoding="utf-8")]


def test_versions_of_python_agree() -> None:
    named = [line.rpartition(" ")[2] for line in project()["classifiers"] if "Python :: 3." in line]
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert f"python: {json.dumps(named)}" in workflow
    readme = (ROOT / "README.md").read_text()
    assert f"Python {', '.join(named[:-1])} or {named[-1]} and" in readme
    assert project()["requires-python"] == f">={named[0]}"


def test_the_tutorial_has_all_extras() -> None:
    table = re.findall(r"^\| (`[^|]*`) \|", (ROOT / "docs/tutorial.md").read_text(), re.MULTILINE)
    listed = re.findall(r"`([\w-]+)`", " ".join(table))
    assert sorted(listed) == sorted(project()["optional-dependencies"])
