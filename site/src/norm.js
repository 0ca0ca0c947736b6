// A row of RMSNorm, cut by the number of tokens (vLLM's kernel) and by the row's length alone (the mode).

import * as Plot from "@observablehq/plot";
import { FORMATS, encoded, fields, hexadecimal, lanesSum, rounded } from "./floats.js";
import { bellShaped } from "./numbers.js";
import { bitsOf, choice, drawn, element, figure, plural, slider, table, whenResized } from "./page.js";

const EPSILON = 1e-6;
export const LANES = 64;
const ROWS = 32;

/** Threads that share a row in vLLM's fused_add_rms_norm. */
export function threadsOf(tokens, length) {
  return Math.min(length, tokens < 256 ? 1024 : 256);
}

/** The sum of squares in fp32, in so many partial sums, and what each element is multiplied by. */
export function normalised(row, partialSums) {
  const round = Math.fround;
  const squares = row.map((x) => round(x * x));
  const sum = lanesSum(squares, partialSums, FORMATS.fp32);
  const scale = round(1 / round(Math.sqrt(round(round(sum / row.length) + round(EPSILON)))));
  return { sum, scale, elements: row.map((x) => round(x * scale)) };
}

export function norm(root) {
  const { controls, body, say } = figure(root, "The squares of a row, added in partial sums");
  const counts = [1, 2, 4, 8, 16, 32, 64, 128, 192, 255, 256, 320, 512, 1024, 4096];
  const tokens = slider(controls, "Tokens in the step", counts, 256, show);
  const length = choice(
    controls,
    "Length of the row",
    [2048, 4096, 8192].map((size) => [String(size), size.toLocaleString("en")]),
    show,
  );
  length.value = "4096";
  const rows = new Map();

  function rowsOf(size) {
    if (!rows.has(size)) rows.set(size, Array.from({ length: ROWS }, (_, seed) => bellShaped(size, seed)));
    return rows.get(size);
  }

  function picture(title, size, sums) {
    const each = size / sums;
    const columns = Math.min(sums, 128);
    const words = `${title}: ${sums.toLocaleString("en")} partial sums of ${plural(each, "square")} each`;
    return drawn(body, words, words, () => ({
      height: 130,
      marginLeft: 44,
      x: { label: "partial sums →", domain: [0, 1024], ticks: 5 },
      y: { label: "↑ squares in each", domain: [0, size / LANES], ticks: 3 },
      marks: [
        Plot.rectY(Array.from({ length: columns }), {
          x1: (_, i) => (i * sums) / columns,
          x2: (_, i) => ((i + 1) * sums) / columns,
          y: each,
          fillOpacity: (_, i) => (i % 2 ? 0.65 : 1),
          fill: sums === LANES ? "var(--see-ours)" : "var(--see-other)",
        }),
      ],
    }));
  }

  function show() {
    const size = Number(length.value);
    const threads = threadsOf(tokens.value, size);
    const [now, alone, ours] = [threads, threadsOf(1, size), LANES].map((sums) =>
      rowsOf(size).map((row) => normalised(row, sums)),
    );
    const moved = now.flatMap(({ sum }, row) => (sum === alone[row].sum ? [] : [row]));
    const shown = moved[0] ?? 0;
    const changed = (format) => {
      const bits = (x) => encoded(rounded(x, format), format);
      return now[shown].elements.filter((x, i) => bits(x) !== bits(alone[shown].elements[i])).length.toLocaleString("en");
    };
    const cells = ({ sum }) => {
      const hex = hexadecimal(sum, FORMATS.fp32);
      return [String(sum), bitsOf(fields(sum, FORMATS.fp32), hex), hex];
    };
    body.replaceChildren(
      picture(`By tokens, ${tokens.value} of them`, size, threads),
      picture("By the row's length", size, LANES),
      table(
        `The sum of the squares of row ${shown}`,
        ["", "sum", "bits", "in hexadecimal"],
        [
          ["by tokens, 1 of them", ...cells(alone[shown])],
          [`by tokens, ${tokens.value} of them`, ...cells(now[shown])],
          ["by the row's length, any number", ...cells(ours[shown])],
        ],
      ),
      element(
        "p",
        { className: "see-note" },
        `The ${ROWS} rows are made up in the browser, and added in single additions of fp32 as drawn: of n partial sums, ` +
          "number i takes the squares i, i + n, i + 2n and so on, and the partial sums are added by halving. The table " +
          "shows the first row whose sum changes.",
      ),
    );
    say(
      `${plural(tokens.value, "token")}: ${plural(threads, "partial sum")}. Against one token alone the sum changes in ` +
        `${moved.length} of ${ROWS} rows; in row ${shown}, ${changed(FORMATS.fp32)} of ${size.toLocaleString("en")} ` +
        `results change in fp32 and ${changed(FORMATS.bf16)} in bf16. By the row's length: ${LANES} partial sums, ` +
        "and no row changes.",
    );
  }

  whenResized(root, show);
  show();
}
