"""What other terms, steps and sizes are worth to the classifier of whole graphs.

The model is the Energy Transformer with the returns of random walks, read off the sum
of the nodes after every block: four blocks of width 32, one step of α = 0.3 each. Every
variant changes something on top of that, or on top of `both`:

    normalized-heads    queries and keys divided by their root mean square in the head
    signs               thresholds in the memory, and a quarter of it repels
    both                these two
    learned-step        α > 0 of each block is learned
    quiet, more-noise   no noise on the gradient in training, or five times as much
    pictures            more noise, and what pictures gain from: a size of steps for
                        every channel, no weight decay, eight heads of four entries

and rates, steps and widths. Each is trained on the first fold of a set, and judged by
its validation graphs alone; no test graph is scored.

    python experiments/set_terms.py                              # all of NCI1
    python experiments/set_terms.py --data ENZYMES --only quiet  # one

Each run is one file in results/set-terms, and one whose file stands is not made again.
"""

import time
from dataclasses import asdict, replace
from functools import partial

from flax import nnx
from runs import compare, parameters_of

from et_nbdev.block import Block
from et_nbdev.dynamics import descend
from et_nbdev.graph.classify import ClassifyConfig, GraphClassifier
from et_nbdev.graph.crossval import FitConfig, deal, fit_classifier, parts, seed_of
from et_nbdev.graph.energy import EdgeAttention
from et_nbdev.graph.sets import POSITIONS as KINDS
from et_nbdev.graph.sets import Supply, learn_encoding, load_graphs
from et_nbdev.memory import HopfieldMemory, SignedMemory
from et_nbdev.norm import EnergyLayerNorm
from et_nbdev.solvers import LearnedEuler, LearnedMetric

EPOCHS = {"NCI1": 40, "ENZYMES": 60}
POSITIONS = 15

FOUND = dict(dim=32, num_heads=4, head_dim=8, num_memories=128)
FOUND |= dict(num_positions=POSITIONS, positions="returns", readout="every")
FOUND |= dict(blocks=4, steps=1, step_size=0.3, filter_size=1, noise=0.02)
FOUND |= dict(lr=3e-3, weight_decay=0.05)
FOUND |= dict(normalize=False, signs=False, learned=False, channels=False)
BOTH = dict(normalize=True, signs=True)
VARIANTS = {
    "as-found": {},
    "normalized-heads": dict(normalize=True),
    "signs": dict(signs=True),
    "both": BOTH,
    "learned-step": dict(learned=True),
    "quiet": dict(noise=0.0),
    "both-rate-6e-3": dict(**BOTH, lr=6e-3),
    "both-wider": dict(**BOTH, dim=64, num_memories=256),
    "both-wide-64-memories": dict(**BOTH, dim=64, num_memories=64),
    "both-wide-128-memories": dict(**BOTH, dim=64, num_memories=128),
    "both-step-1": dict(**BOTH, step_size=1.0),
    "both-dropout": dict(**BOTH, dropout=0.3),
    "both-more-noise": dict(**BOTH, noise=0.1),
    "pictures": BOTH
    | dict(channels=True, weight_decay=0.0, num_heads=8, head_dim=4, noise=0.1),
}


def block(c: dict, rngs: nnx.Rngs) -> Block:
    "A block; the weights of attention are drawn first."
    of = dict(normalize=c["normalize"])
    if c["normalize"]:
        of["beta"] = nnx.Param(4 / c["head_dim"] ** 0.5)
    heads = EdgeAttention(c["dim"], c["num_heads"], c["head_dim"], **of, rngs=rngs)
    signed = partial(SignedMemory, negative=0.25)
    memory = signed if c["signs"] else HopfieldMemory
    recall = memory(c["dim"], c["num_memories"], rngs=rngs)
    return Block(EnergyLayerNorm(c["dim"]), attention=heads, memory=recall)


class Varied(GraphClassifier):
    "The classifier with blocks, steps and noise of a variant."

    def __init__(self, sizes, c: dict, rngs: nnx.Rngs):
        config = {f: c[f] for f in ClassifyConfig.__dataclass_fields__ if f in c}
        config = ClassifyConfig(**config)
        of = sizes.num_features, sizes.num_classes, config
        edges = dict(num_edge_features=sizes.num_edge_features)
        super().__init__(*of, **edges, rngs=rngs)
        self.blocks = nnx.List(block(c, rngs) for _ in range(config.blocks))
        T, alpha = config.steps, config.step_size
        if c["channels"]:  # which take half of it at first
            solver = lambda: LearnedMetric(T, config.dim, 2 * alpha)
        else:
            solver = lambda: LearnedEuler(T, alpha)
        alone = c["learned"] or c["channels"]
        alone = [solver() for _ in range(config.blocks * alone)]
        self.solvers = nnx.List(alone) if alone else None

    def __call__(self, batch, rngs=None):
        if self.solvers is None:
            return super().__call__(batch, rngs)
        x = self.tokens(batch)
        pairs, passed = self.pairs(x, batch), [x]
        for one, own in zip(self.blocks, self.solvers):
            end = descend(one, passed[-1], self.config.steps, solver=own, **pairs)[0]
            passed.append(end)
        return self.read(passed, batch, rngs)


def run(data: str, variant: str, seed: int) -> dict:
    "Train once on the first fold; what the run's file holds."
    began = time.perf_counter()
    c = FOUND | VARIANTS[variant]
    graphs = load_graphs(data, None)
    part = parts(deal(graphs.labels), 0)
    hidden = graphs.labels.copy()
    hidden[part.test] = -1
    graphs = replace(graphs, labels=hidden)
    positions = KINDS[c["positions"]](graphs, POSITIONS)
    encoding = learn_encoding(graphs, part.train)
    supply = Supply(graphs, encoding, positions, 32)
    fit = FitConfig(EPOCHS[data], lr=c["lr"], weight_decay=c["weight_decay"])
    own = seed_of(seed, 0)
    model = Varied(supply, c, nnx.Rngs(own))
    fitted = fit_classifier(model, supply, part.train, part.validation, fit, own)
    accuracy = [row["validation_accuracy"] for row in fitted.history]
    row = {"data": data, "variant": variant, "seed": seed, "validation": accuracy}
    row |= {"best_validation_accuracy": max(accuracy), "config": c, "fit": asdict(fit)}
    row |= {"loss": [row["loss"] for row in fitted.history]}
    seconds = time.perf_counter() - began
    return row | {"parameters": parameters_of(model), "seconds": seconds}


def told(row: dict) -> str:
    return f"{row['best_validation_accuracy']:.1%}  {row['seconds']:.0f} s"


if __name__ == "__main__":
    compare(__doc__, "set-terms", run, told, EPOCHS, VARIANTS, [0])
