"""The energies and their gradients: the paper's index formulas written out in loops,
beside the modules, over random shapes and options.
"""

from functools import partial
from math import erf, exp, log, pi, prod, sqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import examples
from flax import nnx
from hypothesis import assume, given
from hypothesis import strategies as st

from et_nbdev.attention import EnergyAttention, RelativePositions
from et_nbdev.block import Block, EnergyTransformer, TransformerBlock
from et_nbdev.energy import ExternalField, Scaled
from et_nbdev.memory import HopfieldMemory, SignedMemory
from et_nbdev.norm import EnergyLayerNorm, hessian, lagrangian, layer_norm, turning
from et_nbdev.scores import log_sum_exp, softmax
from et_nbdev.testing import (
    assert_close,
    assert_gradient,
    attention_update,
    memory_update,
)

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("compile_quickly")]


# ------------------------------------------------------------------------------------
# random modules, tokens and masks

# Batch axes of 2 at least, for the mistakes that hide in a batch of one. Of every list
# hypothesis tries the first entry first, so that
# its simplest example is already one with several of everything.
LEAD = st.sampled_from([(2,), (3,), (2, 2), (2, 1, 2)])
SEED = st.integers(0, 2**16)
MASKS = [
    "none",
    "shared",
    "per sample",
    "one for all",
    "blind rows",
    "unseen columns",
    "nothing",
]
ACTIVATIONS = [
    ("relu", 3.0, 1.0),
    ("power", 2.0, 1.0),
    ("power", 2.5, 1.0),
    ("power", 3.0, 1.0),
    ("gelu", 3.0, 1.0),
    ("softmax", 3.0, 0.4),
    ("softmax", 3.0, 3.0),
]
SIGNED = ("signed", 2.0, 1.0)
SIGNED_GELU = ("signed gelu", 2.0, 1.0)
# what is multiplied with the scores, and what is added to them
PAIRS = [(), ("weights",), ("bias",), ("weights", "bias")]

attentions = st.fixed_dictionaries(
    dict(
        lead=LEAD,
        N=st.sampled_from([4, 3, 5]),
        D=st.sampled_from([4, 5, 3, 2, 1]),
        H=st.sampled_from([2, 3, 1]),
        Y=st.sampled_from([3, 4, 2, 1]),
        beta=st.sampled_from(["per head", None, 0.3]),
        learn_beta=st.booleans(),
        self_attention=st.booleans(),
        normalize=st.booleans(),
        positions=st.booleans(),  # where N is a square
        seed=SEED,
    )
)
memories = st.fixed_dictionaries(
    dict(
        lead=LEAD,
        N=st.sampled_from([3, 4]),
        D=st.sampled_from([4, 5, 3, 2, 1]),
        K=st.sampled_from([5, 6, 4, 3, 2, 1]),
        seed=SEED,
    )
)
blocks = st.fixed_dictionaries(
    dict(
        lead=LEAD,
        N=st.sampled_from([4, 3]),
        D=st.sampled_from([4, 5, 3, 2]),
        H=st.sampled_from([2, 1]),
        Y=st.sampled_from([3, 2, 1]),
        K=st.sampled_from([5, 4, 3, 2, 1]),
        beta=st.sampled_from(["per head", None]),
        learn_beta=st.booleans(),
        self_attention=st.booleans(),
        normalize=st.booleans(),
        positions=st.booleans(),
        activation=st.sampled_from([*ACTIVATIONS, SIGNED, SIGNED_GELU]),
        mask=st.sampled_from(["per sample", *MASKS]),
        gamma=st.sampled_from([1.7, 0.2]),
        seed=SEED,
    )
)


def build(make, rng):
    """The module with random float64 weights from NumPy; its own initializers would be
    compiled anew for every shape.
    """
    graphdef, state = nnx.split(nnx.eval_shape(make))
    return nnx.merge(
        graphdef,
        jax.tree.map(lambda w: jnp.asarray(0.7 * rng.normal(size=w.shape)), state),
    )


def heads(beta, H):
    return [0.3, 1.0, 2.5][:H] if beta == "per head" else beta


def attention_of(c, rng, kind=EnergyAttention):
    where = c.get("positions") and c["N"] == 4
    make = lambda: kind(
        c["D"],
        c["H"],
        c["Y"],
        heads(c["beta"], c["H"]),
        c["self_attention"],
        learn_beta=c["learn_beta"],
        normalize=c.get("normalize", False),
        positions=(
            RelativePositions(2, c["H"], param_dtype=jnp.float64) if where else None
        ),
        param_dtype=jnp.float64,
        rngs=nnx.Rngs(0),
    )
    return build(make, rng)


def memory_of(c, activation, rng, kind=HopfieldMemory):
    "With signs: thresholds, and two fifths of the memories repel."
    name, power, beta = activation
    if activation in (SIGNED, SIGNED_GELU):
        gelu = "gelu" if activation == SIGNED_GELU else "relu"
        kind, options = SignedMemory, dict(negative=0.4, activation=gelu)
    else:
        options = dict(activation=name, power=power, beta=beta)
    make = lambda: kind(
        c["D"], c["K"], param_dtype=jnp.float64, rngs=nnx.Rngs(0), **options
    )
    return build(make, rng)


def block_of(c, rng):
    block = Block(
        build(lambda: EnergyLayerNorm(c["D"], param_dtype=jnp.float64), rng),
        attention=attention_of(c, rng),
        memory=memory_of(c, c["activation"], rng),
    )
    block.norm.rho[...] = jnp.log(jnp.expm1(jnp.asarray(c["gamma"], jnp.float64)))
    return block


def tokens_of(c, rng):
    # NumPy: indexing it compiles nothing
    return rng.normal(size=(*c["lead"], c["N"], c["D"]))


def mask_of(kind, lead, N, rng):
    if kind == "none":
        return None
    if kind == "shared":
        return rng.random((N, N)) < 0.6
    if kind == "one for all":
        return rng.random((*(1 for _ in lead), N, N)) < 0.6
    mask = rng.random((*lead, N, N)) < 0.7
    if kind == "blind rows":
        mask[..., 1, :] = mask[0, ..., 0, :] = False
    if kind == "unseen columns":
        mask[..., :, 2] = mask[-1, ..., :, 0] = False
    if kind == "nothing":
        mask[...] = False
    return mask


def pairs_of(names, c, rng):
    "Context that is one number per pair of tokens: per sample, per head, or shared."
    N, H = c["N"], c["H"]
    shapes = [(*c["lead"], H, N, N), (H, N, N), (N, N), (*c["lead"], 1, N, N)]
    shape = lambda: shapes[rng.integers(len(shapes))]
    return {name: rng.normal(size=shape()) for name in names}


# One compiled program for each structure and shape, whatever the weights: `graphdef`
# says what the module is.


@partial(jax.jit, static_argnums=0)
def _energy(graphdef, state, g, context):
    return nnx.merge(graphdef, state).energy(g, **context)


@partial(jax.jit, static_argnums=0)
def _both(graphdef, state, g, context):
    module = nnx.merge(graphdef, state)
    return module.energy(g, **context), module.update(g, **context)


def energy(module, g, **context):
    return _energy(*nnx.split(module), g, context)


def both(module, g, **context):
    return jax.device_get(_both(*nnx.split(module), g, context))


def update(module, g, **context):
    return both(module, g, **context)[1]


def permuted(g, p, **pairs):
    "The tokens in another order, and the rows and columns of all pairs along."
    there = lambda a: None if a is None else a[..., p, :][..., p]
    return g[..., p, :], {name: there(a) for name, a in pairs.items()}


def changed(a, index, value):
    a = np.array(a)
    a[index] = value
    return a


# ------------------------------------------------------------------------------------
# the formulas, index by index, one sample


