// What a running training tells: loss, speed, memory, previews; and buttons to save, preview or stop it.

import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { addPanel, button, element, findById, keepById, PANEL_STYLE } from "./dom.js";
import { say } from "./language.js";

const NODE = "FerryTrainLoraOffload";
const EVENT = "ferry.training";
const MOST_POINTS = 2000;
const CHART_HEIGHT = 90;
const PANEL_HEIGHT = 340;
const GB = 1e9;

const panels = new Map(); // node id -> panel

app.registerExtension({
  name: "ComfyUI-Ferry.TrainingPanel",
  async setup() {
    api.addEventListener(EVENT, ({ detail }) => findById(panels, detail.node_id)?.show(detail));
    // After a reload of the page: what runs now.
    const answer = await api.fetchApi("/ferry/trainings");
    if (!answer.ok) return;
    for (const training of await answer.json()) findById(panels, training.node_id)?.show(training);
  },
  nodeCreated(node) {
    if (node.comfyClass !== NODE) return;
    const panel = new TrainingPanel();
    addPanel(node, "ferry_training", panel.content, PANEL_HEIGHT);
    keepById(panels, node, panel);
  },
});

class TrainingPanel {
  constructor() {
    this.promptId = null;
    this.points = []; // [step, loss, average]
    this.chart = element("canvas", { height: CHART_HEIGHT, width: 300, style: { width: "100%" } });
    this.chart.setAttribute("role", "img");
    this.lines = element("div", { className: "ferry-lines", style: { whiteSpace: "pre-wrap", overflowWrap: "anywhere" } });
    this.lines.setAttribute("role", "status");
    this.lines.textContent = say("No training has run yet.");
    this.preview = element("img", { alt: "", style: { maxHeight: "64px", display: "none", alignSelf: "start" } });
    this.buttons = ["save", "preview", "stop"].map((command) => this.commandButton(command));
    const row = element("div", { style: { display: "flex", gap: "4px" } }, ...this.buttons);
    this.content = element(
      "div",
      { className: "ferry-training", style: PANEL_STYLE },
      this.chart,
      row,
      this.lines,
      this.preview,
    );
    this.enable(false);
  }

  commandButton(command) {
    const [text, title] = {
      save: [say("Save now"), say("Write the LoRA and the training's state after this step")],
      preview: [say("Preview now"), say("Sample a picture after this step (needs preview_vae)")],
      stop: [say("Stop and keep"), say("End after this step and go on with the LoRA so far")],
    }[command];
    return button(text, title, () => this.send(command));
  }

  async send(command) {
    const answer = await api.fetchApi(`/ferry/trainings/${this.promptId}/${command}`, { method: "POST" });
    if (!answer.ok) this.lines.textContent = (await answer.json()).error;
  }

  enable(running) {
    for (const made of this.buttons) made.disabled = !running;
  }

  show(progress) {
    if (progress.prompt_id !== this.promptId) this.points = [];
    this.promptId = progress.prompt_id;
    if (progress.loss != null) this.points.push([progress.step, progress.loss, progress.average_loss]);
    // Every second point of a long training says as much.
    if (this.points.length > MOST_POINTS) this.points = this.points.filter((_, index) => index % 2 === 0);
    this.lines.textContent = describe(progress);
    this.enable(progress.step < progress.steps);
    if (progress.preview) {
      this.preview.src = api.apiURL(`/view?${new URLSearchParams(progress.preview)}`);
      this.preview.alt = say("Preview at step {step}", progress);
      this.preview.style.display = "";
    }
    this.draw();
  }

  draw() {
    const { chart, points } = this;
    chart.width = chart.clientWidth || 300;
    const pen = chart.getContext("2d");
    pen.clearRect(0, 0, chart.width, chart.height);
    if (!points.length) return;
    const losses = points.map(([, loss]) => loss);
    const [low, high] = [Math.min(...losses), Math.max(...losses)];
    const last = points[points.length - 1];
    chart.setAttribute("aria-label", say("Loss from {first} to {last}", { first: losses[0].toPrecision(3), last: last[1].toPrecision(3) }));
    const x = (step) => 2 + ((step - points[0][0]) / Math.max(1, last[0] - points[0][0])) * (chart.width - 4);
    const y = (loss) => 4 + ((high - loss) / (high - low || 1)) * (chart.height - 8);
    const colours = getComputedStyle(chart);
    for (const [index, colour, width] of [
      [1, colours.getPropertyValue("--descrip-text") || "#888", 1],
      [2, colours.getPropertyValue("--input-text") || "#ddd", 2],
    ]) {
      pen.strokeStyle = colour;
      pen.lineWidth = width;
      pen.beginPath();
      for (const point of points) pen.lineTo(x(point[0]), y(point[index] ?? point[1]));
      pen.stroke();
    }
  }
}

function describe(progress) {
  const lines = [say("Step {step} of {steps}", progress)];
  if (progress.loss != null) {
    const values = { loss: progress.loss.toPrecision(4), average: progress.average_loss.toPrecision(4) };
    lines[0] += say(", loss {loss} (average {average})", values);
  }
  if (progress.seconds_per_step != null) {
    const predicted = progress.predicted_seconds == null ? "" : say(" (predicted {seconds})", { seconds: progress.predicted_seconds.toPrecision(3) });
    const values = { seconds: progress.seconds_per_step.toPrecision(3), predicted, left: clock(progress.seconds_left) };
    lines.push(say("{seconds} s a step{predicted}, {left} left", values));
  }
  const memory = [];
  if (progress.gpu_bytes != null) {
    const planned = progress.gpu_planned_bytes == null ? "" : say(", planned {size}", { size: gb(progress.gpu_planned_bytes) });
    const values = { used: gb(progress.gpu_bytes), total: gb(progress.gpu_total_bytes), planned };
    memory.push(say("VRAM {used} of {total} (peak {peak}{planned})", { ...values, peak: gb(progress.gpu_peak_bytes) }));
  }
  if (progress.pinned_bytes != null) memory.push(say("pinned RAM {size}", { size: gb(progress.pinned_bytes) }));
  if (progress.stalled_share != null) {
    memory.push(say("{percent} % waiting for weights", { percent: Math.round(100 * progress.stalled_share) }));
  }
  if (memory.length) lines.push(memory.join(", "));
  if (progress.plan) lines.push(say("Plan: {plan}", progress));
  if (progress.saved) lines.push(say("Saved at step {saved_step}: {saved}", progress));
  if (progress.message) lines.push(progress.message);
  return lines.join("\n");
}

function gb(bytes) {
  return bytes == null ? "?" : `${(bytes / GB).toFixed(1)} GB`;
}

function clock(seconds) {
  const whole = Math.max(0, Math.round(seconds ?? 0));
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}
