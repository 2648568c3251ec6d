"""The PyTorch half of the zoo: models as other projects write them, none of the suite's own.

Each is small, and made here in the construction of a kind of model that people have: those of
timm and transformers are not installed, models of the same construction stand here; those of
torchvision are the originals, with random weights.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pt_impl.kit.user_model import UserModel
from tests.zoo.foreign import Foreign

CLASSES = 6
VOCABULARY = 24
LENGTH = 16
SIZE = 32  # of images
DEVICE = os.environ.get("ZOO_DEVICE", "cpu")  # of models and data: `python -m tests.zoo --device`


# Images ---------------------------------------------------------------------------------------


class SqueezeExcite(nn.Module):
    """Channels are weighted by what the whole image says."""

    def __init__(self, channels: int):
        super().__init__()
        self.reduce = nn.Conv2d(channels, channels // 4, 1)
        self.expand = nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(n, c, h, w) -> (n, c, h, w)."""
        weight = self.expand(F.silu(self.reduce(x.mean((2, 3), keepdim=True))))
        return x * weight.sigmoid()


class GroupsNet(nn.Module):
    """Depthwise and grouped convolutions, a residual sum and two branches side by side."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.GELU()
        )
        self.mix = nn.Sequential(
            nn.Conv2d(16, 16, 5, padding=2, groups=16, bias=False),
            nn.BatchNorm2d(16),
            nn.Conv2d(16, 32, 1),
            nn.GELU(),
            SqueezeExcite(32),
            nn.Conv2d(32, 16, 1),
        )
        self.left = nn.Conv2d(16, 16, 3, 2, 1, groups=4)
        self.right = nn.Conv2d(16, 8, 1, 2)
        self.norm = nn.BatchNorm2d(24)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, h, w) -> (n, classes)."""
        x = self.stem(x)
        x = x + self.mix(x)
        x = self.norm(torch.cat([self.left(x), self.right(x)], dim=1)).relu()
        return self.head(self.dropout(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)))


