"""Do what a page says, as somebody would who reads it: in a folder, a shell and an interpreter of the reader's own.

The text that runs is the text of the page. The machine around it is the reader's: a mount namespace in which /etc,
/dev, /mnt, /run and /var/tmp may be written to and nothing is left of it, and the environment that a test gives.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from page_blocks import Block, Command

_TIMEOUT_S: Final = 280
_LOOK_AGAIN_S: Final = 0.5
_MACHINE: Final = r"""
set -e
for folder in etc dev run var/tmp; do
  mkdir -p "$ASIDE/$folder"
  mount --rbind "/$folder" "$ASIDE/$folder"
  mount -t tmpfs -o mode=0755 tmpfs "/$folder"
  for name in "$ASIDE/$folder"/* "$ASIDE/$folder"/.[!.]*; do
    # Of /var/tmp, which pages use, a reader finds the test cluster only.
    if [ -e "$name" ] && [ "${name%/var/tmp/*}" = "$name" -o "${name##*/}" = stepkeeper ]; then
      ln -s "$name" "/$folder/"
    fi
  done
done
mount -t tmpfs -o mode=0755 tmpfs /mnt
unset ASIDE
set +e
printf '0\n' >&"$STATUS"
"""
"""Give this shell's mount namespace folders of its own, in which all that was there is still found."""

_INTERPRETER: Final = Path(__file__).with_name("page_interpreter.py")
_MASKED: Final = frozenset({"AGE", "SIZE", "RENEWED"})
"""Columns of tables whose cells differ from machine to machine."""


