"""Run controllers beside the control plane, with their webhooks by URL: JobSet's, and Kueue's where it is needed."""

import base64
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from stepcluster import binaries, certificates
from stepcluster.binaries import Binaries
from stepcluster.layout import (
    JOBSET_HEALTH_PORT,
    JOBSET_WEBHOOK_PORT,
    KUEUE_HEALTH_PORT,
    KUEUE_WEBHOOK_PORT,
    Layout,
)
from stepcluster.machine import wait_until
from stepcluster.parts import Parts
from stepcluster.processes import Launcher

JOBSET_CRD: Final = "jobsets.jobset.x-k8s.io"
_POD_WEBHOOKS: Final = {"mpod.kb.io", "vpod.kb.io"}
_SOURCE: Final = Path(__file__).parents[1] / "kueue"
_PACKAGES: Final = ("sigs.k8s.io/kueue/cmd/kueue",)
_FLAGS: Final = ("-trimpath", "-ldflags=-s -w")
_GROUPS: Final = {"kueue.x-k8s.io", "jobset.x-k8s.io"}
_READY_TIMEOUT_S: Final = 200.0
_METRICS_CERTIFICATE: Final = "kueue/metrics/certs"
"""The folder below /etc where Kueue wants one, also if it serves no metrics."""

_WITH_OWN_ETC: Final = ("unshare", "--mount", "--propagation", "private", "sh", "-c")
_BIND_ETC: Final = 'mount --bind "$0" /etc && exec "$@"'


def list_jobset_manifests(programs: Binaries, layout: Layout) -> list[Mapping[str, object]]:
    """Return the CRD and the webhook configurations of the pinned version. The webhooks point at our process."""
    crd = yaml.safe_load(programs.jobset_crd.read_text(encoding="utf-8"))
    webhooks = [*_list_webhooks(programs.jobset_webhooks, layout, "jobset", JOBSET_WEBHOOK_PORT)]
    for webhook in (each for document in webhooks for each in document["webhooks"]):
        if webhook["name"] in _POD_WEBHOOKS:
            # JobSet's own installation has this too: other pods must not depend on its webhook.
            selector = [{"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}]
            webhook["objectSelector"] = {"matchExpressions": selector}
    return [crd, *webhooks]


def start_jobset(launcher: Launcher, programs: Binaries, layout: Layout) -> None:
    config = _write_config(layout, "jobset", "v1alpha1", (JOBSET_WEBHOOK_PORT, JOBSET_HEALTH_PORT))
    kubeconfig = layout.certificates / "jobset.kubeconfig"
    launcher.start("jobset", [programs["jobset"], f"--config={config}", f"--kubeconfig={kubeconfig}"])


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
    integrations = {"frameworks": ["jobset.x-k8s.io/jobset"]}
    config = _write_config(
        layout,
        "kueue",
        "v1beta2",
        (KUEUE_WEBHOOK_PORT, KUEUE_HEALTH_PORT),
        namespace="kueue-system",
        integrations=integrations,
    )
    _copy_certificate(layout, "kueue", layout.folder / "kueue-etc" / _METRICS_CERTIFICATE)
    arguments = [f"--config={config}", f"--kubeconfig={kubeconfig}"]
    argv = [str(folder / "kueue"), *arguments, "--feature-gates=VisibilityOnDemand=false"]
    parts.launcher.start("kueue", [*_WITH_OWN_ETC, _BIND_ETC, str(layout.folder / "kueue-etc"), *argv])
    log = layout.logs / "kueue.log"
    wait_until(lambda: _is_listening(log), "Kueue", timeout_s=_READY_TIMEOUT_S, log=log)
    parts.apply(_list_kueue_webhooks(folder, layout))


def _build_into(folder: Path) -> None:
    binaries.build_module(_SOURCE, _PACKAGES, _FLAGS, folder)
    config = binaries.find_module(_SOURCE, "sigs.k8s.io/kueue") / "config" / "components"
    shutil.copytree(config / "crd" / "bases", folder / "crds", copy_function=shutil.copyfile)
    (folder / "crds").chmod(0o755)
    shutil.copyfile(config / "webhook" / "manifests.yaml", folder / "webhooks.yaml")


def _list_kueue_webhooks(folder: Path, layout: Layout) -> Iterator[dict[str, Any]]:
    """Read the webhooks of JobSets and of Kueue's own kinds, and let them point at our process."""
    for document in _list_webhooks(folder / "webhooks.yaml", layout, "kueue", KUEUE_WEBHOOK_PORT):
        document["webhooks"] = [
            webhook
            for webhook in document["webhooks"]
            if all(set(rule["apiGroups"]) <= _GROUPS for rule in webhook["rules"])
        ]
        yield document


def _list_webhooks(path: Path, layout: Layout, name: str, port: int) -> Iterable[dict[str, Any]]:
    authority = base64.b64encode((layout.certificates / "ca.crt").read_bytes()).decode()
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        document["metadata"]["name"] = f"{name}-{document['metadata']['name']}"
        for webhook in document["webhooks"]:
            url = f"https://{layout.address}:{port}{webhook['clientConfig']['service']['path']}"
            webhook["clientConfig"] = {"url": url, "caBundle": authority}
        yield document


def _copy_certificate(layout: Layout, name: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind in ("crt", "key"):
        (folder / f"tls.{kind}").write_bytes((layout.certificates / f"{name}-webhook.{kind}").read_bytes())


def _write_config(layout: Layout, name: str, version: str, ports: tuple[int, int], **more: object) -> Path:
    """Write the configuration of a controller with these ports, of its webhooks and of its health."""
    folder = layout.certificates / f"{name}-webhook"
    _copy_certificate(layout, name, folder)
    config = {
        "apiVersion": f"config.{name}.x-k8s.io/{version}",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{ports[1]}"},
        "webhook": {"host": str(layout.address), "port": ports[0], "certDir": str(folder)},
        "internalCertManagement": {"enable": False},
        **more,
    }
    path = layout.folder / f"{name}.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def _is_listening(log: Path) -> bool:
    return log.is_file() and "Serving webhook server" in log.read_text(encoding="utf-8", errors="replace")
