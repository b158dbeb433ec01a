// Degrees as numbers: do they fit together and the machine, what would mend them, who does what. No page, no node.

// Outermost axis of the device mesh first; a short name for a small box.
export const AXES = [
  ["cfg_degree", "CFG", "C"],
  ["batch_degree", "Batch", "B"],
  ["tensor_parallel_degree", "tensor parallel", "T"],
  ["ring_degree", "Ring", "R"],
  ["ulysses_degree", "Ulysses", "U"],
];

/** Return the product of all degrees. */
export function product(degrees) {
  return AXES.reduce((total, [name]) => total * (degrees[name] ?? 1), 1);
}

/**
 * Return what is wrong with `degrees`, or null.
 *
 * `usable` is how many GPUs the workers may use, null if that is not known here. The result has a template and
 * its values for `say`, and fixes: each with the changes that it makes, all of which fit.
 */
export function findProblem(degrees, usable) {
  const low = ["gpus", ...AXES.map(([name]) => name)].find((name) => degrees[name] < 1);
  if (low) {
    return {
      text: "{name} is {value}. A degree is 1 or more: 1 means that the method is not used.",
      values: { name: low, value: degrees[low] },
      fixes: [{ [low]: 1 }],
    };
  }
  const total = product(degrees);
  const fits = usable === null || degrees.gpus <= usable;
  if (!fits) {
    return {
      text: "gpus is {gpus}, but {usable} can be used.",
      values: { gpus: degrees.gpus, usable },
      fixes: [changesOf(degrees, fitted(degrees, usable))],
    };
  }
  if (total === degrees.gpus) return null;
  const fixes = [];
  if (usable === null || total <= usable) fixes.push({ gpus: total });
  const others = total / (degrees.ulysses_degree ?? 1);
  if (degrees.gpus % others === 0) fixes.push({ ulysses_degree: degrees.gpus / others });
  if (!fixes.length) fixes.push(changesOf(degrees, fitted(degrees, degrees.gpus)));
  return {
    text: "gpus is {gpus}, but the degrees multiply to {product}.",
    values: { gpus: degrees.gpus, product: total },
    fixes,
  };
}

/** Return degrees for `gpus` GPUs that keep as many of the given ones as they can. */
export function fitted(degrees, gpus) {
  const keeps = [
    ["cfg_degree", "batch_degree", "tensor_parallel_degree", "ring_degree"],
    ["cfg_degree"],
    [],
  ];
  for (const kept of keeps) {
    const others = kept.reduce((total, name) => total * (degrees[name] ?? 1), 1);
    if (gpus % others) continue;
    const found = { gpus };
    for (const [name] of AXES) {
      if (name in degrees) found[name] = kept.includes(name) ? degrees[name] : 1;
    }
    return { ...found, ulysses_degree: gpus / others };
  }
  return degrees;
}

function changesOf(before, after) {
  return Object.fromEntries(Object.entries(after).filter(([name, value]) => before[name] !== value));
}

/** Return for each axis in use its name, its short name, the place of `rank` on it (from 1) and its degree. */
export function places(rank, degrees) {
  let rest = rank;
  const found = [];
  for (const [name, what, short] of [...AXES].reverse()) {
    const degree = degrees[name] ?? 1;
    if (degree > 1) found.unshift({ name, what, short, place: (rest % degree) + 1, degree });
    rest = Math.floor(rest / degree);
  }
  return found;
}
