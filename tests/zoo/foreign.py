"""What both halves of the zoo share: how a model of it is described."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

TRAITS = {
    "images": "images as inputs",
    "normalization": "a layer with adapted statistics (Keras's Normalization)",
    "gelu": "exact GELU",
    "conv1d": "1-D convolutions",
    "conv3d": "3-D convolutions",
    "grouped": "grouped convolutions",
    "depthwise": "depthwise convolutions",
    "transposed": "transposed convolutions",
    "residual": "residual branches",
    "concatenated": "concatenated branches",
    "attention": "multi-head attention",
    "encoder": "the framework's own encoder of a transformer",
    "lstm": "LSTM",
    "tied": "tied weights",
    "l2": "L2 regularisation inside the model",
    "dropout": "dropout",
    "tuple inputs": "several inputs, positional",
    "dict inputs": "several inputs, by name",
    "tuple outputs": "several outputs, by place",
    "dict outputs": "several outputs, by name",
    "dataclass outputs": "an output object with `.logits`",
    "eleven outputs": "more than ten outputs",
    "subclassed": "a model that only its own code describes",
    "top-level list": "blocks in a list at the top of the model",
    "batchnorm": "batch normalisation",
    "spectral": "spectral normalisation",
    "assigned state": "a state that a layer changes and then reads",
    "len": "a forward that asks for `len(x)`",
    "torchscript": "a block of TorchScript",
    "bags": "bags of embeddings (`nn.EmbeddingBag`)",
    "untaken head": "a head that the example does not take",
    "inputs in place": "inputs that the model changes in place",
    "loss of model": "a loss that reads its model",
    "lookup": "looked up words, and bins of numbers",
    "activity": "a regulariser of what a layer gives",
    "conv lstm": "convolutional LSTM",
    "ctc": "a layer that adds CTC's loss",
}
# With these, two halves of a batch do not train as the whole does.
SEES_THE_BATCH = {"batchnorm", "spectral", "assigned state"}


@dataclass(frozen=True)
class Foreign:
    """A model of the zoo, and what has to be said to apply a technique to it.

    build: makes it, always with the same weights. inputs: of so many samples, as the framework's
    users hand them over. labels: of so many samples. blocks: what checkpointing recomputes. layer:
    one that feature distillation can follow. cut: where a pipeline is cut, "" for nowhere. pairs:
    what tensor parallel splits, "" for nothing.
    """

    name: str
    build: Callable
    inputs: Callable
    labels: Callable
    traits: tuple[str, ...]
    blocks: str
    layer: str
    cut: str = ""
    pairs: str = ""

    @property
    def sees_the_batch(self) -> bool:
        """Whether training depends on how a batch is cut."""
        return bool(SEES_THE_BATCH & {*self.traits})

    def __post_init__(self) -> None:
        if unknown := set(self.traits) - TRAITS.keys():
            raise ValueError(f"{self.name}: unknown traits {', '.join(sorted(unknown))}")
