"""Test what the demo makes of a log that kubectl ends too early."""

import os
from pathlib import Path

import pytest

from demo import watch as demo_watch
from demo.kubectl import Kubectl
from demo.watch import StepPrinted, Watch


def test_a_log_that_ends_before_its_pod_is_followed_again_without_repeating_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_watch, "_AGAIN_S", 0.05)
    monkeypatch.setattr(demo_watch, "_FOLLOW_AGAIN_S", 0.05)

    def lines(*steps: int) -> str:
        return "".join(f"2026-11-21T09:31:27.{n}Z step={n} epoch=0 loss=1.5 exact=0x1\\n" for n in steps)

    cut = "2026-11-21T09:31:27.3Z step=3 epoch=0 loss=1.5 exact=0"
    program = tmp_path / "kubectl"
    program.write_text(f"""#!/bin/sh
cd {tmp_path}
case "$*" in
*'get ctj'*) exec sleep 100;;
*'get pods'*) printf 'p n Running\\n'; exec sleep 100;;
*'get pod '*) [ -e second ] && echo Succeeded || echo Running;;
*logs*)
  [ -e second ] && printf '{lines(1, 2, 3)}' && exit
  [ -e first ] && touch second && printf '{lines(1, 2)}{cut}' && exit
  touch first; exit 1;;
esac
""")
    program.chmod(0o755)
    kubectl = Kubectl(environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    steps: list[StepPrinted] = []
    with Watch(kubectl, job="j", uri=(tmp_path / "root").as_uri()) as watch:
        while len(steps) < 3:
            event = watch.events.get(timeout=60)
            if isinstance(event, StepPrinted):
                steps.append(event)
    assert [(step.step, step.exact) for step in steps] == [(1, "0x1"), (2, "0x1"), (3, "0x1")]
