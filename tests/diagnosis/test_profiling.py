"""The breakdown adds up to the step, and its parts are those that are known."""

from __future__ import annotations

import json
import re
import time

import pytest

from shared.profiles import (
    PARTS,
    STEP,
    WAITING,
    Span,
    Taken,
    break_down,
    convolution_flops,
    endless,
    product_flops,
    run_steps,
    settle,
    write_chrome_trace,
    write_stacks,
)
from shared.specs import TASKS, train_step_flops
from tests.diagnosis import BACKWARD, FORWARD

PRODUCTS = re.compile(r"matmul|addmm$|::mm$", re.IGNORECASE)
COMPUTES = re.compile(r"matmul|mm$|conv", re.IGNORECASE)


def parts(found) -> dict:
    return {part: found[part] for part in PARTS}


# Of spans that are made up: no framework ----------------------------------------------------------


def span(name, start, end, part=None, thread="main", operator=True, device=False):
    return Span(name, start, end, thread, part, operator, device)


def marked(*spans, waiting=1.0, step=10.0):
    """The spans in one step that begins at 0 and waits before."""
    marks = [
        span(WAITING, -waiting, 0.0, operator=False),
        span(STEP, 0.0, step, operator=False),
    ]
    return [*marks, *spans]


def broken_down(spans, step=10.0, profiled=10.0, waiting=1.0, cpu=10.0, memory=(), peaks=None):
    plain, with_profiler = Taken(waiting, step, cpu), Taken(waiting, profiled, cpu)
    return break_down(spans, [plain], [with_profiler], list(memory), peaks or {})


def test_the_parts_are_times_that_passed():
    breakdown = broken_down(
        marked(
            span("a", 0.0, 4.0, "forward"),
            span("inner", 1.0, 2.0),
            span("b", 4.0, 7.0, "backward"),
            span("all_reduce", 6.0, 8.5, "communication", thread="other"),
            span("copy", 8.0, 9.0, "transfer", thread="third"),
        )
    )
    assert breakdown.forward == pytest.approx(4.0)
    assert breakdown.backward == pytest.approx(3.0)
    assert breakdown.communication == pytest.approx(1.5)  # as far as nothing is computed beside it
    assert breakdown.transfer == pytest.approx(0.5)
    assert breakdown.overhead == pytest.approx(1.0)
    assert breakdown.waiting == pytest.approx(1.0)
    assert breakdown.step == pytest.approx(11.0)
    assert breakdown.gaps[0] == (pytest.approx(1.0), "copy", "end of the step")
    seconds = {one.name: one.seconds for one in breakdown.operators}
    assert seconds["a"] == pytest.approx(3.0)  # without what it called


def test_operators_at_the_same_time_share_it():
    breakdown = broken_down(
        marked(
            span("a", 0.0, 10.0, "backward"),
            span("b", 0.0, 10.0, "optimizer", thread="other"),
        )
    )
    assert (breakdown.backward, breakdown.optimizer) == (pytest.approx(5.0), pytest.approx(5.0))


def test_sleep_is_idle_and_work_in_python_is_not():
    spans = marked(span("a", 0.0, 4.0, "forward"))
    assert broken_down(spans, cpu=4.0).idle == pytest.approx(6.0)
    assert broken_down(spans, cpu=10.0).idle == pytest.approx(0.0)
    assert broken_down(spans, cpu=10.0).overhead == pytest.approx(6.0)


def test_what_the_profiler_added_is_taken_where_it_recorded():
    us = 1e-6
    many = [span(f"op{n}", (5 + n / 2) * us, (5.4 + n / 2) * us, "forward") for n in range(10)]
    spans = marked(span("large", 0.0, 5 * us, "backward"), *many, waiting=us, step=10 * us)
    breakdown = broken_down(spans, step=8 * us, profiled=10 * us, waiting=us, cpu=10 * us)
    assert breakdown.profiler_cost == pytest.approx(2 / 9)
    assert breakdown.traced == pytest.approx(11 * us)
    assert sum(getattr(breakdown, part) for part in PARTS) == pytest.approx(breakdown.step)
    # Of 13 events the ten small ones are forward, the marks between operators.
    assert breakdown.backward == pytest.approx((5 - 2 / 13) * us, rel=0.02)
    assert breakdown.forward == pytest.approx((4 - 20 / 13) * us, rel=0.02)


