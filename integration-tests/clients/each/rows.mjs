// What a client's script in JavaScript tells the runner: one JSON line for each request, with its times as the client saw them.
import { randomUUID } from 'node:crypto';
import { appendFileSync } from 'node:fs';

export const url = process.env.BATON_URL;
export const model = process.env.BATON_MODEL;
export const offered = process.env.BATON_OFFERED.split(',');
export const questions = [
  'What is the capital of France? Answer in one short sentence.',
  'Name three primary colours.',
  'Tell me a story about a lighthouse.',
  'How many legs has a spider?',
];
// Longer than the context of any model that the tests use.
export const tooLong = 'word '.repeat(40_000);
export const weatherQuestion = 'How will the weather be in Rome in the next two days?';

const write = (row) => appendFileSync(process.env.CLIENT_ROWS, JSON.stringify(row) + '\n');
const told = (why) => `${why?.name}: ${why?.message}`.slice(0, 500);

function begin(what) {
  const row = { what, id: `client-${randomUUID()}`, error: null };
  const began = performance.now();
  const elapsed = () => performance.now() - began;
  return {
    row,
    // They go with the request, so that its record is found by its id.
    headers: { 'x-request-id': row.id },
    // The client has the first token; later calls change nothing.
    first: () => (row.ttft_ms ??= elapsed()),
    // The client has the whole answer, and these counts in it.
    done(promptTokens, outputTokens) {
      row.e2e_ms ??= elapsed();
      Object.assign(row, { prompt_tokens: promptTokens, output_tokens: outputTokens });
    },
  };
}

// An exception becomes the row's error: the requests that follow are still worth sending.
export async function request(what, body) {
  const one = begin(what);
  try {
    await body(one);
    if (!Number.isInteger(one.row.output_tokens)) throw new Error('the client shows no count of tokens');
  } catch (why) {
    one.row.error = told(why);
  }
  write(one.row);
}

// A request that the server must refuse; `isRight` looks at what the client throws.
export async function refused(what, isRight, body) {
  const { row, headers } = begin(what);
  row.is_refused = true;
  try {
    await body({ headers });
    row.error = 'it was not refused';
  } catch (why) {
    if (!isRight(why)) row.error = `another error: ${told(why)}`;
  }
  write(row);
}

export function check(isTrue, words) {
  if (!isTrue) throw new Error(words);
}
