"""List the defaults that the API server puts into spec.template, by path; "[]" is any item of a list.

Made by `make generate` from crds/pod_template.yaml.
"""

from collections.abc import Mapping
from typing import Final

__all__ = ["TEMPLATE_DEFAULTS"]

TEMPLATE_DEFAULTS: Final[Mapping[str, str | int | bool]] = {
    "spec.containers[].envFrom[].configMapRef.name": "",
    "spec.containers[].envFrom[].secretRef.name": "",
    "spec.containers[].env[].valueFrom.configMapKeyRef.name": "",
    "spec.containers[].env[].valueFrom.fileKeyRef.optional": False,
    "spec.containers[].env[].valueFrom.secretKeyRef.name": "",
    "spec.containers[].livenessProbe.grpc.service": "",
    "spec.containers[].ports[].protocol": "TCP",
    "spec.containers[].readinessProbe.grpc.service": "",
    "spec.containers[].startupProbe.grpc.service": "",
    "spec.imagePullSecrets[].name": "",
    "spec.initContainers[].envFrom[].configMapRef.name": "",
    "spec.initContainers[].envFrom[].secretRef.name": "",
    "spec.initContainers[].env[].valueFrom.configMapKeyRef.name": "",
    "spec.initContainers[].env[].valueFrom.fileKeyRef.optional": False,
    "spec.initContainers[].env[].valueFrom.secretKeyRef.name": "",
    "spec.initContainers[].livenessProbe.grpc.service": "",
    "spec.initContainers[].ports[].protocol": "TCP",
    "spec.initContainers[].readinessProbe.grpc.service": "",
    "spec.initContainers[].startupProbe.grpc.service": "",
    "spec.volumes[].azureDisk.fsType": "ext4",
    "spec.volumes[].azureDisk.readOnly": False,
    "spec.volumes[].cephfs.secretRef.name": "",
    "spec.volumes[].cinder.secretRef.name": "",
    "spec.volumes[].configMap.name": "",
    "spec.volumes[].csi.nodePublishSecretRef.name": "",
    "spec.volumes[].flexVolume.secretRef.name": "",
    "spec.volumes[].iscsi.iscsiInterface": "default",
    "spec.volumes[].iscsi.secretRef.name": "",
    "spec.volumes[].projected.sources[].configMap.name": "",
    "spec.volumes[].projected.sources[].secret.name": "",
    "spec.volumes[].rbd.keyring": "/etc/ceph/keyring",
    "spec.volumes[].rbd.pool": "rbd",
    "spec.volumes[].rbd.secretRef.name": "",
    "spec.volumes[].rbd.user": "admin",
    "spec.volumes[].scaleIO.fsType": "xfs",
    "spec.volumes[].scaleIO.secretRef.name": "",
    "spec.volumes[].scaleIO.storageMode": "ThinProvisioned",
    "spec.volumes[].storageos.secretRef.name": "",
}
