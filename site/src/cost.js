// Whole engines, from benchmarks/data/engine.csv.

import * as Plot from "@observablehq/plot";
import measured from "../../benchmarks/data/engine.csv";
import { choice, drawn, element, figure, plural, table, whenResized } from "./page.js";
import { EQUAL, colour, gain } from "./ratios.js";

const PROVIDERS = { ours: "the mode", native: "vLLM's own mode" };
/** The case's own parts, by name. */
function keysOf({ case: named }) {
  return Object.fromEntries(named.split(" ").map((pair) => pair.split("=")));
}

/** Whole models of 16 bits on one H200, in the usual arithmetic. */
const whole = measured.filter((row) => !/\b(layers|arithmetic|tp|tree|format)=/.test(row.case) && /H200/.test(row.gpu));

/** Of drafts, the time of a token alone: the tokens that a verify step gives are no cost, and what a step takes is in that time. */
const timed = whole.filter(({ metric }) => metric !== "length" && metric !== "step");

/**
 * Whether the two engines wrote the same text. With random weights they do not, and each accepts the drafts that happen to be
 * right in its own text; so drafts are compared with a model whose answers no rounding changes.
 */
export function writeTheSame(row) {
  const { spec, model } = keysOf(row);
  return !spec || model === "predictable";
}

/** What was served: a predictable model has the layers of the 8B shape. */
function servedBy(row) {
  const { model = "8b" } = keysOf(row);
  return model === "predictable" ? "8b" : model;
}

const SERVED = [
  ["8b", "Qwen3-8B"],
  ["30b-a3b", "Qwen3-30B-A3B, experts"],
];

/** A case of the benchmark in words. */
export function inWords(row) {
  const { case: named, metric } = row;
  const keys = keysOf(row);
  const thousands = (number) => Number(number).toLocaleString("en");
  const drafter = { itself: "the model itself", ngram: "n-grams", "ngram-repeats": "n-grams", eagle3: "EAGLE-3" }[keys.spec];
  const drafts = keys.spec ? `, ${keys.k} ${keys.k === "1" ? "draft" : "drafts"} by ${drafter}` : "";
  switch (keys.workload) {
    case "throughput":
      return `${thousands(keys.prompts)} prompts, ${keys.output} tokens each`;
    case "tpot":
      return `a token, batch ${keys.batch}${Number(keys.context) > 64 ? `, behind ${thousands(keys.context)}` : ""}${drafts}`;
    case "prefill":
      return `prefill, ${keys.prompts} × ${thousands(keys.input)} (tokens/s)`;
    case "turn":
      return `first token behind ${thousands(keys.cached)} cached`;
    case "online":
      return `server, ${metric.startsWith("ttft") ? "first token" : "a token"}, ${metric.endsWith("p99") ? "p99" : "p50"}`;
    default:
      return { startup: "start-up", memory: "GPU memory" }[keys.workload] ?? named;
  }
}

/** Whether tokens were drafted: such rows come last, because most servers draft none. */
function drafts({ case: named }) {
  return named.includes("spec=");
}

function versionOf({ versions }) {
  return versions.match(/vllm=(\S+)/)[1];
}

/** What the colours mean, of those that are drawn. */
function legend(bars) {
  const colours = {
    "var(--see-ours)": "the mode, as plain vLLM or better",
    "var(--see-worse)": "the mode, worse than plain vLLM by more than 1 %",
    "var(--see-other)": "vLLM's own mode",
  };
  const drawn = new Set(bars.map(colour));
  const items = Object.entries(colours).filter(([name]) => drawn.has(name));
  const swatch = (background) => {
    const made = element("span", { className: "see-swatch", "aria-hidden": "true" });
    made.style.background = background;
    return made;
  };
  return element("ul", { className: "see-legend" }, ...items.map(([name, words]) => element("li", {}, swatch(name), words)));
}

/** Ratios of engines that wrote other texts, which say nothing of their speed. */
function otherTexts(rows) {
  const inside = table(
    "Ratios to plain vLLM that compare texts",
    ["", "the mode", "ratio", "unit"],
    rows.map((row) => [inWords(row), row.p50.toLocaleString("en"), row.ratio.toFixed(2), row.unit]),
  );
  const why =
    "With random weights the two engines write other texts after the first bit that differs, and n-grams are right about one text more " +
    "often than about another. A token's time then follows from the drafts that were accepted. The bars above have drafts for a model " +
    "whose text no rounding changes.";
  return element("details", {}, element("summary", {}, `${plural(rows.length, "figure")} of drafts for random weights, left out`), element("p", {}, why), inside);
}

