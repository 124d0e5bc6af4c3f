//! Chat templates against the golden prompts, against Python's jinja2, and hostile ones.

use super::*;
use crate::test_kit::{TinyModel, golden_cases, model_path};

fn compile(source: &str) -> Result<ChatTemplate, ChatTemplateError> {
    ChatTemplate::compile(source, "<s>".to_owned(), "</s>".to_owned())
}

fn user(content: &str) -> Vec<ChatMessage> {
    vec![ChatMessage {
        role: "user".to_owned(),
        content: content.to_owned(),
    }]
}

fn messages(value: &serde_json::Value) -> Vec<ChatMessage> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn golden_prompts() {
    let template = ChatTemplate::from_gguf(&GgufFile::open(&model_path()).unwrap()).unwrap();
    let chats: Vec<_> = golden_cases()
        .into_iter()
        .filter(|case| case.get("messages").is_some())
        .collect();
    assert_eq!(chats.len(), 3);
    for case in chats {
        let text = template.render(&messages(&case["messages"]), true).unwrap();
        assert_eq!(text, case["rendered_prompt"].as_str().unwrap(), "{}", case["id"]);
        let closed = template.render(&messages(&case["messages"]), false).unwrap();
        assert_eq!(format!("{closed}<|im_start|>assistant\n"), text);
    }
}

/// What jinja2 made of each case; see `testdata/make_jinja_golden.py`.
#[test]
fn renders_as_jinja2_does() {
    let cases: Vec<serde_json::Value> = serde_json::from_str(include_str!("../../testdata/jinja_golden.json")).unwrap();
    assert!(cases.len() > 60);
    let mut wrong = Vec::new();
    for case in &cases {
        let source = case["template"].as_str().unwrap();
        let template = compile(source).unwrap_or_else(|error| panic!("{source}: {error}"));
        let ours = template.render(&messages(&case["messages"]), case["add_generation_prompt"] == true);
        let same = match (&ours, case.get("text"), case.get("refused")) {
            (Ok(text), Some(expected), _) => text == expected,
            (Err(ChatTemplateError::Refused { message }), _, Some(expected)) => message == expected,
            _ => false,
        };
        if !same {
            wrong.push(format!(
                "{source}\n  ours: {ours:?}\n  jinja2: {:?}",
                case.get("text").or(case.get("refused"))
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_refusal_is_the_clients_fault_and_says_why() {
    let template =
        compile("{% if messages[0].role != 'system' %}{{ raise_exception('start with a system message') }}{% endif %}");
    let error = template.unwrap().render(&user("hi"), true).unwrap_err();
    assert!(matches!(error, ChatTemplateError::Refused { .. }));
    assert!(error.to_string().contains("start with a system message"), "{error}");
    // Also from within a macro and a loop.
    let nested = compile(
        "{% macro f() %}{{ raise_exception('deep') }}{% endmacro %}{% for m in messages %}{{ f() }}{% endfor %}",
    );
    let error = nested.unwrap().render(&user("hi"), true).unwrap_err();
    assert!(
        matches!(&error, ChatTemplateError::Refused { message } if message == "deep"),
        "{error:?}"
    );
    let broken = compile("{{ messages[0].content + 1 }}")
        .unwrap()
        .render(&user("hi"), true)
        .unwrap_err();
    assert!(matches!(&broken, ChatTemplateError::Render { .. }), "{broken:?}");
}

#[test]
fn hostile_templates_end() {
    let endless = "{% for a in range(100000) %}{% for b in range(100000) %}{% set x = a * b %}{% endfor %}{% endfor %}";
    assert!(matches!(
        compile(endless).unwrap().render(&user("hi"), true),
        Err(ChatTemplateError::TooLong)
    ));
    let recursive = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}";
    assert!(compile(recursive).unwrap().render(&user("hi"), true).is_err());
    let wordy = "{% for a in range(100000) %}{{ messages[0].content }}{% endfor %}";
    assert!(matches!(
        compile(wordy).unwrap().render(&user(&"x".repeat(1000)), true),
        Err(ChatTemplateError::TooLong)
    ));
    assert!(
        compile("{{ 'x' * 100000000000 }}")
            .unwrap()
            .render(&user("hi"), true)
            .is_err()
    );
    assert!(
        compile("{{ '1'.zfill(100000000000) }}")
            .unwrap()
            .render(&user("hi"), true)
            .is_err()
    );
    assert!(matches!(compile("{% for %}"), Err(ChatTemplateError::Compile { .. })));
    assert!(matches!(
        compile("{% include 'x' %}").unwrap().render(&[], true),
        Err(ChatTemplateError::Render { .. })
    ));
}

#[test]
fn many_and_long_messages_render() {
    let template = compile("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}").unwrap();
    let many: Vec<_> = (0..20_000).flat_map(|_| user("hi")).collect();
    assert_eq!(template.render(&many, true).unwrap().len(), 20_000 * "<user>hi".len());
    assert_eq!(
        template.render(&user(&"x".repeat(1 << 20)), true).unwrap().len(),
        (1 << 20) + "<user>".len()
    );
    assert_eq!(template.render(&[], true).unwrap(), "");
}

#[test]
fn special_token_texts_and_the_clock_reach_the_template() {
    assert_eq!(
        compile("{{ bos_token }}x{{ eos_token }}")
            .unwrap()
            .render(&[], true)
            .unwrap(),
        "<s>x</s>"
    );
    let year = compile("{{ strftime_now('%Y') }}").unwrap().render(&[], true).unwrap();
    assert_eq!(year.len(), 4);
    let missing = TinyModel::default().build().without_metadata(TEMPLATE_KEY);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    missing.write(&path).unwrap();
    let template = ChatTemplate::from_gguf(&GgufFile::open(&path).unwrap());
    assert!(matches!(template, Err(ChatTemplateError::Missing)));
    TinyModel::default().build().write(&path).unwrap();
    let template = ChatTemplate::from_gguf(&GgufFile::open(&path).unwrap()).unwrap();
    assert_eq!(
        template.render(&user("hi"), true).unwrap(),
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    );
}
