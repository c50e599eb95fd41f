"""Play a story of a job with the operator that is on the path: python operators.py FILE SPEC STORY.

FILE holds the cluster between the operators. The first one makes the job, with the fields of SPEC.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from fake_cluster.stories import play
from fake_cluster.world import World
from stepkeeper_operator.cache.reports import ReportCache

JOB = ("checkpointedtrainingjobs", "default", "lm")


def load(file: Path, spec: dict[str, Any]) -> World:
    """Take over the cluster in the file, as an operator that starts now."""
    # Release 0.1.0 needs one more argument than a world gives.
    defaults = ReportCache.__init__.__kwdefaults__ or {}
    ReportCache.__init__.__kwdefaults__ = {**defaults, "silence_s": 60}
    world = World(**spec)
    if file.exists():
        saved = json.loads(file.read_text(encoding="utf-8"))
        world.now, world.cluster.version = saved["now"], saved["version"]
        world.cluster.objects = {tuple(place): raw for place, raw in saved["objects"]}
        world.restart_operator()
    # The version has counted all changes, so no uid of now is one of before.
    world.cluster._uids = world.cluster.version
    return world


def save(world: World, file: Path) -> None:
    objects = list(world.cluster.objects.items())
    saved = {"now": world.now, "version": world.cluster.version, "objects": objects}
    file.write_text(json.dumps(saved), encoding="utf-8")


async def main(file: Path, spec: str, story: str) -> None:
    world = await play(load(file, json.loads(spec)), story)
    save(world, file)
    pods = sorted(pod["metadata"]["uid"] for pod in world.pods)
    raw = world.cluster.objects[JOB]
    sys.stdout.write(json.dumps({"pods": pods, "status": raw["status"]}))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
