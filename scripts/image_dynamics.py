"""Train small models whose loss is met at a fixed depth, at random times of a long
descent, or where the descent has settled, and follow each far past its training: what
notebook 27 shows, into results/image-dynamics. Every run has a folder under
runs/dynamics, is resumed if it was stopped, and skipped once it is scored.

    python scripts/image_dynamics.py --part 0/2 &  python scripts/image_dynamics.py
    --part 1/2
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import numpy as np
from flax import nnx

from et_nbdev.training.checkpoint import _atomic_write, _provenance
from et_nbdev.training.fit import fit
from et_nbdev.vision._dynamics_scores import (
    _errors_after,
    _errors_in_time,
    _errors_settled,
)
from et_nbdev.vision.data import batches
from et_nbdev.vision.dynamics import _FieldImageEnergyTransformer, _growing, _loss_at
from et_nbdev.vision.model import ImageEnergyTransformer
from et_nbdev.vision.train import _CONFIGS, _FILLS, _evaluate_fill, _held_out, _prepare

ROOT = Path(__file__).resolve().parent.parent
TINY = _CONFIGS["tiny"]
# 16 tokens a picture: a small fraction of the time of 64
CONFIG = replace(
    TINY, flip=0.0, every=100, model=replace(TINY.model, patch_size=8, dim=96)
)
# of the optimizer in all; and how many of them the last variant takes at rest, at a
# quarter of the learning rate
STEPS, AT_REST = 1500, 300
T, GROWING, FIRST = CONFIG.model.steps, _growing(14).tolist(), 3
# name: (model, stages of training: (optimizer steps, share of the learning rate, step
# sizes of the descent or None: until it has settled,
#        first step at which a picture may be read or None: the last))
VARIANTS = {
    "T = 6": (ImageEnergyTransformer, [(STEPS, 1.0, [1.0] * T, None)]),
    "random times": (ImageEnergyTransformer, [(STEPS, 1.0, GROWING, FIRST)]),
    "random times, field": (
        _FieldImageEnergyTransformer,
        [(STEPS, 1.0, GROWING, FIRST)],
    ),
    "at rest, field": (
        _FieldImageEnergyTransformer,
        [(STEPS - AT_REST, 1.0, GROWING, FIRST), (AT_REST, 0.25, None, None)],
    ),
}
SEEDS = 0, 1, 2
# Euler steps that the descent goes on for, and how often it is looked at
LAST, EVERY = 300, 2
DEEPER = 1e-4  # a tenth of the residual at which a loss at rest is met in training
# the first test pictures were looked at while the variants were devised: scores are on
# those after them
SEEN = 500


def mean(v):
    return float(v.mean())


def standard_error(v):
    return v.std(-1, ddof=1) / v.shape[-1] ** 0.5


def about(v):
    return {"mse": mean(v), "standard_error": float(standard_error(v))}


def trained(name: str, config, images: dict, folder: Path):
    """The model after all its stages, what each stage has logged, and where and when
    they ran.
    """
    kind, stages = VARIANTS[name]
    model, logs = kind(config.model, rngs=nnx.Rngs(config.seed)), []
    made = folder / "provenance.json"
    if not made.exists():
        keep(made, _provenance())
    for n, (steps, share, step_sizes, first) in enumerate(stages):
        optim = replace(
            config.optim, steps=steps, warmup=steps // 10, lr=share * config.optim.lr
        )
        supply = lambda start, n=n: batches(
            images["train"], config.batch_size, seed=config.seed + 1000 * n, start=start
        )
        run = fit(
            model,
            _loss_at(config, step_sizes, first),
            supply,
            optim,
            seed=config.seed,
            folder=folder / f"stage-{n}",
            every=config.every,
            config={
                **asdict(config),
                "variant": name,
                "stage": n,
                "step_sizes": step_sizes,
                "first": first,
            },
            progress=sys.stdout.isatty(),
        )
        model = run.model
        logs.append(
            {
                "optim": asdict(optim),
                "step_sizes": step_sizes,
                "first": first,
                "seconds": run.history[-1]["seconds"],
                "log": [
                    {
                        key: round(row[key], 4)
                        for key in ("step", "loss", "settled")
                        if key in row
                    }
                    for row in run.history
                ],
            }
        )
    return model, logs, json.loads(made.read_text())


def score(name: str, config, images: dict, fill, test_on: int, folder: Path) -> dict:
    "`fill`: the errors of the best fill on the same pictures."
    model, stages, made = trained(name, config, images, folder)
    rows, started = [], time.perf_counter()
    for x, o in _held_out(
        images["test"], config.model, config.num_occluded, limit=test_on, batch_size=100
    ):
        found = (
            *_errors_in_time(model, x, o, LAST, EVERY),
            _errors_after(model, x, o, GROWING),
            *_errors_settled(model, x, o),
        )
        if stages[-1]["step_sizes"] is None:
            found += _errors_settled(model, x, o, DEEPER)[::2]
        rows.append([np.asarray(a) for a in found])
    error, energy, long, end, end_energy, settled, evaluations, *deeper = (
        np.concatenate(a, -1) for a in zip(*rows)
    )
    times = np.arange(0, LAST + 1, EVERY)
    looked = sorted(
        {int(np.argmin(np.abs(times - t))) for t in np.geomspace(1, LAST, 60)} | {0}
    )
    at_rest = {
        **about(end),
        "mse_of_settled": mean(end[settled]),
        "energy": mean(end_energy),
        "share": mean(settled),
        "evaluations": mean(evaluations),
        "below_best_fill": about(fill - end),
    }
    return {
        "name": name,
        "seed": config.seed,
        "test_pictures": int(error.shape[-1]),
        "first_test_picture": SEEN,
        "steps": times[looked].tolist(),
        "mse": error.mean(-1)[looked].tolist(),
        "standard_error": standard_error(error)[looked].tolist(),
        "energy": energy.mean(-1)[looked].tolist(),
        "rises": int((np.diff(energy, axis=0) > 4e-7 * np.abs(energy).max(0)).sum()),
        "growing": {**about(long), "time": sum(GROWING)},
        "settled": at_rest,
        "deeper": (
            {**about(deeper[0]), "tolerance": DEEPER, "share": mean(deeper[1])}
            if deeper
            else None
        ),
        "strength": float(model.strength[...]) if hasattr(model, "strength") else None,
        "stages": stages,
        "training": made,
        "scoring_seconds": time.perf_counter() - started,
        "config": {
            key: value for key, value in asdict(config).items() if key != "optim"
        },
        "command": "python scripts/image_dynamics.py",
        **_provenance(),
    }


def keep(path: Path, row: dict):
    path.parent.mkdir(parents=True, exist_ok=True)
    with _atomic_write(path) as temporary:
        temporary.write_text(json.dumps(row) + "\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", default="0/1", help="i/n: only the i-th of n shares of the runs"
    )
    parser.add_argument(
        "--test_on",
        type=int,
        default=1000,
        help="test pictures to score on, after the first 500",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "results/image-dynamics")
    args = parser.parse_args()
    try:
        i, n = map(int, args.part.split("/"))
    except ValueError:
        i, n = 0, 0
    if not 0 <= i < n:
        parser.error(
            "argument --part: expected i/n with 0 ≤ i < n, such as 0/2, got"
            f" {args.part!r}"
        )
    if args.test_on < 2:
        parser.error(f"argument --test_on: expected at least 2, got {args.test_on}")
    base, images = _prepare(CONFIG)
    # small enough to be decoded once
    images = {
        "train": images["train"][:],
        "test": images["test"][SEEN : SEEN + args.test_on],
    }
    errors = {
        name: _evaluate_fill(
            fill, images["test"], base.model, base.num_occluded, limit=args.test_on
        )
        for name, fill in _FILLS.items()
    }
    if i == 0:
        keep(
            args.out / "fills.json",
            {
                "test_pictures": len(images["test"]),
                "first_test_picture": SEEN,
                "fills": {k: about(e) for k, e in errors.items()},
                **_provenance(),
            },
        )
    best = min(errors.values(), key=mean)
    for seed, name in list(product(SEEDS, VARIANTS))[i::n]:
        slug = (
            "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
            + f"-{seed}"
        )
        path = args.out / f"{slug}.json"
        if path.exists():
            continue
        row = score(
            name,
            replace(base, seed=seed),
            images,
            best,
            args.test_on,
            ROOT / "runs/dynamics" / slug,
        )
        keep(path, row)
        print(
            f"{name:<22} seed {seed}: best {min(row['mse']):.4f}, after {LAST} steps"
            f" {row['mse'][-1]:.4f}, settled {row['settled']['mse']:.4f}"
            f" ({row['settled']['share']:.0%}) "
            f" {sum(s['seconds'] for s in row['stages']):.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