def attention_by_index(g, Wq, Wk, beta, sees, weights=1, bias=0, normalize=False):
    """Eq. (3), (4), (12) and the update, in loops. sees[C, B]: does key B stand in the
    sum of query C? Its score has a factor and a summand of its own, and queries and
    keys may be divided by the root mean square of their entries.
    """
    (N, D), (H, _, Y) = g.shape, Wq.shape
    A, b = (np.broadcast_to(a, (H, N, N)) for a in (weights, bias))
    E, u = 0.0, np.zeros((N, D))
    for h in range(H):
        project = lambda W, A: [
            sum(W[h, i, a] * g[A, i] for i in range(D)) for a in range(Y)
        ]
        length = lambda v: sqrt(sum(s**2 for s in v) / Y + 1e-5) if normalize else 1.0
        Q, K = ([project(W, A) for A in range(N)] for W in (Wq, Wk))
        rho_Q, rho_K = ([length(v) for v in vs] for vs in (Q, K))
        Q, K = (
            [[s / rho for s in v] for v, rho in zip(vs, rhos)]
            for vs, rhos in ((Q, rho_Q), (K, rho_K))
        )
        weight = lambda B, C: (
            exp(
                beta[h] * A[h, C, B] * sum(K[B][a] * Q[C][a] for a in range(Y))
                + b[h, C, B]
            )
            if sees[C, B]
            else 0.0
        )
        Z = [sum(weight(B, C) for B in range(N)) for C in range(N)]
        # over the keys B of query C
        soft = lambda B, C: weight(B, C) / Z[C] if sees[C, B] else 0.0
        E -= sum(log(z) for z in Z if z > 0) / beta[h]

        def turned(pull, v, rho):
            "By an entry of Q, from that by an entry of what it is divided to."
            along = sum(p * s for p, s in zip(pull, v)) / Y if normalize else 0.0
            return [(p - s * along) / rho for p, s in zip(pull, v)]

        for t in range(N):
            q = [
                sum(soft(C, t) * A[h, t, C] * K[C][a] for C in range(N))
                for a in range(Y)
            ]
            k = [
                sum(soft(t, C) * A[h, C, t] * Q[C][a] for C in range(N))
                for a in range(Y)
            ]
            q, k = turned(q, Q[t], rho_Q[t]), turned(k, K[t], rho_K[t])
            for i in range(D):
                u[t, i] += sum(
                    Wq[h, i, a] * q[a] + Wk[h, i, a] * k[a] for a in range(Y)
                )
    return E, u


def memory_by_index(g, xi, activation, threshold=None, negative=0):
    "Eq. (5), its relatives, and the update, in loops; the last memories repel."
    (N, D), K = g.shape, len(xi)
    name, n, beta = activation
    sign = [1.0 if m < K - negative else -1.0 for m in range(K)]
    b = np.zeros(K) if threshold is None else threshold
    E, u = 0.0, np.zeros((N, D))
    for B in range(N):
        a = [sum(xi[m, j] * g[B, j] for j in range(D)) + b[m] for m in range(K)]
        if name == "softmax":
            Z = sum(exp(beta * s) for s in a)
            E -= log(Z) / beta
            h = [exp(beta * s) / Z for s in a]
        elif name.endswith("gelu"):
            cdf = [(1 + erf(o / sqrt(2))) / 2 for o in a]
            density = [exp(-o * o / 2) / sqrt(2 * pi) for o in a]
            for s, o, P, p in zip(sign, a, cdf, density):
                E -= s * ((o * o - 1) * P + o * p) / 2
            h = [s * o * P for s, o, P in zip(sign, a, cdf)]
        else:
            n = 2.0 if name == "relu" else n
            E -= sum(s * max(o, 0.0) ** n for s, o in zip(sign, a)) / n
            h = [s * max(o, 0.0) ** (n - 1) for s, o in zip(sign, a)]
        for i in range(D):
            u[B, i] = sum(h[m] * xi[m, i] for m in range(K))
    return E, u


def norm_by_index(x, gamma, delta, eps):
    "Eq. (1) and (2), in loops: L of every token, g of every entry."
    N, D = x.shape
    L, g = np.zeros(N), np.zeros((N, D))
    for A in range(N):
        mean = sum(x[A]) / D
        sigma = sqrt(sum((x[A, j] - mean) ** 2 for j in range(D)) / D + eps)
        L[A] = D * gamma * sigma + sum(delta[j] * x[A, j] for j in range(D))
        g[A] = [gamma * (x[A, i] - mean) / sigma + delta[i] for i in range(D)]
    return L, g


def per_sample(f, g, *args):
    """Run `f` on every sample of a batch, and stack its two results in the batch's
    shape.
    """
    lead = g.shape[:-2]
    results = [f(np.asarray(g)[i], *(a[i] for a in args)) for i in np.ndindex(lead)]
    return tuple(np.reshape(r, (*lead, *np.shape(r[0]))) for r in zip(*results))


def who_sees_whom(mask, g, self_attention):
    lead, N = g.shape[:-2], g.shape[-2]
    sees = np.broadcast_to(True if mask is None else np.asarray(mask), (*lead, N, N))
    return sees if self_attention else sees & ~np.eye(N, dtype=bool)


# ------------------------------------------------------------------------ the two
# checks that every module passes and every mutant fails


def check_gradient(module, g, **context):
    """The update is −∂E/∂g of the energy that the module itself reports: by autodiff to
    1e-9, by central differences to 1e-6.
    """
    away_from_short_heads(g, getattr(module, "attention", module))
    claim = -update(module, g, **context)
    assert_gradient(lambda g: energy(module, g, **context), g, claim)


def check_formulas(module, g, self_attention=False, activation=None, **context):
    "Energy and update are the paper's, to 1e-12."
    if isinstance(module, HopfieldMemory):
        signs = (
            (np.asarray(module.threshold[...]), module.num_negative)
            if activation in (SIGNED, SIGNED_GELU)
            else ()
        )
        xi = np.asarray(module.xi[...])
        E, u = per_sample(lambda g: memory_by_index(g, xi, activation, *signs), g)
    else:
        Wq, Wk, beta = (np.asarray(w[...]) for w in (module.Wq, module.Wk, module.beta))
        sees = who_sees_whom(context.get("mask"), g, self_attention)
        table = (*g.shape[:-2], len(Wq), g.shape[-2], g.shape[-2])
        weights, bias = (
            np.broadcast_to(context.get(name, default), table)
            for name, default in (("weights", 1.0), ("bias", 0.0))
        )
        if module.positions is not None:
            bias = bias + positions_by_index(module.positions.table[...])
        E, u = per_sample(
            lambda g, *pairs: attention_by_index(
                g, Wq, Wk, beta, *pairs, module.normalize
            ),
            g,
            sees,
            weights,
            bias,
        )
    # The update of a normalized head with a Y of 1 is what is left of terms near 1, which
    # nearly cancel.
    for actual, expected in zip(both(module, g, **context), (E, u)):
        assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def positions_by_index(table):
    "The bias of every pair among the four patches of a picture, in loops."
    at = [(0, 0), (0, 1), (1, 0), (1, 1)]
    return np.array(
        [
            [[of[y - v + 1, x - w + 1] for v, w in at] for y, x in at]
            for of in np.asarray(table)
        ]
    )


def away_from_short_heads(g, attention):
    """A normalized query shorter than √ε turns around within a central difference: take
    other tokens.
    """
    if getattr(attention, "normalize", False):
        project = partial(jnp.einsum, "...nd,hdy->...hny", g)
        heads = project(attention.Wq[...]), project(attention.Wk[...])
        assume(all(jnp.sqrt(jnp.mean(a**2, -1)).min() > 0.03 for a in heads))


def away_from_kinks(g, memory):
    """Central differences across the kink of a ReLU are wrong by themselves: take other
    tokens.
    """
    a = np.asarray(g) @ np.asarray(memory.xi[...]).T
    if isinstance(memory, SignedMemory):
        a = a + np.asarray(memory.threshold[...])
    assume(np.abs(a).min() > 1e-3)


# ------------------------------------------------------------------------------------
# attention


@pytest.mark.parametrize("mask", MASKS)
@examples(2)
@given(c=attentions, names=st.sampled_from(PAIRS))
def test_attention_is_its_formula_and_its_update_is_the_gradient(x64, mask, c, names):
    rng = np.random.default_rng(c["seed"])
    attention, g = attention_of(c, rng), tokens_of(c, rng)
    pairs = pairs_of(names, c, rng) | {"mask": mask_of(mask, c["lead"], c["N"], rng)}
    check_formulas(attention, g, c["self_attention"], **pairs)
    check_gradient(attention, g, **pairs)


# two that change the update by themselves, and all at once
OPTIONS = [("normalize",), ("weights",), ("normalize", "positions", "weights", "bias")]


@pytest.mark.parametrize("names", OPTIONS, ids="+".join)
def test_every_option_of_attention_is_its_formula_and_a_gradient(x64, names):
    rng = np.random.default_rng(5)
    c = dict(lead=(2,), N=4, D=5, H=2, Y=3, beta="per head", learn_beta=True)
    c |= dict(self_attention=False, **{name: name in names for name in OPTIONS[-1]})
    attention, g = attention_of(c, rng), tokens_of(c, rng)
    pairs = pairs_of([name for name in ("weights", "bias") if name in names], c, rng)
    pairs["mask"] = mask_of("blind rows", (2,), 4, rng)
    check_formulas(attention, g, **pairs)
    check_gradient(attention, g, **pairs)
    # and it makes a difference
    plain = attention_of(c | dict(normalize=False, positions=False), rng)
    plain.Wq[...], plain.Wk[...] = attention.Wq[...], attention.Wk[...]
    plain.log_beta[...] = attention.log_beta[...]
    apart = update(attention, g, **pairs) - update(plain, g, mask=pairs["mask"])
    assert np.abs(apart).max() > 0.1


