"""Complete photographs of 128 × 128 pixels in 256 patches: the Tiny ImageNet model that
comes with the library, `resized`, is trained on with larger pictures that may be shown.

They are photographs of clothes (CC0, github.com/alexeygrigorev/clothing-dataset-small),
in a clone of that repository or its parquet files:

    python experiments/photographs.py --data FOLDER

First it is trained as before, then to stay, as `shown` in image_rest.py. A command that
was stopped goes on from its checkpoints in runs/photographs when it is given again.
Weights are chosen on validation pictures, in the second part by the mean error after T
and 8 T steps. Test pictures are scored once, beside fills that know no or all training
pictures: results/photographs/metrics.json.
"""

import json
from dataclasses import asdict, replace

import image_pair
import image_rest as rest
import jax
from runs import RESULTS, RUNS, keep, options, parameters_of

from et_nbdev.training import OptimConfig, provenance
from et_nbdev.vision.data import FILLS, fills_from
from et_nbdev.vision.model import from_pretrained, save_model
from et_nbdev.vision.train import (
    CONFIGS,
    drawn_batch,
    evaluate,
    evaluate_fill,
    prepare,
    summarize,
)


def part(config, steps: int, lr: float):
    "The configuration of a part of the training."
    rates = dict(lr=lr, lr_floor=1e-4 * lr, weight_decay=0.0)
    return replace(config, optim=OptimConfig(steps=steps, warmup=steps // 10, **rates))


def long_error(kept, config, images) -> dict:
    "The mean error of validation pictures after T and 8 T steps."
    T, few = config.model.steps, dict(limit=config.validate_on)
    at = lambda k: evaluate(kept.model, images, config.num_occluded, steps=k * T, **few)
    return {"loss": (at(1).mean() + at(8).mean()) / 2}


def main(argv=None):
    parser = options(__doc__)
    parser.add_argument("--data", required=True, help="folder of the pictures")
    told = "optimizer steps of both parts, and their highest learning rates"
    parser.add_argument("--steps", nargs=2, type=int, default=(1500, 1200), help=told)
    parser.add_argument(
        "--rates", nargs=2, type=float, default=(0.01, 0.005), help=told
    )
    args = parser.parse_args(argv)
    base, model = (
        CONFIGS["tiny-imagenet"],
        from_pretrained("tiny-imagenet").resized(128),
    )
    config = replace(base, model=model.config, data=args.data, batch_size=16, every=250)
    config, images = prepare(config)
    model.config, n = config.model, config.num_occluded
    images = {split: own[:] for split, own in images.items()}
    errors = {"before training": evaluate(model, images["test"], n)}

    first = part(config, args.steps[0], args.rates[0])
    folder = RUNS / "photographs"
    about = dict(folder=folder / "first", config=asdict(first))
    begun = image_pair.trained(model, first, images, **about)
    errors["not trained to stay"] = evaluate(begun.model, images["test"], n)

    second = replace(
        part(config, args.steps[1], args.rates[1]), seed=1, validate_on=100
    )
    how = rest.VARIANTS["shown"]
    late = images["train"][: config.batch_size // 4]
    kept = rest.Kept(begun.model, drawn_batch(second, late, jax.random.key(0)))
    validate = lambda kept: long_error(kept, second, images["validation"])
    about = dict(folder=folder / "second", config=asdict(second) | how)
    loss = rest.long_loss(second, **how)
    found = image_pair.trained(kept, second, images, loss, validate=validate, **about)
    model = found.model.model

    errors = {"Energy Transformer": evaluate(model, images["test"], n)} | errors
    for name, fill in (FILLS | fills_from(images["train"])).items():
        errors[name] = evaluate_fill(fill, images["test"], config.model, n)
    seconds = [fit.history[-1]["seconds"] for fit in (begun, found)]
    row = summarize(errors) | rest.score(model, second, images["test"]) | {"how": how}
    row |= dict(
        split="test", data="clothes", config=asdict(second), first=asdict(first)
    )
    row |= dict(parameters=parameters_of(model), seconds=seconds)
    row |= dict(best_step=found.best_step, training_seconds=sum(seconds))
    out = RESULTS / "photographs"
    out.mkdir(exist_ok=True)
    keep(out / "metrics.json", row)
    meta = {"step": found.best_step, "seed": second.seed, **provenance()}
    save_model(out / "model.safetensors", model, meta)
    print(json.dumps(row["masked_patch_mse"], indent=2))


if __name__ == "__main__":
    main()
