"""Who has started a process is told by the variables that it finds."""

import pytest
import torch

from stepkeeper.distributed.devices import choose_backend
from stepkeeper.distributed.launchers import Launcher, choose_launcher, read_local_rank
from stepkeeper.errors import ProcessGroupError
from stepkeeper_testing.pod import pod_environ, pod_identity

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "lm-w-0-0.lm",
    "MASTER_PORT": "29500",
}
POD = pod_environ(pod_identity())


@pytest.mark.parametrize(
    ("environ", "on_tpu", "launcher"),
    [
        ({}, False, Launcher.NOBODY),
        (POD, False, Launcher.OPERATOR),
        (TORCHRUN, False, Launcher.TORCHRUN),
        (POD | TORCHRUN, False, Launcher.TORCHRUN),
        (POD | TORCHRUN, True, Launcher.TPU),
        ({}, True, Launcher.TPU),
        (POD | {"MASTER_ADDR": "of the template", "MASTER_PORT": "1"}, False, Launcher.OPERATOR),
    ],
)
def test_the_launcher_nearest_to_the_process_counts(
    environ: dict[str, str], on_tpu: bool, launcher: Launcher
) -> None:
    assert choose_launcher(environ, on_tpu=on_tpu) is launcher


@pytest.mark.parametrize("missing", sorted(TORCHRUN))
def test_a_variable_that_a_launcher_left_out_is_named(missing: str) -> None:
    environ = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(ProcessGroupError, match=f"but {missing} is not: set all of"):
        choose_launcher(environ, on_tpu=False)


def test_the_local_rank_is_the_launchers() -> None:
    assert read_local_rank(TORCHRUN) == 1
    assert read_local_rank({"PJRT_LOCAL_PROCESS_RANK": "2"}) == 2
    assert read_local_rank(POD) == 0


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl"), ("mtia", "gloo")],
)
def test_the_backend_is_the_devices_own_beside_gloo(kind: str, backend: str) -> None:
    assert choose_backend(torch.device(kind)) == backend
