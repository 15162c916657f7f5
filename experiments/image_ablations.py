"""The paper's model of pictures with one change at a time, on CIFAR-10, as
nbs/24_image_results.ipynb shows it; scores go to results/image-ablations.

Each variant is a run of its own under runs/ablations, resumed if it was stopped and
skipped once it is scored. To share the work among processes:

    python experiments/image_ablations.py --part 0/2 &
    python experiments/image_ablations.py --part 1/2
"""

import sys
from dataclasses import asdict, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from image_pair import PLAIN, parts
from runs import RUNS, add_part, make, options, parameters_of

from et_nbdev.attention import EnergyAttention
from et_nbdev.dynamics import descend
from et_nbdev.vision import model as library
from et_nbdev.vision.train import CONFIGS, TrainConfig, evaluate, prepare, train

BASE = CONFIGS["tiny"]
T, STEPS = BASE.model.steps, BASE.optim.steps


def normal(c: library.ImageConfig, rngs: nnx.Rngs, scale: float = 2.0):
    "MASK and positions at random."
    draw = lambda *shape: jax.random.normal(rngs.params(), shape, jnp.float32)
    return draw(c.dim), scale * draw(c.num_tokens, c.dim)


def transformer(c: library.ImageConfig, rngs: nnx.Rngs) -> library.Parts:
    sizes = c.dim, c.num_heads, c.head_dim, c.num_memories
    return library.Parts(
        *library.wave_start(c, rngs), library.TransformerBlock(*sizes, rngs=rngs)
    )


# name: (changes to parts and numbers of the model, to the optimizer, to the rest)
NO_HN, NO_ATT = dict(terms=("attention",)), dict(terms=("memory",))
TABLE_7 = {
    "ET-Full": ({}, {}, {}),
    "ET-Full+Self": (dict(self_attention=True), {}, {}),
    "ET-NoHN": (NO_HN, {}, {}),
    "ET-NoHN+Self": (NO_HN | dict(self_attention=True), {}, {}),
    "ET-NoATT": (NO_ATT, {}, {}),
}
CHOICES = {
    "α = 0.5": (dict(step_size=0.5), {}, {}),
    "α = 0.1": (dict(step_size=0.1), {}, {}),
    "T = 12, α = 0.5": (dict(steps=12, step_size=0.5), {}, {}),
    "β × 4": (dict(beta=1.0), {}, {}),
    "β / 4": (dict(beta=0.0625), {}, {}),
    "β learned": (dict(betas="one"), {}, {}),
    "weight decay 0": ({}, dict(weight_decay=0.0), {}),
    "weight decay 0.5": ({}, dict(weight_decay=0.5), {}),
    "no open tenth": ({}, {}, dict(open_fraction=0.0)),
    "no clipping": ({}, dict(clip=1e9), {}),
    "positions half as long": (
        dict(start=partial(library.wave_start, scale=1.0)),
        {},
        {},
    ),
    "random positions": (dict(start=normal), {}, {}),
    "W_K apart from W_Q": (dict(heads=EnergyAttention), {}, {}),
    "transformer": ({}, dict(lr=8e-3), {}),
}


stop = jax.lax.stop_gradient


# The shortcut from the start to the end remains.
def last_k(block, x, steps, step_size, k):
    "T steps, of which only the last k are differentiated."
    early = stop(descend(stop(block), stop(x), steps - k, step_size)[0])
    return descend(block, early + (x - stop(x)), k, step_size, remat=True)[0]


def implicit(block, x, steps, step_size, k):
    "T steps, differentiated as k steps that were all taken at the last state."
    last = stop(descend(stop(block), stop(x), steps, step_size)[0])
    change = x - stop(x)
    for _ in range(k):
        ahead = descend(block, last + change, 1, step_size)[0]
        change = ahead - stop(ahead)
    return last + change


class Shortened(library.ImageEnergyTransformer):
    "The model, with another gradient of the same descent."

    gradient, k = staticmethod(last_k), 1

    def __call__(self, patches, masked, remat=False, steps=None):
        c, x = self.config, self.encode(patches, masked)
        if steps is not None:  # where nothing is differentiated
            return self.decode(descend(self.block, x, steps, c.step_size)[0])
        how = type(self).gradient
        return self.decode(how(self.block, x, c.steps, c.step_size, type(self).k))


