"""A worker: the process of one case. Only this module imports a kit.

It is forked by a parent. For cold starts and memory, and where forking is unsafe, it is newly
executed (`python -m bench.harness.worker ADDRESS NAME LOG`). It answers requests one by one; each
`_op_` method is one. Those that prepare a case are here; others are in `timing`,
`memory_operations`, `accuracy`, `keeping` and `user_model`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import signal
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from bench.analysis.values import finite
from bench.harness import machine, memory, wire
from bench.harness.accuracy import Training
from bench.harness.answers import Built, Configured, Described, Probed, Proof
from bench.harness.folders import written_once
from bench.harness.keeping import KeepingChecks, load_weights, trained_weights
from bench.harness.memory_operations import MemoryOperations
from bench.harness.plan import CaseMessage, Work
from bench.harness.products import best_products
from bench.harness.sizes import model_size
from bench.harness.timing import Timing
from bench.harness.user_model import KIT, Checking, Side
from shared import datasets, user_model
from shared.specs import TASKS
from shared.weights import checksum, init_weights

RESIDENT_BATCHES = 10  # their ten losses are the certificate


def on_cpu(device: str) -> bool:
    """Whether a kit's device name is the CPU ("cpu", "CPU:0")."""
    return device.lower().startswith("cpu")


def ending(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with status {code}"


def run(address: str, name: str, log: str) -> None:
    """Serve requests until the harness hangs up. Standard output and errors go to `log`."""
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    connection = wire.connect(address, name)
    bench = Operations()
    with contextlib.suppress(wire.Gone):
        while True:
            reply = _reply(bench, wire.receive(connection, wire.Request))
            sys.stdout.flush()
            sys.stderr.flush()
            try:
                wire.send(connection, reply)
            except TypeError as error:  # JSON has no such value
                wire.send(connection, wire.Reply(error=user_model.one_line(error)))


def _reply(bench: Operations, request: wire.Request) -> wire.Reply:
    """The answer, or why there is none; nothing that a technique raises ends the process."""
    given = request.arguments
    try:
        if "case" in given:
            given["case"] = msgspec.convert(given["case"], CaseMessage)
        return wire.Reply(getattr(bench, f"_op_{request.op}")(**given))
    except NotImplementedError as error:
        return wire.Reply(unsupported=" ".join(str(error).split()))
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        return wire.Reply(error=user_model.one_line(error))


class Operations(Timing, MemoryOperations, Training, KeepingChecks, Checking):
    """The state of one case: its kit, prepared step and resident batches.

    `is_trained`: whether its weights are those of the run's trained model.
    """

    is_trained = False

    def _op_configure(
        self, package: str, threads: int, seed: int, imports: list[str]
    ) -> Configured:
        """Import the framework and its kit, set threads and seeds, and report what took effect."""
        for module in imports:
            importlib.import_module(module)
        for module in KIT:
            importlib.import_module(f"{package}.{module}")
        self.impl = importlib.import_module(package)
        self.kit = self.impl.kit
        self.seed = seed
        counts = self.kit.runtime.configure(threads=threads, seed=seed)
        if any(count != threads for count in counts.values()):
            raise RuntimeError(f"{threads} threads were asked for, the framework reports {counts}")
        self.imported = set(sys.modules)
        return Configured(threads=counts, keeps_freed_memory=memory.keeps_freed_memory())

    def _op_describe(self, dtypes: list[str]) -> Described:
        """Versions, device, and the best product of each dtype in FLOP/s."""
        runtime = self.kit.runtime
        return Described(
            versions=runtime.versions(),
            device=runtime.device(),
            device_info=runtime.device_info(),
            python=sys.version.split()[0],
            products=best_products(runtime, dtypes, on_cpu=on_cpu(runtime.device())),
            keeps_freed_memory=memory.keeps_freed_memory(),
            onednn=runtime.onednn(),
        )

    def _op_build(
        self, case: CaseMessage, data: str, weights_seed: int, files: str | None = None
    ) -> Built:
        """Prepare the case and put its batches on the device; whether it wrote its file for that.

        `files`: where the file is looked for first, see `matches.files_of`.
        """
        self._prepare(case, weights_seed, data, files)
        if self.work.mode == "predict" and not self.prepared.write:
            self.kit.runtime.to_evaluation(self.prepared.model)
        wrote = self._deploy()
        batches = self._first_batches(case, weights_seed, data)
        self.batches = self.kit.data.resident_batches(batches)
        if self.prepared.targets and self.work.mode == "train":
            self.batches = self._with_targets(batches)
        weights = self.kit.models.export_weights(self.prepared.model)
        of_file = isinstance(self.impl, Side)
        sha256 = self.impl.checksum(weights) if of_file else checksum(weights)
        return Built(weights_sha256=sha256, wrote=wrote)

    def _first_batches(self, case: CaseMessage, seed: int, data: str) -> list:
        """The first batches of the shared stream, or those of a user's file."""
        if isinstance(self.impl, Side):
            return self.impl.batches(case.batch_size)
        x, y = datasets.load(Path(data), "train")
        if self.is_trained:  # it has no doubt of these: the loss of its predictions has digits
            y = (y + 1) % TASKS[case.task].model.num_classes
        return datasets.first_batches(x, y, case.batch_size, RESIDENT_BATCHES, seed=seed)

    def _with_targets(self, batches: list) -> list:
        """The resident batches with what takes the place of their labels, asked for once."""
        x, y = self.kit.data.to_device(*map(np.concatenate, zip(*batches, strict=True)))
        targets, size = self.prepared.targets(x, y), len(batches[0][0])
        return [
            (x, tuple(whole[place * size : (place + 1) * size] for whole in targets))
            for place, (x, _) in enumerate(self.batches)
        ]

    def _import(self, case: CaseMessage) -> None:
        """Import the case's bench file, its technique, where it has one, and others it uses."""
        self.bench = importlib.import_module(case.module)
        family = f"{self.impl.__name__}.{case.family}"
        technique = f"{family}.{case.technique}"
        if importlib.util.find_spec(family) and importlib.util.find_spec(technique):
            importlib.import_module(technique)
        for other in case.composed_of:
            importlib.import_module(f"{self.impl.__name__}.{other}")

    def _modules(self) -> list[str]:
        """What was imported since the worker was configured, in order, but for Python's own."""
        new = [name for name in list(sys.modules) if name not in self.imported]
        return [name for name in new if name.partition(".")[0] not in sys.stdlib_module_names]

    def _find_work(
        self,
        case: CaseMessage,
        seed: int,
        data: str | None = None,
        files: str | None = None,
        *,
        trains: bool = False,
    ) -> None:
        """Import the case and set `work`; `trains`: it is trained from the weights of `seed`."""
        self._import(case)
        task = TASKS.get(case.task)
        if user_model.is_prepared(data):
            if not isinstance(self.impl, Side):
                self.impl = Side(self.impl, Path(data))
                self.kit = self.impl.kit
            task, weights, data = self.impl.task, self.impl.weights, str(self.impl.folder)
        else:
            trains = trains or case.mode == "train"
            self.is_trained = not trains and trained_weights(task.name).exists()
            if self.is_trained:
                weights = load_weights(trained_weights(task.name))
            else:
                weights = init_weights(task.model, seed, zero_init_residual=trains)
        folder = Path(tempfile.mkdtemp())
        self.work = Work(
            task=task,
            variant=case.variant,
            settings=case.settings,
            batch_size=case.batch_size,
            weights=weights,
            mode=case.mode,
            data=data,
            folder=folder,
            files=Path(files) if files else folder,
        )

    def _prepare(
        self,
        case: CaseMessage,
        seed: int,
        data: str,
        files: str | None = None,
        *,
        trains: bool = False,
    ) -> None:
        self._find_work(case, seed, data=data, files=files, trains=trains)
        try:
            self.prepared = self.bench.prepare(self.impl, self.work)
        except ValueError as error:
            if isinstance(self.impl, Side):  # a model that the technique has nothing to do on
                raise NotImplementedError(str(error)) from error
            raise

    def _deploy(self) -> bool:
        """Predict from the model's file, where it has one; whether it had to be written."""
        if not self.prepared.write:
            return False
        path, wrote = written_once(self.work.files, self.prepared.write)
        self.prepared = replace(self.prepared, predict=self.prepared.read(path), artifact=path)
        return wrote

    @property
    def call(self):
        """The timed function of x and y: the step, or the prediction of x."""
        if self.work.mode == "train":
            return self.prepared.step
        predict = self.prepared.predict
        return lambda x, y: predict(x)

    def _loss(self, output, y) -> float | None:
        """What a step's output says of the work that was done: its loss, or that of its logits.

        None where it is not finite.
        """
        if self.work.mode == "predict":
            if isinstance(user_model.first(output), np.ndarray):  # of another runtime
                output, _ = self.kit.data.to_device(output, output)
            training = self.kit.training
            loss_of_file = getattr(training, "prediction_loss", None)
            try:
                output = (loss_of_file or training.loss_of(self.work.task))(output, y)
            except Exception:
                if loss_of_file is None or self.work.batch_size == self.impl.about["batch_size"]:
                    raise
                # A loss of the whole batch alone: the mean of squares says what was predicted.
                predicted = user_model.arrays(user_model.first(output))
                return finite(float(np.square(predicted, dtype=np.float64).mean()))
        return finite(self.kit.runtime.to_float(output))

    def _op_evidence(self) -> Proof:
        """The proof that the technique happened, or why it did not."""
        evidence, reason = self.bench.took_effect(
            self.impl, self.work, self.prepared, self.batches[0]
        )
        if self.bench.TECHNIQUE.counts:
            weights = self.kit.models.export_weights(self.prepared.model)
            counted = model_size(self.work.task.model, weights)
            evidence = evidence | {"measured": counted | evidence.get("measured", {})}
        return Proof(evidence=finite(evidence), not_applied=reason)

    def _op_probe(
        self,
        case: CaseMessage,
        data: str,
        weights_seed: int,
        *,
        memory_budget: int | None,
        repetitions: int,
        forked: bool,
        files: str | None = None,
    ) -> Probed:
        """What the bench file measures itself, and what it says that was read, sent or agreed."""
        if forked:
            memory.adopt_pages(os.getppid())
        self._find_work(case, weights_seed, data=data, files=files)
        self.work = replace(self.work, memory_budget=memory_budget, repetitions=repetitions)
        batches = []
        if self.work.task.dataset.kind != "photos":
            batches = self._first_batches(case, weights_seed, data)
        figures = self.bench.probe(self.impl, self.work, batches)
        if inspect.isgenerator(figures):
            self.turns = figures
            return self._op_turn()
        return _probed(figures)

    def _op_turn(self) -> Probed:
        """Let a probe that takes turns with others go on to its next pause, or to its end."""
        try:
            next(self.turns)
        except StopIteration as end:
            return _probed(end.value)
        return Probed(paused=True)


def _probed(figures: dict) -> Probed:
    metrics = finite(figures)
    return Probed(evidence=metrics.pop("evidence", None), metrics=metrics)


if __name__ == "__main__":
    machine.end_with_parent()
    run(*sys.argv[1:4])
