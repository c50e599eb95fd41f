"""The command on gs://, against an emulator as a process."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from stepcluster import binaries
from stepkeeper.cli.app import app
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.gcs import BUCKET, fake_gcs_server


@pytest.fixture(scope="module")
def gcs_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("fake-gcs-server")
    with fake_gcs_server(binaries.ensure()["fake-gcs-server"], folder) as address:
        yield address


def run(*arguments: str | int) -> Result:
    return CliRunner().invoke(app, ["--patience", "0", *map(str, arguments)])


def test_every_command(gcs_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_address)
    url = f"gs://{BUCKET}/runs/one"
    root = SmallRoot(url)
    root.begin()
    record = root.save(10, world_size=2)
    root.save(20)
    left = root.give_up(30)
    root.begin(1)
    root.save(40)

    listed = json.loads(run("ls", url, "--json").stdout)
    assert [(each["step"], each["state"]) for each in listed["commits"]] == [
        (40, "latest"),
        (20, "line"),
        (10, "line"),
    ]
    assert all(each["time_unix_s"] > 1_500_000_000 for each in listed["commits"])
    assert json.loads(run("show", url, 10, "--json").stdout)["world_size"] == 2
    assert run("path", url, 10).stdout == f"{url}/{record.folder}\n"
    assert run("verify", "--all", url).exit_code == 0
    result = run("export", url, str(tmp_path / "w.safetensors"), "--step", 10, "--leave-out-values")
    assert result.exit_code == 0, result.output
    assert load_file(tmp_path / "w.safetensors")["model.w"].tolist() == [
        [10 + r + c for c in range(8)] for r in range(2)
    ]
    assert json.loads(run("watch", url, "--count", 1, "--json").stdout)["step"] == 40

    result = run("doctor", url, "--throughput", 1, "--json")
    assert result.exit_code == 0, result.output
    verdicts = {each["check"]: each["verdict"] for each in json.loads(result.stdout)["findings"]}
    assert {"log", "put", "conditional-write", "delete", "lifecycle", "soft-delete", "throughput"} <= set(
        verdicts
    )

    assert f"collected {left}" in run("gc", url).stdout
    assert run("rm", url, 20, "--force", "--yes").exit_code == 0
    assert [each["step"] for each in json.loads(run("ls", "--all", url, "--json").stdout)["commits"]] == [
        40,
        10,
    ]

    path = f"{record.folder}/__1_0.distcp"
    data = root.store.read(path)
    root.change(path, data[:-1] + b"?")
    result = run("verify", url, 10)
    assert result.exit_code == 1
    assert f"BAD {path} block 0" in result.stdout
    root.store.close()


def test_a_bucket_that_is_not_there_is_code_3(gcs_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_address)
    for command in ("ls", "verify", "doctor", "gc"):
        result = run(command, "gs://no-such-bucket/runs")
        assert (result.exit_code, result.stdout) == (3, ""), command
        assert "there is no bucket 'no-such-bucket'" in result.stderr
        assert len(result.stderr.splitlines()) == 1
