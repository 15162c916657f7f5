"""One epoch of training on whole graphs: the Energy Transformer and GIN of this library
beside the same GIN in PyTorch Geometric and in DGL, where they are installed.

Each way trains on the same graphs in batches of 32, with AdamW and the gradient's norm
clipped. An epoch is what cross-validation does between two looks at the validation
graphs: batches are put together, padded where the way needs it, and learned from. Ratios
are to the library's GIN.
"""

import json
import os
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
from timing import alone, compared, options, peak, write

from et_nbdev.graph.classify import GraphClassifier
from et_nbdev.graph.crossval import FitConfig, programs, taken_apart
from et_nbdev.graph.sets import POSITIONS, Supply, learn_encoding, load_graphs
from et_nbdev.training import TrainState, clipped_adamw

from graph_classification import grid  # isort: skip
from set_rivals import GIN, GINConfig  # isort: skip

FIT = FitConfig(batch_size=32)
GIN_CONFIG = GINConfig(64, 5, 0.5)
PACKAGES = {"GIN of PyTorch Geometric": "torch_geometric", "GIN of DGL": "dgl"}


def ours(make, config, supply, sizes, ids):
    "A function that trains for one epoch."
    from flax import nnx

    graphdef, params, rest = taken_apart(make(*sizes, config, rngs=nnx.Rngs(0)))
    moments = clipped_adamw(0.0, 0.0, 0.0).init(params)
    state = [TrainState(params, moments, jnp.zeros((), jnp.int32), rest)]
    numbers = dict(weight_decay=FIT.weight_decay, clip=FIT.clip)
    numbers = jax.tree.map(jnp.float32, numbers | dict(share=1 / FIT.batch_size))
    step = partial(programs(graphdef)[0], numbers=numbers, key=jax.random.key(0))
    number = iter(range(10**6))

    def epoch():
        for part in supply.plan(ids, 0, next(number)):
            batch = supply.load(part), np.float32(FIT.lr)
            state[0], metrics = step(state[0], batch)
        return float(metrics["loss"])

    return epoch


def geometric(pieces):
    "Layer, its call, sum over nodes and batches (graph, h, labels) of PyG."
    import torch
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GINConv, global_add_pool

    data = [Data(x=x, edge_index=torch.stack([s, r]), y=y) for x, s, r, y in pieces]
    loader = DataLoader(data, FIT.batch_size, shuffle=True)
    conv = partial(GINConv, train_eps=True)
    near = lambda layer, graph, h: layer(h, graph.edge_index)
    pool = lambda graph, h: global_add_pool(h, graph.batch)
    return conv, near, pool, lambda: ((graph, graph.x, graph.y) for graph in loader)


def dgl_layers(pieces):
    "The same of DGL."
    import dgl
    from dgl.dataloading import GraphDataLoader
    from dgl.nn.pytorch import GINConv, SumPooling

    data = [(dgl.graph((s, r), num_nodes=len(x)), x, y[0]) for x, s, r, y in pieces]
    for graph, x, _ in data:
        graph.ndata["x"] = x
    data = [(graph, y) for graph, _, y in data]
    loader = GraphDataLoader(data, batch_size=FIT.batch_size, shuffle=True)
    conv = lambda layers: GINConv(layers, "sum", learn_eps=True)
    near = lambda layer, graph, h: layer(graph, h)
    return conv, near, SumPooling(), lambda: ((g, g.ndata["x"], y) for g, y in loader)


def torch_gin(graphs, features, ids, layers_of):
    "The same for GIN in PyTorch, its layers and its batches made by a package."
    import torch
    from torch import nn

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    pieces = []
    for i in ids:
        edges = slice(*graphs.edge_start[i : i + 2])
        nodes = slice(*graphs.start[i : i + 2])
        ends = (graphs.senders[edges], graphs.receivers[edges])
        ends = [torch.from_numpy(e.astype(np.int64) - nodes.start) for e in ends]
        label = torch.tensor([int(graphs.labels[i])])
        pieces.append((torch.from_numpy(features[nodes]), *ends, label))
    conv, near, pool, batches = layers_of(pieces)
    D, F, C = GIN_CONFIG.hidden, features.shape[1], graphs.num_classes
    sizes = [F, *[D] * (GIN_CONFIG.num_layers - 1)]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            halves = lambda i: (nn.Linear(i, D), nn.BatchNorm1d(D), nn.ReLU())
            each = (conv(nn.Sequential(*halves(i), *halves(D))) for i in sizes[:-1])
            self.layers = nn.ModuleList(each)
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

    def epoch():
        for graph, h, y in batches():
            loss = nn.functional.cross_entropy(model(graph, h), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), FIT.clip)
            optimizer.step()
        return float(loss.detach())

    return epoch


def prepared(data: str, count: int):
    "The graphs of an epoch, and a function for each way that makes its training."
    graphs = load_graphs(data)
    ids = np.sort(np.random.default_rng(0).permutation(len(graphs))[:count])
    encoding = learn_encoding(graphs, np.arange(len(graphs)))
    features, e = encoding(graphs)
    sizes = features.shape[1], graphs.num_classes
    found, plain = (grid(name, 15)[0].model for name in ("et", "et-eigenvectors"))
    supply = {}
    for kind in ("eigenvectors", "returns"):
        positions = POSITIONS[kind](graphs, found.num_positions)
        supply[kind] = Supply(graphs, encoding, positions, FIT.batch_size)
    et = partial(GraphClassifier, num_edge_features=e.shape[1])
    kinds = {
        "Energy Transformer": (et, found, supply["returns"]),
        "Energy Transformer, the paper's terms": (et, plain, supply["eigenvectors"]),
        "GIN": (GIN, GIN_CONFIG, supply["returns"]),
    }
    ways = {name: partial(ours, *kind, sizes, ids) for name, kind in kinds.items()}
    for name, package in PACKAGES.items():
        if find_spec(package):
            layers = {"dgl": dgl_layers}.get(package, geometric)
            ways[name] = partial(torch_gin, graphs, features, ids, layers)
    return graphs, ids, ways


def measure_alone(name: str, data: str, count: str) -> dict:
    "Peak memory in MiB: of this process, and before it made the model."
    jax.block_until_ready(jnp.ones(8) + 1)  # the runtime itself
    if name in PACKAGES:
        __import__(PACKAGES[name])
    ways, before = prepared(data, int(count))[2], peak()
    ways[name]()()
    return {"peak_mib": peak(), "before_mib": before}


def main():
    parser = options(__doc__, "epochs", data="NCI1", graphs=2048, rounds=9)
    args = parser.parse_args()
    if args.alone:
        return print(json.dumps(measure_alone(*args.alone)))
    graphs, ids, ways = prepared(args.data, args.graphs)
    made = {name: make() for name, make in ways.items()}
    packages = ("torch", *PACKAGES.values())
    result = {
        "data": args.data,
        "graphs": len(ids),
        "batch_size": FIT.batch_size,
        **compared(made, args.rounds, "GIN", warm=2),
        "memory": {name: alone(name, args.data, args.graphs) for name in ways},
        "versions": {p: version(p) for p in packages if find_spec(p)},
    }
    write(args.out, result)


if __name__ == "__main__":
    main()
