"""Private names of Python's standard library, checked against 3.11 to 3.13."""

from __future__ import annotations

import pickle
import platform

from fusedmoe.compat import require_names

require_names("Python", platform.python_version(), "3.11 to 3.13", pickle, "_Unpickler")

#: The Python unpickler: the C unpickler allocates as much memory as a file of a few bytes requests.
PythonUnpickler = pickle._Unpickler
