"""Replicas out of reach of others, and one that hangs: its peers end in time, and leave nothing."""

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared import network_namespace, parallel
from tests import workers
from tests.network.namespaces import refusal
from tests.parallel.hanging_worker import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("pt", "tf")
END = 15  # seconds in which a process must have ended when it waits no longer
permitted = pytest.mark.skipif(refusal() is not None, reason=f"no namespaces: {refusal()}")


@pytest.fixture(scope="module")
def hung(tmp_path_factory) -> dict:
    """What became of the run of each side, and what it left in the temporary folder."""

    def one(side: str) -> workers.Scenarios:
        folder, temporary = tmp_path_factory.mktemp(side), tmp_path_factory.mktemp(f"tmp-{side}")
        settings = {"TMPDIR": str(temporary)}
        run = workers.run("parallel.hanging_worker", (side,), lambda name: [folder], **settings)
        found = run[side]
        found["left"] = {"files": [path.name for path in temporary.iterdir()]}
        return found

    with ThreadPoolExecutor() as pool:  # most of the time they wait
        return dict(zip(SIDES, pool.map(one, SIDES), strict=True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("side", SIDES)
def test_a_peer_that_hangs_ends_the_run_within_its_time(side, hung):
    kind, words = hung[side]["raised"]
    assert kind == "RuntimeError"
    assert "\n" not in words
    assert {"pt": "6000ms", "tf": "another process hangs"}[side] in words
    waited = hung[side]["ended"] - hung[side]["begun-0"]
    assert PATIENCE - 1 < waited < PATIENCE + END
    assert hung[side]["begun-1"]  # it was there, and alive, and did nothing


@pytest.mark.parametrize("side", SIDES)
def test_a_run_that_ends_badly_leaves_nothing(side, hung):
    assert hung[side]["left"] == {"files": []}


@permitted
def test_only_the_loopback_is_there_for_the_servers_of_tensorflow(hung):
    assert hung["tf"]["interfaces-0"] == hung["tf"]["interfaces-1"] == ["lo"]


# A network of its own ---------------------------------------------------------------------------

SERVER = """
import socket, sys
with socket.create_server(("", int(sys.argv[1]))) as server:
    server.settimeout(20)
    open(sys.argv[2], "w").close()
    server.accept()[0].sendall(b"here")
"""
CLIENT = """
import pathlib, socket, sys, time
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(.01)
assert socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20).recv(4) == b"here"
"""


@permitted
def test_processes_of_one_network_reach_each_other_and_nobody_else_does(tmp_path):
    with network_namespace.isolated_network() as network:
        (port,) = parallel.free_ports(1)
        started = []
        for program in (SERVER, CLIENT):
            words = [sys.executable, "-c", program, str(port), str(tmp_path / "listening")]
            command = network.command(words)
            started.append(subprocess.Popen(command, pass_fds=network.files))
            if program is SERVER:
                until((tmp_path / "listening").exists)
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((parallel.LOOPBACK, port), 5)
        assert [process.wait(30) for process in started] == [0, 0]


def until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@permitted
def test_who_enters_a_network_keeps_user_folder_and_environment(tmp_path):
    said = "import os; print(os.getuid(), os.getcwd(), os.environ['WORD'])"
    with network_namespace.isolated_network() as network:
        done = subprocess.run(
            network.command([sys.executable, "-c", said]),
            pass_fds=network.files,
            cwd=tmp_path,
            env={"WORD": "kept"},
            capture_output=True,
            text=True,
        )
    assert done.stdout.split() == [str(os.getuid()), str(tmp_path), "kept"]


def test_where_no_network_is_permitted_a_warning_says_so_and_the_run_goes_on(monkeypatch, tmp_path):
    refusing = "import sys; sys.exit('PermissionError: unshare: Operation not permitted')"
    monkeypatch.setattr(network_namespace, "_PYTHON", [sys.executable, "-c", refusing])
    monkeypatch.setattr(parallel, "others_reach", lambda host: ["eth0"])
    run = f"open({str(tmp_path / 'ran')!r}, 'w').close()"
    with pytest.warns(UserWarning, match="listen on every interface .*Operation not permitted"):
        parallel.run([([sys.executable, "-c", run], {})], out_of_reach=True)
    assert (tmp_path / "ran").exists()


@permitted
def test_interfaces_beside_the_loopback_and_the_runs_own_are_named(tmp_path):
    said = (
        "import psutil; from shared import parallel\n"
        "print([name for name in psutil.net_if_addrs()], parallel.others_reach('127.0.0.1'))"
    )
    with network_namespace.isolated_network() as network:
        done = subprocess.run(
            network.command([sys.executable, "-c", said]),
            pass_fds=network.files,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    assert done.stdout == "['lo'] []\n", done.stderr


def test_who_listens_on_every_interface_is_seen():
    with socket.create_server(("", 0)) as everywhere, socket.create_server(("127.0.0.1", 0)) as one:
        assert parallel.listens_everywhere(everywhere.getsockname()[1])
        assert not parallel.listens_everywhere(one.getsockname()[1])


# Waiting without end ----------------------------------------------------------------------------

IDLE = """
import sys, time
from shared import parallel
parallel.end_when_idle(0.5)
end = time.monotonic() + 1.5
while time.monotonic() < end:
    if sys.argv[1] == "idle":
        time.sleep(2)
print("ended by itself")
"""


@pytest.mark.parametrize(("kind", "status"), [("idle", 1), ("busy", 0)])
def test_who_has_nothing_to_do_for_too_long_ends_with_a_word(kind, status):
    done = subprocess.run(
        [sys.executable, "-c", IDLE, kind], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status
    assert ("another process hangs: nothing to do for 0.5 s" in done.stderr) == (status == 1)
