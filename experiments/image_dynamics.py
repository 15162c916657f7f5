"""Train small models whose loss is met at a fixed depth, at random times of a long
descent, or where the descent has settled, and follow each far past its training: what
notebook 27 shows, into results/image-dynamics. Every run has a folder under
runs/dynamics, is resumed if it was stopped, and skipped once it is scored.

    python experiments/image_dynamics.py --part 0/2 &  python experiments/image_dynamics.py
    --part 1/2
"""

import json
import sys
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from runs import RUNS, add_part, keep, make, options

from et_nbdev.block import Block
from et_nbdev.dynamics import descend
from et_nbdev.energy import ExternalField
from et_nbdev.equilibria import equilibrium
from et_nbdev.solvers import Anderson, Backtracking, Schedule, solve
from et_nbdev.training import fit
from et_nbdev.vision import train as vision
from et_nbdev.vision.data import FILLS, batches, normalize, occlude, patchify
from et_nbdev.vision.model import ImageEnergyTransformer

# --- the model, and where its loss is taken ---


class FieldModel(ImageEnergyTransformer):
    """Image completion whose tokens at t = 0 also act as an external field, h = λ·x₀
    with a learned λ (`strength`): the start is never forgotten.
    """

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        terms = self.block.terms | {"field": ExternalField()}
        self.block = Block(self.block.norm, **terms)
        self.strength = nnx.Param(jnp.float32(4.0))  # the initial λ

    def context(self, x):
        return {"field": self.strength[...] * x}


def growing(steps: int = 9, first: float = 1.0):
    "Step sizes, each about as long as all before it together."
    return first * 2.0 ** np.arange(steps)


def states_by(model, x, step_sizes, **options):
    "All states of Euler steps of the given sizes, from tokens x at t = 0."
    solver = Schedule(np.asarray(step_sizes, np.float32))
    options |= dict(solver=solver, states=True) | model.context(x)
    return descend(model.block, x, len(step_sizes), **options)[1].states


def tokens_at_rest(model, x):
    "Where the descent of tokens x settles, with the fraction settled as a metric."
    options = dict(tolerance=1e-3, evaluations=100, leave_out=True)
    solver = Anderson(model.config.step_size)
    x, found = equilibrium(model.block, x, solver, **options, **model.context(x))
    return x, {"settled": jnp.mean(found.settled, dtype=x.dtype)}


def loss_at(config, step_sizes=None, first: int | None = None):
    """The loss (model, uint8 images, key) -> (mean, metrics) after steps of the given
    sizes, or without sizes, where the descent has settled.

    With `first`, every picture is decoded after a random number of steps, from `first`
    to all of them. At rest, a picture that has not settled trains only the decoder.
    """
    c, n = config.model, config.num_occluded

    def loss(model, images, key):
        hide, when = jax.random.split(key)
        patches = patchify(normalize(images, c.mean, c.std), c.patch_size)
        B = len(images)
        hidden, masked = occlude(hide, B, c.num_tokens, n, config.open_fraction)
        x, metrics = model.encode(patches, masked), {}
        if step_sizes is None:
            x, metrics = tokens_at_rest(model, x)
        else:
            states, T = states_by(model, x, step_sizes, remat=True), len(step_sizes)
            t = T if first is None else jax.random.randint(when, B, first, T + 1)
            x = states[t, jnp.arange(B)]
        return vision.completion_loss(model.decode(x), patches, hidden), metrics

    return loss


# --- scores: error on the hidden patches of each picture, and energy ---


def start(model, images, occluded):
    "Tokens at t = 0, and the error on the hidden patches as a function of tokens."
    c = model.config
    patches = patchify(normalize(images, c.mean, c.std), c.patch_size)

    def error(x):
        each = jnp.mean((model.decode(x) - patches) ** 2, -1)
        return jnp.mean(each, -1, where=occluded)

    return model.encode(patches, occluded), error


