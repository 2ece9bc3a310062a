"""The files for Docker, conda and citations agree with the package."""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import offmarl

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECIPE = yaml.safe_load((ROOT / "packaging/recipe.yaml").read_text())
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
WORKFLOW = (ROOT / ".github/workflows/ci.yml").read_text()
CONDA_NAMES = {"matplotlib": "matplotlib-base"}  # the one without a graphical interface


def split(requirement: str) -> tuple[str, str]:
    """Return the name and the versions of a requirement of pip or of conda."""
    name, versions = re.fullmatch(r"([\w.-]+) ?(.*)", requirement).groups()
    return name, versions


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "packaging/Dockerfile").read_text(), flags=re.M)
    lines = filter(None, text.replace("\\\n", " ").splitlines())
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def test_the_recipe_of_conda_has_the_requirements_of_the_package():
    expected = {CONDA_NAMES.get(name, name): v for name, v in map(split, PROJECT["dependencies"])}
    run = dict(map(split, RECIPE["requirements"]["run"]))
    assert run.pop("python") == PROJECT["requires-python"]
    assert run == expected


def test_versions_licences_and_commands_are_the_same_everywhere():
    assert RECIPE["context"]["version"] == CITATION["version"] == offmarl.__version__
    assert RECIPE["about"]["license"] == CITATION["license"] == PROJECT["license"]
    (command,) = PROJECT["scripts"].items()
    assert RECIPE["build"]["python"]["entry_points"] == [" = ".join(command)]


def test_the_citation_has_what_its_format_requires():
    """https://github.com/citation-file-format/citation-file-format, version 1.2.0."""
    assert CITATION["cff-version"] == "1.2.0" and CITATION["type"] == "software"
    assert CITATION["title"] and CITATION["message"]
    assert all("name" in author or "family-names" in author for author in CITATION["authors"])


def test_the_dockerfile_copies_what_the_package_is_built_from():
    ignored = (ROOT / "packaging/Dockerfile.dockerignore").read_text().splitlines()
    exceptions = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert all((ROOT / path).exists() for path in exceptions)
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    wheel = hatch["build"]["targets"]["wheel"]
    built = {*wheel["packages"], *wheel["force-include"], *PROJECT["license-files"]}
    assert built | {PROJECT["readme"], "pyproject.toml", ".ci/constraints.txt"} == exceptions


def test_the_dockerfile_builds_for_cpu_and_cuda():
    steps = instructions()
    stages = [argument for name, argument in steps if name == "FROM"]
    assert stages == ["python:${PYTHON}-slim AS build", "python:${PYTHON}-slim"]
    names = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in steps} <= names
    arguments = dict(a.split("=") for name, a in steps if name == "ARG")
    assert arguments["DEVICE"] == "cpu" and arguments["PYTHON"] in WORKFLOW
    assert set(arguments["EXTRAS"].split(",")) <= PROJECT["optional-dependencies"].keys()
    for name, argument in steps:
        if name in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(word, str) for word in json.loads(argument))
        if name == "RUN":
            assert shlex.split(argument)


@pytest.mark.parametrize("name", ["ci", "docs", "release"])
def test_a_workflow_names_files_that_exist(name):
    text = (ROOT / f".github/workflows/{name}.yml").read_text()
    assert yaml.safe_load(text)["jobs"]
    for path in re.findall(r"(?<![\w/])(?:\.ci|offmarl|packaging)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path


def test_the_release_reads_the_version_where_it_is():
    text = (ROOT / ".github/workflows/release.yml").read_text()
    command = re.search(r"version=\$\((sed .*)\)", text)[1]
    process = subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True, check=True)
    assert process.stdout.decode().strip() == offmarl.__version__
