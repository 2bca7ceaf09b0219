// The page of the API: every operation of openapi.json with the fields of its body.

import { byId, make, say } from "./dom.js";

/** The schema behind a reference, or the schema itself. */
function resolved(description, schema) {
  const name = schema?.$ref?.split("/").pop();
  return name ? description.components.schemas[name] : (schema ?? {});
}

/** What a value may be, in few words. */
function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  const several = schema.anyOf ?? schema.oneOf;
  if (several) return [...new Set(several.map(typeOf))].join(" | ");
  if (schema.type === "array") return `list of ${typeOf(schema.items ?? {})}`;
  return schema.type ?? "any";
}

function fields(description, schema) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) =>
    make(
      "tr",
      {},
      make("td", {}, make("code", { textContent: name })),
      make("td", { textContent: typeOf(field) }),
      make("td", { textContent: schema.required?.includes(name) ? "needed" : "" }),
    ),
  );
  return rows.length ? make("table", {}, make("tbody", {}, ...rows)) : null;
}

function operation(description, path, method, { summary, description: about, requestBody }) {
  const body = resolved(description, requestBody?.content?.["application/json"]?.schema);
  return make(
    "details",
    {},
    make("summary", {}, make("code", { textContent: `${method.toUpperCase()} ${path}` }), ` ${summary ?? ""}`),
    about ? make("p", { textContent: about }) : null,
    body.description ? make("p", { textContent: body.description }) : null,
    fields(description, body),
  );
}

async function show() {
  const answer = await fetch("openapi.json");
  if (!answer.ok) {
    say(byId("problem"), `openapi.json answered ${answer.status}: with an API key set, it is read with the key.`);
    return;
  }
  const description = await answer.json();
  for (const [path, methods] of Object.entries(description.paths)) {
    for (const [method, found] of Object.entries(methods)) {
      byId("operations").append(operation(description, path, method, found));
    }
  }
}

show();
