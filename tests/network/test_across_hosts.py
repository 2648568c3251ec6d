"""Training across hosts: as one process trains, and what becomes of faults.

Each host is a network namespace. The link is slow, so that a run lasts long enough to be disturbed.
"""

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import psutil
import pytest

from bench.harness.machine import THREAD_VARIABLES
from bench.network.hosts import Hosts, Link
from shared import datasets, parallel
from shared.parallel import Result, distance
from shared.specs import TASKS
from tests import workers
from tests.harness.command_line import MARK, marked
from tests.network.namespaces import wait_until

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("hosts_permitted")]
SIDES = ("pt", "tf")
SLOW = Link(bandwidth=5e6)
SAMPLES, BATCH, STEPS, SAVE_EVERY = 200, 32, 16, 4  # an epoch's last batch has 8
PATIENCE = 8  # seconds that a process waits for others
END = 15  # seconds in which a process must have ended when it waits no longer
QUIET = dict.fromkeys(THREAD_VARIABLES, "1")
QUIET |= {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
# Else the workers of a second attempt find the addresses of the first in torchrun's own store.
QUIET |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    """The first digits by side, as its model takes them."""
    whole = datasets.materialise(TASKS["digits-cnn"].dataset, tmp_path_factory.mktemp("whole"))
    x, y = (part[:SAMPLES] for part in datasets.load(whole, "train"))
    folders = {}
    for side, images in (("pt", x.transpose(0, 3, 1, 2)), ("tf", x)):
        folders[side] = tmp_path_factory.mktemp(f"data-{side}")
        parallel.save_samples(np.ascontiguousarray(images), folders[side] / "train_x")
        parallel.save_samples(y, folders[side] / "train_y")
    return folders


class Training:
    """A run of one side's program: its options, where it writes, and its processes by host."""

    def __init__(self, side: str, data: dict[str, Path], folder: Path, *, patience: int = PATIENCE):
        self.side, self.folder = side, folder
        self.checkpoint, self.out = folder / "checkpoint", folder / "result.npz"
        self.program = [
            *("-m", f"{side}_impl.kit.replicas", f"{side}_impl.parallel.data_parallel:processes"),
            *(f"{side}_impl.kit.examples:digits_cnn", str(data[side])),
            *(f"--global-batch={BATCH}", f"--steps={STEPS}", "--seed=3", "--threads=1"),
            *('--settings={"synchronised_norm": true}', f"--timeout-s={patience}"),
            *(f"--save-every={SAVE_EVERY}", f"--out={self.out}"),
        ]

    def start(self, hosts: Hosts, *, launcher=(), before="") -> dict:
        """A process on each host; `before` is for the first host's shell."""
        started = {}
        for host in (0, 1):
            launched = [word.format(host=host) for word in launcher]
            command = [sys.executable, *launched, *self.program]
            command += [f"--checkpoint={self.checkpoint}"]
            if before and host == 0:
                command = ["sh", "-c", before, "sh", *command]
            environment = hosts.environment(host) | QUIET
            with (self.folder / f"host{host}.log").open("w") as log:
                started[host] = hosts.start(host, command, env=environment, stdout=log, stderr=log)
        return started

    def said(self, host: int) -> str:
        return (self.folder / f"host{host}.log").read_text("utf-8")

    def result(self, started: dict) -> Result:
        for host, process in started.items():
            assert process.wait(120) == 0, self.said(host)
        return Result.load(self.out)

    def error(self, started: dict, host: int, seconds: float) -> str:
        """What a host's program says was wrong, which ends within so many seconds."""
        assert started[host].wait(seconds) == 1, self.said(host)
        assert "Traceback" not in self.said(host)
        (line,) = [
            line for line in self.said(host).splitlines() if line.startswith(parallel._ERROR)
        ]
        return line

    def wait_for_checkpoint(self, started: dict, *, after: set[str] = frozenset()) -> None:
        """Until there is a whole one that was not there before."""

        def new():
            for host, process in started.items():
                assert process.poll() is None, self.said(host)
            return self.checkpoints() - after

        wait_until(new, seconds=90, what="a checkpoint")

    def checkpoints(self) -> set[str]:
        suffix = {"pt": ".pt", "tf": ".index"}[self.side]
        return {path.name for path in self.checkpoint.glob(f"step-*{suffix}")}


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """The result of one process with the whole batch, by side; each is trained once."""
    results = {}

    def train(side: str) -> Result:
        if side not in results:
            training = Training(side, data, tmp_path_factory.mktemp(f"{side}-alone"))
            _, module, *arguments = training.program
            done = workers.parent(side).run(module, *arguments, timeout=120, **QUIET)
            assert done.returncode == 0, done.stdout + done.stderr
            results[side] = Result.load(training.out)
        return results[side]

    return train


def agree(ours: Result, theirs: Result) -> None:
    """The parity bar of the task's model, over all steps."""
    bar = TASKS["digits-cnn"].parity
    assert distance(ours, theirs) < bar
    assert np.abs(ours.losses / theirs.losses - 1).max() < bar
    assert len(ours.losses) == STEPS


@pytest.mark.parametrize("side", ["pt", pytest.param("tf", marks=pytest.mark.campaign)])
def test_two_hosts_train_as_one_process_does(side, data, alone, tmp_path):
    """Started as README says: torchrun on each host; TensorFlow's program with TF_CONFIG.

    At each change TensorFlow's replicas meet on one host (tests/parallel/test_data_parallel.py),
    and across hosts in a sweep (test_projection.py).
    """
    launcher = {
        "pt": "-m torch.distributed.run --nnodes=2 --node-rank={host} --master-addr=host0",
        "tf": "",
    }[side].split()
    training = Training(side, data, tmp_path, patience=60)  # nothing is to be waited for in vain
    with Hosts(2) as hosts:
        result = training.result(training.start(hosts, launcher=launcher))
    agree(result, alone(side))
    assert result.seen.sum() == 2 * SAMPLES + (STEPS - 14) * BATCH  # two epochs of 7 steps


@pytest.mark.parametrize("side", SIDES)
def test_a_worker_that_never_arrives_is_named_in_time(side, data, tmp_path):
    """By the program of one host alone, a fork of what has imported its framework."""
    _, module, *arguments = Training(side, data, tmp_path, patience=2).program
    ours, theirs = (f"127.0.0.1:{port}" for port in parallel.free_ports(2))
    cluster = {"cluster": {"worker": [ours, theirs]}, "task": {"type": "worker", "index": 0}}
    told = {"RANK": "0", "WORLD_SIZE": "2", "TF_CONFIG": json.dumps(cluster)}
    told |= dict(zip(("MASTER_ADDR", "MASTER_PORT"), ours.split(":"), strict=True))
    start = time.monotonic()
    done = workers.parent(side).run(module, *arguments, timeout=60, **QUIET | told)
    assert time.monotonic() - start > 2
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith(parallel._ERROR)]
    assert {"pt": "1/2 clients joined", "tf": f"{theirs} did not come"}[side] in line


