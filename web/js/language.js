// The pack's words in the language that ComfyUI shows: `locales/<language>`; the panels' stand in main.json, under
// "ferry". ComfyUI translates nodes and settings itself, but its front-end 1.32 forgets the packs' texts when it
// loads a language, so they are put in place here, too.

import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";

let texts = {};

app.registerExtension({
  name: "ComfyUI-Ferry.Language",
  async init() {
    const answer = await api.fetchApi("/i18n");
    if (!answer.ok) return;
    const languages = await answer.json();
    const chosen = app.ui.settings.getSettingValue("Comfy.Locale") ?? navigator.language.split("-")[0];
    texts = languages[chosen] ?? {};
  },
  addCustomNodeDefs(definitions) {
    for (const [id, translated] of Object.entries(texts.nodeDefs ?? {})) {
      if (id.startsWith("Ferry") && id in definitions) translateNode(definitions[id], translated);
    }
  },
});

function translateNode(definition, translated) {
  definition.display_name = translated.display_name;
  definition.description = translated.description;
  for (const inputs of Object.values(definition.input ?? {})) {
    for (const [name, { tooltip }] of Object.entries(translated.inputs)) {
      if (inputs?.[name]?.[1]) inputs[name][1].tooltip = tooltip;
    }
  }
  for (const [place, { tooltip }] of Object.entries(translated.outputs ?? {})) {
    if (definition.output_tooltips) definition.output_tooltips[place] = tooltip;
  }
}

/** Return `{name, tooltip}` of a setting in the chosen language, {} if they are not translated. */
export function settingTexts(id) {
  return texts.settings?.[id.replaceAll(".", "_")] ?? {};
}

/** Return `template` in the chosen language, with each `{name}` replaced by its value. */
export function say(template, values = {}) {
  return (texts.ferry?.[template] ?? template).replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));
}
