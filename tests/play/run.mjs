// node run.mjs ENGINE MODEL INPUT: what the engine makes of a picture, as JSON.
import { readFileSync } from "node:fs";

const [engine, model, input] = process.argv.slice(2);
const { ImageEnergyTransformer, readSafetensors } = await import(engine);
const bytes = readFileSync(model);
const buffer = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
const net = new ImageEnergyTransformer(readSafetensors(buffer));
const { pixels, masked, steps } = JSON.parse(readFileSync(input, "utf8"));
const x = net.encode(net.patchify(pixels), masked);
const seen = net.look(x);
const path = net.descend(pixels, masked, steps);
console.log(
  JSON.stringify({
    x: [...x],
    g: [...seen.g],
    attention: [...seen.attention.update],
    memory: [...seen.memory.update],
    energies: path.map(({ energies }) => energies),
    pictures: path.map(({ pixels }) => [...pixels]),
  }),
);