# A rematerialized step costs 4 forward passes where the gradient goes through it and 1
# where it does not; the implicit one 2 a term, and 1 for its linearization. Each is
# given the steps that the full gradient's 4·T·STEPS would buy, and once the steps of
# the full one.
COST = {
    None: lambda T, k: 4 * T,
    last_k: lambda T, k: T + 3 * k,
    implicit: lambda T, k: T + 1 + 2 * k,
}
WAYS = {  # files have their numbers
    f"{how.__name__} k = {k}{same}": (how, k)
    for how in (last_k, implicit)
    for k in (1, 3)
    for same in ("", ", same steps")
}
bought = lambda how, k: round(STEPS * COST[None](T, 0) / COST[how](T, k))
GRADIENTS = {
    name: ({}, dict(steps=STEPS if name.endswith("steps") else bought(*way)), {})
    for name, way in WAYS.items()
}


def configured(base: TrainConfig, name: str, seed: int) -> TrainConfig:
    "The training of a variant, whose parts are a recipe by its name."
    model, optim, rest = VARIANTS[name]
    numbers = {key: model[key] for key in model if hasattr(base.model, key)}
    own = {key: model[key] for key in model if key not in numbers}
    library.RECIPES[name] = partial(parts, **PLAIN | own)
    if name == "transformer":
        library.RECIPES[name] = transformer
    model = replace(base.model, recipe=name, **numbers)
    optim = replace(base.optim, **optim)
    return replace(base, model=model, optim=optim, seed=seed, **rest)


def start(name: str, config: TrainConfig) -> library.ImageEnergyTransformer:
    "The model of a variant, freshly drawn."
    rngs, (how, k) = nnx.Rngs(config.seed), WAYS.get(name, (None, 0))
    if how is None:
        return library.image_model(config.model, rngs=rngs)
    kind = type("Shortened", (Shortened,), dict(gradient=staticmethod(how), k=k))
    return kind(config.model, rngs=rngs)


# Figure 7: positions that start small and know nothing, so that what they end as is
# what training made of them.
SMALL = (dict(start=partial(normal, scale=0.1)), {}, {})
POSITIONS = {"small random positions": SMALL}
for name in ("β × 4", "β / 4", "weight decay 0", "weight decay 0.5"):
    model, optim, _ = CHOICES[name]
    POSITIONS[f"small random positions, {name}"] = (SMALL[0] | model, optim, {})
VARIANTS = {**TABLE_7, **CHOICES, **GRADIENTS, **POSITIONS}
SEEDS = {name: range(1) for name in VARIANTS} | {
    **dict.fromkeys((*TABLE_7, "transformer"), range(5)),
    **dict.fromkeys(POSITIONS, range(3)),
}


def score(base: TrainConfig, name: str, seed: int, images: dict, test_on: int) -> dict:
    config = configured(base, name, seed)
    folder = RUNS / "ablations" / f"{name.replace('/', '÷')} {seed}"
    fresh, shown = start(name, config), sys.stdout.isatty()
    model, history, _ = train(config, images, folder, progress=shown, model=fresh)
    how, k = WAYS.get(name, (None, 0))
    test, hidden = images["test"], config.num_occluded
    mean = lambda **how: float(evaluate(model, test, hidden, **how).mean())
    # quality where the descent is stopped earlier or goes on for longer than in
    # training
    many = name in ("ET-Full", "α = 0.1", "T = 12, α = 0.5")
    times = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 48] if many else []
    told = name.startswith(("ET-Full", "β", "weight", "random", "small")) and not seed
    positions = np.asarray(model.positions[...]).round(4).tolist() if told else None
    passes = config.batch_size * config.optim.steps * COST[how](config.model.steps, k)
    row = {"name": name, "seed": seed, "config": asdict(config), "positions": positions}
    row["mse"] = [mean(seed=mask, limit=test_on) for mask in range(10)]
    row["by_time"] = {t: mean(limit=500, steps=t) for t in times}
    seen = [r for r in history if "validation_loss" in r]
    row["validation"] = [(r["step"], r["validation_loss"]) for r in seen]
    row |= {"test_pictures": test_on, "parameters": parameters_of(model)}
    row["training_flops"] = model.flops * passes // config.model.steps
    return row | {"seconds": history[-1]["seconds"]}


def main():
    parser = options(__doc__, "image-ablations")
    add_part(parser)
    told = "test pictures to score on"
    parser.add_argument("--test_on", type=int, default=1000, help=told)
    args = parser.parse_args()
    base, images = prepare(BASE)
    # small enough to be decoded once
    images = {split: x[:] for split, x in images.items()}
    jobs = [(n, seed) for seed in range(5) for n in VARIANTS if seed in SEEDS[n]]
    for name, seed in jobs[args.part]:
        path = args.out / f"{list(VARIANTS).index(name):02d}-{seed}.json"
        of = base, name, seed, images, args.test_on
        said = lambda row: f"{np.mean(row['mse']):.4f}  {row['name']}"
        make(path, partial(score, *of), said)


if __name__ == "__main__":
    main()
