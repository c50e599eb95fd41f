"""An operator without QueuedResources doesn't load google's client: it takes a second and 40 MB."""

import subprocess
import sys

_PROGRAM = """
import sys
import stepkeeper_operator.startup
import stepkeeper_operator.cloud_tpu.cloud
import stepkeeper_operator.cloud_tpu.polling
print(sorted(name for name in sys.modules if name.split(".")[0] == "grpc" or name.startswith("google.cloud.tpu")))
"""


def test_the_operator_starts_without_google_s_client() -> None:
    answer = subprocess.run([sys.executable, "-c", _PROGRAM], check=True, capture_output=True, text=True)
    assert answer.stdout == "[]\n"
