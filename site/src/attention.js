// The keys of one query cut into a number of splits that follows the work there is, and into splits of fixed size.

import * as Plot from "@observablehq/plot";
import attentionCsv from "../../benchmarks/data/attention.csv";
import { FORMATS, fields, hexadecimal, sumOf } from "./floats.js";
import { bellShaped } from "./numbers.js";
import { bitsOf, choice, drawn, element, figure, plural, slider, table, whenResized } from "./page.js";

const MULTIPROCESSORS = 132;
const KV_HEADS = 8;
const QUERY_HEADS = 32;
const BLOCK_OF_ROWS = 64;
const BLOCK_OF_KEYS = 128;
const CHUNK = 512;
const TERMS = 4096;

/** FlashAttention 3's rule (hopper/heuristics.h): the fewest splits that use 85 % of what the best number would. */
export function numberOfSplits(blocksOfRows, blocksOfKeys) {
  if (blocksOfRows >= 0.8 * MULTIPROCESSORS || blocksOfKeys <= 4) return 1;
  const efficiencies = Array.from({ length: Math.min(128, MULTIPROCESSORS, blocksOfKeys) }, (_, i) => {
    const waves = (blocksOfRows * (i + 1)) / MULTIPROCESSORS;
    return waves / Math.ceil(waves);
  });
  const best = Math.max(...efficiencies);
  return 1 + efficiencies.findIndex((efficiency) => efficiency >= 0.85 * best);
}

/** Borders of the splits that this rule makes of the keys there are, cut off behind the keys that the query sees. */
export function byNumber(seen, there, queries, requests) {
  const rows = queries * (QUERY_HEADS / KV_HEADS);
  const splits = numberOfSplits(requests * KV_HEADS * Math.ceil(rows / BLOCK_OF_ROWS), Math.ceil(there / BLOCK_OF_KEYS));
  const size = Math.ceil(Math.ceil(there / BLOCK_OF_KEYS) / splits) * BLOCK_OF_KEYS;
  return cutAt(seen, (start) => start + size);
}

/** Borders of the mode's splits: 256 keys up to position 2048, 512 up to 32768, 1024 behind it. */
export function bySize(seen) {
  return cutAt(seen, (start) => start + (start < 2048 ? 256 : start < 32768 ? 512 : 1024));
}

function cutAt(seen, next) {
  const found = [];
  for (let start = 0; start < seen; start = next(start)) found.push([start, Math.min(next(start), seen)]);
  return found;
}

/** How a query that sees so many keys may be computed: queries in the step, and keys there are in the end. */
export function schedulesOf(seen) {
  const chunk = Math.ceil(seen / CHUNK) * CHUNK;
  return [
    { name: "decode", queries: 1, there: seen },
    { name: `a chunk of ${CHUNK}`, queries: CHUNK, there: chunk },
    { name: "prefill at once", queries: 2 * chunk, there: 2 * chunk },
  ];
}

/** The sum of the first terms in fp32: each split from its first term to its last, then the splits' sums. */
export function sumInSplits(terms, cut) {
  return sumOf(
    cut.map(([start, end]) => sumOf(terms.subarray(start, end), FORMATS.fp32)),
    FORMATS.fp32,
  );
}

