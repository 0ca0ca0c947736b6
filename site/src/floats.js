// Floating-point numbers of 32 and 16 bits: every addition and product rounded once, as IEEE 754 says.

const WORDS = new Uint32Array(2);
const DOUBLE = new Float64Array(WORDS.buffer);
const HIGH = new Uint8Array(new Uint32Array([1]).buffer)[0] === 1 ? 1 : 0;

/** What a format keeps: bits of its exponent and of its fraction. */
export const FORMATS = {
  fp32: { name: "fp32", exponent: 8, fraction: 23 },
  fp16: { name: "fp16", exponent: 5, fraction: 10 },
  bf16: { name: "bf16", exponent: 8, fraction: 7 },
};

function bias(format) {
  return 2 ** (format.exponent - 1) - 1;
}

function exponentOf(x) {
  DOUBLE[0] = x;
  return ((WORDS[HIGH] >>> 20) & 0x7ff) - 1023;
}

/** The nearest number of a format, ties to even; infinity beyond the largest. */
export function rounded(x, format) {
  if (x === 0 || !Number.isFinite(x)) return x;
  const exponent = Math.max(exponentOf(x), 1 - bias(format));
  const step = 2 ** (exponent - format.fraction);
  // Adding and taking away 1.5 * 2^52 leaves an integer, rounded by the processor; the division is by a power of two.
  const steps = x / step + 6755399441055744 - 6755399441055744;
  if (steps === 0) return x < 0 ? -0 : 0;
  const result = steps * step;
  return Math.abs(result) >= 2 ** (bias(format) + 1) ? Math.sign(x) * Infinity : result;
}

/** A function that rounds to a format: the browser's own where it has one, which is faster and gives the same bits. */
export function rounding(format) {
  if (format === FORMATS.fp32) return Math.fround;
  if (format === FORMATS.fp16 && Math.f16round) return Math.f16round;
  return (x) => rounded(x, format);
}

/** The bits of a number that the format has, as an unsigned integer. */
export function encoded(x, format) {
  const sign = x < 0 || Object.is(x, -0) ? 1 : 0;
  const ones = 2 ** format.exponent - 1;
  const pack = (exponent, fraction) => (sign * 2 ** format.exponent + exponent) * 2 ** format.fraction + fraction;
  if (Number.isNaN(x)) return ones * 2 ** format.fraction + 2 ** (format.fraction - 1);
  if (!Number.isFinite(x)) return pack(ones, 0);
  const size = Math.abs(x);
  const least = 1 - bias(format);
  if (size < 2 ** least) return pack(0, size / 2 ** (least - format.fraction));
  const exponent = exponentOf(size);
  return pack(exponent + bias(format), (size / 2 ** exponent - 1) * 2 ** format.fraction);
}

/** The same bits as digits: sign, exponent and fraction. */
export function fields(x, format) {
  const digits = encoded(x, format)
    .toString(2)
    .padStart(1 + format.exponent + format.fraction, "0");
  return [digits[0], digits.slice(1, 1 + format.exponent), digits.slice(1 + format.exponent)];
}

/** The bits in hexadecimal, as debuggers print them. */
export function hexadecimal(x, format) {
  return "0x" + encoded(x, format).toString(16).padStart((1 + format.exponent + format.fraction) / 4, "0");
}

/** One number after the other, each sum rounded; all partial sums. Numbers have to be of the format. */
export function partialSums(numbers, format) {
  const round = rounding(format);
  let total = 0;
  return Array.from(numbers, (number) => (total = round(total + number)));
}

/** The last of the partial sums. */
export function sumOf(numbers, format) {
  const round = rounding(format);
  let total = 0;
  for (let i = 0; i < numbers.length; i++) total = round(total + numbers[i]);
  return total;
}

/** Each block added up, then the blocks' sums. */
export function blockedSum(numbers, block, format) {
  const sums = [];
  for (let start = 0; start < numbers.length; start += block) {
    sums.push(sumOf(numbers.subarray(start, start + block), format));
  }
  return sumOf(sums, format);
}

/** Element i goes to lane i mod `lanes`, ascending; then lane i takes lane i + half, until there is one. */
export function lanesSum(numbers, lanes, format) {
  const round = rounding(format);
  const sums = new Float64Array(lanes);
  for (let i = 0; i < numbers.length; i++) sums[i % lanes] = round(sums[i % lanes] + numbers[i]);
  for (let half = lanes / 2; half >= 1; half /= 2) {
    for (let i = 0; i < half; i++) sums[i] = round(sums[i] + sums[i + half]);
  }
  return sums[0];
}

const UNIT = 1074n;

function integerOf(x) {
  DOUBLE[0] = x;
  const high = WORDS[HIGH];
  const biased = (high >>> 20) & 0x7ff;
  const fraction = (BigInt(high & 0xfffff) << 32n) + BigInt(WORDS[1 - HIGH]);
  const size = biased === 0 ? fraction : (fraction + (1n << 52n)) << BigInt(biased - 1);
  return high >>> 31 ? -size : size;
}

/** The sum without any rounding, in units of 2^-1074. */
export function exactSum(numbers) {
  let total = 0n;
  for (const number of numbers) total += integerOf(number);
  return total;
}

/** An exact sum as the nearest double. */
export function approximately(exact) {
  const size = exact < 0n ? -exact : exact;
  const surplus = BigInt(Math.max(size.toString(2).length - 1000, 0));
  const scaled = Number(exact >> surplus) / 2 ** 500;
  return (scaled / 2 ** 574) * 2 ** Number(surplus);
}

/** How far a number lies from an exact sum. */
export function distance(x, exact) {
  return approximately(integerOf(x) - exact);
}
