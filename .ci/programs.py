"""Makes pages of the site of what GitHub shows by a link: programs, and the README, which is the front page.

A page of docs/ names a program by a link on a line of its own; the site shows the program.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"^\[(examples/\w+\.py)\]\((?:\.\./)+\1\)$", re.MULTILINE)
_SETUP = re.compile(r"<!-- setup\n.*?-->\n+", re.DOTALL)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs for each page."""
    return front_page() if page.file.src_uri == "index.md" else _LINK.sub(_program, markdown)


def front_page() -> str:
    """The README as a page of docs/; a file that is not there is named without a link."""
    text = _SETUP.sub("", (_ROOT / "README.md").read_text(encoding="utf-8"))
    return re.sub(r"\[([^\]]*)\]\((?!docs/|\w+:|#)[^)]*\)", r"\1", text).replace("](docs/", "](")


def _program(link: re.Match[str]) -> str:
    return f'```{{.python title="{link[1]}"}}\n{(_ROOT / link[1]).read_text(encoding="utf-8").rstrip()}\n```'
