"""A Keras model and a Keras optimizer, on Keras's backend PyTorch, as PyTorch's own are used.

What it holds: what makes of a user's `keras()` a model and an optimizer that any technique takes.
No technique needs it.
Its twin: none; in TensorFlow a Keras model is what every technique takes.
"""

import numpy as np
import torch
from torch import Tensor, nn


class KerasModule(nn.Module):
    """A Keras model in the mode that `train` and `eval` set; Keras is told it in each call.

    A tuple of inputs, or a mapping, reaches the model as one structure, as in `fit`.
    """

    def __init__(self, model):
        super().__init__()
        self.keras_model = model

    def forward(self, *inputs, **named):
        """What the model gives."""
        x = named or (inputs if len(inputs) > 1 else inputs[0])
        return self.keras_model(x, training=self.training)

    def named_weights(self) -> dict:
        """Keras's variables, numbered in the order of `model.weights`, as in TensorFlow."""
        return {f"{place:04d}": v for place, v in enumerate(self.keras_model.weights)}

    def export_weights(self) -> dict[str, np.ndarray]:
        """Copies of all weights, trained or not."""
        return {n: v.value.detach().cpu().numpy().copy() for n, v in self.named_weights().items()}

    def import_weights(self, weights: dict[str, np.ndarray]) -> None:
        """Copy `weights` into the model. Raises ValueError where they do not fit."""
        variables = self.named_weights()
        ours = {name: tuple(variable.shape) for name, variable in variables.items()}
        if ours != {name: value.shape for name, value in weights.items()}:
            raise ValueError("the weights do not fit the model: their number or a shape is another")
        for name, variable in variables.items():
            variable.assign(weights[name])

    def trained(self) -> dict[str, Tensor]:
        """Name -> trainable parameter."""
        return {n: v.value for n, v in self.named_weights().items() if v.value.requires_grad}

    def reseed(self, seed: int) -> None:
        """Begin the random numbers of its layers anew, such as those of dropout."""
        for place, variable in enumerate(self.keras_model.variables):
            if "seed_generator_state" in variable.name:
                variable.assign([seed, place])


class KerasOptimizer(torch.optim.Optimizer):
    """A Keras optimizer that applies what the parameters of a model have as `.grad`.

    The update is Keras's own. Of its settings none is in `param_groups`.
    """

    def __init__(self, model: KerasModule, optimizer):
        self.keras_optimizer, self.variables = optimizer, model.keras_model.trainable_variables
        optimizer.build(self.variables)
        parameters = [variable.value for variable in self.variables]
        super().__init__(parameters, {})
        self.state[parameters[0]] = {v.path: v.value for v in optimizer.variables}

    @torch.no_grad()
    def step(self, closure=None):
        """Update the variables."""
        gradients = [variable.value.grad for variable in self.variables]
        self.keras_optimizer.apply(gradients, self.variables)