@examples(6)
@given(c=attentions, mask=st.sampled_from(MASKS))
def test_attention_knows_no_order_and_no_neighboring_sample(x64, c, mask):
    rng = np.random.default_rng(c["seed"])
    # positions are an order
    attention, g = attention_of(c | dict(positions=False), rng), tokens_of(c, rng)
    mask = mask_of(mask, c["lead"], c["N"], rng)
    E, u = both(attention, g, mask=mask)
    p = rng.permutation(c["N"])
    g_p, pairs = permuted(g, p, mask=mask)
    E_p, u_p = both(attention, g_p, **pairs)
    assert_close(E_p, E, rtol=1e-12)
    assert_close(u_p, u[..., p, :], rtol=1e-12)

    first = (0,) * len(c["lead"])
    alone = (
        None
        if mask is None
        else np.broadcast_to(mask, (*c["lead"], c["N"], c["N"]))[first]
    )
    # a sample by itself, without batch axes
    for whole, own in zip((E, u), both(attention, g[first], mask=alone)):
        assert_close(own, whole[first], rtol=1e-12, atol=1e-14)
    others = changed(np.ones(c["lead"], bool), first, False)
    for actual, before in zip(
        both(attention, changed(g, first, -3.0 * g[first]), mask=mask), (E, u)
    ):
        np.testing.assert_array_equal(actual[others], before[others])


@examples(4)
@given(c=attentions)
def test_a_token_outside_the_mask_might_as_well_not_be_there(x64, c):
    rng = np.random.default_rng(c["seed"])
    attention = attention_of(c | dict(positions=False), rng)
    g, N = tokens_of(c, rng), c["N"]
    inside = np.arange(N) < N - 1
    mask = np.outer(inside, inside)
    E, u = both(attention, g, mask=mask)
    for whole, part in zip((E, u[..., :-1, :]), both(attention, g[..., :-1, :])):
        assert_close(whole, part, rtol=1e-12)
    assert not np.any(u[..., -1, :])
    for actual, before in zip(
        both(attention, changed(g, (..., -1, slice(None)), 1e3), mask=mask), (E, u)
    ):
        np.testing.assert_array_equal(actual, before)


def test_a_full_mask_is_no_mask_and_shared_masks_broadcast(x64):
    rng = np.random.default_rng(0)
    c = dict(
        lead=(2, 3),
        N=4,
        D=3,
        H=2,
        Y=2,
        beta="per head",
        learn_beta=False,
        self_attention=False,
    )
    attention, g = attention_of(c, rng), tokens_of(c, rng)
    for mask in (np.ones((4, 4), bool), np.ones((2, 3, 4, 4), bool)):
        for a, b in zip(both(attention, g, mask=mask), both(attention, g)):
            assert_close(a, b, rtol=1e-14)
    some = mask_of("shared", (2, 3), 4, rng)
    for shape in ((1, 1, 4, 4), (2, 1, 4, 4), (3, 4, 4)):
        for a, b in zip(
            both(attention, g, mask=np.broadcast_to(some, shape)),
            both(attention, g, mask=some),
        ):
            assert_close(a, b, rtol=1e-14)


