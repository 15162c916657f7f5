"""A trained pair of experiments/image_pair.py becomes the one that the library ships
and its chapters draw: the Energy Transformer as `from_pretrained("tiny-imagenet")`, the
transformer of as many operations beside its results, for comparison.

    python scripts/ship_model.py --steps 7200 --seed 0
    python scripts/image_figures.py       # then, what is drawn and measured from them
    python scripts/front_figures.py
    python scripts/browser_models.py

The weights come from runs/image-pair, what is known of them from results/image-pair:
the `run` in their header names the row there.
"""

import argparse
import json
from pathlib import Path

from et_nbdev.vision.model import _save_pretrained, load_model, save_model

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "et_nbdev/vision/weights/tiny-imagenet.safetensors"
RIVAL = ROOT / "results/tiny-imagenet-transformer"
KIND = "tiny-imagenet-small-64"


def run_of(name: str, steps: int, seed: int) -> dict:
    "The row of a run at the best learning rate; its `run` is the name of its files."
    pattern = f"{KIND}-{name}-{steps}-*-{seed}.json"
    found = sorted((ROOT / "results/image-pair").glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"results/image-pair: {len(found)} runs match {pattern}")
    return json.loads(found[0].read_text()) | {"run": found[0].stem}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/image-pair")
    args = parser.parse_args()
    for name in ("et-operations", "transformer"):
        row = run_of(name, args.steps, args.seed)
        path = args.runs / row["run"] / "best.safetensors"
        if not path.exists():  # the weights of a long run are kept beside its result
            path = ROOT / "results/image-pair" / f"{row['run']}.safetensors"
        model = load_model(path)
        kept = ("run", "seed", "best_step", "commit", "validation_mse", "test_mse")
        meta = {key: row[key] for key in kept} | {"step": row["best_step"]}
        if name == "transformer":
            RIVAL.mkdir(exist_ok=True)
            _save_pretrained(RIVAL, model, meta)
        else:
            save_model(SHIPPED, model, meta)
        print(f"{row['run']}: test error {row['test_mse']:.4f}")


if __name__ == "__main__":
    main()
