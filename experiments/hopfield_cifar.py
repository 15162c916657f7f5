"""Store CIFAR-10 pictures in a continuous Hopfield network, recall them from their
upper halves at many temperatures, and freeze in results/hopfield what notebook 11
plots.

cifar10.json: for every inverse temperature how many memories share in the fixed points
and which part of the queries is recalled. cifar10.png: eight pictures in rows; in
columns the stored picture, the query, and the fixed points at three inverse
temperatures. Takes a few minutes on one core; reads the pictures as every other script
does (ET_DATA, or the hub).
"""

import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from runs import RESULTS, keep, options

from et_nbdev.hopfield.continuous import (
    _continuous_energy_and_update,
    _sharing,
    _unit_memories,
    retrieve,
)
from et_nbdev.training.checkpoint import atomic_write
from et_nbdev.vision.data import load_images

OUT = RESULTS / "hopfield"
SHOWN = (0.25, 25.0, 2500.0)


@jax.jit
def ten_steps(x, xi, beta):
    """Ten steps on, how many memories share in each state, and how far each still is
    from rest.
    """
    x = retrieve(x, xi, beta, 10)[0]
    return (
        x,
        _sharing(x, xi, beta),
        jnp.linalg.norm(_continuous_energy_and_update(x, xi, beta)[1], axis=-1),
    )


def recall(x, xi, beta, rounds=30):
    for _ in range(rounds):
        x, shares, unrest = ten_steps(x, xi, beta)
        if unrest.max() < 1e-5:
            break
    return x, shares, unrest


def main():
    parser = options(__doc__)
    add, evenly = parser.add_argument, "pictures to recall, spread evenly over these"
    add("--stored", type=int, default=2000, help="pictures to store: 2000")
    add("--queries", type=int, default=100, help=f"{evenly}: 100")
    args = parser.parse_args()
    if not 8 <= args.queries <= args.stored:
        parser.error(
            "--queries: expected at least 8, for the eight rows of the picture, and at"
            f" most --stored, got {args.queries}"
        )
    start = time.time()
    images = load_images("cifar10", "train")
    chosen = np.random.default_rng(0).choice(len(images), args.stored, replace=False)
    pictures = jnp.asarray(images[chosen] / np.float32(255))  # (K, 32, 32, 3)
    xi, mean = _unit_memories(pictures)
    queries = np.linspace(0, args.stored - 1, args.queries).round().astype(int)
    x = xi[queries].reshape(-1, 32, 32, 3).at[:, 16:].set(0).reshape(len(queries), -1)
    betas = 10 ** np.linspace(-1, 4, 26)
    share, hit, unrest, ends = [], [], [], {}
    for beta in betas:
        end, shares, moving = recall(x, xi, beta)
        share.append(float(shares.mean()))
        unrest.append(float(moving.max()))
        hit.append(float(jnp.mean(jnp.linalg.norm(end - xi[queries], axis=-1) < 0.1)))
        for b in SHOWN:
            if abs(np.log(beta / b)) < 0.1:
                ends[b] = end
        print(
            f"beta {beta:9.3g}: {share[-1]:8.1f} share, {hit[-1]:.2f} recalled,"
            f" furthest from rest {unrest[-1]:.1e}",
            flush=True,
        )
    said = "CIFAR-10, training split, drawn at random; query: the upper half, the rest"
    found = {
        "betas": betas.tolist(),
        "sharing": share,
        "recalled": hit,
        "furthest_from_rest": unrest,
        "stored": args.stored,
        "queries": args.queries,
        "seed": 0,
        "data": f"{said} at the mean; recalled: within 0.1 of the memory of unit length",
        "seconds": round(time.time() - start),
    }
    keep(OUT / "cifar10.json", found)
    flat = pictures.reshape(args.stored, -1) - mean[None]
    rows = []
    for q in args.queries // 20 + np.arange(8) * (args.queries // 8):
        length = jnp.linalg.norm(flat[queries[q]])
        each = xi[queries[q]], x[q], *(ends[b][q] for b in SHOWN)
        picture = lambda s: np.clip((length * s + mean).reshape(32, 32, 3), 0, 1)
        rows.append(np.concatenate(list(map(picture, each)), 1))
    with atomic_write(OUT / "cifar10.png") as temporary:
        plt.imsave(temporary, np.concatenate(rows, 0), format="png")


if __name__ == "__main__":
    main()
