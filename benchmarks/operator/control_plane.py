"""Start etcd and an API server for a measurement, with the kinds that the operator needs and without nodes."""

import base64
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from benchmarks.operator.processes import ROOT

from stepcluster import certificates, lifecycle
from stepcluster.layout import ETCD_PORT
from stepcluster.machine import run
from stepcluster.parts import Parts
from stepcluster.processes import PROGRAM_MARK, marked

_CRDS: Final = ROOT / "charts" / "stepkeeper" / "crds"
_OPERATOR: Final = "operator"
"""The operator's user: the audit log has its requests by that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlane:
    parts: Parts
    operator_kubeconfig: Path

    @property
    def url(self) -> str:
        return self.parts.layout.api_url

    @property
    def etcd_url(self) -> str:
        return f"http://{self.parts.layout.address}:{ETCD_PORT}"

    @property
    def certificates(self) -> Path:
        return self.parts.layout.certificates

    @property
    def folder(self) -> Path:
        """The folder for logs."""
        return self.parts.layout.logs

    def list_pids(self) -> dict[str, list[int]]:
        """List the processes of each program."""
        folder = str(self.parts.layout.folder)
        programs = {"apiserver": "kube-apiserver", "etcd": "etcd"}
        return {name: list(marked(PROGRAM_MARK, mark, within=folder)) for name, mark in programs.items()}

    def read_endpoint_ca(self) -> str:
        """Return the certificate that companions trust, in PEM."""
        get = ["-n", "stepkeeper", "get", "secret", "stepkeeper-operator-tls", "-o", "json"]
        data: dict[str, str] = json.loads(run([*self.parts.kubectl, *get]))["data"]
        return base64.b64decode(data["ca.crt"]).decode()

    def open_audit(self) -> int:
        """Return the place in the audit log where requests from now on are."""
        return self.parts.layout.audit_log.stat().st_size

    def count_requests(self, place: int, took_s: float) -> dict[str, float]:
        """Count the operator's requests since that place in the audit log, per second, by verb and resource."""
        found: Counter[str] = Counter()
        with self.parts.layout.audit_log.open("rb") as log:
            log.seek(place)
            for line in log:
                if b'"username":"operator"' in line and line.endswith(b"\n"):
                    found[_describe(json.loads(line))] += 1
        counts = {"all": found.total(), **dict(found.most_common(6))}
        return {name: round(count / took_s, 2) for name, count in counts.items()}


@contextmanager
def control_plane(name: str) -> Iterator[ControlPlane]:
    """Run a control plane of that name for the block."""
    parts = lifecycle.start_api(name)
    try:
        layout = parts.layout
        authority = certificates.load_authority(layout.certificates)
        authority.issue(_OPERATOR, _OPERATOR, organisation=certificates.MASTERS)
        kubeconfig = layout.certificates / f"{_OPERATOR}.kubeconfig"
        text = certificates.write_kubeconfig(layout, layout.certificates, _OPERATOR)
        kubeconfig.write_text(text, encoding="utf-8")
        crds = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(_CRDS.glob("*.yaml"))]
        crds.append(yaml.safe_load(parts.binaries.jobset_crd.read_text(encoding="utf-8")))
        parts.apply(crds)
        for crd in crds:
            parts.wait_established(crd["metadata"]["name"])
        yield ControlPlane(parts=parts, operator_kubeconfig=kubeconfig)
    finally:
        lifecycle.stop(name)


def _describe(entry: dict[str, Any]) -> str:
    about = entry.get("objectRef") or {}
    parts = (about.get("resource", entry["requestURI"]), about.get("subresource"))
    return " ".join([entry["verb"], "/".join(part for part in parts if part)])
