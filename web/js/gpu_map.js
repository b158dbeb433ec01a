// Which GPU does what under the chosen degrees, whether they fit as one types, and what was measured.

import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { AXES, findProblem, places, product } from "./degrees.js";
import { addPanel, button, element, findById, keepById, onRemoved, PANEL_STYLE, watchWidgets } from "./dom.js";
import { say } from "./language.js";
import { knownMachine, machineError, onMachineChange, usableGpus } from "./machine.js";

const NODES = ["FerryParallelModel", "FerryParallelSampler"];
const EVENT = "ferry.parallel";
const HUES = ["#3b82f6", "#f59e0b", "#10b981", "#a855f7"]; // one a prompt
const COMPUTES = "#10b981";
const WAITS = "#f59e0b";
const MOST_SHOWN = 16;
const PANEL_HEIGHT = 150;
const GB = 1e9;

const maps = new Map(); // node id -> map

app.registerExtension({
  name: "ComfyUI-Ferry.GpuMap",
  async setup() {
    api.addEventListener(EVENT, ({ detail }) => findById(maps, detail.node_id)?.show(detail));
    // After a reload of the page: what was measured last.
    const answer = await api.fetchApi("/ferry/parallel");
    if (!answer.ok) return;
    for (const measured of await answer.json()) findById(maps, measured.node_id)?.show(measured);
  },
  nodeCreated(node) {
    if (!NODES.includes(node.comfyClass)) return;
    suggestDegrees(node);
    keepById(maps, node, new GpuMap(node));
  },
});

/** Give a new node the degrees of this machine's GPUs; those of a saved one are read in afterwards. */
function suggestDegrees(node) {
  const usable = usableGpus();
  if (!usable || knownMachine().kind !== "cuda") return;
  for (const name of ["gpus", "ulysses_degree"]) {
    const widget = node.widgets?.find((found) => found.name === name);
    if (widget) widget.value = usable.length;
  }
}

class GpuMap {
  constructor(node) {
    this.node = node;
    this.measured = null;
    this.content = element("div", { className: "ferry-gpu-map", style: PANEL_STYLE });
    addPanel(node, "ferry_gpu_map", this.content, PANEL_HEIGHT);
    const update = () => this.update();
    watchWidgets(node, ["gpus", "ray_address", ...AXES.map(([name]) => name)], update);
    onRemoved(node, onMachineChange(update));
    update();
  }

  /** Take what a sampling tells. */
  show(measured) {
    this.measured = measured;
    this.update();
  }

  update() {
    const focused = [...this.content.querySelectorAll("[tabindex], button")].indexOf(document.activeElement);
    this.content.replaceChildren(...this.describe());
    // Read-outs come while one goes over the boxes with the keyboard.
    if (focused >= 0) this.content.querySelectorAll("[tabindex], button")[focused]?.focus();
  }

  describe() {
    const degrees = this.readDegrees();
    if (Object.values(degrees).includes(null)) {
      return [status(say("The degrees come by links and are checked when the prompt runs.")), ...this.figures(null)];
    }
    const onCluster = Boolean(this.node.widgets?.find(({ name }) => name === "ray_address")?.value);
    if (machineError() && !onCluster) return [status(machineError(), true)];
    const usable = onCluster ? null : usableGpus(); // Ray decides which ones; they are counted when it runs
    const problem = findProblem(degrees, usable && usable.length);
    if (problem) return [status(say(problem.text, problem.values), true), this.fixButtons(problem.fixes)];
    const measured = matches(this.measured, degrees) ? this.measured : null;
    return [status(summary(degrees)), grid(degrees, usable, measured), ...this.figures(measured)];
  }

  /** Return the degrees by input name; null for one that comes by a link and is not known here. */
  readDegrees() {
    const degrees = {};
    for (const name of ["gpus", ...AXES.map(([axis]) => axis)]) {
      const widget = this.node.widgets?.find((found) => found.name === name);
      if (!widget) continue;
      const linked = this.node.inputs?.some((input) => input.name === name && input.link != null);
      degrees[name] = linked ? null : Number(widget.value);
    }
    return degrees;
  }

  fixButtons(fixes) {
    const made = fixes.map((changes) => {
      const text = Object.entries(changes).map(([name, value]) => `${name} = ${value}`);
      return button(say("Set {changes}", { changes: text.join(", ") }), say("Make the degrees fit"), () => {
        this.apply(changes);
      });
    });
    return element("div", { style: { display: "flex", flexWrap: "wrap", gap: "4px" } }, ...made);
  }

  apply(changes) {
    for (const [name, value] of Object.entries(changes)) {
      const widget = this.node.widgets.find((found) => found.name === name);
      widget.value = value;
      widget.callback?.(value);
    }
    this.node.setDirtyCanvas?.(true, true);
    this.update();
    this.content.querySelector("[tabindex], button")?.focus();
  }

