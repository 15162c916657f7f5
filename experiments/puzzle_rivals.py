"""What the puzzles' model is compared with: a transformer block applied again and
again, Hyper-SET's step, a perceptron, and the model itself with parts of its energy
broken.
"""

from abc import abstractmethod
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from broken import BrokenBlock, rms
from flax import nnx

from et_nbdev.attention import PairBias
from et_nbdev.puzzle import PuzzleConfig, PuzzleTransformer


class Recurrent(PuzzleTransformer):
    "A model with the same tokens and readout, but with any step."

    @abstractmethod
    def move(self, x):
        "x after one step."

    def descend(self, x, steps, *, states=False, unroll=1):
        def step(x, _):
            energy = self.block.energies(self.block.norm(x)) if self.has_energy else {}
            return self.move(x), (x if states else None, energy)

        last, (path, energies) = jax.lax.scan(step, x, length=steps, unroll=unroll)
        end = self.block.energies(self.block.norm(last)) if self.has_energy else {}
        join = lambda a, b: jnp.concatenate([a, b[None]])
        energies = jax.tree.map(join, energies, end)
        return last, (energies, join(path, last) if states else None)

    has_energy = False


class Attracting(PuzzleTransformer):
    "All heads attract."

    def __init__(self, config: PuzzleConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.block.attention.repelling = 0


class Placed(Attracting):
    "The paper's positions: a learned vector per cell in place of the biases of pairs."

    def __init__(self, config: PuzzleConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.block.attention.positions = None
        self.places = nnx.Param(
            jax.random.normal(rngs.params(), (config.n**2, config.dim))
        )

    def encode(self, boards, key):
        return super().encode(boards, key) + self.places[...]


class Broken(Recurrent):
    'The model with a broken block; "order": memory after attention, not beside it.'

    has_energy = True

    def __init__(self, config: PuzzleConfig, *, broken: Sequence[str], rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.block = BrokenBlock(self.block, tuple(broken), rngs)

    def move(self, x):
        alpha, block = jnp.exp(self.solver.log_alpha[...][0]), self.block
        g = block.norm(x)
        x = x + alpha * block.attend(g)
        if "order" in block.broken:
            g = block.norm(x)
        return x + alpha * block.remember(g)


class Transformer(Recurrent):
    "One pre-norm transformer block, applied again and again, with the same biases."

    def __init__(self, config: PuzzleConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        D, H, Y, K = config.dim, config.num_heads, config.head_dim, config.num_memories
        del self.block.attention.Wq, self.block.memory.xi  # its own follow
        self.norm1, self.norm2 = (nnx.LayerNorm(D, rngs=rngs) for _ in range(2))
        linear = lambda a, b: nnx.Linear(a, b, rngs=rngs)
        self.query, self.key, self.value = (linear(D, H * Y) for _ in range(3))
        self.out, self.up, self.down = linear(H * Y, D), linear(D, K), linear(K, D)
        self.positions = self.block.attention.positions

    def move(self, x):
        g, (H, Y) = self.norm1(x), (self.config.num_heads, self.config.head_dim)
        heads = lambda of: of(g).reshape(*g.shape[:-1], H, Y)
        bias = self.positions().reshape((1,) * (x.ndim - 2) + (H, *[x.shape[-2]] * 2))
        x = x + self.out(
            nnx.dot_product_attention(
                heads(self.query), heads(self.key), heads(self.value), bias
            ).reshape(*g.shape[:-1], H * Y)
        )
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class HyperSet(Recurrent):
    """Hyper-SET's step (Hu, Zou, Xu, arXiv 2502.11646): one matrix per head for queries,
    keys and values, tokens that repel each other inside a head, and sizes per channel of
    either sign (there they depend on the step, too); with our biases of pairs.
    """

    def __init__(self, config: PuzzleConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        D, H, Y, K = config.dim, config.num_heads, config.head_dim, config.num_memories
        normal = lambda *shape: jax.random.normal(rngs.params(), shape)
        self.W = nnx.Param(normal(H, D, Y) * D**-0.5)
        self.V = nnx.Param(normal(D, K) * D**-0.5)
        self.a, self.b = (nnx.Param(jnp.full(D, 0.1)) for _ in range(2))
        self.positions = PairBias(config.n**2, H)

    def move(self, x):
        W, V = self.W[...], self.V[...]
        unit = lambda a: a / rms(a)
        w = unit(jnp.einsum("...nd,hdy->...hny", unit(x), W))
        scores = jnp.einsum("...hcy,...hby->...hcb", w, w) * w.shape[-1] ** -0.5
        scores = scores + self.positions()
        both = jax.nn.softmax(scores, -1) + jax.nn.softmax(scores, -2)
        pushed = jnp.einsum("...hcb,...hby,hdy->...cd", both, w, W)
        x = x - self.a[...] * pushed
        return x + self.b[...] * (nnx.gelu(unit(unit(x) @ V)) @ V.T)


class Perceptron(nnx.Module):
    """A network with one hidden layer that sees the whole board and answers at once. A
    token is the board's digit, 1 of n, and the answer's logits.
    """

    def __init__(self, config: PuzzleConfig, *, hidden=1024, rngs: nnx.Rngs):
        self.config, size = config, config.n**3
        self.up = nnx.Linear(size, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, size, rngs=rngs)

    def encode(self, boards, key):
        cells = boards.reshape(*boards.shape[:-2], -1)
        board = jax.nn.one_hot(cells - 1, self.config.n)
        return jnp.concatenate([board, jnp.zeros_like(board)], -1)

    def descend(self, x, steps, *, states=False, unroll=1):
        board = x[..., : self.config.n]
        hidden = jax.nn.relu(self.up(board.reshape(*x.shape[:-2], -1)))
        answer = self.down(hidden).reshape(board.shape)
        last = jnp.concatenate([board, answer], -1)
        return last, ({}, jnp.broadcast_to(last, (steps + 1, *x.shape)))

    def logits(self, x):
        return x[..., self.config.n :]
