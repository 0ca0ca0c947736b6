// A matmul cut into tiles and splits by the number of rows; and one real dot product, recorded in batches of 1 to 128.

import * as Plot from "@observablehq/plot";
import dot from "../data/dot.json";
import schedules from "../data/schedules.json";
import linear from "../../benchmarks/data/linear.csv";
import { FORMATS, fields, hexadecimal } from "./floats.js";
import { bitsOf, choice, drawn, element, figure, plural, slider, small, table, whenResized } from "./page.js";

const MULTIPROCESSORS = 132;
const FEWEST_TERMS = 512;

/** A rule of thumb for split-K: more splits while programs do not fill the GPU and each has enough of K. */
export function ruleOfThumb(m, n, k) {
  const tile = m <= 64 ? [64, 64] : [128, 128];
  const tiles = Math.ceil(m / tile[0]) * Math.ceil(n / tile[1]);
  let splits = 1;
  while (2 * splits * tiles <= MULTIPROCESSORS && k / (2 * splits) >= FEWEST_TERMS) splits *= 2;
  return { tile, tiles, splits };
}

export function tiles(root) {
  const { controls, body, say } = figure(root, "One matmul, cut up");
  const shapes = schedules.shapes.map(({ n, k }, place) => [String(place), `${n} × ${k}`]);
  const shape = choice(controls, "Weight, N × K", shapes, show);
  const rows = slider(controls, "Rows in the batch, M", schedules.batches, 1, show);

  function strip(title, way, n, k) {
    const across = Math.min(Math.ceil(n / way.tile[1]), 128);
    const parts = Array.from({ length: way.splits }, (_, part) => part);
    const words =
      `${title}: tiles of ${way.tile.join(" × ")}, ${plural(way.tiles, "tile")}; K in ` +
      `${way.splits === 1 ? "one piece" : `${way.splits} pieces`}, ${plural(way.tiles * way.splits, "program")}.`;
    const result = drawn(body, `${title}: the result in tiles, M downwards and N to the right`, words, () => ({
      height: 30 + 16 * Math.min(Math.ceil(rows.value / way.tile[0]), 6),
      margin: 2,
      x: { axis: null, domain: [0, across] },
      y: { axis: null, domain: [0, Math.min(Math.ceil(rows.value / way.tile[0]), 6)], reverse: true },
      marks: [
        Plot.rect(
          Array.from({ length: across * Math.min(Math.ceil(rows.value / way.tile[0]), 6) }, (_, i) => ({
            x: i % across,
            y: Math.floor(i / across),
          })),
          {
            x1: (d) => d.x,
            x2: (d) => d.x + 1,
            y1: (d) => d.y,
            y2: (d) => d.y + 1,
            inset: across > 64 ? 0.4 : 1,
            fill: "var(--see-ours)",
            fillOpacity: 0.55,
          },
        ),
      ],
    }));
    const order = drawn(body, `${title}: K of one element, terms 1 to ${k.toLocaleString("en")}`, words, () => ({
      height: 62,
      margin: 2,
      marginBottom: 26,
      x: { domain: [0, k], ticks: 4, label: null },
      marks: [
        Plot.barX(parts, {
          x1: (part) => (part * k) / way.splits,
          x2: (part) => ((part + 1) * k) / way.splits,
          fill: (part) => `var(--see-part-${part % 4})`,
          inset: 1,
        }),
        Plot.text(way.splits <= 8 ? parts : [], {
          x: (part) => ((part + 0.5) * k) / way.splits,
          text: (part) => (way.splits === 1 ? "one sum, from the first term to the last" : `sum ${part + 1}`),
          fill: "var(--see-on-colour)",
        }),
      ],
    }));
    return [element("p", { className: "see-words" }, words), result, order];
  }

  function measuredTimes(n, k) {
    const ofCase = linear.filter((row) => row.n === n && row.k === k && row.m === rows.value);
    const names = { stock: "torch.mm", ours: "the mode", native: "vLLM's own mode" };
    const found = Object.entries(names).map(([provider, name]) => [name, ofCase.find((row) => row.provider === provider)]);
    const [{ gpu, versions, date }] = ofCase;
    return table(
      `Measured: ${gpu}, ${versions}, ${date} (benchmarks/data/linear.csv)`,
      ["", "microseconds", "as a ratio to torch.mm", "a row's bits at M - 1, M and M + 1"],
      found.map(([name, row]) => [
        name,
        row.p50.toFixed(1),
        row.ratio.toFixed(2),
        { equal: "the same", differ: "differ", "-": "nothing is promised" }[row.bits],
      ]),
    );
  }

  function show() {
    const { n, k, tiles } = schedules.shapes[shape.value];
    const [block_m, block_n] = tiles[rows.value];
    const ours = {
      tile: [block_m, block_n],
      tiles: Math.ceil(rows.value / block_m) * Math.ceil(n / block_n),
      splits: 1,
    };
    const thumb = ruleOfThumb(rows.value, n, k);
    body.replaceChildren(
      ...strip("A rule of thumb", thumb, n, k),
      ...strip("The mode", ours, n, k),
      measuredTimes(n, k),
    );
    say(
      `${plural(rows.value, "row")} and a weight of ${n} × ${k}: the rule of thumb adds K in ${plural(thumb.splits, "piece")} ` +
        `with tiles of ${thumb.tile.join(" by ")}, the mode in 1 piece with tiles of ${ours.tile.join(" by ")}.`,
    );
  }

  whenResized(root, show);
  show();
}

