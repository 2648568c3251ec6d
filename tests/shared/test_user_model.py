"""A user's file: read without being executed, executed, and its batches in any structure."""

import inspect
import sys
from pathlib import Path

import numpy as np
import pytest

from shared import user_model
from shared.profiles import in_order
from shared.user_model import BadFile

MODEL = "def pytorch(): pass\n"
BATCH = "def batch(size, seed): pass\n"


def file(tmp_path, text, name="my_model.py"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_it_is_known_by_its_functions(tmp_path):
    text = f"raise SystemExit('executed')\nfrom nets import tensorflow\n{MODEL}{BATCH}"
    known = user_model.look(file(tmp_path, text))
    assert known.sides == ["pt", "tf"]
    assert known.functions == {"pytorch", "tensorflow", "batch"}
    assert known.name == "my_model"


def test_a_name_of_the_suite_s_is_another_task(tmp_path):
    assert user_model.look(file(tmp_path, MODEL + BATCH, "photos.py")).name == "user_photos"
    assert user_model.look(file(tmp_path, MODEL + BATCH, "my net-2.py")).name == "my_net_2"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BATCH, "has no pytorch(), tensorflow() or keras()"),
        (MODEL, "has no batch(size, seed) and no batches()"),
        (f"{MODEL}def batch(size, seed:\n", "my_model.py:2: "),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, text, reason):
    with pytest.raises(BadFile) as raised:
        user_model.look(file(tmp_path, text))
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_none_says_so(tmp_path):
    with pytest.raises(BadFile, match=r"gone\.py can't be read \(No such file"):
        user_model.look(tmp_path / "gone.py")
    path = tmp_path / "bytes.py"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadFile, match="is not a Python file"):
        user_model.look(path)


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ("print", "make() returns a builtin_function_or_method, not (step, batches)"),
        ("print, {'x': 1}", "make() returns a dict as its batches: return a list of tuples"),
        (
            "lambda x, y: x, ([1], [2])",
            "(missing a required argument: 'y'): return a list of tuples",
        ),
        ("lambda x, y: x, [{'x': 1, 'y': 2}]", "such as a dict, is passed whole"),
        ("lambda x: x['y'], [{'x': 1}]", "my_model.py:2: KeyError: 'y'"),
        ("lambda x: x['x'], [{'x': 1}]", "1"),
        ("lambda x, y: y, iter([([1], [2])])", "[2]"),
    ],
)
def test_a_step_and_its_batches_are_made_by_a_file(tmp_path, returned, reason):
    def first(step, batches):
        return step(*in_order(next(iter(batches))))

    path = file(tmp_path, f"def make():\n    return {returned}\n")
    if reason in ("1", "[2]"):
        assert str(user_model.with_made(path, first)) == reason
        return
    with pytest.raises(BadFile) as raised:
        user_model.with_made(path, first)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "Graph execution error:\n\nDetected at node a defined at:\n\n9 is not in [0, 4)\n"
            "\t [[{{node a}}]] [Op:__inference_step_1]",
            "9 is not in [0, 4)",
        ),
        (
            "Exception encountered when calling A.call().\n\n\x1b[1m{{function_node __wrapped__"
            "Gather_device_/device:CPU:0}} 9 is not in [0, 4) [Op:GatherV2]\x1b[0m\n\nArguments",
            "Exception encountered when calling A.call(): 9 is not in [0, 4) [Op:GatherV2]",
        ),
        ("{{function_node __wrapped}} a label of 9 [Op:A] name: ", "a label of 9"),
        (
            'in user code:\n\n    File "a.py", line 7, in step  *\n        loss = f(x)\n'
            "\n    TypeError: 9 is no tensor\n",
            "TypeError: 9 is no tensor",
        ),
        (
            'in user code:\n\n    File "a.py", line 7, in step  *\n        loss = f(x)\n\n    '
            "ValueError: Exception encountered when calling A.call().\n\n    9 is no 4\n\n    "
            "Arguments received by A.call():\n      • x=7",
            "ValueError: Exception encountered when calling A.call(): 9 is no 4",
        ),
        ("of what is asked\nthe first line", "of what is asked"),
    ],
)
def test_of_an_error_s_lines_the_reason_is_said(message, said):
    assert user_model.one_line(RuntimeError(message)) == f"RuntimeError: {said}"


