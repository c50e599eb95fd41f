"""Form the process group by `stepkeeper.distributed.init()`, and say what came of it."""

import json
import sys

import torch
import torch.distributed as dist

import stepkeeper


def main() -> None:
    timeout_s = float(sys.argv[1])
    this = stepkeeper.distributed.init(timeout_s=timeout_s)
    assert stepkeeper.distributed.init(timeout_s=timeout_s) == this
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == this.world_size
    said = [str(this.device), this.rank, this.world_size, this.local_rank]
    # A line of its own: gloo writes to stdout as well.
    sys.stdout.write(f"\njoined {json.dumps(said)}\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