class Reader:
    """Somebody at a machine with a page before them. Made by `reading`."""

    def __init__(self, folder: Path, env: Mapping[str, str], *, own_network: bool) -> None:
        self.folder = folder / "here"
        self.folder.mkdir()
        self.env = {**os.environ, **env, "HOME": str(self.folder)}
        self.env["PATH"] = f"{Path(sys.executable).parent}:{self.env['PATH']}"
        self.env["COLUMNS"] = "300"  # Tables are as wide as they need.
        self._at = self.folder
        self._output, self._errors = folder / "output", folder / "errors"
        self._python_output = folder / "python-output"
        self._blocks = folder / "blocks"
        self._blocks.mkdir()
        aside = folder / "aside"
        aside.mkdir()
        self._interpreter: tuple[subprocess.Popen[str], int] | None = None
        self._news, told = os.pipe()
        network = ["--net"] if own_network else []
        self._shell = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", *network, "bash", "--norc"],
            env=self.env | {"ASIDE": str(aside), "STATUS": str(told)},
            cwd=self.folder,
            stdin=subprocess.PIPE,
            pass_fds=[told],
            text=True,
            start_new_session=True,
        )
        os.close(told)
        self._told = told
        self._write(self._shell, _MACHINE)
        if own_network:
            self._write(self._shell, "ip link set lo up\n")
        assert self._hear(self._news) == "0"

    def close(self) -> None:
        """End the shell, the interpreter, and what they have left running."""
        self._end(self._shell)
        if self._interpreter:
            self._end(self._interpreter[0])
            os.close(self._interpreter[1])
        os.close(self._news)

    @staticmethod
    def _end(process: "subprocess.Popen[str]") -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin:
            with suppress(BrokenPipeError):
                process.stdin.close()

    def does(self, block: Block, *, exit_code: int = 0, looks_for_s: float = 0) -> str:
        """Do what the block says, check how each command ends and what it prints, and return all that was printed.

        Commands of which the page says nothing end with `exit_code`. One is given again until it prints what the page
        shows, for so many seconds.
        """
        assert block.mark is None, f"{block}: {block.mark}"
        if block.file:
            return ""
        if block.language == "python":
            return self._runs(block)
        return "".join(self._types(block, command, exit_code, looks_for_s) for command in block.commands)

    def opens(self, blocks: Sequence[Block]) -> None:
        """Copy the files that the page shows."""
        for block in blocks:
            if block.file:
                (self.folder / block.file).write_text(block.text, encoding="utf-8")

    def knows(self, **variables: str) -> None:
        """Set variables in the shell, and in what is started from now on."""
        self.env.update(variables)
        exports = (f"export {name}={shlex.quote(value)}" for name, value in variables.items())
        self._shell_runs("\n".join(["true", *exports]))

    def goes(self, folder: Path) -> None:
        """Change the folder that the reader is in."""
        self._at = folder
        self._shell_runs(f"cd {folder}")

    def finds(self, path: str, text: str) -> None:
        """Put a file on the reader's machine, wherever it is."""
        written = self._blocks / "found"
        written.write_text(text, encoding="utf-8")
        self._shell_runs(f"mkdir -p $(dirname {path}) && cp {written} {path}")

    def aside(self, script: str, *arguments: str) -> str:
        """Run a Python script that is no part of the page, on the reader's machine."""
        path = self._blocks / "aside.py"
        path.write_text(script, encoding="utf-8")
        command = self._inside([sys.executable, str(path), *arguments])
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    def _inside(self, command: list[str]) -> list[str]:
        return ["nsenter", "--target", str(self._shell.pid), "--mount", f"--wd={self._at}", *command]

    def _types(self, block: Block, command: Command, exit_code: int, looks_for_s: float) -> str:
        if command.endless:
            return self._interrupts(block, command)
        deadline = time.monotonic() + looks_for_s
        while True:
            code, out, errors = self._shell_runs(command.text)
            said = out + errors
            assert code == (command.exit_code or exit_code), (
                f"{block}: {command.text}: exit code {code}: {said[-4000:]}"
            )
            if command.prints is None:
                return said
            try:
                assert_same_output(out, command.prints, str(block))
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_AGAIN_S)
            else:
                return said

    def _shell_runs(self, command: str) -> tuple[int, str, str]:
        """Return the command's exit code, output and errors."""
        self._write(
            self._shell,
            f"{{ {command}\n}} </dev/null >{self._output} 2>{self._errors}\nprintf '%s\\n' $? >&{self._told}\n",
        )
        code = self._hear(self._news)
        out, errors = (path.read_text(encoding="utf-8") for path in (self._output, self._errors))
        assert code, f"the shell has ended: {command}: {out[-2000:]}{errors[-2000:]}"
        return int(code), out, errors

    def _interrupts(self, block: Block, command: Command) -> str:
        """Wait until the command has printed a line, and press Ctrl-C."""
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                self._inside(["bash", "-c", command.text]),
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
            assert process.stdout is not None
            try:
                first = process.stdout.readline()
                os.killpg(process.pid, signal.SIGINT)
                rest, _ = process.communicate(timeout=_TIMEOUT_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            errors.seek(0)
            assert first, f"{block}: {command.text}: it ended by itself: {errors.read()[-4000:]}"
        return first + rest

    def _runs(self, block: Block) -> str:
        path = self._blocks / f"{Path(block.page).name}-{block.line}.py"
        path.write_text(block.text, encoding="utf-8")
        process, news = self._interpreter or self._start_interpreter()
        with self._python_output.open(encoding="utf-8") as output:
            output.seek(0, os.SEEK_END)
            begin = output.tell()
            self._write(process, f"{path}\n")
            outcome = self._hear(news)
            output.seek(begin)
            said = output.read()
        assert outcome == "done", f"{block}: {said[-6000:]}"
        return said

    def _start_interpreter(self) -> tuple[subprocess.Popen[str], int]:
        news, told = os.pipe()
        with self._python_output.open("w") as output:
            process = subprocess.Popen(
                self._inside([sys.executable, str(_INTERPRETER), str(self.folder), str(told)]),
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[told],
                text=True,
                start_new_session=True,
            )
        os.close(told)
        self._interpreter = process, news
        return self._interpreter

    def leaves_python(self) -> None:
        """End the page's interpreter as the end of a script does."""
        assert self._interpreter is not None
        process, news = self._interpreter
        self._interpreter = None
        os.close(news)
        process.communicate(timeout=_TIMEOUT_S)
        assert process.returncode == 0, self._python_output.read_text(encoding="utf-8")[-4000:]

    @staticmethod
    def _write(process: "subprocess.Popen[str]", text: str) -> None:
        stdin: IO[str] | None = process.stdin
        assert stdin is not None
        stdin.write(text)
        stdin.flush()

    @staticmethod
    def _hear(news: int) -> str:
        """Return the next line; nothing if the other end is gone."""
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(news, 1)
            if not byte:
                return ""
            line += byte
        return line.decode().strip()


@contextmanager
def reading(env: Mapping[str, str] | None = None, *, own_network: bool = False) -> Iterator[Reader]:
    """Give a reader a machine with these variables, and maybe a network of its own, and end all of it."""
    with tempfile.TemporaryDirectory(prefix="page-", dir="/tmp") as folder:
        reader = Reader(Path(folder), env or {}, own_network=own_network)
        try:
            yield reader
        finally:
            reader.close()


def assert_same_output(printed: str, shown: str, where: str) -> None:
    """Compare a command's output with the page's by lines, tables by cells, without what differs by machine."""
    ours, theirs = ([line.rstrip() for line in text.splitlines()] for text in (printed, shown))
    header = _cells(theirs[0])
    if not all(re.fullmatch(r"[A-Z]+", cell) for cell in header):
        assert ours == theirs, where
        return
    assert _cells(ours[0]) == header, where
    assert len(ours) == len(theirs), (where, printed)
    for our, their in zip(ours[1:], theirs[1:], strict=True):
        assert _compared(ours[0], our) == _compared(theirs[0], their), where


def _cells(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


def _compared(header: str, line: str) -> list[tuple[str, str]]:
    """Return the cells of a table's line, each with its column's name, without what differs by machine."""
    names, cells = _cells(header), _cells(line)
    if len(cells) != len(names):  # Some are empty: of these tables the columns are flush left.
        begins = [match.start() for match in re.finditer(r"[A-Z]+", header)]
        ends = [*begins[1:], None]
        cells = [line[begin:end].strip() for begin, end in zip(begins, ends, strict=True)]
    return [(name, cell) for name, cell in zip(names, cells, strict=True) if name not in _MASKED]
