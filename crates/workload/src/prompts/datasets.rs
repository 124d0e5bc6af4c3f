//! Reads files of prompts: JSON lines with a `prompt` each (the custom dataset of `vllm bench serve`), and conversations in the form of
//! ShareGPT. The lengths become a trace; the texts stay beside it, because a trace never has text.

use std::fmt;
use std::io::{BufRead, BufReader, Read};
use std::time::Duration;

use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serving_core::request::Lane;

use crate::trace::reading::{BYTE_ORDER_MARK, Lines, read_rows, tokens};
use crate::trace::{ReadLimits, Trace, TraceError, TraceRequest};

const FORMAT_NAME: &str = "a file of prompts";
/// About what English text has in the vocabularies of the common models. The server counts exactly.
const BYTES_PER_TOKEN: usize = 4;

/// The n-th text is the prompt of the n-th request. All arrive at 0.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptSet {
    pub trace: Trace,
    pub texts: Vec<String>,
}

/// A row of JSON lines, or an entry of ShareGPT's list.
#[derive(Deserialize)]
struct Entry {
    prompt: Option<String>,
    prompt_tokens: Option<u64>,
    output_tokens: Option<u64>,
    conversations: Option<Vec<Message>>,
}

#[derive(Deserialize)]
struct Message {
    value: String,
}

/// `output_tokens` counts for all requests; without it each row has its own, or an answer whose length is estimated.
pub fn read(
    name: &str,
    input: &mut dyn Read,
    limits: &ReadLimits,
    output_tokens: Option<u32>,
) -> Result<PromptSet, TraceError> {
    let mut input = BufReader::new(input);
    let start = input.fill_buf().map_err(|source| TraceError::Read { row: 1, source })?;
    let text = start.strip_prefix(BYTE_ORDER_MARK).unwrap_or(start);
    let mark_bytes = start.len() - text.len();
    let is_list = text.trim_ascii_start().first() == Some(&b'[');
    let mut set = PromptSet {
        trace: Trace {
            name: name.to_owned(),
            block_tokens: 0,
            requests: Vec::new(),
        },
        texts: Vec::new(),
    };
    if is_list {
        input.consume(mark_bytes);
        for (row, entry) in (1..).zip(read_list(&mut input, limits)?) {
            if entry.is_unfinished(output_tokens) {
                continue;
            }
            let request = set.take(row, entry, output_tokens)?;
            set.trace.requests.push(request);
        }
    } else {
        set.trace.requests = read_rows(&mut Lines::new(&mut input, limits), |row, line| {
            let entry = serde_json::from_slice(line).map_err(|source| TraceError::NotARow {
                row,
                format: FORMAT_NAME,
                source,
            })?;
            set.take(row, entry, output_tokens)
        })?;
    }
    match set.texts.is_empty() {
        true => Err(TraceError::Empty),
        false => Ok(set),
    }
}

impl Entry {
    /// A conversation without a question, or without an answer that says how long ours is. The published files of ShareGPT have some, and
    /// `vllm bench serve` passes over them, too.
    fn is_unfinished(&self, output_tokens: Option<u32>) -> bool {
        let messages = self.conversations.as_deref().filter(|_| self.prompt.is_none());
        let needs_answer = output_tokens.is_none() && self.output_tokens.is_none();
        messages.is_some_and(|messages| {
            let has = |at: usize| messages.get(at).is_some_and(|message| !message.value.is_empty());
            !has(0) || (needs_answer && !has(1))
        })
    }
}

