"""Train small models whose loss is met at a fixed depth, at random times, after steps that grow, or at the fixed point, and follow each far past its training:
what notebook 15 shows, into results/image-dynamics. A variant is a run of its own under runs/dynamics, resumed if it was stopped, skipped once it is scored.

    python scripts/image_dynamics.py --part 0/2 &  python scripts/image_dynamics.py --part 1/2"""
import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from flax import nnx

from et_nbdev.training import atomic_write, fit, provenance
from et_nbdev.vision.data import batches
from et_nbdev.vision.dynamics import FieldImageEnergyTransformer, errors_in_time, errors_settled, growing, loss_at
from et_nbdev.vision.model import ImageEnergyTransformer
from et_nbdev.vision.train import CONFIGS, held_out, prepare

ROOT = Path(__file__).resolve().parent.parent
TINY = CONFIGS["tiny"]
CONFIG = replace(TINY, model=replace(TINY.model, patch_size=8, dim=96))     # 16 tokens a picture: a small fraction of the time of 64
T, GROWING = CONFIG.model.steps, growing().tolist()
# name: (model, step sizes in training or None: where it has settled, first step at which a picture may be read or None: the last)
VARIANTS = {
    "T = 6": (ImageEnergyTransformer, [1.0] * T, None),
    "growing steps": (ImageEnergyTransformer, GROWING, None),
    "growing steps, field": (FieldImageEnergyTransformer, GROWING, None),
    "fixed point, field": (FieldImageEnergyTransformer, None, None),
    "random times": (ImageEnergyTransformer, GROWING, 3),
}
STEPS = 400                 # of the optimiser: enough to tell the variants apart
LAST, EVERY = 300, 2        # Euler steps that the descent goes on for, and how often it is looked at


def score(name: str, base, images: dict, test_on: int, folder: Path) -> dict:
    kind, step_sizes, first = VARIANTS[name]
    config = replace(base, flip=0.0, every=100, optim=replace(base.optim, steps=STEPS, warmup=STEPS // 10))
    run = fit(kind(config.model, rngs=nnx.Rngs(config.seed)), loss_at(config, step_sizes, first),
              lambda start: batches(images["train"], config.batch_size, seed=config.seed, start=start), config.optim, seed=config.seed,
              folder=folder, every=config.every, config={**asdict(config), "variant": name, "step_sizes": step_sizes, "first": first}, progress=sys.stdout.isatty())
    rows, started = [], time.perf_counter()
    for x, o in held_out(images["test"], config.model, config.num_occluded, limit=test_on, batch_size=100):
        rows.append([np.asarray(a) for a in (*errors_in_time(run.model, x, o, LAST, EVERY), *errors_settled(run.model, x, o))])
    error, energy, end, end_energy, settled, evaluations = (np.concatenate(a, -1) for a in zip(*rows))
    times = np.arange(0, LAST + 1, EVERY)
    keep = sorted({int(np.argmin(np.abs(times - t))) for t in np.geomspace(1, LAST, 60)} | {0})
    return {"name": name, "steps": times[keep].tolist(), "mse": error.mean(-1)[keep].tolist(), "energy": energy.mean(-1)[keep].tolist(),
            "standard_error": (error.std(-1) / error.shape[-1] ** 0.5)[keep].tolist(), "rises": int((np.diff(energy, axis=0) > 4e-7 * np.abs(energy).max(0)).sum()),
            "settled": {"mse": float(end.mean()), "energy": float(end_energy.mean()), "share": float(settled.mean()), "evaluations": float(evaluations.mean())},
            "strength": float(run.model.strength[...]) if hasattr(run.model, "strength") else None, "test_pictures": int(error.shape[-1]),
            "training_mse": [[r["step"], r["loss"]] for r in run.history], "training_seconds": run.history[-1]["seconds"], "scoring_seconds": time.perf_counter() - started,
            "step_sizes": step_sizes, "first": first, "config": asdict(config), "command": "python scripts/image_dynamics.py", **provenance()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="0/1", help="i/n: only the i-th of n shares of the variants")
    parser.add_argument("--test_on", type=int, default=500, help="test pictures to score on")
    parser.add_argument("--out", type=Path, default=ROOT / "results/image-dynamics")
    args = parser.parse_args()
    try: i, n = map(int, args.part.split("/"))
    except ValueError: i, n = 0, 0
    if not 0 <= i < n: parser.error(f"argument --part: expected i/n with 0 ≤ i < n, such as 0/2, got {args.part!r}")
    if args.test_on < 1: parser.error(f"argument --test_on: expected at least 1, got {args.test_on}")
    base, images = prepare(CONFIG)
    images = {split: x[:] for split, x in images.items() if split != "validation"}          # small enough to be decoded once
    for name in list(VARIANTS)[i::n]:
        slug = "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
        path = args.out / f"{slug}.json"
        if path.exists(): continue
        row = score(name, base, images, args.test_on, ROOT / "runs/dynamics" / slug)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary: temporary.write_text(json.dumps(row) + "\n")
        print(f"{name:<22} best {min(row['mse']):.4f}, after {LAST} steps {row['mse'][-1]:.4f}, settled {row['settled']['mse']:.4f}  {row['training_seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
