// Sums by block size and a product by tile, computed here, beside what a GPU measured.

import * as Plot from "@observablehq/plot";
import measured from "../data/gpu_blocks.json";
import {
  FORMATS,
  blockedSum,
  distance,
  encoded,
  exactSum,
  fields,
  hexadecimal,
  rounding,
} from "./floats.js";
import { uniform } from "./numbers.js";
import { bitsOf, button, choice, drawn, element, figure, plural, slider, small, table, whenResized, written } from "./page.js";

export const ELEMENTS = 2 ** 20;
export const BLOCKS = [64, 128, 256, 512, 1024];
export const SIDE = 256;
export const TILES = [
  [32, 64],
  [64, 128],
  [128, 128],
];
const FORMATS_HERE = [FORMATS.fp32, FORMATS.fp16];

/** The sum for each block size, and the exact sum of the same numbers. */
export function sumsByBlock(format) {
  const numbers = uniform(ELEMENTS, 0, rounding(format));
  const sums = new Map(BLOCKS.map((block) => [block, blockedSum(numbers, block, format)]));
  return { sums, exact: exactSum(numbers) };
}

/** Two matrices of the demonstration. */
export function operands(format) {
  return [uniform(SIDE * SIDE, 1, rounding(format)), uniform(SIDE * SIDE, 2, rounding(format))];
}

/** One tile of a @ b into `out`: K upwards in each split, then the splits' sums. */
export function multiplyTile([a, b], out, top, left, [height, width], splits, format) {
  const round = rounding(format);
  const part = Math.ceil(SIDE / splits);
  for (let row = top; row < Math.min(top + height, SIDE); row++) {
    for (let column = left; column < Math.min(left + width, SIDE); column++) {
      let total = 0;
      for (let start = 0; start < SIDE; start += part) {
        let sum = 0;
        for (let k = start; k < Math.min(start + part, SIDE); k++) {
          sum = round(sum + round(a[row * SIDE + k] * b[k * SIDE + column]));
        }
        total = round(total + sum);
      }
      out[row * SIDE + column] = total;
    }
  }
}

/** The whole product; between tiles the browser may do other things. */
export async function multiply(matrices, tile, splits, format) {
  const out = new Float64Array(SIDE * SIDE);
  for (let top = 0; top < SIDE; top += tile[0]) {
    for (let left = 0; left < SIDE; left += tile[1]) {
      multiplyTile(matrices, out, top, left, tile, splits, format);
      await new Promise((done) => setTimeout(done));
    }
  }
  return out;
}

const onGpu = measured.where
  ? `The GPU's numbers: ${measured.where.machine}, PyTorch ${measured.where.torch}, Triton ${measured.where.triton}, ` +
    `${measured.where.date}; written by ${measured.written_by}.`
  : "No GPU has measured this yet. python -m scripts.see.gpu_blocks measures it on yours, and the next make site shows it.";

export function sums(root) {
  const { controls, body, say } = figure(root, `The sum of ${ELEMENTS.toLocaleString("en")} numbers`);
  const known = new Map();
  const format = choice(controls, "Format", FORMATS_HERE.map(({ name }) => [name, name]), show);
  const block = slider(controls, "Numbers in a block", BLOCKS, 256, show);

  function show() {
    const here = FORMATS[format.value];
    if (!known.has(here)) known.set(here, sumsByBlock(here));
    const { sums, exact } = known.get(here);
    const points = BLOCKS.map((size) => ({ size: String(size), error: distance(sums.get(size), exact) }));
    const chosen = sums.get(block.value);
    const rows = BLOCKS.map((size) => {
      const sum = sums.get(size);
      return [
        size === block.value ? element("strong", {}, String(size)) : String(size),
        written(sum),
        ...(measured.sums ? [written(measured.sums[here.name][size])] : []),
        small(distance(sum, exact)),
        bitsOf(fields(sum, here), hexadecimal(sum, here)),
      ];
    });
    const words = `Error of the sum in ${here.name} by the size of a block.`;
    body.replaceChildren(
      drawn(body, words, `${words} ${points.map(({ size, error }) => `${size}: ${small(error)}`).join(", ")}.`, () => ({
        height: 190,
        marginLeft: 70,
        x: { type: "band", label: "numbers in a block", labelAnchor: "right", domain: BLOCKS.map(String) },
        y: { label: "↑ error", grid: true, ticks: 5, tickFormat: (y) => small(y) },
        marks: [
          Plot.ruleY([0]),
          Plot.ruleX(points, { x: "size", y: "error", stroke: "var(--see-ours)" }),
          Plot.dot(points, {
            x: "size",
            y: "error",
            r: 6,
            fill: ({ size }) => (size === String(block.value) ? "var(--see-other)" : "var(--see-ours)"),
          }),
        ],
      })),
      table(
        `Sums in ${here.name}`,
        ["numbers in a block", "sum", ...(measured.sums ? ["on the GPU"] : []), "error", "bits"],
        rows,
      ),
      element("p", { className: "see-note" }, onGpu),
    );
    const others = new Set([...sums.values()].map((sum) => encoded(sum, here))).size;
    say(
      `Blocks of ${block.value} in ${here.name}: ${written(chosen)}, ${small(distance(chosen, exact))} from the exact ` +
        `sum. The five sizes give ${plural(others, "different sum")}.`,
    );
  }

  whenResized(root, show);
  show();
}

