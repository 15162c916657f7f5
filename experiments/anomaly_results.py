"""Tune, train and score every classifier that notebook 35 compares, and freeze what
came out in results/anomaly.

Each line of a table (a graph, a share of training nodes, a classifier) is a file of its
own; a run that was stopped goes on where it was. Lines shared among processes:
    python experiments/anomaly_results.py --part 0/2 &
    python experiments/anomaly_results.py --part 1/2
Other graphs, with their files where load_graph looks for them:
    python experiments/anomaly_results.py --data amazon yelp tfinance --ratios 0.01 0.4
On published splits, tuned by average precision (on mines, ours with three trials):
    python experiments/anomaly_results.py --data minesweeper --ratios official \
        --seeds 10 --trials 8 --epochs 200
    python experiments/anomaly_results.py --data tolokers --ratios official \
        --seeds 10 --trials 8
On card transactions, whose splits look ahead, in the same way:
    python experiments/anomaly_results.py --data transactions --ratios time --trials 8
Changes to the Energy Transformer (other steps, its parts taken away) start from what
its own line found, and means over several starts from what theirs did, so that comes
first.
"""

import json
import os
import re
import time
from dataclasses import replace
from functools import cache, partial
from itertools import count, product
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from graph_rivals import NETWORKS, fit_trees
from looking_ahead import transactions
from runs import add_part, keep, options
from sklearn.neighbors import kneighbors_graph

from et_nbdev.commands import as_command
from et_nbdev.graph.anomaly import (
    AnomalyConfig,
    AnomalyEnergyTransformer,
    weighted_loss,
)
from et_nbdev.graph.data import (
    DATASETS,
    Graph,
    Split,
    from_relations,
    load_graph,
    split,
)
from et_nbdev.graph.nodes import Batch, aggregate, held_out, scaled, train_classifier
from et_nbdev.training import OptimConfig

# What the search may choose from. Every neural network shares the first line, every
# classifier gets the same number of trials.
NEURAL = dict(
    scale=["standard", "rank", "both"],
    lr=[2e-3, 5e-3, 1e-2, 2e-2],
    weight_decay=[0.0, 0.01, 0.1],
    dropout=[0.0, 0.2, 0.5],
)
WIDTHS = NEURAL | dict(hidden=[32, 64, 128])
SPACES = {
    "mlp": WIDTHS | dict(num_layers=[2, 3]),
    "gcn": WIDTHS | dict(num_layers=[2, 3]),
    "bwgnn": WIDTHS | dict(order=[1, 2, 3, 4]),
    "transformer": WIDTHS | dict(num_layers=[1, 2], num_heads=[1, 2, 4]),
    "et": NEURAL
    | dict(dim=[32, 64, 128], num_memories=[64, 128, 256], num_heads=[1, 2])
    | dict(head_dim=[32, 64], steps=[1, 2, 3, 4], step_size=[0.5, 1.0]),
    "forest": dict(scale=["standard"], n_estimators=[300], max_depth=[None, 16, 8])
    | dict(min_samples_leaf=[1, 2, 5, 10], max_features=["sqrt", 0.5, 1.0]),
    "boosting": dict(scale=["standard"], n_estimators=[100, 300])
    | dict(learning_rate=[0.03, 0.1, 0.3], max_depth=[2, 4, 6])
    | dict(subsample=[0.7, 1.0], reg_lambda=[1.0, 10.0]),
}
# On a board of mines, which is large, so models may be deeper; eight trials by hand, on
# validation nodes of its first split, said that more steps, more of training and the
# terms `both` of graph_terms.py help ours
MINES = {
    "gcn": dict(num_layers=[2, 3, 5]),
    "bwgnn": dict(order=[1, 2, 4, 6]),
    "transformer": dict(num_layers=[1, 2, 4]),
    "et": dict(steps=[2, 4, 8], step_size=[0.25, 0.5, 1.0])
    | dict(terms=["as-found", "both"], dim=[64], num_memories=[128])
    | dict(num_heads=[2, 4], head_dim=[16, 32])
    | dict(weight_decay=[0.0, 0.01], dropout=[0.0, 0.2]),
}


class Line(NamedTuple):
    "A line of the table."

    kind: str  # classifier
    hops: int = 0  # how far away neighbors are whose mean features join a node's own
    relations: str = "merged"  # what becomes of several kinds of edges
    labels: bool = False  # those of training nodes are features, too


