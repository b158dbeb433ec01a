// The pack's page in ComfyUI's settings, and what "auto" means by it, shown on the nodes with budgets.

import { app } from "../../../scripts/app.js";
import { addPanel, element, onRemoved, PANEL_STYLE, watchWidgets } from "./dom.js";
import { say } from "./language.js";
import { chooseGpus, GPUS_SETTING, knownMachine, machineError, onMachineChange, tellListeners } from "./machine.js";

const BUDGETS = {
  vram_budget_gb: ["Ferry.VramBudgetGb", "VRAM"],
  ram_budget_gb: ["Ferry.RamBudgetGb", "RAM"],
};
const LINE_HEIGHT = { FerryOffloadModel: 44, FerryLoadDiffusionModelOffload: 58 };
const GB = 1e9;

function budgetSetting(id, what, tooltip) {
  return {
    id,
    category: ["Ferry", "Memory", what],
    name: `${what} budget for weights, in GB`,
    tooltip,
    type: "number",
    defaultValue: 0,
    attrs: { min: 0, max: 4096, step: 0.5, maxFractionDigits: 1 },
    onChange: () => queueMicrotask(tellListeners),
  };
}

app.registerExtension({
  name: "ComfyUI-Ferry.Settings",
  settings: [
    budgetSetting(
      "Ferry.RamBudgetGb",
      "RAM",
      "For offload nodes whose ram_budget_gb is 0 (auto). 0: no setting, the whole model is kept in RAM.",
    ),
    budgetSetting(
      "Ferry.VramBudgetGb",
      "VRAM",
      "For offload nodes whose vram_budget_gb is 0 (auto). 0: no setting, whatever ComfyUI has free.",
    ),
    {
      id: GPUS_SETTING,
      category: ["Ferry", "Parallel", "GPUs"],
      name: "GPUs that parallel sampling may use",
      tooltip: "None chosen: all of them. A node's gpus says how many are used, the first of these first.",
      type: gpuChoice,
      defaultValue: [],
      onChange: chooseGpus,
    },
  ],
  nodeCreated(node) {
    if (node.comfyClass in LINE_HEIGHT) addBudgetLine(node);
  },
});

/** Return a group of checkboxes, one a GPU. */
function gpuChoice(name, setter, value) {
  const group = element("fieldset", { className: "ferry-gpu-choice", style: { border: "none", padding: 0 } });
  group.setAttribute("aria-label", say(name));
  const machine = knownMachine();
  if (!machine) {
    group.append(machineError() || say("This machine has no GPU that workers could use."));
    return group;
  }
  const chosen = new Set(Array.isArray(value) ? value : []);
  for (const { index, name: device, memory_bytes } of machine.devices) {
    const box = element("input", { type: "checkbox", checked: chosen.has(index) });
    box.onchange = () => {
      if (box.checked) chosen.add(index);
      else chosen.delete(index);
      setter([...chosen].sort((one, other) => one - other));
    };
    const size = memory_bytes ? `, ${(memory_bytes / GB).toFixed(0)} GB` : "";
    const style = { display: "flex", gap: "6px", alignItems: "center", cursor: "pointer" };
    group.append(element("label", { style }, box, `${index}: ${device}${size}`));
  }
  return group;
}

/** Show what 0 means on a node with budgets, as the settings are now. */
function addBudgetLine(node) {
  const content = element("div", { className: "ferry-budget", style: { ...PANEL_STYLE, whiteSpace: "pre-line" } });
  content.setAttribute("role", "status");
  addPanel(node, "ferry_budget", content, LINE_HEIGHT[node.comfyClass]);
  const update = () => (content.textContent = describeBudgets(node));
  watchWidgets(node, Object.keys(BUDGETS), update);
  onRemoved(node, onMachineChange(update));
  update();
}

function describeBudgets(node) {
  const lines = [];
  for (const [name, [setting, what]] of Object.entries(BUDGETS)) {
    const widget = node.widgets?.find((found) => found.name === name);
    if (!widget || Number(widget.value) !== 0) continue;
    const gb = app.ui.settings.getSettingValue(setting);
    if (gb) lines.push(say("{what}: auto is {gb} GB, by Settings > Ferry.", { what, gb }));
    else if (what === "VRAM") lines.push(say("VRAM: auto is whatever ComfyUI has free."));
    else lines.push(say("RAM: auto is the whole model."));
  }
  return lines.join("\n");
}
