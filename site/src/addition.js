// Terms in an order that the reader chooses, added in three formats.

import * as Plot from "@observablehq/plot";
import { FORMATS, distance, exactSum, fields, hexadecimal, partialSums, rounded, rounding, sumOf } from "./floats.js";
import { mersenneTwister } from "./numbers.js";
import { bitsOf, button, choice, drawn, element, figure, plural, small, table, whenResized, written } from "./page.js";

const EXAMPLES = {
  pairs: { name: "eight numbers whose sum is 0", terms: [1, 1e-2, 1e-5, 1e-10, -1, -1e-2, -1e-5, -1e-10] },
  decimals: { name: "0.1, 0.2 and 0.3", terms: [0.1, 0.2, 0.3] },
  swallowed: { name: "a large number and small ones", terms: [2048, 1, 1, 1, 1, -2048] },
  growing: { name: "1, 1/2, 1/3 up to 1/8", terms: [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6, 1 / 7, 1 / 8] },
};
const MOST = 8;

/** Every sum that some order of the terms has, with how many orders have it. */
export function sumsOfAllOrders(terms, format) {
  const round = rounding(format);
  const numbers = terms.map((term) => rounded(term, format));
  const found = new Map();
  const visit = (left, total) => {
    if (left === 0) {
      found.set(total, (found.get(total) ?? 0) + 1);
      return;
    }
    for (let i = 0; i < numbers.length; i++) {
      if (left & (1 << i)) visit(left & ~(1 << i), round(total + numbers[i]));
    }
  };
  visit((1 << numbers.length) - 1, 0);
  return found;
}

export function addition(root) {
  const { controls, body, say } = figure(root, "Add these numbers from the first to the last");
  const example = choice(
    controls,
    "Numbers",
    Object.entries(EXAMPLES).map(([key, { name }]) => [key, name]),
    () => {
      terms = [...EXAMPLES[example.value].terms];
      all.clear();
      show();
    },
  );
  let terms = [...EXAMPLES.pairs.terms];
  const all = new Map();
  const list = element("ol", { className: "see-terms", "aria-label": "Terms in the order of adding" });
  const orders = element("div", { className: "see-buttons" });
  const draw = mersenneTwister(Date.now() % 2 ** 31);
  const sorted = (compare) => () => {
    terms.sort(compare);
    show();
  };
  button(orders, "Smallest first", sorted((a, b) => Math.abs(a) - Math.abs(b)));
  button(orders, "Largest first", sorted((a, b) => Math.abs(b) - Math.abs(a)));
  button(orders, "Shuffle", () => {
    for (let i = terms.length - 1; i > 0; i--) {
      const other = draw() % (i + 1);
      [terms[i], terms[other]] = [terms[other], terms[i]];
    }
    show();
  });
  button(orders, "Turn round", () => {
    terms.reverse();
    show();
  });
  const results = element("div");
  body.append(list, orders, results);
  let dragged = null;

  function move(from, to, focus) {
    if (to < 0 || to >= terms.length) return;
    terms.splice(to, 0, ...terms.splice(from, 1));
    show();
    // At an end the button of that direction is off: the other one takes the focus.
    const { children } = list;
    (children[to].querySelector(`${focus}:enabled`) ?? children[to].querySelector("button:enabled"))?.focus();
  }

  function item(term, place) {
    const value = element("input", {
      type: "number",
      step: "any",
      value: term,
      "aria-label": `Term ${place + 1}`,
    });
    value.addEventListener("change", () => {
      if (Number.isFinite(value.valueAsNumber)) {
        terms[place] = value.valueAsNumber;
        all.clear();
        show();
      }
    });
    const made = element("li", { draggable: true }, value);
    const earlier = button(made, "←", () => move(place, place - 1, ".see-earlier"), `Add term ${place + 1} earlier`);
    const later = button(made, "→", () => move(place, place + 1, ".see-later"), `Add term ${place + 1} later`);
    earlier.classList.add("see-earlier");
    later.classList.add("see-later");
    earlier.disabled = place === 0;
    later.disabled = place === terms.length - 1;
    made.addEventListener("dragstart", () => (dragged = place));
    made.addEventListener("dragover", (event) => event.preventDefault());
    made.addEventListener("drop", (event) => {
      event.preventDefault();
      if (dragged !== null) move(dragged, place);
      dragged = null;
    });
    return made;
  }

  function histogram(format, total) {
    if (!all.has(format)) all.set(format, sumsOfAllOrders(terms, format));
    const found = all.get(format);
    const count = [...found.values()].reduce((a, b) => a + b, 0);
    const points = [...found].map(([sum, orders]) => ({ sum, orders, yours: sum === total }));
    const exact = exactSum(terms.map((term) => rounded(term, format)));
    const inWords =
      `${format.name}: ${plural(count, "order")} of these numbers give ${plural(found.size, "different sum")}; ` +
      `${plural([...found].reduce((n, [sum, orders]) => n + (distance(sum, exact) === 0 ? orders : 0), 0), "order")} ` +
      `give the exact one.`;
    return drawn(body, inWords, `${inWords} Yours gives ${written(total)}.`, () => ({
      height: 110,
      marginLeft: 50,
      x: { label: "sum →", ticks: 4, tickFormat: (x) => small(x) },
      y: { label: "↑ orders", type: "sqrt", ticks: 3, domain: [0, Math.max(...found.values())] },
      marks: [
        Plot.ruleX(points, { x: "sum", y: "orders", stroke: "var(--see-ours)", strokeWidth: 1.5 }),
        Plot.dot(points, { x: "sum", y: "orders", r: 2.5, fill: "var(--see-ours)" }),
        Plot.dot(points.filter(({ yours }) => yours), {
          x: "sum",
          y: "orders",
          r: 7,
          stroke: "var(--see-other)",
          strokeWidth: 2.5,
        }),
      ],
    }));
  }

  function show() {
    list.replaceChildren(...terms.map(item));
    const formats = Object.values(FORMATS);
    const found = formats.map((format) => {
      const numbers = terms.map((term) => rounded(term, format));
      return { format, numbers, total: sumOf(numbers, format), exact: exactSum(numbers) };
    });
    const rows = found.map(({ format, total, exact }) => {
      const hex = hexadecimal(total, format);
      return [format.name, written(total), bitsOf(fields(total, format), hex), hex, small(distance(total, exact))];
    });
    const steps = terms.map((term, place) => [
      `after ${place + 1}`,
      ...found.map(({ format, numbers }) => written(partialSums(numbers, format)[place])),
    ]);
    results.replaceChildren(
      table(
        "Sums in your order",
        ["format", "sum", "bits: sign, exponent, fraction", "the same in hexadecimal", "distance to the exact sum"],
        rows,
      ),
      ...(terms.length <= MOST ? found.map(({ format, total }) => histogram(format, total)) : []),
      table("The sum after each term", ["terms added", ...formats.map(({ name }) => name)], steps),
    );
    const heard = found.map(({ format, total, exact }) => {
      const away = distance(total, exact);
      return `${format.name} ${written(total)}, ${away === 0 ? "exact" : `${small(away)} from the exact sum`}`;
    });
    say(`${terms.map(String).join(", ")}: ${heard.join("; ")}.`);
  }

  whenResized(root, show);
  show();
}
