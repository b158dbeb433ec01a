// What the last pass of a streamed model did: blocks that stay and that come, memory, and what it waited for.

import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { addPanel, element, findById, keepById, PANEL_STYLE } from "./dom.js";
import { say } from "./language.js";

const NODES = ["FerryOffloadModel", "FerryLoadDiffusionModelOffload"];
const EVENT = "ferry.offload";
// Three lines and the bar; a node of a workflow that was laid out without them still ends above the next one.
const PANEL_HEIGHT = 72;
const PANEL_MARGIN = 4;
const PANEL_PADDING = 10;
const GB = 2 ** 30;

const panels = new Map(); // node id -> panel

app.registerExtension({
  name: "ComfyUI-Ferry.OffloadPanel",
  setup() {
    api.addEventListener(EVENT, ({ detail }) => findById(panels, detail.node)?.show(detail));
  },
  nodeCreated(node) {
    if (!NODES.includes(node.comfyClass)) return;
    const panel = new OffloadPanel();
    addPanel(node, "ferry_offload", panel.content, PANEL_HEIGHT, PANEL_MARGIN);
    keepById(panels, node, panel);
  },
});

class OffloadPanel {
  constructor() {
    this.resident = element("div", { style: { background: "var(--p-primary-color, #3f7a4f)", height: "100%", width: "0" } });
    const barStyle = {
      background: "var(--comfy-input-bg)",
      border: "1px solid var(--border-color)",
      borderRadius: "4px",
      boxSizing: "border-box",
      flex: "none",
      height: "8px",
      overflow: "hidden",
    };
    this.bar = element("div", { style: barStyle }, this.resident);
    this.bar.setAttribute("role", "img");
    this.bar.setAttribute("aria-label", say("No blocks yet"));
    this.lines = element("div", { style: { whiteSpace: "pre-line" } });
    this.lines.setAttribute("role", "status");
    this.lines.textContent = say("Shows its blocks and memory while it samples.");
    const style = { ...PANEL_STYLE, padding: `2px ${PANEL_PADDING}px` };
    this.content = element("div", { className: "ferry-offload", style }, this.bar, this.lines);
  }

  show(told) {
    const { resident_blocks: resident, streamed_blocks: streamed } = told;
    const blocks = resident + streamed;
    const stays = told.weight_bytes ? 1 - told.streamed_bytes / told.weight_bytes : 0;
    this.resident.style.width = `${100 * stays}%`;
    this.bar.setAttribute("aria-label", say("{resident} of {blocks} blocks stay in VRAM", { resident, blocks }));
    this.lines.textContent = describe(told);
    this.content.title = told.bound_by === "link" ? say("A larger VRAM budget would make it faster.") : "";
  }
}

function describe(told) {
  const { resident_blocks: resident, streamed_blocks: streamed } = told;
  const moved = size(told.streamed_bytes);
  const lines = [
    streamed
      ? say("{resident} blocks resident, {streamed} streamed: {moved} a pass", { resident, streamed, moved })
      : say("{resident} blocks resident, {streamed} streamed", { resident, streamed }),
  ];
  const memory = { vram: size(told.vram_bytes), ram: size(told.ram_bytes), file: size(told.file_bytes) };
  if (told.file_bytes) lines.push(say("VRAM {vram}, RAM {ram}, from the file {file}", memory));
  else lines.push(say("VRAM {vram}, RAM {ram}", memory));
  if (!told.pass_s) return lines.join("\n");
  const waits = { percent: Math.round(told.stall_percent), seconds: told.pass_s.toPrecision(3) };
  if (told.bound_by === "link") lines.push(say("{percent} % of {seconds} s waiting for weights: link-bound", waits));
  else lines.push(say("{percent} % of {seconds} s waiting for weights: compute-bound", waits));
  return lines.join("\n");
}

function size(bytes) {
  return bytes < 0.1 * GB ? `${(bytes / 2 ** 20).toFixed(1)} MB` : `${(bytes / GB).toFixed(1)} GB`;
}
