// Puts every figure in its place: <div data-see="name"></div>.

import { addition } from "./addition.js";
import { measured, splits } from "./attention.js";
import { dotProduct, tiles } from "./batch.js";
import { product, sums } from "./blocks.js";
import { cost } from "./cost.js";
import { norm } from "./norm.js";
import { samples } from "./samples.js";

const FIGURES = { addition, tiles, "dot-product": dotProduct, norm, splits, measured, samples, sums, product, cost };

for (const root of document.querySelectorAll("[data-see]")) FIGURES[root.dataset.see](root);