def test_the_line_that_fails_is_named(tmp_path):
    text = f"{BATCH}def pytorch():\n    return helper()\n\ndef helper():\n    return {{}}['loss']\n"
    module = user_model.load(file(tmp_path, text))
    with pytest.raises(BadFile, match=r"^my_model\.py:6: in pytorch KeyError: 'loss'$"):
        user_model.call("pytorch", module.__file__, module.pytorch)
    with pytest.raises(BadFile, match=r"^broken\.py:1: ZeroDivisionError: division by zero$"):
        user_model.load(file(tmp_path, "1 / 0\n", "broken.py"))
    (tmp_path / "latin.py").write_bytes("# Größe\n".encode("latin-1"))
    with pytest.raises(BadFile, match=r"latin\.py: SyntaxError: .*save the file as UTF-8"):
        user_model.load(tmp_path / "latin.py")


def test_a_file_has_no_arguments_of_the_process_that_executes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["worker", "7"])
    path = file(tmp_path, "import sys\ngiven = sys.argv\ndef pytorch(): return sys.argv\n")
    module = user_model.load(path)
    assert module.given == [str(path)]
    assert user_model.call("pytorch", path, module.pytorch) == [str(path)]
    assert sys.argv == ["worker", "7"]
    ends = file(tmp_path, "raise SystemExit('usage: train.py DATA')\n", "ends.py")
    with pytest.raises(BadFile, match=r"py:1: SystemExit: usage: train\.py DATA \(it ends the"):
        user_model.load(ends)


def square(output, y):
    return ((output - y) ** 2).mean()


@pytest.mark.parametrize(
    ("loss", "output", "y"),
    [
        (square, (8, 1), (8,)),
        (square, (8,), (8, 1)),
        (square, (8, 1, 5, 5), (8, 5, 5)),
    ],
)
def test_a_loss_that_holds_each_output_against_all_targets_is_said(loss, output, y):
    random = np.random.default_rng(0)
    said = f"the output has shape {output}, y has {y}; give both the same".replace("(", r"\(")
    with pytest.raises(BadFile, match=said.replace(")", r"\)")):
        user_model.check_broadcast(loss, random.normal(size=output), random.normal(size=y))


@pytest.mark.parametrize(
    ("loss", "output", "y"),
    [
        (square, (8, 1), (8, 1)),
        (square, (1, 1), (1,)),
        (square, (8, 3), (1, 3)),
        (lambda output, y: square(output, y[:, None]), (8, 1), (8,)),
        (lambda output, y: square(output[:, 0], y), (8, 1), (8,)),
        (lambda output, y: square(output.reshape(y.shape), y), (8, 1), (8,)),
        (lambda output, y: square(output - output.T, y - y[:, None]), (8, 1), (8,)),  # of pairs
        (lambda output, y: 1 / 0, (8, 1), (8,)),
    ],
)
def test_a_loss_that_takes_care_of_its_shapes_is_sound(loss, output, y):
    random = np.random.default_rng(0)
    user_model.check_broadcast(loss, random.normal(size=output), random.normal(size=y))
    user_model.check_broadcast(loss, {"logits": 1}, random.normal(size=y))


def test_a_loss_that_takes_its_targets_first_is_said():
    with pytest.raises(BadFile, match="takes y_true first"):
        user_model.check_order(lambda y_true, y_pred: 0)
    user_model.check_order(lambda output, y_true: 0)
    user_model.check_order(dict)


def test_what_upstream_refuses_is_named_as_well(tmp_path):
    text = f"{BATCH}def pytorch():\n    raise NotImplementedError('no such layer')\n"
    module = user_model.load(file(tmp_path, text))
    with pytest.raises(BadFile, match="no such layer"):
        user_model.call("pytorch", module.__file__, module.pytorch)


def test_a_package_of_the_suite_s_name_is_said(tmp_path):
    path = file(tmp_path, f"from shared.net import WIDTH\n{MODEL}{BATCH}")
    with pytest.raises(BadFile, match=r"py:1: .*has a package 'shared', too: give yours another"):
        user_model.load(path)