@pytest.mark.campaign
@pytest.mark.parametrize("side", SIDES)
def test_after_every_fault_a_run_goes_on_to_the_same_weights(
    side, data, alone, tmp_path, monkeypatch
):
    """A host is killed, then the link is lost, then the disk is full; nothing is left over."""
    monkeypatch.setenv(MARK, mark := uuid.uuid4().hex)
    training = Training(side, data, tmp_path)
    with Hosts(2, SLOW) as hosts:
        started = training.start(hosts)
        training.wait_for_checkpoint(started)
        hosts.stop(1)
        assert training.error(started, 0, seconds=PATIENCE + END)
        assert hosts.processes(0) == hosts.processes(1) == []

        before = training.checkpoints()
        started = training.start(hosts)
        training.wait_for_checkpoint(started, after=before)
        hosts.cut(1)
        for host in (0, 1):
            assert training.error(started, host, seconds=PATIENCE + END)
        hosts.mend(1)

        line, after = run_on_a_full_disk(training, hosts)
        assert "No space left on device" in line
        assert str(training.checkpoint) in line

        training.checkpoint = after
        result = training.result(training.start(hosts))
        assert hosts.processes(0) == hosts.processes(1) == []
    assert marked(mark) == []
    agree(result, alone(side))
    assert 0 < result.seen.sum() < 2 * SAMPLES + (STEPS - 14) * BATCH  # it did not begin again


def run_on_a_full_disk(training: Training, hosts: Hosts) -> tuple[str, Path]:
    """Go on where the disk has no room for another checkpoint; the error, and what is left there.

    The disk is a tmpfs that host 0 alone sees, with what lies in the checkpoint's folder.
    """
    old, after = (training.folder / name for name in ("old", "after"))
    shutil.copytree(training.checkpoint, old)
    after.mkdir()
    size = sum(-(-path.stat().st_size // 4096) * 4096 for path in old.iterdir()) + 16384
    disk, old, kept = (shlex.quote(str(path)) for path in (training.checkpoint, old, after))
    script = f"mount -t tmpfs -o size={size} none {disk} && cp -a {old}/. {disk} && "
    script += f'"$@"; status=$?; cp -a {disk}/. {kept}; umount {disk}; exit $status'
    started = training.start(hosts, before=script)
    line = training.error(started, 0, seconds=90)
    started[1].wait(PATIENCE + END)
    return line, after


@pytest.mark.campaign
def test_torchrun_starts_a_killed_worker_again(data, alone, tmp_path):
    """Elastic: the launchers meet again, and the run goes on from its last checkpoint."""
    launcher = "-m torch.distributed.run --nnodes=2 --max-restarts=2 --rdzv-id=run"
    launcher = [*launcher.split(), "--rdzv-backend=c10d", "--rdzv-endpoint=host0:29400"]
    training = Training("pt", data, tmp_path)
    with Hosts(2, SLOW) as hosts:
        started = training.start(hosts, launcher=launcher)
        training.wait_for_checkpoint(started)
        worker_below(started[1]).send_signal(signal.SIGKILL)
        result = training.result(started)
        assert hosts.processes(0) == hosts.processes(1) == []
    agree(result, alone("pt"))
    assert 0 < result.seen.sum() < 2 * SAMPLES + (STEPS - 14) * BATCH


def worker_below(launcher: subprocess.Popen) -> psutil.Process:
    """The process that trains, which is not its launcher."""
    every = psutil.Process(launcher.pid).children(recursive=True)
    trains = [p for p in every if "torch.distributed.run" not in p.cmdline()]
    (worker,) = [p for p in trains if "pt_impl.kit.replicas" in p.cmdline()]
    return worker
