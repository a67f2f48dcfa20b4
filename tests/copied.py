"""First import of the process from which ranks of tests are forked (tests/cluster.py): it ends with its parent.

Otherwise it would wait for its copies, which may be in native code.
"""

from __future__ import annotations

import os

from tests.lifetime import end_with

PID = os.getpid()
end_with(os.getppid())
