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
    gelu                 GELU in place of ReLU as the memories' activity
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

    python experiments/image_terms.py              # all runs
    python experiments/image_terms.py --summary    # the table so far

Each run is one file in results/image-terms, written when it ends, and a run whose file
stands is not made again. `--part 0/2` and `--part 1/2` share the work between two
processes.
"""

import time
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import image_pair
import jax
import numpy as np
from flax import nnx
from image_pair import (
    EnergyModel,
    Job,
    Plan,
    _filled,
    configured,
    operations,
    pictures,
    rises,
    score,
    score_of,
)
from runs import RUNS, add_part, make, options, spread
from runs import read as rows_of

from et_nbdev.testing import _half_interval
from et_nbdev.training.fit import fit
from et_nbdev.vision.data import batches
from et_nbdev.vision.model import ImageConfig
from et_nbdev.vision.train import completion_loss, training_loss

LEARNING_RATE = 4.5e-2
SEEDS = (0, 1, 2)
FULL = "full"
STATISTICS = ("channels", "mean", "std")  # of the training pictures

_plain = dict(
    relative_positions="none",
    normalize_heads=False,
    beta=None,
    learn_beta=False,
    beta_per_head=False,
    negative_memories=None,
    learn_steps=False,
    channel_steps=False,
    step_size=1.0,
)


def _only(*kept: str) -> dict:
    "Changes that leave these options of the full model, and no other."
    return {name: value for name, value in _plain.items() if name not in kept}


VARIANTS: dict[str, dict] = {
    FULL: {},
    "without positions": dict(relative_positions="none"),
    "free table": dict(relative_positions="zero"),
    "without normalized": dict(normalize_heads=False, beta=None),
    "one beta": dict(beta_per_head=False),
    "fixed beta": dict(beta_per_head=False, learn_beta=False),
    "without signs": dict(negative_memories=None),
    "half negative": dict(negative_memories=0.5),
    "gelu": dict(activation="gelu"),
    "token sizes": dict(channel_steps=False, gate_steps=True),
    "learned steps": dict(channel_steps=False, step_size=1.0),
    "fixed steps": dict(channel_steps=False, learn_steps=False, step_size=1.0),
    "self-attention": dict(self_attention=True),
    "T = 4": dict(steps=4, step_size=3.0),  # α·T stays
    "T = 8": dict(steps=8, step_size=1.5),
    "8 heads": dict(num_heads=8, head_dim=16, beta=1.0),
    "2 heads": dict(num_heads=2, head_dim=64, beta=0.5),
    "every step": {},
    "plain": _only(),
    "only positions": _only("relative_positions"),
    "only normalized": _only("normalize_heads", "beta", "learn_beta", "beta_per_head"),
    "only signs": _only("negative_memories"),
}


def sized(base: ImageConfig, name: str) -> ImageConfig:
    "The variant's configuration, with memories for as many operations as all have."
    model, rival = "et-metric-operations", "transformer"
    config = replace(image_pair.sized(base, model), **VARIANTS[name])
    goal = operations(image_pair.sized(base, rival), rival)
    return _filled(config, model, operations, goal)


def every_step(config, model, batch):
    "The mean over all steps of the error after them, not that after the last."
    patches, occluded, masked = batch
    states = model.descend(patches, masked, states=True)[1].states[1:]
    error = lambda x: completion_loss(model.decode(x), patches, occluded)
    return sum(map(error, states)) / len(states), {}


def loss_for(config, name: str):
    "The library's loss, of the last state or of those after each step."
    return (
        training_loss(config, every_step)
        if name == "every step"
        else training_loss(config)
    )


def run(plan: Plan, name: str, seed: int, images: dict) -> dict:
    "Train once; what the run's file holds."
    began = time.perf_counter(), time.process_time()
    job = Job("et-metric-operations", plan.trial_steps, LEARNING_RATE, seed)
    config = configured(plan, job, images)
    base = replace(plan.base, **{f: getattr(config.model, f) for f in STATISTICS})
    config = replace(config, model=sized(base, name))
    model = EnergyModel(config.model, rngs=nnx.Rngs(seed))
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    row = {"name": name, "lr": LEARNING_RATE, "seed": seed, "validation_mse": None}
    row["parameters"] = sum(p.size for p in params)
    row["operations"] = config.model.flops
    try:
        model = fit(
            model,
            loss_for(config, name),
            lambda start: batches(
                images["train"], config.batch_size, seed=seed, start=start
            ),
            config.optim,
            seed=seed,
            progress=False,
        ).model
        mse = float(score_of(model, config, images["validation"]).mean())
        row |= {"validation_mse": mse} | rises(model, images["validation"][:100])
    except FloatingPointError as error:
        row["diverged"] = str(error)
    row["seconds"] = time.perf_counter() - began[0]
    row["cpu_seconds"] = time.process_time() - began[1]
    return row | {"config": asdict(config)}


def file(name: str, seed: int) -> str:
    return f"{name.replace(' = ', '').replace(' ', '-').lower()}-{seed}.json"


def work(plan: Plan, out: Path, names: list[str], images: dict):
    "Make the runs that `out` lacks, seed by seed."
    said = lambda row: f"{score(row):.4f}  {row['seconds']:.0f} s"
    for seed, name in product(SEEDS, names):
        make(out / file(name, seed), lambda: run(plan, name, seed, images), said)


def read(out: Path) -> dict[tuple[str, int], dict]:
    "The runs made so far, by name and seed."
    return {(row["name"], row["seed"]): row for row in rows_of(out)}


def summary(out: Path):
    """Print a table: mean and standard deviation over seeds, and the paired change, ±
    half its 95 % interval.
    """
    done = read(out)
    print("| variant | parameters | K | seeds | MSE | change | steps up |")
    print("|---|---|---|---|---|---|---|")
    for name in VARIANTS:
        rows = {seed: done[name, seed] for seed in SEEDS if (name, seed) in done}
        if not rows:
            continue
        beside = "plain" if name.startswith("only") else FULL
        mse = [score(row) for row in rows.values()]
        gaps = [
            score(row) - score(done[beside, seed])
            for seed, row in rows.items()
            if (beside, seed) in done and name != beside
        ]
        row = next(iter(rows.values()))
        up = sum(row.get("steps_up", 0) for row in rows.values())
        of = sum(row.get("steps_observed", 0) for row in rows.values())
        print(
            f"| {name} | {row['parameters']:,} | {row['config']['model']['num_memories']}"
            f" | {len(rows)} | {spread(mse)}"
            f" | {f'{np.mean(gaps):+.4f} ± {_half_interval(gaps):.4f}' if gaps else '–'}"
            f" | {up} of {of:,} |"
        )


def main():
    parser = options(__doc__, "image-terms")
    add = parser.add_argument
    add("--summary", action="store_true", help="print the table so far, and stop")
    add_part(parser)
    add("--only", nargs="+", choices=VARIANTS, default=[*VARIANTS], metavar="NAME")
    add("--cache", type=Path, default=RUNS, help="of decoded pictures")
    args = parser.parse_args()
    if args.summary:
        return summary(args.out)
    plan = Plan()
    work(plan, args.out, args.only[args.part], pictures(plan, args.cache))


if __name__ == "__main__":
    main()
