//! Every cap of the HTTP edge, with where the number comes from.

use std::time::Duration;

/// Choices per prompt. OpenAI allows 128. Each choice is a sequence with its own KV, and a node runs 16 sequences unless set.
pub const CHOICES_MAX: u32 = 16;
/// Prompts in one completions request: each is a request of its own in the admission queue.
pub const PROMPTS_MAX: usize = 128;
/// Messages of one chat. Far above any real conversation that fits a context; bounds the template's work.
pub const MESSAGES_MAX: usize = 4096;
/// OpenAI allows 4 stop strings, vLLM any number; every token is searched for every one of them.
pub const STOP_STRINGS_MAX: usize = 16;
/// A stop string this long holds back as much text.
pub const STOP_STRING_CHARS_MAX: usize = 256;
/// Tokens that end a sequence: looked through at every token.
pub const STOP_TOKEN_IDS_MAX: usize = 128;
/// OpenAI's limit for chat (5 for completions); each alternative is carried with every token.
pub const LOGPROBS_MAX: u32 = 20;
/// OpenAI documents -100..100 for the values and 1,024 is what vLLM's tests go to; the list travels to the nodes.
pub const LOGIT_BIAS_ENTRIES_MAX: usize = 1024;
pub const LOGIT_BIAS_MAX: f64 = 100.0;
/// OpenAI's range.
pub const TEMPERATURE_MAX: f64 = 2.0;
/// OpenAI's range of presence and frequency penalty.
pub const PENALTY_MAX: f64 = 2.0;
/// Multiplies logits; beyond this every repeated token is out of reach already.
pub const REPETITION_PENALTY_MAX: f64 = 10.0;
/// `user` and other labels that are kept with a request.
pub const LABEL_CHARS_MAX: usize = 128;
/// An hour: longer than any stream of this model's context takes on one core.
pub const REQUEST_TIMEOUT_MAX: Duration = Duration::from_secs(3600);
/// A body must arrive within this time: a client that sends a byte a second holds a connection, not a place.
pub const BODY_READ_MAX: Duration = Duration::from_secs(30);
/// How much of a refused body is read and thrown away, so that the client gets to read the 413 or the 503 instead of a reset
/// connection. The 50 MB body of the acceptance tests fits.
pub const REFUSED_BODY_READ_BYTES_MAX: usize = 64 << 20;
/// And for how long.
pub const REFUSED_BODY_READ_MAX: Duration = Duration::from_secs(3);
/// And of how many clients at a time: reading costs a core some 0.3 ms for each MiB.
pub const REFUSED_BODIES_READ_MAX: usize = 2;
/// Texts below this are tokenized in place (about 1 ms); longer ones on a blocking thread.
pub const TOKENIZE_INLINE_BYTES_MAX: usize = 16 << 10;
/// After the last token of the last choice: how long an answer waits for the nodes' last reports. Only one that tells of
/// them does.
pub const REPORTS_WAIT_MAX: Duration = Duration::from_millis(500);
/// How long a record that is not complete waits for them when its answer has ended. The control loop waits for a second
/// after the decode node's, which itself comes with the last token.
pub const LATE_REPORTS_WAIT_MAX: Duration = Duration::from_secs(2);
/// Different ignored field names logged over the life of the process; more are ignored in silence.
pub const IGNORED_NAMES_LOGGED_MAX: usize = 256;
/// Elements of one list of a body, but for the token ids of a prompt, which the context length bounds. Also the most tokens
/// that a `/detokenize` call may send.
pub const JSON_LIST_MAX: usize = 1 << 16;
/// Values in one body. Each takes up to 72 bytes while the fields are checked: 18 MiB at most, on no more threads than cores.
pub const JSON_VALUES_MAX: usize = 1 << 18;
/// A text of up to so many context lengths is counted to its end, so that the refusal can say how many tokens it has.
pub const COUNTED_CONTEXTS: usize = 4;
/// Tokens of a text that `/tokenize` counts, or a context length where that is more: texts are prepared with it before they are
/// cut to size. Digits, the dearest text, take about 50 ms of one core for so many.
pub const TOKENIZE_TOKENS_MAX: usize = 1 << 15;
/// Bodies up to this size are not counted against the budget of bytes in flight: connections bound them.
pub const BODY_UNCOUNTED_BYTES: usize = 64 << 10;