export function cost(root) {
  const { controls, body, say } = figure(root, "Whole engines beside plain vLLM");
  const versions = [...new Set(timed.map(versionOf))].sort().reverse();
  const version = choice(controls, "Version of vLLM", versions.map((name) => [name, name]), show);
  const served = choice(controls, "Shape of the model", SERVED, show);
  const workload = choice(
    controls,
    "What to show",
    [
      ["all", "everything that was measured"],
      ["tpot", "time per output token"],
      ["other", "the rest"],
    ],
    show,
  );

  function show() {
    const wanted = (row) => workload.value === "all" || (row.metric === "tpot") === (workload.value === "tpot");
    const ofVersion = timed.filter((row) => versionOf(row) === version.value && servedBy(row) === served.value);
    const found = ofVersion.filter((row) => writeTheSame(row) && wanted(row));
    const other = ofVersion.filter((row) => !writeTheSame(row) && row.provider === "ours");
    if (!found.length) {
      body.replaceChildren(element("p", {}, "Nothing of this kind was measured with this version."));
      say(`vLLM ${version.value}: nothing of this kind was measured.`);
      return;
    }
    const rows = [...found.filter((row) => !drafts(row)), ...found.filter(drafts)];
    const stock = rows.filter(({ provider }) => provider === "stock");
    const others = rows.filter(({ provider }) => provider in PROVIDERS);
    const bars = others.map((row) => ({ ...row, words: inWords(row), who: PROVIDERS[row.provider] }));
    const known = [...new Set(bars.map(({ who }) => who))];
    const narrow = (body.clientWidth || 640) < 520;
    const words = `Ratio to plain vLLM ${version.value} in the same run; at 1 both are equal.`;
    body.replaceChildren(
      drawn(body, words, `${words} ${bars.map((bar) => `${bar.who}, ${bar.words}: ${bar.ratio.toFixed(2)}`).join("; ")}.`, () => ({
        height: 40 + bars.length * 17 + stock.length * 14,
        marginLeft: narrow ? 4 : 312,
        marginTop: narrow ? 30 : 10,
        marginRight: 40,
        x: { label: "ratio →", domain: [0, Math.max(1.15, ...bars.map(({ ratio }) => Math.min(ratio, 5)))], grid: true, clamp: true },
        y: { axis: null, domain: known },
        fy: { label: null, axis: narrow ? null : "left", domain: bars.filter(({ who }) => who === known[0]).map((bar) => bar.words), padding: narrow ? 0.45 : 0.2 },
        marks: [
          Plot.barX(bars, { x: "ratio", y: "who", fy: "words", fill: colour }),
          Plot.ruleX([1], { strokeWidth: 1.5 }),
          Plot.text(bars, { x: () => 0, y: "who", fy: "words", text: (bar) => bar.ratio.toFixed(2), dx: 6, textAnchor: "start", fill: "var(--see-on-colour)" }),
          ...(narrow
            ? [
                Plot.text(bars.filter(({ who }) => who === known[0]), {
                  x: () => 0,
                  y: () => known[0],
                  fy: "words",
                  text: "words",
                  textAnchor: "start",
                  dy: -14,
                }),
              ]
            : []),
        ],
      })),
      legend(bars),
      table(
        `Medians with vLLM ${version.value}`,
        ["", "plain vLLM", ...known, "unit"],
        stock.map((row) => [
          inWords(row),
          row.p50.toLocaleString("en"),
          ...known.map((who) => {
            const found = bars.find((bar) => bar.who === who && bar.case === row.case && bar.metric === row.metric);
            return found ? `${found.p50.toLocaleString("en")} (${found.ratio.toFixed(2)})` : "not measured";
          }),
          row.unit,
        ]),
      ),
      ...(other.length ? [otherTexts(other)] : []),
      element("p", { className: "see-note" }, `${stock[0].gpu}, ${stock[0].versions}, ${stock[0].date}; benchmarks/data/engine.csv.`),
    );
    const ours = bars.filter(({ provider }) => provider === "ours");
    const gains = ours.map(gain);
    const count = (holds) => gains.filter(holds).length;
    say(
      `vLLM ${version.value}, ${plural(ours.length, "figure")}: the mode is better than plain vLLM in ` +
        `${count((share) => share > EQUAL)}, within 1 % of it in ${count((share) => Math.abs(share) <= EQUAL)}, and worse in ` +
        `${count((share) => share < -EQUAL)}. Its ratios go ` +
        `from ${Math.min(...ours.map(({ ratio }) => ratio)).toFixed(2)} to ${Math.max(...ours.map(({ ratio }) => ratio)).toFixed(2)}.`,
    );
  }

  whenResized(root, show);
  show();
}
