"""Cross-validate a graph classifier, and keep every fold in
results/graph-classification/NAME/MODEL/fold-F.json.

A fold that has its file is not computed again, so a stopped run goes on when it is
called again, and several processes may share the folds:
    python experiments/graph_classification.py --data NCI1 --model gin --part 0/2 &
    python experiments/graph_classification.py --data NCI1 --model gin --part 1/2
A folder holds the folds of one run; another number of folds needs another one:
--folds 5 --out FOLDER.
"""

import json
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from runs import RESULTS, add_part, options
from set_rivals import GIN, Agnostic, AgnosticConfig, GINConfig

from et_nbdev.commands import as_command
from et_nbdev.graph.classify import CONFIGS, ClassifyConfig, GraphClassifier
from et_nbdev.graph.crossval import Candidate, FitConfig, cross_validate, deal, summary
from et_nbdev.graph.sets import TU_NAMES, load_graphs
from et_nbdev.training import save_checkpoint

OUT = RESULTS / "graph-classification"
# NAME/10: the fold of each graph, a digit; read by notebook 40, compared here, written
# by nobody
FOLDS = OUT / "folds.json"


def et(config, sizes, rngs: nnx.Rngs) -> nnx.Module:
    own = sizes.num_features, sizes.num_classes
    edges = dict(num_edge_features=sizes.num_edge_features)
    return GraphClassifier(*own, config, **edges, rngs=rngs)


def rival(Model):
    return lambda config, sizes, rngs: Model(
        sizes.num_features, sizes.num_classes, config, rngs=rngs
    )


@dataclass(frozen=True)
class PlacedConfig(GINConfig):
    "A GIN that is given positions; they are computed from the graph, as for `et`."

    positions: str = "returns"


class PlacedGIN(nnx.Module):
    "A GIN whose node features are joined by the positions of the nodes."

    def __init__(self, config: PlacedConfig, sizes, rngs: nnx.Rngs):
        width = sizes.num_features + sizes.num_positions
        self.gin = GIN(width, sizes.num_classes, config, rngs=rngs)

    def __call__(self, batch, rngs: nnx.Rngs | None = None):
        both = jnp.concatenate([batch.features, batch.positions], -1)
        return self.gin(batch._replace(features=both), rngs)


MAKE = {
    "et": et,  # returns of random walks, read off the sum of the nodes, and more terms
    "et-eigenvectors": et,  # eigenvectors, read off CLS, and the terms of the paper
    "et-paper": et,  # the paper's sizes, step and schedule, and its literal formula
    "gin": rival(GIN),
    "gin-returns": PlacedGIN,  # the same, with the positions of `et` as features
    "agnostic": rival(Agnostic),
}


def grid(model: str, k: int) -> list[Candidate]:
    """Four candidates for every model: the same budget of choice. The paper's setting
    stands alone, with nothing to choose.
    """
    if model == "et-paper":
        c = CONFIGS["paper"]
        fit = FitConfig(c.epochs, c.batch_size, c.lr, c.warmup, c.weight_decay)
        return [Candidate(replace(c.model, num_positions=k), fit)]
    fit = lambda lr: FitConfig(lr=lr, weight_decay=0.0)
    rates = 1e-3, 1e-2
    if model.startswith("gin"):
        make = GINConfig if model == "gin" else PlacedConfig
        configs = [make(64, 5, dropout) for dropout in (0.0, 0.5)]
        return [Candidate(c, fit(lr)) for c in configs for lr in rates]
    if model == "agnostic":
        configs = [AgnosticConfig(128, per_node) for per_node in (False, True)]
        return [Candidate(c, fit(lr)) for c in configs for lr in rates]
    sizes = dict(dim=32, num_heads=4, head_dim=8, num_memories=128, blocks=4)
    sizes["num_positions"] = k
    if model == "et-eigenvectors":
        changes = dict(filter_size=1, step_size=1.0), dict(filter_size=3, step_size=0.3)
        rates = 1e-3, 3e-3
    else:
        sizes |= dict(positions="returns", readout="every", filter_size=1)
        sizes |= dict(normalize_heads=True, beta=2**0.5, learn_beta=True)  # 4/√Y
        sizes |= dict(negative_memories=0.25, step_size=0.3)
        changes = dict(noise=0.02), dict(noise=0.1)
        rates = 2e-3, 4e-3
    configs = [ClassifyConfig(**sizes, **change) for change in changes]
    return [Candidate(c, FitConfig(lr=lr)) for c in configs for lr in rates]


