// Vercel's AI SDK: generateText, streamText, generateObject, streamObject, tools; responses where offered.
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { APICallError, generateObject, generateText, streamObject, streamText, tool } from 'ai';
import { z } from 'zod';
import { check, model, offered, questions, refused, request, tooLong, url, weatherQuestion } from './rows.mjs';

const baseURL = `${url}/v1`;
// It asks for no usage in streams unless told so.
const settings = { name: 'baton', baseURL, includeUsage: true, supportsStructuredOutputs: true };
const compatible = createOpenAICompatible(settings);
const official = createOpenAI({ baseURL, apiKey: 'none' });
const Person = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(120) });
const Place = z.object({ place: z.string().max(20), days: z.number().int().min(1).max(7) });
const weather = tool({ description: 'The weather.', inputSchema: Place });
const finish = (one, usage) => one.done(usage.inputTokens, usage.outputTokens);

async function follow(one, result) {
  for await (const part of result.fullStream) {
    if (part.type === 'error') throw part.error;
    if (part.type === 'text-delta') one.first();
  }
  finish(one, await result.usage);
}

async function every(kind, of, question) {
  const ask = { model: of, prompt: question, maxOutputTokens: 24, maxRetries: 0 };
  const person = { model: of, prompt: 'Invent a person.', schema: Person, maxOutputTokens: 300, maxRetries: 0 };
  await request(`generateText${kind}`, async (one) =>
    finish(one, (await generateText({ ...ask, headers: one.headers })).usage));
  await request(`streamText${kind}`, (one) => follow(one, streamText({ ...ask, headers: one.headers })));
  await request(`generateObject${kind}`, async (one) => {
    const answer = await generateObject({ ...person, headers: one.headers });
    finish(one, answer.usage);
    check(Person.safeParse(answer.object).success, 'it is no person');
  });
  await request(`streamObject${kind}`, async (one) => {
    const answer = streamObject({ ...person, headers: one.headers });
    for await (const part of answer.fullStream) if (part.type === 'error') throw part.error;
    finish(one, await answer.usage);
    check(Person.safeParse(await answer.object).success, 'it is no person');
  });
}

async function tools(kind, of, toolChoice) {
  const limits = { maxOutputTokens: 400, maxRetries: 0 };
  const ask = { model: of, prompt: weatherQuestion, tools: { weather }, toolChoice, ...limits };
  const isCall = (calls) =>
    check(calls.length && calls.every((call) => Place.safeParse(call.input).success), 'there is no call');
  await request(`tools${kind}`, async (one) => {
    const answer = await generateText({ ...ask, headers: one.headers });
    finish(one, answer.usage);
    isCall(answer.toolCalls);
  });
  await request(`tools, stream${kind}`, async (one) => {
    const answer = streamText({ ...ask, headers: one.headers });
    for await (const part of answer.fullStream) if (part.type === 'error') throw part.error;
    finish(one, await answer.usage);
    isCall(await answer.toolCalls);
  });
}

const chats = [['', compatible.chatModel(model)], [', @ai-sdk/openai chat', official.chat(model)]];
if (offered.includes('/v1/responses')) chats.push([', @ai-sdk/openai responses', official.responses(model)]);
for (const [kind, of] of chats) {
  for (const question of questions) await every(kind, of, question);
  for (const choice of ['required', { type: 'tool', toolName: 'weather' }]) await tools(kind, of, choice);
}
for (const question of questions) {
  const ask = { model: compatible.completionModel(model), prompt: question, maxOutputTokens: 24, maxRetries: 0 };
  await request('streamText of completions', (one) => follow(one, streamText({ ...ask, headers: one.headers })));
}
const isTooLong = (why) => APICallError.isInstance(why) && why.statusCode === 400 && /context length/.test(why.message);
await refused('too long', isTooLong, ({ headers }) =>
  generateText({ model: compatible.chatModel(model), prompt: tooLong, maxRetries: 0, headers }));
