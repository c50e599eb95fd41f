"""Everything that this package raises on purpose."""


class ClusterError(Exception):
    """Something about the test cluster is not as it has to be; the message says what to do."""


class UnsupportedMachineError(ClusterError, OSError):
    """This machine can't run the cluster: not Linux, not root, or a program is missing."""


class BuildError(ClusterError, RuntimeError):
    """A binary or an image could not be built."""


class StartError(ClusterError, RuntimeError):
    """A part of the cluster did not come up; the message ends with the last lines of its log."""


class ClusterExistsError(ClusterError, FileExistsError):
    """A cluster of this name is running."""


class NoClusterError(ClusterError, LookupError):
    """No cluster of this name is running."""


class CommandError(ClusterError, RuntimeError):
    """A program ended with an error; the message has its output."""


class FaultError(ClusterError, RuntimeError):
    """A fault could not be made: its target isn't there or isn't in the state that it needs."""
