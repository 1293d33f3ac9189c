"""Train a character GPT on Python's documentation and let it write text: nanoGPT's recipe for CPUs.

    python examples/tiny_gpt.py --capture
    mpirun -n 2 python examples/tiny_gpt.py --folder run
    flrun -n 4 examples/tiny_gpt.py --leaves 8

The network has 4 layers of 4 heads, width 128, and reads 64 characters. With --folder the program
saves
checkpoints, and a second start continues from the last checkpoint. With --leaves the parameters and
their
SHA-256 are the same on any number of ranks.
"""

import argparse
import hashlib
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

import flashlight_py as fl

LAYERS, HEADS, WIDTH, BLOCK = 4, 4, 128, 64
Tokens = npt.NDArray[np.int64]


class GPT(fl.nn.Module):
    """Network from tokens ``[batch, positions]`` to log probabilities of the next token, ``[...,
    tokens]``."""

    def __init__(self, tokens: int) -> None:
        self.embedding = fl.nn.Embedding(tokens, WIDTH)
        self.position = fl.nn.Embedding(BLOCK, WIDTH)
        self.blocks = fl.nn.Transformer(WIDTH, HEADS, layers=LAYERS, causal=True)
        self.norm = fl.nn.LayerNorm(WIDTH)
        self.head = fl.nn.Linear(WIDTH, tokens, bias=False)

    def forward(self, tokens: fl.Variable) -> fl.Variable:
        positions = fl.input(np.arange(tokens.shape[1]))
        x = self.blocks(self.embedding(tokens) + self.position(positions))
        return fl.autograd.functions.log_softmax(self.head(self.norm(x)))


def main(options: argparse.Namespace) -> None:
    fl.distributed_init()
    fl.set_seed(options.seed)
    if options.batch_size < fl.get_world_size():
        least = f"{fl.get_world_size()}, the number of processes"
        raise SystemExit(f"--batch-size: expected at least {least}, got {options.batch_size}")
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace").decode()
    letters = sorted(set(text))
    tokens = np.searchsorted(letters, [*text]).astype(np.int64)
    train, test = np.split(tokens, [len(tokens) * 9 // 10])
    model = GPT(len(letters))
    fl.broadcast_parameters(model)
    fl.distribute_module_grads(model, leaves=options.leaves or None)
    optimizer = fl.optim.AdamOptimizer(model.params(), 1e-3, beta2=0.99, weight_decay=0.1)
    warm_up = fl.optim.LinearLR(optimizer, 0.01, total_iters=100)
    cosine = fl.optim.CosineAnnealingLR(optimizer, max(1, options.steps - 100), eta_min=1e-4)
    schedule = fl.optim.SequentialLR(optimizer, [warm_up, cosine], [100])
    criterion = fl.nn.CategoricalCrossEntropy()

    def step(inputs: Tokens, targets: Tokens) -> fl.Variable:
        optimizer.zero_grad()
        parts = fl.leaves(model, inputs, targets) if options.leaves else [(inputs, targets)]
        for x, y in parts:
            loss = criterion(model(fl.input(x)), fl.no_grad(y))
            loss.backward()
        fl.optim.clip_grad_norm(model.params(), 1.0)
        optimizer.step()
        return loss

    run = fl.capture(step) if options.capture else step
    state: dict[str, Any] = {"module": model, "optimizer": optimizer, "schedule": schedule}
    checkpoint = fl.load(options.folder, rng=True, **state) if options.folder else None
    history: list[list[float]] = checkpoint.extra if checkpoint else []
    share = slice(None) if options.leaves else slice(fl.get_world_rank(), None, fl.get_world_size())
    losses = []
    steps = range(checkpoint.step if checkpoint else 0, options.steps)
    for t in tqdm(steps, leave=False, disable=None if fl.is_main_process() else True):
        inputs, targets = batch(train, [options.seed, t], options.batch_size)
        losses.append(run(inputs[share], targets[share]).scalar())
        schedule.step()
        if (t + 1) % options.every == 0 or t + 1 == options.steps:
            history.append(
                [t + 1, float(np.mean(losses)), validate(model, test, options.batch_size)]
            )
            losses.clear()
            say("step {:5.0f}  loss {:.4f}  validation {:.4f}", *history[-1])
            if options.folder:
                fl.save(options.folder, rng=True, step=t + 1, extra=history, **state)
    say("SHA-256 of the parameters: {}", digest(model))
    say("{}", "".join(letters[token] for token in write(model, options.letters)))


def batch(tokens: Tokens, seed: list[int], size: int) -> tuple[Tokens, Tokens]:
    """Return sections of text that the seed determines, and the token after each position."""
    begins = np.random.default_rng(seed).integers(len(tokens) - BLOCK, size=size)
    positions = begins[:, None] + np.arange(BLOCK)
    return tokens[positions], tokens[positions + 1]


def validate(model: GPT, tokens: Tokens, size: int) -> float:
    """Return the loss on fixed sections of held-out text, which are divided between the ranks."""
    model.eval()
    total = np.zeros(2)
    for t in range(fl.get_world_rank(), 20, fl.get_world_size()):
        inputs, targets = batch(tokens, [t], size)
        logs = model(fl.input(inputs)).numpy()
        total += -np.take_along_axis(logs, targets[..., None], -1).mean(), 1
    model.train()
    fl.all_reduce(total)
    return float(total[0] / total[1])


def write(model: GPT, letters: int) -> list[int]:
    """Return tokens that the model draws one after the other."""
    random, tokens = np.random.default_rng(0), [0]
    model.eval()
    for _ in range(letters):
        logs = model(fl.input(np.array([tokens[-BLOCK:]]))).numpy()[0, -1].astype(np.float64)
        tokens.append(int(random.choice(len(logs), p=np.exp(logs) / np.exp(logs).sum())))
    return tokens


def digest(model: fl.nn.Module) -> str:
    """Return the SHA-256 of the parameters of ``model``."""
    arrays = model.state_dict().values()
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def say(line: str, *values: Any) -> None:
    """Print on rank 0 only, above the progress bar."""
    if fl.is_main_process():
        tqdm.write(line.format(*values))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a character GPT on documentation.")
    add = parser.add_argument
    add("--steps", type=int, default=2_000)
    add("--batch-size", type=int, default=12, help="of all ranks together")
    add("--every", type=int, default=250, help="steps between validations, and checkpoints")
    add("--letters", type=int, default=500, help="to write at the end")
    add("--seed", type=int, default=0)
    add("--capture", action="store_true", help="record the step once and replay it natively")
    add("--leaves", type=int, default=0, help="the same bits on any number of ranks, such as 8")
    add("--folder", type=Path, help="folder of the checkpoints; created if it is missing")
    options = parser.parse_args()
    if min(options.every - 1, options.steps, options.letters, options.seed, options.leaves) < 0:
        parser.error("--every is from 1 on, other numbers from 0")
    main(options)