def test_on_a_device_only_what_it_does_counts():
    spans = marked(
        span("launch", 0.0, 9.0, "forward"),
        span("kernel", 2.0, 5.0, "forward", thread="stream", device=True),
    )
    breakdown = broken_down(spans)
    assert breakdown.forward == pytest.approx(3.0)
    assert breakdown.overhead + breakdown.idle == pytest.approx(7.0)
    assert [one.name for one in breakdown.operators] == ["kernel"]


def test_a_products_share_of_the_peak_is_its_operations_over_its_time():
    spans = marked(
        Span("mm", 0.0, 2.0, "main", "forward", True, flops=3e9, dtype="float32"),
        Span("mm", 2.0, 4.0, "main", "backward", True, flops=1e9, dtype="bfloat16"),
        Span("relu", 4.0, 5.0, "main", "forward", True),
        Span("sometimes", 5.0, 6.0, "main", "forward", True, flops=1e9, dtype="float32"),
        Span("sometimes", 6.0, 7.0, "main", "forward", True),
        Span("half", 7.0, 8.0, "main", "forward", True, flops=1e9, dtype="float16"),
    )
    breakdown = broken_down(spans, peaks={"float32": 2e9, "bfloat16": 4e9, "float16": 0.0})
    told = {one.name: (one.flops, one.of_peak) for one in breakdown.operators}
    assert told == {
        "mm": (4e9, (3e9 / 2e9 + 1e9 / 4e9) / 4.0),
        "relu": (None, None),
        "sometimes": (None, None),  # a call of it is not known
        "half": (1e9, None),  # nor is the machine's peak
    }
    lines = str(breakdown).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert rows["mm"] == ["2.0", "4000.000", "50.0%", "44%"]
    assert rows["relu"] == ["1.0", "1000.000", "12.5%"]
    assert lines[-1] == "peak, of a large product: float32 2 GFLOP/s, bfloat16 4 GFLOP/s"
    assert all(len(line) <= 80 for line in lines)


def test_operations_follow_from_shapes():
    assert product_flops((3, 4), (4, 5), 4) == 2 * 3 * 4 * 5
    assert product_flops((4, 3), (5, 4), 4) == 2 * 3 * 4 * 5
    assert product_flops((7, 1, 3, 4), (2, 4, 5), 4) == 7 * 2 * 2 * 3 * 4 * 5  # one is broadcast
    assert product_flops((3, 0), (0, 5), 0) == 0
    assert convolution_flops((3, 3, 8, 16), 2 * 6 * 6) == 2 * (3 * 3 * 8 * 16) * (2 * 6 * 6)


def test_what_runs_between_steps_is_not_counted():
    spans = marked(span("a", 0.0, 4.0, "forward"), span("later", 20.0, 30.0, "forward"))
    assert [one.name for one in broken_down(spans).operators] == ["a"]


def test_what_a_loader_computes_while_the_step_waits_is_not_the_steps():
    spans = marked(
        span("decode", -0.9, -0.2), span("inner", -0.5, -0.4), span("a", 0.0, 4.0, "forward")
    )
    breakdown = broken_down(spans, cpu=4.0)
    assert [one.name for one in breakdown.operators] == ["a"]
    assert breakdown.operators[0].share == 1.0
    assert breakdown.waiting == pytest.approx(1.0)
    assert breakdown.idle == pytest.approx(6.0)


def test_a_trace_without_marks_is_refused():
    with pytest.raises(ValueError, match="lacks the marks"):
        broken_down([span("a", 0.0, 1.0)])


def test_files_of_spans(tmp_path):
    spans = marked(span("a", 0.0, 4.0, "forward"), span("b;c", 1.0, 2.0))
    write_chrome_trace(spans, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"a", "b;c", STEP} <= {event["name"] for event in events}
    write_stacks(spans, tmp_path / "stacks.txt")
    assert (tmp_path / "stacks.txt").read_text().splitlines() == [
        f"{STEP} 6000000",
        f"{STEP};a 3000000",
        f"{STEP};a;b,c 1000000",
        f"{WAITING} 1000000",
    ]


