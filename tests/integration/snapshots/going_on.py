"""A training that saves, and one that goes on from there: python going_on.py save|restore URI. Says what it found."""

import json
import sys
from typing import Any

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from sharded_training import Training, compilations

from stepkeeper import CheckpointManager


def save(uri: str) -> dict[str, Any]:
    undisturbed = Training(33, small=True)
    for _ in range(6):
        undisturbed.step()
    training, compiled = Training(33, small=True), 0
    with CheckpointManager(uri, save=10**6) as manager:
        for step in range(1, 7):
            training.step()
            if step == 4:
                compiled = compilations()
            # The second save finds all that it needs compiled.
            if step in (3, 4, 5):
                manager.save(step, training.state)
        torch_xla.sync()
        xm.wait_device_ops()
        later = compilations() - compiled
    bits = training.bits()
    return {"same": bits == undisturbed.bits(), "bits": bits, "later_compilations": later}


def restore(uri: str) -> dict[str, Any]:
    training = Training(33, small=True)
    with CheckpointManager(uri, save=10**6) as manager:
        xm.set_rng_state(987)
        result = manager.restore(training.state)
        assert result is not None
        spec = torch_xla._XLAC._get_xla_sharding_spec(training.parameters[0])  # nowhere else
        for _ in range(result.step, 6):
            training.step()
        bits = training.bits()
        manager.save(7, training.state).result()
    return {"step": result.step, "bits": bits, "spec": spec}


xr.use_spmd()
print(json.dumps({"save": save, "restore": restore}[sys.argv[1]](sys.argv[2])), flush=True)
