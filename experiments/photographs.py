"""Complete photographs of 128 × 128 pixels in 256 patches: the Tiny ImageNet model that
comes with the library, `resized`, is trained on with larger pictures that may be shown.

They are photographs of clothes (CC0, github.com/alexeygrigorev/clothing-dataset-small).
Ours were cut to squares of 144 pixels before (JPEG 92); a clone has larger ones:

    python experiments/photographs.py --data FOLDER

The model is trained to stay, as `shown` in image_rest.py. Weights are chosen by the mean
error of 100 validation pictures after T and 8 T steps. Test pictures are scored once,
beside fills that know no or all training pictures: results/photographs, whose weights
are then moved to the library by hand. A command that was stopped goes on from its
checkpoints in runs/photographs when it is given again.
"""

from dataclasses import asdict, replace

import image_pair
import image_rest as rest
import jax
import matplotlib.pyplot as plt
from runs import RUNS, keep, options

from et_nbdev.training import OptimConfig, provenance
from et_nbdev.vision.data import FILLS, fills_from
from et_nbdev.vision.model import from_pretrained, plot_completion, save_model
from et_nbdev.vision.train import (
    CONFIGS,
    drawn_batch,
    evaluate,
    evaluate_fill,
    held_out_batches,
    prepare,
    summarize,
)

OPTIM = OptimConfig(steps=1400, warmup=100, lr=8e-3, lr_floor=1e-6, weight_decay=0.0)


def main(argv=None):
    parser = options(__doc__, "photographs")
    parser.add_argument("--data", required=True, help="folder of the pictures")
    args = parser.parse_args(argv)
    model = from_pretrained("tiny-imagenet").resized(128)
    how = dict(optim=OPTIM, batch_size=16, every=200, validate_on=100, data=args.data)
    config = replace(CONFIGS["tiny-imagenet"], model=model.config, **how)
    config, images = prepare(config)
    model.config, n, T = config.model, config.num_occluded, config.model.steps
    images = {split: own[:] for split, own in images.items()}
    errors = {"before this training": evaluate(model, images["test"], n)}
    how, late = rest.VARIANTS["shown"], images["train"][: config.batch_size // 4]
    kept = rest.Kept(model, drawn_batch(config, late, jax.random.key(0)))

    def validate(kept):
        of = images["validation"][: config.validate_on], n
        at = [evaluate(kept.model, *of, steps=k * T).mean() for k in (1, 8)]
        return {"loss": sum(at) / 2}

    about = dict(folder=RUNS / "photographs", config=asdict(config) | how)
    loss = rest.long_loss(config, **how)
    fit = image_pair.trained(kept, config, images, loss, validate=validate, **about)
    model = fit.model.model
    errors = {"Energy Transformer": evaluate(model, images["test"], n)} | errors
    for name, fill in (FILLS | fills_from(images["train"])).items():
        errors[name] = evaluate_fill(fill, images["test"], config.model, n)
    row = summarize(errors) | rest.score(model, config, images["test"]) | how
    row |= dict(split="test", data="clothes")
    row["config"] = asdict(replace(config, data="clothes"))
    row["command"] = "python experiments/photographs.py --data FOLDER"
    row |= dict(best_step=fit.best_step, training_seconds=fit.history[-1]["seconds"])
    args.out.mkdir(exist_ok=True)
    keep(args.out / "metrics.json", row)
    meta = {"step": fit.best_step, "seed": config.seed, **provenance()}
    save_model(args.out / "model.safetensors", model, meta)
    some = next(held_out_batches(images["test"], config.model, n, batch_size=5))
    plot_completion(model, *some, times=(1, 2, T, 8 * T))
    plt.savefig(args.out / "completion.jpg", dpi=130, pil_kwargs=dict(quality=90))


if __name__ == "__main__":
    main()
