// Number puzzles as far as a browser needs them: the rules, boards with one solution, and
// the model that fills them in. A board is a list of digits, row by row, 0 where empty.

import { EnergyTransformer, layerNorm, multiply } from "./engine.js";

export const BOXES = { 4: [2, 2], 6: [2, 3], 9: [3, 3] }; // rows and columns of a box
const NAMES = ["row", "column", "box"];

/** Row, column and box of a cell, numbered from 0. */
export function unitsOf(n, cell) {
  const [height, width] = BOXES[n];
  const [row, column] = [Math.floor(cell / n), cell % n];
  const box = Math.floor(row / height) * (n / width) + Math.floor(column / width);
  return [row, column, box];
}

/** Whether two cells share a row, a column, a box. */
function shared(n, a, b) {
  const other = unitsOf(n, b);
  return unitsOf(n, a).map((unit, kind) => a !== b && unit === other[kind]);
}

/** Every pair of equal digits that share a unit: both cells, and the unit's name. */
export function conflicts(n, board) {
  const found = [];
  board.forEach((digit, a) => {
    for (let b = 0; digit && b < a; b++) {
      const kind = board[b] === digit ? shared(n, a, b).indexOf(true) : -1;
      if (kind < 0) continue;
      found.push({ cells: [b, a], digit, unit: `${NAMES[kind]} ${unitsOf(n, a)[kind] + 1}` });
    }
  });
  return found;
}

function shuffled(list) {
  const keyed = list.map((item) => [Math.random(), item]);
  return keyed.sort(([a], [b]) => a - b).map(([, item]) => item);
}

/** Up to `most` solutions of a board, by search in the cell with the fewest choices. */
export function solutions(n, board, most = 2) {
  if (conflicts(n, board).length) return [];
  const cells = [...board];
  const found = [];
  const seen = cells.map((_, a) => cells.flatMap((_, b) => (shared(n, a, b).includes(true) ? [b] : [])));
  const digits = Array.from({ length: n }, (_, i) => i + 1);
  const free = (cell) => digits.filter((digit) => seen[cell].every((other) => cells[other] !== digit));
  const fill = () => {
    const empty = cells.flatMap((digit, cell) => (digit ? [] : [{ cell, choices: free(cell) }]));
    if (!empty.length) return found.push([...cells]);
    const { cell, choices } = empty.reduce((a, b) => (b.choices.length < a.choices.length ? b : a));
    for (const digit of shuffled(choices)) {
      cells[cell] = digit;
      fill();
      if (found.length === most) break;
    }
    cells[cell] = 0;
  };
  fill();
  return found;
}

/** A puzzle with one solution and, where that is possible, as few givens as `wanted`. */
export function puzzle(n, wanted) {
  const [board] = solutions(n, Array(n * n).fill(0), 1);
  for (const cell of shuffled([...board.keys()])) {
    if (board.filter(Boolean).length <= wanted) break;
    const digit = board[cell];
    board[cell] = 0;
    if (solutions(n, board).length > 1) board[cell] = digit;
  }
  return board;
}

function normal() {
  return Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
}

export class PuzzleTransformer extends EnergyTransformer {
  constructor({ tensors, config }) {
    super({ tensors, config: { ...config, repelling: Math.floor(config.num_heads / 2) } }, config.n ** 2);
    this.delta = this.get("block.norm.delta");
  }

  /** The bias of every pair of cells, or of every kind of pair. */
  biasOf(head) {
    const { n, units } = this.config;
    const { N } = this;
    const table = this.get("block.attention.positions.table");
    if (!units) return (c, b) => table[(head * N + c) * N + b];
    const kinds = Array.from({ length: N * N }, (_, at) =>
      shared(n, Math.floor(at / N), at % N).reduce((sum, same, kind) => sum + (same << kind), 0),
    );
    return (c, b) => table[8 * head + kinds[c * N + b]];
  }

  /** Tokens (N, D) at the start: givens long, others as in `start`, or random. */
  encode(board, start = undefined) {
    const D = this.config.dim;
    const x = start ? Float32Array.from(start) : Float32Array.from({ length: this.N * D }, normal);
    const digits = this.get("digits");
    board.forEach((digit, n) => {
      for (let i = 0; digit && i < D; i++) x[n * D + i] = 5 * digits[(digit - 1) * D + i];
    });
    return x;
  }

  /** A probability of every digit (N, n). */
  beliefs(x) {
    const { dim: D, n } = this.config;
    const g = layerNorm(x, this.gamma, this.delta, D);
    const bias = this.get("readout.bias");
    const p = Float32Array.from({ length: this.N * n }, (_, at) => bias[at % n]);
    multiply(p, g, this.get("readout.kernel"), this.N, D, n);
    for (let at = 0; at < p.length; at += n) {
      const row = p.subarray(at, at + n);
      const top = Math.max(...row);
      const sum = row.reduce((all, v) => all + Math.exp(v - top), 0);
      row.forEach((v, i) => (row[i] = Math.exp(v - top) / sum));
    }
    return p;
  }
}