def test_batches_begin_again_and_an_empty_loader_is_named():
    batches = endless([(1,), (2,)])
    seen = []
    run_steps(seen.append, batches, count=5)
    run_steps(seen.append, endless([{"x": 1}]), count=1)  # what is no tuple is handed over whole
    assert seen == [1, 2, 1, 2, 1, {"x": 1}]
    with pytest.raises(ValueError, match="no batches"):
        next(endless([]))


@pytest.mark.parametrize(
    ("pause", "count"),
    [(0, 1), (1, 2), (3, 6), (60, 10)],  # of half a second each, for 5 s at most
)
def test_more_untimed_steps_follow_a_longer_pause(monkeypatch, pause, count):
    seconds = [100.0]

    def step(more):
        seconds.append(seconds[-1] + more)

    with monkeypatch.context() as clock:
        clock.setattr(time, "perf_counter", lambda: seconds[-1])
        settle(step, since=100.0 - pause, batches=endless([(0.5,)]))
    assert len(seconds) - 1 == count


# Of either framework ------------------------------------------------------------------------------


def test_the_parts_add_up_to_the_step_that_another_clock_saw(timed):
    profile = timed["profiling sleeping"]
    total = sum(parts(profile).values())
    assert total == pytest.approx(profile["step"], rel=1e-6)
    assert profile["steps"] == 5 + 1 + 4 * 12
    assert total == pytest.approx(profile["own"]["plain"], rel=0.05)
    assert profile["profiled"] == pytest.approx(profile["own"]["profiled"], rel=0.05)
    assert profile["traced"] == pytest.approx(profile["own"]["profiled"], rel=0.05)


def test_steps_wait_as_they_do_where_nothing_was_made_ahead(timed):
    found = timed["profiling made_ahead"]
    assert found["step"] > 0.012  # a batch comes every 15 ms
    assert found["waiting"] > 0.6 * found["step"]


def test_known_times_are_found_where_they_were_planted(timed):
    profile = timed["profiling sleeping"]
    slept = profile["slept"]  # as a busy machine wakes late: of all steps, not of the plain alone
    assert slept["forward"] >= FORWARD
    assert slept["backward"] >= BACKWARD
    assert profile["waiting"] == pytest.approx(slept["waiting"], rel=0.15)
    assert profile["forward"] == pytest.approx(slept["forward"], rel=0.15)
    assert profile["backward"] == pytest.approx(slept["backward"], rel=0.15)
    assert 0 < profile["optimizer"] < FORWARD / 2
    assert profile["transfer"] == profile["communication"] == 0


def test_sleep_and_python_between_operators_are_told_apart(timed):
    profile = timed["profiling between_operators"]
    asleep, busy = profile["asleep"], profile["busy"]
    assert asleep["idle"] == pytest.approx(profile["slept"], rel=0.25)
    # While others have the core, what works is idle too.
    assert asleep["idle"] > busy["idle"] - profile["robbed"]
    assert busy["overhead"] > asleep["overhead"]


@pytest.mark.campaign
def test_python_between_operators_is_overhead_and_not_idle(timed):
    profile = timed["profiling between_operators"]
    assert profile["busy"]["overhead"] > 0.009
    assert profile["busy"]["idle"] < 0.003 + 1.5 * profile["robbed"]


def test_products_are_counted_forward_and_backward(every):
    profile = every["profiling operators"]
    products = [one for one in profile["operators"] if PRODUCTS.search(one["name"])]
    assert sum(one["calls"] for one in products) == 3 + 5
    assert sum(one["share"] for one in profile["operators"]) == pytest.approx(1.0)
    costs = [one["seconds"] for one in profile["operators"]]
    assert costs == sorted(costs, reverse=True)
    assert profile["forward"] > 0
    assert profile["backward"] > 0
    assert profile["optimizer"] > 0


ONE = 2 * 96 * 160 * 224
KNOWN = {
    "product": ONE,
    "transposed": ONE,
    "batch": 5 * ONE,
    "einsum": 5 * ONE,
    "bfloat16": ONE,
    "large": 2 * 768**3,
}
OWN = {
    "pt": {"compiled": ONE},
    "tf": {
        "fused": ONE,
        "called in a loop": 3 * ONE,
        "alike": 2 * 96 * 160 * 96,
    },
}


def counted(found) -> list[dict]:
    return [one for one in found["operators"] if one["flops"] is not None]


