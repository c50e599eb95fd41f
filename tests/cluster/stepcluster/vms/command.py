"""The command `python -m stepcluster vm`."""

import argparse
import json
from pathlib import Path

from stepcluster.api import Cluster
from stepcluster.errors import ClusterError
from stepcluster.machine import say
from stepcluster.vms.machines import GRACE_S

ACTIONS = ("start", "stop", "list")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of all actions."""
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("vm", nargs="?", default="", help="the machine's host name")
    parser.add_argument("--metadata-file", type=Path, help="start: its attributes, a JSON object")
    parser.add_argument("--startup-script", type=Path, help="start: what it runs whenever it starts")
    parser.add_argument("--tpu-chips", type=int, default=4, help="start: what it has of google.com/tpu (4)")
    parser.add_argument("--no-wait", action="store_true", help="start: don't wait until its node is Ready")
    parser.add_argument(
        "--grace", type=float, default=GRACE_S, metavar="SECONDS", help="stop: 0 cuts its power at once (30)"
    )
    parser.add_argument("--keep-disk", action="store_true", help="stop: it can be started again")


def carry_out(arguments: argparse.Namespace) -> None:
    """Start or stop a machine, or print the names of all."""
    machines = Cluster.attach(arguments.name).vms
    if arguments.action == "list":
        for name in machines.names():
            print(f"{name}\t{'on' if machines.is_on(name) else 'off'}")
        return
    if not arguments.vm:
        raise ClusterError(
            f"which one? `vm {arguments.action} NAME`; there are: {', '.join(machines.names())}"
        )
    if arguments.action == "stop":
        machines.stop(arguments.vm, grace_s=arguments.grace, delete=not arguments.keep_disk)
        say(f"vm {arguments.vm}: {'off' if arguments.keep_disk else 'gone'}")
        return
    metadata, script = arguments.metadata_file, arguments.startup_script
    machines.start(
        arguments.vm,
        metadata=json.loads(metadata.read_text(encoding="utf-8")) if metadata else {},
        startup_script=script.read_text(encoding="utf-8") if script else "#!/bin/sh\n",
        tpu_chips=arguments.tpu_chips,
    )
    if not arguments.no_wait:
        machines.wait_joined(arguments.vm)
    say(f"vm {arguments.vm}: {'started' if arguments.no_wait else 'joined'}")
