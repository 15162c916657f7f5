"""Attention along edges: beside the dense table of the same graph, for every kind of
graph, both back ends, and what training differentiates.
"""

import threading
from functools import cache, partial

import doors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from et_nbdev.attention import RelativePositions
from et_nbdev.block import EnergyTransformer
from et_nbdev.dynamics import descend
from et_nbdev.graph import edges as _edges
from et_nbdev.graph import kernels
from et_nbdev.graph.edges import neighbor_match
from et_nbdev.graph.energy import (
    EdgeAttention,
    EdgeIndex,
    EdgeTransformer,
    attention_weights,
)
from et_nbdev.testing import assert_close, assert_gradient

BACKENDS = ("compiled", "xla")
each_backend = pytest.mark.parametrize("backend", BACKENDS)
pytestmark = pytest.mark.usefixtures("compile_quickly")

# -------------------------------------------------------------------------------------
# graphs of all kinds


def ids(table):
    "The edges of a table with receivers in rows."
    receivers, senders = np.nonzero(table)
    return senders, receivers


def make(kind, rng, backend="compiled"):
    N = 23
    table = rng.random((N, N)) < 0.2
    if kind == "undirected":
        table |= table.T
    if kind == "isolated":
        table[[0, 7]] = table[:, [0, 7]] = False
    # 3 sees nobody, nobody sees 9
    if kind == "deaf and unheard":
        table[3] = table[:, 9] = False
    if kind == "one way":
        table = np.tril(table)
    if kind == "no edges":
        table[:] = False
    if kind == "complete":
        table[:] = True
    # wider than a rectangle of the XLA path, and not a power of two of it
    if kind == "hubs":
        table = np.zeros((301, 301), bool)
        table[5] = table[:, 250] = True
        table[8, 1:131] = True
    if kind == "self-loops":
        table[[1, 4], [1, 4]] = True
    else:
        np.fill_diagonal(table, False)
    senders, receivers = ids(table)
    return EdgeIndex(
        senders, receivers, len(table), self_loops=kind == "self-loops", backend=backend
    ), jnp.asarray(table)


KINDS = [
    "directed",
    "undirected",
    "isolated",
    "deaf and unheard",
    "one way",
    "no edges",
    "complete",
    "hubs",
    "self-loops",
]


def random_weights(module, rng):
    graphdef, state = nnx.split(module)
    return nnx.merge(
        graphdef,
        jax.tree.map(lambda w: jnp.asarray(0.6 * rng.normal(size=w.shape)), state),
    )


def attention_of(rng, H, Y, D=4, self_attention=False, **options):
    beta = [0.3, 1.0, 2.5][:H]
    return random_weights(
        EdgeAttention(
            D,
            H,
            Y,
            beta,
            self_attention,
            param_dtype=jnp.float64,
            rngs=nnx.Rngs(0),
            **options,
        ),
        rng,
    )


def seen(pairs):
    "A table as a mask, anything else as edges."
    return {"mask": pairs} if isinstance(pairs, jax.Array) else {"edges": pairs}


@nnx.jit
def both(attention, g, pairs):
    return attention.energy_and_update(g, **seen(pairs))


def along_edges(edges, Q, K):
    "ℓ of every query, and both pulls: the derivatives of its sum."
    lse, pull = jax.vjp(partial(neighbor_match, edges), Q, K)
    return lse, *pull(jnp.ones_like(lse))


outputs = jax.jit(along_edges)


def all_close(got, wanted, **options):
    got, wanted = jax.tree.leaves(got), jax.tree.leaves(wanted)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted):
        assert_close(a, b, **options)


# ------------------------------------------------------------------------------------
# the energy, its update and their derivative


@each_backend
@pytest.mark.parametrize(
    "kind, H, Y",
    [(kind, *[(3, 5), (2, 1), (1, 3)][i % 3]) for i, kind in enumerate(KINDS)],
)
def test_equals_the_dense_table(kind, H, Y, backend, x64):
    rng = np.random.default_rng(KINDS.index(kind))
    edges, table = make(kind, rng, backend)
    # normalized or not
    options = dict(self_attention=kind == "self-loops", normalize=H == 2)
    attention = attention_of(rng, H, Y, **options)
    g = jnp.asarray(rng.normal(size=(len(table), 4)))
    all_close(both(attention, g, edges), both(attention, g, table))
    np.testing.assert_array_equal(edges.mask(), table)


