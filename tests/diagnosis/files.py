"""Files as users have them: healthy ones, and ones with a planted cause and how it is called."""

_PT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential({layers})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(x, y):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    {planted}
    return step, {batches}
"""
_TF = """
import numpy as np
import tensorflow as tf

def make():
    tf.keras.utils.set_random_seed(0)
    model = tf.keras.Sequential([tf.keras.Input((64,)), *{layers}])
    optimizer = tf.keras.optimizers.SGD(0.01)
    compute = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    {decorator}
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = compute(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    {planted}
    return step, {batches}
"""
_LAYERS = {
    "pt": "torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)",
    "tf": "[tf.keras.layers.Dense(64, 'relu'), tf.keras.layers.Dense(10)]",
}
_BATCHES = {
    "pt": "[(torch.randn(32, 64), torch.randint(0, 10, (32,)))] * 8",
    "tf": "[(tf.random.normal((32, 64)), tf.zeros((32,), tf.int32))] * 8",
}


def _pt(layers: str = _LAYERS["pt"], planted: str = "", batches: str = _BATCHES["pt"]) -> str:
    return _PT.format(layers=layers, planted=planted, batches=batches)


def _tf(
    layers: str = _LAYERS["tf"],
    planted: str = "",
    batches: str = _BATCHES["tf"],
    decorator: str = "@tf.function",
) -> str:
    return _TF.format(layers=layers, planted=planted, batches=batches, decorator=decorator)


HEALTHY = {"pt": _pt(), "tf": _tf()}
TRY = """
import numpy as np

def pytorch():
    import torch
    return torch.nn.Linear(64, 10), torch.nn.functional.cross_entropy

def tensorflow():
    import tensorflow as tf
    model = tf.keras.Sequential([tf.keras.Input((64,)), tf.keras.layers.Dense(10)])
    return model, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

def batch(size=32, seed=0):
    random = np.random.default_rng(seed)
    return random.random((size, 64), np.float32), random.integers(0, 10, size)
"""
_TOKENS = """
import numpy as np

def pytorch():
    import torch
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(100, 16), torch.nn.Linear(16, 100)
        def forward(self, x):
            return self.head(self.embed(x))
    return Model(), lambda o, y: torch.nn.functional.cross_entropy(o.flatten(0, 1), y.flatten())

def tensorflow():
    import tensorflow as tf
    layers = [tf.keras.layers.Embedding(100, 16), tf.keras.layers.Dense(100)]
    model = tf.keras.Sequential([tf.keras.Input((None,), dtype="int32"), *layers])
    return model, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

def batches():
    random = np.random.default_rng(0)
    for length in {lengths}:
        x = random.integers(1, 100, (8, length)).astype("int32")
        x[np.arange(length) >= np.linspace(length * {fullest}, length, 8)[:, None]] = 0
        yield x, x.astype("int64")
"""
_VARYING = _TOKENS.format(lengths="range(16, 128, 8)", fullest=1.0)
_PADDED = _TOKENS.format(lengths="[64] * 12", fullest=0.1)
_WIDE = {
    "pt": "torch.nn.Linear(64, 512), torch.nn.Linear(512, 512), torch.nn.Linear(512, 10)",
    "tf": "[tf.keras.layers.Dense(512), tf.keras.layers.Dense(512), tf.keras.layers.Dense(10)]",
}
_TINY = "for p in model[1].parameters(): p.data.mul_(1e-38)"
_TINY_TF = "for v in model.layers[1].weights: v.assign(tf.fill(v.shape, np.float32(1e-39)))"
_ROWS = (
    "DataLoader(TensorDataset(torch.randn(9000, 64), torch.randint(0, 10, (9000,))), "
    "batch_size=256)"
)
_ROWS_TF = (
    "tf.data.Dataset.from_generator(lambda: ((np.ones(64, 'f4'), 1) for _ in range(9000)), "
    "output_signature=(tf.TensorSpec((64,)), tf.TensorSpec((), tf.int32))).batch(128)"
)
_COMPILED = """model.compile(optimizer, compute, run_eagerly=True)
    step = model.train_on_batch"""
_PREDICTS = "step = lambda x, y: model.predict(x[:1], verbose=0)"

DENORMAL = {"pt": _pt(_WIDE["pt"], _TINY), "tf": _tf(_WIDE["tf"], _TINY_TF)}
# (framework, cause): the file, and the check that names it
PLANTED = {
    ("pt", "rows"): (_pt(batches=_ROWS), "loader by rows"),
    ("tf", "rows"): (_tf(batches=_ROWS_TF), "loader by rows"),
    ("pt", "anomaly"): (_pt(planted="torch.autograd.set_detect_anomaly(True)"), "anomaly"),
    ("tf", "eager"): (_tf(decorator=""), "eager"),
    ("tf", "run_eagerly"): (_tf(planted=_COMPILED), "eager"),
    ("tf", "predict"): (_tf(planted=_PREDICTS), "predict in a loop"),
    ("pt", "threads"): (_pt(planted="torch.set_num_threads(3)"), "pool too small"),
    ("pt", "varying"): (_VARYING, "shapes that vary"),
    ("tf", "varying"): (_VARYING, "shapes that vary"),
    ("pt", "padded"): (_PADDED, "padding"),
    ("tf", "padded"): (_PADDED, "padding"),
}
