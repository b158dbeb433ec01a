// On nodes with many inputs, those that ComfyUI calls advanced are folded away: at their default and without a link.
// ComfyUI's Nodes 2.0 do so themselves where the front-end has a setting for it.

import { app } from "../../../scripts/app.js";
import { addPanel, ALWAYS_SHOWN, button, element, PANEL_STYLE } from "./dom.js";
import { say } from "./language.js";

const FEWEST = 6;
const PANEL_HEIGHT = 30;

app.registerExtension({
  name: "ComfyUI-Ferry.Fold",
  nodeCreated(node) {
    if (!node.comfyClass?.startsWith("Ferry")) return;
    const alwaysShown = app.ui.settings.getSettingValue(ALWAYS_SHOWN);
    if (alwaysShown || (window.LiteGraph?.vueNodesMode && alwaysShown != null)) return;
    const widgets = (node.widgets ?? []).filter((widget) => widget.options?.advanced);
    if (widgets.length >= FEWEST) new Fold(node, widgets);
  },
});

class Fold {
  constructor(node, widgets) {
    this.node = node;
    this.widgets = widgets;
    this.folded = true;
    this.button = button("", say("Inputs that have good defaults"), () => {
      this.folded = !this.folded;
      this.update();
    });
    const content = element("div", { className: "ferry-fold", style: PANEL_STYLE }, this.button);
    addPanel(node, "ferry_fold", content, PANEL_HEIGHT, 0);
    for (const name of ["onConfigure", "onConnectionsChange"]) {
      const before = node[name];
      node[name] = (...values) => {
        const result = before?.apply(node, values);
        setTimeout(() => this.update()); // after other panels have made the node fit
        return result;
      };
    }
    setTimeout(() => this.update());
  }

  update() {
    const { node } = this;
    for (const widget of this.widgets) hide(widget, this.folded && isDefault(node, widget));
    const count = this.widgets.filter((widget) => widget.hidden).length;
    this.button.textContent = this.folded ? say("More inputs ({count})", { count }) : say("Fewer inputs");
    this.button.setAttribute("aria-expanded", String(!this.folded));
    // Nodes 2.0 looks at its inputs again when their list changes.
    if (window.LiteGraph?.vueNodesMode) node.widgets.push(node.widgets.pop());
    node.setSize([node.size[0], node.computeSize()[1]]);
    node.setDirtyCanvas?.(true, true);
  }
}

function hide(widget, hidden) {
  widget.hidden = hidden;
  // ComfyUI 0.3.75 draws no hidden widget, but leaves its place; 4 pixels go between widgets.
  if (hidden) widget.computeSize = () => [0, -4];
  else delete widget.computeSize;
  if (window.LiteGraph?.vueNodesMode) widget.options.hidden = hidden;
}

/** Whether nothing is hidden that somebody chose: the value is the default, and no link brings another. */
function isDefault(node, widget) {
  if (node.inputs?.some((input) => input.name === widget.name && input.link != null)) return false;
  const { required = {}, optional = {} } = node.constructor.nodeData?.input ?? {};
  const [type, options = {}] = required[widget.name] ?? optional[widget.name] ?? [];
  const choices = Array.isArray(type) ? type : options.options;
  return widget.value === (options.default ?? choices?.[0]);
}
