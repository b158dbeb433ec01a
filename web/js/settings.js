// The pack's page in ComfyUI's settings, and what "auto" means by it, shown on the nodes with budgets.

import { app } from "../../../scripts/app.js";
import { addPanel, element, onRemoved, PANEL_STYLE, watchWidgets } from "./dom.js";
import { say, settingTexts } from "./language.js";
import { chooseGpus, GPUS_SETTING, knownMachine, machineError, onMachineChange, tellListeners } from "./machine.js";

const BUDGETS = {
  vram_budget_gb: ["Ferry.VramBudgetGb", "VRAM"],
  ram_budget_gb: ["Ferry.RamBudgetGb", "RAM"],
};
// What 0 means without a setting, and how high the lines are.
const BUDGET_NODES = {
  FerryOffloadModel: ["VRAM: auto is what is free.", "", 44],
  FerryLoadDiffusionModelOffload: ["VRAM: auto is what is free.", "RAM: auto is the whole model.", 58],
  FerryTrainLoraOffload: ["VRAM: auto is what is free.", "RAM: auto is no limit.", 58],
};
const GB = 1e9;

function budgetSetting(id, what, tooltip) {
  return {
    id,
    category: ["Ferry", "Budgets", what],
    name: `${what} budget, in GB`,
    tooltip,
    type: "number",
    defaultValue: 0,
    attrs: { min: 0, max: 4096, step: 0.5, maxFractionDigits: 1 },
    onChange: () => queueMicrotask(tellListeners),
  };
}

const SETTINGS = [
  budgetSetting(
    "Ferry.RamBudgetGb",
    "RAM",
    "For nodes whose ram_budget_gb is 0 (auto). 0: no setting, the whole model is kept in RAM.",
  ),
  budgetSetting(
    "Ferry.VramBudgetGb",
    "VRAM",
    "For nodes whose vram_budget_gb is 0 (auto). 0: no setting, whatever is free.",
  ),
  {
    id: GPUS_SETTING,
    category: ["Ferry", "Workers", "GPUs"],
    name: "GPUs that workers may use",
    tooltip: "None chosen: all of them. A node's gpus says how many are used, the first of these first.",
    type: gpuChoice,
    defaultValue: [],
    onChange: chooseGpus,
  },
];

app.registerExtension({
  name: "ComfyUI-Ferry.Settings",
  settings: SETTINGS,
  setup() {
    for (const setting of SETTINGS) Object.assign(setting, settingTexts(setting.id));
  },
  nodeCreated(node) {
    if (node.comfyClass in BUDGET_NODES) addBudgetLine(node);
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
  addPanel(node, "ferry_budget", content, BUDGET_NODES[node.comfyClass][2]);
  const update = () => (content.textContent = describeBudgets(node));
  watchWidgets(node, Object.keys(BUDGETS), update);
  onRemoved(node, onMachineChange(update));
  update();
}

function describeBudgets(node) {
  const [freeVram, freeRam] = BUDGET_NODES[node.comfyClass];
  const lines = [];
  for (const [name, [setting, what]] of Object.entries(BUDGETS)) {
    const widget = node.widgets?.find((found) => found.name === name);
    if (!widget || Number(widget.value) !== 0) continue;
    const gb = app.ui.settings.getSettingValue(setting);
    if (gb) lines.push(say("{what}: auto is {gb} GB (Settings).", { what: say(what), gb }));
    else lines.push(say(what === "VRAM" ? freeVram : freeRam));
  }
  return lines.join("\n");
}
