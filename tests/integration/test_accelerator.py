"""What lies on an accelerator that is neither XLA nor CUDA is saved and restored by torch's own means for any."""

from pathlib import Path

import pytest
from fork_server import ForkServer
from torch.utils import backend_registration


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="torch 2.9 takes no device that is made of Python; `make test-newest` runs this",
)
def test_its_tensors_and_random_numbers_are_saved_and_restored(
    torch_server: ForkServer, tmp_path: Path
) -> None:
    done = torch_server.run([Path(__file__).parent / "accelerator" / "training.py", tmp_path], timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
