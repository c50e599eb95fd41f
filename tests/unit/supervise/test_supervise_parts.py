"""The edges of a supervised run: the command, the root's lock, the endpoint, the lines on the terminal."""

import io
import sys
from pathlib import Path

import pytest

from stepkeeper.companion.reporter import ReportTarget, _EndpointError, _post_report
from stepkeeper.contract import Report, ReportPhase
from stepkeeper.supervise.attempt import build_command
from stepkeeper.supervise.endpoint import ReportEndpoint
from stepkeeper.supervise.terminal import RunTerminal


def test_a_script_is_run_by_this_python_and_by_torchrun_if_there_are_several_processes() -> None:
    assert build_command(["train.py", "--lr", "1"], 1) == [sys.executable, "train.py", "--lr", "1"]
    assert build_command(["sh", "-c", "true"], 1) == ["sh", "-c", "true"]
    assert build_command(["train.py", "x"], 4)[1:] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "train.py", "x",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"--nproc 2 needs a script, such as train.py, and not 'sh'"):
        build_command(["sh"], 2)


def post(
    endpoint: ReportEndpoint, folder: Path, token: str, attempt: int = 1, body: bytes | None = None
) -> int:
    (folder / "token").write_text(token)
    target = ReportTarget(url=endpoint.url_of(attempt), ca_file="", token_file=str(folder / "token"))
    data = Report(phase=ReportPhase.TRAINING, step=7).to_json() if body is None else body
    return _post_report(target, data).report_interval_s


def test_reports_arrive_with_the_number_of_their_attempt(tmp_path: Path) -> None:
    came: list[tuple[int, int | None]] = []
    with ReportEndpoint("secret", lambda number, report: came.append((number, report.step))) as endpoint:
        assert post(endpoint, tmp_path, "secret", attempt=3) == 1
        with pytest.raises(_EndpointError, match="answered 401"):
            post(endpoint, tmp_path, "guessed")
        with pytest.raises(_EndpointError, match="answered 400"):
            post(endpoint, tmp_path, "secret", body=b"no report")
        with pytest.raises(_EndpointError, match="answered 413"):
            post(endpoint, tmp_path, "secret", body=b" " * (1 << 17))
    assert came == [(3, 7)]


@pytest.mark.parametrize("url", ["http://10.0.0.1:80/1", "ftp://127.0.0.1/1", "http://localhost:80/1"])
def test_no_token_leaves_this_machine_in_plain_text(tmp_path: Path, url: str) -> None:
    target = ReportTarget(url=url, ca_file="", token_file=str(tmp_path / "token"))
    with pytest.raises(_EndpointError, match="is not https"):
        _post_report(target, b"{}")


def test_events_have_one_line_each() -> None:
    stream = io.StringIO()
    terminal = RunTerminal(label="a: ", stream=stream)
    terminal.print_line("begins")
    terminal.print_line("done")
    assert stream.getvalue() == "stepkeeper: a: begins\nstepkeeper: a: done\n"
