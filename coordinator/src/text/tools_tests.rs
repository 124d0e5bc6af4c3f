//! Recorded outputs of the families, whole and in parts, and what is no call.

use super::*;
use crate::text::TextModel;

fn call(name: &str, arguments: &str) -> Piece {
    Piece::Call(ToolCall {
        name: name.to_owned(),
        arguments: arguments.to_owned(),
    })
}

fn text(text: &str) -> Piece {
    Piece::Text(text.to_owned())
}

/// What comes out when the answer arrives in parts of so many characters; neighbouring texts are joined.
fn read(format: ToolFormat, answer: &str, part: usize) -> Vec<Piece> {
    let mut reader = ToolCallReader::new(format, ["weather", "clock", "a", "b"].map(str::to_owned).into());
    let characters: Vec<char> = answer.chars().collect();
    let mut pieces: Vec<Piece> = Vec::new();
    for part in characters.chunks(part) {
        pieces.extend(reader.push(&part.iter().collect::<String>()));
    }
    pieces.extend(reader.end());
    pieces.into_iter().fold(Vec::new(), |mut joined, piece| {
        match (joined.last_mut(), piece) {
            (Some(Piece::Text(before)), Piece::Text(more)) => before.push_str(&more),
            (_, piece) => joined.push(piece),
        }
        joined
    })
}

/// Whole, and in parts of every small length.
fn assert_reads(format: ToolFormat, answer: &str, expected: &[Piece]) {
    for part in [1, 2, 3, 5, 7, 11, 1000] {
        assert_eq!(read(format, answer, part), expected, "in parts of {part}: {answer}");
    }
}

