// Prometheus' text to numbers, and samples of it over the last minute to the figures that the live view shows.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
export const WINDOW = 60;

/** Name to its series: [{labels, value}]. */
export function parseMetrics(text) {
  const families = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : LINE.exec(line);
    if (!match) continue;
    const [, name, inner, value] = match;
    const labels = Object.fromEntries([...(inner ?? "").matchAll(LABEL)].map(([, key, text]) => [key, unescape(text)]));
    if (!families.has(name)) families.set(name, []);
    families.get(name).push({ labels, value: Number(value) });
  }
  return families;
}

const unescape = (text) => text.replace(/\\(.)/g, (_, mark) => (mark === "n" ? "\n" : mark));

/** Samples of the last WINDOW polls; all figures come from here. null: the server has no such number yet. */
export class History {
  #samples = [];

  add(families, seconds) {
    this.#samples.push({ families, seconds });
    // A server that was started again counts from 0.
    if (this.#total("vllm:generation_tokens_total") < this.#total("vllm:generation_tokens_total", -2)) {
      this.#samples = this.#samples.slice(-1);
    }
    if (this.#samples.length > WINDOW + 1) this.#samples.shift();
  }

  /** The newest value of a gauge or counter. */
  value(name) {
    return this.#samples.length ? this.#total(name) : null;
  }

  labels(name) {
    return this.#samples.at(-1)?.families.get(name)?.[0]?.labels ?? {};
  }

  /** The newest values of a family by one of its labels: [[label's value, value]]. */
  byLabel(name, label) {
    const series = this.#samples.at(-1)?.families.get(name) ?? [];
    return series.map(({ labels, value }) => [labels[label], value]);
  }

  /** A gauge's values, oldest first. */
  values(name) {
    return this.#samples.map((_, place) => this.#total(name, place)).filter((value) => value !== null);
  }

  /** A counter's growth per second between each two samples, oldest first. */
  rates(name) {
    return this.#samples.slice(1).map(({ seconds }, place) => {
      const growth = (this.#total(name, place + 1) ?? 0) - (this.#total(name, place) ?? 0);
      return growth / (seconds - this.#samples[place].seconds);
    });
  }

  /** How much of one counter came with how much of another: in the window, or since the start if it was quiet. */
  ratio(part, whole, label = null) {
    const [parts, wholes] = [this.#growth(part, label), this.#growth(whole)];
    if (wholes > 0) return parts / wholes;
    const all = this.value(whole);
    return all ? (this.#total(part, -1, label) ?? 0) / all : null;
  }

  #growth(name, label = null) {
    return (this.#total(name, -1, label) ?? 0) - (this.#total(name, 0, label) ?? 0);
  }

  #total(name, place = -1, label = null) {
    const series = this.#samples.at(place)?.families.get(name);
    if (!series) return null;
    const wanted = label ? series.filter(({ labels }) => labels[label[0]] === label[1]) : series;
    return wanted.reduce((sum, { value }) => sum + value, 0);
  }
}
