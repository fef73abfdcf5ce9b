"""The model of the demo: small, real, and the same on every rank for one seed.

Each layer is stored whole by the trainer and in two column halves by the engine, one a device.
Both sides compute with the same halves, so that equal weights give equal outputs.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = (
    "LAYERS",
    "LAYER_BYTES",
    "WIDTH",
    "fresh",
    "generate",
    "halves",
    "learn",
    "use_one_thread",
)

LAYERS = 6
WIDTH = 1024
LAYER_BYTES = WIDTH * WIDTH * 4
BATCH = 16
PROMPTS = 4
TOKENS = 3
STEPS_AN_EPOCH = 4
LEARNING_RATE = 20.0  # The loss is a mean over many outputs, so gradients are small.

Halves: TypeAlias = Sequence[Tensor]
Keep: TypeAlias = Callable[[int, int, int, Tensor], None]


def use_one_thread() -> None:
    """Many ranks share the cores of one machine: none may take them all."""
    torch.set_num_threads(1)


def fresh(seed: int) -> list[Tensor]:
    """The weights before the first step."""
    chance = torch.Generator().manual_seed(seed)
    scale = 1.2 / WIDTH**0.5
    return [torch.randn(WIDTH, WIDTH, generator=chance) * scale for _ in range(LAYERS)]


def learn(layers: Sequence[Tensor], seed: int) -> list[float]:
    """One epoch of steps, in place, on the few examples that there are; the loss at each step.

    The gradients stay with the layers, where real trainers leave them too.
    """
    chance = torch.Generator().manual_seed(seed)
    given = torch.randn(BATCH, WIDTH, generator=chance)
    wanted = torch.tanh(torch.randn(BATCH, WIDTH, generator=chance))
    losses = []
    for layer in layers:
        layer.requires_grad_(True)
    for _ in range(STEPS_AN_EPOCH):
        for layer in layers:
            layer.grad = None
        found = given
        for layer in layers:
            found = torch.tanh(found @ layer)
        loss = (found - wanted).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for layer in layers:
                assert layer.grad is not None
                layer.sub_(LEARNING_RATE * layer.grad)
        losses.append(float(loss.detach()))
    for layer in layers:
        layer.requires_grad_(False)
    return losses


def halves(layer: Tensor, parts: int) -> list[Tensor]:
    """The layer's columns in as many parts as a replica has devices."""
    return [part.contiguous() for part in layer.chunk(parts, dim=1)]


def generate(layers: Sequence[Halves], seed: int, keep: Keep | None = None) -> list[float]:
    """What the model says to the prompts of this seed: a few tokens, each from the last.

    `keep` is given each layer's part of each token, as a KV cache is.
    """
    chance = torch.Generator().manual_seed(seed)
    token = torch.randn(PROMPTS, WIDTH, generator=chance)
    said = []
    with torch.no_grad():
        for position in range(TOKENS):
            for at, layer in enumerate(layers):
                parts = [torch.tanh(token @ half) for half in layer]
                if keep is not None:
                    for device, part in enumerate(parts):
                        keep(device, at, position, part)
                token = torch.cat(parts, dim=1)
            said.append(token[:, ::16])
    values: list[float] = torch.cat(said).flatten().tolist()
    return values