export function product(root) {
  const { controls, body, say } = figure(root, `${SIDE} × ${SIDE} times ${SIDE} × ${SIDE}`);
  const format = choice(controls, "Format", FORMATS_HERE.map(({ name }) => [name, name]), start);
  const cut = choice(
    controls,
    "Way of cutting",
    [
      ...TILES.map((tile) => [`${tile.join("x")}/1`, `tiles of ${tile.join(" × ")}`]),
      ...[2, 4, 8].map((splits) => [`128x128/${splits}`, `tiles of 128 × 128, K in ${splits} parts`]),
    ],
    start,
  );
  cut.value = "64x128/1";
  const go = button(controls, "Compute and compare", compute);
  const canvas = element("canvas", { width: SIDE, height: SIDE, className: "see-matrix", role: "img" });
  const results = element("div");
  const references = new Map();
  const tried = new Map();
  body.append(canvas, results, element("p", { className: "see-note" }, onGpu));

  function parts() {
    const [tile, splits] = cut.value.split("/");
    return [tile.split("x").map(Number), Number(splits)];
  }

  function paint(reference, found) {
    const context = canvas.getContext("2d");
    const image = context.createImageData(SIDE, SIDE);
    const [blue, orange] = ["--see-ours", "--see-other"].map((name) => {
      context.fillStyle = getComputedStyle(root).getPropertyValue(name).trim();
      return [1, 3, 5].map((at) => Number.parseInt(context.fillStyle.slice(at, at + 2), 16));
    });
    for (let i = 0; i < SIDE * SIDE; i++) {
      image.data.set([...(found && found[i] !== reference[i] ? orange : blue), found ? 255 : 60], 4 * i);
    }
    context.putImageData(image, 0, 0);
  }

  function start() {
    paint([], null);
    canvas.setAttribute("aria-label", "Not computed yet.");
    const [[height, width], splits] = parts();
    say(
      `Tiles of ${height} by ${width}${splits > 1 ? `, K in ${splits} parts` : ""}, in ${format.value}: ` +
        `${plural(Math.ceil(SIDE / height) * Math.ceil(SIDE / width) * splits, "program")}. Not computed yet.`,
    );
  }

  async function compute() {
    go.disabled = true;
    const here = FORMATS[format.value];
    const [tile, splits] = parts();
    const name = `${cut.selectedOptions[0].textContent}, ${here.name}`;
    say(`Computing with ${name}.`);
    const matrices = operands(here);
    if (!references.has(here)) references.set(here, await multiply(matrices, TILES[0], 1, here));
    const reference = references.get(here);
    const found = await multiply(matrices, tile, splits, here);
    const moved = found.reduce((count, value, i) => count + (value !== reference[i]), 0);
    paint(reference, found);
    const onThatGpu = measured.product?.[here.name]?.[cut.value];
    tried.set(name, [name, moved.toLocaleString("en"), ...(measured.product ? [String(onThatGpu ?? "–")] : [])]);
    const words = `${moved.toLocaleString("en")} of ${(SIDE * SIDE).toLocaleString("en")} elements have other bits`;
    canvas.setAttribute("aria-label", `${words}; each pixel is an element.`);
    results.replaceChildren(
      table(
        "Compared with tiles of 32 × 64",
        ["way of cutting", "elements with other bits", ...(measured.product ? ["on the GPU"] : [])],
        [...tried.values()],
      ),
    );
    say(`${name}: ${words}.`);
    go.disabled = false;
  }

  start();
}