def test_beta_is_one_over_root_y_by_default_and_one_a_head_on_request():
    make = partial(EnergyAttention, 6, 2, 4, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(make().beta, [0.5, 0.5])
    np.testing.assert_allclose(make(3).beta, [3.0, 3.0])
    np.testing.assert_allclose(make(jnp.array([1.0, 2.0])).beta, [1.0, 2.0])
    np.testing.assert_allclose(
        make([1.0, 2.0], learn_beta=True).beta, [1.0, 2.0], rtol=1e-6
    )
    count = lambda module: sum(
        w.size for w in jax.tree.leaves(nnx.state(module, nnx.Param))
    )
    assert [
        count(make()),
        count(make([1.0, 2.0])),
        count(make(learn_beta=True)),
        count(make([1.0, 2.0], learn_beta=True)),
    ] == [96, 96, 97, 98]
    attention = make(learn_beta=True)
    attention.log_beta[...] = jnp.asarray(-50.0)  # wherever training drives it
    assert (attention.beta > 0).all()


def test_a_lone_token_sees_only_itself(x64):
    rng = np.random.default_rng(0)
    c = dict(
        lead=(2,), N=1, D=3, H=2, Y=2, beta=None, learn_beta=False, self_attention=False
    )
    attention, g = attention_of(c, rng), tokens_of(c, rng)
    assert not np.any(energy(attention, g)) and not np.any(update(attention, g))
    attention = attention_of(c | dict(self_attention=True), rng)
    check_formulas(attention, g, self_attention=True)
    check_gradient(attention, g)


# ------------------------------------------------------------------------------------
# memory


@pytest.mark.parametrize("activation", [*ACTIVATIONS, SIGNED, SIGNED_GELU], ids=str)
@examples(2)
@given(c=memories)
def test_memory_is_its_formula_and_its_update_is_the_gradient(x64, activation, c):
    rng = np.random.default_rng(c["seed"])
    memory, g = memory_of(c, activation, rng), tokens_of(c, rng)
    away_from_kinks(g, memory)
    check_formulas(memory, g, activation=activation)
    check_gradient(memory, g)


@examples(6)
@given(c=memories, activation=st.sampled_from([*ACTIVATIONS, SIGNED, SIGNED_GELU]))
def test_memory_takes_every_token_by_itself(x64, c, activation):
    rng = np.random.default_rng(c["seed"])
    memory, g = memory_of(c, activation, rng), tokens_of(c, rng)
    E, u = both(memory, g)
    each, each_u = both(memory, g[..., None, :])  # every token a sample of its own
    assert_close(each.sum(-1), E, rtol=1e-12)
    assert_close(each_u[..., 0, :], u, rtol=1e-12)
    p = rng.permutation(c["N"])
    for a, b in zip(both(memory, g[..., p, :]), (E, u[..., p, :])):
        assert_close(a, b, rtol=1e-12, atol=1e-14)
    if activation in (SIGNED, SIGNED_GELU):  # the last memories are those that repel
        return
    q = rng.permutation(c["K"])  # nor is there an order among memories
    memory.xi[...] = jnp.asarray(np.asarray(memory.xi[...])[q])
    for a, b in zip(both(memory, g), (E, u)):
        assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_hidden_activity_is_what_the_memories_send_back(x64, activation):
    rng = np.random.default_rng(1)
    memory, g = memory_of(dict(D=4, K=5), activation, rng), rng.normal(size=(2, 3, 4))
    hidden = np.asarray(jax.jit(memory.hidden)(g))
    lowest = -0.17 if activation[0] == "gelu" else 0  # that of GELU, at -0.75
    assert hidden.shape == (2, 3, 5) and (hidden >= lowest).all()
    assert_close(update(memory, g), hidden @ np.asarray(memory.xi[...]), rtol=1e-12)
    if activation[0] == "softmax":
        assert_close(hidden.sum(-1), np.ones((2, 3)), rtol=1e-14)


def test_power_two_is_relu_and_a_cold_softmax_picks_the_best_memory(x64):
    rng = np.random.default_rng(2)
    c = dict(D=4, K=6)
    g = rng.normal(size=(2, 3, 4))
    of = lambda activation: memory_of(c, activation, np.random.default_rng(3))
    for a, b in zip(both(of(("power", 2.0, 1.0)), g), both(of(("relu", 3.0, 1.0)), g)):
        np.testing.assert_array_equal(a, b)
    cold = of(("softmax", 3.0, 1e4))
    overlaps = g @ np.asarray(cold.xi[...]).T
    assert_close(energy(cold, g), -overlaps.max(-1).sum(-1), rtol=1e-3)
    assert_close(
        update(cold, g), np.asarray(cold.xi[...])[overlaps.argmax(-1)], rtol=1e-6
    )


# ------------------------------------------------------------------------------------
# norm

jit_lagrangian, jit_norm = jax.jit(lagrangian), jax.jit(layer_norm)


def check_norm(lagrangian, x, gamma, delta, eps):
    "g is the gradient of one Lagrangian per token, summed over tokens."
    assert_gradient(
        lambda x: lagrangian(x, gamma, delta, eps), x, jit_norm(x, gamma, delta, eps)
    )


norms = st.fixed_dictionaries(
    dict(
        lead=LEAD,
        N=st.sampled_from([3, 4]),
        D=st.sampled_from([4, 6, 5, 3, 2]),
        gamma=st.sampled_from([1.7, 0.3, 0.0, -0.8]),
        eps=st.sampled_from([0.1, 1e-5]),
        scale=st.sampled_from([1.0, 20.0]),
        seed=SEED,
    )
)


def norm_case(c):
    rng = np.random.default_rng(c["seed"])
    x = c["scale"] * rng.normal(size=(*c["lead"], c["N"], c["D"])) + 3.0
    # nearer to constant, central differences would need smaller steps
    assume(x.std(-1).min() > 0.03)
    return x, np.asarray(c["gamma"]), rng.normal(size=c["D"]), c["eps"]


@examples(7)
@given(c=norms)
def test_norm_is_its_formula_and_the_gradient_of_its_lagrangian(x64, c):
    x, gamma, delta, eps = norm_case(c)
    L, g = per_sample(lambda x: norm_by_index(x, gamma, delta, eps), x)
    assert_close(jit_lagrangian(x, gamma, delta, eps), L, rtol=1e-12)
    assert_close(jit_norm(x, gamma, delta, eps), g, rtol=1e-12)
    check_norm(jit_lagrangian, x, gamma, delta, eps)


@examples(7)
@given(c=norms)
def test_hessian_of_the_norm_is_known_down_to_its_eigenvalues(x64, c):
    x, gamma, delta, eps = norm_case(c)
    D = c["D"]
    M = np.asarray(jax.jit(hessian)(x, gamma, eps))
    assert M.shape == (*x.shape, D)
    token = jax.jit(
        jax.vmap(
            jax.hessian(
                lambda x: lagrangian(
                    x[None], jnp.asarray(gamma), jnp.asarray(delta), eps
                )[0]
            )
        )
    )
    assert_close(
        M, np.asarray(token(np.reshape(x, (-1, D)))).reshape(M.shape), rtol=1e-9
    )
    assert_close(M, M.swapaxes(-1, -2), rtol=1e-14)
    # a common shift of all entries is not seen
    assert_close(M.sum(-1), np.zeros(x.shape), atol=1e-12)
    sigma = np.sqrt(np.var(x, -1) + eps)
    expected = np.stack(
        [0 * sigma, c["gamma"] * eps / sigma**3, *[c["gamma"] / sigma] * (D - 2)], -1
    )
    values = np.linalg.eigvalsh(M)
    assert_close(values, np.sort(expected, -1), rtol=1e-9, atol=1e-12)
    if c["gamma"] >= 0:
        assert values.min() >= -1e-12
    else:
        assert values.min() < 0  # why γ must not be negative


def test_the_turning_force_is_what_the_hessian_lets_through(x64):
    x, u = np.random.default_rng(1).normal(size=(2, 2, 5, 6))
    M = hessian(x, jnp.asarray(1.0), 0.01)
    sigma = np.sqrt(x.var(-1, keepdims=True) + 0.01)
    turned = turning(x, u, 0.01)
    assert_close(turned, sigma * np.einsum("...ij,...j->...i", M, u), rtol=1e-12)
    norm = EnergyLayerNorm(6, 0.01, param_dtype=jnp.float64)
    assert_close(norm.turning(x, u), turned, rtol=1e-12)
    # stretching and shifting turn nothing
    along = 3.0 * (x - x.mean(-1, keepdims=True)) + 2.0
    assert np.abs(turning(x, along)).max() < 1e-3


@pytest.mark.parametrize("D", [2, 5])
def test_norm_module_is_the_functions_with_its_own_parameters(x64, D):
    rng = np.random.default_rng(D)
    norm = build(lambda: EnergyLayerNorm(D, eps=0.01, param_dtype=jnp.float64), rng)
    x, call = rng.normal(size=(2, 3, D)), jax.jit(norm)
    gamma, delta = np.log1p(np.exp(norm.rho[...])), norm.delta[...]
    assert_close(norm.gamma, gamma, rtol=1e-12)
    assert_close(call(x), jit_norm(x, gamma, delta, 0.01), rtol=1e-12)
    assert_close(
        jax.jit(norm.lagrangian)(x), jit_lagrangian(x, gamma, delta, 0.01), rtol=1e-12
    )
    # every token by itself
    assert_close(call(x[0, 1:2])[0], np.asarray(call(x))[0, 1], rtol=1e-12)
    assert_gradient(jax.jit(norm.lagrangian), x, call(x))


@pytest.mark.parametrize("dim", [2, 7, 768])
def test_norm_starts_at_one_and_zero_with_d_plus_one_parameters(dim):
    norm = EnergyLayerNorm(dim)
    assert sum(w.size for w in jax.tree.leaves(nnx.state(norm, nnx.Param))) == dim + 1
    np.testing.assert_allclose(norm.gamma, 1.0, rtol=1e-6)
    assert not np.any(norm.delta[...])


@pytest.mark.parametrize("rho", [-1e30, -1e3, -90.0, -1.0, 0.0, 1.0, 1e3])
def test_no_parameter_makes_gamma_negative(rho):
    norm = EnergyLayerNorm(4)
    norm.rho[...] = jnp.asarray(rho, jnp.float32)
    gamma, slope = jax.value_and_grad(jax.nn.softplus)(norm.rho[...])
    assert (
        gamma == norm.gamma
        and norm.gamma >= 0
        and np.isfinite(norm.gamma)
        and np.isfinite(slope)
    )
    assert np.isfinite(norm(jnp.arange(12.0).reshape(3, 4))).all()


@pytest.mark.parametrize("rate", [0.1, 10.0, 1e4])
def test_no_gradient_step_makes_gamma_negative(rate):
    norm, x = EnergyLayerNorm(4), jax.random.normal(jax.random.key(0), (3, 4))
    graphdef, state = nnx.split(norm)
    # the smaller γ the better, without end
    step = jax.jit(
        jax.grad(lambda state: jnp.sum(nnx.merge(graphdef, state)(x) * norm(x)))
    )
    for _ in range(30):
        state = jax.tree.map(lambda w, slope: w - rate * slope, state, step(state))
        norm = nnx.merge(graphdef, state)
        assert norm.gamma >= 0 and np.isfinite(norm.gamma)
    assert norm.gamma < 0.3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_constant_tokens_have_finite_values_and_gradients(dtype):
    norm = EnergyLayerNorm(4)
    norm.delta[...] = jnp.arange(4.0)
    x = jnp.asarray(np.array([[0, 0, 0, 0], [3, 3, 3, 3], [1, 2, 3, 4]]), dtype)
    assert norm(x).dtype == dtype and norm.lagrangian(x).dtype == jnp.float32
    # γ·0 + δ
    np.testing.assert_array_equal(
        norm(x)[:2], jnp.broadcast_to(jnp.arange(4, dtype=dtype), (2, 4))
    )
    graphdef, state = nnx.split(norm)
    loss = lambda state, x: jnp.sum(
        nnx.merge(graphdef, state)(x).astype(jnp.float32) ** 3
    )
    for leaf in jax.tree.leaves(
        jax.jit(
            lambda x: (
                jax.grad(loss, (0, 1))(state, x),
                jax.hessian(lambda x: norm.lagrangian(x).sum())(x),
            )
        )(x)
    ):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()


# ------------------------------------------------------------------------------------
# block


@partial(jax.jit, static_argnums=0)
def _block(graphdef, state, x, context):
    "Everything that a block can say about x, in one program."
    block = nnx.merge(graphdef, state)
    g = block.norm(x)
    return (
        g,
        block.energy(g, **context),
        block.update(g, **context),
        block.energies(g, **context),
        block.energies_and_update(g, **context),
        block.attention.energy_and_update(g, **context),
        block.memory.energy_and_update(g),
    )


@examples(6)
@given(c=blocks, names=st.sampled_from(PAIRS))
def test_block_descends_the_sum_of_its_energies(x64, c, names):
    rng = np.random.default_rng(c["seed"])
    block = block_of(c, rng)
    x = tokens_of(c, rng)
    mask = mask_of(c["mask"], c["lead"], c["N"], rng)
    assert np.any(block.norm.delta[...])
    assert_close(block.norm.gamma, jnp.asarray(c["gamma"]), rtol=1e-12)
    run = lambda x, pairs: jax.device_get(_block(*nnx.split(block), x, pairs))
    pairs = pairs_of(names, c, rng) | {"mask": mask}
    g, E, u, halves, together, (E_att, u_att), (E_hn, u_hn) = run(x, pairs)
    away_from_kinks(g, block.memory)
    check_gradient(block, g, **pairs)
    assert_close(E, E_att + E_hn, rtol=1e-14)
    assert_close(u, u_att + u_hn, rtol=1e-14)
    for energies in (halves, together[0]):
        assert list(energies) == ["attention", "memory"]
        assert_close(energies["attention"], E_att, rtol=1e-14)
        assert_close(energies["memory"], E_hn, rtol=1e-14)
        assert_close(energies.total, E, rtol=1e-14)
    assert_close(together[1], u, rtol=1e-14)

    if block.attention.positions is not None:
        return
    p = rng.permutation(c["N"])
    g_p, E_p, u_p, *_ = run(*permuted(x, p, **pairs))
    for a, b in ((g_p, g[..., p, :]), (E_p, E), (u_p, u[..., p, :])):
        assert_close(a, b, rtol=1e-12)


@examples(4)
@given(c=blocks)
def test_energy_falls_at_the_rate_that_the_hessian_of_the_norm_gives(x64, c):
    r"""Eq. (7): along x + t u with u = −∂E/∂g, dE/dt at t = 0 is −uᵀMu, and that is
    never positive.
    """
    rng = np.random.default_rng(c["seed"])
    block = block_of(c, rng)
    x = tokens_of(c, rng)
    mask = mask_of(c["mask"], c["lead"], c["N"], rng)

    def along_the_update(x):
        u = block.update(block.norm(x), mask=mask)
        energy = lambda x: block.energy(block.norm(x), mask=mask)
        return u, jax.jvp(energy, (x,), (u,))[1]

    u, rate = jax.jit(along_the_update)(x)
    M = np.asarray(jax.jit(hessian)(x, block.norm.gamma))
    expected = -np.einsum("...ni,...nij,...nj->...", u, M, u)
    assert_close(rate, expected, rtol=1e-9)
    assert (np.asarray(rate) <= 1e-12).all()


def test_parameter_counts_of_the_base_block():
    # shapes only, nothing allocated
    block = nnx.eval_shape(
        lambda: EnergyTransformer(768, 12, 64, 3072, rngs=nnx.Rngs(0))
    )
    count = lambda module: sum(
        prod(w.shape) for w in jax.tree.leaves(nnx.state(module, nnx.Param))
    )
    assert count(block) == 3_539_713
    assert count(block.attention) + count(block.memory) == 3_538_944
    assert count(block.norm) == 769
    # no state besides parameters
    assert count(block) == sum(prod(w.shape) for w in jax.tree.leaves(nnx.state(block)))


def test_block_hands_its_options_on():
    block = EnergyTransformer(
        6,
        2,
        3,
        5,
        attention=partial(
            EnergyAttention,
            beta=[1.0, 2.0],
            learn_beta=True,
            self_attention=True,
            normalize=True,
            positions=(where := RelativePositions(2, 2)),
        ),
        memory=partial(HopfieldMemory, activation="power", power=4.0),
        init_scale=0.0,
        dtype=jnp.bfloat16,
        rngs=nnx.Rngs(0),
    )
    np.testing.assert_allclose(block.attention.beta, [1.0, 2.0], rtol=1e-6)
    assert (
        block.attention.self_attention
        and block.attention.normalize
        and block.attention.positions is where
        and block.memory.activation == "power"
        and block.memory.power == 4.0
    )
    assert block.attention.dtype == block.memory.dtype == jnp.bfloat16
    assert not any(
        np.any(w[...])
        for w in (block.attention.Wq, block.attention.Wk, block.memory.xi)
    )


def test_positions_start_at_zero_or_fall_with_the_distance():
    zero, far = RelativePositions(3, 5), RelativePositions(3, 5, "distance")
    for positions in (zero, far):
        assert positions.table[...].shape == (5, 5, 5) and positions().shape == (
            5,
            9,
            9,
        )
    assert not np.any(zero.table[...])
    apart = np.hypot(*np.subtract.outer(np.mgrid[:3, :3].reshape(2, 9).T, [0, 0]).T[0])
    # from the first patch, in patches; slopes double from head to head, four times
    for head, slope in enumerate((0.25, 0.5, 1.0, 2.0, 0.25)):
        np.testing.assert_allclose(far()[head, 0], -slope * apart, rtol=1e-6)
        np.testing.assert_array_equal(far()[head], far()[head].T)


@pytest.mark.parametrize("share, negative", [(0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_the_last_memories_repel(x64, share, negative):
    memory = SignedMemory(4, 8, share, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    assert not np.any(memory.threshold[...]) and memory.num_negative == negative
    h = np.asarray(memory.hidden(np.random.default_rng(0).normal(size=(50, 3, 4))))
    assert (h[..., : 8 - negative] >= 0).all() and (h[..., 8 - negative :] <= 0).all()
    assert all(np.any(h[..., m]) for m in range(8))


def test_weights_start_different_from_each_other_and_with_the_asked_spread():
    block = EnergyTransformer(64, 2, 64, 128, rngs=nnx.Rngs(0))
    att, scale = block.attention, lambda w: float(jnp.std(w[...]))
    np.testing.assert_allclose(
        [scale(att.Wq), scale(att.Wk), scale(block.memory.xi)], 1 / 8, rtol=0.05
    )
    assert not np.allclose(att.Wq[...], att.Wk[...])
    tied = EnergyTransformer(
        64,
        2,
        64,
        128,
        attention=partial(EnergyAttention, tied_start=True),
        rngs=nnx.Rngs(0),
    ).attention
    np.testing.assert_array_equal(tied.Wq[...], tied.Wk[...])
    np.testing.assert_allclose(
        scale(
            EnergyTransformer(
                64, 2, 64, 128, init_scale=0.02, rngs=nnx.Rngs(0)
            ).memory.xi
        ),
        0.02,
        rtol=0.05,
    )


# ------------------------------------------------------------------------------------
# what training differentiates


def test_the_rules_of_log_sum_exp_hold_to_the_third_derivative(x64):
    "Beside pairs that are left out, and a row of nothing else."
    scores = jax.random.normal(jax.random.key(0), (5,)).at[1].set(-jnp.inf)
    open_ = jnp.array([0, 2, 3, 4])
    for f, plain in (
        (log_sum_exp, jax.nn.logsumexp),
        (lambda s: softmax(s)[0], lambda s: jax.nn.softmax(s)[0]),
    ):
        inside = lambda f: lambda t: f(scores.at[open_].set(t))
        for _ in range(3):
            assert_close(inside(f)(scores[open_]), inside(plain)(scores[open_]))
            f, plain = (jax.grad(lambda s, g=g: jnp.sum(g(s) ** 2)) for g in (f, plain))
            f, plain = (lambda s, g=g: g(s)[open_] for g in (f, plain))
        empty = jnp.full(5, -jnp.inf)
        assert jnp.all(f(empty) == 0)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, SIGNED, SIGNED_GELU], ids=str)
def test_a_gradient_through_an_update_is_that_through_the_formula_derived_by_hand(
    x64, activation
):
    "In every parameter and in g; each of them is reached."
    rng = np.random.default_rng(0)
    c = dict(lead=(2,), N=4, D=4, H=2, Y=3, K=5, beta="per head", learn_beta=True)
    c |= dict(self_attention=False, normalize=True, positions=True, gamma=1.7)
    block = block_of(c | {"activation": activation}, rng)
    g, v = tokens_of(c, rng), rng.normal(size=(2, 4, 4))
    pairs = pairs_of(["weights", "bias"], c, rng)
    pairs = {name: np.broadcast_to(a, (2, 2, 4, 4)) for name, a in pairs.items()}
    pairs["mask"] = mask_of("blind rows", (2,), 4, rng)
    graphdef, state = nnx.split(block)

    def automatic(block, g):
        return block.update(g, **pairs)

    def by_hand(block, g):
        moved = attention_update(block.attention, g, **pairs)
        return moved + memory_update(block.memory, g)

    slope = lambda update: jax.grad(
        lambda state, g: jnp.vdot(v, update(nnx.merge(graphdef, state), g)), (0, 1)
    )
    found, wanted = (jax.jit(slope(f))(state, g) for f in (automatic, by_hand))
    for (path, a), b in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        assert np.any(a) or "norm" in str(path), f"no gradient reaches {path}"
        assert_close(a, b, rtol=1e-9)


# ------------------------------------------------------------------------------------
# precision


@partial(jax.jit, static_argnums=0)
def everything(graphdef, state, g, context):
    "Energy, update, and the gradient of a loss on both."

    def loss(state, g):
        E, u = nnx.merge(graphdef, state).energy_and_update(g, **context)
        return (jnp.vdot(u.astype(E.dtype), u.astype(E.dtype)) + E.sum()).astype(
            jnp.float32
        )

    E, u = nnx.merge(graphdef, state).energy_and_update(g, **context)
    return E, u, jax.grad(loss, (0, 1))(state, g)


def cast(tree, dtype):
    return jax.tree.map(lambda w: np.asarray(w).astype(dtype), tree)


def single_is_double(module, g, gradient_rtol, **context):
    """The same in float32 and float64. A β of 10⁴ magnifies the rounding of a score by
    itself, and the derivative of a softmax by its square, so that gradients, unlike
    values, can then be no more than roughly right in single precision.
    """
    graphdef, state = nnx.split(module)
    single, double = (
        everything(graphdef, cast(state, d), g.astype(d), context)
        for d in (np.float32, np.float64)
    )
    for i, (a, b) in enumerate(
        zip(
            jax.tree.leaves(single),
            cast(jax.tree.leaves(double), np.float32),
            strict=True,
        )
    ):
        # energy, update; then the gradients
        assert_close(a, b, rtol=1e-5 if i < 2 else gradient_rtol)


@pytest.mark.parametrize(
    "large, mask, self_attention",
    [
        ("tokens", "none", True),
        ("tokens", "blind rows", False),
        ("beta", "blind rows", False),
    ],
)
def test_scores_of_ten_thousand_do_not_overflow_in_single_precision(
    x64, large, mask, self_attention
):
    rng = np.random.default_rng(7)
    scale, beta = (100.0, 2.0) if large == "tokens" else (1.0, 2e4)
    attention = EnergyAttention(8, 2, 4, beta, self_attention, rngs=nnx.Rngs(0))
    g = (scale * rng.normal(size=(2, 4, 8))).astype(np.float32)
    mask = mask_of(mask, (2,), 4, rng)
    Q, K = (np.einsum("bnd,hdy->bhny", g, w[...]) for w in (attention.Wq, attention.Wk))
    scores = beta * np.einsum("bhcy,bhky->bhck", Q, K)
    assert scores.max() > 1e4 and scores.min() < -1e4
    single_is_double(attention, g, 1e-5 if large == "tokens" else 2e-2, mask=mask)


@pytest.mark.parametrize(
    "activation",
    [
        ("relu", 3.0, 1.0),
        ("power", 3.0, 1.0),
        ("softmax", 3.0, 1.0),
        ("softmax", 3.0, 1e4),
        ("gelu", 3.0, 1.0),
        SIGNED,
        SIGNED_GELU,
    ],
    ids=str,
)
def test_large_overlaps_do_not_overflow_in_single_precision(x64, activation):
    rng = np.random.default_rng(7)
    name, power, beta = activation
    rngs = dict(rngs=nnx.Rngs(0))
    memory = (
        SignedMemory(8, 6, 0.4, "relu" if activation == SIGNED else "gelu", **rngs)
        if activation in (SIGNED, SIGNED_GELU)
        else HopfieldMemory(8, 6, name, power=power, beta=beta, **rngs)
    )
    g = ((1.0 if beta > 1 else 1e4) * rng.normal(size=(2, 4, 8))).astype(np.float32)
    single_is_double(memory, g, 1e-5 if beta == 1 else 2e-2)


BF16, F32 = jnp.bfloat16, jnp.float32


@partial(jax.jit, static_argnums=0)
def _energies_and_update(graphdef, state, x, mask):
    block = nnx.merge(graphdef, state)
    return block.energies_and_update(block.norm(x), mask=mask)


@pytest.mark.parametrize(
    "activation, tokens, options",
    [
        ("relu", F32, dict(dtype=BF16)),
        ("power", F32, dict(dtype=BF16)),
        ("softmax", F32, dict(dtype=BF16)),
        ("gelu", F32, dict(dtype=BF16)),
        ("relu", BF16, dict()),
        ("gelu", BF16, dict()),
        ("softmax", BF16, dict(dtype=BF16)),
        ("relu", F32, dict(dtype=BF16, normalize=True)),
        ("relu", BF16, dict(normalize=True)),
        ("relu", F32, dict(param_dtype=BF16)),
        ("relu", BF16, dict(dtype=F32)),
        ("relu", jnp.float16, dict()),
    ],
)
def test_half_precision_is_close_and_keeps_energies_in_single(
    activation, tokens, options
):
    rng = np.random.default_rng(3)
    make = lambda normalize=False, **options: EnergyTransformer(
        32,
        2,
        16,
        64,
        attention=partial(EnergyAttention, normalize=normalize),
        memory=partial(HopfieldMemory, activation=activation),
        rngs=nnx.Rngs(0),
        **options,
    )
    block = make(**options)
    reference, _ = nnx.split(make(normalize=block.attention.normalize))
    graphdef, state = nnx.split(block)
    x = rng.normal(size=(2, 6, 32)).astype(np.float32)
    mask = mask_of("blind rows", (2,), 6, rng)
    E, u = _energies_and_update(reference, cast(state, F32), x, mask)
    energies, update = _energies_and_update(
        graphdef, state, jnp.asarray(x, tokens), mask
    )
    assert update.dtype == tokens
    for name, b in E.items():
        assert energies[name].dtype == b.dtype == F32
        assert_close(energies[name], b, rtol=2e-2)
    assert_close(np.asarray(update, F32), u, rtol=2e-2)


@pytest.mark.parametrize("factor", [None, 0.5])
@pytest.mark.parametrize("strength", [BF16, F32])
def test_fields_in_half_precision_have_energies_in_single(strength, factor):
    g, field = np.random.default_rng(0).normal(size=(2, 2, 6, 32)).astype(np.float32)
    term = ExternalField() if factor is None else Scaled(ExternalField(), factor)
    half, field = jnp.asarray(g, BF16), jnp.asarray(field, strength)
    E, u = term.energy_and_update(half, field=field)
    assert E.dtype == term.energy(half, field=field).dtype == F32 and u.dtype == BF16
    whole = term.energy_and_update(g, field=field.astype(F32))
    assert_close(E, whole[0], rtol=2e-2)
    assert_close(u.astype(F32), whole[1], rtol=2e-2)


def test_the_conventional_block_computes_in_half_precision_and_returns_the_type_it_got():
    x = jax.random.normal(jax.random.key(0), (2, 5, 8))
    single, half = (
        TransformerBlock(8, 2, 4, 16, dtype=dtype, rngs=nnx.Rngs(0))
        for dtype in (None, BF16)
    )
    assert half(x.astype(BF16)).dtype == BF16 and half(x).dtype == F32
    assert_close(half(x), single(x), rtol=0.05, atol=0.05)
    assert not np.array_equal(half(x), single(x))


@pytest.mark.parametrize("tokens, options", [(F32, dict(dtype=BF16)), (BF16, dict())])
def test_half_precision_trains(tokens, options):
    block = EnergyTransformer(
        8,
        2,
        4,
        16,
        attention=partial(EnergyAttention, learn_beta=True),
        memory=partial(HopfieldMemory, activation="softmax"),
        rngs=nnx.Rngs(0),
        **options,
    )
    graphdef, state = nnx.split(block)
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(2, 3, 8)), tokens)
    mask = mask_of("blind rows", (2,), 3, rng)
    loss = lambda state: jnp.sum(
        _energies_and_update(graphdef, state, x, mask)[1].astype(F32) ** 2
    )
    for slope in jax.tree.leaves(jax.jit(jax.grad(loss))(state)):
        assert slope.dtype == F32 and np.isfinite(slope).all() and np.any(slope)


# ------------------------------------------------------------------------------------
# known mistakes, and the check that sees each


class WrongAttention(EnergyAttention):
    "The energy and update in six plain lines, each with a mistake to be switched on."

    token_energy = None
    mistake = None

    def energy_and_update(self, g, mask=None):
        m, beta = self.mistake, self.beta[:, None, None]
        see = jnp.ones((g.shape[-2],) * 2, bool) if mask is None else mask
        if m != "the diagonal stays":
            see = see & ~jnp.eye(g.shape[-2], dtype=bool)
        Q = jnp.einsum("nd,hdy->hny", g, self.Wq[...])
        K = jnp.einsum("nd,hdy->hny", g, self.Wk[...])
        s = beta * jnp.einsum("hcy,hby->hcb", Q, K)
        s = (
            s * see[None].astype(s.dtype)
            if m == "masked scores times zero"
            else jnp.where(see[None], s, -jnp.inf)
        )
        P = jax.nn.softmax(s, -1)
        P_key = (
            jax.nn.softmax(s, -2)
            if m == "second softmax over the wrong axis"
            else P.mT
            if m == "second softmax not transposed"
            else P
        )
        scale = 1.0 if m == "no 1/β" else 1 / self.beta
        E = -jnp.sum(scale * jax.nn.logsumexp(s, -1).sum(-1))
        u = jnp.einsum("hcb,hby,hdy->cd", P, K, self.Wq[...])
        if m != "no second term":
            u = u + jnp.einsum("hcb,hcy,hdy->bd", P_key, Q, self.Wk[...])
        if m == "update over batch × tokens":
            u = u / (2 * g.shape[-2])
        if m == "energy over batch × tokens":
            E, u = E / (2 * g.shape[-2]), u / (2 * g.shape[-2])
        return E, u

    def energy(self, g, mask=None):
        return jax.vmap(lambda g: self.energy_and_update(g, mask)[0])(g)

    def update(self, g, mask=None):
        return jax.vmap(lambda g: self.energy_and_update(g, mask)[1])(g)


# What each mistake leaves in order. A mistake made in the energy and in the update
# alike is a gradient still, and only the formulas see it.
@pytest.mark.parametrize(
    "mistake, caught_by_gradient",
    [
        (None, False),
        ("no second term", True),
        ("second softmax over the wrong axis", True),
        ("second softmax not transposed", True),
        ("no 1/β", True),
        ("update over batch × tokens", True),
        ("masked scores times zero", True),
        ("the diagonal stays", False),
        ("energy over batch × tokens", False),
    ],
)
def test_mistakes_in_attention_are_caught(x64, mistake, caught_by_gradient):
    rng = np.random.default_rng(0)
    c = dict(
        lead=(2,), N=4, D=5, H=2, Y=3, beta=2.0, learn_beta=False, self_attention=False
    )
    g, mask = tokens_of(c, rng), changed(rng.random((4, 4)) < 0.7, 0, True)
    mask[:, :2] = True  # every row sees somebody
    of = lambda kind: attention_of(c, np.random.default_rng(1), kind)
    if mistake is None:  # the same checks pass where nothing is wrong
        for sound in (EnergyAttention, WrongAttention):
            check_gradient(of(sound), g, mask=mask)
            check_formulas(of(sound), g, mask=mask)
        return
    mutant = of(WrongAttention)
    mutant.mistake = mistake
    with pytest.raises(AssertionError, match="exceeds"):
        check_formulas(mutant, g, mask=mask)
    if caught_by_gradient:
        with pytest.raises(AssertionError, match="exceeds"):
            check_gradient(mutant, g, mask=mask)
    else:
        check_gradient(mutant, g, mask=mask)


class WrongMemory(HopfieldMemory):
    token_energy = None
    mistake = None

    def energy(self, g):
        r = jax.nn.relu(g @ self.xi[...].T)
        return (
            -jnp.sum(
                r if self.mistake in ("no square", "no square in the energy") else r**2,
                (-2, -1),
            )
            / 2
        )

    def energy_and_update(self, g):
        r = jax.nn.relu(g @ self.xi[...].T)
        if self.mistake == "no square":
            r = jnp.where(r > 0, 0.5, 0.0)
        if self.mistake == "no relu in the update":
            r = g @ self.xi[...].T
        u = r @ self.xi[...]
        if self.mistake == "update over batch × tokens":
            u = u / (g.shape[0] * g.shape[1])
        return self.energy(g), u


@pytest.mark.parametrize(
    "mistake, caught_by_gradient",
    [
        (None, False),
        ("no square in the energy", True),
        ("no square", False),
        ("no relu in the update", True),
        ("update over batch × tokens", True),
    ],
)
def test_mistakes_in_memory_are_caught(x64, mistake, caught_by_gradient):
    rng = np.random.default_rng(0)
    c, relu = dict(lead=(2,), N=3, D=5, K=6), ("relu", 3.0, 1.0)
    g = tokens_of(c, rng)
    of = lambda kind: memory_of(c, relu, np.random.default_rng(1), kind)
    if mistake is None:
        for sound in (HopfieldMemory, WrongMemory):
            check_gradient(of(sound), g)
            check_formulas(of(sound), g, activation=relu)
        return
    mutant = of(WrongMemory)
    mutant.mistake = mistake
    with pytest.raises(AssertionError, match="exceeds"):
        check_formulas(mutant, g, activation=relu)
    if caught_by_gradient:
        with pytest.raises(AssertionError, match="exceeds"):
            check_gradient(mutant, g)
    else:
        check_gradient(mutant, g)


def test_a_lagrangian_with_one_root_for_all_tokens_is_caught(x64):
    @jax.jit
    def one_root(x, gamma, delta, eps):
        centered = x - x.mean(-1, keepdims=True)
        return x.shape[-1] * gamma * jnp.sqrt(
            jnp.sum(jnp.mean(centered**2, -1), -1) + eps
        ) + (x @ delta).sum(-1)

    rng = np.random.default_rng(0)
    x, gamma, delta = rng.normal(size=(2, 3, 4)), np.asarray(1.7), rng.normal(size=4)
    check_norm(jit_lagrangian, x, gamma, delta, 1e-5)
    with pytest.raises(AssertionError, match="exceeds"):
        check_norm(one_root, x, gamma, delta, 1e-5)
    # on one token it passes: which is why there are three
    check_norm(one_root, x[:, :1], gamma, delta, 1e-5)


def test_a_lagrangian_without_delta_is_caught(x64):
    rng = np.random.default_rng(0)
    x, gamma, delta = rng.normal(size=(2, 3, 4)), np.asarray(1.7), rng.normal(size=4)
    without = lambda x, gamma, delta, eps: jit_lagrangian(x, gamma, np.zeros(4), eps)
    with pytest.raises(AssertionError, match="exceeds"):
        check_norm(without, x, gamma, delta, 1e-5)
    # at δ = 0 it passes: which is why δ ≠ 0
    check_norm(without, x, gamma, np.zeros(4), 1e-5)


# ------------------------------------------------------------------------------------
# bad input


def attention(*args, **options):
    return EnergyAttention(*args, rngs=nnx.Rngs(0), **options)


def memory(*args, **options):
    return HopfieldMemory(*args, rngs=nnx.Rngs(0), **options)


def signed(*args, **options):
    return SignedMemory(*args, rngs=nnx.Rngs(0), **options)


def block(*args, **options):
    return EnergyTransformer(*args, rngs=nnx.Rngs(0), **options)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "make, match",
    [
        *[(partial(EnergyLayerNorm, dim), "dim") for dim in (1, 0, -3)],
        *[(partial(EnergyLayerNorm, 4, eps), "eps") for eps in (0.0, -1e-5, NAN, INF)],
        (partial(EnergyLayerNorm, 4.0), "dim"),
        (partial(attention, 4, 2.0, 3), "num_heads"),
        (partial(memory, 4, "5"), "num_memories"),
        (partial(attention, 0, 1, 1), "dim"),
        (partial(attention, 4, -1, 1), "num_heads"),
        (partial(attention, 4, 1, -2), "head_dim"),
        *[
            (partial(attention, 4, 2, 3, beta), "beta")
            for beta in (
                0,
                -1.0,
                NAN,
                INF,
                [1.0, 0.0],
                [1.0, NAN],
                [1.0],
                [1.0, 2.0, 3.0],
                np.ones((2, 1)),
            )
        ],
        (partial(attention, 4, 2, 3, -1.0, learn_beta=True), "beta"),
        (partial(attention, 4, 0, 3), "num_heads"),
        (partial(RelativePositions, 0, 2), "side"),
        (partial(RelativePositions, 3, 0), "num_heads"),
        (partial(RelativePositions, 3, 2, "far"), "start.*zero.*distance"),
        *[(partial(signed, 4, 5, share), "negative") for share in (-0.1, 1.1, NAN)],
        *[
            (partial(signed, 4, 5, 0.5, name), "activation.*signs.*relu.*gelu")
            for name in ("power", "softmax")
        ],
        (partial(signed, 4, 0), "num_memories"),
        (partial(memory, 0, 5), "dim"),
        (partial(memory, 4, 0, "softmax"), "num_memories"),
        (partial(memory, 4, -1), "num_memories"),
        *[
            (partial(memory, 4, 5, name), "activation.*relu.*power.*softmax")
            for name in ("GELU", "ReLU", "", None, 2)
        ],
        *[
            (partial(memory, 4, 5, "power", power=n), "power")
            for n in (1.9, 1, 0, -3, NAN, INF, [2.0, 3.0])
        ],
        *[
            (partial(memory, 4, 5, "softmax", beta=beta), "beta")
            for beta in (0, -1.0, NAN, INF, [1.0, 2.0])
        ],
        (partial(block, 1, 1, 1, 1), "dim"),
        (partial(block, 4, -1, 1, 1), "num_heads"),
        (partial(block, 4, 1, 0, 1), "head_dim"),
        (partial(block, 4, 1, 1, -1), "num_memories"),
    ],
)
def test_bad_settings_are_refused_by_name(make, match):
    with pytest.raises((ValueError, TypeError), match=match):
        make()


