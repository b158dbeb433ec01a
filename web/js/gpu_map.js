// Which GPU does what under the chosen degrees, and whether they fit together, as one types.

import { app } from "../../../scripts/app.js";
import { addPanel, button, element, PANEL_STYLE } from "./dom.js";

const NODES = ["FerryParallelModel", "FerryParallelSampler"];
// Outermost axis of the device mesh first.
const AXES = [
  ["cfg_degree", "CFG"],
  ["tensor_parallel_degree", "tensor parallel"],
  ["ring_degree", "Ring"],
  ["ulysses_degree", "Ulysses"],
];
const HUES = ["#3b82f6", "#f59e0b", "#10b981", "#a855f7"];
const MOST_SHOWN = 16;
const PANEL_HEIGHT = 96;

app.registerExtension({
  name: "ComfyUI-Ferry.GpuMap",
  nodeCreated(node) {
    if (NODES.includes(node.comfyClass)) addGpuMap(node);
  },
});

function addGpuMap(node) {
  const content = element("div", { className: "ferry-gpu-map", style: PANEL_STYLE });
  addPanel(node, "ferry_gpu_map", content, PANEL_HEIGHT);
  const update = () => content.replaceChildren(...describe(node, update));
  for (const widget of degreeWidgets(node)) {
    const before = widget.callback;
    widget.callback = function (...values) {
      const result = before?.apply(this, values);
      update();
      return result;
    };
  }
  for (const name of ["onConfigure", "onConnectionsChange"]) {
    const before = node[name];
    node[name] = function (...values) {
      const result = before?.apply(this, values);
      queueMicrotask(update);
      return result;
    };
  }
  update();
}

function degreeWidgets(node) {
  const names = ["gpus", ...AXES.map(([name]) => name)];
  return (node.widgets ?? []).filter((widget) => names.includes(widget.name));
}

/** Return the degrees by input name; null for one that comes by a link and is not known here. */
function readDegrees(node) {
  const degrees = {};
  for (const widget of degreeWidgets(node)) {
    const linked = node.inputs?.some((input) => input.name === widget.name && input.link != null);
    degrees[widget.name] = linked ? null : widget.value;
  }
  return degrees;
}

function describe(node, update) {
  const degrees = readDegrees(node);
  if (Object.values(degrees).includes(null)) {
    return [status("The degrees come by links and are checked when the prompt runs.")];
  }
  const product = AXES.reduce((total, [name]) => total * (degrees[name] ?? 1), 1);
  if (Object.values(degrees).some((degree) => degree < 1)) {
    return [status("A degree is 1 or more: 1 means that the method is not used.", true)];
  }
  if (product !== degrees.gpus) {
    const fix = button(`Set gpus to ${product}`, "Make the number of GPUs fit the degrees", () => {
      const widget = node.widgets.find(({ name }) => name === "gpus");
      widget.value = product;
      widget.callback?.(product);
      node.setDirtyCanvas?.(true, true);
      update();
    });
    return [status(`gpus is ${degrees.gpus}, but the degrees multiply to ${product}.`, true), fix];
  }
  return [status(summary(degrees, product)), grid(degrees, product)];
}

function status(text, wrong = false) {
  const style = wrong ? { color: "var(--error-text)" } : {};
  const line = element("div", { textContent: text, className: "ferry-status", style });
  line.setAttribute("role", wrong ? "alert" : "status");
  return line;
}

function summary(degrees, product) {
  const used = AXES.filter(([name]) => degrees[name] > 1);
  const parts = used.map(([name, what]) => `${what} ${degrees[name]}`);
  return `${product} GPU${product > 1 ? "s" : ""}` + (parts.length ? `: ${parts.join(" x ")}` : "");
}

/** Return one box a GPU: its colour is its prompt, its text its place on every other axis. */
function grid(degrees, product) {
  const style = { display: "flex", flexWrap: "wrap", gap: "3px", overflow: "auto" };
  const boxes = [];
  for (let gpu = 0; gpu < Math.min(product, MOST_SHOWN); gpu++) boxes.push(box(gpu, degrees));
  if (product > MOST_SHOWN) boxes.push(element("span", { textContent: `and ${product - MOST_SHOWN} more` }));
  return element("div", { style }, ...boxes);
}

function box(gpu, degrees) {
  let rest = gpu;
  const places = {};
  for (const [name] of [...AXES].reverse()) {
    const degree = degrees[name] ?? 1;
    places[name] = rest % degree;
    rest = Math.floor(rest / degree);
  }
  const used = AXES.filter(([name]) => (degrees[name] ?? 1) > 1);
  const title = used.map(([name, what]) => `${what} ${places[name] + 1} of ${degrees[name]}`).join(", ");
  const style = {
    border: `2px solid ${HUES[places.cfg_degree % HUES.length]}`,
    borderRadius: "4px",
    padding: "1px 5px",
    minWidth: "34px",
    textAlign: "center",
  };
  const label = used.slice(1).length || degrees.cfg_degree === 1 ? used.map(([name]) => places[name] + 1).join(".") : "";
  return element("div", { className: "ferry-gpu", title, style }, `GPU ${gpu}`, element("div", { textContent: label }));
}
