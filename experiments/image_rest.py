"""Is a longer descent never worse, if a model of pictures learns at later times, too?

The three long runs of the extended model (`et-maps-operations` of image_pair.py, whose
weights are in results/image-pair) are trained for some more steps. `plain`: as before.
`rest`: a quarter of the descents of every batch go on where the last step of training
left them, T steps more each time, of the last one's sizes. A descent makes room for a
new picture's with probability `renew`. The error after each of these steps counts. One
that moves a state costs `rest` times how far, as a share of the state's length, and one
that raises E, within T or after it, `price` times the share of |E|. `shown`: the same,
and the error after every step before T counts, too, with the weight `way`.

    python experiments/image_rest.py

Scored are 500 validation pictures, after those by which prices were chosen: error,
energy and movement up to 64 T; and Spearman's correlation of energy with error, without
what the variance of the open patches tells of both. Each run is one file in
results/image-rest, and one whose file stands is not made again; one that was stopped
goes on from its checkpoint in runs/image-rest.
"""

from dataclasses import asdict, replace
from functools import partial

import image_pair
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from image_dynamics import start
from image_pair import Job, Plan
from runs import RESULTS, RUNS, compare

from et_nbdev.dynamics import descend
from et_nbdev.training import OptimConfig, in_parts
from et_nbdev.vision.data import patchify, unit
from et_nbdev.vision.model import load_model
from et_nbdev.vision.train import (
    completion_loss,
    completion_of,
    drawn_batch,
    held_out_batches,
    part_size,
)

SEEN = 200  # validation pictures by which prices were chosen; scores are on the others
MORE, LR, SEEDS = 800, 0.01, (0, 1, 2)  # steps, their peak rate
LATER = 1, 2, 4, 8, 64  # times, in T, at which runs are compared
STAY = dict(renew=0.02, rest=0.3, price=30.0)
VARIANTS = {"plain": None, "rest": STAY, "shown": STAY | dict(way=0.1)}

length = partial(jnp.linalg.norm, axis=(-1, -2))  # of states (..., N, D)


class Onward:
    "Another solver's steps from step t on."

    def __init__(self, solver, t):
        self.solver, self.t = solver, t

    def init(self, look, x):
        return x, jnp.int32(self.t)

    def step(self, look, state):
        return self.solver.step(look, state)


class Kept(nnx.Module):
    "A model, and descents that go on: patches, hidden and masked ones, tokens."

    def __init__(self, model, batch):
        self.model = model
        late = *batch, descended(model, batch)[0]
        self.late = nnx.List(map(nnx.Variable, late))


def descended(model, batch, x=None):
    "Tokens after T steps from the start, or after T more from x; and the trajectory."
    solver, T = model.solver, model.config.steps
    if x is None:
        x = model.encode(batch[0], batch[2])
    else:
        solver = Onward(solver, T)
    return descend(model.block, x, T, solver=solver, states=True, unroll=True)


def long_loss(config, renew, rest, price, way=0.0):
    "The loss of `Kept`, whose descents go on with every call."
    late = config.batch_size // 4

    def loss(kept, images, key):
        model, old = kept.model, [v[...] for v in kept.late]
        new = drawn_batch(config, images[late:], key)
        some, others = [a[:late] for a in new], [a[late:] for a in new]
        size = part_size(len(others[0]), config.model.num_tokens)
        error = 2 * in_parts(partial(completion_of, config), model, others, size)[0]
        x, path = descended(model, some)
        error += completion_loss(model.decode(x), *some[:2])
        end, onward = descended(model, old[:3], old[3])
        at = lambda xs, of: jax.vmap(lambda x: completion_loss(model.decode(x), *of))(
            xs
        )
        later = at(onward.states[1:], old[:2]).mean()
        early = at(path.states[1:-1], some[:2]).mean() if way else 0.0
        moved = length(jnp.diff(onward.states, axis=0)) / length(onward.states[:-1])
        E = jnp.concatenate([path.energies.total, onward.energies.total], 1)
        up = jax.nn.relu(jnp.diff(E, axis=0)) / jnp.abs(E[:-1])
        value = (error + later) / 4 + rest * moved.mean() + price * up.mean()
        value += way * early
        fresh = jax.random.bernoulli(jax.random.fold_in(key, 1), renew, (late,))
        pick = lambda a, b: jnp.where(fresh.reshape(-1, *[1] * (a.ndim - 1)), a, b)
        for v, a, b in zip(kept.late, (*some, x), (*old[:3], end)):
            v[...] = jax.lax.stop_gradient(pick(a, b))
        told = dict(error=error / 3, later=later, moved=moved.mean(), up=up.mean())
        return value, told

    return loss


