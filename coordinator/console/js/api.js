// Reads the coordinator's pages; a failure is one sentence for people, never a code alone.

import { goToSignIn } from "./session.js";

const LIMIT_MS = 15_000;
/** No key came, or one that is not known: only a sign-in helps. */
const UNAUTHORIZED = 401;

export class ApiFailure extends Error {
  constructor(message, status = null, code = null) {
    super(message);
    this.status = status;
    this.code = code;
    /** Nobody answered, as opposed to an answer that says no. */
    this.isAway = status === null;
  }
}

/** An error answer as a failure: what it says about itself, else what its status means. */
export async function failureOf(response, path) {
  if (response.status === UNAUTHORIZED) goToSignIn();
  const body = await response.text().catch(() => "");
  try {
    const { error } = JSON.parse(body);
    const message = typeof error === "string" ? error : error?.message;
    if (message) return new ApiFailure(message, response.status, error.code ?? null);
  } catch {
    // Not JSON: the text itself may say something.
  }
  const plain = body.length > 0 && body.length < 300 && !body.includes("<") ? `: ${body.trim()}` : "";
  return new ApiFailure(`${path} answered with status ${response.status}${plain}`, response.status);
}

async function ask(method, path, signal) {
  const limit = AbortSignal.timeout(LIMIT_MS);
  const both = signal ? AbortSignal.any([signal, limit]) : limit;
  let response;
  try {
    response = await fetch(path, { method, signal: both, cache: "no-store" });
  } catch (problem) {
    if (signal?.aborted) throw problem;
    const why = limit.aborted ? `did not answer within ${LIMIT_MS / 1000} s` : "could not be reached";
    throw new ApiFailure(`The coordinator ${why} (${path}).`);
  }
  if (!response.ok) throw await failureOf(response, path);
  return response;
}

/** An order, which has no body; what it answers is read by nobody. */
export const order = (path) => ask("POST", path);

/** {status, text}. A connection that breaks, or a limit that comes, before the end is nobody's wrong content. */
async function read(path, signal) {
  const response = await ask("GET", path, signal);
  try {
    return { status: response.status, text: await response.text() };
  } catch (problem) {
    if (signal?.aborted) throw problem;
    throw new ApiFailure(`The coordinator's answer did not come to its end (${path}).`);
  }
}

export async function getJson(path, signal) {
  const { status, text } = await read(path, signal);
  try {
    return JSON.parse(text);
  } catch {
    throw new ApiFailure(`${path} answered with something that is not JSON.`, status);
  }
}

export async function getText(path, signal) {
  return (await read(path, signal)).text;
}
