"""Test what the demo makes of what kubectl prints: also where a watch breaks, and where a log ends too early."""

import os
from pathlib import Path

import pytest

from demo import watch as demo_watch
from demo.kubectl import Kubectl
from demo.watch import Event, PodStarted, StepPrinted, Watch

STANDS_STILL = "exec sleep 100"


@pytest.fixture(autouse=True)
def looks_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_watch, "_AGAIN_S", 0.05)
    monkeypatch.setattr(demo_watch, "_FOLLOW_AGAIN_S", 0.05)


def fake_kubectl(folder: Path, **answers: str) -> Kubectl:
    """Return a kubectl that runs a few lines of shell for each verb; "watch" is `get` with --watch of the pods."""
    cases = [
        f"*'get ctj'*) {answers.get('ctj', STANDS_STILL)};;",
        f"*'get pods'*) {answers.get('pods', STANDS_STILL)};;",
        f"*'get pod '*) {answers.get('pod', 'true')};;",
        f"*logs*) {answers.get('logs', 'true')};;",
    ]
    program = folder / "kubectl"
    program.write_text("\n".join(["#!/bin/sh", f"cd {folder}", 'case "$*" in', *cases, "esac"]))
    program.chmod(0o755)
    return Kubectl(environment={"PATH": f"{folder}:{os.environ['PATH']}"})


def see(kubectl: Kubectl, folder: Path, n_events: int) -> list[Event]:
    """Watch until so many events of pods have come."""
    seen: list[Event] = []
    with Watch(kubectl, job="j", uri=(folder / "root").as_uri()) as watch:
        while len(seen) < n_events:
            event = watch.events.get(timeout=60)
            if isinstance(event, PodStarted | StepPrinted):
                seen.append(event)
    return seen


def test_a_log_that_ends_before_its_pod_is_followed_again_without_repeating_a_step(tmp_path: Path) -> None:
    def line(step: int) -> str:
        return f"2026-11-21T09:31:27.{step}Z step={step} epoch=0 loss=1.5 exact=0x1\\n"

    cut = "2026-11-21T09:31:27.3Z step=3 epoch=0 loss=1.5 exact=0"
    kubectl = fake_kubectl(
        tmp_path,
        pods=f"printf 'p n Running\\n'; {STANDS_STILL}",
        pod="[ -e second ] && echo Succeeded || echo Running",
        logs=(
            f"[ -e second ] && printf '{line(1)}{line(2)}{line(3)}' && exit;"
            f"[ -e first ] && touch second && printf '{line(1)}{line(2)}{cut}' && exit; touch first; exit 1"
        ),
    )
    _, *steps = see(kubectl, tmp_path, 4)
    assert [(step.step, step.exact) for step in steps if isinstance(step, StepPrinted)] == [
        (1, "0x1"),
        (2, "0x1"),
        (3, "0x1"),
    ]