impl PromptSet {
    /// Keeps the text of an entry, and says what it asks for.
    fn take(&mut self, row: usize, entry: Entry, output_tokens: Option<u32>) -> Result<TraceRequest, TraceError> {
        let mut messages = entry
            .conversations
            .unwrap_or_default()
            .into_iter()
            .map(|message| message.value);
        let text = entry.prompt.or_else(|| messages.next()).filter(|text| !text.is_empty());
        let text = text.ok_or(TraceError::BadRow {
            row,
            what: "no prompt. A row has a `prompt`, or `conversations` with a first message",
        })?;
        let answer = messages.next().filter(|answer| !answer.is_empty());
        let output = output_tokens.map(u64::from).or(entry.output_tokens);
        let estimated_output = output.or_else(|| answer.as_deref().map(estimated_tokens));
        let estimated_output = estimated_output.ok_or(TraceError::BadRow {
            row,
            what: "neither `output_tokens` nor an answer. Say how many tokens each answer has, here or for all (--random-output-len)",
        })?;
        let prompt = entry.prompt_tokens.unwrap_or_else(|| estimated_tokens(&text));
        self.texts.push(text);
        Ok(TraceRequest {
            at: Duration::ZERO,
            prompt_tokens: tokens(row, "prompt_tokens", prompt)?,
            output_tokens: tokens(row, "output_tokens", estimated_output)?,
            prefix_blocks: Vec::new(),
            lane: Lane::Interactive,
            conversation: None,
        })
    }
}

fn estimated_tokens(text: &str) -> u64 {
    u64::try_from(text.len().div_ceil(BYTES_PER_TOKEN)).unwrap_or(u64::MAX)
}

/// The entries of a list that may be as long as the limits allow.
fn read_list(input: &mut dyn Read, limits: &ReadLimits) -> Result<Vec<Entry>, TraceError> {
    let mut bounded = BufReader::new(input.take(limits.bytes_max.saturating_add(1)));
    let mut json = serde_json::Deserializer::from_reader(&mut bounded);
    let entries = json.deserialize_seq(Entries {
        rows_max: limits.rows_max,
    });
    let entries = entries.and_then(|entries| json.end().map(|()| entries));
    if bounded.get_ref().limit() == 0 {
        let bytes_max = limits.bytes_max;
        return Err(TraceError::TooLarge { bytes_max });
    }
    let entries = entries.map_err(|source| TraceError::NotAList { source })?;
    let rows_max = limits.rows_max;
    entries.ok_or(TraceError::TooManyRows { rows_max })
}

struct Entries {
    rows_max: usize,
}

