"""The table: one line for each measurement, with its ratio to those that it is to be compared with."""

import statistics
from collections.abc import Callable
from typing import Any, Final

__all__ = ["line"]

_MIB: Final = 1024 * 1024

Found = dict[str, Any]


def line(found: Found, results: list[Found]) -> str:
    """Describe a result beside others of the same run."""
    head = f"{found['where']:8}{found['size_mib']:6} MiB  {found['shape']:12} {found['way']:26}"
    if "failure" in found:
        return f"{head} {found['failure']}"
    of: dict[str, Callable[[Found, list[Found]], str]] = {
        "disk": _disk,
        "host": _host,
        "devices": _devices,
        "steps": _steps,
        "notice": _notice,
        "replicas": _replicas,
    }
    return f"{head} {of[found['where']](found, results)}"


def _disk(found: Found, results: list[Found]) -> str:
    del results
    return "no O_DIRECT" if found["best_s"] is None else f"{_gib(found) / found['best_s']:6.2f} GiB/s"


def _host(found: Found, results: list[Found]) -> str:
    stall_s, durable_s = (statistics.median(found[key][1:]) for key in ("stall_s", "durable_s"))
    first_ms = found["stall_s"][0] * 1000
    ratios = []
    least = _same(results, found, "warm memcpy")
    if least is not None:
        ratios.append(f"{stall_s / statistics.median(least['stall_s'][1:]):5.2f} memcpy")
    text = [f"stall {stall_s * 1000:7.0f} ms = {', '.join(ratios)} (first {first_ms:.0f} ms)"]
    if found["way"] != "warm memcpy":
        text.append(f"durable at {_gib(found) / durable_s:5.2f} GiB/s{_against(found, results, durable_s)}")
    if found["persist_s"]:
        persist_s = statistics.median(found["persist_s"][1:])
        text.append(f"persisted at {_gib(found) / persist_s:5.2f} GiB/s{_against(found, results, persist_s)}")
    whole = found["size_mib"] * _MIB
    memory = f"memory {(found['peak_extra_bytes'] + found['others_bytes']) / whole:4.2f}x"
    if found["group_extra_bytes"] is not None:
        memory += f", with the kernel's cache {found['group_extra_bytes'] / whole:4.2f}x"
    return ", ".join([*text, memory])


def _against(found: Found, results: list[Found], durable_s: float) -> str:
    """Return the ratios to stock's writer and to the disk itself."""
    ratios = []
    stock = _same(results, found, "dcp.save")
    if stock is not None:
        ratios.append(f"{statistics.median(stock['durable_s'][1:]) / durable_s:.2f} dcp.save")
    disk = _same(results, {**found, "where": "disk", "shape": "-"}, "the disk itself")
    if disk is not None and disk["best_s"] is not None:
        ratios.append(f"{disk['best_s'] / durable_s:.2f} of the disk")
    return f" = {' = '.join(ratios)}" if ratios else ""


def _devices(found: Found, results: list[Found]) -> str:
    each_s = found["wall_per_save_s"]
    stall_ms = statistics.median(found["stall_s"]) * 1000
    text = [
        f"call {stall_ms:6.0f} ms, wall {each_s / _gib(found) * 1000:6.0f} ms/GiB for each save",
        f"without the first {statistics.median(found['extra_s'][1:]) / _gib(found) * 1000:6.0f} ms/GiB",
        f"= {each_s / found['device_copy_s']:5.1f} device copies",
    ]
    shared = "cores shared" in found["way"]
    theirs = _same(results, found, "torch_xla's, cores shared" if shared else "torch_xla's manager")
    if theirs is not None and theirs is not found:
        text.append(f"{each_s / theirs['wall_per_save_s']:5.2f} of torch_xla's")
    processor = f"CPU {statistics.median(found['extra_cpu_s'][1:]) / _gib(found) * 1000:.0f} ms/GiB"
    if found["companion_cpu_per_save_s"] is not None:
        processor += (
            f" and the companion's {found['companion_cpu_per_save_s'] / _gib(found) * 1000:.0f} ms/GiB"
        )
    text.append(processor)
    if found["step_beside_s"]:
        text.append(
            f"steps {found['step_alone_s'] * 1000:.0f} ms alone, {found['step_beside_s'] * 1000:.0f} ms beside a "
            f"save, {found['worst_step_beside_s'] * 1000:.0f} ms at most"
        )
    return ", ".join([*text, f"memory {found['peak_extra_bytes'] / (found['size_mib'] * _MIB):4.2f}x"])


def _steps(found: Found, results: list[Found]) -> str:
    del results
    alone, beside, everything = (found[key] for key in ("alone_ms", "beside_ms", "all_ms"))
    return (
        f"beside a save {found['mean_ratio']:5.3f} times as long (mean; median {found['median_ratio']:5.3f}), "
        f"{alone['mean']:.1f} → {beside['mean']:.1f} ms, p99 {alone['p99']:.1f} → {beside['p99']:.1f} ms, "
        f"p99.9 of all {found['steps_alone'] + found['steps_beside']} steps {everything['p99.9']:.1f} ms, "
        f"{found['saves']} saves"
    )


def _notice(found: Found, results: list[Found]) -> str:
    del results
    told_s, own_s = (statistics.median(found[key]) for key in ("told_to_commit_s", "own_s"))
    return (
        f"committed {told_s * 1000:.0f} ms after SIGTERM, the save's own time {own_s * 1000:.0f} ms, beside it "
        f"{statistics.median(found['beside_s']) * 1000:.0f} ms, {max(found['beside_s']) * 1000:.0f} ms at most"
    )


def _replicas(found: Found, results: list[Found]) -> str:
    del results
    with_s, without_s, copy_s = (found[key] for key in ("with_s", "without_s", "copy_s"))
    return (
        f"snapshot {with_s * 1000:.0f} ms with digests of all copies, {without_s * 1000:.0f} ms without: "
        f"{with_s / without_s:.2f} times as long, {with_s / copy_s:.2f} of a copy of the whole state"
    )


def _gib(found: Found) -> float:
    return float(found["size_mib"]) / 1024


def _same(results: list[Found], found: Found, way: str) -> Found | None:
    """Find the result of the same case by another way, in the same run."""
    wanted = (found["where"], way, found["shape"], found["size_mib"])
    for other in results:
        known = (other["where"], other["way"], other["shape"], other["size_mib"])
        if known == wanted and "failure" not in other:
            return other
    return None
