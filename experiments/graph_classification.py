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
from functools import partial
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
POSITIONS = 15  # of a node


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
    et = dict(dim=32, num_heads=4, head_dim=8, num_memories=128, blocks=4)
    et = partial(ClassifyConfig, **et, num_positions=k)
    more = dict(positions="returns", readout="every", filter_size=1, step_size=0.3)
    more |= dict(normalize_heads=True, beta=2**0.5, learn_beta=True)  # 4/√Y
    more = partial(et, **more, negative_memories=0.25)
    far = dict(filter_size=1, step_size=1.0), dict(filter_size=3, step_size=0.3)
    noise, kinds = (dict(noise=0.02), dict(noise=0.1)), (False, True)
    dropout, rates = (dict(dropout=0.0), dict(dropout=0.5)), (1e-3, 1e-2)
    make, changes, rates = {
        "et": (more, noise, (2e-3, 4e-3)),
        "et-eigenvectors": (et, far, (1e-3, 3e-3)),
        "gin": (GINConfig, dropout, rates),
        "gin-returns": (PlacedConfig, dropout, rates),
        "agnostic": (
            AgnosticConfig,
            [dict(hidden=128, per_node=k) for k in kinds],
            rates,
        ),
    }[model]
    fit = {} if model.startswith("et") else dict(weight_decay=0.0)
    fits = [FitConfig(lr=lr, **fit) for lr in rates]
    return [Candidate(make(**change), fit) for change in changes for fit in fits]


def fixed_folds(name: str, labels: np.ndarray, k: int) -> np.ndarray:
    "The folds of a set; ten of them have to be those that are kept, where they are."
    fold, key = deal(labels, k), f"{name}/10"
    kept = json.loads(FOLDS.read_text()) if k == 10 and FOLDS.exists() else {}
    if key in kept and kept[key] != "".join(map(str, fold)):
        told = f"the folds kept for {key} are not those of these labels"
        sys.exit(f"{FOLDS}: {told}; is this the set as published?")
    return fold


def parse(argv=None):
    parser = options(__doc__, "graph-classification")
    add = parser.add_argument
    told = f"rings, one of {', '.join(TU_NAMES)}, or another name of the TU collection"
    add("--data", required=True, help=told)
    add("--model", required=True, choices=sorted(MAKE))
    add("--folds", type=int, default=10, help="outer folds in all")
    add_part(parser)
    told = "folder for the weights of each fold's winner, MODEL-NAME-F.safetensors"
    add("--weights", type=Path, help=told)
    told = "of initial weights and of the order of graphs; the folds do not change"
    add("--seed", type=int, default=0, help=told)
    for f in fields(FitConfig):
        kind = f.type if callable(f.type) else {"int": int, "float": float}[f.type]
        told = f"{f.metadata['help']} (instead of the grid's)"
        add(f"--{f.name}", type=kind, help=told)
    args = parser.parse_args(argv)
    if args.folds < 3 or args.folds != 10 and args.out.resolve() == OUT:
        told = "results/graph-classification holds ten folds a set"
        told = f"{told}; at least 3 others go elsewhere, with --out, got {args.folds}"
        parser.error(f"argument --folds: {told}")
    return args


def main(argv=None):
    args = parse(argv)
    with as_command("graph_classification"):
        run(args)


def run(args):
    graphs = load_graphs(args.data, None)
    fold = fixed_folds(args.data, graphs.labels, args.folds)
    given = {f.name: getattr(args, f.name) for f in fields(FitConfig)}
    changes = {name: value for name, value in given.items() if value is not None}
    grids = grid(args.model, POSITIONS)
    candidates = [c._replace(fit=replace(c.fit, **changes)) for c in grids]
    placed = args.model.startswith("et") or args.model == "gin-returns"
    k = POSITIONS if placed else 0  # the others have no use for positions

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
        folds=[*range(args.folds)][args.part],
        k=k,
        seed=args.seed,
        out=args.out / args.data / args.model,
        progress=sys.stdout.isatty(),
        keep=keep,
    )
    for row in rows:
        best = row["candidates"][row["chosen"]]
        scores = row["test_accuracy"], best["validation_accuracy"]
        told = "fold {}: test {:.1%}, hold-out {:.1%}, candidate {}, epoch {}"
        which = row["chosen"] + 1, best["epoch"]
        print(told.format(row["fold"], *scores, *which))
    if rows:
        print(f"{args.data}, {args.model}: {summary(rows)} %")


if __name__ == "__main__":
    main()