@cache
def descent_slope(**options):
    "The compiled derivative, for all graphs of the same shapes."

    def loss(block, x, pairs):
        x, path = descend(block, x, steps=4, step_size=0.4, **seen(pairs), **options)
        return (
            jnp.sum(jnp.sin(x))
            + 1e-2 * jnp.sum(path.energies["attention"] ** 2)
            + 1e-2 * jnp.sum(jnp.cos(path.energies["memory"]))
        )

    return nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))


@pytest.mark.parametrize(
    "backend, kind, options",
    [
        ("compiled", "directed", {}),
        ("compiled", "hubs", {}),
        ("compiled", "self-loops", {}),
        ("compiled", "isolated", {"remat": True}),
        ("compiled", "deaf and unheard", {}),
        ("xla", "no edges", {}),
        ("xla", "hubs", {}),
        ("xla", "one way", {}),
    ],
)
def test_training_through_the_descent_equals_the_dense_table(
    backend, kind, options, x64
):
    """The gradient of a loss of states and energies with respect to every parameter, β
    among them, and the tokens.
    """
    rng = np.random.default_rng(10 + KINDS.index(kind))
    edges, table = make(kind, rng, backend)
    block = random_weights(
        EdgeTransformer(
            4,
            2,
            3,
            5,
            beta=[0.5, 2.0],
            learn_beta=True,
            normalize=kind in ("directed", "one way"),
            self_attention=kind == "self-loops",
            param_dtype=jnp.float64,
            rngs=nnx.Rngs(0),
        ),
        rng,
    )
    x = jnp.asarray(rng.normal(size=(len(table), 4)))
    take = descent_slope(**options)
    got, wanted = take(block, x, edges), take(block, x, table)
    assert len(jax.tree.leaves(wanted)) == 8
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted)) > 1e-2
    all_close(got, wanted, atol=1e-11)


@each_backend
@pytest.mark.parametrize(
    "kind, normalize", [("one way", False), ("self-loops", False), ("directed", True)]
)
def test_update_is_minus_the_gradient_of_the_energy(kind, normalize, backend, x64):
    rng = np.random.default_rng(3)
    edges, table = make(kind, rng, backend)
    options = dict(self_attention=kind == "self-loops", normalize=normalize)
    attention = attention_of(rng, 2, 3, **options)
    g = jnp.asarray(rng.normal(size=(2, len(table), 4)))
    energy = jax.jit(lambda g: attention.energy(g, edges=edges))
    assert_gradient(energy, g, -both(attention, g, edges)[1])


@each_backend
def test_weighted_token_energies_have_their_own_derivative(backend, x64):
    "A sum over tokens with weights, its gradient, and that of a loss on the gradient."
    rng = np.random.default_rng(21)
    edges, table = make("one way", rng, backend)
    attention = attention_of(rng, 2, 3, repelling=1)
    g, w, v = jnp.asarray(rng.normal(size=(3, 23, 4)))

    def slopes(g, w, pairs):
        energy = lambda g: jnp.sum(w[:, 0] * attention.token_energy(g, **seen(pairs)))
        slope = jax.grad(energy)
        loss = lambda g, w: jnp.sum(jnp.sin(slope(g)) * v)
        return slope(g), jax.grad(loss)(g, w)

    all_close(*(jax.jit(slopes)(g, w, pairs) for pairs in (edges, table)))


def test_a_look_costs_two_passes_over_the_edges_and_its_derivative_two_more():
    edges = EdgeIndex([0, 1, 2], [1, 2, 0], 3, backend="compiled")
    block = EdgeTransformer(4, 2, 3, 5, rngs=nnx.Rngs(0))
    force = lambda g: block.energies_and_update(g, edges=edges)[1]
    count = lambda f: (
        jax.jit(f)
        .lower(jnp.ones((3, 4)))
        .compile()
        .as_text()
        .count('custom_call_target="et_nbdev_graph')
    )
    assert count(force) == 2
    assert count(jax.grad(lambda g: jnp.sum(jnp.sin(force(g))))) == 4


