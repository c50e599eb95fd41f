"""List what the pages show and no test runs, with the reason: a closed table, whose counts a test holds."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark behind a block's language."""

    reason: str
    n_blocks: int


MARKS: Final = {
    "google-cloud": Mark("asks Google Cloud, where tests have no project", 13),
    "accelerator": Mark("torchtitan's trainer needs an accelerator, where tests have none", 2),
    "images": Mark("builds images with docker or podman, which tests don't have: test_images.py", 1),
    "orbax": Mark("needs JAX and Orbax, which tests don't have; it was run by hand with Orbax 0.12", 1),
    "quick-start": Mark("one command is interrupted: tests/integration/test_supervise.py runs them", 1),
    "slurm": Mark("a batch script: tests/integration/test_supervise.py runs it", 1),
    "repository": Mark(
        "the repository's own targets: CI runs each by itself, and one of them is these tests", 1
    ),
}
"""By mark. Such a block is still checked for its syntax (tests/unit/repository/test_pages.py)."""

STORIES: Final = {
    "docs/operations/damaged-log.md": "tests/integration/test_damaged_log_page.py",
    **{
        f"docs/user/{trainer}.md": "tests/integration/integrations/test_pages_of_trainers.py"
        for trainer in ("accelerate", "lightning", "transformers", "wandb")
    },
}
"""Pages that aren't gone through from the top to the end: what runs their blocks, in each order that they give."""
