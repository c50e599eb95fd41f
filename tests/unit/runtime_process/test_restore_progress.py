"""Test what a restore that takes long logs while it goes on."""

import logging

import pytest

from stepkeeper.restore.progress import RestoreProgress

GIB = 1024**3


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "stepkeeper")
    return caplog


def test_a_line_comes_every_five_seconds(said: pytest.LogCaptureFixture) -> None:
    now_s = 100.0
    progress = RestoreProgress("step 7", 10 * GIB, clock=lambda: now_s)
    for _ in range(64):
        now_s += 0.25
        progress.note_bytes(int((now_s - 100) * GIB / 2))
    assert said.messages == [
        "restoring step 7: 2.5 GiB of 10.0 GiB after 5 s, 512.0 MiB/s",
        "restoring step 7: 5.0 GiB of 10.0 GiB after 10 s, 512.0 MiB/s",
        "restoring step 7: 7.5 GiB of 10.0 GiB after 15 s, 512.0 MiB/s",
    ]
