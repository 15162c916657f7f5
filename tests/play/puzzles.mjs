// node puzzles.mjs ENGINE: boards that the page makes, and what its search finds in them.
const [engine] = process.argv.slice(2);
const { puzzle, solutions } = await import(new URL("board.js", `file://${engine}`));
const all = (n, wanted, count) => Array.from({ length: count }, () => puzzle(n, wanted));
const boards = [...all(4, 7, 10), ...all(4, 0, 10), ...all(6, 14, 2)];
const found = boards.map((board) => solutions(board.length ** 0.5, board, 9));
const every = solutions(4, Array(16).fill(0), 999).length;
const none = solutions(4, [1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 4, 0]).length;
console.log(JSON.stringify([boards, found, every, none]));