@pytest.mark.parametrize("heads, memories", [(0, 5), (2, 0)])
def test_a_part_that_is_left_out_is_no_term(x64, heads, memories):
    options = dict(memory=partial(HopfieldMemory, activation="power"))
    options |= dict(param_dtype=jnp.float64)
    whole = block(6, 2, 3, 5, **options)
    part = block(6, heads, 3, memories, **options)
    (name,) = part.names
    assert name == ("attention" if heads else "memory")
    nnx.update(part.terms[name], nnx.state(whole.terms[name]))
    g = jax.random.normal(jax.random.key(0), (2, 4, 6), jnp.float64)
    energies, update = part.energies_and_update(g)
    E, u = whole.terms[name].energy_and_update(g)
    assert list(energies) == [name]
    assert_close(energies[name], E)
    assert_close(energies.total, E)
    assert_close(update, u)
    assert_gradient(part.energy, g, -update)


def test_a_block_of_nothing_is_refused():
    with pytest.raises(ValueError, match="^terms: expected at least one"):
        block(6, 0, 3, 0)


# ------------------------------------------------------------------------------------
# terms besides


@pytest.mark.parametrize("factor", [0.0, -0.7, 2.0])
def test_fields_and_factors_are_their_formulas_and_gradients(x64, factor):
    rng = np.random.default_rng(3)
    c = dict(lead=(2, 2), N=3, D=4, H=2, Y=3, K=5, beta="per head")
    c |= dict(learn_beta=True, self_attention=False)
    g, field = tokens_of(c, rng), tokens_of(c, rng)
    E, u = both(ExternalField(), g, field=field)
    assert_close(E, -np.einsum("...nd,...nd->...", field, g), rtol=1e-12)
    assert_close(u, field, rtol=1e-12)
    check_gradient(ExternalField(), g, field=field)
    mask = mask_of("blind rows", c["lead"], 3, rng)
    for term, context in (
        (attention_of(c, rng), dict(mask=mask)),
        (memory_of(c, SIGNED, rng), {}),
        (ExternalField(), dict(field=field)),
    ):
        scaled = Scaled(term, factor)
        assert scaled.takes == term.takes
        whole = both(term, g, **context)
        for a, b in zip(both(scaled, g, **context), whole, strict=True):
            assert_close(a, factor * np.asarray(b), rtol=1e-12)
        check_gradient(scaled, g, **context)


