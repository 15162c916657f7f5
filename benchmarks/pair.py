"""What a training step costs of each model that chapter 26 compares at equal operations,
on Tiny ImageNet's size: 64 pictures of 64 × 64. Ratios are to the transformer.
"""

from dataclasses import asdict

import numpy as np
from timing import in_turn, medians, options, spreads, trainer, write

from et_nbdev.training import trainable
from et_nbdev.vision.train import training_loss

from image_pair import Job, Plan, configured, make  # isort: skip

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


def training(config, name: str, images: np.ndarray):
    "A thunk that does one training step and waits for it."
    graphdef, params, *_ = trainable(make(config.model, name))
    train = trainer(graphdef, params, training_loss(config), config.optim)
    return lambda: train(images)


def main():
    args = options(__doc__, "pair", rounds=20).parse_args()
    plan = Plan(steps=10_938)
    shape = plan.batch_size, plan.base.image_size, plan.base.image_size, 3
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    jobs = {name: Job(name, plan.steps, 1e-3, 0) for name in NAMES}
    configs = {n: configured(plan, job, {"train": images}) for n, job in jobs.items()}
    work = {name: training(config, name, images) for name, config in configs.items()}
    times = in_turn(work, args.rounds, warm=2)
    median = medians(times)
    result = {
        "batch_size": plan.batch_size,
        "model": asdict(plan.base),
        "seconds": median,
        "spread": spreads(times),
        "over_transformer": {n: s / median[REFERENCE] for n, s in median.items()},
        "rounds": args.rounds,
    }
    write(args.out, result)
    for name, s in median.items():
        ratio = s / median[REFERENCE]
        print(f"{name:<32}{1e3 * s:7.0f} ms a step{ratio:7.2f} × {REFERENCE}")


if __name__ == "__main__":
    main()
