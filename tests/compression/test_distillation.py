"""The soft loss is NumPy's, it teaches where the widespread mistake does not, and both sides agree.

Each framework runs in a process of its own (`distillation_worker.py`), tf_keras in a third. The
optimizer of the gradient tests puts the gradient in the weight's place.
"""

from __future__ import annotations

import numpy as np
import pytest

from bench.compression.bench_distillation import TECHNIQUE
from bench.harness.plan import EFFORT
from bench.harness.schedule import Plan
from bench.harness.selection import cases_of
from shared import teacher
from shared.specs import TASKS, parameter_count
from tests import workers
from tests.compression.distillation_evidence import WORKERS, apart, side

BARS = {"cnn": 1e-5, "gpt": 1e-4}  # the parity of the tasks with such models
STUDENT = TASKS["digits-student"]


@pytest.fixture(params=["pt", "tf"])
def found(request):
    return side(request.param)


@pytest.fixture(params=WORKERS)
def every(request):
    return side(request.param)


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def soft(student, teacher_logits, temperature):
    """Value and gradient of T^2 KL(teacher || student), by hand in float64."""
    log_p, log_q = (log_softmax(v / temperature) for v in (teacher_logits, student))
    p, q = np.exp(log_p), np.exp(log_q)
    positions = student.size // student.shape[-1]
    value = temperature**2 * (p * (log_p - log_q)).sum() / positions
    return value, temperature * (q - p) / positions


def relative(ours, theirs):
    return max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))


# The loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize("logits", ["one", "samples", "positions"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_value_and_gradient_of_the_soft_loss_are_those_of_numpy(found, logits, temperature):
    case = found["soft_losses"][logits]
    ours = case[str(temperature)]
    value, gradient = soft(np.array(case["student"]), np.array(case["teacher"]), temperature)
    assert ours["value"] == pytest.approx(value, rel=1e-10)
    assert apart({"gradient": ours["gradient"]}, {"gradient": gradient}) < 1e-10


def test_the_soft_loss_of_opposite_certainties_is_finite(found):
    """Probabilities underflow here, logarithms do not."""
    found = found["soft_losses"]["extreme"]
    assert found["value"] == pytest.approx(800.0)
    assert np.allclose(found["gradient"], [[1.0, 0.0, -1.0]])


