// Sends a chat and reads its answer token by token; what happened comes as calls, errors as words.

import { ApiFailure, failureOf } from "./api.js";

const PATH = "/v1/chat/completions";
/** An error inside a stream comes after a good status. */
const STATUS_OF_STREAM = 200;

/** A read whose data is there already ends without a turn of the event loop: a page that has fallen behind would not hear a click. */
const TURN_EVERY_MS = 30;

/** Data of server-sent events out of a byte stream; an event may be cut anywhere between two reads. */
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let turnAt = performance.now() + TURN_EVERY_MS;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      if (performance.now() >= turnAt) {
        await new Promise((resolve) => setTimeout(resolve));
        turnAt = performance.now() + TURN_EVERY_MS;
      }
      rest += value.replaceAll("\r", "");
      const parts = rest.split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part
          .split("\n")
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart())
          .join("\n");
        if (data) yield data;
      }
    }
  } finally {
    // Leaving early, for whatever reason, must close the connection: the nodes then free the blocks.
    reader.cancel().catch(() => {});
  }
}

async function open(request, signal) {
  try {
    return await fetch(PATH, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(request),
      signal,
    });
  } catch (problem) {
    if (signal.aborted) throw problem;
    throw new ApiFailure("The coordinator could not be reached. Nothing was sent.");
  }
}

/**
 * `settings`: {model, temperature, max_tokens}. `on`: {id(responseId, requestId), text(piece)}.
 * Ends when the stream does, with {metrics, usage, finishReason}; throws ApiFailure, or an AbortError when `signal` stopped it.
 */
export async function streamChat(settings, messages, on, signal) {
  const request = {
    ...settings,
    messages,
    stream: true,
    include_metrics: true,
    stream_options: { include_usage: true },
  };
  const response = await open(request, signal);
  if (!response.ok) throw await failureOf(response, PATH);
  const requestId = response.headers.get("x-request-id");
  const end = { metrics: null, usage: null, finishReason: null };
  let isDone = false;
  try {
    for await (const data of eventsOf(response.body)) {
      isDone = data === "[DONE]";
      if (isDone) break;
      take(JSON.parse(data), requestId, on, end);
    }
  } catch (problem) {
    if (signal.aborted || problem instanceof ApiFailure) throw problem;
    throw new ApiFailure("The answer broke off: the connection was lost.");
  }
  if (!isDone) throw new ApiFailure("The answer broke off before its end.");
  return end;
}

function take(chunk, requestId, on, end) {
  if (chunk.error) throw new ApiFailure(chunk.error.message ?? "The answer failed.", STATUS_OF_STREAM);
  if (chunk.id) on.id(chunk.id, requestId);
  const choice = chunk.choices?.[0];
  if (choice?.delta?.content) on.text(choice.delta.content);
  end.finishReason = choice?.finish_reason ?? end.finishReason;
  end.usage = chunk.usage ?? end.usage;
  end.metrics = chunk.metrics ?? end.metrics;
}
