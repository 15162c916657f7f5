"""The energies and their gradients: the paper's index formulas written out in loops,
beside the modules with every option.
"""

from functools import partial
from math import erf, exp, log, pi, sqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from et_nbdev.attention import (
    EnergyAttention,
    PairBias,
    RelativeDistances,
    RelativePositions,
    log_sum_exp,
    softmax,
)
from et_nbdev.block import Block
from et_nbdev.energy import ExternalField, Scaled
from et_nbdev.memory import HopfieldMemory, SignedMemory
from et_nbdev.norm import EnergyLayerNorm
from et_nbdev.testing import (
    assert_close,
    assert_gradient,
    attention_update,
    hessian,
    memory_update,
)

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("compile_quickly")]
B, N, D, H, Y, K = 2, 4, 5, 2, 3, 6
BETA = [0.3, 2.5]
F64 = dict(param_dtype=jnp.float64)


def rng(seed=0):
    return np.random.default_rng(seed)


def tokens(seed=0, shape=(B, N, D)):
    return rng(seed).normal(size=shape)


def randomized(module, seed=1):
    "The module with random weights, none of them at its default."
    draw = rng(seed)
    nnx.update(
        module,
        jax.tree.map(
            lambda w: jnp.asarray(0.7 * draw.normal(size=w.shape), w.dtype),
            nnx.state(module, nnx.Param),
        ),
    )
    return module


def attention_of(kind=EnergyAttention, seed=1, **options):
    options = dict(beta=BETA) | options
    return randomized(kind(D, H, Y, **options, **F64, rngs=nnx.Rngs(0)), seed)


MEMORIES = {
    "relu": (HopfieldMemory, {}),
    "power 2.5": (HopfieldMemory, dict(activation="power", power=2.5)),
    "power 4": (HopfieldMemory, dict(activation="power", power=4.0)),
    "gelu": (HopfieldMemory, dict(activation="gelu")),
    "warm softmax": (HopfieldMemory, dict(activation="softmax", beta=0.4)),
    "cold softmax": (HopfieldMemory, dict(activation="softmax", beta=3.0)),
    "signed": (SignedMemory, dict(negative=0.4)),
    "signed gelu": (SignedMemory, dict(negative=0.4, activation="gelu")),
}


def memory_of(name, seed=1):
    kind, options = MEMORIES[name]
    return randomized(kind(D, K, **options, **F64, rngs=nnx.Rngs(0)), seed)


def norm_of(gamma=1.7):
    norm = randomized(EnergyLayerNorm(D, **F64))
    norm.rho[...] = jnp.log(jnp.expm1(jnp.asarray(gamma, norm.rho.dtype)))
    return norm


def both(module, g, **context):
    energy = partial(module.energy, **context)
    return jax.device_get((energy(g), module.update(g, **context)))


def changed(a, index, value):
    a = np.array(a)
    a[index] = value
    return a


# ------------------------------------------------------------------------------------
# the formulas, index by index, one sample


def attention_by_index(g, m, sees, weights, bias):
    """Eq. (3), (4), (12) and the update, in loops. sees[C, B]: does key B stand in the
    sum of query C? The last heads repel.
    """
    Wq, Wk, beta = (np.asarray(w[...]) for w in (m.Wq, m.Wk, m.beta))
    tokens, entries, E, u = range(len(g)), range(Y), 0.0, np.zeros_like(g)
    for h in range(H):
        s = -1.0 if h >= H - m.repelling else 1.0
        project = lambda W: [
            [sum(W[h, i, a] * g[A, i] for i in range(D)) for a in entries]
            for A in tokens
        ]
        long = lambda v: sqrt(sum(e**2 for e in v) / Y + 1e-5) if m.normalize else 1.0
        Q, K = project(Wq), project(Wk)
        lq, lk = ([long(v) for v in vs] for vs in (Q, K))
        Q = [[e / n for e in v] for v, n in zip(Q, lq)]
        K = [[e / n for e in v] for v, n in zip(K, lk)]
        dot = lambda C, B: sum(K[B][a] * Q[C][a] for a in entries)
        score = lambda C, B: beta[h] * weights[h, C, B] * dot(C, B) + bias[h, C, B]
        w = [[exp(score(C, B)) if sees[C, B] else 0.0 for B in tokens] for C in tokens]
        Z = [sum(row) for row in w]
        E -= s * sum(log(z) for z in Z if z > 0) / beta[h]
        P = lambda C, B: w[C][B] / Z[C] * weights[h, C, B] if sees[C, B] else 0.0

        def turned(pull, v, length):
            "By an entry of Q, from that by an entry of what it is divided to."
            along = sum(p * e for p, e in zip(pull, v)) / Y if m.normalize else 0.0
            return [(p - e * along) / length for p, e in zip(pull, v)]

        for A in tokens:
            q = [sum(P(A, C) * K[C][a] for C in tokens) for a in entries]
            k = [sum(P(C, A) * Q[C][a] for C in tokens) for a in entries]
            q, k = turned(q, Q[A], lq[A]), turned(k, K[A], lk[A])
            for i in range(D):
                pulls = (Wq[h, i, a] * q[a] + Wk[h, i, a] * k[a] for a in entries)
                u[A, i] += s * sum(pulls)
    return E, u


