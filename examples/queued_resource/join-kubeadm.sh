#!/usr/bin/env bash
# Joins this Cloud TPU VM to a cluster that kubeadm made, as a node with the labels that stepkeeper's operator set.
# It is the startup script of a QueuedResource: it runs as root at every start, and does nothing once the VM has joined.
set -euo pipefail

# --- Yours to set. ---------------------------------------------------------------------------------------------------
API_SERVER=API-SERVER:6443      # as the VM reaches it
CA_CERT_HASH=sha256:CA-CERT-HASH
# The bootstrap token, or the name of a secret in Secret Manager that holds the newest one:
# projects/PROJECT/secrets/SECRET. The VM's service account needs roles/secretmanager.secretAccessor on it.
TOKEN=
TOKEN_SECRET=
# Your cluster's version. What the image lacks is installed from pkgs.k8s.io, at this version.
KUBERNETES_VERSION=1.36.3
# Of the package containerd, where the image has none: `apt-cache madison containerd` lists them.
CONTAINERD_VERSION=VERSION
# Autocheckpoint gives a training 5 minutes; system pods get 30 s after that.
SHUTDOWN_S=330
SHUTDOWN_CRITICAL_S=30
# ---------------------------------------------------------------------------------------------------------------------

etc=${JOIN_ETC:-/etc}
if [[ -e $etc/kubernetes/kubelet.conf ]]; then
  echo 'this VM has joined already: systemd starts its kubelet'
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

export DEBIAN_FRONTEND=noninteractive
apt_install() {
  apt-get -o DPkg::Lock::Timeout=300 update &&
  apt-get -o DPkg::Lock::Timeout=300 install --yes --no-install-recommends "$@"
}
if ! command -v containerd >/dev/null; then
  retry apt_install "containerd=$CONTAINERD_VERSION"
fi
if ! command -v kubeadm >/dev/null || ! command -v kubelet >/dev/null; then
  source=https://pkgs.k8s.io/core:/stable:/v${KUBERNETES_VERSION%.*}/deb/
  mkdir -p "$etc/apt/keyrings"
  curl --fail --silent --show-error --location --retry 10 "${source}Release.key" |
    gpg --dearmor --yes --output "$etc/apt/keyrings/kubernetes.gpg"
  echo "deb [signed-by=$etc/apt/keyrings/kubernetes.gpg] $source /" >"$etc/apt/sources.list.d/kubernetes.list"
  retry apt_install "kubelet=$KUBERNETES_VERSION-*" "kubeadm=$KUBERNETES_VERSION-*"
  apt-mark hold kubelet kubeadm
fi

# What kubeadm asks of a machine: forwarding, and a containerd that serves kubelets. Docker's packages switch that off.
mkdir -p "$etc/modules-load.d" "$etc/sysctl.d" "$etc/containerd"
printf 'overlay\nbr_netfilter\n' >"$etc/modules-load.d/kubernetes.conf"
printf 'net.ipv4.ip_forward = 1\nnet.bridge.bridge-nf-call-iptables = 1\n' >"$etc/sysctl.d/90-kubernetes.conf"
modprobe --all overlay br_netfilter
sysctl --quiet --load "$etc/sysctl.d/90-kubernetes.conf"
containerd config default | sed 's/SystemdCgroup = false/SystemdCgroup = true/' >"$etc/containerd/config.toml"
systemctl restart containerd

mkdir -p "$etc/kubernetes/patches"
cat >"$etc/kubernetes/patches/kubeletconfiguration+merge.yaml" <<EOF
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
shutdownGracePeriod: ${SHUTDOWN_S}s
shutdownGracePeriodCriticalPods: ${SHUTDOWN_CRITICAL_S}s
EOF
(
  umask 077
  cat >"$etc/kubernetes/join.yaml" <<EOF
apiVersion: kubeadm.k8s.io/v1beta4
kind: JoinConfiguration
discovery:
  bootstrapToken:
    apiServerEndpoint: "$API_SERVER"
    token: "$TOKEN"
    caCertHashes: ["$CA_CERT_HASH"]
nodeRegistration:
  criSocket: unix:///run/containerd/containerd.sock
  kubeletExtraArgs:
    - name: node-labels
      value: "$labels"
  taints:
    - key: google.com/tpu
      value: present
      effect: NoSchedule
patches:
  directory: $etc/kubernetes/patches
EOF
)
join() {
  if [[ -e $etc/kubernetes/bootstrap-kubelet.conf ]]; then
    kubeadm reset --force || return # an earlier try failed, or was cut off, in the middle
  fi
  kubeadm join --config "$etc/kubernetes/join.yaml"
}
retry join
rm "$etc/kubernetes/join.yaml"
