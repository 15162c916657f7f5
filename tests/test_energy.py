"""The energies and their gradients: the paper's index formulas written out in loops,
beside the modules with every option.
"""

from functools import partial
from itertools import product
from math import erf, exp, log, pi, sqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from et_nbdev.attention import (
    EnergyAttention,
    PairBias,
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


def attention_by_index(g, sees, weights, bias, m):
    """Eq. (3), (4) and (12), in loops. sees[C, B]: does key B stand in the sum of query
    C? The last heads repel.
    """
    Wq, Wk, beta = (np.asarray(w[...]) for w in (m.Wq, m.Wk, m.beta))
    tokens, entries, E = range(len(g)), range(Y), 0.0

    def projected(W):
        rows = [
            [sum(W[i, a] * g[A, i] for i in range(D)) for a in entries] for A in tokens
        ]
        long = lambda v: sqrt(sum(e**2 for e in v) / Y + 1e-5) if m.normalize else 1.0
        return [[e / long(v) for e in v] for v in rows]

    for h in range(H):
        Q, K = projected(Wq[h]), projected(Wk[h])
        dot = lambda C, B: sum(K[B][a] * Q[C][a] for a in entries)
        score = lambda C, B: beta[h] * weights[h, C, B] * dot(C, B) + bias[h, C, B]
        Z = [sum(exp(score(C, B)) for B in tokens if sees[C, B]) for C in tokens]
        sign = -1.0 if h >= H - m.repelling else 1.0
        E -= sign * sum(log(z) for z in Z if z > 0) / beta[h]
    return E


def memory_by_index(g, m):
    "Eq. (5) and its relatives, in loops; the last memories repel."
    xi, signed = np.asarray(m.xi[...]), isinstance(m, SignedMemory)
    b = np.asarray(m.threshold[...]) if signed else np.zeros(K)
    sign = [-1.0 if signed and k >= K - m.num_negative else 1.0 for k in range(K)]
    cdf = lambda o: (1 + erf(o / sqrt(2))) / 2
    density = lambda o: exp(-o * o / 2) / sqrt(2 * pi)
    n = {"power": m.power}.get(m.activation, 2.0)
    rewards = {"gelu": lambda o: ((o * o - 1) * cdf(o) + o * density(o)) / 2}
    reward, E = rewards.get(m.activation, lambda o: max(o, 0.0) ** n / n), 0.0
    for token in g:
        a = [sum(xi[k, j] * token[j] for j in range(D)) + b[k] for k in range(K)]
        if m.activation == "softmax":
            E -= log(sum(exp(m.beta * o) for o in a)) / m.beta
        else:
            E -= sum(s * reward(o) for s, o in zip(sign, a))
    return E


def per_sample(f, g, *args):
    "`f` of every sample of a batch."
    return np.array([f(*sample) for sample in zip(g, *args)])


def bias_by_index(positions):
    "The bias of every pair, in loops."
    if isinstance(positions, RelativePositions):  # four patches of a picture
        at = [(0, 0), (0, 1), (1, 0), (1, 1)]
        of = lambda t, C, B: t[at[C][0] - at[B][0] + 1, at[C][1] - at[B][1] + 1]
    else:
        of = lambda t, C, B: t[C, B]
    (tables,) = (np.asarray(t[...]) for t in jax.tree.leaves(nnx.state(positions)))
    return np.array(
        [[[of(t, C, A) for A in range(N)] for C in range(N)] for t in tables]
    )


def expected_energy(m, g, mask=None, weights=1.0, bias=0.0):
    "Of an attention, by index."
    sees = np.broadcast_to(True if mask is None else mask, (B, N, N))
    sees = sees if m.self_attention else sees & ~np.eye(N, dtype=bool)
    A, b = (np.broadcast_to(a, (B, H, N, N)) for a in (weights, bias))
    b = b if m.positions is None else b + bias_by_index(m.positions)
    return per_sample(partial(attention_by_index, m=m), g, sees, A, b)


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
}
OPTIONS = {
    "plain": {},
    "learned beta": dict(beta=nnx.Param(BETA)),
    "self-attention": dict(self_attention=True),
    "normalize": dict(normalize=True),
    "repelling": dict(repelling=1),
    "everything": dict(normalize=True, repelling=1, beta=nnx.Param(BETA)),
}


EXTREMES = "plain", "everything"  # meet every mask; the other options two