@partial(nnx.jit, static_argnames=("steps", "every"))
def errors_in_time(model, images, occluded, steps: int, every: int = 1):
    """Error and energy after 0, `every`, 2·`every`, … Euler steps of the configuration's
    size, (times, B) each.
    """
    x, error = start(model, images, occluded)
    context = model.context(x)

    def stage(x, _):
        last, path = descend(model.block, x, every, model.config.step_size, **context)
        return last, (error(x), path.energies.total[0])

    return jax.lax.scan(stage, x, length=steps // every + 1)[1]


@partial(nnx.jit, static_argnames="step_sizes")
def errors_after(model, images, occluded, step_sizes: tuple[float, ...]):
    "Error after Euler steps of the given sizes, (B,)."
    x, error = start(model, images, occluded)
    return error(states_by(model, x, step_sizes)[-1])


@partial(nnx.jit, static_argnames="evaluations")
def errors_settled(model, images, occluded, tolerance=1e-3, evaluations: int = 300):
    """Error where the descent has settled, its energy, whether it has, and the
    evaluations that took, (B,) each.
    """
    x, error = start(model, images, occluded)
    options = dict(evaluations=evaluations, tolerance=tolerance, **model.context(x))
    found = solve(model.block, x, Backtracking(model.config.step_size), **options)
    energy = found.energies.total[-1]
    return error(found.x), energy, found.settled, found.evaluations


# --- the runs ---

TINY = vision.CONFIGS["tiny"]
# 16 tokens a picture: a small fraction of the time of 64
SMALL = replace(TINY.model, patch_size=8, dim=96)
CONFIG = replace(TINY, flip=0.0, every=100, model=SMALL)
# of the optimizer in all; and how many of them the last variant takes at rest, at a
# quarter of the learning rate
STEPS, AT_REST = 1500, 300
T, GROWING, FIRST = CONFIG.model.steps, growing(14).tolist(), 3
# name: (model, stages of training: (optimizer steps, share of the learning rate, step
# sizes of the descent or None: until it has settled,
#        first step at which a picture may be read or None: the last))
LONG, SETTLE = (STEPS, 1.0, GROWING, FIRST), (AT_REST, 0.25, None, None)
VARIANTS = {
    "T = 6": (ImageEnergyTransformer, [(STEPS, 1.0, [1.0] * T, None)]),
    "random times": (ImageEnergyTransformer, [LONG]),
    "random times, field": (FieldModel, [LONG]),
    "at rest, field": (FieldModel, [(STEPS - AT_REST, *LONG[1:]), SETTLE]),
}
SEEDS = 0, 1, 2
# Euler steps that the descent goes on for, and how often it is looked at
LAST, EVERY = 300, 2
DEEPER = 1e-4  # a tenth of the residual at which a loss at rest is met in training
# the first test pictures were looked at while the variants were devised: scores are on
# those after them
SEEN = 500


def mean(v):
    return float(v.mean())


def about(v):
    error = v.std(-1, ddof=1) / v.shape[-1] ** 0.5
    return {"mse": mean(v), "standard_error": float(error)}


def trained(name: str, config, images: dict, folder: Path):
    """The model after all its stages, what each stage has logged, and where and when
    they ran.
    """
    kind, stages = VARIANTS[name]
    model, logs = kind(config.model, rngs=nnx.Rngs(config.seed)), []
    made = folder / "provenance.json"
    if not made.exists():
        keep(made, {})
    for n, (steps, share, step_sizes, first) in enumerate(stages):
        rates = dict(steps=steps, warmup=steps // 10, lr=share * config.optim.lr)
        optim = replace(config.optim, **rates)
        own, stage = config.seed + 1000 * n, dict(step_sizes=step_sizes, first=first)
        supply = partial(batches, images["train"], config.batch_size, seed=own)
        run = fit(
            model,
            loss_at(config, **stage),
            lambda start, supply=supply: supply(start=start),
            optim,
            seed=config.seed,
            folder=folder / f"stage-{n}",
            every=config.every,
            config=asdict(config) | {"variant": name, "stage": n} | stage,
            progress=sys.stdout.isatty(),
        )
        model, keys = run.model, ("step", "loss", "settled")
        log = [{k: round(r[k], 4) for k in keys if k in r} for r in run.history]
        seconds = run.history[-1]["seconds"]
        logs.append(stage | {"optim": asdict(optim), "seconds": seconds, "log": log})
    return model, logs, json.loads(made.read_text())


def score(name: str, config, images: dict, fill, test_on: int, folder: Path) -> dict:
    "`fill`: the errors of the best fill on the same pictures."
    model, stages, made = trained(name, config, images, folder)
    drawn, rows = dict(limit=test_on, batch_size=100), []
    of = images["test"], config.model, config.num_occluded
    for batch in vision.held_out_batches(*of, **drawn):
        found = errors_in_time(model, *batch, LAST, EVERY)
        found += (errors_after(model, *batch, tuple(GROWING)),)
        found += tuple(errors_settled(model, *batch))
        if stages[-1]["step_sizes"] is None:
            found += errors_settled(model, *batch, DEEPER)[::2]
        rows.append([np.asarray(a) for a in found])
    whole = [np.concatenate(a, -1) for a in zip(*rows)]
    error, energy, long, end, _, settled, evaluations, *deeper = whole
    times = np.arange(0, LAST + 1, EVERY)
    nearest = lambda t: int(np.argmin(np.abs(times - t)))
    looked = sorted({0, *map(nearest, np.geomspace(1, LAST, 60))})
    row = {"name": name, "seed": config.seed, "test_pictures": int(error.shape[-1])}
    row |= {"steps": times[looked].tolist(), "mse": error.mean(-1)[looked].tolist()}
    row["rises"] = int((np.diff(energy, axis=0) > 4e-7 * np.abs(energy).max(0)).sum())
    row["growing"] = {**about(long), "time": sum(GROWING)}
    settles = {"share": mean(settled), "evaluations": mean(evaluations)}
    row["settled"] = about(end) | settles | {"below_best_fill": about(fill - end)}
    row["deeper"] = None
    if deeper:
        row["deeper"] = about(deeper[0]) | {"share": mean(deeper[1])}
    strength = getattr(model, "strength", None)
    row["strength"] = None if strength is None else float(strength[...])
    return row | {"stages": stages, "training": made, "config": asdict(config)}


def main():
    parser = options(__doc__, "image-dynamics")
    add_part(parser)
    told = "test pictures to score on, after the first 500"
    parser.add_argument("--test_on", type=int, default=1000, help=told)
    args = parser.parse_args()
    base, images = vision.prepare(CONFIG)
    # small enough to be decoded once
    test = images["test"][SEEN : SEEN + args.test_on]
    images = {"train": images["train"][:], "test": test}
    of, limit = (test, base.model, base.num_occluded), args.test_on
    errors = {n: vision.evaluate_fill(f, *of, limit=limit) for n, f in FILLS.items()}
    kept = {"test_pictures": len(test), "first_test_picture": SEEN}
    kept["fills"] = {name: about(each) for name, each in errors.items()}
    make(args.out / "fills.json", lambda: kept, lambda row: "")
    best = min(errors.values(), key=mean)
    told = "best {:.4f}, after {} steps {:.4f}, settled {:.4f}".format
    said = lambda row: told(
        min(row["mse"]), LAST, row["mse"][-1], row["settled"]["mse"]
    )
    for seed, name in list(product(SEEDS, VARIANTS))[args.part]:
        words = "".join(c if c.isalnum() else " " for c in name.lower()).split()
        slug = f"{'-'.join(words)}-{seed}"
        of = name, replace(base, seed=seed), images, best, args.test_on
        run = partial(score, *of, RUNS / "dynamics" / slug)
        make(args.out / f"{slug}.json", run, said)


if __name__ == "__main__":
    main()
