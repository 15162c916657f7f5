"""What it costs to keep a trained Energy Transformer downhill.

After a long training of `et-metric-operations` one of its six learned steps raises the
energy of every picture. Here its weights, those best on validation, are trained for
some more steps, with a price on every step that does not lower E by a hundredth. They
are read from `--runs` or else from results/image-pair, which keeps those of ten passes.

    loss + λ · mean over pictures of Σ_t max(0, (E_t+1 − E_t) / |E_t| + 1/100)

This is the library's loss with `downhill` = λ. With λ = 0 the same steps are taken
without a price, to tell what they alone do. The rate starts again, lower, and falls to
nothing.

    python experiments/image_downhill.py                # seeds 0, 1, 2
    python experiments/image_downhill.py --price 0      # without a price
    python experiments/image_downhill.py --summary      # the table so far

Scored like the runs of image_pair.py: weights are chosen on 1,000 validation pictures,
with a price among those that raised the energy of none of 100 of them if there are any.
The test split is read once, at the end, and of the steps on 1,000 of its pictures those
that raise the energy are counted. Each run is one file in results/image-downhill,
written when it ends, and is resumed from its checkpoint in runs/image-downhill.
"""

from dataclasses import asdict, replace
from pathlib import Path

import image_pair
from flax import nnx
from image_pair import Job, Plan
from runs import RESULTS, RUNS, options, read

from et_nbdev.training.checkpoint import load_checkpoint
from et_nbdev.training.fit import fit
from et_nbdev.training.loop import OptimConfig
from et_nbdev.vision.data import batches
from et_nbdev.vision.train import training_loss

NAME = "et-metric-operations"


def trained(plan: Plan, job: Job, images: dict, runs: Path):
    "The configuration of a run of image_pair.py, and its model with the best weights."
    config = image_pair.configured(plan, job, images)
    model = image_pair.make(config.model, job.name)
    like = {"params": nnx.to_pure_dict(nnx.state(model, nnx.Param))}
    name = job.file(plan)
    kept = RESULTS / "image-pair" / f"{name}.safetensors"
    own = runs / name / "best.safetensors"
    found, _ = load_checkpoint(own if own.exists() else kept, like)
    nnx.update(model, found["params"])
    return config, model


def run(plan: Plan, job: Job, images, runs: Path, folder: Path, args) -> dict:
    "Train on; what the file of a run holds."
    config, model = trained(plan, job, images, runs)
    optim = OptimConfig(
        steps=args.more, warmup=args.more // 18, lr=args.lr, lr_floor=1e-4 * args.lr
    )
    before = image_pair.score_of(model, config, images["validation"]).mean()

    def validate(model):
        error = image_pair.score_of(model, config, images["validation"]).mean()
        up = image_pair.rises(model, images["validation"][:100])["steps_up"]
        # weights that go uphill somewhere come after all others
        return {"loss": error + up * bool(args.price), "error": error, "up": up}

    # other batches and occlusions than the training before it
    seed = job.seed + 100
    result = fit(
        model,
        training_loss(replace(config, downhill=args.price)),
        lambda start: batches(
            images["train"], config.batch_size, seed=seed, start=start
        ),
        optim,
        seed=seed,
        folder=folder,
        validate=validate,
        every=-(-args.more // 6),
        config=asdict(config) | {"from": job.file(plan), "price": args.price},
        progress=False,
    )
    kept = next(r for r in result.history if r["step"] == result.best_step)
    errors = image_pair.score_of(result.model, config, images["test"])
    about = {"from": job.file(plan), "seed": job.seed, "optim": asdict(optim)}
    about |= {"price": args.price, "best_step": result.best_step}
    about |= {"validation_before": float(before), "test_errors": errors}
    about |= {"validation_mse": kept["validation_error"]}
    about |= {
        "test_mse": float(errors.mean()),
        "seconds": result.history[-1]["seconds"],
    }
    about |= image_pair.rises(result.model, images["test"][:1000])
    curve = [{k: row[k] for k in row if k != "seconds"} for row in result.history]
    return about | {"curve": curve} | image_pair._origin(config)


def summary(out: Path):
    "Print a line for each run."
    for row in read(out):
        print(
            f"{row['from']}, price {row['price']:g}: validation"
            f" {row['validation_before']:.4f} -> {row['validation_mse']:.4f},"
            f" test {row['test_mse']:.4f},"
            f" {row['steps_up']} of {row['steps_observed']} steps raise E"
        )


def main(argv: list[str] | None = None):
    parser = options(__doc__, "image-downhill")
    add = parser.add_argument
    add("--summary", action="store_true", help="print the table so far, and stop")
    add("--steps", type=int, default=10_938, help="of the training before: 10938")
    add("--rate", type=float, default=0.045, help="of the training before: 0.045")
    add("--seeds", type=int, nargs="+", default=(0, 1, 2))
    add("--more", type=int, default=900, help="steps: 900")
    add("--lr", type=float, default=0.01, help="peak rate of these: 0.01")
    add("--price", type=float, default=1.0, help="λ: 1")
    add("--data", default="tiny-imagenet")
    add("--size", default="small", choices=tuple(image_pair.SIZES))
    add("--batch-size", type=int, default=64)
    add("--runs", type=Path, default=RUNS / "image-pair", help="trained weights")
    args = parser.parse_args(argv)
    if not args.summary:
        plan = Plan(
            data=args.data,
            size=args.size,
            batch_size=args.batch_size,
            steps=args.steps,
            trial_steps=0,
        )
        images = image_pair.pictures(plan, args.runs.parent)
        for seed in args.seeds:
            job = Job(NAME, args.steps, args.rate, seed)
            name = f"{job.file(plan)}-{args.more}-{args.lr:g}-price-{args.price:g}"
            if not (args.out / f"{name}.json").exists():
                folder = args.runs.parent / "image-downhill" / name
                row = run(plan, job, images, args.runs, folder, args)
                image_pair.write(args.out, name, row)
    summary(args.out)


if __name__ == "__main__":
    main()