@pytest.mark.parametrize(
    "name, mask",
    [
        (name, mask)
        for name, mask in product([*OPTIONS, *PLACES], MASKS)
        if name in EXTREMES or mask in ("shared", "blind")
    ],
)
def test_attention_is_its_formula_and_its_update_is_the_gradient(x64, name, mask):
    options = OPTIONS.get(name, {})
    if name in PLACES or name == "everything":
        options = options | dict(positions=PLACES.get(name, PLACES["grid"])())
    module, g = attention_of(**options), tokens()
    context = dict(mask=MASKS[mask])
    if name == "everything" or mask == "shared":
        context |= PAIRS
    assert module.takes >= set(context)
    energies = module.energy(g, **context), expected_energy(module, g, **context)
    assert_close(*energies, rtol=1e-12, atol=1e-14)
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


# ------------------------------------------------------------------------------------
# memory


@pytest.mark.parametrize("name", MEMORIES)
def test_memory_is_its_formula_and_its_update_is_the_gradient(x64, name):
    module, g = memory_of(name), tokens()
    found = both(module, g)
    expected = per_sample(partial(memory_by_index, m=module), g)
    assert_close(found[0], expected, rtol=1e-12)
    assert_gradient(module, g)
    h = np.asarray(module.hidden(g))
    assert_close(h @ np.asarray(module.xi[...]), found[1], rtol=1e-12)
    # every token by itself
    E, u = both(module, g[..., None, :])
    assert_close(E.sum(-1), found[0], rtol=1e-12)
    assert_close(u[..., 0, :], found[1], rtol=1e-12)


# ------------------------------------------------------------------------------------
# norm


@pytest.mark.parametrize("gamma", [1.7, 1e-300])
@pytest.mark.parametrize("eps, scale", [(0.1, 1.0), (1e-5, 20.0)])
def test_norm_is_a_gradient_and_its_hessian_is_known_to_the_eigenvalues(
    x64, gamma, eps, scale
):
    "The formulas are in nbs/03_norm.ipynb."
    x, u, norm = scale * tokens() + 3.0, jnp.asarray(tokens(4)), norm_of(gamma)
    norm.eps, x = eps, jnp.asarray(x)
    assert_close(norm.gamma, np.float64(gamma), rtol=1e-12)
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
    assert_close(automatic(block, g), by_hand(block, g), rtol=1e-12)
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
        terms = dict(field=ExternalField(), half=Scaled(ExternalField(), 0.5))
        return Block(EnergyLayerNorm(32), attention=heads, memory=memory, **terms)

    block, reference = make(**options), make()
    nnx.update(reference, cast(nnx.state(block), F32))
    x, field = tokens(3, (2, 2, N, 32)).astype(np.float32)
    at = lambda block, kind: block.energies_and_update(
        block.norm(jnp.asarray(x, kind)),
        mask=MASKS["blind"],
        field=jnp.asarray(field, kind),
    )
    (E, u), look = at(reference, F32), lambda block: at(block, x_dtype)
    energies, update = look(block)
    assert update.dtype == x_dtype
    for name, b in E.items():
        assert energies[name].dtype == b.dtype == F32
        assert_close(energies[name], b, rtol=2e-2)
    assert_close(np.asarray(update, F32), u, rtol=2e-2)
    slopes = jax.grad(lambda block: jnp.sum(look(block)[1].astype(F32) ** 2))(block)
    for slope in jax.tree.leaves(slopes.attention):
        assert np.isfinite(np.asarray(slope, F32)).all() and np.any(slope)


# ------------------------------------------------------------------------------------
# bad samples; what is no sample is in test_settings.py


@pytest.mark.parametrize(
    "make",
    [
        attention_of,
        partial(attention_of, normalize=True, self_attention=True),
        partial(memory_of, "cold softmax"),
        partial(memory_of, "signed"),
        lambda: Block(norm_of(), attention=attention_of(), memory=memory_of("relu")),
    ],
)
def test_a_sample_that_is_not_a_number_spoils_no_other_and_an_empty_batch_is_fine(
    x64, make
):
    module, g = make(), jnp.asarray(changed(tokens(), (0, 1, 2), np.nan))
    E, u = both(module, g)
    assert np.isnan(E[0]) and np.isnan(u[0]).any()
    assert np.isfinite(E[1]) and np.isfinite(u[1]).all()
    E, u = both(module, g[:0])
    assert E.shape == (0,) and u.shape == (0, N, D)
