"""What a newly executed worker is asked: memory by phase, and the first call."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import time
import weakref
from itertools import cycle, islice

from bench.harness import memory
from bench.harness.answers import Built, ColdStart, Compiled
from bench.harness.plan import CaseMessage, Prepared
from bench.harness.sizes import artifact_bytes

STEADY_STEPS = 20  # of a peak in the steady state, or as many as
STEADY_S = 2.0  # fit into this, if steps are long
STATE = ("parameters", "gradients", "optimizer")


class MemoryOperations:
    """Operations on a case that is not prepared: see `worker.Operations`."""

    def _op_first_compile(self, cache: str) -> Compiled:
        """What a first program takes to compile, which leaves in `cache` what others find there."""
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        return Compiled(seconds=self.kit.runtime.first_compile())

    def _op_cold_build(
        self,
        case: CaseMessage,
        data: str,
        weights_seed: int,
        *,
        imports: list[str],
        cache: str,
        forked: bool,
        files: str | None = None,
    ) -> Built:
        """Prepare a case in a process that has done nothing else, for `memory`.

        What the case's own code imports is imported first: `imports` are the modules that it was
        seen to import, wherever it does so. torch.compile's cache on disk outlives processes:
        `cache` is one without the case's program. Where the worker is `forked`, it begins with all
        pages that its parent has.
        """
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        if forked and not memory.adopt_pages(os.getppid()):
            raise RuntimeError("the pages of its parent can't be mapped")
        self._import(case)
        for name in imports:
            with contextlib.suppress(Exception):  # some are made, not imported
                importlib.import_module(name)
        self.imported = set(sys.modules)
        self.phases = {"import_bytes": memory.resident()}
        self.resets = memory.reset_peak()
        built = self._op_build(case, data, weights_seed, files)
        self.phases["build_bytes"] = memory.peak()
        self.wrote = built.wrote
        return built

    def _op_memory(self) -> ColdStart:
        """The first call, and resident peaks by phase, of what was built for that.

        `modules` are those that the case imported though they were not named. `wrote`: whether the
        file of its predictions was not there, so that what is left of writing it is in the figures.
        """
        kit, phases = self.kit, self.phases
        model = weakref.ref(self.prepared.model)
        if self.work.mode == "predict":
            self._forget_training()
        memory.reset_peak()
        kit.runtime.reset_device_peak()
        start = time.perf_counter()
        self.call(*self.batches[0])
        kit.runtime.synchronize()
        first = time.perf_counter() - start
        phases["first_step_peak_bytes"] = memory.peak()
        memory.reset_peak()
        for batch in islice(cycle(self.batches), STEADY_STEPS):
            self.call(*batch)
            kit.runtime.synchronize()
            if time.perf_counter() - start > STEADY_S:
                break
        phases["steady_peak_bytes"] = memory.peak()
        if not self.resets:
            phases = dict.fromkeys(phases)
        parts = kit.runtime.state_bytes(model(), self.prepared.optimizer) if model() else {}
        return ColdStart(
            first_call_s=first,
            memory=phases,
            parts={part: parts.get(part, 0) for part in STATE},
            device_peak=kit.runtime.device_peak(),
            artifact=artifact_bytes(self.prepared.artifact),
            modules=self._modules(),
            wrote=self.wrote,
        )

    def _forget_training(self) -> None:
        """Leave what a prediction needs, which is not the model where it comes from a file."""
        self.prepared = Prepared(
            None, self.prepared.predict, None, None, artifact=self.prepared.artifact
        )
        gc.collect()
        memory.trim()
