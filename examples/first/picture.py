"""Run README's first commands, and draw what they print: python examples/first/picture.py docs/quick-start.svg."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path("/tmp/first")
TRAINING = "examples/first/train.py"
COMMANDS = (
    (f"stepkeeper run --root runs/first {TRAINING}", "step 60 committed"),
    (f"stepkeeper run --root runs/first {TRAINING}", None),
    (f"stepkeeper rehearse {TRAINING}", None),
)
"""Each command, and the line after which Ctrl-C is pressed."""

COLUMNS, LINE_PX, COLUMN_PX, MARGIN_PX = 118, 17, 7.3, 16
INK, OURS, PROMPT, PAPER = "#d1d5db", "#86efac", "#f9fafb", "#111827"


def run(command: str, interrupt_after: str | None) -> Iterator[str]:
    """Yield the lines that a command prints, and those of the prompt."""
    yield f"$ {command}"
    words = [str(Path(sys.executable).with_name("stepkeeper")), *command.split()[1:]]
    process = subprocess.Popen(
        words, cwd=FOLDER, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        yield line.rstrip()
        if interrupt_after and interrupt_after in line:
            interrupt_after = None
            os.kill(process.pid, signal.SIGINT)
            yield "^C"
    code = process.wait()
    if code:
        yield f"$ echo $?\n{code}"


def draw(lines: list[str], title: str) -> str:
    """Draw the lines as text, our own and the prompt's in other colors."""
    height, width = 2 * MARGIN_PX + LINE_PX * (len(lines) + 1), 2 * MARGIN_PX + COLUMN_PX * COLUMNS
    texts = []
    for number, line in enumerate(lines, 1):
        color = PROMPT if line.startswith("$") else OURS if line.startswith("stepkeeper: ") else INK
        y = MARGIN_PX + LINE_PX * number
        texts.append(f'<text x="{MARGIN_PX}" y="{y}" fill="{color}">{escape(line)}</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" xml:space="preserve"',
            '  font-size="12" font-family="ui-monospace, DejaVu Sans Mono, Menlo, Consolas, monospace">',
            f"<title>{escape(title)}</title>",
            f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>',
            *texts,
            "</svg>\n",
        ]
    )


def main(path: Path) -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    (FOLDER / TRAINING).parent.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("train.py"), FOLDER / TRAINING)
    began_s = time.monotonic()
    lines: list[str] = []
    for command in COMMANDS:
        for line in run(*command):
            print(line, flush=True)
            for part in line.splitlines():
                lines += textwrap.wrap(part, COLUMNS, subsequent_indent="    ", break_on_hyphens=False) or [
                    ""
                ]
    title = f"stepkeeper run, Ctrl-C, run again, rehearse: {time.monotonic() - began_s:.0f} s"
    path.write_text(draw(lines, title), encoding="utf-8")
    shutil.rmtree(FOLDER)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
