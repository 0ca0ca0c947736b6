// A row of RMSNorm, cut by the number of tokens (vLLM's kernel) and by the row's length alone (the mode).

import * as Plot from "@observablehq/plot";
import { FORMATS, encoded, fields, hexadecimal, lanesSum, rounded } from "./floats.js";
import { bellShaped } from "./numbers.js";
import { bitsOf, choice, drawn, element, figure, plural, slider, table, whenResized } from "./page.js";

const EPSILON = 1e-6;
export const LANES = 64;

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
  const { controls, body, say } = figure(root, "The squares of one row, added in partial sums");
  const tokens = slider(
    controls,
    "Tokens in the step",
    [1, 2, 4, 8, 16, 32, 64, 128, 192, 255, 256, 320, 512, 1024, 4096],
    1,
    show,
  );
  const length = choice(
    controls,
    "Length of the row",
    [2048, 4096, 8192].map((size) => [String(size), size.toLocaleString("en")]),
    show,
  );
  length.value = "4096";

  function picture(title, size, sums) {
    const each = size / sums;
    const words = `${title}: ${sums.toLocaleString("en")} partial sums of ${plural(each, "square")} each`;
    return drawn(body, words, words, () => ({
      height: 150,
      marginLeft: 50,
      x: { label: "partial sum →", domain: [0, sums] },
      y: { label: "↑ squares in it", domain: [0, 8192 / LANES], ticks: 4 },
      marks: [
        Plot.rectY(Array.from({ length: Math.min(sums, 128) }), {
          x1: (_, i) => (i * sums) / Math.min(sums, 128),
          x2: (_, i) => ((i + 1) * sums) / Math.min(sums, 128),
          y: each,
          inset: 0.5,
          fill: sums === LANES ? "var(--see-ours)" : "var(--see-other)",
        }),
      ],
    }));
  }

  function show() {
    const size = Number(length.value);
    const row = bellShaped(size, 7);
    const threads = threadsOf(tokens.value, size);
    const [plain, alone, ours] = [threads, threadsOf(1, size), LANES].map((sums) => normalised(row, sums));
    const moved = plain.elements.reduce((count, x, i) => count + (x !== alone.elements[i]), 0);
    const inBf16 = plain.elements.reduce(
      (count, x, i) =>
        count +
        (encoded(rounded(x, FORMATS.bf16), FORMATS.bf16) !== encoded(rounded(alone.elements[i], FORMATS.bf16), FORMATS.bf16)),
      0,
    );
    const cells = ({ sum }) => {
      const hex = hexadecimal(sum, FORMATS.fp32);
      return [String(sum), bitsOf(fields(sum, FORMATS.fp32), hex), hex];
    };
    body.replaceChildren(
      picture(`By tokens, ${tokens.value} of them`, size, threads),
      picture("By the row's length", size, LANES),
      table(
        "The sum of squares",
        ["", "sum", "bits", "in hexadecimal"],
        [
          ["by tokens, with 1", ...cells(alone)],
          [`by tokens, with ${tokens.value}`, ...cells(plain)],
          ["by the row's length, any number", ...cells(ours)],
        ],
      ),
      element(
        "p",
        { className: "see-note" },
        "The row is made up in the browser, and added in single additions of fp32 as drawn: partial sum i takes the " +
          "squares i, i + n, i + 2n, and so on, and the partial sums are added by halving.",
      ),
    );
    say(
      `${plural(tokens.value, "token")}: ${plural(threads, "partial sum")}, and ` +
        `${plain.sum === alone.sum ? "the sum of one token alone" : "another sum than for one token alone"}; ` +
        `${moved.toLocaleString("en")} of ${size.toLocaleString("en")} results change in fp32, ` +
        `${inBf16.toLocaleString("en")} in bf16. By the length: ${LANES} partial sums, and no result changes.`,
    );
  }

  whenResized(root, show);
  show();
}