MODULES = dict(
    norm=EnergyLayerNorm(4),
    attention=attention(4, 2, 3),
    self_attention=attention(4, 2, 3, self_attention=True),
    normalized=attention(4, 2, 3, normalize=True),
    memory=memory(4, 5),
    softmax=memory(4, 5, "softmax"),
    signed=signed(4, 5),
    block=block(4, 2, 3, 5),
)


@pytest.mark.parametrize(
    "x, error, match",
    [
        (np.ones(4, np.float32), ValueError, r"\(\.\.\., N, D\).*got \(4,\)"),
        (np.float32(1), ValueError, r"got \(\)"),
        (np.ones((3, 5), np.float32), ValueError, r"D = 4.*got \(3, 5\)"),
        (np.ones((2, 4, 3), np.float32), ValueError, r"D = 4.*got \(2, 4, 3\)"),
        (np.ones((2, 3, 4), int), TypeError, "floating.*int"),
        (np.ones((2, 3, 4), bool), TypeError, "floating.*bool"),
        (np.ones((2, 3, 4), np.complex64), TypeError, "floating.*complex"),
        (np.ones((2, 0, 4), np.float32), ValueError, r"got \(2, 0, 4\)"),
    ],
    ids=lambda v: str(getattr(v, "shape", "")),
)
@pytest.mark.parametrize("name", ["norm", "block"])
def test_bad_tokens_are_refused_by_name(name, x, error, match):
    module, x = MODULES[name], jnp.asarray(x)
    arg = "x" if name == "norm" else "g"
    for method in (
        (module, module.lagrangian)
        if name == "norm"
        else (module.energy, module.update, module.energies, module.updates)
    ):
        with pytest.raises(error, match=rf"^{arg}: .*{match}"):
            method(x)


