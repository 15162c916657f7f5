"""What the classifier of whole graphs has to beat: a model that ignores the edges, and
one that sees all that message passing can see. Both take the batches of
`et_nbdev.graph.sets`, and are in training where they get `rngs`.

experiments/graph_classification.py and benchmarks/epochs.py train them, and
nbs/40_classification_results.ipynb tells what they are.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


def sum_of_nodes(x, batch):
    "The sum over the nodes of each graph that are present: (B, D)."
    x = jnp.where(batch.present[:, None], x, jnp.zeros_like(x))
    return jax.ops.segment_sum(x, batch.graph, len(batch.labels))


def sum_of_neighbors(h, batch):
    # padding edges join padding to itself
    options = dict(indices_are_sorted=True)
    return jax.ops.segment_sum(h[batch.senders], batch.receivers, len(h), **options)


def drop(x, rate: float, rngs: nnx.Rngs | None):
    return nnx.Dropout(rate)(x, deterministic=rngs is None, rngs=rngs)


@dataclass(frozen=True)
class AgnosticConfig:
    hidden: int = 64  # width of the hidden layers
    per_node: bool = False  # embed each node before the sum (deep set) or not
    dropout: float = 0.0


class Agnostic(nnx.Module):
    r"""The structure-agnostic baseline of Errica et al. (2020): an MLP on $\sum_C x_C$,
    or with `per_node` on $\sum_C \mathrm{ReLU}(W_0x_C+b_0)$.
    """

    def __init__(
        self, num_features: int, num_classes: int, config=AgnosticConfig(), **options
    ):
        self.config, hidden = config, config.hidden
        linear = lambda i, o: nnx.Linear(i, o, **options)
        self.embed = linear(num_features, hidden) if config.per_node else None
        self.first = linear(hidden if config.per_node else num_features, hidden)
        self.second = linear(hidden, num_classes)

    def __call__(self, batch, rngs: nnx.Rngs | None = None):
        x = batch.features
        x = x if self.embed is None else jax.nn.relu(self.embed(x))
        x = jax.nn.relu(self.first(sum_of_nodes(x, batch)))
        return self.second(drop(x, self.config.dropout, rngs))


@dataclass(frozen=True)
class GINConfig:
    hidden: int = 64  # D, width of a state
    num_layers: int = 5  # the features count as the first
    dropout: float = 0.5  # of each layer's logits
    norm: str = "batch"  # the only one; results name it


class Isomorphism(nnx.Module):
    r"""One layer: two linear maps with a batch norm over the present nodes and ReLU
    after each, on $(1+\epsilon)h_C + \sum_{B\in N(C)} h_B$.
    """

    def __init__(self, size_in: int, hidden: int, *, param_dtype=jnp.float32, rngs):
        own = dict(param_dtype=param_dtype, rngs=rngs)
        still = dict(param_dtype=param_dtype, rngs=nnx.Rngs(0))  # draws nothing
        still |= dict(momentum=0.9, epsilon=1e-5, use_fast_variance=False)
        self.epsilon = nnx.Param(jnp.zeros((), param_dtype))
        self.maps = nnx.List(nnx.Linear(i, hidden, **own) for i in (size_in, hidden))
        self.norms = nnx.List(nnx.BatchNorm(hidden, **still) for _ in range(2))

    def __call__(self, h, batch, training: bool):
        here = batch.present[:, None]
        h = (1 + self.epsilon[...]) * h + sum_of_neighbors(h, batch)
        for linear, norm in zip(self.maps, self.norms):
            h = norm(linear(h), use_running_average=not training, mask=here)
            h = jax.nn.relu(h)
        return jnp.where(here, h, jnp.zeros_like(h))


class GIN(nnx.Module):
    r"""Graph isomorphism network (Xu et al., 2019): $h_C =
    \mathrm{MLP}((1+\epsilon)h_C + \sum_{B\in N(C)}h_B)$, `num_layers` - 1 times; logits
    $\sum_l (W_l\sum_C h^{(l)}_C + b_l)$.
    """

    def __init__(
        self, num_features: int, num_classes: int, config=GINConfig(), **options
    ):
        self.config = config
        sizes = num_features, *[config.hidden] * (config.num_layers - 1)
        layer = lambda size: Isomorphism(size, config.hidden, **options)
        self.layers = nnx.List(map(layer, sizes[:-1]))
        self.heads = nnx.List(nnx.Linear(n, num_classes, **options) for n in sizes)

    def __call__(self, batch, rngs: nnx.Rngs | None = None):
        h, logits = batch.features, 0
        for layer, head in zip([None, *self.layers], self.heads):
            h = h if layer is None else layer(h, batch, rngs is not None)
            read = head(sum_of_nodes(h, batch))
            logits = logits + drop(read, self.config.dropout, rngs)
        return logits
