"""What a training step costs of each model that chapter 26 compares at equal operations,
on Tiny ImageNet's size: 64 pictures of 64 × 64. Ratios are to the transformer.
"""

from dataclasses import asdict

import numpy as np
from timing import compared, options, trainer, write

from et_nbdev.training import trainable
from et_nbdev.vision.train import training_loss

from image_pair import Job, Plan, configured, make  # isort: skip

REFERENCE = "transformer"
NAMES = "transformer-gated-operations et-operations et-metric-operations"
NAMES += " et-maps-operations hyperset-operations hyperset-true-operations"
NAMES = (REFERENCE, *NAMES.split())


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
    found = compared(work, args.rounds, REFERENCE, warm=2)
    write(args.out, found | {"batch_size": plan.batch_size, "model": asdict(plan.base)})


if __name__ == "__main__":
    main()
