// Whole engines, from benchmarks/data/engine.csv.

import * as Plot from "@observablehq/plot";
import measured from "../../benchmarks/data/engine.csv";
import { choice, drawn, element, figure, plural, table, whenResized } from "./page.js";

/** Of the 8B shape whole on one GPU, in the usual arithmetic. */
const engine = measured.filter(({ case: named }) => !/\b(layers|model|arithmetic|tp|tree)=/.test(named));
const PROVIDERS = { ours: "the mode", native: "vLLM's own mode" };

/** A case of the benchmark in words. */
export function inWords({ case: named, metric }) {
  const keys = Object.fromEntries(named.split(" ").map((pair) => pair.split("=")));
  const thousands = (number) => Number(number).toLocaleString("en");
  const drafts = keys.spec ? `, ${keys.k} drafts by ${keys.spec === "itself" ? "the model itself" : keys.spec}` : "";
  switch (keys.workload) {
    case "throughput":
      return `${thousands(keys.prompts)} prompts, ${keys.output} tokens each`;
    case "tpot":
      return `a ${metric === "step" ? "verify step" : "token"}, batch ${keys.batch}${Number(keys.context) > 64 ? `, behind ${thousands(keys.context)}` : ""}${drafts}`;
    case "accepted":
      return `tokens of a verify step${drafts}`;
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

/** Whether a larger number of a metric is better. */
export function moreIsBetter({ metric }) {
  return metric === "throughput" || metric === "length";
}

/** Whether tokens were drafted: such rows come last, because most servers draft none. */
function drafts({ case: named }) {
  return named.includes("spec=");
}

function versionOf({ versions }) {
  return versions.match(/vllm=(\S+)/)[1];
}

export function cost(root) {
  const { controls, body, say } = figure(root, "Whole engines beside plain vLLM");
  const versions = [...new Set(engine.map(versionOf))];
  const version = choice(controls, "Version of vLLM", versions.map((name) => [name, name]), show);
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
    const wanted = (row) => workload.value === "all" || ["tpot", "step"].includes(row.metric) === (workload.value === "tpot");
    const found = engine.filter((row) => versionOf(row) === version.value && wanted(row));
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
          Plot.barX(bars, { x: "ratio", y: "who", fy: "words", fill: ({ who }) => (who === PROVIDERS.ours ? "var(--see-ours)" : "var(--see-other)") }),
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
      element("p", { className: "see-words" }, known.map((who) => `${who === PROVIDERS.ours ? "Blue" : "Orange"}: ${who}.`).join(" ")),
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
      element("p", { className: "see-note" }, `${stock[0].gpu}, ${stock[0].versions}, ${stock[0].date}; benchmarks/data/engine.csv.`),
    );
    const ours = bars.filter(({ provider }) => provider === "ours");
    const gains = ours.map((bar) => (moreIsBetter(bar) ? bar.ratio - 1 : 1 - bar.ratio));
    const count = (holds) => gains.filter(holds).length;
    say(
      `vLLM ${version.value}, ${plural(ours.length, "figure")}: the mode is better than plain vLLM in ` +
        `${count((gain) => gain > 0.01)}, within 1 % of it in ${count((gain) => Math.abs(gain) <= 0.01)}, and worse in ` +
        `${count((gain) => gain < -0.01)}. Its ratios go ` +
        `from ${Math.min(...ours.map(({ ratio }) => ratio)).toFixed(2)} to ${Math.max(...ours.map(({ ratio }) => ratio)).toFixed(2)}.`,
    );
  }

  whenResized(root, show);
  show();
}
