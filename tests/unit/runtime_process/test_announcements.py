"""Test what a process does about what the cloud announces for its machine."""

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from stepkeeper.contract import Cause
from stepkeeper.training.notices.announcements import Announcements, save_lead_s
from stepkeeper.training.notices.cloud_notices import CloudNotice, CloudNotices, read_cloud_notice
from stepkeeper.training.notices.metadata_server import MetadataValue, find_metadata_host

NOW_S = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
PREEMPTED = CloudNotice(cause=Cause.SPOT_PREEMPTION, begins_unix_s=None)
MAINTENANCE = CloudNotice(cause=Cause.MAINTENANCE, begins_unix_s=None)


def maintenance_in(left_s: float) -> CloudNotice:
    return CloudNotice(cause=Cause.MAINTENANCE, begins_unix_s=NOW_S + left_s)


@pytest.mark.parametrize(
    ("key", "text", "notice"),
    [
        ("preempted", "TRUE", PREEMPTED),
        ("maintenance-event", "NONE", None),
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", MAINTENANCE),
        ("upcoming-maintenance", "{}", None),
        ("upcoming-maintenance", "no maintenance", None),
        ("upcoming-maintenance", '{"window_start_time": "soon"}', None),
        ("upcoming-maintenance", "[" * 60_000, None),
        ("upcoming-maintenance", '{"window_start_time": "0001-01-01T00:00:00"}', None),
        ("upcoming-maintenance", '{"window_start_time": "2026-01-01T00:01:00Z"}', maintenance_in(60)),
        ("upcoming-maintenance", '{"windowStartTime": "2026-01-01T01:01:00+01:00"}', maintenance_in(60)),
    ],
)
def test_what_the_metadata_server_says_is_read(key: str, text: str, notice: CloudNotice | None) -> None:
    assert read_cloud_notice(key, text) == notice


class Training:
    """Note what announcements ask of it."""

    def __init__(self, save_s: float | None = None) -> None:
        self.asked: list[str] = []
        self.now_s = NOW_S
        self.announcements = Announcements(
            stop=lambda source: self.asked.append(f"stop/{source}"),
            save=self.asked.append,
            save_s=lambda: save_s,
            now_unix_s=lambda: self.now_s,
        )


def test_a_preemption_stops_and_is_the_cause() -> None:
    training = Training()
    assert training.announcements.cause is None
    training.announcements.take_over("upcoming-maintenance", maintenance_in(10))
    training.announcements.take_over("preempted", PREEMPTED)
    assert training.asked[-1] == "stop/preempted"
    assert training.announcements.cause is Cause.SPOT_PREEMPTION


@pytest.mark.parametrize(("save_s", "lead_s"), [(None, 300), (1.0, 60), (30.0, 90)])
def test_a_maintenance_far_ahead_is_saved_for_shortly_before_it_and_once(
    save_s: float | None, lead_s: int
) -> None:
    training = Training(save_s)
    training.announcements.take_over("upcoming-maintenance", maintenance_in(3600))
    training.now_s = NOW_S + 3600 - lead_s - 1
    training.announcements.check()
    assert training.asked == []
    training.now_s += 1
    for _ in range(3):
        training.announcements.check()
    assert training.asked == [f"maintenance/{int(NOW_S) + 3600}"]
    assert save_lead_s(save_s) == lead_s


def test_a_maintenance_explains_an_end_only_when_it_is_near() -> None:
    training = Training()
    training.announcements.take_over("upcoming-maintenance", maintenance_in(3600))
    assert training.announcements.cause is None
    training.now_s += 3500
    assert training.announcements.cause is Cause.MAINTENANCE
    training.now_s += 100 + 3600
    assert training.announcements.cause is Cause.MAINTENANCE
    # Nobody has withdrawn it: a server without anything to announce may answer with an error.
    training.now_s += 1
    assert training.announcements.cause is None
    training.now_s -= 1
    training.announcements.take_over("upcoming-maintenance", None)
    assert training.announcements.cause is None


def test_a_maintenance_without_a_date_is_saved_for_once_however_long_it_stays() -> None:
    training = Training()
    training.announcements.take_over("maintenance-event", MAINTENANCE)
    for _ in range(10):
        training.now_s += 600
        training.announcements.check()
    assert len(training.asked) == 1


def test_only_machines_of_google_cloud_have_a_metadata_server(tmp_path: Path) -> None:
    product = tmp_path / "product_name"
    assert find_metadata_host({}, product) is None
    product.write_text("Standard PC (Q35 + ICH9, 2009)\n")
    assert find_metadata_host({}, product) is None
    product.write_text("Google Compute Engine\n")
    assert find_metadata_host({}, product) == "169.254.169.254"
    assert find_metadata_host({"GCE_METADATA_HOST": "localhost:8080"}, product) == "localhost:8080"


class Scripted:
    """A metadata server whose answers are known; then it waits for ever."""

    def __init__(self, *answers: MetadataValue | OSError) -> None:
        self.answers: Iterator[MetadataValue | OSError] = iter(answers)
        self.asked: list[str | None] = []
        self.exhausted = threading.Event()

    def wait_for_change(self, key: str, etag: str | None, timeout_s: float) -> MetadataValue:
        if key == "maintenance-event":
            self.asked.append(etag)
            for answer in self.answers:
                if isinstance(answer, OSError):
                    raise answer
                return answer
            self.exhausted.set()
        threading.Event().wait(timeout_s)
        raise OSError


class Heard:
    def __init__(self) -> None:
        self.changes: list[tuple[str, CloudNotice | None]] = []
        self.fails = False

    def take_over(self, key: str, notice: CloudNotice | None) -> None:
        self.changes.append((key, notice))
        if self.fails:
            raise ValueError("once")


def test_a_watch_survives_errors_and_hands_on_each_change_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepkeeper.training.notices.cloud_notices._PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr("stepkeeper.training.notices.cloud_notices._ABSENT_S", 0.0)
    server = Scripted(
        OSError("503"),
        OSError("no route"),
        OSError("timed out"),
        MetadataValue("NONE", "a"),
        MetadataValue("NONE", "a"),
        MetadataValue("TERMINATE_ON_HOST_MAINTENANCE", "b"),
        OSError("503"),
        MetadataValue("TERMINATE_ON_HOST_MAINTENANCE", "c"),
        MetadataValue("NONE", "d"),
        MetadataValue("TERMINATE_ON_HOST_MAINTENANCE", "e"),
        MetadataValue(None, ""),
    )
    heard = Heard()
    heard.fails = True
    notices = CloudNotices(server, heard.take_over)
    notices.start()
    assert server.exhausted.wait(30)
    assert heard.changes == [("maintenance-event", MAINTENANCE), ("maintenance-event", None)] * 2
    assert server.asked[:5] == [None, None, None, None, "a"]
    notices.close()
