"""Attention on graphs: speed and memory of its operator beside XLA and DGL, how its cost
grows with the graph, and two graphs of real size.

    operator   one update and one training step at the size of tolokers (the graph itself
               where ET_DATA names it), by the compiled kernels, by XLA and by DGL's
               message passing on torch: processes of their own, taking turns; medians,
               and peak memory beyond what libraries and their machine code take
    scaling    one update from 10⁴ to 10⁸ edges, power-law degrees
    tsocial    every node classified by the whole model (D 64, H 1, T 2) at the size of
               T-Social: 5.78 M nodes, 146 M directed edges, power-law degrees

Every part that is run replaces its entry in the results. `--scale 0.01` tries everything
at a hundredth of the size.
"""

import gc
import json
import os
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from timing import alone, medians, options, peak, seconds, spreads, write

HEADS, WIDTH = 2, 32  # of the operator
FEATURES = 10  # a node
SOCIAL = 5_781_065, 146_211_016  # nodes, edges


def power_law(nodes: int, edges: int):
    """Both directions of `edges`/2 different pairs; a node of rank r is drawn with a
    probability that falls as 1/√r.
    """
    rng, keys, half = np.random.default_rng(0), np.zeros(0, np.int64), edges // 2
    draw = lambda more: (nodes * rng.random(more) ** 2).astype(np.int64)
    while len(keys) < half:
        more = int(1.1 * (half - len(keys))) + 1000
        a, b = draw(more), draw(more)
        fresh = (np.minimum(a, b) * nodes + np.maximum(a, b))[a != b]
        keys = np.unique(np.concatenate([keys, fresh]))
    if len(keys) > half:
        keys = np.delete(keys, rng.choice(len(keys), len(keys) - half, replace=False))
    a, b = (keys // nodes).astype(np.int32), (keys % nodes).astype(np.int32)
    shuffle = rng.permutation(nodes).astype(np.int32)  # hubs anywhere, not at the front
    a, b = shuffle[a], shuffle[b]
    return np.concatenate([a, b]), np.concatenate([b, a])


def operator_graph(scale: float):
    data = os.environ.get("ET_DATA")
    if data and scale == 1:
        path = Path(data) / "graphs/anomaly/tolokers.npz"
        with np.load(path, allow_pickle=False) as file:
            ends = file["senders"], file["receivers"]
            return "tolokers", len(file["labels"]), *ends
    nodes = max(100, int(11_758 * scale))
    return "power law", nodes, *power_law(nodes, int(1_038_000 * scale))


# --- in a process of its own each ---


def normal(nodes: int, count: int) -> list[np.ndarray]:
    rng, shape = np.random.default_rng(0), (nodes, HEADS, WIDTH)
    return [rng.normal(size=shape).astype(np.float32) for _ in range(count)]


def dgl_operator(nodes, senders, receivers, training):
    "u_dot_v, edge_softmax, u_mul_e along the edges, and u_mul_e against them."
    os.environ.setdefault("DGLBACKEND", "pytorch")
    import dgl
    import dgl.function as fn
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield peak()
    # faster than int64
    ends = [torch.from_numpy(e.astype(np.int32)) for e in (senders, receivers)]
    graph = dgl.graph(tuple(ends), num_nodes=nodes)
    turned = dgl.reverse(graph)  # the same edges in the same order
    for g in (graph, turned):
        g.create_formats_()
    Q, K, a, b = map(torch.from_numpy, normal(nodes, 4))
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

    from et_nbdev.graph.energy import EdgeIndex
    from et_nbdev.graph.kernels import neighbor_match

    jax.block_until_ready(jnp.ones(8) + 1)
    # compiles, if need be: other libraries bring machine code with their import
    EdgeIndex([0], [1], 2, backend=backend)
    yield peak()
    edges = EdgeIndex(senders, receivers, nodes, backend=backend)
    Q, K, a, b = map(jnp.asarray, normal(nodes, 4))
    Q = Q * WIDTH**-0.5
    match = lambda Q, K, edges: neighbor_match(edges, Q, K).sum()
    update = jax.grad(match, (0, 1))

    def loss(Q, K, edges):
        as_query, as_key = update(Q, K, edges)
        return jnp.sum(as_query * a) + jnp.sum(as_key * b)

    call = jax.jit(jax.grad(loss, (0, 1)) if training else update)
    yield lambda: jax.block_until_ready(call(Q, K, edges))


def operator_alone(name: str, kind: str, scale: str, repeats: str) -> dict:
    graph, training = operator_graph(float(scale))[1:], kind == "training"
    if name == "dgl":
        steps = dgl_operator(*graph, training)
    else:
        steps = jax_operator(*graph, training, name)
    before, run = next(steps), next(steps)
    first, result = seconds(run), run()
    return {
        "first_call_s": first,
        "seconds": [seconds(run) for _ in range(int(repeats))],
        "peak_mib": peak() - before,
        "process_mib": peak(),
        "norms": [float(np.linalg.norm(np.asarray(r, np.float64))) for r in result],
    }


def built(senders, receivers, nodes: int):
    "The index of a graph, and the seconds that it takes."
    from et_nbdev.graph.energy import EdgeIndex

    made = []
    took = seconds(lambda: made.append(EdgeIndex(senders, receivers, nodes)))
    return made[0], took


def scaling_alone(edges: str, repeats: str) -> dict:
    import jax

    from et_nbdev.graph.kernels import neighbor_match

    nodes = max(int(edges) // 25, 300)
    graph, took = built(*power_law(nodes, int(edges)), nodes)
    draw = lambda i: jax.random.normal(jax.random.key(i), (nodes, 1, 64)) / 8**i
    Q, K = draw(0), draw(1)
    match = lambda Q, K, graph: neighbor_match(graph, Q, K).sum()
    call = jax.jit(jax.value_and_grad(match, (0, 1)))
    run = lambda: jax.block_until_ready(call(Q, K, graph))
    run()
    row = {"edges": graph.num_edges, "nodes": nodes, "backend": graph.backend}
    times = [seconds(run) for _ in range(int(repeats))]
    return row | {"build_s": took, "seconds": float(np.median(times))}


def graph_alone(scale: str, folder: str) -> dict:
    "Draw a graph into a folder, which takes more memory than the model."
    nodes, edges = (max(200, int(n * float(scale))) for n in SOCIAL)
    for name, ends in zip(("senders", "receivers"), power_law(nodes, edges)):
        np.save(f"{folder}/{name}.npy", ends)
    return {"nodes": nodes}


def model_alone(folder: str, nodes: str, repeats: str) -> dict:
    "All nodes classified by the whole model."
    import jax
    from flax import nnx

    from et_nbdev.graph.anomaly import AnomalyConfig, AnomalyEnergyTransformer

    nodes, ends = int(nodes), ("senders", "receivers")
    graph, took = built(*(np.load(f"{folder}/{end}.npy") for end in ends), nodes)
    gc.collect()
    config = AnomalyConfig(dim=64, num_heads=1, head_dim=64, num_memories=128, steps=2)
    row = {"nodes": nodes, "edges": graph.num_edges, "build_s": took}
    model = AnomalyEnergyTransformer(FEATURES, config, rngs=nnx.Rngs(0))
    graphdef, weights = nnx.split(model)
    features = jax.random.normal(jax.random.key(0), (nodes, FEATURES))
    call = jax.jit(lambda w, x, graph: nnx.merge(graphdef, w)(x, (graph,)))
    run = lambda: jax.block_until_ready(call(weights, features, graph))
    first, *times = [seconds(run) for _ in range(int(repeats) + 1)]
    times = {"first_call_s": first, "seconds": float(np.median(times))}
    return row | times | {"process_mib": peak()}


# --- side by side ---


def operator(scale, repeats, rounds) -> dict:
    names = ["compiled", "xla", *(["dgl"] if find_spec("dgl") else [])]
    graph, nodes, senders, _ = operator_graph(scale)
    report = {"graph": graph, "nodes": nodes, "edges": len(senders), "heads": HEADS}
    report |= {"width": WIDTH, "repeats": repeats, "rounds": rounds}
    for kind in ("update", "training"):
        runs = {name: [] for name in names}
        for _ in range(rounds):  # in turn, so that a slow moment hits all of them
            for name in names:
                runs[name].append(alone("operator", name, kind, scale, repeats))
        for name in names:
            same = runs[name][0]["norms"], runs["compiled"][0]["norms"]
            np.testing.assert_allclose(*same, rtol=1e-4, err_msg=name)
        times = {n: np.concatenate([r["seconds"] for r in runs[n]]) for n in names}
        median, spread, row = medians(times), spreads(times), {}
        for name in names:
            row[name] = {"seconds": median[name], "spread": spread[name]}
            for key in ("first_call_s", "peak_mib", "process_mib"):
                row[name][key] = float(np.median([run[key] for run in runs[name]]))
            took, held = 1e3 * median[name], row[name]["peak_mib"]
            print(f"{kind:<9}{name:<9}{took:8.1f} ms{held:8.0f} MiB", flush=True)
        ours, over = row["compiled"], names[1:]
        row["speed_over"] = {n: row[n]["seconds"] / ours["seconds"] for n in over}
        row["memory_over"] = {n: ours["peak_mib"] / row[n]["peak_mib"] for n in over}
        report[kind] = row
    packages = ("dgl", "torch", "numba")
    report["versions"] = {p: version(p) for p in packages if find_spec(p)}
    return report


def scaling(scale, repeats, rounds) -> list:
    rows = []
    for edges in (10**4, 10**5, 10**6, 10**7, 10**8):
        some = max(1, min(repeats, 10**8 // edges))
        rows.append(row := alone("scaling", max(1000, int(edges * scale)), some))
        each = 1e9 * row["seconds"] / row["edges"]
        told = f"{row['edges']:>12,} edges {row['seconds']:9.4f} s"
        print(f"{told} {each:6.1f} ns an edge", flush=True)
    return rows


def social(scale, repeats, rounds) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        nodes = alone("graph", scale, folder)["nodes"]
        row = alone("model", folder, nodes, max(1, repeats // 3))
    told = f"tsocial: {row['edges']:,} edges, {row['seconds']:.2f} s"
    print(f"{told}, {row['process_mib']:.0f} MiB", flush=True)
    return row


def main():
    from et_nbdev.training import provenance

    parts = {"operator": operator, "scaling": scaling, "tsocial": social}
    parser = options(__doc__, "graphs", repeats=7, rounds=3, scale=1.0)
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="which (all)")
    args = parser.parse_args()
    report = json.loads(args.out.read_text()) if args.out.exists() else {}
    came = report.pop("provenance", {})
    for part in args.parts or parts:
        report[part] = parts[part](args.scale, args.repeats, args.rounds)
        came[part] = {**provenance(), "scale": args.scale}
        write(args.out, report | {"provenance": came})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--alone"]:  # without what JAX takes, for DGL
        what, *words = sys.argv[2:]
        print(json.dumps(globals()[f"{what}_alone"](*words)))
    else:
        main()
