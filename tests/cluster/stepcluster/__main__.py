"""The test cluster's command line: `python -m stepcluster --help`."""

import argparse
import contextlib
import random
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from stepcluster import api, binaries, drill, images, lifecycle, packages, state
from stepcluster.api import Cluster
from stepcluster.errors import ClusterError
from stepcluster.machine import say
from stepcluster.vms import command

NODE_FAULTS = ("spot-preemption", "power-cut", "power-on", "drain", "uncordon")
POD_FAULTS = ("kill", "stop", "continue", "oom", "evict")
CLUSTER_FAULTS = ("kill-operator", "stop-operator", "start-operator", "restart-api-server", "random")


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out the command and return the exit status."""
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
    cluster = api.start(arguments.name, n_tpu_nodes=arguments.tpu_nodes)
    cluster.load_shell_image()
    print(cluster.kubeconfig)


def down(arguments: argparse.Namespace) -> None:
    if arguments.abandoned:
        lifecycle.stop_abandoned()
        return
    for name in state.names() if arguments.all else [arguments.name]:
        lifecycle.stop(name)
        say(f"cluster {name}: nothing of it is left")


def env(arguments: argparse.Namespace) -> None:
    for key, value in Cluster.attach(arguments.name).environment.items():
        print(f"export {key}={value}")


def image(arguments: argparse.Namespace) -> None:
    wheel = arguments.wheel or images.build_wheel()
    cluster = Cluster.attach(arguments.name)
    if arguments.kind == "operator":
        print(cluster.load_operator_image(wheel, arguments.tag))
    elif arguments.kind == "trainer":
        print(cluster.load_trainer_image(arguments.app.resolve(), wheel, arguments.tag))
    else:
        print(cluster.load_shell_image())


def fault(arguments: argparse.Namespace) -> None:
    faults = Cluster.attach(arguments.name).faults
    pod = {"namespace": arguments.namespace, "container": arguments.container}

    def send(number: signal.Signals) -> Callable[[str], object]:
        return lambda name: faults.signal_pod(name, number, process=arguments.process, **pod)

    actions: dict[str, Callable[[str], object]] = {
        "spot-preemption": lambda node: faults.spot_preemption(node, back_after_s=arguments.back_after),
        "power-cut": faults.power_cut,
        "power-on": lambda node: faults.power_on(node, fresh=arguments.fresh),
        "drain": faults.drain,
        "uncordon": faults.uncordon,
        "kill": send(signal.SIGKILL),
        "stop": send(signal.SIGSTOP),
        "continue": send(signal.SIGCONT),
        "oom": lambda name: faults.out_of_memory(name, **pod),
        "evict": lambda name: faults.evict(name, namespace=arguments.namespace),
        "kill-operator": lambda _: faults.kill_operator(),
        "stop-operator": lambda _: faults.stop_operator(),
        "start-operator": lambda _: faults.start_operator(),
        "restart-api-server": lambda _: faults.restart_api_server(),
        "random": lambda _: _random(arguments),
    }
    actions[arguments.kind](arguments.target)
    say(f"fault: {arguments.kind} {arguments.target}".rstrip() + " has happened")


def vm(arguments: argparse.Namespace) -> None:
    command.carry_out(arguments)


def _random(arguments: argparse.Namespace) -> None:
    cluster = Cluster.attach(arguments.name)
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    say(f"drill: seed {seed} (--seed {seed} gives the same faults)")
    pods = (
        drill.Pods(namespace=arguments.namespace, selector=arguments.selector) if arguments.selector else None
    )
    planned = drill.plan(
        seed,
        cluster.tpu_nodes,
        n_faults=arguments.count,
        within_s=arguments.within,
        with_pods=pods is not None,
    )
    for item in planned:
        say(f"drill: planned at {item.after_s:.1f} s: {item.kind} {item.node}".rstrip())
    drill.carry_out(cluster.faults, planned, back_after_s=arguments.back_after or 0.0, pods=pods)


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
    ending.add_argument("--all", action="store_true", help="every cluster of this machine")
    ending.add_argument("--abandoned", action="store_true", help="clusters of test runs that were killed")
    add(env, 'Print what a shell needs: eval "$(python -m stepcluster env)".')
    loading = add(image, "Build an image from this tree and load it into the nodes; print its name.")
    loading.add_argument("kind", choices=["operator", "trainer", "shell"])
    loading.add_argument(
        "--app", type=Path, default=images.ROOT / "examples" / "text_lm", help="a trainer's folder"
    )
    loading.add_argument("--wheel", type=Path, help="a wheel in place of this tree's")
    loading.add_argument("--tag", default="dev")
    _add_fault_options(add(fault, "Make something go wrong."))
    command.add_options(add(vm, "Start or stop a virtual machine, which joins by its startup script."))
    return parser


def _add_fault_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=[*NODE_FAULTS, *POD_FAULTS, *CLUSTER_FAULTS])
    parser.add_argument("target", nargs="?", default="", help="node or pod")
    parser.add_argument("-n", "--namespace", default="default", help="the pod's namespace")
    parser.add_argument("-c", "--container", default="", help="the pod's container (the first)")
    parser.add_argument(
        "--process", default="", help="part of the command line of the process (the container's first)"
    )
    parser.add_argument(
        "--back-after", type=float, metavar="SECONDS", help="bring the node back after this long"
    )
    parser.add_argument("--fresh", action="store_true", help="power-on: as a new machine")
    parser.add_argument("--seed", type=int, help="random: choose as the drill with this seed did")
    parser.add_argument("-l", "--selector", default="", help="random: hit pods that this selects, too")
    parser.add_argument("--count", type=int, default=1, help="random: how many faults (1)")
    parser.add_argument(
        "--within", type=float, default=60.0, metavar="SECONDS", help="random: in this time (60)"
    )


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
