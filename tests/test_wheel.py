"""The wheel is what is in the tree, and works where there is no tree: built, installed, and tried elsewhere."""

import os
import subprocess
import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

import shardwise

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "shardwise"


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    finished = subprocess.run(  # type: ignore[call-overload]
        command, capture_output=True, text=True, timeout=300, check=False, **options
    )
    assert isinstance(finished, subprocess.CompletedProcess)
    return finished


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `pip wheel` would, with the backend that is installed here: there may be no network."""
    folder = tmp_path_factory.mktemp("wheel")
    built = run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder, cwd=ROOT)
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs, and nothing of the tree."""
    folder = tmp_path_factory.mktemp("installed")
    words = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    finished = run(sys.executable, "-m", "pip", *words, "--target", folder, wheel)
    assert finished.returncode == 0, finished.stderr
    return folder


@pytest.fixture
def elsewhere(installed: Path, tmp_path: Path) -> dict[str, object]:
    """A working directory that is not the tree, and an environment in which Python finds the installed package."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return {"cwd": tmp_path, "env": {**environment, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}}


def test_every_file_of_the_package_is_in_the_wheel_as_it_is_here(wheel: Path) -> None:
    paths = [path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    here = {path.relative_to(SOURCE.parent).as_posix(): path.read_bytes() for path in paths}
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        there = {name: archive.read(name) for name in names}
    assert sorted(there) == sorted(here)
    assert [name for name, held in here.items() if there[name] != held] == []


def test_the_wheel_says_what_it_is_and_brings_its_license(installed: Path) -> None:
    (folder,) = installed.glob("shardwise-*.dist-info")
    told = PathDistribution(folder)
    assert told.version == shardwise.__version__
    assert told.metadata["Requires-Python"] == ">=3.11"
    assert any(each.startswith("torch") for each in told.requires or [])
    assert [each.value for each in told.entry_points if each.name == "shardwise"] == ["shardwise.cli:main"]
    assert list(folder.rglob("LICENSE"))


def test_python_finds_the_installed_package_and_not_the_tree(installed: Path, elsewhere: dict[str, object]) -> None:
    finished = run(sys.executable, "-P", "-c", "import shardwise; print(shardwise.__file__)", **elsewhere)
    assert Path(finished.stdout.strip()) == installed / "shardwise" / "__init__.py", finished.stderr


def test_its_command_plans_in_another_folder(installed: Path, elsewhere: dict[str, object]) -> None:
    words = ["plan", "llama3.1-8b", "--cluster", "8xh100", "--batch", "64", "--sequence", "4096"]
    finished = run(installed / "bin" / "shardwise", *words, **elsewhere)
    assert finished.returncode == 0, finished.stderr
    assert "8xh100" in finished.stdout


def test_it_checks_a_plan_on_ranks_in_another_folder(elsewhere: dict[str, object]) -> None:
    finished = run(sys.executable, "-P", "-m", "shardwise", "check", "--plan", "dp=2", "--steps", "1", **elsewhere)
    assert finished.returncode == 0, finished.stderr
    assert "the same as on one device" in finished.stdout
