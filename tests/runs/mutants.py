"""Run mutmut over the pure cores: `python tests/runs/mutants.py [--whole] [CORE…]`.

A mutant is a core with one small change, which the unit tests of the core should notice. The share that was noticed is
written into benchmarks/results/mutants.json. Fails if a rate is below its core's floor.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypedDict

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / "benchmarks" / "results" / "mutants.json"
PACKAGES: Final = ("runtime/stepkeeper", "planners/stepkeeper_planners", "operator/stepkeeper_operator")
SURVIVED: Final = 0
UNTESTED: Final = 33
"""mutmut's code for a mutant of a function that no test calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """Modules that decide and do nothing else, with the tests that must notice a change in them."""

    modules: tuple[str, ...]
    """Patterns below `src`, where mutmut wants all packages."""

    tests: tuple[str, ...]
    """Patterns of files and folders."""

    without: tuple[str, ...] = ()
    """Files of these that start processes or wait."""

    floor: float
    """The least share of mutants that must be noticed."""

    is_sampled: bool = False
    """True if a tenth of the mutants are tried, unless all are asked for."""


def _of_operator(room: str, floor: float) -> Core:
    slow = ("certificates", "lease", "process")
    return Core(
        modules=(f"src/stepkeeper_operator/{room}/*",),
        tests=("tests/unit/operator", "tests/unit/queued_resources/test_job_*.py"),
        without=tuple(f"tests/unit/operator/test_operator_{name}.py" for name in slow),
        floor=floor,
        is_sampled=True,
    )


CORES: Final = {
    "log": Core(
        modules=("src/stepkeeper/log/state.py", "src/stepkeeper/log/claims.py"),
        tests=("tests/unit/runtime/test_log_*.py", "tests/unit/runtime/test_repair*.py"),
        floor=0.92,
    ),
    "agreement": Core(
        modules=("src/stepkeeper/coordination/agreement_rules.py",),
        # Those without threads: a mutant that holds a rank for ever is noticed at once.
        tests=(
            "tests/unit/runtime_process/test_agreement_rules.py",
            "tests/property/test_step_agreement_model.py",
        ),
        floor=0.97,
    ),
    "ending": Core(
        modules=(
            "src/stepkeeper/ending/machine.py",
            "src/stepkeeper/ending/schedule.py",
        ),
        tests=(
            "tests/unit/runtime_process/test_end*.py",
            "tests/unit/runtime_process/test_last_step.py",
            "tests/unit/runtime_process/test_save_rules.py",
        ),
        floor=0.9,
    ),
    "decide": _of_operator("training_jobs/decide", floor=0.80),
    "attempts": _of_operator("training_jobs/attempts", floor=0.88),
    "policy": _of_operator("training_jobs/policy", floor=0.88),
}


class Figures(TypedDict):
    """What became of a core's mutants."""

    mutants: int
    noticed: int
    rate: float
    sample: str


def prepare(core: Core, folder: Path) -> None:
    """Lay out the tree as mutmut wants it, with its settings."""
    shutil.rmtree(folder, ignore_errors=True)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / "src" / Path(package).name)
    (folder / "tests").symlink_to(ROOT / "tests")
    found = sorted(path for pattern in core.tests for path in ROOT.glob(pattern))
    settings = {
        "source_paths": ["src"],
        "only_mutate": list(core.modules),
        "track_dependencies": False,
        "pytest_add_cli_args": ["-m", "gate", *(f"--ignore={path}" for path in core.without)],
        "pytest_add_cli_args_test_selection": [str(path.relative_to(ROOT)) for path in found],
    }
    table = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (folder / "pyproject.toml").write_text(f"{project}\n[tool.mutmut]\n{table}", encoding="utf-8")


def read_codes(folder: Path) -> dict[str, int]:
    """Return how the tests ended with each mutant that was tried."""
    codes: dict[str, int] = {}
    for path in (folder / "mutants" / "src").rglob("*.meta"):
        tried = json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"]
        codes |= {name: code for name, code in tried.items() if code is not None}
    return codes


def run(name: str, sample: str | None) -> Figures:
    """Run mutmut over a core, and return its figures."""
    core, folder = CORES[name], ROOT / "out" / "mutants" / name
    prepare(core, folder)
    names = [] if sample is None else [f"*__mutmut_*{sample}"]
    subprocess.run([sys.executable, "-m", "mutmut", "run", *names], cwd=folder, check=True)
    codes = read_codes(folder)
    left = sorted(mutant for mutant, code in codes.items() if code in (SURVIVED, UNTESTED))
    print(f"{name}: not noticed; `mutmut show NAME` in {folder} shows one:", *left, sep="\n  ")
    return {
        "mutants": len(codes),
        "noticed": len(codes) - len(left),
        "rate": round(1 - len(left) / len(codes), 3),
        "sample": "all" if sample is None else f"those whose number ends in {sample}",
    }


def main() -> str | None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cores", nargs="*", metavar="CORE", help=f"{', '.join(CORES)}; all by default")
    parser.add_argument("--whole", action="store_true", help="try all mutants of large cores too")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16), help="chooses the sample")
    options = parser.parse_args()
    digit = str(random.Random(options.seed).randint(1, 9))
    print(f"--seed {options.seed}", flush=True)
    results: dict[str, Figures] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.cores or CORES:
        is_sampled = CORES[name].is_sampled and not options.whole
        results |= {name: run(name, digit if is_sampled else None)}
        RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    low = [name for name in options.cores or CORES if results[name]["rate"] < CORES[name].floor]
    print(*(f"{name}: {figures}" for name, figures in results.items()), sep="\n")
    return f"below the floor: {', '.join(low)}" if low else None


if __name__ == "__main__":
    sys.exit(main())
