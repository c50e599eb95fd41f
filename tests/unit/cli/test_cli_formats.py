"""export and import: what they write, that it is whole or not there, and what they say where it can't be."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planners_parts.pickles import Reduced
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from typer.testing import Result

from stepkeeper.checkpoint.files import CommitFiles
from stepkeeper.log import CommitRecord
from stepkeeper_testing.checkpoints import SmallRoot

Run = Callable[..., Result]


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.fixture
def root(url: str) -> SmallRoot:
    """Steps 10 and 25 on the line, 20 on an abandoned branch; each by two ranks, with its number as the value."""
    root = SmallRoot(url)
    root.begin()
    base = root.save(10, world_size=2, value=saved(10))
    root.save(20, world_size=2, value=saved(20))
    root.begin(1, base.slot)
    root.save(25, world_size=2, value=saved(25))
    return root


def rows(step: int) -> torch.Tensor:
    return torch.stack([torch.arange(8.0) + step + rank for rank in range(2)])


@pytest.mark.parametrize(
    ("options", "step"), [([], 25), (["--step", 10], 10), (["--sequence", 2], 20), (["--json"], 25)]
)
def test_a_commit_becomes_a_torch_save_file(
    options: list[str | int], step: int, run: Run, root: SmallRoot, tmp_path: Path
) -> None:
    before = root.contents()
    result = run("export", root.url, tmp_path / "out.pt", *options)
    assert (result.exit_code, result.stderr) == (0, "")
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(state["model.w"], rows(step))
    assert state["step"] == step
    assert root.contents() == before
    if "--json" not in options:
        assert result.stdout.startswith(f"exported step {step} (sequence ")
        return
    found = json.loads(result.stdout)
    assert found["uri"] == root.store.uri.rstrip("/")
    figures = ("format", "step", "n_tensors", "tensor_bytes", "left_out")
    assert [found[key] for key in figures] == [1, 25, 1, 64, []]
    assert found["files"] == [found["path"]] == [str(tmp_path / "out.pt")]


def test_a_commit_becomes_safetensors(run: Run, root: SmallRoot, tmp_path: Path) -> None:
    file, folder = tmp_path / "out.safetensors", tmp_path / "out"
    result = run("export", root.url, file)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "1 values of" in result.stderr
    assert "aren't tensors: step. Pass --leave-out-values" in result.stderr
    assert run("export", root.url, file, "--leave-out-values").stdout.endswith(f"to {file}; left out 1\n")
    assert torch.equal(load_file(file)["model.w"], rows(25))
    result = run(
        "export", root.url, folder, "--as", "safetensors", "--prefix", "model", "--step", 10, "--max-shard", 1
    )
    assert result.exit_code == 0, result.stderr
    assert torch.equal(load_file(folder / "model.safetensors")["w"], rows(10))


def test_what_is_there_is_replaced_on_request_only(run: Run, root: SmallRoot, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    out.write_text("a year of work")
    result = run("export", root.url, out)
    assert (result.exit_code, out.read_text()) == (4, "a year of work")
    assert f"{out} exists; delete it, or pass --overwrite" in result.stderr
    assert run("export", root.url, out, "--overwrite").exit_code == 0
    assert torch.load(out)["step"] == 25


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_torn_commit_is_not_exported(damage: str, run: Run, root: SmallRoot, tmp_path: Path) -> None:
    record = root.log.open().latest
    assert record is not None
    for name in ("__1_0.distcp", ".metadata", "manifest.1.json"):
        path = f"{record.folder}/{name}"
        good = root.store.read(path)
        half = len(good) // 2
        flipped = good[:half] + bytes([good[half] ^ 1]) + good[half + 1 :]
        root.change(path, {"flipped": flipped, "cut": good[:-1], "gone": None}[damage])
        result = run("export", root.url, tmp_path / "out.pt")
        assert (result.exit_code, result.stdout) == (1, ""), name
        assert path in result.stderr, name
        assert len(result.stderr.splitlines()) == 1
        assert not (tmp_path / "out.pt").exists()
        root.change(path, good)
    assert not [path for path in tmp_path.iterdir() if path.name != "a root"]


def test_what_was_deleted_while_it_was_exported_is_not_torn(
    run: Run, root: SmallRoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = CommitFiles.__init__

    def overtaken(self: CommitFiles, store: Any, commit: CommitRecord, **options: Any) -> None:
        made(self, store, commit, **options)
        root.log.delete(root.claim, lambda state: [commit.slot])
        for stat in store.list(commit.folder):
            store.delete(stat.path)

    monkeypatch.setattr(CommitFiles, "__init__", overtaken)
    result = run("export", root.url, tmp_path / "out.pt", "--step", 10)
    assert (result.exit_code, result.stderr) == (
        1,
        "stepkeeper: step 10 (sequence 1) has just been deleted\n",
    )


def test_a_root_is_left_to_its_job(run: Run, tmp_path: Path) -> None:
    root = SmallRoot((tmp_path / "run").as_uri())
    root.begin()
    root.save(10, value=saved(10))
    before = root.contents()
    for place in ("run/x.pt", "run/10/x.pt", "elsewhere/../run/.metadata"):
        result = run("export", root.url, tmp_path / place, "--overwrite")
        assert result.exit_code == 4
        assert "is in the root itself" in result.stderr
    assert root.contents() == before


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("export {root} {tmp}/x.pt --prefix model", 2, "are for safetensors"),
        ("export {root} {tmp}/x.safetensors --max-shard 5", 2, "names one"),
        ("export {root} {tmp}/x.pt --step 1 --sequence 1", 2, "not both"),
        ("export {root} {tmp}/x.pt --as onnx", 2, "onnx"),
        ("export {tmp} {tmp}/x.pt --step 1", 1, "no commit of step 1"),
        ("export {tmp} {tmp}/x.pt", 1, "nothing is committed here"),
        ("export gcs://bucket {tmp}/x.pt", 2, "gs://"),
        ("export {root} {tmp}/x.pt --step 99", 1, "no commit of step 99"),
        ("export {root} {tmp}/no/folder/x.pt", 1, "No such file or directory"),
        ("export {root} {tmp}", 4, "is a folder"),
        ("import {tmp}/nothing.pt {tmp}/c", 1, "nothing.pt"),
        ("import {tmp}/nothing.safetensors {tmp}/c", 1, "nothing.safetensors"),
        ("import {tmp}/text.pt {tmp}/c", 1, "text.pt isn't a torch.save file"),
        ("import {tmp}/text.pt {tmp}/c --as safetensors", 1, "text.pt isn't a safetensors file"),
        ("import {tmp}/text.pt {tmp}/c --prefix model", 2, "--prefix is for safetensors"),
        ("import {tmp}/text.pt", 2, "FOLDER"),
    ],
)
def test_exit_codes(arguments: str, code: int, says: str, run: Run, tmp_path: Path) -> None:
    root = SmallRoot((tmp_path / "a" / "root").as_uri())
    root.begin()
    root.save(10, value=saved(10))
    (tmp_path / "text.pt").write_text("only text")
    before = sorted(tmp_path.rglob("*"))
    result = run(*arguments.format(root=root.url, tmp=tmp_path).split())
    assert (result.exit_code, result.stdout) == (code, ""), result.stderr
    assert says in " ".join(result.stderr.replace("│", "").split())
    assert "Traceback" not in result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_files_become_checkpoints_and_checkpoints_files(run: Run, tmp_path: Path) -> None:
    weights = {"a.w": torch.arange(5.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    torch.save(weights, tmp_path / "in.pt")
    save_file(weights, tmp_path / "in.safetensors")
    assert run("import", tmp_path / "in.pt", tmp_path / "one").stderr == ""
    result = run("import", tmp_path / "in.safetensors", tmp_path / "two", "--prefix", "model", "--json")
    assert json.loads(result.stdout)["n_tensors"] == 2
    state = {"model.a.w": torch.zeros(5), "model.b": torch.zeros(2, dtype=torch.bfloat16)}
    load(state, storage_reader=FileSystemReader(tmp_path / "two"), no_dist=True)
    assert torch.equal(state["model.a.w"], weights["a.w"])
    assert run("import", tmp_path / "in.pt", tmp_path / "one").exit_code == 4
    assert run("import", tmp_path / "in.pt", tmp_path / "one", "--overwrite").exit_code == 0
    for name in ("one", "two"):
        assert run("export", tmp_path / name, tmp_path / f"{name}.pt").exit_code == 0
    assert torch.equal(torch.load(tmp_path / "one.pt")["b"], weights["b"])
    assert torch.equal(torch.load(tmp_path / "two.pt")["model"]["a.w"], weights["a.w"])


@pytest.mark.parametrize("content", ["a call", "a name"])
def test_a_file_runs_nothing_and_its_names_do_nothing_to_the_terminal(
    run: Run, tmp_path: Path, content: str
) -> None:
    hook = {"w": torch.ones(2), "hook": Reduced(Path.touch, (tmp_path / "touched",))}
    torch.save(hook if content == "a call" else {"\x1b[2J\ud800": {1, 2}}, tmp_path / "in.pt")
    result = run("import", tmp_path / "in.pt", tmp_path / "c")
    assert result.exit_code == 1
    assert ("at hook" if content == "a call" else r"\x1b[2J\ud800") in result.stderr
    assert "\x1b" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]
