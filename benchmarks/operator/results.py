"""Join what the companions sent with what the watch has shown."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """Read the lines of a file that may still be written."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def find_latencies(sent: Sequence[Line], seen: Sequence[Line], begin: float, end: float) -> dict[str, Any]:
    """Find how long after the first POST with it the API server showed each commit, and each step that it showed."""
    posts = [line for line in sent if line["kind"] == "report" and begin <= line["at"] < end]
    shown = _by_job(seen)
    commits, lost = list[float](), 0
    first = {
        (line["job"], line["sequence"]): line["at"] for line in reversed(sent) if line["kind"] == "report"
    }
    for line in sent:
        if line["kind"] != "commit":
            continue
        posted = first.get((line["job"], line["sequence"]))
        if posted is None or not begin <= posted < end:
            continue
        times = [each["at"] for each in shown[line["job"]] if each["sequence"] >= line["sequence"]]
        commits.append(min(times) - posted if times else math.inf)
        lost += not times
    posted_steps = {(line["job"], line["step"]): line["at"] for line in reversed(posts)}
    steps = []
    for job, lines in shown.items():
        known = None
        for each in lines:
            if each["step"] != known and (job, each["step"]) in posted_steps:
                steps.append(each["at"] - posted_steps[job, each["step"]])
            known = each["step"]
    answers = [line["took_s"] for line in sent if line["kind"] == "answer" and begin <= line["at"] < end]
    failures = sum(line["kind"] == "failure" and begin <= line["at"] < end for line in sent)
    return {
        "reports_per_s": round(len(posts) / (end - begin), 1),
        "reports_failed": failures,
        "commits": len(commits),
        "commits_not_shown": lost,
        **_quantiles("commit", commits),
        **_quantiles("step", steps),
        **_quantiles("answer", answers),
    }


def find_cold_start_s(sent: Sequence[Line], seen: Sequence[Line], down: float, up: float) -> dict[str, Any]:
    """Find how long after its start the operator answered first, and showed all commits that it had not seen.

    `all_right_s` is there only once all are shown.
    """
    answers = [line["at"] - up for line in sent if line["kind"] == "answer" and line["at"] > up]
    missed = {
        line["job"]: line["sequence"] for line in sent if line["kind"] == "commit" and down <= line["at"] < up
    }
    first = {
        job: min(
            (e["at"] - up for e in lines if e["at"] > up and e["sequence"] >= missed[job]), default=math.inf
        )
        for job, lines in _by_job(seen).items()
        if job in missed
    }
    found: dict[str, Any] = {"missed": len(missed)}
    if answers:
        found["first_answer_s"] = round(min(answers), 1)
    if len(first) == len(missed) and all(math.isfinite(each) for each in first.values()):
        found["all_right_s"] = round(max(first.values(), default=0.0), 1)
    return found


def _by_job(seen: Iterable[Line]) -> dict[str, list[Line]]:
    found: defaultdict[str, list[Line]] = defaultdict(list)
    for line in seen:
        found[line["job"]].append(line)
    return found


def _quantiles(name: str, values: list[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    chosen = {
        key: ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None
        for key, share in shares.items()
    }
    shown = {
        key: None if value is None or math.isinf(value) else round(value, 3) for key, value in chosen.items()
    }
    return {f"{name}_{key}_s": value for key, value in shown.items()}
