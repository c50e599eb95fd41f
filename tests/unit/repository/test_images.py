"""Test that the Dockerfiles make what the test cluster runs, and that `make` and the release workflow publish it."""

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from page_blocks import ROOT

import stepkeeper
from stepcluster import images
from stepcluster.ociimage import Settings

OF_THE_MACHINE = {"PATH", "SSL_CERT_FILE"}
"""Variables that the test cluster's images need, since they are made of the machine's Python."""


class Stage:
    """The last stage of a Dockerfile, and the commands of all stages."""

    def __init__(self, name: str) -> None:
        text = (ROOT / "images" / f"{name}.Dockerfile").read_text(encoding="utf-8")
        lines = re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
        instructions = [(word, value) for word, _, value in (line.partition(" ") for line in lines) if word]
        arguments = dict(value.split("=", 1) for word, value in instructions if word == "ARG")
        self.python = arguments["PYTHON"]
        self.extras = arguments.get("EXTRAS", "")
        self.commands = [
            re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]].strip('"'), value)
            for word, value in instructions
            if word == "RUN"
        ]
        last = max(n for n, (word, _) in enumerate(instructions) if word == "FROM")
        self.last: Mapping[str, str] = dict(instructions[last + 1 :])
        self.environment = dict(each.split("=", 1) for each in shlex.split(self.last["ENV"]))

    def words(self, name: str) -> list[str]:
        """Read an instruction in the form of a list."""
        return [str(word) for word in yaml.safe_load(self.last.get(name, "[]"))]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the test cluster puts into images: the settings, and what is installed where."""
    found: dict[str, Any] = {"installed": []}
    monkeypatch.setattr(images, "_layer", lambda *_: None)
    monkeypatch.setattr(images, "_content", lambda *_: "")
    monkeypatch.setattr(images, "build_wheel", lambda: Path("stepkeeper.whl"))
    monkeypatch.setattr(images, "_installed", lambda what, to: found["installed"].append((what.name, to)))
    monkeypatch.setattr(images, "_image", lambda _name, _layers, settings: found.update(settings=settings))
    return found


def of_the_product(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in OF_THE_MACHINE}


def test_the_operators_image_is_the_one_that_is_tested(made: dict[str, Any]) -> None:
    images.operator()
    settings, stage = made["settings"], Stage("operator")
    assert isinstance(settings, Settings)
    assert (stage.last["USER"], stage.last["WORKDIR"]) == (settings.user, settings.folder)
    assert stage.words("ENTRYPOINT") == settings.entrypoint
    assert stage.environment == of_the_product(settings.environment)
    # Nothing else is in it: no torch, which the lock doesn't have.
    installs = [shlex.split(each) for each in stage.commands if "pip install" in each]
    assert made["installed"] == [
        ("requirements-operator.lock", "opt/packages"),
        ("stepkeeper.whl", "opt/stepkeeper"),
    ]
    assert [each[-1] for each in installs] == ["requirements-operator.lock", "."]
    targets = [word.partition("=/")[2] for each in installs for word in each if word.startswith("--target")]
    assert targets == [target for _, target in made["installed"]]
    assert all("--no-deps" in each for each in installs)
    assert "--require-hashes" in installs[0]


def test_the_trainers_image_is_the_one_that_is_tested(made: dict[str, Any], tmp_path: Path) -> None:
    images.trainer(tmp_path)
    settings, stage = made["settings"], Stage("trainer")
    assert stage.words("CMD") == settings.command
    # Devices of a TPU belong to root.
    assert (stage.last.get("USER", "0:0"), stage.last["WORKDIR"]) == (settings.user, settings.folder)
    # Here pip installs everything for Python itself, and no path is needed.
    variables = of_the_product(settings.environment)
    assert stage.environment | {"PYTHONPATH": variables["PYTHONPATH"]} == variables
    (install,) = stage.commands
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(stage.extras.split(",")) <= project["optional-dependencies"].keys()
    assert f'-c constraints ".[{stage.extras}]"' in install
    pins = subprocess.run(
        ["bash", "-c", f"{install.partition(' > ')[0]} | grep -E '^torch(-xla)?=='"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(pins.stdout.split()) == 2


@pytest.mark.parametrize("name", ["operator", "trainer"])
def test_an_image_has_a_python_that_is_supported_and_a_context(name: str) -> None:
    assert Stage(name).python in ("3.11", "3.12", "3.13")
    context = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert [each for each in images.WHEEL_SOURCES if f"!{each}" not in context] == []
    used = re.findall(r"\S+\.lock", (ROOT / "images" / f"{name}.Dockerfile").read_text(encoding="utf-8"))
    assert [each for each in used if f"!{each}" not in context] == []


def test_make_builds_and_pushes_both(tmp_path: Path) -> None:
    program = tmp_path / "container"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n', encoding="utf-8")
    program.chmod(0o755)
    command = ["make", "--silent", "push", "REGISTRY=registry.example/team", f"CONTAINER={program}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    names = [
        f"registry.example/team/stepkeeper-{name}:{stepkeeper.__version__}"
        for name in ("operator", "trainer")
    ]
    assert (tmp_path / "called").read_text(encoding="utf-8").splitlines() == [
        *(
            f"build --file images/{name}.Dockerfile --tag {tag} ."
            for name, tag in zip(("operator", "trainer"), names, strict=True)
        ),
        *(f"push {tag}" for tag in names),
    ]
    nowhere = subprocess.run(
        [*command[:3], command[-1]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (nowhere.returncode, "REGISTRY=" in nowhere.stdout) == (2, True)


def test_the_workflow_publishes_what_the_tree_makes() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert set(jobs) == {"images", "chart", "wheel"}
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    for command in commands:
        subprocess.run(["bash", "-n", "-c", command], check=True)
    targets = set(
        re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert {word for each in commands for word in re.findall(r"\bmake (?:--silent )?([a-z]+)", each)} == {
        "version",
        "push",
    }
    assert {"version", "push"} <= targets
    assert not re.search(r"[a-z]\.(?:io|dev)/", text), "the registry is a variable"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_installs_into_a_clean_environment(kind: str, tmp_path: Path) -> None:
    """pip gets the dependencies, and of a source archive also builds the wheel. Nothing heavy comes with it."""
    build: list[str | Path] = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        kind,
        "-d",
        tmp_path / "dist",
    ]
    subprocess.run(build, cwd=ROOT, check=True, timeout=120, capture_output=True)
    (archive,) = (tmp_path / "dist").iterdir()
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "environment"], check=True, timeout=120)
    python = tmp_path / "environment/bin/python"
    install: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        f"{archive}[cli]",
    ]
    subprocess.run(install, check=True, timeout=500)
    commands: list[list[str | Path]] = [
        [
            python,
            "-c",
            "import stepkeeper.contract, stepkeeper_planners.geometry; print(stepkeeper.__version__)",
        ],
        [tmp_path / "environment/bin/stepkeeper", "ls", tmp_path / "none"],
        [python, "-m", "pip", "list", "--format=freeze"],
        [
            python,
            "-c",
            "import stepkeeper_operator.labels, importlib.metadata as m; print(m.files('stepkeeper'))",
        ],
    ]
    version, listed, packages, files = [
        subprocess.run(each, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
        for each in commands
    ]
    assert version.stdout.strip() == stepkeeper.__version__, version.stderr
    assert "Traceback" not in listed.stderr
    assert "torch" not in packages.stdout
    sources = {
        str(path.relative_to(ROOT / top))
        for top in ("operator", "runtime", "planners")
        for path in (ROOT / top).rglob("*.py")
    }
    assert {name for name in sources if name not in files.stdout} == set()
