"""Number puzzles: boards at the door, search, the model's energy and its update, descents
that fill boards in, files, and what a notebook shows.
"""

import re

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from flax import nnx

from et_nbdev.puzzle import (
    BOXES,
    PuzzleConfig,
    PuzzleTransformer,
    as_boards,
    from_pretrained,
    is_solved,
    is_unique,
    play,
    plot_descent,
    puzzles,
    same_unit,
    save_puzzle,
    solutions,
    solve,
    units,
)
from et_nbdev.testing import assert_gradient
from et_nbdev.training import CheckpointError

pytestmark = pytest.mark.usefixtures("compile_quickly")
SMALL = dict(dim=6, num_heads=3, head_dim=4, num_memories=5, steps=2)
FULL = np.array([[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]])


@pytest.fixture(scope="module")
def model():
    return from_pretrained("sudoku-4")


def changed(row, column, digit):
    board = FULL.copy()
    board[row, column] = digit
    return board


# --- boards


def test_text_and_arrays_are_the_same_boards():
    text = "1 2|3 .\n3.|12\n---+---\n2143\n4 3 0 1"
    board = FULL * [[1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 1, 1], [1, 1, 0, 1]]
    for given in (text, board, board.astype(np.uint8), board.tolist()):
        np.testing.assert_array_equal(as_boards(given), board)
    np.testing.assert_array_equal(as_boards([text, text]), [board, board])


@pytest.mark.parametrize(
    "wrong, error, says",
    [
        ("12x. .... .... ....", ValueError, "digits and dots, got 'x'"),
        ("123", ValueError, "16, 36 or 81 cells, got 3"),
        ("." * 25, ValueError, "16, 36 or 81 cells, got 25"),
        (FULL / 2, TypeError, "integers or text, got float64"),
        (FULL[:3], ValueError, r"n, n\) with n = 4, 6 or 9, got shape \(3, 4\)"),
        (FULL[0], ValueError, r"got shape \(4,\)"),
        (changed(1, 2, 5), ValueError, "0 to 4, got 5 in row 2, column 3$"),
        (changed(3, 0, -1), ValueError, "got -1 in row 4, column 1$"),
        ("2..2" + 12 * ".", ValueError, "row 1 has 2 twice, in row 1, column 1 and in row 1, col"),
        (".1.. .... .1.. ....", ValueError, "column 2 has 1 twice, in row 1, column 2"),
        ("1... .1.. .... ....", ValueError, "box 1 has 1 twice, in row 1, column 1 and"),
        (["." * 16, "33" + "." * 14], ValueError, "row 1 of board 1 has 3 twice"),
    ],
)  # fmt: skip
def test_a_bad_board_is_refused_by_cell(wrong, error, says):
    with pytest.raises(error, match=says):
        as_boards(wrong)


def test_a_board_is_solved_when_every_unit_holds_every_digit():
    twice = changed(0, 0, 2)
    latin = FULL[[0, 2, 1, 3]]  # rows and columns are right, boxes are not
    rows = np.tile([1, 2, 3, 4], (4, 1))
    found = is_solved(np.stack([FULL, twice, latin, rows, rows.T, changed(2, 2, 0)]))
    assert found.tolist() == [True] + [False] * 5
    assert is_solved(FULL).shape == ()


# --- search


