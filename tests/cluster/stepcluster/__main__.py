"""The test cluster's command line: `python -m stepcluster --help`."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from stepcluster import binaries, images, lifecycle, packages
from stepcluster.api import Cluster
from stepcluster.errors import ClusterError
from stepcluster.machine import say


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    # A terminal that goes away or a supervisor that loses patience must end like Ctrl-C: with nothing left. Ctrl-C
    # itself is ignored, unless a program says otherwise, in what a shell script starts in the background.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        arguments.command(arguments)
    except ClusterError as error:
        say(f"stepcluster: {error}")
        return 1
    except KeyboardInterrupt:
        say("stepcluster: interrupted")
        return 130
    return 0


def build(_: argparse.Namespace) -> None:
    packages.ensure()
    print(binaries.ensure().folder)


def up(arguments: argparse.Namespace) -> None:
    cluster = Cluster(lifecycle.start(arguments.name, n_tpu_nodes=arguments.tpu_nodes))
    cluster.load_shell_image()
    print(cluster.kubeconfig)


def down(arguments: argparse.Namespace) -> None:
    if arguments.abandoned:
        lifecycle.stop_abandoned()
        return
    lifecycle.stop(arguments.name)
    say(f"cluster {arguments.name}: nothing of it is left")


def env(arguments: argparse.Namespace) -> None:
    for key, value in Cluster.attach(arguments.name).environment.items():
        print(f"export {key}={value}")


def image(arguments: argparse.Namespace) -> None:
    cluster = Cluster.attach(arguments.name)
    if arguments.kind == "operator":
        print(cluster.load_operator_image())
    elif arguments.kind == "trainer":
        print(cluster.load_trainer_image(arguments.app.resolve()))
    else:
        print(cluster.load_shell_image())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stepcluster", description="A Kubernetes cluster for tests."
    )
    commands = parser.add_subparsers(required=True)

    def add(command: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(command.__name__, help=text, description=text)
        added.set_defaults(command=command)
        if command is not build:
            added.add_argument("--name", default="dev", help="the cluster's name (dev)")
        return added

    add(build, "Build the programs, once, and install the packages that are missing.")
    starting = add(up, "Start a cluster and print its kubeconfig.")
    starting.add_argument("--tpu-nodes", type=int, default=2, help="TPU nodes beside the system node (2)")
    ending = add(down, "End a cluster.")
    ending.add_argument("--abandoned", action="store_true", help="clusters of test runs that were killed")
    add(env, 'Print what a shell needs: eval "$(python -m stepcluster env)".')
    loading = add(image, "Build an image from this tree and load it into the nodes; print its name.")
    loading.add_argument("kind", choices=["operator", "trainer", "shell"])
    loading.add_argument(
        "--app", type=Path, default=images.ROOT / "examples" / "text_lm", help="a trainer's folder"
    )
    return parser


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
