"""Runs pytest with each list of arguments, and prints what came of it, a line each.

    python -m tests.harness.in_one '[["bench/", "--collect-only"], ...]'

In one process, since most of a run that measures nothing is imports.
"""

import contextlib
import io
import json
import sys

import pytest

for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = pytest.main(arguments)
    print(json.dumps([status, out.getvalue(), err.getvalue()]), flush=True)