def test_narrow_logits_are_cast_up(found):
    found = found["soft_losses"]["narrow"]
    assert found["dtype"].removeprefix("torch.") == "float32"
    assert found["loss"] == pytest.approx(found["wide"], rel=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_gradients_of_a_linear_student_are_those_of_numpy(found, alpha):
    case = found["linear"]
    x, y = np.array(case["x"]), np.array(case["y"])
    student, over = (x @ np.array(kernel) for kernel in case["kernels"])
    value, gradient = soft(student, over, 2.0)
    log_q = log_softmax(student)
    hard = -log_q[np.arange(len(y)), y].mean()
    wanted = alpha * value + (1 - alpha) * hard
    pull = alpha * gradient + (1 - alpha) * (np.exp(log_q) - np.eye(3)[y]) / len(y)
    ours = case[str(alpha)]
    assert ours["loss"] == pytest.approx(wanted, rel=1e-5)
    assert apart({"gradient": ours["gradient"]}, {"gradient": x.T @ pull}) < 1e-5


@pytest.mark.parametrize(
    ("other", "model"), [(other, "cnn") for other in workers.keras()] + [("tf", "gpt")]
)
def test_twins_agree_in_loss_and_gradient(other, model):
    ours, theirs = (side(name)["applied"][model] for name in (other, "pt"))
    assert apart(ours, theirs) < BARS[model]


# The step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["taught", "stored"])
def test_alpha_zero_is_the_plain_step_and_runs_no_teacher(found, name):
    case = found["neutral"]
    if found.framework == "pt":
        assert case[name] == case["baseline"]  # to the last bit
    assert apart(case[name], case["baseline"]) < 1e-6


def test_stored_logits_teach_as_the_teacher_does(every):
    found = every["stored"]
    assert apart({"x": found["logits"]["ours"]}, {"x": found["logits"]["theirs"]}) < 1e-6
    assert relative(found["stored"]["losses"], found["taught"]["losses"]) < 1e-5
    last, wanted = found["fit"]
    assert last == pytest.approx(wanted, rel=1e-5)


def test_twins_take_the_same_ten_steps():
    pt, *others = (side(name)["stored"]["taught"]["losses"] for name in WORKERS)
    assert len(pt) == 10
    assert pt[-1] < pt[0]
    assert all(relative(losses, pt) < BARS["cnn"] for losses in others)


@pytest.mark.parametrize("kind", ["logits", "features"])
def test_the_teacher_is_left_as_it_was(every, kind):
    """Its BatchNorm too, part of which was found in training mode."""
    found = every["left_alone"][kind]
    assert found["weights"]
    assert found["modes"]
    assert found["gradients"] == 0
    assert found["student learned"]
    assert found["statistics moved"]


# Whether it teaches ---------------------------------------------------------------------------


def teaches(found):
    """A student that starts from nothing and hears the teacher alone comes to agree with it."""
    losses = found["losses"]
    return found["agreement"] > 0.9 and losses[-1] < losses[0] / 10


def test_the_soft_loss_alone_teaches(found):
    assert teaches(found["soft_alone"]["ours"])


@pytest.mark.parametrize("mistake", ["mistaken", "half mistaken"])
def test_the_widespread_mistake_does_not(found, mistake):
    """KLDivergence()(log_softmax, log_softmax), or the teacher's softmax: not one bit moves."""
    found = found["soft_alone"][mistake]
    assert not teaches(found)
    assert found["kernel moved by"] == 0.0
    assert len(set(found["losses"])) == 1


def test_a_mistaken_loss_looks_plausible(found):
    assert found["soft_alone"]["half mistaken"]["losses"][0] > 1


# Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["", "stored "])
@pytest.mark.parametrize("setting", ["temperature 0", "temperature -1", "temperature nan"])
def test_a_temperature_out_of_range_is_refused(found, step, setting):
    said = found["refusals"][step + setting]
    assert said.startswith("ValueError: temperature must be above 0 and finite, not ")


def test_an_infinite_temperature_is_refused(found):
    said = found["refusals"]["temperature inf"]
    assert said == "ValueError: temperature must be above 0 and finite, not inf"


@pytest.mark.parametrize("step", ["", "stored "])
@pytest.mark.parametrize("setting", ["alpha -0.1", "alpha 1.1", "alpha nan"])
def test_an_alpha_out_of_range_is_refused(found, step, setting):
    said = found["refusals"][step + setting]
    assert said == f"ValueError: alpha must be between 0 and 1, not {setting.split()[1]}"


def test_a_student_that_cannot_learn_is_refused(found):
    assert found["refusals"]["frozen"].startswith("ValueError: the student has no trainable ")


def test_a_teacher_of_other_classes_is_refused_before_anything_is_changed(found):
    found = found["refusals"]
    words = "student and teacher must give logits of one shape, with the same classes: "
    for name in ("classes", "stored classes"):
        assert found[name].startswith("ValueError: ")
        assert f"{words}the student gives [8, 5], the teacher [8, 4]" in found[name]
    assert f"{words}the student gives [8, 5], the teacher dict" in found["dict"]
    for name in ("classes unchanged", "classes state", "dict unchanged", "dict state", "unchanged"):
        assert found[name], name
    assert found["goes on"] is None


def test_tf_models_without_variables_are_refused():
    for name in workers.keras():
        found = side(name)["foreign"]
        for who in ("student", "teacher"):
            start = f"ValueError: the {who} has no variables yet: call it once"
            assert found[f"unbuilt {who}"].startswith(start)


# Models that are not ours ---------------------------------------------------------------------


def test_models_of_two_inputs(every):
    """PyTorch: a tuple of arguments. Keras: a functional model's list, a subclassed one's tuple."""
    found = every["foreign"]
    for name in ("logits",) if every.framework == "pt" else ("logits", "subclassed"):
        assert found[name][-1] < 0.7 * found[name][0], name
    assert apart({"x": found["stored"]}, {"x": found["predicted"]}) < 1e-5


def test_tf_in_fit_a_student_learns_as_in_the_step():
    """Whatever its teacher's share, with its own losses; evaluation has no teacher."""
    found = dict(side("tf")["in_fit"])
    evaluated, wanted = found.pop("evaluated")
    assert evaluated == pytest.approx(wanted, rel=1e-5)
    assert "the student has no teacher yet: say learn_from(teacher)" in found.pop("alone")
    weighted = found.pop("weighted")
    assert weighted["none"] == pytest.approx(0, abs=1e-5)
    assert weighted["all"] > 2 * weighted["first half"] / 3 > 0
    assert weighted["first half"] == pytest.approx(weighted["half alone"], rel=1e-4)
    assert len(found) == 3
    for alpha, case in found.items():
        (ours, wanted), (plain, taught) = case["losses"], case["weights"]
        assert ours == pytest.approx(wanted, rel=1e-5), alpha
        assert len(plain) == len(taught) == 4  # none of the teacher's
        for one, other in zip(taught, plain, strict=True):
            assert np.allclose(one, other, rtol=1e-5, atol=1e-6), alpha
    first = [case["losses"][0][0] for case in found.values()]
    assert len({round(loss, 3) for loss in first}) == 3


@pytest.mark.parametrize("step", ["taught", "stored", "fitted", "followed"])
def test_tf_no_evaluation_moves_seeds_on(step):
    """Neither the teacher's pass nor a look at what the student gives: two of one LSTM."""
    count, kept, plain = side("tf")["seeds"][step]
    assert count > 0
    assert kept
    assert plain


# The teacher's file and the benchmark ---------------------------------------------------------


def test_the_student_has_at_most_a_tenth_of_the_parameters():
    assert parameter_count(STUDENT.model) <= parameter_count(teacher.TASK.model) / 10
    assert STUDENT.dataset == teacher.TASK.dataset


def test_the_teacher_has_the_recorded_accuracy():
    recorded = teacher.load().accuracy
    one_image = 100 / teacher.TASK.dataset.test_size
    assert side("pt")["recorded"]["accuracy"] == pytest.approx(recorded, abs=2 * one_image)
    assert recorded > 95


def test_the_teacher_is_the_same_in_both_frameworks():
    ours, theirs = ({"logits": side(name)["recorded"]["logits"]} for name in ("tf", "pt"))
    assert apart(ours, theirs) < 1e-5


def test_a_teacher_is_trained_rounded_and_written():
    found = side("pt")["teach"]
    assert len(set(found["accuracy"])) == 1  # of what the file holds, not of what was trained
    assert all(found["learned"])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "teacher.npz"
    path.write_bytes(teacher.PATH.read_bytes())
    return path


def test_what_is_saved_is_what_is_loaded(file):
    first = teacher.load(file)
    teacher.save(first, file)
    again = teacher.load(file)
    assert again.accuracy == first.accuracy
    assert all(np.array_equal(again.weights[n], first.weights[n]) for n in first.weights)
    assert {str(value.dtype) for value in again.weights.values()} == {"float32"}


def without_head(path):
    arrays = dict(np.load(path))
    del arrays["head.kernel"]
    np.savez(path, **arrays)


def another_shape(path):
    arrays = dict(np.load(path))
    np.savez(path, **arrays | {"head.bias": np.zeros(7, np.float16)})


def not_finite(path):
    arrays = dict(np.load(path))
    np.savez(path, **arrays | {"head.bias": np.full(10, np.nan, np.float16)})


def pickled(path):
    np.savez(path, **dict(np.load(path)) | {"head.bias": np.array([print], dtype=object)})


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


def flipped(path):
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    path.write_bytes(damaged)


DAMAGE = {
    without_head: "does not hold the weights of digits-resnet20",
    another_shape: "does not hold the weights of digits-resnet20",
    not_finite: "not finite",
    pickled: "is damaged",
    cut: "is damaged",
    flipped: "is damaged",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_teacher_is_refused(file, damage):
    damage(file)
    with pytest.raises(ValueError, match="twinbench teacher") as caught:
        teacher.load(file)
    assert DAMAGE[damage] in str(caught.value)


def test_a_missing_teacher_says_how_to_make_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="twinbench teacher"):
        teacher.load(tmp_path / "none.npz")


def test_the_benchmark_proves_that_the_teacher_taught(found):
    judged = {n: v for n, v in found["benchmarks"].items() if n.startswith("logits ")}
    assert "logits stored" in judged
    for name, (evidence, reason) in judged.items():
        assert reason is None, (name, evidence)
        assert evidence["norm_of_labels"] > 0
        assert ("norm_of_teacher" in evidence) == (name in ("logits stored", "logits taught"))


def test_the_benchmark_sees_a_teacher_that_teaches_nothing(found):
    assert found["benchmarks"]["mistaken"][1] == "the teacher's term has no gradient"


def test_the_benchmark_sees_a_teacher_that_says_the_labels_again():
    reason = side("pt")["benchmarks"]["labels again"][1]
    assert reason == "the teacher's gradient is that of the labels"


def test_a_worker_asks_the_teacher_once_for_all_seeds():
    """In PyTorch: the harness does the same with TensorFlow."""
    stored, taught = (side("pt")["harness"][name] for name in ("stored", "taught"))
    assert stored["asked"] == 1
    assert len(stored["trained"]) == 2
    assert stored["losses"] == pytest.approx(taught["losses"], rel=1e-4)
    # One of 64 images may fall to the other side by rounding.
    assert abs(stored["trained"][0] - taught["trained"][0]) < 2


def test_what_a_cheaper_row_computes_is_not_trained_again():
    cases = cases_of(TECHNIQUE, "module", "default")
    plan = Plan({TECHNIQUE.name: cases}, {TECHNIQUE.name: TECHNIQUE}, EFFORT["default"])
    untrained = {case.variant.name for case in cases if not plan.trained(case)}
    assert untrained == {"taught", "control"}


# Any inputs and outputs -----------------------------------------------------------------------


def test_several_outputs_are_stored_and_their_soft_losses_added(every):
    found = every["structures"]
    assert found["stored"].keys() == found["wanted"].keys() == {"classes", "size"}
    for name, value in found["wanted"].items():
        assert np.allclose(found["stored"][name], value, rtol=1e-6, atol=1e-6)
    step, stored = found["losses"]
    assert step == pytest.approx(found["soft"], rel=1e-5)
    assert stored == pytest.approx(step, rel=1e-5)


def test_classes_are_along_the_axis_that_is_said_and_labels_show_another_one(every):
    found = every["structures"]
    for outputs in ("", " of all", " of each"):
        said = found[f"classes elsewhere{outputs}"]
        assert "have the classes along axis 1, not -1" in said
    wanted = found["soft of the last axis"]
    assert found["soft of the second axis"] == pytest.approx(wanted, rel=1e-5)


def test_an_argument_that_is_none_goes_with_every_part_that_is_stored(every):
    found = every["foreign"]
    assert len(found["stored with None"]) == 9
    assert np.allclose(found["stored with None"], found["stored without"], atol=1e-6)


def test_of_a_dict_with_logits_these_alone_are_taught(every):
    found = every["structures"]
    assert found["named logits"] < 1e-6
    assert abs(found["same named logits"]) < 1e-6  # whatever else the two models give


def test_inputs_by_name_and_logits_in_an_output(every):
    found = every["structures"]
    for name in ("by name", "in a tuple"):
        losses = found.get(name, found["by name"])
        assert losses[-1] < 0.8 * losses[0]
    assert found["stored by name"] == [9, 3]


@pytest.mark.parametrize("shape", ["one class", "no axis of classes"])
def test_logits_of_fewer_than_two_classes_teach_nothing_and_are_refused(every, shape):
    said = every["structures"][shape]
    assert said.startswith("ValueError: ")
    assert "have no two classes along axis -1" in said


def test_probabilities_are_refused_before_anything_changes(every):
    found = every["structures"]
    for name in ("probabilities of the teacher", "probabilities of the student"):
        who = name.split()[-1]
        assert found[name].startswith(f"ValueError: the {who} gives probabilities")
    assert found["stored probabilities"].startswith("ValueError: the teacher gives probabilities")
    assert found["unchanged"]
