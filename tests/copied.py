"""Imported first by the process whose copies the ranks of tests are (tests/cluster.py): it ends with its parent.

By itself it would wait for its copies, which may be in native code.
"""

from __future__ import annotations

import os

from tests.lifetime import end_with

PID = os.getpid()
end_with(os.getppid())