@pytest.mark.parametrize("n", [4, 6])
def test_puzzles_have_one_solution_and_as_many_givens_as_asked(n):
    boards, full = puzzles(n, 4, givens=(n * n // 2, n * n // 2 + 2), seed=1)
    assert is_solved(full).all() and ((boards == 0) | (boards == full)).all()
    left = np.count_nonzero(boards, (-1, -2))
    assert ((left >= n * n // 2) & (left <= n * n // 2 + 2)).all()
    for board, answer in zip(boards, full):
        (found,) = solutions(board)  # all of them
        np.testing.assert_array_equal(found, answer)
    fewest = puzzles(n, 1, givens=(0, 0), seed=1)[0][0]
    for row, column in np.argwhere(fewest):
        fewer = fewest.copy()
        fewer[row, column] = 0
        assert not is_unique(fewer)
    with pytest.raises(ValueError, match="0 ≤ fewest ≤ most"):
        puzzles(n, 1, givens=(5, 4))


# --- the model


@pytest.mark.parametrize(
    "n, box, of_units, channels",
    [
        (4, (2, 2), False, False),
        (4, (2, 2), False, True),
        (6, (2, 3), True, True),
        (9, (3, 3), True, False),
    ],
)
def test_the_update_is_minus_the_gradient_and_e_falls(n, box, of_units, channels):
    assert BOXES[n] == box
    config = PuzzleConfig(n, **SMALL, units=of_units, channels=channels)
    boards = jnp.asarray(puzzles(n, 2, givens=(n * n, n * n))[0]).at[:, ::2].set(0)
    with jax.enable_x64(True):
        model = PuzzleTransformer(config, rngs=nnx.Rngs(0))
        random = np.random.default_rng(0)
        shake = lambda p: p.astype(float) + 0.3 * random.normal(size=p.shape)
        nnx.update(model, jax.tree.map(shake, nnx.state(model, nnx.Param)))
        x = model.encode(boards, jax.random.key(0))
        given = boards.reshape(2, -1) > 0
        vectors = 5 * model.digits[...][boards.reshape(2, -1) - 1]
        np.testing.assert_array_equal(x[given], vectors[given])
        g = model.block.norm(x)
        assert_gradient(model.block, g)
        # half of the heads repel
        attention = model.block.attention
        scores = attention.scores(g)
        match = jax.nn.logsumexp(scores, -1).sum(-1) / attention.beta[None]
        wanted = match[:, 2] - match[:, :2].sum(-1)  # one of three
        np.testing.assert_allclose(attention.energy(g), wanted)
        model.solver.log_alpha[...] = jnp.full(1, np.log(1e-3))
        _, (energies, _) = model.descend(x, 5)
        assert (jnp.diff(energies.total, axis=0) < 0).all()


def test_a_bias_of_units_is_one_of_every_kind_of_pair():
    table = PuzzleTransformer(
        PuzzleConfig(6, **SMALL, units=True), rngs=nnx.Rngs(0)
    ).block.attention.positions
    table.table[...] = jnp.arange(24.0).reshape(3, 8)
    b, (row, column, box) = np.asarray(table()), units(6)
    for a, c in np.ndindex(36, 36):
        same = [of[a] == of[c] and a != c for of in (row, column, box)]
        assert b[1, a, c] == 8 + same[0] + 2 * same[1] + 4 * same[2]
    assert same_unit(6)[:, 0, 7].tolist() == [False, False, True]
    with pytest.raises(ValueError, match="n: expected 4, 6 or 9, got 5"):
        PuzzleTransformer(PuzzleConfig(5), rngs=nnx.Rngs(0))


# --- descents


def test_a_shipped_model_solves_and_keeps_what_is_given(model):
    boards, full = puzzles(4, 60, seed=5)
    found = solve(model, boards, starts=4)
    assert found.solved.mean() > 0.9
    np.testing.assert_array_equal(found.solved, is_solved(found.boards))
    np.testing.assert_array_equal(found.boards[found.solved], full[found.solved])
    assert (found.boards == boards)[boards > 0].all()
    np.testing.assert_allclose(found.beliefs.sum(-1), 1, rtol=1e-5)
    E = found.energies.total
    assert E.shape == (33, 60) and (np.diff(E, axis=0) < 1e-5 * np.abs(E[1:])).all()


def test_of_several_starts_the_lowest_is_kept(model):
    boards = puzzles(4, 3, seed=2)[0][None]
    found = solve(model, boards, steps=6, starts=5, seed=3)
    many = jnp.broadcast_to(jnp.asarray(boards[0]), (5, 3, 4, 4))
    x, (energies, _) = model.descend(model.encode(many, jax.random.key(3)), 6)
    low = np.asarray(energies.total[-1]).argmin(0)
    assert len({*low}) > 1
    np.testing.assert_allclose(
        found.energies.total[-1, 0], energies.total[-1].min(0), rtol=1e-4
    )
    beliefs = np.asarray(jax.nn.softmax(model.logits(x), -1))[low, range(3)]
    np.testing.assert_allclose(found.beliefs.reshape(beliefs.shape), beliefs, atol=1e-3)
    assert found.boards.shape == (1, 3, 4, 4) and found.solved.shape == (1, 3)


# --- files


def test_a_saved_model_is_the_same_and_other_names_are_refused(tmp_path):
    config = PuzzleConfig(6, **SMALL, units=True, channels=True)
    model = PuzzleTransformer(config, rngs=nnx.Rngs(3))
    save_puzzle(tmp_path / "own.safetensors", model, dict(note="mine"))
    again = from_pretrained(tmp_path / "own.safetensors")
    assert again.config == config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))
    with pytest.raises(ValueError, match="expected 'sudoku-4'.*got 'sudoku-5'"):
        from_pretrained("sudoku-5")
    with pytest.raises(CheckpointError):
        from_pretrained(tmp_path / "none.safetensors")


# --- what a notebook shows


def test_a_descent_is_drawn(model):
    with matplotlib.rc_context({"backend": "agg"}):
        board = "1... ..3. .4.. ...2"
        fig = plot_descent(model, board, steps=16)
    *boards, curve = fig.axes
    assert [ax.get_title() for ax in boards] == [f"$t={t}$" for t in (0, 2, 4, 8, 16)]
    x = model.encode(as_boards(board), jax.random.key(0))
    x, (energies, _) = model.descend(x, 16)
    p = np.asarray(jax.nn.softmax(model.logits(x), -1)).max(-1)
    sizes = [t.get_fontsize() for t in boards[-1].texts]
    drawn = [size for size in sizes if size > max(sizes) / 1.5]
    assert len(drawn) == 4 + (p > 0.5).sum() - 4
    E = energies.total - energies.total[0]
    np.testing.assert_allclose(curve.lines[2].get_ydata(), E, rtol=1e-4, atol=1e-3)


def test_a_board_is_played_with_in_a_notebook(model):
    pytest.importorskip("ipywidgets")
    (board, buttons), (_, t), view, says = (
        getattr(part, "children", part) for part in play(model).children
    )
    assert "solved" in says.value and view.value.count("<div") == 17
    before = board.value, says.value
    buttons.children[1].click()
    assert board.value == before[0] and says.value != before[1]
    buttons.children[0].click()
    assert board.value != before[0]
    t.value = 0
    assert "not solved" in says.value
    numbers = lambda text: re.findall(r"[\d.]+(?=[,:])", text)
    assert len({*numbers(says.value)}) == 1 < len({*numbers(before[1])})
    board.value = "11.. .... .... ...."
    assert "row 1 has 1 twice" in says.value
    board.value = "." * 36
    assert "plays 4 × 4" in says.value


def test_what_is_no_board_is_refused_in_words(model):
    with pytest.raises(ValueError, match="n: expected 4, 6 or 9, got 5"):
        puzzles(5, 1)
    with pytest.raises(ValueError, match="boards: expected at least one"):
        solve(model, np.zeros((0, 4, 4), int))
    with pytest.raises(ValueError, match="plays 4 × 4, got 6 × 6"):
        solve(model, np.zeros((6, 6), int))
    with pytest.raises(ValueError, match="starts"):
        solve(model, FULL, starts=0)
    with pytest.raises(ValueError, match="board: expected one, got shape"):
        plot_descent(model, np.zeros((2, 4, 4), int))
    assert not list(solutions(np.array([[1, 2, 3, 4]] * 4)))
    assert not is_solved("1... .... ..2. ....") and not is_unique("1..." * 4)
    assert len(list(solutions("1... .... ..2. ...."))) == 18
    for ask in (solutions, is_unique, is_solved):
        with pytest.raises(ValueError, match="expected 0 to 6, got 7 in row 1"):
            ask(np.full((6, 6), 7))
    with pytest.raises(ValueError, match="board: expected one, got shape"):
        solutions(np.zeros((2, 4, 4), int))


def test_weights_load_in_double_precision(x64):
    table = from_pretrained("sudoku-6").block.attention.positions.table
    assert table.dtype == np.float32
