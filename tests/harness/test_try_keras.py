"""`twinbench try` on a file whose one Keras model is that of both frameworks."""

import pytest

from bench import user_task
from bench.analysis.certificates import difference
from bench.analysis.reading import load
from shared import user_model
from tests.harness.test_try import try_

pytestmark = pytest.mark.timeout(600)
FILE = """
import numpy as np


def keras():
    import keras
    from keras import layers

    parts = [keras.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="relu")]
    parts += [layers.BatchNormalization(), layers.Flatten(), layers.Dense(3)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras.Sequential(parts), loss, keras.optimizers.SGD(0.01, momentum=0.9)


def batch(size=8, seed=0):
    random = np.random.default_rng(seed)
    return random.standard_normal((size, 8, 8, 1), dtype=np.float32), random.integers(0, 3, size)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the file was tried: one block of the plain step on each backend."""
    place = tmp_path_factory.mktemp("keras")
    (place / "model.py").write_text(FILE)
    done = try_(place, "model.py", "--effort=quick", "--technique=baseline", "--variant=baseline")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return place


@pytest.mark.campaign
def test_both_backends_do_the_same_work_from_the_same_weights(folder):
    record = load(folder / "results")
    ours, theirs = (case for case in record.cases if case.role == "baseline")
    assert {ours.framework, theirs.framework} == {"pt", "tf"}
    assert ours.certificate.weights_sha256 == theirs.certificate.weights_sha256
    assert len(ours.losses) == 10
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
    assert ours.losses[-1] != pytest.approx(ours.losses[0], rel=1e-3)
    assert difference(ours, theirs) is None
    (plain,) = [c for c in record.comparisons if c.kind == "framework" and c.variant == "baseline"]
    assert plain.reason is None
    assert plain.ratio > 0


def test_both_backends_give_the_same_from_the_same_weights(tmp_path, monkeypatch):
    """Each in a process with the backend of its framework."""
    (tmp_path / "model.py").write_text(FILE)
    monkeypatch.setattr(user_task, "TASKS", {})
    path, results = str(tmp_path / "model.py"), tmp_path / "results"
    made = user_task.prepare(path, results, {}, set(), lambda said: None)
    assert made.task.paired  # the outputs of one batch were compared
    backends = {side: known["keras_backend"] for side, known in made.about["sides"].items()}
    assert backends == {"pt": "torch", "tf": "tensorflow"}


@pytest.mark.parametrize(
    ("text", "makers", "is_keras"),
    [
        (FILE, ["keras", "keras"], True),
        (FILE + "\ndef pytorch():\n    pass\n", ["pytorch", "keras"], False),
        (FILE.replace("def keras", "def pytorch"), ["pytorch"], False),
        ("import keras\n" + FILE.replace("def keras", "def tensorflow"), ["tensorflow"], False),
    ],
)
def test_keras_is_the_model_of_a_framework_that_has_no_other(tmp_path, text, makers, is_keras):
    (tmp_path / "model.py").write_text(text)
    file = user_model.look(tmp_path / "model.py")
    assert [file.maker(side) for side in file.sides] == makers
    assert file.is_keras == is_keras