LINES = (
    {kind: Line(kind) for kind in SPACES}
    | {f"{kind}-2hop": Line(kind, 2) for kind in ("mlp", "bwgnn", "forest", "boosting")}
    | {"et-2hop": Line("et", 2)}
    # these two only where there are several kinds of edges
    | {f"et-{pool}": Line("et", relations=pool) for pool in ("max", "concat")}
    | {f"{kind}-2hop-labels": Line(kind, 2, labels=True) for kind in ("et", "bwgnn")}
)
# Lines that have the mean probability of several models, with other initial weights;
# the setting is that of the line itself
STARTS = 3
MEANS = ("et-2hop", "et-2hop-labels", "bwgnn-2hop-labels")
MEANS = {f"{line}-mean": line for line in MEANS}
ALIKE = "-alike"  # after a graph's name: edges of a second kind, by `withalike`
CARDS = "transactions"  # and after it, the number of a split
BATCH = 8  # trials drawn at a time
# Appendix D.1 and the public commands (without their dropout in the memory): one head
# as wide as a token, K = 2D, T = 2, learned β
PAPER = dict(scale="standard", degree=False, lr=1e-3, weight_decay=0.0, dropout=0.0)
PAPER |= dict(dim=64, num_memories=128, num_heads=1, head_dim=64, steps=2)
PAPER |= dict(step_size=1.0)
# Changes to the configuration that the trials found for the Energy Transformer; nothing
# is tuned again (the paper's setting leaves nothing of what they found)
ABLATIONS = {
    "et-paper": PAPER,
    "et-no-memories": dict(num_memories=0),
    "et-no-attention": dict(num_heads=0),
}
DEPTHS = {f"et T = {T}": dict(steps=T) for T in (1, 2, 4)}  # of mines
CHANGES = ABLATIONS | DEPTHS


def draws(space: dict, number: int) -> list[dict]:
    "`number` different points of the space; a larger number begins with the same ones."
    points, chosen = list(product(*space.values())), {}  # an ordered set
    number = min(number, len(points))
    for seed in count():
        choice = np.random.default_rng(seed).choice
        some = choice(len(points), min(BATCH, len(points)), replace=False)
        chosen |= dict.fromkeys(some)
        if len(chosen) >= number:
            return [dict(zip(space, points[i])) for i in list(chosen)[:number]]


def withalike(graph: Graph, k: int = 8) -> Graph:
    """The graph with edges of two kinds: its own, and edges between each node and the k
    nodes whose standardized features are nearest.
    """
    near = kneighbors_graph(scaled(graph, degree=False, scale="standard"), k).tocoo()
    edges = {"own": graph.edges, "alike": (near.col, near.row)}
    of = graph.features, graph.labels, f"{graph.name}{ALIKE}"
    return from_relations(edges, *of).symmetric()


@cache
def ahead(number: int) -> tuple[Graph, Split]:
    """A split of transactions that looks ahead. Labels fall into ten periods; a period
    is tested, the one before validates, all earlier ones train, and of the later ones
    there is nothing in the graph. Splits 0 to 4 test the last five.
    """
    periods = np.array_split(transactions()[0].labeled, 10)[: number + 6]
    parts = Split(np.concatenate(periods[:-2]), *periods[-2:])
    return transactions(parts.test[-1] + 1)[0], parts


@cache
def graph_of(name: str):
    if name.startswith(CARDS):
        return ahead(int(name.removeprefix(CARDS) or 4))[0]  # the last has them all
    if name.endswith(ALIKE):
        return withalike(load_graph(name.removesuffix(ALIKE)))
    return load_graph(name)


@cache
def features_of(name: str, hops: int, scale: str, degree: bool = True):
    graph = graph_of(name)
    if hops:  # the degree is a feature like the others, and neighbors have one too
        own = np.column_stack([graph.features, np.log1p(graph.degrees)])
        graph = replace(graph, features=own.astype(np.float32))
        graph, degree = replace(graph, features=aggregate(graph, hops)), False
    return scaled(graph, degree, scale)


@cache
def edges_of(name: str, kind: str, relations: str):
    if kind == "et":
        return AnomalyEnergyTransformer.prepare(graph_of(name), relations)
    return NETWORKS[kind].prepare(graph_of(name))


def with_labels(features, labels, known) -> np.ndarray:
    "Features and two more columns, which name the class of the `known` nodes."
    shown = np.zeros((len(features), 2), np.float32)
    shown[known, labels[known]] = 1
    return np.column_stack([features, shown])


