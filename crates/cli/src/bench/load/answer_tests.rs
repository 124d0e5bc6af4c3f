//! Tests of the reader of answers.

use proptest::prelude::*;
use serde_json::json;

use super::*;

/// Reads a stream that arrives in pieces of `size` bytes. Returns how many tokens it has.
fn read(endpoint: Endpoint, stream: &str, size: usize) -> Result<(usize, Answer), AnswerError> {
    let mut reader = AnswerReader::new(endpoint);
    let mut tokens = 0;
    for piece in stream.as_bytes().chunks(size) {
        tokens += reader.push(piece)?;
    }
    Ok((tokens, reader.finish()?))
}

const COMPLETIONS: &str = concat!(
    ": ping\n\n",
    "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"text\":\"Par\",\"finish_reason\":null}]}\n\n",
    "data: {\"choices\":[{\"text\":\"\",\"finish_reason\":null}]}\r\n\r\n",
    "event: x\ndata:{\"choices\" : [ {\"logprobs\":{\"tokens\":[\"text\",\"choices\"]},\"text\": \"\\\"is\\\\\"}]}\n\n",
    "data: {\"choices\":[{\"text\":\"ö \\u00f6\",\"finish_reason\":\"length\"}]}\n\n",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":4,\"prompt_tokens_details\":{\"cached_tokens\":3}}}\n\n",
    "data: [DONE]\n\n",
);

#[test]
fn tokens_text_and_usage_are_the_same_however_the_stream_is_cut() {
    for size in 1..COMPLETIONS.len() {
        let (tokens, answer) = read(Endpoint::Completions, COMPLETIONS, size).expect("valid");
        assert_eq!(
            (tokens, answer.text.as_str()),
            (4, "Par\"is\\ö ö"),
            "cut every {size} bytes"
        );
        let usage = Usage {
            prompt_tokens: Some(7),
            completion_tokens: Some(4),
            cached_tokens: Some(3),
        };
        assert_eq!(answer.usage, usage);
    }
}

#[test]
fn of_counts_that_grow_with_each_event_the_last_one_is_taken() {
    let event = |count: u32| {
        let usage = json!({"prompt_tokens": 7, "completion_tokens": count});
        let event = json!({"choices": [{"text": "a", "finish_reason": "stop"}], "usage": usage});
        format!("data: {event}\n\n")
    };
    let stream: String = (1..=3).map(event).collect();
    let (tokens, answer) = read(Endpoint::Completions, &stream, 1000).expect("valid");
    assert_eq!((tokens, answer.usage.completion_tokens), (3, Some(3)));
}

#[test]
fn an_event_that_names_only_the_role_holds_no_token() {
    let stream = concat!(
        "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"a\"},\"logprobs\":{\"content\":[]}}]}\n\n",
        "data: {\"choices\":[{\"logprobs\":{\"content\":[]},\"delta\":{\"content\":\"b\"}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"\"}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"reasoning_content\":\"hm\"}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}],\"usage\":{\"completion_tokens\":4}}\n\n",
    );
    let (tokens, answer) = read(Endpoint::Chat, stream, 7).expect("valid, without [DONE]");
    assert_eq!((tokens, answer.text.as_str()), (4, "ab"));
    assert_eq!(answer.usage.completion_tokens, Some(4));
}

#[test]
fn each_way_to_end_badly_has_its_error() {
    let first = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
    let of = |rest: &str| read(Endpoint::Completions, &format!("{first}{rest}"), 1000).expect_err("an error");
    assert_eq!(of(""), AnswerError::Broken);
    assert_eq!(
        of("data: {\"error\":{\"message\":\"decode node lost\"}}\n\n"),
        AnswerError::InStream("decode node lost".to_owned())
    );
    for reason in ["abort", "error"] {
        let last =
            format!("data: {{\"choices\":[{{\"text\":\"\",\"finish_reason\":\"{reason}\"}}]}}\n\ndata: [DONE]\n\n");
        assert_eq!(of(&last), AnswerError::GivenUp(reason.to_owned()));
    }
    assert_eq!(of("data: {oops\n\n"), AnswerError::NotJson("{oops".to_owned()));
    assert_eq!(
        of("data: {\"choices\":[{\"text\":\"\\x\"}]}\n"),
        AnswerError::NotJson("\"\\x\"".to_owned())
    );
    let none = read(Endpoint::Completions, "data: [DONE]\n\n", 1000).expect_err("no token");
    assert_eq!(none, AnswerError::NoToken);
    let mut endless = AnswerReader::new(Endpoint::Chat);
    assert_eq!(
        endless.push(&vec![b'x'; LINE_BYTES_MAX + 1]),
        Err(AnswerError::LineTooLong)
    );
}

proptest! {
    /// The search for keys finds what a JSON parser finds, whatever the text is.
    #[test]
    fn any_text_is_read_as_a_json_parser_reads_it(texts in prop::collection::vec("(\"(text|content|choices)\":|\\PC|[\"\\\\\n:]){0,12}", 1..6), size in 1_usize..64) {
        for endpoint in [Endpoint::Completions, Endpoint::Chat] {
            let mut stream = String::new();
            for text in &texts {
                let choice = match endpoint {
                    Endpoint::Completions => json!({"text": text, "finish_reason": "stop"}),
                    Endpoint::Chat => json!({"delta": {"content": text}, "finish_reason": "stop"}),
                };
                stream.push_str(&format!("data: {}\n\n", json!({"id": text, "choices": [choice]})));
            }
            let (tokens, answer) = read(endpoint, &stream, size).expect("valid");
            prop_assert_eq!(tokens, texts.len());
            prop_assert_eq!(answer.text, texts.concat());
        }
    }

    /// No bytes make it panic.
    #[test]
    fn bytes_from_outside_cannot_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), keys in "(data: |\"choices\":|\"text\":|\\[|\"|\\\\|\n){0,40}") {
        for endpoint in [Endpoint::Completions, Endpoint::Chat] {
            let mut reader = AnswerReader::new(endpoint);
            let _ = reader.push(keys.as_bytes());
            let _ = reader.push(&bytes);
            let _ = reader.finish();
        }
    }
}
