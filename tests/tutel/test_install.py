"""`import tutel` imports this package: after install(), and in an unmodified script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
CLIENT = "tests/tutel/client.py"


def run_python(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=folder, env=environment)


@pytest.mark.slow
def test_unmodified_script_runs_on_package() -> None:
    done = run_python("-m", "fusedmoe.tutel", CLIENT, "--flag", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "client ['--flag', '3'] __main__ 1"


def test_tutel_checkout_examples_run_on_package(tmp_path: Path) -> None:
    """A checkout's examples run on this package; without a checkout the program ends with a fix."""
    run = ("-m", "fusedmoe.tutel", "-m", "tutel.examples.helloworld", "--top", "2")
    done = run_python(*run, folder=tmp_path)
    assert done.returncode == 1 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "tutel.examples.helloworld was not found" in done.stderr and "in a Tutel checkout" in done.stderr
    examples = tmp_path / "tutel" / "examples"
    examples.mkdir(parents=True)
    (tmp_path / "tutel" / "__init__.py").write_text("raise ImportError('this is Tutel itself')")
    (examples / "helloworld.py").write_text(
        "import sys\nfrom tutel import system\nimport tutel\nfrom tutel.examples import other\n"
        "print(__name__, system.__name__, tutel.__name__, sys.argv[1:])\n"
    )
    (examples / "other.py").write_text("import tutel")
    done = run_python(*run, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "__main__ fusedmoe.tutel.system fusedmoe.tutel ['--top', '2']\n"
    assert "tutel.examples.none was not found" in run_python(*run[:3], "tutel.examples.none", folder=tmp_path).stderr


@pytest.mark.slow
def test_install_rejects_previously_imported_tutel() -> None:
    code = f"import fusedmoe.tutel; fusedmoe.tutel.install(); fusedmoe.tutel.install(); exec(open({CLIENT!r}).read())"
    assert run_python("-c", code).returncode == 0
    late = run_python(
        "-c",
        "import sys, types; sys.modules['tutel'] = types.ModuleType('tutel')\n"
        "import fusedmoe.tutel; fusedmoe.tutel.install()",
    )
    assert late.returncode and "ConfigError: tutel is imported already" in late.stderr


@pytest.mark.slow
def test_command_line_modules_and_unknown_names() -> None:
    done = run_python("-m", "fusedmoe.tutel", "-m", "tutel.checkpoint.scatter", "--help")
    assert done.returncode == 0 and "--output_size" in done.stdout
    done = run_python("-m", "fusedmoe.tutel", "--help")
    assert done.returncode == 0 and "usage: python -m fusedmoe.tutel" in done.stdout
    done = run_python("-m", "fusedmoe.tutel", "-m")
    assert done.returncode and "usage: python -m fusedmoe.tutel" in done.stderr
    code = "import fusedmoe.tutel; fusedmoe.tutel.install(); import tutel.nothing"
    assert "ModuleNotFoundError: No module named 'tutel.nothing'" in run_python("-c", code).stderr