def memory_by_index(g, m):
    "Eq. (5), its relatives, and the update, in loops; the last memories repel."
    xi, E, u = np.asarray(m.xi[...]), 0.0, np.zeros_like(g)
    signed = isinstance(m, SignedMemory)
    b = np.asarray(m.threshold[...]) if signed else np.zeros(K)
    sign = [-1.0 if signed and k >= K - m.num_negative else 1.0 for k in range(K)]
    for A in range(len(g)):
        a = [sum(xi[k, j] * g[A, j] for j in range(D)) + b[k] for k in range(K)]
        if m.activation == "softmax":
            Z = sum(exp(m.beta * o) for o in a)
            E -= log(Z) / m.beta
            h = [exp(m.beta * o) / Z for o in a]
        elif m.activation == "gelu":
            cdf = [(1 + erf(o / sqrt(2))) / 2 for o in a]
            density = [exp(-o * o / 2) / sqrt(2 * pi) for o in a]
            F = [((o * o - 1) * P + o * p) / 2 for o, P, p in zip(a, cdf, density)]
            E -= sum(s * f for s, f in zip(sign, F))
            h = [s * o * P for s, o, P in zip(sign, a, cdf)]
        else:
            n = {"relu": 2.0, "power": m.power}[m.activation]
            E -= sum(s * max(o, 0.0) ** n for s, o in zip(sign, a)) / n
            h = [s * max(o, 0.0) ** (n - 1) for s, o in zip(sign, a)]
        for i in range(D):
            u[A, i] = sum(h[k] * xi[k, i] for k in range(K))
    return E, u


def norm_by_index(x, gamma, delta, eps):
    "Eq. (1) and (2), in loops: L of every token, g of every entry."
    L, g = np.zeros(len(x)), np.zeros_like(x)
    for A, token in enumerate(x):
        n = len(token)
        mean = sum(token) / n
        sigma = sqrt(sum((e - mean) ** 2 for e in token) / n + eps)
        L[A] = n * gamma * sigma + sum(d * e for d, e in zip(delta, token))
        g[A] = [gamma * (e - mean) / sigma + d for e, d in zip(token, delta)]
    return L, g


def per_sample(f, g, *args):
    "Both results of `f`, for every sample of a batch."
    found = [f(g[i], *(a[i] for a in args)) for i in range(len(g))]
    return tuple(np.stack(results) for results in zip(*found))


def bias_by_index(positions, z):
    "The bias of every pair, in loops."
    if isinstance(positions, RelativePositions):  # four patches of a picture
        at = [(0, 0), (0, 1), (1, 0), (1, 1)]
        of = lambda t, C, B: t[at[C][0] - at[B][0] + 1, at[C][1] - at[B][1] + 1]
    elif isinstance(positions, RelativeDistances):
        of = lambda t, C, B: -exp(t) * sum((z[C] - z[B]) ** 2)
    else:
        of = lambda t, C, B: t[C, B]
    (tables,) = (np.asarray(t[...]) for t in jax.tree.leaves(nnx.state(positions)))
    return np.array(
        [[[of(t, C, A) for A in range(N)] for C in range(N)] for t in tables]
    )


def check_attention(module, g, mask=None, weights=None, bias=None, **places):
    "Energy and update are the paper's, to 1e-12."
    sees = np.broadcast_to(True if mask is None else mask, (B, N, N))
    sees = sees if module.self_attention else sees & ~np.eye(N, dtype=bool)
    A = np.broadcast_to(1.0 if weights is None else weights, (B, H, N, N))
    b = np.broadcast_to(0.0 if bias is None else bias, (B, H, N, N))
    if module.positions is not None:
        b = b + bias_by_index(module.positions, places.get("coordinates"))
    f = lambda g, *pairs: attention_by_index(g, module, *pairs)
    context = dict(mask=mask, weights=weights, bias=bias, **places)
    found = both(module, g, **context)
    for actual, expected in zip(found, per_sample(f, g, sees, A, b)):
        assert_close(actual, expected, rtol=1e-12, atol=1e-14)


# ------------------------------------------------------------------------------------
# attention

