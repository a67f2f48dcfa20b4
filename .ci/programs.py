"""A page of docs/ names a program by a link on a line of its own, which GitHub shows; the site shows the program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"^\[(examples/\w+\.py)\]\((?:\.\./)+\1\)$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for each page."""
    return _LINK.sub(_program, markdown)


def _program(link: re.Match[str]) -> str:
    return f'```{{.python title="{link[1]}"}}\n{(_ROOT / link[1]).read_text(encoding="utf-8").rstrip()}\n```'
