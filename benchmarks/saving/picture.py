"""Draw how long each way keeps the training waiting, by size of the state."""

import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt  # after the choice of how to draw

__all__ = ["draw"]


def draw(results: list[dict[str, Any]], target: Path) -> None:
    """Draw the picture to `target`: one panel for CPU tensors, one for tensors on devices, each by shape and size."""
    figure, panels = plt.subplots(1, 2, figsize=(13, 6))
    for panel, where in zip(panels, ("host", "devices"), strict=True):
        found = [row for row in results if row["where"] == where and "failure" not in row]
        cases = list(dict.fromkeys((row["shape"], row["size_mib"]) for row in found))
        ways = list(dict.fromkeys(row["way"] for row in found))
        width = 0.8 / max(1, len(ways))
        for index, way in enumerate(ways):
            rows = {(row["shape"], row["size_mib"]): row for row in found if row["way"] == way}
            heights = [_seconds(rows[case]) if case in rows else 0.0 for case in cases]
            panel.bar([place + index * width for place in range(len(cases))], heights, width, label=way)
        panel.set_xticks(
            [place + 0.4 for place in range(len(cases))],
            [f"{shape}\n{size_mib} MiB" for shape, size_mib in cases],
        )
        panel.set_yscale("log")
        panel.set_ylabel("seconds that training waits for a save")
        panel.set_title({"host": "CPU tensors", "devices": "tensors on four devices (torch_xla, CPU)"}[where])
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target)
    plt.close(figure)


def _seconds(row: dict[str, Any]) -> float:
    if row["where"] == "host":
        return float(statistics.median(row["stall_s"][1:]))
    return max(0.0001, float(row["wall_per_save_s"]))
