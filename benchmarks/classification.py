"""Training throughput of the graph classifier, beside the same model written as one
would first write it down, with padded tables.

Ways of this library: tables in buckets, and lists of edges. The plain way forms X ⊗ X,
convolves it and takes `jax.grad` of the energy, on random batches that are padded to
the largest graph of the *batch*, as the paper does; beside it the same with every batch
padded to the largest graph of the *set*. To tell what padding costs from what the
literal formulas cost, our model also runs on batches of both kinds. All are timed in
turn within one process and reported as graphs per second and as ratios of medians to
the plain way of the paper. Writes results/benchmarks/classification.json. Run it on a
machine that does nothing else; the set is found as `et_nbdev.graph.sets.load_graphs`
says.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from et_nbdev.graph.batches import (
    EdgeLists,
    flip_signs,
    laplacian_positions,
    learn_encoding,
    make_buckets,
)
from et_nbdev.graph.classify import (
    ClassifyConfig,
    ClassifyTraining,
    GraphClassifier,
    _classification_loss,
)
from et_nbdev.graph.sets import load_graphs
from et_nbdev.training import (
    TrainState,
    atomic_write,
    make_optimizer,
    make_step,
    provenance,
)

MODEL = ClassifyConfig(
    dim=32, num_heads=4, head_dim=8, num_memories=128, num_positions=8, blocks=2
)


def energy(block, g, A, mask):
    "E of all graphs, as in the paper."
    Q = jnp.einsum("bnd,hdy->bhny", g, block.attention.Wq[...])
    K = jnp.einsum("bnd,hdy->bhny", g, block.attention.Wk[...])
    beta = block.attention.beta[None, :, None]
    scores = jnp.where(
        mask, beta[..., None] * A * jnp.einsum("bhcy,bhny->bhcn", Q, K), -1e9
    )
    lse = jnp.where(mask.any(-1), jax.nn.logsumexp(scores, -1), 0.0)
    return -jnp.sum(lse / beta) - 0.5 * jnp.sum(
        jax.nn.relu(jnp.einsum("bnd,kd->bnk", g, block.memory.xi[...])) ** 2
    )


class PlainClassifier(GraphClassifier):
    "The same weights and the same function; nothing is saved."

    def __call__(self, batch, rngs=None):
        c = self.config
        x = self.tokens(batch if rngs is None else flip_signs(batch, rngs.signs()))
        here = jnp.pad(batch.present, ((0, 0), (1, 0)), constant_values=True)
        mask = (
            here[:, :, None]
            & here[:, None]
            & jnp.pad(
                batch.adjacency != 0, ((0, 0), (1, 0), (1, 0)), constant_values=True
            )
        )
        mask = (mask & ~jnp.eye(x.shape[1], dtype=bool)[None])[:, None]
        A = jax.lax.conv_general_dilated(
            x[:, :, None] * x[:, None],
            self.adjacency.filters[...],
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NCHW"),
        )
        A = A + self.adjacency.bias[...][None, :, None, None]
        for block in self.blocks:
            for _ in range(c.steps):
                x = x - c.step_size * jax.grad(lambda g: energy(block, g, A, mask))(
                    block.norm(x)
                )
                if rngs is not None:
                    x = x - c.step_size * c.noise * jax.random.normal(
                        rngs.noise(), x.shape
                    )
        return self.head(x[:, 0])


def trainer(make, data, config):
    "A function that does one training step on a batch and waits for it."
    model = make(
        data["features"],
        data["classes"],
        config.model,
        num_edge_features=data["edge_features"],
        rngs=nnx.Rngs(0),
    )
    graphdef, params = nnx.split(model, nnx.Param)
    params, optimizer = nnx.to_pure_dict(params), make_optimizer(config.optim(10**4))
    state = [TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))]
    step = make_step(graphdef, _classification_loss, optimizer, 0)

    def train(batch):
        state[0], metrics = step(state[0], batch)
        return float(metrics["loss"])

    return train


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data",
        default="PROTEINS",
        help="a name of the TU collection (default: PROTEINS)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="times that each way is timed (default: 5)",
    )
    parser.add_argument(
        "--plain_batches",
        type=int,
        default=4,
        help=(
            "random batches that are padded to their own largest graph; each shape is"
            " compiled (default: 4)"
        ),
    )
    parser.add_argument(
        "--set_batch",
        type=int,
        default=4,
        help=(
            "graphs in a batch that is padded to the largest of the set, which needs"
            " gigabytes (default: 4)"
        ),
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent.parent / "results/benchmarks/classification.json",
    )
    args = parser.parse_args()
    try:
        graphs = load_graphs(args.data)
    except FileNotFoundError as e:
        print(
            f"classification.py: {e}\nGoing on with rings, whose graphs are all small,"
            " so padding matters little."
        )
        args.data, graphs = "rings", load_graphs("rings")
    ids = np.arange(len(graphs))
    encoding = learn_encoding(graphs, ids)
    positions = laplacian_positions(graphs, MODEL.num_positions)
    config = ClassifyTraining(args.data, model=MODEL)
    x, e = encoding(graphs[:1])
    data = dict(features=x.shape[1], classes=graphs.num_classes, edge_features=0)
    if e.shape[1]:
        sys.exit(
            f"classification.py: the plain way has no features of edges, {args.data}"
            " has some"
        )

    ways = {}
    suppliers = {
        "buckets": make_buckets(
            graphs,
            encoding,
            positions=positions,
            num_buckets=config.num_buckets,
            batch_size=config.batch_size,
        ),
        "edges": EdgeLists(graphs, encoding, positions, config.batch_size),
    }
    for name, supply in suppliers.items():
        train, per_epoch = trainer(GraphClassifier, data, config), iter(range(10**6))

        def epoch(supply=supply, train=train, per_epoch=per_epoch):
            for batch in supply.batches(ids, 0, next(per_epoch)):
                train(batch)

        ways[name] = (epoch, len(ids))

    def padded(some):
        "These graphs as one batch, padded to the largest of them."
        one = make_buckets(
            graphs[some],
            encoding,
            positions=laplacian_positions(graphs[some], MODEL.num_positions),
            num_buckets=1,
            batch_size=len(some),
            room=2**40,
        )
        return next(one.batches(np.arange(len(some))))

    rng, largest = np.random.default_rng(0), int(graphs.sizes.argmax())
    drawn = np.array_split(
        rng.permutation(ids)[: args.plain_batches * config.batch_size],
        args.plain_batches,
    )
    with_largest = np.append(
        rng.choice(np.setdiff1d(ids, largest), args.set_batch - 1, replace=False),
        largest,
    )
    kinds = {
        "largest of the batch": [padded(some) for some in drawn],
        "largest of the set": [padded(with_largest)],
    }
    for kind, batches in kinds.items():
        for name, make in (("plain", PlainClassifier), ("our model", GraphClassifier)):
            train = trainer(make, data, config)

            def each(batches=batches, train=train):
                for batch in batches:
                    train(batch)

            ways[f"{name}, {kind}"] = (
                each,
                sum(len(batch.labels) for batch in batches),
            )

    seconds = {name: [] for name in ways}
    # compiles; the edges meet all their shapes
    for _, (thunk, _) in ways.items():
        thunk()
    for _ in range(args.rounds):
        for name, (thunk, _) in ways.items():
            start = time.perf_counter()
            thunk()
            seconds[name].append(time.perf_counter() - start)
    rate = {
        name: ways[name][1] / float(np.median(times)) for name, times in seconds.items()
    }
    plain = rate["plain, largest of the batch"]
    result = {
        "data": args.data,
        "largest": int(graphs.sizes.max()),
        "mean_nodes": float(graphs.sizes.mean()),
        "graphs_per_second": rate,
        "ratio_to_plain": {name: rate[name] / plain for name in rate},
        "batch_size": config.batch_size,
        "set_batch": args.set_batch,
        "padded_to": {
            kind: [int(batch.present.shape[1]) for batch in batches]
            for kind, batches in kinds.items()
        },
        "rounds": args.rounds,
        **provenance(),
    }
    with atomic_write(args.out) as path:
        path.write_text(json.dumps(result, indent=2) + "\n")
    for name, r in rate.items():
        print(f"{name:<32}{r:10.1f} graphs/s{r / plain:10.1f} × plain")


if __name__ == "__main__":
    main()
