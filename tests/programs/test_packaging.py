"""What `pip install .` installs: everything that the programs need, and nothing else."""

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from processes import ENVIRONMENT, ROOT, run_to_end

PACKAGES = ("util", "tools", "experiments", "benchmarks", "configs")
SUFFIXES = (".py", ".csv", ".json", ".html", ".yaml")


def read_requirements(name: str) -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines())
    return [Requirement(line) for line in lines if line]


@pytest.fixture(scope="module")
def installed(clone, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    flags = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--no-compile", "--target", str(folder)]
    done = run_to_end([sys.executable, "-m", "pip", "install", *flags, str(clone)])
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def distribution(installed) -> importlib.metadata.Distribution:
    (found,) = importlib.metadata.distributions(path=[str(installed)])
    return found


@pytest.fixture
def elsewhere(installed, tmp_path):
    """Runs Python in a folder that is not the project's; returns its standard output."""

    def call(*arguments: str) -> str:
        environment = {**ENVIRONMENT, "PYTHONPATH": str(installed)}
        done = run_to_end([sys.executable, *arguments], cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


def test_every_module_and_data_file_is_installed_and_nothing_else(clone, distribution):
    """A module of the root that pyproject.toml does not list is missing here; recorded results stay in the tree."""
    wanted = {path.name for path in clone.glob("*.py")} - {"hubconf.py"}
    for package in PACKAGES:
        paths = (path for path in (clone / package).rglob("*") if path.suffix in SUFFIXES)
        wanted |= {path.relative_to(clone).as_posix() for path in paths if path.parent.name != "results"}
    found = {str(path) for path in distribution.files or ()}
    assert {name for name in found if ".dist-info/" not in name} == wanted


def test_metadata_has_the_requirements_and_extras(distribution):
    requirements = [Requirement(line) for line in distribution.requires or ()]

    def of(extra: str) -> set[tuple[str, str]]:
        chosen = (r for r in requirements if (r.marker.evaluate({"extra": extra}) if r.marker else not extra))
        return {(r.name, str(r.specifier)) for r in chosen}

    files = {
        "": "requirements.txt",
        "extra": "requirements-extra.txt",
        "dev": "requirements-dev.txt",
        "bench": "benchmarks/requirements.txt",
    }
    for extra, name in files.items():
        assert of(extra) == {(r.name, str(r.specifier)) for r in read_requirements(name)}
    assert set(distribution.metadata.get_all("Provides-Extra") or ()) == {"extra", "dev", "bench"}


def test_the_models_import_from_any_folder(elsewhere, installed):
    printed = elsewhere("-c", "import models_mae, models_cmm, masking; print(models_mae.__file__)")
    assert Path(printed.strip()) == installed / "models_mae.py"


def test_a_program_runs_from_any_folder(elsewhere):
    """And finds the configs, which the recipes use."""
    assert "--mask_ratio" in elsewhere("-m", "main_pretrain", "--config", "configs/cheap.yaml", "--help")
    shown = elsewhere("-m", "experiments.run", "losses", "--data_set", "shapes", "--dry_run")
    assert "--config configs/laptop.yaml" in shown


def test_constraints_meet_the_requirements():
    """pip install -c constraints.txt finds a version of each."""
    pinned = {r.name: re.sub("^==", "", str(r.specifier)) for r in read_requirements("constraints.txt")}
    for part in ("", "-extra", "-dev"):
        for requirement in read_requirements(f"requirements{part}.txt"):
            assert requirement.specifier.contains(pinned[requirement.name]), requirement
