"""Runs of several processes, which are forks of one that has imported the framework.

Importing it in each process of each run would take most of the time.
"""

from __future__ import annotations

import atexit
import importlib
import json
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from shared import parallel
from tests.frameworks import apart


class Forks:
    """`launch` of the kit by forks; it is to be made before an operator runs in this process.

    From then on its threads, of which a fork has none, would be missed.
    """

    def __init__(self, framework: str, folder: Path) -> None:
        self.framework, self.folder = framework, folder
        for name in ("kit.replicas", *(f"parallel.{kind}_parallel" for kind in KINDS)):
            importlib.import_module(f"{framework}_impl.{name}")
        self._server, theirs = multiprocessing.Pipe()
        given = self._server, theirs
        multiprocessing.get_context("fork").Process(target=_serve, args=given).start()
        theirs.close()
        atexit.register(self._server.close)  # by which it ends

    def launch(
        self, make: str, build: str, dataset, run: parallel.Run, settings: dict | None = None
    ) -> parallel.Result:
        """What the processes of a run have trained."""
        stages = run.parts if self.framework == "pt" else 1
        count = run.processes or run.replicas * stages
        threads = parallel.threads_each(run.threads, count)
        common = parallel.environment(threads)
        with parallel.training_folder(dataset) as data:
            out, said = self.folder / "result.npz", self.folder / "said"
            said.write_text("")
            given = parallel.arguments(make, build, data, run, settings or {})
            given += [f"--threads={threads}", f"--out={out}"]
            places = PLACES[self.framework](parallel.free_ports(count))
            module = f"{self.framework}_impl.kit.replicas"
            self._server.send([(module, given, common | place, said) for place in places])
            codes = self._server.recv()
        if any(code != 0 for code in codes):  # None: it did not end
            raise RuntimeError(f"replicas ended with {codes}: {given}: {said.read_text()}")
        result = parallel.Result.load(out)
        out.unlink()
        return result


KINDS = ("data", "model", "tensor")


def _serve(ours: Connection, theirs: Connection) -> None:
    """Take what the processes of a run are given, and answer with how they ended."""
    ours.close()
    context = multiprocessing.get_context("fork")
    while True:
        try:
            every = theirs.recv()
        except EOFError:
            return
        started = [context.Process(target=_replica, args=given) for given in every]
        for process in started:
            process.start()
        for process in started:
            process.join(120)
        theirs.send([process.exitcode for process in started])
        for process in started:
            process.kill()


def _replica(module: str, given: list[str], environment: dict[str, str], said: Path) -> None:
    """Be one process of a run, which writes its errors to the file `said`."""
    os.environ |= environment
    sys.argv, sys.stderr = [module, *given], said.open("a")
    importlib.import_module(module).main()
    atexit._run_exitfuncs()  # a forked process would not, and its framework says goodbye there


def _pt_places(ports: list[int]) -> list[dict[str, str]]:
    """What torchrun tells each process."""
    world = {"MASTER_ADDR": parallel.LOOPBACK, "MASTER_PORT": str(ports[0])}
    world |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(len(ports)))
    return [world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(len(ports))]


def _tf_places(ports: list[int]) -> list[dict[str, str]]:
    """The cluster of all processes, and which of them each is."""
    if len(ports) == 1:
        return [{}]
    hosts = [f"{parallel.LOOPBACK}:{port}" for port in ports]
    return [{"TF_CONFIG": tf_config(hosts, index)} for index in range(len(hosts))]


def tf_config(hosts: list[str], index: int = 0) -> str:
    """What TensorFlow tells the process of this number."""
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": hosts}, "task": task})


PLACES = {"pt": _pt_places, "tf": _tf_places}


def assert_equal_work(one: parallel.Result, other: parallel.Result, bar: float) -> None:
    """Both have the same losses, and the same weights by relative L2 distance."""
    np.testing.assert_allclose(one.losses, other.losses, rtol=bar)
    far = differences(one, other)
    assert {name: found for name, found in far.items() if not found < bar} == {}


def differences(one: parallel.Result, other: parallel.Result) -> dict[str, float]:
    """Relative L2 distance of each tensor."""
    assert one.weights.keys() == other.weights.keys()
    return {name: apart(value, other.weights[name]) for name, value in one.weights.items()}


def result_of(weights: dict, losses: list[float]) -> parallel.Result:
    """What plain code has trained."""
    none = np.zeros(0)
    return parallel.Result(weights, np.array(losses), *[none] * 5, 0.0)