impl<'de> Visitor<'de> for Entries {
    /// `None`: there are more than allowed.
    type Value = Option<Vec<Entry>>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a list of conversations")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = list.next_element()? {
            entries.push(entry);
            if entries.len() > self.rows_max {
                // The rest is passed over, because a list that is left half read is an error of its own.
                while list.next_element::<serde::de::IgnoredAny>()?.is_some() {}
                return Ok(None);
            }
        }
        match entries.is_empty() {
            true => Err(A::Error::custom("the list is empty")),
            false => Ok(Some(entries)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read_text(text: &str, output_tokens: Option<u32>) -> Result<PromptSet, TraceError> {
        let limits = ReadLimits {
            rows_max: 3,
            line_bytes_max: 200,
            bytes_max: 1_000,
        };
        read("file", &mut text.as_bytes(), &limits, output_tokens)
    }

    fn lengths(set: &PromptSet) -> Vec<(u32, u32)> {
        let requests = set.trace.requests.iter();
        requests
            .map(|request| (request.prompt_tokens, request.output_tokens))
            .collect()
    }

    #[test]
    fn lines_with_prompts_are_read() {
        let text = "{\"prompt\":\"What is 2+2?\",\"output_tokens\":7}\n\n{\"prompt\":\"Hello\",\"prompt_tokens\":3,\"output_tokens\":1,\"more\":0}\n";
        let set = read_text(text, None).expect("both rows are whole");
        assert_eq!(lengths(&set), [(3, 7), (3, 1)]);
        assert_eq!(set.texts, ["What is 2+2?", "Hello"]);
        assert_eq!(
            lengths(&read_text(text, Some(50)).expect("both rows are whole")),
            [(3, 50), (3, 50)]
        );
        let error = read_text("{\"prompt\":\"a\"}", None).expect_err("nobody says how long the answer is");
        assert!(matches!(error, TraceError::BadRow { row: 1, .. }));
        let error = read_text("{\"text\":\"a\"}", Some(1)).expect_err("there is no prompt");
        assert!(matches!(error, TraceError::BadRow { row: 1, .. }));
        let error = read_text("{\"prompt\":\"a\",\"output_tokens\":0}", None).expect_err("an answer has a token");
        assert!(matches!(error, TraceError::NoTokens { row: 1, .. }));
    }

    /// The first message is the prompt and the second one its answer, as `vllm bench serve` takes them.
    #[test]
    fn conversations_of_sharegpt_are_read() {
        let text = r#" [{"id":"x","conversations":[{"from":"human","value":"12345678"},{"from":"gpt","value":"1234567890123"},{"from":"human","value":"more"}]}]"#;
        let set = read_text(text, None).expect("the form of ShareGPT");
        assert_eq!((lengths(&set), set.texts), (vec![(2, 4)], vec!["12345678".to_owned()]));
        let marked = read_text(&format!("\u{feff}{text}"), None).expect("the same from Windows");
        assert_eq!(lengths(&marked), [(2, 4)]);
        assert!(matches!(read_text("[]", None), Err(TraceError::NotAList { .. })));
        assert!(matches!(
            read_text(r#"[{"conversations":[]}]"#, None),
            Err(TraceError::Empty)
        ));
        let one = r#"{"prompt":"a","output_tokens":1}"#;
        let many = format!("[{}]", [one; 4].join(","));
        assert!(matches!(
            read_text(&many, None),
            Err(TraceError::TooManyRows { rows_max: 3 })
        ));
        let large = format!("[{one}{}]", " ".repeat(1_000));
        assert!(matches!(read_text(&large, None), Err(TraceError::TooLarge { .. })));
        assert!(matches!(
            read_text(&format!("[{one}] {one}"), None),
            Err(TraceError::NotAList { .. })
        ));
    }

    #[test]
    fn conversations_without_an_answer_are_passed_over() {
        let of = |messages: &[&str]| {
            let messages = messages.iter().map(|value| format!("{{\"value\":\"{value}\"}}"));
            format!("{{\"conversations\":[{}]}}", messages.collect::<Vec<_>>().join(","))
        };
        let list = |entries: [String; 3]| format!("[{}]", entries.join(","));
        let text = list([of(&[]), of(&["alone"]), of(&["question", "answer"])]);
        let set = read_text(&text, None).expect("one is whole");
        assert_eq!((lengths(&set), set.texts), (vec![(2, 2)], vec!["question".to_owned()]));
        // With a length for all, a question is enough.
        let set = read_text(&text, Some(9)).expect("two have a question");
        assert_eq!(set.texts, ["alone", "question"]);
        let row = r#"{"prompt":"a"}"#.to_owned();
        let error = read_text(&list([row, of(&[]), of(&[])]), None).expect_err("a row, and no conversation");
        assert!(matches!(error, TraceError::BadRow { row: 1, .. }));
    }

    proptest! {
        #[test]
        fn damaged_files_never_panic(at in 0_usize..120, byte in any::<u8>(), cut in 0_usize..160, is_list in any::<bool>()) {
            let row = r#"{"prompt":"a","output_tokens":1,"conversations":[{"from":"human","value":"b"}]}"#;
            let text = match is_list {
                true => format!("[{row},{row}]"),
                false => format!("{row}\n{row}"),
            };
            let mut bytes = text.into_bytes();
            bytes[at] = byte;
            bytes.truncate(cut);
            let read = read("damaged", &mut &bytes[..], &ReadLimits::default(), None);
            prop_assert!(read.is_err() || read.is_ok_and(|set| set.texts.len() == set.trace.requests.len()));
        }
    }
}
