"""What each part of the best Energy Transformer is worth on pictures.

The model is `et-metric-operations` of image_pair.py, with everything that the library's
energy has and a step size for every channel. Each variant changes one thing; memories
make up for the operations, so all cost as much as the transformer of that comparison:

    without positions    no relative positions in the scores
    free table           relative positions that start from zero, not as distances
    without normalized   queries and keys as they are, β = 1/√Y
    one beta             a single learned β for all heads
    fixed beta           β stays 4/√Y
    without signs        all memories attract, no thresholds
    half negative        half of the memories repel, a quarter in the model
    token sizes          a gate for every token in place of a size for every channel
    learned steps        neither: a learned α for every step
    fixed steps          α = 1
    self-attention       a token may attend to itself
    T = 4, T = 8         fewer or more steps, with more or fewer memories
    8 heads, 2 heads     of half and of twice the width
    every step           the loss is the mean over all steps, not that of the last

and three plain Energy Transformers with one thing added: `only positions`, `only
normalized`, `only signs`; beside `plain`, with none of them.

Each runs with seeds 0, 1 and 2, for 450 steps of 64 pictures at one learning rate, the
best of the full model in runs of this length (others may prefer another), and is scored
on 1,000 validation pictures with fixed occlusions and on the energies of 100 of them:
how many of the T steps raised E. The test split is not touched.

    python experiments/image_terms.py

Each run is one file in results/image-terms, written when it ends, and a run whose file
stands is not made again. `--part 0/2` and `--part 1/2` share the work between two
processes.
"""

import time
from dataclasses import asdict, replace
from functools import partial
from itertools import product

import image_pair
from flax import nnx
from image_pair import PLAIN, EnergyModel, Job, Plan, parts, rises, score_of
from runs import RUNS, add_part, make, options, parameters_of, said_of

from et_nbdev.vision.model import RECIPES, ImageConfig
from et_nbdev.vision.train import completion_loss, training_loss

LEARNING_RATE = 4.5e-2
SEEDS = (0, 1, 2)
FULL = "full"
STATISTICS = ("channels", "mean", "std")  # of the training pictures


def _only(*kept: str) -> tuple[dict, dict]:
    "Changes that leave these parts of the full model, and no other."
    return {k: v for k, v in PLAIN.items() if k not in kept}, dict(step_size=1.0)


VARIANTS: dict[str, tuple[dict, dict]] = {  # changes of parts, and of numbers
    FULL: ({}, {}),
    "without positions": (dict(positions=None), {}),
    "free table": (dict(positions="zero"), {}),
    "without normalized": (dict(normalize=False), {}),
    "one beta": (dict(betas="one"), {}),
    "fixed beta": (dict(betas="fixed"), {}),
    "without signs": (dict(negative=None), {}),
    "half negative": (dict(negative=0.5), {}),
    "token sizes": (dict(sizes="tokens"), {}),
    "learned steps": (dict(sizes="steps"), dict(step_size=1.0)),
    "fixed steps": (dict(sizes="fixed"), dict(step_size=1.0)),
    "self-attention": (dict(self_attention=True), {}),
    "T = 4": ({}, dict(steps=4, step_size=3.0)),  # α·T stays
    "T = 8": ({}, dict(steps=8, step_size=1.5)),
    "8 heads": ({}, dict(num_heads=8, head_dim=16)),
    "2 heads": ({}, dict(num_heads=2, head_dim=64)),
    "every step": ({}, {}),
    "plain": _only(),
    "only positions": _only("positions"),
    "only normalized": _only("normalize", "betas"),
    "only signs": _only("negative"),
}
RECIPES |= {f"terms: {n}": partial(parts, **own) for n, (own, _) in VARIANTS.items()}


def model_of(c: ImageConfig, name: str, seed: int) -> EnergyModel:
    "A fresh model of a variant."
    return EnergyModel(replace(c, recipe=f"terms: {name}"), rngs=nnx.Rngs(seed))


def operations_of(c: ImageConfig, name: str) -> int:
    return nnx.eval_shape(lambda: model_of(c, name, 0)).flops


def sized(base: ImageConfig, name: str) -> ImageConfig:
    "The variant's configuration, with memories for as many operations as all have."
    model, rival = "et-metric-operations", "transformer"
    numbers = VARIANTS[name][1] | dict(recipe=f"terms: {name}")
    config = replace(image_pair.sized(base, model), **numbers)
    goal = image_pair.operations(image_pair.sized(base, rival), rival)
    return image_pair.filled(config, name, operations_of, goal)


def every_step(config, model, batch):
    "The mean over all steps of the error after them, not that after the last."
    patches, occluded, masked = batch
    states = model.descend(patches, masked, states=True)[1].states[1:]
    error = lambda x: completion_loss(model.decode(x), patches, occluded)
    return sum(map(error, states)) / len(states), {}


def short(plan: Plan, job: Job, images: dict, name: str, recipe: str = "") -> dict:
    "A variant, with a recipe of its own if named, trained once: what a file holds."
    began = time.perf_counter()
    config = image_pair.configured(plan, job, images)
    base = replace(plan.base, **{f: getattr(config.model, f) for f in STATISTICS})
    model = sized(base, name)
    config = replace(config, model=replace(model, recipe=recipe or model.recipe))
    model = EnergyModel(config.model, rngs=nnx.Rngs(job.seed))
    loss = training_loss(config, every_step) if name == "every step" else None
    row = {"name": name, "steps": job.steps, "lr": job.lr, "seed": job.seed}
    row |= {"parameters": parameters_of(model), "operations": model.flops}
    row |= {"validation_mse": None, "config": asdict(config)}
    try:
        # without validation the weights are the last ones
        model = image_pair.trained(model, config, images, loss, validate=None).model
        error = score_of(model, config, images["validation"]).mean()
        row |= {"validation_mse": float(error)} | rises(
            model, images["validation"][:100]
        )
    except FloatingPointError as error:
        row["diverged"] = str(error)
    return row | {"seconds": time.perf_counter() - began}


def run(plan: Plan, name: str, seed: int, images: dict) -> dict:
    job = Job("et-metric-operations", plan.trial_steps, LEARNING_RATE, seed)
    return short(plan, job, images, name)


def file(name: str, seed: int) -> str:
    return f"{name.replace(' = ', '').replace(' ', '-').lower()}-{seed}.json"


def main():
    parser = options(__doc__, "image-terms")
    add_part(parser)
    told = dict(nargs="+", choices=VARIANTS, default=[*VARIANTS], metavar="NAME")
    parser.add_argument("--only", **told)
    args, plan = parser.parse_args(), Plan()
    images = image_pair.pictures(plan, RUNS)
    for seed, name in product(SEEDS, args.only[args.part]):
        run_it = lambda: run(plan, name, seed, images)
        make(args.out / file(name, seed), run_it, said_of)


if __name__ == "__main__":
    main()
