"""Evaluations and time that each solver takes to the energy of 12, 50 and 500 Euler
steps, on two models that come with the library: six photographs with half of their
patches hidden. "descend" is the paper's loop of so many steps, which watches no energy.
"""

import time

import jax
import numpy as np
from flax import nnx
from timing import options, write

from et_nbdev.dynamics import Euler, descend
from et_nbdev.solvers import Anderson, Backtracking, Flow, solve
from et_nbdev.vision.data import normalize, occlude, patchify, photographs
from et_nbdev.vision.model import from_pretrained

STEPS = (12, 50, 500)


def measure(name: str, repeats: int) -> dict:
    model = from_pretrained(name)
    c, photos = model.config, photographs(model.config.image_size)
    hidden = occlude(jax.random.key(1), len(photos), c.num_tokens, c.num_tokens // 2)[0]
    patches = patchify(normalize(photos, c.mean, c.std), c.patch_size)
    start, most = model.encode(patches, hidden), dict(evaluations=max(STEPS) + 1)
    euler = Euler(c.step_size)
    energies = solve(model.block, start, euler, **most).energies.total
    loop = lambda block, x, steps: descend(block, x, steps, c.step_size)[0]
    run = nnx.jit(loop, static_argnums=2)
    methods = {
        "descend": None,
        "Euler": euler,
        "Backtracking": Backtracking(c.step_size),
        "Anderson": Anderson(c.step_size),
        "Flow": Flow(rtol=1e-2, atol=1e-2),
    }
    times, rows = {}, {m: {} for m in methods}
    for number in range(repeats + 1):  # the first, which compiles, is not counted
        for m, method in methods.items():
            for T in STEPS:
                began, count = (time.perf_counter(), time.process_time()), np.array([T])
                if method is None:
                    jax.block_until_ready(run(model.block, start, T))
                else:
                    found = solve(model.block, start, method, until=energies[T], **most)
                    assert (found.energies.total[-1] <= energies[T]).all()
                    count = np.asarray(found.evaluations)
                now = time.perf_counter(), time.process_time()
                if number:
                    times.setdefault((m, T), []).append(np.subtract(now, began))
                counts = dict(evaluations=int(count.max()))
                rows[m][T] = counts | dict(mean_evaluations=float(count.mean()))
    for (m, T), each in times.items():
        wall, processor = np.median(each, 0).tolist()
        rows[m][T] |= dict(seconds=wall, processor_seconds=processor)
    return rows


def main():
    args = options(__doc__, "solvers", repeats=7).parse_args()
    names = "tiny-imagenet-2026-11-21", "cifar10-small"
    models = {name: measure(name, args.repeats) for name in names}
    write(args.out, {"models": models, "pictures": 6, "repeats": args.repeats})
    for name, rows in models.items():
        print(f"{name}: evaluations and processor time to the energy of {STEPS} steps")
        for m, row in rows.items():
            for T in STEPS:
                spent = 1e3 * row[T]["processor_seconds"]
                print(f"  {m:<14}{T:>5}{row[T]['evaluations']:>7}{spent:>9.1f} ms")


if __name__ == "__main__":
    main()
