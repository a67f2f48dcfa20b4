"""Sets the repository's address in an unpacked source distribution: the project's URLs and the README's relative links.

Package indexes show the README without the repository around it, so that relative links and pictures break there.

    python .ci/release.py --check [ADDRESS]         # exits with 1 if no address is set
    python .ci/release.py UNPACKED_SDIST [ADDRESS]

ADDRESS: default `Repository` of [project.urls] in pyproject.toml.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

#: An address that does not exist: `.invalid` is reserved (RFC 2606).
PLACEHOLDER = "https://repository.invalid/fusedmoe"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]*)\)")
_PICTURES = (".svg", ".png")


def repository(folder: Path, address: str = "") -> str:
    """Return `address`, or else the one of pyproject.toml. Raises `SystemExit` if neither is a real address."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = (address or project["urls"]["Repository"]).rstrip("/")
    if not address.startswith("https://") or ".invalid" in address:
        raise SystemExit(
            f"no release without the repository's address: pyproject.toml has {address}; set Repository in "
            "[project.urls] there, or run: make dist REPOSITORY=https://..."
        )
    return address


def absolute_links(text: str, address: str) -> str:
    """Replace relative links with links to the repository's default branch; pictures link to the raw file."""

    def link(found: re.Match[str]) -> str:
        picture, label, path = found.groups()
        view = "raw" if path.endswith(_PICTURES) else "blob"
        return f"{picture}[{label}]({address}/{view}/HEAD/{path})"

    return _LINK.sub(link, text)


def prepare(folder: Path, address: str) -> None:
    """Write the address into `pyproject.toml` and `README.md` of the folder."""
    for name, change in (
        ("pyproject.toml", lambda text: text.replace(PLACEHOLDER, address)),
        ("README.md", lambda text: absolute_links(text, address)),
    ):
        path = folder / name
        path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def main(target: str, address: str = "") -> None:
    if target == "--check":
        repository(Path(__file__).parents[1], address)
    else:
        prepare(Path(target), repository(Path(target), address))


if __name__ == "__main__":
    main(*sys.argv[1:])