def test_a_products_operations_are_exact(timed):
    profiles, known = timed["profiling products"], KNOWN | OWN[timed.name]
    flops = {name: [one["flops"] for one in counted(profiles[name])] for name in known}
    assert flops == {name: [operations] for name, operations in known.items()}
    assert list(profiles["bfloat16"]["peaks"]) == ["bfloat16"]


def test_a_share_of_the_peak_is_operations_over_seconds_and_the_peak(timed):
    for name, found in timed["profiling products"].items():
        for one in counted(found):
            (peak,) = found["peaks"].values()
            assert one["of_peak"] == pytest.approx(one["flops"] / one["seconds"] / peak), name


@pytest.mark.campaign
def test_a_share_of_the_peak_is_one(timed):
    for name, found in timed["profiling products"].items():
        assert all(0 < one["of_peak"] < 1.3 for one in counted(found)), name
    (large,) = counted(timed["profiling products"]["large"])
    assert large["of_peak"] > 0.2


def test_what_is_not_known_has_no_share(timed):
    profiles = timed["profiling products"]
    for name in {"integers", "without a graph", "of any length"} & profiles.keys():
        assert counted(profiles[name]) == []
        assert profiles[name]["peaks"] == {}
    rest = [one for one in profiles["network"]["operators"] if not COMPUTES.search(one["name"])]
    assert len(rest) > 3
    assert all(one["flops"] is None and one["of_peak"] is None for one in rest)


def test_a_networks_operations_are_those_of_its_layers_forward_and_backward(timed):
    strided = 2 * (3 * 3 * 3 * 8) * (4 * 8 * 8)
    grouped = 2 * (3 * 3 * 8) * (4 * 4 * 4)
    transposed = 2 * (2 * 2 * 8 * 4) * (4 * 4 * 4)  # each weight once at each of its inputs
    dense = 2 * (4 * 8 * 8) * 2 * 4
    total = 2 * strided + 3 * (grouped + transposed + dense)  # images have no gradient
    found = counted(timed["profiling products"]["network"])
    assert sum(one["flops"] for one in found) == pytest.approx(total, rel=1e-9)
    assert all(COMPUTES.search(one["name"]) for one in found)


def test_a_tasks_operations_are_those_of_its_description(timed):
    total = train_step_flops(TASKS["digits-cnn"].model, 4)
    found = counted(timed["profiling products"]["task"])
    assert sum(one["flops"] for one in found) == pytest.approx(total, rel=1e-9)


def test_what_prepares_batches_in_the_background_is_not_the_steps(evidence):
    names = {one["name"] for one in evidence["tf"]["profiling beside_the_step"]["operators"]}
    assert "Cholesky" not in names
    assert any(PRODUCTS.search(name) for name in names)


def test_operators_without_a_graph_are_counted_once(evidence):
    profile = evidence["tf"]["profiling without_a_graph"]
    products = [one for one in profile["operators"] if PRODUCTS.search(one["name"])]
    assert sum(one["calls"] for one in products) == 3
    calls = {one["name"]: one["calls"] for one in profile["operators"]}
    assert calls["Tanh"] == 1
    assert "IteratorGetNext" not in calls  # which waits
    assert profile["forward"] > 0


def test_the_files_are_opened_by_their_readers(every):
    files = every["profiling files"]
    assert files["log"].endswith(".pt.trace.json" if every.name == "pt" else ".xplane.pb")
    assert files["log marks"] == sorted([STEP, WAITING])
    assert files["trace marks"] >= 1
    assert files["trace whole"]
    assert all(re.fullmatch(r"\S.* \d+", line) for line in files["stacks"])
    assert any(line.startswith(f"{STEP};") for line in files["stacks"])
    assert bool(files["memory"]) == (every.name == "pt")  # TensorFlow's has those of a GPU alone


def test_tensorboard_s_plug_in_finds_the_operators(every):
    names = every["profiling files"]["opened"]
    if names is None:
        pytest.skip("needs pip install '.[readers]'")
    product = "addmm" if every.name == "pt" else "MatMul"
    assert any(product in name for name in names)


def test_what_can_not_be_profiled_is_said(every):
    reasons = every["profiling refused"]
    assert reasons["no batches"].startswith("ValueError: there are no batches")
    assert reasons["few steps"].startswith("ValueError: profiling needs 4 steps")
    if every.name == "tf":
        assert reasons["xla"].startswith("NotImplementedError: XLA runs the whole step")
