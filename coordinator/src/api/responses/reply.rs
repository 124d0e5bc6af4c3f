//! Turns tokens into the items of a response and, in a stream, into the events that tell of them.

use serde::Serialize;
use serde_json::{Value, json};
use serving_core::request::FinishReason;

use super::object::{ResponseObject, ResponseUsage, Status};
use crate::api::calls::{Calls, SaidPiece, ToolCallBody};
use crate::api::error::ApiError;
use crate::api::event_frame::write_event;
use crate::api::request::CheckedRequest;
use crate::api::run::{OutToken, Run};
use crate::api::shapes::{EdgeTimes, Head, metrics};

/// One answer of `/v1/responses`. It has one choice.
#[derive(Debug)]
pub struct ResponseReply {
    head: Head,
    plan: CheckedRequest,
    calls: Option<Calls>,
    /// The items that have ended.
    output: Vec<Value>,
    open: Option<OpenItem>,
    /// White space that a message may begin with.
    held_space: String,
    /// How the answer ended, once it has.
    status: Status,
    events: Events,
}

/// The item that the tokens go into.
#[derive(Debug)]
enum OpenItem {
    Message {
        id: String,
        text: String,
    },
    Call {
        id: String,
        call_id: String,
        name: String,
        arguments: String,
    },
}

/// Events that wait to be sent, with their numbers.
#[derive(Debug, Default)]
struct Events {
    next_number: u64,
    bytes: Vec<u8>,
}

#[derive(Serialize)]
struct Event<'a, T> {
    r#type: &'a str,
    sequence_number: u64,
    #[serde(flatten)]
    body: T,
}

#[derive(Serialize)]
struct OfResponse<'a> {
    response: ResponseObject<'a>,
}

impl Events {
    fn push(&mut self, kind: &str, body: impl Serialize) {
        let event = Event {
            r#type: kind,
            sequence_number: self.next_number,
            body,
        };
        self.next_number += 1;
        write_event(&mut self.bytes, Some(kind), &event);
    }

    fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }
}

impl ResponseReply {
    pub fn new(head: Head, plan: CheckedRequest, calls: Option<Calls>) -> Self {
        Self {
            head,
            plan,
            calls,
            output: Vec::new(),
            open: None,
            held_space: String::new(),
            status: Status::InProgress,
            events: Events::default(),
        }
    }

    /// The events of a token. Before those of the first one come those of the beginning. A token whose text is held back, because
    /// it may belong to a call, has none.
    pub fn token(&mut self, out: &OutToken) -> Vec<u8> {
        if out.is_first {
            for kind in ["response.created", "response.in_progress"] {
                let response = ResponseObject::new(&self.head, &self.plan, &Status::InProgress, &[]);
                self.events.push(kind, OfResponse { response });
            }
        }
        self.add(&out.text, std::slice::from_ref(out));
        self.events.take()
    }

    pub fn end(&mut self, run: &Run, times: &EdgeTimes) -> Vec<u8> {
        self.last_event(run, Some(times))
    }

    pub fn failed(&mut self, run: &Run, error: &ApiError) -> Vec<u8> {
        self.status = Status::Failed(error.clone());
        self.close();
        let mut bytes = self.events.take();
        bytes.extend(self.last_event(run, None));
        bytes
    }

    fn last_event(&self, run: &Run, times: Option<&EdgeTimes>) -> Vec<u8> {
        let mut events = Events {
            next_number: self.events.next_number,
            bytes: Vec::new(),
        };
        let response = self.object(run, times);
        events.push(self.status.event(), OfResponse { response });
        events.bytes
    }