def test_it_imports_what_lies_beside_it(tmp_path):
    file(tmp_path, "WIDTH = 7\n", "own_width_of_a_test.py")
    path = file(tmp_path, f"from own_width_of_a_test import WIDTH\n{MODEL}{BATCH}")
    assert user_model.load(path).WIDTH == 7


def test_it_is_executed_as_it_was_checked_where_it_was_started(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    text = f"import os\nPLACE = os.getcwd()\n{MODEL}{BATCH}"
    path = file(tmp_path, text)
    checked = user_model.look(path)
    path.write_text(text.replace("PLACE", "EDITED").replace("pass", "return 7"))
    (tmp_path / user_model.SOURCE).write_bytes(checked.text)
    module = user_model.load_checked(path, tmp_path, str(tmp_path))
    assert Path(module.PLACE).samefile(tmp_path)
    assert inspect.getsource(module.pytorch) == MODEL  # which AutoGraph reads
    assert user_model.look(path).sha256() != checked.sha256()


def test_a_file_needs_no_suffix(tmp_path):
    path = file(tmp_path, MODEL + BATCH, "my_model")
    assert user_model.load(path).pytorch() is None


def test_a_batch_has_the_size_that_the_file_means(tmp_path):
    default = user_model.load(file(tmp_path, f"{MODEL}def batch(size=12, seed=0): pass\n", "a.py"))
    assert user_model.usual_size(default) == 12
    assert user_model.usual_size(user_model.load(file(tmp_path, MODEL + BATCH, "b.py"))) == 32


def test_a_batch_is_arrays_in_any_structure(tmp_path):
    text = (
        "import numpy as np\n"
        f"{MODEL}"
        "def batch(size, seed, framework):\n"
        "    x = {'ids': np.full((size, 3), seed), 'parts': (np.zeros(size), [1.0] * size)}\n"
        "    return x, np.array(framework == 'tensorflow')\n"
    )
    module = user_model.load(file(tmp_path, text))
    batches = [user_model.draw(module, 4, seed, "tf") for seed in range(user_model.BATCHES)]
    user_model.save_batches(tmp_path / "tf", batches)
    whole, few = (user_model.load_batches(tmp_path / "tf", size) for size in (None, 1))
    assert len(whole) == user_model.BATCHES
    x, y = whole[3]
    assert list(x) == ["ids", "parts"]
    assert (x["ids"] == 3).all()
    assert x["ids"].shape == (4, 3)
    assert x["parts"][1].tolist() == [1.0] * 4
    assert bool(y)
    assert few[3][0]["ids"].shape == (1, 3)
    x, y = user_model.samples(tmp_path / "tf", 10)
    assert x["ids"][:, 0].tolist() == [0] * 4 + [1] * 4 + [2] * 2
    assert x["parts"][0].shape == (10,)
    assert y.shape == ()  # what has no samples stays as it is


def test_one_sample_leaves_what_is_of_no_sample(tmp_path):
    def targets(seed):
        boxes = [{"boxes": np.full((1 + place % 3, 4), seed)} for place in range(8)]
        return {"of_images": tuple(boxes), "weights": np.ones(10), "label": np.arange(8)}

    batches = [(np.zeros((8, 6)), targets(seed)) for seed in range(user_model.BATCHES)]
    user_model.save_batches(tmp_path, batches)
    _, y = user_model.load_batches(tmp_path, 1)[2]
    assert len(y["of_images"]) == 1
    assert y["of_images"][0]["boxes"].tolist() == [[2] * 4]
    assert y["weights"].shape == (10,)
    assert y["label"].tolist() == [0]
    x, y = user_model.samples(tmp_path, 80)
    assert x.shape == (80, 6)
    assert [each["boxes"][0, 0] for each in y["of_images"]] == sorted([*range(10)] * 8)
    assert y["weights"].shape == (10,)
    assert len(user_model.resized(y, 80, 100)["of_images"]) == 100
    two = (np.arange(2), np.ones(10))  # two targets of two samples are no list of samples
    assert [len(each) for each in user_model.resized(two, 2, 1)] == [1, 10]


def test_logits_are_found_wherever_an_output_has_them():
    logits = np.eye(2)
    for output in (logits, {"loss": 1.0, "logits": logits}, user_model.Logits(logits), (logits, 0)):
        assert user_model.first(output) is logits
    assert user_model.Logits(logits)["logits"] is user_model.Logits(logits)[0] is logits
    with pytest.raises(KeyError):
        user_model.Logits(logits)["loss"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (np.zeros(3), "not (x, y)"),
        ((1, 2, 3), "a tuple of 3, not (x, y)"),
        ((np.array(["a"]), 1), "give arrays of numbers"),
    ],
)
def test_what_is_no_batch_is_said(given, reason):
    with pytest.raises(BadFile) as found:
        user_model.pair(given, "batch")
    assert reason in str(found.value)