def completion_loss(model, batch: Batch, key):
    """The weighted loss of a random half of the training nodes, whose labels are taken
    out of the features; the other half keeps its own.
    """
    hiding, dropping = jax.random.split(key)
    hide = jax.random.bernoulli(hiding, shape=batch.nodes.shape)
    shown = jnp.ones(len(batch.features)).at[batch.nodes].set(jnp.where(hide, 0.0, 1.0))
    features = batch.features.at[:, -2:].multiply(shown[:, None])
    logits = model(features, batch.edges, rngs=nnx.Rngs(dropout=dropping))
    log_p = jax.nn.log_softmax(logits[batch.nodes])
    anomalous = batch.labels == 1
    count = lambda nodes: jnp.sum(jnp.where(nodes, 1.0, 0.0))
    # a half of few nodes may have no anomalous one
    sigma = count(hide & ~anomalous) / jnp.maximum(count(hide & anomalous), 1.0)
    weight = jnp.where(hide, jnp.where(anomalous, sigma, 1.0), 0.0)
    own = jnp.where(anomalous, log_p[:, 1], log_p[:, 0])
    return -jnp.sum(weight * own) / jnp.sum(weight), {}


def transformer(features, options: dict, kinds: int, start: int):
    "The Energy Transformer of a setting, not the rival of that name."
    own, made = dict(options), dict(kinds=kinds, rngs=nnx.Rngs(start))
    if (terms := own.pop("terms", "as-found")) != "as-found":
        from graph_terms import Detector  # which needs what is above

        return Detector(features.shape[1], terms, AnomalyConfig(**own), start)
    return AnomalyEnergyTransformer(features.shape[1], AnomalyConfig(**own), **made)


def optim_of(options: dict, epochs: int) -> OptimConfig:
    "The optimizer of a setting, which loses its entries."
    rates = {name: options.pop(name) for name in ("lr", "weight_decay")}
    few = dict(steps=epochs, warmup=min(5, epochs - 1), lr_floor=0.0, b2=0.999)
    return OptimConfig(**few, **rates)


def trained(
    data, parts, line: Line, config: dict, start: int, features, epochs: int, by: str
):
    """Probabilities of all nodes, after one training from the initial weights `start`;
    those `by` which validation nodes have the highest score.
    """
    graph, options = graph_of(data), dict(config)
    if line.kind in ("forest", "boosting"):
        of = features, graph.labels, parts.train, start
        return fit_trees(line.kind, *of, **options)
    if line.labels:
        features = with_labels(features, graph.labels, parts.train)
    optim = optim_of(options, epochs)
    edges = edges_of(data, line.kind, line.relations)
    if line.kind == "et":
        options["relations"] = line.relations
        model = transformer(features, options, len(edges), start)
    else:
        model = NETWORKS[line.kind](features.shape[1], **options, rngs=nnx.Rngs(start))
    loss = completion_loss if line.labels else weighted_loss
    of = model, graph, parts, features, edges, optim, loss
    return train_classifier(*of, seed=start, chosen_by=by, progress=False).p


def evaluate(data, ratio, line, config: dict, seed: int, epochs: int, starts=1) -> dict:
    """One split: scores on validation and test nodes of the mean probability after
    training from that many starts.
    """
    parts, of, options = parts_of(data, ratio, seed), LINES[line], dict(config)
    graph = graph_of(data := f"{data}{seed}" if ratio == "time" else data)
    given = options.pop("scale"), options.pop("degree", True)
    features, begin = features_of(data, of.hops, *given), time.perf_counter()
    at = range(seed, seed + 1000 * starts, 1000)
    how = features, epochs, "macro_f1" if is_share(ratio) else "auprc"
    p = [trained(data, parts, of, options, start, *how) for start in at]
    _, validation, test = held_out(np.mean(p, 0), graph.labels, parts)
    spent = {"seconds": time.perf_counter() - begin}
    return {"seed": seed, "validation": validation, "test": test} | spent


def slug(line: str) -> str:
    "A line's name as part of a file's: 'et T = 4' becomes et-t-4."
    return "-".join(re.findall(r"[a-z0-9.]+", line.lower()))


def merit(ratio: float | str, run: dict) -> float:
    """What the search maximizes on validation nodes: the mean of macro-F1 and AUROC, or
    on published splits and those that look ahead average precision.
    """
    found = run["validation"]
    if is_share(ratio):
        return (found["macro_f1"] + found["auroc"]) / 2
    return found["auprc"]


def is_share(ratio: float | str) -> bool:
    return not isinstance(ratio, str)


def parts_of(data: str, ratio: float | str, seed: int) -> Split:
    "A split at random or ahead, or the published one of that number, from ET_DATA."
    if ratio == "time":
        return ahead(seed)[1]
    if is_share(ratio):
        return split(graph_of(data).labels, ratio, seed)
    path = Path(os.environ["ET_DATA"], f"graphs/anomaly/{data}_splits.npz")
    masks = np.load(path, allow_pickle=False)
    found = (masks[f"{part}_masks"][seed] for part in ("train", "val", "test"))
    return Split(*map(np.flatnonzero, found))