@partial(nnx.jit, static_argnames="steps")
def follow(model, images, hidden, steps: int):
    "Error, energy and movement of every picture after 0, 1, …, `steps` steps."
    x, error = start(model, images, hidden)

    def stage(x, t):
        last, path = descend(model.block, x, 1, solver=Onward(model.solver, t))
        moved = length(last - x) / length(x)
        return last, (error(x), path.energies.total[0], moved)

    return jax.lax.scan(stage, x, jnp.arange(steps + 1))[1]


def beyond(a, b, given) -> float:
    "Spearman's correlation of a and b, without what `given` tells of both."
    ranks = lambda v: np.argsort(np.argsort(v))
    r = np.linalg.inv(np.corrcoef([ranks(a), ranks(b), ranks(given)]))
    return float(-r[0, 1] / np.sqrt(r[0, 0] * r[1, 1]))


def score(model, config, images) -> dict:
    "Means over pictures at some times up to 64 T, and what the energy says of each."
    c, T, rows = model.config, model.config.steps, []
    drawn = held_out_batches(images, c, config.num_occluded, limit=500, batch_size=100)
    for some, hidden in drawn:
        shown = patchify(unit(some), c.patch_size)
        shown = [patches[open_].var() for patches, open_ in zip(shown, ~hidden)]
        rows.append((*follow(model, some, hidden, 64 * T), np.array(shown)[None]))
    error, E, moved, (shown,) = (np.concatenate(a, 1) for a in zip(*rows))
    at = [k * T for k in LATER]
    seen = np.unique([*range(T), *np.geomspace(T, 64 * T, 49).round().astype(int)])
    mean = lambda a: [float(f"{v:.6g}") for v in a[seen].mean(1)]
    row = dict(pictures=len(shown), steps=seen.tolist())
    row |= dict(mse=mean(error), energy=mean(E), moved=mean(moved))
    more = error[at[1:]] - error[T]
    of_mean = more.std(1, ddof=1) / len(shown) ** 0.5
    row["later"] = [[float(m), float(s)] for m, s in zip(more.mean(1), of_mean)]
    up = np.diff(E, axis=0) > 1e-6 * np.abs(E[:-1])
    row |= dict(up_within=float(up[:T].mean()), up_beyond=float(up[T:].mean()))
    row["tells"] = [beyond(E[t], error[t], shown) for t in at]
    return row


def best_of(name: str):
    "The weights of a run of image_pair.py that were best on validation."
    own = RUNS / "image-pair" / name / "best.safetensors"
    kept = RESULTS / "image-pair" / f"{name}.safetensors"
    return load_model(own if own.exists() else kept)


def run(data: str, name: str, seed: int) -> dict:
    "Train on; what the file of a run holds."
    plan = Plan(data=data, weight_decay=0.0)
    images = image_pair.pictures(plan, RUNS)
    job = Job("et-maps-operations", plan.steps, 0.023, seed)
    model, how, loss = best_of(job.file(plan)), VARIANTS[name], None
    rates = dict(lr=LR, lr_floor=1e-4 * LR, weight_decay=plan.weight_decay)
    config = replace(
        image_pair.configured(plan, job, images),
        model=model.config,
        optim=OptimConfig(steps=MORE, warmup=MORE // 10, **rates),
        seed=seed + 100,  # other batches and occlusions than the training before it
        every=100,
    )
    if how:
        first = images["train"][: config.batch_size // 4]
        model = Kept(model, drawn_batch(config, first, jax.random.key(seed)))
        loss = long_loss(config, **how)
    came = {"name": name, "from": job.file(plan), "how": how}
    folder = RUNS / "image-rest" / f"{data}-{name}-{seed}"
    options = dict(validate=None, folder=folder, config=asdict(config) | came)
    found = image_pair.trained(model, config, images, loss, **options)
    rows, model = found.history, getattr(found.model, "model", found.model)
    kept = image_pair.origin(config) | came | {"seed": seed}
    kept["curve"] = [{k: round(v, 6) for k, v in r.items()} for r in rows]
    kept["seconds"] = rows[-1]["seconds"]
    return kept | score(model, config, images["validation"][SEEN:])


def said_of(row: dict) -> str:
    errors = dict(zip(row["steps"], row["mse"]))
    at = [row["config"]["model"]["steps"] * k for k in LATER]
    told = [f"{errors[t]:.4f} ({r:.2f})" for t, r in zip(at, row["tells"])]
    ups = f"up {row['up_within']:.2%}, {row['up_beyond']:.2%}"
    return f"{' '.join(told)} {ups} {row['seconds']:.0f} s"


if __name__ == "__main__":
    compare(__doc__, "image-rest", run, said_of, ["tiny-imagenet"], VARIANTS, SEEDS)
