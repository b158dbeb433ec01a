// Small DOM pieces that the panels share. Colours are ComfyUI's own variables, so both themes fit.

import { app } from "../../../scripts/app.js";

/** The id of ComfyUI's setting to show advanced inputs on all nodes, which 0.3.75 does not have. */
export const ALWAYS_SHOWN = "Comfy.Node.AlwaysShowAdvancedWidgets";

/** Return an element with properties, styles (as `style`) and children. */
export function element(tag, { style = {}, ...properties } = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  Object.assign(made.style, style);
  made.append(...children);
  return made;
}

/** Return a button that the keyboard reaches too. */
export function button(text, title, onclick) {
  const style = {
    background: "var(--comfy-input-bg)",
    color: "var(--input-text)",
    border: "1px solid var(--border-color)",
    borderRadius: "4px",
    padding: "2px 8px",
    cursor: "pointer",
    font: "inherit",
  };
  return element("button", { type: "button", className: "ferry-button", textContent: text, title, onclick, style });
}

const WIDGET_GAP = 4; // between a node's widgets, on the canvas

// From top to bottom; extensions are loaded in any order.
const PANELS = ["ferry_fold", "ferry_gpu_map", "ferry_offload", "ferry_training", "ferry_budget"];

/** Put `content` on a node below its other widgets; it is part of neither workflow nor prompt. */
export function addPanel(node, name, content, height, margin = 10) {
  const widget = node.addDOMWidget(name, "ferry_panel", content, {
    serialize: false,
    hideOnZoom: false,
    margin,
    getMinHeight: () => height,
    getMaxHeight: () => height,
  });
  widget.serialize = false;
  const panels = node.widgets.filter(({ type }) => type === "ferry_panel");
  panels.sort((one, other) => PANELS.indexOf(one.name) - PANELS.indexOf(other.name));
  node.widgets.splice(node.widgets.length - panels.length, panels.length, ...panels);
  // A new node is as large as it was without the panel, and so is one from a workflow saved before.
  measureAsShown(node);
  let isNew = true;
  const before = node.onConfigure;
  node.onConfigure = function (...values) {
    const result = before?.apply(this, values);
    isNew = false;
    fit(node);
    return result;
  };
  queueMicrotask(() => fit(node, isNew));
  return widget;
}

function fit(node, isNew = false) {
  const [width, height] = node.computeSize();
  node.setSize([Math.max(width, node.size[0]), isNew ? height : Math.max(height, node.size[1])]);
}

const measured = new WeakSet(); // nodes

/** Nodes 2.0 leaves out advanced inputs, for which the canvas makes room, and grows by itself when it shows them. */
function measureAsShown(node) {
  if (measured.has(node)) return;
  measured.add(node);
  const before = node.computeSize;
  node.computeSize = function (...values) {
    const size = before.apply(this, values);
    const allShown = this.showAdvanced || app.ui.settings.getSettingValue(ALWAYS_SHOWN);
    if (!window.LiteGraph?.vueNodesMode || allShown) return size;
    const advanced = this.widgets.filter((widget) => widget.options?.advanced);
    size[1] -= advanced.length * (LiteGraph.NODE_WIDGET_HEIGHT + WIDGET_GAP);
    return size;
  };
}

/** Call `update` whenever one of the named widgets, a link or the whole node changes. */
export function watchWidgets(node, names, update) {
  for (const widget of node.widgets ?? []) {
    if (names.includes(widget.name)) callAfter(widget, "callback", update);
  }
  for (const name of ["onConfigure", "onConnectionsChange"]) callAfter(node, name, () => queueMicrotask(update));
}

/** Call `action` once the node is taken off the canvas. */
export function onRemoved(node, action) {
  callAfter(node, "onRemoved", action);
}

/** Keep `panel` in the map `panels` under the node's id while it is on the canvas. */
export function keepById(panels, node, panel) {
  const keep = () => panels.set(String(node.id), panel);
  callAfter(node, "onAdded", keep);
  callAfter(node, "onConfigure", keep);
  onRemoved(node, () => panels.delete(String(node.id)));
}

/** Return the panel of the node that the server calls `id`; inside subgraphs that is a path such as "5:3". */
export function findById(panels, id) {
  return panels.get(String(id)) ?? panels.get(String(id).split(":").at(-1));
}

function callAfter(owner, name, action) {
  const before = owner[name];
  owner[name] = function (...values) {
    const result = before?.apply(this, values);
    action();
    return result;
  };
}

// Where the keyboard is has to be seen in both themes.
document.head.append(
  element("style", {
    textContent: `.ferry-gpu:focus-visible, .ferry-button:focus-visible
      { outline: 2px solid var(--input-text); outline-offset: 1px; }`,
  }),
);

/** The style of a panel's outermost element. */
export const PANEL_STYLE = {
  display: "flex",
  flexDirection: "column",
  gap: "4px",
  padding: "4px",
  boxSizing: "border-box",
  fontSize: "12px",
  color: "var(--input-text)",
  overflow: "hidden",
};
