//! A conversation as its client sent it. A template reads it as trees of JSON, which take many times the memory of their text: they
//! are made by the thread that runs the template, and live no longer than it runs.

use std::sync::Arc;

use serde_json::{Value, json};

use super::error::ApiError;
use super::json_tree::{TooManyValues, Trees};
use super::limits::{FRAME_BYTES, TOOL_VALUES_MAX};
use super::tools::{EarlierCall, GivenFunction, GivenTools, too_many_values};
use crate::text::Chat;

#[derive(Debug)]
pub struct GivenChat {
    /// The field of the request that the turns came from.
    field: &'static str,
    pub turns: Vec<Turn>,
    tools: Arc<[GivenFunction]>,
}

/// A message.
#[derive(Debug, Default)]
pub struct Turn {
    pub role: &'static str,
    pub content: String,
    pub calls: Vec<EarlierCall>,
    pub tool_call_id: Option<String>,
    pub name: Option<String>,
}

impl GivenChat {
    pub fn new(field: &'static str, turns: Vec<Turn>, tools: Option<&GivenTools>) -> Self {
        Self {
            field,
            turns,
            tools: tools.map(GivenTools::functions).unwrap_or_default(),
        }
    }

    /// The fewest bytes that a template makes of what is said, called and can be called.
    pub fn text_bytes(&self) -> usize {
        let turns: usize = self.turns.iter().map(Turn::text_bytes).sum();
        turns + self.tools.iter().map(GivenFunction::text_bytes).sum::<usize>()
    }

    /// What tells a small chat from a large one: every text, also one that only some templates print, and what a template writes around
    /// them.
    pub fn work_bytes(&self) -> usize {
        let turns: usize = self.turns.iter().map(Turn::work_bytes).sum();
        let tools = self.tools.iter().map(|tool| FRAME_BYTES + tool.work_bytes());
        turns + tools.sum::<usize>()
    }

    pub fn for_template(self) -> Result<Chat, ApiError> {
        let mut trees = Trees::new(TOOL_VALUES_MAX);
        let tools = self.tools.iter().enumerate();
        let tools = tools.map(|(at, tool)| tool.for_template(at, &mut trees));
        let tools: Vec<Value> = tools.collect::<Result<_, _>>()?;
        let messages = self.turns.into_iter().map(|turn| turn.for_template(&mut trees));
        let messages: Result<Vec<Value>, TooManyValues> = messages.collect();
        Ok(Chat {
            messages: messages.map_err(|TooManyValues| too_many_values(self.field))?,
            tools,
        })
    }
}

impl Turn {
    pub fn new(role: &'static str, content: String) -> Self {
        Self {
            role,
            content,
            ..Self::default()
        }
    }

    fn text_bytes(&self) -> usize {
        self.content.len() + self.calls.iter().map(EarlierCall::text_bytes).sum::<usize>()
    }

    fn work_bytes(&self) -> usize {
        let ids = self.calls.iter().map(|call| call.id.as_ref());
        let others = ids.chain([self.tool_call_id.as_ref(), self.name.as_ref()]);
        let others: usize = others.flatten().map(String::len).sum();
        let calls: usize = self.calls.iter().map(EarlierCall::work_bytes).sum();
        FRAME_BYTES * (1 + self.calls.len()) + self.content.len() + calls + others
    }

    fn for_template(self, trees: &mut Trees) -> Result<Value, TooManyValues> {
        let mut turn = json!({"role": self.role});
        turn["content"] = Value::from(self.content);
        if !self.calls.is_empty() {
            let calls = self.calls.into_iter().map(|call| call.for_template(trees));
            turn["tool_calls"] = Value::from(calls.collect::<Result<Vec<Value>, _>>()?);
        }
        for (field, value) in [("tool_call_id", self.tool_call_id), ("name", self.name)] {
            if let Some(value) = value {
                turn[field] = Value::from(value);
            }
        }
        Ok(turn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::limits::TOKENIZE_INLINE_BYTES_MAX;

    fn call(arguments: &str) -> EarlierCall {
        EarlierCall {
            id: None,
            name: "f".to_owned(),
            arguments: arguments.to_owned(),
        }
    }

    #[test]
    fn arguments_become_an_object_where_they_are_one() {
        let said = Turn {
            calls: vec![call(r#"{"a": [1]}"#), call("[1]"), call("{")],
            ..Turn::new("assistant", "so".to_owned())
        };
        let result = Turn {
            tool_call_id: Some("c".to_owned()),
            name: Some("f".to_owned()),
            ..Turn::new("tool", "1".to_owned())
        };
        let chat = GivenChat::new("messages", vec![said, result], None);
        assert_eq!(chat.text_bytes(), "so".len() + "fff".len() + "1".len());
        let function = |arguments: Value| json!({"id": null, "type": "function", "function": {"name": "f", "arguments": arguments}});
        let calls = [
            function(json!({"a": [1]})),
            function(json!("[1]")),
            function(json!("{")),
        ];
        let wanted = [
            json!({"role": "assistant", "content": "so", "tool_calls": calls}),
            json!({"role": "tool", "content": "1", "tool_call_id": "c", "name": "f"}),
        ];
        assert_eq!(chat.for_template().expect("few values").messages, wanted);
    }

    #[test]
    fn the_values_of_all_calls_count_together() {
        let half = format!("{{\"a\": [{}0]}}", "0,".repeat(TOOL_VALUES_MAX / 2));
        let turn = || Turn {
            calls: vec![call(&half)],
            ..Turn::new("assistant", String::new())
        };
        assert!(GivenChat::new("input", vec![turn()], None).for_template().is_ok());
        let both = GivenChat::new("input", vec![turn(), turn()], None).for_template();
        assert_eq!(both.expect_err("too many").param.as_deref(), Some("input"));
    }

    #[test]
    fn many_messages_and_long_names_are_no_small_work_though_they_say_nothing() {
        let is_small = |turns: Vec<Turn>| {
            let chat = GivenChat::new("messages", turns, None);
            assert!(chat.text_bytes() <= TOKENIZE_INLINE_BYTES_MAX);
            chat.work_bytes() <= TOKENIZE_INLINE_BYTES_MAX
        };
        let empty = || Turn::new("tool", String::new());
        let many: Vec<Turn> = (0..1000).map(|_| empty()).collect();
        let calling = || Turn {
            calls: (0..1000).map(|_| call("{}")).collect(),
            ..empty()
        };
        let long = || Some("x".repeat(TOKENIZE_INLINE_BYTES_MAX));
        let named = Turn {
            name: long(),
            ..empty()
        };
        let answering = Turn {
            tool_call_id: long(),
            ..empty()
        };
        let called = Turn {
            calls: vec![EarlierCall {
                id: long(),
                ..call("{}")
            }],
            ..empty()
        };
        assert!(is_small(vec![empty()]));
        for turns in [many, vec![calling()], vec![named], vec![answering], vec![called]] {
            assert!(!is_small(turns));
        }
    }
}
