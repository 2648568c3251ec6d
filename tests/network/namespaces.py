"""What tests between hosts share: whether this machine permits any, and waiting."""

import shutil
import subprocess
import time
from functools import cache

# What hosts are made of, asked of the system: a fault in `network.hosts` has to fail, not to skip.
NEEDED = """mount -t tmpfs none /run && ip link add switch type bridge &&
ip link add one type veth peer name other && ip tuntap add tap mode tap &&
tc qdisc add dev one root tbf rate 1mbit burst 16000 limit 16mb"""


@cache
def refusal() -> str | None:
    """Why this machine permits no namespaces with links between them; None where it does."""
    for program in ("unshare", "nsenter", "ip", "tc"):
        if shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin") is None:
            return f"program {program!r} is missing"
    return namespace_refusal() and namespace_refusal("--user", "--map-root-user")


def namespace_refusal(*kind: str) -> str | None:
    """What the system says where it permits none of this kind; None where it does."""
    command = ["unshare", *kind, "--net", "--mount", "--pid", "--fork", "--mount-proc"]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    done = subprocess.run(
        [*command, "sh", "-c", NEEDED], env=environment, capture_output=True, text=True, timeout=30
    )
    return " ".join(done.stderr.split()) or "refused" if done.returncode else None


def wait_until(condition, *, seconds=20.0, what="it"):
    """What `condition` returns once that is true; AssertionError where it is not in time."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.02)
    return result
