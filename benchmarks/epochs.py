"""One epoch of training on whole graphs: the Energy Transformer and GIN of this library
beside the same GIN in PyTorch Geometric and in DGL.

Each way trains on the same graphs in batches of 32, with AdamW and the gradient's norm
clipped. An epoch is what cross-validation does between two looks at the validation
graphs: batches are put together, padded where the way needs it, and learned from. All
take turns within one process; medians and the middle 80 % are kept, with ratios to the
library's GIN. Then each way trains for one epoch in a process of its own, for the peak
memory, and how much of it came after the packages and the graphs were loaded. Ways
whose package is not installed are left out. Writes results/benchmarks/epochs.json. Run
it on a machine that does nothing else; the set is found as
`et_nbdev.graph.sets.load_graphs` says.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from et_nbdev.graph.batches import EdgeLists, cached_positions, learn_encoding
from et_nbdev.graph.classify import GraphClassifier
from et_nbdev.graph.crossval import FitConfig, programs, taken_apart
from et_nbdev.graph.sets import load_graphs
from et_nbdev.training.checkpoint import atomic_write, provenance
from et_nbdev.training.loop import TrainState, clipped_adamw

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "experiments"))

from graph_classification import grid
from memory import peak
from set_rivals import GIN, GINConfig

FIT = FitConfig(batch_size=32)
GIN_CONFIG = GINConfig(64, 5, 0.5)
PACKAGES = {"GIN of PyTorch Geometric": "torch_geometric", "GIN of DGL": "dgl"}


def ours(make, config, supply, sizes, ids):
    "A function that trains for one epoch, and the number of parameters."
    model = make(*sizes, config, rngs=nnx.Rngs(0))
    graphdef, params, rest = taken_apart(model)
    moments = clipped_adamw(0.0, 0.0, 0.0).init(params)
    state = [TrainState(params, moments, jnp.zeros((), jnp.int32), rest)]
    numbers = dict(weight_decay=FIT.weight_decay, clip=FIT.clip)
    numbers = jax.tree.map(jnp.float32, numbers | dict(share=1 / FIT.batch_size))
    step = partial(programs(graphdef)[0], numbers=numbers, key=jax.random.key(0))

    def epoch(number):
        for part in supply.plan(ids, 0, number):
            batch = supply.load(part), np.float32(FIT.lr)
            state[0], metrics = step(state[0], batch)
        return float(metrics["loss"])

    return epoch, sum(p.size for p in jax.tree.leaves(params))


def torch_gin(graphs, features, ids, package):
    "The same for GIN in PyTorch, its layers and its batches made by `package`."
    import torch
    from torch import nn

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    D, F, C = GIN_CONFIG.hidden, features.shape[1], graphs.num_classes
    labels = torch.from_numpy(graphs.labels.astype(np.int64))
    nodes = [slice(*graphs.start[i : i + 2]) for i in ids]
    edges = [slice(*graphs.edge_start[i : i + 2]) for i in ids]
    pieces = [
        (
            torch.from_numpy(features[n]),
            torch.from_numpy(graphs.senders[e].astype(np.int64) - n.start),
            torch.from_numpy(graphs.receivers[e].astype(np.int64) - n.start),
            labels[i : i + 1],
        )
        for i, n, e in zip(ids, nodes, edges)
    ]
    if package == "torch_geometric":
        from torch_geometric.data import Data
        from torch_geometric.loader import DataLoader
        from torch_geometric.nn import GINConv, global_add_pool

        conv = lambda layers: GINConv(layers, train_eps=True)
        pool = lambda graph, h: global_add_pool(h, graph.batch)
        near = lambda layer, graph, h: layer(h, graph.edge_index)
        data = [Data(x=x, edge_index=torch.stack([s, r]), y=y) for x, s, r, y in pieces]
        loader = DataLoader(data, FIT.batch_size, shuffle=True)
        unpack = lambda graph: (graph, graph.x, graph.y)
    else:
        import dgl
        from dgl.dataloading import GraphDataLoader
        from dgl.nn.pytorch import GINConv, SumPooling

        pool_nodes = SumPooling()
        conv = lambda layers: GINConv(layers, "sum", learn_eps=True)
        pool = lambda graph, h: pool_nodes(graph, h)
        near = lambda layer, graph, h: layer(graph, h)
        data = []
        for x, s, r, y in pieces:
            graph = dgl.graph((s, r), num_nodes=len(x))
            graph.ndata["x"] = x
            data.append((graph, y[0]))
        loader = GraphDataLoader(data, batch_size=FIT.batch_size, shuffle=True)
        unpack = lambda batch: (batch[0], batch[0].ndata["x"], batch[1])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = [F, *[D] * (GIN_CONFIG.num_layers - 1)]
            halves = lambda i: (nn.Linear(i, D), nn.BatchNorm1d(D), nn.ReLU())
            self.layers = nn.ModuleList(
                conv(nn.Sequential(*halves(i), *halves(D))) for i in sizes[:-1]
            )
            self.heads = nn.ModuleList(nn.Linear(i, C) for i in sizes)
            self.drop = nn.Dropout(GIN_CONFIG.dropout)

        def forward(self, graph, h):
            logits = self.drop(self.heads[0](pool(graph, h)))
            for layer, head in zip(self.layers, self.heads[1:]):
                h = near(layer, graph, h)
                logits = logits + self.drop(head(pool(graph, h)))
            return logits

    model = Model()
    settings = dict(lr=FIT.lr, betas=(0.9, 0.99), weight_decay=FIT.weight_decay)
    optimizer = torch.optim.AdamW(model.parameters(), **settings)

    def epoch(_):
        for batch in loader:
            graph, h, y = unpack(batch)
            loss = nn.functional.cross_entropy(model(graph, h), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), FIT.clip)
            optimizer.step()
        return float(loss.detach())

    return epoch, sum(p.numel() for p in model.parameters())


def prepared(data: str, count: int):
    "The graphs of an epoch, and a function for each way that makes its training."
    graphs = load_graphs(data)
    rng = np.random.default_rng(0)
    ids = np.sort(rng.permutation(len(graphs))[:count])
    encoding = learn_encoding(graphs, np.arange(len(graphs)))
    features, e = encoding(graphs)
    sizes = features.shape[1], graphs.num_classes
    found, plain = (grid(name, 15)[0].model for name in ("et", "et-eigenvectors"))
    supply = {
        kind: EdgeLists(
            graphs,
            encoding,
            cached_positions(graphs, found.num_positions, kind),
            FIT.batch_size,
        )
        for kind in ("eigenvectors", "returns")
    }

    def et(*sizes_config, rngs):
        return GraphClassifier(*sizes_config, num_edge_features=e.shape[1], rngs=rngs)

    ways = {
        "Energy Transformer": partial(ours, et, found, supply["returns"], sizes, ids),
        "Energy Transformer, the paper's terms": partial(
            ours, et, plain, supply["eigenvectors"], sizes, ids
        ),
        "GIN": partial(ours, GIN, GIN_CONFIG, supply["returns"], sizes, ids),
    }
    for name, package in PACKAGES.items():
        if find_spec(package):
            ways[name] = partial(torch_gin, graphs, features, ids, package)
    return graphs, ids, ways


def measure_alone(name: str, data: str, count: int) -> dict:
    "Peak memory in MiB: of this process, and before it made the model."
    jax.block_until_ready(jnp.ones(8) + 1)  # the runtime itself
    if name in PACKAGES:
        __import__(PACKAGES[name])
    _, _, ways = prepared(data, count)
    before = peak()
    epoch, _ = ways[name]()
    epoch(0)
    return {"peak_mib": peak(), "before_mib": before}


def alone(name: str, data: str, count: int) -> dict:
    "The same, of a new process."
    command = [sys.executable, __file__, "--alone", name]
    command += ["--data", data, "--graphs", str(count)]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(run.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", default="NCI1", help="a name of the TU collection (default: NCI1)"
    )
    parser.add_argument(
        "--graphs", type=int, default=2048, help="graphs in an epoch (default: 2048)"
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="epochs of each way (default: 9)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent.parent / "results/benchmarks/epochs.json",
    )
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        return print(json.dumps(measure_alone(args.alone, args.data, args.graphs)))
    try:
        graphs, ids, ways = prepared(args.data, args.graphs)
    except FileNotFoundError as e:
        print(f"epochs.py: {e}\nGoing on with rings, whose graphs are all small.")
        args.data = "rings"
        graphs, ids, ways = prepared(args.data, args.graphs)
    for name, package in PACKAGES.items():
        if name not in ways:
            print(f"epochs.py: {package} is not installed, so {name} is left out")
    ways = {name: make() for name, make in ways.items()}

    seconds = {name: [] for name in ways}
    first = {}
    for number in range(args.rounds + 2):  # two to compile and to warm up
        for name, (epoch, _) in ways.items():
            start = time.perf_counter()
            epoch(number)
            took = time.perf_counter() - start
            if number == 0:
                first[name] = took
            elif number > 1:
                seconds[name].append(took)
    median = {name: float(np.median(all)) for name, all in seconds.items()}
    memory = {name: alone(name, args.data, args.graphs) for name in ways}
    result = {
        "data": args.data,
        "graphs": len(ids),
        "mean_nodes": float(graphs.sizes[ids].mean()),
        "batch_size": FIT.batch_size,
        "seconds": median,
        "spread": {n: np.quantile(s, [0.1, 0.9]).tolist() for n, s in seconds.items()},
        "first_epoch": first,
        "over_gin": {name: s / median["GIN"] for name, s in median.items()},
        "parameters": {name: int(size) for name, (_, size) in ways.items()},
        "memory": memory,
        "rounds": args.rounds,
        "versions": {
            package: version(package)
            for package in ("torch", *PACKAGES.values())
            if find_spec(package)
        },
        **provenance(),
    }
    with atomic_write(args.out) as path:
        path.write_text(json.dumps(result, indent=2) + "\n")
    for name, s in median.items():
        own = memory[name]["peak_mib"] - memory[name]["before_mib"]
        print(
            f"{name:<38}{s:8.2f} s an epoch{result['over_gin'][name]:8.2f} × GIN",
            end="",
        )
        print(f"{own:8.0f} MiB more, {memory[name]['peak_mib']:6.0f} in all")


if __name__ == "__main__":
    main()
