"""Keys of builds: the same content is never built twice, other content always is."""

from pathlib import Path

import pytest
import yaml

from stepcluster import binaries, kueue, packages, toolchain
from stepcluster.errors import BuildError, UnsupportedMachineError
from stepcluster.layout import Layout
from stepcluster.machine import require_root


def source(folder: Path, go_mod: str = "module m\n") -> Path:
    (folder / "kube").mkdir(parents=True)
    (folder / "go.mod").write_text(go_mod)
    (folder / "kube" / "main.go").write_text("package main\n")
    return folder


def test_the_key_is_of_the_content_alone(tmp_path: Path) -> None:
    one, other = source(tmp_path / "one"), source(tmp_path / "other")
    assert binaries.content_key(one, ["-trimpath"]) == binaries.content_key(other, ["-trimpath"])


def test_the_key_changes_with_files_their_names_flags_and_packages(tmp_path: Path) -> None:
    one = source(tmp_path / "one")
    keys = {
        binaries.content_key(one, []),
        binaries.content_key(one, ["-race"]),
        binaries.content_key(one, [], ["./x"]),
    }
    (one / "kube" / "main.go").rename(one / "kube" / "other.go")
    keys.add(binaries.content_key(one, []))
    (one / "go.mod").write_text("module n\n")
    keys.add(binaries.content_key(one, []))
    assert len(keys) == 5


def test_the_version_in_the_binaries_is_the_pinned_one() -> None:
    flags = binaries.build_flags("require (\n\tk8s.io/kubernetes v1.36.3\n)\n")
    assert "-X k8s.io/component-base/version.gitVersion=v1.36.3" in flags[1]
    assert "gitMinor=36" in flags[1]
    with pytest.raises(BuildError, match="pins no"):
        binaries.build_flags("module m\n")


def test_the_go_that_is_needed_is_read_from_go_mod() -> None:
    assert toolchain.needed_version((binaries.SOURCE / "go.mod").read_text(encoding="utf-8")) == (1, 26)


def test_only_what_is_missing_is_installed() -> None:
    there = {
        "containerd",
        "containerd-shim-runc-v2",
        "ctr",
        "ip",
        "mount",
        "nsenter",
        "unshare",
        "dbus-daemon",
        "curl",
        "jq",
    }
    missing = packages.missing_packages(
        which=lambda program: f"/bin/{program}" if program in there else None, exists=lambda _: False
    )
    assert missing == ("busybox-static", "containernetworking-plugins", "nftables", "runc")
    assert packages.missing_packages(which=lambda program: program, exists=lambda _: True) == ()


def test_without_root_the_message_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UnsupportedMachineError, match=r"needs root.*sudo.*KUBECONFIG"):
        require_root()


def test_kueue_gets_the_webhooks_of_jobsets_and_of_its_own_kinds_only(tmp_path: Path) -> None:
    def webhook(name: str, *groups: str) -> dict[str, object]:
        service = {"path": f"/{name}", "name": "webhook-service"}
        return {
            "name": name,
            "clientConfig": {"service": service},
            "rules": [{"apiGroups": [group]} for group in groups],
        }

    given = [webhook("pods", ""), webhook("jobsets", "jobset.x-k8s.io"), webhook("own", "kueue.x-k8s.io")]
    body = {"metadata": {"name": "mutating-webhook-configuration"}, "webhooks": given}
    (tmp_path / "webhooks.yaml").write_text(yaml.safe_dump(body))
    layout = Layout(name="t", block=1, folder=tmp_path)
    layout.certificates.mkdir(parents=True)
    (layout.certificates / "ca.crt").write_text("CA")
    (made,) = kueue.list_webhooks(tmp_path, layout)
    assert [each["name"] for each in made["webhooks"]] == ["jobsets", "own"]
    assert made["webhooks"][0]["clientConfig"]["url"] == f"https://{layout.address}:9444/jobsets"