def fixed_folds(name: str, labels: np.ndarray, k: int) -> np.ndarray:
    "The folds of a set; ten of them have to be those that are kept, where they are."
    fold, key = deal(labels, k), f"{name}/10"
    kept = json.loads(FOLDS.read_text()) if k == 10 and FOLDS.exists() else {}
    if key in kept and kept[key] != "".join(map(str, fold)):
        sys.exit(
            f"{FOLDS}: the folds kept for {key} are not those of these labels; is this"
            " the set as published?"
        )
    return fold


def parse(argv=None):
    parser = options(__doc__, "graph-classification")
    add = parser.add_argument
    error = lambda name, said: parser.error(f"argument --{name}: {said}")
    told = f"rings, one of {', '.join(TU_NAMES)}, or another name of the TU collection"
    add("--data", required=True, help=told)
    add("--root", type=Path, help="folder to look in for it, before ET_DATA")
    add("--model", required=True, choices=sorted(MAKE))
    add("--folds", type=int, default=10, help="outer folds in all")
    add("--which", help="only these outer folds, such as 0,1,2")
    add_part(parser)
    told = "folder for the weights of each fold's winner, MODEL-NAME-F.safetensors"
    add("--weights", type=Path, help=told)
    add("--positions", type=int, default=15, help="k, positions of a node")
    told = "tables in buckets, or lists of edges, which large graphs need"
    add("--layout", choices=("dense", "edges"), default="dense", help=told)
    add("--buckets", type=int, default=4, help="shapes of tables at most")
    told = "of initial weights and of the order of graphs; the folds do not change"
    add("--seed", type=int, default=0, help=told)
    for f in fields(FitConfig):
        kind = f.type if callable(f.type) else {"int": int, "float": float}[f.type]
        told = f"{f.metadata['help']} (instead of the grid's)"
        add(f"--{f.name}", type=kind, help=told)
    args = parser.parse_args(argv)
    if args.folds < 3:
        error("folds", f"expected at least 3, got {args.folds}")
    if args.folds != 10 and args.out.resolve() == OUT:
        kept = "results/graph-classification holds ten folds a set"
        error("folds", f"{kept}; put {args.folds} elsewhere, with --out")
    every = range(args.folds)
    try:
        args.which = [int(f) for f in args.which.split(",")] if args.which else [*every]
    except ValueError:
        error("which", f"expected folds such as 0,1,2, got {args.which!r}")
    if not set(args.which) <= set(every):
        error("which", f"expected folds from 0 to {every[-1]}, got {args.which}")
    return args


def main(argv=None):
    args = parse(argv)
    with as_command("graph_classification"):
        run(args)


def run(args):
    graphs = load_graphs(args.data, args.root)
    fold = fixed_folds(args.data, graphs.labels, args.folds)
    given = {f.name: getattr(args, f.name) for f in fields(FitConfig)}
    changes = {name: value for name, value in given.items() if value is not None}
    grids = grid(args.model, args.positions)
    candidates = [c._replace(fit=replace(c.fit, **changes)) for c in grids]
    placed = args.model.startswith("et") or args.model == "gin-returns"
    k = args.positions if placed else 0  # the others have no use for positions

    def keep(f, model):
        if args.weights:
            path = args.weights / f"{args.model}-{args.data}-{f}.safetensors"
            state = nnx.to_pure_dict(nnx.state(model))
            save_checkpoint(path, state, {"data": args.data, "fold": f})

    print(graphs, flush=True)
    rows = cross_validate(
        MAKE[args.model],
        graphs,
        fold,
        candidates,
        folds=args.which[args.part],
        k=k,
        num_buckets=args.buckets,
        layout=args.layout,
        seed=args.seed,
        out=args.out / args.data / args.model,
        progress=sys.stdout.isatty(),
        keep=keep,
    )
    for row in rows:
        chosen = row["candidates"][row["chosen"]]
        accuracy, held_out = row["test_accuracy"], chosen["validation_accuracy"]
        print(
            f"fold {row['fold']}: test {accuracy:.1%}, hold-out {held_out:.1%},", end=""
        )
        print(f" candidate {row['chosen'] + 1}, epoch {chosen['epoch']}")
    if rows:
        print(f"{args.data}, {args.model}: {summary(rows)} %")


if __name__ == "__main__":
    main()