#[test]
fn outputs_of_qwen_and_hermes_are_read() {
    let one = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\": \"Köln\", \"days\": 2}}\n</tool_call>";
    let expected = call("weather", r#"{"place":"Köln","days":2}"#);
    assert_reads(ToolFormat::Tagged, one, std::slice::from_ref(&expected));
    let two = format!("I look. {one}\n<tool_call>\n{{\"name\": \"clock\", \"arguments\": {{}}}}\n</tool_call>");
    assert_reads(
        ToolFormat::Tagged,
        &two,
        &[text("I look. "), expected, call("clock", "{}")],
    );
    // Text after a call keeps its white space, however it is cut.
    let after = "<tool_call>{\"name\": \"clock\", \"arguments\": {}}</tool_call> It  is late. \n";
    assert_reads(
        ToolFormat::Tagged,
        after,
        &[call("clock", "{}"), text(" It  is late. \n")],
    );
    // SmolLM2 writes a list between the tags.
    let list =
        "<tool_call>[{\"name\": \"a\", \"arguments\": {\"x\": 1}}, {\"name\": \"b\", \"arguments\": {}}]</tool_call>";
    assert_reads(ToolFormat::Tagged, list, &[call("a", r#"{"x":1}"#), call("b", "{}")]);
    // No arguments are an object without fields.
    for none in ["null", "\"\"", "\" null\"", "{}"] {
        let bare = format!("<tool_call>{{\"name\": \"clock\", \"arguments\": {none}}}</tool_call>");
        assert_reads(ToolFormat::Tagged, &bare, &[call("clock", "{}")]);
    }
    // The end of the answer ends a call, too.
    let cut = "<tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n";
    assert_reads(ToolFormat::Tagged, cut, &[call("clock", "{}")]);
}

#[test]
fn outputs_of_llama_are_read() {
    let one = r#"{"name": "weather", "parameters": {"place": "Rome"}}"#;
    let expected = call("weather", r#"{"place":"Rome"}"#);
    assert_reads(ToolFormat::Object, one, std::slice::from_ref(&expected));
    let two = format!("{one}; {}", r#"{"name": "clock", "parameters": {}}"#);
    assert_reads(ToolFormat::Object, &two, &[expected, call("clock", "{}")]);
}

#[test]
fn outputs_of_mistral_are_read() {
    let calls = r#"[{"name": "weather", "arguments": {"place": "Rome"}}, {"name": "clock", "arguments": {}}]"#;
    let expected = [call("weather", r#"{"place":"Rome"}"#), call("clock", "{}")];
    // The mark is a control token, which a text may lack.
    assert_reads(ToolFormat::List, calls, &expected);
    assert_reads(ToolFormat::List, &format!("[TOOL_CALLS] {calls}"), &expected);
}

#[test]
fn what_is_no_call_stays_text() {
    for (format, answer) in [
        (ToolFormat::Tagged, "1 < 2 and <tool> and <tool_cal"),
        (ToolFormat::Tagged, "<tool_call>no JSON</tool_call> then"),
        (ToolFormat::Tagged, "<tool_call>{\"name\": 5}"),
        (ToolFormat::Object, "A set is written {1, 2}."),
        (ToolFormat::Object, "{\"answer\": 42}"),
        (ToolFormat::Object, "{\"name\": \"clock\", \"age\": 3}"),
        (
            ToolFormat::Tagged,
            "<tool_call>{\"name\": \"other\", \"arguments\": {}}</tool_call>",
        ),
        (ToolFormat::List, "[1, 2, 3]"),
        (ToolFormat::List, "[]"),
        (ToolFormat::List, "See [1]."),
        (ToolFormat::Object, ""),
    ] {
        let expected: Vec<Piece> = [text(answer)].into_iter().filter(|piece| *piece != text("")).collect();
        assert_reads(format, answer, &expected);
    }
}

#[test]
fn a_format_is_known_by_its_template() {
    for (source, format) in [
        ("{% if tools %}<tool_call>{% endif %}", Some(ToolFormat::Tagged)),
        // Hermes' own template describes functions in the words of Llama's.
        (
            "{% if tools %}, \"parameters\": {} <tool_call>{% endif %}",
            Some(ToolFormat::Tagged),
        ),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", Some(ToolFormat::List)),
        (
            "{% if tools %}{{ '{\"parameters\": ' }}{% endif %}",
            Some(ToolFormat::Object),
        ),
        ("{{ messages }}", None),
    ] {
        assert_eq!(ToolFormat::of_template(source), format, "{source}");
    }
}

#[test]
fn without_a_place_in_the_template_tools_become_text() {
    let chat = Chat {
        messages: vec![
            json!({"role": "system", "content": "Be brief."}),
            json!({"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function",
                "function": {"name": "clock", "arguments": {"zone": "CET"}}}]}),
            json!({"role": "tool", "content": "noon", "tool_call_id": "1"}),
        ],
        tools: vec![json!({"type": "function", "function": {"name": "clock"}})],
    };
    let plain = chat.with_tools_as_text();
    assert!(plain.tools.is_empty());
    let content = |at: usize| plain.messages[at]["content"].as_str().unwrap_or_default();
    assert!(content(0).starts_with("Be brief.\n\nYou can call") && content(0).contains("\"clock\""));
    assert_eq!(
        content(1),
        "<tool_call>{\"name\":\"clock\",\"arguments\":{\"zone\":\"CET\"}}</tool_call>"
    );
    assert_eq!(
        (plain.messages[2]["role"].as_str(), content(2)),
        (Some("user"), "<tool_response>noon</tool_response>")
    );
    let alone = Chat {
        messages: vec![json!({"role": "user", "content": "hi"})],
        ..chat
    };
    assert!(alone.has_tools());
    assert_eq!(alone.with_tools_as_text().messages[0]["role"], "system");
}

#[test]
fn results_that_follow_one_another_are_one_message_of_the_user() {
    let result = |content: &str| json!({"role": "tool", "content": content, "tool_call_id": "1"});
    let said = |role: &str| json!({"role": role, "content": role});
    let chat = Chat {
        messages: vec![
            said("user"),
            said("assistant"),
            result("a"),
            result("b"),
            result("c"),
            said("assistant"),
            result("d"),
        ],
        tools: Vec::new(),
    };
    let messages = chat.with_tools_as_text().messages;
    let roles: Vec<_> = messages.iter().map(|message| message["role"].as_str()).collect();
    let (user, assistant) = (Some("user"), Some("assistant"));
    assert_eq!(roles, [user, assistant, user, assistant, user]);
    let all = "<tool_response>a</tool_response>\n<tool_response>b</tool_response>\n<tool_response>c</tool_response>";
    assert_eq!(messages[2]["content"], all);
    assert_eq!(messages[4]["content"], "<tool_response>d</tool_response>");
}

#[test]
fn calls_and_results_become_text_also_where_the_tools_were_left_out() {
    let call = json!({"id": "1", "type": "function", "function": {"name": "clock", "arguments": {"zone": "CET"}}});
    let chat = Chat {
        messages: vec![
            json!({"role": "user", "content": "time?"}),
            json!({"role": "assistant", "content": "", "tool_calls": [call]}),
            json!({"role": "tool", "content": "noon", "tool_call_id": "1"}),
        ],
        tools: Vec::new(),
    };
    assert!(chat.has_tools());
    let prompt = TextModel::open(&model_files::test_kit::model_path(), None)
        .expect("the real model, whose template knows no tools")
        .render_chat(&chat, true)
        .expect("is rendered");
    assert!(
        prompt.contains(r#"<tool_call>{"name":"clock","arguments":{"zone":"CET"}}</tool_call>"#)
            && prompt.contains("<|im_start|>user\n<tool_response>noon</tool_response>"),
        "{prompt}"
    );
    assert!(
        !prompt.contains("You can call functions"),
        "no tool may be called: {prompt}"
    );
    let plain = Chat {
        messages: vec![json!({"role": "user", "content": "hi"})],
        tools: Vec::new(),
    };
    assert!(!plain.has_tools());
}
