"""What a training step costs of each model that chapter 26 compares at equal
operations, on Tiny ImageNet's size: 64 pictures of 64 × 64.

All take turns within one process; medians and the middle 80 % are kept, and ratios to
the transformer. Writes results/benchmarks/pair.json. Run it on a machine that does
nothing else.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from et_nbdev.training import (
    TrainState,
    atomic_write,
    make_optimizer,
    make_step,
    provenance,
    trainable,
)
from et_nbdev.vision.train import training_loss as _loss_for

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "experiments"))

from image_pair import DESIGNS, ROOT, Job, Plan, configured, design_of, operations

REFERENCE = "transformer"
NAMES = (
    REFERENCE,
    "transformer-gated-operations",
    "et-operations",
    "et-metric-operations",
    "et-maps-operations",
    "hyperset-operations",
    "hyperset-true-operations",
)


def training(name: str, plan: Plan, images: np.ndarray):
    """A thunk that does one training step and waits for it, and the operations of a
    picture on its way through the model.
    """
    job = Job(name, plan.full(len(images)), 1e-3, 0)
    config = configured(plan, job, {"train": images})
    model = DESIGNS[design_of(name)][0](config.model, rngs=nnx.Rngs(0))
    graphdef, params, *_ = trainable(model)
    optimizer = make_optimizer(config.optim)
    step = make_step(graphdef, _loss_for(config), optimizer, 0)
    state = [TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))]

    def train():
        state[0], _ = step(state[0], images)
        jax.block_until_ready(state[0])

    return train, operations(config.model, name)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="steps of each model")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results/benchmarks/pair.json"
    )
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"argument --rounds: expected at least 1, got {args.rounds}")
    began, load = time.perf_counter(), os.getloadavg()[0]
    plan = Plan(steps=10_938)
    shape = plan.batch_size, plan.base.image_size, plan.base.image_size, 3
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    work = {name: training(name, plan, images) for name in NAMES}
    seconds = {name: [] for name in NAMES}
    for number in range(args.rounds + 2):  # two to compile and to warm up
        for name, (train, _) in work.items():
            start = time.perf_counter()
            train()
            if number > 1:
                seconds[name].append(time.perf_counter() - start)
    median = {name: float(np.median(all)) for name, all in seconds.items()}
    result = {
        "batch_size": plan.batch_size,
        "model": asdict(plan.base),
        "operations": {name: flops for name, (_, flops) in work.items()},
        "seconds": median,
        "spread": {n: np.quantile(s, [0.1, 0.9]).tolist() for n, s in seconds.items()},
        "over_transformer": {n: s / median[REFERENCE] for n, s in median.items()},
        "rounds": args.rounds,
        "load_before": load,
        "all_seconds": time.perf_counter() - began,
        "command": "python benchmarks/pair.py",
        **provenance(),
    }
    with atomic_write(args.out) as path:
        path.write_text(json.dumps(result, indent=2) + "\n")
    for name, s in median.items():
        ratio = result["over_transformer"][name]
        print(f"{name:<32}{1e3 * s:7.0f} ms a step{ratio:7.2f} × {REFERENCE}")


if __name__ == "__main__":
    main()
