"""Form the group as on a TPU, on torch_xla's CPU devices: `xla://` is the same, but for the number of hosts."""

import os
import sys

import torch
import torch.distributed as dist
import torch_xla.runtime as xr

from stepkeeper.distributed import groups
from stepkeeper.distributed.devices import Hardware
from stepkeeper.errors import ProcessGroupError
from stepkeeper_testing.pod import pod_environ, pod_identity


def main() -> None:
    hardware = Hardware(device=torch.device("xla"), backend="gloo", on_tpu=True)
    os.environ |= pod_environ(pod_identity(hosts_per_slice=4))
    try:
        groups._form(hardware, 20.0)
    except ProcessGroupError as error:
        sys.stdout.write(f"{error}\n")
    assert not dist.is_initialized()
    os.environ |= pod_environ(pod_identity())
    groups._form(hardware, 20.0)
    assert xr.is_spmd()
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
