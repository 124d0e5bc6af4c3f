//! Chat templates against the golden prompts, the files that they come from, and hostile ones.

use super::*;
use crate::test_kit::{TinyModel, golden_cases, model_path};

fn compile(source: &str) -> Result<ChatTemplate, ChatTemplateError> {
    let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let tokens = tokens.map(|(name, text)| (name.to_owned(), Value::from(text)));
    ChatTemplate::parse(source, None, tokens.into_iter().collect())
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
fn long_texts_are_split_and_mapped() {
    let source = "{{ ('word ' * 200000).splitlines() | length }} {{ ['x' * 600000] | map('trim') | list | length }} \
                  {{ (' ' * 200000 ~ 'x').split() | length }}";
    assert_eq!(compile(source).unwrap().render(&[], true).unwrap(), "1 1 1");
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

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
    folder
}

fn rendered_with(template: &ChatTemplate, variables: &Value) -> Result<String, ChatTemplateError> {
    template.render_conversation(&Conversation {
        messages: &[json!({"role": "user", "content": "hi"})],
        variables: variables.as_object().unwrap(),
        add_generation_prompt: true,
        now: SystemTime::UNIX_EPOCH,
    })
}

#[test]
fn a_folder_names_its_template_in_one_of_three_files() {
    let config =
        r#"{"chat_template": "config", "bos_token": {"content": "<s>", "lstrip": false}, "added_tokens_decoder": {}}"#;
    let of = |files: &[(&str, &str)]| {
        let folder = folder(files);
        let text = ChatTemplate::from_folder(folder.path()).and_then(|template| rendered_with(&template, &json!({})));
        text.unwrap_or_else(|error| format!("{error:?}"))
    };
    let all = [
        ("chat_template.jinja", "file {{ bos_token }}"),
        ("chat_template.json", r#"{"chat_template": "json {{ bos_token }}"}"#),
        ("tokenizer_config.json", config),
    ];
    assert_eq!(of(&all), "file <s>");
    assert_eq!(of(&all[1..]), "json <s>");
    assert_eq!(of(&all[2..]), "config");
    assert_eq!(of(&[]), "Missing");
    assert_eq!(of(&[("tokenizer_config.json", r#"{"bos_token": null}"#)]), "Missing");
    // Tokens that the configuration lacks are in an older file.
    let tokens = [
        (
            "chat_template.jinja",
            "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token is defined }}",
        ),
        ("tokenizer_config.json", r#"{"bos_token": "a", "eos_token": null}"#),
        (
            "special_tokens_map.json",
            r#"{"bos_token": "x", "eos_token": {"content": "b"}, "unk_token": "c"}"#,
        ),
    ];
    assert_eq!(of(&tokens), "abcFalse");
}

#[test]
fn a_template_for_tools_is_used_with_tools_only() {
    let named = |with_tools: &str| {
        let templates = json!([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": with_tools}, {"name": "rag", "template": "{% x"}]);
        json!({"chat_template": templates}).to_string()
    };
    let tools = json!({"tools": [{"name": "f"}]});
    let folders = [
        folder(&[("tokenizer_config.json", &named("{{ tools | tojson }}"))]),
        folder(&[
            ("chat_template.jinja", "plain"),
            ("additional_chat_templates/tool_use.jinja", "{{ tools | tojson }}"),
        ]),
    ];
    for folder in &folders {
        let template = ChatTemplate::from_folder(folder.path()).unwrap();
        assert_eq!(rendered_with(&template, &json!({})).unwrap(), "plain");
        assert_eq!(rendered_with(&template, &json!({"tools": null})).unwrap(), "plain");
        assert_eq!(rendered_with(&template, &tools).unwrap(), r#"[{"name": "f"}]"#);
    }
    // A broken one does not keep the model from chatting without tools.
    let broken = folder(&[("tokenizer_config.json", &named("{% if"))]);
    let template = ChatTemplate::from_folder(broken.path()).unwrap();
    assert_eq!(rendered_with(&template, &json!({})).unwrap(), "plain");
    assert!(matches!(
        rendered_with(&template, &tools),
        Err(ChatTemplateError::Compile { line: 1, .. })
    ));
    // GGUF files name their further templates in keys of their own.
    let text = |text: &str| crate::gguf::MetadataValue::String(text.to_owned());
    let file = TinyModel::default().build().without_metadata(TEMPLATE_KEY);
    let file = file.metadata("tokenizer.chat_template.default", text("plain"));
    let file = file.metadata("tokenizer.chat_template.tool_use", text("{{ tools | length }}"));
    let path = broken.path().join("named.gguf");
    file.write(&path).unwrap();
    let template = ChatTemplate::from_gguf(&GgufFile::open(&path).unwrap()).unwrap();
    assert_eq!(rendered_with(&template, &json!({})).unwrap(), "plain");
    assert_eq!(rendered_with(&template, &tools).unwrap(), "1");
}

#[test]
fn damaged_folders_are_refused_by_name() {
    let of = |name: &str, content: &str| ChatTemplate::from_folder(folder(&[(name, content)]).path()).unwrap_err();
    let config = "tokenizer_config.json";
    for damaged in [
        "",
        "{",
        r#"{"chat_template": 5}"#,
        r#"{"chat_template": "x", "bos_token": 5}"#,
    ] {
        assert!(
            matches!(of(config, damaged), ChatTemplateError::Json { .. }),
            "{damaged}"
        );
    }
    let deep = |name: &str| format!(r#"{{"{name}": {}{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
    assert!(matches!(
        of(config, &deep("chat_template")),
        ChatTemplateError::Json { .. }
    ));
    // What nobody reads is passed over, however deep it is.
    assert!(matches!(of(config, &deep("x")), ChatTemplateError::Missing));
    let large = "x".repeat(SOURCE_BYTES_MAX + 1);
    assert!(matches!(
        of("chat_template.jinja", &large),
        ChatTemplateError::TooLarge { .. }
    ));
    let in_config = json!({"chat_template": large}).to_string();
    assert!(matches!(of(config, &in_config), ChatTemplateError::Compile { .. }));
    let is_folder = folder(&[("chat_template.jinja/x", "")]);
    let error = ChatTemplate::from_folder(is_folder.path()).unwrap_err();
    assert!(matches!(error, ChatTemplateError::Io { .. }));
    assert!(error.to_string().contains("chat_template.jinja"), "{error}");
    let not_text = folder(&[]);
    std::fs::write(not_text.path().join("chat_template.jinja"), [0xff, 0xfe]).unwrap();
    assert!(matches!(
        ChatTemplate::from_folder(not_text.path()),
        Err(ChatTemplateError::Io { .. })
    ));
    let broken = of("chat_template.jinja", "a\nb\n{% for x in %}");
    assert!(
        matches!(broken, ChatTemplateError::Compile { line: 3, .. }),
        "{broken:?}"
    );
    let failing = compile("a\n{{ messages[0].content + 1 }}")
        .unwrap()
        .render(&user("hi"), true)
        .unwrap_err();
    assert!(
        matches!(failing, ChatTemplateError::Render { line: 2, .. }),
        "{failing:?}"
    );
}

#[test]
fn messages_reach_the_template_as_transformers_gives_them() {
    let template = compile("{{ messages }}").unwrap();
    let message = json!({"role": "assistant", "content": null, "reasoning": "r", "tool_calls": null});
    let text = template.render_conversation(&Conversation {
        messages: &[message],
        variables: &Map::new(),
        add_generation_prompt: false,
        now: SystemTime::UNIX_EPOCH,
    });
    // From transformers: `_alias_reasoning_fields(_normalize_chat_messages([message]))`.
    let expected = "[{'thinking': 'r', 'role': 'assistant', 'reasoning': 'r', 'reasoning_content': 'r'}]";
    assert_eq!(text.unwrap(), expected);
    // Variables of the request stand above the model's own tokens.
    assert_eq!(
        rendered_with(
            &compile("{{ bos_token }}{{ x }}").unwrap(),
            &json!({"bos_token": "b", "x": 1})
        )
        .unwrap(),
        "b1"
    );
}
