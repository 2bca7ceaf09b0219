// The vendored libraries, named here alone: their versions and sums are in vendor/vendored.toml.

import hljs from "./vendor/highlight-11.12.0/core.min.js";
import bash from "./vendor/highlight-11.12.0/bash.min.js";
import c from "./vendor/highlight-11.12.0/c.min.js";
import cpp from "./vendor/highlight-11.12.0/cpp.min.js";
import csharp from "./vendor/highlight-11.12.0/csharp.min.js";
import css from "./vendor/highlight-11.12.0/css.min.js";
import diff from "./vendor/highlight-11.12.0/diff.min.js";
import dockerfile from "./vendor/highlight-11.12.0/dockerfile.min.js";
import go from "./vendor/highlight-11.12.0/go.min.js";
import ini from "./vendor/highlight-11.12.0/ini.min.js";
import java from "./vendor/highlight-11.12.0/java.min.js";
import javascript from "./vendor/highlight-11.12.0/javascript.min.js";
import json from "./vendor/highlight-11.12.0/json.min.js";
import kotlin from "./vendor/highlight-11.12.0/kotlin.min.js";
import lua from "./vendor/highlight-11.12.0/lua.min.js";
import makefile from "./vendor/highlight-11.12.0/makefile.min.js";
import markdown from "./vendor/highlight-11.12.0/markdown.min.js";
import php from "./vendor/highlight-11.12.0/php.min.js";
import powershell from "./vendor/highlight-11.12.0/powershell.min.js";
import python from "./vendor/highlight-11.12.0/python.min.js";
import r from "./vendor/highlight-11.12.0/r.min.js";
import ruby from "./vendor/highlight-11.12.0/ruby.min.js";
import rust from "./vendor/highlight-11.12.0/rust.min.js";
import sql from "./vendor/highlight-11.12.0/sql.min.js";
import swift from "./vendor/highlight-11.12.0/swift.min.js";
import typescript from "./vendor/highlight-11.12.0/typescript.min.js";
import xml from "./vendor/highlight-11.12.0/xml.min.js";
import yaml from "./vendor/highlight-11.12.0/yaml.min.js";
// Its browser file sets a global name.
import "./vendor/katex-0.19.1/katex.min.js";

export { default as DOMPurify } from "./vendor/dompurify-3.4.17/purify.es.mjs";
export { default as MarkdownIt } from "./vendor/markdown-it-15.0.3/markdown-it.esm.min.mjs";
export const { katex } = globalThis;
export { hljs };

const LANGUAGES = {
  bash, c, cpp, csharp, css, diff, dockerfile, go, ini, java, javascript, json, kotlin, lua, makefile, markdown, php,
  powershell, python, r, ruby, rust, sql, swift, typescript, xml, yaml,
};
for (const [name, grammar] of Object.entries(LANGUAGES)) hljs.registerLanguage(name, grammar);
