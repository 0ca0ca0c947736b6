// The numbers of scripts/demos/blocks.py, drawn as PyTorch draws them on a CPU: so sums here are those of the documents.

/** MT19937 (Matsumoto and Nishimura, 1998), the generator behind torch.Generator on a CPU. */
export function mersenneTwister(seed) {
  const state = new Uint32Array(624);
  state[0] = seed;
  for (let i = 1; i < 624; i++) {
    const before = state[i - 1] ^ (state[i - 1] >>> 30);
    state[i] = Math.imul(before, 1812433253) + i;
  }
  let next = 624;
  return () => {
    if (next === 624) {
      for (let i = 0; i < 624; i++) {
        const mixed = (state[i] & 0x80000000) | (state[(i + 1) % 624] & 0x7fffffff);
        state[i] = state[(i + 397) % 624] ^ (mixed >>> 1) ^ (mixed & 1 ? 0x9908b0df : 0);
      }
      next = 0;
    }
    let word = state[next++];
    word ^= word >>> 11;
    word ^= (word << 7) & 0x9d2c5680;
    word ^= (word << 15) & 0xefc60000;
    return (word ^ (word >>> 18)) >>> 0;
  };
}

/** `count` numbers from -1 to 1: 2 * torch.rand(count) - 1 in fp32, which is exact, then rounded to a format. */
export function uniform(count, seed, round) {
  const draw = mersenneTwister(seed);
  return Float64Array.from({ length: count }, () => round((draw() % 2 ** 24) / 2 ** 23 - 1));
}

/** Roughly normal numbers of fp32 for pictures: the mean of twelve uniform ones. */
export function bellShaped(count, seed) {
  const draw = mersenneTwister(seed);
  return Float64Array.from({ length: count }, () => {
    let total = -6;
    for (let i = 0; i < 12; i++) total += draw() / 2 ** 32;
    return Math.fround(total);
  });
}
