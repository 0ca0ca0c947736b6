// Bundles the pages' scripts with what they need of D3, Observable Plot and the measurements.  usage: build.mjs FOLDER

import { existsSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { csvParse } from "d3";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2];
const schedules = JSON.parse(readFileSync(join(here, "data", "schedules.json"), "utf8"));

/** A case's `key=value` pairs beside the other columns, numbers as numbers. */
function row({ case: named, ...others }) {
  const keys = Object.fromEntries(named.split(" ").map((pair) => pair.split("=")));
  const found = Object.entries({ ...keys, ...others }).map(([key, value]) => [
    key.toLowerCase(),
    value !== "" && !Number.isNaN(Number(value)) ? Number(value) : value,
  ]);
  return { ...Object.fromEntries(found), case: named };
}

/** Of the large files only what a page shows. */
const SHOWN = {
  "linear.csv": ({ provider, metric, n, k }) =>
    metric === "time" && provider !== "ours-triton" && schedules.shapes.some((shape) => shape.n === n && shape.k === k),
  "attention.csv": ({ phase, metric, heads }) => phase === "decode" && metric === "time" && heads === 32,
  "engine.csv": () => true,
};

const measurements = {
  name: "measurements",
  setup({ onLoad, onResolve }) {
    onLoad({ filter: /\.csv$/ }, ({ path }) => ({
      contents: JSON.stringify(csvParse(readFileSync(path, "utf8")).map(row).filter(SHOWN[path.split(/[\\/]/).at(-1)])),
      loader: "json",
    }));
    // A recording that nobody has made yet is an empty one, and its page says so.
    onResolve({ filter: /^\.\.\/data\/gpu_blocks\.json$/ }, ({ resolveDir, path }) => {
      const file = join(resolveDir, path);
      return existsSync(file) ? { path: file } : { path: file, namespace: "not-recorded" };
    });
    onLoad({ filter: /.*/, namespace: "not-recorded" }, () => ({ contents: "{}", loader: "json" }));
  },
};

const common = { bundle: true, charset: "utf8", legalComments: "none", logLevel: "warning", plugins: [measurements] };
const { metafile } = await build({
  ...common,
  entryPoints: [join(here, "src", "see.js")],
  outfile: join(out, "see.js"),
  format: "iife",
  minify: true,
  metafile: true,
});

/** The licence of each package that is in the bundle, or beside it, whole. */
const folders = new Set(
  [...Object.keys(metafile.inputs), "node_modules/iframe-worker/"]
    .map((path) => path.match(/node_modules\/((?:@[^/]+\/)?[^/]+)/)?.[1])
    .filter(Boolean),
);
const licences = [...folders].sort().map((name) => {
  const folder = join(here, "node_modules", name);
  const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  const file = readdirSync(folder).find((found) => /^licen[cs]e/i.test(found));
  if (!file) throw new Error(`${name} has no licence file`);
  return `${name} ${version} (${license})\n\n${readFileSync(join(folder, file), "utf8").trim()}\n`;
});
writeFileSync(join(out, "licences.txt"), licences.join("\n----\n\n"));
