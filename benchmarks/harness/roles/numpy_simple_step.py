"""The step by hand in simple form: a new array for every result, layer by layer."""

import itertools

import numpy as np

from harness.role import RankSetup
from harness.roles.numpy_step import HandWritten
from harness.roles.perceptron import LR, MOMENTUM, Recipe, Step, batches, parameters


class Simple(HandWritten):
    """One process, SGD only."""

    def step(self, recipe: Recipe, kind: str) -> Step:
        params = parameters(recipe)
        velocities = [np.zeros_like(p) for p in params]
        weights, biases = params[::2], params[1::2]
        coming, rows = itertools.cycle(batches(recipe)), np.arange(recipe.batch)

        def step() -> float:
            x, target = next(coming)
            inputs = [x]
            for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
                inputs.append(np.maximum(inputs[-1] @ weight.T + bias, 0))
            result = inputs[-1] @ weights[-1].T + biases[-1]
            if recipe.loss == "mse":
                error = result - target
                loss = np.vdot(error, error) / error.size  # a fifth of the time of np.mean
                grad = error * (2 / error.size)
            else:
                result -= result.max(1, keepdims=True)
                grad = np.exp(result)
                total = grad.sum(1, keepdims=True)
                loss = (np.log(total[:, 0]) - result[rows, target]).sum() / len(rows)
                grad /= total
                grad[rows, target] -= 1
                grad /= len(rows)
            grads = []
            for number in range(len(weights) - 1, -1, -1):
                grads += [grad.sum(0), grad.T @ inputs[number]]
                if number:
                    grad = (grad @ weights[number]) * (inputs[number] > 0)
            for param, velocity, change in zip(params, velocities, grads[::-1], strict=True):
                np.multiply(velocity, MOMENTUM, out=velocity)
                np.add(velocity, change, out=velocity)
                np.subtract(param, LR * velocity, out=param)
            return float(loss)

        return step


def join(_: RankSetup) -> Simple:
    """Return the role of the only rank."""
    return Simple()