@pytest.mark.parametrize(
    "mask, error, match",
    [
        (np.ones((3, 3), np.float32), TypeError, "boolean.*float32"),
        (np.ones((3, 3), np.int32), TypeError, "boolean.*int32"),
        (np.ones((2, 3), bool), ValueError, r"got \(2, 3\)"),
        (np.ones(3, bool), ValueError, r"got \(3,\)"),
        (np.ones((), bool), ValueError, r"got \(\)"),
        (np.ones((1, 1), bool), ValueError, r"got \(1, 1\)"),
        (np.ones((2, 1, 3), bool), ValueError, r"\(2, 3, 3\).*got \(2, 1, 3\)"),
        (
            np.ones((3, 3, 2), bool),
            ValueError,
            r"got \(3, 3, 2\)",
        ),  # the batch axis last
        (np.ones((3, 3, 3), bool), ValueError, r"got \(3, 3, 3\)"),  # of another batch
        # an axis for heads is not for the caller to add
        (np.ones((1, 2, 3, 3), bool), ValueError, r"got \(1, 2, 3, 3\)"),
    ],
    ids=lambda v: str(getattr(v, "shape", "")),
)
@pytest.mark.parametrize("name", ["attention", "self_attention", "block"])
def test_bad_masks_are_refused_by_name(name, mask, error, match):
    g = jnp.ones((2, 3, 4))
    for method in (MODULES[name].energy, MODULES[name].update):
        with pytest.raises(error, match=f"^mask: .*{match}"):
            method(g, mask=jnp.asarray(mask))


