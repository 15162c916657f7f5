"""Evaluations and wall time that each solver takes to the energy of 12, 50 and 500
Euler steps, on the models that come with the library.

Six photographs with half of their patches hidden; everything is timed in turn within
one process, and what counts are ratios of medians. "descend" is the paper's loop of so
many steps, which watches no energy. Writes results/benchmarks/solvers.json, with wall
time and processor time; the former means something only on a machine that does nothing
else.
"""

import argparse
import json
import os
import time
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from et_nbdev.dynamics import Euler, descend
from et_nbdev.solvers import Anderson, Backtracking, Flow, solve
from et_nbdev.training import atomic_write, provenance
from et_nbdev.vision.data import normalize, occlude, patchify, photographs
from et_nbdev.vision.model import from_pretrained

ROOT = Path(__file__).resolve().parent.parent
STEPS = (12, 50, 500)


def measure(name: str, repeats: int) -> dict:
    model = from_pretrained(name)
    c, photos = model.config, photographs(model.config.image_size)
    hidden = occlude(jax.random.key(1), len(photos), c.num_tokens, c.num_tokens // 2)[0]
    start = model.encode(
        patchify(normalize(photos, c.mean, c.std), c.patch_size), hidden
    )
    energies = solve(
        model.block, start, Euler(c.step_size), evaluations=max(STEPS) + 1
    ).energies.total
    run = nnx.jit(
        lambda block, x, steps: descend(block, x, steps, c.step_size)[0],
        static_argnums=2,
    )
    methods = {
        "Euler": Euler(c.step_size),
        "Backtracking": Backtracking(c.step_size),
        "Anderson": Anderson(c.step_size),
        "Flow": Flow(rtol=1e-2, atol=1e-2),
    }
    work = {("descend", T): lambda T=T: run(model.block, start, T) for T in STEPS}
    work |= {
        (m, T): lambda method=method, T=T: solve(
            model.block, start, method, evaluations=max(STEPS) + 1, until=energies[T]
        )
        for m, method in methods.items()
        for T in STEPS
    }
    seconds, rows = {key: [] for key in work}, {m: {} for m in ("descend", *methods)}
    for _ in range(repeats + 1):  # the first, which compiles, is not counted
        for key, do in work.items():
            began = time.perf_counter(), time.process_time()
            result = jax.block_until_ready(do())
            seconds[key].append(
                (time.perf_counter() - began[0], time.process_time() - began[1])
            )
            if key[0] == "descend":
                rows[key[0]][key[1]] = {
                    "evaluations": key[1],
                    "mean_evaluations": key[1],
                }
            else:
                assert (result.energies.total[-1] <= energies[key[1]]).all(), key
                rows[key[0]][key[1]] = {
                    "evaluations": int(result.evaluations.max()),
                    "mean_evaluations": float(result.evaluations.mean()),
                }
    for (m, T), times in seconds.items():
        rows[m][T]["seconds"], rows[m][T]["processor_seconds"] = np.median(
            times[1:], 0
        ).tolist()
    return rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results/benchmarks/solvers.json"
    )
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"argument --repeats: expected at least 1, got {args.repeats}")
    began, load = time.perf_counter(), os.getloadavg()[0]
    models = {
        name: measure(name, args.repeats)
        for name in ("tiny-imagenet-2026-11-21", "cifar10-small")
    }
    result = {
        "models": models,
        "pictures": 6,
        "repeats": args.repeats,
        "load_before": load,
        "seconds": time.perf_counter() - began,
        "command": "python benchmarks/solvers.py",
        **provenance(),
    }
    with atomic_write(args.out) as path:
        path.write_text(json.dumps(result, indent=2) + "\n")
    for name, rows in models.items():
        print(
            f"{name}: evaluations and processor milliseconds to the energy of "
            + ", ".join(map(str, STEPS))
            + " Euler steps"
        )
        for m, row in rows.items():
            print(
                f"  {m:<14}"
                + "".join(
                    f"{row[T]['evaluations']:>7}{1e3 * row[T]['processor_seconds']:>9.1f}"
                    for T in STEPS
                )
            )


if __name__ == "__main__":
    main()