def test_the_first_axis_is_the_batch():
    user_model.check_size({"a": np.zeros((8, 2)), "scale": np.array(1.0)}, 8, "batch")
    with pytest.raises(BadFile, match=r"shape \(3, 8\): its first axis must have the 8 samples"):
        user_model.check_size((np.zeros((8, 2)), np.zeros((3, 8))), 8, "batch")


# Names by import *, and functions under a condition ----------------------------------------------


def test_names_that_come_by_a_star_are_looked_for_beside_the_file(tmp_path):
    file(tmp_path, f"from torch import *\n{MODEL}{BATCH}_hidden = 1\n", "nets.py")
    assert user_model.look(file(tmp_path, "from nets import *\n")).functions == {"pytorch", "batch"}
    known = user_model.look(file(tmp_path, f"from math import *\n{MODEL}{BATCH}"))
    assert known.functions == {"pytorch", "batch"}
    with pytest.raises(BadFile, match=r"imports \* from a module: .* batch by name$"):
        user_model.look(file(tmp_path, f"from elsewhere import *\n{BATCH}"))


def test_a_function_under_a_condition_that_does_not_hold_is_named(tmp_path):
    text = f"import os\nif os.environ.get('NEVER_SET'):\n    {MODEL}{BATCH}"
    path = file(tmp_path, text)
    assert user_model.look(path).sides == ["pt"]
    module = user_model.load(path)
    assert user_model.function(module, "pytorch", "batch") is module.batch
    with pytest.raises(BadFile, match=r"^pytorch is defined only under a condition"):
        user_model.function(module, "pytorch")


# A loss of parts ---------------------------------------------------------------------------------


def mean_of_samples(output, y):
    return np.mean((output - y) ** 2)


def mean_of_tokens(output, y):
    return np.sum(np.where(y < 0, 0, (output - y) ** 2)) / np.sum(y >= 0)


def total(output, y):
    return np.sum((output - y) ** 2)


@pytest.mark.parametrize(
    ("loss", "same"), [(mean_of_samples, True), (mean_of_tokens, False), (total, False)]
)
@pytest.mark.parametrize("wrap", [lambda logits: logits, user_model.Logits])
def test_a_mean_over_unequal_tokens_is_no_mean_over_samples(loss, same, wrap):
    random = np.random.default_rng(0)
    output, y = random.random((10, 8)), random.random((10, 8))
    y[np.arange(8)[None] > np.arange(10)[:, None]] = -1  # padding

    def loss_of_file(given, y):
        return loss(given.logits if wrap is user_model.Logits else given, y)

    apart = user_model.parts_apart(loss_of_file, wrap(output), y)
    assert apart < 1e-12 if same else apart > 1e-3


def test_a_loss_that_draws_numbers_and_few_samples_tell_nothing_of_parts():
    random = np.random.default_rng(0)
    drawn = user_model.parts_apart(lambda o, y: random.random(), np.ones((8, 2)), np.ones(8))
    few = user_model.parts_apart(total, np.ones((3, 2)), np.zeros((3, 2)))
    assert drawn == few == 0.0
    nothing = user_model.parts_apart(
        lambda o, y: np.nan if len(y) < 8 else 1.0, np.ones(8), np.ones(8)
    )
    assert nothing == 1.0
