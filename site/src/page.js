// What every page has: controls with labels, a line that says what a control changed, tables, bits.

import * as Plot from "@observablehq/plot";

/** The name of an axis has a line of its own below the numbers. */
const ROOM_FOR_LABEL = 12;
const NUMBER = /^[-\d.,e]+$/;
let named = 0;

/** An element with properties, attributes (`aria-...`, `role` and the like) and children. */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made && !key.startsWith("aria")) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** A figure in which a reader moves things. `say` tells it to everybody, screen readers included. */
export function figure(root, title) {
  const id = `see-${++named}`;
  const controls = element("div", { className: "see-controls" });
  const status = element("p", { className: "see-status", role: "status" });
  const body = element("div", { className: "see-body" });
  root.replaceChildren(element("p", { className: "see-title", id }, title), controls, status, body);
  root.setAttribute("role", "group");
  root.setAttribute("aria-labelledby", id);
  let pending;
  return {
    controls,
    body,
    say(text) {
      // A drag of a slider says many things in a second: only the last one is worth reading out.
      clearTimeout(pending);
      root.dataset.says = text;
      status.setAttribute("aria-busy", "true");
      pending = setTimeout(() => {
        status.textContent = text;
        status.removeAttribute("aria-busy");
      }, 150);
      if (!status.textContent) status.textContent = text;
    },
  };
}

/** A slider over a list of values. */
export function slider(controls, label, values, start, onChange) {
  const id = `see-${++named}`;
  const input = element("input", {
    id,
    type: "range",
    min: 0,
    max: values.length - 1,
    step: 1,
    value: values.indexOf(start),
  });
  // A screen reader has this from aria-valuetext.
  const shown = element("span", { className: "see-value", "aria-hidden": "true" });
  const update = () => {
    shown.textContent = values[input.value];
    input.setAttribute("aria-valuetext", String(values[input.value]));
  };
  update();
  input.addEventListener("input", () => {
    update();
    onChange();
  });
  controls.append(element("div", { className: "see-control" }, element("label", { htmlFor: id }, label), input, shown));
  return {
    get value() {
      return values[input.value];
    },
    set value(value) {
      input.value = values.indexOf(value);
      update();
    },
  };
}

/** A choice from a list of [value, text]. */
export function choice(controls, label, options, onChange) {
  const id = `see-${++named}`;
  const made = options.map(([value, text]) => element("option", { value }, text));
  const select = element("select", { id }, ...made);
  select.addEventListener("change", onChange);
  controls.append(element("div", { className: "see-control" }, element("label", { htmlFor: id }, label), select));
  return select;
}

/** A button. */
export function button(parent, text, onClick, label = text) {
  const made = element("button", { type: "button", className: "see-button", "aria-label": label }, text);
  made.addEventListener("click", onClick);
  parent.append(made);
  return made;
}

/** A table with a caption, whose first column names its rows. Cells are text or nodes. */
export function table(caption, header, rows) {
  const head = header.map((name) => element("th", { scope: "col" }, name));
  const body = rows.map(([first, ...others]) =>
    element("tr", {}, element("th", { scope: "row" }, first), ...others.map((cell) => element("td", { className: NUMBER.test(cell) ? "see-number" : "" }, cell))),
  );
  const made = element(
    "table",
    { className: "see-table" },
    element("caption", {}, element("span", {}, caption)),
    element("thead", {}, element("tr", {}, ...head)),
    element("tbody", {}, ...body),
  );
  return element("div", { className: "see-scroll", tabIndex: 0, role: "region", "aria-label": caption }, made);
}

/** Bits in three colours, with a reading for those who do not see them. */
export function bitsOf([sign, exponent, fraction], hex) {
  return element(
    "span",
    { className: "see-bits", role: "img", "aria-label": `bits ${hex}` },
    element("span", { className: "see-sign" }, sign),
    element("span", { className: "see-exponent" }, exponent),
    element("span", { className: "see-fraction" }, fraction),
  );
}

/** A drawing with what it shows in words, as wide as its figure. */
export function drawn(figureBody, title, description, options) {
  const width = Math.max(280, Math.min(figureBody.clientWidth || 640, 960));
  const chosen = options(width);
  const svg = Plot.plot({
    marginBottom: 30 + ROOM_FOR_LABEL,
    ...chosen,
    width,
    height: chosen.height + (chosen.marginBottom ? 0 : ROOM_FOR_LABEL),
    style: { background: "none", fontSize: "12px", overflow: "visible" },
  });
  const picture = svg.matches("svg") ? svg : svg.querySelector("svg");
  // The whole is one picture to a screen reader; Plot's names of its parts say nothing more.
  for (const part of picture.querySelectorAll("[aria-label]")) part.removeAttribute("aria-label");
  picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", description);
  return element("figure", { className: "see-figure" }, element("figcaption", {}, title), svg);
}

/** Draw again when the width changes. */
export function whenResized(root, draw) {
  let width = root.clientWidth;
  new ResizeObserver(() => {
    if (Math.abs(root.clientWidth - width) > 8) {
      width = root.clientWidth;
      draw();
    }
  }).observe(root);
}

/** A number with so many digits that no other number of the format is written alike. */
export function written(x) {
  if (x === 0 || !Number.isFinite(x)) return Object.is(x, -0) ? "-0" : String(x);
  const digits = Number(x.toPrecision(9));
  return Math.abs(digits) < 1e-4 ? digits.toExponential() : String(digits);
}

/** A difference in few digits. */
export function small(x) {
  return x === 0 ? "0" : x.toExponential(2).replace("e+", "e");
}

export function plural(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}
