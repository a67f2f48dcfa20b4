"""`import tutel` gives this package: by install(), and around an unmodified script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
CLIENT = "tests/tutel/client.py"


def python(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=folder, env=environment)


@pytest.mark.slow
def test_unmodified_script() -> None:
    done = python("-m", "fusedmoe.tutel", CLIENT, "--flag", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "client ['--flag', '3'] __main__ 1"


def test_examples_that_come_with_tutel(tmp_path: Path) -> None:
    """Those of a checkout run, on this package; without one the program ends and says what to do."""
    run = ("-m", "fusedmoe.tutel", "-m", "tutel.examples.helloworld", "--top", "2")
    done = python(*run, folder=tmp_path)
    assert done.returncode == 1 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "tutel.examples.helloworld is not here" in done.stderr and "in a checkout of Tutel" in done.stderr
    examples = tmp_path / "tutel" / "examples"
    examples.mkdir(parents=True)
    (tmp_path / "tutel" / "__init__.py").write_text("raise ImportError('this is Tutel itself')")
    (examples / "helloworld.py").write_text(
        "import sys\nfrom tutel import system\nimport tutel\nfrom tutel.examples import other\n"
        "print(__name__, system.__name__, tutel.__name__, sys.argv[1:])\n"
    )
    (examples / "other.py").write_text("import tutel")
    done = python(*run, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "__main__ fusedmoe.tutel.system fusedmoe.tutel ['--top', '2']\n"
    assert "tutel.examples.none is not here" in python(*run[:3], "tutel.examples.none", folder=tmp_path).stderr


@pytest.mark.slow
def test_install_and_a_real_tutel_before_it() -> None:
    code = f"import fusedmoe.tutel; fusedmoe.tutel.install(); fusedmoe.tutel.install(); exec(open({CLIENT!r}).read())"
    assert python("-c", code).returncode == 0
    late = python(
        "-c",
        "import sys, types; sys.modules['tutel'] = types.ModuleType('tutel')\n"
        "import fusedmoe.tutel; fusedmoe.tutel.install()",
    )
    assert late.returncode and "ConfigError: tutel is imported already" in late.stderr


@pytest.mark.slow
def test_modules_and_unknown_names() -> None:
    done = python("-m", "fusedmoe.tutel", "-m", "tutel.checkpoint.scatter", "--help")
    assert done.returncode == 0 and "--output_size" in done.stdout
    done = python("-m", "fusedmoe.tutel", "--help")
    assert done.returncode == 0 and "usage: python -m fusedmoe.tutel" in done.stdout
    done = python("-m", "fusedmoe.tutel", "-m")
    assert done.returncode and "usage: python -m fusedmoe.tutel" in done.stderr
    code = "import fusedmoe.tutel; fusedmoe.tutel.install(); import tutel.nothing"
    assert "ModuleNotFoundError: No module named 'tutel.nothing'" in python("-c", code).stderr