function orderOf(orders, batch) {
  return orders.findIndex(({ batches }) => batches.includes(batch));
}

export function dotProduct(root) {
  const { controls, body, say } = figure(root, `One dot product of ${dot.k.toLocaleString("en")} terms, recorded`);
  const batches = [...dot.stock.flatMap((order) => order.batches)].sort((a, b) => a - b);
  const batch = slider(controls, "Rows in the batch, M", batches, 1, show);
  const positions = dot.exact.map((_, place) => (place + 1) * dot.step);
  const errors = (order) => order.running.map((sum, place) => ({ k: positions[place], error: sum - dot.exact[place] }));
  const most = Math.max(...[...dot.stock, ...dot.ours].flatMap((order) => errors(order).map((d) => Math.abs(d.error))));

  function runningSums(chosen) {
    const lines = dot.stock.map((order, place) => ({ place, points: errors(order) }));
    const words = `Running sums of plain PyTorch at M = ${batch.value} (thick), at other M (thin), and of the mode (dashed)`;
    return drawn(body, `${words}, less the exact ones`, words, () => ({
      height: 230,
      marginLeft: 66,
      x: { label: "terms added →", domain: [0, dot.k] },
      y: { label: "↑ error so far", grid: true, domain: [-most, most], ticks: 5, tickFormat: (y) => small(y) },
      marks: [
        Plot.ruleY([0]),
        ...lines
          .sort((a, b) => (a.place === chosen) - (b.place === chosen))
          .map(({ place, points }) =>
            Plot.lineY(points, {
              x: "k",
              y: "error",
              stroke: place === chosen ? "var(--see-other)" : "var(--see-faint)",
              strokeWidth: place === chosen ? 3 : 1.2,
            }),
          ),
        Plot.lineY(errors(dot.ours[0]), { x: "k", y: "error", stroke: "var(--see-ours)", strokeDasharray: "5 3", strokeWidth: 2 }),
      ],
    }));
  }

  function order(title, meets, colour) {
    const points = meets.map((terms, place) => ({ k: place + 1, terms }));
    const words = `${title}: how many terms the first sum has that holds term 0 and this one`;
    return drawn(body, words, words, () => ({
      height: 150,
      marginLeft: 50,
      x: { label: "term →", domain: [0, dot.k] },
      y: { label: "↑ terms", grid: true, ticks: 4, domain: [0, dot.k] },
      marks: [Plot.dot(points, { x: "k", y: "terms", r: 1.4, fill: colour })],
    }));
  }

  function show() {
    const chosen = orderOf(dot.stock, batch.value);
    const [stock, ours] = [dot.stock[chosen], dot.ours[0]];
    const row = (name, result) => {
      const hex = hexadecimal(result, FORMATS.fp32);
      return [name, String(result), bitsOf(fields(result, FORMATS.fp32), hex), hex];
    };
    const { machine, torch, date } = dot.where;
    body.replaceChildren(
      table(
        `The result at M = ${batch.value}`,
        ["", "result", "bits", "in hexadecimal"],
        [row("plain PyTorch", stock.result), row("the mode", ours.result)],
      ),
      runningSums(chosen),
      order(`Plain PyTorch at M = ${batch.value}`, stock.meets, "var(--see-other)"),
      order("The mode at any M", ours.meets, "var(--see-ours)"),
      element(
        "p",
        { className: "see-note" },
        `Recorded on ${machine}, PyTorch ${torch}, fp32, ${date}, by ${dot.written_by}: ` +
          `row 0 of x [M, ${dot.k}] times column ${dot.column} of a weight with ${dot.n} columns.`,
      ),
    );
    const same = dot.stock[chosen].result === dot.stock[0].result;
    say(
      `${plural(batch.value, "row")}: plain PyTorch gives ${stock.result}, ` +
        `${same ? "the result of one row alone" : "another result than for one row alone"}. ` +
        `The mode gives ${ours.result}, as for any number of rows.`,
    );
  }

  whenResized(root, show);
  show();
}
