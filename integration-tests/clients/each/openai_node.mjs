// The official OpenAI client in Node: chats, completions, parse with zod, tools, streams, a typed error, responses.
import OpenAI from 'openai';
import { zodFunction, zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';
import { check, model, offered, questions, refused, request, tooLong, url, weatherQuestion } from './rows.mjs';

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0, timeout: 120_000 });
const Person = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(120) });
const Place = z.object({ place: z.string().max(20), days: z.number().int().min(1).max(7) });
const weather = zodFunction({ name: 'weather', description: 'The weather.', parameters: Place });
const user = (content) => [{ role: 'user', content }];
const finish = (one, answer) => one.done(answer.usage.prompt_tokens, answer.usage.completion_tokens);
const counted = { stream: true, stream_options: { include_usage: true } };

// The chunks of a stream; the last one has the usage.
async function follow(one, stream) {
  let last;
  for await (last of stream) one.first();
  finish(one, last);
}

async function plain(question) {
  const chat = { model, messages: user(question), max_tokens: 24 };
  const completion = { model, prompt: question, max_tokens: 24 };
  await request('chat', async (one) =>
    finish(one, await client.chat.completions.create(chat, { headers: one.headers })));
  await request('chat, stream', async (one) =>
    follow(one, await client.chat.completions.create({ ...chat, ...counted }, { headers: one.headers })));
  await request('completion', async (one) =>
    finish(one, await client.completions.create(completion, { headers: one.headers })));
  await request('completion, stream', async (one) =>
    follow(one, await client.completions.create({ ...completion, ...counted }, { headers: one.headers })));
}

async function structured() {
  const response_format = zodResponseFormat(Person, 'person');
  const ask = { model, messages: user('Invent a person.'), max_tokens: 300, response_format };
  const isPerson = (answer) => check(Person.safeParse(answer.choices[0].message.parsed).success, 'it is no person');
  await request('parse()', async (one) => {
    const answer = await client.chat.completions.parse(ask, { headers: one.headers });
    finish(one, answer);
    isPerson(answer);
  });
  await request('stream() of a schema', async (one) => {
    const stream_options = { include_usage: true };
    const stream = client.chat.completions.stream({ ...ask, stream_options }, { headers: one.headers });
    for await (const _chunk of stream) one.first();
    const answer = await stream.finalChatCompletion();
    finish(one, answer);
    isPerson(answer);
  });
}

async function tools(tool_choice) {
  const ask = { model, messages: user(weatherQuestion), max_tokens: 400, tools: [weather], tool_choice };
  await request('parse() of tools', async (one) => {
    const answer = await client.chat.completions.parse(ask, { headers: one.headers });
    finish(one, answer);
    for (const call of answer.choices[0].message.tool_calls) {
      check(Place.safeParse(call.function.parsed_arguments).success, 'the arguments do not fit');
    }
  });
  await request('tools, stream', async (one) => {
    const calls = [];
    let last;
    for await (last of await client.chat.completions.create({ ...ask, ...counted }, { headers: one.headers })) {
      for (const choice of last.choices) calls.push(...(choice.delta.tool_calls ?? []));
    }
    finish(one, last);
    check(calls[0]?.function.name === 'weather', 'there is no call');
  });
}

async function responses(question) {
  const ask = { model, max_output_tokens: 60 };
  const done = (one, answer) => one.done(answer.usage.input_tokens, answer.usage.output_tokens);
  await request('response', async (one) =>
    done(one, await client.responses.create({ ...ask, input: question }, { headers: one.headers })));
  await request('response, stream', async (one) => {
    const stream = await client.responses.create({ ...ask, input: question, stream: true }, { headers: one.headers });
    let last;
    for await (last of stream) {
      if (last.type === 'response.output_text.delta') one.first();
    }
    done(one, last.response);
  });
  await request('responses.parse()', async (one) => {
    const text = { format: zodTextFormat(Person, 'person') };
    const answer = await client.responses.parse({ ...ask, input: 'Invent a person.', text }, { headers: one.headers });
    done(one, answer);
    check(Person.safeParse(answer.output_parsed).success, 'it is no person');
  });
}

for (const question of questions) {
  await plain(question);
  await structured();
  if (offered.includes('/v1/responses')) await responses(question);
}
for (const choice of ['required', { type: 'function', function: { name: 'weather' } }]) await tools(choice);
const isTooLong = (why) => why instanceof OpenAI.BadRequestError && why.code === 'context_length_exceeded';
await refused('too long', isTooLong, ({ headers }) =>
  client.chat.completions.create({ model, messages: user(tooLong) }, { headers }));
