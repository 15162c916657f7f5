"""What the exact energy costs on pictures: the same model with its energy broken.

The model is the `full` one of image_terms.py. Each variant breaks one thing on purpose,
so that a step is no longer the downhill direction of any energy:

    key         what a token does as a key is left out, as in common attention
    values      values and an output matrix of their own, as in a transformer
    memory      what a memory adds has weights of its own, as in a transformer
    jacobian    the length of a head counts as a constant under the derivative
    turn        learned sizes multiply the bare force, not the one along the sphere
    all         values, memory and turn at once, a transformer in all but name

Width, heads, memories and steps stay, so matrices of their own come on top. Runs are
scored as those of image_terms.py, on validation pictures alone, and counted are the
steps that raised the energy that the model still reports.

    python experiments/image_broken.py                        # 450 steps, one rate
    python experiments/image_broken.py --steps 1800 --rates 0.0225 0.032 0.045

Each run is one file in results/image-broken, and one whose file stands is not made again.
"""

from functools import partial
from itertools import product

import image_pair
import image_terms
from broken import BrokenBlock
from flax import nnx
from image_pair import Job, Plan
from runs import RUNS, add_part, make, options, said_of

from et_nbdev.solvers import LearnedMetric
from et_nbdev.vision import model as library

VARIANTS = {
    "full": (),
    "key": ("key",),
    "values": ("values",),
    "memory": ("memory",),
    "jacobian": ("jacobian",),
    "turn": ("turn",),
    "all": ("values", "memory", "turn"),
}


class Bare(LearnedMetric):
    "Learned sizes of the bare force, which need not go downhill."

    def step(self, look, state):
        (x, t), view = state, look(state[0])
        return (x + self.sizes(view.g, t) * view.update, t + 1), view


def recipe(c: library.ImageConfig, rngs: nnx.Rngs, broken=()) -> library.Parts:
    "The full model, in which something is broken."
    parts = image_pair.parts(c, rngs)
    solver = parts.solver
    if "turn" in broken:
        solver = Bare(c.steps, c.dim, c.step_size)
    return parts._replace(block=BrokenBlock(parts.block, broken, rngs), solver=solver)


library.RECIPES |= {
    f"broken: {name}": partial(recipe, broken=what) for name, what in VARIANTS.items()
}


def run(plan: Plan, name: str, steps: int, lr: float, seed: int, images: dict) -> dict:
    "Train once; what the run's file holds."
    job = Job("et-metric-operations", steps, lr, seed)
    full = image_terms.FULL, f"broken: {name}"
    return image_terms.short(plan, job, images, *full) | {"name": name}


def main():
    parser = options(__doc__, "image-broken")
    add_part(parser)
    told = dict(nargs="+", choices=VARIANTS, default=[*VARIANTS], metavar="NAME")
    parser.add_argument("--only", **told)
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.045])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args, plan = parser.parse_args(), Plan()
    images = image_pair.pictures(plan, RUNS)
    work = [*product(args.seeds, args.only, args.rates)][args.part]
    for seed, name, lr in work:
        run_it = partial(run, plan, name, args.steps, lr, seed, images)
        make(args.out / f"{name}-{args.steps}-{lr:g}-{seed}.json", run_it, said_of)


if __name__ == "__main__":
    main()