class UNet(nn.Module):
    """Down and up again, with what was left on the way put beside: a class for each pixel."""

    def __init__(self):
        super().__init__()
        self.first = self._block(3, 8)
        self.second = self._block(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.last = self._block(16, 8)
        self.head = nn.Conv2d(8, CLASSES, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU(True)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, h, w) -> (n, classes, h, w)."""
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        return self.head(self.last(torch.cat([self.up(second), first], 1)))


class Video(nn.Module):
    """3-D convolutions over frames."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(3, 8, 3, padding=1),
            nn.BatchNorm3d(8),
            nn.ReLU(),
            nn.MaxPool3d(2),
            nn.Conv3d(8, 16, 3, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, t, h, w) -> (n, classes)."""
        return self.head(self.body(x).mean((2, 3, 4)))


class TwoHeads(nn.Module):
    """A class and a box: a tuple."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()
        )
        self.hidden = nn.Linear(16, 32)
        self.classes, self.box = nn.Linear(32, CLASSES), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(n, 3, h, w) -> (n, classes) and (n, 4)."""
        x = F.relu(self.hidden(self.features(x).mean((2, 3))))
        return self.classes(x), self.box(x)


class DictHeads(nn.Module):
    """Coarse and fine classes: a dict, which is not in the order of its names."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.neck = nn.Sequential(nn.Flatten(), nn.Linear(8 * 256, 32), nn.Tanh())
        self.heads = nn.ModuleDict({"fine": nn.Linear(32, CLASSES), "coarse": nn.Linear(32, 3)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """(n, 3, 32, 32) -> fine (n, classes), coarse (n, 3)."""
        x = self.neck(self.features(x))
        return {name: head(x) for name, head in self.heads.items()}


# Sequences ------------------------------------------------------------------------------------


class Conv1dText(nn.Module):
    """Dilated 1-D convolutions over embedded characters."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList([nn.Conv1d(16, 16, 3, dilation=2**n) for n in range(2)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, codes: Tensor) -> Tensor:
        """(n, t) -> (n, classes)."""
        x = self.embedding(codes).transpose(1, 2)
        for number, layer in enumerate(self.layers):
            x = x + F.gelu(layer(F.pad(x, (2 * 2**number, 0))))
        return self.head(self.norm(x.transpose(1, 2)).amax(1))


class LSTMLanguage(nn.Module):
    """A language model with an LSTM, whose last layer is its embedding (Press and Wolf, 2017)."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.lstm = nn.LSTM(24, 24, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(24, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, codes: Tensor) -> Tensor:
        """(n, t) -> (n, t, vocabulary)."""
        x, _ = self.lstm(self.embedding(codes))
        return self.head(x)


class BiLSTM(nn.Module):
    """The last states of both directions."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True, bidirectional=True)
        self.hidden = nn.Linear(32, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, 8) -> (n, classes)."""
        _, (state, _) = self.lstm(x)
        return self.head(self.hidden(torch.cat([state[0], state[1]], 1)).relu())


class Encoder(nn.Module):
    """PyTorch's own encoder over patches, with a token that stands for the class."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.positions = nn.Parameter(0.02 * torch.randn(1, LENGTH + 1, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, 16) -> (n, classes)."""
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.encoder(x)[:, 0])


@dataclass
class ClassifierOutput(OrderedDict):
    """Logits with what else a model found, by name: an object that is a dict, too.

    Only what there is counts as an item, as in the libraries that give such objects.
    """

    logits: Tensor | None = None
    hidden: Tensor | None = None
    attentions: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("logits", "hidden", "attentions"):
            if getattr(self, name) is not None:
                super().__setitem__(name, getattr(self, name))


pytree.register_pytree_node(
    ClassifierOutput,
    lambda output: (list(output.values()), list(output)),
    lambda values, names: ClassifierOutput(**dict(zip(names, values, strict=True))),
    serialized_type_name="tests.zoo.pt.ClassifierOutput",
)


class AttentionBlock(nn.Module):
    """`nn.MultiheadAttention` and a feed-forward, each normalised after its sum."""

    def __init__(self, width: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.norm0, self.norm1 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """(n, t, width) and what of it is padding -> (n, t, width)."""
        found, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        x = self.norm0(x + self.dropout(found))
        return self.norm1(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    """Inputs by name, an object as output, blocks that take a mask as well."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 32, padding_idx=0)
        self.register_buffer("position_ids", torch.arange(LENGTH)[None], persistent=False)
        self.positions = nn.Embedding(LENGTH, 32)
        self.layer = nn.ModuleList([AttentionBlock(32) for _ in range(2)])
        self.pooler = nn.Linear(32, 32)
        self.classifier = nn.Linear(32, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> ClassifierOutput:
        """Codes (n, t), and 1 where there is a word -> logits (n, classes), hidden (n, t, 32)."""
        x = self.words(input_ids) + self.positions(self.position_ids[:, : input_ids.shape[1]])
        padding = None if attention_mask is None else attention_mask == 0
        for block in self.layer:
            x = block(x, padding)
        logits = self.classifier(torch.tanh(self.pooler(x[:, 0])))
        return ClassifierOutput(logits=logits, hidden=x)


@dataclass
class LanguageOutput:
    """A plain dataclass, which the framework knows nothing of."""

    logits: Tensor
    loss: Tensor | None = None


class CausalBlock(nn.Module):
    """Attention written by hand over a mask in a buffer with four axes."""

    def __init__(self, width: int):
        super().__init__()
        mask = torch.ones(LENGTH, LENGTH).tril().view(1, 1, LENGTH, LENGTH)
        self.register_buffer("bias", mask.bool(), persistent=False)
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """(n, t, width) -> the same, alone in a tuple."""
        n, t, width = x.shape
        heads = self.c_attn(self.ln_1(x)).view(n, t, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        scores = query @ key.transpose(-2, -1) / math.sqrt(width // 2)
        scores = scores.masked_fill(~self.bias[:, :, :t, :t], torch.finfo(scores.dtype).min)
        found = self.dropout(scores.softmax(-1)) @ value
        x = x + self.c_proj(found.transpose(1, 2).reshape(n, t, width))
        return (x + self.dropout(self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))),)


class GPT2(nn.Module):
    """Blocks in a list at the top, tied embeddings, inputs by name, a dataclass as output."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, 32), nn.Embedding(LENGTH, 32)
        self.h = nn.ModuleList([CausalBlock(32) for _ in range(2)])
        self.ln_f = nn.LayerNorm(32)
        self.lm_head = nn.Linear(32, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.1)

    def forward(self, input_ids: Tensor) -> LanguageOutput:
        """(n, t) -> logits (n, t, vocabulary)."""
        x = self.wte(input_ids) + self.wpe.weight[: input_ids.shape[1]]
        for block in self.h:
            (x,) = block(x)
        return LanguageOutput(logits=self.lm_head(self.ln_f(x)))


# Several inputs and outputs ---------------------------------------------------------------------


class TwoTowers(nn.Module):
    """An image and a vector, each through layers of its own."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.vector = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Bilinear(8, 8, CLASSES)

    def forward(self, image: Tensor, vector: Tensor) -> Tensor:
        """(n, 3, h, w) and (n, 5) -> (n, classes)."""
        return self.head(self.image(image).flatten(1), self.vector(vector))


class WideAndDeep(nn.Module):
    """Numbers and categories by name."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([100.0, -3.0, 0.5]))
        self.register_buffer("variance", torch.tensor([400.0, 9.0, 0.01]))
        self.category = nn.Embedding(7, 4)
        self.deep = nn.Sequential(nn.Linear(7, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
        self.head = nn.Linear(35, CLASSES)

    def forward(self, *, numbers: Tensor, category: Tensor) -> Tensor:
        """numbers (n, 3), category (n,) -> (n, classes)."""
        numbers = (numbers - self.mean) / self.variance.sqrt()
        deep = self.deep(torch.cat([numbers, self.category(category)], 1))
        return self.head(torch.cat([deep, numbers], 1))


class ElevenHeads(nn.Module):
    """As many outputs as sort otherwise by number than by name."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU())
        self.heads = nn.ModuleList([nn.Linear(32, CLASSES) for _ in range(11)])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """(n, 8) -> eleven of (n, classes)."""
        x = self.body(x)
        return tuple(head(x) for head in self.heads)


# What few models have, each with one such trait -------------------------------------------------


class Critic(nn.Module):
    """Spectral normalisation, whose vectors follow each pass of training."""

    def __init__(self):
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.first, self.second = norm(nn.Conv2d(3, 8, 3, 2)), norm(nn.Conv2d(8, 16, 3, 2))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, h, w) -> (n, classes)."""
        return self.head(self.second(self.first(x).relu()).relu().mean((2, 3)))


class Centre(nn.Module):
    """Subtracts a moving mean that it has updated before, as the head of DINO does."""

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """(n, width) -> (n, width)."""
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return torch.tanh(x - self.mean)


class Centred(nn.Sequential):
    """A head that is centred."""

    def __init__(self):
        parts = {"first": nn.Linear(8, 16), "centre": Centre(16), "head": nn.Linear(16, CLASSES)}
        super().__init__(OrderedDict(parts))


class Around(nn.Module):
    """Holds layers that were compiled to TorchScript."""

    def __init__(self):
        super().__init__()
        self.inside = torch.jit.script(nn.Sequential(nn.Linear(8, 32), nn.ReLU()))
        self.after = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 8) -> (n, 16)."""
        return self.after(self.inside(x)).relu()


class Scripted(nn.Sequential):
    """A block of TorchScript within a model that is none."""

    def __init__(self):
        super().__init__(OrderedDict(around=Around(), head=nn.Linear(16, CLASSES)))


class Bags(nn.Module):
    """The mean of the vectors of codes."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, 32, mode="mean")
        self.hidden, self.head = nn.Linear(32, 32), nn.Linear(32, CLASSES)

    def forward(self, codes: Tensor) -> Tensor:
        """(n, t) -> (n, classes)."""
        return self.head(self.hidden(self.bag(codes)).relu())


class Tasks(nn.Module):
    """Two heads, of which a call takes one."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.classes, self.boxes = nn.Linear(32, CLASSES), nn.Linear(32, 4)

    def forward(self, x: Tensor, task: str = "classes") -> Tensor:
        """(n, 8) -> (n, classes), or for another task (n, 4)."""
        x = self.trunk(x)
        return self.classes(x) if task == "classes" else self.boxes(x)


class InPlace(nn.Module):
    """Normalises its input where it is."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(8, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 8) -> (n, classes)."""
        return self.head(self.hidden(x.sub_(0.1).mul_(1.5)).relu())


def penalised() -> tuple[nn.Module, Callable]:
    """A model with its loss, which has a penalty of the model's weights."""
    hidden, head = nn.Linear(8, 32), nn.Linear(32, CLASSES)
    model = nn.Sequential(OrderedDict(hidden=hidden, bend=nn.ReLU(), head=head))

    def loss_fn(output, y: Tensor) -> Tensor:
        return cross_entropy(output, y) + 0.1 * model.hidden.weight.square().sum()

    return model, loss_fn


PENALISED = UserModel(penalised)  # which hands each model its loss, as in a user's file


# What they are fed with, and what their outputs are worth ---------------------------------------


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _images(n: int, seed: int = 0, channels: int = 3) -> Tensor:
    return torch.randn(n, channels, SIZE, SIZE, generator=_random(seed))


def _vectors(*shape: int) -> Callable:
    return lambda n, seed=0: torch.randn(n, *shape, generator=_random(seed))


def _codes(n: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, (n, LENGTH), generator=_random(seed))


def _classes(*shape: int, classes: int = CLASSES) -> Callable:
    return lambda n, seed=1: torch.randint(0, classes, (n, *shape), generator=_random(seed))


def _bert_inputs(n: int, seed: int = 0) -> dict[str, Tensor]:
    mask = torch.ones(n, LENGTH, dtype=torch.int64)
    mask[:, LENGTH - 3 :] = 0
    return {"input_ids": _codes(n, seed) * mask, "attention_mask": mask}


def _gpt2_inputs(n: int, seed: int = 0) -> dict[str, Tensor]:
    return {"input_ids": _codes(n, seed)}


def _pair(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return _images(n, seed), _vectors(5)(n, seed)


def _table(n: int, seed: int = 0) -> dict[str, Tensor]:
    numbers = torch.randn(n, 3, generator=_random(seed)) * torch.tensor([20.0, 3.0, 0.1])
    numbers = numbers + torch.tensor([100.0, -3.0, 0.5])
    return {"numbers": numbers, "category": torch.arange(n) % 7}


def cross_entropy(output, y: Tensor) -> Tensor:
    """Mean cross-entropy of one tensor of logits, or of an object that has `.logits`.

    (n, classes), (n, t, classes) or (n, classes, h, w); a mean over samples.
    """
    logits = getattr(output, "logits", output)
    axis = 1 if logits.ndim == 4 else -1
    logits = logits.float().movedim(axis, -1)
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def many_losses(output, y: Tensor) -> Tensor:
    """Cross-entropy of the first output, and a tenth of the mean square of the others."""
    first, *others = list(output.values()) if isinstance(output, dict) else output
    return cross_entropy(first, y) + 0.1 * sum(part.float().square().mean() for part in others)


def loss_of(model: Foreign) -> Callable:
    """The loss that a model of the zoo trains with: `loss_fn(output, y)`."""
    if "loss of model" in model.traits:
        return PENALISED.loss
    return many_losses if {"tuple outputs", "dict outputs"} & {*model.traits} else cross_entropy


# The models -------------------------------------------------------------------------------------


def _vit() -> nn.Module:
    make = torchvision.models.VisionTransformer
    model = make(SIZE, 8, 2, 2, 32, 64, dropout=0.1, num_classes=CLASSES)
    nn.init.normal_(model.heads.head.weight, std=0.1)  # which begins at zero: nothing would flow
    return model


def _convnext() -> nn.Module:
    setting = torchvision.models.convnext.CNBlockConfig
    settings = [setting(16, 32, 1), setting(32, None, 1)]
    return torchvision.models.ConvNeXt(settings, 0.0, num_classes=CLASSES)


def _densenet() -> nn.Module:
    make = torchvision.models.DenseNet
    return make(8, (2, 2), 16, bn_size=2, num_classes=CLASSES)


def _torchvision(name: str) -> nn.Module:
    return torchvision.models.get_model(name, weights=None, num_classes=CLASSES)


def _seeded(make: Callable, inputs: Callable) -> Callable:
    kept = {}

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = make()
        if not kept:
            kept.update(_statistics(model, inputs(64)))
        model.load_state_dict(kept, strict=False)
        return model.train().to(DEVICE)

    return build


def _placed(make: Callable) -> Callable:
    return lambda *given: pytree.tree_map(lambda part: part.to(DEVICE), make(*given))


def _statistics(model: nn.Module, x) -> dict[str, Tensor]:
    """The state of the normalisations of a model that has seen x, as a trained model's has.

    With the statistics that they begin with, what a random model predicts would all but vanish.
    """
    norms = {
        name: module
        for name, module in model.eval().named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    }
    momenta = [module.momentum for module in norms.values()]
    for module in norms.values():
        module.train().momentum = 1.0
    with torch.no_grad():
        model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
    for module, momentum in zip(norms.values(), momenta, strict=True):
        module.momentum = momentum
    return {
        f"{name}.{key}": value.clone()
        for name, module in norms.items()
        for key, value in module.named_buffers()
    }


PAIRS = {
    "bilstm": "hidden > head",
    "encoder": "encoder.layers.*.linear1 > encoder.layers.*.linear2",
}


def _zoo() -> dict[str, Foreign]:
    images, label, text = _images, _classes(), _classes(LENGTH, classes=VOCABULARY)
    rows = [
        ("groups_net", GroupsNet, images, label,
         "images gelu grouped depthwise residual concatenated"
         " dropout batchnorm", "mix", "mix", "left"),
        ("unet", UNet, images, _classes(SIZE, SIZE), "images transposed concatenated",
         "first,second",
         "second", ""),
        ("video", Video, _vectors(3, 8, 16, 16), label, "conv3d batchnorm", "body", "head",
         "body.4"),
        ("two_heads", TwoHeads, images, label, "images tuple_outputs", "features", "hidden",
         "hidden"),
        ("dict_heads", DictHeads, images, label, "images dict_outputs batchnorm", "neck", "neck",
         "neck"),
        ("conv1d_text", Conv1dText, _codes, label, "conv1d gelu residual", "layers.*", "norm",
         "norm"),
        ("lstm_language", LSTMLanguage, _codes, text, "lstm tied dropout", "lstm", "embedding",
         ""),
        ("bilstm", BiLSTM, _vectors(LENGTH, 8), label, "lstm", "hidden", "hidden", "hidden"),
        ("encoder", Encoder, _vectors(LENGTH, 16), label, "encoder attention gelu dropout residual"
         " len", "encoder.layers.*", "encoder", "encoder.layers.1"),
        ("bert", Bert, _bert_inputs, label, "attention gelu dropout residual dict_inputs"
         " dataclass_outputs", "layer.*", "pooler", "layer.1"),
        ("gpt2", GPT2, _gpt2_inputs, text, "attention tied dropout residual dict_inputs"
         " dataclass_outputs top-level_list", "h.*", "ln_f", "h.1"),
        ("two_towers", TwoTowers, _pair, label, "images tuple_inputs", "image", "vector", "head"),
        ("wide_and_deep", WideAndDeep, _table, label, "gelu dict_inputs concatenated"
         " normalization", "deep", "deep", "head"),
        ("eleven_heads", ElevenHeads, _vectors(8), label, "gelu tuple_outputs eleven_outputs",
         "body", "body", ""),
        ("resnet18", partial(_torchvision, "resnet18"), images, label, "images residual batchnorm",
         "layer?", "layer4", "layer3"),
        ("mobilenet_v3_small", partial(_torchvision, "mobilenet_v3_small"), images, label,
         "images depthwise residual dropout batchnorm", "features.*", "avgpool", "features.6"),
        ("efficientnet_b0", partial(_torchvision, "efficientnet_b0"), images, label,
         "images depthwise residual dropout batchnorm", "features.*", "avgpool", "features.4"),
        ("vit", _vit, images, label, "images attention gelu dropout residual",
         "encoder.layers.encoder_layer_*", "encoder", "encoder.layers.encoder_layer_1"),
        ("convnext", _convnext, images, label, "images depthwise gelu residual", "features.*",
         "avgpool",
         "features.2"),
        ("densenet", _densenet, images, label, "images concatenated batchnorm",
         "features.denseblock*",
         "features.norm5", "features.transition1"),
        ("critic", Critic, images, label, "images spectral", "first,second", "second", ""),
        ("centred", Centred, _vectors(8), label, "assigned_state", "centre", "centre", ""),
        ("scripted", Scripted, _vectors(8), label, "torchscript", "around", "around", ""),
        ("bags", Bags, _codes, label, "bags", "hidden", "hidden", ""),
        ("tasks", Tasks, _vectors(8), label, "untaken_head", "trunk", "trunk", ""),
        ("in_place", InPlace, _vectors(8), label, "inputs_in_place", "hidden", "hidden", ""),
        ("penalised", PENALISED.build, _vectors(8), label, "loss_of_model", "hidden", "hidden", ""),
    ]  # fmt: skip
    found = {}
    for name, make, inputs, labels, traits, blocks, layer, cut in rows:
        kinds = tuple(trait.replace("_", " ") for trait in traits.split())
        data = _placed(inputs), _placed(labels)
        given = (name, _seeded(make, inputs), *data, kinds, blocks, layer, cut)
        found[name] = Foreign(*given, PAIRS.get(name, ""))
    return found


ZOO = _zoo()
