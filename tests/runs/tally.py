"""Add up the results of several runs of pytest: `python tests/runs/tally.py SECONDS FILE…`, each written by --junitxml.

Prints the slowest tests, the tests that passed only at the second try (`flaky.txt` beside the files), and a closing
line in pytest's form. Exits with 1 if a test failed, with 5 if no test ran.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from xml.etree import ElementTree as ET

FLAKY = "flaky.txt"
FAILED = frozenset({"failed", "error"})
_N_SLOWEST = 20
_OUTCOMES = {"failure": "failed", "error": "error", "skipped": "skipped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One test: what pytest's XML says of it."""

    name: str
    outcome: str
    """passed, failed, error or skipped, as pytest's closing line counts them."""

    duration_s: float


def read_results(path: Path) -> list[Result]:
    """Read a file that pytest wrote with --junitxml. It has a test that passed, but for its teardown, as an error.

    Returns no results if pytest ended before it wrote the whole file.
    """
    try:
        cases = list(ET.parse(path).iter("testcase"))
    except (FileNotFoundError, ET.ParseError):
        return []
    return [
        Result(
            name=_name(case),
            outcome=next((_OUTCOMES[part.tag] for part in case if part.tag in _OUTCOMES), "passed"),
            duration_s=float(case.get("time", 0)),
        )
        for case in cases
    ]


def _name(case: ET.Element) -> str:
    """Return the name that pytest takes for this test. Its classname is module.Class, with dots for slashes."""
    parts = case.get("classname", "").split(".")
    n_module = next((number for number, part in enumerate(parts, 1) if part.startswith("test_")), 0)
    if not n_module:
        # A module that could not be imported has its own name, and no class.
        return case.get("name", "")
    return "::".join(["/".join(parts[:n_module]) + ".py", *parts[n_module:], case.get("name", "")])


def write_crash(path: Path, file: str, message: str) -> list[Result]:
    """Write the results of a file whose process left none: one error. Returns them."""
    suite = ET.Element("testsuite")
    classname = file.removesuffix(".py").replace("/", ".")
    case = ET.SubElement(suite, "testcase", classname=classname, name="(all)", time="0")
    ET.SubElement(case, "error", message=message)
    ET.ElementTree(suite).write(path)
    return read_results(path)


def count(results: Iterable[Result]) -> Counter[str]:
    return Counter(result.outcome for result in results)


def has_failed(results: Iterable[Result]) -> bool:
    return any(result.outcome in FAILED for result in results)


def closing_line(counts: Mapping[str, int], elapsed_s: float) -> str:
    """Return the counts as pytest's last line has them."""
    parts = [
        f"{counts[outcome]} {outcome}" for outcome in ("failed", "passed", "skipped") if counts.get(outcome)
    ]
    if n_errors := counts.get("error"):
        parts.append("1 error" if n_errors == 1 else f"{n_errors} errors")
    said = ", ".join(parts) or "no tests ran"
    return f"===== {said} in {elapsed_s:.2f}s ({timedelta(seconds=int(elapsed_s))}) ====="


def exit_code(counts: Mapping[str, int]) -> int:
    if any(counts.get(outcome) for outcome in FAILED):
        return 1
    return 0 if counts.get("passed") else 5


def main(arguments: Sequence[str]) -> int:
    """Print what the files say together. The first argument is the seconds that the runs took."""
    elapsed_s, paths = float(arguments[0]), [Path(name) for name in arguments[1:]]
    results = [result for path in paths for result in read_results(path)]
    print(f"===== slowest {_N_SLOWEST} =====")
    for result in sorted(results, key=lambda result: -result.duration_s)[:_N_SLOWEST]:
        print(f"{result.duration_s:7.1f} s  {result.name}")
    for flaky in sorted({path.with_name(FLAKY) for path in paths}):
        if flaky.exists():
            print(flaky.read_text(encoding="utf-8"), end="")
    counts = count(results)
    print(closing_line(counts, elapsed_s))
    return exit_code(counts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