def test_rectangles_of_every_width(x64, monkeypatch):
    """The XLA path as in a large graph: a class for every power of two, worked off in
    many chunks.
    """
    monkeypatch.setattr(_edges, "_SPARE", 0)
    monkeypatch.setattr(_edges, "_ROOM", 200)
    rng = np.random.default_rng(15)
    table = np.tril(np.ones((33, 33), bool), -1)
    edges = EdgeIndex(*ids(table), 33, backend="xla")
    assert edges.into.classes == ((1, 1), (2, 1), (4, 2), (8, 4), (16, 8), (32, 16))
    Q, K, a, b = jnp.asarray(rng.normal(size=(4, 33, 2, 3)))
    compiled = EdgeIndex(*ids(table), 33, backend="compiled")
    loss = lambda Q, K, edges: (
        lambda lse, x, y: jnp.sum(jnp.sin(lse)) + jnp.sum(x * a) + jnp.sum(y * b)
    )(*along_edges(edges, Q, K))
    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    all_close(run(Q, K, edges), run(Q, K, compiled))


@each_backend
def test_a_directed_graph_is_not_its_reverse(backend, x64):
    """Both terms taken along the arrows, as in public code: right where every edge has
    its opposite, wrong elsewhere.
    """
    rng = np.random.default_rng(5)
    attention = attention_of(rng, 2, 3)
    for kind, right in (("undirected", True), ("directed", False), ("one way", False)):
        edges, table = make(kind, rng, backend)
        turned = EdgeIndex(*edges.edge_list()[::-1], 23, backend=backend)
        g = jnp.asarray(rng.normal(size=(23, 4)))
        Q, K = (
            jnp.einsum("nd,hdy->nhy", g, W[...]) for W in (attention.Wq, attention.Wk)
        )
        Q = Q * attention.beta[None, :, None]
        as_query = outputs(edges, Q, K)[1]
        as_key = outputs(edges if right else turned, Q, K)[2]
        one_way = jnp.einsum("nhy,hdy->nd", as_query, attention.Wq[...]) + jnp.einsum(
            "nhy,h,hdy->nd", as_key, 1 / attention.beta, attention.Wk[...]
        )
        update = both(attention, g, table)[1]
        error = jnp.linalg.norm(one_way - update) / jnp.linalg.norm(update)
        assert (error < 1e-9) == right, (kind, error)
        assert_close(both(attention, g, edges)[1], update)


@each_backend
def test_batches_share_a_graph(backend, x64):
    rng = np.random.default_rng(6)
    edges, table = make("directed", rng, backend)
    attention = attention_of(rng, 2, 3)
    g = jnp.asarray(rng.normal(size=(2, 3, 23, 4)))
    wanted = both(attention, g, table)
    all_close(both(attention, g, edges), wanted)
    all_close(
        jax.jit(
            jax.vmap(jax.vmap(lambda g: attention.energy_and_update(g, edges=edges)))
        )(g),
        wanted,
    )


@each_backend
def test_relations_add_up(backend, x64):
    rng = np.random.default_rng(7)
    (first, table), (second, other), (third, another) = (
        make(kind, rng, backend) for kind in ("directed", "one way", "isolated")
    )
    attention = attention_of(rng, 2, 3)
    g = jnp.asarray(rng.normal(size=(23, 4)))
    total = jax.tree.map(
        lambda a, b, c: a + b + c,
        *(both(attention, g, t) for t in (table, other, another)),
    )
    all_close(both(attention, g, (first, second, third)), total)


@each_backend
@pytest.mark.parametrize("normalize", [False, True])
def test_explanations(normalize, backend, x64):
    rng = np.random.default_rng(8)
    edges, table = make("deaf and unheard", rng, backend)
    attention = attention_of(rng, 2, 3, normalize=normalize)
    g = jnp.asarray(rng.normal(size=(23, 4)))
    shares = jax.jit(lambda g, edges: attention.token_energy(g, edges=edges))(g, edges)
    np.testing.assert_array_equal(shares == 0, ~table.any(1))
    assert shares[3] == 0
    for C in (3, 9, 11):  # a node's share is the energy of the graph of its own edges
        only = jnp.zeros_like(table).at[C].set(table[C])
        assert_close(shares[C], both(attention, g, only)[0], atol=1e-15)
    weights = attention_weights(attention, g, edges, chunk=10)
    senders, receivers = edges.edge_list()
    P = attention.attended(g, mask=table)
    assert weights.shape == (edges.num_edges, 2)
    assert_close(weights, P[:, receivers, senders].T)
    some = slice(5, 30, 3)
    pairs = senders[some], receivers[some]
    assert_close(attention_weights(attention, g, edges, pairs), weights[some])