def base(full: Path) -> dict:
    """The setting that changes and means start from: what the trials of a line found.
    Raises ValueError until they have.
    """
    found = json.loads(full.read_text()) if full.exists() else {}
    if "config" not in found:
        raise ValueError(f"argument --lines: this needs another line first ({full})")
    return found["config"]


def fill(path: Path, record: dict, planned: list[dict], seeds: int, of, starts: int):
    """Trials on the split of seed 0, then the best one on all splits; what the file
    already holds is not run again. `of` are a graph, a ratio, a line and epochs.
    """
    data, ratio, line, epochs = of

    def add(to: str, config: dict, seed: int):
        run = evaluate(data, ratio, line, config, seed, epochs, starts)
        record[to].append({"config": config, **run})
        keep(path, record)
        told = f"{len(record[to]):>2}  validation {merit(ratio, run):.4f}"
        print(f"{path.stem:<34} {to:<6} {told}  {run['seconds']:.0f} s", flush=True)

    tried = [run["config"] for run in record["trials"]]
    if tried[: len(planned)] != planned[: len(tried)]:
        raise ValueError(f"argument --out: {path} holds trials of another search")
    for config in planned[len(tried) :]:
        add("trials", config, 0)
    if record["trials"]:
        best = max(record["trials"], key=partial(merit, ratio))
        record["config"] = best["config"]
    best = record["config"]
    # others are of a time with fewer trials
    record["runs"] = [run for run in record["runs"] if run["config"] == best]
    for seed in range(len(record["runs"]), seeds):
        add("runs", best, seed)


def parsed(argv: list[str] | None):
    parser, lines = options(__doc__, "anomaly"), [*LINES, *MEANS, *CHANGES]
    add = parser.add_argument
    several = partial(add, nargs="+", metavar="NAME")
    told = f"of {', '.join(DATASETS)}, or one of these and {ALIKE}, which adds edges"
    told += " between nodes with similar features"
    names = [*DATASETS, *(name + ALIKE for name in DATASETS), CARDS]
    usual = ["amazon-upu", "tolokers", "digits-relations"]
    several("--data", choices=names, default=usual, help=told)
    told = "shares of the labeled nodes to train on; official: the published splits;"
    told += f" time: splits that look ahead, for {CARDS} only"
    ratio = lambda text: text if text in ("official", "time") else float(text)
    several("--ratios", type=ratio, default=[0.01, 0.4], help=told)
    told, usual = f"of {', '.join(lines)}", [*LINES, *MEANS, *ABLATIONS]
    several("--lines", choices=lines, default=usual, help=told)
    told = "configurations that each classifier may try"
    add("--trials", type=int, default=2 * BATCH, help=told)
    told = "splits, each with its own initial weights"
    add("--seeds", type=int, default=5, help=told)
    told = "full-batch steps of the neural networks"
    add("--epochs", type=int, default=100, help=told)
    add_part(parser)
    args = parser.parse_args(argv)
    ahead = *(d == CARDS for d in args.data), *(r == "time" for r in args.ratios)
    if any(ahead) and not (all(ahead) and args.seeds <= 5):
        told = f"only {CARDS} has splits by time, and no others, and five of them"
        parser.error(f"argument --ratios: {told}")
    return args


def work(args, data: str, ratio: float | str, line: str):
    "One line of the table."
    share = f"{ratio:g}" if is_share(ratio) else ratio
    file = lambda line: args.out / f"{data}-{share}-{slug(line)}.json"
    path, record = file(line), {"data": data, "ratio": ratio, "line": line}
    record |= {"epochs": args.epochs, "trials": [], "runs": []}
    if path.exists():
        record = json.loads(path.read_text())
    if record["epochs"] != (own := args.epochs):
        told = f"{path} was made with {record['epochs']}, got {own}; set another --out"
        raise ValueError(f"argument --epochs: {told}")
    trained_as, planned = "et" if line in CHANGES else MEANS.get(line, line), []
    if trained_as == line:
        kind = LINES[line].kind
        given = MINES.get(kind, {}) if data == "minesweeper" else {}
        planned = draws(SPACES[kind] | given, args.trials)
    elif CHANGES.get(line) is PAPER:
        record["config"] = PAPER
    else:
        record["config"] = base(file(trained_as)) | CHANGES.get(line, {})
    of = data, ratio, trained_as, args.epochs
    fill(path, record, planned, args.seeds, of, STARTS if line in MEANS else 1)


def main(argv: list[str] | None = None):
    args = parsed(argv)
    whole = lambda line: line not in LINES or LINES[line].relations == "merged"
    tasks = product(args.data, args.ratios, args.lines)
    with as_command("anomaly_results"):
        tasks = [t for t in tasks if whole(t[2]) or graph_of(t[0]).relations]
        for task in tasks[args.part]:
            work(args, *task)


if __name__ == "__main__":
    main()
