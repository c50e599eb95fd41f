#!/usr/bin/env bash
# Joins this Cloud TPU VM to a k3s cluster, as an agent with the labels that stepkeeper's operator set.
# It is the startup script of a QueuedResource: it runs as root at every start, and does nothing once the VM has joined.
set -euo pipefail

# --- Yours to set. ---------------------------------------------------------------------------------------------------
SERVER=https://SERVER:6443      # as the VM reaches it
# An agent token, or the name of a secret in Secret Manager that holds the newest one:
# projects/PROJECT/secrets/SECRET. The VM's service account needs roles/secretmanager.secretAccessor on it.
TOKEN=
TOKEN_SECRET=
# Your cluster's version, and from its release page the line of sha256sum-amd64.txt for `k3s`.
K3S_VERSION=v1.36.3+k3s1
K3S_SHA256=SHA256-OF-K3S
# Autocheckpoint gives a training 5 minutes; system pods get 30 s after that.
SHUTDOWN_S=330
SHUTDOWN_CRITICAL_S=30
# ---------------------------------------------------------------------------------------------------------------------

etc=${JOIN_ETC:-/etc}
if [[ -L $etc/systemd/system/multi-user.target.wants/k3s-agent.service ]]; then
  echo 'this VM has joined already: systemd starts its agent'
  exit 0
fi

# Prints a metadata attribute of this VM; waits up to 2 minutes for the metadata server.
attribute() {
  curl --fail --silent --show-error --max-time 10 --retry 60 --retry-delay 2 --retry-connrefused \
    --header 'Metadata-Flavor: Google' \
    "http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance/attributes/$1"
}

# Runs a command until it succeeds, for about 10 minutes: a machine that gives up too early costs money and does nothing.
retry() {
  local wait_s
  for wait_s in 10 20 40 80 160 300; do
    "$@" && return
    echo "$1 failed: it is tried again in $wait_s s" >&2
    sleep "$wait_s"
  done
  "$@"
}

# Without the operator's labels no job would find this node, and it would never be removed: it is better not to join.
labels=$(attribute stepkeeper-node-labels)
slice=$(attribute instance-id)
labels+=",stepkeeper.dev/slice=${slice##*/}"

if [[ -n $TOKEN_SECRET ]]; then
  TOKEN=$(retry gcloud secrets versions access latest --secret="$TOKEN_SECRET")
fi

if ! k3s=$(command -v k3s); then
  k3s=/usr/local/bin/k3s
  curl --fail --silent --show-error --location --retry 10 --output "$k3s.new" \
    "https://github.com/k3s-io/k3s/releases/download/${K3S_VERSION/+/%2B}/k3s"
  echo "$K3S_SHA256  $k3s.new" | sha256sum --check --quiet
  chmod 755 "$k3s.new"
  mv "$k3s.new" "$k3s"
fi

mkdir -p "$etc/rancher/k3s" "$etc/systemd/system"
cat >"$etc/rancher/k3s/kubelet.yaml" <<EOF
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
shutdownGracePeriod: ${SHUTDOWN_S}s
shutdownGracePeriodCriticalPods: ${SHUTDOWN_CRITICAL_S}s
EOF
(
  umask 077
  cat >"$etc/rancher/k3s/config.yaml" <<EOF
server: "$SERVER"
token: "$TOKEN"
node-label:
$(tr , '\n' <<<"$labels" | sed 's/.*/  - "&"/')
kubelet-arg:
  - "config=$etc/rancher/k3s/kubelet.yaml"
node-taint:
  - "google.com/tpu=present:NoSchedule"
EOF
)
cat >"$etc/systemd/system/k3s-agent.service.new" <<EOF
[Unit]
Description=k3s agent
Wants=network-online.target
After=network-online.target

[Service]
Type=notify
ExecStart=$k3s agent
KillMode=process
Delegate=yes
LimitNOFILE=1048576
TasksMax=infinity
TimeoutStartSec=0
Restart=always
RestartSec=5

[Install]
WantedBy=multi-user.target
EOF
mv "$etc/systemd/system/k3s-agent.service.new" "$etc/systemd/system/k3s-agent.service"
systemctl daemon-reload
systemctl enable --now k3s-agent