# ------------------------------------------------------------------------------------
# the same bits


def power_law(rng, N, E):
    senders = np.minimum((N * rng.random(E) ** 3).astype(np.int64), N - 1)
    receivers = np.minimum((N * rng.random(E) ** 3).astype(np.int64), N - 1)
    pairs = np.unique(np.stack([senders, receivers]), axis=1)
    return pairs[:, pairs[0] != pairs[1]]


@each_backend
def test_repeats_bit_for_bit(backend):
    """Over calls, over the order in which edges are listed, and while other calls are
    under way.
    """
    rng = np.random.default_rng(9)
    N = 2000 if backend == "compiled" else 300
    senders, receivers = power_law(rng, N, 50 * N)
    shuffle = rng.permutation(len(senders))
    edges = EdgeIndex(senders, receivers, N, backend=backend)
    again = EdgeIndex(
        senders[shuffle].astype(np.int64),
        receivers[shuffle].astype(np.uint16),
        N,
        backend=backend,
    )
    Q, K = jnp.asarray(rng.normal(size=(2, N, 2, 7)).astype(np.float32))
    loss = lambda Q, K, edges: sum(
        jnp.sum(jnp.sin(x)) for x in along_edges(edges, Q, K)
    )
    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    first = jax.block_until_ready(run(Q, K, edges))
    different = []

    def compare():
        for _ in range(4):
            for other in (edges, again):
                if not all(
                    (np.asarray(a) == np.asarray(b)).all()
                    for a, b in zip(
                        jax.tree.leaves(first), jax.tree.leaves(run(Q, K, other))
                    )
                ):
                    different.append(other)

    threads = [
        threading.Thread(target=compare)
        for _ in range(3 if backend == "compiled" else 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "calls wait for each other"
    assert not different


@pytest.mark.parametrize(
    "degrees", [[0], [5], [0, 0, 7, 0], [1, 1, 1000, 1, 1], list(range(50)), [0] * 9]
)
def test_chunks_cover_every_row_once_and_cost_alike(degrees):
    start = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int32)
    for chunks in (1, 2, 3, 7):
        rows = [kernels._first_row(start, i, chunks) for i in range(chunks + 1)]
        assert (rows[0], rows[-1]) == (0, len(degrees)) and rows == sorted(rows)
        costs = [start[b] + b - start[a] - a for a, b in zip(rows, rows[1:])]
        assert max(costs) <= (start[-1] + len(degrees)) / chunks + max(degrees) + 1


def test_back_ends_agree_on_a_power_law_graph():
    "Many chunks and several threads, long rows cut into pieces; single precision."
    rng = np.random.default_rng(11)
    senders, receivers = power_law(rng, 1000, 40_000)
    Q, K = jnp.asarray(0.5 * rng.normal(size=(2, 1000, 1, 16)).astype(np.float32))
    loss = lambda Q, K, edges: sum(
        jnp.mean(jnp.sin(x)) for x in along_edges(edges, Q, K)
    )
    compiled, xla = (EdgeIndex(senders, receivers, 1000, backend=b) for b in BACKENDS)
    assert max(np.bincount(receivers)) > 2 * _edges._WIDEST
    all_close(outputs(compiled, Q, K), outputs(xla, Q, K), rtol=1e-5)
    slope = jax.jit(jax.grad(loss, (0, 1)))
    all_close(slope(Q, K, compiled), slope(Q, K, xla), rtol=1e-5)


# ------------------------------------------------------------------------------------
# numbers and memory


@each_backend
def test_scores_of_ten_thousand(backend):
    attention = EdgeAttention(6, 1, 6, beta=1.0, rngs=nnx.Rngs(0))
    attention.Wq[...] = attention.Wk[...] = jnp.eye(6)[None]
    g = 100.0 * jnp.array(
        [
            [1, 0, 0, 0, 0, 0],
            [-1, 0, 0, 0, 0, 0],
            [1, 0.1, 0, 0, 0, 0],
            [1, 1, 1, 1, 1, 1],
        ]
    )
    edges = EdgeIndex([0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1], 4, backend=backend)
    E, u = both(attention, g, edges)
    assert_close(E, jnp.float32(-10_000 - np.log(2)), rtol=1e-6)
    # a score of that size has a last digit of 10⁻³
    all_close((E, u), both(attention, g, edges.mask()), rtol=1e-3)
    assert (u[3] == 0).all()
    slope = jax.jit(jax.grad(lambda g: jnp.sum(attention.update(g, edges=edges) ** 2)))(
        g
    )
    assert jnp.isfinite(slope).all() and (slope[3] == 0).all()


@each_backend
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_seen(bad, backend):
    "A NaN reaches the node's neighbors and nobody else."
    edges = EdgeIndex([0, 1, 2, 3], [1, 0, 3, 2], 4, backend=backend)
    Q = jnp.ones((4, 1, 3)).at[0, 0, 1].set(bad)
    lse, as_query, as_key = outputs(edges, Q, Q)
    assert (
        not np.isfinite(lse[:2]).any()
        and np.isfinite(lse[2:]).all()
        and np.isfinite(as_query[2:]).all()
        and np.isfinite(as_key[2:]).all()
    )


@each_backend
def test_half_precision_is_summed_in_single(backend):
    rng = np.random.default_rng(12)
    edges, table = make("directed", rng, backend)
    attention = EdgeAttention(8, 2, 4, rngs=nnx.Rngs(0))
    g = jnp.asarray(rng.normal(size=(23, 8)), jnp.bfloat16)
    E, u = both(attention, g, edges)
    E32, u32 = both(attention, g.astype(jnp.float32), table)
    assert (E.dtype, u.dtype) == (jnp.float32, jnp.bfloat16)
    assert_close(E, E32, rtol=0.02)
    assert_close(u.astype(jnp.float32), u32, rtol=0.05)


def test_memory_is_not_edges_times_width(compile_fully):
    "What the compiler sets aside for forward and backward, beside one array (E, H, Y)."
    receivers, senders = np.nonzero(
        np.random.default_rng(13).random((3000, 3000)) < 0.03 * (1 - np.eye(3000))
    )
    E, N, H, Y = len(senders), 3000, 2, 64
    shape = jax.ShapeDtypeStruct((N, H, Y), jnp.float32)
    train = jax.jit(
        jax.grad(
            lambda Q, K, edges: sum(jnp.sum(x**2) for x in along_edges(edges, Q, K)),
            (0, 1),
        )
    )
    spare = {
        b: (
            train.lower(shape, shape, EdgeIndex(senders, receivers, N, backend=b))
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )
        for b in BACKENDS
    }
    array = 4 * E * H * Y
    assert E > 150_000 and spare["compiled"] < 12 * 4 * N * H * Y, (spare, array)
    assert spare["xla"] < array / 3, (spare, array)


@each_backend
def test_room_for_more_edges(backend, x64):
    """Spare capacity changes no number, and compiled programs are shared between graphs
    of one capacity.
    """
    rng = np.random.default_rng(14)
    attention, traces = attention_of(rng, 2, 3), []
    g = jnp.asarray(rng.normal(size=(23, 4)))

    @jax.jit
    def run(g, edges):
        traces.append(1)
        return attention.energy_and_update(g, edges=edges)

    for kind in ("directed", "one way"):
        edges, table = make(kind, rng, backend)
        roomy = EdgeIndex(*edges.edge_list(), 23, capacity=600, backend=backend)
        assert (roomy.num_edges, roomy.num_nodes) == (edges.num_edges, 23)
        all_close(run(g, roomy), attention.energy_and_update(g, mask=table))
        np.testing.assert_array_equal(roomy.mask(), table)
    if backend == "compiled":
        assert len(traces) == 1


# ------------------------------------------------------------------------------------
# bad input


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (([0, 5], [1, 2], 5), ValueError, "senders: .* from 0 to 4, got 0 to 5"),
        (([0, 1], [1, -1], 5), ValueError, "receivers: .* from 0 to 4, got -1 to 1"),
        (([0.0, 1.0], [1, 2], 5), TypeError, "senders: .*whole numbers, got float64"),
        (([0, 1], [True, False], 5), TypeError, "receivers: .*whole .*got bool"),
        (([[0, 1]], [[1, 2]], 5), ValueError, r"senders: one|senders: .*got \(1, 2\)"),
        (([0, 1], [1], 5), ValueError, "equally many, .*got 2 and 1"),
        (([0, 1], [1, 1], 5), ValueError, "1 edges lead .*node 1.*self_loops=True"),
        (([0, 1, 0, 0], [1, 2, 1, 1], 5), ValueError, "2 of the 4 .*np.unique"),
        (([0] * 300, [1] * 300, 2), ValueError, "299 of the 300"),
        (([0, 1], [1, 0], 0), ValueError, "num_nodes"),
        (([0, 1], [1, 0], 2.5), ValueError, "num_nodes"),
    ],
)
def test_bad_edges_are_refused_by_name(arguments, error, words):
    with doors.unchecked(), pytest.raises(error, match=words):
        EdgeIndex(*arguments)


