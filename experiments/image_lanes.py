"""The runs of image_pair.py on a GPU: many of one model in one program.

A step of these models is too small for a GPU, which waits for its next kernel most of
the time. So runs that differ in seed and learning rate alone are trained side by side,
as lanes of one vectorized step, with all pictures in the device's memory. Each has its
own weights, batches, occlusions, optimizer and schedule, and is scored alone: up to
rounding its numbers are those of image_pair.py, in the same files. (`seconds` are those
of all lanes together, and `lanes` says how many these were.)

    python experiments/image_lanes.py --longer 0 --only et-metric-operations
    python experiments/image_lanes.py --only transformer --rates 0.008 0.011 0.023 \
        --out results/image-rates
    python experiments/image_lanes.py --summary

Options are those of image_pair.py without those about stopping, and one more. For each
model the short runs come first, at seven rates around the first guess; if the best is
at an edge of those tried, more beyond it; then all seeds at full length, at the best
rate. `--rates` says instead which rates all seeds are trained at, in a folder of their
own. A model's lanes are not resumed within a run, but a run whose file stands is not
made again. The weights of full runs that are best on validation are kept in `--runs`.
Several models at once are several calls.
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
from image_pair import LEARNING_RATES, Job, Plan, configured, make, score_of

from et_nbdev.training.checkpoint import save_checkpoint
from et_nbdev.training.fit import run_identity, trainable
from et_nbdev.training.loop import (
    TrainState,
    clipped_adamw,
    gradient_step,
    learning_rate,
    make_optimizer,
)
from et_nbdev.vision.data import batches
from et_nbdev.vision.train import TrainConfig, training_loss

LOG_EVERY = 50  # steps
REACH = 3  # rates tried on either side of the first guess, or beyond the best


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


def train_together(plan: Plan, jobs: list[Job], images: dict, stored) -> list[Lane]:
    "Runs of one model at one length; `stored` are the training pictures on the device."
    first, *others = configs = [configured(plan, job, images) for job in jobs]
    plain = lambda c: replace(c, optim=replace(c.optim, lr=1.0, lr_floor=0.0), seed=0)
    one = len({job.name for job in jobs}) == 1
    if not one or any(plain(c) != plain(first) for c in others):
        raise ValueError("jobs: expected one model and length, and rates and seeds")
    lanes = [Lane(*of, len(images["train"])) for of in zip(jobs, configs)]
    split = [trainable(make(first.model, job.name, job.seed)) for job in jobs]
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
    for lane in lanes:
        lane.batches.close()
        lane.model = lane.best and nnx.merge(graphdef, lane.best)
    return lanes


def keep(plan: Plan, lanes: list[Lane], images: dict, out: Path, runs: Path):
    "Write the files of runs that ended, and the weights of the full ones."
    for lane in lanes:
        of = (plan, lane.job, lane.config, images)
        name = lane.job.file(plan)
        if lane.why is not None or lane.model is None:
            row = image_pair.diverged(*of, lane.why or "no validation was finite")
        else:
            row = image_pair.ended(*of, lane.model, lane.history, lane.best_step)
            if lane.job.steps > plan.trial_steps:
                identity = asdict(lane.config) | {"name": lane.job.name}
                config = run_identity(lane.config.optim, lane.job.seed, identity)
                (runs / name).mkdir(parents=True, exist_ok=True)
                save_checkpoint(
                    runs / name / "best.safetensors",
                    {"params": lane.best},
                    {"config": config, "step": lane.best_step},
                )
        image_pair.write(out, name, row | {"lanes": len(lanes)})


# --- what to run ---


def more_rates(tried: dict[float, float], first: float) -> list[float]:
    "Rates to try: around the first, then beyond the best if it is at an edge."
    at = LEARNING_RATES.index(first)
    near = LEARNING_RATES[max(at - REACH, 0) : at + REACH + 1]
    if missing := [rate for rate in near if rate not in tried]:
        return missing
    best = LEARNING_RATES.index(next(iter(tried)))
    above, below = LEARNING_RATES[best + 1 :][:REACH], LEARNING_RATES[:best][-REACH:]
    return [r for side in (above, below) if not tried.keys() & {*side} for r in side]


def work(
    plan: Plan, names, out: Path, runs: Path, images: dict, rates=(), trials=False
):
    "Make the runs that `out` lacks, those of a model and a length together."
    stored = jnp.asarray(images["train"])
    steps = plan.full(len(images["train"]))

    def make_all(jobs):
        done = image_pair.read(out, plan)
        missing = [job for job in jobs if job not in done]
        if missing:
            keep(plan, train_together(plan, missing, images, stored), images, out, runs)

    for name in names:
        if rates:
            make_all([Job(name, steps, r, s) for r in rates for s in plan.seeds])
            continue
        while not plan.lr:
            tried = image_pair.rates(image_pair.read(out, plan), plan, name)
            more = more_rates(tried, image_pair.first_rate(plan, name))
            if not more:
                break
            make_all([Job(name, plan.trial_steps, rate, 0) for rate in more])
        if trials:
            continue
        done = image_pair.read(out, plan)
        jobs = image_pair.finals(done, plan, [name], steps)
        for length in sorted({job.steps for job in jobs}):
            make_all([job for job in jobs if job.steps == length])


def main(argv: list[str] | None = None):
    parser = image_pair.plan_options(__doc__)
    text = "train all seeds at these rates, without trials"
    parser.add_argument("--rates", type=float, nargs="+", default=(), help=text)
    args = parser.parse_args(argv)
    if args.rates and (args.lr or args.trials):
        parser.error("--rates: not together with --lr or --trials")
    if args.rates and args.out == parser.get_default("out"):
        parser.error("--rates: their runs need a folder of their own, --out FOLDER")
    plan, names = image_pair.planned(args)
    if args.sizes:
        return image_pair.table(plan, names)
    if not args.summary:
        images = image_pair.pictures(plan, args.runs.parent)
        work(plan, names, args.out, args.runs, images, args.rates, args.trials)
    image_pair.summary(plan, names, args.out)


if __name__ == "__main__":
    main()
