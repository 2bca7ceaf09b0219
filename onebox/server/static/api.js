// The server: who it is, its metrics, and one streamed answer.

/** What the server said instead of an answer; `status` is HTTP's, 0 where it said nothing at all. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function ask(path, key, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer.");
  }
  if (!response.ok) throw new ServerError(await refusal(response), response.status);
  return response;
}

async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

/** The one model that is served: {id, max_model_len, input_modalities}. */
export async function readModel(key) {
  return (await (await ask("v1/models", key)).json()).data[0];
}

/** The metrics as Prometheus' text. */
export async function readMetrics(key) {
  return (await ask("metrics", key, { cache: "no-store" })).text();
}

/** How the engine is: {status, message, num_restarts}; also where the server says that it takes no requests. */
export async function readHealth() {
  try {
    return await (await fetch("health", { cache: "no-store" })).json();
  } catch {
    throw new ServerError("The server does not answer.");
  }
}

/** Chunks of a streamed chat completion, parsed, as they come. */
export async function* streamChat(body, key, signal) {
  const options = {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  };
  const response = await ask("v1/chat/completions", key, options);
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message);
    yield chunk;
  }
  throw new ServerError("The stream ended before the answer did.");
}

/** The data of server-sent events; events may be cut anywhere, inside a character too. */
async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The connection broke before the answer was done.");
    }
    if (part.done) return;
    const events = (held + part.value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const lines = event.split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}
