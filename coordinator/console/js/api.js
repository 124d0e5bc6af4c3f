// Reads the coordinator's pages; a failure is one sentence for people, never a code alone.

const LIMIT_MS = 15_000;

export class ApiFailure extends Error {
  constructor(message, status = null) {
    super(message);
    this.status = status;
    /** Nobody answered, as opposed to an answer that says no. */
    this.isAway = status === null;
  }
}

/** What an error answer says about itself, else what its status means. */
export async function wordsOf(response, path) {
  const body = await response.text().catch(() => "");
  try {
    const { error } = JSON.parse(body);
    const message = typeof error === "string" ? error : error?.message;
    if (message) return message;
  } catch {
    // Not JSON: the text itself may say something.
  }
  const plain = body.length > 0 && body.length < 300 && !body.includes("<") ? `: ${body.trim()}` : "";
  return `${path} answered with status ${response.status}${plain}`;
}

async function get(path, signal) {
  const limit = AbortSignal.timeout(LIMIT_MS);
  let response;
  try {
    response = await fetch(path, { signal: signal ? AbortSignal.any([signal, limit]) : limit, cache: "no-store" });
  } catch (problem) {
    if (signal?.aborted) throw problem;
    const why = limit.aborted ? `did not answer within ${LIMIT_MS / 1000} s` : "could not be reached";
    throw new ApiFailure(`The coordinator ${why} (${path}).`);
  }
  if (!response.ok) throw new ApiFailure(await wordsOf(response, path), response.status);
  return response;
}

export async function getJson(path, signal) {
  const response = await get(path, signal);
  try {
    return await response.json();
  } catch (problem) {
    if (signal?.aborted) throw problem;
    throw new ApiFailure(`${path} answered with something that is not JSON.`, response.status);
  }
}

export async function getText(path, signal) {
  return (await get(path, signal)).text();
}
