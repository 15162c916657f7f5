"Number puzzles: boards and their rules, a model made of this library's parts, and descents that fill a board in."
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from .attention import EnergyAttention, PairBias
from .block import Block
from .checks import check_sizes
from .dynamics import descend
from .energy import Energies
from .memory import HopfieldMemory
from .norm import EnergyLayerNorm
from .solvers import LearnedEuler, LearnedMetric
from .training.checkpoint import restore, save_checkpoint

#----
GIVENS = {4: (4, 8), 6: (8, 18), 9: (30, 45)}  # in training
BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # n, and the rows and columns of a box


def units(n: int) -> Int[np.ndarray, "3 N"]:
    "The row, the column and the box of every cell, numbered from 0."
    height, width = BOXES[n]
    row, column = np.divmod(np.arange(n * n), n)
    return np.stack([row, column, row // height * (n // width) + column // width])


def same_unit(n: int) -> Bool[np.ndarray, "3 N N"]:
    "Whether two different cells share a row, a column, a box."
    of = units(n)
    return (of[:, :, None] == of[:, None, :]) & ~np.eye(n * n, dtype=bool)
#----
def as_boards(boards: ArrayLike | str | Sequence[str]) -> Int[np.ndarray, "... n n"]:
    """Boards as integers, 0 where a cell is empty. Text has one character per cell, row
    by row, a dot or a 0 for an empty one; spaces, line breaks and | - + are skipped.

    Raises TypeError for anything but integers or text; ValueError for a size other than
    4, 6 or 9, for digits out of range, and for a digit twice in a row, column or box,
    naming the cells.
    """
    if isinstance(boards, str):
        cells = [c for c in boards if c not in " \t\r\n|-+"]
        if odd := sorted(set(cells) - set("0123456789.")):
            raise ValueError(f"boards: expected digits and dots, got {odd[0]!r}")
        n = round(len(cells) ** 0.5)
        if n not in BOXES or n * n != len(cells):
            raise ValueError(
                f"boards: expected 16, 36 or 81 cells, got {len(cells)} characters"
            )
        boards = np.array([int(c.replace(".", "0")) for c in cells]).reshape(n, n)
    elif isinstance(boards, (list, tuple)) and boards and isinstance(boards[0], str):
        boards = np.stack([as_boards(board) for board in boards])
    boards = np.asarray(boards)
    if boards.dtype.kind not in "iu":
        raise TypeError(f"boards: expected integers or text, got {boards.dtype}")
    n = boards.shape[-1] if boards.ndim >= 2 else 0
    if n not in BOXES or boards.shape[-2] != n:
        raise ValueError(
            "boards: expected (..., n, n) with n = 4, 6 or 9, got shape"
            f" {boards.shape}"
        )
    boards = boards.astype(int)
    flat = boards.reshape(-1, n * n)
    where = lambda b: "" if boards.ndim == 2 else f" of board {b}"
    for b, cell in np.argwhere((flat < 0) | (flat > n))[:1]:
        raise ValueError(
            f"boards: expected 0 to {n}, got {flat[b, cell]} in row {cell // n + 1},"
            f" column {cell % n + 1}{where(b)}"
        )
    same, digits = same_unit(n), (flat[:, :, None] == flat[:, None, :])
    twice = (digits & (flat > 0)[:, :, None])[:, None] & same
    for b, unit, first, second in np.argwhere(twice)[:1]:
        name = ("row", "column", "box")[unit]
        place = lambda c: f"row {c // n + 1}, column {c % n + 1}"
        raise ValueError(
            f"boards: {name} {units(n)[unit, first] + 1}{where(b)} has"
            f" {flat[b, first]} twice, in {place(first)} and in {place(second)}"
        )
    return boards


def is_solved(boards: Int[ArrayLike, "... n n"]) -> Bool[np.ndarray, "..."]:
    "Whether every row, column and box holds every digit."
    boards = np.asarray(boards)
    n = boards.shape[-1]
    flat = boards.reshape(*boards.shape[:-2], n * n)
    held = [flat[..., units(n)[kind].argsort(kind="stable")] for kind in range(3)]
    full = [(np.sort(h.reshape(*h.shape[:-1], n, n)) == np.arange(1, n + 1)) for h in held]
    return np.all(full, axis=(0, -1, -2))
#----
def solutions(
    board: Int[np.ndarray, "n n"], rng: np.random.Generator | None = None
) -> Iterator[Int[np.ndarray, "n n"]]:
    """All solutions of a board, by search: always in the cell with the fewest possible
    digits, in the order of the digits, or in random order.
    """
    n = len(board)
    cells, of = np.asarray(board).reshape(-1).tolist(), units(n).T.tolist()
    used = [[0] * n for _ in range(3)]  # the digits of every row, column, box, as bits
    for cell, digit in enumerate(cells):
        for kind in range(3) if digit else ():
            used[kind][of[cell][kind]] |= 1 << digit
    every = (2 << n) - 2

    def free(cell):
        row, column, box = of[cell]
        return every & ~(used[0][row] | used[1][column] | used[2][box])

    def fill():
        empty = [cell for cell, digit in enumerate(cells) if not digit]
        if not empty:
            yield np.array(cells).reshape(n, n)
            return
        cell = min(empty, key=lambda cell: free(cell).bit_count())
        digits = [d for d in range(1, n + 1) if free(cell) >> d & 1]
        if rng is not None:
            rng.shuffle(digits)
        for digit in digits:
            cells[cell] = digit
            for kind in range(3):
                used[kind][of[cell][kind]] ^= 1 << digit
            yield from fill()
            for kind in range(3):
                used[kind][of[cell][kind]] ^= 1 << digit
        cells[cell] = 0

    return fill()


def is_unique(board: Int[np.ndarray, "n n"]) -> bool:
    "Whether a board has exactly one solution."
    found = solutions(board)
    return next(found, None) is not None and next(found, None) is None


def puzzles(
    n: int,
    count: int,
    givens: tuple[int, int] | None = None,  # fewest and most; None: what training used
    seed: int = 0,
) -> tuple[Int[np.ndarray, "count n n"], Int[np.ndarray, "count n n"]]:
    """Random puzzles with one solution each, and these solutions.

    A full board loses cells in random order as long as its solution stays the only one,
    or until as few are left as were drawn; a puzzle has more givens than that if it
    cannot do with fewer. Raises ValueError for another n, or givens out of range.
    """
    check_sizes(count=count)
    fewest, most = GIVENS[n] if givens is None else givens
    if not 0 <= fewest <= most <= n * n:
        raise ValueError(f"givens: expected 0 ≤ fewest ≤ most ≤ {n * n}, got {givens}")
    rng, made = np.random.default_rng(seed), []
    for _ in range(count):
        full = next(solutions(np.zeros((n, n), int), rng))
        board, wanted = full.copy(), rng.integers(fewest, most + 1)
        for cell in zip(*np.divmod(rng.permutation(n * n), n)):
            if np.count_nonzero(board) <= wanted:
                break
            board[cell] = 0
            if not is_unique(board):
                board[cell] = full[cell]
        made.append((board, full))
    boards, full = zip(*made)
    return np.array(boards), np.array(full)
#----
class UnitBias(nnx.Module):
    """A learned bias of the scores for every head and kind of pair: which of row,
    column and box two cells share. Starts at zero. Parameters: 8 H.
    """

    def __init__(self, n: int, num_heads: int):
        self.n = n
        self.table = nnx.Param(jnp.zeros((num_heads, 8)))

    def __call__(self) -> Float[Array, "H N N"]:
        "b for every pair of cells: queries in rows, keys in columns."
        return self.table[...][:, np.tensordot([1, 2, 4], same_unit(self.n), 1)]


@dataclass(frozen=True)
class PuzzleConfig:
    "The sizes of a `PuzzleTransformer`."

    n: int = 4  # rows, columns and digits: 4, 6 or 9
    dim: int = 32  # D
    num_heads: int = 6  # H, of which half repel
    head_dim: int = 8  # Y
    num_memories: int = 32  # K
    steps: int = 8  # T, in training
    channels: bool = False  # step sizes per channel (`LearnedMetric`), or one α
    units: bool = False  # a bias per kind of pair (`UnitBias`), or one for every pair


class PuzzleTransformer(nnx.Module):
    r"""A board of n × n cells as N = n² tokens, and an Energy Transformer whose descent
    fills it in.

    A cell that is given starts as `GIVEN` times the vector of its digit, an empty one
    anywhere: normal numbers. The energy is attention, with a learned bias for every
    pair of cells and half of the heads repelling, and the paper's memory. Without
    `units` nothing says what a row, a column or a box is. A linear map of g gives the logits of the digits.
    Raises ValueError for sizes that do not fit.
    """

    GIVEN = 5.0  # a long token turns slowly, so that the givens hold

    def __init__(self, config: PuzzleConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        if c.n not in BOXES:
            raise ValueError(f"n: expected 4, 6 or 9, got {c.n!r}")
        self.digits = nnx.Param(jax.random.normal(rngs.params(), (c.n, c.dim)))
        bias = UnitBias(c.n, c.num_heads) if c.units else PairBias(c.n**2, c.num_heads)
        attention = EnergyAttention(
            c.dim,
            c.num_heads,
            c.head_dim,
            repelling=c.num_heads // 2,
            positions=bias,
            rngs=rngs,
        )
        memory = HopfieldMemory(c.dim, c.num_memories, rngs=rngs)
        norm = EnergyLayerNorm(c.dim)
        self.block = Block(norm, attention=attention, memory=memory)
        self.solver = (
            LearnedMetric(1, c.dim, 0.6) if c.channels else LearnedEuler(1, 0.3)
        )
        self.readout = nnx.Linear(
            c.dim, c.n, kernel_init=nnx.initializers.normal(0.02), rngs=rngs
        )

    def encode(
        self, boards: Int[Array, "... n n"], key: PRNGKeyArray
    ) -> Float[Array, "... N D"]:
        "The tokens at the start: givens long, empty cells random."
        cells = boards.reshape(*boards.shape[:-2], -1, 1)
        given = self.GIVEN * self.digits[...][jnp.maximum(cells[..., 0] - 1, 0)]
        return jnp.where(cells > 0, given, jax.random.normal(key, given.shape))

    def descend(self, x: Float[Array, "... N D"], steps: int, **options):
        "`descend` with the model's block and its steps."
        return descend(self.block, x, steps, solver=self.solver, **options)

    def logits(self, x: Float[Array, "... N D"]) -> Float[Array, "... N n"]:
        "One number per cell and digit; a softmax of them are the beliefs."
        return self.readout(self.block.norm(x))
#----
class Solved(NamedTuple):
    "What `solve` found; see there."

    boards: Int[np.ndarray, "... n n"]  # the most believed digit of every cell
    beliefs: Float[np.ndarray, "... n n n"]  # a probability per cell and digit
    energies: Energies  # each (steps + 1, ...): before every step and at the end
    solved: Bool[np.ndarray, "..."]  # every row, column and box holds every digit


def solve(
    model: PuzzleTransformer,
    boards: ArrayLike | str | Sequence[str],  # as `as_boards` takes them
    steps: int | None = None,  # None: 4 T
    starts: int = 1,  # random starts per board; that of the lowest energy is kept
    seed: int = 0,
) -> Solved:
    """Fill boards in by going downhill. Givens stay; where the descent ends in a board
    that breaks a rule, `solved` is False: a puzzle without a solution stays unsolved,
    and of several solutions one is found, or none.

    Raises what `as_boards` raises, and ValueError for another size than the model's or
    for numbers below 1.
    """
    boards = as_boards(boards)
    n = model.config.n
    if boards.shape[-1] != n:
        raise ValueError(
            f"boards: this model plays {n} × {n}, got {boards.shape[-1]} × "
            f"{boards.shape[-1]}"
        )
    steps = 4 * model.config.steps if steps is None else steps
    check_sizes(steps=steps, starts=starts)
    flat = boards.reshape(-1, n, n)
    many = jnp.broadcast_to(jnp.asarray(flat), (starts, *flat.shape))
    x, (energies, _) = model.descend(model.encode(many, jax.random.key(seed)), steps)
    kept = np.asarray(energies.total[-1]).argmin(0), np.arange(len(flat))
    shape = boards.shape[:-2]
    energies = jax.tree.map(
        lambda e: np.asarray(e)[:, *kept].reshape(steps + 1, *shape), energies
    )
    beliefs = np.asarray(jax.nn.softmax(model.logits(x), -1))[kept]
    beliefs = beliefs.reshape(*boards.shape, n)
    filled = np.where(boards > 0, boards, beliefs.argmax(-1) + 1)
    return Solved(filled, beliefs, energies, is_solved(filled))
#----
def save_puzzle(path: Path | str, model: PuzzleTransformer, meta: dict | None = None):
    "Write weights, sizes and `meta` to one safetensors file, atomically."
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    config = {"config": asdict(model.config)}
    save_checkpoint(path, {"params": params}, (meta or {}) | config)


def from_pretrained(source: str | Path) -> PuzzleTransformer:
    """A trained model: "sudoku-4" or "sudoku-6", which come with the library, or the
    path of a file that `save_puzzle` wrote. Raises ValueError for another name, and
    CheckpointError if the file is damaged or holds something else.
    """

    def build(config: dict, size: int):
        config = PuzzleConfig(**config)
        if config.dim * config.num_memories > size:
            raise ValueError("its memories alone would be larger than the file")
        return PuzzleTransformer(config, rngs=nnx.Rngs(0))

    shipped = {f.name.partition(".")[0]: f for f in files("et_nbdev").joinpath("weights").iterdir()}
    if str(source) in shipped:
        with as_file(shipped[str(source)]) as path:
            return restore(path, "puzzle model", build)
    if not str(source).endswith(".safetensors"):
        raise ValueError(
            f"source: expected {' or '.join(map(repr, sorted(shipped)))}, or a"
            f" .safetensors file, got {str(source)!r}"
        )
    return restore(source, "puzzle model", build)