export function splits(root) {
  const { controls, body, say } = figure(root, "The keys of one query");
  const contexts = [100, 256, 600, 900, 999, 1000, 1001, 1024, 1500, 2047, 2048, 2049, 3000, 4000, 4096];
  const context = slider(controls, "Keys that the query sees", contexts, 1000, show);
  const requests = slider(controls, "Requests in the batch", [1, 2, 4, 8, 13, 14, 16, 32, 64, 256], 1, show);
  const compared = choice(
    controls,
    "Mark what is equal to",
    [
      ["decode", "decode of this query alone"],
      ["before", "the query one token before, alone"],
    ],
    show,
  );
  const terms = bellShaped(TERMS, 11);

  function rowsOf(seen, cut) {
    return schedulesOf(seen).map((schedule) => ({ name: schedule.name, cut: cut(schedule) }));
  }

  function picture(title, rows, reference) {
    const known = new Set(reference.map(String));
    const pieces = rows.flatMap(({ name, cut }) =>
      cut.map(([start, end], place) => ({ name, start, end, place, same: known.has(`${start},${end}`) })),
    );
    const equal = rows.map(({ name, cut }) => `${name} ${cut.filter((split) => known.has(String(split))).length} of ${cut.length}`);
    const words = `${title}. Partial results that are equal: ${equal.join(", ")}`;
    const height = 34;
    return drawn(body, words, words, () => ({
      height: height * rows.length + 40,
      marginLeft: 104,
      x: { label: "key →", domain: [0, context.value], ticks: 5 },
      y: { label: null, domain: rows.map(({ name }) => name), padding: 0.25 },
      marks: [
        Plot.barX(pieces, {
          x1: "start",
          x2: "end",
          y: "name",
          insetRight: 1,
          fill: ({ same }) => (same ? "var(--see-ours)" : "var(--see-other)"),
          fillOpacity: ({ place }) => (place % 2 ? 0.7 : 1),
        }),
        Plot.text(pieces.filter(({ start, end }) => end - start > context.value / 9), {
          x: ({ start, end }) => (start + end) / 2,
          y: "name",
          text: ({ same, start, end }) => `${same ? "=" : "≠"} ${end - start}`,
          fill: "var(--see-on-colour)",
        }),
      ],
    }));
  }

  function results(rows, alone) {
    return rows.map(({ name, cut }) => {
      const sum = sumInSplits(terms, cut);
      const hex = hexadecimal(sum, FORMATS.fp32);
      const verdict = sum === alone ? "as in decode alone" : "other bits";
      return [name, plural(cut.length, "split"), bitsOf(fields(sum, FORMATS.fp32), hex), hex, verdict];
    });
  }

  function show() {
    const seen = context.value;
    const earlier = compared.value === "before";
    const number = rowsOf(seen, ({ queries, there }) => byNumber(seen, there, queries, requests.value));
    const size = rowsOf(seen, () => bySize(seen));
    const alone = byNumber(seen, seen, 1, 1);
    const reference = earlier ? [byNumber(seen - 1, seen - 1, 1, 1), bySize(seen - 1)] : [alone, bySize(seen)];
    const header = ["schedule", "splits", "bits of the sum", "in hexadecimal", "compared"];
    const sums = [sumInSplits(terms, alone), sumInSplits(terms, bySize(seen))];
    const byNumberRows = results(number, sums[0]);
    const bySizeRows = results(size, sums[1]);
    body.replaceChildren(
      picture("A number of splits that follows the work", number, reference[0]),
      picture("Splits of fixed size", size, reference[1]),
      table("By number: a sum over these keys", header, byNumberRows),
      table("By size: the same sum", header, bySizeRows),
    );
    const others = (rows) => rows.filter((row) => row.at(-1) === "other bits").map(([name]) => name);
    const moved = others(byNumberRows);
    const equal = (rows, cut) => {
      const [known, all] = [new Set(cut.map(String)), rows.flatMap((row) => row.cut)];
      return `${all.filter((split) => known.has(String(split))).length} of ${all.length}`;
    };
    say(
      `${plural(seen, "key")}, ${plural(requests.value, "request")}: by number, ` +
        `${number.map(({ name, cut }) => `${name} in ${plural(cut.length, "split")}`).join(", ")}; ` +
        `${moved.length ? `other bits than in decode alone in ${moved.join(", ")}` : "the bits of decode alone in all"}. ` +
        `By size, ${plural(size[0].cut.length, "split")} in all three; ` +
        `${others(bySizeRows).length ? "other bits" : "the bits of decode alone in all"}. Of the partial results, ` +
        `${equal(number, reference[0])} by number and ${equal(size, reference[1])} by size are those of ` +
        `${compared.selectedOptions[0].textContent}.`,
    );
  }

  whenResized(root, show);
  show();
}

export function measured(root) {
  const { controls, body, say } = figure(root, "Attention of decode on a GPU, measured");
  const decode = attentionCsv.filter((row) => row.phase === "decode" && row.heads === 32);
  const contexts = [...new Set(decode.map((row) => row.context))];
  const batches = [...new Set(decode.map((row) => row.batch))];
  const context = slider(controls, "Keys in the cache", contexts, contexts[0], show);
  const batch = slider(controls, "Requests in the batch", batches, 1, show);
  const names = {
    stock: "FlashAttention 3",
    "fa3-one-split": "FlashAttention 3 with one split",
    "native-triton": "vLLM's Triton backend",
    "ours-triton": "the mode",
  };

  function show() {
    const rows = decode.filter((row) => row.context === context.value && row.batch === batch.value);
    const found = Object.entries(names).map(([provider, name]) => [name, rows.find((row) => row.provider === provider)]);
    const here = `${plural(batch.value, "request")} behind ${plural(context.value, "key")}`;
    if (!rows.length) {
      body.replaceChildren(element("p", {}, `${here}: not measured, because the cache would not fit.`));
      say(`${here}: not measured.`);
      return;
    }
    const [{ gpu, versions, date }] = rows;
    const bits = { equal: "the same in all batches tried", differ: "not the same in all batches", "-": "not compared" };
    const { stock, ours } = { stock: found[0][1], ours: found.at(-1)[1] };
    body.replaceChildren(
      table(
        `${here}: ${gpu}, ${versions}, ${date} (benchmarks/data/attention.csv)`,
        ["", "microseconds", "as a ratio to FlashAttention 3", "a request's bits"],
        found.filter(([, row]) => row).map(([name, row]) => [name, row.p50.toFixed(1), row.ratio.toFixed(2), bits[row.bits]]),
      ),
    );
    say(
      `${here}: FlashAttention 3 takes ${stock.p50.toFixed(1)} microseconds, and a request's bits are ${bits[stock.bits]}; ` +
        `the mode takes ${ours.p50.toFixed(1)}, and they are ${bits[ours.bits]}.`,
    );
  }

  show();
}