    pub fn whole(&mut self, run: &Run, steps: &[OutToken], times: &EdgeTimes) -> ResponseObject<'_> {
        let text: String = steps.iter().map(|step| step.text.as_str()).collect();
        self.add(&text, steps);
        self.object(run, Some(times))
    }

    fn object(&self, run: &Run, times: Option<&EdgeTimes>) -> ResponseObject<'_> {
        let shown = times
            .filter(|_| self.plan.fields.include_metrics.0)
            .zip(run.prompts.first());
        let metrics =
            shown.and_then(|(times, prompt)| serde_json::to_value(metrics(prompt, times, self.head.reader)).ok());
        let object = ResponseObject::new(&self.head, &self.plan, &self.status, &self.output);
        object.with_figures(ResponseUsage::of(run), metrics)
    }

    /// Puts text into items. The last of its tokens may be the last one of the answer.
    fn add(&mut self, text: &str, steps: &[OutToken]) {
        let finish = steps.last().and_then(|step| step.finish);
        let Some(calls) = &mut self.calls else {
            // Each token has its event, so that the times between events are those between tokens.
            self.say(text);
            return self.end_at(finish);
        };
        for piece in calls.take(0, text, finish.is_some()).0 {
            match piece {
                SaidPiece::Text(text) => self.say_between_calls(text),
                SaidPiece::Call(call) => self.call(call),
            }
        }
        self.end_at(finish);
    }

    /// White space before a call, or between two, makes no message.
    fn say_between_calls(&mut self, text: String) {
        let is_open = matches!(self.open, Some(OpenItem::Message { .. }));
        let text = match is_open {
            true => text,
            false => std::mem::take(&mut self.held_space) + &text,
        };
        if text.is_empty() {
            return;
        }
        if !is_open && text.trim().is_empty() {
            self.held_space = text;
            return;
        }
        self.say(&text);
    }

    fn end_at(&mut self, finish: Option<FinishReason>) {
        if finish.is_some() {
            self.status = Status::of(finish);
            self.close();
        }
    }

    fn say(&mut self, text: &str) {
        if !matches!(self.open, Some(OpenItem::Message { .. })) {
            self.close();
            let id = item_id("msg");
            let item =
                json!({"id": id, "type": "message", "status": "in_progress", "role": "assistant", "content": []});
            self.open(
                item,
                OpenItem::Message {
                    id,
                    text: String::new(),
                },
            );
            self.tell(
                "response.content_part.added",
                json!({"content_index": 0, "part": text_part("")}),
            );
        }
        if let Some(OpenItem::Message { text: all, .. }) = &mut self.open {
            all.push_str(text);
        }
        let delta = json!({"content_index": 0, "delta": text, "logprobs": []});
        self.tell("response.output_text.delta", delta);
    }

    /// A call, or, where it has no id, more of the arguments of the one before.
    fn call(&mut self, body: ToolCallBody) {
        if let Some(call_id) = body.id {
            self.held_space.clear();
            self.close();
            let (id, name) = (item_id("fc"), body.function.name.unwrap_or_default());
            let arguments = String::new();
            let item = call_item((&id, "in_progress"), (&call_id, &name, &arguments));
            let open = OpenItem::Call {
                id,
                call_id,
                name,
                arguments,
            };
            self.open(item, open);
        }
        if let Some(OpenItem::Call { arguments, .. }) = &mut self.open {
            arguments.push_str(&body.function.arguments);
        }
        let delta = json!({"delta": body.function.arguments});
        self.tell("response.function_call_arguments.delta", delta);
    }

    fn open(&mut self, item: Value, open: OpenItem) {
        let added = json!({"output_index": self.output.len(), "item": item});
        self.events.push("response.output_item.added", added);
        self.open = Some(open);
    }

    /// An event of the open item.
    fn tell(&mut self, kind: &str, mut body: Value) {
        let Some(OpenItem::Message { id, .. } | OpenItem::Call { id, .. }) = &self.open else {
            return;
        };
        body["item_id"] = Value::from(id.as_str());
        body["output_index"] = Value::from(self.output.len());
        self.events.push(kind, body);
    }

    fn close(&mut self) {
        // An item that another one follows is complete.
        let status = match self.status {
            Status::Incomplete | Status::Failed(_) => "incomplete",
            Status::InProgress | Status::Completed => "completed",
        };
        let item = match &self.open {
            None => return,
            Some(OpenItem::Message { id, text }) => {
                let (id, text) = (id.clone(), text.clone());
                let part = text_part(&text);
                self.tell(
                    "response.output_text.done",
                    json!({"content_index": 0, "text": text, "logprobs": []}),
                );
                self.tell("response.content_part.done", json!({"content_index": 0, "part": part}));
                json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": [part]})
            }
            Some(OpenItem::Call {
                id,
                call_id,
                name,
                arguments,
            }) => {
                let item = call_item((id, status), (call_id, name, arguments));
                let done = json!({"name": name, "arguments": arguments});
                self.tell("response.function_call_arguments.done", done);
                item
            }
        };
        let done = json!({"output_index": self.output.len(), "item": item});
        self.events.push("response.output_item.done", done);
        self.output.push(item);
        self.open = None;
    }
}

fn item_id(prefix: &str) -> String {
    format!("{prefix}_{:032x}", rand::random::<u128>())
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn call_item((id, status): (&str, &str), (call_id, name, arguments): (&str, &str, &str)) -> Value {
    json!({
        "id": id, "type": "function_call", "status": status, "call_id": call_id, "name": name, "arguments": arguments,
    })
}
