// The panels' words in the language that ComfyUI shows: `locales/<language>/main.json`, under "ferry".

import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";

let words = {};

app.registerExtension({
  name: "ComfyUI-Ferry.Language",
  async init() {
    const answer = await api.fetchApi("/i18n");
    if (!answer.ok) return;
    const languages = await answer.json();
    const chosen = app.ui.settings.getSettingValue("Comfy.Locale") ?? navigator.language.split("-")[0];
    words = languages[chosen]?.ferry ?? {};
  },
});

/** Return `template` in the chosen language, with each `{name}` replaced by its value. */
export function say(template, values = {}) {
  return (words[template] ?? template).replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));
}
