"""Kueue's controller, as a process beside the control plane. Only the tests that need it build and start it."""

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from stepcluster import binaries, certificates
from stepcluster.layout import KUEUE_HEALTH_PORT, KUEUE_WEBHOOK_PORT, Layout
from stepcluster.machine import wait_until
from stepcluster.parts import Parts

__all__ = ["list_webhooks", "start_kueue"]

_SOURCE: Final = Path(__file__).parents[1] / "kueue"
_PACKAGES: Final = ("sigs.k8s.io/kueue/cmd/kueue",)
_FLAGS: Final = ("-trimpath", "-ldflags=-s -w")
_GROUPS: Final = {"kueue.x-k8s.io", "jobset.x-k8s.io"}
_READY_TIMEOUT_S: Final = 200.0
_METRICS_CERTIFICATE: Final = "kueue/metrics/certs"
"""The folder below /etc where Kueue wants one, also if it serves no metrics."""

_WITH_OWN_ETC: Final = ("unshare", "--mount", "--propagation", "private", "sh", "-c")
_BIND_ETC: Final = 'mount --bind "$0" /etc && exec "$@"'


def start_kueue(parts: Parts) -> None:
    """Build Kueue unless that is done, start it, and wait until its webhooks answer."""
    folder = binaries.fill_cache(binaries.content_key(_SOURCE, _FLAGS, _PACKAGES), _build_into)
    layout = parts.layout
    authority = certificates.load_authority(layout.certificates)
    authority.issue("kueue-webhook", "kueue-webhook", hosts=[str(layout.address)])
    authority.issue("kueue", "kueue-controller", organisation=certificates.MASTERS)
    kubeconfig = layout.certificates / "kueue.kubeconfig"
    kubeconfig.write_text(
        certificates.write_kubeconfig(layout, layout.certificates, "kueue"), encoding="utf-8"
    )
    crds = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("crds/*.yaml"))]
    parts.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kueue-system"}}, *crds])
    for crd in crds:
        parts.wait_established(crd["metadata"]["name"])
    arguments = [f"--config={_write_config(layout)}", f"--kubeconfig={kubeconfig}"]
    argv = [str(folder / "kueue"), *arguments, "--feature-gates=VisibilityOnDemand=false"]
    parts.launcher.start("kueue", [*_WITH_OWN_ETC, _BIND_ETC, str(_write_etc(layout)), *argv])
    log = layout.logs / "kueue.log"
    wait_until(lambda: _is_listening(log), "Kueue", timeout_s=_READY_TIMEOUT_S, log=log)
    parts.apply(list_webhooks(folder, layout))


def _build_into(folder: Path) -> None:
    binaries.build_module(_SOURCE, _PACKAGES, _FLAGS, folder)
    config = binaries.find_module(_SOURCE, "sigs.k8s.io/kueue") / "config" / "components"
    shutil.copytree(config / "crd" / "bases", folder / "crds", copy_function=shutil.copyfile)
    (folder / "crds").chmod(0o755)
    shutil.copyfile(config / "webhook" / "manifests.yaml", folder / "webhooks.yaml")


def _write_etc(layout: Layout) -> Path:
    """Write what Kueue finds as its /etc."""
    etc = layout.folder / "kueue-etc"
    _copy_certificate(layout, etc / _METRICS_CERTIFICATE)
    return etc


def _copy_certificate(layout: Layout, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("crt", "key"):
        (folder / f"tls.{name}").write_bytes((layout.certificates / f"kueue-webhook.{name}").read_bytes())


def _write_config(layout: Layout) -> Path:
    folder = layout.certificates / "kueue-webhook"
    _copy_certificate(layout, folder)
    config = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": "kueue-system",
        "leaderElection": {"leaderElect": False},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{KUEUE_HEALTH_PORT}"},
        "webhook": {"host": str(layout.address), "port": KUEUE_WEBHOOK_PORT, "certDir": str(folder)},
        "internalCertManagement": {"enable": False},
        "integrations": {"frameworks": ["jobset.x-k8s.io/jobset"]},
    }
    path = layout.folder / "kueue.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def list_webhooks(folder: Path, layout: Layout) -> Iterator[dict[str, Any]]:
    """Read the webhooks of JobSets and of Kueue's own kinds, and let them point at our process."""
    authority = base64.b64encode((layout.certificates / "ca.crt").read_bytes()).decode()
    for document in yaml.safe_load_all((folder / "webhooks.yaml").read_text(encoding="utf-8")):
        document["metadata"]["name"] = f"kueue-{document['metadata']['name']}"
        document["webhooks"] = [
            webhook
            for webhook in document["webhooks"]
            if all(set(rule["apiGroups"]) <= _GROUPS for rule in webhook["rules"])
        ]
        for webhook in document["webhooks"]:
            path = webhook["clientConfig"]["service"]["path"]
            url = f"https://{layout.address}:{KUEUE_WEBHOOK_PORT}{path}"
            webhook["clientConfig"] = {"url": url, "caBundle": authority}
        yield document


def _is_listening(log: Path) -> bool:
    return log.is_file() and "Serving webhook server" in log.read_text(encoding="utf-8", errors="replace")
