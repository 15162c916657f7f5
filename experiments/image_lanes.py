"""The runs of image_pair.py on a GPU, `--lanes`: many of one model in one program.

A step of these models is too small for a GPU, which waits for its next kernel most of
the time. So runs that differ in seed and learning rate alone are trained side by side,
as lanes of one vectorized step, with all pictures in the device's memory. Each has its
own weights, batches, occlusions, optimizer and schedule, and is scored alone: up to
rounding its numbers are those of a run alone, in the same files. (`seconds` are those
of all lanes together, and `lanes` says how many these were.) Lanes are not resumed
within a run. The weights of full runs that are best on validation are kept.
"""

import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import image_pair
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from image_pair import Job, Plan, configured, make, score_of

from et_nbdev.training import (
    TrainState,
    clipped_adamw,
    gradient_step,
    learning_rate,
    make_optimizer,
    run_identity,
    save_checkpoint,
    trainable,
)
from et_nbdev.vision.data import batches
from et_nbdev.vision.train import TrainConfig, training_loss

LOG_EVERY = 50  # steps


# --- a vectorized step ---


def _lane(graphdef, config: TrainConfig):
    "A step (state, batch, key, peak rate) -> (state, metrics) of one lane."
    o = config.optim
    shape = learning_rate(replace(o, lr=1.0, lr_floor=o.lr_floor / o.lr))

    def step(state, batch, key, lr):
        optimizer = clipped_adamw(
            lambda t: lr * shape(t), o.weight_decay, o.clip, o.b1, o.b2
        )
        return gradient_step(graphdef, training_loss(config), optimizer)(
            state, batch, key
        )

    return step


def _several(lane):
    """(state of all lanes, pictures, numbers of the pictures (most, lanes, B), how many
    steps, keys, rates) -> (state, losses and norms of the gradient (most, lanes)).
    """

    @partial(jax.jit, donate_argnums=0)
    def several(state, pictures, numbers, steps, keys, lrs):
        def one(i, carry):
            state, log = carry
            state, found = jax.vmap(lane)(state, pictures[numbers[i]], keys, lrs)
            now = jnp.stack([found["loss"], found["grad_norm"]]).astype(log.dtype)
            return state, log.at[i].set(now)

        log = jnp.zeros((len(numbers), 2, numbers.shape[1]), jnp.float32)
        return jax.lax.fori_loop(0, steps, one, (state, log))

    return several


# --- runs ---


class Lane:
    "What is kept of one of the runs."

    def __init__(self, job: Job, config: TrainConfig, pictures: int):
        self.job, self.config = job, config
        # batches of numbers in place of pictures
        self.batches = batches(np.arange(pictures), config.batch_size, seed=job.seed)
        self.history, self.why = [], None
        self.loss, self.best_step, self.best = np.inf, 0, None

    def log(self, step: int, loss: float, norm: float, seconds: float):
        if self.why is None and not np.isfinite([loss, norm]).all():
            self.why = f"loss is {loss}, its gradient's norm {norm}, at step {step}"
        self.history.append({"step": step, "loss": float(loss), "seconds": seconds})

    def validate(self, step: int, model, images):
        loss = float(score_of(model, self.config, images["validation"]).mean())
        if not np.isfinite(loss):
            self.why = self.why or f"validation loss is {loss} at step {step}"
            return
        self.history[-1]["validation_loss"] = loss
        if loss < self.loss:
            params = jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
            self.loss, self.best_step, self.best = loss, step, params


def train_together(plan: Plan, jobs: list[Job], images: dict, runs: Path) -> list[dict]:
    "What the files of runs of one model at one length hold."
    configs = [configured(plan, job, images) for job in jobs]
    first, stored = configs[0], jnp.asarray(images["train"])
    lanes = [Lane(*of, len(images["train"])) for of in zip(jobs, configs)]
    fresh = lambda job: make(first.model, job.name, job.seed)
    split = [trainable(fresh(job)) for job in jobs]
    graphdef, params = split[0][0], [params for _, params, *_ in split]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    moments = jax.vmap(make_optimizer(first.optim).init)(params)
    state = TrainState(params, moments, jnp.zeros(len(jobs), jnp.int32))
    keys = jnp.stack([jax.random.key(job.seed) for job in jobs])
    lrs = jnp.asarray([job.lr for job in jobs], jnp.float32)
    several = _several(_lane(graphdef, first))
    steps, every, start = first.optim.steps, first.every, time.perf_counter()
    since, step = 0.0, 0
    while step < steps:
        many = min(every, steps - step)
        numbers = np.zeros((every, len(jobs), first.batch_size), np.int32)
        for i in range(many):
            numbers[i] = [next(lane.batches) for lane in lanes]
        state, log = several(state, stored, numbers, many, keys, lrs)
        log = np.asarray(log)
        seconds = time.perf_counter() - start
        for i in range(many):
            at = step + i + 1
            if at % LOG_EVERY == 0 or i + 1 == many:
                share = (i + 1) / many
                for lane, loss, norm in zip(lanes, *log[i]):
                    lane.log(at, loss, norm, since + share * (seconds - since))
        step += many
        for i, lane in enumerate(lanes):
            if lane.why is None:
                own = jax.tree.map(lambda leaf: leaf[i], state.params)
                lane.validate(step, nnx.merge(graphdef, own), images)
        since = time.perf_counter() - start
    rows = []
    for lane in lanes:
        lane.batches.close()
        model = lane.best and nnx.merge(graphdef, lane.best)
        rows.append(row_of(plan, lane, model, images, runs) | {"lanes": len(lanes)})
    return rows


def row_of(plan: Plan, lane: Lane, model, images: dict, runs: Path) -> dict:
    "What the file of a run holds; the weights of a full one are kept."
    of = plan, lane.job, lane.config, images
    if lane.why is not None or model is None:
        return image_pair.diverged(*of, lane.why or "no validation was finite")
    if lane.job.steps > plan.trial_steps:
        path = runs / lane.job.file(plan) / "best.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        identity = asdict(lane.config) | {"name": lane.job.name}
        config = run_identity(lane.config.optim, lane.job.seed, identity)
        about = {"config": config, "step": lane.best_step}
        save_checkpoint(path, {"params": lane.best}, about)
    return image_pair.ended(*of, model, lane.history, lane.best_step)
