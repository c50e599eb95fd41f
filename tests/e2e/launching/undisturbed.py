"""Train README's model for some steps, with which nothing interferes: torchrun … undisturbed.py N_STEPS FILE."""

import itertools
import sys

import my_model
import torch

import stepkeeper
from stepkeeper import prime_optimizer


def main() -> None:
    n_steps, path = int(sys.argv[1]), sys.argv[2]
    my_model.PAUSE_S = 0.0
    this = stepkeeper.distributed.init()
    model, optimizer, batches = my_model.build()
    prime_optimizer(optimizer)
    for batch in itertools.islice(batches, n_steps):
        my_model.train(model, optimizer, batch)
    if this.rank == 0:
        torch.save(model.state_dict(), path)


if __name__ == "__main__":
    main()
