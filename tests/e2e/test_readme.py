"""Test that what the README shows can be used as it stands."""

import re
from pathlib import Path

import pytest
from page_blocks import read_blocks

from stepcluster.api import Cluster

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = (each.text for each in read_blocks("README.md") if each.language == language)
    return found


@pytest.mark.cluster
def test_the_api_server_takes_the_manifest(cluster: Cluster) -> None:
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", ROOT / "crds")
    assert "created" in cluster.kubectl("apply", "--dry-run=server", "-f", "-", stdin=block("yaml"))


def test_the_script_calls_what_there_is() -> None:
    import stepkeeper

    script = block("python")
    compile(script, "README.md", "exec")
    for name in re.findall(r"manager\.(\w+)", script):
        assert hasattr(stepkeeper.CheckpointManager, name)


def test_every_file_that_it_names_is_there() -> None:
    links = re.findall(r"\]\((?!https:)([^)]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_make_target_that_it_names_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"`?make ([a-z-]+)", README)
    assert targets
    assert [target for target in targets if f"\n{target}:" not in makefile] == []
