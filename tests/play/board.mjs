// node board.mjs ENGINE MODEL INPUT: the descent of a board from a start, as JSON.
import { readFileSync } from "node:fs";

const [engine, model, input] = process.argv.slice(2);
const { readSafetensors } = await import(engine);
const { PuzzleTransformer } = await import(new URL("board.js", `file://${engine}`));
const bytes = readFileSync(model);
const buffer = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
const net = new PuzzleTransformer(readSafetensors(buffer));
const { board, start, steps, keyTerm } = JSON.parse(readFileSync(input, "utf8"));
net.keyTerm = keyTerm;
const path = [];
for (let x = net.encode(board, start), t = 0; t <= steps; t++) {
  const { attention, memory, ...seen } = net.look(x);
  const update = attention.update.map((u, i) => u + memory.update[i]);
  const rows = [[attention.energy], [memory.energy], update, net.beliefs(x)];
  path.push(rows.map((row) => [...row]));
  x = net.step(x, { attention, memory, ...seen }, t);
}
console.log(JSON.stringify(path));