def test_bad_options_are_refused_by_name():
    with pytest.raises(ValueError, match="backend"):
        EdgeIndex([0], [1], 2, backend="numba")
    with pytest.raises(ValueError, match="capacity"):
        EdgeIndex([0, 1], [1, 0], 2, capacity=1)
    block = EdgeTransformer(4, 1, 3, 2, rngs=nnx.Rngs(0))
    edges, g = EdgeIndex([0], [1], 2), jnp.ones((2, 4))
    for call in (block.energy, block.update):
        with pytest.raises(ValueError, match="edges: .*N = 3, got 2"):
            call(jnp.ones((3, 4)), edges=edges)
        with pytest.raises(ValueError, match="edges: .*self_attention=True"):
            call(g, edges=EdgeIndex([0], [0], 2, self_loops=True))
        with pytest.raises(ValueError, match="D = 4"):
            call(jnp.ones((2, 5)), edges=edges)
        with pytest.raises(ValueError, match="edges: expected at least one graph"):
            call(g, edges=())
        for wrong in (np.array([[0], [1]]), ([0], [1])):
            with pytest.raises(TypeError, match="^edges: expected an EdgeIndex"):
                call(g, edges=wrong)
        for name, table in (
            ("mask", edges.mask()),
            ("weights", jnp.ones((2, 2))),
            ("bias", jnp.ones((2, 2))),
        ):
            with pytest.raises(ValueError, match="edges: expected no mask, weights"):
                call(g, edges=edges, **{name: table})
    placed = EdgeTransformer(
        4, 1, 3, 2, positions=RelativePositions(2, 1), rngs=nnx.Rngs(0)
    )
    with pytest.raises(ValueError, match="edges: .*got RelativePositions; a grid"):
        placed.energy(jnp.ones((4, 4)), edges=EdgeIndex([0], [1], 4))
    plain = EnergyTransformer(4, 1, 3, 2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="edges: no term of this block takes it"):
        plain.energy(g, edges=edges)


@each_backend
@pytest.mark.parametrize(
    "Q, K, error, words",
    [
        ((3, 1, 2), (3, 1, 5), ValueError, r"K of \(3, 1, 5\)"),
        ((3, 1, 8), (1, 1, 8), ValueError, r"K of \(1, 1, 8\)"),
        ((2, 1, 2), (2, 1, 2), ValueError, "N = 2, got 3"),
        ((3, 1, 2, int), (3, 1, 2, int), TypeError, "float64, got int"),
        ((3, 1, 2, jnp.bfloat16), (3, 1, 2), TypeError, "got bfloat16"),
        ((3, 1, 2), (3, 1, 2, jnp.float16), TypeError, "got float32 and float16"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_any_is_read(
    Q, K, error, words, backend
):
    "A compiled loop would read, and write, beyond their ends."
    edges, beta = EdgeIndex([0, 1], [1, 2], 3, backend=backend), jnp.ones(1)
    make = lambda N, H, Y, kind=jnp.float32: jnp.ones((N, H, Y), kind)
    match = lambda Q, K: edges.match(Q, K, beta, False)
    with doors.unchecked():
        for call in (match, jax.jit(match)):
            with pytest.raises(error, match=words):
                call(make(*Q), make(*K))
