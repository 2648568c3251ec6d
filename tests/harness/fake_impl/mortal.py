"""A framework that kills the parents that import it: the first `MORTAL_LIVES` of them.

`MORTAL` names a file that counts them; `MORTAL_AT` is "import", or the number of the fork before
which the parent is killed.
"""

import os
import signal

with open(os.environ["MORTAL"], "a") as _file:
    _file.write(".")
    _file.flush()
    _life = _file.tell()
_forks = []


def _die() -> None:
    _forks.append(1)
    if len(_forks) == int(os.environ["MORTAL_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)


if _life <= int(os.environ["MORTAL_LIVES"]):
    if os.environ["MORTAL_AT"] == "import":
        os._exit(7)
    os.register_at_fork(before=_die)
