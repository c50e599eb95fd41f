"""One measurement in a process of its own: JSON on standard output."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.saving.disk import direct_write_s
from benchmarks.saving.memory import Group, forget_peak, peak_bytes, resident_bytes
from benchmarks.saving.states import new_state

_MIB = 1024 * 1024
_LEAST_SAVES = 4
_MOST_SAVES = 8
_ENOUGH_S = 5.0
"""Short saves are repeated for so long,"""

_TOO_LONG_S = 60.0
"""and long ones twice if they take this together."""

_PAUSE_S = 1.0
"""From one save to the next: a training does something in between, and so may what the last save left to do."""


def on_host(way: str, shape: str, size_mib: int, folder: Path) -> dict[str, Any]:
    """Measure several saves of CPU tensors, which change in between."""
    from benchmarks.saving import host

    group = Group.entered()
    state = new_state(shape, size_mib)
    saver = host.WAYS[way](folder)
    forget_peak()
    before_bytes, others_bytes = resident_bytes(), 0
    group_before_bytes = 0 if group is None else group.forget_peak()
    saver.prepare(state)
    stalls: list[float] = []
    durables: list[float] = []
    while not _are_enough(durables):
        step = len(durables) + 1
        began_s = time.perf_counter()
        saver.begin(step, state)
        stalls.append(time.perf_counter() - began_s)
        saver.finish()
        durables.append(time.perf_counter() - began_s)
        for tensor in state.values():
            tensor.add_(1)
        others_bytes = max(others_bytes, saver.others_bytes())
        time.sleep(_PAUSE_S)
    peak = peak_bytes() - before_bytes
    group_extra_bytes = None if group is None else group.peak_bytes() - group_before_bytes
    saver.close()
    if group is not None:
        group.leave()
    return {
        "stall_s": stalls,
        "durable_s": durables,
        "persist_s": list(saver.persist_s()),
        "peak_extra_bytes": peak,
        "others_bytes": others_bytes,
        "group_extra_bytes": group_extra_bytes,
    }


def _are_enough(durables_s: Sequence[float]) -> bool:
    n_saves, took_s = len(durables_s), sum(durables_s)
    if n_saves < _LEAST_SAVES:
        return n_saves > 1 and took_s > _TOO_LONG_S
    return n_saves == _MOST_SAVES or took_s > _ENOUGH_S


def on_disk(size_mib: int, folder: Path) -> dict[str, Any]:
    """Measure writes past the page cache, in one file and in eight side by side."""
    times_s = [direct_write_s(folder, size_mib * _MIB, n_files) for n_files in (1, 8, 1, 8)]
    known = [each_s for each_s in times_s if each_s is not None]
    return {"durable_s": known, "best_s": min(known, default=None)}


def main() -> None:
    where, way, shape, size_mib, folder = (*sys.argv[1:4], int(sys.argv[4]), sys.argv[5])
    with tempfile.TemporaryDirectory(dir=folder) as name:
        if where == "host":
            found = on_host(way, shape, size_mib, Path(name))
        elif where == "disk":
            found = on_disk(size_mib, Path(name))
        elif where == "steps":
            from benchmarks.saving import steps as training

            found = training.measure(way, shape, size_mib, Path(name), n_steps=int(sys.argv[6]))
        elif where == "notice":
            from benchmarks.saving import notice

            found = notice.measure(way, shape, size_mib, Path(name))
        elif where == "replicas":
            from benchmarks.saving import replicas

            found = replicas.measure(way, shape, size_mib)
        else:
            from benchmarks.saving import devices

            saves, every = int(sys.argv[6]), int(sys.argv[7])
            found = devices.measure(way, shape, size_mib, Path(name), saves=saves, every=every)
    print(json.dumps({"where": where, "way": way, "shape": shape, "size_mib": size_mib, **found}), flush=True)
    os._exit(0)  # torch_xla's manager and torch's pools leave threads running


if __name__ == "__main__":
    main()