  /** Return lines with the measured figures, and none that were not measured. */
  figures(measured) {
    if (!measured) return [];
    const lines = [];
    if (measured.evaluation_s != null) {
      lines.push(say("{seconds} s an evaluation of the model.", { seconds: measured.evaluation_s.toPrecision(3) }));
    }
    if (measured.exchange_share != null) {
      lines.push(say("{percent} % of a call is communication.", { percent: percent(measured.exchange_share) }));
    }
    const ideal = measured.ideal_speed_up;
    if (ideal > 1 && measured.speed_up != null) {
      const values = { real: measured.speed_up.toFixed(2), ideal, seconds: measured.one_gpu_s.toPrecision(3) };
      lines.push(say("Speed-up {real} of ideally {ideal} (one GPU: {seconds} s).", values));
    } else if (ideal > 1 && measured.evaluation_s != null) {
      lines.push(say("Speed-up: ideally {ideal}; run once with gpus 1 to measure the real one.", { ideal }));
    }
    return [element("div", { className: "ferry-figures", textContent: lines.join(" ") })];
  }
}

/** Return whether figures belong to these degrees. */
function matches(measured, degrees) {
  if (!measured) return false;
  const { cfg, batch, tp, ring, ulysses } = measured.degrees;
  const was = { cfg, batch, tensor_parallel: tp, ring, ulysses };
  return Object.entries(was).every(([name, degree]) => (degree ?? 1) === (degrees[`${name}_degree`] ?? 1));
}

function status(text, wrong = false) {
  const style = wrong ? { color: "var(--error-text)" } : {};
  const line = element("div", { textContent: text, className: "ferry-status", style });
  line.setAttribute("role", wrong ? "alert" : "status");
  return line;
}

function summary(degrees) {
  const parts = AXES.filter(([name]) => degrees[name] > 1).map(([name, what]) => `${say(what)} ${degrees[name]}`);
  const count = product(degrees);
  const text = say(count > 1 ? "{count} GPUs" : "{count} GPU", { count });
  return text + (parts.length ? `: ${parts.join(" x ")}` : "");
}

/** Return one box a GPU: its frame's colour is its prompt, its text its place on every axis, its bar its use. */
function grid(degrees, usable, measured) {
  const count = product(degrees);
  const boxes = [];
  for (let rank = 0; rank < Math.min(count, MOST_SHOWN); rank++) {
    const gpu = measured?.devices[rank] ?? usable?.[rank] ?? rank;
    boxes.push(box(rank, gpu, degrees, measured?.ranks[rank]));
  }
  if (count > MOST_SHOWN) boxes.push(element("span", { textContent: say("and {rest} more", { rest: count - MOST_SHOWN }) }));
  const style = { display: "flex", flexWrap: "wrap", gap: "3px", overflow: "auto" };
  const made = element("div", { style }, ...boxes);
  made.setAttribute("role", "list");
  made.setAttribute("aria-label", say("What each GPU does"));
  return made;
}

function box(rank, gpu, degrees, use) {
  const mine = places(rank, degrees);
  const told = mine.map(({ what, place, degree }) => say("{what} {place} of {degree}", { what: say(what), place, degree }));
  if (use) told.push(...describeUse(use));
  const device = knownMachine()?.devices.find(({ index }) => index === gpu)?.name;
  const prompt = mine.find(({ name }) => name === "cfg_degree")?.place ?? 1;
  const style = {
    border: `2px solid ${HUES[(prompt - 1) % HUES.length]}`,
    borderRadius: "4px",
    padding: "1px 5px",
    minWidth: "46px",
    textAlign: "center",
  };
  const label = element("div", { textContent: mine.map(({ short, place }) => short + place).join(" ") });
  const made = element("div", { className: "ferry-gpu", title: told.join(", "), tabIndex: 0, style }, `GPU ${gpu}`, label);
  if (use) made.append(bar(use));
  made.setAttribute("role", "listitem");
  made.setAttribute("aria-label", [`GPU ${gpu}`, device, ...told].filter(Boolean).join(", "));
  return made;
}

function describeUse(use) {
  const told = [say("computes {percent} % of the time", { percent: percent(use.computes) })];
  if (use.waits != null) told.push(say("waits for other GPUs {percent} %", { percent: percent(use.waits) }));
  if (use.memory_bytes != null) told.push(say("holds {gb} GB", { gb: (use.memory_bytes / GB).toFixed(1) }));
  return told;
}

/** Return a bar: computing, waiting for others, and idle. */
function bar(use) {
  const part = (share, background) => element("div", { style: { width: `${percent(share)}%`, background } });
  const style = {
    display: "flex",
    height: "5px",
    borderRadius: "2px",
    overflow: "hidden",
    background: "var(--border-color)",
  };
  const made = element("div", { className: "ferry-use", style }, part(use.computes, COMPUTES), part(use.waits ?? 0, WAITS));
  made.setAttribute("aria-hidden", "true"); // its box says it in words
  return made;
}

function percent(share) {
  return Math.round(100 * share);
}
