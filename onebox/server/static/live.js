// The live view: figures of the server's metrics, read each second while the page can be seen.

import { readHealth, readMetrics } from "./api.js";
import { byId, make, makeSvg, say } from "./dom.js";
import { History, WINDOW, parseMetrics } from "./metrics.js";

const PERIOD_MS = 1000;
const DRAFTS = "vllm:spec_decode_num_drafts_total";
const ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
const TIER = "onebox:prefix_tier";
const DISK = "onebox:prefix_disk";
const GIB = 2 ** 30;

/** Starts reading. `key` gives the API key of the moment; `isWanted` says whether the view is open. */
export function startLive(key, isWanted) {
  const view = new LiveView();
  const poll = async () => {
    if (!document.hidden && isWanted()) await view.refresh(key());
    setTimeout(poll, PERIOD_MS);
  };
  poll();
}

class LiveView {
  #history = new History();
  #speed = new Figure("Tokens per second");
  #first = new Figure("Time to first token");
  #requests = new Figure("Requests running");
  #waiting = new Figure("Requests waiting");
  #cache = new Figure("Prefix-cache hits");
  #pages = new Figure("KV pages used");
  #drafts = new Bars("Drafts accepted, by position");
  #memory = new Bars("Memory");
  #tiers = new Bars("Cached prefixes, hits by tier");
  #disk = new Figure("Prefixes on disk");

  constructor() {
    const figures = [this.#speed, this.#first, this.#requests, this.#waiting, this.#cache, this.#pages];
    const all = [...figures, this.#tiers, this.#disk, this.#drafts, this.#memory];
    byId("live-figures").append(...all.map(({ element }) => element));
  }

  async refresh(key) {
    try {
      this.#history.add(parseMetrics(await readMetrics(key)), performance.now() / 1000);
    } catch (error) {
      this.#complain(error.status);
      return;
    }
    say(byId("live-problem"), this.#history.value("onebox:engine_up") === 0 ? await whatIsDown() : null);
    byId("live-figures").hidden = false;
    this.#show(this.#history);
  }

  #complain(status) {
    const why = {
      401: "The metrics need the API key; give it in Settings.",
      404: "This server has no metrics.",
      0: "The server does not answer.",
    };
    say(byId("live-problem"), why[status] ?? `The metrics cannot be read (status ${status}).`);
    byId("live-figures").hidden = true;
  }

  #show(history) {
    const rates = history.rates("vllm:generation_tokens_total");
    this.#speed.show(rates.at(-1)?.toFixed(1), rates);
    const first = "vllm:time_to_first_token_seconds";
    this.#first.show(seconds(history.ratio(`${first}_sum`, `${first}_count`)));
    const running = history.values("vllm:num_requests_running");
    this.#requests.show(running.at(-1), running);
    const waiting = history.values("vllm:num_requests_waiting");
    this.#waiting.show(waiting.at(-1), waiting);
    this.#cache.show(percent(history.ratio("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")));
    this.#showPages(history);
    this.#showTiers(history.byLabel(`${TIER}_hits_total`, "tier"), history.byLabel(`${TIER}_hit_tokens_total`, "tier"));
    this.#showDisk(history);
    const places = history.byLabel(ACCEPTED, "position").map(([place]) => place);
    const shares = places.map((place) => [Number(place) + 1, history.ratio(ACCEPTED, DRAFTS, ["position", place])]);
    const known = shares.filter(([, share]) => share !== null);
    this.#drafts.show(known.map(([place, share]) => [place, share, percent(share)]));
    this.#showMemory(history.byLabel("onebox:memory_bytes", "part"));
  }

  #showPages(history) {
    const shares = history.values("vllm:kv_cache_usage_perc");
    const total = Number(history.labels("vllm:cache_config_info").num_gpu_blocks);
    const cached = history.value("onebox:prefix_cache_pages");
    if (!shares.length || !total) return this.#pages.show(undefined);
    const kept = cached ? `, ${cached} more keep prefixes` : "";
    return this.#pages.show(`${Math.round(shares.at(-1) * total)} of ${total}${kept}`, shares, 1);
  }

  /** Of a server without a directory for prefixes, memory is the only tier: the hits above say it all. */
  #showTiers(hits, tokens) {
    const total = hits.reduce((sum, [, count]) => sum + count, 0);
    const known = hits.length > 1 && total ? hits : [];
    const found = new Map(tokens);
    this.#tiers.show(known.map(([tier, count]) => [tier, count / total, `${count}, ${found.get(tier) ?? 0} tokens`]));
  }

  #showDisk(history) {
    const used = history.value(`${DISK}_bytes`);
    this.#disk.element.hidden = used === null;
    if (used === null) return;
    const [read, written, saved] = ["read_bytes_total", "written_bytes_total", "saved_seconds_total"].map(
      (name) => history.value(`${DISK}_${name}`) ?? 0,
    );
    const stopped = history.value(`${DISK}_writing`) === 0 ? "; not writing" : "";
    const moved = `${gib(read)} read, ${gib(written)} written`;
    this.#disk.show(`${gib(used)}, ${moved}, ${saved.toFixed(1)} s saved${stopped}`);
  }

  #showMemory(parts) {
    const most = Math.max(...parts.map(([, bytes]) => bytes));
    this.#memory.show(parts.map(([name, bytes]) => [name, bytes / most, gib(bytes)]));
  }
}

/** In the server's words; it is asked only once the metrics say that no requests are taken. */
async function whatIsDown() {
  try {
    const { status, message } = await readHealth();
    return status === "ok" ? null : `The engine is down (${status}). ${message ?? ""}`.trim();
  } catch (error) {
    return error.message;
  }
}

const gib = (bytes) => `${(bytes / GIB).toFixed(2)} GiB`;
const percent = (share) => (share === null ? undefined : `${(100 * share).toFixed(0)} %`);
const seconds = (value) => (value === null ? undefined : `${value.toPrecision(3)} s`);

/** A number with its name, and a line of how it was in the last minute. */
class Figure {
  #value = make("strong", {}, "–");
  #line = makeSvg("polyline");
  #chart = makeSvg(
    "svg", { viewBox: `0 0 ${WINDOW} 20`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.#line,
  );

  constructor(name) {
    this.element = make("div", { class: "figure" }, make("span", { class: "quiet" }, name), this.#value, this.#chart);
    this.#chart.style.display = "none";
  }

  /** `values` are drawn oldest first; the top of the line is `top`, or the largest of them. */
  show(text, values = [], top = Math.max(...values)) {
    this.#value.textContent = text ?? "–";
    this.#chart.style.display = values.length > 1 ? "" : "none";
    const left = WINDOW - values.length;
    const points = values.map((value, place) => `${left + place},${19 - (18 * value) / (top || 1)}`);
    this.#line.setAttribute("points", points.join(" "));
  }
}

/** Rows of a name, a bar and a text; hidden while there are none. */
class Bars {
  #rows = make("dl");

  constructor(name) {
    this.element = make("div", { class: "bars", hidden: true }, make("span", { class: "quiet" }, name), this.#rows);
  }

  show(rows) {
    this.element.hidden = !rows.length;
    const parts = rows.flatMap(([name, share, text]) => [
      make("dt", {}, String(name)),
      make("dd", {}, make("meter", { min: 0, max: 1, value: share, "aria-label": String(name) }), text),
    ]);
    this.#rows.replaceChildren(...parts);
  }
}
