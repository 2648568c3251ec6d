"""What is said of planted measurements: causes, sentences, sums, and what libraries print."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import user_answer
from bench.analysis.questions import answers
from bench.analysis.reading import load
from bench.record import decode, encode
from bench.report import advised, page, tables
from bench.report import causes as causes_of_record
from bench.why import experiments, libraries, of_record, two_machines
from bench.why import measured as m
from bench.why.causes import GUESS, TESTED, causes, sentence
from bench.why.command import as_json, main, of_why, text
from bench.why.difference import common, compare, partners
from bench.why.side import Request
from bench.why.sweep import sweep, without_profiler
from shared import step_events as kinds
from shared.profiles import STEP, WAITING, Taken
from shared.step_events import Event
from tests import records

MACHINES = Path(__file__).parents[2] / "docs" / "machines"
MS = 1e-3
PEAK = 100e9
USUAL = {kinds.PRODUCTS: 10.0, kinds.ELEMENTWISE: 5.0, kinds.OPTIMIZER: 5.0}


def side(name: str, milliseconds: dict[str, float] = USUAL, **facts) -> m.Side:
    """A side whose pieces take so long, with nothing beside them."""
    pieces = [
        m.Piece(layer="block0", phase="forward", kind=kind, seconds=value * MS, calls=1.0)
        for kind, value in milliseconds.items()
    ]
    step = sum(milliseconds.values()) * MS + facts.get("compiling_s", 0.0)
    known = {"threads": 2, "processors": 2, "cpu_s": step, "peaks": {"float32": PEAK}} | facts
    return m.Side(
        name=name,
        framework="pt",
        rounds=[step * (1 + wobble) for wobble in (-0.01, 0.0, 0.01, 0.0, 0.002)],
        profiled=step * 1.1,
        pieces=pieces,
        facts=m.Facts(**known),
        layers={"block0": [], "block0.up": [4, 8]},
    )


def more(kind: str, **facts) -> m.Side:
    """The usual side with 40 ms more of a kind of work."""
    return side("slow", USUAL | {kind: USUAL.get(kind, 0.0) + 40.0}, **facts)


@pytest.mark.parametrize(
    "kind", [k for k in kinds.KINDS if k not in ("page faults", "recompilation")]
)
def test_a_kind_of_work_that_takes_more_is_named(kind):
    difference = compare(more(kind), side("plain"))
    (cause,) = causes(difference)
    assert (cause.kind, cause.seconds) == (kind, pytest.approx(40 * MS))
    assert sentence(difference).startswith("slow takes 40 ms more than plain: 40 in ")


def test_page_faults_are_taken_from_the_work_that_they_happen_in():
    slow = more(kinds.ELEMENTWISE, faults=50_000, fault_s=0.8e-6, system_s=50 * MS)
    difference = compare(slow, side("plain"))
    assert causes(difference)[0].kind == kinds.FAULTS
    assert sum(one.seconds for one in slow.parts()) == pytest.approx(slow.step)


def test_compiling_again_is_named():
    slow = side("slow", compiling_s=40 * MS, graphs=0.5)
    assert [one.kind for one in causes(compare(slow, side("plain")))] == [kinds.RECOMPILATION]


@pytest.mark.parametrize("threads", [1, 16])
def test_a_pool_that_is_too_small_or_too_large_is_named(threads):
    difference = compare(more(kinds.PRODUCTS, threads=threads), side("plain"))
    (cause,) = causes(difference)
    assert cause.kind == "threads"
    assert f"{threads} thread" in sentence(difference)


def test_denormal_numbers_are_named_where_flushing_them_helps():
    slow = more(kinds.PRODUCTS, denormal=0.2, flushed=0.4)
    (cause,) = causes(compare(slow, side("plain")))
    assert (cause.kind, cause.status) == ("denormals", TESTED)


def test_denormal_numbers_that_cost_nothing_are_no_cause():
    slow = more(kinds.PRODUCTS, denormal=0.2, flushed=0.99)
    assert [one.kind for one in causes(compare(slow, side("plain")))] == [kinds.PRODUCTS]


def test_time_that_others_had_the_processors_is_not_that_of_operators():
    slow = more(kinds.PRODUCTS, cpu_s=20 * MS, delayed=40 * MS)
    assert causes(compare(slow, side("plain")))[0].kind == kinds.DELAYED


def test_no_cause_of_equal_sides():
    difference = compare(side("one"), side("another"))
    assert difference.is_noise
    assert causes(difference) == []
    assert "same time" in sentence(difference)


def test_no_cause_where_rounds_scatter_more_than_they_differ():
    slow = m.replaced(more(kinds.PRODUCTS), rounds=[20 * MS, 200 * MS, 10 * MS, 90 * MS, 20 * MS])
    assert causes(compare(slow, side("plain"))) == []


def test_a_step_that_no_profiler_saw_is_not_attributed():
    slow = m.replaced(more(kinds.PRODUCTS), pieces=[])
    assert [one.kind for one in slow.parts()] == [kinds.REST]


def product(library: str, seconds: float) -> m.Product:
    return m.Product(
        kind=kinds.PRODUCTS,
        layer="block0",
        shape=(1, 2, 3),
        dtype="float32",
        calls=24.0,
        seconds=seconds,
        flops=0.37 * 50 * MS * PEAK,
        ran_by=library,
    )


def test_products_are_told_with_library_and_share_of_the_peak():
    slow = m.replaced(more(kinds.PRODUCTS), products=[product("MKL", 50 * MS)])
    fast = m.replaced(
        side("plain", USUAL | {kinds.PRODUCTS: 25.0}), products=[product("oneDNN", 25 * MS)]
    )
    told = "25 in 24 products that MKL runs at 37% of peak and oneDNN at 74%"
    assert sentence(compare(slow, fast)) == f"slow takes 25 ms more than plain: {told}"


def test_a_share_above_the_peak_is_not_told():
    slow = m.replaced(more(kinds.PRODUCTS, peaks={"float32": PEAK / 5}))
    slow = m.replaced(slow, products=[product("MKL", 50 * MS)])
    fast = m.replaced(side("plain", peaks={}), products=[product("oneDNN", 10 * MS)])
    assert sentence(compare(slow, fast)).endswith("40 in 24 products (MKL, oneDNN)")


def test_attention_without_its_kernel_is_told():
    def attending(one: m.Side, name: str) -> m.Side:
        names = [m.replaced(p, names=(name,)) for p in one.pieces]
        return m.replaced(one, pieces=names)

    slow = attending(more(kinds.ATTENTION), "aten::bmm")
    fast = attending(
        side("plain", USUAL | {kinds.ATTENTION: 1.0}), "aten::_flash_attention_for_cpu"
    )
    assert "slow computes in separate products and a softmax" in sentence(compare(slow, fast))


def test_work_that_takes_less_meanwhile_is_told_as_such():
    slow = side("slow", {kinds.PRODUCTS: 60.0, kinds.COPIES: 1.0})
    fast = side("plain", {kinds.PRODUCTS: 10.0, kinds.COPIES: 21.0})
    assert "20 less in copies and casts" in sentence(compare(slow, fast))


def test_kernels_of_a_compiler_and_what_they_replace_are_one_cause():
    fast = side("XLA", {kinds.PRODUCTS: 10.0, kinds.COMPILED: 5.0, kinds.OPTIMIZER: 5.0})
    slow = side("plain", USUAL | {kinds.ELEMENTWISE: 30.0, kinds.NORMALISATION: 20.0})
    difference = compare(fast, slow)
    (cause,) = causes(difference)
    assert (cause.kind, cause.seconds) == (kinds.COMPILED, pytest.approx(-45 * MS))
    told = "45 in element-wise and normalisation, which XLA compiles into its kernels"
    assert sentence(difference) == f"XLA takes 45 ms less than plain: {told}"


# Experiments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alone", "status"), [(1.5 * MS, TESTED), (0.1 * MS, GUESS)])
def test_products_by_themselves_bear_a_cause_out_or_make_it_a_guess(alone, status):
    slow = m.replaced(more(kinds.PRODUCTS), products=[product("MKL", 50 * MS)])
    fast = m.replaced(side("plain"), products=[product("oneDNN", 10 * MS)])
    difference = compare(slow, fast)
    (cause,) = causes(difference)
    judged = experiments.alone(cause, difference, lambda *_, **__: alone, lambda *_, **__: 0.1 * MS)
    assert judged.status == status
    assert ("a guess" in sentence(difference, [judged])) == (status == GUESS)


@pytest.mark.parametrize(("single", "status"), [(21 * MS, TESTED), (90 * MS, GUESS)])
def test_waiting_for_threads_goes_with_one_thread_or_is_a_guess(single, status):
    difference = compare(more(kinds.WAITING), side("plain"))
    (cause,) = causes(difference)
    judged = experiments.on_one_thread(cause, difference, lambda: single, lambda: 20 * MS)
    assert judged.status == status


@pytest.mark.parametrize(("gap", "status"), [(1 * MS, TESTED), (39 * MS, GUESS)])
@pytest.mark.parametrize("kind", [kinds.CONVOLUTIONS, kinds.FAULTS])
def test_a_condition_that_is_changed_in_new_processes_decides(monkeypatch, kind, gap, status):
    monkeypatch.setattr(experiments, "gap_of", lambda *_: gap)
    request = Request(name="one", framework="pt", case=None, data="", threads=2)
    difference = compare(more(kinds.CONVOLUTIONS), side("plain"))
    cause = replace(causes(difference)[0], kind=kind)
    (judged,) = experiments.thorough([cause], difference, request, request)
    assert judged.status == status
    assert "the difference is" in judged.evidence


@pytest.mark.parametrize(("gap", "status"), [(2.0, TESTED), (38.0, GUESS)])
def test_tensorflow_without_onednn_is_told_and_tried_with_it(monkeypatch, gap, status):
    slow = m.replaced(more(kinds.CONVOLUTIONS, onednn=False), framework="tf", name="TensorFlow")
    convolution = m.replaced(product("", 40.0 * MS), kind=kinds.CONVOLUTIONS)
    slow = m.replaced(slow, products=[convolution])
    difference = compare(slow, side("PyTorch"))
    asked = []
    monkeypatch.setattr(experiments, "gap_of", lambda *pair: asked.extend(pair) or gap * MS)
    request = Request(name="any", framework="tf", case=None, data="", threads=2)
    (cause,) = experiments.with_onednn(causes(difference), difference, request, request)
    assert "TensorFlow without oneDNN" in sentence(difference)
    assert cause.status == status
    assert cause.evidence == f"with TF_ENABLE_ONEDNN_OPTS=1 the difference is {gap:.3g} ms"
    assert [one.variables for one in asked] == [{"TF_ENABLE_ONEDNN_OPTS": "1"}] * 2
    faster = compare(side("PyTorch"), slow)
    assert experiments.with_onednn(causes(faster), faster, request, request) != causes(faster)
    with_it = m.replaced(slow, facts=m.replaced(slow.facts, onednn=True))
    known = compare(with_it, side("PyTorch"))
    assert experiments.with_onednn(causes(known), known, request, request) == causes(known)


WIDE = (8, 16, 16, 4, 3, 3, 4, 8, 1, 1, 1, 1, 0)  # a convolution, see the kits


@pytest.mark.parametrize(
    ("kind", "shape", "status"),
    [
        (kinds.CONVOLUTIONS, WIDE, TESTED),
        (kinds.CONVOLUTIONS, (), GUESS),
        (kinds.ATTENTION, (32, 8, 32), TESTED),
        (kinds.ATTENTION, (4, 32, 8, 1), TESTED),
    ],
)
def test_convolutions_and_attention_are_computed_by_themselves(kind, shape, status):
    one = m.replaced(product("", 50 * MS), kind=kind, shape=shape, calls=6.0, flops=6 * 2 * 8192.0)
    slow = m.replaced(more(kind), products=[one])
    difference = compare(slow, m.replaced(side("plain"), products=[one]))
    (cause,) = causes(difference)
    asked = []

    def alone(what, *, single):
        asked.append(what)
        return 40 * MS

    judged = experiments.alone(cause, difference, alone, lambda *_, **__: 1 * MS)
    assert judged.status == status
    assert all(what.train for what in asked)
    if shape == (32, 8, 32):  # six products of a layer, whose length is 32
        assert (asked[0].shape, len(asked)) == ((1, 32, 8), 2)


# Layers ------------------------------------------------------------------------------------------


def test_layers_of_other_names_belong_together_by_weights_and_order():
    ours = {"b1.conv1": [3, 3, 4, 8], "fc": [8, 10], "net.0": [8, 8], "net.1": [], "net.2": [8, 8]}
    theirs = {"b1_conv1": [3, 3, 4, 8], "fc": [8, 10], "dense": [8, 8], "dense_1": [8, 8]}
    known = partners(ours, theirs)
    assert known == {"b1_conv1": "b1.conv1", "dense": "net.0", "dense_1": "net.2"}
    assert partners(ours, theirs | {"dense_2": [8, 8]}) == {"b1_conv1": "b1.conv1"}


def test_layers_without_a_pair_are_listed_and_lines_still_sum_up():
    slow = m.replaced(more(kinds.PRODUCTS), layers={"block0": [4, 4], "gate": [4, 9]})
    fast = m.replaced(
        side("plain"),
        layers={"dense": [4, 4]},
        pieces=[m.replaced(one, layer="dense") for one in side("plain").pieces],
    )
    difference = compare(slow, fast)
    assert difference.unpaired == (["gate"], [])
    assert [line.what for line in difference.layers] == ["block0, forward"]
    assert any("without a pair" in line and "gate" in line for line in text(difference, []))


# Records -----------------------------------------------------------------------------------------


def test_causes_of_headline_pairs_stand_beside_their_ratios():
    record = records.whole_run()
    pairs = of_record.headline(record)
    assert pairs
    assert all(a.id != b.id for a, b in pairs)
    a, b = pairs[0]
    difference = compare(more(kinds.PRODUCTS), side("plain"))
    why = of_record.of_difference(a.id, b.id, difference, causes(difference))
    kept = decode(encode(record.but(why=[why])))
    told = "slow takes 40 ms more than plain: 40 in products"
    work = causes_of_record.heading(kept, kept.why[0])
    assert told in kept.why[0].sentence
    assert sum(x - y for x, y in kept.why[0].kinds.values()) == pytest.approx(kept.why[0].seconds)
    assert f"Why: {told}" in advised.table(answers(kept), kept.why).rows[0][-1]
    assert f"{work}: {told}" in tables.markdown(kept)
    assert f"Why, {work}: {told}" in page.html(kept)
    rankings = user_answer._rankings(kept)
    answer = [line for one in rankings for line in user_answer._why(kept, one)]
    assert "because slow takes 40 ms more than plain" in " ".join(" ".join(answer).split())


@pytest.mark.parametrize(("factor", "kept"), [(1.01, True), (1.5, False)])
def test_a_pair_has_no_cause_where_the_run_shows_a_difference_that_rounds_now_lack(factor, kept):
    record = records.whole_run()
    a, b = of_record.headline(record)[0]
    a = a.but(timing=a.timing.but(median_s=factor * b.timing.median_s))
    same = compare(side("one"), side("another"))
    assert (of_record._doubt(same, a, b) == "") == kept


@pytest.mark.parametrize(("factor", "words"), [(1.02, "within 5%"), (2.0, "50% away")])
def test_the_sum_of_the_parts_is_tested_by_the_steps_of_the_run(factor, words):
    record = records.whole_run()
    a, b = of_record.headline(record)[0]
    ours, theirs = a.timing.median_s, b.timing.median_s
    one = of_record.of_difference(a.id, b.id, compare(more(kinds.PRODUCTS), side("plain")), [])
    one = one.but(kinds={kinds.PRODUCTS: (ours, theirs)})
    timing = a.timing.but(median_s=theirs + factor * (ours - theirs))
    changed = [x.but(timing=timing) if x.id == a.id else x for x in record.cases]
    assert words in causes_of_record.agreement(record.but(cases=changed), one)
    assert words in "".join(of_why(record.but(cases=changed), one))


def test_causes_of_a_pair_that_the_record_lacks_are_not_shown():
    record = records.whole_run()
    a, b = of_record.headline(record)[0]
    one = of_record.of_difference("gone", b.id, compare(side("one"), side("another")), [])
    assert causes_of_record.known(record.but(why=[one])) == []
    assert causes_of_record.known(record.but(why=[one.but(numerator=a.id)]))


def test_what_is_measured_of_a_record_is_written_with_its_page_after_each_pair(
    monkeypatch, tmp_path, capsys
):
    record = records.whole_run()
    file, pairs = tmp_path / "results.json", of_record.headline(record)[:2]
    file.write_bytes(encode(record))
    answered = iter([(compare(side("one"), side("another")), []), ValueError("it was stopped")])
    seen = []

    def measured(*_, **__):
        seen.append(len(load(file).why))
        if isinstance(answer := next(answered), ValueError):
            raise answer
        return answer

    monkeypatch.setattr(of_record, "check_machine", lambda _: None)
    monkeypatch.setattr(of_record, "of_suite", lambda _: lambda *_: None)
    monkeypatch.setattr(of_record, "headline", lambda _: pairs)
    monkeypatch.setattr(of_record, "_doubt", lambda *_: "")
    monkeypatch.setattr(of_record.pairs, "explained", measured)
    assert main([str(file), "--write"]) == 0
    assert seen == [0, 1]
    assert "one and another take the same time" in capsys.readouterr().out
    assert "one and another take the same time" in (tmp_path / "report.html").read_text("utf-8")


def test_a_pair_whose_other_side_is_slower_now_has_no_cause(monkeypatch):
    record = records.whole_run()
    a, b = of_record.headline(record)[0]
    slower = a if a.timing.median_s > b.timing.median_s else b
    said: list[str] = []

    def measured(pair, **_):
        difference = compare(more(kinds.PRODUCTS), side("plain"))
        return (difference, []) if slower is b else (compare(difference.b, difference.a), [])

    monkeypatch.setattr(of_record.pairs, "explained", measured)
    monkeypatch.setattr(of_record, "headline", lambda _: [(a, b)])
    assert list(of_record.with_causes(record, lambda *_: None, 99, said.append)) == []
    assert said[-1].startswith("left out")


def test_on_two_machines_the_framework_that_uses_less_of_the_faster_one_is_a_guess():
    one, other = (load(path) for path in sorted(MACHINES.glob("amd-epyc-avx-512*/results.json")))
    said = "\n".join(two_machines.told([one, other], ["one", "other"]))
    assert "a guess, PyTorch's libraries use less" in said
    assert "No ratio of the frameworks" in two_machines.told([one, one], ["one", "one"])[-1]


# From events to pieces ---------------------------------------------------------------------------


def event(name: str, start: float, end: float, kind: str = kinds.DISPATCH, **known) -> Event:
    return Event(name, start, end, known.pop("thread", "main"), kind=kind, **known)


def swept(*events: Event, cpu: float = 10.0, until: float = 10.0) -> dict[str, float]:
    marks = [(event(WAITING, -1.0, 0.0), event(STEP, 0.0, until))]
    pieces = sweep(list(events), marks, [Taken(1.0, until, cpu)]).pieces
    seconds: dict[str, float] = {}
    for one in pieces:
        seconds[one.kind] = seconds.get(one.kind, 0.0) + one.seconds
    return seconds


def test_a_moment_is_that_of_the_innermost_operator():
    outer, inner = event("conv", 0, 6, kinds.CONVOLUTIONS), event("copy", 2, 3, kinds.COPIES)
    found = swept(outer, inner)
    assert (found[kinds.CONVOLUTIONS], found[kinds.COPIES]) == (5.0, 1.0)
    assert sum(found.values()) == pytest.approx(11.0)


def test_operators_at_the_same_time_share_the_moment():
    found = swept(
        event("a", 0, 4, kinds.PRODUCTS), event("b", 0, 4, kinds.ELEMENTWISE, thread="other")
    )
    assert (found[kinds.PRODUCTS], found[kinds.ELEMENTWISE]) == (2.0, 2.0)


def test_a_gap_is_dispatch_where_the_thread_is_busy_and_waiting_where_it_sleeps():
    work = event("a", 0, 4, kinds.PRODUCTS)
    assert swept(work, cpu=10.0)[kinds.DISPATCH] == pytest.approx(6.0)
    assert swept(work, cpu=4.0)[kinds.WAITING] == pytest.approx(6.0)


def test_what_recording_costs_is_taken_by_events():
    pieces = [
        m.Piece(layer="", phase="", kind=kinds.DISPATCH, seconds=10 * MS, calls=1000.0),
        m.Piece(layer="", phase="", kind=kinds.PRODUCTS, seconds=10 * MS, calls=1.0),
    ]
    dispatch, products = without_profiler(pieces, plain=18 * MS, profiled=20 * MS)
    assert dispatch.seconds == pytest.approx(8 * MS, rel=0.01)
    assert products.seconds == pytest.approx(10 * MS, rel=0.01)


def test_a_layer_of_one_side_counts_for_the_one_around_it():
    ours, theirs = ["block0.gelu", "head"], ["block0", "block0.up", "head"]
    assert common("block0.gelu", ours, theirs) == "block0"
    assert common("head", ours, theirs) == "head"
    assert common("conv", ["conv"], ["layer"]) == "conv"


# Names of operators ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", kinds.PRODUCTS),
        ("aten::mkldnn_convolution", kinds.CONVOLUTIONS),
        ("aten::native_layer_norm", kinds.NORMALISATION),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", kinds.ATTENTION),
        ("aten::bmm", kinds.ATTENTION),
        ("aten::_to_copy", kinds.COPIES),
        ("aten::transpose", kinds.DISPATCH),
        ("aten::gelu", kinds.ELEMENTWISE),
        ("aten::normal_", kinds.ELEMENTWISE),
        ("aten::_local_scalar_dense", kinds.READING),
        ("aten::_log_softmax_backward_data", kinds.REDUCTIONS),
        ("aten::embedding_dense_backward", kinds.INDEXING),
        ("aten::mkldnn_rnn_layer", kinds.RECURRENT),
    ],
)
def test_kinds_of_pytorch(name, kind):
    assert kinds.of_pytorch(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_FusedMatMul", kinds.PRODUCTS),
        ("Conv2DBackpropFilter", kinds.CONVOLUTIONS),
        ("FusedBatchNormV3", kinds.NORMALISATION),
        ("BatchMatMulV2", kinds.ATTENTION),
        ("Cast", kinds.COPIES),
        ("Transpose", kinds.COPIES),
        ("ReadVariableOp", kinds.DISPATCH),
        ("Tanh", kinds.ELEMENTWISE),
        ("EagerPyFunc", kinds.PYTHON),
        ("GatherV2", kinds.INDEXING),
        ("XlaLaunch", kinds.COMPILED),
        ("__inference_step_53", kinds.COMPILED),
    ],
)
def test_kinds_of_tensorflow(name, kind):
    assert kinds.of_tensorflow(name) == kind


def test_sums_within_a_normalisation_are_part_of_it():
    assert kinds.within(kinds.ELEMENTWISE, "LayerNormalization") == kinds.NORMALISATION
    assert kinds.within(kinds.PRODUCTS, "SelfAttention") == kinds.PRODUCTS
    assert kinds.within(kinds.PRODUCTS, "LSTM") == kinds.RECURRENT
    assert kinds.within(kinds.DISPATCH, "LSTM") == kinds.DISPATCH


# Libraries ---------------------------------------------------------------------------------------

VERBOSE = [
    "MKL_VERBOSE SGEMM(N,T,384,1152,512,0x7ff,0x55,384,0x55,1152,0x7f,0x55,384) 50.53ms CNR:OFF",
    "onednn_verbose,v1,primitive,exec,cpu,gemm_api,,undef,src,lda:384 ,,96x192:192x864,0.65",
    "onednn_verbose,v1,primitive,exec,cpu,convolution,jit:avx2,forward_training,src,,,mb8_ic16,3.0",
    "onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,src,,,8x32x8x8,1.0",
    "onednn_verbose,v1,info,oneDNN v3.7",
    "something else",
]


def test_verbose_lines_tell_the_library_of_a_shape():
    calls = libraries.read(VERBOSE)
    assert calls.of[kinds.PRODUCTS][384, 512, 1152] == libraries.MKL
    assert calls.of[kinds.PRODUCTS][96, 192, 864] == libraries.ONEDNN
    assert calls.of[kinds.CONVOLUTIONS][libraries.ANY] == libraries.ONEDNN
    assert calls.reorders == pytest.approx(0.25)


def test_changes_of_layout_within_convolutions_count_as_copies():
    known = libraries.with_libraries(more(kinds.CONVOLUTIONS), libraries.read(VERBOSE))
    seconds = {one.kind: one.seconds for one in known.pieces}
    assert seconds[kinds.COPIES] == pytest.approx(10 * MS)
    assert seconds[kinds.CONVOLUTIONS] == pytest.approx(30 * MS)


# The command -------------------------------------------------------------------------------------


def test_tables_sum_to_the_step_and_json_has_all():
    difference = compare(more(kinds.PRODUCTS), side("plain"))
    lines = text(difference, causes(difference))
    rows = [line.split()[-3:] for line in lines if line.startswith("the step")]
    assert rows == [["60.000", "20.000", "40.000"]] * 2
    assert "with the profilers on, the steps differ by 44.000 ms: +10%" in lines
    told = json.loads(json.dumps(as_json(difference, causes(difference))))
    assert told["causes"][0]["kind"] == kinds.PRODUCTS
    assert sum(one["a"] - one["b"] for one in told["layers"]) == pytest.approx(told["seconds"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-task"],
        ["no_file.py"],
        ["digits-cnn", "--technique", "magic"],
        ["digits-cnn", "--technique", "mixed_precision", "--variant", "int3"],
    ],
)
def test_what_there_is_not_is_one_line(arguments, capsys):
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("twinbench why: ")


def test_interval_of_the_difference_is_that_of_the_rounds():
    difference = compare(more(kinds.PRODUCTS), side("plain"))
    low, high = difference.interval
    assert low < 40 * MS < high
    assert not difference.is_noise
    assert replace(difference, interval=(-1.0, 1.0)).is_noise
