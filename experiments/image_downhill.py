"""What it costs to keep a trained Energy Transformer downhill.

After a long training of `et-metric-operations` one of its six learned steps raises the
energy of every picture. Here its weights, those best on validation, are trained for
some more steps, with a price on every step that does not lower E by a hundredth. They
are read from `--runs` or else from results/image-pair, which keeps those of ten passes.

    loss + λ · mean over pictures of Σ_t max(0, (E_t+1 − E_t) / |E_t| + 1/100)

|E_t| is only a unit, and no gradient passes through it. With λ = 0 the same steps are taken
without a price, to tell what they alone do. The rate starts again, lower, and falls to
nothing.

    python experiments/image_downhill.py                # seeds 0, 1, 2
    python experiments/image_downhill.py --price 0      # without a price

Scored like the runs of image_pair.py: weights are chosen on 1,000 validation pictures,
with a price among those that raised the energy of none of 100 of them if there are any.
The test split is read once, at the end, and of the steps on 1,000 of its pictures those
that raise the energy are counted. Each run is one file in results/image-downhill,
written when it ends, and is resumed from its checkpoint in runs/image-downhill.
"""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import image_pair
import jax
import jax.numpy as jnp
from image_pair import Job, Plan
from runs import RESULTS, RUNS, options

from et_nbdev.training import OptimConfig
from et_nbdev.vision.model import load_model
from et_nbdev.vision.train import completion_loss, completion_of, training_loss

NAME = "et-metric-operations"
RATE = 0.045  # of the training before
MORE, LR = 900, 0.01  # steps after it, and their peak rate


def price_of_rises(energies):
    r"""Of E (T + 1, B), the mean over pictures of $\sum_t\max(0, (E_{t+1}-E_t)/|E_t| +
    1/100)$, in which $|E_t|$ counts as a constant, and as one that is not zero.
    """
    least = jnp.finfo(energies.dtype).eps
    unit = jax.lax.stop_gradient(jnp.maximum(jnp.abs(energies[:-1]), least))
    rises = jnp.diff(energies, axis=0) / unit
    return jnp.maximum(rises + 0.01, 0).sum(0).mean()


def priced(weight: float, config, model, batch):
    "The mean error on what is hidden, with the price of rises, if there is one."
    if not weight:
        return completion_of(config, model, batch)
    patches, occluded, masked = batch
    x, path = model.descend(patches, masked, unroll=config.model.steps <= 16)
    error = completion_loss(model.decode(x), patches, occluded)
    price = price_of_rises(path.energies.total)
    return error + weight * price, {"price": price}


def best_of(name: str, runs: Path):
    "The weights of a run of image_pair.py that were best on validation."
    own = runs / name / "best.safetensors"
    kept = RESULTS / "image-pair" / f"{name}.safetensors"
    return load_model(own if own.exists() else kept)


def run(plan: Plan, job: Job, images, runs: Path, folder: Path, price: float) -> dict:
    "Train on; what the file of a run holds."
    config, model = (
        image_pair.configured(plan, job, images),
        best_of(job.file(plan), runs),
    )
    score = lambda m, split: image_pair.score_of(m, config, images[split])
    before = float(score(model, "validation").mean())
    rates = dict(warmup=MORE // 18, lr=LR, lr_floor=1e-4 * LR)
    optim = OptimConfig(steps=MORE, **rates)

    def validate(model):
        error = score(model, "validation").mean()
        up = image_pair.rises(model, images["validation"][:100])["steps_up"]
        # weights that go uphill somewhere come after all others
        return {"loss": error + up * bool(price), "error": error, "up": up}

    came = {"from": job.file(plan), "price": price}
    result = image_pair.trained(
        model,
        # other batches and occlusions than the training before it
        replace(config, optim=optim, seed=job.seed + 100),
        images,
        training_loss(config, partial(priced, price)),
        folder=folder,
        validate=validate,
        every=-(-MORE // 6),
        config=asdict(config) | came,
    )
    rows, errors = result.history, score(result.model, "test")
    kept = next(r for r in rows if r["step"] == result.best_step)
    row = came | {"seed": job.seed, "optim": asdict(optim), "test_errors": errors}
    row |= {"best_step": result.best_step, "seconds": rows[-1]["seconds"]}
    row |= {"validation_before": before, "validation_mse": kept["validation_error"]}
    row |= image_pair.rises(result.model, images["test"][:1000])
    row["curve"] = [{k: r[k] for k in r if k != "seconds"} for r in rows]
    return row | {"test_mse": float(errors.mean())} | image_pair.origin(config)


def main(argv: list[str] | None = None):
    parser = options(__doc__, "image-downhill")
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=(0, 1, 2))
    add("--price", type=float, default=1.0, help="λ: 1")
    add("--runs", type=Path, default=RUNS / "image-pair", help="trained weights")
    args, plan = parser.parse_args(argv), Plan()
    images = image_pair.pictures(plan, args.runs.parent)
    for seed in args.seeds:
        job = Job(NAME, plan.steps, RATE, seed)
        name = f"{job.file(plan)}-{MORE}-{LR:g}-price-{args.price:g}"
        if not (args.out / f"{name}.json").exists():
            folder = args.runs.parent / "image-downhill" / name
            row = run(plan, job, images, args.runs, folder, args.price)
            image_pair.write(args.out, name, row)


if __name__ == "__main__":
    main()
