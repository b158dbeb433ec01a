// The GPUs of the machine and which of them workers may use, for the map and the settings.

import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";

export const GPUS_SETTING = "Ferry.Gpus";

const listeners = new Set();
let machine = null; // what /ferry/machine says
let chosen = null; // the setting as it is now, which the server may not have stored yet

app.registerExtension({
  name: "ComfyUI-Ferry.Machine",
  async init() {
    const answer = await api.fetchApi("/ferry/machine");
    if (answer.ok) machine = await answer.json();
    tellListeners();
  },
});

/** Return `{kind, devices: [{index, name, memory_bytes}]}`, null before it is known or without a GPU. */
export function knownMachine() {
  return machine?.devices ? machine : null;
}

/** Return why the machine's GPUs are not known: what the server says, or "". */
export function machineError() {
  return machine?.error ?? "";
}

/** Return the indices of the GPUs that workers may use, null if they are not known. */
export function usableGpus() {
  if (!knownMachine()) return null;
  const setting = chosen ?? app.ui.settings.getSettingValue(GPUS_SETTING) ?? [];
  if (!Array.isArray(setting) || !setting.length) return machine.devices.map(({ index }) => index);
  return [...setting].sort((one, other) => one - other);
}

/** Take over a new value of the setting. */
export function chooseGpus(indices) {
  chosen = Array.isArray(indices) ? indices : [];
  tellListeners();
}

/** Call `listener` whenever the usable GPUs change; the result stops that. */
export function onMachineChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Tell everybody who shows settings that one has changed. */
export function tellListeners() {
  for (const listener of listeners) listener();
}
