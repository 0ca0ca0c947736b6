// What a ratio to plain vLLM says: better, equal or worse, and the colour of its bar.

/** From here on a figure is better or worse; closer to 1 the two are equal. */
export const EQUAL = 0.01;

/** Whether a larger number of a metric is better. */
export function moreIsBetter({ metric }) {
  return metric === "throughput";
}

/** How much better than plain vLLM a row is, as a share; below 0 it is worse. */
export function gain(row) {
  return moreIsBetter(row) ? row.ratio - 1 : 1 - row.ratio;
}

export function colour(row) {
  if (row.provider !== "ours") return "var(--see-other)";
  return gain(row) < -EQUAL ? "var(--see-worse)" : "var(--see-ours)";
}
