"""Several hosts on one machine: network namespaces with links between them.

The hosts are namespaces (network, processes, mounts) held by a process that ends with this one. So
the kernel removes all their processes, interfaces and ports when this process ends, and at the
latest after `seconds`. Nothing outside is changed, and a host can reach nothing outside. Root may
make them, and any user if the system permits user namespaces.

Links are veth pairs on a bridge; the kernel's token bucket filter (tbf) limits each host's
bandwidth. With a latency, `bench/network/switch.py` replaces the bridge, and frames are 9,000 bytes
long.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

MOST_HOSTS = 64
PORT = 29500  # torchrun's own default; free, since no host has a program yet
PROGRAMS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2"}
SWITCH = Path(__file__).with_name("switch.py")
# The first process of the namespaces: when it ends, all others in them do. `cat` ends with us.
HOLD = """mount -t tmpfs none /run && mkdir /run/netns && echo "{names}" > /run/hosts &&
mount --bind /run/hosts /etc/hosts && echo ready && exec timeout -s KILL {seconds} cat"""
# In a namespace for its name, so that programs that ask for it can be reached by it.
NAMED = 'echo host{host} > /proc/sys/kernel/hostname && exec "$@"'
BURST = 16_000  # bytes that may leave at once; no less than the longest frame


class Refused(RuntimeError):
    """Why this machine permits no network namespaces, in one line."""


@dataclass(frozen=True)
class Link:
    """The link between a host and the switch.

    latency: seconds from one host to another, one way. bandwidth: bits per second that each host
    may send; None: no limit.
    """

    latency: float = 0.0
    bandwidth: float | None = None


class Hosts:
    """`count` hosts on one switch; a context manager that removes them.

    Raises Refused if the machine does not permit it, ValueError for wrong settings.
    """

    def __init__(self, count: int, link: Link = Link(), *, seconds: float = 600.0):
        if not 1 <= count <= MOST_HOSTS:
            raise ValueError(f"--hosts: give 1 to {MOST_HOSTS}, not {count}")
        if link.latency < 0 or (link.bandwidth is not None and link.bandwidth <= 0):
            raise ValueError(f"{link}: give a latency of 0 or more and a bandwidth above 0")
        if not 0 < seconds < float("inf"):
            raise ValueError(f"--seconds: give a finite number above 0, not {seconds}")
        self.count, self.link = count, link
        self._path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
        self._programs = _programs(self._path)
        self._lab, self._enter = self._make(seconds)
        self._switch: subprocess.Popen | None = None
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End every process on the hosts, and remove them; returns when they are gone."""
        self._lab.stdin.close()
        try:
            self._lab.wait(10)
        except subprocess.TimeoutExpired:
            self._lab.kill()
            self._lab.wait()
        for process in filter(None, [self._lab, self._switch]):
            process.wait()
            process.stdout.close()
            process.stderr.close()

    def address(self, host: int) -> str:
        """The IPv4 address of a host's interface, eth0; host names are host0, host1 and so on."""
        return f"10.77.0.{host + 1}"

    def environment(self, host: int) -> dict[str, str]:
        """This process's variables, and those of a cluster manager for one program per host."""
        kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        workers = [f"{self.address(n)}:{PORT}" for n in range(self.count)]
        task = {"type": "worker", "index": host}
        return kept | {
            "RANK": str(host),
            "WORLD_SIZE": str(self.count),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task}),
        }

    def start(self, host: int, command: list[str], **settings) -> subprocess.Popen:
        """Start a command on a host, in this process's folder; `settings` are for Popen.

        The returned process waits for the command and ends as it does. Signals reach the command by
        `stop`, or as the process group of a `start_new_session`.
        """
        settings = {"env": self.environment(host), "stdin": subprocess.DEVNULL} | settings
        named = ["unshare", "--uts", "--", "sh", "-c", NAMED.format(host=host), "sh"]
        within = ["nsenter", f"--net=/run/netns/host{host}", "--", *named]
        return subprocess.Popen([*self._enter, *within, *command], **settings)

    def processes(self, host: int) -> list[int]:
        """The processes on a host, by their numbers there."""
        return list(map(int, self._shell(f"ip netns pids host{host}").split()))

    def stop(self, host: int) -> None:
        """Kill every process on a host at once. Its kernel closes their connections, which a loss
        of power would not: that is `cut`.
        """
        self._shell(f"ip netns pids host{host} | xargs -r kill -KILL")

    def cut(self, host: int) -> None:
        """Disconnect a host: nothing comes or goes, and nobody is told. Not with a latency."""
        if self.link.latency:
            raise ValueError("a link with a latency can't be cut")
        self._shell(f"ip link set port{host} down")

    def mend(self, host: int) -> None:
        """Connect a host again."""
        self._shell(f"ip link set port{host} up")

    def _make(self, seconds: float) -> tuple[subprocess.Popen, list[str]]:
        """The process that holds the namespaces, and the command that enters them."""
        kinds, errors = ["--net", "--mount", "--pid"], []
        names = [f"{self.address(host)} host{host}" for host in range(self.count)]
        hold = HOLD.format(names="\n".join(["127.0.0.1 localhost", *names]), seconds=seconds)
        for user in ([], ["--user", "--map-root-user"]):
            unshare = [self._programs["unshare"], *kinds, *user]
            lab = subprocess.Popen(
                [*unshare, "--fork", "--kill-child", "--mount-proc", "sh", "-c", hold],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C reaches us, and we end it
            )
            if lab.stdout.readline() == "ready\n":
                children = Path(f"/proc/{lab.pid}/task/{lab.pid}/children").read_text().split()
                as_we_are = ["--user", "--preserve-credentials"] if user else []
                where = [f"--target={children[0]}", f"--wdns={os.getcwd()}"]
                return lab, [self._programs["nsenter"], *where, *kinds, *as_we_are, "--"]
            errors.append(" ".join(lab.communicate()[1].split()))
        raise Refused(f"network namespaces are not permitted here: {errors[-1] or errors[0]}")

    def _connect(self) -> None:
        if self.link.latency:
            self._start_switch()
            plugs = [
                f"ip link set port{n} netns host{n} name eth0 mtu 9000" for n in range(self.count)
            ]
        else:
            plugs = [
                f"ip link add eth0 netns host{n} type veth peer name port{n}\n"
                f"ip link set port{n} master switch up"
                for n in range(self.count)
            ]
        lines = ["ip link add switch type bridge", "ip link set switch up"]
        for host, plug in enumerate(plugs):
            name = f"host{host}"
            lines += [
                f"ip netns add {name}",
                plug,
                f"ip -n {name} address add {self.address(host)}/24 dev eth0",
                f"ip -n {name} link set lo up",
                f"ip -n {name} link set eth0 up",
                # A pause would throw TCP back to its slow start, and time would not be linear.
                f"nsenter --net=/run/netns/{name} "
                "sh -c 'echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle'",
            ]
            if self.link.bandwidth:
                rate = f"rate {self.link.bandwidth:.0f}bit burst {BURST} limit 16mb"
                lines.append(f"tc -n {name} qdisc add dev eth0 root tbf {rate}")
        self._shell("\n".join(lines))

    def _start_switch(self) -> None:
        names = [f"port{host}" for host in range(self.count)]
        self._switch = subprocess.Popen(
            [*self._enter, sys.executable, SWITCH, str(self.link.latency), *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self._switch.stdout.readline() != "ready\n":
            reason = self._switch.stderr.read().strip().splitlines()[-1:]
            raise Refused(f"no TAP devices for links with a latency: {' '.join(reason)}")

    def _shell(self, script: str) -> str:
        """Run a script where the switch is; what it printed. Raises Refused where it fails."""
        done = subprocess.run(
            [*self._enter, "sh", "-ec", script],
            env=os.environ | {"PATH": self._path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise Refused(f"the links can't be made: {' '.join(done.stderr.split())}")
        return done.stdout


def _programs(path: str) -> dict[str, str]:
    """Where each program is. Raises Refused for the first that is not there."""
    if sys.platform != "linux":
        raise Refused("network namespaces exist only on Linux")
    places = {name: shutil.which(name, path=path) for name in PROGRAMS}
    for name, place in places.items():
        if place is None:
            raise Refused(f"program {name!r} is missing: install {PROGRAMS[name]}")
    return places


def run(hosts: Hosts, command: str) -> int:
    """Run a shell command on every host, show its output, and return the first failed status."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    pipes["errors"] = "backslashreplace"  # who reads must not end while a command writes
    started = [hosts.start(n, ["sh", "-c", command], **pipes) for n in range(hosts.count)]
    readers = [
        threading.Thread(target=_show, args=(host, process)) for host, process in enumerate(started)
    ]
    for reader in readers:
        reader.start()
    try:
        return next(filter(None, [process.wait() for process in started]), 0)
    finally:
        hosts.close()  # what the commands left behind may hold their output open
        for reader in readers:
            reader.join()


def _show(host: int, process: subprocess.Popen) -> None:
    for line in process.stdout:
        print(f"host{host}: {line}", end="", flush=True)
