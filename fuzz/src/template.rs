//! Any chat template with fixed messages: it renders within its bounds, or is refused with a reason.

use std::time::SystemTime;

use model_files::chat_template::{ChatTemplate, Conversation};
use serde_json::{Map, Value, json};

use crate::folder::Folder;

/// More than a rendering may add to the messages: four times their bytes, and 16 KiB for each of them and once more.
const OUTPUT_BYTES_MAX: usize = 128 << 10;

thread_local! {
    static FOLDER: Folder = Folder::new();
    static CHAT: (Vec<Value>, Map<String, Value>) = chat();
}

fn chat() -> (Vec<Value>, Map<String, Value>) {
    let call = json!({"id": "1", "type": "function", "function": {"name": "find", "arguments": {"x": [1, 2.5, null]}}});
    let messages = vec![
        json!({"role": "system", "content": "Be short."}),
        json!({"role": "user", "content": "What is 1 + 1 in \u{65e5}\u{672c}?"}),
        json!({"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"}),
        json!({"role": "tool", "content": "2", "tool_call_id": "1"}),
    ];
    let tools = json!([{"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {"type": "object"}}}]);
    let mut variables = Map::new();
    variables.insert("tools".to_owned(), tools);
    variables.insert("enable_thinking".to_owned(), json!(true));
    (messages, variables)
}

pub(crate) fn check(data: &[u8]) {
    let template = FOLDER.with(|folder| {
        folder.write("chat_template.jinja", data);
        ChatTemplate::from_folder(folder.path())
    });
    let Ok(template) = template else { return };
    CHAT.with(|(messages, variables)| {
        for add_generation_prompt in [false, true] {
            let rendered = template.render_conversation(&Conversation {
                messages,
                variables,
                add_generation_prompt,
                now: SystemTime::UNIX_EPOCH,
            });
            match rendered {
                Ok(text) => assert!(text.len() <= OUTPUT_BYTES_MAX, "{} bytes", text.len()),
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        }
    });
}
