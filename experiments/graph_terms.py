"""What other terms in the energy, and other steps, are worth to the detector of
anomalous nodes.

The model is the Energy Transformer in the setting that its sixteen trials found
(results/anomaly). Each variant changes terms of its block, or how the descent steps,
and nothing is tuned again:

    as found             energy attention along the edges, and the memory
    normalized heads     queries and keys divided by their root mean square in the head
    signs                thresholds in the memory, and a quarter of it repels
    both                 these two
    learned steps        α_t and a gate for every token, which start at the α found

Each is trained on the splits 0, 1 and 2 with 40 % of the labels; seeds of the weights
are those of the splits. Validation nodes judge; scores on test nodes are kept beside.

    python experiments/graph_terms.py                            # all runs
    python experiments/graph_terms.py --only both --seeds 1  # some

Each run is one file in results/graph-terms, and one whose file stands is not made again.
"""

import json
import time
from functools import partial

import anomaly_results as results
import jax.numpy as jnp
from flax import nnx
from image_pair import GatedEuler
from runs import RESULTS, compare

from et_nbdev.block import Block
from et_nbdev.dynamics import Euler, descend
from et_nbdev.graph import anomaly
from et_nbdev.graph.data import split
from et_nbdev.graph.energy import EdgeAttention
from et_nbdev.graph.nodes import held_out, train_classifier
from et_nbdev.memory import HopfieldMemory, SignedMemory
from et_nbdev.norm import EnergyLayerNorm

RATIO, EPOCHS = 0.4, 100
FOUND = {"tolokers": "et-2hop", "amazon-upu": "et"}  # whose setting is taken


def block(variant: str, c: anomaly.AnomalyConfig, rngs: nnx.Rngs) -> Block:
    "The block of a variant; weights are drawn in the order of its terms."
    beta = nnx.Param(c.head_dim**-0.5) if c.beta is None else c.beta
    of = dict(normalize=variant in ("normalized-heads", "both"), rngs=rngs)
    heads = EdgeAttention(c.dim, c.num_heads, c.head_dim, beta, **of)
    memory = HopfieldMemory
    if variant in ("signs", "both"):
        memory = partial(SignedMemory, negative=0.25)
    recall = memory(c.dim, c.num_memories, rngs=rngs)
    return Block(EnergyLayerNorm(c.dim), attention=heads, memory=recall)


VARIANTS = "as-found normalized-heads signs both learned-steps".split()


class Detector(anomaly.AnomalyEnergyTransformer):
    "The detector of a variant, for edges of one kind."

    def __init__(
        self, num_features: int, variant: str, config: anomaly.AnomalyConfig, seed
    ):
        super().__init__(num_features, config, rngs=nnx.Rngs(seed))
        self.blocks = nnx.List([block(variant, config, nnx.Rngs(seed))])
        sizes = config.steps, 2 * config.step_size, config.dim  # the gate starts at ½
        self.learned = GatedEuler(*sizes) if variant == "learned-steps" else None

    def __call__(self, features, edges, *, rngs=None):
        c, (block,), (kind,) = self.config, self.blocks, edges
        solver = self.learned or Euler(c.step_size)
        x = self.encode(features)
        end = descend(block, x, c.steps, solver=solver, **anomaly.along(block, kind))[0]
        read = jnp.concatenate([block.norm(x), block.norm(end)], -1)
        read = self.dropout(read, deterministic=rngs is None, rngs=rngs)
        return self.down(nnx.relu(self.up(read)))


def found(data: str) -> dict:
    "The setting that the trials chose."
    kept = RESULTS / f"anomaly/{data}-{RATIO:g}-{FOUND[data]}.json"
    return json.loads(kept.read_text())["config"]


def run(data: str, variant: str, seed: int) -> dict:
    "Train once on a split; what the run's file holds."
    began, line, config = time.perf_counter(), FOUND[data], found(data)
    options = dict(config)
    graph, edges = results.graph_of(data), results.edges_of(data, "et", "merged")
    given = options.pop("scale"), options.pop("degree", True)
    features = results.features_of(data, results.LINES[line].hops, *given)
    optim = results.optim_of(options, EPOCHS)
    parts = split(graph.labels, RATIO, seed)
    model = Detector(features.shape[1], variant, anomaly.AnomalyConfig(**options), seed)
    of = model, graph, parts, features, edges, optim, anomaly.weighted_loss
    p = train_classifier(*of, seed=seed, progress=False).p
    _, validation, test = held_out(p, graph.labels, parts)
    row = {"data": data, "variant": variant, "seed": seed, "line": line}
    row |= {"validation": validation, "test": test, "config": config}
    return row | {"seconds": time.perf_counter() - began}


def told(row: dict) -> str:
    auroc = row["validation"]["auroc"]
    return f"validation AUROC {auroc:.4f}  {row['seconds']:.0f} s"


if __name__ == "__main__":
    compare(__doc__, "graph-terms", run, told, FOUND, VARIANTS, (0, 1, 2), len(FOUND))
