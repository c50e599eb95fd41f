"""The command, as processes, beside a companion that saves, deletes and collects in the same folder."""

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stepkeeper.checkpoint import SaveOrder, Structure, ValueOrder
from stepkeeper.companion.messages import ClaimRequest, CommitRequest, OpenRequest
from stepkeeper.companion.session import Session
from stepkeeper.log import Log
from stepkeeper.policy.keep import LastN
from stepkeeper.policy.keep_message import Keep
from stepkeeper.storage import open_store
from stepkeeper_testing.background import done
from stepkeeper_testing.checkpoints import SmallRoot, write_request
from stepkeeper_testing.pod import pod_identity

COMMAND = [str(Path(sys.executable).with_name("stepkeeper"))]
N_ROUNDS = 2


class Job:
    """Saves until it is told to end; what fails ends it and is kept."""

    def __init__(self, url: str) -> None:
        self.session = Session(
            OpenRequest(
                rank=0,
                world_size=1,
                uri=url,
                keep=Keep(last=(LastN(2),)),
                identity=pod_identity(restart_attempt=1),
            ),
            lambda directive: None,
        )
        self.claim = self.session.claim_root(ClaimRequest()).claim
        self.steps = 0
        self.complaint: BaseException | None = None
        self.ended = threading.Event()
        self.region = os.memfd_create("region")
        os.write(self.region, secrets.token_bytes(1 << 20))
        self.save()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        try:
            while not self.ended.is_set():
                self.save()
        except BaseException as error:  # the test raises it
            self.complaint = error

    def save(self) -> None:
        order = SaveOrder(
            rank=0,
            world_size=1,
            step=self.steps + 1,
            claim=self.claim.slot,
            nonce=secrets.token_hex(16),
            structure=Structure(),
            values=(ValueOrder(fqn="blob", start=0, length_bytes=1 << 20),),
        )
        self.session.shares.write_share(write_request(order), self.region)
        _, after = self.session.commit_save(CommitRequest(folder=order.folder, others=(), duration_millis=1))
        done(after)
        self.steps += 1


@contextmanager
def saving(url: str) -> Iterator[Job]:
    job = Job(url)
    job.thread.start()
    try:
        yield job
    finally:
        job.ended.set()
        job.thread.join(60)
        os.close(job.region)
    if job.complaint is not None:
        raise job.complaint


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.smoke
def test_nothing_but_rm_is_noticed_by_a_job_that_is_saving(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    before = SmallRoot(url)
    before.begin()
    left = before.give_up(7)
    with saving(url) as job:
        watching = subprocess.Popen(
            [*COMMAND, "watch", url, "--interval", "0.01", "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert watching.stdout is not None
            first = json.loads(watching.stdout.readline())
            for _ in range(N_ROUNDS):
                steps = job.steps
                for command in (["ls", "--all"], ["verify", "--all"], ["gc"], ["doctor"]):
                    done = run(*command, url)
                    assert (done.returncode, done.stderr) == (0, ""), done
                assert job.steps > steps
            refused = run("rm", url, str(first["step"]), "--yes")
            assert refused.returncode in (1, 4), refused
            watching.send_signal(signal.SIGINT)
            seen, said = watching.communicate(timeout=60)
        finally:
            watching.kill()
            # Its pipes are closed too: left to be collected, they would fail some later test.
            watching.communicate()
    assert (watching.returncode, said) == (0, "")
    steps_seen = [first["step"], *(json.loads(line)["step"] for line in seen.splitlines())]
    assert steps_seen == sorted(set(steps_seen))
    assert len(steps_seen) > N_ROUNDS

    state = Log(open_store(url)).open()
    assert [record.step for record in state.line] == [job.steps, job.steps - 1]
    assert state.claim == job.claim.slot
    assert not (tmp_path / left).exists()
    assert run("verify", "--all", url).returncode == 0
