"""Attention on graphs: speed and memory of its operator beside XLA and DGL, how its
cost grows with the graph, and two graphs of real size.

    operator   one update and one training step at the size of tolokers (the graph
    itself where ET_DATA names it), by the compiled kernels, by XLA and by
               DGL message passing on torch: processes of their own, taking turns;
               medians, and peak memory beyond what libraries and their machine code
               take
    scaling    one update from 10⁴ to 10⁸ edges, power-law degrees
    tsocial    every node classified by the whole model (D 64, H 1, T 2) at the size of
    T-Social: 5.78 M nodes, 146 M directed edges, power-law degrees
    tfinance   one training step of the whole model on all nodes at the size of
    T-Finance: 39,357 nodes, 42 M directed edges

Every part that is run replaces its entry in results/benchmarks/graphs.json. Run it on a
machine that does nothing else. `--scale 0.01` tries everything at a hundredth of the
size.
"""

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np

HEADS, WIDTH = 2, 32  # of the operator
FEATURES = 10  # a node, of T-Social and T-Finance


# ------------------------------------------------------------------------------------
# graphs


def power_law(nodes: int, edges: int, seed: int = 0, flat: float = 0.5):
    """Both directions of `edges`/2 different pairs; a node of rank r is drawn with a
    probability that falls as r to the power −`flat`.
    """
    rng, keys, half = np.random.default_rng(seed), np.zeros(0, np.int64), edges // 2
    while len(keys) < half:
        more = int(1.1 * (half - len(keys))) + 1000
        a, b = (
            np.minimum(
                (nodes * rng.random(more) ** (1 / (1 - flat))).astype(np.int64),
                nodes - 1,
            )
            for _ in range(2)
        )
        fresh = (np.minimum(a, b) * nodes + np.maximum(a, b))[a != b]
        del a, b
        keys = np.unique(np.concatenate([keys, fresh]))
        del fresh
    if len(keys) > half:
        keys = np.delete(keys, rng.choice(len(keys), len(keys) - half, replace=False))
    a, b = (keys // nodes).astype(np.int32), (keys % nodes).astype(np.int32)
    del keys
    shuffle = rng.permutation(nodes).astype(np.int32)  # hubs anywhere, not at the front
    a, b = shuffle[a], shuffle[b]
    return np.concatenate([a, b]), np.concatenate([b, a])


def operator_graph(scale: float):
    data = os.environ.get("ET_DATA")
    if data and scale == 1:
        with np.load(
            Path(data) / "graphs/anomaly/tolokers.npz", allow_pickle=False
        ) as file:
            return (
                "tolokers",
                int(len(file["labels"])),
                file["senders"],
                file["receivers"],
            )
    nodes = max(100, int(11_758 * scale))
    return "power law", nodes, *power_law(nodes, int(1_038_000 * scale))


# ------------------------------------------------------------------------------------
# in a process of its own each


def peak() -> float:
    "The most memory this process ever held, in MiB."
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(thunk, repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        thunk()
        times.append(time.perf_counter() - start)
    return times


def dgl_operator(nodes, senders, receivers, training):
    "u_dot_v, edge_softmax, u_mul_e along the edges, and u_mul_e against them."
    os.environ.setdefault("DGLBACKEND", "pytorch")
    import dgl
    import dgl.function as fn
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield peak()
    # faster than int64
    graph = dgl.graph(
        (
            torch.from_numpy(senders.astype(np.int32)),
            torch.from_numpy(receivers.astype(np.int32)),
        ),
        num_nodes=nodes,
    )
    turned = dgl.reverse(graph)  # the same edges in the same order
    for g in (graph, turned):
        g.create_formats_()
    rng = np.random.default_rng(0)
    Q, K, a, b = (
        torch.from_numpy(rng.normal(size=(nodes, HEADS, WIDTH)).astype(np.float32))
        for _ in range(4)
    )
    Q, K = Q * WIDTH**-0.5, K.clone()
    Q.requires_grad_(training), K.requires_grad_(training)

    def update():
        with graph.local_scope(), turned.local_scope():
            graph.srcdata["k"], graph.dstdata["q"], turned.srcdata["q"] = K, Q, Q
            graph.apply_edges(fn.u_dot_v("k", "q", "s"))
            p = dgl.nn.functional.edge_softmax(graph, graph.edata.pop("s"))
            graph.edata["p"] = turned.edata["p"] = p
            graph.update_all(fn.u_mul_e("k", "p", "m"), fn.sum("m", "pull"))
            turned.update_all(fn.u_mul_e("q", "p", "m"), fn.sum("m", "pull"))
            return graph.dstdata["pull"], turned.dstdata["pull"]

    def run():
        if not training:
            with torch.no_grad():
                return update()
        Q.grad = K.grad = None
        as_query, as_key = update()
        ((as_query * a).sum() + (as_key * b).sum()).backward()
        return Q.grad, K.grad

    yield run


def jax_operator(nodes, senders, receivers, training, backend):
    import jax
    import jax.numpy as jnp

    from et_nbdev.graph.edges import neighbor_match
    from et_nbdev.graph.energy import EdgeIndex

    jax.block_until_ready(jnp.ones(8) + 1)
    # compiles, if need be: other libraries bring machine code with their import
    EdgeIndex([0], [1], 2, backend=backend)
    yield peak()
    edges = EdgeIndex(senders, receivers, nodes, backend=backend)
    rng = np.random.default_rng(0)
    Q, K, a, b = (
        jnp.asarray(rng.normal(size=(nodes, HEADS, WIDTH)).astype(np.float32))
        for _ in range(4)
    )
    Q = Q * WIDTH**-0.5
    match = lambda Q, K, edges: neighbor_match(edges, Q, K).sum()
    update = jax.grad(match, (0, 1))

    def loss(Q, K, edges):
        as_query, as_key = update(Q, K, edges)
        return jnp.sum(as_query * a) + jnp.sum(as_key * b)

    call = jax.jit(jax.grad(loss, (0, 1)) if training else update)
    yield lambda: jax.block_until_ready(call(Q, K, edges))


def operator_alone(name: str, kind: str, scale: float, repeats: int) -> dict:
    _, nodes, senders, receivers = operator_graph(scale)
    steps = (
        dgl_operator(nodes, senders, receivers, kind == "training")
        if name == "dgl"
        else jax_operator(nodes, senders, receivers, kind == "training", name)
    )
    before, run = next(steps), next(steps)
    first = timed(run, 1)[0]
    result = run()
    return {
        "first_call_s": first,
        "seconds": timed(run, repeats),
        "peak_mib": peak() - before,
        "process_mib": peak(),
        "norms": [float(np.linalg.norm(np.asarray(r, np.float64))) for r in result],
    }


def scaling_alone(edges: int, repeats: int) -> dict:
    import jax

    from et_nbdev.graph.edges import neighbor_match
    from et_nbdev.graph.energy import EdgeIndex

    nodes = max(edges // 25, 300)
    senders, receivers = power_law(nodes, edges)
    start = time.perf_counter()
    graph = EdgeIndex(senders, receivers, nodes)
    built = time.perf_counter() - start
    del senders, receivers
    Q, K = (
        jax.random.normal(jax.random.key(i), (nodes, 1, 64)) / 8**i for i in range(2)
    )
    match = lambda Q, K, graph: neighbor_match(graph, Q, K).sum()
    call = jax.jit(jax.value_and_grad(match, (0, 1)))
    run = lambda: jax.block_until_ready(call(Q, K, graph))
    run()
    return {
        "edges": graph.num_edges,
        "nodes": nodes,
        "backend": graph.backend,
        "build_s": built,
        "seconds": float(np.median(timed(run, repeats))),
    }


def model_alone(part: str, folder: str, repeats: int) -> dict:
    """All nodes classified by the whole model (tsocial), or one step of its training on
    all of them (tfinance), on the graph kept in `folder`.
    """
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from et_nbdev.graph.anomaly import (
        AnomalyConfig,
        AnomalyEnergyTransformer,
        weighted_loss,
    )
    from et_nbdev.graph.energy import EdgeIndex
    from et_nbdev.graph.nodes import Batch

    nodes = int(np.load(f"{folder}/nodes.npy"))
    start = time.perf_counter()
    graph = EdgeIndex(
        np.load(f"{folder}/senders.npy"), np.load(f"{folder}/receivers.npy"), nodes
    )
    built = time.perf_counter() - start
    gc.collect()
    config = AnomalyConfig(dim=64, num_heads=1, head_dim=64, num_memories=128, steps=2)
    row = {
        "nodes": nodes,
        "edges": graph.num_edges,
        "most_neighbors": int(np.diff(np.asarray(graph.into.start)).max()),
        "build_s": built,
        "build_peak_mib": peak(),
        "steps_of_descent": config.steps,
    }
    graphdef, weights = nnx.split(
        AnomalyEnergyTransformer(FEATURES, config, rngs=nnx.Rngs(0))
    )
    features = jax.random.normal(jax.random.key(0), (nodes, FEATURES))
    if part == "tsocial":
        infer = jax.jit(
            lambda weights, features, graph: nnx.merge(graphdef, weights)(
                features, (graph,)
            )
        )
        run = lambda: jax.block_until_ready(infer(weights, features, graph))
    else:
        labels = jax.random.bernoulli(jax.random.key(1), 0.05, (nodes,)).astype(
            jnp.int32
        )
        batch = Batch(features, (graph,), jnp.arange(nodes), labels)
        optimizer = optax.adam(1e-3)
        state = optimizer.init(weights)

        @jax.jit
        def train(weights, state, batch):
            loss, slope = jax.value_and_grad(
                lambda weights: weighted_loss(
                    nnx.merge(graphdef, weights), batch, jax.random.key(2)
                )[0]
            )(weights)
            change, state = optimizer.update(slope, state)
            return optax.apply_updates(weights, change), state, loss

        run = lambda: jax.block_until_ready(train(weights, state, batch))
    times = timed(run, repeats + 1)
    return {
        **row,
        "first_call_s": times[0],
        "seconds": float(np.median(times[1:])),
        "process_mib": peak(),
    }


# ------------------------------------------------------------------------------------
# side by side


def alone(*arguments) -> dict:
    run = subprocess.run(
        [sys.executable, __file__, "--alone", *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    if run.returncode:
        raise SystemExit(f"{arguments}: exit {run.returncode}\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def operator(scale, repeats, rounds) -> dict:
    names = ["compiled", "xla", *(["dgl"] if find_spec("dgl") else [])]
    if "dgl" not in names:
        print(
            "dgl is not installed (pip install 'et_nbdev[dgl]', Python 3.11): measured"
            " without it"
        )
    graph, nodes, senders, _ = operator_graph(scale)
    report = {
        "graph": graph,
        "nodes": nodes,
        "edges": len(senders),
        "heads": HEADS,
        "width": WIDTH,
        "repeats": repeats,
        "rounds": rounds,
    }
    for kind in ("update", "training"):
        runs = {name: [] for name in names}
        for _ in range(rounds):  # in turn, so that a slow moment hits all of them
            for name in names:
                runs[name].append(alone("operator", name, kind, scale, repeats))
        for name in names[1:]:
            np.testing.assert_allclose(
                runs[name][0]["norms"],
                runs["compiled"][0]["norms"],
                rtol=1e-4,
                err_msg=f"{name} computes something else",
            )
        times = {
            name: np.concatenate([run["seconds"] for run in runs[name]])
            for name in names
        }
        row = {
            name: {
                "seconds": float(np.median(times[name])),
                "spread": [float(np.quantile(times[name], q)) for q in (0.1, 0.9)],
                **{
                    key: float(np.median([run[key] for run in runs[name]]))
                    for key in ("first_call_s", "peak_mib", "process_mib")
                },
            }
            for name in names
        }
        report[kind] = {
            **row,
            "speed_over": {
                name: row[name]["seconds"] / row["compiled"]["seconds"]
                for name in names[1:]
            },
            "memory_over": {
                name: row["compiled"]["peak_mib"] / row[name]["peak_mib"]
                for name in names[1:]
            },
        }
        for name in names:
            print(
                f"{kind:<9} {name:<9} {1e3 * row[name]['seconds']:8.1f} ms   peak"
                f" {row[name]['peak_mib']:7.0f} MiB (process"
                f" {row[name]['process_mib']:.0f})"
                + (
                    f"   × {report[kind]['speed_over'][name]:.1f}"
                    if name != "compiled"
                    else ""
                ),
                flush=True,
            )
    report["versions"] = {
        name: version(name) for name in ("dgl", "torch", "numba") if find_spec(name)
    }
    return report


def scaling(scale, repeats, rounds) -> list:
    rows = []
    for edges in (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000):
        rows.append(
            alone(
                "scaling",
                max(1000, int(edges * scale)),
                max(1, min(repeats, 10**8 // edges)),
            )
        )
        print(
            "{edges:>12,} edges  {seconds:9.4f} s  {ns:6.1f} ns an edge  built in"
            " {build_s:.2f} s".format(
                **rows[-1], ns=1e9 * rows[-1]["seconds"] / rows[-1]["edges"]
            ),
            flush=True,
        )
    return rows


def model(part, scale, repeats, rounds) -> dict:
    nodes, edges, flat = {
        "tsocial": (5_781_065, 146_211_016, 0.5),
        "tfinance": (39_357, 42_445_086, 0.2),
    }[part]
    nodes = max(200, int(nodes * (scale if part == "tsocial" else scale**0.5)))
    edges = int(edges * scale)
    with tempfile.TemporaryDirectory() as folder:
        make = (
            f"import numpy as np, graphs; s, r = graphs.power_law({nodes}, {edges},"
            f" flat={flat}); [np.save(f'{folder}/{{n}}.npy', x) for n, x in"
            f" (('senders', s), ('receivers', r), ('nodes', {nodes}))]"
        )
        subprocess.run(
            [sys.executable, "-c", make], check=True, cwd=Path(__file__).parent
        )
        row = alone("model", part, folder, max(1, repeats // 3))
    print(
        f"{part}: {row['nodes']:,} nodes, {row['edges']:,} edges, at most"
        f" {row['most_neighbors']:,} a node: {row['seconds']:.2f} s (the first time,"
        f" with compiling, {row['first_call_s']:.2f} s), built in {row['build_s']:.1f}"
        f" s, peak of the process {row['process_mib'] / 1024:.2f} GiB",
        flush=True,
    )
    return row


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts",
        nargs="*",
        choices=["operator", "scaling", "tsocial", "tfinance", []],
        help="which to run (all)",
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent.parent / "results/benchmarks/graphs.json",
    )
    parser.add_argument("--alone", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.alone:
        what, *rest = args.alone
        if what == "operator":
            result = operator_alone(rest[0], rest[1], float(rest[2]), int(rest[3]))
        elif what == "scaling":
            result = scaling_alone(int(rest[0]), int(rest[1]))
        else:
            result = model_alone(rest[0], rest[1], int(rest[2]))
        return print(json.dumps(result))
    from et_nbdev.training import atomic_write, provenance

    report = json.loads(args.out.read_text()) if args.out.exists() else {}
    for part in args.parts or ["operator", "scaling", "tsocial", "tfinance"]:
        run = {"operator": operator, "scaling": scaling}.get(part) or (
            lambda *rest: model(part, *rest)
        )
        report[part] = run(args.scale, args.repeats, args.rounds)
        report["provenance"] = {
            **report.get("provenance", {}),
            part: {**provenance(), "scale": args.scale},
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(args.out) as path:
            path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