MASKS = {
    "none": None,
    "shared": rng(5).random((N, N)) < 0.6,
    # an empty row, and a key that nobody sees
    "blind": changed(rng(6).random((B, N, N)) < 0.7, (0, 1), False)
    & (np.arange(N) != 2),
    "nothing": np.zeros((N, N), bool),
}
PAIRS = dict(weights=tokens(7, (H, N, N)), bias=tokens(8, (B, 1, N, N)))
PLACES = {
    "grid": lambda: RelativePositions(2, H, **F64),
    "pair bias": lambda: PairBias(N, H, **F64),
    "distances": lambda: RelativeDistances(H, **F64),
}
OPTIONS = {
    "plain": {},
    "learned beta": dict(beta=nnx.Param(BETA)),
    "self-attention": dict(self_attention=True),
    "normalize": dict(normalize=True),
    "repelling": dict(repelling=1),
    "everything": dict(normalize=True, repelling=1, beta=nnx.Param(BETA)),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", [*OPTIONS, *PLACES])
def test_attention_is_its_formula_and_its_update_is_the_gradient(x64, name, mask):
    options = OPTIONS.get(name, {})
    if name in PLACES or name == "everything":
        options = options | dict(positions=PLACES.get(name, PLACES["distances"])())
    module, g = attention_of(**options), tokens()
    context = dict(mask=MASKS[mask])
    if name == "everything" or mask == "shared":
        context |= PAIRS
    if "coordinates" in module.takes:
        context["coordinates"] = tokens(9, (N, 2))
    assert module.takes >= set(context)
    check_attention(module, g, **context)
    assert_gradient(module, g, **context)
    if name != "plain" and mask != "nothing":  # and it makes a difference
        learned = "log_beta" in vars(module)
        plain = attention_of(beta=nnx.Param(BETA) if learned else BETA)
        for weight in vars(plain).keys() & {"Wq", "Wk", "log_beta"}:
            getattr(plain, weight)[...] = getattr(module, weight)[...]
        apart = both(plain, g, mask=MASKS[mask])[1] - both(module, g, **context)[1]
        assert np.abs(apart).max() > 0.01 or name == "learned beta"


@pytest.mark.parametrize("shape", [(N, N), (1, 1, N, N), (2, 1, N, N), (3, N, N)])
def test_shared_masks_broadcast_and_a_full_one_is_none(x64, shape):
    module, g, some = attention_of(), tokens(shape=(2, 3, N, D)), MASKS["shared"]
    for given, same in ((True, None), (some, some)):
        mask = np.broadcast_to(given, shape)
        whole = both(module, g, mask=same)
        for a, b in zip(both(module, g, mask=mask), whole):
            assert_close(a, b, rtol=1e-14)
        for a, b in zip(both(module, g[1, 2], mask=same), whole):  # no batch axes
            assert_close(a, b[1, 2], rtol=1e-12, atol=1e-14)


def test_beta_is_one_over_root_y_by_default_and_one_a_head_on_request():
    make = partial(EnergyAttention, 6, 2, 4, rngs=nnx.Rngs(0))
    count = lambda module: sum(w.size for w in jax.tree.leaves(nnx.state(module)))
    for options, beta, size in (
        ({}, [0.5, 0.5], 96),
        (dict(beta=3), [3.0, 3.0], 96),
        (dict(beta=jnp.array([1.0, 2.0])), [1.0, 2.0], 96),
        (dict(beta=nnx.Param(0.5)), [0.5, 0.5], 97),
        (dict(beta=nnx.Param([1.0, 2.0])), [1.0, 2.0], 98),
        (dict(positions=PairBias(3, 2)), [0.5, 0.5], 96 + 18),
        (dict(positions=RelativeDistances(2)), [0.5, 0.5], 96 + 2),
    ):
        module = make(**options)
        np.testing.assert_allclose(module.beta, beta, rtol=1e-6)
        assert count(module) == size
    module = make(beta=nnx.Param(0.5))
    module.log_beta[...] = jnp.asarray(-50.0)  # wherever training drives it
    assert (module.beta > 0).all()


def test_starts():
    scale = lambda w: float(jnp.std(w[...]))
    for options, spread in (({}, 1 / 8), (dict(init_scale=0.02), 0.02)):
        heads = EnergyAttention(64, 2, 64, **options, rngs=nnx.Rngs(0))
        memory = HopfieldMemory(64, 128, **options, rngs=nnx.Rngs(0))
        weights = heads.Wq, heads.Wk, memory.xi
        np.testing.assert_allclose([*map(scale, weights)], spread, rtol=0.05)
        assert not np.allclose(heads.Wq[...], heads.Wk[...])
    np.testing.assert_allclose(EnergyLayerNorm(4).gamma, 1, rtol=1e-6)
    zero, far = RelativePositions(3, 5), RelativePositions(3, 5, "distance")
    assert not np.any(zero()) and not np.any(PairBias(3, 2)())
    apart = np.hypot(*np.mgrid[:3, :3]).ravel()  # from the first patch
    # slopes double from head to head, four times
    for head, slope in enumerate((0.25, 0.5, 1.0, 2.0, 0.25)):
        np.testing.assert_allclose(far()[head, 0], -slope * apart, rtol=1e-6)
        np.testing.assert_array_equal(far()[head], far()[head].T)
    np.testing.assert_allclose(RelativeDistances(5).factor, [0.25, 0.5, 1, 2, 0.25])


def test_a_lone_token_sees_only_itself(x64):
    g = tokens(shape=(B, 1, D))
    for found in both(attention_of(), g):
        assert not np.any(found)
    module = attention_of(self_attention=True)
    Q, K = module.queries_and_keys(g)
    assert_close(module.energy(g), -(Q * K).sum((1, 2, 3)), rtol=1e-12)


# ------------------------------------------------------------------------------------
# memory


@pytest.mark.parametrize("name", MEMORIES)
def test_memory_is_its_formula_and_its_update_is_the_gradient(x64, name):
    module, g = memory_of(name), tokens()
    found = both(module, g)
    for actual, expected in zip(
        found, per_sample(partial(memory_by_index, m=module), g)
    ):
        assert_close(actual, expected, rtol=1e-12)
    assert_gradient(module, g)
    h = np.asarray(module.hidden(g))
    assert_close(h @ np.asarray(module.xi[...]), found[1], rtol=1e-12)
    # every token by itself
    E, u = both(module, g[..., None, :])
    assert_close(E.sum(-1), found[0], rtol=1e-12)
    assert_close(u[..., 0, :], found[1], rtol=1e-12)


@pytest.mark.parametrize("share, negative", [(0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_the_last_memories_repel(x64, share, negative):
    memory = SignedMemory(4, 8, share, **F64, rngs=nnx.Rngs(0))
    assert not np.any(memory.threshold[...]) and memory.num_negative == negative
    h = np.asarray(memory.hidden(tokens(shape=(50, 3, 4))))
    assert (h[..., : 8 - negative] >= 0).all() and (h[..., 8 - negative :] <= 0).all()
    assert all(np.any(h[..., m]) for m in range(8))


# ------------------------------------------------------------------------------------
# norm


@pytest.mark.parametrize("gamma", [1.7, 1e-300])
@pytest.mark.parametrize("eps, scale", [(0.1, 1.0), (1e-5, 20.0)])
def test_norm_is_a_gradient_and_its_hessian_is_known_to_the_eigenvalues(
    x64, gamma, eps, scale
):
    x, u, norm = scale * tokens() + 3.0, jnp.asarray(tokens(4)), norm_of(gamma)
    norm.eps, x = eps, jnp.asarray(x)
    L, g = per_sample(lambda x: norm_by_index(x, gamma, norm.delta[...], eps), x)
    assert_close(norm.gamma, np.float64(gamma), rtol=1e-12)
    assert_close(norm.lagrangian(x), L, rtol=1e-12)
    assert_close(norm(x), g, rtol=1e-12)
    assert_close(norm(x[0, 1:2])[0], norm(x)[0, 1], rtol=1e-12)
    assert_gradient(norm.lagrangian, x, norm(x))
    M = np.asarray(hessian(x, gamma, eps))
    slopes = jax.jacobian(lambda x: norm(x[None])[0])
    assert_close(M, jax.vmap(jax.vmap(slopes))(x), rtol=1e-9, atol=1e-12)
    sigma = np.sqrt(np.var(x, -1) + eps)
    expected = [0 * sigma, gamma * eps / sigma**3, *[gamma / sigma] * (D - 2)]
    expected = np.sort(np.stack(expected, -1), -1)
    assert_close(np.linalg.eigvalsh(M), expected, rtol=1e-9, atol=1e-12)
    turned = sigma[..., None] / gamma * np.einsum("bnij,bnj->bni", M, u)
    assert_close(norm.turning(x, u), turned, rtol=1e-9)


@pytest.mark.parametrize("rho", [-1e30, -90.0, 0.0, 1e3])
def test_no_parameter_makes_gamma_negative(rho):
    norm = EnergyLayerNorm(4)
    norm.rho[...] = jnp.asarray(rho, jnp.float32)
    slope = jax.grad(lambda norm: norm.gamma)(norm).rho[...]
    assert norm.gamma >= 0 and np.isfinite([norm.gamma, slope]).all()
    assert np.isfinite(norm(jnp.arange(12.0).reshape(3, 4))).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_constant_tokens_have_finite_values_and_gradients(dtype):
    norm = EnergyLayerNorm(4)
    norm.delta[...] = jnp.arange(4.0)
    x = jnp.asarray(np.array([[0, 0, 0, 0], [3, 3, 3, 3], [1, 2, 3, 4]]), dtype)
    assert norm(x).dtype == dtype and norm.lagrangian(x).dtype == jnp.float32
    np.testing.assert_array_equal(norm(x)[:2], np.tile(np.arange(4), (2, 1)))  # γ·0 + δ
    loss = lambda norm, x: jnp.sum(norm(x).astype(jnp.float32) ** 3)
    slopes = (
        jax.grad(loss, (0, 1))(norm, x),
        jax.hessian(lambda x: norm.lagrangian(x).sum())(x),
    )
    for leaf in jax.tree.leaves(slopes):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()


# ------------------------------------------------------------------------------------
# a block, and what training differentiates


@pytest.mark.parametrize("name", ["relu", "signed gelu"])
def test_block_descends_the_sum_of_its_energies(x64, name):
    r"""Eq. (7), too: along x + t u with u = −∂E/∂g, dE/dt at t = 0 is −uᵀMu, and that is
    never positive.
    """
    heads, memory = attention_of(normalize=True, repelling=1), memory_of(name)
    block, x = Block(norm_of(), attention=heads, memory=memory), tokens()
    g, pairs = block.norm(x), PAIRS | dict(mask=MASKS["blind"])
    energies, u = block.energies_and_update(g, **pairs)
    assert list(energies) == ["attention", "memory"]
    (E_att, u_att), (E_hn, u_hn) = both(heads, g, **pairs), both(memory, g)
    assert_close(energies["attention"], E_att, rtol=1e-14)
    assert_close(energies["memory"], E_hn, rtol=1e-14)
    assert_close(block.energy(g, **pairs), E_att + E_hn, rtol=1e-14)
    assert_close(u, u_att + u_hn, rtol=1e-14)
    assert_gradient(block, g, **pairs)
    along = lambda x: block.energy(block.norm(x), **pairs)
    rate = jax.jvp(along, (x,), (u,))[1]
    M = hessian(x, block.norm.gamma)
    assert_close(rate, -jnp.einsum("bni,bnij,bnj->b", u, M, u), rtol=1e-9)
    assert (rate <= 1e-12).all()


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


@pytest.mark.parametrize("name", MEMORIES)
def test_a_gradient_through_an_update_is_that_through_the_formula_derived_by_hand(
    x64, name
):
    "In every parameter and in g; each of them is reached."
    options = dict(normalize=True, repelling=1, beta=nnx.Param(BETA))
    heads = attention_of(positions=PLACES["pair bias"](), **options)
    block = Block(norm_of(), attention=heads, memory=memory_of(name))
    g, v = tokens(), tokens(4)
    pairs = {k: np.broadcast_to(a, (B, H, N, N)) for k, a in PAIRS.items()}
    pairs["mask"] = MASKS["blind"]

    def by_hand(block, g):
        moved = attention_update(block.attention, g, **pairs)
        return moved + memory_update(block.memory, g)

    automatic = lambda block, g: block.update(g, **pairs)
    slope = lambda update: jax.jit(
        jax.grad(lambda block, g: jnp.vdot(v, update(block, g)), (0, 1))
    )(block, g)
    found, wanted = slope(automatic), slope(by_hand)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        assert np.any(a) or "norm" in str(path), f"no gradient reaches {path}"
        assert_close(a, b, rtol=1e-9)


@pytest.mark.parametrize("factor", [0.0, -0.7, 2.0])
def test_fields_and_factors_are_their_formulas_and_gradients(x64, factor):
    g, field = tokens(), tokens(2)
    E, u = both(ExternalField(), g, field=field)
    assert_close(E, -np.einsum("bnd,bnd->b", field, g), rtol=1e-12)
    assert_close(u, field, rtol=1e-12)
    for term, context in (
        (attention_of(), dict(mask=MASKS["blind"])),
        (memory_of("signed"), {}),
        (ExternalField(), dict(field=field[0, 0])),  # one for all tokens
    ):
        scaled = Scaled(term, factor)
        assert scaled.takes == term.takes
        found, whole = (both(m, g, **context) for m in (scaled, term))
        for a, b in zip(found, whole, strict=True):
            assert_close(a, factor * np.asarray(b), rtol=1e-12)
        assert_gradient(scaled, g, **context)


# ------------------------------------------------------------------------------------
# precision


@partial(jax.jit, static_argnums=0)
def everything(graphdef, state, g, context):
    "Energy, update, and the gradient of a loss on both."

    def loss(state, g):
        E, u = nnx.merge(graphdef, state).energy_and_update(g, **context)
        return (jnp.vdot(u, u) + E.sum()).astype(jnp.float32)

    E, u = nnx.merge(graphdef, state).energy_and_update(g, **context)
    return E, u, jax.grad(loss, (0, 1))(state, g)


def cast(tree, dtype):
    return jax.tree.map(lambda w: np.asarray(w).astype(dtype), tree)


LARGE = {
    "attention": (lambda **r: EnergyAttention(8, 2, 4, 2.0, **r), 100.0, 1e-5),
    "cold attention": (lambda **r: EnergyAttention(8, 2, 4, 2e4, **r), 1.0, 2e-2),
    "relu": (lambda **r: HopfieldMemory(8, 6, **r), 1e4, 1e-5),
    "power": (lambda **r: HopfieldMemory(8, 6, "power", **r), 1e4, 1e-5),
    "gelu": (lambda **r: HopfieldMemory(8, 6, "gelu", **r), 1e4, 1e-5),
    "softmax": (lambda **r: HopfieldMemory(8, 6, "softmax", **r), 1e4, 1e-5),
    "cold": (lambda **r: HopfieldMemory(8, 6, "softmax", beta=1e4, **r), 1.0, 2e-2),
    "signed": (lambda **r: SignedMemory(8, 6, 0.4, **r), 1e4, 1e-5),
}


@pytest.mark.parametrize("name", LARGE)
def test_scores_of_ten_thousand_do_not_overflow_in_single_precision(x64, name):
    """The same in float32 and float64. A β of 10⁴ magnifies the rounding of a score by
    itself, and the derivative of a softmax by its square, so that gradients, unlike
    values, can then be no more than roughly right in single precision.
    """
    make, scale, rtol = LARGE[name]
    graphdef, state = nnx.split(make(rngs=nnx.Rngs(0)))
    g = scale * tokens(7, (2, 4, 8)).astype(np.float32)
    context = dict(mask=MASKS["blind"]) if "attention" in name else {}
    single, double = (
        jax.tree.leaves(everything(graphdef, cast(state, d), g.astype(d), context))
        for d in (np.float32, np.float64)
    )
    for i, (a, b) in enumerate(zip(single, cast(double, np.float32), strict=True)):
        assert_close(a, b, rtol=1e-5 if i < 2 else rtol)  # energy, update; gradients


BF16, F32 = jnp.bfloat16, jnp.float32


@pytest.mark.parametrize(
    "activation, x_dtype, options",
    [
        ("relu", F32, dict(dtype=BF16)),
        ("softmax", BF16, dict(dtype=BF16)),
        ("gelu", BF16, dict()),
        ("power", F32, dict(param_dtype=BF16)),
        ("relu", BF16, dict(dtype=F32)),
        ("relu", jnp.float16, dict()),
    ],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_half_precision_is_close_trains_and_keeps_energies_in_single(
    activation, x_dtype, options, normalize
):
    def make(**options):
        shared = dict(rngs=nnx.Rngs(0), **options)
        heads = EnergyAttention(32, 2, 16, normalize=normalize, **shared)
        memory = HopfieldMemory(32, 64, activation, **shared)
        return Block(EnergyLayerNorm(32), attention=heads, memory=memory)

    block, reference = make(**options), make()
    nnx.update(reference, cast(nnx.state(block), F32))
    x = tokens(3, (2, N, 32)).astype(np.float32)
    E, u = reference.energies_and_update(reference.norm(x), mask=MASKS["blind"])
    look = lambda block: block.energies_and_update(
        block.norm(jnp.asarray(x, x_dtype)), mask=MASKS["blind"]
    )
    energies, update = look(block)
    assert update.dtype == x_dtype
    for name, b in E.items():
        assert energies[name].dtype == b.dtype == F32
        assert_close(energies[name], b, rtol=2e-2)
    assert_close(np.asarray(update, F32), u, rtol=2e-2)
    slopes = jax.grad(lambda block: jnp.sum(look(block)[1].astype(F32) ** 2))(block)
    for slope in jax.tree.leaves(slopes.attention):
        assert np.isfinite(np.asarray(slope, F32)).all() and np.any(slope)


@pytest.mark.parametrize("factor", [None, 0.5])
def test_fields_in_half_precision_have_energies_in_single(factor):
    g, field = tokens(shape=(2, 2, 6, 32)).astype(np.float32)
    term = ExternalField() if factor is None else Scaled(ExternalField(), factor)
    E, u = term.energy_and_update(jnp.asarray(g, BF16), field=jnp.asarray(field, BF16))
    assert E.dtype == F32 and u.dtype == BF16
    whole = term.energy_and_update(g, field=field)
    assert_close(E, whole[0], rtol=2e-2)
    assert_close(u.astype(F32), whole[1], rtol=2e-2)


# ------------------------------------------------------------------------------------
# known mistakes: each is caught by the gradient, or, where it is made in the energy and
# in the update alike, by the formulas


def wrong_attention(m, mistake, g, mask):
    "The energy and update in plain lines, each with a mistake to be switched on."
    see = mask if mistake == "the diagonal stays" else mask & ~np.eye(N, dtype=bool)
    Q, K = (jnp.einsum("bnd,hdy->bhny", g, W[...]) for W in (m.Wq, m.Wk))
    s = m.beta[None, :, None, None] * Q @ K.mT
    zero = mistake == "masked scores times zero"
    s = (
        s * see[None, None].astype(float)
        if zero
        else jnp.where(see[None, None], s, -jnp.inf)
    )
    P = P_key = jax.nn.softmax(s, -1)
    if mistake == "second softmax over the wrong axis":
        P_key = jax.nn.softmax(s, -2)
    if mistake == "second softmax not transposed":
        P_key = P.mT
    scale = jnp.ones(H) if mistake == "no 1/β" else 1 / m.beta
    E = -jnp.sum(scale[None] * jax.nn.logsumexp(s, -1).sum(-1), -1)
    u = jnp.einsum("bhny,hdy->bnd", P @ K, m.Wq[...])
    if mistake != "no second term":
        u = u + jnp.einsum("bhny,hdy->bnd", P_key.mT @ Q, m.Wk[...])
    by_both = mistake == "energy over batch × tokens"
    over = B * N if by_both or mistake == "update over batch × tokens" else 1
    return E / (over if by_both else 1), u / over


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
    m, g, mask = attention_of(), tokens(), np.ones((N, N), bool)
    mask[2, 3] = False
    wrong = partial(wrong_attention, m, mistake, mask=mask)
    right = [np.allclose(*pair) for pair in zip(wrong(g), both(m, g, mask=mask))]
    assert all(right) == (mistake is None)
    check = lambda: assert_gradient(lambda g: wrong(g)[0], g, -wrong(g)[1])
    if caught_by_gradient:
        with pytest.raises(AssertionError, match="exceeds"):
            check()
    else:
        check()


@pytest.mark.parametrize("tokens_seen, delta", [(3, 1), (1, 1), (3, 0)])
def test_a_lagrangian_of_all_tokens_or_without_delta_is_caught(x64, tokens_seen, delta):
    "On one token, and at δ = 0, they pass: which is why there are three, and δ ≠ 0."
    x, norm = jnp.asarray(tokens()[:, :tokens_seen]), norm_of()
    norm.delta[...] = delta * norm.delta[...]

    def one_root(x):
        total = jnp.sqrt(x.var(-1).sum(-1) + 1e-5)
        return D * norm.gamma * total + (x @ norm.delta[...]).sum(-1)

    shiftless = lambda x: norm.lagrangian(x) - x @ norm.delta[...]
    for wrong, passes in ((one_root, tokens_seen == 1), (shiftless, not delta)):
        if passes:
            assert_gradient(wrong, x, norm(x))
        else:
            with pytest.raises(AssertionError, match="exceeds"):
                assert_gradient(wrong, x, norm(x))


# ------------------------------------------------------------------------------------
# bad input

NAN, INF = float("nan"), float("inf")
heads, memory, signed = (
    lambda *args, kind=kind, **options: kind(*args, rngs=nnx.Rngs(0), **options)
    for kind in (EnergyAttention, HopfieldMemory, SignedMemory)
)


@pytest.mark.parametrize(
    "make, match",
    [
        *[(partial(EnergyLayerNorm, dim), "dim") for dim in (1, -3, 4.0, True)],
        *[(partial(EnergyLayerNorm, 4, eps), "eps") for eps in (0.0, -1e-5, NAN, INF)],
        (partial(heads, 4, 2.0, 3), "num_heads"),
        (partial(heads, 0, 1, 1), "dim"),
        (partial(heads, 4, 0, 3), "num_heads"),
        (partial(heads, 4, 1, -2), "head_dim"),
        *[
            (partial(heads, 4, 2, 3, beta), "beta: expected positive, finite numbers")
            for beta in (0, -1.0, NAN, INF, [1.0, 0.0], [1.0], [1.0] * 3, "warm")
        ],
        (partial(heads, 4, 2, 3, nnx.Param(-1.0)), "beta"),
        *[(partial(heads, 4, 2, 3, repelling=n), "repelling") for n in (-1, 3, 0.5)],
        (partial(PairBias, 0, 2), "num_tokens"),
        (partial(PairBias, 3, 0), "num_heads"),
        (partial(RelativePositions, 0, 2), "side"),
        (partial(RelativePositions, 3, 2, "far"), "start.*zero.*distance"),
        (partial(RelativeDistances, 0), "num_heads"),
        *[(partial(signed, 4, 5, share), "negative") for share in (-0.1, 1.1, NAN)],
        (partial(signed, 4, 5, 0.5, "power"), "activation.*signs.*relu.*gelu"),
        (partial(memory, 0, 5), "dim"),
        (partial(memory, 4, "5"), "num_memories"),
        (partial(memory, 4, 5, "ReLU"), "activation.*relu.*power.*softmax"),
        *[
            (partial(memory, 4, 5, "power", power=n), r"power: .*\[2, inf\)")
            for n in (1.9, -3, NAN, INF, [2.0, 3.0])
        ],
        *[
            (partial(memory, 4, 5, "softmax", beta=beta), "beta")
            for beta in (0, -1.0, NAN, [1.0, 2.0])
        ],
        (partial(Scaled, ExternalField(), [1.0]), "factor: expected a number"),
    ],
)
def test_bad_settings_are_refused_by_name(make, match):
    with pytest.raises((ValueError, TypeError), match=f"^{match}"):
        make()


MODULES = dict(
    norm=EnergyLayerNorm(4),
    attention=heads(4, 2, 3),
    normalized=heads(4, 2, 3, normalize=True, self_attention=True),
    memory=memory(4, 5, "softmax"),
    signed=signed(4, 5),
)
MODULES["block"] = Block(
    MODULES["norm"], attention=MODULES["attention"], memory=MODULES["memory"]
)
TERMS = [name for name in MODULES if name != "norm"]


@pytest.mark.parametrize(
    "x, error, match",
    [
        (jnp.ones(4), ValueError, r"\(\.\.\., N, D\).*got \(4,\)"),
        (jnp.ones((3, 5)), ValueError, r"D = 4.*got \(3, 5\)"),
        (jnp.ones((2, 0, 4)), ValueError, r"got \(2, 0, 4\)"),
        (jnp.ones((2, 3, 4), int), TypeError, "floating.*int"),
        (jnp.ones((2, 3, 4), jnp.complex64), TypeError, "floating.*complex"),
        ([[1.0, 2.0, 3.0, 4.0]], TypeError, "floating.*list"),
    ],
)
def test_bad_tokens_are_refused_by_name(x, error, match):
    norm, block = MODULES["norm"], MODULES["block"]
    for name, method in (
        ("x", norm),
        ("x", norm.lagrangian),
        ("g", block.energies),
        ("g", block.update),
    ):
        with pytest.raises(error, match=rf"^{name}: .*{match}"):
            method(x)


@pytest.mark.parametrize(
    "name, given, error",
    [
        ("mask", np.ones((3, 3), np.float32), TypeError),
        ("mask", np.ones((3, 3), np.int32), TypeError),
        *[
            (name, np.ones(shape, bool if name == "mask" else np.float32), ValueError)
            for name, shapes in (
                # another batch, the batch axis last, an axis for heads
                ("mask", [(3, 3, 3), (3, 3, 2), (1, 2, 3, 3), (1, 1)]),
                ("bias", [(3, 3, 3), (3, 2, 3, 3), (2, 2, 2, 3, 3)]),
                ("weights", [()]),
            )
            for shape in [(3,), (2, 3), *shapes]
        ],
    ],
    ids=lambda v: str(getattr(v, "shape", "")),
)
def test_bad_pairs_are_refused_by_name(name, given, error):
    for module in (MODULES["attention"], MODULES["normalized"], MODULES["block"]):
        for method in (module.energy, module.update):
            with pytest.raises(error, match=f"^{name}: "):
                method(jnp.ones((2, 3, 4)), **{name: jnp.asarray(given)})


def test_positions_of_others_and_context_of_nobody_are_refused():
    for places in (RelativePositions(2, 2), PairBias(3, 3)):
        module = heads(4, 2, 3, positions=places)
        with pytest.raises(ValueError, match="^positions: .*"):
            module.energy(jnp.ones((2, 3, 4)))
    with pytest.raises(TypeError, match="unexpected keyword argument 'maks'"):
        MODULES["attention"].energy(jnp.ones((2, 3, 4)), maks=np.ones((3, 3), bool))
    far = heads(4, 2, 3, positions=RelativeDistances(2))
    with pytest.raises(TypeError, match="coordinates"):
        far.energy(jnp.ones((2, 3, 4)))
    with pytest.raises(ValueError, match="^coordinates: expected"):
        far.energy(jnp.ones((2, 3, 4)), coordinates=np.ones(3, np.float32))


@pytest.mark.parametrize("name", TERMS)
def test_a_sample_that_is_not_a_number_spoils_no_other_and_an_empty_batch_is_fine(name):
    g = jnp.asarray(changed(tokens(shape=(2, 3, 4)), (0, 1, 2), np.nan), jnp.float32)
    E, u = both(MODULES[name], g)
    assert np.isnan(E[0]) and np.isnan(u[0]).any()
    assert np.isfinite(E[1]) and np.isfinite(u[1]).all()
    E, u = both(MODULES[name], g[:0])
    assert E.shape == (0,) and u.shape == (0, 3, 4)
