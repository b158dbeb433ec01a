// A short message for what happens to the workers, with the remedy where something went wrong.

import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { say } from "./language.js";

const EVENT = "ferry.workers";
const SHORT_MS = 5000;

const KINDS = {
  starting: ["info", "Starting {workers} workers", "One process a GPU; they stay for the next prompts."],
  started: ["success", "{workers} workers started", "It took {seconds} s."],
  restarted: ["success", "{workers} new workers started", "In place of those that were lost; it took {seconds} s."],
  lost: ["error", "The workers were lost"],
  out_of_memory: ["error", "A GPU ran out of memory"],
  killed: ["error", "A worker was killed"],
};

app.registerExtension({
  name: "ComfyUI-Ferry.WorkerToasts",
  setup() {
    api.addEventListener(EVENT, ({ detail }) => showToast(detail));
  },
});

function showToast(notice) {
  if (!(notice.kind in KINDS)) return;
  const [severity, summary, detail] = KINDS[notice.kind];
  const values = { workers: notice.workers, seconds: notice.seconds?.toFixed(1) };
  const wrong = severity === "error";
  app.extensionManager.toast.add({
    severity,
    summary: `Ferry: ${say(summary, values)}`,
    detail: wrong ? `${notice.reason}\n${say(notice.remedy)}` : say(detail, values),
    // What went wrong stays until it is closed.
    ...(wrong ? {} : { life: SHORT_MS }),
  });
}