@pytest.mark.parametrize(
    "shape", [(3,), (), (2, 3), (3, 3, 3), (3, 2, 3, 3), (2, 2, 2, 3, 3)]
)
@pytest.mark.parametrize("name", ["weights", "bias"])
def test_bad_pairs_are_refused_by_name(name, shape):
    "Neither of another number of tokens, nor of heads, nor of another batch."
    for module in (MODULES["attention"], MODULES["block"]):
        for method in (module.energy, module.update):
            with pytest.raises(
                ValueError, match=f"^{name}: .*H, N, N.*got .{str(shape)[1:-1]}"
            ):
                method(jnp.ones((2, 3, 4)), **{name: jnp.ones(shape)})


def test_positions_of_other_patches_are_refused():
    module = attention(4, 2, 3, positions=RelativePositions(2, 2))
    with pytest.raises(ValueError, match="^positions: .*"):
        module.energy(jnp.ones((2, 3, 4)))
    module = attention(4, 3, 3, positions=RelativePositions(2, 2))
    with pytest.raises(ValueError, match="^positions: .*"):
        module.energy(jnp.ones((2, 4, 4)))


@pytest.mark.parametrize("name", [name for name in MODULES if name != "norm"])
def test_a_sample_that_is_not_a_number_says_so_and_spoils_no_other(name):
    g = jnp.asarray(
        changed(np.random.default_rng(0).normal(size=(2, 3, 4)), (0, 1, 2), np.nan),
        jnp.float32,
    )
    E, u = MODULES[name].energy(g), MODULES[name].update(g)
    assert np.isnan(E[0]) and np.isnan(u[0]).any()
    assert np.isfinite(E[1]) and np.isfinite(u[1]).all()


def test_lists_are_refused_by_name():
    x = [[1.0, 2.0, 3.0, 4.0]]
    for call, name in ((MODULES["norm"], "x"), (MODULES["block"].update, "g")):
        with pytest.raises(TypeError, match=f"^{name}: .*list"):
            call(x)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "norm"])
def test_an_empty_batch_is_no_mistake(name):
    g = jnp.ones((0, 3, 4))
    assert MODULES[name].energy(g).shape == (0,) and MODULES[name].update(g).shape == (
        0,
        3,
        4,
    )
