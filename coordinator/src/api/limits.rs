//! Every limit of the HTTP edge, with where the number comes from.

use std::time::Duration;

/// Choices per prompt. OpenAI allows 128. Each choice is a sequence with its own KV, and a node runs 16 sequences unless set.
pub const CHOICES_MAX: i64 = 16;
/// Prompts in one completions request. Each is a request of its own in the admission queue.
pub const PROMPTS_MAX: usize = 128;
/// Token ids of a prompt that is one flat list. It is longer than any context that is served here, and each takes 32 bytes
/// while the list is read.
pub const PROMPT_ELEMENTS_MAX: usize = 1 << 18;
/// Messages of one chat. It is far above any real conversation that fits a context, and limits the template's work.
pub const MESSAGES_MAX: usize = 4096;
/// Tokens that end a sequence. Each generated token is compared with all of them.
pub const STOP_TOKEN_IDS_MAX: usize = 128;
/// Token ids that a request may be limited to. They travel with each attempt, and each draw looks at them.
pub const ALLOWED_TOKEN_IDS_MAX: usize = 1 << 14;
/// Words that the output may not have. Each is compared with the end of the output at every token.
pub const BAD_WORDS_MAX: usize = 128;
pub const BAD_WORD_BYTES_MAX: usize = 128;
/// Texts of which the output is one.
pub const CHOICE_TEXTS_MAX: usize = 1024;
/// A regular expression of this size takes some 50 MiB while it is compiled, at worst.
pub const REGEX_BYTES_MAX: usize = 8 << 10;
/// Rules in Lark's form may hold regular expressions. The grammars of whole programming languages have some 10 KiB.
pub const LARK_BYTES_MAX: usize = 16 << 10;
/// Grammars that are compiled at a time. Each takes a core.
pub const COMPILED_AT_ONCE: usize = 2;
/// A grammar travels to the nodes with each attempt. The largest schemas in use have some 100 KB.
pub const GRAMMAR_BYTES_MAX: usize = 128 << 10;
/// OpenAI's limits.
pub const TOOLS_MAX: usize = 128;
pub const TOOL_NAME_CHARS_MAX: usize = 64;
/// JSON values in the `parameters` of all tools and in the `arguments` of all calls together. While a prompt is made, each takes up to
/// 300 bytes, a few times over. The largest sets of tools in use have some 100 KB, which are about 5,000 values.
pub const TOOL_VALUES_MAX: usize = 1 << 15;
/// Calls in one message of the assistant.
pub const CALLS_MAX: usize = 128;
/// Bytes of the fields that an answer of `/v1/responses` repeats. They are kept for as long as the request runs, and a stream has them
/// three times. The largest sets of tools in use have some 100 KB.
pub const REPEATED_BYTES_MAX: usize = 128 << 10;
/// Names in `include` of a response. OpenAI knows fewer than ten.
pub const INCLUDED_MAX: usize = 16;
/// OpenAI's limit for chat (5 for completions). Each alternative travels with every token.
pub const LOGPROBS_MAX: i64 = 20;
/// Logprobs that one request may report of its prompts' tokens: the tokens, each with its alternatives. One takes some 70 bytes of the
/// answer. With 20 alternatives this is a prompt of 50,000 tokens.
pub const PROMPT_LOGPROBS_MAX: usize = 1 << 20;
/// A place in the queue. vLLM gives its priorities no range; these are all whole numbers of 32 bits.
pub const PRIORITY_MIN: i64 = i32::MIN as i64;
pub const PRIORITY_MAX: i64 = i32::MAX as i64;
/// OpenAI documents -100 to 100 for the values. vLLM's tests use up to 1,024 entries. The list travels to the nodes.
pub const LOGIT_BIAS_ENTRIES_MAX: usize = 1024;
pub const LOGIT_BIAS_MAX: i32 = 100;
/// OpenAI's range.
pub const TEMPERATURE_MAX: i32 = 2;
/// OpenAI's range of presence and frequency penalty.
pub const PENALTY_MAX: i32 = 2;
/// The penalty multiplies logits. A larger value changes nothing more: repeated tokens are already out of reach.
pub const REPETITION_PENALTY_MAX: i32 = 10;
/// `user` and other labels that are kept with a request.
pub const LABEL_CHARS_MAX: usize = 128;
/// An hour: longer than any stream of this model's context takes on one core.
pub const REQUEST_TIMEOUT_MAX: Duration = Duration::from_secs(3600);
/// A body must arrive within this time. A client that sends a byte a second therefore holds a connection for a limited
/// time.
pub const BODY_READ_MAX: Duration = Duration::from_secs(30);
/// How much of a refused body is read and dropped, so that the client can read the 413 or the 503 instead of getting a
/// reset connection. The 50 MB body of the acceptance tests fits.
pub const REFUSED_BODY_READ_BYTES_MAX: usize = 64 << 20;
/// How long a refused body is read at most.
pub const REFUSED_BODY_READ_MAX: Duration = Duration::from_secs(3);
/// How fast refused bodies are read, over all clients. Reading costs a core some 0.5 ms for each MiB, so this is a thirtieth of
/// a core.
pub const REFUSED_BYTES_READ_PER_SECOND: f64 = 64.0 * 1024.0 * 1024.0;
/// Texts below this size are tokenized in place (about 1 ms). Longer texts go to a blocking thread.
pub const TOKENIZE_INLINE_BYTES_MAX: usize = 16 << 10;
/// What a template writes around a message, a call or a tool, as work: ChatML's marks of a message have 33 bytes, Hermes' of a call 52,
/// the JSON of a tool some 70.
pub const FRAME_BYTES: usize = 64;
/// A token id as work. A token stands for about four bytes of English text.
pub const TOKEN_ID_BYTES: usize = 4;
/// How long an answer waits for the nodes' last reports after the last token of its last choice. Only an answer that shows
/// these reports waits.
pub const REPORTS_WAIT_MAX: Duration = Duration::from_millis(500);
/// How long a record waits for the nodes' last reports when its answer has ended. The control loop waits for a second after
/// the decode node's report, which comes with the last token.
pub const LATE_REPORTS_WAIT_MAX: Duration = Duration::from_secs(2);
/// Ignored field names that are logged over the life of the process. Further names are ignored without a log line.
pub const IGNORED_NAMES_LOGGED_MAX: usize = 256;
/// Tokens that a `/detokenize` call may send.
pub const DETOKENIZE_TOKENS_MAX: usize = 1 << 16;
/// A text of up to this many context lengths is counted to its end, so that the refusal can say how many tokens it has.
pub const COUNTED_CONTEXTS: usize = 4;
/// Tokens of a text that `/tokenize` counts (or a context length where that is more). A text is prepared with this limit
/// before it is cut to size. Digits, the slowest text, take about 50 ms of one core for this many tokens.
pub const TOKENIZE_TOKENS_MAX: usize = 1 << 15;
/// Bodies up to this size do not count against the budget of bytes in flight. The number of connections limits them.
pub const BODY_UNCOUNTED_BYTES: usize = 64 << 10;
