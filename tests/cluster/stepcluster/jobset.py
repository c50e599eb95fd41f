"""JobSet's controller, as a process beside the control plane, with its webhooks by URL."""

import base64
import json
from collections.abc import Mapping

import yaml

from stepcluster.binaries import Binaries
from stepcluster.layout import JOBSET_HEALTH_PORT, JOBSET_WEBHOOK_PORT, Layout
from stepcluster.processes import Launcher

CRD = "jobsets.jobset.x-k8s.io"
POD_WEBHOOKS = {"mpod.kb.io", "vpod.kb.io"}


def manifests(binaries: Binaries, layout: Layout) -> list[Mapping[str, object]]:
    """Return the CRD and the webhook configurations of the pinned version. The webhooks point at our process."""
    authority = base64.b64encode((layout.certificates / "ca.crt").read_bytes()).decode()
    found: list[Mapping[str, object]] = [yaml.safe_load(binaries.jobset_crd.read_text(encoding="utf-8"))]
    for document in yaml.safe_load_all(binaries.jobset_webhooks.read_text(encoding="utf-8")):
        document["metadata"]["name"] = f"jobset-{document['metadata']['name']}"
        for webhook in document["webhooks"]:
            path = webhook["clientConfig"]["service"]["path"]
            url = f"https://{layout.address}:{JOBSET_WEBHOOK_PORT}{path}"
            webhook["clientConfig"] = {"url": url, "caBundle": authority}
            if webhook["name"] in POD_WEBHOOKS:
                # JobSet's own installation has this too: other pods must not depend on its webhook.
                selector = [{"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}]
                webhook["objectSelector"] = {"matchExpressions": selector}
        found.append(document)
    return found


def start(launcher: Launcher, binaries: Binaries, layout: Layout) -> None:
    folder = layout.certificates / "jobset-webhook"
    folder.mkdir(exist_ok=True)
    for name in ("crt", "key"):
        (folder / f"tls.{name}").write_bytes((layout.certificates / f"jobset-webhook.{name}").read_bytes())
    config = {
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{JOBSET_HEALTH_PORT}"},
        "webhook": {"host": str(layout.address), "port": JOBSET_WEBHOOK_PORT, "certDir": str(folder)},
        "internalCertManagement": {"enable": False},
    }
    path = layout.folder / "jobset.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")
    kubeconfig = layout.certificates / "jobset.kubeconfig"
    launcher.start("jobset", [binaries["jobset"], f"--config={path}", f"--kubeconfig={kubeconfig}"])
