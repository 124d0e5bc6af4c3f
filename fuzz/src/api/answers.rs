//! Any bytes as the answer of a model: a stream and a whole answer say the same, and a plain text comes through unchanged.

use serde_json::{Map, Value, json};

use super::bodies::{events, json as parsed};
use super::{Edge, MODEL, with_edge};
use crate::choices::Choices;

/// An event of `/v1/responses` may show all that was said before it.
const SAID_BYTES_MAX: usize = 300;

/// What a client gathers of an answer: the text and the calls of each choice.
type Said = Vec<(String, Vec<(String, String)>)>;

pub(crate) fn check(data: &[u8]) {
    let mut choices = Choices::of(data);
    let path = ["/v1/completions", "/v1/chat/completions", "/v1/responses"][choices.below(3)];
    let (has_tools, has_stop, has_two) = (choices.flag(), choices.flag(), choices.flag());
    let mut body = match path {
        "/v1/completions" => json!({"model": MODEL, "prompt": "hi", "max_tokens": 500}),
        "/v1/chat/completions" => json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}),
        _ => json!({"model": MODEL, "input": "hi"}),
    };
    let function = json!({"name": "find", "parameters": {"type": "object"}});
    match path {
        "/v1/chat/completions" if has_tools => body["tools"] = json!([{"type": "function", "function": function}]),
        "/v1/responses" if has_tools => {
            body["tools"] = json!([{"type": "function", "name": "find", "parameters": {"type": "object"}}]);
        }
        _ => {}
    }
    let may_differ = path == "/v1/responses";
    if has_stop && !may_differ {
        body["stop"] = json!(["ab", "\n\n"]);
    }
    if has_two && !may_differ {
        body["n"] = json!(2);
    }
    let says = choices.rest();
    let says = &says[..says.len().min(SAID_BYTES_MAX)];
    with_edge(|edge| {
        edge.says(says);
        let whole = ask(edge, path, &body, false);
        let stream = ask(edge, path, &body, true);
        assert_eq!(whole, stream, "whole and stream differ");
        let has_calls = has_tools && path != "/v1/completions";
        if !has_calls && body.get("stop").is_none() {
            let text = String::from_utf8_lossy(says);
            assert!(whole.iter().all(|(said, _)| *said == text), "{whole:?} is not {text:?}");
        }
    });
}

fn ask(edge: &Edge, path: &str, body: &Value, is_stream: bool) -> Said {
    let mut body = body.clone();
    body["stream"] = json!(is_stream);
    let answer = edge.post(path, body.to_string().as_bytes());
    assert_eq!(answer.status.as_u16(), 200, "{:?}", answer.body);
    match (path, is_stream) {
        ("/v1/responses", false) => of_response(&parsed(&answer.body)),
        ("/v1/responses", true) => of_response_events(&events(&answer.body)),
        (_, false) => of_choices(std::slice::from_ref(&parsed(&answer.body)), "message"),
        (_, true) => {
            let chunks = events(&answer.body);
            let chunks = chunks.iter().filter(|(_, data)| data != "[DONE]");
            let chunks: Vec<Value> = chunks.map(|(_, data)| parsed(data.as_bytes())).collect();
            of_choices(&chunks, "delta")
        }
    }
}

fn of_choices(bodies: &[Value], part: &str) -> Said {
    let mut said = Said::new();
    let choices = bodies
        .iter()
        .flat_map(|body| body["choices"].as_array().into_iter().flatten());
    for choice in choices {
        let index = choice["index"].as_u64().expect("a choice has an index") as usize;
        said.resize(said.len().max(index + 1), Default::default());
        let (text, calls) = &mut said[index];
        let texts = [&choice["text"], &choice[part]["content"]];
        texts
            .iter()
            .filter_map(|part| part.as_str())
            .for_each(|part| text.push_str(part));
        for (place, call) in choice[part]["tool_calls"].as_array().into_iter().flatten().enumerate() {
            let place = call["index"].as_u64().map_or(place, |index| index as usize);
            calls.resize(calls.len().max(place + 1), Default::default());
            add(&mut calls[place].0, &call["function"]["name"]);
            add(&mut calls[place].1, &call["function"]["arguments"]);
        }
    }
    said
}

fn add(text: &mut String, part: &Value) {
    text.push_str(part.as_str().unwrap_or_default());
}

fn of_response(response: &Value) -> Said {
    let (mut text, mut calls) = (String::new(), Vec::new());
    for item in response["output"].as_array().into_iter().flatten() {
        for part in item["content"].as_array().into_iter().flatten() {
            add(&mut text, &part["text"]);
        }
        if item["type"] == "function_call" {
            let field = |name: &str| item[name].as_str().unwrap_or_default().to_owned();
            calls.push((field("name"), field("arguments")));
        }
    }
    vec![(text, calls)]
}

/// The deltas must add up to what the last event shows whole.
fn of_response_events(events: &[(String, String)]) -> Said {
    let (mut text, mut arguments) = (String::new(), Map::new());
    let mut last = Value::Null;
    for (kind, data) in events {
        let event = parsed(data.as_bytes());
        assert_eq!(event["type"], kind.as_str());
        match kind.as_str() {
            "response.output_text.delta" => add(&mut text, &event["delta"]),
            "response.function_call_arguments.delta" => {
                let id = event["item_id"].as_str().expect("a delta has an item").to_owned();
                let before = arguments.entry(id).or_insert_with(|| json!(""));
                let so_far = before.as_str().unwrap_or_default().to_owned();
                *before = json!(so_far + event["delta"].as_str().unwrap_or_default());
            }
            _ => {}
        }
        last = event;
    }
    let said = of_response(&last["response"]);
    assert_eq!(said[0].0, text, "the deltas are another text");
    let of_calls: Vec<&str> = said[0].1.iter().map(|(_, arguments)| arguments.as_str()).collect();
    let of_deltas: Vec<&str> = arguments.values().filter_map(Value::as_str).collect();
    assert_eq!(of_calls, of_deltas, "the deltas are other arguments");
    said
}
